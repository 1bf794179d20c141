"""How long a prefix is, when a model keeps KV in several groups.

A full-attention group (or MLA) needs every block of the prefix. A sliding-window group only needs the blocks that its
window still reaches from the end of the prefix; older ones may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.spec import KVGroup

__all__ = ["hit_length", "needed_blocks"]


def needed_blocks(group: KVGroup, length: int, block_tokens: int) -> range:
    """Return the block indices `group` needs so that a prefix of `length` blocks can be continued."""
    if group.kind != "sliding_window":
        return range(length)
    return range(max(0, (length * block_tokens - group.window) // block_tokens), length)


def hit_length(groups: Sequence[KVGroup], total: int, block_tokens: int, has: Callable[[int, int], bool]) -> int:
    """Return the longest usable prefix in blocks, at most `total`.

    Parameters
    ----------
    has
        ``has(index, group)`` says whether a block is published. Called at most once per block, in rising order.
    """
    full = [g for g, group in enumerate(groups) if group.kind != "sliding_window"]
    windows = [g for g, group in enumerate(groups) if group.kind == "sliding_window"]
    length = 0
    while length < total and all(has(length, g) for g in full):
        length += 1
    if not windows:
        return length
    # runs[g][i]: how many consecutive blocks of group g end with block i
    runs: dict[int, list[int]] = {g: [] for g in windows}
    for g in windows:
        run = 0
        for index in range(length):
            run = run + 1 if has(index, g) else 0
            runs[g].append(run)
    while length and any(runs[g][length - 1] < len(needed_blocks(groups[g], length, block_tokens)) for g in windows):
        length -= 1
    return length
