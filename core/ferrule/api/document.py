"""The OpenAPI document: FastAPI's document, completed with what the edge does around every route."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ferrule.api.paths import Entry
from ferrule.config import Config
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.router import Access

_ERROR_REF = {"$ref": "#/components/schemas/Error"}
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
    "adapters": "Adapters that are loaded and unloaded while the server runs.",
    "admin": "Administration; absent unless FERRULE_SERVER_DEV_MODE=1.",
}
_SECRETS = {Access.KEY: "key", Access.ADMIN: "adminKey", Access.OPERATOR: "adminKey"}
_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "--api-key"},
    "adminKey": {"type": "http", "scheme": "bearer", "description": "--admin-key, or else --api-key"},
}
_FASTAPI_ERRORS = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI, served: Sequence[Entry], config: Config) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the routes that are `served`."""
    routes = list({id(entry.route): entry.route for entry in served}.values())  # each once, whatever its methods
    used = {str(tag) for route in routes for tag in route.tags}
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="An LLM inference server. null means the same as an absent field.",
        routes=routes,
        servers=[{"url": "/" + config.frontend.root_path.strip("/")}],
        tags=[{"name": tag, "description": _TAGS.get(tag, "")} for tag in sorted(used, key=_order)],
    )
    document = _with_definitions(document)
    for entry in served:
        operation = document["paths"].get(entry.route.path_format, {}).get(entry.method.lower())
        if operation is not None:
            _complete(operation, entry, config)
    schemas = document["components"]["schemas"]
    for name in _FASTAPI_ERRORS:
        schemas.pop(name, None)
    schemas["Error"] = OPENAI.error_schema
    headers = sorted({name for entry in served for name in entry.dialect.key_headers})
    in_headers = {name: {"type": "apiKey", "in": "header", "name": name} for name in headers}
    document["components"]["securitySchemes"] = _SCHEMES | in_headers
    return document


def _order(tag: str) -> tuple[int, str]:
    return (list(_TAGS).index(tag) if tag in _TAGS else len(_TAGS), tag)


def _with_definitions(document: dict[str, Any]) -> dict[str, Any]:
    """Move the definitions inside schemas to the document's components, where FastAPI's own are."""
    found: dict[str, Any] = {}

    def lift(part: dict[str, Any]) -> dict[str, Any]:
        found.update(part.pop("$defs", {}))
        return part

    text = json.dumps(document).replace('"#/$defs/', '"#/components/schemas/')
    document = json.loads(text, object_hook=lift)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in found.items():
        schemas.setdefault(name, schema)
    return document


def _complete(operation: dict[str, Any], entry: Entry, config: Config) -> None:
    """Add to an operation who may call it, and every error that it may answer."""
    words = [word.strip("{}") for word in (entry.route.path_format or "").split("/") if word]
    operation["operationId"] = "_".join([entry.method.lower(), *words]).replace(".", "_")
    secrets = [_SECRETS[entry.access], *entry.dialect.key_headers] if entry.access in _SECRETS else []
    operation["security"] = [{secret: []} for secret in secrets]
    has_body = entry.body is not None
    if has_body and config.frontend.strict_requests:
        operation["description"] = "Fields that are not listed are refused (--strict-requests)."
    responses = operation["responses"]
    responses.pop("422", None)
    schema = _ERROR_REF if entry.dialect.error_schema is OPENAI.error_schema else entry.dialect.error_schema
    error = {"application/json": {"schema": schema}}
    for status, what in _FAILURES.items():
        if status in _ONLY_BODY and not has_body or status == 404 and not (has_body or "{" in entry.path):
            continue
        if status == 401 and entry.access is Access.PUBLIC:
            continue
        responses[str(status)] = {"description": what, "content": error}
        if status in {429, 503}:
            responses[str(status)]["headers"] = _RETRY
    responses["default"] = {"description": "An error.", "content": error}
    for answer in responses.values():
        content = answer.get("content", {})
        if "x-event" in content.get("text/event-stream", {}):
            events = content.pop("text/event-stream")
            media_type = entry.dialect.media_type.partition(";")[0]
            content[media_type] = events | {"schema": _events(events["x-event"], schema, entry.dialect)}


def _events(event: Mapping[str, Any], error: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return the schema of a stream of events; OpenAPI before 3.2 describes the whole by the schema of one event."""
    content = {"anyOf": [event, error]}
    if type(dialect).event is not Dialect.event or dialect.last != OPENAI.last:
        return content
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {
        "type": "object",
        "description": "With `stream: true`: events `data: JSON`, at last `data: [DONE]`. After a failure "
        'comes `data: {"error": …}` instead, and the connection closes.',
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }
