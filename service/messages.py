"""Requests as the daemon accepts them: typed, bounded, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from tierkv.core.state import NamespaceInfo
from tierkv.errors import InvalidRequest
from tierkv.insight.breakpoints import TimeClass
from tierkv.keys import HASH_BYTES, TENANT_NAME, adopt_chain, chain_hashes, chain_root
from tierkv.service.audits import AUDIT_SCHEMA
from tierkv.spec import DTYPE_BYTES, LOSSY_CODECS, KVSpec
from tierkv.wire import SESSION_CHARACTERS

__all__ = [
    "AcquireRequest",
    "AuditsRequest",
    "BlocksRequest",
    "BreakpointsRequest",
    "ChainRequest",
    "CommitRequest",
    "PauseRequest",
    "PeerRequest",
    "PinRequest",
    "PrefetchRequest",
    "ReleaseRequest",
    "RenewRequest",
    "ReserveRequest",
    "SpecMessage",
    "TouchRequest",
    "WaitRequest",
    "WhereRequest",
    "parse",
    "parse_spec",
]

_MOST_BREAKPOINTS = 64
_HEX = re.compile("(?:[0-9a-fA-F]{2})*")
_INDEX = re.compile("[0-9]{1,9}")


def _hashes(value: Any) -> Any:
    """Accept one byte string of 32-byte hashes, or a list of byte strings or hex digits."""
    if isinstance(value, str):
        value = _bytes(value)
    if isinstance(value, bytes):
        if len(value) % HASH_BYTES:
            raise ValueError(f"a byte string of hashes must be a multiple of {HASH_BYTES} long")
        return [value[at : at + HASH_BYTES] for at in range(0, len(value), HASH_BYTES)]
    if isinstance(value, list):
        return [_bytes(item) for item in value]
    raise ValueError("give one byte string, or a list of hashes")


def _extra(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_index(index): _bytes(extra) for index, extra in value.items()}
    raise ValueError("give a mapping of block index to bytes or hex digits")


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        if not _HEX.fullmatch(value):
            raise ValueError("bytes are an even number of hex digits")
        return bytes.fromhex(value)
    if isinstance(value, bytes):
        return value
    raise ValueError("give bytes, as hex digits in JSON")


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or not _INDEX.fullmatch(str(value)):
        raise ValueError("a block index is a whole number")
    return int(value)


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _hashes_schema(one: str) -> WithJsonSchema:
    """What JSON may hold for hashes: all digits in one string, or a list of hashes that match `one`."""
    return WithJsonSchema({"anyOf": [_text("([0-9a-fA-F]{64})*"), {"type": "array", "items": _text(one)}]})


_EXTRA_SCHEMA = WithJsonSchema(
    {"type": "object", "propertyNames": _text(_INDEX.pattern), "additionalProperties": _text("([0-9a-fA-F]{2})*")}
)
_TOKEN_SCHEMA = WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})
_WRITTEN_SCHEMA = WithJsonSchema(
    {
        "type": "array",
        "uniqueItems": True,
        "items": {
            "type": "array",
            "prefixItems": [*[{"type": "integer", "minimum": 0}] * 3, _text("[0-9a-f]{16}")],
            "minItems": 4,
            "maxItems": 4,
        },
    }
)

# Fail fast: a long list of nonsense must not become a long list of faults.
Hashes = Annotated[list[bytes], BeforeValidator(_hashes), _hashes_schema("[0-9a-fA-F]{64}")]
EngineHashes = Annotated[list[bytes], BeforeValidator(_hashes), _hashes_schema("([0-9a-fA-F]{2})*")]
Tokens = Annotated[list[Annotated[StrictInt, _TOKEN_SCHEMA]], Field(fail_fast=True)]
Positions = Annotated[list[tuple[StrictInt, StrictInt]], Field(fail_fast=True)]
Names = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Ttl = Annotated[float, Field(gt=0, strict=True)]
SessionName = Annotated[str, Field(max_length=SESSION_CHARACTERS, strict=True)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


AUDITS_AT_ONCE = 64
_WAYS = ("hashes", "engine_hashes", "tokens")


class ChainRequest(_Message):
    """Which blocks: `hashes` are chain hashes of this namespace, `engine_hashes` an engine's, `tokens` token ids."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [way]} for way in _WAYS]})

    hashes: Hashes = []
    engine_hashes: EngineHashes = []
    tokens: Tokens = []
    extra_keys: Annotated[dict[int, bytes], BeforeValidator(_extra), _EXTRA_SCHEMA] = {}

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if len(self.model_fields_set.intersection(_WAYS)) != 1:
            raise ValueError("give exactly one of hashes, engine_hashes and tokens")
        return self

    def chain(self, info: NamespaceInfo, limit: int) -> Sequence[bytes]:
        """The chain hashes meant. Raises `InvalidRequest` for hashes of another size or more than `limit`."""
        root = chain_root(info.fingerprint)
        if "tokens" in self.model_fields_set:
            chain: Sequence[bytes] = chain_hashes(root, self.tokens, info.spec.block_tokens, self.extra_keys)
        elif "engine_hashes" in self.model_fields_set:
            chain = adopt_chain(root, self.engine_hashes)
        else:
            chain = self.hashes
            if any(len(item) != HASH_BYTES for item in chain):
                raise InvalidRequest(
                    f"chain hashes are {HASH_BYTES} bytes long", remedy="send an engine's own as engine_hashes"
                )
        if len(chain) > limit:
            raise InvalidRequest(
                f"a chain of {len(chain)} blocks is over the limit of {limit}", remedy="raise limits.blocks"
            )
        return chain


# What a spec's values must be is checked by `KVSpec`, which says what is wrong; here they get their types.
_FromOne = Annotated[StrictInt, WithJsonSchema({"type": "integer", "minimum": 1})]
_Dtype = Annotated[StrictStr, WithJsonSchema({"enum": list(DTYPE_BYTES)})]
_Lossy = Annotated[StrictStr, WithJsonSchema({"enum": ["", *LOSSY_CODECS]})]
_Kind = Annotated[StrictStr, WithJsonSchema({"enum": ["full", "sliding_window", "mla"]})]
_Order = Annotated[StrictStr, WithJsonSchema({"enum": ["NHD", "HND"]})]
_Layer = Annotated[StrictInt, WithJsonSchema({"type": "integer", "minimum": 0})]


def _when(name: str, value: Any, then: Mapping[str, Any]) -> dict[str, Any]:
    """Say in a JSON schema what other fields are where one has a certain value."""
    given = {"properties": {name: {"const": value}}, "required": [name]}
    return {"if": given, "then": {"properties": then, "required": list(then)}}


class GroupMessage(_Message):
    """A KV group: `layers` ascending; `window` in tokens, 0 unless the kind is ``sliding_window``."""

    model_config = ConfigDict(
        json_schema_extra={
            **_when("kind", "sliding_window", {"window": {"minimum": 1}}),
            "else": {"properties": {"window": {"const": 0}}},
        }
    )

    layers: Annotated[list[_Layer], Field(fail_fast=True, json_schema_extra={"minItems": 1, "uniqueItems": True})]
    kind: _Kind
    kv_heads: _FromOne
    head_dim: _FromOne
    window: Count = 0


class SpecMessage(_Message):
    """A `KVSpec`."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _when("exact_first_block", True, {"lossy": {"enum": list(LOSSY_CODECS)}}),
                *(
                    _when("lossy", codec, {"dtype": {"enum": ["float32", "bfloat16", "float16"]}})
                    for codec in LOSSY_CODECS
                ),
            ]
        }
    )

    model: StrictStr
    weights: StrictStr
    dtype: _Dtype
    block_tokens: _FromOne
    groups: Annotated[list[GroupMessage], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
    tokenizer: StrictStr = ""
    attention: dict[str, StrictStr] = {}
    order: _Order = "NHD"
    tp_rank: StrictInt = 0
    tp_size: StrictInt = 1
    pp_rank: StrictInt = 0
    pp_size: StrictInt = 1
    cp_rank: StrictInt = 0
    cp_size: StrictInt = 1
    adapter: StrictStr = ""
    quantization: StrictStr = ""
    extra: dict[str, StrictStr] = {}
    lossy: _Lossy = ""
    exact_first_block: StrictBool = False


class TouchRequest(ChainRequest):
    """Blocks of KV group `group` that were read in place without a lease, in the order they were read."""

    group: Annotated[int, Field(ge=0, lt=2**16, strict=True)] = 0


class WhereRequest(ChainRequest):
    """`wait_s`: for the answers of other nodes."""

    wait_s: Seconds = 0.05


class PeerRequest(_Message):
    """What a node asks another about a chain of a tenant."""

    tenant: Annotated[str, Field(pattern=f"^{TENANT_NAME.pattern}$", strict=True)]
    namespace: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * HASH_BYTES}}}$", strict=True)]
    hashes: Hashes


class PrefetchRequest(ChainRequest):
    deadline_s: Ttl = 60.0


class WaitRequest(_Message):
    """`groups`: wait for the first so many KV groups only."""

    wait_s: Seconds = 10.0
    groups: Count | None = None


class AcquireRequest(ChainRequest):
    """`wait_s` null: wait as long as the daemon allows. `tiers`: memory the caller has mapped; none for HTTP bodies."""

    wait_s: Seconds | None = 10.0
    ttl_s: Ttl = 30.0
    max_blocks: Count | None = None
    tiers: Names | None = None
    compute_s: Seconds = 0.0
    prefill_tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    session: SessionName = ""
    groups: Annotated[list[StrictInt], Field(fail_fast=True)] | None = None
    handoff: StrictBool = False


class LookupRequest(ChainRequest):
    """`wait_s`: longest wait for what other machines have; 0: what is known here."""

    wait_s: Seconds = 0.0


class PinRequest(ChainRequest):
    ttl_s: Ttl


class BreakpointMessage(_Message):
    """The first `tokens` tokens of the chain, without it all of them, for `ttl` after their last use."""

    tokens: Count | None = None
    ttl: TimeClass = "5m"


class BreakpointsRequest(ChainRequest):
    breakpoints: Annotated[list[BreakpointMessage], Field(min_length=1, max_length=_MOST_BREAKPOINTS)]


class PauseRequest(_Message):
    expected_s: Seconds


class ReserveRequest(ChainRequest):
    start: Count = 0
    stop: Count | None = None
    wait_s: Seconds = 1.0
    ttl_s: Ttl = 60.0
    tiers: Names | None = None
    session: SessionName = ""


class CommitRequest(_Message):
    """Rows of index, group, length and checksum (16 hex digits)."""

    blocks: Annotated[list[Any], _WRITTEN_SCHEMA]


class ReleaseRequest(_Message):
    """`corrupt`: rows of index and group that failed the reader's verification."""

    corrupt: Positions = []


class RenewRequest(_Message):
    ttl_s: Ttl


class AuditsRequest(_Message):
    """Results of audits, as `AuditResult.to_dict` makes them."""

    audits: Annotated[list[Annotated[Any, WithJsonSchema(AUDIT_SCHEMA)]], Field(max_length=AUDITS_AT_ONCE)]


class BlocksRequest(_Message):
    """Which blocks of a read lease to send; all of them by default."""

    lease: str
    blocks: Positions | None = None


M = TypeVar("M", bound=BaseModel)
_FAULTS_TOLD = 5
_FAULTS_CHARACTERS = 1000


def parse(model: type[M], data: Any) -> M:
    """Validate a decoded message. Raises `InvalidRequest` with every fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = "; ".join(
            ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, "))))
            for fault in error.errors(include_url=False, include_context=False, include_input=False)[:_FAULTS_TOLD]
        )
        raise InvalidRequest(
            f"the request is not understood: {faults[:_FAULTS_CHARACTERS]}", remedy="docs/wire.md lists the fields"
        ) from None


def parse_spec(data: Any) -> KVSpec:
    """Validate a decoded spec. Raises `InvalidRequest`."""
    parse(SpecMessage, data)
    try:
        return KVSpec.from_dict(data)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, remedy=error.remedy or "docs/wire.md lists the fields of a spec") from None
