"""Record kernel launches instead of running them, and compile what was launched for given architectures."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels.aot.case import Case, Found

__all__ = ["compile_case"]

_ACCESS = re.compile(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


@contextmanager
def _recorded() -> Iterator[list[_Launch]]:
    """Catch every launch of a kernel."""
    launches: list[_Launch] = []

    def record(kernel: JITFunction, *args: object, grid: Any, warmup: bool, **kwargs: object) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        arguments = {**defaults, **dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        grid = grid(arguments) if callable(grid) else grid
        launches.append(_Launch(kernel, tuple(grid), arguments, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def _source(launch: _Launch) -> ASTSource:
    """Specialise as Triton's launcher would: integers of 1 are constants, multiples of 16 are known as such."""
    signature, constants, attributes = {}, {}, {}
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name], number = _POINTERS[value.dtype], value.data_ptr()
        elif isinstance(value, bool):
            signature[name], number = "u1", 1
        elif isinstance(value, int):
            signature[name], number = ("i32" if -(2**31) <= value < 2**31 else "i64"), value
        else:
            signature[name], number = "fp32", 1
        if number % 16 == 0 and not parameter.do_not_specialize:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _widths(ptx: str) -> dict[str, Counter[int]]:
    found = {"ld": Counter[int](), "st": Counter[int]()}
    for instruction, vector, bits in _ACCESS.findall(ptx):
        found[instruction][int(vector or 1) * int(bits)] += 1
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [str(_CUOBJDUMP), "-res-usage", file.name]
        usage = _USAGE.search(subprocess.run(dump, capture_output=True, text=True, check=True).stdout)
    if usage is None:
        raise ValueError("cuobjdump tells no resource usage")
    return int(usage[1]), int(usage[2])


def compile_case(case: Case, architectures: tuple[int, ...]) -> Iterator[Found]:
    """Compile every kernel that a case launches, once per architecture."""
    with _recorded() as launches:
        case.launch()
    names = {launch.kernel.__name__ for launch in launches}
    if names != set(case.limits):
        raise ValueError(f"{case.name!r} has limits for {sorted(case.limits)}, and launches {sorted(names)}")
    for launch in launches:
        name = launch.kernel.__name__
        limits = case.limits[name]
        for sm in architectures:
            compiled = triton.compile(_source(launch), target=GPUTarget("cuda", sm, 32), options=dict(launch.options))
            found = _widths(compiled.asm["ptx"])
            found["ld"].subtract(limits.loads)
            found["st"].subtract(limits.stores)
            registers, stack = _usage(compiled.asm["cubin"])
            yield Found(
                case=case.name,
                moved=case.moved,
                kernel=name,
                sm=sm,
                programs=prod(launch.grid),
                loads={bits: count for bits, count in found["ld"].items() if count},
                stores={bits: count for bits, count in found["st"].items() if count},
                width=limits.width,
                most_registers=limits.registers,
                registers=registers,
                stack=stack,
                shared=compiled.metadata.shared,
            )
