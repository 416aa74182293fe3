"""Fields that do nothing are refused or named, never passed over; answers fit the types of the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BaseModel
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ConfigDict, TypeAdapter, with_config

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Reasoning
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, Usage
from ferrule.sampling_params import Beam
from ferrule.schema import known_names, marks_of
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai import answers as openai_answers
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody
from tests.fakes.http import Site, chunks, error_of
from tools import ROOT

IGNORED = "x-ferrule-ignored-fields"
TOOL = {"type": "function", "function": {"name": "f"}}


def warnings_of(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return list(response.json().get("ferrule", {"warnings": []})["warnings"])


# ---------------------------------------------------------------------------------------- nothing is silent


MARKS = {**marks_of(CompletionBody), **marks_of(ChatBody)}


def test_marks_and_schemas_agree() -> None:
    """Leave exactly the marked fields untyped; the schema says which values pass."""
    fields = {**CompletionBody.model_fields, **ChatBody.model_fields}
    assert {name for name, field in fields.items() if field.annotation is Any} == set(MARKS)
    told = {**CompletionBody.model_json_schema()["properties"], **ChatBody.model_json_schema()["properties"]}
    for name, mark in MARKS.items():
        schema = dict(told[name])
        assert mark.reason in schema.pop("description"), name
        if mark.refused and mark.harmless:
            assert schema == {"enum": [None, *mark.harmless]}, name
        else:
            assert schema == ({"type": "null"} if mark.refused else {}), name


def test_the_documentation_names_every_field() -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []


@pytest.mark.advisory("CVE-2026-105758")
@pytest.mark.parametrize("name", sorted(MARKS))
async def test_absent_features_are_refused_or_named(name: str) -> None:
    mark = MARKS[name]
    for call, kind in ((Site().complete, CompletionBody), (Site().chat, ChatBody)):
        if name not in kind.model_fields:
            continue
        response = await call(**{name: "something"})
        if mark.refused:
            assert error_of(response)["param"] == name
        else:
            assert [text for text in warnings_of(response) if text.startswith(f"{name}: ")]
            assert response.headers[IGNORED] == name
        for value in mark.harmless:
            assert warnings_of(await call(**{name: value})) == []


XARGS = {"text": "a", "number": 67, "float": 0.5, "flag": True, "list": ["a", 1, 2.5]}


async def test_arguments_for_plugins_reach_the_engine_and_are_named_where_nothing_reads_them() -> None:
    for site in (Site(), Site(model={"sampler": "theirs"})):  # not built in
        for call in (site.complete, site.chat):
            warnings = warnings_of(await call(vllm_xargs=XARGS))
            assert site.service.requests[-1].params.extra_args == XARGS
            assert len(warnings) == (site.config.model.sampler == "default")
            assert all(text.startswith("vllm_xargs: no sampler") for text in warnings)
            assert warnings_of(await call(vllm_xargs=None)) == warnings_of(await call(vllm_xargs={})) == []


@pytest.mark.parametrize("given", [5, [1], {"a": None}, {"a": {}}, {"a": [[1]]}, {"a": [None]}, {"a": "x" * 17000}])
async def test_arguments_for_plugins_are_plain_and_few(given: Any) -> None:
    error = error_of(await Site().complete(vllm_xargs=given))
    assert error["param"] == "vllm_xargs"


async def test_false_is_not_zero() -> None:
    """Compare a harmless value with its type."""
    assert warnings_of(await Site().complete(store=0)) != []
    assert error_of(await Site().complete(watermarking=0))["param"] == "watermarking"


async def test_names_that_nobody_misspelt_are_not_looked_for() -> None:
    """Avoid listing the names of all fields, which would make the first request some 30 ms slower."""
    known_names.cache_clear()
    assert warnings_of(await Site().chat(temperature=0)) == []
    assert known_names.cache_info().currsize == 0


async def test_unknown_fields_are_named_with_the_nearest() -> None:
    response = await Site().complete(temperatur=0, zzz=1)
    assert warnings_of(response) == [
        "temperatur: unknown, ignored. Did you mean 'temperature'?",
        "zzz: unknown, ignored.",
    ]
    assert response.headers[IGNORED] == "temperatur, zzz"
    assert len(warnings_of(await Site().chat(**{f"zzz{number}": 1 for number in range(100)}))) == 16
    long = warnings_of(await Site().chat(**{"z" * 10_000: 1}))
    assert len(long[0]) < 200
    tokens = await Site().http.post("/tokenize", json={"prompt": "a", "zzz": 1})
    assert warnings_of(tokens) == ["zzz: unknown, ignored."]
    assert "ferrule" not in (await Site().http.post("/detokenize", json={"tokens": [97]})).json()


async def test_nothing_to_say_is_an_absent_field() -> None:
    for call in (Site().complete, Site().chat):
        response = await call(temperature=0)
        assert "ferrule" not in response.json()
        assert IGNORED not in response.headers


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"service_tier": "flex", "store": True}, "service_tier"),
        ({"use_beam_search": True, "seed": 3}, "seed"),
    ],
)
async def test_fields_without_effect_in_this_request(body: dict[str, Any], name: str) -> None:
    for call in (Site().complete, Site().chat):
        response = await call(**body)
        first = chunks(response)[0] if body.get("stream") else response.json()
        assert first["ferrule"]["warnings"][0].startswith(f"{name}: ")
        assert name in response.headers[IGNORED]
    strict = Site(strict_requests=True)
    for call in (strict.complete, strict.chat):
        assert error_of(await call(**body))["param"] == name


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"echo": True}, "echo"),
    ],
)
async def test_fields_without_effect_in_this_chat(body: dict[str, Any], name: str) -> None:
    assert warnings_of(await Site().chat(**body))[0].startswith(f"{name}: ")


async def test_variables_that_the_template_does_not_read() -> None:
    site = Site(enable_auto_tool_choice=True)
    given: dict[str, Any] = {
        "tools": [TOOL],
        "documents": [{"title": "a", "text": "b"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"mark": 1, "other": 2},
    }
    assert warnings_of(await site.chat(**given)) == []  # not known yet
    site.service.template_reads = frozenset({"messages", "mark"})
    assert warnings_of(await site.chat(**given)) == [
        "tools: the chat template does not show them to the model.",
        "documents: the chat template does not show them to the model.",
        "reasoning_effort: the chat template does not read it.",
        "chat_template_kwargs: the chat template does not read 'other'.",
    ]
    assert warnings_of(await site.chat(**given, chat_template="of the request")) == []
    assert warnings_of(await site.chat(tools=[TOOL], tool_choice="none")) == []
    site.service.template_reads = frozenset({"tools", "documents", "enable_thinking", "mark", "other"})
    assert warnings_of(await site.chat(**given)) == []


async def test_tokenize_names_what_a_template_does_not_show() -> None:
    """Name, as chat does, keys and variables that the template does not read, and content that it leaves out."""
    site, strict = Site(), Site(strict_requests=True)
    given: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a", "mood": "gay"}],
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"other": 2},
    }
    told = [
        "messages[0].mood: the chat template does not read it.",
        "documents: the chat template does not show them to the model.",
        "chat_template_kwargs: the chat template does not read 'other'.",
    ]
    lost = "messages[0].content: the chat template does not show it to the model."
    for one in (site, strict):
        one.service.template_reads = frozenset({"messages"})
    response = await site.http.post("/tokenize", json=given)
    assert warnings_of(response) == told == warnings_of(await site.chat(**given))
    assert response.headers[IGNORED] == "messages[0].mood, documents, chat_template_kwargs"
    assert error_of(await strict.http.post("/tokenize", json=given))["param"] == "messages[0].mood"
    site.service.notes = (lost,)
    response = await site.http.post("/tokenize", json=given | {"zzz": 1})
    assert warnings_of(response) == ["zzz: unknown, ignored.", *told, lost]
    assert response.json()["tokens"] == [97]
    response = await site.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
    assert warnings_of(response) == [lost]
    assert warnings_of(await site.http.post("/tokenize", json=given | {"chat_template": "of the request"})) == [lost]


async def test_nothing_is_added_to_ids() -> None:
    assert warnings_of(await Site().complete(prompt=[97], add_special_tokens=True))[0].startswith("add_special_tokens")
    assert warnings_of(await Site().complete(prompt=["a"], add_special_tokens=True)) == []


async def test_a_stream_warns_once() -> None:
    for call in (Site().complete, Site().chat):
        parts = chunks(await call(zzz=1, n=2, stream=True))
        assert parts[0]["ferrule"] == {"warnings": ["zzz: unknown, ignored."]}
        assert all("ferrule" not in part for part in parts[1:])


async def test_what_has_an_effect_is_not_named() -> None:
    site = Site(model={"enable_prompt_embeds": True}, enable_auto_tool_choice=True, reasoning_parser="qwen3")
    busy: dict[str, Any] = {"use_beam_search": True, "n": 2, "length_penalty": 2.0, "early_stopping": True}
    assert warnings_of(await site.complete(**busy, prompt_logprobs=0, return_tokens_as_token_ids=True)) == []
    last = [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    response = await site.chat(
        messages=last, echo=True, tools=[TOOL], parallel_tool_calls=False, include_reasoning=False, top_logprobs=0
    )
    assert warnings_of(response) == []
    assert response.json()["choices"][0]["message"]["content"].startswith("so")


async def test_notes_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notes = {"user": "me\nyou", "metadata": {"a": "b"}, "session_id": "s"}
    with caplog.at_level("INFO", logger="ferrule"):
        assert warnings_of(await Site().chat(**notes, safety_identifier="i")) == []
        assert warnings_of(await Site(disable_log_requests=True).chat(user="hidden")) == []
    lines = [record for record in caplog.records if record.getMessage().startswith("request notes")]
    assert len(lines) == 1
    for name in ("metadata", "session_id"):
        assert error_of(await Site().chat(**{name: {"a": "b" * 20_000} if name == "metadata" else "b" * 20_000}))


# ---------------------------------------------------------------------------------------- fields that do something


async def test_beam_search_is_asked_for() -> None:
    site = Site()
    await site.complete(use_beam_search=True, n=3, length_penalty=0.5, early_stopping=True)
    assert site.last.beam == Beam(width=3, length_penalty=0.5, early_stopping=True)
    await site.chat(use_beam_search=True, best_of=4, n=2)
    assert site.last.beam == Beam(width=4)
    assert site.last.params.n == 2
    await site.chat(use_beam_search=False, n=2)
    assert site.last.beam is None


async def test_prompts_as_embeddings() -> None:
    site = Site(model={"enable_prompt_embeds": True})
    site.service._ids = lambda prompt: (97,)  # type: ignore[method-assign,assignment]
    for prompt in (None, "", []):
        assert (await site.complete(prompt=prompt, prompt_embeds="AAAA")).status_code == 200
        assert site.last.prompts == (Prompt(embeds="AAAA"),)
    await site.complete(prompt=["a", "b"], prompt_embeds=["AA", "BB"])
    assert site.last.prompts == (Prompt(embeds="AA"), Prompt(embeds="BB"), Prompt(text="a"), Prompt(text="b"))
    for field, value in {"echo": True, "suffix": "a"}.items():
        assert error_of(await site.complete(prompt_embeds="AAAA", **{field: value}))["param"] == field
    answer = (await site.complete(prompt="a", prompt_embeds="AAAA", n=2, return_token_ids=True)).json()
    assert ["prompt_token_ids" in choice for choice in answer["choices"]] == [False, False, True, True]
    assert error_of(await site.complete(prompt_embeds=3))["param"] == "prompt_embeds"


async def test_reasoning_effort_is_for_the_template() -> None:
    site = Site()
    await site.chat(reasoning_effort="none")
    assert prompt_of(site).chat_template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    await site.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False, "a": 1})
    expected = {"reasoning_effort": "high", "enable_thinking": False, "a": 1}
    assert prompt_of(site).chat_template_kwargs == expected
    assert error_of(await site.chat(reasoning_effort="much"))["param"] == "reasoning_effort"


def prompt_of(site: Site) -> ChatPrompt:
    prompt = site.last.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def test_a_message_that_is_continued_gets_no_generation_prompt() -> None:
    site = Site()
    await site.chat(continue_final_message=True)
    assert (prompt_of(site).continue_final_message, prompt_of(site).add_generation_prompt) == (True, False)
    await site.chat(continue_final_message=True, add_generation_prompt=True)  # the renderer refuses it
    assert prompt_of(site).add_generation_prompt


async def test_all_logprobs() -> None:
    site = Site(model={"max_logprobs": -1})
    site.service.rules = type(site.service.rules)(
        **{name: getattr(site.service.rules, name) for name in site.service.rules.__struct_fields__}
        | {"max_logprobs": -1}
    )
    site.service.script = three_ranks
    top = (await site.complete(logprobs=-1)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert sorted(top) == ["A", "B", "a"]
    chat = (await site.chat(logprobs=True, top_logprobs=-1)).json()["choices"][0]["logprobs"]["content"][0]
    assert [entry["token"] for entry in chat["top_logprobs"]] == ["A", "B"]
    assert error_of(await Site().chat(logprobs=True, top_logprobs=-1))["param"] == "top_logprobs"
    assert error_of(await site.chat(logprobs=True, top_logprobs=-2))["param"] == "top_logprobs"


def three_ranks(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    entry = TokenLogprobs(97, -3.0, 3, ((65, -1.0), (66, -2.0)))
    event = (Content("a"),)
    end = FinishReason.STOP
    return [Output(index=index, events=event, token_ids=(97,), logprobs=(entry,), token_offsets=(0,), finish=end)]


async def test_the_prompt_can_be_read_back() -> None:
    choice = (await Site().complete(prompt="ab", return_prompt_text=True)).json()["choices"][0]
    assert choice["prompt_text"] == "ab"
    assert (await Site().chat(return_prompt_text=True)).json()["prompt_text"] == "hello"
    parts = chunks(await Site().chat(return_prompt_text=True, stream=True))
    assert [part.get("prompt_text") for part in parts] == ["hello"] + [None] * (len(parts) - 1)


async def test_the_old_permission_object() -> None:
    card = (await Site().http.get("/v1/models")).json()["data"][1]
    assert (card["id"], card["root"], card["parent"]) == ("alias", "fake", None)
    assert card["permission"][0]["object"] == "model_permission"


# ---------------------------------------------------------------------------------------- usage


def thinking(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    """Return a mark, three pieces of reasoning, another mark, and two words; 8 tokens."""
    texts = [(), (Reasoning("a"),), (Reasoning("b"),), (Reasoning("c"),), (), (Content("d"),), (Content("e"),), ()]
    last = len(texts) - 1
    return [
        Output(
            index=index,
            events=events,
            token_ids=(place,),
            usage=Usage(prompt_tokens=5, completion_tokens=place + 1, reasoning_tokens=min(place + 1, 4)),
            finish=FinishReason.STOP if place == last else None,
        )
        for place, events in enumerate(texts)
    ]


def at_once(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    usage = Usage(prompt_tokens=5, completion_tokens=8, reasoning_tokens=6)
    events = (Reasoning("aaa"), Content("b"))
    return [Output(index=index, events=events, token_ids=tuple(range(8)), usage=usage, finish=FinishReason.STOP)]


async def test_reasoning_tokens_are_counted() -> None:
    site = Site(reasoning_parser="qwen3")
    site.service.script = thinking
    assert (await site.chat(n=2)).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    last = chunks(await site.chat(stream=True, stream_options={"include_usage": True}))[-1]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    site.service.script = at_once
    assert (await site.chat()).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert "completion_tokens_details" not in (await site.complete()).json()["usage"]
    assert "completion_tokens_details" not in (await Site().chat()).json()["usage"]


# ---------------------------------------------------------------------------------------- the official client's types


def strict(kind: type[BaseModel], value: dict[str, Any]) -> Any:
    """Validate as pydantic would by itself: the client's own construction checks nothing."""
    return TypeAdapter(kind).validate_python(value, strict=False)


def calling(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    return [
        Output(index=index, events=(Reasoning("think"), Content("x")), token_ids=(1,)),
        Output(index=index, events=(CallStart(0, "call-1", "f"), CallArguments(0, "{}"), CallEnd(0)), token_ids=(2,)),
        Output(index=index, token_ids=(3,), finish=FinishReason.STOP, usage=Usage(prompt_tokens=5)),
    ]


def empty(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    return [Output(index=index, token_ids=(1,), finish=FinishReason.STOP)]


BODIES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"echo": True, "zzz": 1},
    {"return_token_ids": True, "return_prompt_text": True},
    {"use_beam_search": True, "n": 2},
]


@pytest.mark.parametrize("body", [*BODIES, {"logprobs": True, "top_logprobs": 2, "n": 2}])
@pytest.mark.parametrize("script", [None, calling, empty])
async def test_chat_answers_have_the_official_types(body: dict[str, Any], script: Any) -> None:
    site = Site(enable_prompt_tokens_details=True, reasoning_parser="qwen3")
    if script is not None:
        site.service.script = script
    answer = (await site.chat(**body)).json()
    whole = strict(ChatCompletion, answer)
    assert whole.usage is not None
    assert [choice.index for choice in whole.choices] == list(range(body.get("n", 1)))
    assert "content" in answer["choices"][0]["message"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(await site.chat(**body, stream=True, stream_options=options))
    typed = [strict(ChatCompletionChunk, part) for part in parts]
    assert typed[-1].usage == whole.usage
    assert typed[-1].choices == []
    for index in range(body.get("n", 1)):
        mine = [choice for part in typed for choice in part.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert [choice.delta.role for choice in mine[1:]] == [None] * (len(mine) - 1)
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
        content = "".join(choice.delta.content or "" for choice in mine)
        assert content == (whole.choices[index].message.content or "")


@pytest.mark.parametrize("body", [*BODIES, {"logprobs": 2, "n": 2}, {"prompt": ["a", "b"], "logprobs": 0}])
@pytest.mark.parametrize("script", [None, empty])
async def test_completions_have_the_official_types(body: dict[str, Any], script: Any) -> None:
    site = Site(enable_prompt_tokens_details=True)
    if script is not None:
        site.service.script = script
    whole = strict(Completion, (await site.complete(**body)).json())
    parts = chunks(await site.complete(**body, stream=True, stream_options={"include_usage": True}))
    for part in parts:
        for choice in part["choices"]:
            # The type is that of whole answers; OpenAI's own chunks have null here until the last one.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    typed = [strict(Completion, part) for part in parts]
    assert typed[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [one for part in typed for one in part.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text


# ---------------------------------------------------------------------------------------- inside messages and tools

CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "argumnets": "{}"}}]}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user", "content": "a", "nmae": "b"}]}, "messages[0].nmae"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txet": 1}]}]}, "content[0].txet"),
        (
            {"messages": [{"role": "user", "content": "a"}, CALLED]},
            "messages[1].tool_calls[0].function.argumnets",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools[0].function.paramters"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ],
)
async def test_unknown_keys_at_any_depth_are_named(body: dict[str, Any], path: str) -> None:
    body = {"tool_choice": "none"} | body if "tools" in body else body
    response = await Site().chat(**body)
    first = chunks(response)[0] if body.get("stream") else response.json()
    assert any(path in text for text in first["ferrule"]["warnings"]), first
    assert path in response.headers[IGNORED]
    assert path in error_of(await Site(strict_requests=True).chat(**body))["message"]


async def test_keys_of_messages_that_the_template_reads_are_not_named() -> None:
    site = Site()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a", "mood": "gay", "nmae": None}]}
    assert warnings_of(await site.chat(**body)) == ["messages[0].mood: the chat template does not read it."]
    site.service.template_keys = frozenset({"mood", "role"})
    assert warnings_of(await site.chat(**body)) == []
    assert site.last.prompts[0].messages == tuple(body["messages"])  # type: ignore[union-attr]


async def test_enforced_arguments_are_not_promised() -> None:
    """Warn: the service of these tests has no parser that enforces the calls that a model chooses to make."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes")
    warned = warnings_of(await site.chat(tools=[tool]))
    assert [text.partition(":")[0] for text in warned] == ["tools[0].function.strict"]
    assert warnings_of(await site.chat(tools=[tool], tool_choice="none")) == []
    assert warnings_of(await site.chat(tools=[tool], tool_choice="required")) == []


async def test_spaces_between_special_tokens_that_are_not_shown() -> None:
    hidden = {"spaces_between_special_tokens": False}
    assert warnings_of(await Site().complete(**hidden))[0].startswith("spaces_between_special_tokens: ")
    assert warnings_of(await Site().complete(**hidden, skip_special_tokens=False)) == []


async def test_without_a_tokenizer_ids_come_by_default() -> None:
    site = Site(model={"skip_tokenizer_init": True})
    choice = (await site.complete(prompt=[97, 98], max_tokens=2)).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98], [97, 98])
    parts = chunks(await site.complete(prompt=[97, 98], max_tokens=2, stream=True))
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == [97, 98]
    assert "token_ids" not in (await site.complete(prompt=[97], return_token_ids=False)).json()["choices"][0]


@pytest.mark.parametrize("field", ["n", "max_tokens", "seed", "top_k", "priority"])
async def test_whole_numbers_may_come_as_floats(field: str) -> None:
    for call in (Site(policy="priority").complete, Site(policy="priority").chat):
        assert (await call(**{field: 2.0})).status_code == 200
        assert error_of(await call(**{field: 2.5}))["param"] == field


# ---------------------------------------------------------------------------------------- hostile bodies


HOSTILE: list[tuple[dict[str, Any], str | None]] = [
    ({"n": "2024-01-01T00:00:00Z"}, "n"),
    ({"temperature": "0.5"}, "temperature"),
    ({"stream": "true"}, "stream"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": {"0": "a"}}, "stop"),
    ({"logit_bias": {str(token): "x" for token in range(50_000)}}, "logit_bias"),
    ({"logits_processors": [{"qualname": 5}] * 50_000}, "logits_processors[0].qualname"),
    ({"stop": [[]] * 100_000}, "stop[0]"),
    ({f"x{number}": number for number in range(10_000)}, None),
    ({"__class__": 1, "__init__": {}, "model_fields": [], "model_config": {}, "__pydantic_fields_set__": [1]}, None),
]


@pytest.mark.parametrize(("body", "param"), HOSTILE)
async def test_hostile_values_are_one_refusal(body: dict[str, Any], param: str | None) -> None:
    """Refuse once; with None, serve the body and name what it has beyond the fields."""
    for call in (Site().complete, Site().chat):
        response = await call(**body)
        if param is None:
            assert 0 < len(warnings_of(response)) <= 16
        else:
            error = error_of(response)
            assert (error["param"], len(error["message"]) < 300) == (param, True)


# ---------------------------------------------------------------------------------------- what is declared is sent


@pytest.mark.parametrize("script", [None, calling, empty])
@pytest.mark.parametrize("body", [*BODIES, {"prompt_logprobs": 1}])
async def test_answers_have_the_declared_types(body: dict[str, Any], script: Any) -> None:
    """Hold together the dicts that are sent and their types in the OpenAPI document, which are written separately."""
    site = Site(enable_prompt_tokens_details=True, reasoning_parser="qwen3")
    site.service.script = script or site.service.script
    for call, kind, shown in (
        (site.complete, openai_answers.Completion, {"logprobs": 2}),
        (site.chat, openai_answers.ChatCompletion, {"logprobs": True, "top_logprobs": 2}),
    ):
        declared = TypeAdapter(with_config(ConfigDict(extra="forbid", strict=True))(kind))
        for more in ({}, shown):
            if script is not None and more and call == site.complete:
                continue  # the scripts give no logprobs for their tokens
            declared.validate_python((await call(**body, **more)).json())
            if "prompt_logprobs" not in body:
                options = {"include_usage": True, "continuous_usage_stats": True}
                for part in chunks(await call(**body, **more, stream=True, stream_options=options)):
                    declared.validate_python(part)


def same_text(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
    entry = TokenLogprobs(128, -0.5, 1, ((128, -0.5), (129, -1.0), (65, -2.0)))
    return [
        Output(index=index, events=(Content("\ufffd"),), token_ids=(128,), logprobs=(entry,), finish=FinishReason.STOP)
    ]


async def test_tokens_of_the_same_text_are_all_among_the_most_likely() -> None:
    site = Site()
    site.service.script = same_text
    site.service.token_text = lambda token: "\ufffd" if token > 127 else chr(token)  # type: ignore[method-assign]
    (top,) = (await site.complete(logprobs=3)).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"\ufffd": -0.5, "token_id:129": -1.0, "A": -2.0}
