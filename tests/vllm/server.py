"""vLLM's HTTP server as a user starts it: several processes, and a connector in two of them."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.process import free_port, mortal
from tests.vllm.engine import ENVIRONMENT, PATIENCE_S, ROOT, START_S, kill_session


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def request(self, method: str, path: str, message: Mapping[str, Any] | None = None) -> bytes:
        """Raises `AssertionError` for any other status than 200, and `OSError` where nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            body = None if message is None else json.dumps(message)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, (response.status, answer, self.log[-3000:])
            return answer
        finally:
            connection.close()

    def complete(self, tokens: Sequence[int], max_tokens: int, **more: Any) -> tuple[list[int], int]:
        """Return the tokens of a greedy answer, and how many of the prompt's tokens were not computed."""
        message = {
            "model": "m",
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        answer = json.loads(self.request("POST", "/v1/completions", message))
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["token_ids"], (details or {}).get("cached_tokens") or 0

    def reset(self) -> None:
        self.request("POST", "/reset_prefix_cache")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log[-6000:]
            assert time.monotonic() < deadline, self.log[-6000:]
            try:
                self.request("GET", "/health")
            except OSError:
                time.sleep(0.1)
            else:
                return


@contextmanager
def server(model: Path, log: Path, transfer: Mapping[str, Any], *arguments: str) -> Iterator[Server]:
    """A server that is ready, dead at the end with all its processes."""
    port = free_port()
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "m",
        ),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "4096", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer), *arguments),
    ]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}  # which serves /reset_prefix_cache
    with log.open("wb") as output:
        process = subprocess.Popen(
            mortal(command), stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True
        )
    started = Server(process, port, log)
    try:
        started.wait_ready()
        yield started
    finally:
        kill_session(process)
