"""The kit of models."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import Generates, PoolingKind, PoolingSpec, PoolRow, Pools
from ferrule.types import HostTensor, MediaItem, Pooling
from ferrule_testkit.kits.base import does_not_apply, promise, shown
from ferrule_testkit.kits.model_run import BLOCK, Checkpoints, check_named, prompt, tensors_of
from ferrule_testkit.ranks import Exchange


class ModelKit(Checkpoints):
    """A model computes the same however its tokens are cut into steps and whoever shares them, from all its weights.

    Settings: `recipes`, names of `ferrule_testkit.checkpoints` (by default those of the architecture that the plugin's
    name is), or `write`, functions that write a small checkpoint with ``config.json`` and safetensors into a folder.
    With `hugging_face` the logits are compared with those of transformers, whose `attention` implementation is right;
    of a model that pools, vectors of each of the kinds in `pooled_by` with what they are of the library's states.

    What a model `Generates`, logits, is looked at where it can, else the vectors that it `Pools`.
    """

    # ------------------------------------------------------------------------------------ promises

    def test_a_prompt_in_chunks_is_the_prompt(self) -> None:
        """Give the same logits for a prompt at once, in chunks of several sizes, and token by token."""
        for folder in self.folders():
            runner = self.runner(folder)
            if not runner.splits:
                does_not_apply("the model does not split prompts")
            whole = runner.run([prompt(1, 30)], [[30]])
            for cut in ([8, 8, 8, 6], [1, 28, 1], [29, 1], [1] * 30):
                self.equal(whole[0][-1], runner.run([prompt(1, 30)], [cut])[0][-1], f"chunks of {shown(cut)}")

    def test_a_row_is_as_it_is_alone(self) -> None:
        """Give a request in a batch the logits that it gets alone, beside whole prompts, chunks and single tokens."""
        prompts = [prompt(1, 30), prompt(2, 9), prompt(3, 17), prompt(4, 1)]
        cuts = [[10, 1, 1, 18], [9], [1, 15, 1], [1]]
        for folder in self.folders():
            runner = self.runner(folder)
            together = runner.run(prompts, cuts)
            for number, (ids, cut) in enumerate(zip(prompts, cuts, strict=True)):
                alone = runner.run([ids], [cut])[0]
                for a, b in zip(together[number], alone, strict=True):
                    self.equal(b, a, f"request {number} in a batch")

    def test_a_slot_keeps_nothing_of_its_former_request(self) -> None:
        """Give a request in a used slot and used blocks the logits that it gets in clean ones."""
        for folder in self.folders():
            fresh = self.runner(folder).run([prompt(5, 12)], [[5, 7]])[0]
            runner = self.runner(folder)
            runner.run([prompt(6, 40)], [[40]])
            again = runner.run([prompt(5, 12)], [[5, 7]])[0]
            self.equal(fresh[-1], again[-1], "a used slot")

    def test_logits_are_float32_rows(self) -> None:
        """Return float32 [rows, vocabulary] from `logits`, for one row and for many, each row by itself."""
        for folder in self.folders():
            model, hidden = self.hidden(folder)
            with torch.inference_mode():
                logits = model.logits(hidden.clone())
                alone = model.logits(hidden[1:2].clone())
            width = int(checkpoint.read(folder)["vocab_size"])
            form = (logits.dtype, tuple(logits.shape)) == (torch.float32, (len(hidden), width))
            promise(form, f"logits are {logits.dtype} {tuple(logits.shape)}")
            self.equal(logits[1], alone[0], "a row of logits alone")

    def test_vectors_are_float32_rows(self) -> None:
        """Return float32 [rows, size] from `pool`, each row by itself, and of length 1 exactly where that is asked
        for.
        """
        for folder in self.folders():
            model: Any = self.model(folder)
            if not isinstance(model, Pools):
                does_not_apply("the model does not pool")
            hidden = torch.randn(9, _hidden_size(folder), generator=torch.Generator().manual_seed(0))
            rows = [(first, count, normalize) for first, count in ((0, 4), (4, 5)) for normalize in (False, True)]
            own = [PoolRow(first=f, count=count, work=Pooling(normalize=wanted)) for f, count, wanted in rows]
            with torch.inference_mode():
                together = model.pool(hidden.clone(), own)
                alone = torch.cat([model.pool(hidden.clone(), [row]) for row in own])
            promise(together.dtype == torch.float32 and together.dim() == 2, f"vectors are {together.dtype}")
            self.equal(together, alone, "vectors alone")
            for plain, normal in zip(together[::2], together[1::2], strict=True):
                promise(abs(float(plain.norm()) - 1) > 1e-3, "a vector that is not to be normalised is")
                self.equal(plain / plain.norm(), normal, "a normalised vector")

    def test_what_is_cached_is_told(self) -> None:
        """Return the same from `cache_specs` each time, with possible sizes, in blocks of the given size."""
        for folder in self.folders():
            model = self.model(folder)
            specs = model.cache_specs()
            keeps = bool(specs) or bool(model.state_specs())
            promise(keeps or not model.splits_prompts, "the model splits prompts, and keeps nothing of their parts")
            promise(specs == self.model(folder).cache_specs() == model.cache_specs(), "cache_specs change")
            for name, spec in specs.items():
                sizes = spec.num_kv_heads > 0 and spec.head_dim > 0 and spec.group.window >= 0
                promise(sizes and spec.group.block_size == BLOCK, f"layer {name} caches {spec}")

    def test_every_weight_is_used(self) -> None:
        """Fill every parameter from the checkpoint in `load_weights`, whatever the order of the tensors, and return
        their names.
        """
        for folder in self.folders():
            tensors = tensors_of(folder)
            wanted = self.model(folder)
            random.Random(0).shuffle(tensors)
            model = self.empty(folder)
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
        """Use every tensor of the checkpoint in the answers."""
        for folder in self.folders():
            tensors = tensors_of(folder)
            before = self.answers(folder, tensors)
            for number, (name, tensor) in enumerate(tensors):
                # not by a factor: what is multiplied and then normalised would hide it; down too: it may be a limit
                noise = 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                others = tensors[:number], tensors[number + 1 :]
                changed = ([*others[0], (name, tensor + by.to(tensor.dtype)), *others[1]] for by in (noise, -noise))
                same = all(torch.equal(before, self.answers(folder, each)) for each in changed)
                promise(not same, f"{name} of the checkpoint has no effect")

    def test_weights_that_do_not_fit_are_named(self) -> None:
        """Raise CheckpointError that names an unknown tensor or one of a wrong shape; leave a missing one unfilled."""
        for folder in self.folders():
            tensors = tensors_of(folder)
            name, tensor = max(tensors, key=lambda item: item[1].dim())
            wrong = [(n, t[:-1].clone() if n == name else t) for n, t in tensors]
            for given, said in (([*tensors, ("no.such_tensor", torch.ones(2))], "no.such_tensor"), (wrong, name)):
                self.refused(folder, given, said)
            model = self.empty(folder)
            names = {n for n, _ in _parameters(model)}
            try:
                with torch.no_grad():
                    filled = model.load_weights(iter([item for item in tensors if item[0] != name]))
            except CheckpointError as error:
                check_named(str(error), name)
            else:
                promise(filled < names, f"without {name} load says that everything was filled")

    def test_equals_transformers(self) -> None:
        """Equal the logits of transformers at every position, for prompts longer than any window. Vectors equal the
        library's hidden states, pooled.
        """
        if not self.hugging_face:
            does_not_apply("there is no class of transformers to compare with")
        for folder in self.folders():
            from transformers import AutoModelForCausalLM

            model, ids, what = self.model(folder), prompt(7, 40), f"transformers with the checkpoint {folder.name}"
            options: dict[str, Any] = {"attn_implementation": self.attention, "dtype": torch.float32}
            if isinstance(model, Generates):
                theirs = AutoModelForCausalLM.from_pretrained(folder, **options)
                with torch.inference_mode():
                    wanted = theirs.eval()(torch.tensor([ids])).logits[0]
                got = self.runner(folder).run([ids], [[1] * 40])[0]
                self.equal(wanted, torch.stack(got), what)
            if isinstance(model, Pools):
                pooled = _library_vectors(folder, ids, options)
                for kind in self.pooled_by:
                    own = self.runner(folder, pooling=PoolingSpec(kind=kind, normalize=False))
                    self.equal(pooled[kind], own.run([ids], [[40]], pools=True)[0][0], f"{what}, pooled by {kind}")

    def test_ranks_compute_what_one_does(self) -> None:
        """Give the logits of the whole model in each of two ranks, which exchange parts of their results."""
        for folder in self.folders():
            prompts, cuts = [prompt(10, 14), prompt(11, 3)], [[12, 1, 1], [3]]
            wanted = self.runner(folder).run(prompts, cuts)
            exchange = Exchange(2)
            runners = [self.runner(folder, shard=shard) for shard in exchange.shards]
            for found in exchange.run([partial(runner.run, prompts, cuts) for runner in runners]):
                for number in range(2):
                    self.equal(wanted[number][-1], found[number][-1], f"request {number} in two ranks")

    def test_embeddings_take_the_place_of_ids(self) -> None:
        """Accept a prompt as the output of transformers' embedding layer, with the result of its ids, also in
        chunks.
        """
        if not self.hugging_face:
            does_not_apply("there is no class of transformers to take embeddings from")
        for folder in self.folders():
            if not self.model(folder).embed_size():
                does_not_apply("the model takes no embeddings")
            from transformers import AutoModelForCausalLM

            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            prompts = [prompt(8, 30), prompt(9, 12)]
            with torch.inference_mode():
                embeds = theirs.get_input_embeddings()(torch.tensor(prompts[0])).contiguous()
            tensor = HostTensor(shape=tuple(embeds.shape), dtype="float32", data=embeds.numpy().tobytes())
            given = MediaItem(kind="embeds", digest=b"given", start=0, count=len(embeds), data={"embeds": tensor})
            runner = self.runner(folder)
            for cuts in ([[30], [12]], [[8, 1, 13, 8], [1, 5, 5, 1]]):
                wanted = runner.run(prompts, cuts)
                got = runner.run([[0] * 30, prompts[1]], cuts, {0: given})
                for number in range(2):
                    self.equal(wanted[number][-1], got[number][-1], f"request {number} of one with embeddings")


def _library_vectors(folder: Path, ids: list[int], options: Mapping[str, Any]) -> Mapping[PoolingKind, torch.Tensor]:
    from transformers import AutoModel

    library = AutoModel.from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        states = library(torch.tensor([ids])).last_hidden_state[0]
    return {"cls": states[0], "mean": states.mean(0), "last": states[-1]}


def _hidden_size(folder: Path) -> int:
    return int(checkpoint.read(folder)["hidden_size"])


def _parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    promise(isinstance(model, torch.nn.Module), "the model is not a torch.nn.Module")
    return list(model.named_parameters())
