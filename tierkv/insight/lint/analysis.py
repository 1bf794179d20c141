"""From a log to what was lost in it, by template, place and cause.

The log is replayed as it is, then without any cause. Where one template has several causes it is replayed once more
for each:
without the first in the prompt, without the first two, and so on. What a cause costs is what its removal adds, so that
every lost token is counted once, and the costs add up to what all of them cost together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierkv.insight.lint.causes import CAUSES
from tierkv.insight.lint.causes.data import CHANGING_VALUE
from tierkv.insight.lint.core.batch import Batch, Ints
from tierkv.insight.lint.core.index import make_index
from tierkv.insight.lint.core.losses import exposed, hits_without, prompt_lengths, replay_prompts, segment_offsets
from tierkv.insight.lint.core.plan import Grain, Plan, Rules, plan
from tierkv.insight.lint.core.statistics import SegmentStatistics
from tierkv.insight.lint.options import CacheOptions
from tierkv.insight.lint.sources.source import Source
from tierkv.insight.lint.steps import Steps
from tierkv.insight.lint.survey import LossKey, Survey, Suspect, TemplateTotals

__all__ = ["RULES", "Analysis", "Loss", "Measured", "analyse", "measure", "planned"]

RULES = Rules.of(((cause.code, cause.moved, cause.reordered) for cause in CAUSES), CHANGING_VALUE.code)


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens that would have hit without one cause in one place of one template, and where to see it."""

    tokens: int
    suspect: Suspect


@dataclass(frozen=True, slots=True)
class Measured:
    """A log replayed as it is, per request.

    Attributes
    ----------
    tokens, hits
        Of each prompt, in tokens.
    relatives
        The earlier request with the longest equal prefix; -1: none.
    """

    tokens: Ints
    hits: Ints
    relatives: Ints
    statistics: SegmentStatistics

    @property
    def prompt_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a log loses, and to what. `steps` says which segments of a prompt belong to which loss."""

    measured: Measured
    losses: Mapping[LossKey, Loss]
    templates: Mapping[int, TemplateTotals]
    steps: Steps


def measure(source: Source, cache: CacheOptions) -> Measured:
    """Replay a log as it is."""
    index = make_index(cache.capacity_blocks)()
    statistics = SegmentStatistics(source.filter_bits)
    tokens: list[Ints] = []
    hits: list[Ints] = []
    relatives: list[Ints] = []
    for batch in source.batches():
        statistics.add(batch, segment_offsets(batch))
        found = replay_prompts(batch, index, cache.block_tokens)
        tokens.append(prompt_lengths(batch))
        hits.append(found.tokens)
        relatives.append(found.relatives)
    empty = np.empty(0, np.int64)
    columns = [np.concatenate([empty, *parts]) for parts in (tokens, hits, relatives)]
    return Measured(columns[0], columns[1], columns[2], statistics)


def analyse(source: Source, cache: CacheOptions) -> Analysis:
    """Replay a log with and without causes. Reads it twice, and once more for each further cause of a template."""
    measured = measure(source, cache)
    survey = Survey(measured.hits, measured.tokens, measured.relatives)
    index = make_index(cache.capacity_blocks)()
    for batch in source.explained_batches():
        found = planned(batch, measured.statistics, source.grain)
        without = hits_without(batch, found, None, index, cache.block_tokens)
        actual = measured.hits[batch.first : batch.first + batch.count]
        behind, harmful = exposed(batch, found, actual, without)
        survey.add(batch, found, without, behind, harmful)
    del index
    steps = Steps.of(survey.suspects, measured.prompt_tokens)
    hits = [Counter({name: totals.hit_tokens for name, totals in survey.templates.items()})]
    hits.extend(_hits_at(step, steps, source, measured, cache) for step in range(1, steps.count))
    hits.append(Counter({name: totals.possible_tokens for name, totals in survey.templates.items()}))
    losses = {}
    for template, keys in steps.by_template.items():
        # A template with fewer causes than steps is without them all from its own last one on.
        reached = [*(hits[step][template] for step in range(len(keys))), survey.templates[template].possible_tokens]
        for number, key in enumerate(keys):
            losses[key] = Loss(reached[number + 1] - reached[number], survey.suspects[key])
    return Analysis(measured, losses, survey.templates, steps)


def planned(batch: Batch, statistics: SegmentStatistics, grain: Grain) -> Plan:
    """Plan a batch by the table of causes."""
    frequency, offsets = statistics.look_up(batch.ids)
    return plan(batch, frequency, offsets, RULES, grain)


def _hits_at(step: int, steps: Steps, source: Source, measured: Measured, cache: CacheOptions) -> Counter[int]:
    """Return the hit tokens of each template without its first `step` causes."""
    index = make_index(cache.capacity_blocks)()
    hits: Counter[int] = Counter()
    for batch in source.explained_batches():
        found = planned(batch, measured.statistics, source.grain)
        kept = steps.of_segments(batch, found) >= step
        without = hits_without(batch, found, kept & (found.causes > 0), index, cache.block_tokens)
        names, back = np.unique(found.templates[batch.requests], return_inverse=True)
        hits.update(dict(zip(names.tolist(), np.bincount(back, without).astype(np.int64).tolist(), strict=True)))
    return hits
