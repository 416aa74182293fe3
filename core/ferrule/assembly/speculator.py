"""The speculator that the configuration names, beside a model that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ferrule.assembly.choose import Device, attention_layers, refusal
from ferrule.assembly.memory import weight_tensors
from ferrule.assembly.model import Loaded, load_beside
from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.config import LoadConfig, WorkerSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import BuildContext, Model
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.interfaces.speculator import LoadedDraft, Speculator, SpeculatorContext
from ferrule.interfaces.tokenizer import Tokenizer

_TOKENIZERS = ("tokenizer*", "vocab*", "tekken*", "*.tiktoken", "*.model")  # names of files that a tokenizer may have

OpenTokenizer = Callable[[], Tokenizer | None]


@dataclass(frozen=True, kw_only=True)
class SpeculatorMaker:
    """A maker of the configuration's speculator for a model, which may be another copy of the model each time."""

    config: WorkerSettings
    plugins: Plugins
    device: Device
    attention: tuple[str, AttentionBackend]
    context: BuildContext  # of the model
    method: QuantizationMethod | None  # of the model
    num_slots: int
    tokenizer: OpenTokenizer  # of the model
    checked: bool  # nothing is loaded: see `check_model`

    @classmethod
    def of(
        cls,
        config: WorkerSettings,
        plugins: Plugins,
        loaded: Loaded,
        num_slots: int,
        tokenizer: OpenTokenizer,
        checked: bool = False,
    ) -> SpeculatorMaker:
        return cls(
            config=config,
            plugins=plugins,
            device=Device(loaded.platform, loaded.caps),
            attention=(loaded.info.attention, loaded.attention),
            context=replace(loaded.context, adapters=None),  # guesses are the base model's
            method=loaded.method,
            num_slots=num_slots,
            tokenizer=tokenizer,
            checked=checked,
        )

    def make(self, target: Model) -> Speculator | None:
        """Make the speculator, with its weights, or without where the model has none; None: nothing is to be guessed.

        Raises StartupError.
        """
        section = self.config.speculative
        if not section.method:
            return None
        context = SpeculatorContext(
            num_tokens=section.num_tokens,
            num_slots=self.num_slots,
            target=target,
            build=self.context,
            quantization=self.method,
            settings=section.settings,
            load=self._load,
            tokenizer=self.tokenizer,
        )
        with self.device.platform.memory().guard("load"):
            speculator: Speculator = self.plugins.make("speculator", section.method, context)
        self._check_attention(speculator)
        return speculator

    def _check_attention(self, speculator: Speculator) -> None:
        """Raise ConfigError where the server's attention backend does not serve the speculator's own layers."""
        name, backend = self.attention
        layers, context = attention_layers(speculator.cache_specs(), speculator.modules()), self.context
        reasons = (refusal(type(backend), *layer, self.device.caps, context.dtype) for layer in layers)
        reason = next((reason for reason in reasons if reason), None)
        if reason is not None:
            raise ConfigError(
                f"--speculative-config: attention {name}, which serves the model, does not serve the layers of "
                f"{self.config.speculative.method}: {reason}.",
                "Choose another one with --attention-backend.",
            )

    def _load(self, settings: Mapping[str, Any]) -> LoadedDraft:
        """Load the model that `settings` name. Raises StartupError."""
        folder, config = settings.get("model"), self.config
        if not isinstance(folder, str):
            raise ConfigError(f"--speculative-config: the method {config.speculative.method} needs a model.")
        section = replace(
            config.model,
            model=folder,
            tokenizer=folder,
            tokenizer_mode="auto",
            hf_config_path=folder,
            hf_overrides={},
            quantization=settings.get("quantization"),
            quantization_param_path=None,
            dtype=str(self.context.dtype).removeprefix("torch."),
            max_model_len=None,
            pooler_config={},
        )
        beside = replace(
            config,
            model=section,
            load=replace(config.load, load_format=LoadConfig().load_format, model_loader_extra_config={}),
            cache=replace(config.cache, calculate_kv_scales=False),
        )
        model, build = load_beside(beside, self.plugins, self.device, checked=self.checked)
        place = Path(folder)
        has_tokenizer = any(next(place.glob(pattern), None) for pattern in _TOKENIZERS)
        opened: OpenTokenizer = partial(open_tokenizer, beside, self.plugins, place) if has_tokenizer else lambda: None
        return LoadedDraft(model=model, build=build, tokenizer=opened)


def own_bytes(speculator: Speculator, target: Model) -> int:
    """Return the size of a speculator's weights, without those that are the target's too."""
    shared = {id(tensor) for tensor in weight_tensors(target)}
    tensors = {id(tensor): tensor for module in speculator.modules() for tensor in weight_tensors(module)}
    return sum(tensor.nbytes for key, tensor in tensors.items() if key not in shared)
