"""One block by its chain hash: GET, HEAD, PUT and DELETE, as curl would ask."""

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.service.daemon import (
    BLOCK_BYTES,
    PATIENCE_S,
    SPEC,
    TIERS,
    Daemon,
    Raw,
    chain,
    eventually,
    payload,
    running,
    store,
)
from tierkv.cache import Cache, Chain
from tierkv.spec import KVGroup, KVSpec

NS = f"/v1/{SPEC.namespace}"
OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def cache(daemon: Daemon) -> Iterator[Cache]:
    with daemon.connect() as cache:
        yield cache


def url(of: Chain, index: int, query: str = "") -> str:
    return f"{NS}/blocks/{of.hashes[index].hex()}{query}"


def etag(data: bytes) -> str:
    return f'"{xxhash.xxh3_64_hexdigest(data)}"'


class Single:
    """Requests about single blocks, whose bodies are bytes."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes, http.client.HTTPResponse]:
        status, answer, response = self.raw.request("GET", path, headers=headers)
        return status, answer.get("raw", b""), response

    def put(
        self, of: Chain, index: int, data: bytes | None = None, headers: Mapping[str, str] = OCTETS, more: str = ""
    ) -> tuple[int, dict[str, Any]]:
        parent = f"&parent={of.hashes[index - 1].hex()}" if index else ""
        body = payload(of, index) if data is None else data
        return self.raw.request("PUT", url(of, index, f"?group=0{parent}{more}"), body, headers)[:2]


@pytest.fixture
def single(raw: Raw, cache: Cache) -> Single:
    return Single(raw)


def check(answer: tuple[int, dict[str, Any]], status: int, slug: str, *words: str) -> None:
    assert (answer[0], answer[1].get("type")) == (status, f"urn:tierkv:problem:{slug}"), answer
    assert answer[1]["remedy"]
    assert all(word in answer[1]["detail"] + answer[1]["remedy"] for word in words), answer


def test_blocks_put_one_by_one_are_a_prefix(single: Single, cache: Cache) -> None:
    written = chain(3, seed=1)
    for index in range(3):
        status, answer = single.put(written, index)
        summed = xxhash.xxh3_64_hexdigest(payload(written, index))
        assert (status, answer) == (201, {"stored": True, "length": BLOCK_BYTES, "checksum": summed, "depth": index})
    assert cache.lookup(written).blocks == 3
    with cache.acquire(written) as read:
        assert [bytes(read.view(index)) for index in range(3)] == [payload(written, index) for index in range(3)]


def test_what_engines_stored_can_be_fetched(single: Single, cache: Cache) -> None:
    stored = chain(2, seed=2)
    store(cache, stored)
    for index in range(2):
        status, body, response = single.get(url(stored, index))
        assert (status, body) == (200, payload(stored, index))
        assert response.headers["Content-Type"] == "application/octet-stream"
        assert response.headers["ETag"] == etag(body)
        assert response.headers["Tierkv-Tier"] == "warm"
        assert response.headers["Tierkv-Generation"]
    assert cache.stats()["leases"]["read"] == 0


def test_head_says_the_same_without_a_body(single: Single, cache: Cache) -> None:
    stored = chain(1, seed=3)
    store(cache, stored)
    got = single.get(url(stored, 0))[2]
    status, answer, head = single.raw.request("HEAD", url(stored, 0))
    assert (status, answer) == (200, {"raw": b""})
    for name in ("Content-Length", "Content-Type", "ETag", "Tierkv-Tier", "Accept-Ranges"):
        assert head.headers[name] == got.headers[name], name


def test_head_of_a_block_that_is_not_there(single: Single, daemon: Daemon) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.tcp_port, timeout=PATIENCE_S)
    connection.request("HEAD", url(chain(1, seed=30), 0))
    response = connection.getresponse()
    assert (response.status, response.read()) == (404, b"")
    connection.close()


def test_a_block_put_again_stays_as_it_is(single: Single) -> None:
    written = chain(1, seed=4)
    assert single.put(written, 0)[0] == 201
    status, answer = single.put(written, 0)
    assert (status, answer["stored"]) == (200, False)
    status, answer = single.put(written, 0, bytes(BLOCK_BYTES))
    assert (status, answer["checksum"]) == (200, xxhash.xxh3_64_hexdigest(payload(written, 0)))
    assert single.get(url(written, 0))[1] == payload(written, 0)


def test_a_chain_is_written_from_its_first_block_on(single: Single, cache: Cache) -> None:
    written = chain(2, seed=5)
    check(single.put(written, 1), 409, "conflict", "before this one", "first to its last")
    assert single.get(url(written, 1))[0] == 404
    assert cache.stats()["leases"]["write"] == 0
    assert single.put(written, 0)[0] == 201
    assert single.put(written, 1)[0] == 201


def test_a_block_that_somebody_writes(single: Single, cache: Cache) -> None:
    written = chain(1, seed=6)
    with cache.reserve(written) as write:
        check(single.put(written, 0), 409, "conflict", "somebody else")
        write.write(0, payload(written, 0))
        write.commit()
    assert single.put(written, 0)[0] == 200


@pytest.mark.parametrize(
    ("size", "status", "slug"),
    [(BLOCK_BYTES - 1, 400, "body-mismatch"), (0, 400, "body-mismatch"), (BLOCK_BYTES + 1, 413, "block-too-large")],
)
def test_a_body_of_another_size(single: Single, size: int, status: int, slug: str) -> None:
    written = chain(1, seed=7)
    check(single.put(written, 0, bytes(size)), status, slug, str(BLOCK_BYTES), str(size))
    assert single.get(url(written, 0))[0] == 404


def test_a_checksum_of_the_sender(single: Single) -> None:
    written = chain(1, seed=8)
    summed = xxhash.xxh3_64_hexdigest(payload(written, 0))
    wrong = {**OCTETS, "Tierkv-Checksum": "0" * 16}
    check(single.put(written, 0, headers=wrong), 422, "checksum-mismatch")
    check(single.put(written, 0, headers={**OCTETS, "Tierkv-Checksum": "0"}), 400, "invalid-request", "16 hex")
    assert single.get(url(written, 0))[0] == 404
    assert single.put(written, 0, headers={**OCTETS, "Tierkv-Checksum": summed})[0] == 201


def test_names_and_parameters_that_are_none(single: Single) -> None:
    written = chain(1, seed=9)
    check(single.put(written, 0, headers={"Content-Type": "text/plain"}), 400, "invalid-request", "octet-stream")
    check(single.put(written, 0, more="&parent=zz"), 400, "invalid-request", "64 hex")
    check(single.put(written, 0, more="&group=0"), 400, "invalid-request", "group", "once")
    for query, word in (("group=-1", "group"), ("group=1", "group"), ("wait_s=x", "wait_s"), ("wait_s=-1", "wait_s")):
        check(single.raw.request("GET", url(written, 0, f"?{query}"))[:2], 400, "invalid-request", word)
    check(single.raw.request("GET", f"{NS}/blocks/{'A' * 64}")[:2], 400, "invalid-request", "lower case")
    check(single.raw.request("GET", f"/v1/{'0' * 64}/blocks/{'a' * 64}")[:2], 404, "not-found", "namespace")


def test_blocks_belong_to_a_tenant(single: Single, cache: Cache) -> None:
    stored = chain(1, seed=10)
    store(cache, stored)
    assert single.get(url(stored, 0), {"Tierkv-Tenant": "other"})[0] == 404


def test_who_has_it_already_is_told_so(single: Single, cache: Cache) -> None:
    stored = chain(1, seed=11)
    store(cache, stored)
    mine = etag(payload(stored, 0))
    for tags in (mine, f"W/{mine}", f'"x", {mine}', "*"):
        for method in ("GET", "HEAD"):
            status, answer, response = single.raw.request(method, url(stored, 0), headers={"If-None-Match": tags})
            assert (status, answer, response.headers["ETag"]) == (304, {"raw": b""}, mine), tags
    assert single.get(url(stored, 0), {"If-None-Match": '"0000000000000000"'})[0] == 200


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=8000-", 8000, BLOCK_BYTES),
        ("bytes=8191-999999", BLOCK_BYTES - 1, BLOCK_BYTES),
        ("bytes=-5", BLOCK_BYTES - 5, BLOCK_BYTES),
        ("bytes=-999999", 0, BLOCK_BYTES),
    ],
)
def test_a_part_of_a_block(single: Single, cache: Cache, asked: str, start: int, stop: int) -> None:
    stored = chain(1, seed=12)
    store(cache, stored)
    status, body, response = single.get(url(stored, 0), {"Range": asked})
    assert (status, body) == (206, payload(stored, 0)[start:stop])
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{BLOCK_BYTES}"
    assert response.headers["ETag"] == etag(payload(stored, 0))


@pytest.mark.parametrize("asked", ["bytes=8192-", "bytes=99999-100000", "bytes=-0"])
def test_a_part_that_a_block_has_not(single: Single, cache: Cache, asked: str) -> None:
    stored = chain(1, seed=12)
    store(cache, stored)
    status, problem, response = single.raw.request("GET", url(stored, 0), headers={"Range": asked})
    check((status, problem), 416, "invalid-request", str(BLOCK_BYTES))
    assert response.headers["Content-Range"] == f"bytes */{BLOCK_BYTES}"


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "lines=0-1", "bytes=5-1", "bytes=-", "bytes", ""])
def test_ranges_that_are_ignored(single: Single, cache: Cache, asked: str) -> None:
    stored = chain(1, seed=12)
    store(cache, stored)
    status, body, _ = single.get(url(stored, 0), {"Range": asked})
    assert (status, body) == (200, payload(stored, 0))


def test_a_range_of_what_the_block_was(single: Single, cache: Cache) -> None:
    stored = chain(1, seed=12)
    store(cache, stored)
    mine = etag(payload(stored, 0))
    for tag, status in ((mine, 206), (f"W/{mine}", 200), ('"0"', 200), ("Sat, 01 Jan 2000 00:00:00 GMT", 200)):
        assert single.get(url(stored, 0), {"Range": "bytes=0-9", "If-Range": tag})[0] == status, tag


def test_delete_removes_it(single: Single, cache: Cache) -> None:
    stored = chain(1, seed=13)
    store(cache, stored)
    assert single.raw.request("DELETE", url(stored, 0))[:2] == (200, {"removed": 1})
    check(single.raw.request("GET", url(stored, 0))[:2], 404, "not-found", "not published")
    assert single.raw.request("DELETE", url(stored, 0))[:2] == (200, {"removed": 0})


def test_damage_in_memory_is_not_sent(single: Single, cache: Cache) -> None:
    damaged = chain(1, seed=14)
    store(cache, damaged)
    cache.flush()
    with cache.acquire(damaged) as read:
        read._plane.view(read.blocks[0])[100] ^= 1  # type: ignore[attr-defined]
    found = cache.stats()["counters"]["corrupt_blocks"].get("warm/checksum", 0)
    check(single.raw.request("GET", url(damaged, 0))[:2], 500, "corrupt-block", "warm", "removed")
    assert cache.stats()["counters"]["corrupt_blocks"]["warm/checksum"] == found + 1
    status, body, response = single.get(url(damaged, 0))
    assert (status, body, response.headers["Tierkv-Tier"]) == (200, payload(damaged, 0), "cold")
    assert cache.stats()["leases"]["read"] == 0


def test_a_block_on_disk_is_loaded_and_damage_there_is_not_sent() -> None:
    tiers = {**TIERS, "cold": {**TIERS["cold"], "codec": "raw"}}
    sound, damaged = chain(2, seed=15), chain(1, seed=16)
    with running(tiers) as daemon:
        with daemon.connect() as cache:
            store(cache, sound)
            store(cache, damaged)
        assert daemon.stop() == 0
        _damage(daemon.state_dir / "cold", payload(damaged, 0))
        daemon.start()
        single = Single(Raw(daemon.tcp_port))
        single.raw.json("PUT", "/v1/namespaces", SPEC.to_dict())
        head = single.raw.request("HEAD", url(sound, 1))[2]
        assert (head.headers["Tierkv-Tier"], head.headers["ETag"]) == ("cold", etag(payload(sound, 1)))
        check(single.raw.request("GET", url(sound, 1, "?wait_s=0"))[:2], 503, "not-loaded", "0 seconds")
        status, body, response = single.get(url(sound, 1))
        assert (status, body, response.headers["Tierkv-Tier"]) == (200, payload(sound, 1), "cold")
        assert single.get(url(sound, 1))[2].headers["Tierkv-Tier"] == "warm"
        status, problem, _ = single.raw.request("GET", url(damaged, 0))
        check((status, problem), 500, "corrupt-block", "removed")
        counters = single.raw.request("GET", "/v1/stats")[1]["counters"]
        assert counters["corrupt_blocks"] == {f"cold/{problem['cause']}": 1}
        assert single.get(url(damaged, 0))[0] == 404
        assert single.put(damaged, 0)[0] == 201
        assert single.get(url(damaged, 0))[1] == payload(damaged, 0)


def _damage(directory: Path, data: bytes) -> None:
    for path in directory.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 50)
                file.write(bytes([data[50] ^ 1]))
            return
    raise AssertionError("the block is in no file")


def test_no_room() -> None:
    with running({"warm": {"capacity": "2MiB"}, "cold": {"capacity": 0}}) as daemon, daemon.connect() as cache:
        full = chain(256, seed=17)
        with cache.reserve(full) as write:
            assert len(write.granted) > 100
            other = chain(1, seed=18)
            single = Single(Raw(daemon.tcp_port))
            check(single.put(other, 0), 503, "tier-full", "leased")
        eventually(lambda: single.put(other, 0)[0] == 201)


def test_a_long_chain_in_a_small_memory_keeps_its_head() -> None:
    """Without a cold tier a block must not push out the one before it."""
    with running({"warm": {"capacity": "2MiB"}, "cold": {"capacity": 0}}) as daemon, daemon.connect() as cache:
        single, long = Single(Raw(daemon.tcp_port)), chain(400, seed=19)
        for index in range(400):
            assert single.put(long, index)[0] == 201, index
        assert cache.stats()["leases"]["write"] == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(single: Single, daemon: Daemon, tmp_path: Path) -> None:
    written = chain(1, seed=20)
    (tmp_path / "block").write_bytes(payload(written, 0))
    target = f"http://localhost{url(written, 0)}"
    curl = ["curl", "--silent", "--show-error", "--fail", "--unix-socket", str(daemon.socket)]
    done = subprocess.run([*curl, "-T", tmp_path / "block", target], capture_output=True, check=True)
    assert json.loads(done.stdout)["stored"] is True
    subprocess.run([*curl, "-C", "100", "-o", tmp_path / "rest", target], check=True)
    assert (tmp_path / "rest").read_bytes()[-BLOCK_BYTES + 100 :] == payload(written, 0)[100:]


def test_groups_of_a_model_are_apart(single: Single) -> None:
    from tests.service.stranger import SPEC as TWO_GROUPS

    registered = single.raw.json("PUT", "/v1/namespaces", TWO_GROUPS)[1]
    name, sizes = registered["namespace"], registered["block_bytes"]
    first, second = "1" * 64, "2" * 64
    for group, size in enumerate(sizes):
        body = np.random.default_rng(group).bytes(size)
        path = f"/v1/{name}/blocks/{first}?group={group}"
        assert single.raw.request("PUT", path, body, OCTETS)[0] == 201
        assert single.get(path)[1] == body
    path = f"/v1/{name}/blocks/{second}?group=1&parent={first}"
    status, answer, _ = single.raw.request("PUT", path, bytes(sizes[1]), OCTETS)
    assert (status, answer["depth"]) == (201, 1)
    assert single.get(f"/v1/{name}/blocks/{second}?group=0")[0] == 404


def test_a_block_that_many_put_at_once_is_stored_once(single: Single, cache: Cache) -> None:
    written = chain(20, seed=21)
    with ThreadPoolExecutor(4) as clients:
        for index in range(20):
            answers = list(clients.map(lambda _, index=index: single.put(written, index), range(4)))
            assert sorted(status for status, _ in answers).count(201) == 1
            assert {status for status, _ in answers} <= {200, 201, 409}
    assert cache.lookup(written).blocks == 20


def test_the_tag_is_of_what_is_sent_where_the_disk_keeps_it_lossily() -> None:
    spec = KVSpec("lossy", "weights", "float32", 16, (KVGroup((0, 1), "full", 2, 16),), lossy="int8")
    exact = np.random.default_rng(0).standard_normal(BLOCK_BYTES // 4).astype("<f4").tobytes()
    path = f"/v1/{spec.namespace}/blocks/{'3' * 64}"
    with running() as daemon:
        single = Single(Raw(daemon.tcp_port))
        single.raw.json("PUT", "/v1/namespaces", spec.to_dict())
        assert single.raw.request("PUT", path, exact, OCTETS)[0] == 201
        assert single.get(path)[1] == exact
        assert daemon.stop() == 0
        daemon.start()
        single = Single(Raw(daemon.tcp_port))
        single.raw.json("PUT", "/v1/namespaces", spec.to_dict())
        tag = single.raw.request("HEAD", path)[2].headers["ETag"]
        status, close, response = single.get(path)
        assert (status, close == exact) == (200, False)
        assert response.headers["ETag"] == etag(close) == tag
        assert single.get(path)[1] == close
