"""The Responses routes over a scripted service: every field's bad values, notes, chains, owners and failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ferrule.errors import ConfigError, OverloadedError, RequestFailed, UnavailableError
from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ferrule.interfaces.response_store import StoredResponse
from ferrule.interfaces.service import ChatPrompt, Output, ServedAdapter, Usage, add_up
from ferrule.types import FinishReason
from ferrule_plugins.response_store.bounds import Bounds
from ferrule_plugins.response_store.memory import MemoryStore
from ferrule_plugins.router.responses import background, history
from ferrule_plugins.router.responses.answers import Response
from ferrule_plugins.router.responses.form import ResponseForm
from ferrule_plugins.router.responses.schema import ResponsesBody, TokensBody
from tests.fakes.http import Site, error_of
from tests.unit.plugins.router.test_openai import WRONG

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TOOLS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "5"}
NO_EFFECT: dict[str, Any] = {
    "service_tier": "flex",
    "prompt_cache_key": "a",
    "max_tool_calls": 3,
    "moderation": {},
    "top_logprobs": 3,
    "parallel_tool_calls": False,
    "include": ["web_search_call.results"],
    "reasoning": {"summary": "auto"},
}


async def send(site: Site, path: str = "", **fields: Any) -> httpx.Response:
    return await site.http.post(f"/v1/responses{path}", json={"input": "hello"} | fields)


async def answer(site: Site, **fields: Any) -> dict[str, Any]:
    response = await send(site, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names must be their types."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("field", sorted(ResponsesBody.model_fields))
async def test_no_value_of_any_field_is_our_fault(field: str) -> None:
    site = Site(reasoning_parser="qwen3", **TOOLS)
    nested = [{"type": each} for each in ("message", "function", "reasoning", "json_schema", "allowed_tools", 5)]
    for path in ("", "/input_tokens") if field in TokensBody.model_fields else ("",):
        for value in [*WRONG, "a" * 20_000, *nested, [nested], nested, [{"role": "user", "content": nested}]]:
            response = await send(site, path, **{field: value})
            if response.status_code != 200:
                error = error_of(response, response.status_code)
                assert response.status_code in {400, 404}, (field, value, response.text)
                assert error["message"]
                assert "aaaaaaaaaa" * 12 not in error["message"]


async def test_hooks_are_told_the_answers_name() -> None:
    site = Site()
    assert (await answer(site))["id"] == site.service.requests[-1].answer_id


@pytest.mark.parametrize("field", sorted(NO_EFFECT))
async def test_fields_without_effect_are_told(field: str) -> None:
    response = await send(Site(), **{field: NO_EFFECT[field]}, colour=1)
    named = response.headers["x-ferrule-ignored-fields"]
    assert field in named
    assert "colour" in named
    assert any(each.startswith(field) for each in response.json()["ferrule"]["warnings"])
    strict = await send(Site(strict_requests=True), **{field: NO_EFFECT[field]})
    assert error_of(strict)["message"].startswith(field)


@pytest.mark.parametrize("field", ["conversation", "prompt", "previous_input_messages"])
async def test_features_that_are_not_here_are_refused(field: str) -> None:
    fields: dict[str, Any] = {field: ["x"]}
    assert f"{field}: not in this build" in error_of(await send(Site(), **fields))["message"]


async def test_the_request_reaches_the_service() -> None:
    site = Site(**TOOLS)
    site.service.defaults = {"top_p": 0.5, "top_k": 3, "max_tokens": 9}
    other = ADD | {"name": "other"}
    only_add = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    told = await answer(
        site,
        temperature=0,
        top_k=7,
        stop="x",
        tools=[ADD, other],
        tool_choice=only_add,
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        text={"verbosity": "low"},
        instructions="Be brief.",
    )
    asked, params = site.last, site.last.params
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0, 0.5, 7, "x", 9)
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)
    (prompt,) = asked.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"})
    assert [tool["function"]["name"] for tool in prompt.tools or ()] == ["add"]
    switches = {"reasoning_effort": "none", "enable_thinking": False, "verbosity": "low"}
    assert prompt.chat_template_kwargs == switches
    assert (told["temperature"], told["top_p"], told["tool_choice"], len(told["tools"])) == (0, 0.5, only_add, 2)
    await answer(site, text={"format": {"type": "json_object"}}, max_output_tokens=3)
    assert site.last.grammar is not None
    assert site.last.params.max_tokens == 3
    name = error_of(await send(site, max_output_tokens=1 << 20))["param"]
    assert name == "max_output_tokens"


async def test_a_chain_and_references_become_one_conversation() -> None:
    site = Site(**TOOLS)
    first = await answer(site, input=[{"role": "developer", "content": "D"}, {"role": "user", "content": "one"}])
    second = await answer(
        site, input=[CALL, RESULT, {"role": "user", "content": "b"}], previous_response_id=first["id"]
    )
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Done", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {"role": "user", "content": "b"},
    )
    items = (await site.http.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()
    assert [item["type"] for item in items["data"]] == ["function_call", "function_call_output", "message"]
    ids = [item["id"] for item in items["data"]]
    page = (await site.http.get(f"/v1/responses/{second['id']}/input_items?limit=1&after={ids[2]}")).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[1]], True)
    await answer(site, input=[{"id": ids[2]}, {"type": "item_reference", "id": second["output"][0]["id"]}])
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant"]


async def test_a_conversation_beyond_the_context() -> None:
    """Refuse what is too long, or drop what is oldest; read no more of a chain than can be used."""
    site = Site()
    first = await answer(site, input="a" * 60)
    for _ in range(3):
        first = await answer(site, input="b" * 30, previous_response_id=first["id"], max_output_tokens=5)
    long = {"previous_response_id": first["id"], "input": "c" * 120}
    assert "context" in error_of(await send(site, **long))["message"]
    kept = await answer(site, truncation="auto", max_output_tokens=20, **long)
    assert any("oldest items were dropped" in each for each in kept["ferrule"]["warnings"])
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[-1]["content"] == "c" * 120
    assert prompt.messages[0]["role"] == "user"
    assert sum(len(message["content"]) for message in prompt.messages) + 20 <= 256
    site.service.loaded["poet"] = ServedAdapter(name="poet", parent="m", path="/poet", num_virtual=60)
    await answer(site, truncation="auto", max_output_tokens=20, model="poet", **long)
    (virtual,) = site.last.prompts
    assert isinstance(virtual, ChatPrompt)
    assert sum(len(message["content"]) for message in virtual.messages) + 20 + 60 <= 256
    assert len(virtual.messages) < len(prompt.messages)
    counted = await send(site, "/input_tokens", truncation="auto", **long)
    assert counted.json()["input_tokens"] < 256
    assert "context" in error_of(await send(site, truncation="auto", input="d" * 300))["message"]


async def test_whose_responses_they_are(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: sk-alice\nbob: sk-bob\n")
    site = Site(api_key_file=str(keys))
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    made = (await site.http.post("/v1/responses", json={"input": "hello"}, headers=alice)).json()["id"]
    assert (await site.http.get(f"/v1/responses/{made}", headers=alice)).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        error_of(await site.http.request(method, f"/v1/responses/{made}{path}", headers=bob), 404)
    for body in ({"previous_response_id": made}, {"input": [{"id": f"msg_{made[5:]}_0"}]}):
        error_of(await site.http.post("/v1/responses", json={"input": "x"} | body, headers=bob), 404)
    assert (await site.http.delete(f"/v1/responses/{made}", headers=alice)).json()["deleted"] is True


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (OverloadedError("The queue is full."), 429),
        (UnavailableError("The server is starting."), 503),
        (RequestFailed("It failed."), 500),
    ],
)
async def test_failures_before_and_within_a_stream(failure: Any, status: int) -> None:
    site = Site()
    site.service.refusal = failure
    assert error_of(await send(site, background=True), status)["message"] == failure.message
    site.service.refusal, site.service.failure = None, failure
    broken = events((await send(site, stream=True, request_id="broken")).text)
    assert [event["type"] for event in broken[-2:]] == ["response.failed", "error"]
    assert broken[-2]["response"]["error"]["message"] == broken[-1]["message"] == failure.message
    assert broken[-2]["response"]["output"][0]["status"] == "incomplete"
    error_of(await site.http.get("/v1/responses/resp_broken"), 404)
    queued = await answer(site, background=True)
    told = await ended(site, queued["id"])
    assert (told["status"], told["error"]) == ("failed", {"code": _code(failure), "message": failure.message})
    refused = error_of(await send(site, previous_response_id=queued["id"]))
    assert "is failed: it has no answer" in refused["message"]
    assert site.service.open == 0


def _code(failure: Any) -> str:
    return "invalid_prompt" if isinstance(failure, OverloadedError) else "server_error"


async def ended(site: Site, name: str) -> dict[str, Any]:
    """Return a response in the background once it has ended."""
    while (told := (await site.http.get(f"/v1/responses/{name}")).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    return dict(told)


async def test_the_background_goes_on_and_can_be_cancelled() -> None:
    site, go = Site(), asyncio.Event()
    site.service.pace = go.wait
    queued = await answer(site, background=True)
    assert queued["status"] == "queued"
    assert (await site.http.get(f"/v1/responses/{queued['id']}")).json()["status"] in ("queued", "in_progress")
    assert "is in_progress" in error_of(await send(site, previous_response_id=queued["id"]))["message"]
    cancelled = (await site.http.post(f"/v1/responses/{queued['id']}/cancel")).json()
    assert (cancelled["status"], site.service.open) == ("cancelled", 0)
    go.set()
    assert (await site.http.post(f"/v1/responses/{queued['id']}/cancel")).json() == cancelled
    whole = await ended(site, (await answer(site, background=True))["id"])
    assert whole["output"][0]["content"][0]["text"] == "hello"
    streamed = events((await send(site, background=True, stream=True)).text)
    name = streamed[0]["response"]["id"]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    assert [event["type"] for event in streamed[:3]] == [
        f"response.{kind}" for kind in ("created", "queued", "in_progress")
    ]
    rest = (await site.http.get(f"/v1/responses/{name}?stream=true&starting_after=4")).text
    assert events(rest) == streamed[5:]
    assert (
        "starting_after needs stream"
        in error_of(await site.http.get(f"/v1/responses/{name}?starting_after=4"))["message"]
    )


async def test_what_has_no_stream_cannot_be_followed() -> None:
    """Ask while it runs, when there is nothing to tell it by but its events, and behind the end."""
    site, go = Site(), asyncio.Event()
    site.service.pace = go.wait
    name = (await answer(site, background=True))["id"]
    refused = error_of(await site.http.get(f"/v1/responses/{name}?stream=true"))
    assert "only a response that was made with background and stream" in refused["message"]
    go.set()
    streamed = events((await send(site, background=True, stream=True)).text)
    path = f"/v1/responses/{streamed[0]['response']['id']}?stream=true&starting_after="
    last = len(streamed) - 1
    assert (await site.http.get(f"{path}{last}")).text == ""
    for number in (last + 1, 1 << 62):
        refused = error_of(await site.http.get(f"{path}{number}"))
        assert (refused["message"], refused["param"]) == (
            f"starting_after: the stream has no event {number} so far.",
            "starting_after",
        )


async def test_a_store_that_fails_at_the_end_leaves_nothing_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store fail for a while: the run ends as its stream told, or as a failed one."""
    monkeypatch.setattr(background, "_AGAIN", 0.01)
    for method, streamed, status in (
        ("append", True, "failed"),
        ("update", True, "incomplete"),
        ("update", False, "failed"),
    ):
        name, works, tries = f"resp_{method}-{streamed}", getattr(MemoryStore, method), list[None]()
        site, go = Site(), asyncio.Event()
        site.service.pace = go.wait
        sending = asyncio.create_task(send(site, background=True, stream=streamed, request_id=name[5:]))
        while (await site.http.get(f"/v1/responses/{name}")).json().get("status") != "in_progress":
            await asyncio.sleep(0.01)

        def fails(self: Any, *args: Any, works: Any = works, tries: Any = tries) -> Any:
            tries.append(None)
            if len(tries) <= 3:
                raise RequestFailed("The disk is full.")
            return works(self, *args)

        with monkeypatch.context() as broken:
            broken.setattr(MemoryStore, method, fails)
            go.set()
            told = await ended(site, name)
        assert (told["status"], site.service.open) == (status, 0)
        assert told["error"] is None or told["error"]["message"] == "The disk is full."
        last = events((await sending).text)[-1] if streamed else {"response": told}
        assert last["response"] == told


async def test_items_have_ids_of_their_own() -> None:
    """Turn pages of a list in which ids came twice, or not at all."""
    site = Site()
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    sent = [said[0] | {"id": "msg_x"}, said[1] | {"id": "msg_x"}, said[2] | {"id": "msg_pages_i0"}, said[3], said[4]]
    await answer(site, input=sent, request_id="pages")
    path, found, more = "/v1/responses/resp_pages/input_items?order=asc&limit=1", list[Any](), True
    while more and len(found) < 9:
        after = f"&after={found[-1]['id']}" if found else ""
        page = (await site.http.get(path + after)).json()
        found, more = found + page["data"], page["has_more"]
    assert [item["content"][0]["text"] for item in found] == list("01234")
    assert [item["id"] for item in found] == ["msg_x", "msg_pages_i1", "msg_pages_i0", "msg_pages_i2", "msg_pages_i3"]


async def test_references_are_short_and_what_they_name_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    output = (await answer(site))["output"][0]["id"]
    monkeypatch.setattr(history, "_MOST_REFERRED", 1000)
    refused = error_of(await send(site, input=[{"id": output}] * 20, truncation="auto"))
    assert refused["param"].startswith("input[")
    assert "more than 1000 bytes" in refused["message"]


async def test_a_chain_without_an_end_is_read_as_a_long_one() -> None:
    store = MemoryStore(None, options=Bounds())
    for name, parent in (("a", "b"), ("b", "a")):
        empty = {"status": "completed", "output": list[Any]()}
        store.add(StoredResponse(id=name, parent=parent, created=0.0, response=json.dumps(empty).encode()))
    assert not (await history.History(lambda: store).before("", "a", 1000)).whole


async def test_ids_of_requests_are_taken_once() -> None:
    site = Site()
    assert (await answer(site, request_id="a.b-c"))["id"] == "resp_a.b-c"
    count = len(site.service.requests)
    assert "request_id" in error_of(await send(site, request_id="a.b-c"))["message"]
    assert len(site.service.requests) == count
    assert (await answer(site, request_id="a.b-c", store=False))["store"] is False
    error_of(await send(site, request_id="a/b"))
    named = await answer(site, request_id="a_b")
    assert (await answer(site, input=[{"id": named["output"][0]["id"]}]))["status"] == "incomplete"


def test_one_process_cannot_keep_responses_for_several() -> None:
    with pytest.raises(ConfigError, match="--api-server-count 2"):
        Site(response_store="memory", api_server_count=2)
    Site(api_server_count=2)


async def test_the_router_can_be_left_out() -> None:
    response = await send(Site(routers=("openai", "docs", "health")))
    assert response.status_code == 404
    assert "The router responses serves it" in response.text


# ------------------------------------------------------------------------------------------------ forms

EVENTS: tuple[Event, ...] = (
    Reasoning("Let "),
    Reasoning("me."),
    Content("He"),
    Content(""),
    Content("llo"),
    CallStart(0, "c0", "add"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallEnd(0),
    Content("More"),
    CallStart(1, "c1", "add"),
    CallArguments(1, "{"),
)


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("cut", [1, 3, 100])
def test_a_stream_says_what_the_whole_says(cut: int, finish: FinishReason, many: bool) -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=2, reasoning_tokens=3)
    pieces = [EVENTS[start : start + cut] for start in range(0, len(EVENTS), cut)]
    outputs = [Output(index=0, events=piece, usage=usage) for piece in pieces]
    outputs.append(Output(index=0, events=(), usage=usage, finish=finish))
    head: Any = {"id": "resp_x", "background": False}

    def form() -> ResponseForm:
        return ResponseForm(head, "x", many, encrypts=True, logprobs=None)

    streamed = form()
    sent = [event for part in [streamed.begin(), *map(streamed.chunk, outputs)] for event in part]
    folded = form()
    folded.chunk(add_up(outputs))
    whole: Response = folded.response
    told = sent[-1]["response"]
    assert {**told, "completed_at": 0} == {**whole, "completed_at": 0}
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", *(["function_call"] if many else [])]
    assert [item.get("arguments") for item in whole["output"] if "arguments" in item] == ['{"a": 1}', "{"][: 1 + many]
    assert whole["output"][-1]["status"] == ("completed" if finish is FinishReason.STOP else "incomplete")
    assert len({item["id"] for item in whole["output"]}) == len(kinds)
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert whole["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }
