"""`transformers`: any causal language model of that library whose attention goes through its attention interface.

The library's modules compute everything but attention: an attention function of our own is registered under the name
`ferrule`, and it hands queries, keys and values to the engine's paged cache. The library's cache, masks and generation
are not used. All requests of a step are one flat row [1, tokens], told apart by their positions alone.

Loading is the library's own conversion from checkpoint names to parameters, fed with tensors that a Ferrule load format
has read: no file is opened by the library, and a missing, unexpected or mis-shaped tensor is an error. Models with a
sliding window, soft caps or sinks are compared with the library's own forward pass then (`transformers_check`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ferrule.checkpoint import remote_code
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import AttentionOptions, BuildContext, ForwardContext, InputEmbeds, LayerCache, Model
from ferrule.types import CacheGroup
from ferrule_plugins.model import transformers_check

_NAME = "ferrule"  # of the attention function in the library's registry
_REGISTRATION = "ferrule_registration"  # attribute of the library's modules: their `_Registration`
_PLAIN = {"full_attention", "sliding_attention", "attention"}
# Arguments of an attention call that change nothing here. Any other one that is set is refused.
_HARMLESS = frozenset(
    ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache")
    + ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position")
    + ("position_embeddings", "layer_idx", "deterministic", "logits_to_keep", "training", "past_key_values")
)


@dataclass
class _Step:
    """The forward pass in progress. `ctx` None: a probe, which records layers instead of attending."""

    ctx: ForwardContext | None = None


class _Layer(nn.Module):
    """What an attention module needs, as its call showed. A submodule, so that it is found as an `AttentionLayer`."""

    def __init__(self, name: str, cache: LayerCache, options: AttentionOptions) -> None:
        super().__init__()
        self.name = name
        self.cache = cache
        self.options = options


class _Given:
    """An output of the base model of which only the hidden states exist."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Passthrough(nn.Module):
    """Stands for the base model, or a part of it, where only the head is to run: its output is `hidden`."""

    hidden: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return self  # OPT's head asks for `model.decoder`

    def forward(self, *args: Any, **kwargs: Any) -> _Given:
        return _Given(self.hidden)


class TransformersModel(nn.Module, Model):
    """Wraps the library's model. Layers are found by a probe of one token, which on the meta device costs nothing."""

    conformance = MappingProxyType({"recipes": ("llama", "gemma2", "mixtral")})

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._step = _Step()
        self.layers = nn.ModuleList()  # of `_Layer`, in the order in which they run; empty before a probe
        self._config = _library_config(ctx)
        _check_config(self._config, ctx)
        self.inner = _build(self._config, ctx)
        _check_class(self.inner)

    @property
    def base(self) -> nn.Module:
        """The part without the head."""
        base: nn.Module = getattr(self.inner, self.inner.base_model_prefix)
        return base

    def cache_specs(self) -> dict[str, LayerCache]:
        if not len(self.layers):
            self._probe_without_weights()
        return {layer.name: layer.cache for layer in self.layers if isinstance(layer, _Layer)}

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        self._step.ctx = ctx
        try:
            return self._run(ids, ctx.positions, ctx.embeds)
        finally:
            self._step.ctx = None

    def embed_size(self) -> int:
        """0 for what needs ids besides, such as a second embedding in each layer."""
        table = self.inner.get_input_embeddings()
        accepts_embeds = "inputs_embeds" in inspect.signature(self.base.forward).parameters
        if (
            not accepts_embeds
            or not isinstance(table, nn.Embedding)
            or hasattr(self._config, "hidden_size_per_layer_input")
        ):
            return 0
        return int(table.embedding_dim)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the library's own forward with the base model replaced: the head, and what it does to logits."""
        head = copy.copy(self.inner)
        stand_in = _Passthrough()
        stand_in.hidden = hidden.unsqueeze(0)
        head._modules = {**self.inner._modules, self.inner.base_model_prefix: stand_in}
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = head(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0].float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = {name.removeprefix("inner."): tensor for name, tensor in weights}
        cls = type(self.inner)
        del self.inner  # before there is another one
        self.inner = _filled(cls, self._config, tensors, self._ctx)
        self._probe()
        if self._is_unusual():
            self._compare_with_library()
        return {name for name, _ in self.named_parameters()}

    # ------------------------------------------------------------------------------------------ attention

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, given: InputEmbeds | None = None) -> torch.Tensor:
        inputs = {"input_ids": ids.unsqueeze(0)}
        if given is not None:
            rows = self.inner.get_input_embeddings()(ids)
            inputs = {"inputs_embeds": rows.index_copy(0, given.tokens, given.data.to(rows.dtype)).unsqueeze(0)}
        out = self.base(**inputs, position_ids=positions.unsqueeze(0), use_cache=False, return_dict=True)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def _probe_without_weights(self) -> None:
        """Find the layers on the meta device; where a model looks at values as it runs, give it zeros for once."""
        try:
            self._find_layers()
        except CheckpointError:
            raise
        except Exception:
            self.inner.to_empty(device=self._ctx.device)
            with torch.no_grad():
                for tensor in (*self.inner.parameters(), *self.inner.buffers()):
                    tensor.zero_()
            self._probe()

    def _probe(self) -> None:
        """Find the layers. Raises CheckpointError where the library's code does not run."""
        try:
            self._find_layers()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{_name(self.inner)} does not run here: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def _find_layers(self) -> None:
        """Run one token. Raises whatever a forward pass of the library raises."""
        probe = _Probe(self._ctx, self._config)
        for path, module in self.inner.named_modules():
            module.__dict__[_REGISTRATION] = _Registration(path, self._step, probe)
        nothing = torch.zeros(1, dtype=torch.int64, device=next(self.inner.parameters()).device)
        with torch.inference_mode():
            self._run(nothing, nothing)
        if not probe.layers:
            raise CheckpointError(f"{_name(self.inner)} calls no attention: it keeps another kind of state.")
        self.layers = nn.ModuleList(probe.layers.values())

    # ------------------------------------------------------------------------------------------ self-check

    def _is_unusual(self) -> bool:
        """Whether attention is more than causal: the class has a window, soft caps or sinks."""
        options = [layer.options for layer in self.layers if isinstance(layer, _Layer)]
        unusual = any(each.window or each.soft_cap or each.sinks is not None for each in options)
        return unusual or bool(getattr(self._config.get_text_config(), "sliding_window", None))

    def _compare_with_library(self) -> None:
        """Raises CheckpointError where the class computes something else than paged attention does."""
        full = not self._ctx.sliding_window  # then no request is longer than the window
        config = self._config if full else transformers_check.short_windows(self._config)
        twin = _build(config, self._ctx, transformers_check.NAME).eval()
        probe = _Probe(self._ctx, config)

        def options(
            path: str, module: nn.Module, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]
        ) -> AttentionOptions:
            if path not in probe.layers:
                probe.record(path, module, k, max(k.shape[-1], v.shape[-1]), given)
            return probe.layers[path].options

        try:
            transformers_check.check(self.inner, twin, options, self._ctx.max_model_len)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{_name(self.inner)} cannot be compared with paged attention: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error


class _Probe:
    """Turns the first attention call of each module into a `_Layer`."""

    def __init__(self, ctx: BuildContext, config: Any) -> None:
        text = config.get_text_config()
        self.ctx = ctx
        self.kinds = getattr(text, "layer_types", None) or ()
        self.window = getattr(text, "sliding_window", None)
        self.layers: dict[str, _Layer] = {}

    def record(self, path: str, module: nn.Module, k: torch.Tensor, width: int, given: Mapping[str, Any]) -> None:
        """k is [1, kv_heads, 1, head_dim], `width` that of keys or values, and `given` the call's other arguments."""
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
        """The window that the call names; where it names none, what `layer_types` says of the layer."""
        if "sliding_window" in given:
            return int(given["sliding_window"] or 0)
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index < len(self.kinds) and self.kinds[index] == "sliding_attention":
            return int(self.window or 0)
        return 0


@dataclass(frozen=True)
class _Registration:
    """What `attend` needs to know of a module of the library, which is attached to it."""

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
    """The attention function in the library's registry. Returns [1, tokens, heads, value_dim]."""
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


# ------------------------------------------------------------------------------------------------ building


def _library_config(ctx: BuildContext) -> Any:
    """The library's configuration object, with the overrides that `ctx.config` has."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    outer: Mapping[str, Any] = getattr(ctx.config, "outer", ctx.config)
    kind = outer.get("model_type")
    known = kind in CONFIG_MAPPING
    trusted = remote_code(outer, known=known, trusted=ctx.trust_remote_code)
    if not known and not trusted:
        raise CheckpointError(
            f"transformers has no model type {kind!r}, and Ferrule has no model {ctx.config.get('architectures')}.",
            "A newer transformers may have it.",
        )
    if outer.get("quantization_config"):
        raise CheckpointError("Quantized checkpoints cannot be served through transformers.")
    try:
        if trusted:
            file: Path | None = getattr(ctx.config, "file", None)  # --hf-config-path may name another
            folder = file.parent if file is not None else ctx.folder
            return AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(outer)))
        config.get_text_config()  # raises where there are several
        return config
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"transformers does not accept this config.json: {error}.") from error


def _check_config(config: Any, ctx: BuildContext) -> None:
    """Refuse what shows in the configuration: state other than keys and values, and length-dependent rotation."""
    text = config.get_text_config()
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _PLAIN)
    if kinds:
        raise CheckpointError(f"Layers of the kind {', '.join(kinds)} keep a state that the paged cache has not.")
    if getattr(text, "num_kv_shared_layers", 0):
        raise CheckpointError("Layers that share keys and values with others cannot be served through transformers.")
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") not in {"dynamic", "longrope"}:
            continue
        limit = settings.get("original_max_position_embeddings") or text.max_position_embeddings
        if ctx.max_model_len > limit:
            raise CheckpointError(
                f"Rotary scaling {settings['rope_type']!r} of transformers depends on the other requests of a step.",
                f"Up to {limit} tokens it does not: --max-model-len {limit}.",
            )


def _build(config: Any, ctx: BuildContext, attention: str = _NAME) -> Any:
    """The library's model without weights, on the meta device; its attention goes to the function of that name."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_NAME, attend)
    AttentionInterface.register(transformers_check.NAME, transformers_check.compare)
    AttentionMaskInterface.register(transformers_check.NAME, eager_mask)
    trusted = remote_code(getattr(ctx.config, "outer", ctx.config), known=True, trusted=ctx.trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=ctx.dtype, trust_remote_code=trusted
            )
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # KeyError: attention classes by name, not ours
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r} whose attention can be "
            f"replaced ({type(error).__name__}: {str(error)[:200]})."
        ) from error

    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("batched_mm")  # the one that does not look at values, so that it can be probed
    return _without_padding(model)


def _without_padding(model: Any) -> Any:
    """Switch off the search for padding in each step's ids that some models do: the ids are never padded."""
    from huggingface_hub.errors import StrictDataclassError

    with suppress(StrictDataclassError):  # a class whose field must be a number, and that does not look
        model.config.pad_token_id = None
    return model


def _check_class(inner: Any) -> None:
    """Refuse what shows in the class."""
    name = _name(inner)
    if getattr(inner, "_is_stateful", False):
        raise CheckpointError(f"{name} keeps a recurrent state, which the paged cache does not have.")
    if not getattr(inner, "_supports_attention_backend", False):
        raise CheckpointError(
            f"{name} does not use transformers' attention interface, so its attention cannot be replaced."
        )
    base = getattr(inner, inner.base_model_prefix, None)
    if base is None or "position_ids" not in inspect.signature(base.forward).parameters:
        raise CheckpointError(f"{name} takes no position ids, so requests of a step cannot be told apart.")


def _name(inner: Any) -> str:
    return f"{type(inner).__name__} of transformers"


def _filled(cls: Any, config: Any, tensors: dict[str, torch.Tensor], ctx: BuildContext) -> Any:
    """A model with these weights. Raises CheckpointError that names the first tensors at fault."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the load format has shown one already
    model, report = cls.from_pretrained(
        None,
        config=copy.deepcopy(config),
        state_dict=tensors,
        dtype=ctx.dtype,
        attn_implementation=_NAME,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    faults = {
        "lacks the tensor": sorted(report["missing_keys"]),
        "holds a tensor that the model does not have:": sorted(report["unexpected_keys"]),
        "holds a tensor of another shape than the model needs:": sorted(map(str, report["mismatched_keys"])),
    }
    for what, names in faults.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"The checkpoint {what} {names[0]}{more}.", f"The model is {_name(model)}.")
    if report.get("error_msgs"):
        raise CheckpointError(f"The checkpoint does not fit {_name(model)}: {str(report['error_msgs'])[:500]}")
    return _without_padding(model).eval().to(ctx.device)
