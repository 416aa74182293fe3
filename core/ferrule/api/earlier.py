"""Routers of contract 1 (`ferrule.interfaces.router`), as routers of this one: tables of routes, bodies as Structs."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Body, Request, Response
from fastapi.routing import APIRoute
from pydantic import PlainValidator, WithJsonSchema

from ferrule.errors import RequestError
from ferrule.interfaces import http
from ferrule.interfaces import router as v1
from ferrule.schema import printable

Endpoint = Callable[..., Awaitable[Response]]
_PLACE = re.compile(r" - at `(?:key in `)?\$\.?(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`\Z")


def adapt(old: type[v1.Router]) -> type[http.Router]:
    """The class of this contract that serves what a class of contract 1 does."""

    class Adapted(http.Router):
        def router(self, ctx: http.RouterContext) -> APIRouter:
            found: list[v1.Route] = []
            given = v1.RouterContext(ctx.config, ctx.plugins, ctx.service, lambda: tuple(found), ctx.load)
            found += old().routes(given)
            made = APIRouter()
            made.routes.extend(_route(route) for route in found)
            return made

        def absent(self, ctx: http.RouterContext) -> Mapping[str, str]:
            return old().absent(v1.RouterContext(ctx.config, ctx.plugins, ctx.service, load=ctx.load))

    Adapted.__name__ = Adapted.__qualname__ = old.__name__
    Adapted.__module__ = old.__module__
    return Adapted


def _route(route: v1.Route) -> APIRoute:
    names = [part[1:-1].removesuffix(":path") for part in route.path.split("/") if part.startswith("{")]
    places = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    asked = [
        {"name": name, "in": "query", "description": what, "schema": {"type": "string"}}
        for name, what in route.query.items()
    ]
    return APIRoute(
        route.path,
        _endpoint(route),
        methods=[route.method],
        summary=route.summary,
        tags=list(route.tags),
        dependencies=[http.needs(route.access)],
        response_model=None,
        responses=_responses(route),
        openapi_extra={"parameters": [*places, *asked]} if places or asked else None,
    )


def _endpoint(route: v1.Route) -> Endpoint:
    async def answer(request: Request, body: Any) -> Response:
        return _response(await route.handler(_call(request, body)))

    async def plain(request: Request) -> Response:
        return await answer(request, None)

    async def taking(request: Request, body: Any) -> Response:
        return await answer(request, body)

    if route.body_type is None:
        return plain
    taking.__annotations__["body"] = _body(route.body_type)
    taking.__annotations__["request"] = Request
    return taking


def _body(kind: type) -> Any:
    """A type for pydantic that is checked by msgspec and described by its schema."""

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise _refusal(str(error)) from None

    return Annotated[Any, PlainValidator(convert), WithJsonSchema(_schema(kind)), Body()]


def _refusal(text: str) -> RequestError:
    """What msgspec found: the field, and the finding without the client's value, which it never repeats."""
    place = _PLACE.search(text)
    param = printable(place.group(1).replace("[...]", "")) if place else ""
    what = text[: place.start()] if place else text
    if missing := _MISSING.match(what):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return RequestError(f"{param} is required.", param)
    return RequestError(f"{param or 'The body'}: {printable(what, 256).replace('`', '')}.", param or None)


def _call(request: Request, body: Any) -> v1.Call:
    frame: http.Frame = request.scope[http.SCOPE_KEY]
    info, query = frame.info, request.query_params
    return v1.Call(
        body=body,
        path_params=request.path_params,
        query={name: ",".join(query.getlist(name)) for name in query},
        headers=info.headers,
        request_id=info.id,
        disconnected=info.disconnected,
        unknown_fields=info.unknown_fields,
    )


def _response(reply: v1.Reply | v1.EventStream) -> Response:
    if isinstance(reply, v1.EventStream):
        return http.EventStream(reply.events, reply.headers)
    content = reply.content
    headers = {"content-type": reply.media_type, **reply.headers}
    if not isinstance(content, str | bytes):
        content = msgspec.json.encode(content)
    return Response(content, reply.status, headers)


def _responses(route: v1.Route) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {}
    if route.answer in (str, bytes):
        content["text/plain" if route.answer is str else "text/html"] = {"schema": {"type": "string"}}
    elif route.answer is not None:
        content["application/json"] = {"schema": _schema(route.answer)}
    if route.event is not None:
        content["text/event-stream"] = {"x-event": _schema(route.event)}
    return {200: {"content": content}} if content else {}


def _schema(kind: Any) -> dict[str, Any]:
    """msgspec's description of a type, without references: pydantic takes no others' into its own documents.

    msgspec describes no union of Structs that it could not decode: each member by itself then.
    """
    members: Sequence[Any] = get_args(kind)
    if members and all(hasattr(member, "__struct_fields__") for member in members):
        return {"anyOf": [_schema(member) for member in members]}
    schema = msgspec.json.schema(kind)
    found: dict[str, Any] = _whole(schema, schema.pop("$defs", {}), ())
    return found


def _whole(part: Any, definitions: Mapping[str, Any], above: tuple[str, ...]) -> Any:
    """A schema with what it refers to in place of the references; a type inside itself may be anything there."""
    if isinstance(part, list):
        return [_whole(item, definitions, above) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return {} if name in above else _whole(definitions[name], definitions, (*above, name))
    return {name: _whole(value, definitions, above) for name, value in part.items()}
