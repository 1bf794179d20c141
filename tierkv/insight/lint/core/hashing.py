"""Vectorised hashes of tokens: prefixes at block boundaries, segments, and where to cut plain token ids.

A prefix is hashed as the sum of its tokens, mixed to 64 bits, each times a pseudo-random odd number of its position
(multilinear hashing). Sums of runs and their cumulative sums need no loop. These hashes find equal prefixes of one log;
they are no names of blocks and never leave the process.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tierkv.insight.lint.core.batch import Bools, Ints, Tokens, Words, ragged

__all__ = ["block_hashes", "chunk_starts", "mix", "number_repeats", "run_hashes"]

_GOLDEN = 0x9E3779B97F4A7C15
_CUT_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_WINDOW = len(_CUT_MULTIPLIERS)


def mix(values: Words) -> Words:
    """Scramble 64-bit words, one to one (the finaliser of SplitMix64)."""
    mixed = values + np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@cache
def _multipliers(size: int) -> Words:
    return mix(np.arange(size, dtype=np.uint64)) | np.uint64(1)


def _weights(positions: Ints) -> Words:
    """Odd multipliers of positions; tables grow in powers of two, so that few are ever made."""
    longest = int(positions.max()) + 1 if positions.size else 1
    return _multipliers(1 << max(10, (longest - 1).bit_length()))[positions]


def _spread(tokens: Tokens) -> Words:
    spread = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    spread ^= spread >> np.uint64(29)
    return spread


def block_hashes(tokens: Tokens, starts: Ints, lengths: Ints, block_tokens: int) -> tuple[Words, Ints]:
    """Hash the prefix up to the end of every full block.

    Parameters
    ----------
    tokens
        Prompts one after the other; `starts` and `lengths` say where each is.

    Returns
    -------
    hashes, counts
        Hashes of prompt 0's blocks in order, then of prompt 1's; and how many each has.
    """
    counts = lengths // block_tokens
    if not counts.any():
        return np.empty(0, np.uint64), counts
    whole = counts * block_tokens
    tight = bool((starts[1:] == (starts + lengths)[:-1]).all()) and bool((whole == lengths).all())
    kept = tokens if tight and tokens.size == int(whole.sum()) else tokens[ragged(starts, whole)]
    terms = _spread(kept)
    terms *= _weights(ragged(np.zeros_like(whole), whole))
    sums = terms.reshape(-1, block_tokens).sum(axis=1, dtype=np.uint64)
    running = np.cumsum(sums, dtype=np.uint64)
    firsts = np.cumsum(counts) - counts
    before = np.where(firsts > 0, running[np.maximum(firsts, 1) - 1], np.uint64(0))
    running -= np.repeat(before, counts)
    depth = ragged(np.zeros_like(counts), counts).astype(np.uint64)
    return mix(running ^ (depth << np.uint64(40))), counts


def run_hashes(tokens: Tokens, starts: Ints, lengths: Ints) -> Words:
    """Hash the runs of tokens that lie one after the other and cover `tokens`, none of them empty."""
    terms = _spread(tokens)
    terms *= _weights(ragged(np.zeros_like(lengths), lengths))
    sums: Words = np.add.reduceat(terms, starts)
    return mix(sums ^ lengths.astype(np.uint64))


def chunk_starts(tokens: Tokens, prompt_starts: Ints, mean_tokens: int) -> Ints:
    """Cut prompts where their own tokens say so (content-defined chunking), so that equal text is cut equally wherever
    it stands: after a window of four tokens with a small hash, one in `mean_tokens`, and where a prompt starts. Where
    such windows lie closer than four tokens, only the first of them counts: a token or two tell nothing.
    """
    if tokens.size == 0:
        return np.empty(0, np.int64)
    window: Tokens = tokens * np.uint32(_CUT_MULTIPLIERS[0])
    for back, multiplier in enumerate(_CUT_MULTIPLIERS[1:], start=1):
        window[back:] += tokens[:-back] * np.uint32(multiplier)
    window *= np.uint32(0x165667B1)
    cut: Bools = np.ones(tokens.size, np.bool_)
    np.less(window[:-1], np.uint32((1 << 32) // mean_tokens), out=cut[1:])
    # The first windows of a prompt would look at the prompt before it.
    for offset in range(1, _WINDOW):
        early = prompt_starts + offset
        cut[early[early < tokens.size]] = False
    starts = prompt_starts[prompt_starts < tokens.size]
    cut[starts] = True
    cuts = np.flatnonzero(cut)
    close = np.diff(cuts, prepend=-_WINDOW) < _WINDOW
    cut[cuts[close]] = False
    cut[starts] = True
    return np.flatnonzero(cut)


def number_repeats(ids: Words, requests: Ints) -> Words:
    """Make the second, third ... segment of one request that has the same id another id: the same in every request."""
    if ids.size == 0:
        return ids
    keys = mix(ids ^ mix(requests.astype(np.uint64)))
    in_order = np.sort(keys)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    if repeated.size == 0:
        return ids
    candidates = np.flatnonzero(repeated[np.minimum(np.searchsorted(repeated, keys), repeated.size - 1)] == keys)
    order = candidates[np.argsort(keys[candidates], kind="stable")]
    ordered = keys[order]
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    fresh = np.ones(order.size, np.bool_)
    fresh[repeats] = False
    begins = np.maximum.accumulate(np.where(fresh, np.arange(order.size), 0))
    ordinals = (repeats - begins[repeats]).astype(np.uint64)
    numbered = ids.copy()
    places = order[repeats]
    numbered[places] = mix(ids[places] + ordinals * np.uint64(_GOLDEN))
    return numbered
