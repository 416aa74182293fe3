"""`lora`: adapters that an operator loads and unloads while the server runs, as vLLM has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ferrule import env
from ferrule.interfaces.router import Access, CurrentRequest, RequestInfo, Router, RouterContext, needs
from ferrule.schema import Body, SomeText
from ferrule_protocol import Notes

_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class LoadAdapter(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[SomeText, Field(description="The name that requests are to give as `model`.")]
    lora_path: Annotated[
        SomeText, Field(description="Absolute path of a folder on the server, below one that its operator has named.")
    ]
    load_inplace: Annotated[
        bool | None, Field(description="Take the place of an adapter of this name. Default: false, it is refused then.")
    ] = None


class UnloadAdapter(Body):
    """``POST /v1/unload_lora_adapter``. Adapters are found by their names: there is no `lora_int_id`."""

    lora_name: Annotated[SomeText, Field(description="The name of a loaded adapter.")]


class Lora(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["adapters"], dependencies=[needs(Access.OPERATOR)])
        if not ctx.config.lora_updating:
            return routes
        service, (load_path, unload_path) = ctx.service, _PATHS

        @routes.post(load_path, response_class=PlainTextResponse, summary="Load an adapter.")
        async def load(body: LoadAdapter, info: CurrentRequest) -> PlainTextResponse:
            headers = _read(body, info)
            await service.load_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.", headers=headers)

        @routes.post(unload_path, response_class=PlainTextResponse, summary="Unload an adapter.")
        async def unload(body: UnloadAdapter, info: CurrentRequest) -> PlainTextResponse:
            headers = _read(body, info)
            await service.unload_adapter(body.lora_name)
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", headers=headers)

        def _read(body: Body, info: RequestInfo) -> dict[str, str]:
            """Return headers that tell of fields which nothing reads. Raises RequestError on a strict server."""
            notes = Notes.of(info.unknown_fields, type(body))
            notes.settle(ctx.config.frontend.strict_requests)
            return notes.headers

        return routes

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        if ctx.config.lora_updating:
            return {}
        variable = env.variable("allow_runtime_lora_updating")
        hint = f"The server must be started with --enable-lora and {variable}=1; --lora-modules serves adapters anyway."
        return dict.fromkeys(_PATHS, hint)
