"""Choose a platform, a model, an attention backend and a weight format, and put the model into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ferrule.config import Config
from ferrule.config import checkpoint as checkpoints
from ferrule.errors import CheckpointError, ConfigError, nearest
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import AttentionOptions, BuildContext, LayerCache, Model
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import load_first

_DEFAULT_BLOCK_SIZE = 16


@dataclass(kw_only=True)
class Loaded:
    """A model in memory, and how it came there. `notes` say what was refused, and why."""

    model: Model
    architecture: str
    implementation: str
    context: BuildContext
    caps: DeviceCaps
    platform: Platform
    attention_name: str
    attention: AttentionBackend
    vocab_size: int
    notes: list[str] = field(default_factory=list)


def load(config: Config, plugins: Plugins) -> Loaded:
    """Build the model that the configuration names. Raises StartupError."""
    notes: list[str] = []
    platform, caps = _platform(config, plugins, notes)
    folder = Path(config.model.model)
    checkpoint = checkpoints.read(folder, config.model.hf_overrides)
    architecture, name = _implementation(config, plugins, checkpoint, notes)
    context = BuildContext(
        config=checkpoint,
        dtype=platform.dtype(config.model.dtype, checkpoint),
        device=platform.device(),
        block_size=config.cache.block_size or _DEFAULT_BLOCK_SIZE,
        max_model_len=_max_model_len(config, checkpoint),
        folder=folder,
        trust_remote_code=config.model.trust_remote_code,
        sliding_window=not config.model.disable_sliding_window,
    )
    model: Model = plugins.load("model", name)(context)
    attention_name, attention = _attention(config, plugins, model, (platform, caps, context.dtype), notes)
    _fill(config, plugins, model, folder)
    return Loaded(
        model=model,
        architecture=architecture,
        implementation=f"{name} ({plugins.origin('model', name)})",
        context=context,
        caps=caps,
        platform=platform,
        attention_name=attention_name,
        attention=attention,
        vocab_size=checkpoints.positive(checkpoint, "vocab_size") or 0,
        notes=notes,
    )


def _platform(config: Config, plugins: Plugins, notes: list[str]) -> tuple[Platform, DeviceCaps]:
    wanted = config.device.device
    if wanted == "auto":
        names = sorted(plugins.names("platform"), key=lambda name: name == "cpu")  # every machine has one: it is last
        chosen = load_first(plugins, "platform", names, lambda cls: cls.refuses())
        notes += [f"platform {name} refused: {reason}" for name, reason in chosen.refusals]
        platform: Platform = chosen.plugin()
    else:
        cls = plugins.load("platform", wanted)
        reason = cls.refuses()
        if reason is not None:
            raise ConfigError(f"--device {wanted}: {reason}")
        platform = cls()
    return platform, platform.prepare(config)


def _implementation(
    config: Config, plugins: Plugins, checkpoint: Mapping[str, Any], notes: list[str]
) -> tuple[str, str]:
    """The architecture that is served, and the name of the plugin that does it."""
    named = checkpoints.architectures(checkpoint)
    known = plugins.names("model")
    native = next((name for name in named if name in known), None)
    wanted = config.model.model_impl
    if checkpoint.get("quantization_config"):
        method = dict(checkpoint["quantization_config"]).get("quant_method", "an unnamed method")
        raise CheckpointError(f"The weights are quantized ({method}); no installed plugin reads them.")
    if native is None and wanted in ("native", "vllm"):
        hint = nearest(named[0], known)
        raise ConfigError(f"--model-impl {wanted}: there is no native implementation of {', '.join(named)}.{hint}")
    if native is not None and wanted != "transformers":
        return native, native
    if wanted == "auto":
        notes.append(f"model {named[0]} has no native implementation: transformers runs it")
    return named[0], "transformers"


def _max_model_len(config: Config, checkpoint: Mapping[str, Any]) -> int:
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
    config: Config,
    plugins: Plugins,
    model: Model,
    where: tuple[Platform, DeviceCaps, torch.dtype],
    notes: list[str],
) -> tuple[str, AttentionBackend]:
    layers = attention_layers(model)
    platform, caps, dtype = where

    def refuses(cls: type[AttentionBackend]) -> str | None:
        return next((reason for spec, options in layers if (reason := cls.refuses(spec, options, caps, dtype))), None)

    wanted = config.device.attention_backend or config.env.attention_backend
    if wanted is not None:
        name = wanted if wanted in plugins.names("attention") else wanted.lower()
        cls = plugins.load("attention", name)
        reason = refuses(cls)
        if reason is not None:
            raise ConfigError(f"--attention-backend {wanted}: {reason}")
        return name, cls()
    chosen = load_first(plugins, "attention", platform.attention_order(), refuses)
    notes += [f"attention {name} refused: {reason}" for name, reason in chosen.refusals]
    return chosen.name, chosen.plugin()


def attention_layers(model: Model) -> list[tuple[LayerCache, AttentionOptions]]:
    """What each layer caches and how it scores. A model whose layers do not say how is taken to score plainly."""
    stated = {
        getattr(part, "name", None): options
        for part in (model.modules() if isinstance(model, torch.nn.Module) else ())
        if isinstance(options := getattr(part, "options", None), AttentionOptions)
    }
    return [
        (spec, stated.get(name) or AttentionOptions(scale=1.0, window=spec.group.window))
        for name, spec in model.cache_specs().items()
    ]


def _fill(config: Config, plugins: Plugins, model: Model, folder: Path) -> None:
    """Load the weights, and check that no parameter was left out. Raises CheckpointError."""
    source = _weights(config, plugins, folder)
    given = {"use_tqdm_on_load": config.load.use_tqdm_on_load, "ignore_patterns": config.load.ignore_patterns}
    options = {**config.load.model_loader_extra_config, **given}
    try:
        with torch.no_grad():
            filled = model.load(source.tensors(folder, model, options))
    except CheckpointError as error:
        if source.place and source.place not in error.message:
            raise CheckpointError(f"{source.place}: {error.message}", error.hint) from None
        raise
    missing = sorted(set(_parameters(model)) - filled)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"The weights in {folder} lack {', '.join(missing[:3])}{more}.")


def _weights(config: Config, plugins: Plugins, folder: Path) -> WeightSource:
    wanted = config.load.load_format
    if wanted == "auto":
        names = plugins.names("load_format")
        wanted = load_first(plugins, "load_format", names, lambda cls: cls.refuses(folder)).name
    source: WeightSource = plugins.load("load_format", wanted)()
    return source


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}


def weigh(model: Model) -> tuple[int, int]:
    """Numbers and bytes of parameters, a shared one once."""
    tensors: Iterable[torch.Tensor] = _parameters(model).values()
    sizes = [(tensor.numel(), tensor.nbytes) for tensor in tensors]
    return sum(count for count, _ in sizes), sum(size for _, size in sizes)
