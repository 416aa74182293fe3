"""The one place where values that were left open are filled, and where values are checked against each other.

Pure: it looks at no device, no file and no clock. What depends on the checkpoint or the device (the longest context,
the type of weights, the steps in flight) is settled by the executor, which reports it as `ModelInfo`.
"""

from __future__ import annotations

import dataclasses
import re

from ferrule.config.parse import config_sections
from ferrule.config.schema import Schema
from ferrule.config.sections import CacheConfig, Config, ModelConfig, SchedulerConfig
from ferrule.errors import ConfigError, nearest
from ferrule.plugin import Plugins

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048


def resolve(config: Config, max_model_len: int | None = None) -> Config:
    """Fill what is open. Resolve again with `max_model_len` once the model is loaded; nothing that is set changes.

    Raises ConfigError, one line per contradiction.
    """
    problems = _contradictions(config)
    scheduler = _scheduler(config.scheduler, max_model_len or config.model.max_model_len, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return dataclasses.replace(config, model=_model(config.model), cache=_cache(config.cache), scheduler=scheduler)


def check_names(config: Config, plugins: Plugins) -> None:
    """Check that the plugins which options name exist, without importing them. Raises ConfigError naming the option.

    Names that exist and cannot be used (denied, offered twice) are left to `load`, which says why.
    """
    problems = []
    for spec in Schema(config_sections()).specs:
        if (kind := spec.option.kind) is None:
            continue
        value, known = getattr(getattr(config, spec.section), spec.name), plugins.names(kind)
        names = [name.removeprefix("+") for name in value] if isinstance(value, tuple) else [value]
        for name in names:
            if name not in (None, "", "auto", *known) and not plugins.origin(kind, name):
                listed = ", ".join(known) or "none is installed"
                problems.append(f"{spec.flag}: no {kind} plugin {name!r}; available: {listed}.{nearest(name, known)}")
    if problems:
        raise ConfigError("\n".join(problems))


def _model(section: ModelConfig) -> ModelConfig:
    """The model answers under the name that the user gave, also after a hub id has become a folder."""
    names = section.served_model_name or ((section.model,) if section.model else ())
    return dataclasses.replace(section, served_model_name=names)


def _cache(section: CacheConfig) -> CacheConfig:
    return dataclasses.replace(section, block_size=section.block_size or BLOCK_SIZE)


def _scheduler(section: SchedulerConfig, max_model_len: int | None, problems: list[str]) -> SchedulerConfig:
    """Tokens per step stay open when whole prompts must fit into a step and the longest one is not known yet."""
    seqs, tokens = section.max_num_seqs, section.max_num_batched_tokens
    whole_prompts = 0 if section.enable_chunked_prefill else max_model_len
    if tokens is None and whole_prompts is not None:
        tokens = max(_MAX_NUM_BATCHED_TOKENS, whole_prompts, seqs or 0)
    if seqs is None:
        seqs = MAX_NUM_SEQS if tokens is None else min(MAX_NUM_SEQS, tokens)
    if tokens is not None and tokens < seqs:
        problems.append(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({seqs}): every running request "
            "needs a token per step."
        )
    if tokens is not None and tokens < (whole_prompts or 0):
        problems.append(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-model-len ({whole_prompts}) with "
            "--no-enable-chunked-prefill: a prompt must fit into one step."
        )
    return dataclasses.replace(section, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _contradictions(config: Config) -> list[str]:
    problems = []
    model = config.model
    if len(set(model.served_model_name)) < len(model.served_model_name):
        problems.append("--served-model-name has the same name twice.")
    if any(not name.strip() for name in model.served_model_name):
        problems.append("--served-model-name has an empty name.")
    if any(not key for key in config.frontend.api_key):
        problems.append("--api-key is empty; leave it out to serve without a key.")
    if model.logits_processor_pattern is not None:
        try:
            re.compile(model.logits_processor_pattern)
        except re.error as error:
            problems.append(f"--logits-processor-pattern is not a regular expression: {error}.")
    if config.frontend.enable_auto_tool_choice and not config.frontend.tool_call_parser:
        problems.append("--enable-auto-tool-choice needs --tool-call-parser NAME: without it no call is understood.")
    if config.frontend.disable_frontend_multiprocessing and config.frontend.api_server_count > 1:
        problems.append("--disable-frontend-multiprocessing is one process: it does not go with --api-server-count.")
    version = config.observability.show_hidden_metrics_for_version
    if version is not None and not re.fullmatch(r"\d+\.\d+(\.\w+)?", version):
        problems.append(f"--show-hidden-metrics-for-version: {version!r} is not X.Y.")
    root = config.frontend.root_path
    if root and not root.startswith("/"):
        problems.append(f"--root-path: {root!r} must begin with '/'.")
    return problems
