"""Rules and bounds that change while the engine runs: at once where they allow more, gently where they allow less."""

from collections.abc import Iterator
from threading import Event

import pytest

from tierkv.config import parse_config
from tierkv.core.build import build_engine
from tierkv.core.engine import Engine, Limits
from tierkv.core.scheduler import LoadScheduler
from tierkv.core.sessions import SessionTable
from tierkv.core.tenants import TenantRules
from tierkv.errors import LimitExceeded

BLOCK = 8192
PATIENCE_S = 30.0


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = build_engine(parse_config({"warm": {"capacity": "1MiB"}}))
    yield engine
    engine.close()


def regrant(engine: Engine, rules: dict[str, TenantRules], most: Limits | None = None) -> bool:
    return engine.regrant(rules, most or Limits(), 1 << 20)


def test_a_smaller_quota_takes_nothing_before_room_is_asked_for(engine: Engine) -> None:
    order = engine.placement.memory[0].order
    tenant = engine.tenant("a")
    order.take(tenant.id, 4 * BLOCK)
    assert not regrant(engine, {"a": TenantRules(quotas={"warm": 2 * BLOCK})})
    assert order.used() == {tenant.id: 4 * BLOCK}
    assert not order.within_quota(tenant.id, 1)
    assert order.allowance(tenant.id) == 2 * BLOCK
    regrant(engine, {})
    assert order.within_quota(tenant.id, BLOCK)
    order.give(tenant.id, 4 * BLOCK)


def test_another_weight_divides_the_tier_anew(engine: Engine) -> None:
    order = engine.placement.memory[0].order
    tenants = [engine.tenant(name) for name in ("a", "b")]
    for tenant in tenants:
        order.take(tenant.id, 4 * BLOCK)
    shares = [order.allowance(tenant.id) for tenant in tenants]
    assert shares[0] == shares[1]
    regrant(engine, {"a": TenantRules(weight=3)})
    shares = [order.allowance(tenant.id) for tenant in tenants]
    assert shares[0] == 3 * shares[1]
    for tenant in tenants:
        order.give(tenant.id, 4 * BLOCK)


def test_a_known_tenant_keeps_its_scope_and_its_counters(engine: Engine) -> None:
    before = engine.tenant("a")
    before.counters.requested_tokens += 7
    assert regrant(engine, {"a": TenantRules(scope="s"), "new": TenantRules(scope="s")})
    after = engine.tenant("a")
    assert (after.key, after.id, after.rules.scope, after.counters.requested_tokens) == (before.key, before.id, "", 7)
    assert engine.tenant("new").rules.scope == "s"
    assert not regrant(engine, {"new": TenantRules(weight=2, scope="s")})
    assert engine.tenant("new").rules.weight == 2


def test_fewer_tenants_are_known_from_now_on(engine: Engine) -> None:
    for name in ("a", "b", "c"):
        engine.tenant(name)
    regrant(engine, {}, Limits(tenants=2))
    assert engine.tenant("c").name == "c"
    with pytest.raises(LimitExceeded):
        engine.tenant("d")
    regrant(engine, {}, Limits(tenants=4))
    assert engine.tenant("d").name == "d"


def test_fewer_sessions_are_remembered_once_another_one_comes() -> None:
    table = SessionTable(10)
    for number in range(10):
        table.use(b"t", "n", str(number), ())
    table.most = 3
    table.use(b"t", "n", "new", ())
    assert len(table) == 3


def test_more_bytes_in_flight_let_a_waiting_job_begin() -> None:
    began, let_go = [Event(), Event()], Event()

    def job(number: int) -> None:
        began[number].set()
        assert let_go.wait(PATIENCE_S)

    scheduler = LoadScheduler(2, 10)
    try:
        scheduler.submit(lambda: job(0), 8, 1.0)
        assert began[0].wait(PATIENCE_S)
        scheduler.submit(lambda: job(1), 8, 2.0)
        assert not began[1].is_set()
        scheduler.bound(16)
        assert began[1].wait(PATIENCE_S)
    finally:
        let_go.set()
        scheduler.close()
