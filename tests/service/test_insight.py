"""`/v1/insight`: what a daemon says of why prompts were not cached, to whom, and the audits it is told of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest

import tierkv
import tierkv.client
from tests.insight.live.audits import AUDIT, CORRUPT
from tests.service.cli import command
from tests.service.daemon import SPEC, TIERS, Daemon, Raw, chain, eventually, read_back, running, short_directory, store
from tierkv.cache import Chain
from tierkv.errors import InvalidRequest
from tierkv.service.tokens import TokenFile


def beginning_alike(count: int, seed: int = 0) -> Iterator[Chain]:
    """Prompts of eight blocks, six of which are the same."""
    for number in range(count):
        tokens = [*range(seed, seed + 6 * SPEC.block_tokens), *[1000 * number + seed] * 2 * SPEC.block_tokens]
        yield Chain.of(SPEC, tokens)


def work(cache: tierkv.Cache, prompts: Iterator[Chain]) -> None:
    for prompt in prompts:
        hit = read_back(cache, prompt)
        store(cache, prompt, start=hit)


def test_what_a_daemon_has_seen(daemon: Daemon, raw: Raw) -> None:
    with daemon.connect("seen") as cache:
        work(cache, beginning_alike(10))
    status, found, response = raw.request("GET", "/v1/insight")
    assert (status, response.headers["Content-Type"].partition(";")[0]) == (200, "application/json")
    own = found["tenants"]["seen"]
    assert (own["requests"], own["requested_tokens"]) == (10, 10 * 8 * 16)
    assert own["lost_tokens"] == {"new": (8 + 9 * 2) * 16}
    (template,) = (template for template in found["templates"] if template["tenant"] == "seen")
    assert (template["end"], template["requests"], template["model"]) == (6 * 16, 10, SPEC.model)
    assert found["whatif"]["rates"]
    eventually(lambda: raw.request("GET", "/v1/stats")[1]["insight"]["requests"] >= 10)


def test_a_window_counts_what_was_asked_lately(daemon: Daemon, raw: Raw) -> None:
    with daemon.connect("lately") as cache:
        work(cache, beginning_alike(6, seed=3))
        found = cache.insight(3600.0)
    assert found["window_s"] == 3600.0
    assert found["tenants"]["lately"]["requests"] == 6
    assert found["templates"] == []
    whole = raw.request("GET", "/v1/insight")[1]
    assert whole["window_s"] is None
    assert found["since"] >= whole["since"]


@pytest.mark.parametrize("window", ["0", "86401", "1h", "-1", "nan", ""])
def test_a_window_that_is_none_is_refused(raw: Raw, window: str) -> None:
    status, problem, _ = raw.request("GET", f"/v1/insight?window={window}")
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
    assert "window" in problem["detail"]
    assert "seconds" in problem["remedy"]


def test_it_speaks_msgpack_too(raw: Raw) -> None:
    status, answer, _ = raw.request("GET", "/v1/insight", headers={"Accept": "application/msgpack"})
    assert status == 200
    assert msgpack.unpackb(answer["raw"])["enabled"] is True


def test_audits_are_kept_counted_and_raise_the_alarm(daemon: Daemon, raw: Raw) -> None:
    results = [AUDIT.to_dict(), CORRUPT.to_dict(), replace(CORRUPT, verdict="outside").to_dict()]
    assert raw.json("POST", "/v1/insight/audits", {"audits": results}) == (200, {"accepted": 3})
    kept = raw.request("GET", "/v1/insight")[1]["tenants"]["default"]["audits"]
    assert kept["audits"] == {"ok": 1, "outside": 1, "corrupt": 1}
    assert [found["verdict"] for found in kept["last"]] == ["corrupt", "outside"]
    assert kept["worst"]["difference"] == "inf"
    alarm = [line for line in daemon.log.splitlines() if "what the cache served is not what is computed" in line]
    assert len(alarm) == 2
    assert "level=error" in alarm[0]
    assert "verdict=corrupt" in alarm[0]
    eventually(lambda: 'tierkv_insight_audits_total{verdict="corrupt"} 1.0' in text(raw))


def test_a_client_tells_what_its_audits_found(daemon: Daemon) -> None:
    with tierkv.client.connect(daemon.url, tenant="auditor") as cache:
        cache.tell_audits([AUDIT] * 3)
        assert cache.insight()["tenants"]["auditor"]["audits"]["audits"]["ok"] == 3
        with pytest.raises(InvalidRequest):
            cache.tell_audits([AUDIT] * 65)


def text(raw: Raw) -> str:
    return bytes(raw.request("GET", "/metrics")[1]["raw"]).decode()


@pytest.mark.parametrize(
    "audits",
    [
        None,
        {},
        [1],
        [{}],
        [{**AUDIT.to_dict(), "tokens": -1}],
        [{**AUDIT.to_dict(), "tokens": "128"}],
        [{**AUDIT.to_dict(), "verdict": "fine"}],
        [{**AUDIT.to_dict(), "more": 1}],
        [AUDIT.to_dict()] * 65,
    ],
)
def test_what_is_no_audit_is_refused_whole(raw: Raw, audits: Any) -> None:
    def total() -> int:
        kept = raw.request("GET", "/v1/insight")[1]["tenants"].get("default", {}).get("audits")
        return sum(kept["audits"].values()) if kept else 0

    before = total()
    good = [AUDIT.to_dict()] if isinstance(audits, list) else []
    status, problem = raw.json("POST", "/v1/insight/audits", {"audits": [*good, *audits] if good else audits})
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
    assert total() == before


def test_each_tenant_is_shown_its_own_and_operators_all() -> None:
    with short_directory() as directory:
        daemon = Daemon(directory)
        file = TokenFile(daemon.state_dir)
        tokens = {
            name: file.create(tenant, role)  # type: ignore[arg-type]
            for name, tenant, role in (
                ("chat", "chat", "engine"),
                ("look", "chat", "reader"),
                ("batch", "batch", "engine"),
                ("staff", "staff", "operator"),
            )
        }
        try:
            raw = Raw(daemon.start().tcp_port)

            def ask(token: str) -> dict[str, Any]:
                return raw.request("GET", "/v1/insight", headers={"Authorization": f"Bearer {tokens[token]}"})[1]

            def tell(token: str) -> int:
                headers = {"Authorization": f"Bearer {tokens[token]}", "Content-Type": "application/json"}
                body = json.dumps({"audits": [AUDIT.to_dict()]}).encode()
                return raw.request("POST", "/v1/insight/audits", body, headers)[0]

            for token, count in (("chat", 6), ("batch", 5)):
                with tierkv.connect(daemon.url, token=tokens[token]) as cache:
                    cache.register(SPEC)
                    work(cache, beginning_alike(count))
            assert [tell(token) for token in ("chat", "look", "staff")] == [200, 403, 200]
            for token in ("chat", "look"):
                found = ask(token)
                assert set(found["tenants"]) == {"chat"}
                assert (found["requests"], found["whatif"]) == (6, None)
                assert {template["tenant"] for template in found["templates"]} == {"chat"}
                assert "batch" not in json.dumps(found)
            assert ask("batch")["tenants"]["batch"]["audits"] is None
            everything = ask("staff")
            assert everything["requests"] == 11
            assert set(everything["tenants"]) == {"chat", "batch", "staff"}
            assert everything["whatif"] is not None
        finally:
            daemon.destroy()


def test_a_daemon_that_does_not_look() -> None:
    with running({**TIERS, "insight": {"enabled": False}}) as daemon, daemon.connect() as cache:
        raw = Raw(daemon.tcp_port)
        store(cache, chain(3))
        assert read_back(cache, chain(3)) == 3
        found = raw.request("GET", "/v1/insight")[1]
        assert (found["enabled"], found["requests"]) == (False, 0)
        assert raw.request("GET", "/v1/stats")[1]["insight"] is None
        assert raw.json("POST", "/v1/insight/audits", {"audits": []})[0] == 404
        assert "tierkv_insight_requests_total 0.0" in text(raw)


def test_token_ids_are_kept_only_where_text_is_on() -> None:
    for on in (False, True):
        with running({**TIERS, "insight": {"text": on}}) as daemon, daemon.connect():
            raw = Raw(daemon.tcp_port)
            for number in range(8):
                tokens = [70_001] * 3 * SPEC.block_tokens + [80_000 + number] * 2 * SPEC.block_tokens
                assert raw.json("POST", f"/v1/{SPEC.namespace}/acquire", {"tokens": tokens})[0] == 200
            (template,) = raw.request("GET", "/v1/insight")[1]["templates"]
            assert template.get("text") == ([70_001] * 3 * SPEC.block_tokens if on else None)
            assert ("70001" in json.dumps(template)) == on


def test_on_the_command_line(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    with daemon.connect("cli") as cache:
        work(cache, beginning_alike(5, seed=7))
    with command(capfd, TIERKV_URL=daemon.url) as run:
        found = json.loads(run("insight", "--json")[1])
        code, out, _ = run("insight")
        lately = run("insight", "--last", "1h")
        refused = [run("insight", "--last", text) for text in ("soon", "2d", "0s")]
    assert code == 0
    assert lately[0] == 0
    assert "nobody had asked for them before" in lately[1]
    assert "without --last" in lately[1]
    assert [(code, "at most 24h" in error) for code, _, error in refused] == [(2, True)] * 3
    assert found["tenants"]["cli"]["requests"] == 5
    named = next(template["id"] for template in found["templates"] if template["tenant"] == "cli")
    words = ("nobody had asked for them before", named, "0 to 96", "warm", "4 times", "as it is")
    assert all(word in out for word in words), out
    with running({**TIERS, "insight": {"enabled": False}}) as off, command(capfd, TIERKV_URL=off.url) as run:
        assert "insight.enabled is false" in run("insight")[1]
