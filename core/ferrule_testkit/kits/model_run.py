"""What the kit of models looks at: small checkpoints, models built of them, and these under the real runner."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, Generates, Model, PoolingKind
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, MediaItem, Pooling, StepPlan, TokenSampling, Work
from ferrule_testkit.kits.base import Kit, does_not_apply, promise
from ferrule_testkit.simulate import load

BLOCK = 4
LENGTH = 64
SLOTS = 4


Tensors = Sequence[tuple[str, torch.Tensor]]  # of a checkpoint, by name


@cache
def _written(recipe: str) -> tempfile.TemporaryDirectory[str]:
    """Write a tiny checkpoint, once in a process. The folder is removed with the returned object."""
    from ferrule_testkit.checkpoints import tiny_checkpoint

    folder = tempfile.TemporaryDirectory(prefix="ferrule-kit-")
    tiny_checkpoint(recipe, folder.name)
    return folder


def recipe_folder(recipe: str) -> Path:
    """Return the folder of a checkpoint of `ferrule_testkit.checkpoints`."""
    return Path(_written(recipe).name)


@cache
def _recipes_of(architecture: str) -> tuple[str, ...]:
    # By name: the classes themselves would be imported with their modules.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    from ferrule_testkit.checkpoints import ENCODERS, NATIVE, RECIPES

    tables = ((NATIVE, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), (ENCODERS, MODEL_MAPPING_NAMES))
    return tuple(n for names, table in tables for n in names if table.get(RECIPES[n].model_type) == architecture)


class Checkpoints(Kit):
    """A kit's plugin, built of small checkpoints: its settings, and what is computed and compared of it."""

    kind = "model"
    recipes: Sequence[str] = ()
    write: Sequence[Callable[[Path], None]] = ()
    hugging_face: bool = True
    attention: str = "eager"
    pooled_by: Sequence[PoolingKind] = get_args(PoolingKind)
    tolerance: float = 2e-4  # of answers in float32, relative to their largest

    def folders(self) -> Iterator[Path]:
        recipes = self.recipes or (() if self.write else _recipes_of(self.name))
        if not recipes and not self.write:
            does_not_apply(f"no checkpoint for {self.name or self.plugin.__name__}: give `recipes` or `write`")
        for recipe in recipes:
            yield recipe_folder(recipe)
        for write in self.write:
            folder = self.folder()
            write(folder)
            yield folder

    def model(self, folder: Path, tensors: Tensors | None = None, **context: Any) -> Model:
        """Build a model and load its weights. `context` are fields of its `BuildContext`."""
        model = self.empty(folder, **context)
        with torch.no_grad():
            model.load_weights(iter(tensors_of(folder) if tensors is None else tensors))
        return model

    def runner(self, folder: Path, tensors: Tensors | None = None, **context: Any) -> Runner:
        return Runner(self.model(folder, tensors, **context), int(checkpoint.read(folder)["vocab_size"]))

    def empty(self, folder: Path, **changes: Any) -> Model:
        context = BuildContext(
            config=checkpoint.completed(checkpoint.read(folder), self.plugin.config_names, self.plugin.config_defaults),
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=BLOCK,
            max_model_len=LENGTH,
            folder=folder,
            kernels=load("platform", "cpu")().execution().kernels(),
            **changes,
        )
        model: Model = self.new(context)
        return model

    def answers(self, folder: Path, tensors: Tensors) -> torch.Tensor:
        """Return logits at many positions, because not every expert is used at each."""
        prompts = [prompt(number, 24) for number in range(1, 1 + SLOTS)]
        found = self.runner(folder, tensors).run(prompts, [[2] * 12] * len(prompts))
        return torch.stack([logits for each in found for logits in each])

    def hidden(self, folder: Path) -> tuple[Generates, torch.Tensor]:
        """Return a model, and hidden states [rows, hidden] that it computed."""
        model: Any = self.model(folder)
        if not isinstance(model, Generates):
            does_not_apply("the model does not generate")
        seen: list[torch.Tensor] = []
        logits = model.logits

        def watch(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden.clone())
            return logits(hidden)  # type: ignore[no-any-return]

        model.logits = watch
        Runner(model, int(checkpoint.read(folder)["vocab_size"])).run([prompt(1, 3), prompt(2, 3)], [[3], [3]])
        model.logits = logits
        return model, seen[0]

    def equal(self, wanted: torch.Tensor, got: torch.Tensor, what: str) -> None:
        promise(bool(got.isfinite().all()), f"{what}: numbers that are not finite")
        error = float((wanted - got).abs().max() / (1 + wanted.abs().max()))
        promise(error <= self.tolerance, f"{what}: answers differ by {error:.1e}, more than {self.tolerance}")

    def refused(self, folder: Path, tensors: Sequence[tuple[str, torch.Tensor]], name: str) -> None:
        try:
            with torch.no_grad():
                self.empty(folder).load_weights(iter(tensors))
        except CheckpointError as error:
            check_named(str(error), name)
        else:
            promise(False, f"a tensor {name} that does not fit is taken")


class Runner:
    """A model under the real runner, with the reference attention; `run` gives logits instead of tokens, or vectors."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        limits = RunnerLimits(
            slots=SLOTS,
            max_model_len=LENGTH,
            vocab_size=vocab_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
            host_memory=True,
        )
        self.splits = model.splits_prompts
        self._generates = isinstance(model, Generates)
        self._seen = _Seen()
        attention = load("attention", "torch_sdpa")()
        parts = RunnerParts(model=model, attention=attention, sampler=self._seen, limits=limits)
        self._runner = ModelRunner(parts)
        self._groups = sum(group.kind != "recurrent" for group in self._runner.cache.groups)
        self._runner.init_cache(1 + SLOTS * self._groups * (LENGTH // BLOCK))

    def run(
        self,
        prompts: Sequence[list[int]],
        cuts: Sequence[Sequence[int]],
        media: Mapping[int, MediaItem] | None = None,
        pools: bool = False,
    ) -> list[list[torch.Tensor]]:
        """Return the logits [vocab] after each chunk of each prompt. The first chunks share a step, then the second
        ones, and so on.

        `media` is the item of a prompt, by its number. The result has vectors if the model does not generate, or with
        `pools`; prompts that are not split are computed whole.
        """
        given = media or {}
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        cuts = cuts if self.splits else [[len(ids)] for ids in prompts]
        work: Work = TokenSampling(seed=0, max_tokens=1, temperature=0.0)
        if pools or not self._generates:
            work = Pooling()
        admits = tuple(
            Admit(
                slot=n,
                id=f"r{n}",
                epoch=0,
                known_ids=tuple(ids),
                num_prompt=len(ids),
                work=work,
                media=(given[n],) if n in given else (),
            )
            for n, ids in enumerate(prompts)
        )
        for step in range(max(map(len, cuts))):
            chunks = []
            for slot, cut in enumerate(cuts):
                if step < len(cut):
                    blocks = self._blocks(slot) if not step else ()
                    start = sum(cut[:step])
                    chunks.append(
                        Chunk(
                            slot=slot,
                            id=f"r{slot}",
                            epoch=0,
                            start=start,
                            count=cut[step],
                            ends=work.ends,
                            new_blocks=blocks,
                        )
                    )
            encodes = () if step else tuple(given.values())
            plan = StepPlan(step=step, chunks=tuple(chunks), admits=() if step else admits, encodes=encodes)
            rows = self._runner.execute(plan).rows
            vectors = [torch.frombuffer(bytearray(row.vector), dtype=torch.float32) for row in rows if row.vector]
            for chunk, answer in zip(chunks, vectors or self._seen.logits, strict=True):
                found[chunk.slot].append(answer)
        forgets = tuple(item.digest for item in given.values())
        self._runner.execute(StepPlan(step=99, chunks=(), releases=tuple(range(len(prompts))), forgets=forgets))
        self._runner.check()
        return found

    def _blocks(self, slot: int) -> tuple[tuple[int, ...], ...]:
        count = LENGTH // BLOCK
        first = [1 + (slot * self._groups + group) * count for group in range(self._groups)]
        return tuple(tuple(range(start, start + count)) for start in first)


class _Seen(Sampler):
    """A sampler that keeps the logits, and chooses the token that is known to come."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        self.logits = [row.clone() for row in logits]
        tokens = torch.tensor([int(batch.history[row.slot, row.position]) for row in batch.rows])
        return Sampled(tokens, torch.ones(len(tokens), dtype=torch.bool))


def tensors_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_named(message: str, tensor: str) -> None:
    """Check that a message names a tensor, or its layer: a merged parameter may stand for its parts."""
    layer = tensor.rpartition(".")[0].rpartition(".")[0]
    promise(tensor in message or layer in message, f"{tensor} is not named: {message}")
