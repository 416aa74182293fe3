"""`AsyncLLM` and `LLMEngine`, what `LLM` has of vLLM's API beside batches, and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from ferrule.errors import ConfigError, EngineDead, RequestError, RequestFailed
from ferrule.interfaces.sampler import SampleBatch
from ferrule.interfaces.service import Generate, Prompt
from ferrule.llm.backend import Backend
from ferrule.llm.metrics import Counter, Gauge, Histogram
from ferrule.types import EngineStats
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_testkit.checkpoints import write_tokenizer
from tests.otlp_collector import grpc_collector

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    pattern = rf"{__name__}\.(make_only|only_five)"
    with LLM(str(tiny_llama), disable_log_stats=False, logits_processor_pattern=pattern, **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_llama), disable_log_stats=True, **OPTIONS)) as opened:
        yield opened


def name_of(model: torch.nn.Module) -> str:
    return type(model).__name__


def kind_of(worker: Any, prefix: str) -> str:
    return prefix + worker.config.model.dtype


def only_five(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Leave no other token than 5."""
    return torch.full_like(logits, float("-inf")).index_fill_(0, torch.tensor([5]), 0.0)


def make_only(token: int) -> Any:
    return lambda output_ids, logits: torch.where(torch.arange(len(logits)) == token, logits, float("-inf"))


def after_the_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Repeat the prompt."""
    wanted = prompt_ids[len(output_ids) % len(prompt_ids)]
    return torch.where(torch.arange(len(logits)) == wanted, logits, float("-inf"))


def _ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def _read(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


# ------------------------------------------------------------------------------------------------ LLM


def test_functions_change_logits(llm: LLM) -> None:
    alone = _ids(llm.generate([[9, 8]], GREEDY, use_tqdm=False))
    params = [
        GREEDY.model_copy(update={"logits_processors": [only_five]}),
        GREEDY,
        GREEDY.model_copy(update={"logits_processors": [after_the_prompt], "n": 2}),
    ]
    first, neighbour, *repeated = _ids(llm.generate([[9, 8]] * 3, params, use_tqdm=False))
    assert first == [5] * 8
    assert [neighbour] == alone
    assert repeated == [[9, 8] * 4] * 2

    def broken(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise LookupError("inside")

    with pytest.raises(RequestFailed, match="A logits processor failed"):
        llm.generate([[9, 8]], GREEDY.model_copy(update={"logits_processors": [broken]}), use_tqdm=False)
    with pytest.raises(RequestError, match=r"logits_processors\[0\]: it must take"):
        llm.generate([[9, 8]], GREEDY.model_copy(update={"logits_processors": [lambda a: a]}), use_tqdm=False)


def test_processors_by_import_path_run_in_the_engine(llm: LLM) -> None:
    """Pass processors on as a router does."""

    async def generate(processor: Any) -> list[int]:
        request = Generate(
            prompts=(Prompt(ids=(9, 8)),), params=SamplingParams(max_tokens=3), logits_processors=(processor,), raw=True
        )
        stream = (await llm._backend.service.admit(request)).outputs()
        return [token async for output in stream for token in output.token_ids]

    made = {"qualname": f"{__name__}.make_only", "args": [7], "kwargs": {}}
    assert llm._backend.wait(generate(made)) == [7, 7, 7]
    assert llm._backend.wait(generate(f"{__name__}.only_five")) == [5, 5, 5]
    with pytest.raises(RequestError, match="does not have"):
        llm._backend.wait(generate(f"{__name__}.name_of"))


def test_a_conversation_is_read_as_chat_reads_it(llm: LLM) -> None:
    one, two = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "you"}]
    prompts = llm.preprocess_chat([one, two], chat_template_kwargs={"x": 1})
    assert [set(prompt) for prompt in prompts] == [{"prompt_token_ids", "prompt"}] * 2
    assert llm.generate(prompts, GREEDY, use_tqdm=False) == llm.chat([one, two], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="add_generation"):
        llm.preprocess_chat(one, add_generation=True)


def test_a_function_of_the_model(llm: LLM) -> None:
    assert llm.apply_model(name_of) == ["Llama"]
    assert llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()) >= 0) == [True]
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        llm.apply_model(lambda model: 1 / 0)


def test_metrics_are_counted_and_read(llm: LLM) -> None:
    def tokens() -> int:
        return sum(
            metric.value
            for metric in llm.get_metrics()
            if isinstance(metric, Counter) and metric.name == "vllm:generation_tokens"
        )

    before = tokens()
    llm.generate([[9, 8]], GREEDY, use_tqdm=False)
    assert tokens() == before + 8
    kinds = {metric.name: type(metric) for metric in llm.get_metrics()}
    assert kinds["vllm:num_requests_running"] is Gauge
    assert kinds["vllm:e2e_request_latency_seconds"] is Histogram


def test_a_request_tells_of_its_times_and_guesses(tiny_llama: Path) -> None:
    guesses = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, n=2)
    begun = time.time()
    with LLM(str(tiny_llama), disable_log_stats=False, speculative_config=guesses, **OPTIONS) as opened:
        (output,) = opened.generate("a b c", params, use_tqdm=False)
        counters = {one.name: one.value for one in opened.get_metrics() if isinstance(one, Counter)}
        text = output.outputs[0].text
        stopped = opened.generate("a b c", SamplingParams(temperature=0, max_tokens=60, stop=text[-2:]), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    counts = metrics.spec_token_acceptance_counts
    assert counts is not None
    told = [counters[f"vllm:spec_decode_num_{what}"] for what in ("drafts", "draft_tokens", "accepted_tokens")]
    assert told == [counts[0], metrics.num_draft_tokens, sum(counts[1:])]
    assert 0 < sum(counts[1:]) <= 3 * counts[0]
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    times = [
        begun,
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
    ]
    assert times == sorted(times)
    assert stopped[0].outputs[0].finish_reason == "stop"
    assert stopped[0].metrics is not None
    assert metrics.last_token_time <= stopped[0].metrics.arrival_time <= stopped[0].metrics.last_token_time


def test_requests_one_by_one(llm: LLM) -> None:
    steps = llm.llm_engine
    wanted = _ids(llm.generate([[9, 8], "hello"], GREEDY, use_tqdm=False))
    assert (steps.step(), steps.has_unfinished_requests()) == ([], False)
    steps.add_request("a", [9, 8], GREEDY)
    steps.add_request("b", "hello", GREEDY.model_copy(update={"output_kind": RequestOutputKind.DELTA}), priority=0)
    assert steps.get_num_unfinished_requests() == 2
    with pytest.raises(RequestError, match="'a' is in use"):
        steps.add_request("a", [9, 8], GREEDY)
    with pytest.raises(RequestError, match="prompt"):
        steps.add_request("c", {"promt": "x"}, GREEDY)
    with pytest.raises(RequestError, match="LoRA"):
        steps.add_request("c", "x", GREEDY, lora_request="adapter")  # type: ignore[arg-type]
    seen: dict[str, list[list[int]]] = {"a": [], "b": []}
    while steps.has_unfinished_requests():
        news = steps.step()
        assert len({output.request_id for output in news}) == len(news) > 0
        for output in news:
            seen[output.request_id].append(list(output.outputs[0].token_ids))
    assert seen["a"][-1] == wanted[0]
    assert [token for part in seen["b"] for token in part] == wanted[1]
    config = steps.get_model_config()
    assert (config.max_model_len, config.dtype) == (256, "float32")


def test_an_aborted_request_is_not_heard_of_again(llm: LLM) -> None:
    steps = llm.llm_engine
    steps.add_request("a", [9, 8], LONG)
    assert [output.request_id for output in steps.step()] == ["a"]
    steps.abort_request(["a", "no such"])
    assert (steps.has_unfinished_requests(), steps.step()) == (False, [])
    steps.add_request("a", [9, 8], GREEDY.model_copy(update={"output_kind": RequestOutputKind.FINAL_ONLY}))
    (last,) = steps.step()
    assert (last.finished, len(last.outputs[0].token_ids)) == (True, 8)


def test_an_engine_of_its_own(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dtype'"):
        EngineArgs(str(tiny_llama), dtyp="float32")
    steps = LLMEngine.from_engine_args(EngineArgs(str(tiny_llama), disable_log_stats=True, **OPTIONS))
    steps.check_health()
    with pytest.raises(RequestError, match="disable_log_stats=False"):
        steps.get_metrics()
    steps.add_request("a", [9, 8], LONG)
    steps.shutdown()
    with pytest.raises(EngineDead):
        _read(steps)
    with pytest.raises(EngineDead):
        steps.check_health()


def test_another_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    with LLM(str(tiny_llama), skip_tokenizer_init=True, **OPTIONS) as opened:
        assert opened.get_tokenizer() is None
        with pytest.raises(RequestError, match="without a tokenizer"):
            opened.generate("hello", GREEDY, use_tqdm=False)
        opened.set_tokenizer(AutoTokenizer.from_pretrained(tiny_llama))
        by_object = opened.generate("hello", GREEDY, use_tqdm=False)
        write_tokenizer(tmp_path)
        opened.set_tokenizer(tmp_path)
        assert opened.generate("hello", GREEDY, use_tqdm=False) == by_object
        assert by_object[0].outputs[0].text
        opened.set_tokenizer(opened.get_tokenizer())
        for wrong in (5, "no such folder"):
            with pytest.raises(RequestError, match="one of transformers, a folder"):
                opened.set_tokenizer(wrong)
        opened.llm_engine.add_request("a", [9, 8], LONG)
        with pytest.raises(RequestError, match="requests are running"):
            opened.set_tokenizer(tmp_path)


def test_extra_arguments_reach_the_sampler(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    plain = DefaultSampler.sample

    def sample(self: DefaultSampler, logits: torch.Tensor, batch: SampleBatch) -> Any:
        seen.extend(row.sampling.extra_args for row in batch.rows)
        return plain(self, logits, batch)

    monkeypatch.setattr(DefaultSampler, "sample", sample)
    llm.generate([[9, 8]], SamplingParams(max_tokens=1, extra_args={"a": [1, {"b": None}]}), use_tqdm=False)
    assert seen == [{"a": [1, {"b": None}]}]


# ------------------------------------------------------------------------------------------------ AsyncLLM


async def _all(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def _settled(engine: AsyncLLM) -> EngineStats:
    """Return the engine's figures once nothing runs any more."""
    while True:
        stats = await engine._ask(engine._backend.service.call("stats"))
        if not (stats.get("running") or stats.get("waiting")):
            return EngineStats(**stats)
        await asyncio.sleep(0.01)


async def test_outputs_as_they_come(engine: AsyncLLM) -> None:
    assert AsyncLLMEngine is AsyncLLM
    seen, other = await asyncio.gather(_all(engine, [9, 8], GREEDY, "a"), _all(engine, "hello", GREEDY, "b"))
    lengths = [len(output.outputs[0].token_ids) for output in seen]
    assert lengths == sorted(lengths)
    assert (lengths[-1], [output.finished for output in seen]) == (8, [False] * (len(seen) - 1) + [True])
    assert other[-1].prompt == "hello"
    deltas = await _all(engine, [9, 8], GREEDY.model_copy(update={"output_kind": RequestOutputKind.DELTA}), "a")
    assert [token for output in deltas for token in output.outputs[0].token_ids] == seen[-1].outputs[0].token_ids
    final = GREEDY.model_copy(update={"output_kind": RequestOutputKind.FINAL_ONLY})
    assert (await _all(engine, [9, 8], final, "a"))[0].outputs == seen[-1].outputs


async def test_closing_or_cancelling_frees_the_request(engine: AsyncLLM) -> None:
    stream = engine.generate([9, 8], LONG, "a")
    await anext(stream)
    with pytest.raises(RequestError, match="'a' is in use"):
        await anext(engine.generate([9, 8], LONG, "a"))
    await stream.aclose()
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate([9, 8], LONG, "b"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await _settled(engine)
    assert stats.blocks_used == 0
    assert await _all(engine, [9, 8], GREEDY, "a")


async def test_abort_ends_a_generator(engine: AsyncLLM) -> None:
    seen = []
    async for output in engine.generate([9, 8], LONG, "a"):
        seen.append(output)
        await engine.abort("a")
    assert (seen[-1].finished, seen[-1].outputs[0].finish_reason) == (True, "abort")
    assert len(seen[-1].outputs[0].token_ids) < 200
    await engine.abort("a")


async def test_what_is_asked_of_the_engine(engine: AsyncLLM) -> None:
    tokenizer = await engine.get_tokenizer()
    assert tokenizer is not None
    assert (await engine.get_model_config()).max_model_len == engine.model.max_model_len == 256
    assert (engine.is_running, engine.errored, engine.is_stopped) == (True, False, False)
    await engine.check_health()
    assert await engine.reset_prefix_cache()
    assert await engine.is_sleeping() is False
    assert await engine.collective_rpc(kind_of, args=("is ",)) == ["is float32"]
    with pytest.raises(RequestError, match="top_p"):
        await _all(engine, [9, 8], SamplingParams(top_p=7), "a")


def test_several_loops_may_use_it(engine: AsyncLLM) -> None:
    """Use the engine in a new loop after one that ended with a running request."""

    async def begin() -> None:
        await anext(engine.generate([9, 8], LONG, "left"))

    asyncio.run(begin())
    assert len(asyncio.run(_all(engine, [9, 8], GREEDY, "left"))[-1].outputs[0].token_ids) == 8


# ------------------------------------------------------------------------------------------------ a child


def test_an_engine_in_another_process(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with LLM(str(tiny_llama), **OPTIONS) as remote:
        child = remote._backend.client._child  # type: ignore[union-attr]
        assert child.poll() is None
        assert _ids(remote.generate(["hello"], GREEDY, use_tqdm=False)) == _ids(
            llm.generate(["hello"], GREEDY, use_tqdm=False)
        )
        params = GREEDY.model_copy(update={"logits_processors": [only_five], "extra_args": {"a": 1}})
        assert _ids(remote.generate([[9, 8]], params, use_tqdm=False)) == [[5] * 8]
        assert remote.apply_model(name_of) == ["Llama"]
        assert remote.collective_rpc(kind_of, args=("is ",)) == ["is float32"]
        for call in (
            lambda: remote.apply_model(lambda model: 1),
            lambda: remote.collective_rpc(lambda worker: 1),
            lambda: remote.generate(
                [[9, 8]],
                GREEDY.model_copy(update={"logits_processors": [lambda ids, logits: logits]}),
                use_tqdm=False,
            ),
        ):
            with pytest.raises(RequestError, match="another process, which cannot import"):
                call()
        assert remote.reset_prefix_cache()
        remote.llm_engine.add_request("a", [9, 8], LONG)
        child.kill()
        with pytest.raises(EngineDead, match="ended"):
            _read(remote.llm_engine)
    assert child.poll() is not None


# ------------------------------------------------------------------------------------------------ the end


def _computing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("llm", "engine", "ferrule-worker")]


def _ended(before: list[str]) -> bool:
    """Return whether the engine ends soon: the thread with the last news may be the last to let go, and then another
    one ends the engine.
    """
    for _ in range(3000):
        if _computing() == before:
            return True
        time.sleep(0.01)
    return False


def _holders() -> str:
    """Describe, for a failure, the threads that are left, and what refers to backends that still exist."""
    backends = [each for each in gc.get_objects() if isinstance(each, Backend)]
    threads = ", ".join(thread.name for thread in threading.enumerate())
    return f"{threads}; " + "; ".join(repr(gc.get_referrers(each))[:1000] for each in backends)


def test_who_lets_go_of_it_has_its_memory_back(tiny_llama: Path, llm: LLM, engine: AsyncLLM) -> None:
    """Free the memory also while requests run, and in a thread that is not the main one."""
    before = _computing()
    opened = LLM(str(tiny_llama), **OPTIONS)
    opened.generate([[9, 8]], GREEDY, use_tqdm=False)
    assert len(_computing()) > len(before)
    del opened
    assert _ended(before), _holders()
    single = LLMEngine.from_engine_args(EngineArgs(str(tiny_llama), **OPTIONS))
    single.add_request("a", [9, 8], LONG)
    single.step()
    del single
    assert _ended(before), _holders()
    asynchronous = [AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_llama), **OPTIONS))]
    asyncio.run(_all(asynchronous[0], [9, 8], GREEDY, "a"))
    thread = threading.Thread(target=asynchronous.clear)
    thread.start()
    thread.join()
    assert _ended(before), _holders()


def test_a_program_may_end_with_requests_that_run(tiny_llama: Path) -> None:
    """End whatever computes before the interpreter ends, which a thread in C++ would abort."""
    program = f"""
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
from ferrule import EngineArgs, LLMEngine, SamplingParams
engine = LLMEngine.from_engine_args(EngineArgs({str(tiny_llama)!r}, **{OPTIONS}))
for name in "abc":
    engine.add_request(name, [9, 8], SamplingParams(max_tokens=200, ignore_eos=True))
engine.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr
    assert "Traceback" not in done.stderr


async def test_requests_are_traced(tiny_llama: Path) -> None:
    with grpc_collector() as collector:
        traced: dict[str, Any] = {"otlp_traces_endpoint": collector.endpoint, "collect_detailed_traces": ["worker"]}
        args = AsyncEngineArgs(str(tiny_llama), **OPTIONS, **traced)
        with AsyncLLM.from_engine_args(args) as opened:
            headers = {"Traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
            async for _ in opened.generate("hello", GREEDY, "mine", trace_headers=headers):
                pass
    (span,) = collector.requests()
    assert (span.trace_id, span.parent, span.attributes["gen_ai.request.id"]) == ("a" * 32, "b" * 16, "mine")
    assert span.attributes["gen_ai.latency.time_in_model_execute"] > 0
    assert "gen_ai.latency.time_in_model_forward" not in span.attributes
