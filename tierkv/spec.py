"""Identity and shape: when two KV blocks are the same thing, and how their bytes lie.

`KVSpec` holds everything that must match for KV to be reusable. Its fingerprint is the namespace: two specs that
differ in any field never share a block. `BlockLayout` is the typed shape of one block's payload; it is all that
storage and codecs need to know about a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from hashlib import blake2b
from math import prod
from typing import Any, Literal

from tierkv.errors import InvalidRequest

__all__ = ["DTYPE_BYTES", "LOSSY_CODECS", "BlockLayout", "KVGroup", "KVSpec"]

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

LOSSY_CODECS = ("int8", "eq2", "eq3", "eq4", "eq5")
"""What `KVSpec.lossy` may name, the least lossy first."""

_LOSSY_DTYPES = ("float32", "bfloat16", "float16")

GroupKind = Literal["full", "sliding_window", "mla"]
Order = Literal["NHD", "HND"]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Typed shape of one block's payload, C-contiguous, little-endian.

    Attributes
    ----------
    dtype
        A key of `DTYPE_BYTES`.
    shape
        As stored. NHD: ``(layers, 2, tokens, heads, head_dim)``; HND: ``(layers, 2, heads, tokens, head_dim)``;
        MLA: ``(layers, 1, tokens, 1, latent_dim)``; opaque bytes: ``(nbytes,)``.
    token_axis
        Index of the token axis in `shape`: values along it share a channel.
    """

    dtype: str
    shape: tuple[int, ...]
    token_axis: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @classmethod
    def opaque(cls, nbytes: int) -> BlockLayout:
        """Layout of bytes about which nothing is known."""
        return cls("uint8", (nbytes,), 0)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives and dies together.

    Attributes
    ----------
    layers
        Model layer indices, ascending.
    kind
        ``full`` attention needs its whole prefix; ``sliding_window`` only the last `window` tokens; ``mla`` keeps one
        latent vector of `head_dim` values per token instead of K and V heads.
    kv_heads
        KV heads per layer on this rank (1 for MLA).
    head_dim
        Values per head (the latent dimension for MLA).
    window
        Window in tokens for ``sliding_window``, else 0.
    """

    layers: tuple[int, ...]
    kind: GroupKind
    kv_heads: int
    head_dim: int
    window: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or min(self.layers) < 0 or list(self.layers) != sorted(set(self.layers)):
            raise InvalidRequest(f"layers of a KV group must be ascending and unique, not {self.layers!r}")
        if self.kind not in ("full", "sliding_window", "mla"):
            raise InvalidRequest(f"unknown KV group kind {self.kind!r}", remedy="use full, sliding_window or mla")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise InvalidRequest("kv_heads and head_dim of a KV group must be at least 1")
        if (self.kind == "sliding_window") != (self.window > 0):
            raise InvalidRequest(f"a {self.kind} group cannot have a window of {self.window} tokens")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that must match for KV to be reusable.

    Attributes
    ----------
    model, weights
        Model name, and a revision of its weights that changes whenever they do (`KVSpec.from_pretrained` derives it).
    tokenizer
        Tokenizer id or revision; empty when token ids are only ever made by one tokenizer.
    dtype
        Element type of the stored KV, a key of `DTYPE_BYTES`.
    block_tokens
        Tokens per block.
    groups
        KV groups, in order; the index is the group id in `tierkv.keys.block_key`.
    attention
        Settings that change KV and are not in `weights`: RoPE base and scaling, logit caps, attention implementation.
    order
        Payload order, see `BlockLayout`.
    tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size
        Parallel rank and size whose share this KV is.
    adapter
        LoRA or other adapter id, empty for none.
    quantization
        Quantisation of the KV itself as the engine keeps it, empty for none.
    extra
        Anything else that must match.
    lossy
        Codec, one of `LOSSY_CODECS`, with which the cold tier may store blocks: what it gives back is then close to
        what was written, not the same. Empty: lossless only. For float32, bfloat16 and float16.
    exact_first_block
        Store the first block of every chain losslessly all the same: attention leans on the first tokens of a prompt.
    """

    model: str
    weights: str
    dtype: str
    block_tokens: int
    groups: tuple[KVGroup, ...]
    tokenizer: str = ""
    attention: Mapping[str, str] = field(default_factory=dict)
    order: Order = "NHD"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    adapter: str = ""
    quantization: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    lossy: str = ""
    exact_first_block: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.dtype not in DTYPE_BYTES:
            raise InvalidRequest(f"unknown KV dtype {self.dtype!r}", remedy=f"use one of {', '.join(DTYPE_BYTES)}")
        if self.block_tokens < 1:
            raise InvalidRequest(f"block_tokens must be at least 1, not {self.block_tokens}")
        if not self.groups:
            raise InvalidRequest("a spec needs at least one KV group")
        if self.order not in ("NHD", "HND"):
            raise InvalidRequest(f"unknown layout order {self.order!r}", remedy="use NHD or HND")
        if self.lossy and self.lossy not in LOSSY_CODECS:
            raise InvalidRequest(
                f"lossy cannot be {self.lossy!r}", remedy=f"use one of {', '.join(LOSSY_CODECS)}, or leave it empty"
            )
        if self.lossy and self.dtype not in _LOSSY_DTYPES:
            raise InvalidRequest(
                f"{self.lossy} cannot store KV of {self.dtype}",
                remedy=f"leave lossy empty; it is for {', '.join(_LOSSY_DTYPES)}",
            )
        if self.exact_first_block and not self.lossy:
            raise InvalidRequest(
                "exact_first_block makes an exception of nothing: without lossy every block is exact",
                remedy="set lossy as well, or neither",
            )

    @property
    def fingerprint(self) -> bytes:
        """32-byte BLAKE2b of the canonical encoding."""
        return blake2b(self.canonical.encode("ascii"), digest_size=32).digest()

    @property
    def canonical(self) -> str:
        """The spec as JSON with sorted keys, no spaces, ASCII, and without the fields that have their default value.

        Leaving defaults out lets a later version add a field without giving every namespace another name.
        """
        data = self.to_dict()
        kept = {name: value for name, value in data.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}
        kept["groups"] = [{k: v for k, v in group.items() if (k, v) != ("window", 0)} for group in data["groups"]]
        return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def namespace(self) -> str:
        """The fingerprint as 64 hex digits: the name used in URLs."""
        return self.fingerprint.hex()

    def layout(self, group: int = 0) -> BlockLayout:
        """Return the payload layout of a block of KV group `group`."""
        g = self.groups[group]
        planes = 1 if g.kind == "mla" else 2
        if self.order == "HND":
            return BlockLayout(self.dtype, (len(g.layers), planes, g.kv_heads, self.block_tokens, g.head_dim), 3)
        return BlockLayout(self.dtype, (len(g.layers), planes, self.block_tokens, g.kv_heads, g.head_dim), 2)

    def codec(self, depth: int) -> str:
        """Return the codec that blocks with `depth` others before them are stored with; empty: any lossless one."""
        return "" if self.exact_first_block and depth == 0 else self.lossy

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every field present, as it is sent over the wire."""
        data = asdict(self)
        data["attention"] = dict(self.attention)
        data["extra"] = dict(self.extra)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVSpec:
        """Inverse of `to_dict`. Unknown, missing or ill-typed fields raise `InvalidRequest`."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name) for name in set(data) - known)
        if unknown:
            raise InvalidRequest(
                f"unknown spec fields: {', '.join(unknown)}", remedy=f"known are {', '.join(sorted(known))}"
            )
        values = dict(data)
        _check_types(values)
        try:
            values["groups"] = tuple(KVGroup(**group) for group in values.get("groups", ()))
            return cls(**values)
        except TypeError as error:  # a field is missing, or a group has one that no group has
            raise InvalidRequest(f"not a KV spec: {error}") from None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = "bfloat16",
        block_tokens: int = 64,
        order: Order = "NHD",
        **changes: Any,
    ) -> KVSpec:
        """Fill a spec from a checkpoint directory or GGUF file; the weight revision comes from the files themselves.

        Reads the configuration, every weight file's size and header, and sampled pages: a silent weight update changes
        the namespace. `changes` override fields. Blocks on disk reads. Raises `InvalidRequest` for a path without a
        readable checkpoint. See `tierkv.checkpoint`.
        """
        from tierkv.checkpoint import read_checkpoint

        return cls(**{**read_checkpoint(path), "dtype": dtype, "block_tokens": block_tokens, "order": order, **changes})


_DEFAULTS: Mapping[str, object] = {
    f.name: f.default_factory() if f.default_factory is not MISSING else f.default
    for f in fields(KVSpec)
    if f.default is not MISSING or f.default_factory is not MISSING
}


def _check_types(values: Mapping[str, Any]) -> None:
    integers = ("block_tokens", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size")
    texts = ("model", "weights", "dtype", "tokenizer", "order", "adapter", "quantization", "lossy")
    for name, value in values.items():
        good = (
            (name in integers and _is_integer(value))
            or (name in texts and isinstance(value, str))
            or (name == "exact_first_block" and isinstance(value, bool))
            or (name in ("attention", "extra") and _is_text_map(value))
            or (name == "groups" and isinstance(value, list | tuple) and all(map(_is_group, value)))
        )
        if not good:
            raise InvalidRequest(f"spec field {name!r} has a wrong type or value: {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


def _is_group(value: object) -> bool:
    """Whether the fields of a group that are there have the right types; their names are checked by `KVGroup`."""
    if not isinstance(value, Mapping):
        return False
    layers = value.get("layers", ())
    return (
        isinstance(layers, list | tuple)
        and all(map(_is_integer, layers))
        and all(_is_integer(value.get(name, 0)) for name in ("kv_heads", "head_dim", "window"))
    )
