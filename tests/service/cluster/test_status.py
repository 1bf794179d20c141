"""`tierkv status` of a daemon with a shared tier."""

from pathlib import Path
from typing import Any

import pytest

from tests.servers.redis import MISSING_REDIS, RedisServer
from tests.service.cluster.nodes import node
from tests.service.daemon import SPEC, chain, eventually, store
from tierkv.service.status import print_status


@pytest.mark.skipif(bool(MISSING_REDIS), reason=MISSING_REDIS)
def test_the_shared_tier_is_told_of_at_work_and_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = RedisServer(tmp_path)
    try:
        with node("a", [], shared={"url": server.url}) as daemon, daemon.start().connect() as cache:
            store(cache, chain(4))
            cache.flush()
            told = _told(cache.stats(), capsys)
            assert "shared: valkey, answers; 0 hit tokens, 4 blocks written, 0 waiting" in told
            assert "maxmemory is not set" in told
            server.tell("ACL", "SETUSER", "default", "-evalsha")
            cache.clear(SPEC.namespace)
            told = _told(cache.stats(), capsys)
            assert "come to nothing, the last: " in told
            server.kill()

            def away() -> bool:
                cache.acquire(chain(4, seed=7), wait_s=1.0).release()
                return cache.stats()["shared"]["state"] != "closed"

            eventually(away)
            assert "answers" not in _told(cache.stats(), capsys)
    finally:
        if server.running:
            server.stop()


def _told(stats: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    print_status(stats)
    return capsys.readouterr().out
