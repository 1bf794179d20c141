"""A client written from docs/wire.md alone: plain sockets, JSON, and no line of the project's code."""

import hashlib
import json
import socket
import struct
from typing import Any

import xxhash

FRAME = struct.Struct("<4sBBHIIQQ")
FRAMES = "application/vnd.tierkv.blocks"


class Stranger:
    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), 30)
        self._reader = self._socket.makefile("rb")

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def exchange(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, dict[str, str], bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTierkv-Tenant: stranger\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        status = int(self._reader.readline().split()[1])
        headers: dict[str, str] = {}
        while (line := self._reader.readline().decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        answer = b"" if method == "HEAD" else self._reader.read(int(headers["content-length"]))
        return status, headers, answer

    def put_block(self, namespace: str, block: str, group: int, payload: bytes, parent: str) -> dict[str, Any]:
        path = f"/v1/{namespace}/blocks/{block}?group={group}" + (f"&parent={parent}" if parent else "")
        status, headers, body = self.exchange("PUT", path, payload, "application/octet-stream")
        answer: dict[str, Any] = json.loads(body)
        if status >= 400:
            raise RuntimeError(answer["type"])
        assert (status == 201) == answer["stored"]
        assert answer["checksum"] == xxhash.xxh3_64_hexdigest(payload) == headers["etag"].strip('"')
        return answer

    def get_block(self, namespace: str, block: str, group: int) -> bytes:
        path = f"/v1/{namespace}/blocks/{block}?group={group}"
        status, headers, body = self.exchange("GET", path, b"", "application/json")
        assert (status, headers["content-type"]) == (200, "application/octet-stream")
        assert headers["etag"] == f'"{xxhash.xxh3_64_hexdigest(body)}"'
        assert headers["tierkv-tier"]
        return body

    def head_block(self, namespace: str, block: str, group: int) -> int | None:
        """Size of a block, None when it is not published."""
        path = f"/v1/{namespace}/blocks/{block}?group={group}"
        status, headers, _ = self.exchange("HEAD", path, b"", "application/json")
        assert status in (200, 404)
        return int(headers["content-length"]) if status == 200 else None

    def call(self, method: str, path: str, message: dict[str, Any]) -> dict[str, Any]:
        status, headers, body = self.exchange(method, path, json.dumps(message).encode(), "application/json")
        answer: dict[str, Any] = json.loads(body)
        if status >= 400:
            assert headers["content-type"].startswith("application/problem+json")
            raise RuntimeError(answer["type"])
        assert headers["tierkv-generation"]
        return answer

    def put(self, namespace: str, lease: str, blocks: dict[tuple[int, int], bytes]) -> int:
        body = b""
        for (index, group), payload in blocks.items():
            checksum = xxhash.xxh3_64_intdigest(payload)
            body += FRAME.pack(b"TKVB", 1, 0, group, index, 0, len(payload), checksum) + payload
        status, _, answer = self.exchange("POST", f"/v1/{namespace}/blocks:put?lease={lease}", body, FRAMES)
        assert status == 200, answer
        return int(json.loads(answer)["accepted"])

    def get(self, namespace: str, lease: str) -> dict[tuple[int, int], bytes]:
        message = json.dumps({"lease": lease}).encode()
        status, headers, body = self.exchange("POST", f"/v1/{namespace}/blocks:get", message, "application/json")
        assert (status, headers["content-type"]) == (200, FRAMES)
        blocks: dict[tuple[int, int], bytes] = {}
        at = 0
        while at < len(body):
            magic, version, flags, group, index, reserved, length, checksum = FRAME.unpack_from(body, at)
            assert (magic, version, flags, reserved) == (b"TKVB", 1, 0, 0)
            payload = body[at + FRAME.size : at + FRAME.size + length]
            assert xxhash.xxh3_64_intdigest(payload) == checksum
            blocks[index, group] = payload
            at += FRAME.size + length
        return blocks


SPEC: dict[str, Any] = {
    "model": "a stranger's model, \u00fcber",
    "weights": "1",
    "tokenizer": "",
    "dtype": "float16",
    "block_tokens": 4,
    "groups": [
        {"layers": [0, 2], "kind": "full", "kv_heads": 1, "head_dim": 8, "window": 0},
        {"layers": [1], "kind": "sliding_window", "kv_heads": 2, "head_dim": 4, "window": 8},
    ],
    "order": "NHD",
    "adapter": "",
    "quantization": "",
    "lossy": "",
    "exact_first_block": False,
    "attention": {"rope_theta": "10000"},
    "extra": {},
    **{f"{kind}_rank": 0 for kind in ("tp", "pp", "cp")},
    **{f"{kind}_size": 1 for kind in ("tp", "pp", "cp")},
}


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("tokenizer", "adapter", "quantization", "lossy"), ""),
    "exact_first_block": False,
    **{name: {} for name in ("attention", "extra")},
    **{f"{kind}_rank": 0 for kind in ("tp", "pp", "cp")},
    **{f"{kind}_size": 1 for kind in ("tp", "pp", "cp")},
    "order": "NHD",
}


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def namespace(spec: dict[str, Any]) -> str:
    kept = {name: value for name, value in spec.items() if name not in DEFAULTS or value != DEFAULTS[name]}
    kept["groups"] = [{k: v for k, v in group.items() if (k, v) != ("window", 0)} for group in spec["groups"]]
    return blake(json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hex()


def chain(name: str, tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> list[str]:
    previous = blake(b"tierkv" + bytes.fromhex(name))
    hashes = []
    for index in range(len(tokens) // block_tokens):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        previous = blake(previous + struct.pack(f"<{block_tokens}I", *block) + extra.get(index, b""))
        hashes.append(previous.hex())
    return hashes
