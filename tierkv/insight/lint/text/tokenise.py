"""Turning pieces of text into tokens: with a model's tokenizer, or approximately."""

from __future__ import annotations

import codecs
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
        """Return the text of each token; of a character that several make, the last one has it."""
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
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {number: token.content for number, token in added.items()}
        self._bytes_of = _byte_level if "ByteLevel" in str(tokenizer.decoder) else _sentence_piece
        self._texts: dict[int, str] = {}
        self._parts: dict[int, bytes] = {}  # of characters

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
        ids = tokens.tolist()
        distinct = set(ids)
        for token in distinct - self._texts.keys() - self._parts.keys():
            self._learn(token)
        if self._parts.keys().isdisjoint(distinct):
            return list(map(self._texts.__getitem__, ids))
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        texts = [read(self._parts[token] if token in self._parts else self._texts[token].encode()) for token in ids]
        texts[-1] += read(b"", True)
        return texts

    def _learn(self, token: int) -> None:
        """Not by the package: that drops what is no whole character, and the space a text begins with."""
        written = self._tokenizer.id_to_token(token)
        if token in self._added:
            self._texts[token] = self._added[token]
        elif written is None:
            self._texts[token] = f"<{token}>"
        else:
            data = self._bytes_of(written)
            try:
                self._texts[token] = data.decode()
            except UnicodeDecodeError:
                self._parts[token] = data


def _letters() -> dict[str, int]:
    """Map the characters that byte-level vocabularies are written in to the bytes they stand for, as GPT-2 does."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_LETTERS = _letters()
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level(written: str) -> bytes:
    try:
        return bytes([_LETTERS[character] for character in written])
    except KeyError:
        return written.encode()


def _sentence_piece(written: str) -> bytes:
    byte = _BYTE.fullmatch(written)
    return bytes([int(byte[1], 16)]) if byte else written.replace("\u2581", " ").encode()


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
