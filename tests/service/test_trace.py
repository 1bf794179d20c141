"""`tierkv trace` and what it stands on: a recording replays as the traffic that was recorded would have."""

from __future__ import annotations

import json
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.service.cli import command
from tests.service.daemon import ROOT, SPEC, TIERS, Daemon, Raw, chain, eventually, running
from tests.traces import TRACES, block_key, needs_traces
from tierkv.cache import Cache, Chain
from tierkv.client.transport import Transport
from tierkv.errors import Unavailable
from tierkv.replay.trace import Request, Trace, read_trace
from tierkv.service.recording import Recorded, _Follower, record
from tierkv.service.tokens import Role, TokenFile
from tierkv.spec import KVGroup, KVSpec

BLOCK_TOKENS = 512
SMALL = KVSpec("model", "weights", "uint8", BLOCK_TOKENS, (KVGroup((0,), "full", 1, 1),))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({**TIERS, "insight": {"enabled": False}}) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log


def whole_blocks(trace: Trace) -> Trace:
    """The trace as a daemon is told of it: without blocks that are not full."""
    requests = []
    for request in trace.requests:
        blocks = request.tokens // trace.block_tokens
        requests.append(
            Request(request.timestamp, blocks * trace.block_tokens, request.blocks[:blocks], request.session)
        )
    return Trace(tuple(request for request in requests if request.blocks), trace.block_tokens)


def conversations() -> Trace:
    """Made up: conversations that grow and share a beginning."""
    chance, requests, ids = random.Random(3), [], iter(range(10, 10**6))
    histories = [[1, 2, 3, *(next(ids) for _ in range(chance.randrange(4)))] for _ in range(40)]
    for at in range(400):
        history = chance.choice(histories)
        session = histories.index(history)
        history.extend(next(ids) for _ in range(chance.randrange(3)))
        tokens = len(history) * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS)
        requests.append(Request(at * 10, tokens, tuple(history), session))
    return Trace(tuple(requests), BLOCK_TOKENS)


def write(trace: Trace, path: Path) -> Path:
    rows = [{"timestamp": r.timestamp, "input_length": r.tokens, "hash_ids": r.blocks} for r in trace.requests]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drive(url: str, trace: Trace, tenant: str = "default") -> None:
    with tierkv.connect(url, tenant=tenant) as cache:
        cache.register(SMALL)
        for request in trace.requests:
            blocks = tuple(map(block_key, request.blocks[: request.tokens // BLOCK_TOKENS]))
            session = "" if request.session is None else f"conversation {request.session}"
            with cache.acquire(Chain(SMALL.namespace, blocks), wait_s=0.0, session=session):
                pass


def started(url: str, output: Path) -> Callable[[], Recorded]:
    """Begin a recording; return a function that ends it and returns what it says."""
    over = threading.Event()
    found: list[Recorded] = []
    thread = threading.Thread(target=lambda: found.append(record(url, output, None, over.is_set, interval_s=0.01)))
    thread.start()
    eventually(output.exists)

    def end() -> Recorded:
        over.set()
        thread.join(30)
        return found[0]

    return end


def replayed(run: Callable[..., tuple[int, str, str]], path: Path, blocks: int, policy: str) -> dict[str, Any]:
    options = ("--capacity-blocks", blocks, "--policy", policy, "--block-tokens", BLOCK_TOKENS, "--json")
    code, out, _ = run("replay", path, *options)
    assert code == 0
    figures: dict[str, Any] = json.loads(out)
    del figures["refs_per_s"]
    return figures


@pytest.mark.parametrize("source", ["made up", pytest.param("public", marks=needs_traces)])
def test_a_recording_replays_as_the_original(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str
) -> None:
    trace = conversations()
    if source == "public":
        whole = read_trace(TRACES / "mooncake_conversation_first1000.jsonl.gz")
        trace = Trace(whole.requests[:400], whole.block_tokens)
    asked = whole_blocks(trace)
    original = write(asked, tmp_path / "original.jsonl")
    end = started(daemon.url, tmp_path / "recorded.jsonl")
    drive(daemon.url, trace)
    assert end() == Recorded(len(asked.requests), 0, 0)
    with command(capfd) as run:
        code, out, err = run("trace", "export", tmp_path / "recorded.jsonl", "-o", tmp_path / "exported.jsonl")
        assert (code, err) == (0, "")
        assert f"{len(asked.requests)} requests" in out
        for share in (0.02, 0.1, 0.5):
            blocks = int(share * asked.unique_blocks())
            for policy in ("lru", "slru"):  # aslru tries itself on some of the blocks, chosen by their names
                before = replayed(run, original, blocks, policy)
                assert before["hit_tokens"] > 0
                assert replayed(run, tmp_path / "recorded.jsonl", blocks, policy) == before
                assert replayed(run, tmp_path / "exported.jsonl", blocks, policy) == before
    exported = read_trace(tmp_path / "exported.jsonl", BLOCK_TOKENS)
    assert exported.unique_blocks() == asked.unique_blocks()
    assert max(max(request.blocks) for request in exported.requests) == asked.unique_blocks() - 1
    sessions: dict[Any, Any] = {}
    for made, given in zip(exported.requests, asked.requests, strict=True):
        assert made.tokens == given.tokens
        assert sessions.setdefault(given.session, made.session) == made.session
    assert len(set(sessions.values())) == len(sessions)


def test_the_daemon_writes_the_same_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace, directory = whole_blocks(conversations()), tmp_path / "trace"
    with running({**TIERS, "insight": {"trace": str(directory), "trace_size": "64MiB"}}) as daemon:
        drive(daemon.url, trace, "ada-lovelace")
        assert daemon.stop() == 0
        daemon.start()
        drive(daemon.url, trace, "ada-lovelace")
        assert daemon.stop() == 0
        secret = (daemon.state_dir / "secret").read_bytes()
        assert "Traceback" not in daemon.log
    files = sorted(directory.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]
    text = b"".join(path.read_bytes() for path in files)
    hashes = [block_key(block).hex().encode() for block in trace.requests[0].blocks]
    for told in (b"ada-lovelace", b"conversation", SMALL.namespace.encode(), secret, secret.hex().encode(), *hashes):
        assert told not in text
    with command(capfd) as run:
        assert run("trace", "export", directory, "--output", tmp_path / "out.jsonl.gz", "--no-sessions")[0] == 0
    exported = read_trace(tmp_path / "out.jsonl.gz")
    assert [r.tokens for r in exported.requests] == [r.tokens for r in trace.requests] * 2
    assert all(request.session is None for request in exported.requests)
    assert exported.unique_blocks() == trace.unique_blocks(), "a block keeps its name over a restart"


def test_what_a_daemon_has_recorded_since_its_restart_is_caught_up_with(tmp_path: Path) -> None:
    with running({**TIERS, "insight": {"trace": str(tmp_path / "trace")}}) as daemon, daemon.connect() as cache:
        for blocks in (1, 2, 3):
            ask(cache, blocks)
        transport = Transport(daemon.url, None, 5.0)
        with (tmp_path / "recorded").open("wb") as file:
            follower = _Follower(transport, file, "0123456789abcdef", 2)  # what it has is of an earlier run
            while follower.take():
                pass
        transport.close()
        assert follower.done == Recorded(3, 0, 1)


def test_a_recording_goes_on_after_a_restart(tmp_path: Path) -> None:
    with running() as daemon:
        end = started(daemon.url, tmp_path / "recorded.jsonl")
        recorded = tmp_path / "recorded.jsonl"

        def lines() -> int:
            return recorded.read_bytes().count(b"\n")

        with daemon.connect() as cache:
            ask(cache, 3)
        eventually(lambda: lines() == 1)
        daemon.kill()
        daemon.start()
        with daemon.connect() as cache:
            # Nobody knows when the recording has come back: asked for until it has.
            eventually(lambda: ask(cache, 4) and lines() >= 2)
        done = end()
    assert done.requests == lines()
    assert done.gaps >= 1


def ask(cache: Cache, blocks: int) -> bool:
    with cache.acquire(chain(blocks), wait_s=0.0):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording(daemon: Daemon, tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "recorded.jsonl"
    arguments = ["trace", "record", "--url", daemon.url, "-o", str(output)]
    recording = subprocess.Popen([sys.executable, "-m", "tierkv.service", *arguments], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        eventually(output.exists)
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
        with daemon.connect() as cache:
            ask(cache, 2)
        eventually(lambda: output.stat().st_size > 0)
        recording.send_signal(number)
        out, _ = recording.communicate(timeout=30)
    finally:
        recording.kill()
    assert recording.returncode == 0
    assert out.decode().startswith("1 requests in")


def test_a_recording_ends_by_itself(daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with command(capfd, TIERKV_URL=daemon.url) as run:
        assert run("trace", "record", "--output", tmp_path / "a", "--seconds", 0.1)[:2] == (
            0,
            f"0 requests in {tmp_path / 'a'}\n",
        )
        code, _, err = run("trace", "record", "--output", tmp_path / "a", "--seconds", 0.1)
        assert code != 0
        assert "exists" in err


def test_without_a_daemon_there_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        record(f"unix://{tmp_path / 'nobody'}", tmp_path / "out", 1.0, lambda: False)
    assert not (tmp_path / "out").exists()


def test_a_tenant_follows_its_own_requests_and_an_operator_all() -> None:
    with running() as daemon:
        file = TokenFile(daemon.state_dir)
        roles: dict[str, Role] = {"ada": "reader", "bob": "engine", "op": "operator"}
        tokens = {name: file.create(name, role) for name, role in roles.items()}
        daemon.send(signal.SIGHUP)
        raw = Raw(daemon.tcp_port)

        def trace(name: str, after: int | None = None) -> dict[str, Any]:
            path = "/v1/trace" if after is None else f"/v1/trace?after={after}"
            return raw.request("GET", path, None, {"Authorization": f"Bearer {tokens[name]}"})[1]

        eventually(lambda: raw.request("GET", "/v1/trace")[0] == 401)
        start = trace("op")["last"]
        with tierkv.connect(daemon.url, token=tokens["bob"]) as cache:
            cache.register(SPEC)
            ask(cache, 3)
        assert [len(row["hash_ids"]) for row in trace("op", start)["rows"]] == [3]
        assert len(trace("bob", start)["rows"]) == 1
        assert trace("ada", start)["rows"] == []


def test_what_cannot_be_asked_for(raw: Raw) -> None:
    for after in ("-1", "x", "1" * 19, ""):
        status, problem, _ = raw.request("GET", f"/v1/trace?after={after}")
        assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
