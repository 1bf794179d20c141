"""A tokenizer for logs of token ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.insight.lint.logs import words


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer, trained on words of the logs, with ChatML's frames as tokens of their own."""
    tokenizers = pytest.importorskip("tokenizers")
    rng = random.Random(30)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([words(rng, 200) for _ in range(30)], trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path
