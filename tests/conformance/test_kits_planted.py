"""A kit is trusted because it catches planted faults: at least three for each kind. Parsers have theirs elsewhere."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pydantic
import pytest
import torch
from fastapi import APIRouter

from ferrule import schema
from ferrule.engine.cache import KVCacheManager, PrefixHit
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import CheckpointError, ConfigError, EngineDead, UnavailableError
from ferrule.interfaces.adapters import AdaptedLayer, Add
from ferrule.interfaces.dialect import Dialect, encode
from ferrule.interfaces.hooks import AccessRequest, Hooks
from ferrule.interfaces.hub import Choose, Repository
from ferrule.interfaces.platform import Copies, DeviceMemory, Execution, Transfers
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule.interfaces.response_store import StoredResponse
from ferrule.interfaces.router import JSON, Access, CurrentRequest, EventStream, Router, RouterContext, needs
from ferrule.interfaces.sampler import LogitsProcessor, LogprobsMode, SampleBatch, Sampled
from ferrule.interfaces.scheduler import RequestView, Scheduler, SchedulingPolicy
from ferrule.interfaces.service import Generate, Outputs, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.types import Adapter, Pooling, StepPlan
from ferrule_plugins.adapter_bank.lora import LoraBank
from ferrule_plugins.adapter_bank.lora.pace import Pace
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_plugins.executor.uni import UniExecutor
from ferrule_plugins.hub.huggingface import HuggingFace
from ferrule_plugins.load_format.safetensors import Safetensors
from ferrule_plugins.lora_resolver.base_model import is_for
from ferrule_plugins.lora_resolver.filesystem import FilesystemResolver
from ferrule_plugins.model.bert import Bert
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cpu import CpuPlatform
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_plugins.quantization.integers import Int8
from ferrule_plugins.response_store.memory import MemoryStore
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_plugins.tokenizer.auto import AutoTokenizers, FastTokenizer
from ferrule_quant import Online
from ferrule_testkit.kits import KVCacheKit, kit_of
from ferrule_testkit.kits.run import FAILED, OK, SKIPPED, run_kit
from tests.conformance import planted_commands, planted_speculators
from tests.fakes.resolvers import adapter_in_a_folder
from tests.simulate.bugs import BUGS

# ------------------------------------------------------------------------------------------ attention


class IgnoresTheWindow(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        plain = type(options)(scale=options.scale, soft_cap=options.soft_cap, alibi_slopes=options.alibi_slopes)
        return super().run(q, k, v, cache, plan, plain)


class ReadsDeadBlocks(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        out = super().run(q, k, v, cache, plan, options)
        first = cache[plan.block_table[:, 0].long()].sum()
        return out + 0 * first.to(out.dtype)


class AttendsBeforeItWrites(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        before = cache.clone()
        super().run(q, k, v, cache, plan, options)
        before[before.isnan()] = 0
        return super().run(q, 0 * k, v, before, plan, options)


class SeesOtherChunks(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        return super().run(q, k, v, cache, plan, replace(options, chunk=0))


class TakesTheWrongPartOfLatents(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        return (
            super().run(q, k, v, cache, plan, options).roll(1, -1)
            if cache.shape[2] == 1
            else super().run(q, k, v, cache, plan, options)
        )


class WritesTheNullBlock(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        cache[0] = 1
        return super().run(q, k, v, cache, plan, options)


class SeesOnlyWhatIsBefore(TorchSDPA):
    def run_uncached(self, q, k, v, query_start, query_lens, options):
        halves = [each for length in query_lens for each in (length // 2, length - length // 2) if each]
        return super().run_uncached(q, k, v, query_start, tuple(halves), options)


class MixesHeads(TorchSDPA):
    def run(self, q, k, v, cache, plan, options):
        return super().run(q, k.flip(1), v, cache, plan, options)


# ------------------------------------------------------------------------------------------ model


class SeesNeighbours(Llama):
    def forward(self, ids, ctx):
        hidden = super().forward(ids, ctx)
        return hidden + 0.01 * hidden.mean(0)


class ForgetsWherePiecesAre(Llama):
    def forward(self, ids, ctx):
        self.positions = ctx.positions - ctx.positions.min()
        return super().forward(ids, _Context(ctx, self.positions))


class _Context:
    def __init__(self, ctx: Any, positions: torch.Tensor) -> None:
        self._ctx, self.positions, self.lengths = ctx, positions, ctx.lengths
        self.attend = ctx.attend


class LeavesOutANorm(Llama):
    def load_weights(self, weights):
        return super().load_weights(
            (n, torch.ones_like(t) if n.endswith("model.norm.weight") else t) for n, t in weights
        )


class PoolsWhatIsNotItsRow(Bert):
    def pool(self, hidden, rows):
        return super().pool(hidden, [replace(row, first=0) for row in rows])


class PoolsByTheFirstAlways(Bert):
    def __init__(self, ctx):
        super().__init__(replace(ctx, pooling=replace(ctx.pooling, kind="cls")))


class NormalizesAlways(Bert):
    def pool(self, hidden, rows):
        return super().pool(hidden, [replace(row, work=Pooling(normalize=True)) for row in rows])


class KeepsNothingOfPieces(Bert):
    splits_prompts = True


class SkipsUnknownTensors(Llama):
    def load_weights(self, weights):
        return super().load_weights((n, t) for n, t in weights if not n.startswith("no."))


class HalfPrecisionLogits(Llama):
    def logits(self, hidden):
        return super().logits(hidden).half()


# ------------------------------------------------------------------------------------------ load format


class RoundsToHalf(Safetensors):
    def tensors(self, folder, model, options):
        for name, tensor in super().tensors(folder, model, options):
            yield name, tensor.half().to(tensor.dtype) if tensor.is_floating_point() else tensor


class GivesTheFirstTwice(Safetensors):
    def tensors(self, folder, model, options):
        first = None
        for item in super().tensors(folder, model, options):
            first = first or item
            yield item
        if first is not None:
            yield first


class SwallowsOptions(Safetensors):
    def tensors(self, folder, model, options):
        return super().tensors(folder, model, {})


class SkipsWhatIsDamaged(Safetensors):
    def tensors(self, folder, model, options):
        try:
            yield from super().tensors(folder, model, options)
        except CheckpointError:
            return


class RaisesForNoFolder(Safetensors):
    @classmethod
    def refuses(cls, folder):
        return super().refuses(folder / ".")


# ------------------------------------------------------------------------------------------ tokenizer


class _Tokenizer(FastTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(self.before(text), add_special_tokens=add_special_tokens)

    def before(self, text: str) -> str:
        return text


class _Strips(_Tokenizer):
    def before(self, text: str) -> str:
        return text.strip()


class _Shares(_Tokenizer):
    last = ""

    def before(self, text: str) -> str:
        self.last = text
        time.sleep(1e-3)
        return self.last


class _NarrowVocabulary(_Tokenizer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.vocab_size -= 4


class _ShowsSpecials(_Tokenizer):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(ids, skip_special_tokens=False)


class _Source(AutoTokenizers):
    made: ClassVar[type] = _Tokenizer

    def open(self, folder, options):
        tokenizer = super().open(folder, options)
        tokenizer.__class__ = self.made
        if self.made is _NarrowVocabulary:
            tokenizer.vocab_size -= 4
        return tokenizer


class StripsText(_Source):
    made = _Strips


class SharesBetweenThreads(_Source):
    made = _Shares


class CountsTooFew(_Source):
    made = _NarrowVocabulary


class ShowsSpecialTokens(_Source):
    made = _ShowsSpecials


class RaisesOSError(AutoTokenizers):
    def open(self, folder, options):
        (folder / "tokenizer.json").read_text()
        return super().open(folder, options)


# ------------------------------------------------------------------------------------------ hub


class TellsTheToken(HuggingFace):
    def fetch(self, repository: Repository, choose: Choose) -> Path:
        try:
            return super().fetch(repository, choose)
        except CheckpointError as error:
            raise CheckpointError(f"{error.message} Asked with {repository.token}.") from error


class ForgetsTheRevision(HuggingFace):
    def fetch(self, repository: Repository, choose: Choose) -> Path:
        return super().fetch(replace(repository, revision="v1"), choose)


class ChoosesForItself(HuggingFace):
    def fetch(self, repository: Repository, choose: Choose) -> Path:
        return super().fetch(repository, lambda names: ["*.bin"])


class ListsHalf(HuggingFace):
    def fetch(self, repository: Repository, choose: Choose) -> Path:
        return super().fetch(repository, lambda names: choose(names[::2]))


class RaisesForNames(HuggingFace):
    def refuses(self, name: str) -> str | None:
        return None if name[0].isalpha() else "has other names"


# ------------------------------------------------------------------------------------------ adapter_bank


class AddsToEveryRow(LoraBank):
    def layer(self, layer: AdaptedLayer) -> Add | None:
        add = super().layer(layer)
        return add and (lambda x, y, slots: add(x, y, slots.clamp(min=1)))


class DependsOnTheFirstRow(LoraBank):
    def layer(self, layer: AdaptedLayer) -> Add | None:
        add = super().layer(layer)
        return add and (lambda x, y, slots: add(x, y, slots[:1].expand(len(slots))))


class OneSlotForAll(LoraBank):
    def load(self, slot: int, adapter: Adapter) -> None:
        super().load(1, adapter)


class ClearsNothing(LoraBank):
    def _clear(self, slot: int, pace: Pace) -> None:
        pass


class LoadsWhatIsRead(LoraBank):
    def read(self, adapter: Adapter) -> None:
        self.load(1, adapter)


class BreaksForMissingFolders(LoraBank):
    def read(self, adapter: Adapter) -> None:
        Path(adapter.path, "adapter_config.json").read_bytes()
        super().read(adapter)


class ACopyHasItsOwn(LoraBank):
    def layer(self, layer: AdaptedLayer) -> Add | None:
        self._matrices.pop(layer.name, None)
        return super().layer(layer)


class KeepsWhatIsThere(LoraBank):
    def load(self, slot: int, adapter: Adapter) -> None:
        if not any(bool(weights.ranks[slot].any()) for weights in self._matrices.values()):
            super().load(slot, adapter)


class ForgetsWhatIsDropped(LoraBank):
    def load(self, slot: int, adapter: Adapter) -> None:
        if not self._host or adapter.name in self._host:
            super().load(slot, adapter)


# ------------------------------------------------------------------------------------------ response_store


class OneOwner(MemoryStore):
    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return super().get(owner, response_id) or super().get("me", response_id)


class LastEndCounts(MemoryStore):
    def update(self, response: StoredResponse) -> bool:
        return super().update(response) or (self.delete(response.owner, response.id) and self.add(response))


class ForgetsNothing(MemoryStore):
    def _evict(self) -> None:
        pass


class GivesEventsTwice(MemoryStore):
    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        return super().events(owner, response_id, max(0, start - 1))


class ReplacesIds(MemoryStore):
    def add(self, response: StoredResponse) -> bool:
        self.delete(response.owner, response.id)
        return super().add(response)


class SharesNothing(MemoryStore):
    shared = True


# ------------------------------------------------------------------------------------------ lora_resolver


class InAFolder(FilesystemResolver):
    conformance = {"world": staticmethod(adapter_in_a_folder)}


class FollowsPaths(InAFolder):
    async def resolve(self, lora_name: str) -> Path | None:
        folder = Path(str(self.context.cache_dir), lora_name)
        return folder if is_for(folder, self.context.base_models) else None


class ForAnyModel(InAFolder):
    async def resolve(self, lora_name: str) -> Path | None:
        folder = Path(str(self.context.cache_dir), lora_name)
        plain = lora_name.isalpha() and lora_name.isascii()
        return folder if plain and folder.is_dir() else None


class RaisesForUnknown(InAFolder):
    async def resolve(self, lora_name: str) -> Path | None:
        found = await super().resolve(lora_name)
        if found is None:
            raise FileNotFoundError(lora_name)
        return found


class StaysBusy(InAFolder):
    _busy = False

    async def resolve(self, lora_name: str) -> Path | None:
        if self._busy:
            return None
        self._busy = True
        await asyncio.sleep(0)
        self._busy = False  # not where the call is cancelled
        return await super().resolve(lora_name)


class FindsNothing(InAFolder):
    async def resolve(self, lora_name: str) -> Path | None:
        return None


# ------------------------------------------------------------------------------------------ quantization


class Wrapped(Online):
    """A layer's scheme that the method under test changes."""

    fault = ""

    def pack(self, layer: Any) -> None:
        weight = layer.weight
        if self.fault == "in place":
            weight.mul_(0.5)
        super().pack(layer)
        if self.fault == "keeps":
            layer.weight = weight

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "batch" or self.fault == f"batch in {x.dtype}":
            largest = x.nan_to_num().abs().max()
            return super().matmul(layer, (x / largest * 127).round()) * largest / 127
        y = super().matmul(layer, x)
        if self.fault == "bias" and layer.bias is not None:
            return y - layer.bias
        if self.fault == "coarse":
            return y * 1.2
        if self.fault == "scale":
            bias = 0 if layer.bias is None else layer.bias
            return ((y - bias) * 1.02 + bias).to(y.dtype)
        if self.fault == "a little of the batch":
            return y + x.float().nan_to_num().abs().max().to(y.dtype) * 1e-5  # bfloat16 cannot show it
        return y

    def rows(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if self.fault != "rows":
            return super().rows(layer)
        return lambda ids: self.matrix.rows(ids.flip(0), self.given)


def quantizing(fault: str) -> type:
    """Return `int8` with a fault in it."""

    class Faulty(Int8):
        def scheme(self, layer: LinearLayer) -> LinearScheme | None:
            made = super().scheme(layer)
            scheme = Wrapped(self.form, self.shared, torch.float32 if layer.head else None)
            scheme.fault = fault
            return scheme if made is not None else None

    return Faulty


class ReadsNoRows(Int8):
    def embedding(self, layer: LinearLayer) -> LinearScheme | None:
        return self.scheme(layer)


class OneForAll(Int8):
    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        self.one = getattr(self, "one", None) or super().scheme(layer)
        return self.one


class RefusesByRaising(Int8):
    @classmethod
    def refuses(cls, config, caps, dtype):
        return {torch.bfloat16: None, torch.float16: None, torch.float32: None}[dtype]


# ------------------------------------------------------------------------------------------ scheduling


class NotPure(FcfsPolicy):
    count = 0

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        self.count += 1
        return (self.count,)


class NotANumber(FcfsPolicy):
    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.num_prompt / view.num_computed if view.num_computed else math.nan,)


class NamesNobody(SchedulingPolicy):
    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.sequence,)

    def victim(self, running: Sequence[RequestView]) -> str:
        return running[1].id if len(running) > 1 else "r0"


class BudgetOfNothing(FcfsPolicy):
    def budget(self, running: int, waiting: int, limit: int) -> int:
        return limit // (1 + running)


class WithTheDefaults(Scheduler):
    """The seven methods that must be written, asked for nothing that the documentation rules out."""

    def __init__(self, limits, policy, plugins=None):
        super().__init__(limits, policy, plugins)
        self.inner = DefaultScheduler(limits, policy)

    def add(self, request, now):
        try:
            self.inner.add(request, now)
        except ValueError as error:
            if "already here" not in str(error):
                raise AssertionError(f"the gate does not admit such a request: {error}") from error
            raise

    def cancel(self, ids, reason, now):
        return self.inner.cancel(ids, reason, now)

    def schedule(self, now):
        return self.inner.schedule(now)

    def commit(self, plan, result, now):
        return self.inner.commit(plan, result, now)

    def has_work(self):
        return self.inner.has_work()

    def stats(self):
        return self.inner.stats()

    def check(self):
        self.inner.check()


class AddsTwice(WithTheDefaults):
    def add(self, request, now):
        with suppress(ValueError):
            super().add(request, now)


# ------------------------------------------------------------------------------------------ KV cache


class SharesAcrossSalts(KVCacheManager):
    def chain(self, request):
        return super().chain(msgspec.structs.replace(request, cache_salt=None))


class PublishesTooEarly(KVCacheManager):
    def confirm(self, id, ids, computed):
        return super().confirm(id, [*ids, 0, 0, 0], computed + 2 if computed < len(ids) else computed)


class ForgetsABlock(KVCacheManager):
    def release(self, id):
        self._requests[id].tables[0] = self._requests[id].tables[0][:-1]
        super().release(id)


class HitsOneBlockTooMuch(KVCacheManager):
    def match(self, chain, ids):
        hit = super().match(chain, ids)
        return PrefixHit(hit.tokens + self._size, tuple((*b, 1) for b in hit.blocks)) if hit.tokens else hit


# ------------------------------------------------------------------------------------------ platform


class RefusesNow(CpuPlatform):
    calls = 0

    @classmethod
    def refuses(cls):
        cls.calls += 1
        return f"asked {cls.calls} times"


class SlowToRefuse(CpuPlatform):
    @classmethod
    def refuses(cls):
        total = 0
        for n in range(30_000):
            total += n
        return "too slow" if total < 0 else None


class AnyType(CpuPlatform):
    def dtype(self, requested, checkpoint):
        return getattr(torch, requested, torch.float32)


class KeyErrorForTypes(CpuPlatform):
    def dtype(self, requested, checkpoint):
        try:
            return super().dtype(requested, checkpoint)
        except ConfigError:
            raise KeyError(requested) from None


class Backwards(CpuPlatform):
    """A platform that fetches tensors in another order."""

    def execution(self) -> Execution:
        class Shuffled(Transfers):
            def fetch(self, tensors: Any) -> Any:
                return Copies([tensor.cpu() for tensor in reversed(tensors)])

        class Shuffling(Execution):
            def transfers(self) -> Transfers:
                return Shuffled()

        return Shuffling()


class NoMemory(CpuPlatform):
    def memory(self):
        class Full(DeviceMemory):
            def cache_bytes(self, config):
                return 0

        return Full()


# ------------------------------------------------------------------------------------------ executor


class NewestFirst(UniExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[_Lazy] = []

    def submit(self, plan: StepPlan):
        self.waiting.append(_Lazy(self, plan))
        return self.waiting[-1]

    def run_all(self) -> None:
        while self.waiting:
            lazy = self.waiting.pop()
            lazy.handle = super().submit(lazy.plan)


class _Lazy:
    def __init__(self, executor: NewestFirst, plan: StepPlan) -> None:
        self.executor, self.plan = executor, plan
        self.handle: Any = None

    def done(self) -> bool:
        return self.handle is not None and self.handle.done()

    def result(self):
        self.executor.run_all()
        return self.handle.result()


class WithAWorker(UniExecutor):
    """One with a process beside it, which it watches."""

    conformance: ClassVar[dict[str, Any]] = {"patience": 120.0}

    def start(self, config, plugins):
        info = super().start(config, plugins)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return info

    def submit(self, plan: StepPlan):
        self.check_health()
        return super().submit(plan)

    def check_health(self) -> None:
        super().check_health()
        if hasattr(self, "child") and self.child.poll() is not None:
            raise EngineDead("the worker has ended")

    def shutdown(self) -> None:
        super().shutdown()
        if hasattr(self, "child"):
            self.child.kill()
            self.child.wait()


class DoesNotWatch(WithAWorker):
    conformance: ClassVar[dict[str, Any]] = {"patience": 0.5}

    def check_health(self) -> None:
        UniExecutor.check_health(self)


class LeavesAProcess(WithAWorker):
    conformance: ClassVar[dict[str, Any]] = {"patience": 0.5}

    def shutdown(self) -> None:
        UniExecutor.shutdown(self)


class ShutdownHangs(UniExecutor):
    conformance: ClassVar[dict[str, Any]] = {"patience": 0.5}

    def shutdown(self) -> None:
        super().shutdown()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(3)


class FaultsAreForgotten(UniExecutor):
    conformance: ClassVar[dict[str, Any]] = {"patience": 0.5}

    def check_health(self) -> None:
        """Report good health, whatever happened."""


# ------------------------------------------------------------------------------------------ sampler


class Biased(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return super().sample(logits * 1.15, batch)


class NoiseOfTheRow(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        rows = [
            type(row)(
                row.slot,
                msgspec.structs.replace(row.sampling, seed=row.sampling.seed + n),
                row.num_prompt,
                row.position,
            )
            for n, row in enumerate(batch.rows)
        ]
        return super().sample(logits, SampleBatch(rows, batch.history))


class DrawsOnce(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return super().sample(logits, replace(batch, rows=[replace(row, draw=0) for row in batch.rows]))


class BelievesTheGuess(DefaultSampler):
    def verify(self, logits: torch.Tensor, batch: SampleBatch, guesses: torch.Tensor) -> Sampled:
        sampled = super().verify(logits, batch, guesses)
        return replace(sampled, tokens=torch.where(guesses < 0, sampled.tokens, guesses))


class GuessesMoreOften(DefaultSampler):
    """A sampler that draws guesses too often, which greedy rows do not show."""

    def verify(self, logits: torch.Tensor, batch: SampleBatch, guesses: torch.Tensor) -> Sampled:
        rows = (guesses >= 0).nonzero().squeeze(1)
        logits[rows, guesses[rows]] += 0.3
        return super().verify(logits, batch, guesses)


class LeansOnNeighbours(DefaultSampler):
    """A sampler that depends on neighbours by so little that rows of equal kind hardly ever show it."""

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return super().sample(logits + 1e-3 * logits.nan_to_num().mean(0), batch)


class SharesTheTemperature(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        hottest = max(row.sampling.temperature for row in batch.rows)
        rows = [
            msgspec.structs.replace(row, sampling=msgspec.structs.replace(row.sampling, temperature=hottest))
            if row.sampling.temperature > 0
            else row
            for row in batch.rows
        ]
        return super().sample(logits, SampleBatch(rows, batch.history))


class KeepsTheFirst(DefaultSampler):
    def _prepare(self, row, logits):
        if row.slot in self._prepared:
            return self._prepared[row.slot]
        return super()._prepare(row, logits)


class HidesNaN(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return super().sample(logits.nan_to_num(0.0, 0.0, 0.0), batch)


class LogprobsAfterProcessing(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        found = super().sample(logits, batch)
        asking = [row for row, each in enumerate(batch.rows) if each.sampling.logprobs is not None]
        shown = logits[asking].log_softmax(-1) if asking else None
        return Sampled(found.tokens, found.finite, shown, found.errors)


class ForgetsTheMode(DefaultSampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return super().sample(logits, replace(batch, logprobs_mode=LogprobsMode.RAW_LOGPROBS))


class Push(LogitsProcessor):
    """A correct processor, which makes one token likelier."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = float(by)

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        logits[known_ids[-1] % len(logits)] += self.by
        return logits


class PushChecked(Push):
    def __init__(self, **given: Any) -> None:
        if set(given) - {"by"}:
            raise ValueError("only 'by'")
        super().__init__(**given)


class CountsInTheClass(PushChecked):
    seen: ClassVar[list[int]] = []

    def apply(self, known_ids, num_prompt, logits):
        self.seen.append(1)
        return super().apply(known_ids, num_prompt, logits).roll(len(self.seen))


class BansForEveryone(PushChecked):
    """A processor that bans one request's tokens for all: the other promises soon have all of them said."""

    banned: ClassVar[set[int]] = set()

    def apply(self, known_ids, num_prompt, logits):
        self.banned.update(known_ids[num_prompt:])
        logits[[token for token in self.banned if token]] -= 5.0
        return logits


class CountsThePrompt(PushChecked):
    """A processor that claims to look at generated tokens only."""

    conformance: ClassVar[dict[str, Any]] = {"ignores_prompt": True}

    def apply(self, known_ids, num_prompt, logits):
        logits[sorted(set(known_ids))] -= self.by
        return logits


class CountsTheGenerated(CountsThePrompt):
    """A correct processor, which counts generated tokens."""

    def apply(self, known_ids, num_prompt, logits):
        return super().apply(known_ids[num_prompt:], 0, logits)


class AppendsToTheIds(PushChecked):
    def apply(self, known_ids, num_prompt, logits):
        known_ids.append(0)
        return logits


class GivesDoubles(PushChecked):
    def apply(self, known_ids, num_prompt, logits):
        return logits.double()


# ------------------------------------------------------------------------------------------ router


class Body(schema.Body):
    prompt: str = ""
    count: schema.Int = 1


async def admitted(ctx: RouterContext, request: Generate) -> Outputs:
    return (await ctx.service.admit(request)).outputs()


class Echo(Router):
    """A correct router: one route that generates, and one with a parameter."""

    path = "/echo"
    access = Access.KEY

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter()

        @routes.post(self.path, summary="Echo.", dependencies=[needs(self.access)])
        async def echo(body: Body, info: CurrentRequest) -> JSON:
            return await self.answer(ctx, body)

        @routes.get("/echo/{name}", summary="One.")
        async def one(name: str) -> dict[str, str]:
            return {"name": name}

        return routes

    async def answer(self, ctx: RouterContext, body: Body) -> JSON:
        params = SamplingParams(max_tokens=4)
        outputs = await admitted(ctx, Generate(prompts=(Prompt(text=body.prompt or "x"),), params=params))
        try:
            return JSON([output.token_ids async for output in outputs])
        finally:
            await outputs.aclose()


class OwnErrorShape(Echo):
    async def answer(self, ctx, body):
        try:
            return await super().answer(ctx, body)
        except Exception as error:
            return JSON({"detail": str(error)}, status_code=500)


class OwnForm(Dialect):
    paths = ("/echo/",)
    key_headers = ("x-echo-key",)
    media_type = "application/x-ndjson"
    ping = last = b""

    def error(self, failure):
        return {"oh": failure.message, "no": failure.status}

    def event(self, content):
        return encode(content) + b"\n"


class EchoInOwnForm(Echo):
    """A correct router with a separate dialect, JSON lines."""

    words: Dialect = OwnForm()

    def dialect(self, ctx: RouterContext) -> Dialect:
        return self.words

    async def answer(self, ctx: RouterContext, body: Body) -> EventStream:
        params = SamplingParams(max_tokens=4)
        outputs = await admitted(ctx, Generate(prompts=(Prompt(text=body.prompt or "x"),), params=params))
        return EventStream(outputs)


class SaysNothingOfOverload(EchoInOwnForm):
    class words(OwnForm):
        def error(self, failure):
            return {"oh": "" if failure.status == 429 else failure.message, "no": failure.status}

    def dialect(self, ctx):
        return self.words()


class AnswersInAnotherForm(EchoInOwnForm):
    async def answer(self, ctx, body):
        try:
            return await super().answer(ctx, body)
        except UnavailableError as error:
            return JSON({"error": {"message": str(error), "code": 503}}, status_code=503)


class CoversUpAFailure(EchoInOwnForm):
    async def answer(self, ctx, body):
        stream = await super().answer(ctx, body)

        async def covered():
            try:
                async for output in stream.events:
                    yield output
            except Exception:
                yield {"done": True}

        return EventStream(covered())


class ClosesOnlyWhatHasBegun(EchoInOwnForm):
    async def answer(self, ctx, body):
        stream = await super().answer(ctx, body)

        async def pieces():
            async with aclosing(stream.events):
                async for output in stream.events:
                    yield output

        return EventStream(pieces())


class LeavesRequestsRunning(Echo):
    async def answer(self, ctx, body):
        params = SamplingParams(max_tokens=4)
        outputs = await admitted(ctx, Generate(prompts=(Prompt(text="hello"),), params=params))
        self.kept = outputs
        return JSON([await anext(outputs)])


class OpenToEverybody(Echo):
    access = Access.PUBLIC


class TakesAnothersRoute(Echo):
    path = "/v1/completions"


class FailsOnNumbers(Echo):
    async def answer(self, ctx, body):
        return JSON({"share": 1 / body.count})


class RefusesNull(Echo):
    def router(self, ctx):
        routes = APIRouter()

        @routes.post("/echo", summary="Echo.")
        async def echo(body: NoNull) -> JSON:
            return JSON({})

        return routes


class NoNull(pydantic.BaseModel):
    prompt: str
    count: int = 1


class NullIsTheMost(Echo):
    def router(self, ctx):
        routes = APIRouter()

        @routes.post("/echo", summary="Echo.")
        async def echo(body: Limited) -> JSON:
            params = SamplingParams(max_tokens=100 if body.count is None else body.count)
            outputs = await admitted(ctx, Generate(prompts=(Prompt(text="x"),), params=params))
            return JSON([output.token_ids async for output in outputs])

        return routes


class Limited(pydantic.BaseModel):
    prompt: str = ""
    count: int | None = 1


class AsksTheEngineTooEarly(Echo):
    def router(self, ctx):
        ctx.service.health()
        return super().router(ctx) if ctx.service.names else APIRouter()


# ------------------------------------------------------------------------------------------ stat logger


class RawLabels(Prometheus):
    def exposition(self):
        kind, text = super().exposition()
        name = (self.config.model.served_model_name or ("m",))[0]
        return kind, text + f'mine{{model_name="{name}"}} 1\n'


class CountsOnlyTheLast(Prometheus):
    def on_finish(self, stats):
        self._finished = dict.fromkeys(self._finished, 0)
        super().on_finish(stats)


class ASeriesForEachRequest(Prometheus):
    requests = 0

    def on_finish(self, stats):
        super().on_finish(stats)
        self.requests += 1

    def exposition(self):
        kind, text = super().exposition()
        return kind, text + "".join(f'mine{{request="{n}"}} 1\n' for n in range(self.requests))


class DividesByTheTime(Prometheus):
    def on_http(self, stats):
        self.rate = stats.sent / stats.seconds
        super().on_http(stats)


class KnowsOneReason(Prometheus):
    def on_rejected(self, reason):
        super().on_rejected({"max_num_queued_reqs": reason}[reason])


class CountsCallsTwice(Prometheus):
    def on_http(self, stats):
        super().on_http(stats)
        super().on_http(stats)


class CountsRefusalsTwice(Prometheus):
    def on_rejected(self, reason):
        super().on_rejected(reason)
        super().on_rejected(reason)


class SilentWithoutLogStats(Prometheus):
    def on_http(self, stats):
        if not self.config.observability.disable_log_stats:
            super().on_http(stats)


class DividesByTheTokens(Prometheus):
    def on_finish(self, stats):
        self.mean = stats.end_to_end / stats.generation_tokens
        super().on_finish(stats)


# ------------------------------------------------------------------------------------------ hooks


class Misspelt(Hooks):
    def request_finishd(self, request_id: str) -> None:
        """Never called."""


class OtherParameters(Hooks):
    def step_stats(self, stats: Any, engine_number: int) -> None:
        """Take a parameter that the hook does not have."""


class StumblesOverStrangers(Hooks):
    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def request_admitted(self, request_id: str, prompt_tokens: int) -> None:
        self.known[request_id] = prompt_tokens

    def request_finished(self, request_id: str) -> None:
        del self.known[request_id]


class AnswersWithAWord(Hooks):
    def authorise(self, access: AccessRequest) -> Any:
        return "yes"


class DeniesByTurns(Hooks):
    turn = False

    def authorise(self, access: AccessRequest) -> bool | None:
        self.turn = not self.turn
        return False if self.turn else None


def faults() -> Iterator[tuple[str, type, str]]:
    """Yield (kind, broken plugin, the promise that it breaks)."""
    yield "attention", IgnoresTheWindow, "test_windows_soft_caps_slopes_and_sinks"
    yield "attention", ReadsDeadBlocks, "test_windows_soft_caps_slopes_and_sinks"
    yield "attention", SeesOtherChunks, "test_windows_soft_caps_slopes_and_sinks"
    yield "attention", TakesTheWrongPartOfLatents, "test_values_that_are_a_part_of_the_keys"
    yield "attention", AttendsBeforeItWrites, "test_equals_the_definition"
    yield "attention", WritesTheNullBlock, "test_the_null_block_stays_zero"
    yield "attention", SeesOnlyWhatIsBefore, "test_rows_without_a_cache"
    yield "attention", MixesHeads, "test_groups_of_heads"
    yield "model", SeesNeighbours, "test_a_row_is_as_it_is_alone"
    yield "model", SeesNeighbours, "test_a_prompt_in_chunks_is_the_prompt"
    yield "model", ForgetsWherePiecesAre, "test_a_prompt_in_chunks_is_the_prompt"
    yield "model", LeavesOutANorm, "test_a_change_of_any_weight_changes_the_answer"
    yield "model", LeavesOutANorm, "test_equals_transformers"
    yield "model", SkipsUnknownTensors, "test_weights_that_do_not_fit_are_named"
    yield "model", PoolsWhatIsNotItsRow, "test_a_row_is_as_it_is_alone"
    yield "model", PoolsByTheFirstAlways, "test_equals_transformers"
    yield "model", NormalizesAlways, "test_vectors_are_float32_rows"
    yield "model", KeepsNothingOfPieces, "test_what_is_cached_is_told"
    yield "model", HalfPrecisionLogits, "test_logits_are_float32_rows"
    yield "load_format", RoundsToHalf, "test_every_tensor_once_and_bit_equal"
    yield "load_format", GivesTheFirstTwice, "test_every_tensor_once_and_bit_equal"
    yield "load_format", SwallowsOptions, "test_unknown_options_are_refused"
    yield "load_format", SkipsWhatIsDamaged, "test_damaged_files_are_named"
    yield "load_format", RaisesForNoFolder, "test_refusal_is_an_answer"
    yield "tokenizer", StripsText, "test_texts_come_back"
    yield "tokenizer", SharesBetweenThreads, "test_threads_do_not_disturb_each_other"
    yield "tokenizer", CountsTooFew, "test_special_tokens"
    yield "tokenizer", ShowsSpecialTokens, "test_special_tokens"
    yield "tokenizer", RaisesOSError, "test_what_is_not_there_is_named"
    yield "hub", TellsTheToken, "test_a_repository_that_is_not_there_is_refused"
    yield "hub", ForgetsTheRevision, "test_the_revision_is_the_one_that_was_asked_for"
    yield "hub", ForgetsTheRevision, "test_a_revision_that_is_not_there_is_refused"
    yield "hub", ChoosesForItself, "test_the_chosen_files_come_unchanged"
    yield "hub", ListsHalf, "test_all_names_are_offered"
    yield "hub", RaisesForNames, "test_names_are_judged_in_words"
    yield "quantization", quantizing("batch"), "test_a_row_is_as_it_is_alone"
    yield "quantization", quantizing("batch in torch.float32"), "test_a_row_is_as_it_is_alone"
    yield "quantization", quantizing("batch in torch.float16"), "test_a_row_is_as_it_is_alone"
    yield "quantization", quantizing("a little of the batch"), "test_a_row_is_as_it_is_alone"
    yield "quantization", quantizing("bias"), "test_products_are_near"
    yield "quantization", quantizing("scale"), "test_products_are_near"
    yield "quantization", quantizing("coarse"), "test_products_are_near"
    yield "quantization", quantizing("rows"), "test_rows_are_those_of_the_weight"
    yield "quantization", ReadsNoRows, "test_rows_are_those_of_the_weight"
    yield "quantization", quantizing("keeps"), "test_memory_is_saved"
    yield "quantization", quantizing("in place"), "test_shared_weights_are_left_alone"
    yield "quantization", OneForAll, "test_each_layer_has_its_own_scheme"
    yield "quantization", RefusesByRaising, "test_refusal_is_an_answer"
    yield "policy", NotPure, "test_the_policy_is_pure"
    yield "policy", NotANumber, "test_keys_can_be_compared"
    yield "policy", NamesNobody, "test_the_victim_is_one_of_those_asked_about"
    yield "policy", NamesNobody, "test_random_work_one_step_at_a_time"
    yield "policy", BudgetOfNothing, "test_budgets_are_within_their_bounds"
    yield "scheduler", BUGS["skip-decref"], "test_random_work_one_step_at_a_time"
    yield "scheduler", BUGS["stale-epoch-accepted"], "test_random_work_with_three_steps_in_flight"
    yield "scheduler", BUGS["priority-inverted"], "test_the_order_of_the_policy"
    yield "scheduler", BUGS["oldest-preempted"], "test_chaos_and_preemption"
    yield "scheduler", AddsTwice, "test_random_work_one_step_at_a_time"
    yield "platform", RefusesNow, "test_refusal_is_an_answer"
    yield "platform", SlowToRefuse, "test_refusal_is_cheap"
    yield "platform", AnyType, "test_unknown_types_are_refused"
    yield "platform", KeyErrorForTypes, "test_unknown_types_are_refused"
    yield "platform", NoMemory, "test_the_cache_fits"
    yield "platform", Backwards, "test_tensors_cross_whole"
    yield "executor", NewestFirst, "test_plans_run_in_the_order_of_submission"
    yield "executor", DoesNotWatch, "test_a_lost_worker_is_told_in_time"
    yield "executor", LeavesAProcess, "test_shutdown_is_idempotent_and_bounded"
    yield "executor", ShutdownHangs, "test_shutdown_is_idempotent_and_bounded"
    yield "executor", FaultsAreForgotten, "test_a_failed_step_is_fatal_and_told"
    yield "sampler", Biased, "test_frequencies_follow_the_distribution"
    yield "sampler", NoiseOfTheRow, "test_rows_do_not_depend_on_each_other"
    yield "sampler", DrawsOnce, "test_draws_at_one_position"
    yield "sampler", BelievesTheGuess, "test_guesses_are_verified"
    yield "sampler", GuessesMoreOften, "test_guesses_are_verified"
    yield "sampler", LeansOnNeighbours, "test_extreme_neighbours_change_nothing"
    yield "sampler", SharesTheTemperature, "test_extreme_neighbours_change_nothing"
    yield "sampler", KeepsTheFirst, "test_a_slot_keeps_nothing_of_its_former_request"
    yield "sampler", HidesNaN, "test_rows_that_are_not_finite"
    yield "sampler", LogprobsAfterProcessing, "test_logprobs_are_those_of_the_model"
    yield "sampler", ForgetsTheMode, "test_logprobs_of_each_mode"
    yield "logits_processor", Push, "test_wrong_arguments_are_a_value_error"
    yield "logits_processor", CountsInTheClass, "test_requests_share_nothing"
    yield "logits_processor", CountsInTheClass, "test_it_works_in_a_batch"
    yield "logits_processor", BansForEveryone, "test_nothing_is_kept_for_later_requests"
    yield "logits_processor", CountsThePrompt, "test_the_prompt_does_not_count"
    yield "logits_processor", AppendsToTheIds, "test_the_history_is_left_alone"
    yield "logits_processor", GivesDoubles, "test_the_row_keeps_its_form"
    yield "router", OwnErrorShape, "test_what_the_service_raises_is_answered"
    yield "router", SaysNothingOfOverload, "test_errors_have_the_form_of_its_dialect"
    yield "router", AnswersInAnotherForm, "test_what_the_service_raises_is_answered"
    yield "router", CoversUpAFailure, "test_a_failure_in_the_middle_is_told"
    yield "router", ClosesOnlyWhatHasBegun, "test_a_client_that_leaves_is_noticed"
    yield "router", LeavesRequestsRunning, "test_a_client_that_leaves_is_noticed"
    yield "router", OpenToEverybody, "test_only_probes_are_public"
    yield "router", TakesAnothersRoute, "test_no_route_of_another_router_is_taken"
    yield "router", FailsOnNumbers, "test_no_value_of_a_field_is_the_servers_fault"
    yield "router", RefusesNull, "test_null_means_the_default"
    yield "router", NullIsTheMost, "test_null_means_the_default"
    yield "router", AsksTheEngineTooEarly, "test_asking_for_routes_needs_no_engine"
    yield "adapter_bank", AddsToEveryRow, "test_rows_without_an_adapter_keep_their_bits"
    yield "adapter_bank", DependsOnTheFirstRow, "test_a_row_does_not_depend_on_others"
    yield "adapter_bank", OneSlotForAll, "test_a_slot_does_not_matter"
    yield "adapter_bank", ClearsNothing, "test_an_adapter_for_some_layers_leaves_others"
    yield "adapter_bank", KeepsWhatIsThere, "test_an_adapter_takes_anothers_place"
    yield "adapter_bank", LoadsWhatIsRead, "test_reading_loads_nothing"
    yield "adapter_bank", BreaksForMissingFolders, "test_what_cannot_be_loaded_is_an_error_of_the_request"
    yield "adapter_bank", ACopyHasItsOwn, "test_copies_of_a_model_share_what_is_loaded"
    yield "adapter_bank", ForgetsWhatIsDropped, "test_more_are_read_than_the_host_keeps"
    yield "response_store", OneOwner, "test_an_owner_sees_nothing_of_others"
    yield "response_store", LastEndCounts, "test_only_what_goes_on_is_changed"
    yield "response_store", ForgetsNothing, "test_the_number_is_bounded"
    yield "response_store", ForgetsNothing, "test_the_age_is_bounded"
    yield "response_store", GivesEventsTwice, "test_events_stay_in_order"
    yield "response_store", ReplacesIds, "test_an_id_is_taken_once"
    yield "response_store", SharesNothing, "test_instances_share_or_do_not"
    yield "lora_resolver", FollowsPaths, "test_other_names_are_not_found"
    yield "lora_resolver", ForAnyModel, "test_an_adapter_of_another_model_is_not_found"
    yield "lora_resolver", RaisesForUnknown, "test_other_names_are_not_found"
    yield "lora_resolver", FindsNothing, "test_the_adapter_comes_unchanged"
    yield "lora_resolver", StaysBusy, "test_a_cancelled_call_leaves_it_as_it_was"
    yield "stat_logger", RawLabels, "test_hostile_labels"
    yield "stat_logger", CountsOnlyTheLast, "test_counters_never_fall"
    yield "stat_logger", ASeriesForEachRequest, "test_the_number_of_series_is_bounded"
    yield "stat_logger", DividesByTheTokens, "test_everything_that_happens_is_taken"
    yield "stat_logger", DividesByTheTime, "test_everything_that_happens_is_taken"
    yield "stat_logger", KnowsOneReason, "test_everything_that_happens_is_taken"
    yield "stat_logger", CountsCallsTwice, "test_each_event_counts_once"
    yield "stat_logger", CountsRefusalsTwice, "test_each_event_counts_once"
    yield "stat_logger", SilentWithoutLogStats, "test_calls_are_told_without_log_stats"
    yield "command", planted_commands.HeavyHelp, "test_help_is_quick"
    yield "speculator", planted_speculators.WritesToTheHistory, "test_greedy_outputs_are_those_without"
    yield "speculator", planted_speculators.BeyondTheVocabulary, "test_guesses_have_their_form"
    yield "speculator", planted_speculators.FloatsForIds, "test_guesses_have_their_form"
    yield "speculator", planted_speculators.SaysNothing, "test_guesses_have_their_form"
    yield "speculator", planted_speculators.SaysNothing, "test_what_is_accepted_is_counted"
    yield "speculator", planted_speculators.OneScopeForAll, "test_scopes_are_kept_apart"
    yield "speculator", planted_speculators.TakesAnything, "test_wrong_settings_are_refused"
    yield "speculator", planted_speculators.PassesForEachToken, "test_its_work_is_bounded"
    yield "command", planted_commands.TracebackForFlags, "test_an_unknown_flag_is_one_block"
    yield "command", planted_commands.FlagsAreIgnored, "test_an_unknown_flag_is_one_block"
    yield "command", planted_commands.ExitsItself, "test_help_is_an_answer"
    yield "command", planted_commands.ExitsItself, "test_help_is_quick"
    yield "command", planted_commands.HeavySubCommands, "test_help_is_quick"
    yield "command", planted_commands.ExitsWithAWord, "test_help_is_an_answer"
    yield "command", planted_commands.HidesTheFlag, "test_an_unknown_flag_is_named"
    yield "hooks", Misspelt, "test_no_hook_is_misspelt"
    yield "hooks", OtherParameters, "test_signatures_fit"
    yield "hooks", StumblesOverStrangers, "test_it_hears_everything"
    yield "hooks", AnswersWithAWord, "test_access_is_decided_in_one_word"
    yield "hooks", DeniesByTurns, "test_access_is_decided_in_one_word"
    yield "kv_cache", SharesAcrossSalts, "test_scopes_never_meet"
    yield "kv_cache", PublishesTooEarly, "test_one_group"
    yield "kv_cache", ForgetsABlock, "test_one_group"
    yield "kv_cache", HitsOneBlockTooMuch, "test_one_group"


FAULTS = list(faults())
ENTRY = {"model": "LlamaForCausalLM"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "plugin", "broken"), FAULTS, ids=[f"{k}-{p.__name__}-{b[5:]}" for k, p, b in FAULTS])
def test_a_planted_fault_is_caught(kind: str, plugin: type, broken: str) -> None:
    kit = KVCacheKit if kind == "kv_cache" else kit_of(kind)
    name = "BertModel" if issubclass(plugin, Bert) else ENTRY.get(kind, "")
    (outcome,) = run_kit(kit, plugin, name, only=broken)
    assert outcome.result == FAILED
    assert outcome.reason


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        ("logits_processor", PushChecked),
        ("logits_processor", CountsTheGenerated),
        ("router", Echo),
        ("router", EchoInOwnForm),
        ("executor", WithAWorker),
        ("hooks", Hooks),
        ("command", planted_commands.OnSubCommands),
        ("command", planted_commands.OnSubCommandsInFull),
        pytest.param("scheduler", WithTheDefaults, marks=pytest.mark.slow),  # tests/simulate runs the default one
    ],
)
def test_the_good_ones_that_faults_were_planted_in_keep_every_promise(kind: str, plugin: type) -> None:
    results = {outcome.name: (outcome.result, outcome.reason) for outcome in run_kit(kit_of(kind), plugin)}
    assert {name: why for name, (result, why) in results.items() if result not in (OK, SKIPPED)} == {}
    if kind == "executor":
        assert results["test_a_lost_worker_is_told_in_time"][0] == OK


def test_every_kit_has_three_faults() -> None:
    from ferrule.plugin import KINDS

    counts = {kind: len({plugin for k, plugin, _ in FAULTS if k == kind}) for kind in (*KINDS, "kv_cache")}
    elsewhere = {"tool_parser", "reasoning_parser", "guided_decoding"}  # files of their own
    assert {kind for kind, count in counts.items() if count < 3} == elsewhere
