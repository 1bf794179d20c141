"""Audits of an endpoint, against a server that stands for an engine whose cache is sound, or is not.

The real engine is audited in tests/vllm.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tierkv.errors import InvalidRequest, Unavailable
from tierkv.insight.audit import AuditLog
from tierkv.insight.audit.vllm import Answer, Endpoint, audit_endpoint, compare_answers

Speak = Callable[[dict[str, Any]], Any]
PROMPT = tuple(range(40))


def answer(tokens: list[str], logprobs: list[float], cached: int, runner_up: float = -3.0) -> dict[str, Any]:
    top = [{token: value, "other": runner_up} for token, value in zip(tokens, logprobs, strict=True)]
    return {
        "choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
    }


@contextmanager
def serving(speak: Speak) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that says what `speak` says; yields its address and the requests it gets."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(200, {"data": [{"id": "the-model"}]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            message = json.loads(body) if body else {"path": self.path}
            message["authorization"] = self.headers.get("Authorization")
            heard.append(message)
            said = speak(message)
            self.say(*said) if isinstance(said, tuple) else self.say(200, said)

        def say(self, status: int, message: Any) -> None:
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def audit(speak: Speak, count: int = 3, sample: float = 1.0) -> tuple[list[Any], AuditLog, list[dict[str, Any]]]:
    log = AuditLog(alarm=False)
    with serving(speak) as (url, heard):
        results = audit_endpoint(
            Endpoint(url, token="secret"),
            [PROMPT] * count,
            max_tokens=3,
            sample=sample,
            floor=0.001,
            log=log,
            seed=b"seed",
        )
    return results, log, heard


def test_equal_answers_are_ok_and_salts_are_new_every_time() -> None:
    results, log, heard = audit(lambda message: answer(["a", "b"], [-0.1, -0.2], 0 if "cache_salt" in message else 32))
    assert [(result.verdict, result.basis, result.tokens) for result in results] == [("ok", "exact", 32)] * 3
    assert log.verdicts["ok"] == 3
    asked = [(message.get("cache_salt"), len(message["prompt"])) for message in heard]
    assert [length for _, length in asked] == [40, 40, 20, 40] * 3
    salts = [salt for salt, _ in asked if salt]
    assert len(set(salts)) == 6
    assert all(asked[start][0] is None and asked[start + 2][0] == asked[start + 3][0] for start in (0, 4, 8))
    assert {message["model"] for message in heard} == {"the-model"}
    assert {message["authorization"] for message in heard} == {"Bearer secret"}


def test_a_share_of_the_hits_is_audited_and_misses_are_not() -> None:
    results, log, heard = audit(lambda message: answer(["a"], [-0.1], 32), count=40, sample=0.2)
    assert 0 < len(results) < 20
    assert len(heard) == 40 + 3 * len(results)
    results, log, heard = audit(lambda message: answer(["a"], [-0.1], 0))
    assert (results, log.skipped, len(heard)) == ([], {"miss": 3}, 3)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "verdict", "reason", "at"),
    [
        (["a", "b"], [-0.1005, -0.2], "ok", "", None),
        (["a", "b"], [-0.9, -0.2], "outside", "logits", None),
        (["a", "other"], [-0.1, -0.2], "outside", "token", 1),
        (["a", "c"], [-0.1, -0.2], "corrupt", "token", 1),
        (["a"], [-0.1], "corrupt", "token", 1),
    ],
)
def test_a_cache_that_changes_answers_is_found(
    tokens: list[str], logprobs: list[float], verdict: str, reason: str, at: int | None
) -> None:
    def speak(message: dict[str, Any]) -> Any:
        return answer(["a", "b"], [-0.1, -0.2], 0) if "cache_salt" in message else answer(tokens, logprobs, 32)

    results, log, _ = audit(speak, count=1)
    assert [(result.verdict, result.reason, result.answer_token) for result in results] == [(verdict, reason, at)]
    assert log.verdicts[verdict] == 1


def said(tokens: list[str], logprobs: list[float], runner_up: float) -> Answer:
    top = tuple({token: value, "other": runner_up} for token, value in zip(tokens, logprobs, strict=True))
    return Answer(tuple(tokens), tuple(logprobs), top, 32)


def test_a_near_tie_may_tip_and_noise_widens_what_is_allowed() -> None:
    tied, tipped = said(["a", "b"], [-0.1, -0.7], -0.701), said(["a", "other"], [-0.1, -0.7], -0.701)
    assert compare_answers(tipped, tied, tied, floor=0.001, seconds=0).verdict == "ok"
    assert compare_answers(tipped, tied, tied, floor=0.0001, seconds=0).verdict == "outside"
    noisy = said(["a", "b"], [-0.12, -0.7], -0.701)
    far = said(["a", "b"], [-0.2, -0.7], -0.701)
    assert compare_answers(far, tied, tied, floor=0.001, seconds=0).reason == "logits"
    assert compare_answers(far, tied, noisy, floor=0.001, seconds=0).verdict == "ok"


@pytest.mark.parametrize(
    "said", [(500, b"broken"), (200, b"not json"), {"choices": []}, {"choices": [{"logprobs": None}], "usage": {}}]
)
def test_a_server_that_says_nothing_useful_is_named(said: Any) -> None:
    with serving(lambda message: said) as (url, _), pytest.raises(InvalidRequest, match=url):
        Endpoint(url, model="m").complete(PROMPT, 1)


def test_nobody_there_and_no_address() -> None:
    with serving(lambda message: {}) as (url, _):
        pass
    with pytest.raises(Unavailable, match=url):
        Endpoint(url, model="m").complete(PROMPT, 1)
    with pytest.raises(InvalidRequest, match="no address"):
        Endpoint("localhost:8000")


def test_forgetting_asks_for_it() -> None:
    with serving(lambda message: (200, b"")) as (url, heard):
        Endpoint(url).forget()
    assert heard[0]["path"] == "/reset_prefix_cache"
