"""A real cache whose requests are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.insight.live.support import SPEC, numbered
from tierkv.config import parse_config
from tierkv.embedded import EmbeddedCache, open_cache
from tierkv.insight.traces.files import TraceFiles
from tierkv.insight.traces.recorder import Recorder
from tierkv.insight.traces.row import trace_salt

SECRET = bytes(32)


@dataclass(frozen=True)
class Recording:
    """A cache with its recorder."""

    cache: EmbeddedCache
    recorder: Recorder

    def ask(self, blocks: Sequence[int], tenant: str = "default", session: str = "") -> None:
        with self.cache.for_tenant(tenant).acquire(numbered(blocks), wait_s=0.0, session=session):
            pass


@contextmanager
def recording(
    directory: Path | None = None,
    *,
    most_bytes: int = 1 << 20,
    secret: bytes = SECRET,
    scope: str | None = None,
    state_dir: Path | None = None,
) -> Iterator[Recording]:
    """`state_dir`: where the cache's own secret is, so that its tenants have the same keys each time."""
    tenants = {name: {"scope": scope} for name in ("ada", "bob")} if scope else {}
    settings = {"warm": {"capacity": "1MiB"}, "tenants": tenants, "state_dir": state_dir}
    cache = open_cache(parse_config(settings))
    try:
        cache.register(SPEC)
        files = None if directory is None else TraceFiles(directory, most_bytes)
        recorder = Recorder(cache.engine, trace_salt(secret), files)
        try:
            yield Recording(cache, recorder)
        finally:
            recorder.close()
    finally:
        cache.close()
