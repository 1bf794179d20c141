"""What one sample of a trace, or all of it, says about configurations.

Every block has the room of a full one. Tokens of a sampled block count as often as the block stands for others, so sums
over a sample are estimates without a bias (Horvitz and Thompson, 1952).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, groupby

from tierkv.insight.miniature import MiniatureCache, MiniatureDisk, use_both
from tierkv.insight.plan.question import Question, Setup
from tierkv.insight.whatif import spans_for
from tierkv.policy import make_policy
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Trace

__all__ = ["Delivered", "Sampler", "replay_exactly"]

Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a configuration gave the requests of a trace.

    Attributes
    ----------
    ram_tokens, disk_tokens
        Tokens from each tier, all requests together.
    shares
        For each request the shares of its tokens that came from memory and from disk.
    """

    ram_tokens: int
    disk_tokens: int
    shares: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sample of one request: blocks and how many each stands for; tokens that the first 0, 1, 2 ... stand for."""

    blocks: tuple[tuple[int, int], ...]
    upto: tuple[int, ...]


class Sampler:
    """Independent samples of one trace, and what they say."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._keys = {
            block: blake2b(block.to_bytes(16, "little", signed=True), digest_size=32).digest()
            for request in trace.requests
            for block in request.blocks
        }
        self._samples: dict[tuple[int, int, int], list[_Sampled]] = {}

    def simulate(self, question: Question, number: int, progress: Progress) -> Mapping[Setup, Delivered]:
        """Return what sample `number` (0 to 31) says about every configuration.

        `progress` is called once for each of them.
        """
        found: dict[Setup, Delivered] = {}
        in_memory = sorted(question.setups(), key=lambda setup: (setup.policy, setup.ram_bytes))
        for (policy, ram_bytes), setups in groupby(in_memory, key=lambda setup: (setup.policy, setup.ram_bytes)):
            group = list(setups)
            capacity = ram_bytes // question.block_bytes
            disks = [setup.disk_bytes // question.block_bytes for setup in group]
            outcomes = self._run(policy, capacity, disks, question.demote_ahead, number)
            for setup, outcome in zip(group, outcomes, strict=True):
                found[setup] = outcome
                progress()
        return found

    def _run(
        self, policy: str, capacity: int, disk_sizes: Sequence[int], demote_ahead: float, number: int
    ) -> list[Delivered]:
        memory: MiniatureCache[int] = MiniatureCache(capacity, make_policy(policy, capacity))
        finders: list[MiniatureCache[int] | MiniatureDisk[int]] = [
            MiniatureDisk(size, memory, demote_ahead) if size else memory for size in disk_sizes
        ]
        disks = [finder for finder in finders if isinstance(finder, MiniatureDisk)]
        sums = [[0, 0] for _ in finders]  # tokens from memory and from disk
        shares: list[list[tuple[float, float]]] = [[] for _ in finders]
        for request in self._sample(capacity, number):
            blocks, upto = request.blocks, request.upto
            whole = upto[-1] or 1
            near = [block in memory for block, _ in blocks] if disks else []
            for finder, total, share in zip(finders, sums, shares, strict=True):
                run = finder.run(blocks)
                hit = from_ram = upto[run]
                if finder is not memory:
                    from_ram = sum(upto[depth + 1] - upto[depth] for depth in range(run) if near[depth])
                total[0] += from_ram
                total[1] += hit - from_ram
                share.append((from_ram / whole, (hit - from_ram) / whole))
            use_both(memory, disks, blocks)
        return [Delivered(ram, disk, tuple(each)) for (ram, disk), each in zip(sums, shares, strict=True)]

    def _sample(self, smallest: int, number: int) -> list[_Sampled]:
        spans = spans_for(smallest, byte=number)
        name = spans.narrowest, spans.widest, number
        if name not in self._samples:
            trace, keys = self._trace, self._keys
            self._samples[name] = []
            for request in trace.requests:
                picked = spans.sample([keys[block] for block in request.blocks])
                tokens = (
                    width * (trace.tokens(request, depth + 1) - trace.tokens(request, depth)) for depth, width in picked
                )
                blocks = tuple((request.blocks[depth], width) for depth, width in picked)
                self._samples[name].append(_Sampled(blocks, tuple(accumulate(tokens, initial=0))))
        return self._samples[name]


def replay_exactly(trace: Trace, question: Question, progress: Progress) -> Mapping[Setup, Delivered]:
    """Return what a full replay says about every configuration; `progress` is called once for each of them."""
    found: dict[Setup, Delivered] = {}
    for setup in question.setups():
        memory = MemoryPlan("ram", setup.ram_bytes // question.block_bytes, setup.policy)
        plan = TierPlan((memory,), setup.disk_bytes // question.block_bytes, question.demote_ahead)
        tokens = [(*delivered, 0)[:2] for delivered in replay_tiers(trace, plan).tokens]
        found[setup] = Delivered(
            sum(ram for ram, _ in tokens),
            sum(disk for _, disk in tokens),
            tuple(
                (ram / (request.tokens or 1), disk / (request.tokens or 1))
                for request, (ram, disk) in zip(trace.requests, tokens, strict=True)
            ),
        )
        progress()
    return found
