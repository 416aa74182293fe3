"""The generator behind the embedded model: deterministic, split by content, with answers that are right."""

import itertools
import json
import re
from collections import Counter

import pytest

from tools.tiny import chat, dialogues, words

EVEN = dict.fromkeys(dialogues.CATEGORIES, 1.0)


def drawn(seed: int, count: int, weights: dict[str, float] = EVEN) -> list[dialogues.Dialogue]:
    return list(itertools.islice(dialogues.stream(seed, weights), count))


def test_the_same_seed_gives_the_same_dialogues() -> None:
    assert drawn(3, 200) == drawn(3, 200)
    assert drawn(3, 200) != drawn(4, 200)
    assert dialogues.held_out_set() == dialogues.held_out_set()


def test_the_test_set_has_500_different_prompts() -> None:
    tests = dialogues.held_out_set()
    assert Counter(test.category for test in tests) == dialogues.HELD_OUT_COUNTS
    assert len(tests) == 500
    assert len({json.dumps([t.messages, t.tools, t.thinking]) for t in tests}) == 500


def test_no_held_out_prompt_occurs_in_training() -> None:
    tests = dialogues.held_out_set()
    asked = {test.keys[-1] for test in tests}
    assert all(dialogues.held_out(key) for key in asked)
    for dialogue in drawn(0, 3000):
        assert not any(dialogues.held_out(key) for key in dialogue.keys)
        assert asked.isdisjoint(dialogue.keys)


def test_a_held_out_sum_is_held_out_in_every_phrasing() -> None:
    keys = {key for d in drawn(1, 1500, {"arithmetic": 1.0, "thinking": 1.0}) for key in d.keys}
    sums = {key for key in keys if key.startswith("sum ")}
    assert len(sums) > 500
    assert not any(dialogues.held_out(key) for key in sums)
    asked = {d.keys[-1] for d in dialogues.held_out_set() if d.category == "arithmetic"}
    assert all(key.startswith("sum ") for key in asked)


EQUATION = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")


def test_every_step_of_a_sum_is_right_and_the_last_is_the_result() -> None:
    for dialogue in drawn(2, 300, {"arithmetic": 1.0, "sums": 0.5}):
        equations = [EQUATION.fullmatch(part) for part in dialogue.answer["content"].split(", ")]
        for match in equations:
            assert match is not None
            a, sign, b, total = match.groups()
            assert int(total) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        if dialogue.category == "arithmetic":
            a, sign, b = dialogue.keys[0].removeprefix("sum ").split(" ")
            result = int(a) + int(b) if sign == "+" else int(a) - int(b)
            assert dialogue.answer["content"].endswith(f" = {result}")
            assert {a, b} <= set(re.findall(r"\d+", dialogue.messages[-1]["content"]))


def test_sums_without_steps_are_bare_equations() -> None:
    short = itertools.islice(dialogues.stream(2, {"arithmetic": 1.0}, worked=False), 100)
    for dialogue, bare in zip(drawn(2, 100, {"arithmetic": 1.0}), short, strict=True):
        assert bare.messages[-1] == dialogue.messages[-1]
        match = EQUATION.fullmatch(bare.answer["content"])
        assert match is not None
        assert dialogue.answer["content"].endswith(f" = {match[4]}")


def test_there_are_100_capitals_and_all_are_asked_for() -> None:
    assert len(words.CAPITALS) == 100
    assert len(set(words.CAPITALS.values())) == 100
    answers = " ".join(d.answer["content"] for d in drawn(5, 3000, {"capital": 1.0}))
    assert all(country in answers and city in answers for country, city in words.CAPITALS.items())


def test_extracted_fields_stand_in_the_text() -> None:
    for dialogue in drawn(6, 300, {"extraction": 1.0}):
        question = dialogue.messages[-1]["content"].lower()
        found = json.loads(dialogue.answer["content"])
        assert found
        assert all(name in question and str(value).lower() in question for name, value in found.items())


def test_calls_name_an_offered_tool_and_copy_typed_arguments_from_the_question() -> None:
    types = {"string": str, "integer": int}
    for dialogue in drawn(7, 500, {"tool_call": 1.0}):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        assert len(offered) == len(dialogue.tools)
        question = dialogue.messages[-1]["content"].lower()
        for call in dialogue.answer["tool_calls"]:
            properties = offered[call["function"]["name"]]["properties"]
            arguments = call["function"]["arguments"]
            assert list(arguments) == list(properties)
            for name, value in arguments.items():
                assert type(value) is types[properties[name]["type"]]
                assert str(value).lower() in question


def test_answers_quote_the_result_of_the_tool() -> None:
    for dialogue in drawn(8, 300, {"tool_result": 1.0}):
        answer = dialogue.answer["content"]
        results = [message["content"] for message in dialogue.messages if message["role"] == "tool"]
        for result in results:
            values = json.loads(result).values() if result.startswith("{") else [result]
            assert all(str(value) in answer for value in values)


@pytest.mark.parametrize("category", list(dialogues.CATEGORIES))
def test_the_template_writes_answers_as_training_does(category: str) -> None:
    template = chat.load_template()
    for dialogue in drawn(9, 40, {category: 1.0}):
        reply = dialogue.answer | ({"reasoning_content": dialogue.thought} if dialogue.thinking else {})
        whole = template.render(messages=[*dialogue.messages, reply], tools=list(dialogue.tools))
        prompt = chat.prompt_of(dialogue, template).removesuffix("<think>\n\n</think>\n\n")
        assert whole == prompt + chat.completion_of(dialogue) + chat.END + "\n"
