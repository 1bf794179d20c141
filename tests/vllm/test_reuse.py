"""What is reused, and that nobody can tell from the answers: across the engine's own cache, engines, and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.daemon import Daemon, running
from tests.vllm.engine import PATIENT, Ask, Engine, engine, eventually, prompt, tierkv_config

BLOCK_TOKENS = 64
TIERS = {"warm": {"capacity": "64MiB"}, "cold": {"capacity": "256MiB", "segment": "16MiB"}}


@dataclass
class World:
    """A daemon, two engines that share it, and one that does not know it."""

    daemon: Daemon
    one: Engine
    two: Engine
    plain: Engine

    def hit_tokens(self) -> int:
        with self.daemon.connect() as cache:
            return sum(cache.stats()["counters"]["hit_tokens"].values())


@pytest.fixture(scope="module", params=[("llama", 0.0), ("gemma", 1.0)], ids=["llama", "gemma, computing once"])
def world(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    plain: Callable[[str], Engine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    name, compute_s = request.param
    model = models[name]
    logs = tmp_path_factory.mktemp("logs")
    with (
        running(TIERS) as daemon,
        engine(model, logs / "one", tierkv_config(daemon.url, compute_s=compute_s, **PATIENT)) as one,
        engine(model, logs / "two", tierkv_config(daemon.url, compute_s=compute_s, **PATIENT)) as two,
    ):
        yield World(daemon, one, two, plain(name))


def cachable(ask: Ask) -> int:
    """Tokens that can be reused: whole blocks, and never the last token."""
    return (len(ask.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def reuse_all(engine: Engine, ask: Ask, want: tuple[int, ...]) -> None:
    """Ask until everything comes from outside, for blocks are stored behind the answer's back; it is always right."""

    def reused() -> bool:
        engine.reset()
        answer = engine.run([ask]).answers[0]
        assert answer.tokens == want
        assert answer.cached <= cachable(ask)
        return answer.cached == cachable(ask)

    eventually(reused)


@pytest.mark.parametrize("length", [64, 65, 127, 300, 1000])
def test_answers_are_the_same_cold_reused_and_loaded(world: World, length: int) -> None:
    ask = Ask(prompt(length, seed=length))
    (want,) = world.plain.run([ask]).tokens
    cold = world.one.run([ask]).answers[0]
    assert (cold.tokens, cold.cached) == (want, 0)
    local = world.one.run([ask]).answers[0]
    assert local.tokens == want
    reuse_all(world.one, ask, want)


def test_a_longer_prompt_begins_with_what_a_shorter_one_left(world: World) -> None:
    stem = prompt(300, seed=1)
    short, long = Ask(stem), Ask(prompt(900, seed=2, after=stem))
    want_short, want_long = world.plain.run([short, long]).tokens
    reuse_all(world.one, short, want_short)
    world.one.reset()
    answer = world.one.run([long]).answers[0]
    assert (answer.tokens, answer.cached) == (want_long, 256)


def test_what_the_engine_still_has_is_not_loaded_again(world: World) -> None:
    stem = prompt(500, seed=3)
    long = Ask(prompt(900, seed=4, after=stem))
    (want,) = world.plain.run([long]).tokens
    reuse_all(world.one, long, want)
    world.one.reset()
    world.one.run([Ask(stem)])
    before = world.one.external()
    answer = world.one.run([long]).answers[0]
    assert (answer.tokens, answer.cached) == (want, 896)
    # The engine has 480 of its own, which end inside a block of 64 tokens.
    assert world.one.external() - before == 896 - 480


def test_generated_tokens_are_reused_too(world: World) -> None:
    """As in a conversation: the next turn begins with the answer of the last."""
    first = Ask(prompt(200, seed=5), max_tokens=120)
    (said,) = world.plain.run([first]).tokens
    assert world.one.run([first]).tokens == [said]
    second = Ask([*first.tokens, *said, *prompt(30, seed=6)])
    (want,) = world.plain.run([second]).tokens

    def reused() -> bool:
        world.one.reset()
        answer = world.one.run([second]).answers[0]
        assert answer.tokens == want
        return answer.cached >= 256

    eventually(reused)


def test_another_engine_reuses_what_one_stored(world: World) -> None:
    ask = Ask(prompt(700, seed=7))
    (want,) = world.plain.run([ask]).tokens
    reuse_all(world.one, ask, want)
    answer = world.two.run([ask]).answers[0]
    assert (answer.tokens, answer.cached) == (want, 640)


def test_two_engines_with_the_same_cold_prompts_at_once(world: World) -> None:
    stem = prompt(400, seed=8)
    asks = [Ask(prompt(600, seed=80 + n, after=stem)) for n in range(12)]
    want = world.plain.run(asks).tokens
    world.one.begin(asks)
    world.two.begin(asks)
    assert world.one.finish().tokens == want
    assert world.two.finish().tokens == want


def test_another_salt_finds_nothing(world: World) -> None:
    mine, yours = (Ask(prompt(500, seed=9), salt=salt) for salt in ("mine", "yours"))
    (want,) = world.plain.run([Ask(mine.tokens)]).tokens
    reuse_all(world.one, mine, want)
    for stranger in (yours, Ask(mine.tokens)):
        for other in (world.one, world.two):
            other.reset()
            before = other.external()
            answer = other.run([stranger]).answers[0]
            assert answer.tokens == want
            if other is world.one:  # what it computed is stored, and its neighbour may have it
                assert (answer.cached, other.external() - before) == (0, 0)
    reuse_all(world.two, mine, want)


def test_engine_and_daemon_count_the_same_tokens(world: World) -> None:
    asks = [Ask(prompt(length, seed=10 + length)) for length in (100, 500, 900)]
    for ask, want in zip(asks, world.plain.run(asks).tokens, strict=True):
        reuse_all(world.one, ask, want)
    world.one.reset()
    served, counted = world.hit_tokens(), world.one.external()
    world.one.run(asks)
    assert world.one.external() - counted == sum(map(cachable, asks)) == 64 + 448 + 896
    assert world.hit_tokens() - served == sum(map(cachable, asks))


def test_a_restarted_daemon_serves_from_its_disk(world: World) -> None:
    ask = Ask(prompt(800, seed=11))
    (want,) = world.plain.run([ask]).tokens
    reuse_all(world.one, ask, want)
    assert world.daemon.stop() == 0
    world.daemon.start()
    reuse_all(world.one, ask, want)
    reuse_all(world.two, ask, want)
    with world.daemon.connect() as cache:
        assert cache.stats()["counters"]["hit_tokens"]["cold"] >= 768


def test_a_reset_of_the_connector_forgets_what_was_stored(world: World) -> None:
    """As after an update of the weights in memory: what was computed before is of no use to this engine any more."""
    ask = Ask(prompt(500, seed=13))
    (want,) = world.plain.run([ask]).tokens
    reuse_all(world.one, ask, want)
    world.one.reset(external=True)
    assert world.one.run([ask]).answers[0].cached == 0
    reuse_all(world.one, ask, want)  # what it has computed since
    world.two.reset()
    answer = world.two.run([ask]).answers[0]
    assert (answer.tokens, answer.cached) == (want, 448)


def test_engines_at_rest_hold_no_leases(world: World) -> None:
    with world.daemon.connect() as cache:
        eventually(lambda: not any(cache.stats()["leases"].values()))


def test_an_engine_that_is_killed_leaves_its_blocks_to_others(world: World) -> None:
    """The last of its module: it costs an engine."""
    stem = prompt(600, seed=12)
    asks = [Ask(prompt(700, seed=120 + n, after=stem), max_tokens=200) for n in range(8)]
    want = world.plain.run(asks).tokens
    world.one.begin(asks, pause=0)
    world.one.resume()
    world.one.kill()
    assert world.two.run(asks).tokens == want
    reuse_all(world.two, Ask(asks[0].tokens, 200), want[0])
