"""From routes to an OpenAPI 3.1 document: what each takes, and all that it may answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, get_args

import msgspec

from ferrule import __version__
from ferrule.config import Config
from ferrule.interfaces.router import Access, Route

_ERROR = {
    "description": "Every error, whatever its status, has this form.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what would be right."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}
_FAILURES: Mapping[int, str] = {
    400: "A value, the prompt or the body is wrong; param names the field.",
    401: "The key is missing or wrong.",
    403: "The feature is switched off.",
    404: "There is no such model.",
    408: "The body did not arrive in time, or the timeout that it names has passed.",
    413: "The body is over the limit.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server's own fault; its log says why.",
    503: "Starting, shutting down, or the engine is dead or stalled; see Retry-After.",
}
_ONLY_BODY = frozenset({403, 408, 413, 429})
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
_TAGS = {
    "openai": "The routes of OpenAI's API, with further fields.",
    "tokens": "The tokenizer.",
    "health": "Probes and figures.",
    "docs": "This description.",
    "admin": "Administration; absent unless FERRULE_SERVER_DEV_MODE=1.",
}
_SECRETS = {Access.KEY: "key", Access.ADMIN: "adminKey"}


def describe(routes: Sequence[Route], config: Config) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    kinds = [kind for route in routes for kind in (route.body_type, route.answer, route.event) if _is_json(kind)]
    types = [part for kind in kinds for part in _parts(kind)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of: dict[str, Any] = {str(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    for kind in kinds:
        if len(_parts(kind)) > 1:
            schema_of[str(kind)] = {"anyOf": [schema_of[str(part)] for part in _parts(kind)]}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(route.path.replace(":path}", "}"), {})
        operations[route.method.lower()] = _operation(route, schema_of, config)
    used = sorted({tag for route in routes for tag in route.tags}, key=lambda tag: (list(_TAGS) + [tag]).index(tag))
    key = {"type": "http", "scheme": "bearer", "description": "--api-key"}
    admin = {"type": "http", "scheme": "bearer", "description": "--admin-key, or else --api-key"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ferrule",
            "version": __version__,
            "description": "An LLM inference server. null means the same as an absent field.",
        },
        "servers": [{"url": "/" + (config.frontend.root_path or "").strip("/")}],
        "tags": [{"name": tag, "description": _TAGS.get(tag, "")} for tag in used],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": key, "adminKey": admin},
        },
    }


def _is_json(kind: Any) -> bool:
    return kind is not None and kind not in (str, bytes)


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union of objects: msgspec describes no union that it could not decode."""
    members = get_args(kind) if isinstance(kind, UnionType) else ()
    return members if members and all(hasattr(member, "__struct_fields__") for member in members) else (kind,)


def _operation(route: Route, schema_of: Mapping[str, Any], config: Config) -> dict[str, Any]:
    names = [part[1:-1].removesuffix(":path") for part in route.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    for name, what in route.query.items():
        parameters.append({"name": name, "in": "query", "description": what, "schema": {"type": "string"}})
    words = [word.strip("{}").replace(":path", "") for word in route.path.split("/") if word]
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words]).replace(".", "_"),
        "summary": route.summary,
        "tags": list(route.tags),
        "security": [{_SECRETS[route.access]: []}] if route.access in _SECRETS else [],
        "responses": _responses(route, schema_of, names),
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body_type is not None:
        schema: dict[str, Any] = schema_of[str(route.body_type)]
        if config.frontend.strict_requests:
            operation["description"] = "Fields that are not listed are refused (--strict-requests)."
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _responses(route: Route, schema_of: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"200": {"description": "Success.", "content": _contents(route, schema_of)}}
    takes = route.body_type is not None
    for status, what in _FAILURES.items():
        if status in _ONLY_BODY and not takes or status == 404 and not (takes or names):
            continue
        if status == 401 and route.access is Access.PUBLIC:
            continue
        found[str(status)] = {"description": what, "content": error}
        if status in {429, 503}:
            found[str(status)]["headers"] = _RETRY
    found["default"] = {"description": "An error.", "content": error}
    return found


def _contents(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    """The media types of a success. The pages are HTML, written `bytes`; other text is `str`."""
    if route.answer is str or route.answer is bytes:
        return {"text/plain" if route.answer is str else "text/html": {"schema": {"type": "string"}}}
    schema = schema_of[str(route.answer)] if route.answer is not None else {}
    contents: dict[str, Any] = {"application/json": {"schema": schema}}
    if route.event is not None:
        event = {"anyOf": [schema_of[str(route.event)], {"$ref": "#/components/schemas/Error"}]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
        contents["text/event-stream"] = {
            "schema": {  # before OpenAPI 3.2 it is that of one event
                "type": "object",
                "description": "With `stream: true`: events `data: JSON`, at last `data: [DONE]`. After a failure "
                'comes `data: {"error": …}` instead, and the connection closes.',
                "required": ["data"],
                "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            },
            "x-event": schema_of[str(route.event)],
        }
    return contents
