"""A step begins without waiting for the one before: no question to the device, and two steps in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ferrule.assembly.engine import build_engine, open_executor
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import EngineDead
from ferrule.interfaces.executor import Step
from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.platform import Transfers
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.plugin import discover
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import (
    Admit,
    Chunk,
    EngineRequest,
    HostTensor,
    MediaItem,
    ModelInfo,
    RowResult,
    StepPlan,
    StepResult,
    TokenSampling,
)
from ferrule.wire.messages import Submit
from ferrule_plugins.executor import uni
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cpu import CpuExecution, CpuMemory
from ferrule_plugins.platform.cuda_stage import ALIGNMENT, PinnedTransfers
from ferrule_testkit.checkpoints import tiny_model
from tests.fakes.lazy_device import NoWaiting, PagedAttention, Unread, WaitedError

VOCAB, BLOCK, MAX_LEN = 64, 4, 32
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LEN,
}
GREEDY = TokenSampling(seed=0, max_tokens=8, temperature=0.0)


class Best(Sampler):
    """The likeliest token, as a sampler that waits for nothing chooses it."""

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        most, tokens = logits.max(-1)
        asking = [place for place, row in enumerate(batch.rows) if row.sampling.logprobs is not None]
        chosen = batch.transfers.stage([torch.tensor(asking).long()], logits.device)[0]
        return Sampled(tokens, torch.isfinite(most), logits.index_select(0, chosen).log_softmax(-1) if asking else None)


class Repeats(Speculator):
    """A speculator that guesses the last token once more, without asking the device for it."""

    def __init__(self) -> None:
        pass

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        history = rows.history[: len(rows.slots)]  # which slots they are matters to the guess alone
        return history.gather(1, rows.lengths.unsqueeze(1) - 1).long()


def _runner(device: str = "cpu", transfers: Transfers | None = None) -> ModelRunner:
    torch.manual_seed(0)
    where = torch.device(device)
    model = Llama(
        BuildContext(config=CONFIG, dtype=torch.float32, device=where, block_size=BLOCK, max_model_len=MAX_LEN)
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.35)
    limits = RunnerLimits(slots=3, max_model_len=MAX_LEN, vocab_size=VOCAB, dtype=torch.float32, device=where)
    parts = RunnerParts(
        model=model,
        attention=PagedAttention(),
        sampler=Best(None),  # type: ignore[arg-type]
        limits=limits,
        transfers=transfers or Transfers(),
        speculator=Repeats(),
    )
    runner = ModelRunner(parts)
    runner.init_cache(30)
    return runner


def _story() -> Iterator[StepPlan]:
    """Yield plans with prompts in pieces, decoding, logprobs, embeddings, ids from the host, guesses, a slot that is
    used again.
    """
    asking = TokenSampling(seed=0, max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1)
    tensor = HostTensor(shape=(3, 16), dtype="float32", data=torch.linspace(-1, 1, 3 * 16).numpy().tobytes())
    item = MediaItem(kind="embeds", digest=b"c", start=0, count=3, data={"embeds": tensor})
    admits = (
        Admit(slot=0, id="a", epoch=0, known_ids=(5, 9, 2, 7, 1), num_prompt=5, work=asking),
        Admit(slot=1, id="b", epoch=0, known_ids=(3, 3), num_prompt=2, work=GREEDY),
        Admit(
            slot=2,
            id="c",
            epoch=0,
            known_ids=(0, 0, 0),
            num_prompt=3,
            work=GREEDY,
            media=(replace(item, data={}),),
        ),
    )
    chunks = (
        Chunk(slot=0, id="a", epoch=0, start=0, count=3, ends="", new_blocks=((1, 2),)),
        Chunk(slot=1, id="b", epoch=0, start=0, count=2, ends="sample", wanted=2, new_blocks=((3,),)),
        Chunk(slot=2, id="c", epoch=0, start=0, count=3, ends="sample", wanted=2, new_blocks=((4,),)),
    )
    yield StepPlan(step=0, chunks=chunks, admits=admits, encodes=(item,))
    yield StepPlan(
        step=1,
        chunks=(
            Chunk(slot=0, id="a", epoch=0, start=3, count=2, ends="sample", wanted=2),
            Chunk(slot=1, id="b", epoch=0, start=2, count=1, ends="sample", wanted=2),
            Chunk(slot=2, id="c", epoch=0, start=3, count=1, ends="sample", wanted=2),
        ),
    )
    yield StepPlan(
        step=2,
        chunks=(
            Chunk(slot=2, id="c", epoch=0, start=4, count=1, ends="sample", wanted=2, new_blocks=((5,),)),
            Chunk(slot=0, id="a", epoch=0, start=5, count=1, ends="sample", wanted=2),
        ),
    )
    again = Admit(slot=1, id="d", epoch=1, known_ids=(8, 8, 8), num_prompt=3, work=asking)
    yield StepPlan(
        step=3,
        chunks=(
            Chunk(slot=1, id="d", epoch=1, start=0, count=4, ends="sample", wanted=2, new_ids=(6,), new_blocks=((3,),)),
            Chunk(
                slot=0,
                id="a",
                epoch=0,
                start=6,
                count=3,
                ends="sample",
                wanted=2,
                new_ids=(1, 2),
                drafts=2,
                new_blocks=((6,),),
            ),
        ),
        admits=(again,),
        releases=(1,),
    )
    yield StepPlan(step=4, chunks=(), releases=(0, 1, 2))


def _begin(runner: ModelRunner, plan: StepPlan) -> Step:
    runner.apply(plan)
    return runner.compute(plan)


def test_nothing_is_asked_of_the_device_while_a_step_begins() -> None:
    """Begin steps on "meta", which has no numbers; a copy outside of `Transfers` is refused."""
    watch = NoWaiting()
    transfers = Unread(watch)
    runner = _runner("meta", transfers)
    pending = []
    with watch:
        for plan in _story():
            pending.append(_begin(runner, plan))
    assert transfers.fetched == 4
    shapes = [
        [(row.id, len(row.token_ids), len(row.prompt_logprobs)) for row in each.result().rows] for each in pending
    ]
    assert shapes == [
        [("a", 0, 3), ("b", 1, 0), ("c", 1, 0)],
        [("a", 1, 1), ("b", 1, 0), ("c", 1, 0)],
        [("c", 1, 0), ("a", 1, 0)],
        [("d", 1, 2), ("a", 2, 0)],  # all tokens read as 1, so the first guess is right
        [],
    ]


def test_the_watch_sees_what_waits() -> None:
    """Prove that the test above would fail if there were something to find."""
    far = torch.zeros(3, device="meta")
    for question in (far.tolist, far.cpu, lambda: bool(far.any()), lambda: float(far[0])):
        with pytest.raises((RuntimeError, NotImplementedError)):
            question()
    with NoWaiting(), pytest.raises(WaitedError):
        torch.ones(3).to("meta")


def test_results_may_be_read_when_later_steps_have_begun() -> None:
    runner, other = _runner(), _runner()
    results = [runner.execute(plan) for plan in _story()]
    pending = [_begin(other, plan) for plan in _story()]
    assert [each.result() for each in pending] == results
    assert all(row.error is None for result in results for row in result.rows)
    assert len(results[0].rows[0].prompt_logprobs) == 3
    other.check()


class Marks:
    """A maker of events, which counts how often one was waited for."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.waited > 0

    def synchronize(self) -> None:
        self.waited += 1


def test_pinned_buffers_carry_what_torch_would() -> None:
    marks = Marks()
    packed = _runner(transfers=PinnedTransfers(pinned=False, event=lambda: marks))
    plain = _runner()
    pending = [_begin(packed, plan) for plan in _story()]
    assert (marks.recorded, marks.waited) == (4, 0)
    assert [each.result() for each in pending] == [plain.execute(plan) for plan in _story()]
    assert marks.waited == 4


def test_one_buffer_for_tensors_of_any_type_and_shape() -> None:
    given = [
        torch.arange(5, dtype=torch.int32),
        torch.zeros(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(12.0, dtype=torch.float64).view(3, 4).t(),
        torch.tensor(7),
    ]
    transfers = PinnedTransfers(pinned=False, event=Marks)
    for carried in (transfers.stage(given, torch.device("cpu")), transfers.fetch(given).wait()):
        assert [each.tolist() for each in carried] == [each.tolist() for each in given]
        assert [each.dtype for each in carried] == [each.dtype for each in given]
        offsets = [each.storage_offset() * each.element_size() for each in carried if each.numel()]
        assert all(offset % ALIGNMENT == 0 for offset in offsets)
        assert len({each.untyped_storage().data_ptr() for each in carried}) == 1


# ------------------------------------------------------------------------------------------------- executor


class SlowDevice:
    """A worker whose steps are queued at once and computed when the test lets them. `log` says what the host did."""

    def __init__(self, depth: int) -> None:
        self.log: list[str] = []
        self.computed = [threading.Event() for _ in range(8)]
        self.begun = [threading.Event() for _ in range(8)]
        self.fault: int | None = None
        self.depth = depth

    def start(self) -> ModelInfo:
        return None  # type: ignore[return-value]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.end(self.begin(plan))

    def begin(self, plan: StepPlan) -> SlowStep:
        self.log.append(f"begin {plan.step}")
        self.begun[plan.step].set()
        return SlowStep(self, plan.step)

    def end(self, step: SlowStep) -> StepResult:
        return step.result()

    def close(self, failed: bool = False) -> None:
        self.log.append("close")


class SlowStep(Step):
    def __init__(self, device: SlowDevice, number: int) -> None:
        self._device = device
        self._number = number

    def done(self) -> bool:
        return self._device.computed[self._number].is_set()

    def result(self) -> StepResult:
        assert self._device.computed[self._number].wait(120)
        if self._number == self._device.fault:
            raise RuntimeError("an illegal memory access")
        self._device.log.append(f"end {self._number}")
        return StepResult(self._number, (RowResult(id="a", epoch=0, token_ids=(self._number,)),))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[uni.UniExecutor, SlowDevice]]]:
    executors = []

    def start(depth: int) -> tuple[uni.UniExecutor, SlowDevice]:
        device, executor = SlowDevice(depth), uni.UniExecutor()
        monkeypatch.setattr(uni, "open_worker", lambda config, plugins: device)
        executors.append(executor)
        executor.start(resolve(Config(model=ModelConfig(model="none"))), None)  # type: ignore[arg-type]
        return executor, device

    yield start
    for executor in executors:
        executor.shutdown()


def test_a_step_begins_before_the_one_before_it_ends(started: Any) -> None:
    """Submit n + 1, then ask for n, as the loop drives depth 2."""
    executor, device = started(2)
    handles = [executor.submit(StepPlan(step=n, chunks=())) for n in range(2)]
    assert device.begun[1].wait(120)
    assert device.log == ["begin 0", "begin 1"]
    for n in range(2, 5):
        device.computed[n - 2].set()
        assert handles[n - 2].result().step == n - 2
        handles.append(executor.submit(StepPlan(step=n, chunks=())))
        assert device.begun[n].wait(120)
    for n in (3, 4):
        device.computed[n].set()
        assert handles[n].result().rows[0].token_ids == (n,)
    assert device.log[:6] == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3"]
    assert all(handle.done() for handle in handles)


def test_at_depth_1_a_step_ends_by_itself(started: Any) -> None:
    executor, device = started(1)
    device.computed[0].set()
    first, second = executor.submit(StepPlan(step=0, chunks=())), executor.submit(StepPlan(step=1, chunks=()))
    assert device.begun[1].wait(120)
    assert device.log == ["begin 0", "end 0", "begin 1"]
    assert first.done()
    device.computed[1].set()
    assert second.result().step == 1


def test_a_fault_of_the_device_ends_all_that_is_in_flight(started: Any) -> None:
    executor, device = started(2)
    device.fault = 0
    handles = [executor.submit(StepPlan(step=n, chunks=())) for n in range(2)]
    for event in device.computed:
        event.set()
    with pytest.raises(RuntimeError, match="illegal memory"):
        handles[0].result()
    with pytest.raises(EngineDead, match="illegal memory"):
        handles[1].result()
    with pytest.raises(EngineDead):
        executor.submit(StepPlan(step=2, chunks=()))


def test_a_result_that_is_asked_for_after_the_end(started: Any) -> None:
    executor, device = started(2)
    handle = executor.submit(StepPlan(step=0, chunks=()))
    assert device.begun[0].wait(120)
    executor.shutdown()
    with pytest.raises(EngineDead, match="stopped"):
        handle.result()


@pytest.fixture
def folder(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.mark.parametrize("depth", [1, 2])
def test_a_whole_engine_computes_the_same_at_any_depth(
    folder: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Run the scheduler, the loop, the executor and the runner, with blocks for few requests: some are preempted."""
    threads = torch.get_num_threads()
    marks = Marks()
    monkeypatch.setattr(CpuExecution, "depth", lambda self: depth)
    monkeypatch.setattr(CpuExecution, "transfers", lambda self: PinnedTransfers(pinned=False, event=lambda: marks))
    env = Environment(cpu_kvcache_space=0.01)
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            cache=CacheConfig(num_gpu_blocks_override=8),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16),
            env=env,
        )
    )
    prompts = [tuple(range(5 + n, 12 + 3 * n)) for n in range(5)]
    inbox = [
        (b"me", Submit(EngineRequest(id=str(n), prompt_ids=ids, work=replace(GREEDY, max_tokens=12), arrival=0.0)))
        for n, ids in enumerate(prompts)
    ]
    tokens: dict[str, list[int]] = {str(n): [] for n in range(len(prompts))}
    ended: list[str] = []

    class Client:
        def receive(self, timeout: float) -> list[Any]:
            return [inbox.pop(0)] if inbox else []

        def send(self, client: bytes, message: Any) -> None:
            for delta in message.deltas:
                tokens[delta.id] += delta.token_ids
                ended.extend([delta.id] if delta.finish is not None else [])

    plugins = discover()
    engine = build_engine(config, plugins, Client(), open_executor(config, plugins), cache_root=b"root")
    try:
        assert engine.loop.scheduler.limits.depth == depth
        engine.loop.run(lambda: len(ended) == len(prompts))
        engine.executor.call("check")
    finally:
        engine.executor.shutdown()
        torch.set_num_threads(threads)
    assert marks.recorded >= marks.waited > 12
    model = tiny_model("llama")
    for n, ids in enumerate(prompts):
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens[str(n)] == out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("tokens", "counts"), [(16, [6, 5, 5]), (3, [1, 1, 1]), (2048, [256, 256, 256])])
def test_the_step_that_is_rehearsed_is_the_largest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, counts: list[int]
) -> None:
    """Rehearse as many tokens and rows as there may be, each row as long as it may be; nothing of it is left."""
    threads, env = torch.get_num_threads(), Environment(cpu_kvcache_space=0.01)
    plans: list[StepPlan] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(CpuMemory, "rehearse", lambda self, step: step())
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: plans.append(plan) or execute(self, plan))
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=tokens),
            env=env,
        )
    )
    executor = uni.UniExecutor()
    try:
        executor.start(config, discover())
        (plan,) = plans
        assert [chunk.count for chunk in plan.chunks] == counts
        assert all(chunk.ends == "sample" for chunk in plan.chunks)
        executor.init_cache(20)
        executor.call("check")
    finally:
        executor.shutdown()
        torch.set_num_threads(threads)
