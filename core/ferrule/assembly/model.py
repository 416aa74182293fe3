"""Put the model that the configuration names into memory, in four steps.

    choose   the plugins that serve it (`ferrule.assembly.choose`); attention backend and format of the weights once the
             model is built, because they depend on its layers or are not needed for one that cannot be built
    build    the model without weights, its layers with their quantization schemes
    fill     the parameters with the checkpoint's tensors
    pack     the weights for the kernels that read them

A layer whose weights are quantized while they are loaded may pack itself as soon as its last tensor came, so that no
more than one layer is there in both forms; `pack` then finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ferrule import checkpoint as checkpoints
from ferrule.assembly.cache_scales import CacheScales
from ferrule.assembly.choose import Device, ModelChoice, PluginChooser
from ferrule.assembly.contexts import own_length
from ferrule.assembly.headers import check_headers
from ferrule.assembly.memory import count_parameters, weight_tensors
from ferrule.config import WorkerSettings
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.adapters import Adaptable, AdapterBank, NamesModules
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import BuildContext, Generates, Model, Packable, Pools
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import Quantizable, QuantizationMethod
from ferrule.log import Log
from ferrule.slow_start import StartProgress, waiting
from ferrule.types import ModelInfo

_log = Log("worker")
_TASKS = {"generate": Generates, "embed": Pools}  # what a model with the mix-in is served for
_TOO_SLOW = "See --load-timeout: it counts from the last tensor that came."


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, and the choices made for it. `info` does not describe the cache yet."""

    model: Model
    reload: Callable[[], Model]  # the same model once more, from the checkpoint's files as they are then
    context: BuildContext
    platform: Platform
    caps: DeviceCaps
    attention: AttentionBackend
    cache_type: torch.dtype
    cache_scales: CacheScales
    method: QuantizationMethod | None  # None: the weights stay floats
    info: ModelInfo


def check_model(config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None = None) -> Loaded:
    """Return what `load_model` would, with the model on the meta device: it has no weights, whose files are not read.

    Raises the StartupError with which `load_model` would end, as far as it can be known from the headers of files.
    """
    return _loaded(config, plugins, adapters, checked=True)


def load_model(config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None = None) -> Loaded:
    """Choose, build, fill and pack the model that the configuration names. Raises StartupError.

    Its layers are given their parts of the bank `adapters`; by default, of the one that the configuration names.
    """
    return _loaded(config, plugins, adapters, checked=False)


def _loaded(config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None, *, checked: bool) -> Loaded:
    chooser = PluginChooser(plugins)
    device = chooser.device(config)
    with device.platform.memory().guard("load"):
        choice = chooser.before_build(config, device)
        check_headers(config, chooser, choice)
        choice = _outlined(choice) if checked else choice
        adapters = adapters or chooser.adapter_bank(config, choice, choice.context.device)
        choice = replace(choice, context=replace(choice.context, adapters=adapters))
        model = build(choice)
        attention_name, attention = chooser.attention(config, choice, model)
        open_weights, num_parameters = chooser.weight_format(config), count_parameters(model)
        chooser.notes += _weigh(model, choice, open_weights, plugins if checked else None)
    context = choice.context
    info = ModelInfo(
        architecture=choice.architecture,
        implementation=f"{choice.implementation} ({plugins.origin('model', choice.implementation)})",
        vocab_size=checkpoints.positive(context.config, "vocab_size") or 0,
        max_model_len=context.max_model_len,
        dtype=str(context.dtype).removeprefix("torch."),
        device=device.caps.platform,
        attention=attention_name,
        num_parameters=num_parameters,
        weight_bytes=sum(tensor.nbytes for tensor in weight_tensors(model)),
        quantization=choice.quantization,
        notes=tuple(chooser.notes),
        depth=device.platform.execution().depth(),
        prompt_share=device.platform.execution().prompt_share(),
        prompt_border=model.prompt_border(),
        hidden_size=model.embed_size(),
        adapter_slots=0 if adapters is None else adapters.num_slots,
        own_len=own_length(config, context.config),
        tasks=_tasks(config, choice, model),
        splits_prompts=model.splits_prompts,
        groups=(),
        page_bytes=0,
        max_blocks=0,
    )
    cache_type = _cache_type(config, choice, model, attention)
    reload = partial(_reload, choice, open_weights)
    return Loaded(
        model=model,
        reload=reload,
        context=context,
        platform=device.platform,
        caps=device.caps,
        attention=attention,
        cache_type=cache_type,
        cache_scales=choice.cache_scales,
        method=choice.method,
        info=info,
    )


def load_beside(
    config: WorkerSettings, plugins: Plugins, device: Device, *, checked: bool
) -> tuple[Model, BuildContext]:
    """Return a model that is loaded beside another, and what it was built in; see `load_model` and `check_model`.

    Raises StartupError.
    """
    chooser = PluginChooser(plugins)
    with device.platform.memory().guard("load"):
        choice = chooser.before_build(config, device)
        check_headers(config, chooser, choice)
        choice = _outlined(choice) if checked else choice
        model = build(choice)
        _weigh(model, choice, chooser.weight_format(config), plugins if checked else None)
    return model, choice.context


def _weigh(
    model: Model, choice: ModelChoice, open_weights: Callable[[], WeightSource], rehearsing: Plugins | None
) -> list[str]:
    """Give a model its weights, or with the plugins that are `rehearsing` no more than their shapes. Returns notes."""
    if choice.method is None:
        choice.device.platform.memory().check_weights(sum(tensor.nbytes for tensor in weight_tensors(model)))
    note = None
    if rehearsing is not None:
        rehearse_fill(model, choice, open_weights(), builtin=rehearsing.is_builtin("model", choice.implementation))
    else:
        note = fill(model, choice, open_weights())
        pack(model)
    if choice.unread:
        _log.warning("%s", choice.unread)
    return [note] if note else []


def _tasks(config: WorkerSettings, choice: ModelChoice, model: Model) -> tuple[str, ...]:
    """Return the tasks that the model can do. Raises ConfigError where the task that was asked for is not among
    them.
    """
    tasks = tuple(task for task, mixin in _TASKS.items() if isinstance(model, mixin))
    wanted = config.model.task.replace("embedding", "embed")
    if wanted not in ("auto", *tasks):
        raise ConfigError(
            f"--task {wanted}: the model implementation {choice.implementation} is for {', '.join(tasks)}."
        )
    return tasks


def _cache_type(config: WorkerSettings, choice: ModelChoice, model: Model, attention: AttentionBackend) -> torch.dtype:
    """Return the type of the KV cache's elements. Raises ConfigError where the model cannot have the type that was
    asked for.
    """
    kind, own = config.cache.kv_cache_dtype, choice.context.dtype
    cache_type = attention.cache_type(kind, own) or own
    if cache_type != own and not all(spec.attended for spec in model.cache_specs().values()):
        raise ConfigError(
            f"--kv-cache-dtype {kind}: the model implementation {choice.implementation} reads its cache itself, so the "
            f"cache has the model's type, {str(own).removeprefix('torch.')}.",
            "Leave --kv-cache-dtype out.",
        )
    return cache_type


def _outlined(choice: ModelChoice) -> ModelChoice:
    """Return the choice for a model on the meta device, which takes no memory."""
    return replace(choice, context=replace(choice.context, device=torch.device("meta")))


def _reload(choice: ModelChoice, open_weights: Callable[[], WeightSource]) -> Model:
    model = build(choice)
    fill(model, choice, open_weights())
    pack(model)
    return model


def outline(config: WorkerSettings, chooser: PluginChooser, *, compare: bool = True) -> tuple[ModelChoice, Model]:
    """Return what a start would choose, and the model on the meta device, which takes no memory. Raises StartupError.

    With `compare`, sizes are compared with the headers of the weights, where there are weights.
    """
    choice = chooser.before_build(config, chooser.device(config))
    if compare:
        check_headers(config, chooser, choice)
    return choice, build(_outlined(choice))


def build(choice: ModelChoice) -> Model:
    """Build the model without weights; layers that are quantized have their schemes.

    Raises CheckpointError where ``config.json`` describes a model that cannot be built, ConfigError where no layer
    takes a scheme.
    """
    try:
        model = choice.model(choice.context)
    except torch.OutOfMemoryError:  # of the device: the platform says what to change
        raise
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise  # the platform says it
        cause = (str(error).strip().splitlines() or [""])[0]
        sizes = ", ".join(f"{key} {value}" for key, value in checkpoints.sizes(choice.context.config).items())
        raise CheckpointError(
            f"The model implementation {choice.implementation} cannot build what config.json describes: "
            f"{type(error).__name__}: {cause:.200}",
            f"The sizes in config.json are {sizes}.",
        ) from error
    bank = choice.context.adapters
    if bank is not None and isinstance(model, torch.nn.Module):
        bank.module_name = model.module_name if isinstance(model, NamesModules) else str
        parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Adaptable)]
        adapted = [part.adapt(name, bank) for name, part in parts]
        if not any(adapted):
            raise ConfigError(
                f"--enable-lora: the model implementation {choice.implementation} has no layer for adapters to change."
            )
        if bank.position_scales is not None and not bank.scales_positions:
            raise ConfigError(f"--long-lora-scaling-factors: {choice.implementation} models have no rotary positions.")
    method = choice.method
    if method is not None:
        modules = list(model.named_modules()) if isinstance(model, torch.nn.Module) else []  # schemes may add layers
        quantized = [part.quantize(name, method) for name, part in modules if isinstance(part, Quantizable)]
        if not any(quantized):
            raise ConfigError(
                f"--quantization {choice.quantization}: the model implementation {choice.implementation} has no layer "
                "that it quantizes.",
                "" if method.config else "Leave --quantization out to serve the checkpoint's weights as they are.",
            )
    return model


def fill(model: Model, choice: ModelChoice, source: WeightSource) -> str | None:
    """Load the checkpoint's weights into the parameters. Returns a message for the log, if any.

    Raises CheckpointError, naming file and tensor, for a tensor that does not fit, and for parameters that were not
    filled.
    """
    folder, asked = choice.context.folder, set(_parameters(model))
    try:
        with torch.no_grad(), waiting(f"the weights in {folder}", choice.load_timeout, _TOO_SLOW) as progress:
            tensors = _told(source.tensors(folder, model, choice.load_options), progress)
            tensors = choice.cache_scales.without(tensors)
            tensors = tensors if choice.method is None else choice.method.decode_tensors(tensors)
            filled = model.load_weights(choice.device.platform.memory().loading(model, tensors))
    except CheckpointError as error:
        if source.place and source.place not in error.message:
            raise CheckpointError(f"{source.place}: {error.message}", error.hint) from None
        raise
    _check_filled(
        folder, asked & set(_parameters(model)) - filled
    )  # schemes put parameters of their own in their place
    return choice.cache_scales.give(model)


def rehearse_fill(model: Model, choice: ModelChoice, source: WeightSource, *, builtin: bool) -> None:
    """Give a model on the meta device tensors with the shapes that the headers of its weights state, and no values.

    Raises CheckpointError where `fill` would for their names and shapes. Weights that are quantized, formats whose
    headers say too little, and models of others, which may look at values, are only checked for being there.
    """
    context = choice.context
    shapes = source.shapes(context.folder, choice.load_options)
    if not shapes or choice.method is not None or not builtin or choice.any_architecture:
        return
    tensors = ((name, torch.empty(shape, dtype=context.dtype, device="meta")) for name, shape in shapes.items())
    filled = model.load_weights((name, tensor) for name, tensor in tensors if not choice.cache_scales.takes(name))
    _check_filled(context.folder, set(_parameters(model)) - filled)


def _check_filled(folder: Path | None, missing: set[str]) -> None:
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"The weights in {folder} lack {', '.join(names[:3])}{more}.")


def _told(tensors: Iterable[tuple[str, torch.Tensor]], progress: StartProgress) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, tensor) in enumerate(tensors, 1):
        progress.step(f"tensor {number}, {name}")
        yield name, tensor


def pack(model: Model) -> None:
    """Have every part of a filled model lay its weights out for the kernels that read them."""
    with waiting("the weights to be laid out for the kernels"):
        for part in model.modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(part, Packable):
                part.pack()


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
