"""What `resolve` makes of the sections as given: nothing is open any more that has a default.

A field that stays None means something by it: no limit, no file, or what the checkpoint, the platform or a plugin says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrule.config.sections import Config, DecodingConfig, ModelConfig, SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class ResolvedModel(ModelConfig):
    """`model` and what it implies. `localise` then replaces names by folders."""

    tokenizer: str = field()
    hf_config_path: str = field()


@dataclass(frozen=True, kw_only=True)
class ResolvedScheduler(SchedulerConfig):
    """How much runs in a step."""

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
class Resolved(Config):
    """All sections, resolved once, as every process and every component gets them."""

    model: ResolvedModel = field()
    scheduler: ResolvedScheduler = field()
    decoding: ResolvedDecoding = field()
