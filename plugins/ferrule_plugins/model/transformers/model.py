"""The model plugin: which way a class runs, its weights, its logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext, Generates, LayerCache, Model, StateSpec
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.log import Log
from ferrule.types import PromptBorder
from ferrule_nn import Linear
from ferrule_nn.ops import using
from ferrule_plugins.model.transformers import linears
from ferrule_plugins.model.transformers.build import (
    EAGER,
    build,
    filled,
    library_config,
    set_attention,
    usual_attention,
)
from ferrule_plugins.model.transformers.flat import NAME, Flat, prepared
from ferrule_plugins.model.transformers.rope import Lengths, follow_lengths
from ferrule_plugins.model.transformers.rows import NO_CACHE, Rows
from ferrule_plugins.model.transformers.trial import find_rows

_log = Log("worker")


class _Given:
    """An output of the base model of which only the hidden states exist."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Passthrough(nn.Module):
    """A stand-in for the base model, or a part of it, where only the head is to run: its output is `hidden`."""

    hidden: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return self  # OPT's head asks for `model.decoder`

    def forward(self, *args: Any, **kwargs: Any) -> _Given:
        return _Given(self.hidden)


class TransformersModel(nn.Module, Model, Generates):
    """A model of the library. Its requests run together where its class allows that, else row after row."""

    any_architecture = True
    conformance = MappingProxyType({"recipes": ("llama", "gemma2", "mixtral", "mamba")})

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._config = library_config(ctx)
        self._lengths = Lengths()
        self._border: PromptBorder | None = None
        self._method: QuantizationMethod | None = None
        self._rows: Rows | None = None  # there are none before the weights
        self._gives_logits = False  # whether `forward` gives logits
        self.flat: Flat | None = Flat(ctx, self._config, self._lengths)
        self.reason = ""  # why requests do not run flat
        self._attention = EAGER  # of the library, when they do not
        try:
            self.inner = self.flat.build()
        except CheckpointError as error:
            self._give_up_flat(error)
            self.inner = build(self._config, ctx, EAGER)
            if not self.inner._can_set_attn_implementation():  # then what it usually has cannot be tried later
                self._attention = usual_attention(self.inner)
                self.inner = build(self._config, ctx, self._attention)

    @property
    def way(self) -> str:
        """The way in which requests run, in words."""
        if self.flat is not None:
            return "together"
        anew = self._rows is not None and not self._rows.keeps_cache
        return "one after another, the whole text each time" if anew else "one after another"

    def cache_specs(self) -> dict[str, LayerCache]:
        """Return the caches. Layers that attend are known once the model is built; others, once its weights are
        loaded.
        """
        if self.flat is None:
            return {} if self._rows is None else self._rows.cache_specs()
        if not len(self.flat.layers):
            try:
                self.flat.probe_without_weights(self.inner)
            except CheckpointError as error:
                self._give_up_flat(error)
                return {}
        return self.flat.cache_specs()

    def state_specs(self) -> dict[str, StateSpec]:
        return {} if self._rows is None else self._rows.state_specs()

    def prompt_border(self) -> PromptBorder | None:
        return self._border

    def quantize(self, name: str, method: QuantizationMethod) -> bool:
        """Keep the method; linear layers are replaced when their weights are loaded."""
        self._method = method
        return linears.any_scheme(self.inner, method)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        if self.flat is not None:
            return self.flat.forward(self.inner, ids, ctx)
        if self._rows is None:
            raise RuntimeError("the model has no weights yet")
        return self._rows.forward(ids, ctx)

    def embed_size(self) -> int:
        """Return the width of embeddings; 0 for a model that needs ids besides, such as for a second embedding in each
        layer.
        """
        table = self.inner.get_input_embeddings()
        runs = self.inner if self._gives_logits else getattr(self.inner, self.inner.base_model_prefix, self.inner)
        accepts_embeds = "inputs_embeds" in inspect.signature(runs.forward).parameters
        if (
            not accepts_embeds
            or not isinstance(table, nn.Embedding)
            or hasattr(self._config, "hidden_size_per_layer_input")
            or (self._rows is not None and not self._rows.keeps_cache)
        ):
            return 0
        return int(table.embedding_dim)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._gives_logits else self._head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = {name.removeprefix("inner."): tensor for name, tensor in weights}
        made: Mapping[str, Linear] = {}
        if self._method is not None and self._method.config:
            with using(self._ctx.kernels):
                made, tensors = linears.stored(self.inner, self._method, tensors, self._ctx.dtype, self._ctx.device)
        cls = type(self.inner)
        attention = self._attention if self.flat is None else NAME
        del self.inner  # before there is another one
        self.inner = filled(cls, self._config, tensors, self._ctx, attention)
        if self.flat is not None:
            self._check_flat(self.flat)
        self._border = follow_lengths(self.inner, self._lengths)
        if self.flat is None:
            self._rows, self._gives_logits = find_rows(self._ctx, self.inner, self._head, self._lengths)
            _log.info("requests of a step run one after another", model=type(self.inner).__name__, reason=self.reason)
            if not self._rows.keeps_cache:
                _log.warning("this model is slow", model=type(self.inner).__name__, reason=NO_CACHE)
        if self._method is not None:
            with using(self._ctx.kernels):
                linears.replace(self.inner, self._method, self._ctx.device, self._pass, made)
        return {name for name, _ in self.named_parameters()}

    def _check_flat(self, flat: Flat) -> None:
        """Run row after row instead where the class computes something else than the paged cache does."""
        prepared(self.inner)
        try:
            flat.probe(self.inner)
            flat.compare_with_library(self.inner)
        except CheckpointError as error:
            self._give_up_flat(error)
            set_attention(self.inner, EAGER)

    def _pass(self) -> None:
        """Run a few tokens and keep nothing."""
        if self.flat is not None:
            self.flat.probe(self.inner)
            return
        ids = torch.ones((1, 8), dtype=torch.int64, device=self._ctx.device)
        with torch.inference_mode():
            self.inner(input_ids=ids, return_dict=True)

    def _give_up_flat(self, error: CheckpointError) -> None:
        self.flat, self.reason = None, error.message

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the library's own forward pass with the base model replaced: the head, and what the class does to
        logits.
        """
        head = copy.copy(self.inner)
        stand_in = _Passthrough()
        stand_in.hidden = hidden.unsqueeze(0)
        head._modules = {**self.inner._modules, self.inner.base_model_prefix: stand_in}
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = head(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0].float()
