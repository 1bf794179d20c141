"""Traces as chains of keys, and where the public ones are."""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path

import pytest

from tierkv.replay.trace import Trace, read_trace

BESIDE = Path(__file__).parents[1].parent / "shared" / "traces"
TRACES = Path(os.environ.get("TIERKV_TRACES", BESIDE))
NAMES = (
    "mooncake_conversation_first1000.jsonl.gz",
    "mooncake_conversation_full.jsonl.gz",
    "mooncake_synthetic_full.jsonl.gz",
    "weka_claudecode_48s_b512.jsonl.gz",
)
needs_traces = pytest.mark.skipif(not (TRACES / "golden.json").is_file(), reason="TIERKV_TRACES names no such folder")


@cache
def public(name: str) -> Trace:
    return read_trace(TRACES / name)


@cache
def block_key(block: int) -> bytes:
    return blake2b(block.to_bytes(8, "little"), digest_size=32).digest()


def chains(trace: Trace) -> list[list[bytes]]:
    return [[block_key(block) for block in request.blocks] for request in trace.requests]
