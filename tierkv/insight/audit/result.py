"""What an audit found, as plain data that can be written down, sent and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import isinf, isnan
from typing import TYPE_CHECKING, Any, Literal

from tierkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["AuditResult", "Basis", "Finding", "LogitsDifference", "Plane", "PlaneDifference", "Reason", "Verdict"]

Plane = Literal["K", "V"]
Verdict = Literal["ok", "outside", "corrupt"]
Basis = Literal["exact", "envelope", "budget"]
Reason = Literal["", "bits", "difference", "relative-error", "logits", "kl", "token"]


@dataclass(frozen=True, slots=True)
class PlaneDifference:
    """Served against computed K or V of one layer.

    Attributes
    ----------
    layer, plane
        Index of the layer in the model; ``K`` or ``V``.
    differing
        Values whose bits differ.
    max_difference
        The largest absolute difference; infinite where exactly one of two numbers is not finite.
    relative_error
        Norm of the difference over the norm of what was computed, of the worst block.
    limit
        What `max_difference` may be, or, where the basis is a budget, `relative_error`.
    ulps
        Values by how many representable numbers lie between the two, see `tierkv.insight.audit.ulps.ulp_histogram`.
    """

    layer: int
    plane: Plane
    differing: int
    max_difference: float
    relative_error: float
    limit: float
    ulps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """What the next token was chosen by, served against computed.

    Attributes
    ----------
    max_difference, limit
        Of logits; where an engine gives only log probabilities, of those of the answer's tokens.
    kl, kl_limit
        Divergence of the served distribution from the computed one, in nats; None where it is not known.
    same_token
        Whether both choose the same tokens greedily.
    near_tie
        Whether what was computed holds both choices for equally good, up to `limit`.
    """

    max_difference: float
    limit: float
    kl: float | None
    kl_limit: float | None
    same_token: bool
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Where served KV first left what is allowed, in the order of tokens, then layers.

    Attributes
    ----------
    block, block_hash
        Index of the block in the prompt, and its chain hash in hex, by which it can be deleted.
    layer, plane, token
        Layer, ``K`` or ``V``, and the token's position in the prompt. Of a lossy block, its first token.
    difference, limit
        As in `PlaneDifference`.
    positions
        How many tokens are beyond the limit in this layer's plane.
    """

    block: int
    block_hash: str
    layer: int
    plane: Plane
    token: int
    difference: float
    limit: float
    positions: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The outcome of recomputing one hit without the cache.

    Attributes
    ----------
    engine
        ``transformers`` or ``vllm``.
    namespace
        `KVSpec.namespace`; empty where the engine does not say.
    verdict
        ``ok``; ``outside``: farther off than recomputing explains; ``corrupt``: it is not this prompt's KV.
    basis
        ``exact``: every bit had to agree, or did. ``envelope``: differences were held against those between two ways
        of computing the same. ``budget``: against what a lossy level may cost, on top of that.
    reason
        What gave the verdict: ``bits``, ``difference``, ``relative-error``, ``logits``, ``kl``, ``token``; empty if ok.
    dtype, lossy
        As in `KVSpec`; empty where the engine does not say.
    tokens, block_tokens
        Tokens that the cache served, and tokens per block; 0 where the engine does not say.
    planes, logits
        Per layer K and V, empty where the engine does not show them; and what followed from them.
    finding
        Where it went wrong, if KV did.
    answer_token
        Index in the answer of the first token that differs, where answers were compared.
    computed
        How often the prompt was computed for this.
    seconds
        From its beginning to its end.
    at
        When it ended, in seconds since 1970.
    """

    engine: Literal["transformers", "vllm"]
    namespace: str
    verdict: Verdict
    basis: Basis
    reason: Reason
    dtype: str
    lossy: str
    tokens: int
    block_tokens: int
    planes: tuple[PlaneDifference, ...]
    logits: LogitsDifference | None
    finding: Finding | None
    answer_token: int | None
    computed: int
    seconds: float
    at: float

    def to_dict(self) -> dict[str, Any]:
        """Return data for strict JSON: what is infinite becomes the text ``inf``."""
        found: dict[str, Any] = _strict(asdict(self))
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AuditResult:
        """Read what `to_dict` made, perhaps elsewhere. Raises `InvalidRequest` for anything else."""
        from pydantic import ValidationError

        try:
            result = _adapter().validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise InvalidRequest(
                f"this is not the result of an audit: {where}: {first['msg']}",
                remedy="pass what AuditResult.to_dict makes",
            ) from None
        if not all(_sound(number) for number in _numbers(asdict(result))):
            raise InvalidRequest(
                "this is not the result of an audit: it counts less than nothing, or what is no number",
                remedy="pass what AuditResult.to_dict makes",
            )
        return result


@cache
def _adapter() -> TypeAdapter[AuditResult]:
    from pydantic import ConfigDict, TypeAdapter

    parts: tuple[Any, ...] = (PlaneDifference, LogitsDifference, Finding, AuditResult)
    for part in parts:
        part.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(AuditResult)


def _strict(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _strict(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    return "inf" if isinstance(data, float) and isinf(data) else data


def _numbers(data: Any) -> list[float]:
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        return [number for value in data for number in _numbers(value)]
    return [data] if isinstance(data, (int, float)) else []


def _sound(number: float) -> bool:
    return not isnan(number) and number >= 0
