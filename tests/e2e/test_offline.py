"""`LLM`: the documented calls, arguments and outputs, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule import LLM, SamplingParams
from ferrule.errors import CheckpointError, ConfigError, RequestError


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=256, max_num_seqs=8) as opened:
        yield opened


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_prompts_in_every_form_come_back_in_order(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode("hello world")
    outputs = llm.generate(
        ["hello world", {"prompt": "hello world"}, {"prompt_token_ids": ids}, ids], GREEDY, use_tqdm=False
    )
    assert [o.prompt for o in outputs] == ["hello world", "hello world", None, None]
    assert all(o.prompt_token_ids == ids for o in outputs)
    assert len({o.outputs[0].text for o in outputs}) == 1
    first = outputs[0].outputs[0]
    assert (len(first.token_ids), first.finish_reason, first.stop_reason, first.logprobs) == (8, "length", None, None)
    assert llm.generate("hello world", GREEDY, use_tqdm=False)[0].outputs[0].text == first.text
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].text == first.text


def test_more_prompts_than_fit_the_batch(llm: LLM) -> None:
    prompts = [[5 + n % 7, 6, 7] for n in range(60)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    by_prompt = {tuple(o.prompt_token_ids): o.outputs[0].text for o in outputs}
    assert all(by_prompt[tuple(o.prompt_token_ids)] == o.outputs[0].text for o in outputs)


def test_seeded_samples_are_the_same_alone_and_in_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=3)
    alone = llm.generate([[9, 8, 7]], params, use_tqdm=False)[0]
    company = llm.generate([[9, 8, 7], *([4, n, 6] for n in range(10, 30))], params, use_tqdm=False)[0]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in company.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 3


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    one, two = llm.generate(
        ["a", "b"],
        [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)],
        use_tqdm=False,
    )
    assert (len(one.outputs[0].token_ids), len(two.outputs[0].token_ids)) == (2, 5)
    with pytest.raises(RequestError):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position[token].rank == 1
        assert len(position) == 2
    assert choice.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [token in position for token, position in zip([6, 7, 8], output.prompt_logprobs[1:], strict=True)] == [
        True
    ] * 3


def test_chat_of_one_and_of_several_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    two = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    single = llm.chat(one, GREEDY, use_tqdm=False)
    both = llm.chat([one, two], GREEDY, use_tqdm=False)
    assert single[0].prompt == both[0].prompt
    assert "be brief" in (both[1].prompt or "")
    assert single[0].outputs[0].text == both[0].outputs[0].text


def test_prefix_cache_is_reused_and_reset(llm: LLM) -> None:
    prompt = list(range(10, 74))
    assert llm.reset_prefix_cache()
    cold, warm = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_what_is_wrong_is_named(llm: LLM, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["a"], SamplingParams(top_p=0.0), use_tqdm=False)
    assert caught.value.param == "top_p"
    with pytest.raises(RequestError):
        llm.generate([[5] * 300], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError):
        llm.generate([{"text": "a"}], GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(str(tiny_llama), max_num_seq=3)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_context_that_the_cache_cannot_hold(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that nobody asked for is cut to what fits; one that was asked for is an error with the figures."""
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "0.0001")
    with LLM(str(tiny_llama), dtype="float32") as small:
        longest = small.model.max_model_len
        assert 16 < longest < 256
        assert len(small.generate([[5] * (longest - 8)], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
        with pytest.raises(RequestError):
            small.generate([[5] * longest], GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match=f"set --max-model-len to {longest} or less"):
        LLM(str(tiny_llama), dtype="float32", max_model_len=256)


def test_it_survives_a_failed_request(llm: LLM) -> None:
    """One bad request in a batch ends the call with its error, and the next call works."""
    with pytest.raises(RequestError):
        llm.generate(["fine", [100_000]], GREEDY, use_tqdm=False)
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
