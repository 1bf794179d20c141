"""Real engines in processes of their own, which may be killed and may hang: every wait has a bound."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.service import daemon
from tests.vllm.models import VOCABULARY

ROOT = Path(__file__).parents[2]
START_S = 180.0
PATIENCE_S = 120.0
BLOCK = 32

PATIENT = {"wait_s": 30.0, "extra_s": 10.0}
"""Options of a connector that goes without blocks only where there are none, however busy the machine is."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got: its tokens, how many prompt tokens were not computed for it, why it ended, and when it had
    its first and its last token, in seconds since it was asked."""

    tokens: tuple[int, ...]
    cached: int
    reason: str
    first_s: float = field(compare=False)
    last_s: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    tokens: Sequence[int]
    max_tokens: int = 16
    salt: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A batch of requests: their answers in the order asked, the seconds all of it took, and those of the processor."""

    answers: list[Answer]
    seconds: float = field(compare=False)
    cpu_s: float = field(compare=False)

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers]

    @property
    def cached(self) -> list[int]:
        return [answer.cached for answer in self.answers]


def tierkv_config(url: str, **options: Any) -> dict[str, Any]:
    """The one line of configuration, as vLLM's ``--kv-transfer-config`` takes it."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**({"url": url} if url else {}), **options},
    }


class Engine:
    """A vLLM engine in a process of its own."""

    def __init__(self, log: Path, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._log = log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.driver", json.dumps(dict(arguments))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **environment},
                start_new_session=True,
            )
        self._ready = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Wait until it takes commands, which every command does: engines that are started together start at once."""
        if not self._ready:
            self._expect("ready", START_S)
            self._ready = True

    def run(self, asks: Sequence[Ask], *, abort: Mapping[int, int] | None = None) -> Outcome:
        """Have all requests served at the same time; `abort` takes a request back after so many tokens."""
        self.begin(asks, abort=abort)
        return self.finish()

    def begin(
        self,
        asks: Sequence[Ask],
        *,
        abort: Mapping[int, int] | None = None,
        pause: int | None = None,
        late: int = 0,
    ) -> None:
        """Send requests without waiting for their ends, but with `pause` until so many have ended.

        An engine looks for the blocks of all requests it was given long before it serves them: the last `late` ones are
        given to it after the pause only.
        """
        self._asked = len(asks)
        self._finished: dict[int, Answer] = {}
        command: dict[str, Any] = {
            "do": "run",
            "requests": [{**asdict(ask), "id": str(n)} for n, ask in enumerate(asks)],
            "abort": {str(n): tokens for n, tokens in (abort or {}).items()},
            "late": late,
        }
        if pause is not None:
            command["pause"] = pause
        self._tell(command)
        if pause is not None:
            self._expect("paused", PATIENCE_S)

    def resume(self) -> None:
        """Go on after the pause that `begin` asked for."""
        self._tell({})

    def finish(self, patience_s: float = PATIENCE_S) -> Outcome:
        ran = self._expect("ran", patience_s)
        return Outcome([self._finished[n] for n in range(self._asked)], ran["ran"], ran["cpu_s"])

    def ask(self, tokens: Sequence[int], max_tokens: int = 16, *, salt: str = "", lora: str = "") -> Answer:
        """One request alone."""
        return self.run([Ask(tokens, max_tokens, salt, lora)]).answers[0]

    def reset(self, *, external: bool = False) -> None:
        """Have the engine forget its own prefix cache: whatever is reused after this comes from outside, unless what is
        there has to be forgotten, too."""
        self._tell({"do": "reset", "external": external})
        assert self._expect("reset", PATIENCE_S)["reset"], "the prefix cache was in use"

    def metrics(self) -> dict[str, float]:
        self._tell({"do": "metrics"})
        found: dict[str, float] = self._expect("metrics", PATIENCE_S)["metrics"]
        return found

    def external(self) -> int:
        """Tokens that came from outside, as the engine counts them."""
        return int(self.metrics()["vllm:external_prefix_cache_hits"])

    def stop(self) -> int:
        """Shut down in an orderly way; return the exit code."""
        self._tell({"do": "exit"})
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL to it and to whatever processes it has started."""
        kill_session(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _tell(self, command: Mapping[str, Any]) -> None:
        self.wait_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def _expect(self, key: str, patience_s: float) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=patience_s)
            except queue.Empty:
                raise AssertionError(f"the engine did not answer in {patience_s} s:\n{self.log[-6000:]}") from None
            if answer is None:
                raise AssertionError(f"the engine is dead:\n{self.log[-6000:]}")
            if "finished" in answer:
                number = int(answer.pop("finished"))
                self._finished[number] = Answer(**{**answer, "tokens": tuple(answer["tokens"])})
            if key in answer:
                return answer

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._answers.put(json.loads(line))
        except ValueError:  # closed by kill()
            pass
        self._answers.put(None)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all it has started, and remove the shared memory in which vLLM's processes talk."""
    if process.poll() is not None:
        return
    shared = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # gone in the meantime
            if os.getsid(int(maps.parent.name)) == process.pid:
                shared |= set(re.findall(r"/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+", maps.read_text()))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    for path in shared:
        Path(path).unlink(missing_ok=True)


@contextmanager
def engine(
    model: Path,
    log: Path,
    transfer: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] = ONE_PROCESS,
    **arguments: Any,
) -> Iterator[Engine]:
    """An engine that starts, dead at the end whatever happened to it."""
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "num_gpu_blocks_override": 1000,
        **arguments,
    }
    if environment is ONE_PROCESS:
        settings.setdefault("distributed_executor_backend", "uni")
    if transfer is not None:
        settings["kv_transfer_config"] = dict(transfer)
    started = Engine(log, settings, environment)
    try:
        yield started
    finally:
        started.kill()


def eventually(condition: Callable[[], bool]) -> None:
    """Ask again until it is so, for as long as an engine may take for a few batches of requests."""
    daemon.eventually(condition, PATIENCE_S)


def prompt(length: int, *, seed: int = 0, after: Sequence[int] = ()) -> list[int]:
    """`length` random tokens, the first of them `after`."""
    own = np.random.default_rng(seed).integers(1, VOCABULARY, length - len(after))
    return [*after, *own.tolist()]
