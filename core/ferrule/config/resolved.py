"""What `resolve` makes of the sections as given: nothing is open any more that has a default.

A field that stays None means something by it: no limit, no file, or what the checkpoint, the platform or a plugin says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from dataclasses import replace as replaced

from msgspec.structs import replace

from ferrule.config.sections import (
    CacheConfig,
    Config,
    DecodingConfig,
    DeviceConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PromptAdapterConfig,
    SchedulerConfig,
)
from ferrule.config.speculative import ResolvedSpeculative
from ferrule.env import Environment


@dataclass(frozen=True, kw_only=True)
class ResolvedModel(ModelConfig):
    """The model's section and what it implies. `localise` then replaces names by folders."""

    tokenizer: str = field()
    hf_config_path: str = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedScheduler(SchedulerConfig):
    """The limits of a step, resolved."""

    max_num_seqs: int = field()
    max_num_batched_tokens: int = field()  # see `step_tokens` for the number once the model is loaded
    fits_longest_prompt: bool = field()  # the number was left open: where prompts go whole it grows to the longest
    fits_states: bool = field()  # max_num_seqs was left open: fewer where the states of so many do not fit


@dataclass(frozen=True, kw_only=True)
class ResolvedDecoding(DecodingConfig):
    """The options of guided decoding, with those of --structured-outputs-config among them."""

    @property
    def backend(self) -> str:
        """auto, or the name of a plugin."""
        return self.guided_decoding_backend

    @property
    def fallback(self) -> bool:
        """Whether other backends are asked after the named one."""
        return not self.guided_decoding_disable_fallback

    @property
    def any_whitespace(self) -> bool:
        """Whether JSON may have optional white space. A request can only be stricter; so below."""
        return not self.guided_decoding_disable_any_whitespace

    @property
    def bounded_whitespace(self) -> bool:
        """Whether white space in JSON is limited to what formatted JSON has. A request may ask for more."""
        return not self.guided_decoding_unbounded_whitespace

    @property
    def additional_properties(self) -> bool:
        """Whether JSON may have properties that its schema neither names nor forbids."""
        return not self.guided_decoding_disable_additional_properties


@dataclass(frozen=True, kw_only=True)
class LoRAModule:
    """An adapter to serve from the start. `localise` then replaces its path by a folder."""

    name: str
    path: str
    base_model_name: str | None = None  # a name under which the model answers; None: the first


@dataclass(frozen=True, kw_only=True)
class ResolvedLoRA(LoRAConfig):
    """The options of adapters, resolved."""

    max_cpu_loras: int = field()
    modules: tuple[LoRAModule, ...] = field()  # what --lora-modules says


@dataclass(frozen=True, kw_only=True)
class PromptAdapter:
    """Virtual tokens that stand before some prompts. `path` is their folder.

    `num_tokens` is their number as whoever names the adapter says, 0 where it is not said.
    """

    name: str
    path: str
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ResolvedPromptAdapters(PromptAdapterConfig):
    """The options of prompt adapters, resolved."""

    modules: tuple[PromptAdapter, ...] = field()  # what --prompt-adapters says


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The sections that load a model and run its steps, wherever that happens: an executor is given no more.

    `Resolved` has them too, so a function that is typed with this class is also called where all sections are known.
    """

    model: ResolvedModel
    load: LoadConfig
    cache: CacheConfig
    scheduler: ResolvedScheduler
    speculative: ResolvedSpeculative
    parallel: ParallelConfig
    lora: ResolvedLoRA
    device: DeviceConfig
    observability: ObservabilityConfig
    env: Environment
    parsers: tuple[tuple[str, str], ...]  # (kind, name) of those that read the output: their tags count as text

    @classmethod
    def of(cls, config: WorkerSettings) -> WorkerSettings:
        """Copy these sections alone, without the keys of clients and of the hub: the model is a folder by now."""
        values = {section.name: getattr(config, section.name) for section in fields(WorkerSettings)}
        values["model"] = replaced(config.model, hf_token=None)
        values["env"] = replace(config.env, api_key=None, admin_key=None)
        return WorkerSettings(**values)


@dataclass(frozen=True, kw_only=True)
class Resolved(WorkerSettings, Config):
    """All sections, resolved once, as the server's own processes get them."""

    decoding: ResolvedDecoding = field()
    prompt_adapter: ResolvedPromptAdapters = field()
