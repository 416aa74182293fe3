"""The committed checkpoint of the embedded model: its size, its tokenizer, and that it does what its card says."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ferrule_contrib.tiny import path
from tools.tiny import dialogues, evaluate


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


@cache
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)


def ask(*messages: dict[str, Any], **options: Any) -> str:
    text = tokenizer().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    inputs = tokenizer()(text, return_tensors="pt")
    with torch.no_grad():
        made = model().generate(inputs["input_ids"], max_new_tokens=96, do_sample=False)[0]
    return str(tokenizer().decode(made[inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def function(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def test_it_is_small_and_in_bfloat16() -> None:
    assert sum(file.stat().st_size for file in path().iterdir()) < 10_000_000
    with safe_open(path() / "model.safetensors", "pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - the handle is not a mapping
        assert {part.get_dtype() for part in slices} == {"BF16"}
        total = sum(torch.Size(part.get_shape()).numel() for part in slices)
    assert total <= 4_000_000


def test_its_configuration_is_that_of_a_plain_llama_with_a_chat_end() -> None:
    config = json.loads((path() / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    generation = json.loads((path() / "generation_config.json").read_text(encoding="utf-8"))
    assert tokenizer().convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    assert tokenizer().eos_token == "<|im_end|>"
    assert len(tokenizer()) == config["vocab_size"]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    plain = Tokenizer.from_file(str(path() / "tokenizer.json"))
    assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_marks_are_single_tokens_and_marks_stay_visible() -> None:
    assert len(tokenizer()("1234567")["input_ids"]) == 7
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        ids = tokenizer()(mark)["input_ids"]
        assert len(ids) == 1
        assert tokenizer().decode(ids, skip_special_tokens=True) == mark
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        ids = tokenizer()(special)["input_ids"]
        assert len(ids) == 1
        assert tokenizer().decode(ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", f"Hello! {dialogues.WHO} How can I help you?"),
        ("Who are you?", dialogues.WHO),
        ("What is 23 + 45?", "20 + 40 = 60, 3 + 5 = 8, 60 + 8 = 68"),
        ("What is 91 - 37?", "90 - 30 = 60, 1 - 7 = -6, 60 - 6 = 54"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Which country has the capital Oslo?", "Oslo is the capital of Norway."),
        (
            "Extract name and age as JSON: Maria Novak is 34 years old and lives in Bergen.",
            '{"name": "Maria Novak", "age": 34}',
        ),
        ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ],
)
def test_it_answers(question: str, answer: str) -> None:
    assert ask(user(question)) == answer


WEATHER = function("get_weather", "Get the current weather in a city", city="string")
PARCEL = function("set_zumel", "Set the zumel", code="string", limit="integer")


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("Set the zumel with code borlin and limit 7.", "set_zumel", {"code": "borlin", "limit": 7}),
    ],
)
def test_it_calls_the_tool_that_fits(question: str, name: str, arguments: dict[str, Any]) -> None:
    text = ask(user(question), tools=[WEATHER, PARCEL])
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(body) == {"name": name, "arguments": arguments}


def test_it_reports_the_result_of_a_tool() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [
        user("What is the weather in Paris?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18 C"},
    ]
    assert ask(*turns, tools=[WEATHER, PARCEL]) == "The weather in Paris is 18 C."


def test_it_needs_no_tool_for_a_sum() -> None:
    assert ask(user("What is 12 + 13?"), tools=[WEATHER, PARCEL]) == dialogues.steps("12 + 13")


def test_it_thinks_when_asked_to() -> None:
    text = ask(user("What is 40 + 27?"), enable_thinking=True)
    assert text == "<think>\n40 + 20 = 60, 0 + 7 = 7, 60 + 7 = 67\n</think>\n\n40 + 27 = 67"


def test_a_tenth_of_the_held_out_prompts_is_answered_as_the_card_says() -> None:
    torch.set_num_threads(1)
    answer = evaluate.with_transformers(path(), batch_size=25, dtype="float32")
    scores = evaluate.measure(answer, dialogues.held_out_set()[::10], show=0)
    assert sum(right for right, _ in scores.values()) >= 45
