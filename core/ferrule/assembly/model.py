"""Choose a platform, a model, an attention backend and a weight format, and put the model into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ferrule import checkpoint as checkpoints
from ferrule.config import Resolved
from ferrule.errors import CheckpointError, ConfigError, nearest
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import AttentionOptions, BuildContext, LayerCache, Model
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.plugin import load_first
from ferrule.types import ModelInfo


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and how it came there; `reload` reads the same one once more. `info` lacks what is cached."""

    model: Model
    reload: Callable[[], Model]
    context: BuildContext
    platform: Platform
    attention: AttentionBackend
    cache_type: torch.dtype
    info: ModelInfo


def load(config: Resolved, plugins: Plugins) -> Loaded:
    """Build the model that the configuration names. Raises StartupError."""
    notes: list[str] = []
    platform, caps = _platform(config, plugins, notes)
    with platform.guard("load"):
        return _load(config, plugins, platform, caps, notes)


def _load(config: Resolved, plugins: Plugins, platform: Platform, caps: DeviceCaps, notes: list[str]) -> Loaded:
    folder = Path(config.model.model)
    checkpoint = checkpoints.read(config.model.hf_config_path, config.model.hf_overrides)
    architecture, name = _implementation(config, plugins, checkpoint, notes)
    context = BuildContext(
        config=checkpoint,
        dtype=platform.dtype(config.model.dtype, checkpoint),
        device=platform.device(),
        block_size=config.cache.block_size,
        max_model_len=_max_model_len(config, checkpoint),
        folder=folder,
        trust_remote_code=config.model.trust_remote_code,
        sliding_window=not config.model.disable_sliding_window,
    )
    method_name, method = _quantization(config, plugins, context, caps, notes)
    build: Callable[[], Model] = partial(_build, partial(plugins.load("model", name), context), name, method)
    model = build()
    attention_name, attention = _attention(config, plugins, model, (platform, caps, context.dtype), notes)
    cache_type = attention.cache_type(config.cache.kv_cache_dtype, context.dtype) or context.dtype
    fill = partial(_fill, config, plugins, platform, folder)
    num_parameters, weight_bytes = fill(model)

    def reload() -> Model:
        fresh = build()
        fill(fresh)
        return fresh

    info = ModelInfo(
        architecture=architecture,
        implementation=f"{name} ({plugins.origin('model', name)})",
        vocab_size=checkpoints.positive(checkpoint, "vocab_size") or 0,
        max_model_len=context.max_model_len,
        dtype=str(context.dtype).removeprefix("torch."),
        device=caps.platform,
        attention=attention_name,
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        quantization=method_name,
        notes=tuple(notes),
        depth=platform.depth(),
        prompt_share=platform.prompt_share(),
        prompt_border=model.prompt_border(),
        hidden_size=model.embed_size(),
        groups=(),
        page_bytes=0,
        max_blocks=0,
    )
    return Loaded(model, reload, context, platform, attention, cache_type, info)


def _platform(config: Resolved, plugins: Plugins, notes: list[str]) -> tuple[Platform, DeviceCaps]:
    wanted = None if config.device.device == "auto" else config.device.device
    order = sorted(plugins.names("platform"), key=lambda name: name == "cpu")  # every machine has one: it is last
    _, cls = _choose(plugins, "platform", ("--device", wanted), order, lambda cls: cls.refuses(), notes)
    platform: Platform = cls()
    return platform, platform.prepare(config)


def _choose(
    plugins: Plugins,
    kind: str,
    option: tuple[str, str | None],
    order: Sequence[str],
    refuses: Callable[[Any], str | None],
    notes: list[str],
) -> tuple[str, Any]:
    """Name and class of the plugin that the option names, or of the first in `order` that does not refuse."""
    flag, wanted = option
    if wanted is None:
        chosen = load_first(plugins, kind, order, refuses)
        notes += [f"{kind} {name} refused: {reason}" for name, reason in chosen.refusals]
        return chosen.name, chosen.plugin
    cls = plugins.load(kind, wanted)
    reason = refuses(cls)
    if reason is not None:
        raise ConfigError(f"{flag} {wanted}: {reason}")
    return wanted, cls


def _implementation(
    config: Resolved, plugins: Plugins, checkpoint: Mapping[str, Any], notes: list[str]
) -> tuple[str, str]:
    """The architecture that is served, and the name of the plugin that does it."""
    named = checkpoints.architectures(checkpoint)
    known = plugins.names("model")
    native = next((name for name in named if name in known), None)
    wanted = config.model.model_impl
    if native is None and wanted in ("native", "vllm"):
        hint = nearest(named[0], known)
        raise ConfigError(f"--model-impl {wanted}: there is no native implementation of {', '.join(named)}.{hint}")
    if native is not None and wanted != "transformers":
        return native, native
    if wanted == "auto":
        notes.append(f"model {named[0]} has no native implementation: transformers runs it")
    return named[0], "transformers"


def _quantization(
    config: Resolved, plugins: Plugins, context: BuildContext, caps: DeviceCaps, notes: list[str]
) -> tuple[str | None, QuantizationMethod | None]:
    """The method that is asked for, or that reads the checkpoint; none for float weights as they are."""
    given = context.config.get("quantization_config") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: quantization_config is an object, not {given!r:.80}.")
    wanted, stored = config.model.quantization, dict(given)
    form = str(stored.get("quant_method", "an unnamed method"))

    def refuses(cls: type[QuantizationMethod]) -> str | None:
        if stored and form not in cls.formats:
            return f"the weights are quantized ({form}), which it does not read"
        return cls.refuses(stored, caps, context.dtype)

    if wanted is None and not stored:
        return None, None
    order, option = plugins.names("quantization"), ("--quantization", wanted)
    name, cls = _choose(plugins, "quantization", option, order, refuses, notes)
    return name, cls(stored)


def _build(make: Callable[[], Model], name: str, method: QuantizationMethod | None) -> Model:
    """A model whose layers have their schemes. Raises ConfigError where none takes any."""
    model = make()
    if method is not None:
        named = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        took = [part.quantize(path, method) for path, part in named if callable(getattr(part, "quantize", None))]
        if not any(took):
            raise ConfigError(f"--quantization: there is nothing in the model implementation {name} that takes it.")
    return model


def _max_model_len(config: Resolved, checkpoint: Mapping[str, Any]) -> int:
    """Tokens. Raises ConfigError for more than the checkpoint was made for, unless the environment allows it."""
    limit = checkpoints.max_length(checkpoint, sliding_window=not config.model.disable_sliding_window)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > limit and not config.env.allow_long_max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {limit} tokens that the checkpoint was made for.",
            "Set FERRULE_ALLOW_LONG_MAX_MODEL_LEN=1 to try it; expect nonsense, or NaN, beyond the limit.",
        )
    return wanted or limit


def _attention(
    config: Resolved,
    plugins: Plugins,
    model: Model,
    where: tuple[Platform, DeviceCaps, torch.dtype],
    notes: list[str],
) -> tuple[str, AttentionBackend]:
    layers = attention_layers(model)
    platform, caps, dtype = where
    kind = config.cache.kv_cache_dtype

    def refuses(cls: type[AttentionBackend]) -> str | None:
        if cls.cache_type(kind, dtype) is None:
            return f"it has no cache of {kind} for a model in {str(dtype).removeprefix('torch.')} (--kv-cache-dtype)"
        return next((reason for spec, options in layers if (reason := cls.refuses(spec, options, caps, dtype))), None)

    option = ("--attention-backend", config.device.attention_backend)
    name, cls = _choose(plugins, "attention", option, platform.attention_order(), refuses, notes)
    return name, cls()


def attention_layers(model: Model) -> list[tuple[LayerCache, AttentionOptions]]:
    """What each layer caches and how it scores. A model whose layers do not say how is taken to score plainly."""
    stated = {
        getattr(part, "name", None): options
        for part in _modules(model)
        if isinstance(options := getattr(part, "options", None), AttentionOptions)
    }
    return [
        (spec, stated.get(name) or AttentionOptions(scale=1.0, window=spec.group.window))
        for name, spec in model.cache_specs().items()
    ]


def _fill(config: Resolved, plugins: Plugins, platform: Platform, folder: Path, model: Model) -> tuple[int, int]:
    """Load the weights and lay them out. Returns how many numbers they are, a shared one counted once, and the bytes.

    Raises CheckpointError, also when a parameter was left out.
    """
    source = _weights(config, plugins, folder)
    count = sum(tensor.numel() for tensor in _parameters(model).values())
    given = {"use_tqdm_on_load": config.load.use_tqdm_on_load, "ignore_patterns": config.load.ignore_patterns}
    options = {**config.load.model_loader_extra_config, **given}
    try:
        with torch.no_grad():
            filled = model.load(platform.loading(model, source.tensors(folder, model, options)))
    except CheckpointError as error:
        if source.place and source.place not in error.message:
            raise CheckpointError(f"{source.place}: {error.message}", error.hint) from None
        raise
    missing = sorted(set(_parameters(model)) - filled)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"The weights in {folder} lack {', '.join(missing[:3])}{more}.")
    pack(model)  # which empties parameters
    return count, sum(getattr(part, "nbytes", 0) for part in (*_parameters(model).values(), *_modules(model)))


def pack(model: Model) -> None:
    """Let every part of a loaded model that has a method `pack` lay its weights out for the kernel that reads them."""
    for part in _modules(model):
        if callable(lay_out := getattr(part, "pack", None)):
            lay_out()


def _weights(config: Resolved, plugins: Plugins, folder: Path) -> WeightSource:
    wanted = config.load.load_format
    if wanted == "auto":
        names = plugins.names("load_format")
        wanted = load_first(plugins, "load_format", names, lambda cls: cls.refuses(folder)).name
    source: WeightSource = plugins.load("load_format", wanted)()
    return source


def _modules(model: Model) -> tuple[torch.nn.Module, ...]:
    return tuple(model.modules()) if isinstance(model, torch.nn.Module) else ()


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
