"""What stands in the way of sharing, and the order of segments without it.

A segment *blocks* where something that at least twice as many requests share comes after it: moved to the end of the
prompt, it no longer would. Segments of which the order is free (tools, documents) are *displaced* where they do not
come in the order that is usual in the log. Only hashes, lengths and frequencies are used, so this also works where no
text is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.insight.lint.core.batch import Batch, Bools, Ints, Kind

__all__ = ["SHARED_RUN_TOKENS", "Grain", "Plan", "Rules", "plan"]

SHARED_RUN_TOKENS = 24
"""A shared segment shorter than this counts only together with its neighbours: everybody says "thanks"."""
ANCHOR_TOKENS = 32
"""Length beyond which a segment does not speak more for a template."""


@dataclass(frozen=True, slots=True)
class Grain:
    """How finely prompts are cut.

    Attributes
    ----------
    window
        How many short segments in a row are taken seriously: some 24 tokens of them.
    value_tokens
        Longest run of changing token ids that is taken for a value and not for somebody's text; the seam between two
        parts in another order can be twice as long.
    """

    window: int
    value_tokens: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Codes of causes by kind of segment, as arrays to index with kinds.

    Attributes
    ----------
    moved
        Of a segment that blocks.
    reordered
        Of a segment that is displaced; 0 where the order of a kind is not free.
    short_run
        Of a short run of blocking `OPAQUE` segments.
    """

    moved: NDArray[np.uint8]
    reordered: NDArray[np.uint8]
    short_run: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Iterable[Kind], Iterable[Kind]]], short_run: int) -> Rules:
        """Build the arrays from rows of code, kinds that block, kinds that are displaced."""
        moved, reordered = np.zeros(len(Kind), np.uint8), np.zeros(len(Kind), np.uint8)
        for code, moves, orders in rows:
            moved[list(moves)] = code
            reordered[list(orders)] = code
        return cls(moved, reordered, short_run)


@dataclass(frozen=True, slots=True)
class Plan:
    """One entry per segment of a batch.

    Attributes
    ----------
    causes
        Code of the cause a segment is an instance of; 0 for most.
    blocks
        It is to move behind what more requests share.
    slots
        Which segment's place it takes, as an index into the batch; its own where it stays. Of one that blocks: behind
        which segment it moves.
    hosts
        Of a seam between displaced parts: the segment it is counted with, for in another order there is no such seam;
        else -1.
    frequency
        Requests that have it.
    templates
        One entry per *request*: id of the segment that most tells what it is an instance of.
    """

    causes: NDArray[np.uint8]
    blocks: Bools
    slots: Ints
    hosts: Ints
    frequency: Ints
    templates: NDArray[np.uint64]

    def order(self, batch: Batch, kept: Bools | None = None) -> Ints:
        """Return the segments of the prompts without causes, in order, request by request.

        Segments marked in `kept` keep their cause.
        """
        blocks, slots, live = self.blocks, self.slots, batch.live & (self.hosts < 0)
        if kept is not None:
            blocks = blocks & ~kept
            slots = np.where(kept, np.arange(slots.size), slots)
            live = np.where(kept, np.where(batch.given > 0, batch.own, batch.live), live)
        rank = np.where(blocks, -self.frequency, 0)
        order = np.lexsort((rank, blocks, slots, batch.requests))
        chosen: Ints = order[live[order]]
        return chosen

    def credit(self, batch: Batch, kept: Bools | None = None) -> Ints:
        """Return the tokens of the prompt that hit where each segment of `order` does."""
        seams = np.flatnonzero(self.hosts >= 0 if kept is None else (self.hosts >= 0) & ~kept)
        if seams.size == 0:
            return batch.credit
        hosted = np.bincount(self.hosts[seams], batch.lengths[seams], minlength=batch.ids.size)
        return batch.credit + hosted.astype(np.int64)


def plan(batch: Batch, frequency: Ints, offsets: NDArray[np.float64], rules: Rules, grain: Grain) -> Plan:
    """Find what blocks and what is displaced.

    Parameters
    ----------
    frequency, offsets
        Per segment: requests that have it, and where it usually stands (`SegmentStatistics.look_up`).
    """
    here = np.arange(batch.ids.size)
    shared = _shared_runs(batch, frequency, grain.window)
    # Words that anybody uses make no segment of plain token ids shared, if those around it are not.
    own = np.where(batch.kinds == Kind.OPAQUE, shared, frequency)
    later, behind = _later(shared, own, batch)
    movable = rules.moved[batch.kinds] > 0
    blocks = batch.live & movable & (later > 2 * own) & (batch.given == 0)
    free = rules.reordered[batch.kinds] > 0
    free &= (batch.kinds != Kind.OPAQUE) | _common(batch, shared)
    slots = _usual_slots(batch, np.flatnonzero(free & batch.live & ~blocks & (frequency > 1)), frequency, offsets)
    displaced = slots != here
    slots[blocks] = behind[blocks]
    # A few tokens out of order are a phrase that comes more than once, not a part.
    parts = displaced & (_run_tokens(batch, displaced) >= SHARED_RUN_TOKENS)
    parts |= displaced & (batch.kinds != Kind.OPAQUE)
    causes = np.where(blocks, rules.moved[batch.kinds], np.where(parts, rules.reordered[batch.kinds], batch.given))
    causes = causes.astype(np.uint8)
    hosts = np.full(here.size, -1, np.int64)
    opaque = blocks & (batch.kinds == Kind.OPAQUE)
    if opaque.any():
        tokens = _run_tokens(batch, blocks)
        causes[opaque & (tokens <= grain.value_tokens)] = rules.short_run
        beside = _neighbours(parts, blocks, batch.requests)
        # Where parts meet that elsewhere do not, the segment across the seam is rare: an effect, not a cause.
        seams = opaque & (tokens <= 2 * grain.value_tokens) & (beside >= 0)
        causes[seams] = rules.reordered[Kind.OPAQUE]
        hosts[seams] = beside[seams]
    return Plan(causes, blocks, slots, hosts, frequency, _templates(batch, frequency))


def _usual_slots(batch: Batch, candidates: Ints, frequency: Ints, offsets: NDArray[np.float64]) -> Ints:
    """Return each segment's place when the candidates of one place and kind of a request come in their usual order."""
    slots = np.arange(batch.ids.size)
    if candidates.size == 0:
        return slots
    kinds, places = batch.kinds[candidates].astype(np.int64), batch.places[candidates].astype(np.int64)
    groups = (batch.requests[candidates] * 65536 + places) * len(Kind) + kinds
    # Of tools and documents that not every request has, the more frequent go first: more requests share those.
    rarer = np.where(kinds == Kind.OPAQUE, 0, -np.rint(np.log2(frequency[candidates])))
    usual = offsets[candidates]
    wrong = (groups[1:] == groups[:-1]) & (
        (rarer[1:] < rarer[:-1]) | ((rarer[1:] == rarer[:-1]) & (usual[1:] <= usual[:-1]))
    )
    unordered = np.zeros(batch.count, np.bool_)
    unordered[batch.requests[candidates[1:][wrong]]] = True
    some = np.flatnonzero(unordered[batch.requests[candidates]])
    candidates, groups = candidates[some], groups[some]
    order = np.lexsort((batch.ids[candidates], usual[some], rarer[some], groups))
    slots[candidates[order]] = candidates[np.argsort(groups, kind="stable")]
    return slots


def _common(batch: Batch, shared: Ints) -> Bools:
    """Mark what about as many requests have as the most frequent segments of the same one.

    Plain token ids change places only among these, so that conversations stay in order.
    """
    most = np.zeros(batch.count, np.int64)
    np.maximum.at(most, batch.requests, shared)
    common: Bools = shared * 4 >= most[batch.requests]
    return common


def _shared_runs(batch: Batch, frequency: Ints, window: int) -> Ints:
    """Return frequencies as far as they are taken seriously.

    A short segment has no more than the least frequent one of the best run of `window` segments it is in; a marker
    has none.
    """
    counted = np.where(batch.live & (batch.kinds != Kind.MARKER), frequency, 0)
    least = counted.copy()
    for step in range(1, window):
        same = batch.requests[step:] == batch.requests[:-step]
        least[:-step] = np.minimum(least[:-step], np.where(same, counted[step:], 0))
        least[-step:] = 0
    best = least.copy()
    for step in range(1, window):
        same = batch.requests[step:] == batch.requests[:-step]
        best[step:] = np.maximum(best[step:], np.where(same, least[:-step], 0))
    return np.where(batch.lengths >= SHARED_RUN_TOKENS, counted, best)


def _later(shared: Ints, own: Ints, batch: Batch) -> tuple[Ints, Ints]:
    """Return what is most shared behind each segment, and where it would not be in the way.

    That is behind the last segment that more than twice as many requests share as have this one (`own`), or at the end
    if only one has it.
    """
    # Each request's values lie above all those of the request behind it, so that one running maximum from the end does
    # for all, never increases, and can be searched.
    step = 2 * int(max(shared.max(initial=0), own.max(initial=0))) + 1
    lift = (batch.count - batch.requests) * step
    running = np.maximum.accumulate((shared + lift)[::-1])[::-1]
    later = np.zeros_like(shared)
    same = batch.requests[1:] == batch.requests[:-1]
    later[:-1] = np.where(same, running[1:] - lift[1:], 0)
    behind = np.searchsorted(-running, -(2 * own + lift), side="left") - 1
    ends = np.cumsum(np.bincount(batch.requests, minlength=batch.count)) - 1
    return later, np.where(own <= 1, ends[batch.requests], behind)


def _neighbours(displaced: Bools, blocks: Bools, requests: Ints) -> Ints:
    """Return for each segment the displaced one next to it, not counting those that block; -1: there is none."""
    here = np.arange(blocks.size)
    before = np.maximum.accumulate(np.where(blocks, -1, here))
    after = np.minimum.accumulate(np.where(blocks, here.size, here)[::-1])[::-1]
    last, following = np.maximum(before, 0), np.minimum(after, max(here.size - 1, 0))
    left = displaced[last] & (before >= 0) & (requests[last] == requests)
    right = displaced[following] & (after < here.size) & (requests[following] == requests)
    return np.where(left, last, np.where(right, following, -1))


def _run_tokens(batch: Batch, marked: Bools) -> Ints:
    """Return the tokens of the run of marked segments each segment belongs to."""
    if marked.size == 0:
        return batch.lengths
    breaks = np.ones(marked.size, np.bool_)
    breaks[1:] = (marked[1:] != marked[:-1]) | (batch.requests[1:] != batch.requests[:-1])
    runs = np.cumsum(breaks) - 1
    sums: Ints = np.bincount(runs, weights=batch.lengths).astype(np.int64)[runs]
    return sums


def _templates(batch: Batch, frequency: Ints) -> NDArray[np.uint64]:
    """Name each request after the segment for which requests times tokens is largest, among what it says itself."""
    templates = np.zeros(batch.count, np.uint64)
    if batch.ids.size == 0:
        return templates
    told = batch.own & (batch.kinds != Kind.MARKER)
    # A long document that some requests have says less than the line all have.
    # A long document that some requests have says less than the line all have.
    weight = np.where(told, frequency * np.minimum(batch.lengths, ANCHOR_TOKENS), -1)
    firsts = np.flatnonzero(np.append(True, batch.requests[1:] != batch.requests[:-1]))
    heaviest = np.repeat(np.maximum.reduceat(weight, firsts), np.diff(np.append(firsts, weight.size)))
    named = np.where((weight == heaviest) & told, batch.ids, np.iinfo(np.uint64).max)
    templates[batch.requests[firsts]] = np.minimum.reduceat(named, firsts)
    return templates
