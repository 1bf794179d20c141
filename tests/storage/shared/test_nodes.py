"""Clears and deletions reach all nodes: whatever happens to nodes, network and engine, what is gone stays gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.conformance.tier_suite import key_of, read
from tests.servers.process import wait_until
from tests.servers.redis import RedisServer
from tests.storage.shared.conftest import MakeBackend, Wait
from tests.storage.shared.support import NAMESPACE, TENANT, Between, fresh_prefix, keys, open_store, put
from tierkv.errors import NotFound, Unavailable
from tierkv.storage.shared import Change, SharedStore, SharedTier, make_backend
from tierkv.storage.shared import generation as generations
from tierkv.storage.tier import BlockMeta, checksum

EXAMPLES = 1000 if os.environ.get("TIERKV_LONG") else 40
Start = Callable[..., SharedStore]


@pytest.fixture
def start(engine: MakeBackend, tmp_path: Path) -> Iterator[Start]:
    """Start nodes that share a prefix, each by its name with a file of its own."""
    prefix = fresh_prefix()
    started: list[SharedStore] = []

    def begin(name: str, **settings: Any) -> SharedStore:
        started.append(open_store(engine(), prefix=prefix, known=tmp_path / name, **settings))
        return started[-1]

    yield begin
    for store in started:
        store.close()


def area(store: SharedStore) -> SharedTier:
    return store.area(TENANT, NAMESPACE)


def cleared() -> Change:
    return Change(TENANT, NAMESPACE, True, ())


def deleted(*numbers: int) -> Change:
    return Change(TENANT, NAMESPACE, False, tuple(keys(numbers)))


def test_what_one_node_puts_the_other_reads(start: Start) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    assert read(area(bob), key_of(1)) == read(area(ann), key_of(1))
    assert area(bob).held(keys([1, 2])) == [True, False]
    assert ann.poll() == bob.poll() == []


def test_a_clear_is_at_once_here_and_with_the_next_poll_there(start: Start) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    assert area(bob).has(key_of(1))
    assert area(ann).clear() is True
    assert not area(ann).has(key_of(1))
    put(area(bob), 2)  # where nobody looks any more
    assert bob.poll() == [cleared()]
    assert area(bob).held(keys([1, 2])) == [False, False]
    assert ann.poll() == bob.poll() == []
    put(area(ann), 1)
    assert area(bob).has(key_of(1))


def test_a_deleted_block_is_gone_even_if_a_node_that_does_not_know_puts_it_back(start: Start) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1, 2)
    assert area(bob).held(keys([1, 2])) == [True, True]
    assert area(ann).forget(keys([1])) is True
    put(area(bob), 1)
    for store in (ann, bob):
        assert store.poll() == ([deleted(1)] if store is bob else [])
        assert area(store).held(keys([1, 2])) == [False, True]
        assert area(store).meta(key_of(1)) is None
        assert [key for key, _ in area(store).records()] == keys([2])
        with pytest.raises(NotFound):
            area(store).read_into(key_of(1), memoryview(bytearray(5000)))
    put(area(bob), 1)
    assert read(area(ann), key_of(1)) is not None


def test_many_deletions_become_a_clear(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "MOST_DELETED", 3)
    ann, bob = start("ann"), start("bob")
    put(area(ann), *range(6))
    bob.area(TENANT, NAMESPACE)
    assert bob.poll() == []
    area(ann).forget(keys([1, 2]))
    assert bob.poll() == [deleted(1, 2)]
    area(ann).forget(keys([3, 4]))
    assert bob.poll() == [cleared()]
    assert area(bob).held(keys(range(6))) == [False] * 6


def test_a_node_that_was_away_is_told_when_it_is_back(start: Start) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1, 2, 3)
    area(bob).held(keys([1]))
    bob.close()
    area(ann).forget(keys([2]))
    bob = start("bob")  # its first poll is before anybody asks for the area
    assert bob.poll() == [deleted(2)]
    bob.close()
    area(ann).clear()
    area(ann).forget(keys([3]))
    bob = start("bob")
    (change,) = bob.poll()
    assert (change.tenant, change.namespace, change.cleared) == (TENANT, NAMESPACE, True)
    assert bob.poll() == []


def test_what_was_told_but_not_seen_to_is_told_again(start: Start) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    area(bob).held(keys([1]))
    for change, told in ((lambda: area(ann).forget(keys([1])), deleted(1)), (area(ann).clear, cleared())):
        change()
        assert bob.poll() == [told]
        bob = start("bob")  # as after a crash: the one before was not closed
        assert bob.poll() == [told]
        assert bob.poll() == []


def test_who_meets_an_area_for_the_first_time_is_told_of_what_was_before(start: Start) -> None:
    ann, bob, eve = start("ann"), start("bob"), start("eve")
    put(area(ann), 1)
    area(bob)
    assert bob.poll() == []
    area(ann).forget(keys([1]))
    area(eve)
    assert eve.poll() == [cleared()]  # what it has from elsewhere may have been put before that
    assert eve.poll() == []


def test_an_emptied_engine_clears_nothing(start: Start, engine: MakeBackend, wait: Wait[Any]) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    area(ann).clear()
    put(area(ann), 2)
    assert bob.poll() == []
    area(bob).held(keys([2]))
    bob.poll()
    empty(engine, wait, ann)
    assert bob.poll() == ann.poll() == []
    assert area(ann).held(keys([1, 2])) == [False, False]
    put(area(ann), 3)
    assert area(bob).has(key_of(3))


def test_two_histories_after_the_engine_was_emptied_end_in_a_third(
    start: Start, engine: MakeBackend, wait: Wait[Any]
) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    assert area(bob).has(key_of(1))
    area(ann).clear()
    empty(engine, wait, ann)
    assert bob.poll() == []  # puts back what it knew, which is before the clear
    put(area(ann), 2)
    area(bob).clear()  # after the put, and as many clears as the other knows of
    assert ann.poll() == [cleared()]
    assert bob.poll() == [cleared()]
    assert ann.poll() == []
    for store in (ann, bob):
        assert area(store).held(keys([1, 2])) == [False, False]
    put(area(ann), 3)
    assert area(bob).has(key_of(3))


def test_two_deletions_of_a_block_are_not_one_because_the_engine_forgot_the_first(
    start: Start, engine: MakeBackend, wait: Wait[Any]
) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    assert area(bob).has(key_of(1))
    area(ann).forget(keys([1]))
    empty(engine, wait, ann)
    area(bob).forget(keys([1]))  # knows nothing of the first
    put(area(ann), 1)  # nor this of the second
    assert not area(bob).has(key_of(1))
    assert ann.poll() == [cleared()]
    assert bob.poll() == [cleared()]
    for store in (ann, bob):
        assert area(store).held(keys([1])) == [False]


def test_a_history_with_more_clears_is_not_for_that_a_later_one(
    start: Start, engine: MakeBackend, wait: Wait[Any]
) -> None:
    ann, bob = start("ann"), start("bob")
    put(area(ann), 1)
    area(ann).forget(keys([1]))
    empty(engine, wait, ann)
    area(bob).clear()
    area(bob).clear()
    put(area(bob), 1)  # as it may have had it from before the deletion
    assert ann.poll() == [cleared()]
    assert bob.poll() == [cleared()]
    for store in (ann, bob):
        assert area(store).held(keys([1])) == [False]


def empty(engine: MakeBackend, wait: Wait[Any], store: SharedStore) -> None:
    async def remove_all() -> None:
        backend = engine()
        await backend.open()
        names = [name async for name in backend.names(f"{store._prefix}/")]
        if names:
            await backend.delete(names)
        await backend.close()

    wait(remove_all())


@pytest.mark.parametrize("redo", ["poll", "use", "restart"])
def test_a_clear_without_the_engine_is_made_up_for(redis: RedisServer, tmp_path: Path, redo: str) -> None:
    prefix = fresh_prefix()
    link = Between(make_backend(redis.url))
    ann = open_store(link, prefix=prefix, known=tmp_path / "ann")
    bob = open_store(redis.url, prefix=prefix)
    put(area(ann), 1)
    assert area(bob).has(key_of(1))
    bob.poll()
    link.cut = True
    assert area(ann).clear() is False
    for _ in range(2):
        with pytest.raises(Unavailable):
            area(ann).has(key_of(1))
    assert bob.poll() == []
    if redo == "restart":
        ann.close()
        ann = open_store(redis.url, prefix=prefix, known=tmp_path / "ann")
    link.cut = False
    wait_until(lambda: ann.available, "the breaker")
    assert ann.poll() == [] if redo != "use" else not area(ann).has(key_of(1))
    assert bob.poll() == [cleared()]
    assert not area(ann).has(key_of(1))
    ann.close()
    bob.close()


@pytest.mark.parametrize("first", [True, False], ids=["meets", "settles"])
def test_what_a_node_found_out_on_its_way_outlives_it(
    redis: RedisServer, tmp_path: Path, wait: Wait[Any], first: bool
) -> None:
    prefix = fresh_prefix()
    link = Between(make_backend(redis.url))
    ann = open_store(redis.url, prefix=prefix)
    bob = open_store(link, prefix=prefix, known=tmp_path / "bob")
    put(area(ann), 1)
    if not first:
        assert area(bob).has(key_of(1))
        assert bob.poll() == []
        link.cut = True
        assert area(bob).clear() is False
    assert area(ann).clear() is True
    link.cut = False
    wait_until(lambda: bob.available, "the breaker")
    assert not area(bob).has(key_of(1))  # no poll: what is found out is told later
    kill(bob)
    empty(lambda: make_backend(redis.url), wait, ann)
    bob = open_store(redis.url, prefix=prefix, known=tmp_path / "bob")
    area(bob)
    assert bob.poll() == [cleared()]
    ann.close()
    bob.close()


def kill(store: SharedStore) -> None:
    """End a store as if its process were killed: nothing is saved."""
    store._link.close()


class Node:
    """A node with a local tier of its own: what it puts and reads stays there until it is told."""

    def __init__(self, url: str, prefix: str, known: Path) -> None:
        self.url, self.prefix, self.known = url, prefix, known
        self.local: dict[bytes, set[int]] = {}
        self.gone: set[int] = set()  # by this node's own doing
        self.pending: set[int] = set()  # of these, what others cannot know of yet
        self.seen: set[int] = set()  # what it was told by others, or has told them
        self.start()

    def start(self) -> None:
        self.link = Between(make_backend(self.url))
        self.store = open_store(self.link, prefix=self.prefix, known=self.known)
        self.tier = area(self.store)

    def remove(self, numbers: set[int]) -> None:
        for versions in self.local.values():
            versions -= numbers


KEYS = keys(range(2))
Doing = tuple[str, int]
doings = st.tuples(st.sampled_from(["put", "read", "clear", "forget", "poll"]), st.integers(0, len(KEYS) - 1))


def nodes_machine(url: str, directory: Path, clean: Callable[[str], None]) -> type[RuleBasedStateMachine]:
    runs = count()
    which = st.integers(0, 2)

    class Nodes(RuleBasedStateMachine):
        """Every version of a block is a number. `versions` has them by key.

        `told` has those that are gone by what the engine has: all there ever were when nobody has emptied it. What it
        lost is known to the nodes that knew it, and told again by these.
        """

        def __init__(self) -> None:
            super().__init__()
            prefix, run = fresh_prefix(), next(runs)
            self.nodes = [Node(url, prefix, directory / f"{run}-{name}") for name in range(3)]
            self.prefix = prefix
            self.numbers = count()
            self.versions: dict[bytes, set[int]] = {key: set() for key in KEYS}
            self.told: set[int] = set()

        @rule(at=which, doing=doings)
        def do(self, at: int, doing: Doing) -> None:
            getattr(self, doing[0])(self.nodes[at], KEYS[doing[1]])

        @rule(
            at=which,
            mine=st.lists(doings, max_size=2),
            theirs=st.lists(st.tuples(st.integers(1, 2), doings), max_size=3),
            emptied=st.booleans(),
            after=st.sampled_from(["", "restart", "kill"]),
        )
        def apart(self, at: int, mine: list[Doing], theirs: list[tuple[int, Doing]], emptied: bool, after: str) -> None:
            """A node is cut off, others go on, the engine may lose everything, and the node is back."""
            node = self.nodes[at]
            node.link.cut = True
            for doing in mine:
                self.do(at, doing)
            if emptied:
                self.empty()
            for step, doing in theirs:
                self.do((at + step) % 3, doing)
            node.link.cut = False
            if after:
                self.restart(node, killed=after == "kill")
            else:
                self.await_answer(node)

        @rule(at=which)
        def poll_and_crash(self, at: int) -> None:
            """What a node is told is lost with it, before it has seen to it."""
            node = self.nodes[at]
            node.store.poll()
            self.tell(node)
            self.restart(node, killed=True)

        @rule()
        def empty(self) -> None:
            clean(self.prefix)
            self.told.clear()

        def tell(self, node: Node) -> None:
            self.told |= node.seen | node.pending
            node.seen = set(self.told)
            node.pending = set()

        def settled(self, node: Node) -> None:
            if node.pending:
                self.tell(node)

        def put(self, node: Node, key: bytes) -> None:
            number = next(self.numbers)
            self.versions[key].add(number)
            node.local.setdefault(key, set()).add(number)
            payload = number.to_bytes(8, "little") * 8
            try:
                node.tier.put(key, payload, BlockMeta(64, checksum(payload)))
            except Unavailable:
                assert node.link.cut
            else:
                self.settled(node)

        def read(self, node: Node, key: bytes) -> None:
            out = bytearray(64)
            try:
                held = node.tier.held([key])
                node.tier.read_into(key, memoryview(out))
            except NotFound:
                assert held == [False]
                self.settled(node)
            except Unavailable:
                assert node.link.cut
            else:
                assert held == [True]
                self.settled(node)
                number = int.from_bytes(out[:8], "little")
                assert number in self.versions[key] - node.gone - node.seen
                node.local.setdefault(key, set()).add(number)

        def clear(self, node: Node, key: bytes) -> None:
            self.remove(node, set().union(*self.versions.values()), node.tier.clear)

        def forget(self, node: Node, key: bytes) -> None:
            self.remove(node, set(self.versions[key]), lambda: node.tier.forget([key]))

        def remove(self, node: Node, numbers: set[int], call: Callable[[], bool]) -> None:
            node.gone |= numbers
            node.pending |= numbers
            node.remove(numbers)
            done = call()
            assert done is not node.link.cut
            if done:
                self.settled(node)

        def poll(self, node: Node, key: bytes) -> None:
            try:
                changes = node.store.poll()
            except Unavailable:
                assert node.link.cut
                return
            self.tell(node)
            for change in changes:
                assert (change.tenant, change.namespace) == (TENANT, NAMESPACE)
                if change.cleared:
                    node.local.clear()
                for gone in change.deleted:
                    node.local.pop(gone, None)
            assert not node.seen & set().union(*node.local.values())
            for one in KEYS:
                self.read(node, one)

        def restart(self, node: Node, *, killed: bool) -> None:
            (kill if killed else SharedStore.close)(node.store)
            node.start()

        def await_answer(self, node: Node) -> None:
            def answers() -> bool:
                try:
                    node.store.check()
                except Unavailable:
                    return False
                return True

            wait_until(answers, "a node")

        def teardown(self) -> None:
            for node in self.nodes:
                self.poll(node, KEYS[0])
            for node in self.nodes:
                self.poll(node, KEYS[0])
                node.store.close()

    return Nodes


def test_what_is_gone_stays_gone(redis: RedisServer, tmp_path: Path, wait: Wait[Any]) -> None:
    backend = make_backend(redis.url)
    wait(backend.open())

    async def remove_all(prefix: str) -> None:
        names = [name async for name in backend.names(f"{prefix}/")]
        if names:
            await backend.delete(names)

    machine = nodes_machine(redis.url, tmp_path, lambda prefix: wait(remove_all(prefix)))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=20,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
    wait(backend.close())
