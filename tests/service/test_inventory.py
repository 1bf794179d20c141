"""What an operator can list: segments of the cold tier, and tenants."""

from tests.service.daemon import TIERS, Raw, chain, running, store


def test_segments_of_the_cold_tier() -> None:
    with running() as daemon, daemon.connect() as cache:
        raw = Raw(daemon.tcp_port)
        before = raw.request("GET", "/v1/segments")[1]
        assert sum(segment["blocks"] for segment in before["segments"]) == 0
        assert store(cache, chain(3)) == 3
        cache.flush()
        status, answer, _ = raw.request("GET", "/v1/segments")
        assert status == 200
        assert [segment["blocks"] for segment in answer["segments"] if segment["state"] == "filling"] == [3]
        assert answer["capacity_bytes"] == 64 << 20
        assert 0 < answer["used_bytes"] <= answer["capacity_bytes"]
        assert answer["damage"] == {}
        assert answer["findings"] == []
        assert answer == {name: cache.stats()["tiers"]["cold"][name] for name in answer}


def test_segments_without_a_cold_tier() -> None:
    with running({**TIERS, "cold": {"capacity": 0}}) as daemon:
        status, answer, _ = Raw(daemon.tcp_port).request("GET", "/v1/segments")
        assert (status, answer["capacity_bytes"], answer["segments"]) == (200, 0, [])


def test_tenants_and_what_they_use() -> None:
    settings = {**TIERS, "tenants": {"chat": {"weight": 3, "warm": "4MiB"}}}
    with running(settings) as daemon, daemon.connect("chat") as cache:
        raw = Raw(daemon.tcp_port)
        assert store(cache, chain(2)) == 2
        status, answer, _ = raw.request("GET", "/v1/tenants")
        assert status == 200
        chat = answer["tenants"]["chat"]
        assert (chat["weight"], chat["quotas"], chat["stored_bytes"]) == (3.0, {"warm": 4 << 20}, 2 * 8192)
        assert chat["used_bytes"]["warm"] >= 2 * 8192
        assert answer["tenants"] == raw.request("GET", "/v1/stats")[1]["tenants"]
