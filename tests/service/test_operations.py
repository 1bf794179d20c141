"""What operators see: metrics as documented, stats, health, status, and what must never be seen."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tierkv
from tests.service.daemon import (
    PATIENCE_S,
    ROOT,
    SPEC,
    TIERS,
    Daemon,
    Raw,
    chain,
    mode,
    payload,
    read_back,
    running,
    store,
)
from tierkv.core.build import read_secret
from tierkv.errors import InvalidRequest, error_classes
from tierkv.keys import tenant_key

ROW = re.compile(r"\| `(?P<name>tierkv_\w+)` \| (?P<kind>\w+) \| (?:`(?P<label>\w+)`)? ?\| (?P<unit>\w+) \|")


@pytest.fixture
def families(daemon: Daemon, raw: Raw) -> dict[str, Any]:
    """The exposition of a daemon that has done a bit of everything."""
    with daemon.connect() as cache:
        store(cache, chain(4))
        cache.flush()
        read_back(cache, chain(6))
        cache.delete(chain(4))
        write = cache.reserve(chain(1, seed=9))
        text = raw.request("GET", "/metrics")[1]["raw"].decode()
        write.abort()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_document_and_the_exposition_agree(families: dict[str, Any]) -> None:
    documented = {match["name"]: match for match in ROW.finditer((ROOT / "docs" / "metrics.md").read_text())}
    exposed = {name + ("_total" if family.type == "counter" else ""): family for name, family in families.items()}
    assert documented.keys() == exposed.keys()
    for name, family in exposed.items():
        match = documented[name]
        assert match["kind"] == family.type, name
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= ({match["label"]} if match["label"] else set()), name
        assert not (family.samples and match["label"] and not labels), name
        assert name.endswith("_seconds") == (match["unit"] == "seconds") or name.endswith("_seconds_total"), name
        assert ("_bytes" in name) == (match["unit"] == "bytes"), name


def test_labels_take_few_values(families: dict[str, Any]) -> None:
    for family in families.values():
        assert len(family.samples) <= 8, family.name
    text = str([sample.labels for family in families.values() for sample in family.samples])
    assert SPEC.namespace[:8] not in text
    assert "default" not in text


def test_metrics_say_what_stats_say(families: dict[str, Any], daemon: Daemon, raw: Raw) -> None:
    stats = raw.request("GET", "/v1/stats")[1]
    for name, value in stats["counters"].items():
        samples = families[f"tierkv_{name}"].samples
        assert sum(sample.value for sample in samples) == (sum(value.values()) if isinstance(value, dict) else value)
    assert set(stats["tiers"]) == {"warm", "cold"}


def test_stats_are_documented(raw: Raw) -> None:
    document = (ROOT / "docs" / "metrics.md").read_text().partition("## Stats")[2]
    stats = raw.request("GET", "/v1/stats")[1]
    names = [*stats, *stats["tiers"]["warm"], *stats["tiers"]["cold"], *stats["tiers"]["cold"]["segments"][0]]
    assert all(f"`{name}`" in document for name in names), [name for name in names if f"`{name}`" not in document]


def test_health(raw: Raw) -> None:
    assert raw.request("GET", "/healthz")[:2] == (200, {"status": "ok"})


def test_status_on_the_command_line(daemon: Daemon) -> None:
    def status(*options: str) -> str:
        command = [sys.executable, "-m", "tierkv.service", "status", *options]
        environment = {**os.environ, "TIERKV_URL": daemon.tcp_url, "COLUMNS": "100"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=PATIENCE_S, check=True
        )
        return done.stdout

    text = status()
    assert all(word in text for word in ("warm", "cold", "16.0 MiB", "64.0 MiB", "hit rate", "leases 0 read, 0 write"))
    assert set(json.loads(status("--json"))["tiers"]) == {"warm", "cold"}


def test_files_are_for_their_owner_only(daemon: Daemon) -> None:
    assert mode(daemon.socket) == 0o600
    assert [mode(path) for path in daemon.shared_files()] == [0o600]
    assert mode(daemon.state_dir) == 0o700
    assert mode(daemon.state_dir / "secret") == 0o600
    assert len((daemon.state_dir / "secret").read_bytes()) == 32


def test_shared_memory_is_refused_over_tcp(raw: Raw) -> None:
    status, problem, _ = raw.request("GET", "/v1/attach")
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
    assert "Unix socket" in problem["detail"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_shared_memory_is_refused_to_other_users(daemon: Daemon) -> None:
    """Were the socket's mode changed, the arena would still be the owner's."""
    daemon.socket.chmod(0o666)
    daemon.socket.parent.chmod(0o711)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            with tierkv.connect(daemon.url) as cache:
                cache.register(SPEC)
                store(cache, chain(2, seed=3))
                assert read_back(cache, chain(2, seed=3)) == 2  # as HTTP bodies
                try:
                    cache._transport.call("GET", "/v1/attach")  # type: ignore[attr-defined]
                except InvalidRequest:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    daemon.socket.chmod(0o600)


def test_tenants_do_not_see_each_other(daemon: Daemon) -> None:
    with daemon.connect("ann", tcp=True) as ann, daemon.connect("bob", tcp=True) as bob:
        store(ann, chain(2, seed=4))
        assert (ann.lookup(chain(2, seed=4)).blocks, bob.lookup(chain(2, seed=4)).blocks) == (2, 0)
        assert bob.clear(SPEC.namespace) == 0
        assert bob.delete(chain(2, seed=4)) == 0
        assert read_back(ann, chain(2, seed=4)) == 2


def test_logs_hold_no_tokens_keys_hashes_leases_or_payload() -> None:
    """Everything that logs: failing requests, broken HTTP, a corrupt block, full tiers, a restart."""
    secret_tokens = list(range(7_000_001, 7_000_033))
    with running({**TIERS, "warm": {"capacity": "1MiB"}}) as daemon:
        raw = Raw(daemon.tcp_port)
        with daemon.connect("tenant-x") as cache, daemon.connect("tenant-x", tcp=True) as bodies:
            wanted = tierkv.Chain.of(SPEC, secret_tokens)
            write = cache.reserve(wanted)
            write.buffer(0)[:] = payload(wanted, 0)
            read_back(bodies, wanted)
            write.commit([0])
            write.abort()
            for body in (b'{"tokens": [7000001, "7000002"]}', b'{"tokens": 7000001', b"\xc1secret-7000001"):
                for kind in ("application/json", "application/msgpack", "7000001"):
                    raw.request("POST", f"/v1/{SPEC.namespace}/lookup", body, {"Content-Type": kind})
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
            for broken in (
                head + b"Transfer-Encoding: chunked\r\n\r\n7000001!\r\n",
                head + b"X: " + b"7000001" * 2000 + b"\r\n\r\n",
                b"7000001 \xff\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
                    connection.sendall(broken)
                    connection.recv(1000)
            holding = [cache.reserve(chain(200, seed=seed), wait_s=0) for seed in range(2)]
            lease = holding[0].id
            cache.flush()
        daemon.stop()
        daemon.start()
        key = tenant_key(read_secret(daemon.state_dir / "secret"), "tenant-x")
        hidden = [
            "7000001",
            "7000002",
            "tenant-x",
            wanted.hashes[0].hex(),
            repr(wanted.hashes[0])[2:-1],
            lease,
            key.hex(),
            (daemon.state_dir / "secret").read_bytes().hex(),
            repr(payload(wanted, 0)[:8])[2:-1],
        ]
        log = daemon.log + "\n".join(daemon.announced)
        assert "ready on" in log
        assert [item for item in hidden if item in log] == []


def test_the_documents_name_no_option_that_is_not_there() -> None:
    from tests.test_config import settings
    from tierkv.config import Config

    known = settings(Config)
    for name in ("operations.md", "wire.md", "metrics.md"):
        text = Path(ROOT / "docs" / name).read_text()
        for mentioned in re.findall(r"`((?:hot|warm|cold|limits)\.[a-z_]+)`", text):
            assert mentioned in known, (name, mentioned)


def test_every_exit_code_is_documented() -> None:
    table = re.findall(r"^\| (\d+) \| ", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert {int(code) for code in table} == {0, *(cls.exit_code for cls in error_classes().values())}
