"""Launches of the checksum kernels."""

from __future__ import annotations

import torch

from tests.kernels.aot.case import Case, Limits
from tierkv.kernels.checksum_kernel import sum_payloads

COUNT = 64


def case(name: str, length: int, first: int, width: int) -> Case:
    """Sum COUNT payloads of `length` bytes that begin `first` bytes past an aligned address."""

    def launch() -> None:
        step = -(-(length + first) // 16) * 16
        memory = torch.empty(COUNT, step, dtype=torch.uint8)
        sum_payloads(list(memory[:, first : first + length]))

    blocks = (length - 1) // 1024 + 1
    sums = COUNT * blocks * 64
    limits = {
        # A payload's address, and keys and sums: one word per thread. Triton 3.7 takes 56 registers for narrow words.
        "lane_sums_kernel": Limits(width=width, registers=64, loads={64: 2}, stores={64: 1}),
        # One warp per program, and few programs: registers cost nothing.
        "fold_kernel": Limits(width=None, registers=144),
    }
    return Case(f"checksums {COUNT} x {name}", launch, COUNT * length + 2 * sums, limits)


CASES = (
    case("2 MiB", 2 << 20, 0, 128),
    case("2 MiB, 8 bytes off", 2 << 20, 8, 64),
)
