"""Which plugins serve a model: platform, implementation, quantization, format of the weights, attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ferrule import checkpoint as checkpoints
from ferrule.assembly.cache_scales import CacheScales
from ferrule.assembly.contexts import checked_scaling, max_model_len
from ferrule.assembly.pooling import read_pooling
from ferrule.checkpoint import Values
from ferrule.config import DeviceSettings, LoadConfig, WorkerSettings
from ferrule.config.locations import map_locations
from ferrule.errors import CheckpointError, ConfigError, nearest
from ferrule.interfaces.adapters import AdapterBank, BankContext
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import AttentionLayer, AttentionOptions, BuildContext, LayerCache, Model
from ferrule.interfaces.platform import DeviceCaps, Platform
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.log import Log
from ferrule.plugin import load_first
from ferrule.unread import Watched

_log = Log("worker")
_BESIDE = ("quantize_config.json", "quant_config.json")  # where tools kept settings before config.json had them


@dataclass(frozen=True)
class Device:
    """The platform, prepared, and what its device can do."""

    platform: Platform
    caps: DeviceCaps


@dataclass(frozen=True)
class ModelChoice:
    """The decisions made before a model is built. `quantization` and `method` are None for weights that stay floats."""

    device: Device
    context: BuildContext
    architecture: str  # of the checkpoint
    implementation: str  # name of the model plugin
    model: Callable[[BuildContext], Model]
    any_architecture: bool  # as the model plugin says
    model_names: Mapping[str, str]  # its own names of common keys
    quantization: str | None
    method: QuantizationMethod | None
    load_options: Mapping[str, Any]  # of `WeightSource.tensors`
    cache_scales: CacheScales
    load_timeout: float = 0.0  # seconds without a tensor after which loading is given up; 0: never

    @property
    def unread(self) -> str:
        """A sentence about keys of config.json that the model has not asked for; empty where there are none.

        Complete once the model has its weights. For a model of any architecture it is not known which keys are read.
        """
        config = self.context.config
        if self.any_architecture or not isinstance(config, Watched) or not config.unread:
            return ""
        return f"{config.file}: nothing reads {', '.join(map(repr, config.unread))}"


class PluginChooser:
    """A chooser of plugins: the one that the user names, or the first that does not refuse. `notes` says which refused,
    and why.
    """

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self.notes: list[str] = []

    def choose(
        self,
        kind: str,
        flag: str,
        wanted: str | None,
        order: Sequence[str],
        refuses: Callable[[Any], str | None],
        without: Callable[[], str] = str,
    ) -> str:
        """Return the name of the plugin `wanted`, which `flag` named, or of the first in `order` that does not refuse.

        Raises ConfigError where the plugin that was named refuses, with a hint from `without` about leaving `flag` out,
        and PluginError where all refuse.
        """
        if wanted is None:
            chosen = load_first(self._plugins, kind, order, refuses)
            for refused, why in chosen.refusals:
                self.notes.append(f"{kind} {refused} refused: {why}")
                if why.startswith("--"):  # what the user has set decides this, perhaps without wanting it
                    _log.warning("%s %s is used in place of %s: %s", kind, chosen.name, refused, why)
            return chosen.name
        reason = refuses(self._plugins.load(kind, wanted))
        if reason is not None:
            raise ConfigError(f"{flag} {wanted}: {reason}", without())
        return wanted

    def device(self, config: WorkerSettings) -> Device:
        wanted = None if config.device.device == "auto" else config.device.device
        order = self._plugins.defaults("platform")
        name = self.choose("platform", "--device", wanted, order, lambda cls: cls.refuses())
        platform: Platform = self._plugins.make("platform", name)
        if not self._plugins.is_builtin("platform", name):
            title = self._plugins.title("platform", name)
            _log.warning("the platform is a plugin of another distribution", plugin=title)
        with self._plugins.blamed("platform", name):
            return Device(platform, platform.prepare(DeviceSettings.of(config)))

    def before_build(self, config: WorkerSettings, device: Device) -> ModelChoice:
        """Decide everything that depends on the checkpoint's ``config.json`` and the options alone. Raises
        StartupError.
        """
        folder = Path(config.model.model)
        stated = checkpoints.configured(config.model, self._plugins)
        architecture, name = self._implementation(config, stated)
        model: type[Model] = self._plugins.load("model", name)
        for note in getattr(stated, "notes", ()) if not model.any_architecture else ():  # that one may read them
            _log.warning("%s: %s", stated.file, note)
        checkpoint = checkpoints.completed(stated, model.config_names, model.config_defaults)
        checkpoints.check_sizes(checkpoint, model.config_names)
        context = BuildContext(
            config=Watched(checkpoint) if isinstance(checkpoint, Values) else checkpoint,
            dtype=device.platform.dtype(config.model.dtype, checkpoint),
            device=device.platform.device(),
            block_size=config.cache.block_size,
            max_model_len=max_model_len(config, checkpoint),
            folder=folder,
            trust_remote_code=config.model.trust_remote_code,
            kernels=device.platform.execution().kernels(),
            sliding_window=not config.model.disable_sliding_window,
            pooling=read_pooling(folder, config.model.pooler_config),
        )
        quantization, method = self._quantization(config, context, device)
        return ModelChoice(
            device=device,
            context=context,
            architecture=architecture,
            implementation=name,
            model_names=model.config_names,
            any_architecture=model.any_architecture,
            model=model,  # `build` says what a constructor could not do with config.json
            quantization=quantization,
            method=method,
            load_options={
                **config.load.model_loader_extra_config,
                "use_tqdm_on_load": config.load.use_tqdm_on_load,
                "ignore_patterns": config.load.ignore_patterns,
                **_locations(config),
            },
            cache_scales=CacheScales.of(
                config.model.quantization_param_path, config.cache.kv_cache_dtype, config.cache.calculate_kv_scales
            ),
            load_timeout=config.load.load_timeout,
        )

    def attention(self, config: WorkerSettings, choice: ModelChoice, model: Model) -> tuple[str, AttentionBackend]:
        """Return the name and the class of the backend that serves every layer of the model. Raises StartupError."""
        layers = attention_layers(model.cache_specs(), [model])
        caps, dtype, kind = choice.device.caps, choice.context.dtype, config.cache.kv_cache_dtype

        def refuses(cls: type[AttentionBackend]) -> str | None:
            if cls.cache_type(kind, dtype) is None:
                return f"it has no cache of {kind} for a model in {_short(dtype)} (--kv-cache-dtype)"
            reasons = (refusal(cls, spec, options, caps, dtype) for spec, options in layers)
            return next((reason for reason in reasons if reason), None)

        wanted = config.device.attention_backend or config.env.attention_backend
        if wanted is not None and wanted not in self._plugins.names("attention"):
            wanted = wanted.lower()
        order = choice.device.platform.attention_order()
        name = self.choose("attention", "--attention-backend", wanted, order, refuses)
        backend: AttentionBackend = self._plugins.make("attention", name)
        backend.begin(caps)
        return name, backend

    def adapter_bank(self, config: WorkerSettings, choice: ModelChoice, device: torch.device) -> AdapterBank | None:
        """Make the bank of adapters on a device; None without --enable-lora. Raises StartupError."""
        section, context = config.lora, choice.context
        if not section.enable_lora:
            return None
        dtype: torch.dtype = context.dtype if section.lora_dtype == "auto" else getattr(torch, section.lora_dtype)
        bank: AdapterBank = self._plugins.make(
            "adapter_bank",
            section.adapter_bank,
            BankContext(
                num_slots=section.max_loras,
                max_rank=section.max_lora_rank,
                max_host=section.max_cpu_loras,
                bias=section.enable_lora_bias,
                dtype=dtype,
                device=device,
                kernels=context.kernels,
                config=context.config,
                scaling=checked_scaling(config, context.config),
                max_added=section.lora_extra_vocab_size,
                no_added="--speculative-config has no guesses of such" if config.speculative.method else "",
            ),
        )
        return bank

    def weight_format(self, config: WorkerSettings) -> Callable[[], WeightSource]:
        """Return a function that opens the weights in the model's folder, in their format. Raises StartupError if no
        format fits.
        """
        folder, wanted = Path(config.model.model), config.load.load_format
        if wanted == "auto":
            names = self._plugins.defaults("load_format")
            wanted = load_first(self._plugins, "load_format", names, lambda cls: cls.refuses(folder)).name
        return partial(self._plugins.make, "load_format", wanted)

    def _implementation(self, config: WorkerSettings, checkpoint: Mapping[str, Any]) -> tuple[str, str]:
        """Return the architecture that is served, and the name of the plugin that implements it."""
        named = checkpoints.architectures(checkpoint)
        known = self._plugins.names("model")
        native = next((name for name in named if name in known), None)
        wanted = config.model.model_impl
        if wanted not in ("auto", "native", "vllm"):
            return named[0], wanted
        if native is not None:
            return native, native
        general = (name for name in known if self._plugins.stated("model", name, "any_architecture"))
        chosen = next(general, None) if wanted == "auto" else None
        if chosen is None:
            hint = nearest(named[0], known)
            raise ConfigError(f"--model-impl {wanted}: there is no native implementation of {', '.join(named)}.{hint}")
        self.notes.append(f"model {named[0]} has no native implementation: {chosen} runs it")
        return named[0], chosen

    def _quantization(
        self, config: WorkerSettings, context: BuildContext, device: Device
    ) -> tuple[str | None, QuantizationMethod | None]:
        """Return the name and the instance of the method that is asked for, or that reads the checkpoint; None for
        float weights that stay floats.
        """
        given = context.config.get("quantization_config") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: quantization_config is an object, not {given!r:.80}.")
        (flag, wanted), settings = self._wanted_method(config), dict(given)
        beside = wanted is not None and not settings
        if wanted is not None and beside:
            settings = self._settings_beside(wanted, context, device)
        form = str(settings.get("quant_method", "an unnamed method"))

        def refuses(cls: type[QuantizationMethod]) -> str | None:
            if settings and form not in cls.formats:
                return f"the weights are quantized ({form}), which it does not read"
            return cls.refuses(settings, device.caps, context.dtype)

        if wanted is None and not settings:
            return None, None
        order = sorted(self._plugins.defaults("quantization"), key=lambda name: name != form)  # several read some forms

        def without() -> str:
            if not settings:
                return f"The checkpoint's weights are floats: leave {flag} out to serve them as they are."
            if beside:  # nothing says what the settings are of
                return ""
            loads = partial(self._plugins.load, "quantization")
            reader = next((name for name in order if refuses(loads(name)) is None), None)
            return f"Leave {flag} out: {reader} then serves the weights as they are." if reader else ""

        name = self.choose("quantization", flag, wanted, order, refuses, without)
        if settings and not beside and context.folder is not None:
            cls: type[QuantizationMethod] = self._plugins.load("quantization", name)
            settings = {**cls.settings_of(context.folder, settings), **settings}
        return name, self._plugins.make("quantization", name, settings)

    def _wanted_method(self, config: WorkerSettings) -> tuple[str, str | None]:
        """Return the option that decides the method, `--quantization` or the load format's, and the method's name, if
        any.

        Raises ConfigError where the two differ.
        """
        wanted, form = config.model.quantization, config.load.load_format
        if form == "auto":
            return "--quantization", wanted
        source: type[WeightSource] = self._plugins.load("load_format", form)
        if source.quantization is not None and wanted not in (None, source.quantization):
            raise ConfigError(
                f"--load-format {form} is for weights quantized with {source.quantization}, and --quantization is "
                f"{wanted}.",
                "Leave one of the two out.",
            )
        return ("--load-format", source.quantization) if wanted is None else ("--quantization", wanted)

    def _settings_beside(self, wanted: str, context: BuildContext, device: Device) -> dict[str, Any]:
        """Return the settings that an older tool wrote in a file of its own; none for a method that quantizes float
        weights.
        """
        cls: type[QuantizationMethod] = self._plugins.load("quantization", wanted)
        files = [context.folder / name for name in _BESIDE] if context.folder else []
        found = next((file for file in files if file.is_file()), None)
        if context.folder is None or not cls.formats or cls.refuses({}, device.caps, context.dtype) is None:
            return {}
        stated = {} if found is None else checkpoints.read_json(found)
        known = cls.settings_of(context.folder, stated)
        if not known and found is None:
            return {}
        return {"quant_method": wanted if wanted in cls.formats else cls.formats[0], **known, **stated}


def attention_layers(
    specs: Mapping[str, LayerCache], modules: Iterable[object]
) -> list[tuple[LayerCache | None, AttentionOptions]]:
    """Return the cache and the options of each layer with attention; default options where no `AttentionLayer` among
    the submodules has its name.
    """
    parts = (part for module in modules if isinstance(module, torch.nn.Module) for part in module.modules())
    stated = {part.name: part.options for part in parts if isinstance(part, AttentionLayer)}
    cached = [
        (spec, stated.get(name) or AttentionOptions(scale=1.0, window=spec.group.window))
        for name, spec in specs.items()
        if spec.attended
    ]
    return cached + [(None, options) for options in stated.values() if not options.causal]


def refusal(
    cls: type[AttentionBackend],
    spec: LayerCache | None,
    options: AttentionOptions,
    caps: DeviceCaps,
    dtype: torch.dtype,
) -> str | None:
    """Return why a backend does not serve a layer: it lacks one of the `AttentionBackend.features`, or says so itself.
    None: it serves it.
    """
    if spec is None:
        return None if "bidirectional" in cls.features else "has no attention over what follows a token"
    return lacking_feature(cls, spec, options) or cls.refuses(spec, options, caps, dtype)


def lacking_feature(cls: type[AttentionBackend], spec: LayerCache, options: AttentionOptions) -> str | None:
    """Return why a backend without some of the `AttentionBackend.features` does not serve a layer that caches. None: it
    lacks none.
    """
    if spec.value_dim and "latent" not in cls.features:
        return "has no latent attention, whose values are a part of the keys"
    if options.chunk and "chunk" not in cls.features:
        return "has no attention within chunks"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _locations(config: WorkerSettings) -> dict[str, Any]:
    """Return the option `--pt-load-map-location`, where it is not the default: formats may refuse options that they do
    not know.
    """
    found = map_locations(config.load.pt_load_map_location)
    return {} if found == map_locations(LoadConfig.pt_load_map_location) else {"pt_load_map_location": found}
