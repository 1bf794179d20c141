"""Regret: what a tier gave up and a request wanted, in the order of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.insight.live.support import SPEC, numbered
from tierkv.core.observing import SeenRequest
from tierkv.core.state import NamespaceInfo
from tierkv.core.tenants import Tenant
from tierkv.insight.live.regret import Ghost, Ghosts, Regret

INFO = NamespaceInfo(SPEC.namespace, SPEC.fingerprint, SPEC, (SPEC.layout(),), (SPEC.layout().nbytes,))
TENANT = Tenant("t", b"k" * 32, b"i" * 8)
TIERS = ("hot", "warm", "cold", "shared")


def asked(tiers: Sequence[str], blocks: int, published: int, sequence: int = 10) -> SeenRequest:
    hashes = numbered(range(blocks)).hashes
    return SeenRequest(sequence, 100.0, TENANT, INFO, 0, hashes, tiers, published, {}, "", "", 0, 0, None, None)


def regretted(ghost: Ghost, seen: SeenRequest) -> int:
    """Blocks of a request that are regretted if all of them left the same way before."""
    ghosts = Ghosts(TIERS)
    ghosts.left([seen.key(index) for index in range(len(seen.hashes))], ghost)
    found = len(list(ghosts.wanted(seen, len(seen.hashes))))
    assert list(ghosts.wanted(seen, len(seen.hashes))) == []
    assert len(ghosts) == len(seen.hashes) - found
    return found


@pytest.mark.parametrize(
    ("left", "served", "blocks"),
    [
        ("hot", "hot", 0),
        ("hot", "warm", 3),
        ("warm", "hot", 0),
        ("warm", "warm", 0),
        ("warm", "cold", 3),
        ("cold", "warm", 0),
    ],
)
def test_a_block_that_is_back_where_it_was_is_not_regretted(left: str, served: str, blocks: int) -> None:
    assert regretted(Ghost(left, 5, 0.0, last=False), asked([served] * 3, 3, 3)) == blocks


def test_what_left_after_the_request_is_not_held_against_it() -> None:
    assert regretted(Ghost("warm", 11, 0.0, last=False), asked(["cold"] * 3, 3, 3)) == 0
    assert regretted(Ghost("warm", 9, 0.0, last=False), asked(["cold"] * 3, 3, 3)) == 3


def test_a_block_that_is_not_served_is_regretted_if_it_was_lost_or_lies_below() -> None:
    assert regretted(Ghost("cold", 5, 0.0, last=True), asked([], 4, 0)) == 4
    assert regretted(Ghost("warm", 5, 0.0, last=False), asked([], 4, 3)) == 3


def test_the_run_of_lost_blocks_ends_where_one_is_not_known_to_be() -> None:
    seen = asked([], 6, 0)
    ghosts = Ghosts(TIERS)
    ghosts.left([seen.key(index) for index in range(3)], Ghost("cold", 5, 0.0, last=True))
    ghosts.left([seen.key(3)], Ghost("cold", 11, 0.0, last=True))
    ghosts.left([seen.key(4)], Ghost("cold", 5, 0.0, last=True))
    assert ghosts.lost_from(seen, 0) == 3
    assert ghosts.lost_from(seen, 4) == 5
    assert ghosts.lost_from(seen, 5) == 5


def test_regret_is_told_by_how_soon_a_block_was_wanted() -> None:
    regret = Regret()
    for passed, tokens in ((1, 1), (60, 2), (61, 4), (3600, 8), (86_400, 16), (86_401, 32)):
        regret.note(Ghost("warm", 1, 100.0, last=passed > 61), 100.0 + passed, tokens)
    within = {"1min": 3, "10min": 4, "1h": 8, "1d": 16, "later": 32}
    assert regret.to_dict() == {"warm": {"tokens": 63, "lost_tokens": 56, "within": within}}
    assert regret.tokens() == {"warm": 63}
