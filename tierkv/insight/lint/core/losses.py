"""Hits of a log as it is, and as it would be without causes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.insight.lint.core.batch import Batch, Bools, Ints, ragged
from tierkv.insight.lint.core.hashing import block_hashes
from tierkv.insight.lint.core.index import PrefixIndex
from tierkv.insight.lint.core.plan import Plan

__all__ = ["Hits", "exposed", "hits_without", "prompt_lengths", "replay_prompts", "segment_offsets"]


@dataclass(frozen=True, slots=True)
class Hits:
    """Per request: leading tokens found in the cache, and the earlier request that shares most of them (-1: none)."""

    tokens: Ints
    relatives: Ints


def prompt_lengths(batch: Batch) -> Ints:
    """Return the tokens of each request's prompt."""
    return np.bincount(batch.requests, np.where(batch.own, batch.lengths, 0), minlength=batch.count).astype(np.int64)


def segment_offsets(batch: Batch) -> Ints:
    """Return where each segment starts in its prompt, in tokens."""
    return _offsets(np.where(batch.own, batch.lengths, 0), batch.requests, batch.count)


def replay_prompts(batch: Batch, index: PrefixIndex, block_tokens: int) -> Hits:
    """Replay the prompts as they are."""
    return _replay(batch, np.flatnonzero(batch.own), index, block_tokens)


def hits_without(batch: Batch, plan: Plan, kept: Bools | None, index: PrefixIndex, block_tokens: int) -> Ints:
    """Replay the prompts without their causes, but for the segments in `kept`.

    Returns per segment the tokens of the real prompt that hit then.
    """
    order = plan.order(batch, kept)
    possible = _replay(batch, order, index, block_tokens).tokens
    lengths, requests = batch.lengths[order], batch.requests[order]
    covered = np.clip(possible[requests] - _offsets(lengths, requests, batch.count), 0, lengths)
    hits = np.zeros(batch.ids.size, np.int64)
    hits[order] = covered * plan.credit(batch, kept)[order] // np.maximum(lengths, 1)
    return hits


def exposed(batch: Batch, plan: Plan, actual: Ints, without: Ints) -> tuple[Ints, Bools]:
    """Return what is lost at and behind each segment, and which segments can be to blame for it.

    Parameters
    ----------
    actual
        Hit tokens per request, as it is.
    without
        Hit tokens per segment, without causes.
    """
    own_lengths = np.where(batch.own, batch.lengths, 0)
    own_offsets = segment_offsets(batch)
    lost = without - np.clip(actual[batch.requests] - own_offsets, 0, own_lengths)
    totals = np.bincount(batch.requests, lost, minlength=batch.count).astype(np.int64)
    behind = np.cumsum(totals)[batch.requests] - np.cumsum(lost) + lost
    # A cause in front of the divergence did no harm: its value happened to be an earlier request's.
    harmful = (plan.causes > 0) & (own_offsets + np.maximum(own_lengths, 1) > actual[batch.requests]) & (behind > 0)
    return behind, harmful


def _replay(batch: Batch, order: Ints, index: PrefixIndex, block_tokens: int) -> Hits:
    lengths = batch.lengths[order]
    contiguous = order.size == batch.ids.size and bool((np.diff(order) == 1).all())
    tokens = batch.tokens if contiguous else batch.tokens[ragged(batch.starts[order], lengths)]
    totals = np.bincount(batch.requests[order], lengths, minlength=batch.count).astype(np.int64)
    hashes, counts = block_hashes(tokens, np.cumsum(totals) - totals, totals, block_tokens)
    blocks, relatives = index.replay(hashes, counts, batch.first)
    return Hits(blocks * block_tokens, relatives)


def _offsets(lengths: Ints, requests: Ints, count: int) -> Ints:
    """Return where each segment starts in its prompt."""
    totals = np.bincount(requests, lengths, minlength=count).astype(np.int64)
    return np.cumsum(lengths) - lengths - (np.cumsum(totals) - totals)[requests]
