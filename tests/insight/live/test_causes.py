"""Why blocks were not served: each request of a real cache, told block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.insight.live.support import BLOCK_TOKENS, SPEC, WARM_BLOCKS, Observed, accounted, numbered, observed
from tierkv.core.observing import SeenRequest
from tierkv.core.state import NamespaceInfo
from tierkv.core.tenants import Tenant
from tierkv.insight.live.causes import CAUSES, lost_blocks

INFO = NamespaceInfo(SPEC.namespace, SPEC.fingerprint, SPEC, (SPEC.layout(),), (SPEC.layout().nbytes,))
TENANT = Tenant("t", b"k" * 32, b"i" * 8)
LOST = ("absent", "evicted", "not_demoted_in_time", "deleted", "cleared", "corrupt")
LOADING = ("late", "failed", "no_room", "cheaper_computed", "corrupt", "absent", "of the future")


@st.composite
def requests(draw: st.DrawFn) -> SeenRequest:
    hit, unloaded, gone = (draw(st.integers(0, 6)) for _ in range(3))
    missed: dict[str, int] = {}
    lost = draw(st.sampled_from(LOST)) if gone else ""
    if gone:
        missed[lost] = gone
    for _ in range(unloaded):
        reason = draw(st.sampled_from(LOADING))
        missed[reason] = missed.get(reason, 0) + 1
    hashes = numbered(range(hit + unloaded + gone)).hashes
    published = hit + unloaded
    return SeenRequest(1, 0.0, TENANT, INFO, 0, hashes, ["warm"] * hit, published, missed, lost, "", 0, 0, None, None)


@given(requests(), st.integers(0, 20), st.booleans())
def test_every_block_is_either_served_or_lost_by_one_cause(seen: SeenRequest, known: int, away: bool) -> None:
    lost = lost_blocks(seen, known, shared_away=away)
    assert len(seen.tiers) + sum(lost.values()) == len(seen.hashes)
    assert all(count > 0 for count in lost.values())
    assert set(lost) <= {*CAUSES, "of the future"}


def test_what_was_evicted_is_so_even_if_nobody_remembers_the_prompt() -> None:
    missed = {"evicted": 4}
    seen = SeenRequest(
        1, 0.0, TENANT, INFO, 0, numbered(range(6)).hashes, ["warm"] * 2, 2, missed, "evicted", "", 0, 0, None, None
    )
    assert lost_blocks(seen, 0, shared_away=False) == {"evicted": 1, "new": 3}
    assert lost_blocks(seen, 4, shared_away=False) == {"evicted": 2, "new": 2}
    assert lost_blocks(seen, 4, shared_away=True) == {"shared_away": 2, "new": 2}


def lost(seen: Observed, tenant: str = "default") -> dict[str, int]:
    """Blocks lost since the start, by cause."""
    return {cause: tokens // BLOCK_TOKENS for cause, tokens in seen.report(tenant)["lost_tokens"].items()}


def test_new_content_is_new_and_what_is_asked_again_without_being_stored_is_not() -> None:
    with observed() as seen:
        seen.ask(range(10), store=False)
        assert lost(seen) == {"new": 10}
        seen.ask([*range(10), 100, 101], store=False)
        assert lost(seen) == {"new": 12, "unstored": 10}
        assert seen.ask(range(10)) == 0
        assert seen.ask(range(10)) == 10
        assert lost(seen) == {"new": 12, "unstored": 20}


def test_an_evicted_conversation_and_its_new_turn_are_two_things() -> None:
    with observed() as seen:
        seen.ask(range(20))
        for number in range(8):
            seen.ask(range(1000 * number + 1000, 1000 * number + 1000 + WARM_BLOCKS // 4))
        before = lost(seen)["new"]
        # Nothing was demoted, as there is no disk: blocks leave the tail of the chain first, here all of it.
        hit = seen.ask(range(25), store=False)
        found = lost(seen)
        assert found["new"] == before + 5
        assert {cause: count for cause, count in found.items() if cause != "new"} == {"evicted": 20 - hit}
        regret = seen.report()["tenants"]["default"]["regret"]["warm"]
        assert regret["tokens"] == regret["lost_tokens"] == (20 - hit) * BLOCK_TOKENS
        assert regret["within"] == {"1min": regret["tokens"]}


def test_what_was_deleted_or_cleared_is_told() -> None:
    with observed() as seen:
        for first, remove in ((0, seen.cache.delete), (100, lambda chain: seen.cache.clear(chain.namespace))):
            seen.ask(range(first, first + 4))
            assert remove(numbered(range(first, first + 4))) in (1, 7)
            seen.ask(range(first, first + 6), store=False)
        assert lost(seen) == {"new": 4 + 2 + 4 + 2, "deleted": 1, "cleared": 4}


def test_what_would_have_to_be_loaded_first_is_late_or_cheaper_computed(tmp_path: Any) -> None:
    settings = {
        "state_dir": str(tmp_path),
        "warm": {"capacity": "1MiB", "demote_ahead": 1.0},
        "cold": {"capacity": "32MiB", "segment": "4MiB", "codec": "raw"},
    }
    with observed(settings) as seen:
        seen.ask(range(20))
        seen.cache.flush()
        for number in range(1, 9):
            seen.ask(range(1000 * number, 1000 * number + WARM_BLOCKS // 4))
            seen.cache.flush()
        hot = sum(tier == "warm" for tier in seen.cache.lookup(numbered(range(20))).tiers)
        hit = seen.ask(range(20), store=False, wait_s=0)
        assert hit == hot < 20
        assert lost(seen)["late"] == 20 - hit
        assert seen.ask(range(20), store=False) == 20
        regret = seen.report()["tenants"]["default"]["regret"]["warm"]
        assert (regret["tokens"] > 0, regret["lost_tokens"]) == (True, 0)
        assert accounted(seen.report())


@pytest.mark.parametrize("rate", [None, 4000.0])
def test_seconds_are_told_where_the_engines_speed_is_known(rate: float | None) -> None:
    with observed(price_per_gpu_hour=7.2) as seen:
        seen.ask(range(10), prefill_tokens_per_s=rate)
        report = seen.report()
        seconds = 10 * BLOCK_TOKENS / rate if rate else 0
        assert report["lost_s"] == pytest.approx({"new": seconds} if rate else {})
        assert report["lost_price"] == pytest.approx({"new": seconds * 0.002} if rate else {})


def test_a_price_per_token_needs_no_speed() -> None:
    with observed(price_per_million_tokens=2.5) as seen:
        seen.ask(range(10))
        assert seen.report()["lost_price"] == pytest.approx({"new": 160 * 2.5e-6})
