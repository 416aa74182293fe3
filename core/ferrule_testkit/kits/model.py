"""The kit of models."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, Model
from ferrule.interfaces.ranks import WHOLE, Shard
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, Embeds, StepPlan, TokenSampling
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.ranks import Exchange

_BLOCK = 4
_LENGTH = 64
_SLOTS = 4


@cache
def _written(recipe: str) -> tempfile.TemporaryDirectory[str]:
    """A tiny checkpoint, written once in a process. The folder goes with the object."""
    from ferrule_testkit.checkpoints import tiny_checkpoint

    folder = tempfile.TemporaryDirectory(prefix="ferrule-kit-")
    tiny_checkpoint(recipe, folder.name)
    return folder


def recipe_folder(recipe: str) -> Path:
    """The folder of a checkpoint of `ferrule_testkit.checkpoints`."""
    return Path(_written(recipe).name)


@cache
def _recipes_of(architecture: str) -> tuple[str, ...]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from ferrule_testkit.checkpoints import NATIVE, tiny_config

    return tuple(n for n in NATIVE if MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(n))].__name__ == architecture)


class ModelKit(Kit):
    """A model computes the same however its tokens are cut into steps and whoever shares them, from all its weights.

    Settings: `recipes`, names of `ferrule_testkit.checkpoints` (by default those of the architecture that the plugin's
    name is), or `write`, functions that write a small checkpoint with ``config.json`` and safetensors into a folder.
    With `hugging_face` the logits are compared with those of transformers, whose `attention` implementation is right.
    """

    kind = "model"
    recipes: Sequence[str] = ()
    write: Sequence[Callable[[Path], None]] = ()
    hugging_face: bool = True
    attention: str = "eager"
    tolerance: float = 2e-4  # of logits in float32, relative to their largest

    # ------------------------------------------------------------------------------------ promises

    def test_a_prompt_in_chunks_is_the_prompt(self) -> None:
        """A prompt at once, in chunks of several sizes, and token by token gives the same logits."""
        for folder in self.folders():
            runner = self.runner(folder)
            whole = runner.run([_prompt(1, 30)], [[30]])
            for cut in ([8, 8, 8, 6], [1, 28, 1], [29, 1], [1] * 30):
                self._equal(whole[0][-1], runner.run([_prompt(1, 30)], [cut])[0][-1], f"chunks of {shown(cut)}")

    def test_a_row_is_as_it_is_alone(self) -> None:
        """A request in a batch gives the logits that it gives alone, beside whole prompts, chunks and single tokens."""
        prompts = [_prompt(1, 30), _prompt(2, 9), _prompt(3, 17), _prompt(4, 1)]
        cuts = [[10, 1, 1, 18], [9], [1, 15, 1], [1]]
        for folder in self.folders():
            runner = self.runner(folder)
            together = runner.run(prompts, cuts)
            for number, (ids, cut) in enumerate(zip(prompts, cuts, strict=True)):
                alone = runner.run([ids], [cut])[0]
                for a, b in zip(together[number], alone, strict=True):
                    self._equal(b, a, f"request {number} in a batch")

    def test_a_slot_keeps_nothing_of_its_former_request(self) -> None:
        """A request after another in the same slot and blocks gives what it gives in a clean one."""
        for folder in self.folders():
            fresh = self.runner(folder).run([_prompt(5, 12)], [[5, 7]])[0]
            runner = self.runner(folder)
            runner.run([_prompt(6, 40)], [[40]])
            again = runner.run([_prompt(5, 12)], [[5, 7]])[0]
            self._equal(fresh[-1], again[-1], "a used slot")

    def test_logits_are_float32_rows(self) -> None:
        """`logits` gives float32 [rows, vocabulary], for one row and for many, each row by itself."""
        for folder in self.folders():
            model, hidden = self._hidden(folder)
            with torch.inference_mode():
                logits = model.logits(hidden.clone())
                alone = model.logits(hidden[1:2].clone())
            width = int(checkpoint.read(folder)["vocab_size"])
            form = (logits.dtype, tuple(logits.shape)) == (torch.float32, (len(hidden), width))
            promise(form, f"logits are {logits.dtype} {tuple(logits.shape)}")
            self._equal(logits[1], alone[0], "a row of logits alone")

    def test_what_is_cached_is_told(self) -> None:
        """`cache_specs` are the same each time, with sizes that can be, in blocks of the given size."""
        for folder in self.folders():
            model = self.model(folder)
            specs = model.cache_specs()
            promise(bool(specs) or bool(model.state_specs()), "the model keeps nothing")
            promise(specs == self.model(folder).cache_specs() == model.cache_specs(), "cache_specs change")
            for name, spec in specs.items():
                sizes = spec.num_kv_heads > 0 and spec.head_dim > 0 and spec.group.window >= 0
                promise(sizes and spec.group.block_size == _BLOCK, f"layer {name} caches {spec}")

    def test_every_weight_is_used(self) -> None:
        """`load_weights` fills every parameter from the checkpoint, whatever the order of the tensors, and says so."""
        for folder in self.folders():
            tensors = _tensors(folder)
            wanted = self.model(folder)
            random.Random(0).shuffle(tensors)
            model = self._empty(folder)
            with torch.no_grad():
                filled = model.load_weights(iter(tensors))
            names = {name for name, _ in _parameters(model)}
            promise(
                filled == names,
                f"load_weights says {shown(sorted(filled ^ names))} which is not the names of all parameters",
            )
            others = dict(_parameters(wanted))
            for name, value in _parameters(model):
                promise(torch.equal(value, others[name]), f"{name} depends on the order of the tensors")

    def test_a_change_of_any_weight_changes_the_answer(self) -> None:
        """Every tensor of the checkpoint has a part in the logits."""
        for folder in self.folders():
            tensors = _tensors(folder)
            before = self._answers(folder, tensors)
            for number, (name, tensor) in enumerate(tensors):
                # not by a factor: what is multiplied and then normalised would hide it; down too: it may be a limit
                noise = 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                others = tensors[:number], tensors[number + 1 :]
                changed = ([*others[0], (name, tensor + by.to(tensor.dtype)), *others[1]] for by in (noise, -noise))
                same = all(torch.equal(before, self._answers(folder, each)) for each in changed)
                promise(not same, f"{name} of the checkpoint has no effect")

    def test_weights_that_do_not_fit_are_named(self) -> None:
        """An unknown tensor and one of a wrong shape are CheckpointErrors that name it; a missing one is not filled."""
        for folder in self.folders():
            tensors = _tensors(folder)
            name, tensor = max(tensors, key=lambda item: item[1].dim())
            wrong = [(n, t[:-1].clone() if n == name else t) for n, t in tensors]
            for given, said in (([*tensors, ("no.such_tensor", torch.ones(2))], "no.such_tensor"), (wrong, name)):
                self._refused(folder, given, said)
            model = self._empty(folder)
            names = {n for n, _ in _parameters(model)}
            try:
                with torch.no_grad():
                    filled = model.load_weights(iter([item for item in tensors if item[0] != name]))
            except CheckpointError as error:
                _names(str(error), name)
            else:
                promise(filled < names, f"without {name} load says that everything was filled")

    def test_equals_transformers(self) -> None:
        """The logits at every position equal those of transformers, for prompts longer than any window."""
        if not self.hugging_face:
            does_not_apply("there is no class of transformers to compare with")
        for folder in self.folders():
            from transformers import AutoModelForCausalLM

            theirs = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=self.attention, dtype=torch.float32
            )
            ids = _prompt(7, 40)
            with torch.inference_mode():
                wanted = theirs.eval()(torch.tensor([ids])).logits[0]
            got = self.runner(folder).run([ids], [[1] * 40])[0]
            self._equal(wanted, torch.stack(got), f"transformers with the checkpoint {folder.name}")

    def test_ranks_compute_what_one_does(self) -> None:
        """A model in two parts, with what they exchange, gives the logits of the whole, in each of them."""
        for folder in self.folders():
            prompts, cuts = [_prompt(10, 14), _prompt(11, 3)], [[12, 1, 1], [3]]
            wanted = self.runner(folder).run(prompts, cuts)
            exchange = Exchange(2)
            runners = [self.runner(folder, shard=shard) for shard in exchange.shards]
            for found in exchange.run([partial(runner.run, prompts, cuts) for runner in runners]):
                for number in range(2):
                    self._equal(wanted[number][-1], found[number][-1], f"request {number} in two ranks")

    def test_embeddings_take_the_place_of_ids(self) -> None:
        """A prompt given as what transformers' embedding layer makes of it is the prompt, also in chunks."""
        if not self.hugging_face:
            does_not_apply("there is no class of transformers to take embeddings from")
        for folder in self.folders():
            if not self.model(folder).embed_size():
                does_not_apply("the model takes no embeddings")
            from transformers import AutoModelForCausalLM

            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            prompts = [_prompt(8, 30), _prompt(9, 12)]
            with torch.inference_mode():
                embeds = theirs.get_input_embeddings()(torch.tensor(prompts[0])).contiguous()
            given = Embeds(tokens=len(embeds), size=embeds.shape[1], dtype="float32", data=embeds.numpy().tobytes())
            runner = self.runner(folder)
            for cuts in ([[30], [12]], [[8, 1, 13, 8], [1, 5, 5, 1]]):
                wanted = runner.run(prompts, cuts)
                got = runner.run([[0] * 30, prompts[1]], cuts, {0: given})
                for number in range(2):
                    self._equal(wanted[number][-1], got[number][-1], f"request {number} of one with embeddings")

    # ------------------------------------------------------------------------------------ helpers

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

    def model(
        self, folder: Path, tensors: Sequence[tuple[str, torch.Tensor]] | None = None, shard: Shard = WHOLE
    ) -> Model:
        model = self._empty(folder, shard)
        with torch.no_grad():
            model.load_weights(iter(_tensors(folder) if tensors is None else tensors))
        return model

    def runner(
        self, folder: Path, tensors: Sequence[tuple[str, torch.Tensor]] | None = None, shard: Shard = WHOLE
    ) -> Runner:
        return Runner(self.model(folder, tensors, shard), int(checkpoint.read(folder)["vocab_size"]))

    def _empty(self, folder: Path, shard: Shard = WHOLE) -> Model:
        context = BuildContext(
            config=checkpoint.completed(checkpoint.read(folder), self.plugin.config_names, self.plugin.config_defaults),
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=_BLOCK,
            max_model_len=_LENGTH,
            folder=folder,
            shard=shard,
        )
        model: Model = self.new(context)
        return model

    def _answers(self, folder: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Logits at many positions: of experts, not every one is asked at each."""
        prompts = [_prompt(number, 24) for number in range(1, 1 + _SLOTS)]
        found = self.runner(folder, tensors).run(prompts, [[2] * 12] * len(prompts))
        return torch.stack([logits for each in found for logits in each])

    def _hidden(self, folder: Path) -> tuple[Model, torch.Tensor]:
        """A model, and hidden states [rows, hidden] that it computed."""
        model: Any = self.model(folder)
        seen: list[torch.Tensor] = []
        logits = model.logits

        def watch(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden.clone())
            return logits(hidden)  # type: ignore[no-any-return]

        model.logits = watch
        Runner(model, int(checkpoint.read(folder)["vocab_size"])).run([_prompt(1, 3), _prompt(2, 3)], [[3], [3]])
        model.logits = logits
        return model, seen[0]

    def _equal(self, wanted: torch.Tensor, got: torch.Tensor, what: str) -> None:
        promise(bool(got.isfinite().all()), f"{what}: logits that are not finite")
        error = float((wanted - got).abs().max() / (1 + wanted.abs().max()))
        promise(error <= self.tolerance, f"{what}: logits differ by {error:.1e}, more than {self.tolerance}")

    def _refused(self, folder: Path, tensors: Sequence[tuple[str, torch.Tensor]], name: str) -> None:
        try:
            with torch.no_grad():
                self._empty(folder).load_weights(iter(tensors))
        except CheckpointError as error:
            _names(str(error), name)
        else:
            promise(False, f"a tensor {name} that does not fit is taken")


class Runner:
    """A model under the real runner, with the reference attention; `run` gives logits instead of tokens."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        from ferrule_testkit.simulate import load

        limits = RunnerLimits(
            slots=_SLOTS,
            max_model_len=_LENGTH,
            vocab_size=vocab_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self._seen = _Seen()
        attention = load("attention", "torch_sdpa")()
        parts = RunnerParts(model=model, attention=attention, sampler=self._seen, limits=limits)
        self._runner = ModelRunner(parts)
        self._groups = sum(group.kind != "recurrent" for group in self._runner.cache.groups)
        self._runner.init_cache(1 + _SLOTS * self._groups * (_LENGTH // _BLOCK))

    def run(
        self, prompts: Sequence[list[int]], cuts: Sequence[Sequence[int]], embeds: Mapping[int, Embeds] | None = None
    ) -> list[list[torch.Tensor]]:
        """Logits [vocab] after each chunk of each prompt. The first chunks share a step, then the second ones, …

        `embeds` are those of prompts, by their number.
        """
        given = embeds or {}
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        greedy = TokenSampling(seed=0, max_tokens=1, temperature=0.0)
        admits = tuple(
            Admit(
                slot=n,
                id=f"r{n}",
                epoch=0,
                known_ids=tuple(ids),
                num_prompt=len(ids),
                sampling=greedy,
                embeds=given.get(n),
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
                            samples=True,
                            new_blocks=blocks,
                        )
                    )
            self._runner.execute(StepPlan(step=step, chunks=tuple(chunks), admits=() if step else admits))
            for chunk, logits in zip(chunks, self._seen.logits, strict=True):
                found[chunk.slot].append(logits)
        self._runner.execute(StepPlan(step=99, chunks=(), releases=tuple(range(len(prompts)))))
        self._runner.check()
        return found

    def _blocks(self, slot: int) -> tuple[tuple[int, ...], ...]:
        count = _LENGTH // _BLOCK
        first = [1 + (slot * self._groups + group) * count for group in range(self._groups)]
        return tuple(tuple(range(start, start + count)) for start in first)


class _Seen(Sampler):
    """Keeps the logits, and chooses what is known to come."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        self.logits = [row.clone() for row in logits]
        tokens = torch.tensor([int(batch.history[row.slot, row.position]) for row in batch.rows])
        return Sampled(tokens, torch.ones(len(tokens), dtype=torch.bool))


def _prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _tensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]


def _parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    promise(isinstance(model, torch.nn.Module), "the model is not a torch.nn.Module")
    return list(model.named_parameters())


def _names(message: str, tensor: str) -> None:
    """A merged parameter may stand for its parts: the layer is what must be named."""
    layer = tensor.rpartition(".")[0].rpartition(".")[0]
    promise(tensor in message or layer in message, f"{tensor} is not named: {message}")
