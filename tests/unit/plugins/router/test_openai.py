"""The OpenAI routes over a scripted service: forms of prompts, answers and streams, and every field's bad values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from ferrule.errors import RequestError
from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Reasoning
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, Usage
from ferrule.types import FinishReason, Targets
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody
from tests.fakes.http import Site, chunks, error_of

# ---------------------------------------------------------------------------------------- hostile values

WRONG = [-1, 0, 1.5, 1e308, 2**31, 2**63, -(2**63) - 1, 2**64, True, "x", "", [], [[]], {}, {"a": None}, [None], [1.5]]
FIELDS = sorted(set(CompletionBody.model_fields) | set(ChatBody.model_fields))


@pytest.mark.parametrize("field", FIELDS)
async def test_no_value_of_any_field_is_our_fault(field: str) -> None:
    """Accept each value, or refuse it with a 4xx that names the field, on both routes."""
    site = Site()
    for call in (site.complete, site.chat):
        for value in [*WRONG, "a" * 20_000, [2**63], [-1], {"1": 1e300}, {"-5": 1}, {"x": 1}]:
            response = await call(**{field: value})
            if response.status_code != 200:
                error = error_of(response, response.status_code)
                assert response.status_code in {400, 403, 404}, (field, value, response.text)
                # `messages` decides over `prompt` in chat, and the reverse, so the other's field is unknown there.
                assert (error["param"] or "").startswith((field, "stream_options", "prompt")), (field, value, error)
                assert "aaaaaaaa" not in error["message"]


@pytest.mark.parametrize("field", FIELDS)
async def test_null_is_the_same_as_absent(field: str) -> None:
    site = Site()
    if field not in {"prompt", "messages"}:
        for call in (site.complete, site.chat):
            assert (await call(**{field: None})).status_code == 200


@pytest.mark.advisory("CVE-2026-21869")
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_integer_is_bounded(kind: type[BaseModel]) -> None:
    """Bound every integer of a body to 64 bits: a larger one could not be sent to the engine."""

    def integers(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "integer":
                yield schema
            for part in schema.values():
                yield from integers(part)
        elif isinstance(schema, list):
            for part in schema:
                yield from integers(part)

    found = list(integers(kind.model_json_schema()))
    assert len(found) > 5
    assert all(schema["minimum"] >= -(2**63) and schema["maximum"] <= 2**63 - 1 for schema in found)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], 1]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"suffix": "x", "prompt": [97]}, "suffix"),
        ({"suffix": "x", "prompt_embeds": "AAAA"}, "suffix"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 1}, "priority"),
        ({"target_first_token_ms": 0}, "target_first_token_ms"),
        ({"target_inter_token_ms": 1e9}, "target_inter_token_ms"),
        ({"target_first_token_ms": 500}, "target_first_token_ms"),  # the server has none
        ({"target_inter_token_ms": 500}, "target_inter_token_ms"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"user": "a" * 20_000}, "user"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias")
            for key in ("x", "", ",", "1,2", "1,", "+1", " 1", "1_0", "-", "1.0")
        ),
        *(({"logit_bias": {"7": 1, key: 1}}, "logit_bias") for key in ("", "x", "٣", "1" * 20)),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"model": "other"}, "model"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    response = await Site().complete(**body)
    assert error_of(response, 404 if param == "model" else 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "user", "contnet": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [{}], "tool_choice": "none"}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
async def test_chat_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    assert error_of(await Site().chat(**body))["param"] == param


async def test_service_errors_come_back_under_the_chat_names() -> None:
    site = Site()
    site.service.refusal = RequestError("logprobs is wrong.", "logprobs")
    assert error_of(await site.chat(logprobs=True))["param"] == "top_logprobs"
    site.service.refusal = RequestError("max_tokens is wrong.", "max_tokens")
    assert error_of(await site.chat(max_completion_tokens=5))["param"] == "max_completion_tokens"
    site.service.refusal = RequestError("max_tokens is wrong.", "max_tokens")
    assert error_of(await site.chat(max_tokens=5))["param"] == "max_tokens"


# ------------------------------------------------------------------------------------------- completions


async def test_forms_of_prompts() -> None:
    site = Site()
    expected: list[tuple[Any, tuple[Prompt, ...]]] = [
        ("ab", (Prompt(text="ab"),)),
        (["ab", "c"], (Prompt(text="ab"), Prompt(text="c"))),
        ([97, 98], (Prompt(ids=(97, 98)),)),
        ([[97], [98, 99]], (Prompt(ids=(97,)), Prompt(ids=(98, 99)))),
    ]
    for prompt, prompts in expected:
        assert (await site.complete(prompt=prompt)).status_code == 200
        assert site.last.prompts == prompts
    await site.complete(add_special_tokens=False)
    assert site.last.prompts == (Prompt(text="hello", add_special_tokens=False),)
    for prompt in ("ab", ["ab"]):
        await site.complete(prompt=prompt, suffix="yz")
        assert site.last.prompts == (Prompt(text="ab", suffix="yz"),)
    await site.complete(prompt="ab", suffix="")
    assert site.last.prompts == (Prompt(text="ab"),)


async def test_sampling_fields_arrive_and_defaults_are_layered() -> None:
    server = {"target_first_token_ms": 900.0, "target_inter_token_ms": 50.0}
    site = Site(policy="priority", scheduler=server)
    site.service.defaults = {"temperature": 0.6, "top_k": 20}
    await site.complete()
    params = site.last.params
    assert (params.temperature, params.top_k, params.max_tokens, params.logprobs) == (0.6, 20, 16, None)
    given = {
        "n": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop_token_ids": [1],
        "bad_words": ["y"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 9,
        "allowed_token_ids": [5],
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    processors = ["p", {"qualname": "p", "kwargs": {"a": 1}}, {"qualname": "p", "args": []}]
    wishes = {"target_first_token_ms": 1500, "target_inter_token_ms": 80.5}
    rest = {"logit_bias": {"5": 1.5}, "priority": -3, "cache_salt": "s", "logits_processors": processors}
    await site.complete(**given, **wishes, **rest)
    params = site.last.params
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {5: 1.5}
    assert (site.last.priority, site.last.cache_salt) == (-3, "s")
    assert site.last.targets == Targets(1.5, 0.0805)
    assert site.last.logits_processors == tuple(processors)


async def test_whole_completion() -> None:
    site = Site()
    answer = (await site.complete(prompt=["ab", "cde"], n=2, max_tokens=2, request_id="me", model="alias")).json()
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-me", "text_completion", "fake")
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None
    usage = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "prompt_tokens_details": None}
    assert answer["usage"] == usage
    assert answer["system_fingerprint"].startswith("ferrule-")


async def test_cached_tokens_are_told_with_the_flag() -> None:
    usage = (await Site(enable_prompt_tokens_details=True).complete(n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_stream_folds_to_the_whole_answer() -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "logprobs": 1, "echo": True, "return_token_ids": True}
    whole = (await Site().complete(**body)).json()
    parts = chunks(await Site().complete(**body, stream=True, stream_options={"include_usage": True}))
    last = parts.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert all(part["usage"] is None for part in parts)
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [item for part in mine for item in part["logprobs"][name]] == choice["logprobs"][name]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


async def test_usage_in_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(await Site().complete(stream=True, stream_options=options))
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 5, 5]
    assert all("usage" not in part for part in chunks(await Site().complete(stream=True)))


async def test_legacy_logprobs() -> None:
    choice = (await Site().complete(prompt="ab", logprobs=2)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "A": -1.0, "B": -2.0}, {"b": -0.5, "A": -1.0, "B": -2.0}],
    }
    named = (await Site().complete(prompt="ab", logprobs=0, return_tokens_as_token_ids=True)).json()["choices"][0]
    assert named["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    flagged = Site(return_tokens_as_token_ids=True)
    assert (await flagged.complete(prompt="ab", logprobs=0)).json()["choices"][0]["logprobs"]["tokens"][
        0
    ] == "token_id:97"


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo(prompt: Any) -> None:
    choice = (await Site().complete(prompt=prompt, echo=True, logprobs=1)).json()["choices"][0]
    assert choice["text"] == "abab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -1.0, "A": -0.1}]
    assert "prompt_logprobs" not in choice
    assert (await Site().complete(prompt=prompt, echo=True)).json()["choices"][0]["text"] == "abab"


async def test_echo_of_the_prompt_alone() -> None:
    site = Site()
    answer = (await site.complete(prompt="ab", echo=True, max_tokens=0, logprobs=0)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert site.last.params.max_tokens == 1
    assert error_of(await site.complete(max_tokens=0))["param"] == "max_tokens"


async def test_prompt_logprobs() -> None:
    choice = (await Site().complete(prompt="ab", prompt_logprobs=1)).json()["choices"][0]
    second = {
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
    }
    assert choice["prompt_logprobs"] == [None, second]
    chat = (await Site().chat(prompt_logprobs=1)).json()
    assert len(chat["prompt_logprobs"]) == 5
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_what_is_told_of_the_prompt_survives_an_output_without_text() -> None:
    def script(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
        held = Output(index=index, token_ids=(97,))  # part of a character
        return [held, Output(index=index, events=(Content("a"),), token_ids=(98,), finish=FinishReason.LENGTH)]

    site = Site()
    site.service.script = script
    assert (await site.complete(prompt="ab", prompt_logprobs=0)).json()["choices"][0]["prompt_logprobs"][0] is None
    assert (await site.complete(prompt="ab", return_token_ids=True)).json()["choices"][0]["token_ids"] == [97, 98]
    assert len((await site.chat(prompt_logprobs=0)).json()["prompt_logprobs"]) == 5


def failing(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    good = Output(index=index, events=(Content("a"),), token_ids=(97,))
    return [good, Output(index=index, finish=FinishReason.ERROR, error="Its logits were not finite.")]


async def test_a_failed_request_is_a_500_or_an_event() -> None:
    for call in (Site().complete, Site().chat):
        site: Site = call.__self__  # type: ignore[attr-defined]
        site.service.script = failing
        assert error_of(await call(), 500)["message"] == "Its logits were not finite."
        streamed = await call(stream=True)
        assert "[DONE]" not in streamed.text
        assert '"code":500' in streamed.text
        assert site.service.open == 0


async def test_a_request_whose_constraint_cannot_be_followed_is_a_400_or_an_event() -> None:
    """Blame the client in the middle of an answer, as the engine does."""
    message = "The constraint on the output takes too long to follow: simplify its repetitions."

    def blamed(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
        good, _ = failing(request, index, ids)
        return [good, Output(index=index, finish=FinishReason.ERROR, error=message, invalid=True)]

    for call in (Site().complete, Site().chat):
        site: Site = call.__self__  # type: ignore[attr-defined]
        site.service.script = blamed
        error = error_of(await call(), 400)
        assert (error["message"], error["type"]) == (message, "BadRequestError")
        streamed = await call(stream=True)
        assert "[DONE]" not in streamed.text
        assert message in streamed.text
        assert '"code":400' in streamed.text
        assert site.service.open == 0


async def test_infinite_logprobs_are_json() -> None:
    site = Site()

    def script(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
        from ferrule.types import TokenLogprobs

        entry = TokenLogprobs(97, float("-inf"), 9, ((98, float("-inf")),))
        end = FinishReason.STOP
        return [Output(index=index, token_ids=(97,), logprobs=(entry,), token_offsets=(0,), finish=end, stop_reason=97)]

    site.service.script = script
    choice = (await site.complete(logprobs=1)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 97)


# -------------------------------------------------------------------------------------------------- chat


async def test_whole_chat() -> None:
    site = Site()
    answer = (await site.chat(max_tokens=3)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hel"},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert site.last.params.max_tokens == 3
    await site.chat(max_tokens=3, max_completion_tokens=4)
    assert site.last.params.max_tokens == 4
    await site.chat()
    assert site.last.params.max_tokens is None  # what is left of the context


async def test_chat_stream() -> None:
    parts = chunks(await Site().chat(max_tokens=2, n=2, stream=True, stream_options={"include_usage": True}))
    assert all(part["object"] == "chat.completion.chunk" for part in parts)
    assert parts.pop()["usage"]["completion_tokens"] == 4
    for index in (0, 1):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in mine]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "h"}, {"content": "e"}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]


async def test_chat_logprobs() -> None:
    choice = (await Site().chat(logprobs=True, top_logprobs=1, max_tokens=1)).json()["choices"][0]
    top = [{"token": "A", "logprob": -1.0, "bytes": [65]}]
    assert choice["logprobs"] == {"content": [{"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": top}]}
    assert (await Site().chat(logprobs=True, max_tokens=1)).json()["choices"][0]["logprobs"]["content"][0][
        "token"
    ] == "h"


async def test_chat_template_options_reach_the_service() -> None:
    site = Site()
    tool = {"type": "function", "function": {"name": "f"}}
    await site.chat(
        tools=[tool],
        tool_choice="none",
        documents=[{"title": "t", "text": "x"}],
        chat_template="T",
        chat_template_kwargs={"a": 1},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
    )
    assert site.last.prompts[0] == ChatPrompt(
        messages=({"role": "user", "content": "hello"},),
        tools=(tool,),
        documents=({"title": "t", "text": "x"},),
        chat_template="T",
        chat_template_kwargs={"a": 1},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
    )
    assert (site.last.tools, site.last.tool_choice) == ((tool,), "none")


async def test_chat_echo_and_roles() -> None:
    site = Site(response_role="bot")
    last = [{"role": "bot", "content": "so"}]
    answer = (await site.chat(messages=last, echo=True, max_tokens=1)).json()
    assert answer["choices"][0]["message"] == {"role": "bot", "content": "sos"}
    parts = chunks(await site.chat(messages=last, echo=True, max_tokens=1, stream=True))
    assert parts[0]["choices"][0]["delta"] == {"role": "bot", "content": "so"}
    other = (await site.chat(echo=True, max_tokens=1, add_generation_prompt=False)).json()
    assert other["choices"][0]["message"] == {"role": "user", "content": "helloh"}


def tool_script(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    return [
        Output(index=index, events=(Reasoning("think"),), token_ids=(1,)),
        Output(index=index, events=(CallStart(0, "call-1", "f"), CallArguments(0, '{"a"')), token_ids=(2,)),
        Output(
            index=index,
            events=(CallArguments(0, ":1}"), CallEnd(0), CallStart(1, "call-2", "g"), CallArguments(1, "{}")),
            token_ids=(3,),
            finish=FinishReason.STOP,
            usage=usage,
        ),
    ]


async def test_tool_calls_and_reasoning() -> None:
    site = Site()
    site.service.script = tool_script
    answer = (await site.chat()).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "think",
        "reasoning": "think",
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "call-2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    deltas = [part["choices"][0]["delta"] for part in chunks(await site.chat(stream=True))]
    assert deltas[1] == {"reasoning_content": "think", "reasoning": "think"}
    start = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas[2]["tool_calls"] == [start, {"index": 0, "function": {"arguments": '{"a"'}}]
    single = (await site.chat(parallel_tool_calls=False, include_reasoning=False)).json()["choices"][0]["message"]
    assert [call["id"] for call in single["tool_calls"]] == ["call-1"]
    assert "reasoning" not in single


async def test_chat_returns_token_ids() -> None:
    answer = (await Site().chat(return_token_ids=True, max_tokens=2)).json()
    assert answer["prompt_token_ids"] == [ord(char) for char in "hello"]
    assert answer["choices"][0]["token_ids"] == [ord("h"), ord("e")]
    parts = chunks(await Site().chat(return_token_ids=True, max_tokens=2, stream=True))
    assert parts[0]["prompt_token_ids"] == [ord(char) for char in "hello"]
    assert all("prompt_token_ids" not in part for part in parts[1:])


# ------------------------------------------------------------------------------------- models and tokens


async def test_models() -> None:
    site = Site()
    cards = (await site.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["fake", "alias"]
    assert cards[0]["max_model_len"] == 256
    assert (await site.http.get("/v1/models/alias")).json()["object"] == "model"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_a_constraint_that_the_engine_refuses_is_named_as_the_client_does(
    given: dict[str, Any], param: str
) -> None:
    site = Site()
    refused = Output(index=0, finish=FinishReason.ERROR, error="no", invalid=True, param="structured_outputs")
    site.service.script = lambda request, index, ids: [refused]
    for call in (site.complete, site.chat):
        assert error_of(await call(**given))["param"] == param
        assert f'"param":"{param}"' in (await call(**given, stream=True)).text


async def test_tokenize_and_back() -> None:
    site = Site()
    answer = (await site.http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert answer == {"count": 2, "max_model_len": 256, "tokens": [97, 98], "token_strs": ["a", "b"]}
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert (await site.http.post("/tokenize", json=chat)).json()["count"] == 2
    assert (await site.http.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **chat}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ]:
        assert error_of(await site.http.post(path, json=body))["param"] == param
    unknown = {"prompt": "a", "model": "other"}
    assert error_of(await site.http.post("/tokenize", json=unknown), 404)["param"] == "model"
