"""The device's checksum is the host's, for every length that it takes, wherever payloads lie."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.paged import random_bytes, raw
from tierkv.kernels.checksum import MIN_BYTES, checksums, checksums_reference
from tierkv.kernels.checksum_kernel import sum_payloads
from tierkv.storage.tier import checksum

CPU = torch.device("cpu")
BLOCK = 1024
# Ends of stripes, of blocks, and of the groups of 16 blocks that the second pass loads ahead.
EDGES = [MIN_BYTES, 256, 257, BLOCK, BLOCK + 1, BLOCK + 64, BLOCK + 65, 2 * BLOCK - 1, 2 * BLOCK]
EDGES += [blocks * BLOCK + more for blocks in (8, 15, 16, 17, 32) for more in (0, 1, 64, 65)]


def on_host(payloads: Sequence[Tensor]) -> list[int]:
    return [checksum(raw(payload)) for payload in payloads]


def unsigned(sums: Tensor) -> list[int]:
    return [total % 2**64 for total in sums.tolist()]


def spread(count: int, length: int, skew: int, device: torch.device) -> list[Tensor]:
    """Return payloads `skew` bytes past an aligned address each, the last one first."""
    step = -(-(length + skew) // 16) * 16
    memory = random_bytes(count * step, device).view(count, step)
    return list(memory[:, skew : skew + length].unbind(0))[::-1]


def test_reference_is_the_hosts_sum_for_every_length() -> None:
    for length in (*range(MIN_BYTES, 2 * BLOCK + 130), *EDGES):
        payload = random_bytes(length, CPU)
        assert unsigned(checksums_reference([payload])) == on_host([payload]), length


@pytest.mark.parametrize("length", EDGES)
def test_kernel_sums_every_kind_of_end(device: torch.device, length: int) -> None:
    payloads = spread(2, length, 0, device)
    assert unsigned(sum_payloads(payloads)) == on_host(payloads)


@given(count=st.integers(1, 10), length=st.integers(MIN_BYTES, 4 * BLOCK), skew=st.integers(0, 15))
@settings(max_examples=20)
def test_kernel_sums_many_payloads_at_any_address(device: torch.device, count: int, length: int, skew: int) -> None:
    payloads = spread(count, length, skew, device)
    assert unsigned(sum_payloads(payloads)) == on_host(payloads)


def test_payloads_may_differ_in_alignment(device: torch.device) -> None:
    memory = random_bytes(8 * BLOCK, device)
    payloads = [memory[first : first + 3 * BLOCK] for first in (0, 16, 24, 4, 6, 1)]
    assert unsigned(sum_payloads(payloads)) == on_host(payloads)


def test_one_tensor_of_any_dtype_is_a_payload_per_row(device: torch.device) -> None:
    padded = random_bytes(3 * 2048, device).view(torch.bfloat16).view(3, 2, 512)
    payloads = padded[:, 0]
    assert unsigned(checksums(payloads)) == unsigned(sum_payloads(list(payloads))) == on_host(payloads)


def test_no_payloads_have_no_sums() -> None:
    assert checksums([]).shape == (0,)


REFUSED = {
    "too short": [torch.zeros(MIN_BYTES - 1, dtype=torch.uint8)],
    "payload 1 is 600 bytes": [torch.zeros(500, dtype=torch.uint8), torch.zeros(600, dtype=torch.uint8)],
    "on meta": [torch.zeros(500, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8, device="meta")],
    "payload 0 is not contiguous": [torch.zeros(32, 32).T],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_summed_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checksums(REFUSED[message])
