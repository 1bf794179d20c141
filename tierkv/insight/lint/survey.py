"""Which causes a log has, where, and how much at most they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tierkv.insight.lint.core.batch import Batch, Bools, Ints, Words
from tierkv.insight.lint.core.losses import segment_offsets
from tierkv.insight.lint.core.plan import Plan

__all__ = ["LossKey", "Survey", "Suspect", "TemplateTotals", "packed_keys"]


@dataclass(frozen=True, slots=True, order=True)
class LossKey:
    """What losses are added up by: a template's id, a place's number, a cause's code."""

    template: int
    place: int
    cause: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause in one place of one template.

    Attributes
    ----------
    exposed
        Tokens lost at and behind it: the most it can cost.
    requests
        How many lose anything behind it.
    offset
        Where it first stands in the prompt, tokens, the mean of these requests.
    example, relative
        The request that loses most, and the earlier one that request shares most with (-1: none).
    most
        Tokens that request loses at and behind the cause.
    example_offset
        Where the cause first stands in its prompt, tokens.
    """

    exposed: int
    requests: int
    offset: float
    example: int
    relative: int
    most: int
    example_offset: int


@dataclass(frozen=True, slots=True)
class TemplateTotals:
    """Requests of one template and their tokens. `example` is the first of them."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int
    example: int


class Survey:
    """Collects suspects and templates, batch by batch.

    Parameters
    ----------
    hits, tokens, relatives
        Per request of the whole log, as it is.
    """

    def __init__(self, hits: Ints, tokens: Ints, relatives: Ints) -> None:
        self._hits, self._tokens, self._relatives = hits, tokens, relatives
        self.suspects: dict[LossKey, Suspect] = {}
        self.templates: dict[int, TemplateTotals] = {}
        self._latest: dict[int, int] = {}

    def add(self, batch: Batch, plan: Plan, without: Ints, behind: Ints, harmful: Bools) -> None:
        """Take in a batch: hit tokens per segment without causes, and what `exposed` returned."""
        self._add_templates(batch, plan, without)
        if harmful.any():
            self._add_suspects(batch, plan, behind, np.flatnonzero(harmful))
        names, back = np.unique(plan.templates[::-1], return_index=True)
        self._latest.update(zip(names.tolist(), (batch.first + batch.count - 1 - back).tolist(), strict=True))

    def _add_templates(self, batch: Batch, plan: Plan, without: Ints) -> None:
        requests = slice(batch.first, batch.first + batch.count)
        possible = np.bincount(batch.requests, without, minlength=batch.count)
        names, first, back = np.unique(plan.templates, return_index=True, return_inverse=True)
        sums = [
            np.bincount(back, values).astype(np.int64)
            for values in (self._tokens[requests], self._hits[requests], possible)
        ]
        counts = np.bincount(back)
        for number, name in enumerate(names.tolist()):
            old = self.templates.get(name, TemplateTotals(0, 0, 0, 0, batch.first + int(first[number])))
            self.templates[name] = TemplateTotals(
                old.requests + int(counts[number]),
                old.prompt_tokens + int(sums[0][number]),
                old.hit_tokens + int(sums[1][number]),
                old.possible_tokens + int(sums[2][number]),
                old.example,
            )

    def _add_suspects(self, batch: Batch, plan: Plan, behind: Ints, at: Ints) -> None:
        keys, requests = packed_keys(batch, plan)[at], batch.requests[at]
        order = np.lexsort((at, keys, requests))
        # The first segment of each request and key: all that is lost to the key is lost behind it.
        keys, requests, at = keys[order], requests[order], at[order]
        fresh = np.ones(at.size, np.bool_)
        fresh[1:] = (keys[1:] != keys[:-1]) | (requests[1:] != requests[:-1])
        keys, requests, at = keys[fresh], requests[fresh], at[fresh]
        lost, offsets = behind[at], segment_offsets(batch)[at]
        _, first, back = np.unique(keys, return_index=True, return_inverse=True)
        worst = np.lexsort((-requests, lost, back))
        worst = worst[np.flatnonzero(np.append(back[worst][1:] != back[worst][:-1], True))]
        sums, counts = np.bincount(back, lost), np.bincount(back)
        places = np.bincount(back, offsets)
        for number, row in enumerate(first.tolist()):
            segment, request = int(at[row]), int(requests[row])
            key = LossKey(int(plan.templates[request]), int(batch.places[segment]), int(plan.causes[segment]))
            example = batch.first + int(requests[worst[number]])
            relative = int(self._relatives[example])
            if relative < 0:
                relative = self._latest.get(key.template, self.templates[key.template].example)
            count = int(counts[number])
            new = Suspect(
                exposed=int(sums[number]),
                requests=count,
                offset=float(places[number]) / count,
                example=example,
                relative=relative if relative != example else -1,
                most=int(lost[worst[number]]),
                example_offset=int(offsets[worst[number]]),
            )
            old = self.suspects.get(key)
            self.suspects[key] = new if old is None else _sum(old, new)


def _sum(old: Suspect, new: Suspect) -> Suspect:
    worse = new if new.most > old.most else old
    count = old.requests + new.requests
    mean = (old.offset * old.requests + new.offset * new.requests) / count
    return replace(worse, exposed=old.exposed + new.exposed, requests=count, offset=mean)


def packed_keys(batch: Batch, plan: Plan) -> Words:
    """Return template, place and cause of each segment, packed into a word."""
    small = (batch.places.astype(np.uint64) << np.uint64(8)) | plan.causes.astype(np.uint64)
    return pack(plan.templates[batch.requests], small)


def pack(templates: Words, small: Words) -> Words:
    """Mix templates and small numbers into words that differ where either does."""
    packed: Words = (templates ^ (small * np.uint64(0x9E3779B97F4A7C15))) + small
    return packed
