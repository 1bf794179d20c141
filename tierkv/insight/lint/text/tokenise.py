"""Turning pieces of text into tokens: with a model's tokenizer, or approximately."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tierkv.errors import ConfigError, DependencyMissing
from tierkv.insight.lint.core.batch import Tokens

__all__ = ["APPROXIMATION", "Approximation", "HuggingFace", "Tokeniser", "load_tokeniser"]

APPROXIMATION = (
    "approximation: words of up to 8 letters, numbers of up to 3 digits, single signs; "
    "give --tokenizer for exact counts"
)


class Tokeniser(Protocol):
    """Cuts a text, given in pieces, into tokens."""

    name: str
    exact: bool

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens that begin in each piece. The pieces, joined, are one text."""
        ...

    def decode(self, tokens: Tokens) -> list[str]:
        """Return the text of each token."""
        ...


class Approximation:
    """No model's tokens, but about as many, and always the same ones for the same piece."""

    name = APPROXIMATION
    exact = False
    _pattern = re.compile(r" ?[^\W\d_]{1,8}| ?\d{1,3}|\s+|[^\w\s]|\w")

    def __init__(self) -> None:
        self._piece = lru_cache(1 << 16)(self._encode)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [self._piece(text) for text in texts]

    def decode(self, tokens: Tokens) -> list[str]:
        raise ConfigError("token ids have no text without a tokenizer", remedy="name it with --tokenizer PATH")

    def _encode(self, text: str) -> Tokens:
        words = self._pattern.findall(text)
        return np.fromiter((zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words), np.uint32, len(words))


class HuggingFace:
    """A fast tokenizer of `tokenizers` or `transformers`."""

    exact = True

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self._token = lru_cache(1 << 18)(self._decode)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        encoding = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.uint32)
        begins = np.asarray([begin for begin, _ in encoding.offsets], np.int64)
        ends = np.cumsum([len(text) for text in texts])
        cuts = np.searchsorted(begins, ends[:-1], side="left")
        return np.split(ids, cuts)

    def decode(self, tokens: Tokens) -> list[str]:
        return [self._token(token) for token in tokens.tolist()]

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


def load_tokeniser(path: Path | None) -> Tokeniser:
    """Load a tokenizer from a file or a model's directory; none: the approximation.

    Raises
    ------
    ConfigError
        There is no tokenizer at `path`.
    DependencyMissing
        The package `tokenizers` is not installed.
    """
    if path is None:
        return Approximation()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DependencyMissing(
            "the package tokenizers is needed for --tokenizer",
            remedy="pip install tokenizers, or leave --tokenizer out",
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}", remedy="name a tokenizer.json or the directory that holds one")
    try:
        return HuggingFace(Tokenizer.from_file(str(file)), str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(
            f"{file} is not a tokenizer: {error}", remedy="name a tokenizer.json of Hugging Face"
        ) from None
