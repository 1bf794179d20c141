"""The OpenAPI 3.1 document, made from `tierkv.service.catalog` and the models of messages and answers."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from tierkv import __version__
from tierkv.keys import TENANT_NAME
from tierkv.service.answers import Problem
from tierkv.service.catalog import OPERATIONS, Operation, Parameter
from tierkv.service.query import HASH_PATTERN
from tierkv.wire import (
    GENERATION_HEADER,
    JSON_TYPE,
    MSGPACK_TYPE,
    PROBLEM_TYPE,
    SESSION_CHARACTERS,
    TENANT_HEADER,
)

__all__ = ["openapi_document"]

_REFERENCE = "#/components/schemas/{model}"
_ALWAYS = (400, 401, 403, 429, 500, 503)
"""Statuses of problems that any route may answer."""
_TEXT = {"type": "string"}
_NAMED: dict[str, dict[str, Any]] = {
    "ns": {"type": "string", "pattern": HASH_PATTERN, "description": "a namespace"},
    "hash": {"type": "string", "pattern": HASH_PATTERN, "description": "a chain hash"},
    "id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{16}$", "description": "as the daemon has answered it"},
    "session": {"type": "string", "minLength": 1, "maxLength": SESSION_CHARACTERS, "description": "a conversation"},
    "part": {"type": "string", "pattern": "^[a-z.]+$", "description": "a file"},
}


def openapi_document() -> dict[str, Any]:
    """Describe every route."""
    paths: dict[str, dict[str, Any]] = {}
    models: dict[type[BaseModel], str] = {Problem: "serialization"}
    for (method, path), operation in OPERATIONS.items():
        if isinstance(operation.takes, type):
            models[operation.takes] = "validation"
        models.update({answer: "serialization" for answer in operation.answers.values() if isinstance(answer, type)})
        name = "_".join([method.lower(), *re.findall(r"[\w.]+", path)])
        paths.setdefault(path, {})[method.lower()] = {"operationId": name, **_describe(path, operation)}
    _, definitions = models_json_schema(list(models.items()), ref_template=_REFERENCE)  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tierkv",
            "version": __version__,
            "description": "A tiered KV cache for LLM inference. The protocol is explained in docs/wire.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _describe(path: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary}
    parameters = [_path_parameter(name, path) for name in re.findall(r"{(\w+)}", path)]
    parameters += [_parameter(name, "query", parameter) for name, parameter in operation.query.items()]
    parameters += [_parameter(name, "header", parameter) for name, parameter in operation.headers.items()]
    if operation.by_tenant:
        tenant = Parameter("whose blocks: `default` without it, or the token's tenant", f"^{TENANT_NAME.pattern}$")
        parameters.append(_parameter(TENANT_HEADER, "header", tenant))
    if parameters:
        described["parameters"] = parameters
    if operation.takes is not None:
        described["requestBody"] = {"required": _needs_body(operation.takes), "content": _content(operation.takes)}
    answers = {str(status): _answer(status, operation) for status in sorted(operation.answers)}
    for status in sorted(_problems(path, operation) - set(operation.answers)):
        content = {PROBLEM_TYPE: {"schema": _reference(Problem)}}
        answers[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    described["responses"] = answers
    return described


def _needs_body(takes: type[BaseModel] | str) -> bool:
    """Whether an empty body will not do: it is an empty message."""
    if isinstance(takes, str):
        return True
    try:
        takes.model_validate({})
    except ValidationError:
        return True
    return False


def _problems(path: str, operation: Operation) -> set[int]:
    found = {*_ALWAYS, *operation.problems}
    if "{" in path:
        found.add(404)
    if operation.takes is not None:
        found.add(413)
    return found


def _answer(status: int, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    answer = operation.answers[status]
    sends = (GENERATION_HEADER, *operation.sends) if isinstance(answer, type) else operation.sends
    if sends and status < 400:
        described["headers"] = {name: {"required": True, "schema": _TEXT} for name in sends}
    if answer is not None:
        described["content"] = _content(answer)
    if status >= 400:
        described["content"][PROBLEM_TYPE] = {"schema": _reference(Problem)}
    return described


def _content(body: type[BaseModel] | str) -> dict[str, Any]:
    if isinstance(body, str):
        return {body: {}}
    return {kind: {"schema": _reference(body)} for kind in (JSON_TYPE, MSGPACK_TYPE)}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _path_parameter(name: str, path: str) -> dict[str, Any]:
    schema = dict(_NAMED["session" if "/sessions/{id}" in path else name])
    return {"name": name, "in": "path", "required": True, "description": schema.pop("description"), "schema": schema}


def _parameter(name: str, place: str, parameter: Parameter) -> dict[str, Any]:
    schema = {"type": "string", "pattern": parameter.pattern} if parameter.pattern else _TEXT
    described = {"name": name, "in": place, "description": parameter.description, "schema": schema}
    return {**described, "required": True} if parameter.required else described
