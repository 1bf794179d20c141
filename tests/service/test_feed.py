"""What one reader of the events is sent, whatever its pace."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tierkv.config import parse_config
from tierkv.core.build import build_engine
from tierkv.core.engine import Engine
from tierkv.core.events import EventLog
from tierkv.service import feed
from tierkv.service.feed import Feed, FeedFormat, Selection

EVERYTHING = Selection(frozenset({"acquired", "removed"}), None)
GENERATION = "00000000000000aa"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = build_engine(parse_config({"warm": {"capacity": "1MiB"}}))
    yield engine
    engine.close()


def remove(engine: Engine, number: int, tenant: bytes = b"") -> None:
    with engine._state.lock:
        engine._state.ledger.events.record("removed", tenant, b"", [bytes([number]) * 32], {"reason": "evicted"})


def follow(engine: Engine, selection: Selection = EVERYTHING, start: int = 0) -> AsyncIterator[bytes]:
    return Feed(engine, GENERATION, selection, start, restarted=False, stats=None).chunks()


def data(chunk: bytes) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in chunk.decode().splitlines() if line.startswith("data: ")]


async def test_a_reader_that_falls_behind_is_told_how_much_it_misses(engine: Engine) -> None:
    engine._state.ledger.events = EventLog(most=8)  # of one key each: four events
    chunks = follow(engine)
    assert await anext(chunks) == f"retry: 2000\nid: {GENERATION}-0\n\n".encode()
    for number in range(3):
        remove(engine, number)
    assert len(data(await anext(chunks))) == 3
    for number in range(10):
        remove(engine, number)
    gap, *rest = data(await anext(chunks))
    assert gap == {"missed": 6}
    assert [event["keys"] for event in rest] == [[f"{number:02x}" * 32] for number in range(6, 10)]


async def test_a_quiet_stream_says_that_it_lives_and_where_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)
    remove(engine, 0)
    chunks = follow(engine, Selection(frozenset({"acquired"}), None))
    await anext(chunks)
    assert await anext(chunks) == f": still here\nid: {GENERATION}-1\n\n".encode()


async def test_an_event_ends_the_waiting(engine: Engine) -> None:
    chunks = follow(engine)
    await anext(chunks)
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    await asyncio.to_thread(remove, engine, 1)
    assert data(await asyncio.wait_for(waiting, 10))[0]["keys"] == ["01" * 32]


async def test_a_long_log_is_sent_in_order(engine: Engine) -> None:
    for number in range(1000):
        remove(engine, number % 256)
    chunks = follow(engine)
    await anext(chunks)
    found: list[dict[str, object]] = []
    while len(found) < 1000:
        found += data(await anext(chunks))
    assert [event["keys"] for event in found] == [[f"{number % 256:02x}" * 32] for number in range(1000)]


async def test_strangers_events_are_passed_over(engine: Engine) -> None:
    ann = engine.tenant("ann")
    for tenant in (ann.id, engine.tenant("bob").id, b"", ann.id):
        remove(engine, 1, tenant)
    chunks = follow(engine, Selection(frozenset({"removed"}), ann))
    await anext(chunks)
    assert [event["tenant"] for event in data(await anext(chunks))] == ["ann", "ann"]


@pytest.mark.parametrize("form", ["tierkv", "vllm"])
async def test_the_last_message_of_an_event_carries_its_id(engine: Engine, form: FeedFormat) -> None:
    """A commit that forks makes two of vLLM's events: who has seen the first only gets both again."""
    keys = [bytes([number]) * 32 for number in range(1, 5)]
    details = {
        "hashes": keys,
        "parents": [bytes(32), keys[0], keys[0], keys[2]],
        "depths": [0, 1, 1, 2],
        "groups": [0] * 4,
        "tiers": ["warm"] * 4,
    }
    with engine._state.lock:
        engine._state.ledger.events.record("stored", b"", b"", keys, details)
    chunks = follow(engine, Selection(frozenset({"stored"}), None, form))
    await anext(chunks)
    messages = (await anext(chunks)).decode().strip().split("\n\n")
    assert [message.startswith("id: ") for message in messages] == ([True] if form == "tierkv" else [False, True])
    if form == "vllm":
        runs = [json.loads(message.rpartition("data: ")[2]) for message in messages]
        assert [run["parent_block_hash"] for run in runs] == [None, "01" * 32]
        assert [len(run["block_hashes"]) for run in runs] == [2, 2]


async def test_routers_are_not_told_of_the_shared_tier(engine: Engine) -> None:
    for tier in ("shared", "warm"):
        with engine._state.lock:
            damage = {"tier": tier, "cause": "checksum"}
            engine._state.ledger.events.record("corrupt", b"", b"", [bytes(32)], damage)
    chunks = follow(engine, Selection(frozenset({"corrupt"}), None, "vllm"))
    await anext(chunks)
    assert [told["medium"] for told in data(await anext(chunks))] == ["CPU"]
