"""The two functions of each OpenAI route: what the chunks of a stream say adds up to the whole answer, in every cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ferrule.interfaces.service import Answer, Output, ReadPrompt, Usage, add_up
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai.chat import ChatForm
from ferrule_plugins.router.openai.completions import CompletionForm
from ferrule_plugins.router.openai.form import Asked, Form
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody
from ferrule_protocol import Notes
from ferrule_testkit.service import ScriptedService

PROMPT = ReadPrompt((97, 98), "ab")
THOUGHT = (Reasoning("Well, "), Reasoning("two."))
CALLS: tuple[Event, ...] = (
    *(CallStart(0, "c0", "add"), CallArguments(0, '{"a": '), CallArguments(0, "1}"), CallEnd(0)),
    *(CallStart(1, "c1", "sub"), CallArguments(1, "{}"), CallEnd(1)),
)
EVENTS: dict[str, tuple[Event, ...]] = {
    "text": (Content("one "), Content("two")),
    "thoughts": (*THOUGHT, Content("one "), Content("two")),
    "calls": CALLS,
    "all": (*THOUGHT, Content("I look."), *CALLS),
    "nothing": (),
}


def asked(**changed: Any) -> Asked:
    given: dict[str, Any] = {
        "id": "chatcmpl-1",
        "created": 7,
        "model": "m",
        "fingerprint": "f",
        "tokens": ScriptedService(),
        "token_names": False,
        "token_ids": True,
        "cached_details": True,
        "reasons": True,
        "num_per_prompt": 2,
        "include_usage": False,
        "each_usage": False,
        "notes": Notes(),
    }
    return Asked(**given | changed)


def outputs(index: int, events: Sequence[Event], finish: FinishReason = FinishReason.STOP) -> list[Output]:
    """Return one output for each event, with one token each, and an end without a token."""
    found, called = [], False
    for place, event in enumerate(events):
        called = called or isinstance(event, CallStart)
        entry = TokenLogprobs(97 + place, -0.5 * place, 1, ((65, -1.0),))
        usage = Usage(prompt_tokens=2, completion_tokens=place + 1)
        found.append(
            Output(
                index=index,
                first=place == 0,
                events=(event,),
                token_ids=(97 + place,),
                logprobs=(entry,),
                token_offsets=(place,),
                called_tools=called,
                usage=usage,
            )
        )
    usage = Usage(prompt_tokens=2, completion_tokens=len(events))
    end = Output(index=index, first=not events, finish=finish, stop_reason="x", called_tools=called, usage=usage)
    return [*found, end]


def cut(parts: Sequence[Output], rng: random.Random) -> list[Output]:
    """Return the same news in other outputs."""
    marks = sorted(rng.sample(range(1, len(parts)), rng.randint(0, len(parts) - 1)))
    return [add_up(parts[begin:end]) for begin, end in zip([0, *marks], [*marks, len(parts)], strict=True)]


def whole_of(form: Form, choices: Iterable[Sequence[Output]]) -> dict[str, Any]:
    added = tuple(add_up(choice) for choice in choices)
    return form.whole(Answer(choices=added, usage=Usage.total([one.usage for one in added], 1)))


def read_chat(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join choices as a client does."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        new = {"index": piece["index"], "message": {"content": ""}, "token_ids": [], "logprobs": None}
        choice = found.setdefault(piece["index"], new)
        message, delta = choice["message"], piece["delta"]
        message["content"] += delta.get("content", "")
        message |= {name: delta[name] for name in ("role",) if name in delta}
        for name in {"reasoning", "reasoning_content"} & delta.keys():
            message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        choice["token_ids"] += piece.get("token_ids", [])
        if piece["logprobs"]:
            choice["logprobs"] = {"content": (choice["logprobs"] or {"content": []})["content"]}
            choice["logprobs"]["content"] += piece["logprobs"]["content"]
        choice |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
    for choice in found.values():
        if choice["message"].get("tool_calls"):
            choice["message"]["content"] = choice["message"]["content"] or None
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"parallel_tool_calls": False}])
def test_chunks_of_a_chat_add_up_to_the_whole(name: str, fields: dict[str, Any]) -> None:
    body = ChatBody(messages=[{"role": "user", "content": "Hi"}], n=2, logprobs=True, **fields)
    form = ChatForm(body, asked(), PROMPT, "assistant")
    choices = [outputs(0, EVENTS[name]), outputs(1, EVENTS["text"], FinishReason.LENGTH)]
    whole = whole_of(form, choices)
    for seed in range(20):
        rng = random.Random(seed)
        parts = [part for choice in choices for part in cut(choice, rng)]
        assert read_chat(chunk for part in parts for chunk in form.chunk(part)) == whole["choices"]
    assert whole["usage"]["completion_tokens"] == len(EVENTS[name]) + 2
    assert whole["prompt_token_ids"] == [97, 98]


def test_what_a_whole_chat_says() -> None:
    body = ChatBody(messages=[{"role": "user", "content": "Hi"}], parallel_tool_calls=False)
    form = ChatForm(body, asked(num_per_prompt=1, token_ids=False), PROMPT, "assistant")
    (choice,) = whole_of(form, [outputs(0, EVENTS["all"])])["choices"]
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    thoughts = {"reasoning": "Well, two.", "reasoning_content": "Well, two."}
    assert choice["message"] == message | thoughts
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "x")


def read_completion(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join choices as a client does."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        choice = found.setdefault(piece["index"], {})
        for name, value in piece.items():
            if name == "logprobs":
                lists = choice.setdefault("logprobs", {"text_offset": [], "token_logprobs": [], "tokens": []})
                for kind, entries in (value or {}).items():
                    lists[kind] = lists.get(kind, []) + entries
            elif name in {"text", "token_ids"}:
                choice[name] = choice.get(name, type(value)()) + value
            else:
                choice[name] = value
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("echo", [False, True])
def test_chunks_of_a_completion_add_up_to_the_whole(echo: bool) -> None:
    body = CompletionBody(prompt="ab", n=2, logprobs=1, echo=echo, return_prompt_text=True)
    form = CompletionForm(body, asked(), [PROMPT], ["ab" if echo else ""])
    choices = [outputs(0, EVENTS["text"]), outputs(1, [Content("x")] * 9, FinishReason.LENGTH)]
    prompt_logprobs = (None, TokenLogprobs(98, -2.0, 1, ()))
    choices = [
        [add_up([one[0], Output(index=one[0].index, prompt_logprobs=prompt_logprobs)]), *one[1:]] for one in choices
    ]
    whole = whole_of(form, choices)
    for seed in range(20):
        rng = random.Random(seed)
        parts = [part for choice in choices for part in cut(choice, rng)]
        assert read_completion(chunk for part in parts for chunk in form.chunk(part)) == whole["choices"]
    assert [choice["text"] for choice in whole["choices"]] == ["ab" * echo + "one two", "ab" * echo + "x" * 9]
    assert whole["choices"][0]["logprobs"]["text_offset"] == ([0, 1, 2, 3] if echo else [0, 1])
