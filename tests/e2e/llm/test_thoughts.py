"""Offline: a format behind the thoughts, and a budget for them, on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ferrule import LLM, SamplingParams
from ferrule.structured_outputs import StructuredOutputsParams
from ferrule_contrib import tiny

SCHEMA = {"type": "object", "properties": {"sum": {"enum": [68, 69]}}, "required": ["sum"]}
ASK = [{"role": "user", "content": "What is 23 + 45?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny.path()), reasoning_parser="qwen3", max_model_len=512, num_gpu_blocks_override=64) as opened:
        yield opened


@pytest.mark.parametrize("thinks", [True, False])
def test_a_format_and_a_budget(llm: LLM, thinks: bool) -> None:
    form = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=120, thinking_token_budget=6, structured_outputs=form)
    kwargs = {"enable_thinking": thinks}
    (output,) = llm.chat(ASK, params, use_tqdm=False, chat_template_kwargs=kwargs)
    thoughts, closed, answer = output.outputs[0].text.rpartition("</think>")
    assert bool(closed) == thinks
    assert json.loads(answer)["sum"] in {68, 69}
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert len(tokenizer.encode(thoughts.partition("<think>")[2], add_special_tokens=False)) <= 6
