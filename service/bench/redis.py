"""A Redis of the benchmark's own on a Unix socket, for comparison: what a store without leases and checksums does."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import Unavailable
from tierkv.service.bench.payload import fresh_key

__all__ = ["Redis", "available", "redis_server"]

_START_S = 10.0


def available() -> bool:
    """Whether there are a redis-server and the Python package."""
    return shutil.which("redis-server") is not None and importlib.util.find_spec("redis") is not None


class Redis:
    """Blocks as strings, a chain in one pipeline."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, data: NDArray[np.uint8], batch: int, stored: list[bytes]) -> None:
        """Store all blocks under new keys, in place of the last pass's."""
        self._client.flushdb()
        stored[:] = (fresh_key() for _ in data)
        for start in range(0, len(data), batch):
            with self._client.pipeline(transaction=False) as pipeline:
                for key, row in zip(stored[start : start + batch], data[start : start + batch], strict=True):
                    pipeline.set(key, row.data)
                pipeline.execute()

    def get(self, batch: int, stored: Sequence[bytes]) -> None:
        """Fetch all blocks, each into bytes of its own."""
        for start in range(0, len(stored), batch):
            self._client.mget(stored[start : start + batch])


@contextmanager
def redis_server() -> Iterator[Redis]:
    """Run a server that writes nothing to disk. Raises `Unavailable` when it does not start."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        path = f"{home}/redis"
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        with subprocess.Popen([*command, "--dir", home], stdout=subprocess.DEVNULL) as process:
            redis: Any = importlib.import_module("redis")
            client = redis.Redis(unix_socket_path=path)
            try:
                deadline = time.monotonic() + _START_S
                while not _answers(client, redis.ConnectionError):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise Unavailable("redis-server did not start", remedy="remove it to go without that row")
                    time.sleep(0.01)
                yield Redis(client)
            finally:
                client.close()
                process.terminate()


def _answers(client: Any, missing: type[Exception]) -> bool:
    try:
        return bool(client.ping())
    except missing:
        return False
