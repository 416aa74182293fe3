"""The Messages routes over a scripted service: every field's bad values, notes, switches of templates, and failures."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ferrule.errors import OverloadedError, RequestFailed, UnavailableError
from ferrule.interfaces.service import ChatPrompt
from ferrule_plugins.router.anthropic.schema import CountBody, MessagesBody
from tests.fakes.http import Site
from tests.unit.plugins.router.test_openai import WRONG

BODY: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
ADD = {"name": "add", "input_schema": {"type": "object"}}
NO_EFFECT = {"context_management": {"edits": []}, "speed": "fast", "service_tier": "x", "inference_geo": "eu"}


async def send(site: Site, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return await site.http.post(path, json=BODY | fields)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error of an answer that must be one, in Anthropic's form."""
    found = response.json()
    assert response.status_code == status, response.text
    assert (set(found), found["type"]) == ({"type", "error", "request_id"}, "error")
    assert found["request_id"] == response.headers["request-id"]
    return dict(found["error"])


@pytest.mark.parametrize("field", sorted(MessagesBody.model_fields))
async def test_no_value_of_any_field_is_our_fault(field: str) -> None:
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    nested = [{"type": each} for each in ("text", "tool", "enabled", "json_schema", "ephemeral", 5)]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for value in [*WRONG, "a" * 20_000, *nested, [nested], [{"role": "user", "content": nested}], [{"format": {}}]]:
            response = await send(site, path, **{field: value})
            if response.status_code != 200:
                error = error_of(response, response.status_code)
                assert response.status_code in {400, 404}, (field, value, response.text)
                assert error["message"]
                assert "aaaaaaaa" not in error["message"]


@pytest.mark.parametrize("field", sorted(MessagesBody.model_fields))
async def test_null_is_the_same_as_absent(field: str) -> None:
    response = await send(Site(), **{field: None})
    if MessagesBody.model_fields[field].is_required():
        assert error_of(response)["message"] == f"{field} is required."
    else:
        assert (response.status_code, "ferrule" in response.json()) == (200, False)


@pytest.mark.parametrize("field", sorted(NO_EFFECT))
async def test_fields_without_effect_are_told(field: str) -> None:
    fields: dict[str, Any] = {field: NO_EFFECT[field], "colour": 1}
    response = await send(Site(), **fields)
    assert set(response.headers["x-ferrule-ignored-fields"].split(", ")) == {field, "colour"}
    warnings = response.json()["ferrule"]["warnings"]
    assert [each.partition(":")[0] for each in warnings] == ["colour", field]
    strict = await send(Site(strict_requests=True), **{field: NO_EFFECT[field]})
    assert error_of(strict)["message"].startswith(field)


@pytest.mark.parametrize("field", ["container", "mcp_servers"])
async def test_features_that_are_not_here_are_refused(field: str) -> None:
    assert f"{field}: not in this build" in error_of(await send(Site(), **{field: ["x"]}))["message"]


@pytest.mark.parametrize(
    ("fields", "switches", "budget"),
    [
        ({}, {"enable_thinking": False, "thinking": False}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, None),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True, "thinking": True}, None),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
            9,
        ),
    ],
)
async def test_switches_of_the_template(fields: dict[str, Any], switches: dict[str, Any], budget: int | None) -> None:
    site = Site(reasoning_parser="qwen3")
    assert (await send(site, **fields)).status_code == 200
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.chat_template_kwargs == switches
    assert site.last.params.thinking_token_budget == budget
    plain = Site()
    response = await send(plain, **fields)
    assert plain.last.params.thinking_token_budget is None
    assert ("thinking.budget_tokens" in response.text) is (budget is not None)


async def test_sampling_and_tools_reach_the_service() -> None:
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes")
    site.service.defaults = {"top_p": 0.5, "top_k": 3}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    await send(site, temperature=0, top_k=7, stop_sequences=["x"], tools=[ADD], tool_choice=choice)
    asked, params = site.last, site.last.params
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0, 0.5, 7, ["x"], 5)
    assert (asked.tool_choice, asked.parallel_tool_calls, asked.streamed) == ("required", False, False)
    assert asked.tools is not None
    await send(site, tools=[ADD], tool_choice={"type": "none"}, stream=True, max_tokens=256)
    assert (site.last.tool_choice, site.last.streamed, site.last.params.max_tokens) == ("none", True, None)
    assert error_of(await send(Site(), tools=[ADD]))["message"].startswith('tool_choice "auto"')


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (OverloadedError("The queue is full."), 429, "rate_limit_error"),
        (UnavailableError("The server is starting."), 503, "overloaded_error"),
        (RequestFailed("It failed."), 500, "api_error"),
    ],
)
async def test_failures_before_and_within_a_stream(failure: Any, status: int, kind: str) -> None:
    site = Site()
    site.service.refusal = failure
    response = await send(site)
    assert error_of(response, status) == {"type": kind, "message": failure.message}
    assert ("retry-after" in response.headers) is (status in {429, 503})
    site.service.refusal, site.service.failure = None, failure
    broken = await send(site, stream=True)
    *_, name, data = broken.text.strip().split("\n")
    assert (broken.status_code, name) == (200, "event: error")
    sent = json.loads(data.removeprefix("data: "))
    assert sent["error"] == {"type": kind, "message": failure.message}
    assert sent["request_id"] == broken.headers["request-id"]


async def test_counting_reads_the_prompt_of_the_same_conversation() -> None:
    fields = {name: value for name, value in BODY.items() if name in CountBody.model_fields}
    site = Site()
    counted = await site.http.post("/v1/messages/count_tokens", json=fields)
    usage = (await send(site)).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    error_of(await site.http.post("/v1/messages/count_tokens", json=fields | {"model": "x"}), 404)


async def test_the_router_can_be_left_out() -> None:
    response = await send(Site(routers=("openai", "docs", "health")))
    assert response.status_code == 404
    assert "The router anthropic serves it" in response.text
