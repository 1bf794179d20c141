"""Bad requests: each a problem document that names the thing and the remedy; the daemon stays, nothing is published."""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import xxhash

from tests.service.daemon import BLOCK_BYTES, PATIENCE_S, SPEC, Daemon, PeakMemory, Raw, chain, payload, store
from tierkv.cache import Cache, Chain

NS = f"/v1/{SPEC.namespace}"
JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}
FRAMES = {"Content-Type": "application/vnd.tierkv.blocks"}
HASHES = ["00" * 32]


@pytest.fixture(scope="module")
def cache(daemon: Daemon) -> Iterator[Cache]:
    with daemon.connect() as cache:
        yield cache


def check(status: int, problem: dict[str, Any], expected: int, slug: str, *words: str) -> None:
    assert (status, problem.get("type")) == (expected, f"urn:tierkv:problem:{slug}"), problem
    assert problem["status"] == expected
    assert problem["remedy"]
    assert all(word in problem["detail"] + problem["remedy"] for word in words), problem


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, ["exactly one of hashes, engine_hashes and tokens"]),
        ({"hashes": HASHES, "tokens": [1]}, ["exactly one"]),
        ({"hashes": HASHES, "hahses": []}, ["hahses", "Extra inputs"]),
        ({"hashes": ["00" * 31]}, ["32 bytes"]),
        ({"hashes": "00" * 33}, ["multiple of 32"]),
        ({"hashes": ["zz"]}, ["hashes", "hex"]),
        ({"hashes": [5]}, ["hashes"]),
        ({"hashes": 5}, ["hashes"]),
        ({"tokens": ["one"]}, ["tokens"]),
        ({"tokens": [1.0] * 16}, ["tokens"]),
        ({"tokens": [-1] * 16}, ["token id"]),
        ({"tokens": [2**32] * 16}, ["token id"]),
        ({"tokens": [10**30] * 16}, ["tokens"]),
        ({"tokens": [True] * 16}, ["tokens"]),
        ({"tokens": [1] * 16, "extra_keys": {"zero": "00"}}, ["extra_keys", "index"]),
        ({"tokens": [1] * 16, "extra_keys": {"0": 5}}, ["extra_keys"]),
        ([], ["mapping", "dictionary"][1:]),
        ("text", ["dictionary"]),
        (None, ["dictionary"]),
    ],
)
def test_a_chain_that_is_none(cache: Cache, raw: Raw, message: Any, words: list[str]) -> None:
    for verb in ("lookup", "prefetch", "acquire", "reserve"):
        check(*raw.json("POST", f"{NS}/{verb}", message), 400, "invalid-request", *words)


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("acquire", {"wait_s": -1}),
        ("acquire", {"wait_s": "1"}),
        ("acquire", {"ttl_s": 0}),
        ("acquire", {"ttl_s": -5}),
        ("acquire", {"max_blocks": -1}),
        ("acquire", {"max_blocks": 1.5}),
        ("acquire", {"tiers": "warm"}),
        ("reserve", {"start": -1}),
        ("reserve", {"start": 2}),
        ("reserve", {"stop": 2}),
        ("reserve", {"ttl_s": 0}),
        ("reserve", {"wait_s": None}),
    ],
)
def test_a_field_of_a_wrong_type_or_value(cache: Cache, raw: Raw, verb: str, fields: dict[str, Any]) -> None:
    status, problem = raw.json("POST", f"{NS}/{verb}", {"hashes": HASHES, **fields})
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
    assert next(iter(fields)) in problem["detail"] or "within a chain" in problem["detail"]


@pytest.mark.parametrize("constant", ["NaN", "Infinity"])
def test_times_are_finite(cache: Cache, raw: Raw, constant: str) -> None:
    body = f'{{"hashes": [], "wait_s": {constant}}}'.encode()
    status, problem, _ = raw.request("POST", f"{NS}/acquire", body, JSON)
    check(status, problem, 400, "invalid-request", "wait_s")


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b'{"hashes": [', JSON, ["valid application/json"]),
        (b"\xff\xfe", JSON, ["valid application/json"]),
        (b"[" * 200_000, JSON, ["valid application/json"]),
        (b'{"hashes":[]} trailing', JSON, ["valid application/json"]),
        (b"\x81\xa6hashes", MSGPACK, ["valid application/msgpack"]),
        (b"\x80\x80", MSGPACK, ["valid application/msgpack"]),
        (b"\x91" * 200_000, MSGPACK, ["valid application/msgpack"]),
        (b"\xdd\xff\xff\xff\xff", MSGPACK, ["valid application/msgpack"]),
        (b"\xdf\xff\xff\xff\xff", MSGPACK, ["valid application/msgpack"]),
        (b"\xc6\xff\xff\xff\xff", MSGPACK, ["valid application/msgpack"]),
        (b"\x81\x01\x02", MSGPACK, ["valid application/msgpack"]),
        (b"\xc1", MSGPACK, ["valid application/msgpack"]),
        (b"hello", {"Content-Type": "text/plain"}, ["text/plain", "send application/msgpack"]),
        (b"hello", {}, ["octet-stream"]),
        (b"x", {**JSON, "Content-Encoding": "gzip"}, ["Content-Encoding"]),
        (b"x", {**JSON, "Content-Encoding": "x"}, ["Content-Encoding"]),
    ],
)
def test_a_body_nobody_can_decode(
    cache: Cache, raw: Raw, body: bytes, headers: dict[str, str], words: list[str]
) -> None:
    status, problem, _ = raw.request("POST", f"{NS}/lookup", body, headers)
    check(status, problem, 400, "invalid-request", *words)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\x81\xa6tokens\xdd\x00\x7f\xff\xf0" + b"\x80" * 0x7FFFF0, MSGPACK),
        (b"\x81\xa6tokens\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF, MSGPACK),
        (b"\x81\xa6tokens\x97" + (b"\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF) * 7, MSGPACK),
        (b"\x81\xa6tokens\xdd\x00\x0f\xff\xff" + b"\xa1x" * 0xFFFFF, MSGPACK),
        (b"\xdd\x00\x0f\xff\xff" * 100 + b"\x90" * 0xFFFFF, MSGPACK),
        (b'{"tokens": [' + b"{}," * 2_000_000 + b"1]}", JSON),
        (b'{"tokens": [' + b'"",' * 2_000_000 + b"1]}", JSON),
    ],
)
def test_small_messages_that_would_be_huge_in_memory(
    cache: Cache, daemon: Daemon, raw: Raw, body: bytes, headers: dict[str, str]
) -> None:
    assert daemon.process is not None
    memory = PeakMemory(daemon.process.pid)
    status, problem, _ = raw.request("POST", f"{NS}/lookup", body, headers)
    check(status, problem, 400, "invalid-request")
    assert len(problem["detail"]) < 2000
    assert memory.growth() < 150 << 20


@pytest.mark.parametrize("chunked", [False, True])
def test_a_message_over_the_limit(cache: Cache, daemon: Daemon, chunked: bool) -> None:
    size = 9 << 20
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        head = f"POST {NS}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        if chunked:
            connection.sendall(f"{size:x}\r\n".encode())
        connection.sendall(b" " * size)
        if chunked:
            connection.sendall(b"\r\n0\r\n\r\n")
        answer = connection.makefile("rb").readline()
    assert b" 413 " in answer


def test_an_unknown_route_and_a_method_it_has_not(raw: Raw) -> None:
    status, problem, _ = raw.request("GET", "/v2/lookup")
    check(status, problem, 404, "not-found", "/v2/lookup")
    status, problem, response = raw.request("DELETE", "/healthz")
    check(status, problem, 405, "invalid-request", "DELETE /healthz")
    assert response.headers["Allow"] == "GET,HEAD"


@pytest.mark.parametrize("verb", ["lookup", "prefetch", "acquire", "reserve"])
def test_an_unregistered_namespace(raw: Raw, verb: str) -> None:
    check(*raw.json("POST", f"/v1/{'ab' * 32}/{verb}", {"hashes": HASHES}), 404, "not-found", "PUT its spec")


def test_an_unregistered_namespace_cannot_be_cleared(raw: Raw) -> None:
    status, problem, _ = raw.request("DELETE", f"/v1/namespaces/{'ab' * 32}")
    check(status, problem, 404, "not-found", "abab")


def group(layers: list[Any], kind: str, kv_heads: Any, head_dim: Any) -> dict[str, Any]:
    return {"groups": [{"layers": layers, "kind": kind, "kv_heads": kv_heads, "head_dim": head_dim}]}


@pytest.mark.parametrize(
    ("changes", "status", "slug", "words"),
    [
        ({"modle": "x"}, 400, "invalid-request", ["modle"]),
        ({"groups": []}, 400, "invalid-request", ["group"]),
        ({"groups": [{"layers": [0]}]}, 400, "invalid-request", ["groups.0"]),
        (
            {"groups": [{"layers": [0], "kind": "full", "kv_heads": 1, "head_dim": 1.5}]},
            400,
            "invalid-request",
            ["dim"],
        ),
        (
            {"groups": [{"layers": [0.5], "kind": "full", "kv_heads": 1, "head_dim": 1}]},
            400,
            "invalid-request",
            ["layers"],
        ),
        (
            {"groups": [{"layers": [0], "kind": "full", "kv_heads": True, "head_dim": 1}]},
            400,
            "invalid-request",
            ["heads"],
        ),
        (group([0], "half", 1, 1), 400, "invalid-request", ["half"]),
        ({"groups": "x"}, 400, "invalid-request", ["groups"]),
        ({"dtype": "float12"}, 400, "invalid-request", ["float12", "bfloat16"]),
        ({"block_tokens": 0}, 400, "invalid-request", ["block_tokens"]),
        ({"block_tokens": "16"}, 400, "invalid-request", ["block_tokens"]),
        ({"attention": {"rope": 1}}, 400, "invalid-request", ["attention"]),
        ({"block_tokens": 1 << 20}, 409, "spec-mismatch", ["warm tier", "fewer tokens per block"]),
        ({"block_tokens": 1 << 62}, 409, "spec-mismatch", ["warm tier"]),
    ],
)
def test_a_spec_that_cannot_be(raw: Raw, changes: dict[str, Any], status: int, slug: str, words: list[str]) -> None:
    check(*raw.json("PUT", "/v1/namespaces", {**SPEC.to_dict(), **changes}), status, slug, *words)


def test_a_spec_without_a_field_it_needs(raw: Raw) -> None:
    spec = SPEC.to_dict()
    del spec["weights"]
    status, problem = raw.json("PUT", "/v1/namespaces", spec)
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
    assert "weights" in problem["detail"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "localhost."])
def test_a_foreign_host(raw: Raw, host: str) -> None:
    status, problem, _ = raw.request("GET", "/healthz", headers={"Host": host})
    check(status, problem, 400, "invalid-request", "not this daemon")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80"])
def test_its_own_host(raw: Raw, host: str) -> None:
    assert raw.request("GET", "/healthz", headers={"Host": host})[0] == 200


def test_a_page_of_another_site(raw: Raw) -> None:
    status, problem, _ = raw.request("POST", "/v1/flush", headers={"Origin": "http://evil.example"})
    check(status, problem, 400, "invalid-request", "other sites")


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "../x", "a\u00e9"])
def test_a_tenant_name_that_is_none(cache: Cache, raw: Raw, tenant: str) -> None:
    status, problem, _ = raw.request("POST", f"{NS}/lookup", b'{"hashes": []}', {**JSON, "Tierkv-Tenant": tenant})
    check(status, problem, 400, "invalid-request", "tenant name", "letters")


@pytest.mark.parametrize("verb", ["commit", "abort", "release", "renew"])
def test_a_lease_nobody_has(raw: Raw, verb: str) -> None:
    message = {"commit": {"blocks": []}, "renew": {"ttl_s": 1}}.get(verb, {})
    check(*raw.json("POST", f"/v1/leases/nobodys/{verb}", message), 410, "lease-lost", "again")


def test_a_ticket_nobody_has(raw: Raw) -> None:
    for method in ("GET", "DELETE"):
        status, problem, _ = raw.request(method, "/v1/tickets/nobodys")
        check(status, problem, 404, "not-found", "ticket")


@pytest.mark.parametrize("name", ["zz", "abc"])
def test_a_block_named_by_something_else_than_a_hash(cache: Cache, raw: Raw, name: str) -> None:
    status, problem, _ = raw.request("DELETE", f"{NS}/blocks/{name}")
    check(status, problem, 400, "invalid-request", "hex")


def frame(index: int, data: bytes, **changes: Any) -> bytes:
    head = {
        "magic": b"TKVB",
        "version": 1,
        "flags": 0,
        "group": 0,
        "index": index,
        "reserved": 0,
        "length": len(data),
        "checksum": xxhash.xxh3_64_intdigest(data),
        **changes,
    }
    return struct.pack("<4sBBHIIQQ", *head.values()) + data


class Writing:
    """A reservation of two blocks over HTTP bodies, on a chain of its own."""

    def __init__(self, raw: Raw, cache: Cache, seed: int) -> None:
        self.raw, self.cache = raw, cache
        self.chain = chain(2, seed=seed)
        hashes = [item.hex() for item in self.chain.hashes]
        status, answer = raw.json("POST", f"{NS}/reserve", {"hashes": hashes})
        assert status == 200, answer
        self.lease = answer["lease"]
        self.data = [payload(self.chain, index) for index in range(2)]

    def put(self, body: bytes, headers: dict[str, str] = FRAMES) -> tuple[int, dict[str, Any]]:
        return self.raw.request("POST", f"{NS}/blocks:put?lease={self.lease}", body, headers)[:2]

    def published(self) -> int:
        return self.cache.lookup(self.chain).blocks

    def end(self) -> None:
        assert self.raw.json("POST", f"/v1/leases/{self.lease}/abort", {})[0] == 200


@pytest.fixture
def writing(cache: Cache, raw: Raw, request: pytest.FixtureRequest) -> Writing:
    return Writing(raw, cache, abs(hash(request.node.name)))


def test_frames_that_are_none(writing: Writing) -> None:
    data = writing.data
    good = frame(0, data[0])
    for body, slug, words in (
        (good + good, "invalid-request", ["not open"]),
        (good + frame(7, data[1]), "invalid-request", ["block 7", "not open"]),
        (good + frame(1, data[1], group=3), "invalid-request", ["group 3"]),
        (good + frame(1, data[1][:-1]), "body-mismatch", [str(BLOCK_BYTES)]),
        (good + frame(1, data[1])[:-1], "body-mismatch", ["more bytes than the rest"]),
        (good + frame(1, data[1], length=2**63), "body-mismatch", [str(2**63)]),
        (good + b"junk", "body-mismatch", ["cut to 4"]),
        (good + b"\0" * 32, "body-mismatch", ["version 1"]),
        (good + frame(1, data[1], version=2), "body-mismatch", ["version 1"]),
        (good + frame(1, data[1], flags=1), "body-mismatch", ["version 1"]),
    ):
        status, problem = writing.put(body)
        assert (status, problem["type"]) == (400, f"urn:tierkv:problem:{slug}"), problem
        assert all(word in problem["detail"] for word in words), problem
        assert writing.published() == 0
    assert writing.put(good + frame(1, data[1])) == (200, {"accepted": 2})
    assert writing.published() == 2


def test_a_frame_with_a_wrong_checksum(writing: Writing) -> None:
    status, problem = writing.put(frame(0, writing.data[0]) + frame(1, writing.data[1], checksum=1))
    check(status, problem, 422, "checksum-mismatch", "block 1", "nothing of this commit was published")
    assert problem["cause"] == "checksum"
    assert writing.published() == 0
    writing.end()


def test_a_body_of_another_type_or_without_length(writing: Writing, daemon: Daemon) -> None:
    check(*writing.put(frame(0, writing.data[0]), JSON), 400, "invalid-request", "vnd.tierkv.blocks")
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        head = f"POST {NS}/blocks:put?lease={writing.lease} HTTP/1.1\r\nHost: localhost\r\nContent-Type: x/y\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        assert b" 413 " in connection.makefile("rb").readline()
    writing.end()


def test_a_client_that_hangs_up_in_the_middle_of_a_body(writing: Writing, daemon: Daemon) -> None:
    body = frame(0, writing.data[0]) + frame(1, writing.data[1])
    head = f"POST {NS}/blocks:put?lease={writing.lease} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: {FRAMES['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
    for cut in (10, BLOCK_BYTES, BLOCK_BYTES + 32, len(body) - 1):
        with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
            connection.sendall(head.encode() + body[:cut])
    assert writing.published() == 0
    assert writing.put(body) == (200, {"accepted": 2})
    assert writing.published() == 2


def test_a_body_that_ends_in_a_broken_chunk(cache: Cache, daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        head = f"POST {NS}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nnonsense\r\n{{}}\r\n".encode())
        assert b" 400 " in connection.makefile("rb").readline()


def test_the_slot_of_a_lease_that_has_ended_is_not_written(cache: Cache, daemon: Daemon, raw: Raw) -> None:
    """The slot of an aborted reservation becomes another block's while a late body for it still arrives."""
    late = Writing(raw, cache, 991)
    body = frame(0, b"\xff" * BLOCK_BYTES)
    head = f"POST {NS}/blocks:put?lease={late.lease} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: {FRAMES['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S) as connection:
        connection.sendall(head.encode() + body[: BLOCK_BYTES // 2])
        raw.request("GET", "/healthz")  # the daemon has begun to read the body by now
        late.end()
        other = chain(2, seed=992)
        assert store(cache, other) == 2
        connection.sendall(body[BLOCK_BYTES // 2 :])
        assert b" 410 " in connection.makefile("rb").readline()
    with cache.acquire(other) as read:
        assert [bytes(read.view(index)) for index in range(2)] == [payload(other, index) for index in range(2)]


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 0, BLOCK_BYTES]],
        [[0, 0, BLOCK_BYTES, "0" * 15]],
        [[0, 0, BLOCK_BYTES, "0x" + "0" * 14]],
        [[0, 0, BLOCK_BYTES, 0]],
        [[0.0, 0, BLOCK_BYTES, "0" * 16]],
        [["0", 0, BLOCK_BYTES, "0" * 16]],
        [[0, 0, BLOCK_BYTES - 1, "0" * 16]],
        [[0, 0, BLOCK_BYTES, "0" * 16]] * 2,
        [[9, 0, BLOCK_BYTES, "0" * 16]],
        [[-1, 0, BLOCK_BYTES, "0" * 16]],
        [[2**70, 0, BLOCK_BYTES, "0" * 16]],
        ["row"],
        [None],
    ],
)
def test_a_commit_that_names_no_open_block(writing: Writing, rows: list[Any]) -> None:
    status, problem = writing.raw.json("POST", f"/v1/leases/{writing.lease}/commit", {"blocks": rows})
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request"), problem
    assert writing.published() == 0
    writing.end()


def test_a_commit_of_what_was_not_written(writing: Writing) -> None:
    rows = [[0, 0, BLOCK_BYTES, "0123456789abcdef"]]
    check(
        *writing.raw.json("POST", f"/v1/leases/{writing.lease}/commit", {"blocks": rows}),
        422,
        "checksum-mismatch",
        "block 0",
    )
    assert writing.published() == 0
    writing.end()


def test_a_lease_belongs_to_its_tenant_and_its_kind(writing: Writing, cache: Cache) -> None:
    body = json.dumps({"blocks": []}).encode()
    path = f"/v1/leases/{writing.lease}/commit"
    status, problem, _ = writing.raw.request("POST", path, body, {**JSON, "Tierkv-Tenant": "other"})
    check(status, problem, 410, "lease-lost")
    check(*writing.raw.json("POST", f"/v1/leases/{writing.lease}/release", {}), 400, "invalid-request", "writing")
    check(*writing.raw.json("POST", f"{NS}/blocks:get", {"lease": writing.lease}), 400, "invalid-request", "reading")
    writing.end()


def test_blocks_that_are_not_part_of_a_lease(cache: Cache, raw: Raw) -> None:
    stored: Chain = chain(2, seed=77)
    store(cache, stored)
    hashes = [item.hex() for item in stored.hashes]
    status, answer = raw.json("POST", f"{NS}/acquire", {"hashes": hashes})
    assert (status, answer["hit_blocks"]) == (200, 2)
    for blocks in ([[2, 0]], [[0, 1]], [[0, 0], [0, 0]]):
        message = {"lease": answer["lease"], "blocks": blocks}
        check(*raw.json("POST", f"{NS}/blocks:get", message), 400, "invalid-request", "not part of this lease")
    for blocks in ([[0]], ["x"], [[0, 0, 0]], [[0.0, 0]]):
        message = {"lease": answer["lease"], "blocks": blocks}
        check(*raw.json("POST", f"{NS}/blocks:get", message), 400, "invalid-request", "blocks")
    check(*raw.json("POST", f"/v1/leases/{answer['lease']}/commit", {"blocks": []}), 400, "invalid-request", "writing")
    assert raw.json("POST", f"/v1/leases/{answer['lease']}/release", {})[0] == 200


def test_a_slow_reader_is_cut_off_when_its_lease_ends(cache: Cache, daemon: Daemon, raw: Raw) -> None:
    """It must not get what has been put in the place of its blocks."""
    many = chain(400, seed=78)
    assert store(cache, many) == 400
    hashes = b"".join(many.hashes)
    body = msgpack.packb({"hashes": hashes})
    with socket.socket(socket.AF_UNIX) as connection:  # its buffers are small
        connection.settimeout(PATIENCE_S)
        connection.connect(str(daemon.socket))
        status, answer, _ = raw.request("POST", f"{NS}/acquire", body, MSGPACK)
        assert (status, answer["hit_blocks"]) == (200, 400)
        ask = json.dumps({"lease": answer["lease"]}).encode()
        head = f"POST {NS}/blocks:get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(ask)}\r\n\r\n".encode() + ask)
        received = connection.recv(100)
        assert b" 200 " in received
        assert raw.json("POST", f"/v1/leases/{answer['lease']}/release", {})[0] == 200
        try:
            while chunk := connection.recv(1 << 20):
                received += chunk
        except ConnectionResetError:
            pass
    assert len(received) < 400 * BLOCK_BYTES
