"""The fast way: the library's modules compute everything but attention.

An attention function of our own is registered under the name `ferrule`, and it hands queries, keys and values to the
engine's paged cache. The library's cache, masks and generation are not used. All requests of a step are one flat row
[1, tokens], told apart by their positions alone. When the weights are there, what comes out is compared with the
library's own forward pass (`check`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import AttentionOptions, BuildContext, ForwardContext, InputEmbeds, LayerCache
from ferrule.types import CacheGroup
from ferrule_plugins.model.transformers import check
from ferrule_plugins.model.transformers.build import build, class_name, without_padding
from ferrule_plugins.model.transformers.rope import Lengths

NAME = "ferrule"  # of the attention function in the library's registry
_REGISTRATION = "ferrule_registration"  # attribute of the library's modules: their `_Registration`
_PLAIN = {"full_attention", "sliding_attention", "attention"}
# Arguments of an attention call that change nothing here. Any other one that is set is refused.
_HARMLESS = frozenset(
    ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache")
    + ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position")
    + ("position_embeddings", "layer_idx", "deterministic", "logits_to_keep", "training", "past_key_values")
)


class _Layer(nn.Module):
    """The needs of an attention module, as its call showed. It is a submodule, so that it is found as an
    `AttentionLayer`.
    """

    def __init__(self, name: str, cache: LayerCache, options: AttentionOptions) -> None:
        super().__init__()
        self.name = name
        self.cache = cache
        self.options = options


@dataclass
class _Step:
    """The forward pass in progress. `ctx` None: a probe, which records layers instead of attending."""

    ctx: ForwardContext | None = None


class Flat(nn.Module):
    """A runner of one class for many requests together. Layers are found by a probe of one token, which on the meta
    device costs nothing.
    """

    def __init__(self, ctx: BuildContext, config: Any, lengths: Lengths) -> None:
        super().__init__()
        self._ctx = ctx
        self._config = config
        self._lengths = lengths
        self._step = _Step()
        self.layers = nn.ModuleList()  # of `_Layer`, in the order in which they run; empty before a probe

    def build(self) -> Any:
        """Build the model without weights. Raises CheckpointError for a class or configuration that cannot run
        together.
        """
        _check_config(self._config)
        inner = flat_model(self._config, self._ctx, NAME)
        _check_class(inner)
        return inner

    def cache_specs(self) -> dict[str, LayerCache]:
        return {layer.name: layer.cache for layer in self.layers if isinstance(layer, _Layer)}

    def forward(self, inner: Any, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        self._step.ctx, self._lengths.of_tokens = ctx, ctx.lengths
        try:
            return self._run(inner, ids, ctx.positions, ctx.embeds)
        finally:
            self._step.ctx = self._lengths.of_tokens = None

    def probe_without_weights(self, inner: Any) -> None:
        """Find the layers on the meta device; where a model looks at values as it runs, give it zeros for once."""
        try:
            self._find_layers(inner)
        except CheckpointError:
            raise
        except Exception:  # code that reads values: once more with zeros in memory, and what fails then is told
            inner.to_empty(device=self._ctx.device)
            with torch.no_grad():
                for tensor in (*inner.parameters(), *inner.buffers()):
                    tensor.zero_()
            self.probe(inner)

    def probe(self, inner: Any) -> None:
        """Find the layers. Raises CheckpointError where the library's code does not run."""
        try:
            self._find_layers(inner)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{class_name(inner)} does not run here: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def compare_with_library(self, inner: Any) -> None:
        """Compare the class with paged attention. Raises CheckpointError where the class computes something else."""
        full = not self._ctx.sliding_window  # then no request is longer than the window
        config = self._config if full else check.short_windows(self._config)
        twin = flat_model(config, self._ctx, check.NAME).eval()
        probe = _Probe(self._ctx, config)

        def options(
            path: str, module: nn.Module, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]
        ) -> AttentionOptions:
            if path not in probe.layers:
                probe.record(path, module, k, max(k.shape[-1], v.shape[-1]), given)
            return probe.layers[path].options

        try:
            check.check(inner, twin, options, self._ctx.max_model_len)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{class_name(inner)} cannot be compared with paged attention: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error

    def _run(
        self, inner: Any, ids: torch.Tensor, positions: torch.Tensor, given: InputEmbeds | None = None
    ) -> torch.Tensor:
        inputs = {"input_ids": ids.unsqueeze(0)}
        if given is not None:
            rows = inner.get_input_embeddings()(ids)
            inputs = {"inputs_embeds": rows.index_copy(0, given.tokens, given.data.to(rows.dtype)).unsqueeze(0)}
        base: nn.Module = getattr(inner, inner.base_model_prefix)
        out = base(**inputs, position_ids=positions.unsqueeze(0), use_cache=False, return_dict=True)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def _find_layers(self, inner: Any) -> None:
        """Run one token. Raises whatever a forward pass of the library raises."""
        probe = _Probe(self._ctx, self._config)
        for path, module in inner.named_modules():
            module.__dict__[_REGISTRATION] = _Registration(path, self._step, probe)
        nothing = torch.zeros(1, dtype=torch.int64, device=next(inner.parameters()).device)
        with torch.inference_mode():
            self._run(inner, nothing, nothing)
        if not probe.layers:
            raise CheckpointError(f"{class_name(inner)} calls no attention: it keeps another kind of state.")
        self.layers = nn.ModuleList(probe.layers.values())


class _Probe:
    """A recorder that turns the first attention call of each module into a `_Layer`."""

    def __init__(self, ctx: BuildContext, config: Any) -> None:
        text = config.get_text_config(decoder=True)
        self.ctx = ctx
        self.kinds = getattr(text, "layer_types", None) or ()
        self.window = getattr(text, "sliding_window", None)
        self.layers: dict[str, _Layer] = {}

    def record(self, path: str, module: nn.Module, k: torch.Tensor, width: int, given: Mapping[str, Any]) -> None:
        """Record a call: k is [1, kv_heads, 1, head_dim], `width` that of keys or values, and `given` the call's other
        arguments.
        """
        if path in self.layers:
            raise CheckpointError(f"{path} attends twice in one pass, which needs a cache of its own kind.")
        strange = sorted(key for key, value in given.items() if value is not None and key not in _HARMLESS)
        if strange:
            raise CheckpointError(
                f"{path} needs attention with {', '.join(strange)}, which the paged cache does not have."
            )
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise CheckpointError(f"{path} attends in both directions; only causal models can be served.")
        scale = given.get("scaling")
        window = self._window(module, given) if self.ctx.sliding_window else 0
        sinks = given.get("s_aux")
        options = AttentionOptions(
            scale=float(k.shape[-1] ** -0.5 if scale is None else scale),
            window=window,
            soft_cap=float(given.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach(),
        )
        group = CacheGroup("sliding" if window else "full", self.ctx.block_size, window)
        self.layers[path] = _Layer(path, LayerCache(group, k.shape[1], width), options)

    def _window(self, module: nn.Module, given: Mapping[str, Any]) -> int:
        """Return the window that the call names; where it names none, the one that `layer_types` gives the layer."""
        if "sliding_window" in given:
            return int(given["sliding_window"] or 0)
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index < len(self.kinds) and self.kinds[index] == "sliding_attention":
            return int(self.window or 0)
        return 0


@dataclass(frozen=True)
class _Registration:
    """The data that `attend` needs about a module of the library, attached to that module."""

    path: str
    step: _Step
    probe: _Probe


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through the paged cache; this is the function in the library's registry. Returns [1, tokens, heads,
    value_dim].
    """
    registration: _Registration = getattr(module, _REGISTRATION)
    if attention_mask is not None:
        raise CheckpointError(f"{registration.path} brings a mask of its own; only causal attention can be served.")
    width = max(key.shape[-1], value.shape[-1])
    ctx = registration.step.ctx
    if ctx is None:
        registration.probe.record(registration.path, module, key, width, given)
        _, heads, tokens, _ = query.shape
        return value.new_zeros((1, tokens, heads, value.shape[-1])), None
    layer = registration.probe.layers[registration.path]
    # where keys and values differ in width, zeros change neither scores nor sums
    q, k, v = (nn.functional.pad(each[0], (0, width - each.shape[-1])).transpose(0, 1) for each in (query, key, value))
    out = ctx.attend(layer.name, q.contiguous(), k.contiguous(), v.contiguous(), layer.options)
    return out[..., : value.shape[-1]].contiguous().unsqueeze(0), None


def flat_model(config: Any, ctx: BuildContext, attention: str) -> Any:
    """Build a model without weights whose attention goes to one of Ferrule's functions. Raises CheckpointError."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(check.NAME, check.compare)
    AttentionMaskInterface.register(check.NAME, eager_mask)
    return prepared(build(config, ctx, attention))


def prepared(model: Any) -> Any:
    """Return the model, with the code that looks at values switched off."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("batched_mm")  # the one that does not look at values, so that it can be probed
    return without_padding(model)


def _check_config(config: Any) -> None:
    """Check a configuration for state other than keys and values. Raises CheckpointError where there is some."""
    text = config.get_text_config(decoder=True)
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _PLAIN)
    if kinds:
        raise CheckpointError(f"Layers of the kind {', '.join(kinds)} keep a state, which the paged cache cannot hold.")
    if getattr(text, "num_kv_shared_layers", 0):
        raise CheckpointError("Some layers share keys and values with others.")


def _check_class(inner: Any) -> None:
    """Check that the class keeps no recurrent state and lets its attention be replaced. Raises CheckpointError."""
    name = class_name(inner)
    if getattr(inner, "_is_stateful", False):
        raise CheckpointError(f"{name} keeps a recurrent state, which the paged cache does not have.")
    if not getattr(inner, "_supports_attention_backend", False):
        raise CheckpointError(
            f"{name} does not use transformers' attention interface, so its attention cannot be replaced."
        )
    base = getattr(inner, inner.base_model_prefix, None)
    if base is None or "position_ids" not in inspect.signature(base.forward).parameters:
        raise CheckpointError(f"{name} takes no position ids, so requests of a step cannot be told apart.")
