"""/openapi.json describes every route and no other, and what it says is what the daemon takes and answers."""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jsonschema_rs
import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, reject, settings
from schemathesis.config import SchemathesisConfig

from tests.insight.live.audits import AUDIT
from tests.service.daemon import BLOCK_BYTES, SPEC, TIERS, Daemon, Raw, chain, running, store
from tierkv.cache import Cache
from tierkv.keys import HASH_BYTES
from tierkv.service.catalog import OPERATIONS
from tierkv.service.cluster.signing import NODE_HEADER, NodeKey
from tierkv.service.openapi import openapi_document
from tierkv.service.routes import ROUTES
from tierkv.wire import FRAME_TYPE, MSGPACK_TYPE, PAYLOAD_TYPE

NS = f"/v1/{SPEC.namespace}"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
DOCUMENT = openapi_document()


def test_every_route_is_described_and_no_other() -> None:
    served = {(route.method, route.path) for route in ROUTES}
    described = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == served == set(OPERATIONS)
    names = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)


def test_the_document_is_served(raw: Raw) -> None:
    status, answer, response = raw.request("GET", "/openapi.json")
    assert (status, answer) == (200, DOCUMENT)
    assert response.headers["Content-Type"].startswith("application/json")


def test_every_schema_is_one() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name in schemas:
        jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


class Described:
    """Asks the daemon and compares each answer with its description."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw

    def ask(
        self, method: str, path: str, message: Any = None, *, pattern: str = "", headers: Mapping[str, str] = NO_HEADERS
    ) -> dict[str, Any]:
        headers = {"Content-Type": MSGPACK_TYPE, "Accept": MSGPACK_TYPE, **headers}
        body = None if message is None else msgpack.packb(message)
        status, raw_answer, response = self.raw.request(method, path, body, headers)
        pattern = pattern or path.replace(SPEC.namespace, "{ns}")
        described = DOCUMENT["paths"][pattern][method.lower()]["responses"][str(status)]
        (kind,) = {response.headers["Content-Type"]} & set(described["content"])
        answer = msgpack.unpackb(raw_answer["raw"]) if kind == MSGPACK_TYPE else raw_answer
        schema = {**described["content"][kind]["schema"], "components": DOCUMENT["components"]}
        jsonschema_rs.validate(schema, answer)
        assert set(answer) <= set(DOCUMENT["components"]["schemas"][_name(described, kind)].get("properties", {}))
        found: dict[str, Any] = answer
        return found


def _name(described: dict[str, Any], kind: str) -> str:
    return str(described["content"][kind]["schema"]["$ref"].rpartition("/")[2])


def test_answers_have_the_fields_that_are_described(daemon: Daemon, raw: Raw) -> None:
    """All of them and no more: what is added to an answer is added to the document."""
    described = Described(raw)
    hashes = {"hashes": [item.hex() for item in chain(3, seed=900).hashes]}
    described.ask("PUT", "/v1/namespaces", SPEC.to_dict())
    described.ask("GET", "/v1/namespaces")
    reserved = described.ask("POST", f"{NS}/reserve", hashes)
    described.ask("POST", f"/v1/leases/{reserved['lease']}/renew", {"ttl_s": 1}, pattern="/v1/leases/{id}/renew")
    described.ask("POST", f"/v1/leases/{reserved['lease']}/commit", {"blocks": []}, pattern="/v1/leases/{id}/commit")
    described.ask("POST", f"/v1/leases/{reserved['lease']}/abort", pattern="/v1/leases/{id}/abort")
    with daemon.connect() as cache:
        store(cache, chain(3, seed=900))
    assert described.ask("POST", f"{NS}/lookup", hashes)["blocks"] == 3
    described.ask("POST", f"{NS}/touch", hashes)
    assert described.ask("POST", f"{NS}/where", hashes)["nodes"][0]["blocks"] == 3
    question = msgpack.packb({"tenant": "default", "namespace": SPEC.namespace, "hashes": hashes["hashes"]})
    key = NodeKey((daemon.state_dir / "secret").read_bytes())
    signed = {NODE_HEADER: key.sign("POST", "/v1/peer/lookup", question)}
    described.ask("POST", "/v1/peer/lookup", msgpack.unpackb(question), headers=signed)
    ticket = described.ask("POST", f"{NS}/prefetch", hashes)["ticket"]
    described.ask("GET", f"/v1/tickets/{ticket}", pattern="/v1/tickets/{id}")
    described.ask("POST", f"/v1/tickets/{ticket}/wait", {}, pattern="/v1/tickets/{id}/wait")
    described.ask("DELETE", f"/v1/tickets/{ticket}", pattern="/v1/tickets/{id}")
    acquired = described.ask("POST", f"{NS}/acquire", {**hashes, "compute_s": 1.0, "session": "s"})
    described.ask("POST", f"/v1/leases/{acquired['lease']}/release", {}, pattern="/v1/leases/{id}/release")
    more = {"hashes": b"".join(chain(5, seed=901).hashes)}
    assert described.ask("POST", f"{NS}/acquire", {**more, "compute_s": 1.0})["compute"] is not None
    described.ask("POST", f"{NS}/pin", {**hashes, "ttl_s": 5})
    described.ask("POST", f"{NS}/unpin", hashes)
    described.ask("GET", "/v1/trace")
    described.ask("POST", f"{NS}/breakpoints", {**hashes, "breakpoints": [{"tokens": 20, "ttl": "1h"}, {}]})
    described.ask("POST", f"{NS}/acquire", {**hashes, "session": "s"})
    rows = described.ask("GET", "/v1/trace?after=0", pattern="/v1/trace")["rows"]
    assert set(rows[-1]) == set(DOCUMENT["components"]["schemas"]["TraceRow"]["properties"])
    described.ask("POST", f"{NS}/sessions/s/pause", {"expected_s": 1}, pattern="/v1/{ns}/sessions/{id}/pause")
    described.ask("POST", f"{NS}/sessions/s/end", pattern="/v1/{ns}/sessions/{id}/end")
    for path in ("/v1/segments", "/v1/tenants", "/v1/stats", "/v1/trunks", "/v1/insight", "/healthz", "/readyz"):
        described.ask("GET", path)
    assert described.ask("POST", "/v1/insight/audits", {"audits": [AUDIT.to_dict()]})["accepted"] == 1
    described.ask("POST", "/v1/flush")
    described.ask("GET", "/v1/attach")
    described.ask("POST", f"{NS}/lookup", {"hashes": [], "nonsense": 1})
    described.ask("DELETE", f"{NS}/blocks/{hashes['hashes'][2]}", pattern="/v1/{ns}/blocks/{hash}")
    described.ask("DELETE", f"/v1/namespaces/{SPEC.namespace}", pattern="/v1/namespaces/{ns}")


def test_an_unknown_parameter_is_refused(raw: Raw) -> None:
    for method, path in (("GET", "/healthz"), ("HEAD", f"{NS}/blocks/{'0' * 64}"), ("POST", f"{NS}/lookup")):
        status, problem, _ = raw.request("GET" if method == "HEAD" else method, f"{path}?wiat_s=1")
        assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
        assert "wiat_s" in problem["detail"]


# From here on: schemathesis asks a daemon whatever its document allows, and what it forbids.


@schemathesis.serializer(MSGPACK_TYPE)
def _as_msgpack(context: Any, value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except OverflowError:  # it has integers of 64 bits only
        reject()
    return packed


@schemathesis.deserializer(MSGPACK_TYPE)
def _from_msgpack(context: Any, response: Any) -> Any:
    return msgpack.unpackb(response.content)


@schemathesis.serializer(FRAME_TYPE)
def _as_frames(context: Any, value: Any) -> bytes:
    return str(value).encode()


@schemathesis.serializer(PAYLOAD_TYPE)
def _as_block(context: Any, value: Any) -> bytes:
    """The document does not know the namespace's block size."""
    return str(value).encode()[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """What JSON Schema cannot say: whole numbers are written without a fraction (not 1.0), layers ascend."""
    if isinstance(body, float) and body.is_integer():
        return int(body)
    if isinstance(body, list):
        return [map_body(context, item) for item in body]
    if isinstance(body, dict):
        mapped = {name: map_body(context, item) for name, item in body.items()}
        if isinstance(mapped.get("layers"), list) and all(isinstance(layer, int) for layer in mapped["layers"]):
            mapped["layers"].sort()
        return mapped
    return body


# 410 is to a lease what 404 is to a ticket; the checks know 404 only.
USUAL = ["2xx", "3xx", "401", "403", "404", "409", "410", "429"]
REFUSED = ["400", "401", "403", "404", "405", "406", "409", "410", "413", "415", "422", "428", "429"]
CONFIG: dict[str, Any] = {
    "checks": {
        "positive_data_acceptance": {"expected-statuses": USUAL},
        "negative_data_rejection": {"expected-statuses": REFUSED},
    },
    "operations": [
        # Over TCP everybody is refused.
        {"include-path": "/v1/attach", "checks": {"positive_data_acceptance": {"expected-statuses": [*USUAL, "400"]}}},
        # Blocks outside a chain cannot be reserved.
        {
            "include-path": "/v1/{ns}/reserve",
            "checks": {"positive_data_acceptance": {"expected-statuses": [*USUAL, "400"]}},
        },
        # A checksum that fits the body is not to be guessed.
        {
            "include-path": "/v1/{ns}/blocks/{hash}",
            "checks": {"positive_data_acceptance": {"expected-statuses": [*USUAL, "422"]}},
        },
    ],
}


def narrowed(document: dict[str, Any], known: dict[str, list[str]]) -> dict[str, Any]:
    """The document about what there is: else every question would be about a namespace that is not."""
    document = copy.deepcopy(document)
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in known:
                    parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
    schemas = document["components"]["schemas"]
    schemas["AcquireRequest"]["properties"]["groups"] = {"enum": [None, [0]]}
    schemas["TouchRequest"]["properties"]["group"] = {"const": 0}
    # schemathesis 4.32 turns prefixItems of answers into items in place and then refuses the schema. The rows are
    # compared with the real document above.
    schemas["Acquired"]["properties"]["blocks"]["items"] = {"type": "array"}
    schemas["Reserved"]["properties"]["grants"]["items"] = {"type": "array"}
    return document


STORED = chain(3, seed=902)
HASHES = [item.hex() for item in STORED.hashes]
KNOWN = {
    "ns": [SPEC.namespace],
    "hash": [*HASHES, "0" * 2 * HASH_BYTES],
    "parent": HASHES,
    "group": ["0"],
    "part": ["page.js", "icon.svg"],
}
SCHEMA = schemathesis.openapi.from_dict(narrowed(DOCUMENT, KNOWN), config=SchemathesisConfig.from_dict(CONFIG))


ID = re.compile("[A-Za-z0-9_-]{16}")
MAKERS = {
    "/v1/tickets/{id}": ("prefetch", "ticket"),
    "/v1/tickets/{id}/wait": ("prefetch", "ticket"),
    "/v1/leases/{id}/release": ("acquire", "lease"),
    "/v1/leases/{id}/renew": ("acquire", "lease"),
    "/v1/leases/{id}/abort": ("reserve", "lease"),
}
"""What makes what a path names."""


class Questioned:
    """A daemon that waits for nothing long."""

    def __init__(self, daemon: Daemon, cache: Cache) -> None:
        self.url = daemon.tcp_url
        self._raw = Raw(daemon.tcp_port)
        self._cache = cache
        self._seeds = itertools.count(1000)

    def prepare(self, case: schemathesis.Case) -> None:
        """Let what a question names be there, as far as it names it well."""
        store(self._cache, STORED)
        verb, made = MAKERS.get(case.operation.path, ("", ""))
        if verb and ID.fullmatch(str(case.path_parameters.get("id"))):
            about = chain(1, seed=next(self._seeds)) if verb == "reserve" else STORED
            answer = self._raw.json("POST", f"{NS}/{verb}", {"hashes": about.hashes[0].hex()})[1]
            case.path_parameters["id"] = answer[made]


@pytest.fixture(scope="module")
def questioned() -> Iterator[Questioned]:
    with running({**TIERS, "limits": {"wait": 0.05, "lease": 5}}) as daemon, daemon.connect() as cache:
        yield Questioned(daemon, cache)
        assert daemon.process is not None
        assert daemon.process.poll() is None, daemon.log
        assert "Traceback" not in daemon.log


# Events do not end by themselves.
@SCHEMA.exclude(path="/v1/events").parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_daemon_does_what_the_document_says(case: schemathesis.Case, questioned: Questioned) -> None:
    questioned.prepare(case)
    case.call_and_validate(base_url=questioned.url)
