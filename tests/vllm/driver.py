"""A vLLM engine that obeys lines of JSON: ``python -m tests.vllm.driver '{"model": ...}'``.

Each line on standard input is a command, each line on standard output an answer or a finished request. Whatever the
engine itself prints goes to standard error.

    {"do": "run", "requests": [{"id", "tokens", "max_tokens", "salt", "lora"}], "abort": {id: tokens},
     "pause": n, "late": n}
        -> {"finished": id, "tokens": [...], "cached": n, "reason": "length", "first_s", "last_s"} for each as it ends
        -> {"paused": n} when n have finished; goes on at the next line, with the "late" last requests, held until then
        -> {"ran": seconds, "cpu_s": seconds of this process}
    {"do": "reset", "external": false}  forget the engine's own prefix cache, and the connector's -> {"reset": true}
    {"do": "metrics"}                   -> {"metrics": {name: sum over labels}}
    {"do": "exit"}                      shut down in an orderly way

``lora`` is the directory of an adapter. ``abort`` takes a request back once it has so many tokens. Seconds count from
the command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any


class Driver:
    """One engine in this process."""

    def __init__(self, answers: int, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._answers = os.fdopen(answers, "w", buffering=1)
        self._engine = LLM(**arguments).llm_engine
        self._adapters: dict[str, Any] = {}
        self.say({"ready": True})

    def say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def serve(self, commands: Iterator[str]) -> None:
        for line in commands:
            command = json.loads(line)
            match command["do"]:
                case "run":
                    self._run(command, commands)
                case "reset":
                    self.say({"reset": self._engine.reset_prefix_cache(False, command["external"])})
                case "metrics":
                    self.say({"metrics": self._metrics()})
                case "exit":
                    return

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _run(self, command: dict[str, Any], commands: Iterator[str]) -> None:
        began, cpu_began = time.monotonic(), time.process_time()
        requests = command["requests"]
        late = len(requests) - command["late"]
        for request in requests[:late]:
            self._add(request)
        aborting: dict[str, int] = command.get("abort", {})
        pause, finished = command.get("pause"), 0
        first_s: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answer = output.outputs[0]
                first_s.setdefault(output.request_id, time.monotonic() - began)
                aborted = len(answer.token_ids) >= aborting.get(output.request_id, sys.maxsize)
                if aborted and not output.finished:
                    self._engine.abort_request([output.request_id])
                if aborted or output.finished:
                    finished += 1
                    self.say(
                        {
                            "finished": output.request_id,
                            "tokens": list(answer.token_ids),
                            "cached": output.num_cached_tokens,
                            "reason": answer.finish_reason or "abort",
                            "first_s": first_s[output.request_id],
                            "last_s": time.monotonic() - began,
                        }
                    )
            if pause is not None and finished >= pause:
                pause = None
                self.say({"paused": finished})
                next(commands)
                for request in requests[late:]:
                    self._add(request)
        self.say({"ran": time.monotonic() - began, "cpu_s": time.process_time() - cpu_began})

    def _add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        sampling = SamplingParams(max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        adapter, lora = None, request.get("lora")
        if lora:
            number = len(self._adapters) + 1
            adapter = self._adapters.setdefault(lora, LoRARequest(os.path.basename(lora), number, lora))
        self._engine.add_request(request["id"], prompt, sampling, lora_request=adapter)

    def _metrics(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            if hasattr(metric, "value"):
                sums[metric.name] = sums.get(metric.name, 0.0) + metric.value
        return sums


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    driver = Driver(answers, json.loads(sys.argv[1]))
    try:
        driver.serve(iter(sys.stdin.readline, ""))
    finally:
        driver.close()


if __name__ == "__main__":
    main()
