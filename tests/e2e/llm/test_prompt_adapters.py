"""Prompt adapters, offline: the tokens of `peft`, several adapters in one batch, and what counts and shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM

from ferrule import LLM, BeamSearchParams, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams
from ferrule.errors import ConfigError, RequestError
from tests.fakes.lora_files import merged, write_adapter

NUM_VIRTUAL = 5
COUNTS = {"first": NUM_VIRTUAL, "second": 3}
PROMPTS = [[11, 12, 13], list(range(20, 60)), [7] * 17, list(range(100, 125)), [11, 12, 13], list(range(20, 60))]
ADAPTERS = ["first", "second", None, "first", None, "first"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two adapters: one of prompt tuning, and one of p-tuning with a pickle."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(5)
    one = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNTS["first"])
    other = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNTS["second"], encoder_hidden_size=32)
    for name, config in (("first", one), ("second", other)):
        model = get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), config)
        for parameter in model.prompt_encoder.parameters():
            torch.nn.init.normal_(parameter.data, std=0.5)  # strong enough to change the tokens
        model.save_pretrained(str(folder / name), safe_serialization=name == "first")
    return folder


def request(folder: Path, name: str | None) -> PromptAdapterRequest | None:
    return None if name is None else PromptAdapterRequest(name, 1, str(folder / name), COUNTS[name])


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path, folder: Path) -> list[list[int]]:
    """Generate with `peft`, one prompt at a time."""
    found = []
    for ids, name in zip(PROMPTS, ADAPTERS, strict=True):
        model: Any = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        model = model if name is None else PeftModel.from_pretrained(model, str(folder / name))
        asked = torch.tensor([ids])
        made = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(made[0, len(ids) :].tolist())
    return found


def opened(tiny_llama: Path, **options: Any) -> LLM:
    options = {"num_gpu_blocks_override": 128, "max_num_seqs": 8, **options}
    return LLM(str(tiny_llama), dtype="float32", enable_prompt_adapter=True, max_prompt_adapter_token=8, **options)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with opened(tiny_llama) as llm:
        yield llm


def generate(llm: LLM, folder: Path, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    adapters = [request(folder, name) for name in ADAPTERS]
    return llm.generate(PROMPTS, params, use_tqdm=False, prompt_adapter_request=adapters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_prompt_adapters": 2},  # in pieces, both kept
        {"num_gpu_blocks_override": 13, "block_size": 8, "max_model_len": 90},  # preempted
        {"enable_prefix_caching": False, "pipeline_depth": 2},
    ],
)
def test_tokens_are_those_of_peft(
    tiny_llama: Path, folder: Path, wanted: list[list[int]], options: dict[str, Any]
) -> None:
    with opened(tiny_llama, **options) as llm:
        outputs = generate(llm, folder)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        assert wanted[0] != wanted[4]  # the adapters matter
        assert wanted[1] != wanted[5]
        assert llm._call("check") is True
        assert ("preemptions" in llm._call("stats")) == ("max_model_len" in options)


def test_virtual_tokens_are_not_the_callers(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    outputs = generate(llm, folder, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output, ids in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert all(token in (at or {}) for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True))
    assert outputs[0].prompt_logprobs != outputs[4].prompt_logprobs  # of the same ids


def test_logprobs_of_a_prompt_are_those_after_the_virtual_tokens(llm: LLM, tiny_llama: Path, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False, prompt_adapter_request=request(folder, "first"))
    model: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_llama), str(folder / "first"))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, NUM_VIRTUAL:]
    theirs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(PROMPTS[1])[1:, None])[:, 0]
    ours = [
        at[token].logprob for token, at in zip(PROMPTS[1][1:], (output.prompt_logprobs or [])[1:], strict=True) if at
    ]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)


def test_prefixes_are_shared_per_adapter(llm: LLM, folder: Path) -> None:
    def cached(name: str | None) -> int | None:
        given = request(folder, name)
        (output,) = llm.generate([list(range(60, 110))], GREEDY, use_tqdm=False, prompt_adapter_request=given)
        return output.num_cached_tokens

    llm.reset_prefix_cache()
    assert [cached("first"), cached("second"), cached(None)] == [0, 0, 0]
    # Whole blocks of 16 are cached, of the virtual tokens and the prompt; those of the prompt are told.
    assert [cached("first"), cached("second"), cached(None)] == [48 - COUNTS["first"], 48 - COUNTS["second"], 48]


def test_virtual_tokens_take_part_of_the_context(llm: LLM, folder: Path) -> None:
    length, adapter = llm.model.max_model_len, request(folder, "first")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    fits = [3] * (length - NUM_VIRTUAL - 4)
    (output,) = llm.generate([fits], params, use_tqdm=False, prompt_adapter_request=adapter)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(
        RequestError, match=f"{len(fits) + 1} tokens and its adapter {NUM_VIRTUAL}, and max_tokens is 4"
    ):
        llm.generate([[*fits, 3]], params, use_tqdm=False, prompt_adapter_request=adapter)
    cut = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, truncate_prompt_tokens=-1)
    (output,) = llm.generate([[*fits, 4, 5]], cut, use_tqdm=False, prompt_adapter_request=adapter)
    assert output.prompt_token_ids == [*fits[2:], 4, 5]


def test_penalties_see_the_prompt_alone(tiny_llama: Path, folder: Path) -> None:
    """The id 0, which stands for virtual tokens, was not said; 11 was."""

    def margins(llm: LLM, penalty: float) -> list[float]:
        params = SamplingParams(temperature=1, max_tokens=1, repetition_penalty=penalty, logprobs=-1, seed=1)
        given = request(folder, "first")
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False, prompt_adapter_request=given)
        (at,) = output.outputs[0].logprobs or []
        return [at[token].logprob - at[200].logprob for token in (0, 11)]

    with opened(tiny_llama, logprobs_mode="processed_logprobs", max_logprobs=-1) as other:
        plain, penalised = margins(other, 1.0), margins(other, 1.5)
    assert penalised[0] == pytest.approx(plain[0], abs=1e-5)
    assert abs(penalised[1] - plain[1]) > 1e-3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_adapter_num_virtual_tokens": 4}, "has 5 virtual tokens, not 4"),
        ({"prompt_adapter_local_path": "/nowhere"}, "/nowhere is not a folder"),
        ({"prompt_adapter_num_virtual_tokens": 0}, "a positive number"),
        ({"prompt_adapter_local_path": 7}, "needs a name and a path"),
    ],
)
def test_requests_that_cannot_be_served(llm: LLM, folder: Path, change: dict[str, Any], told: str) -> None:
    values = {
        "prompt_adapter_name": "first",
        "prompt_adapter_id": 1,
        "prompt_adapter_local_path": str(folder / "first"),
        "prompt_adapter_num_virtual_tokens": NUM_VIRTUAL,
        **change,
    }
    with pytest.raises(RequestError, match=told):
        llm.generate([[1, 2]], GREEDY, use_tqdm=False, prompt_adapter_request=PromptAdapterRequest(**values))
    one = request(folder, "first")
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=False, prompt_adapter_request=[one, one])
    assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids  # the engine goes on


def test_prompt_adapters_are_off_by_default(tiny_llama: Path, folder: Path) -> None:
    given = request(folder, "first")
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=32) as llm:
        assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="enable-prompt-adapter"):
            llm.generate([[1, 2]], GREEDY, use_tqdm=False, prompt_adapter_request=given)
    with pytest.raises(ConfigError, match="--max-prompt-adapter-token"):
        LLM(str(tiny_llama), enable_prompt_adapter=True)


def test_weights_and_virtual_tokens_go_together(tiny_llama: Path, folder: Path, tmp_path: Path) -> None:
    """A request may have an adapter of both kinds: as on the merged model with the virtual tokens."""
    lora = LoRARequest("weights", 1, str(write_adapter(tiny_llama, tmp_path / "weights", 1)))
    given: dict[str, Any] = {
        "use_tqdm": False,
        "prompt_adapter_request": [request(folder, "first"), None, request(folder, "second")],
    }
    prompts = [PROMPTS[0]] * 3
    with opened(merged(tiny_llama, tmp_path / "weights", tmp_path / "merged")) as llm:
        wanted = llm.generate(prompts, GREEDY, **given)
    with opened(tiny_llama, enable_lora=True) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=lora, **given)
        plain = llm.generate(prompts, GREEDY, **given)
    texts, theirs, without = ([one.outputs[0].token_ids for one in each] for each in (outputs, wanted, plain))
    assert texts == theirs
    assert all(a != b for a, b in zip(texts, without, strict=True))


def test_steps_and_chats_take_adapters(llm: LLM, folder: Path, wanted: list[list[int]]) -> None:
    engine, adapter = llm.llm_engine, request(folder, "first")
    engine.add_request("a", PROMPTS[0], GREEDY, prompt_adapter_request=adapter)
    engine.add_request("b", PROMPTS[4], GREEDY)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert found == {"a": wanted[0], "b": wanted[4]}
    messages = [{"role": "user", "content": "hello"}]
    plain, with_adapter = (
        llm.chat(messages, GREEDY, use_tqdm=False, prompt_adapter_request=given)[0].outputs[0].token_ids
        for given in (None, adapter)
    )
    assert plain != with_adapter


def test_beams_take_adapters(llm: LLM, folder: Path) -> None:
    params, prompts = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), [[9, 8, 7], [5, 6]]
    adapters = [request(folder, "first"), None]
    wanted = llm.generate(prompts, params, use_tqdm=False, prompt_adapter_request=adapters)
    beams = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    found = llm.beam_search(prompts, beams, prompt_adapter_request=adapters)
    assert [one.sequences[0].tokens for one in found] == [
        [*prompt, *one.outputs[0].token_ids] for prompt, one in zip(prompts, wanted, strict=True)
    ]
    plain = llm.beam_search(prompts, beams)
    assert plain[0].sequences[0].tokens != found[0].sequences[0].tokens
    assert plain[1] == found[1]
