"""The part of SARIF 2.1.0's structure that a report uses: required members, closed objects and enumerations."""

from __future__ import annotations

from typing import Any

__all__ = ["SARIF"]


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT = {"type": "string", "minLength": 1}
BAG = {"type": "object"}
MESSAGE = closed(["text"], text=TEXT)
RULE = closed(["id"], id=TEXT, name=TEXT, shortDescription=MESSAGE, fullDescription=MESSAGE, help=MESSAGE)
DRIVER = closed(["name"], name=TEXT, version=TEXT, rules={"type": "array", "items": RULE, "uniqueItems": True})
REGION = closed([], startLine={"type": "integer", "minimum": 1}, snippet=MESSAGE)
ARTIFACT = closed([], uri={"type": "string", "format": "uri-reference"})
PHYSICAL = closed(["artifactLocation"], artifactLocation=ARTIFACT, region=REGION)
RESULT = closed(
    ["message"],
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    kind={"enum": ["notApplicable", "pass", "fail", "review", "open", "informational"]},
    level={"enum": ["none", "note", "warning", "error"]},
    message=MESSAGE,
    locations={"type": "array", "items": closed([], physicalLocation=PHYSICAL)},
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    baselineState={"enum": ["new", "unchanged", "updated", "absent"]},
    properties=BAG,
)
RUN = closed(
    ["tool"],
    tool=closed(["driver"], driver=DRIVER),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results={"type": "array", "items": RESULT},
    properties=BAG,
)
SARIF: dict[str, Any] = closed(
    ["version", "runs"],
    **{
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": RUN},
    },
)
