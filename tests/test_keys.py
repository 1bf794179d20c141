"""Block names: golden vectors, independence of the process, and what must change them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache import Chain
from tierkv.errors import InvalidRequest
from tierkv.keys import adopt_chain, block_key, chain_hashes, chain_root, share_key, tenant_key
from tierkv.spec import KVGroup, KVSpec

VECTORS = Path(__file__).parent / "vectors" / "keys.json"


def compute(case: dict[str, Any]) -> dict[str, Any]:
    """What the library makes of a vector's inputs; lists and hex digits only."""
    root = chain_root(bytes.fromhex(case["fingerprint"]))
    extra = {int(index): bytes.fromhex(value) for index, value in case["extra_keys"].items()}
    hashes = chain_hashes(root, case["tokens"], case["block_tokens"], extra)
    adopted = adopt_chain(root, [bytes.fromhex(item) for item in case["engine_hashes"]])
    key = tenant_key(bytes.fromhex(case["secret"]), case["tenant"])
    return {
        "root": root.hex(),
        "hashes": [item.hex() for item in hashes],
        "adopted": [item.hex() for item in adopted],
        "tenant_key": key.hex(),
        "share_key": share_key(bytes.fromhex(case["secret"]), case["tenant"]).hex(),
        "block_keys": [block_key(key, item, group).hex() for item in hashes for group in (0, 1)],
    }


def by_hand(case: dict[str, Any]) -> dict[str, Any]:
    """The same from the definition, with nothing but hashlib."""

    def h(data: bytes, key: bytes = b"") -> bytes:
        return blake2b(data, digest_size=32, key=key).digest()

    root = h(b"tierkv" + bytes.fromhex(case["fingerprint"]))
    hashes, previous = [], root
    for index in range(len(case["tokens"]) // case["block_tokens"]):
        block = case["tokens"][index * case["block_tokens"] : (index + 1) * case["block_tokens"]]
        ids = b"".join(token.to_bytes(4, "little") for token in block)
        previous = h(previous + ids + bytes.fromhex(case["extra_keys"].get(str(index), "")))
        hashes.append(previous)
    key = h(b"tenant\0" + case["tenant"].encode(), bytes.fromhex(case["secret"]))
    return {
        "root": root.hex(),
        "hashes": [item.hex() for item in hashes],
        "adopted": [h(root + bytes.fromhex(item)).hex() for item in case["engine_hashes"]],
        "tenant_key": key.hex(),
        "share_key": h(b"share\0" + case["tenant"].encode(), bytes.fromhex(case["secret"])).hex(),
        "block_keys": [h(item + bytes([group, 0, 0, 0]), key).hex() for item in hashes for group in (0, 1)],
    }


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(VECTORS.read_text())["cases"]
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    assert compute(case) == case["expected"]
    assert by_hand(case) == case["expected"]


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_names_do_not_depend_on_the_process(seed: str) -> None:
    program = (
        "import json; from tests.test_keys import cases, compute; print(json.dumps([compute(c) for c in cases()]))"
    )
    here = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(here)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, cwd=here, capture_output=True, check=True)
    assert json.loads(found.stdout) == [case["expected"] for case in cases()]


ROOT = chain_root(bytes(32))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_a_hash_covers_all_tokens_before_it_and_nothing_after(tokens: list[int], block_tokens: int) -> None:
    hashes = chain_hashes(ROOT, tokens, block_tokens)
    assert len(hashes) == len(tokens) // block_tokens
    for index in range(len(hashes)):
        assert chain_hashes(ROOT, tokens[: (index + 1) * block_tokens], block_tokens) == hashes[: index + 1]
    for position in range(len(hashes) * block_tokens):
        changed = list(tokens)
        changed[position] ^= 1
        other = chain_hashes(ROOT, changed, block_tokens)
        first = position // block_tokens
        assert other[:first] == hashes[:first]
        assert not set(other[first:]) & set(hashes)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64", "uint64", ">i4"])
def test_the_integer_type_of_tokens_does_not_matter(dtype: str) -> None:
    tokens = list(range(48))
    assert chain_hashes(ROOT, np.array(tokens, dtype=dtype), 16) == chain_hashes(ROOT, tokens, 16)
    strided = np.repeat(np.array(tokens, dtype=dtype), 2)[::2]
    assert chain_hashes(ROOT, strided, 16) == chain_hashes(ROOT, tokens, 16)


@pytest.mark.parametrize(
    "tokens", [[-1] * 16, [2**32] * 16, [0.5] * 16, [[1, 2], [3, 4]], ["a"] * 16, [True] * 16, [2**70] * 16]
)
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequest):
        chain_hashes(ROOT, tokens, 2)


def test_everything_that_changes_kv_changes_the_name() -> None:
    tokens = list(range(32))
    plain = chain_hashes(ROOT, tokens, 16)
    salted = chain_hashes(ROOT, tokens, 16, {0: b"salt"})
    image = chain_hashes(ROOT, tokens, 16, {1: b"image"})
    assert not set(plain) & set(salted)
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert chain_hashes(ROOT, tokens, 16, {0: b""}) == plain
    assert not set(chain_hashes(chain_root(bytes(31) + b"\1"), tokens, 16)) & set(plain)
    key = tenant_key(bytes(32), "a")
    names = {
        block_key(key, plain[0], 0),
        block_key(key, plain[0], 1),
        block_key(key, plain[1], 0),
        block_key(tenant_key(bytes(32), "b"), plain[0], 0),
        block_key(tenant_key(bytes(31) + b"\1", "a"), plain[0], 0),
    }
    assert len(names) == 5


def test_a_chain_names_its_namespace() -> None:
    spec = KVSpec("m", "w", "float16", 16, (KVGroup((0,), "full", 1, 8),))
    chain = Chain.of(spec, range(40), {1: b"image"})
    assert chain.namespace == spec.namespace
    assert chain.hashes == tuple(chain_hashes(chain_root(spec.fingerprint), list(range(40)), 16, {1: b"image"}))
    assert len(chain) == 2
