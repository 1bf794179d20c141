"""Signatures between nodes: what was signed is accepted, anything else is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.daemon import ROOT
from tierkv.errors import Unauthorized
from tierkv.keys import share_key, tenant_key
from tierkv.service.cluster.signing import WINDOW_S, NodeKey, read_signature, secret_fingerprint

VECTORS = json.loads((ROOT / "tests" / "vectors" / "node.json").read_text())
secrets = st.binary(min_size=32, max_size=32)
bodies = st.binary(max_size=100)
paths = st.text(st.characters(codec="ascii", exclude_characters="\n\r"), max_size=30).map("/".__add__)
times = st.integers(0, 10**12 - 1 - WINDOW_S)


@given(secrets, st.sampled_from(["GET", "POST"]), paths, bodies, times, st.floats(-WINDOW_S, WINDOW_S))
def test_what_was_signed_is_accepted(secret: bytes, method: str, path: str, body: bytes, at: int, skew: float) -> None:
    header = NodeKey(secret).sign(method, path, body, at=at)
    signature = read_signature([header], now=at + skew)
    NodeKey(secret).check(signature, method, path, body)


@given(secrets, secrets, paths, bodies, st.data())
def test_nothing_else_is(secret: bytes, other: bytes, path: str, body: bytes, data: st.DataObject) -> None:
    key = NodeKey(secret)
    signature = read_signature([key.sign("POST", path, body)])
    mac = bytearray.fromhex(signature.mac)
    mac[data.draw(st.integers(0, 31))] ^= 1 << data.draw(st.integers(0, 7))
    seconds, _, nonce = signature.stamp.partition("-")
    wrong = [
        (signature, "GET", path, body),
        (signature, "POST", path + "x", body),
        (signature, "POST", path, body + b"\0"),
        (replace(signature, mac=mac.hex()), "POST", path, body),
        (replace(signature, stamp=f"{int(seconds) + 1}-{nonce}"), "POST", path, body),
        (replace(signature, stamp=f"{seconds}-{'0' * 16}"), "POST", path, body),
    ]
    for attempt in wrong:
        with pytest.raises(Unauthorized):
            key.check(*attempt)
    if other != secret:
        with pytest.raises(Unauthorized):
            NodeKey(other).check(signature, "POST", path, body)


@given(times, st.floats(WINDOW_S + 0.01, 1e6), st.booleans())
def test_old_and_early_ones_are_refused_before_the_body_is_read(at: int, off: float, early: bool) -> None:
    header = NodeKey(b"s" * 32).sign("POST", "/", b"", at=at)
    with pytest.raises(Unauthorized, match="clocks"):
        read_signature([header], now=at - off if early else at + off)


GOOD = NodeKey(b"s" * 32).sign("POST", "/", b"", at=1)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        [GOOD, GOOD],
        [GOOD + "0"],
        [GOOD[:-1]],
        [GOOD.upper()],
        [f" {GOOD}"],
        [f"-{GOOD}"],
        ["\u0661" + GOOD[1:]],
        [GOOD.replace("-", "_")],
    ],
)
def test_what_has_another_form_is_refused(headers: list[str]) -> None:
    with pytest.raises(Unauthorized, match="needs one header"):
        read_signature(headers, now=1)


def test_two_requests_are_never_signed_alike() -> None:
    key = NodeKey(b"s" * 32)
    assert key.sign("POST", "/", b"", at=1) != key.sign("POST", "/", b"", at=1)


@pytest.mark.parametrize("vector", VECTORS["signatures"], ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    key = NodeKey(bytes.fromhex(vector["secret"]))
    body = bytes.fromhex(vector["body"])
    header = key.sign(vector["method"], vector["path"], body, at=vector["at"], nonce=bytes.fromhex(vector["nonce"]))
    assert header == vector["header"]
    key.check(read_signature([header], now=vector["at"]), vector["method"], vector["path"], body)


def test_fingerprints() -> None:
    for vector in VECTORS["fingerprints"]:
        assert secret_fingerprint(bytes.fromhex(vector["secret"])) == vector["fingerprint"]
    derived: list[Callable[[bytes], bytes]] = [lambda s: tenant_key(s, "x"), lambda s: share_key(s, "x")]
    for derive in derived:  # nothing that is derived for others tells it
        assert not derive(b"s" * 32).hex().startswith(secret_fingerprint(b"s" * 32))
