"""Audits made on purpose: prompts are stored, served again from disk, and computed again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import tierkv
from tierkv.cache import Cache
from tierkv.engines.transformers import generate, spec_for
from tierkv.errors import InvalidRequest
from tierkv.insight.audit.limits import MARGINS
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.prompts import Prompt
from tierkv.insight.audit.result import AuditResult
from tierkv.insight.audit.transformers import Auditor
from tierkv.spec import KVSpec

__all__ = ["Checkpoint", "audit_prompts", "disk", "load_checkpoint", "random_prompts", "tokenize"]

_NEW_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model and its checkpoint."""

    model: PreTrainedModel
    path: Path

    def spec(self, block_tokens: int, lossy: str) -> KVSpec:
        return spec_for(self.model, self.path, block_tokens=block_tokens, lossy=lossy)


def load_checkpoint(path: Path, dtype: str) -> Checkpoint:
    """Load a model from a directory or a GGUF file. Takes seconds. Raises `InvalidRequest` if that is impossible."""
    if dtype not in MARGINS:
        raise InvalidRequest(f"KV of {dtype} cannot be audited", remedy=f"choose one of {', '.join(MARGINS)}")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    directory = path
    if path.suffix == ".gguf":
        directory = path.parent
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with redirect_stderr(StringIO()):  # reading draws progress bars that no setting turns off
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, **options)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"no model can be loaded from {path}: {error}", remedy="name a checkpoint's directory or GGUF file"
        ) from error
    return Checkpoint(model.eval(), path)  # type: ignore[no-untyped-call]


def random_prompts(model: PreTrainedModel, count: int, tokens: int) -> list[list[int]]:
    """Return prompts of random tokens, the same ones each time."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return [np.random.default_rng(number).integers(0, vocabulary, tokens).tolist() for number in range(count)]


def tokenize(prompts: Sequence[Prompt], path: Path) -> list[list[int]]:
    """Return prompts as tokens; texts by the checkpoint's tokenizer."""
    options = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    tokenizer: Any = None
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(path.parent if options else path, **options)
            found.append(tokenizer.encode(prompt))
        else:
            found.append(list(prompt))
    return found


@contextmanager
def disk() -> Iterator[Callable[[], Cache]]:
    """Lend a function that opens a cache of its own, whose blocks come from disk when it is opened again."""
    with tempfile.TemporaryDirectory(prefix="tierkv-audit-") as home:
        settings = {
            "state_dir": f"{home}/state",
            "warm": {"capacity": "512MiB"},
            "cold": {"path": f"{home}/cold", "capacity": "8GiB"},
        }
        yield lambda: tierkv.open(settings)


def audit_prompts(
    checkpoint: Checkpoint,
    spec: KVSpec,
    opened: Callable[[], Cache],
    prompts: Sequence[Sequence[int]],
    *,
    chunk_tokens: int,
    rounds: int,
    sample: float,
    log: AuditLog,
    report: Callable[[AuditResult], None],
) -> None:
    """Store all prompts, close the cache, open it again, and audit a share of what it serves. Blocks for as long.

    Parameters
    ----------
    opened
        Opens the cache.
    chunk_tokens
        As in `tierkv.engines.transformers.generate`. With the block size, every float32 bit has to agree.
    rounds
        How often each prompt is asked for again.
    sample, log, report
        As in `Auditor`.
    """

    def answer(cache: Cache, tokens: Sequence[int], audit: Auditor | None) -> int:
        return generate(
            checkpoint.model,
            cache,
            spec,
            tokens,
            _NEW_TOKENS,
            chunk_tokens=chunk_tokens,
            store_generated=False,
            audit=audit,
        ).reused_tokens

    with opened() as cache:
        cache.register(spec)
        for tokens in prompts:
            answer(cache, tokens, None)
        cache.flush()
    with opened() as cache, Auditor(sample=sample, log=log, report=report) as auditor:
        cache.register(spec)
        for _ in range(rounds):
            for tokens in prompts:
                if not answer(cache, tokens, auditor):
                    log.skip("miss")
                auditor.wait()
