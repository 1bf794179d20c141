"""Events over HTTP: all of them, in order, to those they are for; and what they add up to."""

import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tierkv
from tests.service.daemon import (
    PATIENCE_S,
    SPEC,
    TIERS,
    Daemon,
    PeakMemory,
    Raw,
    chain,
    eventually,
    read_back,
    running,
    store,
)
from tests.service.listener import Listener, Told, listen, position, refused
from tierkv.cache import Chain
from tierkv.core.trunks import Trunk
from tierkv.service.tokens import TokenFile
from tierkv.wire import GENERATION_HEADER

SMALL = {"warm": {"capacity": "1MiB"}, "cold": {"capacity": "5MiB", "segment": "1MiB"}}


@pytest.fixture
def since(daemon: Daemon) -> str:
    """Asks for the events of one test alone."""
    return f"after={position(daemon.tcp_port)}"


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon that can be stopped."""
    with running() as daemon:
        yield daemon
        assert "Traceback" not in daemon.log


def of_kind(told: list[Told], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in told if event.kind == kind]


def test_what_happens_is_told_in_order(daemon: Daemon) -> None:
    wanted = chain(3)
    with Listener(daemon.tcp_port) as listener, daemon.connect("ann") as cache:
        store(cache, wanted)
        cache.flush()
        read_back(cache, chain(5))
        cache.delete(chain(3))
        cache.reserve(chain(1, seed=1), ttl_s=0.01)
        told = listener.until(lambda event: event.kind == "expired")
    generation = listener.response.headers[GENERATION_HEADER]
    first = int(told[0].id.rpartition("-")[2])
    assert [event.id for event in told] == [f"{generation}-{first + at}" for at in range(len(told))]
    assert {event.data["tenant"] for event in told} == {"ann"}
    assert all(event.kind == event.data["kind"] for event in told)

    (stored,) = of_kind(told, "stored")
    assert stored["namespace"] == SPEC.namespace
    assert stored["details"]["hashes"] == [item.hex() for item in wanted.hashes]
    assert stored["details"]["parents"] == ["0" * 64, *stored["keys"][:2]]
    assert stored["details"]["tiers"] == ["warm"] * 3
    demoted = of_kind(told, "demoted")
    assert {key for event in demoted for key in event["keys"]} == set(stored["keys"])
    assert {event["details"]["move"] for event in demoted} == {"warm>cold"}
    (acquired,) = of_kind(told, "acquired")
    assert acquired["details"]["requested_tokens"] == 80
    assert acquired["details"]["hit_tokens"] == {"warm": 48}
    assert acquired["details"]["missed_blocks"] == {"absent": 2}
    (removed,) = of_kind(told, "removed")
    assert (removed["keys"], removed["details"]) == (stored["keys"][2:], {"reason": "deleted"})
    assert told[-1].data["details"] == {"lease": "write"}


def test_corruption_is_told(daemon: Daemon, since: str) -> None:
    wanted = chain(2, seed=10)
    with daemon.connect() as cache:
        store(cache, wanted)
        with cache.acquire(wanted) as read:
            ref = read.blocks[1]
            segment = daemon.shared_files()[0]
            with segment.open("r+b") as file:
                file.seek(_header_bytes(segment) + ref.offset)
                file.write(b"damage")
            with pytest.raises(tierkv.errors.CorruptBlock):
                read.view(1)
    told = listen(daemon.tcp_port, since, lambda event: event.kind == "removed")
    (corrupt,) = of_kind(told, "corrupt")
    assert corrupt["details"] == {"tier": "warm", "cause": "checksum"}
    assert corrupt["keys"] == of_kind(told, "removed")[0]["keys"]


def _header_bytes(segment: Path) -> int:
    """The segment's header says how long it is: magic, version u32, header size u32."""
    return int.from_bytes(segment.read_bytes()[12:16], "little")


def test_a_reader_that_comes_back_misses_nothing(daemon: Daemon, since: str) -> None:
    wanted = chain(4, seed=20)
    with daemon.connect() as cache:
        store(cache, chain(2, seed=20))
        first = listen(daemon.tcp_port, since, lambda event: event.kind == "stored")[-1]
        read_back(cache, chain(2, seed=20))
        read_back(cache, wanted)
    number = first.id.rpartition("-")[2]
    for query, resumed in ((f"after={first.id}", ""), (f"after={number}", ""), ("after=1", first.id)):
        with Listener(daemon.tcp_port, query, {"Last-Event-ID": resumed} if resumed else {}) as listener:
            told = [listener.next(), listener.next()]
        assert [event.data["details"]["requested_tokens"] for event in told if event] == [32, 64]
    with Listener(daemon.tcp_port, "last=1") as listener:
        latest = listener.next()
        assert latest is not None
        assert latest.data["details"]["requested_tokens"] == 64


def test_only_the_kinds_asked_for(daemon: Daemon, since: str) -> None:
    with daemon.connect() as cache:
        store(cache, chain(2, seed=30))
        read_back(cache, chain(2, seed=30))
        read_back(cache, chain(3, seed=30))
        cache.delete(chain(2, seed=30))
    told = listen(daemon.tcp_port, f"{since}&kinds=missed,removed", lambda event: event.kind == "removed")
    assert [event.kind for event in told] == ["acquired", "removed"]
    assert told[0].data["details"]["missed_blocks"] == {"absent": 1}


@pytest.mark.parametrize(
    "query", ["kinds=stored,other", "kinds=", "format=xml", "format=vllm&kinds=acquired", "after=x-1", "last=-1"]
)
def test_nonsense_is_refused(daemon: Daemon, query: str) -> None:
    status, problem = refused(daemon.tcp_port, query)
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")


def test_a_reader_of_an_earlier_run_is_told_so(own: Daemon) -> None:
    daemon = own
    with Listener(daemon.tcp_port, "stats=1&kinds=stored") as listener:
        assert listener.next() is not None
        assert daemon.stop() == 0  # does not wait for those who only listen
        while listener.next() is not None:
            pass
    daemon.start()
    with Listener(daemon.tcp_port, headers={"Last-Event-ID": listener.id}) as again, daemon.connect() as cache:
        store(cache, chain(1, seed=1))
        told = again.until(lambda event: event.kind == "stored")
    assert (told[0].kind, told[0].data) == ("gap", {"missed": None})
    assert told[-1].id.partition("-")[0] != listener.id.partition("-")[0]


def test_stats_come_with_the_events(daemon: Daemon, raw: Raw) -> None:
    with Listener(daemon.tcp_port, "stats=1&kinds=stored") as listener:
        first, second = listener.next(), listener.next()
    assert first is not None
    assert second is not None
    assert (first.kind, second.kind) == ("stats", "stats")
    assert 0.5 < second.data["uptime_s"] - first.data["uptime_s"] < PATIENCE_S
    assert first.data.keys() == raw.request("GET", "/v1/stats")[1].keys()


def test_tenants_are_told_of_their_own(own: Daemon) -> None:
    daemon = own
    daemon.stop()
    file = TokenFile(daemon.state_dir)
    ann, bob, operator = file.create("ann", "engine"), file.create("bob", "reader"), file.create("ops", "operator")
    daemon.start()
    for tenant, seed in (("ann", 1), ("bob", 2), ("ann", 3)):
        with tierkv.connect(daemon.url, tenant=tenant, token=operator) as cache:
            cache.register(SPEC)
            store(cache, chain(2, seed=seed))

    def bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    for token, told in ((ann, ["ann", "ann"]), (bob, ["bob"]), (operator, ["ann", "bob", "ann"])):
        with Listener(daemon.tcp_port, "after=0&kinds=stored&stats=1", bearer(token)) as listener:
            events = listener.until(lambda event: event.kind == "stats")
        assert [event.data["tenant"] for event in events[:-1]] == told
        assert set(events[-1].data["tenants"]) - {"ops"} == set(told)
        status, answer, _ = Raw(daemon.tcp_port).request("GET", "/v1/trunks", headers=bearer(token))
        assert (status, sorted(trunk["tenant"] for trunk in answer["trunks"])) == (200, sorted(told))

    with Listener(daemon.tcp_port, "stats=1", bearer(bob)) as listener:
        assert listener.next() is not None
        file.revoke(bob.split("_")[1])
        daemon.send(signal.SIGHUP)
        while listener.next() is not None:  # until the daemon ends the stream
            pass


def test_a_mirror_of_the_events_is_the_index() -> None:
    """Through evictions from every tier; in our own words and in vLLM's."""
    with running(SMALL) as daemon:
        with daemon.connect() as cache:
            for seed in range(8):
                store(cache, chain(90, seed=seed))
                cache.flush()
                read_back(cache, chain(30, seed=seed // 2))
            cache.delete(chain(90, seed=7))
            stats = cache.stats()
            assert stats["counters"]["lost_blocks"]["evicted"] > 0
            read_back(cache, chain(1, seed=999))
        native: dict[str, str] = {}
        told = listen(
            daemon.tcp_port, "after=0", lambda event: event.data["details"].get("requested_tokens") == SPEC.block_tokens
        )
        for event in told[:-1]:
            if event.kind == "stored":
                native.update(dict(zip(event.data["keys"], event.data["details"]["hashes"], strict=True)))
            elif event.kind == "removed":
                for key in event.data["keys"]:
                    native.pop(key, None)
        assert len(native) == stats["published_blocks"]

        media: dict[str | None, set[str]] = {"CPU": set(), "DISK": set()}
        last = told[-2].id
        for event in listen(daemon.tcp_port, "after=0&format=vllm", lambda event: event.id == last):
            hashes = set(event.data["block_hashes"])
            assert event.kind == event.data["type"]
            if event.kind == "BlockStored":
                assert event.data["block_size"] == SPEC.block_tokens
                assert len(event.data["parent_block_hash"] or "0" * 64) == 64
                media[event.data["medium"]] |= hashes
            else:
                assert event.kind == "BlockRemoved"
                for medium in [event.data["medium"]] if event.data["medium"] else list(media):
                    media[medium] -= hashes
        assert set().union(*media.values()) == set(native)


def test_the_hit_rate_of_the_events_is_that_of_the_counters(own: Daemon) -> None:
    """Also when clients hang up before they are answered, and ask again."""
    daemon = own
    with daemon.connect() as cache:
        store(cache, chain(4))
        cache.flush()
    daemon.stop()  # what is asked for first comes from disk
    daemon.start()
    raw = Raw(daemon.tcp_port)
    with daemon.connect("ann") as ann, daemon.connect() as cache:
        for blocks in (4, 6, 2, 4):
            read_back(cache, chain(blocks))
            read_back(ann, chain(blocks))
        hashes = b"".join(chain(5).hashes).hex()
        body = f'{{"hashes": "{hashes}", "wait_s": 5, "ttl_s": 0.2}}'.encode()
        head = f"POST /v1/{SPEC.namespace}/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            read_back(cache, chain(5))
        cache.read_into(chain(4), 0, memoryview(bytearray(SPEC.layout().nbytes)))
    with daemon.connect("last") as cache:
        read_back(cache, chain(1, seed=77))
    told = listen(daemon.tcp_port, "after=0&kinds=acquired", lambda event: event.data["tenant"] == "last")
    stats = raw.request("GET", "/v1/stats")[1]
    families = {f.name: f for f in text_string_to_metric_families(raw.request("GET", "/metrics")[1]["raw"].decode())}

    requested, hits, missed = 0, Counter[str](), Counter[str]()
    for event in told:
        requested += event.data["details"]["requested_tokens"]
        hits.update(event.data["details"]["hit_tokens"])
        missed.update(event.data["details"]["missed_blocks"])
    counters = stats["counters"]
    assert hits["cold"] > 0
    assert hits["warm"] > 0
    assert (requested, dict(hits), dict(missed)) == (
        counters["requested_tokens"],
        counters["hit_tokens"],
        counters["missed_blocks"],
    )
    assert len([event for event in told if event.data["details"]["requested_tokens"]]) >= 29
    samples = {sample.labels["tier"]: sample.value for sample in families["tierkv_hit_tokens"].samples}
    assert samples == hits
    assert families["tierkv_requested_tokens"].samples[0].value == requested


def test_readers_that_take_nothing_are_cut() -> None:
    """They cost memory for what the daemon has made to be sent, not for all that happens."""
    readers = 16
    with running({**TIERS, "limits": {"idle": "500ms"}}) as daemon:
        with daemon.connect() as cache:
            for seed in range(16):
                store(cache, chain(100, seed=seed))
            cache.flush()
        raw = Raw(daemon.tcp_port)
        assert daemon.process is not None
        memory = PeakMemory(daemon.process.pid)
        with ExitStack() as stack:
            for _ in range(readers):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(daemon.socket))
                connection.sendall(b"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: raw.request("GET", "/v1/stats")[1]["http"]["cut"].get("answer", 0) == readers)
        assert memory.growth() < readers << 20
        assert "Traceback" not in daemon.log


def test_trunks_and_their_branches(daemon: Daemon, raw: Raw) -> None:
    """Two conversations with the same beginning: a trunk of what they share, and a branch of each."""
    system = np.arange(4 * 16)
    talks = [np.concatenate([system, np.full(3 * 16, number)]) for number in (7, 8)]
    with daemon.connect("cleo") as cache, daemon.connect("dan") as other:
        for tokens in talks:
            of = Chain.of(SPEC, tokens)
            read_back(cache, of)
            store(cache, of)
        for _ in range(2):
            read_back(cache, Chain.of(SPEC, talks[0]))
        store(other, chain(1))
    trunks = raw.request("GET", "/v1/trunks")[1]["trunks"]
    assert set(trunks[0]) == {*Trunk.__slots__, "model", "tokens", "unused_s"} - {"used"}
    shared, used, new = (trunk for trunk in trunks if trunk["tenant"] == "cleo")
    assert (shared["depth"], shared["blocks"], shared["branches"], shared["uses"]) == (0, 4, 2, 3)
    assert (shared["parent"], shared["model"], shared["tokens"]) == (None, "model", 64)
    assert (used["parent"], used["depth"], used["blocks"], used["uses"]) == (shared["id"], 4, 3, 2)
    assert (new["parent"], new["blocks"], new["uses"], new["unused_s"]) == (shared["id"], 3, 0, None)
    assert 0 <= used["unused_s"] < PATIENCE_S
    assert [trunk["tenant"] for trunk in trunks].count("dan") == 1
    assert len(raw.request("GET", "/v1/trunks?most=1")[1]["trunks"]) == 1
    assert raw.request("GET", "/v1/trunks?most=10001")[0] == 400
