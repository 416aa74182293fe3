"""The one place where values that were left open are filled, and where values are checked against each other.

Pure: it looks at no device, no file and no clock. What depends on the checkpoint or the device (the longest context,
the type of weights, the steps in flight) is settled by the executor, which reports it as `ModelInfo`; from that and the
resolved sections come the scheduler's limits (`ferrule.assembly.limits`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ferrule.config.adapters import lora_remarks, prompt_adapter_remarks, resolve_lora, resolve_prompt_adapters
from ferrule.config.locations import map_locations
from ferrule.config.parse import config_schema
from ferrule.config.resolved import Resolved, ResolvedDecoding, ResolvedModel, ResolvedScheduler
from ferrule.config.sections import Config, DecodingConfig, ModelConfig, ObservabilityConfig, SchedulerConfig
from ferrule.config.suffixes import BACKEND_SUFFIXES, split_backend
from ferrule.env import variable
from ferrule.errors import ConfigError, nearest
from ferrule.extras import missing
from ferrule.plugin import Plugins
from ferrule.plugin.files import path_ref

_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_DETAILED_TRACES = ("model", "worker", "all")
_COMPILATION = (  # keys that vLLM documents; what a platform does not read, it says
    *("level", "mode", "backend", "custom_ops", "splitting_ops", "pass_config", "compile_sizes", "compile_mm_encoder"),
    *("use_inductor", "inductor_compile_config", "inductor_passes", "use_inductor_graph_partition"),
    *("use_cudagraph", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "max_capture_size"),
    *("cudagraph_num_of_warmups", "cudagraph_copy_inputs", "cudagraph_specialize_lora", "full_cuda_graph"),
    *("cache_dir", "local_cache_dir", "compile_cache_save_format", "debug_dump_path", "dynamic_shapes_config"),
    *("compile_ranges_split_points", "bs_to_padded_graph_size", "enabled_custom_ops", "disabled_custom_ops"),
    *("static_forward_context", "traced_files", "compilation_time"),
)


def resolve(config: Config) -> Resolved:
    """Fill the options that are open; an option that is set does not change. Raises ConfigError, one line per
    contradiction.
    """
    problems = _contradictions(config)
    scheduler = _scheduler(config.scheduler, config.model.max_model_len, problems)
    decoding = _decoding(config.decoding, problems)
    lora = resolve_lora(config.lora, config.model, problems)
    served = (*(config.model.served_model_name or (config.model.model,)), *(module.name for module in lora.modules))
    prompts = resolve_prompt_adapters(config.prompt_adapter, served, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    filled: dict[str, Any] = {"model": _model(config.model), "scheduler": scheduler, "decoding": decoding, "lora": lora}
    return Resolved(**{**_fields(config), **filled, "prompt_adapter": prompts, "parsers": _parsers(config)})


def _parsers(config: Config) -> tuple[tuple[str, str], ...]:
    """Pair the names of the parsers that the options choose with their kinds."""
    chosen = (
        ("reasoning_parser", config.frontend.reasoning_parser),
        ("tool_parser", config.frontend.tool_call_parser),
    )
    return tuple((kind, name) for kind, name in chosen if name)


def detailed_traces(section: ObservabilityConfig) -> frozenset[str]:
    """Return the names in --collect-detailed-traces, of which one value may have several."""
    return frozenset(name for value in section.collect_detailed_traces for name in value.split(","))


def step_tokens(section: ResolvedScheduler, max_model_len: int, splits_prompts: bool = True) -> int:
    """Return the most tokens in a step, for a model whose longest request has `max_model_len` tokens.

    `splits_prompts` is the model's. Raises ConfigError where whole prompts cannot fit into the number that was set.
    """
    tokens = section.max_num_batched_tokens
    if tokens >= max_model_len or (section.enable_chunked_prefill and splits_prompts):
        return tokens
    if not section.fits_longest_prompt:
        raise ConfigError(_too_few_for_a_prompt(tokens, max_model_len, splits_prompts))
    return max_model_len


def check_names(config: Config, plugins: Plugins) -> None:
    """Check that the plugins which options name exist, without importing them. Raises ConfigError naming the option.

    Names that exist and cannot be used (denied, offered twice) are left to `load`, which says why.
    """
    problems = []
    for spec in config_schema().specs:
        if (kind := spec.option.kind) is None or (spec.section == "lora" and not config.lora.enable_lora):
            continue
        value, known = getattr(getattr(config, spec.section), spec.name), plugins.names(kind)
        names = [name.removeprefix("+") for name in value] if isinstance(value, tuple) else [value]
        for name in names:
            if name not in (None, "", "auto", *known) and not plugins.origin(kind, name):
                listed = ", ".join(known) or "none is installed"
                hint = f" {missing(kind, name)}".rstrip() or nearest(name, known)
                if name.endswith(".py"):
                    hint = f" Name a file with --plugin {kind}={name}."
                problems.append(f"{spec.flag}: no {kind} plugin {name!r}; available: {listed}.{hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def _fields(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def _model(section: ModelConfig) -> ResolvedModel:
    """Fill the model's section. The model answers under the name that the user gave, also after a hub id has become a
    folder.
    """
    same = section.tokenizer in (None, section.model)
    filled = {
        "served_model_name": section.served_model_name or ((section.model,) if section.model else ()),
        "tokenizer": section.tokenizer or section.model,
        "tokenizer_revision": section.tokenizer_revision or (section.revision if same else None),
        "hf_config_path": section.hf_config_path or section.model,
    }
    return ResolvedModel(**{**_fields(section), **filled})


def _scheduler(section: SchedulerConfig, max_model_len: int | None, problems: list[str]) -> ResolvedScheduler:
    """Fill the scheduler's section. Where whole prompts must fit into a step, the longest prompt may be known only once
    the model is loaded.
    """
    given = section.max_num_batched_tokens
    whole_prompts = not section.enable_chunked_prefill
    longest = (max_model_len or 0) if whole_prompts else 0
    tokens = max(_MAX_NUM_BATCHED_TOKENS, longest, section.max_num_seqs or 0) if given is None else given
    seqs = min(_MAX_NUM_SEQS, tokens) if section.max_num_seqs is None else section.max_num_seqs
    if tokens < seqs:
        problems.append(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({seqs}): every running request "
            "needs a token per step."
        )
    if tokens < longest:
        problems.append(_too_few_for_a_prompt(tokens, longest))
    filled = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "fits_longest_prompt": given is None,
        "fits_states": section.max_num_seqs is None,
    }
    return ResolvedScheduler(**{**_fields(section), **filled})


def _decoding(section: DecodingConfig, problems: list[str]) -> ResolvedDecoding:
    """Fill the section of guided decoding, with --structured-outputs-config turned into the options that it stands
    for.
    """
    given, filled = section.structured_outputs_config, _fields(section)
    off = {name for name in BACKEND_SUFFIXES.values() if given.get(name) is True}
    found = _faults(given)
    problems += (f"--structured-outputs-config{fault}" for fault in found)
    if not found and "backend" in given:
        own = section.guided_decoding_backend
        name, words = split_backend(given["backend"])
        off |= words
        if name != "auto":
            filled["guided_decoding_backend"] = name
        if "auto" not in (name, own) and name != own:
            problems.append(
                f"--guided-decoding-backend ({own}) and --structured-outputs-config.backend ({name}) differ: give one."
            )
    return ResolvedDecoding(**{**filled, **{f"guided_decoding_{name}": True for name in off}})


def _faults(given: dict[str, Any]) -> list[str]:
    """Return the faults of a --structured-outputs-config, each as the end of a sentence that begins with the option."""
    faults, switches = [], tuple(BACKEND_SUFFIXES.values())
    for key, value in given.items():
        if key == "backend":
            try:
                split_backend(value if isinstance(value, str) else "")
            except ValueError as error:
                faults.append(f".backend: {value!r:.80} is not valid: {error}.")
        elif key not in switches:
            faults.append(f" has no {key!r:.80}; it has backend, {', '.join(switches)}.{nearest(key, switches)}")
        elif not isinstance(value, bool):
            faults.append(f".{key}: {value!r:.80} is not valid; expected true or false.")
    return faults


def _too_few_for_a_prompt(tokens: int, longest: int, splits_prompts: bool = True) -> str:
    cause = "with --no-enable-chunked-prefill" if splits_prompts else "for a model whose prompts cannot be split"
    return (
        f"--max-num-batched-tokens ({tokens}) must be at least --max-model-len ({longest}) {cause}: a prompt must fit "
        "into one step."
    )


def remarks(config: Resolved, plugins: Plugins) -> list[str]:
    """Return sentences for the log about values that are accepted but have no effect, or another one than they say."""
    found = []
    if one_worker(config, plugins) is not config:
        found.append("--distributed-executor-backend mp: there is one worker, in the engine's process: uni is used.")
    if config.model.code_revision is not None and not config.model.trust_remote_code:
        found.append("--code-revision changes nothing without --trust-remote-code: no code of the model is fetched.")
    if config.cache.calculate_kv_scales and not config.cache.kv_cache_dtype.startswith("fp8"):
        found.append("--calculate-kv-scales changes nothing without --kv-cache-dtype fp8.")
    return [*found, *lora_remarks(config.lora), *prompt_adapter_remarks(config.prompt_adapter)]


def with_scheduler(config: Resolved, plugins: Plugins) -> Plugins:
    """Return the plugins with the scheduler that `--scheduler-cls` names by its import path, if it names one so."""
    name = config.scheduler.scheduler_cls
    ref = None if plugins.offers("scheduler", name) else path_ref("scheduler", name)
    return plugins if ref is None else dataclasses.replace(plugins, refs=(*plugins.refs, ref))


def one_worker(config: Resolved, plugins: Plugins) -> Resolved:
    """Return the configuration with the executor `mp`, which spreads work over processes, replaced by `uni`: with one
    worker they do the same.

    A plugin named `mp` is used, if there is one.
    """
    if config.parallel.distributed_executor_backend != "mp" or plugins.origin("executor", "mp"):
        return config
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, distributed_executor_backend="uni")
    )


def _named(field: str) -> str:
    return f"--{field.replace('_', '-')} (or {variable(field)}, VLLM_{field.upper()})"


def _contradictions(config: Config) -> list[str]:
    problems = []
    model = config.model
    if len(set(model.served_model_name)) < len(model.served_model_name):
        problems.append("--served-model-name has the same name twice.")
    if any(not name.strip() for name in model.served_model_name):
        problems.append("--served-model-name has an empty name.")
    if model.trust_remote_code and model.code_revision not in (None, model.revision):
        problems.append(
            f"--code-revision {model.code_revision}: code is fetched with the weights, of which --revision is "
            f"{model.revision or 'not given'}. Give both the same revision."
        )
    if any(not key.strip() for key in config.frontend.api_key):
        problems.append(f"{_named('api_key')} is empty: give a key, or leave it out to serve without one.")
    if config.frontend.admin_key is not None and not config.frontend.admin_key.strip():
        problems.append(f"{_named('admin_key')} is empty: give a key, or leave it out.")
    if config.frontend.uds == "":  # the kernel would make up a name
        problems.append("--uds is empty: name the file of the socket, or leave it out.")
    if config.cache.cache_scope == "key" and not (config.frontend.api_key or config.frontend.api_key_file):
        problems.append("--cache-scope key needs API keys: --api-key or --api-key-file.")
    if model.logits_processor_pattern is not None:
        try:
            re.compile(model.logits_processor_pattern)
        except re.error as error:
            problems.append(f"--logits-processor-pattern is not a regular expression: {error}.")
    if config.frontend.enable_auto_tool_choice and not config.frontend.tool_call_parser:
        problems.append("--enable-auto-tool-choice needs --tool-call-parser NAME: without it no call is understood.")
    if config.frontend.disable_frontend_multiprocessing and config.frontend.api_server_count > 1:
        problems.append("--disable-frontend-multiprocessing is one process: it does not go with --api-server-count.")
    if config.frontend.disable_frontend_multiprocessing and config.parallel.engine_restarts:
        problems.append(
            "--engine-restarts needs an engine with a process of its own: with --disable-frontend-multiprocessing the "
            "engine's end is that of the server."
        )
    try:
        map_locations(config.load.pt_load_map_location)
    except ValueError as error:
        problems.append(f"--pt-load-map-location {config.load.pt_load_map_location!r:.80}: {error}.")
    if config.frontend.disable_frontend_multiprocessing and config.frontend.probe_port is not None:
        problems.append(
            "--probe-port is answered by the launcher: it does not go with --disable-frontend-multiprocessing."
        )
    compilation = config.device.compilation_config
    problems += [
        f"--compilation-config has no key {key!r:.80}.{nearest(key, _COMPILATION)}"
        for key in compilation
        if key not in _COMPILATION
    ]
    level = compilation.get("level", compilation.get("mode", 0))
    if type(level) is not int or not 0 <= level <= 3:
        problems.append(f"--compilation-config: level {level!r:.80} does not exist; use 0, 1, 2 or 3.")
    version = config.observability.show_hidden_metrics_for_version
    if version is not None and not re.fullmatch(r"\d+\.\d+(\.\w+)?", version):
        problems.append(f"--show-hidden-metrics-for-version: {version!r} is not X.Y.")
    problems += _trace_problems(config.observability)
    root = config.frontend.root_path
    if root and not root.startswith("/"):
        problems.append(f"--root-path: {root!r} must begin with '/'.")
    return problems


def _trace_problems(section: ObservabilityConfig) -> list[str]:
    endpoint, problems = section.otlp_traces_endpoint, []
    if endpoint is not None and not re.fullmatch(r"(?:https?|grpc)://[^\s/]\S*|[^\s/]+:\d+", endpoint):
        problems.append(f"--otlp-traces-endpoint: {endpoint!r:.120} is not a URL such as http://localhost:4317.")
    names = detailed_traces(section)
    problems += [
        f"--collect-detailed-traces: {name!r:.80} does not exist; use {', '.join(_DETAILED_TRACES)}."
        for name in sorted(names.difference(_DETAILED_TRACES))
    ]
    if names and endpoint is None:
        problems.append("--collect-detailed-traces needs --otlp-traces-endpoint: without it there are no traces.")
    return problems
