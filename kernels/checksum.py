"""XXH3-64 of many payloads where they lie: a block that was copied to a GPU is verified there.

It is the sum that hosts compute with the xxhash package (default secret, seed 0), bit for bit, so a sum taken on one
side can be compared with one taken on the other. The algorithm is XXH3 for inputs of more than 240 bytes as specified
by the xxHash project (https://github.com/Cyan4973/xxHash, `doc/xxhash_spec.md`). It reads 1024-byte blocks of 16
stripes of 8 lanes; within a block lanes are plain sums, between blocks they are scrambled, which is what makes it
sequential:

    pass 1    the 8 lane sums of every block of every payload, all in parallel
    pass 2    per payload: fold the sums of its blocks in order, then the tail and the final mixing
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "MIN_BYTES", "checksums", "checksums_reference"]

MIN_BYTES = 241
"""Shorter inputs have an algorithm of their own, which is not here."""

BLOCK_BYTES = 1024
STRIPE_BYTES = 64

PRIME32_1 = 0x9E3779B1
PRIME32_2 = 0x85EBCA77
PRIME32_3 = 0xC2B2AE3D
PRIME64_1 = 0x9E3779B185EBCA87
PRIME64_2 = 0xC2B2AE3D27D4EB4F
PRIME64_3 = 0x165667B19E3779F9
PRIME64_4 = 0x85EBCA77C2B2AE63
PRIME64_5 = 0x27D4EB2F165667C5
AVALANCHE = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_STRIPE = 121  # where in the secret the keys of the last stripe begin
_MERGE = 11


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


def _words(first: int) -> list[int]:
    """Return eight words of the secret from byte `first`."""
    return [int.from_bytes(_SECRET[i : i + 8], "little", signed=True) for i in range(first, first + 64, 8)]


STRIPE_KEYS = [_words(8 * stripe) for stripe in range(BLOCK_BYTES // STRIPE_BYTES)]
SCRAMBLE_KEYS = _words(len(_SECRET) - STRIPE_BYTES)
LAST_KEYS = _words(_LAST_STRIPE)
MERGE_KEYS = _words(_MERGE)
START = [
    _signed(word) for word in (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
]


def checksums(payloads: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the XXH3-64 of each payload.

    On a GPU, n payloads of P bytes cost n P bytes of reading, and n P / 16 each of writing and reading the lane sums
    between the passes: 1 1/8 n P in all. Pass 2 is a chain of P / 1024 dependent steps of four instructions, some 20
    cycles; it takes as long for one payload as for thousands, and leaves most of the device to others.

    Parameters
    ----------
    payloads
        Tensors of the same number of bytes, each contiguous, on one device, anywhere in memory; or one tensor whose
        first axis counts payloads. Any dtype: bytes are summed. At least `MIN_BYTES` each. Aligned to 16 bytes they are
        read in words of 128 bits, else in the widest that fit.

    Returns
    -------
    Tensor
        int64 ``[n]`` on the payloads' device (on the CPU for no payloads): the bits of the unsigned sums.

    Raises
    ------
    ValueError
        Payloads differ in length or device, are not contiguous, or are too short.

    Notes
    -----
    On a GPU the work is queued on the current stream and this returns at once: keep the payloads alive and unchanged
    until the stream has passed it. Elsewhere the xxhash package does it, and this blocks.
    """
    rows = list(payloads)
    if not rows:
        return torch.empty(0, dtype=torch.int64)
    _check(rows)
    if rows[0].is_cuda:
        from tierkv.kernels.checksum_kernel import sum_payloads

        return sum_payloads(rows)
    import xxhash

    digests = [xxhash.xxh3_64_intdigest(_bytes(row).numpy().data) for row in rows]
    return torch.tensor([_signed(digest) for digest in digests], dtype=torch.int64)


def checksums_reference(payloads: Sequence[Tensor]) -> Tensor:
    """Compute `checksums` in plain torch, a step for each of the kernels'; slow."""
    keys = torch.tensor(STRIPE_KEYS)
    sums = []
    for payload in payloads:
        data = _bytes(payload.cpu())
        blocks, stripes, tail = split(data.numel())
        acc = torch.tensor(START)
        for block in data[: blocks * BLOCK_BYTES].view(blocks, BLOCK_BYTES):
            acc = _scramble(acc + _accumulate(block, keys))
        acc = acc + _accumulate(data[blocks * BLOCK_BYTES :][: stripes * STRIPE_BYTES], keys[:stripes])
        acc = acc + _accumulate(data[tail:], torch.tensor([LAST_KEYS]))
        sums.append(_merge(acc.tolist(), data.numel()))
    return torch.tensor(sums, dtype=torch.int64)


def split(length: int) -> tuple[int, int, int]:
    """Return how many blocks are scrambled, how many whole stripes follow, and the offset of the last 64 bytes."""
    blocks = (length - 1) // BLOCK_BYTES
    return blocks, (length - 1 - blocks * BLOCK_BYTES) // STRIPE_BYTES, length - STRIPE_BYTES


def length_term(length: int) -> int:
    """Return what the number of bytes adds to the final mix, as an int64."""
    return _signed(length * PRIME64_1)


def _check(rows: Sequence[Tensor]) -> None:
    length = rows[0].nbytes
    for index, row in enumerate(rows):
        if (row.nbytes, row.device) != (length, rows[0].device):
            raise ValueError(
                f"payload {index} is {row.nbytes} bytes on {row.device}, payload 0 is {length} on {rows[0].device}"
            )
        if not row.is_contiguous():
            raise ValueError(f"payload {index} is not contiguous")
    if length < MIN_BYTES:
        raise ValueError(f"payloads of {length} bytes are too short: {MIN_BYTES} is the least that is summed here")


def _bytes(payload: Tensor) -> Tensor:
    return payload.reshape(-1).view(torch.uint8)


def _accumulate(stripes: Tensor, keys: Tensor) -> Tensor:
    """Return what whole stripes add to the lanes, int64 ``[8]``."""
    # a copy: torch looks at bytes as words only where they are aligned
    words = stripes.clone().view(torch.int64).view(-1, 8)
    keyed = words ^ keys
    products = (keyed & 0xFFFFFFFF) * (keyed >> 32 & 0xFFFFFFFF)
    neighbours = words.view(-1, 4, 2).flip(2).view(-1, 8)
    return (products + neighbours).sum(0)


def _scramble(acc: Tensor) -> Tensor:
    return (acc ^ (acc >> 47 & 0x1FFFF) ^ torch.tensor(SCRAMBLE_KEYS)) * PRIME32_1


def _merge(acc: Sequence[int], length: int) -> int:
    # python's integers: torch has no product of 128 bits
    mixed = [(lane ^ key) % 2**64 for lane, key in zip(acc, MERGE_KEYS, strict=True)]
    result = length_term(length)
    for even, odd in zip(mixed[::2], mixed[1::2], strict=True):
        product = even * odd
        result += product % 2**64 ^ product >> 64
    result %= 2**64
    result = (result ^ result >> 37) * AVALANCHE % 2**64
    return _signed(result ^ result >> 32)
