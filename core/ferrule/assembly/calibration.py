"""Scales of an fp8 cache, from the keys and values of fixed tokens: `--calculate-kv-scales`.

The model computes them once, with a cache of its own type and before any request, so the scales are the same at each
start and depend on no request. https://docs.vllm.ai/en/stable/features/quantization/quantized_kvcache/ describes the
option, which takes the tokens of the first step there.

vLLM takes the first request's tokens, so its answers depend on who came first. Scales are powers of two: dividing by
them rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch

from ferrule.assembly.model import Loaded
from ferrule.interfaces.model import AttentionOptions, ForwardContext, LayerCache, Model, ScaledCache, StateSpec
from ferrule.interfaces.sampler import Sampler
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, StepPlan, TokenSampling

_TOKENS = 256  # of one prompt, at most


class Watched:
    """A `ForwardContext` that notes the largest absolute key and value of each layer."""

    def __init__(self, ctx: ForwardContext, largest: dict[str, torch.Tensor]) -> None:
        self._ctx = ctx
        self._largest = largest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def attend(
        self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self._largest[layer] = torch.stack([each.abs().amax().float() for each in (k, v)])
        return self._ctx.attend(layer, q, k, v, options)

    def attend_heads(self, *_: Any) -> None:
        """Do nothing: keys and values must be given to `attend`, so that they can be measured."""


class WatchedModel(Model):
    """A loaded model whose forward pass is watched."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.largest: dict[str, torch.Tensor] = {}

    def cache_specs(self) -> dict[str, LayerCache]:
        return self._model.cache_specs()

    def state_specs(self) -> dict[str, StateSpec]:
        return self._model.state_specs()

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self._model.forward(ids, cast("ForwardContext", Watched(ctx, self.largest)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return self._model.load_weights(weights)


def calibrate(loaded: Loaded, limits: RunnerLimits, sampler: Sampler, step_tokens: int) -> tuple[str, ...]:
    """Give the model's layers calculated scales. Returns what the log says. Raises CheckpointError."""
    watched, model = WatchedModel(loaded.model), loaded.model
    one = replace(limits, slots=1, cache_type=None)
    runner = ModelRunner(
        RunnerParts(
            model=watched, attention=loaded.attention, sampler=sampler, limits=one, adapters=loaded.context.adapters
        )
    )
    ids = fixed_tokens(min(_TOKENS, limits.max_model_len, step_tokens), limits.vocab_size, loaded.context.config)
    count, first, blocks = len(ids), 1, []
    for group in runner.cache.paged:
        needed = -(-count // group.block_size)
        blocks.append(tuple(range(first, first + needed)))
        first += needed
    runner.init_cache(first)
    admit = Admit(
        slot=0,
        id="calibration",
        epoch=0,
        known_ids=ids,
        num_prompt=count,
        work=TokenSampling(seed=0, max_tokens=1, temperature=0.0),
    )
    runner.execute(
        StepPlan(
            step=0,
            chunks=(
                Chunk(
                    slot=0,
                    id="calibration",
                    epoch=0,
                    start=0,
                    count=count,
                    ends="",
                    new_blocks=tuple(blocks),
                ),
            ),
            admits=(admit,),
        )
    )
    runner.release_cache()
    parts = model.modules() if isinstance(model, torch.nn.Module) else ()
    scaled = {part.name for part in parts if isinstance(part, ScaledCache)}
    found = {name: most.tolist() for name, most in watched.largest.items() if name in scaled}
    said = loaded.cache_scales.measure({name: (keys, values) for name, (keys, values) in found.items()})
    left = len(watched.largest) - len(found)
    more = f"the caches of {left} layers have scales of 1: their attention takes none" if left and found else None
    return tuple(note for note in (said, more, loaded.cache_scales.give(model)) if note)


def fixed_tokens(count: int, vocab_size: int, config: Any) -> tuple[int, ...]:
    """Return `count` ids, the same at each start; the first is the one with which the model's texts begin, if it has
    one.
    """
    ids: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    begin = config.get("bos_token_id")
    if isinstance(begin, int) and not isinstance(begin, bool) and 0 <= begin < vocab_size:
        ids[0] = begin
    return tuple(ids)
