"""The `uni` executor: from a folder to answered plans, and what it says when something is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import CacheConfig, Config, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import CheckpointError, ConfigError, EngineDead, PluginError, StartupError
from ferrule.execution import Worker, thread
from ferrule.interfaces.executor import Step
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import Sampler
from ferrule.plugin import discover
from ferrule.runner.model_runner import ModelRunner
from ferrule.types import Admit, Chunk, HostTensor, MediaItem, ModelInfo, StepPlan, TokenSampling
from ferrule_plugins.executor.uni import UniExecutor
from ferrule_testkit.checkpoints import tiny_config, tiny_model

ENV = Environment(cpu_kvcache_space=0.01, cpu_omp_threads_bind="auto")
GREEDY = TokenSampling(seed=0, max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


@pytest.fixture
def folder(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _config(folder: Path, env: Environment = ENV, **model: Any) -> Config:
    return resolve(
        Config(
            model=ModelConfig(**{"model": str(folder), "dtype": "float32", **model}),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=2),
            env=env,
        )
    )


def _start(config: Config, plugins: Plugins) -> tuple[UniExecutor, ModelInfo]:
    executor = UniExecutor()
    try:
        return executor, executor.start(config, plugins)
    except BaseException:
        executor.shutdown()
        raise


@pytest.fixture
def running(folder: Path, plugins: Plugins) -> Iterator[UniExecutor]:
    executor, _ = _start(_config(folder), plugins)
    executor.init_cache(20)
    yield executor
    executor.shutdown()


def _plan(step: int, start: int, count: int, blocks: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> StepPlan:
    admits = (Admit(slot=0, id="a", epoch=0, known_ids=prompt, num_prompt=len(prompt), work=GREEDY),) if prompt else ()
    return StepPlan(
        step=step,
        chunks=(Chunk(slot=0, id="a", epoch=0, start=start, count=count, ends="sample", new_blocks=(blocks,)),),
        admits=admits,
    )


def _token_bytes(itemsize: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    config = tiny_config("llama")
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


def test_what_it_reports(folder: Path, plugins: Plugins) -> None:
    executor, info = _start(_config(folder), plugins)
    executor.shutdown()
    expected = tiny_model("llama")
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert info.attention in plugins.load("platform", "cpu")().attention_order()
    assert info.hidden_size == expected.config.hidden_size
    assert info.implementation.startswith("LlamaForCausalLM (ferrule")
    assert info.num_parameters == sum(p.numel() for p in expected.parameters())
    assert info.weight_bytes == 4 * info.num_parameters
    assert (info.vocab_size, info.max_model_len) == (expected.config.vocab_size, 256)
    assert info.page_bytes == 16 * _token_bytes(4)
    assert info.max_blocks == int(0.01 * 2**30) // info.page_bytes


def test_the_cache_is_as_large_as_the_user_says(folder: Path, plugins: Plugins) -> None:
    """Use this size instead of what the device would give, and also where running requests cannot fill it."""
    config = _config(folder)
    cache = replace(config.cache, kv_cache_memory_bytes=64 << 20)
    executor, info = _start(replace(config, cache=cache), plugins)
    executor.shutdown()
    assert info.max_blocks == (64 << 20) // info.page_bytes


def test_plans_submitted_ahead_are_answered_in_order(running: UniExecutor) -> None:
    prompt = tuple(range(5, 14))
    handles = [running.submit(_plan(0, 0, 9, (3,), prompt))]
    handles += [running.submit(_plan(n, 8 + n, 1)) for n in range(1, 6)]
    tokens = [token for handle in handles for token in handle.result().rows[0].token_ids]
    model = tiny_model("llama")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert tokens == out[0, 9:].tolist()
    assert all(handle.done() for handle in handles)
    running.submit(StepPlan(step=9, chunks=(), releases=(0,))).result()
    running.call("check")


def test_an_empty_plan(running: UniExecutor) -> None:
    assert running.submit(StepPlan(step=4, chunks=())).result().rows == ()


def test_a_failed_step_is_fatal(running: UniExecutor) -> None:
    first = running.submit(_plan(0, 0, 1, (), (1,)))  # no block
    with pytest.raises(RuntimeError, match="no block"):
        first.result()
    with pytest.raises(EngineDead, match="no block"):
        running.check_health()
    with pytest.raises(EngineDead):
        running.submit(StepPlan(step=1, chunks=()))


def test_plans_behind_a_failed_one_do_not_run(running: UniExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    held = running._started()._submit(go.wait)
    bad, behind = running.submit(_plan(0, 0, 1, (), (1,))), running.submit(StepPlan(step=1, chunks=()))
    go.set()
    assert held.result()
    with pytest.raises(RuntimeError):
        bad.result()
    with pytest.raises(EngineDead):
        behind.result()


def test_shutdown_twice_and_use_afterwards(folder: Path, plugins: Plugins) -> None:
    executor, _ = _start(_config(folder), plugins)
    executor.shutdown()
    executor.shutdown()
    assert not executor._started()._thread.is_alive()
    with pytest.raises(EngineDead):
        executor.submit(StepPlan(step=0, chunks=()))
    with pytest.raises(EngineDead):
        UniExecutor().submit(StepPlan(step=0, chunks=()))


def test_unknown_administrative_call(running: UniExecutor) -> None:
    with pytest.raises(ValueError, match="fly"):
        running.call("fly")
    running.check_health()


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("backend", ["cpu", "torch_sdpa"])
def test_attention_backend_by_name(folder: Path, plugins: Plugins, backend: str) -> None:
    config = replace(_config(folder), device=DeviceConfig(device="cpu", attention_backend=backend))
    executor, info = _start(config, plugins)
    executor.shutdown()
    assert info.attention == backend


def test_refusals_are_reported(folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    order = plugins.load("platform", "cpu")().attention_order()
    for name in order[:-1]:
        monkeypatch.setattr(plugins.load("attention", name), "refuses", classmethod(lambda *_: "too tired"))
    executor, info = _start(_config(folder), plugins)
    executor.shutdown()
    assert info.attention == order[-1]
    notes = tuple(note for note in info.notes if note.startswith("attention"))
    assert notes == tuple(f"attention {name} refused: too tired" for name in order[:-1])
    config = replace(_config(folder), device=DeviceConfig(attention_backend="cpu"))
    with pytest.raises(ConfigError, match="too tired"):
        _start(config, plugins)


def test_dtype_and_block_size(folder: Path, plugins: Plugins) -> None:
    config = replace(_config(folder, dtype="bfloat16"), cache=CacheConfig(block_size=8))
    executor, info = _start(config, plugins)
    executor.shutdown()
    assert (info.dtype, info.groups[0].block_size, info.page_bytes) == ("bfloat16", 8, 8 * _token_bytes(2))


def test_max_model_len(folder: Path, plugins: Plugins) -> None:
    executor, info = _start(_config(folder, max_model_len=100), plugins)
    executor.shutdown()
    assert info.max_model_len == 100
    with pytest.raises(ConfigError, match="256"):
        _start(_config(folder, max_model_len=257), plugins)
    allowed = Environment(cpu_kvcache_space=0.01, allow_long_max_model_len=True)
    executor, info = _start(_config(folder, allowed, max_model_len=300), plugins)
    executor.shutdown()
    assert info.max_model_len == 300


def test_hf_overrides_reach_the_model(folder: Path, plugins: Plugins) -> None:
    executor, info = _start(_config(folder, hf_overrides={"max_position_embeddings": 64}), plugins)
    executor.shutdown()
    assert info.max_model_len == 64


def test_dummy_weights(folder: Path, plugins: Plugins) -> None:
    config = replace(_config(folder), load=LoadConfig(load_format="dummy", use_tqdm_on_load=False))
    executor, _ = _start(config, plugins)
    executor.init_cache(20)
    assert executor.submit(_plan(0, 0, 2, (1,), (3, 4))).result().rows[0].error is None
    executor.shutdown()


def test_a_start_is_settled_in_a_pause(folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = threading.Event()
    monkeypatch.setattr(Worker, "settle", lambda worker: settled.set())
    executor, _ = _start(_config(folder), plugins)
    executor.init_cache(20)
    assert settled.wait(120)
    executor.shutdown()


def test_a_start_is_not_settled_when_another_job_comes(
    folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the start unsettled: the cache that settling computes with may be gone."""
    settled = threading.Event()
    monkeypatch.setattr(Worker, "settle", lambda worker: settled.set())
    monkeypatch.setattr(thread, "_PAUSE_SECONDS", 3600.0)
    executor, _ = _start(_config(folder), plugins)
    executor.init_cache(20)
    executor.call("release", (("weights", "kv_cache"), 1))
    monkeypatch.setattr(thread, "_PAUSE_SECONDS", 0.0)
    executor.call("check")
    executor.shutdown()
    assert not settled.is_set()


def test_a_start_that_finds_no_memory_to_be_settled_goes_on(
    folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_PAUSE_SECONDS", 3600.0)
    executor, _ = _start(_config(folder), plugins)
    executor.init_cache(20)
    compute = ModelRunner.compute

    def without_memory(runner: ModelRunner, plan: StepPlan) -> Step:
        if plan.chunks:
            raise MemoryError
        return compute(runner, plan)

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "compute", without_memory)
        running = executor._started()
        running._submit(running._guarded, running._ready().settle).result()
    assert executor.submit(_plan(0, 0, 2, (1,), (3, 4))).result().rows[0].error is None
    executor.shutdown()


# ---------------------------------------------------------------------------------------------- given back


def test_memory_is_given_back_and_restored(running: UniExecutor) -> None:
    """Get the same step after waking as before, from new blocks; asleep there is no model."""
    prompt = tuple(range(5, 14))
    before = running.submit(_plan(0, 0, 9, (3,), prompt)).result().rows[0]
    running.call("release", (("weights", "kv_cache"), 1))
    running.call("check")
    for part in ("kv_cache", "weights"):  # in any order
        running.call("restore", (part,))
    assert running.submit(_plan(1, 0, 9, (7,), prompt)).result().rows[0] == before
    running.submit(StepPlan(step=2, chunks=(), releases=(0,))).result()
    running.call("check")
    running.call("release", (("weights",), 2))
    with pytest.raises(RuntimeError, match="weights were given back"):
        running.submit(_plan(3, 0, 9, (3,), prompt)).result()


def test_a_checkpoint_that_is_gone_when_it_wakes(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    copy = _damaged(folder, tmp_path / "copy", lambda weights: None)
    executor, _ = _start(_config(copy), plugins)
    executor.init_cache(20)
    executor.call("release", (("weights", "kv_cache"), 2))
    weights = (copy / "model.safetensors").rename(tmp_path / "aside")
    with pytest.raises(StartupError, match="safetensors"):
        executor.call("restore", ("weights",))
    weights.rename(copy / "model.safetensors")
    executor.call("restore", ("weights",))
    executor.call("restore", ("kv_cache",))
    assert executor.submit(_plan(0, 0, 3, (3,), (5, 6, 7))).result().rows[0].error is None
    executor.shutdown()


# ---------------------------------------------------------------------------------------------- embeddings


def _embedded(size: int = 64, tokens: int = 3, **changes: Any) -> StepPlan:
    given = {"shape": (tokens, size), "dtype": "float32", "data": bytes(4 * tokens * size), **changes}
    item = MediaItem(
        kind="embeds", digest=str(given).encode(), start=0, count=tokens, data={"embeds": HostTensor(**given)}
    )
    admit = Admit(slot=0, id="a", epoch=0, known_ids=(0,) * tokens, num_prompt=tokens, work=GREEDY, media=(item,))
    return StepPlan(
        step=0,
        chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=tokens, ends="sample", new_blocks=((3,),)),),
        admits=(admit,),
        encodes=(item,),
    )


@pytest.mark.parametrize("changes", [{"size": 63}, {"dtype": "int8"}, {"data": b""}, {"data": b"123"}])
def test_embeddings_that_do_not_fit_end_their_request_alone(running: UniExecutor, changes: dict[str, Any]) -> None:
    """Harm nobody else, should the gate, which checks embeddings, fail."""
    (row,) = running.submit(_embedded(**changes)).result().rows
    assert row.error == "The prompt's embeddings do not fit the model."
    running.submit(StepPlan(step=1, chunks=(), releases=(0,))).result()
    running.call("check")
    assert running.submit(_embedded()).result().rows[0].error is None


@pytest.mark.advisory("PYSEC-2026-2303")
def test_a_model_that_takes_no_embeddings(folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.load("model", "LlamaForCausalLM"), "embed_size", lambda self: 0)
    executor, info = _start(_config(folder), plugins)
    executor.shutdown()
    assert info.hidden_size == 0
    with pytest.raises(ConfigError, match="--enable-prompt-embeds: LlamaForCausalLM"):
        _start(_config(folder, enable_prompt_embeds=True), plugins)


# ---------------------------------------------------------------------------------------------- refusals


def _damaged(folder: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), r"norm\.weight"),
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), r"layers\.1\.self_attn\.k_proj\.weight"),
        (lambda w: w.update({"model.extra": torch.zeros(2)}), r"model\.safetensors.*model\.extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model\.safetensors.*norm\.weight.*shape"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, plugins: Plugins, tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        _start(_config(_damaged(folder, tmp_path / "damaged", change)), plugins)


@pytest.mark.parametrize(
    ("overrides", "model", "error", "named"),
    [
        (
            {"architectures": ["LlamaForCausalML"]},
            {"model_impl": "native"},
            ConfigError,
            "Did you mean 'LlamaForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, {}, PluginError, "quantization"),
        ({"vocab_size": None}, {}, CheckpointError, "vocab_size"),
    ],
)
def test_models_that_cannot_be_served(
    folder: Path, plugins: Plugins, overrides: dict[str, Any], model: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        _start(_config(folder, hf_overrides=overrides, **model), plugins)


def test_an_unknown_device_is_named(folder: Path, plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="abacus"):
        _start(replace(_config(folder), device=DeviceConfig(device="abacus")), plugins)


def test_a_cache_that_memory_cannot_hold(folder: Path, plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="GiB"):
        _start(_config(folder, Environment(cpu_kvcache_space=1e6)), plugins)


@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
def test_a_mode_of_logprobs_that_the_sampler_does_not_know(
    folder: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    sampler = plugins.load("sampler", "default")
    monkeypatch.setattr(sampler, "logprobs_modes", Sampler.logprobs_modes)
    config = _config(folder, logprobs_mode="raw_logits")
    with pytest.raises(ConfigError, match="--logprobs-mode raw_logits: the sampler default knows raw_logprobs"):
        Worker(config, plugins).check_start() if check else _start(config, plugins)
