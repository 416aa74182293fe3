"""What protocols share: streams that let go of their source, usage, notes, and how the model is named."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from ferrule.errors import RequestError
from ferrule.interfaces.service import Generate, Output, Usage
from ferrule.sampling_params import SamplingFields, SamplingParams
from ferrule.schema import Body
from ferrule.structured_outputs import ConstraintFields
from ferrule_protocol import (
    MAX_NOTES,
    Closing,
    Meter,
    Notes,
    TemplateFields,
    extended,
    fingerprint,
    finite,
    sampling,
    spelling,
    unread_by_template,
)
from ferrule_testkit.service import ScriptedService


class Source(AsyncIterator[int]):
    """Two numbers, or a failure. `closed` counts."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.left, self.closed, self.failure = [1, 2], 0, failure

    async def __anext__(self) -> int:
        if self.failure is not None:
            raise self.failure
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

    async def aclose(self) -> None:
        self.closed += 1


async def doubled(source: Source) -> AsyncIterator[int]:
    async for number in source:
        yield 2 * number


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_a_stream_lets_go_of_its_source_however_far_it_was_read(taken: int) -> None:
    source = Source()
    events = Closing(doubled(source), source)
    assert [await anext(events) for _ in range(taken)] == [2, 4][:taken]
    await events.aclose()
    assert source.closed == 1


async def test_a_stream_passes_failures_on() -> None:
    source = Source(RequestError("Wrong."))
    with pytest.raises(RequestError, match="Wrong"):
        await anext(Closing(doubled(source), source))


def test_usage_counts_a_prompt_once_for_all_of_its_choices() -> None:
    meter = Meter(count=4, per_prompt=2)
    assert meter.total() == Usage()
    for index, prompt in enumerate((5, 5, 7, 7)):
        usage = Usage(prompt_tokens=prompt, completion_tokens=1, cached_tokens=2, reasoning_tokens=index)
        meter.see(Output(index=index, usage=usage))
    meter.see(Output(index=3, usage=Usage(prompt_tokens=7, completion_tokens=9, cached_tokens=2, reasoning_tokens=3)))
    assert meter.of(3).completion_tokens == 9
    assert meter.total() == Usage(prompt_tokens=12, completion_tokens=12, cached_tokens=4, reasoning_tokens=6)


class Ask(TemplateFields, SamplingFields, Body):
    """A body of some protocol."""

    question: str = ""


def test_sampling_takes_the_request_then_the_model_then_what_is_documented() -> None:
    service = ScriptedService()
    service.sampling_defaults = lambda: {"temperature": 0.25, "top_k": 9}  # type: ignore[method-assign]
    found = sampling(Ask(temperature=0.5, max_tokens=3), service, {"max_tokens": 4})
    assert (found.temperature, found.top_k, found.max_tokens, found.top_p) == (0.5, 9, 4, 1.0)


def test_unknown_fields_are_noted_with_what_may_be_meant() -> None:
    notes = Notes.of(["qestion", *(f"x{number}" for number in range(2 * MAX_NOTES))], Ask)
    assert notes.unknown[0] == ("qestion", "unknown, ignored. Did you mean 'question'?")
    assert len(notes.unknown) == MAX_NOTES
    assert notes.headers == {}  # the frame has these
    notes.settle(strict=True)
    assert extended(notes.extension, ["more"])["warnings"][-1] == "more"  # type: ignore[index]
    assert extended(Notes().extension, []) is None


def test_known_fields_without_effect_are_told_or_refused() -> None:
    notes = Notes(known=[("speed", "nothing reads it.")])
    notes.settle(strict=False)
    assert notes.headers == {"x-ferrule-ignored-fields": "speed"}
    assert notes.extension == {"warnings": ["speed: nothing reads it."]}
    with pytest.raises(RequestError, match="speed: nothing reads it. This server refuses"):
        notes.settle(strict=True)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({}, {}, []),
        ({"tools": [TOOL]}, {}, ["tools"]),
        ({"tools": [TOOL]}, {"shows_tools": False}, []),
        ({"documents": [{}]}, {}, []),
        ({}, {"others": {"mood": ("mood", "tone")}}, ["mood"]),
        ({}, {"others": {"mood": ("mood", "documents")}}, []),
        ({"chat_template_kwargs": {"a": 1, "messages": 2}}, {}, ["chat_template_kwargs"]),
        ({"chat_template_kwargs": {"a": 1}, "chat_template": "x"}, {}, []),
    ],
)
def test_what_the_template_does_not_read_is_named(
    fields: Mapping[str, Any], options: Mapping[str, Any], named: list[str]
) -> None:
    service = ScriptedService()
    service.template_reads = frozenset({"messages", "documents"})
    messages = [{"role": "user", "content": "Hello"}]
    assert [name for name, _ in unread_by_template(messages, TemplateFields(**fields), service, **options)] == named
    service.template_reads = None  # not known
    assert unread_by_template(messages, TemplateFields(**fields), service, **options) == []


def test_keys_of_messages_that_nothing_reads_are_named() -> None:
    service = ScriptedService()
    service.template_keys = frozenset({"mood"})
    messages = [{"role": "user", "content": "Hello", "mood": "glad", "nmae": "Ann"}]
    ((name, why),) = unread_by_template(messages, TemplateFields(), service)
    assert (name, why) == ("messages[0].nmae", "the chat template does not read it. Did you mean 'name'?")


def test_what_answers_say_of_the_model_and_its_tokens() -> None:
    assert fingerprint(ScriptedService()) == fingerprint(ScriptedService())
    assert finite(float("-inf")) < finite(-9000.0) == -9000.0


def test_the_field_that_stated_a_constraint_is_named() -> None:
    class Constrained(ConstraintFields, Body):
        pass

    assert spelling(Constrained(), max_tokens="most") == {"max_tokens": "most"}
    names = spelling(Constrained(guided_regex="a"), max_tokens="most")
    request = Generate(prompts=(), params=SamplingParams(), names=names)
    spelt = {name: request.spelt(name) for name in ("structured_outputs", "max_tokens", "n", None)}
    assert spelt == {"structured_outputs": "guided_regex", "max_tokens": "most", "n": "n", None: None}
