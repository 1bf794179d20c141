"""The observer of a real cache: everything is accounted for, nobody is held up, and tenants stay apart."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.insight.live.audits import AUDIT, CORRUPT
from tests.insight.live.support import BLOCK_TOKENS, SPEC, WARM_BLOCKS, accounted, numbered, observed
from tests.traces import block_key
from tierkv.core.acquiring import Terms
from tierkv.core.observing import SeenRequest
from tierkv.core.steps import run
from tierkv.insight.live import collector

TENANTS = ("ann", "bob", "cyd")


@pytest.mark.parametrize("seed", range(3))
def test_hit_and_lost_tokens_are_what_was_requested_whatever_happens(tmp_path: Any, seed: int) -> None:
    """A long random run on a cache far too small, of tenants that also delete, clear and do not wait."""
    settings = {
        "state_dir": str(tmp_path),
        "cold": {"capacity": "6MiB", "segment": "1MiB", "codec": "raw", "sync": "none"},
        "tenants": {"ann": {"scope": "both"}, "bob": {"scope": "both"}},
    }
    choose = random.Random(seed)
    with observed(settings, templates=5) as seen:
        for number in range(150):
            tenant = choose.choice(TENANTS)
            prompt = [*range(choose.randrange(40)), *(choose.randrange(3) for _ in range(choose.randrange(100)))]
            prompt += [1000 * number + at for at in range(choose.randrange(40))]
            seen.ask(
                prompt,
                tenant,
                store=choose.random() < 0.9,
                wait_s=choose.choice((0.0, 0.001, 5.0)),
                max_blocks=choose.choice((None, len(prompt) // 2)),
                prefill_tokens_per_s=choose.choice((None, 1e5, 1e9)),
            )
            cache = seen.cache.for_tenant(tenant)
            if choose.random() < 0.05:
                cache.delete(numbered(prompt[: len(prompt) // 2]))
            if choose.random() < 0.02:
                cache.clear(SPEC.namespace)
        report, stats = seen.report(), seen.cache.stats()["counters"]
        assert report["dropped"] == 0
        assert (report["requests"], report["requested_tokens"]) == (stats["acquires"], stats["requested_tokens"])
        assert report["hit_tokens"] == stats["hit_tokens"]
        assert sum(report["lost_tokens"].values()) == BLOCK_TOKENS * sum(stats["missed_blocks"].values())
        parts = [*report["templates"], report["rest"]]
        left = sum(tally["lost_tokens"].get("diverged", 0) for tally in parts)
        assert report["lost_tokens"].get("diverged", 0) == left
        assert sum(tally["lost_tokens"].get("diverged", 0) for tally in report["tenants"].values()) == left
        for tally in (report, *report["tenants"].values(), *parts):
            assert accounted(tally)
        for name in ("requests", "requested_tokens"):
            assert sum(tally[name] for tally in parts) == report[name]
            assert sum(tally[name] for tally in report["tenants"].values()) == report[name]
        assert 0 < len(report["templates"]) <= 5
        for tenant in TENANTS:
            own = seen.report(tenant)
            assert own["tenants"] == {tenant: report["tenants"][tenant]}
            assert {template["tenant"] for template in own["templates"]} <= {tenant}
            assert own["requests"] == report["tenants"][tenant]["requests"]
            assert own["whatif"] is None


def test_a_tenant_is_told_nothing_of_another_that_has_the_same_prompts() -> None:
    with observed() as seen:
        for _ in range(10):
            seen.ask(range(20), "ann")
        assert seen.ask([*range(20), 77], "bob", store=False) == 0
        assert seen.report("bob")["lost_tokens"] == {"new": 21 * BLOCK_TOKENS}
        assert seen.report("bob")["templates"] == []
        assert set(seen.report()["tenants"]) == {"ann", "bob"}
        assert seen.report("cyd")["requests"] == 0


def test_names_of_templates_say_nothing_without_the_salt_and_stay_the_same(tmp_path: Any) -> None:
    names = []
    for _ in range(2):
        with observed({"state_dir": str(tmp_path)}) as seen:
            for number in range(8):
                seen.ask([*range(5), 100 + number])
            (template,) = seen.report()["templates"]
            names.append(template["id"])
            assert block_key(0).hex()[:8] not in str(seen.report())
    assert names[0] == names[1]
    with observed({"state_dir": str(tmp_path)}, labels={names[0]: "support bot"}) as seen:
        for number in range(8):
            seen.ask([*range(5), 100 + number])
        assert [template["label"] for template in seen.report()["templates"]] == ["support bot"]


@pytest.mark.parametrize("text", [False, True])
def test_text_is_kept_only_where_that_is_switched_on(text: bool) -> None:
    """Two prompts of three go on with 70 after the first block, others leave there."""
    with observed(text=text) as seen:
        engine = seen.cache.engine
        for number in range(12):
            prompt = [50] * BLOCK_TOKENS + [70 if number % 3 else 900 + number] * BLOCK_TOKENS
            numbers = [0, 1, 2, 100 + number] if number % 3 else [0, 200 + number, 300 + number]
            prompt += [5] * BLOCK_TOKENS * (len(numbers) - 2)
            terms = Terms(frozenset({"warm"}), 0.0, 1.0, tokens=prompt)
            chain = numbered(numbers)
            run(engine.reader.acquire(engine.tenant("default"), chain.namespace, chain.hashes, terms))
        (template,) = seen.report()["templates"]
        (point,) = template["divergences"]
        assert (point["token"], point["requests"]) == (BLOCK_TOKENS, 3)
        if not text:
            assert "text" not in template
            assert "text" not in point
            return
        assert template["text"][:BLOCK_TOKENS] == [50] * BLOCK_TOKENS
        assert point["text"]["trunk"] == [70] * BLOCK_TOKENS
        assert point["text"]["left"] == [[900 + number] * BLOCK_TOKENS for number in (9, 6)]


def test_a_sample_looks_into_some_requests_and_estimates_by_all() -> None:
    with observed(sample=0.3) as seen:
        for number in range(200):
            seen.ask([*range(4), 100 + number], store=False)
        report = seen.report()
        assert 30 < report["requests"] < 90
        assert accounted(report)
        assert 0.5 < report["whatif"]["blocks"] / 1000 < 2  # an estimate, too


def test_what_comes_too_fast_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_PAUSE_S", 3600.0)
    monkeypatch.setattr(collector, "_WAITING_BLOCKS", 50)
    with observed() as seen:
        seen.insight.close()
        seen.cache.engine.observe(seen.insight)
        for _ in range(20):
            seen.ask(range(10))
        report = seen.report()
        assert (report["requests"], report["dropped"], seen.insight.summary()["dropped"]) == (5, 15, 15)
        seen.ask(range(10))
        assert seen.report()["requests"] == 6


class Broken:
    def acquired(self, seen: SeenRequest) -> None:
        raise RuntimeError("an observer's own trouble")


def test_an_observer_that_fails_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with observed() as seen:
        seen.cache.engine.observe(Broken())
        seen.ask(range(5))
        assert seen.ask(range(5)) == 5
        assert "an observer of requests failed" in caplog.text


def test_nothing_is_observed_after_its_end() -> None:
    with observed() as seen:
        seen.ask(range(5))
        seen.insight.close()
        seen.ask(range(5))
        assert seen.report()["requests"] == 1


def test_audits_are_kept_by_tenant_and_a_bad_one_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    with observed() as seen:
        engine = seen.cache.engine
        seen.insight.audited(engine.tenant("ann"), [AUDIT, AUDIT, CORRUPT])
        assert "what the cache served is not what is computed" in caplog.text
        assert seen.report("ann")["tenants"]["ann"]["audits"]["audits"] == {"ok": 2, "outside": 0, "corrupt": 1}
        assert seen.report("bob")["tenants"] == {}
        for _ in range(100):
            seen.insight.audited(engine.tenant("ann"), [replace(CORRUPT, tokens=1)])
        assert len(seen.report()["tenants"]["ann"]["audits"]["last"]) <= 16


def test_a_cold_tier_that_turns_out_smaller_is_asked_about_anew(tmp_path: Any) -> None:
    """Blocks of two kilobytes take more than that on disk: it holds fewer than its size says."""
    cold = {"capacity": "6MiB", "segment": "1MiB", "codec": "raw", "sync": "none"}
    with observed({"state_dir": str(tmp_path), "cold": cold}) as seen:

        def capacity() -> int:
            rates = seen.report()["whatif"]["rates"]
            return next(rate["capacity_blocks"] for rate in rates if (rate["tier"], rate["factor"]) == ("cold", 1))

        seen.ask([0])
        by_size = capacity()
        assert by_size == (6 << 20) // 2048
        for number in range(30):
            seen.ask(range(1000 * number, 1000 * number + WARM_BLOCKS // 4))
            seen.cache.flush()
        for _ in range(1000):
            seen.ask([0], store=False, wait_s=0)
        held = seen.cache.stats()["tiers"]["cold"]["blocks"]
        assert held <= capacity() < min(1.3 * held, 0.9 * by_size)
