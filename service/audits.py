"""Results of audits as engines send them: what JSON says of them, and the strict reading of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tierkv.errors import InvalidRequest
from tierkv.insight.audit.result import AuditResult

__all__ = ["AUDIT_SCHEMA", "parse_audits"]

_ADAPTER = TypeAdapter(AuditResult)
_INFINITE = frozenset({"max_difference", "relative_error", "limit", "difference", "kl", "kl_limit"})
"""Numbers that may be infinite, which strict JSON cannot write: they are the text ``inf`` then."""


def parse_audits(results: Sequence[Any]) -> list[AuditResult]:
    """Read what `AuditResult.to_dict` made. Raises `InvalidRequest` for anything else."""
    return [_parse(result) for result in results]


def _parse(result: Any) -> AuditResult:
    try:
        _ADAPTER.validate_json(json.dumps(_finite(result)), strict=True)
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        told = error.errors(include_url=False, include_input=False)[0] if isinstance(error, ValidationError) else None
        where = ".".join(map(str, told["loc"])) + ": " + told["msg"] if told else "not JSON"
        raise InvalidRequest(
            f"this is not the result of an audit: {where[:200]}", remedy="send what AuditResult.to_dict makes"
        ) from None
    return AuditResult.from_dict(result)


def _finite(data: Any, name: str = "") -> Any:
    if isinstance(data, Mapping):
        return {field: _finite(value, field) for field, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return float("inf") if data == "inf" and name in _INFINITE else data


def _described(schema: Any, definitions: Mapping[str, Any], name: str = "") -> Any:
    """Write references out, and say what `AuditResult.from_dict` insists on: no more fields, no negative numbers."""
    if isinstance(schema, list):
        return [_described(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _described(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    plain = {
        key: (
            {field: _described(value, definitions, field) for field, value in part.items()}
            if key == "properties"
            else [_described(item, definitions, name) for item in part]
            if key == "anyOf"
            else _described(part, definitions)
        )
        for key, part in schema.items()
        if key != "$defs"
    }
    if plain.get("type") == "object":
        plain["additionalProperties"] = False
    elif plain.get("type") in ("integer", "number"):
        plain["minimum"] = 0
        if name in _INFINITE:
            return {"anyOf": [plain, {"const": "inf"}]}
    return plain


def _schema() -> dict[str, Any]:
    schema = _ADAPTER.json_schema()
    described: dict[str, Any] = _described(schema, schema.get("$defs", {}))
    return described


AUDIT_SCHEMA = _schema()
"""JSON Schema of one result."""
