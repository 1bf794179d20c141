"""Which daemons hold how much of a prompt, asked by the client library."""

import signal
from collections.abc import Iterator

import pytest

import tierkv
from tests.service.cluster.nodes import cluster, fill
from tests.service.daemon import PATIENCE_S, SPEC, Daemon, chain
from tierkv import aio
from tierkv.connected import ConnectedCache, Where
from tierkv.errors import InvalidRequest, NotFound

PROMPT = chain(6, seed=1)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Daemon]]:
    with cluster(3) as daemons:
        fill(daemons[0], PROMPT, 2)
        fill(daemons[2], PROMPT, 5)
        yield daemons


def in_short(found: Where) -> list[tuple[str | None, str | None, int, str | None]]:
    return [(hit.node, hit.url, hit.blocks, hit.error) for hit in found.nodes]


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("fail_open", [False, True])
def test_every_daemon_says_what_it_holds(three: list[Daemon], tcp: bool, fail_open: bool) -> None:
    n0, n1, n2 = three
    with tierkv.connect(n1.tcp_url if tcp else n1.url, fail_open=fail_open, extra_s=PATIENCE_S) as cache:
        cache.register(SPEC)
        found = cache.where(PROMPT, wait_s=PATIENCE_S)
    assert found.blocks == 6
    assert in_short(found) == [("n2", n2.tcp_url, 5, None), ("n0", n0.tcp_url, 2, None), ("n1", None, 0, None)]
    best = found.nodes[0]
    assert (best.tokens, sum(best.tokens_by_tier.values()), best.detail, best.age_s) == (80, 80, "", 0.0)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_the_same_for_asyncio(three: list[Daemon], fail_open: bool) -> None:
    cache = await aio.connect(three[0].url, fail_open=fail_open, extra_s=PATIENCE_S)
    async with cache:
        await cache.register(SPEC)
        found = await cache.where(PROMPT, wait_s=PATIENCE_S)
    assert [hit.node for hit in found.nodes] == ["n2", "n0", "n1"]


def test_a_frozen_daemon_is_late_and_holds_nobody_up(three: list[Daemon]) -> None:
    with tierkv.connect(three[0].url) as cache:
        cache.register(SPEC)
        assert cache.where(PROMPT, wait_s=PATIENCE_S).nodes[0].node == "n2"
        three[2].send(signal.SIGSTOP)
        try:
            late = cache.where(PROMPT, wait_s=0.2).nodes[-1]
        finally:
            three[2].send(signal.SIGCONT)
    assert (late.node, late.error, late.blocks) == ("n2", "late", 0)
    assert late.age_s is not None
    assert late.age_s > 0.0


def test_a_daemon_that_was_restarted_is_told_of_the_namespace() -> None:
    with cluster(1) as (one,), one.connect() as cache:
        assert isinstance(cache, ConnectedCache)
        one.stop()
        one.start()
        assert in_short(cache.where(PROMPT)) == [("n0", None, 0, None)]


def test_mistakes_are_said_to_be(three: list[Daemon]) -> None:
    with tierkv.connect(three[0].url) as cache:
        with pytest.raises(NotFound):
            cache.where(tierkv.Chain("0" * 64, PROMPT.hashes))
        cache.register(SPEC)
        for wait_s in (-1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidRequest):
                cache.where(PROMPT, wait_s=wait_s)
