"""The table of leases: who finds which, and when they end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.leases import LeaseTable, ReadRecord, WriteRecord
from tierkv.errors import LeaseLost

ME, OTHER = b"tenant-1", b"tenant-2"


def read(deadline: float, lease_id: str = "") -> ReadRecord:
    return ReadRecord(lease_id or LeaseTable.new_id(), ME, deadline, [], ())


def test_a_lease_is_found_by_its_own_tenant_until_it_is_removed() -> None:
    table = LeaseTable()
    lease = read(1.0)
    table.add(lease)
    assert table.find(lease.id, ME) is lease
    for lease_id, tenant in ((lease.id, OTHER), ("", ME), (lease.id + "x", ME)):
        with pytest.raises(LeaseLost):
            table.find(lease_id, tenant)
    table.remove(lease)
    table.remove(lease)
    with pytest.raises(LeaseLost):
        table.find(lease.id, ME)
    assert table.expired(2.0) == []


def test_ids_cannot_be_guessed_from_one_another() -> None:
    ids = {LeaseTable.new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 16


def test_counts_and_draining() -> None:
    table = LeaseTable()
    both: list[ReadRecord | WriteRecord] = [read(1.0), WriteRecord("w", ME, 2.0, (), {})]
    for lease in both:
        table.add(lease)
    assert table.counts() == {"read": 1, "write": 1, "compute": 0, "pin": 0}
    assert table.drain() == both
    assert table.counts() == {"read": 0, "write": 0, "compute": 0, "pin": 0}
    assert table.next_deadline() is None


operations = st.lists(st.tuples(st.sampled_from(["add", "renew", "remove"]), st.integers(0, 4), st.integers(0, 20)))


@given(operations, st.lists(st.integers(0, 25), min_size=1).map(sorted))
def test_leases_end_exactly_at_their_last_deadline(changes: list[tuple[str, int, int]], clock: list[int]) -> None:
    table = LeaseTable()
    leases: dict[int, ReadRecord] = {}
    for what, n, when in changes:
        if what == "add" and n not in leases:
            leases[n] = read(float(when), str(n))
            table.add(leases[n])
        elif what == "renew" and n in leases:
            table.renew(leases[n], float(when))
        elif what == "remove" and n in leases:
            table.remove(leases.pop(n))
    for now in clock:
        due = {n for n, lease in leases.items() if lease.deadline <= now}
        upcoming = table.next_deadline()
        assert upcoming is not None or not leases
        assert upcoming is None or all(upcoming <= lease.deadline for lease in leases.values())
        assert {int(lease.id) for lease in table.expired(now)} == due
        for n in due:
            del leases[n]
