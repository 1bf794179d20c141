"""Measured speeds: how fast each tier delivers blocks, and how fast engines prefill.

Neither class reads a clock or takes a lock: callers pass monotonic seconds and keep one call at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp2, sqrt

__all__ = ["DeliveryRates", "Estimate", "PrefillRates"]

HALF_LIFE_S = 60.0
HALF_LIFE_SAMPLES = 32
_KEPT_PER_SAMPLE = exp2(-1 / HALF_LIFE_SAMPLES)
# Of less than a quarter of a sample nothing is known. The most that samples can add up to is 47, and each class of
# distance halves them, so nothing can be borrowed from farther than 7 classes away.
_LEAST_SAMPLES = 0.25
_FARTHEST = 7

_PREFILL_SAMPLES = 15
_NAMESPACES = 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a tier's delivery of blocks of one size.

    Attributes
    ----------
    seconds_per_block
        Mean time from one delivery to the next while loads are waiting, with the parallelism there has been.
    deviation_s
        Standard deviation of one delivery, in seconds, including what is not known of the mean: it grows as samples
        get few or old.
    samples
        Samples the estimate rests on, each counted by what age and later samples have left of it.
    age_s
        Seconds since the latest of them.
    """

    seconds_per_block: float
    deviation_s: float
    samples: float
    age_s: float


@dataclass(slots=True)
class _Deliveries:
    """Decaying mean and variance of one tier and size class. `samples` is as of `latest`."""

    samples: float = 0.0
    latest: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    nbytes: float = 0.0

    half_life_s: float = HALF_LIFE_S

    def samples_at(self, now: float) -> float:
        return self.samples * exp2(-max(0.0, now - self.latest) / self.half_life_s)

    def add(self, seconds: float, nbytes: int, now: float) -> None:
        self.samples = self.samples_at(now) * _KEPT_PER_SAMPLE + 1.0
        self.latest = max(self.latest, now)
        share = 1.0 / self.samples
        difference = seconds - self.seconds
        self.seconds += share * difference
        self.variance = (1.0 - share) * (self.variance + share * difference * difference)
        self.nbytes += share * (nbytes - self.nbytes)

    def estimate(self, nbytes: int, samples: float, now: float) -> Estimate:
        scale = nbytes / self.nbytes
        unknown = self.seconds / samples
        return Estimate(
            scale * self.seconds,
            scale * sqrt(self.variance + unknown * unknown),
            samples,
            max(0.0, now - self.latest),
        )


class DeliveryRates:
    """Delivery time per block, by source tier and by size class (powers of two of the block's bytes).

    Several loads run at once, so a block's own loading time says little about how soon the next one follows. What
    counts for a block is the gap from the later of its own start and the tier's previous delivery to its own end: the
    gaps of a busy tier add up to the time it was busy.

    Knowledge fades, by half every 32 samples and every 60 seconds. After some minutes without a load a tier is unknown
    again; that is what gives a tier another chance that was once found too slow to load from.

    Parameters
    ----------
    half_lives
        Levels whose knowledge fades by half in another time, in seconds: a network is slow for moments only.
    """

    def __init__(self, half_lives: Mapping[int, float] | None = None) -> None:
        self._half_lives = half_lives or {}
        self._deliveries: dict[tuple[int, int], _Deliveries] = {}
        self._ended: dict[int, float] = {}

    def note(self, level: int, nbytes: int, started: float, ended: float) -> None:
        """Learn from one load that has delivered.

        Parameters
        ----------
        level
            Tier the block came from.
        nbytes
            Size of the block, at least 1 byte.
        started, ended
            When reading began (after the wait for room, which is not the tier's fault) and when the block was there,
            in monotonic seconds. Calls may come in another order than the ends they report.
        """
        previous = self._ended.get(level, started)
        self._ended[level] = max(previous, ended)
        kind = (level, nbytes.bit_length())
        found = self._deliveries.get(kind)
        if found is None:
            found = _Deliveries(half_life_s=self._half_lives.get(level, HALF_LIFE_S))
            self._deliveries[kind] = found
        found.add(max(0.0, ended - max(started, previous)), nbytes, ended)

    def latest(self, level: int) -> float:
        """Return when a tier has delivered last, in monotonic seconds; 0 for never."""
        return self._ended.get(level, 0.0)

    def estimate(self, level: int, nbytes: int, now: float) -> Estimate | None:
        """Return what is known of blocks of `nbytes` (at least 1) from a tier, None when that is nothing.

        A size class without samples borrows from the nearest that has some, scaled by bytes; every class of distance
        halves the samples.
        """
        size = nbytes.bit_length()
        for distance in range(_FARTHEST + 1):
            candidates = [
                (found.samples_at(now) * exp2(-distance), found)
                for neighbour in {size - distance, size + distance}
                if (found := self._deliveries.get((level, neighbour))) is not None
            ]
            if candidates:
                samples, found = max(candidates, key=lambda candidate: candidate[0])
                if samples >= _LEAST_SAMPLES:
                    return found.estimate(nbytes, samples, now)
        return None


class PrefillRates:
    """Prefill speed by namespace: the median of the latest 15 samples.

    An engine that pauses between two commits makes a sample that is far too slow, so a mean would be of no use. The
    1024 namespaces that learned last are kept.
    """

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}

    def learn(self, namespace: str, tokens: int, seconds: float) -> None:
        """Note that an engine took `seconds` to compute `tokens`. Samples without tokens or time are ignored."""
        if tokens <= 0 or seconds <= 0.0:
            return
        rates = self._rates.pop(namespace, None)  # put in again at the end: the first is the longest without a sample
        if rates is None:
            rates = deque(maxlen=_PREFILL_SAMPLES)
            if len(self._rates) >= _NAMESPACES:
                del self._rates[next(iter(self._rates))]
        rates.append(tokens / seconds)
        self._rates[namespace] = rates

    def tokens_per_s(self, namespace: str) -> float | None:
        """Return the prefill rate in tokens per second, None for a namespace nothing was learned of."""
        rates = self._rates.get(namespace)
        if rates is None:
            return None
        # Of the two in the middle the faster: pauses only ever make a sample slower.
        return sorted(rates)[len(rates) // 2]
