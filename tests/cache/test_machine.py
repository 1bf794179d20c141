"""The whole cache against a simple model: any sequence of operations, with a recount of all books after each.

Time passes by jumps of the clock, and the disk is as slow as the gates before it say: between two steps loads and
demotions are either over or stopped there, so that every failure can be replayed.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from .machine.draws import branches, namespaces, tenants
from .machine.harming import Harming
from .machine.hinting import Hinting
from .machine.model import SETUPS, Model
from .machine.reading import Reading
from .machine.writing import Writing

LONG = bool(os.environ.get("TIERKV_LONG"))


class CacheMachine(Reading, Writing, Hinting, Harming):
    """Every rule, on every setup, beginning with some chains stored."""

    @initialize(
        number=st.integers(0, len(SETUPS) - 1),
        fill=st.lists(st.tuples(tenants, namespaces, branches), min_size=2, max_size=12),
    )
    def begin(self, number: int, fill: list[tuple[str, int, tuple[int, ...]]]) -> None:
        self.setup = SETUPS[number]
        self.directory = Path(self.home.name) / "life-0"
        self.directory.mkdir()
        self.specs = self.setup.specs()
        self.open()
        secret = (self.directory / "state" / "secret").read_bytes()
        self.model = Model(secret, {spec.namespace: spec for spec in self.specs})
        self.opened = True
        for tenant, namespace, branch in fill:
            write = self.reserve(tenant, self.chain(namespace, branch), 0, 0.02, 520.0, "")
            self.commit(write, {index for index, _ in write.open})
            self.end_write(write)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=1000 if LONG else 60,
    stateful_step_count=100 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
