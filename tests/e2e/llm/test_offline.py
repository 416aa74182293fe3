"""`LLM`: the documented calls, arguments and outputs, in this process."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import re
import runpy
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from ferrule import LLM, BeamSearchParams, SamplingParams
from ferrule.client.inline import InlineClient
from ferrule.errors import CheckpointError, ConfigError, EngineDead, RequestError
from ferrule.hooks import HookRunner
from ferrule.interfaces.hooks import Hooks
from ferrule.llm.outputs import RequestOutput
from ferrule.log import flush
from ferrule.wire.messages import Call, ToEngine
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.checkpoints import SIZES, tiny_checkpoint, write_tokenizer
from tools import ROOT


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


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_logprobs_mode(tiny_llama: Path, mode: str) -> None:
    params = SamplingParams(temperature=0.5, top_k=1, max_tokens=2, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=64, logprobs_mode=mode) as opened:
        output = opened.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    choice, model = output.outputs[0], LlamaForCausalLM.from_pretrained(tiny_llama)
    logits = model(torch.tensor([[5, 6, 7, *choice.token_ids]])).logits[0]
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    for place, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), 2):
        wanted = 0.0 if mode == "processed_logprobs" else float(logits[place, token].detach())
        assert found[token].logprob == pytest.approx(wanted, abs=1e-4)
    prompt = logits if mode == "raw_logits" else logits.log_softmax(-1)
    found = output.prompt_logprobs[1]
    assert found is not None
    assert found[6].logprob == pytest.approx(float(prompt[0, 6].detach()), abs=1e-4)


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


def test_keys_of_prompts_are_checked(llm: LLM) -> None:
    for prompt, param, words in (
        ({"prompt": "a", "cache_slat": "x"}, "prompts[0].cache_slat", "Did you mean 'cache_salt'"),
        ({"prompt": "a", "cache_salt": ""}, "prompts[0].cache_salt", "printable ASCII"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data", "not in this build"),
        ({"prompt": 5}, "prompts[0].prompt", "a string"),
        ({"prompt_token_ids": ["a"]}, "prompts[0].prompt_token_ids[0]", "an integer"),
        ({"cache_salt": "a"}, "prompts[0]", "prompt_token_ids"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)) as caught:
            llm.generate([prompt], GREEDY, use_tqdm=False)
        assert caught.value.param == param
    with pytest.raises(RequestError, match=r"prompts\[1\] must be"):
        llm.generate(["a", 5], GREEDY, use_tqdm=False)  # type: ignore[list-item]


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = list(range(10, 74))
    salts = ("one", "two", "one", None)
    cached = [
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, GREEDY, use_tqdm=False)[0].num_cached_tokens
        for salt in salts
    ]
    assert cached == [0, 0, 48, 0]


def test_messages_and_tools_are_checked_as_those_of_bodies(llm: LLM) -> None:
    for messages, param in (
        ([{"role": "user", "contnet": "a"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.chat(messages, GREEDY, use_tqdm=False)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "a"}], GREEDY, False, tools=[{"type": "function"}])
    assert caught.value.param == "tools[0].function"
    with pytest.raises(RequestError, match="Did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2, max_tokens=3)  # type: ignore[call-arg]


def test_a_context_that_the_cache_cannot_hold(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a default length to what fits; a length that was asked for is an error with the figures."""
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "0.0001")
    with LLM(str(tiny_llama), dtype="float32") as small:
        longest = small.model.max_model_len
        assert 16 < longest < 256
        assert len(small.generate([[5] * (longest - 8)], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
        with pytest.raises(RequestError):
            small.generate([[5] * longest], GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes.* set --max-model-len to {longest} or less"):
        LLM(str(tiny_llama), dtype="float32", max_model_len=256)
    with LLM(str(tiny_llama), dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 20) as large:
        assert large.model.max_model_len == 256


def test_it_survives_a_failed_request(llm: LLM) -> None:
    """End the call with the error of one bad request in a batch; the next call works."""
    with pytest.raises(RequestError):
        llm.generate(["fine", [100_000]], GREEDY, use_tqdm=False)
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


# ------------------------------------------------------------------------------------------------ beams, chat


def test_beam_search_gives_the_best_beams_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    first, second = llm.beam_search([{"prompt_token_ids": [9, 8, 7]}, "hello"], params)
    assert [len(found.sequences) for found in (first, second)] == [3, 3]
    for found in (first, second):
        scores = [beam.cum_logprob for beam in found.sequences]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(beam.tokens) for beam in found.sequences}) == 3
    best = first.sequences[0]
    assert best.tokens[:3] == [9, 8, 7]
    assert len(best.logprobs) == len(best.tokens) - 3 == 6
    assert best.cum_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(best.tokens[3:], best.logprobs, strict=True))
    )
    greedy = llm.generate(
        [[9, 8, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0), use_tqdm=False
    )
    assert best.cum_logprob >= (greedy[0].outputs[0].cumulative_logprob or 0) - 1e-4
    assert all(beam.text.startswith("hello") for beam in second.sequences)
    with pytest.raises(RequestError) as caught:
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.7))
    assert caught.value.param == "temperature"


def test_chat_takes_what_the_template_takes(llm: LLM) -> None:
    ask = [{"role": "user", "content": "hello"}]
    template = "{% for m in messages %}<{{ m.role }}|{{ m.content }}>{% endfor %}"
    template += "{% if add_generation_prompt %}!{{ mood }}{% endif %}"
    own = llm.chat(ask, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"mood": "gay"})
    assert own[0].prompt == "<user|hello>!gay"
    assert llm.chat(ask, GREEDY, False, chat_template=template, add_generation_prompt=False)[0].prompt == "<user|hello>"
    parts = "{{ messages[0].content is string }}"
    for form, seen in (("string", "True"), ("openai", "False")):
        output = llm.chat(ask, GREEDY, False, chat_template=parts, chat_template_content_format=form)
        assert output[0].prompt == seen
    open_end = [*ask, {"role": "assistant", "content": "I am"}]
    going_on = llm.chat(open_end, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert (going_on[0].prompt or "").endswith("I am")
    with pytest.raises(RequestError, match="add_generation"):
        llm.chat(ask, GREEDY, False, add_generation=True)


@pytest.mark.parametrize("task", ["encode", "classify", "score"])
def test_calls_of_other_tasks_say_which(llm: LLM, task: str) -> None:
    with pytest.raises(RequestError, match=rf"runs task generate \(.*\); this call needs task {task}, which is not"):
        getattr(llm, task)("text")
    with pytest.raises(RequestError, match="LlamaForCausalLM is for generate, and not for embed"):
        llm.embed("text", use_tqdm=False)


def test_progress_is_shown_by_what_is_given(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            bars.append(self)

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert [(bar.total, bar.n) for bar in bars] == [(2, 2)]
    assert "Prompts" in capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert "Prompts" not in capsys.readouterr().err


def test_priority_under_its_policy(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 1}
    with LLM(str(tiny_llama), scheduling_policy="priority", **options) as opened:
        outputs = opened.generate([[5, 6], [7, 8], [9, 10]], GREEDY, use_tqdm=False, priority=[5, 1, -3])
        assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8, 8]
        with pytest.raises(RequestError):
            opened.generate([[5, 6]], GREEDY, use_tqdm=False, priority=[1, 2])


# ------------------------------------------------------------------------------------------------ embeddings


def test_after_close_every_call_says_so(tiny_llama: Path) -> None:
    """Refuse every call, without a coroutine that is never awaited."""
    llm = LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=64)
    llm.close()
    llm.close()
    chat = [{"role": "user", "content": "hi"}]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for call in (lambda: llm.generate([[5, 6]], GREEDY), lambda: llm.chat(chat), llm.sleep):
            with pytest.raises(EngineDead, match="This LLM was closed"):
                call()
        gc.collect()
    assert not [each.message for each in seen if issubclass(each.category, RuntimeWarning)]


@pytest.fixture(scope="module")
def table(tiny_llama: Path) -> torch.Tensor:
    """Return the model's embedding table [vocabulary, hidden]."""
    return load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]


def _tokens(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, [sorted(p.items()) for p in o.outputs[0].logprobs or []]) for o in outputs]


def _agree(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Check for the same tokens, and logprobs but for rounding: in float32 it may depend on the batch and on the
    cut.
    """
    for ours, theirs in zip((o.outputs[0] for o in outputs), (o.outputs[0] for o in wanted), strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert {t: p.logprob for t, p in mine.items()} == pytest.approx(
                {t: p.logprob for t, p in other.items()}, abs=1e-4
            )


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 256},
        {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 8},  # in pieces
        {"num_gpu_blocks_override": 13, "block_size": 8, "max_model_len": 90},  # preempted
    ],
)
def test_embeddings_say_what_their_ids_say(tiny_llama: Path, table: torch.Tensor, options: dict[str, Any]) -> None:
    prompts = [[11, 12, 13], list(range(20, 60)), [7] * 17, list(range(100, 125))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    mixed: list[Any] = [{"prompt_embeds": table[ids] if n % 2 else table[ids].numpy()} for n, ids in enumerate(prompts)]
    with LLM(str(tiny_llama), dtype="float32", max_num_seqs=4, enable_prompt_embeds=True, **options) as opened:
        wanted = opened.generate(prompts, params, use_tqdm=False)
        _agree(opened.generate(mixed, params, use_tqdm=False), wanted)
        _agree(opened.generate([prompts[0], *mixed[1:]], params, use_tqdm=False), wanted)
        for one, alone in zip(mixed, wanted, strict=True):
            _agree(opened.generate([one], params, use_tqdm=False), [alone])
        opened.reset_prefix_cache()
        cold, hit = (opened.generate([mixed[1]], params, use_tqdm=False)[0] for _ in range(2))
        assert cold.num_cached_tokens == 0
        assert hit.num_cached_tokens >= 32
        _agree([cold, hit], [wanted[1]] * 2)
        other = opened.generate([{"prompt_embeds": table[list(range(21, 61))]}], params, use_tqdm=False)[0]
        assert other.num_cached_tokens == 0  # as many zeros for ids, and another content
        stats = opened._call("stats")
        assert ("preemptions" in stats) == ("max_model_len" in options)
        assert opened._call("check") is True


@pytest.mark.parametrize(
    "embeds", [torch.zeros(3, 65), torch.zeros(64), torch.full((3, 64), torch.nan), "text", [[1.0, 2.0], [3.0]], None]
)
def test_embeddings_that_do_not_fit(tiny_llama: Path, llm: LLM, embeds: Any) -> None:
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=64, enable_prompt_embeds=True) as opened:
        with pytest.raises(RequestError):
            opened.generate([{"prompt_embeds": embeds}], GREEDY, use_tqdm=False)
        half = {"prompt_embeds": torch.zeros(1, 3, 64, dtype=torch.bfloat16)}
        assert len(opened.generate([half], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
    with pytest.raises(RequestError, match="enable-prompt-embeds"):
        llm.generate([{"prompt_embeds": torch.zeros(3, 64)}], GREEDY, use_tqdm=False)


# ------------------------------------------------------------------------------------------------ the engine


def _resident() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_sleep_gives_memory_back_and_waking_restores_every_bit(tmp_path: Path) -> None:
    """Use some 30 MB of weights, and fill the cache before measuring."""
    folder = tmp_path / "wide"
    config = LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 2048})
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    prompts = [[5 + n, *range(20, 200)] for n in range(8)]
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_num_seqs": 8}
    with LLM(str(folder), enable_sleep_mode=True, enable_prefix_caching=False, **options) as opened:
        before = _tokens(opened.generate(prompts, params, use_tqdm=False))
        awake = _resident()
        cache = 8 * 188 * 2 * 2 * 2 * 128 * 4  # requests x tokens x layers x (k, v) x heads x width x bytes
        for level in (1, 2):
            opened.sleep(level)
            freed = awake - _resident()
            assert freed > 0.8 * (opened.model.weight_bytes + cache), (freed, opened.model.weight_bytes, cache)
            with pytest.raises(RequestError, match="wake_up"):
                opened.generate("a", params, use_tqdm=False)
            opened.wake_up(["weights"])
            opened.wake_up(["kv_cache"])
            assert _tokens(opened.generate(prompts, params, use_tqdm=False)) == before
            awake = _resident()
        with pytest.raises(RequestError, match="level"):
            opened.sleep(3)
        with pytest.raises(RequestError, match="kv_cache"):
            opened.wake_up(["everything"])


def hold_until_told_to_sleep(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold an engine after some more steps until its next message tells it to sleep. The event: it is held."""
    held, told, steps, post = threading.Event(), threading.Event(), itertools.count(), InlineClient._post

    def budget(self: FcfsPolicy, running: int, waiting: int, limit: int) -> int:
        if running and next(steps) == 20:
            held.set()
            assert told.wait(240)
        return limit

    def tell(self: InlineClient, message: ToEngine) -> None:
        post(self, message)
        if isinstance(message, Call) and message.name == "sleep":
            told.set()

    monkeypatch.setattr(FcfsPolicy, "budget", budget)
    monkeypatch.setattr(InlineClient, "_post", tell)
    return held


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_running_requests_sleep_too(tiny_llama: Path, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "model_impl": impl}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
    with LLM(str(tiny_llama), enable_sleep_mode=True, **options) as opened:
        wanted = _tokens(opened.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False))
        held = hold_until_told_to_sleep(monkeypatch)
        with ThreadPoolExecutor() as pool:
            work = pool.submit(opened.generate, [[5, 6, 7], [8, 9]], params, use_tqdm=False)
            assert held.wait(240)
            opened.sleep()
            assert not work.done()
            opened.wake_up()
            assert _tokens(work.result(timeout=240)) == wanted


def test_without_sleep_mode_it_says_how_to_get_it(llm: LLM) -> None:
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(RequestError, match="--enable-sleep-mode"):
            call()


class Extension:
    """An extension that the tests mix into the worker."""

    shift = 1

    def count(self, scale: int, *, offset: int = 0) -> dict[str, int]:
        return {"parameters": scale * sum(1 for _ in self.model_runner.model.parameters()) + offset}  # type: ignore[attr-defined]

    def fail(self) -> None:
        raise LookupError("nothing here")

    def tensor(self) -> torch.Tensor:
        return torch.zeros(2)

    def _hidden(self) -> int:
        return 1


def test_calls_on_the_workers(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
    with LLM(str(tiny_llama), worker_extension_cls=f"{__name__}.Extension", **options) as opened:
        (one,) = opened.collective_rpc("count", args=(10,), kwargs={"offset": 3})
        assert one["parameters"] % 10 == 3
        assert opened.collective_rpc(lambda worker, more: [worker.config.model.dtype, more], args=("x",)) == [
            ["float32", "x"]
        ]
        for method in ("_hidden", "shift", "execute", "release", "no_such"):
            with pytest.raises(RequestError, match="count, fail, tensor"):
                opened.collective_rpc(method)
        with pytest.raises(RequestError, match="fail failed: LookupError: nothing here"):
            opened.collective_rpc("fail")
        with pytest.raises(RequestError, match="tensor"):
            opened.collective_rpc("tensor")
        end = threading.Event()
        with pytest.raises(TimeoutError):
            opened.collective_rpc(lambda worker: end.wait(240), timeout=0.01)
        end.set()
        assert len(opened.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


class Colliding:
    def execute(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "said"),
    [("no.such.Thing", "no"), (f"{__name__}._tokens", "not a class"), (f"{__name__}.Colliding", "execute")],
)
def test_worker_extensions_that_cannot_be(tiny_llama: Path, target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--worker-extension-cls .*{said}"):
        LLM(str(tiny_llama), dtype="float32", worker_extension_cls=target)


def check_trace(trace: dict[str, Any]) -> None:
    """Check a trace by the description of Chrome's format: what each phase must have, and that slices nest."""
    needed = {"X": {"ts", "dur"}, "M": {"args"}, "C": {"ts", "args"}, "i": {"ts"}, "b": {"ts", "id", "cat"}}
    needed["e"] = needed["b"]
    slices: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert {"name", "pid", "ph"} | needed[event["ph"]] <= set(event), event
        assert all(isinstance(event[key], (int, float)) for key in ("ts", "dur") if key in event)
        if event.get("cat") == "step" and event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    for track in slices.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(track)))


def test_a_profile_is_written(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    with pytest.raises(RequestError, match="FERRULE_TORCH_PROFILER_DIR"):
        llm.start_profile()
    monkeypatch.setenv("FERRULE_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=64) as opened:
        with pytest.raises(RequestError, match="No profile"):
            opened.stop_profile()
        opened.start_profile()
        with pytest.raises(RequestError, match="already"):
            opened.start_profile()
        opened.generate(["hello", "you"], GREEDY, use_tqdm=False)
        name = opened.stop_profile()
        trace = json.loads(gzip.decompress((tmp_path / "traces" / name).read_bytes()))
        check_trace(trace)
        events = trace["traceEvents"]
        computed = [event for event in events if "linear" in event.get("name", "")]
        steps = [event for event in events if event.get("cat") == "step" and event["ph"] == "X"]
        assert {"rows": 2, "tokens": 2, "decoded": 2, "of prompts": 0, "admitted": 0} in [
            each["args"] for each in steps
        ]
        for event in computed:  # all of it within steps: the clocks are one
            assert any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps)
        assert sorted(event["ph"] for event in events if event.get("cat") == "request") == ["b", "b", "e", "e"]
        assert "/" not in name
        opened.start_profile()
        assert opened.stop_profile() != name
        opened.start_profile()
        (tmp_path / "traces").rename(tmp_path / "moved")
        (tmp_path / "traces").touch()
        for call in (opened.stop_profile, opened.start_profile):
            with pytest.raises(RequestError, match="cannot be written"):
                call()
        (tmp_path / "traces").unlink()
        opened.start_profile()  # nothing is left of the one that failed
        assert (tmp_path / "traces" / opened.stop_profile()).exists()


# ------------------------------------------------------------------------------------------------ around it


def test_hooks_are_told_and_notices_are_logged(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []

    class Told(Hooks):
        def process_started(self, process: str, config: Any) -> None:
            told.append((process, config.model_names[0]))

        def process_stopping(self, process: str, status: int) -> None:
            told.append((process, status))

    monkeypatch.setattr("ferrule.llm.backend.open_hooks", lambda plugins, config: HookRunner([("test", Told())]))
    monkeypatch.setenv("FERRULE_NO_SUCH_VARIABLE", "1")
    with LLM(str(tiny_llama), dtype="float32", num_gpu_blocks_override=64):
        assert told == [("llm", str(tiny_llama))]
    assert told[1:] == [("llm", 0)]
    flush(240)
    assert "FERRULE_NO_SUCH_VARIABLE" in capfd.readouterr().err


def test_the_code_of_the_page_runs(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 12
    script, encoder = tmp_path / "page.py", tiny_checkpoint("bert-encoder", tmp_path / "bert")
    text = "".join(blocks).replace("path/to/model", str(tiny_llama)).replace("path/to/encoder", str(encoder))
    script.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "The capital of France is →" in capsys.readouterr().out
