"""What a kernel's module says about its launches, and what was found when they were compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Case", "Found", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one kernel must hold to, for every architecture.

    Attributes
    ----------
    width
        Bits of each bulk access to global memory; None for a kernel that memory does not bound.
    registers
        Most registers per thread.
    loads, stores
        Accesses that are not bulk, by width in bits: addresses, page ids. They are not held to `width`.
    """

    width: int | None = 128
    registers: int = 64
    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One call that launches kernels.

    Attributes
    ----------
    name
        Unique; starts with the name of the public function.
    launch
        Calls the launcher with tensors on the CPU. Kernels do not run: their launches are recorded, with the
        specialisation that the arguments would get on a GPU. So make tensors with `torch.empty`, of real sizes.
    moved
        Bytes that one call reads and writes in global memory.
    limits
        By the name of each kernel that is launched.
    """

    name: str
    launch: Callable[[], None]
    moved: int
    limits: Mapping[str, Limits]


@dataclass(frozen=True, slots=True)
class Found:
    """One kernel of one case, compiled for one architecture.

    Attributes
    ----------
    case, moved, kernel, sm
        Which one.
    programs
        Programs in the grid.
    loads, stores
        Bulk accesses to global memory in the PTX: how many of each width in bits.
    width, most_registers
        The kernel's `Limits`.
    registers, stack, shared
        Registers per thread, bytes of stack per thread (where spills go), bytes of shared memory per program.
    """

    case: str
    moved: int
    kernel: str
    sm: int
    programs: int
    loads: dict[int, int]
    stores: dict[int, int]
    width: int | None
    most_registers: int
    registers: int
    stack: int
    shared: int
