"""docs/wire.md: a stranger can write a client from it, and what it says is what the daemon does."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service import stranger
from tests.service.daemon import ROOT, SPEC, Daemon, Raw
from tests.service.stranger import Stranger
from tierkv import wire
from tierkv.cache import BlockRef, Grant, Hit, LoadChoice, TicketProgress, Written
from tierkv.core.state import NamespaceInfo
from tierkv.errors import BodyMismatch, CorruptBlock, error_classes
from tierkv.keys import chain_root
from tierkv.service.messages import AcquireRequest, ChainRequest, ReserveRequest, parse
from tierkv.service.routes import ROUTES

DOCUMENT = (ROOT / "docs" / "wire.md").read_text()
VECTORS = json.loads((ROOT / "tests" / "vectors" / "wire.json").read_text())


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Stranger]:
    client = Stranger("127.0.0.1", daemon.tcp_port)
    yield client
    client.close()


def test_a_strangers_client_stores_and_reads_a_block(client: Stranger) -> None:
    spec, tokens, extra = stranger.SPEC, list(range(11)), {1: b"image"}
    registered = client.call("PUT", "/v1/namespaces", spec)
    name = registered["namespace"]
    assert name == stranger.namespace(spec)
    assert registered["block_bytes"] == [2 * 2 * 4 * 1 * 8 * 2, 1 * 2 * 4 * 2 * 4 * 2]
    hashes = stranger.chain(name, tokens, spec["block_tokens"], extra)
    assert len(hashes) == 2

    reserved = client.call("POST", f"/v1/{name}/reserve", {"hashes": "".join(hashes)})
    payloads = {}
    for index, group, state, _, _, length in reserved["grants"]:
        assert state == "granted"
        assert length == registered["block_bytes"][group]
        payloads[index, group] = bytes((index * 7 + group * 3 + at) % 256 for at in range(length))
    assert len(payloads) == 4
    assert client.put(name, reserved["lease"], payloads) == 4

    by_tokens = {"tokens": tokens, "extra_keys": {"1": b"image".hex()}}
    assert client.call("POST", f"/v1/{name}/lookup", by_tokens)["tokens"] == 8
    assert client.call("POST", f"/v1/{name}/lookup", {"tokens": tokens})["tokens"] == 4
    read = client.call("POST", f"/v1/{name}/acquire", by_tokens)
    assert (read["hit_blocks"], sum(read["tokens_by_tier"].values())) == (2, 8)
    assert client.get(name, read["lease"]) == payloads
    client.call("POST", f"/v1/leases/{read['lease']}/release", {})
    with pytest.raises(RuntimeError, match="urn:tierkv:problem:lease-lost"):
        client.call("POST", f"/v1/leases/{read['lease']}/renew", {"ttl_s": 1})


def test_a_stranger_stores_and_fetches_single_blocks(client: Stranger) -> None:
    registered = client.call("PUT", "/v1/namespaces", stranger.SPEC)
    name, sizes = registered["namespace"], registered["block_bytes"]
    hashes = stranger.chain(name, list(range(50, 58)), stranger.SPEC["block_tokens"], {})
    payloads = {
        (at, group): bytes((at + group + n) % 256 for n in range(sizes[group])) for at in (0, 1) for group in (0, 1)
    }
    assert client.head_block(name, hashes[0], 0) is None
    for (at, group), payload in payloads.items():
        parent = hashes[at - 1] if at else ""
        stored = client.put_block(name, hashes[at], group, payload, parent)
        assert (stored["stored"], stored["depth"], stored["length"]) == (True, at, sizes[group])
        assert client.put_block(name, hashes[at], group, payload, parent) == {**stored, "stored": False}
    for (at, group), payload in payloads.items():
        assert client.get_block(name, hashes[at], group) == payload
        assert client.head_block(name, hashes[at], group) == len(payload)
    assert client.call("POST", f"/v1/{name}/lookup", {"hashes": "".join(hashes)})["blocks"] == 2
    with pytest.raises(RuntimeError, match="urn:tierkv:problem:conflict"):
        client.put_block(name, "0" * 64, 0, payloads[0, 0], "1" * 64)


def test_the_stranger_is_one() -> None:
    tree = ast.parse(Path(stranger.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"hashlib", "json", "socket", "struct", "typing", "xxhash"}


def test_every_route_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"`(GET|HEAD|PUT|POST|DELETE) (/[^`?]*)", DOCUMENT))
    served = {(route.method, route.path) for route in ROUTES}
    names = {"{ns}": "{namespace}"}
    for method, path in served.copy():
        kind = next((kind for kind in ("ticket", "session") if f"/{kind}s/" in path), "lease")
        named = path.replace("{ns}", names["{ns}"]).replace("{id}", f"{{{kind}}}")
        served.discard((method, path))
        served.add((method, named))
    assert documented == served


def test_every_problem_is_documented_with_its_status() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", DOCUMENT, re.MULTILINE))
    assert {slug: int(status) for slug, status in rows.items()} == {
        slug: cls.status for slug, cls in error_classes().items()
    }


def test_examples_in_the_document_are_json() -> None:
    examples = re.findall(r"^    (\{\"(?:.|\n    )*\})", DOCUMENT, re.MULTILINE)
    assert len(examples) >= 7
    for example in examples:
        json.loads(re.split(r"\}  +answers", example + " ")[0] + ("}" if "answers" in example else ""))


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=lambda vector: vector["name"])
def test_frames(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["payload"])
    frame = wire.Frame(vector["index"], vector["group"], len(payload), int(vector["checksum"], 16))
    encoded = bytes.fromhex(vector["frame"])
    assert wire.pack_frame(frame) + payload == encoded
    assert wire.unpack_frame(encoded[: wire.FRAME_BYTES]) == frame


@pytest.mark.parametrize("vector", VECTORS["broken_frames"], ids=lambda vector: vector["name"])
def test_broken_frames(vector: dict[str, Any]) -> None:
    with pytest.raises(BodyMismatch):
        wire.unpack_frame(bytes.fromhex(vector["header"]))


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "hit": (wire.pack_hit, wire.unpack_hit),
    "progress": (wire.pack_progress, wire.unpack_progress),
    "choice": (wire.pack_choice, wire.unpack_choice),
    "refs": (wire.pack_refs, wire.unpack_refs),
    "grants": (wire.pack_grants, wire.unpack_grants),
    "written": (wire.pack_written, wire.unpack_written),
}
OBJECTS: dict[str, Any] = {
    "hit": Hit(2, 32, ("hot", "warm")),
    "progress": TicketProgress("loading", 8, 3, 65536, 24576),
    "choice": LoadChoice("partly", 2, 0.25, 1.5),
    "refs": [
        BlockRef(0, 0, "hot", 0, 8192, 0x6FB8C59B8652A78B),
        BlockRef(1, 1, "warm", 2**40, 8192, 0x0000000000000001),
    ],
    "grants": [
        Grant(0, 0, "granted", "warm", 24576, 8192),
        Grant(1, 0, "present"),
        Grant(2, 0, "busy"),
        Grant(3, 0, "no_room"),
    ],
    "written": [Written(0, 0, 8192, 0x6FB8C59B8652A78B), Written(0, 1, 4096, 2**64 - 1)],
}


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_messages(vector: dict[str, Any]) -> None:
    as_json, as_msgpack = vector["json"].encode(), bytes.fromhex(vector["msgpack"])
    message = wire.decode(as_msgpack, wire.MSGPACK_TYPE)
    assert wire.encode(message, wire.JSON_TYPE) == as_json
    assert wire.encode(message, wire.MSGPACK_TYPE) == as_msgpack
    structure = vector.get("structure")
    if structure is not None:
        pack, unpack = STRUCTURES[structure]
        part = message[vector["field"]] if "field" in vector else message
        assert pack(OBJECTS[structure]) == part
        assert unpack(part) == OBJECTS[structure]


def test_every_structure_has_a_vector() -> None:
    assert {vector.get("structure") for vector in VECTORS["messages"]} >= set(STRUCTURES)


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_chains_in_requests(vector: dict[str, Any]) -> None:
    """Both encodings of a request mean the same blocks."""
    model = {"acquire": AcquireRequest, "reserve": ReserveRequest, "lookup": ChainRequest}[vector["verb"]]
    info = NamespaceInfo(SPEC.namespace, SPEC.fingerprint, SPEC, (SPEC.layout(),), (SPEC.layout().nbytes,))
    assert chain_root(info.fingerprint).hex() == VECTORS["root"]
    for encoded, kind in (
        (vector["json"].encode(), wire.JSON_TYPE),
        (bytes.fromhex(vector["msgpack"]), wire.MSGPACK_TYPE),
    ):
        request = parse(model, wire.decode(encoded, kind))
        assert [item.hex() for item in request.chain(info, 100)] == vector["hashes"]


def test_problems_are_the_vectors() -> None:
    assert {vector["type"].rpartition(":")[2] for vector in VECTORS["problems"]} == set(error_classes())
    for vector in VECTORS["problems"]:
        error = wire.error_from_problem(vector["status"], json.dumps(vector).encode())
        assert error.slug == vector["type"].rpartition(":")[2]
        assert (error.message, error.remedy) == (vector["detail"], vector["remedy"])
        assert ("cause" in vector) == isinstance(error, CorruptBlock)
        assert wire.problem_from_error(error) == vector


def test_the_vectors_work_on_a_daemon(daemon: Daemon, raw: Raw) -> None:
    raw.json("PUT", "/v1/namespaces", SPEC.to_dict())
    for vector in VECTORS["chains"]:
        path = f"/v1/{SPEC.namespace}/{vector['verb']}"
        assert raw.request("POST", path, vector["json"].encode(), {"Content-Type": "application/json"})[0] == 200
        body = bytes.fromhex(vector["msgpack"])
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        status, answer, response = raw.request("POST", path, body, headers)
        assert (status, response.headers["Content-Type"]) == (200, "application/msgpack")
        lease = wire.decode(answer["raw"], wire.MSGPACK_TYPE).get("lease")
        if lease:
            raw.json("POST", f"/v1/leases/{lease}/abort", {})
