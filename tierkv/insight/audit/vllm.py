"""The same question asked of a running vLLM, from outside: does an answer from cached KV equal one without?

A request with a `cache_salt` that nobody has used finds no KV at all, in vLLM or below it. So one prompt is sent three
times: as it is, which may be served from a cache; under a new salt, which is computed; and under another new salt in
two parts, the first half before the whole, which is computed in steps of another size and so shows how far apart two
computations are. Answers are greedy, and compared by tokens and log probabilities.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tierkv.errors import InvalidRequest, Unavailable
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.prompts import Prompt
from tierkv.insight.audit.result import AuditResult, LogitsDifference, Reason, Verdict
from tierkv.insight.audit.sampling import Sampler

__all__ = ["Answer", "Endpoint", "audit_endpoint", "compare_answers"]

_TOP = 5
_MARGIN = 6.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer.

    Attributes
    ----------
    tokens, logprobs
        Its tokens as the server names them, and their log probabilities.
    top
        For each, the most likely tokens and their log probabilities.
    cached_tokens
        Prompt tokens that were not computed for it.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]
    cached_tokens: int


class Endpoint:
    """An OpenAI-compatible completions endpoint of vLLM.

    Parameters
    ----------
    url
        ``http://host:port`` or ``https://``, without ``/v1``.
    model
        The model's name there. Empty: the first that it serves.
    token
        Sent as a bearer token, if not empty.
    timeout_s
        Longest wait for one answer.

    Raises
    ------
    InvalidRequest
        `url` is not of that form.
    """

    def __init__(self, url: str, *, model: str = "", token: str = "", timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url} is no address of a server", remedy="name it as http://127.0.0.1:8000")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._base = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._url = url
        self._model = model

    def complete(self, prompt: Prompt, max_tokens: int, *, salt: str = "") -> Answer:
        """Have a prompt answered greedily.

        Raises
        ------
        Unavailable
            Nobody answers, or not in time.
        InvalidRequest
            The server refuses, or does not say what is needed: tokens, log probabilities, how much was cached.
        """
        message: dict[str, Any] = {
            "model": self._named(),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": _TOP,
            "return_tokens_as_token_ids": True,
            **({"cache_salt": salt} if salt else {}),
        }
        answer = self._request("POST", "/v1/completions", message)
        try:
            said = answer["choices"][0]["logprobs"]
            details = answer["usage"].get("prompt_tokens_details") or {}
            return Answer(
                tokens=tuple(map(str, said["tokens"])),
                logprobs=tuple(map(float, said["token_logprobs"])),
                top=tuple({str(name): float(value) for name, value in row.items()} for row in said["top_logprobs"]),
                cached_tokens=int(details.get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"{self._url} answers without log probabilities",
                remedy="audit vLLM's completions endpoint, started with --enable-prompt-tokens-details",
            ) from error

    def forget(self) -> None:
        """Have vLLM drop its own prefix cache, so that hits come from below it. Errors as `complete`.

        Needs a server with ``VLLM_SERVER_DEV_MODE=1``.
        """
        self._request("POST", "/reset_prefix_cache", None)

    def _named(self) -> str:
        if not self._model:
            try:
                self._model = str(self._request("GET", "/v1/models", None)["data"][0]["id"])
            except (KeyError, TypeError, IndexError) as error:
                raise InvalidRequest(f"{self._url} names no model", remedy="pass --model") from error
        return self._model

    def _request(self, method: str, path: str, message: Mapping[str, Any] | None) -> Any:
        connection = self._connect(self._host, self._port, timeout=self._timeout_s)
        try:
            body = None if message is None else json.dumps(message)
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url} does not answer: {error}", remedy="is the server running?") from error
        finally:
            connection.close()
        if response.status != 200:
            raise InvalidRequest(
                f"{self._url}{path} answers {response.status}: {data[:200].decode(errors='replace')}",
                remedy="see the server's log",
            )
        try:
            return json.loads(data) if data else {}
        except ValueError as error:
            raise InvalidRequest(f"{self._url}{path} does not answer in JSON", remedy="check the address") from error


def audit_endpoint(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    sample: float,
    floor: float,
    log: AuditLog,
    seed: bytes | None = None,
) -> list[AuditResult]:
    """Send every prompt, and a share of those that were served from a cache three more times. Errors as `complete`.

    Parameters
    ----------
    max_tokens
        Length of the answers that are compared.
    sample, seed
        As in `Sampler`.
    floor
        What log probabilities may differ by in any case, in nats: of two equal computations nothing can be learned.
    log
        Where results are counted; prompts that no cache served count as ``miss``.
    """
    sampler = Sampler(sample, seed=seed)
    results = []
    for prompt in prompts:
        began = time.perf_counter()
        served = endpoint.complete(prompt, max_tokens)
        if not served.cached_tokens:
            log.skip("miss")
        elif sampler.take():
            computed = endpoint.complete(prompt, max_tokens, salt=secrets.token_hex(16))
            salt = secrets.token_hex(16)
            endpoint.complete(prompt[: max(1, len(prompt) // 2)], 1, salt=salt)
            other = endpoint.complete(prompt, max_tokens, salt=salt)
            result = compare_answers(served, computed, other, floor=floor, seconds=time.perf_counter() - began)
            log.add(result)
            results.append(result)
    return results


def compare_answers(served: Answer, computed: Answer, other: Answer, *, floor: float, seconds: float) -> AuditResult:
    """Judge an answer by two that were computed without any cache.

    It is ``corrupt`` if it chose a token that is not among the likeliest of the computed one, ``outside`` if it chose
    another one that was not as good, or was surer or less sure of its tokens than two computations are of theirs.
    """
    measured = _distance(computed, other)
    limit = _MARGIN * max(measured, floor)
    at = _first_other(served, computed)
    off = _distance(served, computed)
    verdict: Verdict = "ok"
    reason: Reason = ""
    near_tie = True
    if at is not None:
        choices = computed.top[at] if at < len(computed.top) else {}
        choice = served.tokens[at] if at < len(served.tokens) else ""
        near_tie = choice in choices and max(choices.values()) - choices[choice] <= limit
        if not near_tie:
            verdict, reason = "outside" if choice in choices else "corrupt", "token"
    if verdict == "ok" and off > limit:
        verdict, reason = "outside", "logits"
    exact = at is None and served.logprobs == computed.logprobs
    return AuditResult(
        engine="vllm",
        namespace="",
        verdict=verdict,
        basis="exact" if exact else "envelope",
        reason=reason,
        dtype="",
        lossy="",
        tokens=served.cached_tokens,
        block_tokens=0,
        planes=(),
        logits=LogitsDifference(
            max_difference=off, limit=limit, kl=None, kl_limit=None, same_token=at is None, near_tie=near_tie
        ),
        finding=None,
        answer_token=at,
        computed=2,
        seconds=seconds,
        at=time.time(),
    )


def _first_other(left: Answer, right: Answer) -> int | None:
    for index, (mine, theirs) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if mine != theirs:
            return index
    shorter, longer = sorted((len(left.tokens), len(right.tokens)))
    return shorter if shorter != longer else None


def _distance(left: Answer, right: Answer) -> float:
    """Return how far apart the log probabilities of the tokens are that both answers begin with."""
    common = _first_other(left, right)
    pairs = zip(left.logprobs[:common], right.logprobs[:common], strict=False)
    return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)
