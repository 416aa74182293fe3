"""Every option: one field, one flag. The parser, help, YAML keys, validation and the reference page derive from here.

A field's flag is its name with dashes. `opt` carries the sentence of the reference page, bounds, choices and the
form in which a value is written. Components receive only the section that is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ferrule.config.option import opt
from ferrule.env import Environment


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model runs, and what of it."""

    model: str = opt("", "Folder or hub id of the model; without one the embedded model is served.", common=True)
    tokenizer: str | None = opt(None, "Folder or hub id of the tokenizer. Default: the model's.")
    tokenizer_mode: str = opt("auto", "Tokenizer plugin.", kind="tokenizer")
    trust_remote_code: bool = opt(False, "Allow Python code that a checkpoint brings to run.")
    dtype: str = opt(
        "auto",
        "Type of weights and activations. auto: float16 for float32 and float16 checkpoints, else bfloat16, where the "
        "platform computes in it.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        common=True,
    )
    seed: int | None = opt(None, "Seed of requests that bring none; without it they differ from run to run.")
    revision: str | None = opt(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = opt(
        None, "Branch, tag or commit of the tokenizer. Default: --revision, where the model brings the tokenizer."
    )
    hf_token: str | None = opt(
        None, "Hub token. Default, and what the bare option means: the stored one.", bare=True, secret=True
    )
    hf_overrides: dict[str, Any] = opt({}, "Values that replace those of config.json.", json=True)
    max_model_len: int | None = opt(
        None,
        "Longest prompt plus output, in tokens. Default: the model's own limit, or what the KV cache has room for.",
        ge=1,
        human=True,
        common=True,
    )
    max_logprobs: int = opt(20, "Most logprobs that a request may ask for.", ge=-1)
    disable_sliding_window: bool = opt(False, "Cap the context to the sliding window instead of sliding.")
    skip_tokenizer_init: bool = opt(False, "Load no tokenizer: prompts and outputs are token ids.")
    served_model_name: tuple[str, ...] = opt(
        (), "Names under which the model answers; responses carry the first.", nargs="+", common=True
    )
    model_impl: str = opt(
        "auto",
        "Native implementation or the one of transformers; auto takes native where there is one. vllm means native.",
        choices=("auto", "native", "vllm", "transformers"),
    )
    generation_config: str = opt(
        "auto", "Where default sampling values come from: auto (the model's folder), vllm (none), or a folder."
    )
    override_generation_config: dict[str, Any] = opt({}, "Values that replace those defaults.", json=True)
    enforce_eager: bool = opt(False, "Never capture graphs or compile.")
    sampler: str = opt("default", "Sampler plugin: from logits to tokens.", kind="sampler")
    logits_processor_pattern: str | None = opt(
        None, "Regular expression of logits-processor names that requests may use. Default: none."
    )


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How weights are read."""

    load_format: str = opt(
        "auto", "Weight format plugin; auto takes the first that finds its files.", kind="load_format"
    )
    download_dir: str | None = opt(None, "Folder for downloads. Default: the hub's cache.")
    model_loader_extra_config: dict[str, Any] = opt({}, "Options of the load format.", json=True)
    ignore_patterns: tuple[str, ...] = opt(("original/**/*",), "Files that are neither downloaded nor read.", nargs="+")
    use_tqdm_on_load: bool = opt(True, "Show a progress bar while loading.")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | None = opt(None, "Tokens per cache block. Default: 16.", choices=(1, 2, 4, 8, 16, 32, 64, 128))
    gpu_memory_utilization: float = opt(0.9, "Share of device memory that this instance may use.", gt=0, le=1)
    num_gpu_blocks_override: int | None = opt(None, "Exact number of cache blocks.", ge=2)
    enable_prefix_caching: bool = opt(True, "Reuse the cache of equal prompt beginnings.")
    prefix_caching_hash_algo: str = opt("sha256", "Hash of cache blocks.", choices=("builtin", "sha256"))
    kv_cache_dtype: str = opt("auto", "Type of cache entries.", choices=("auto",))


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step."""

    max_num_seqs: int | None = opt(None, "Most requests that run at once. Default: 256.", ge=1, common=True)
    max_num_batched_tokens: int | None = opt(
        None,
        "Most tokens in one step. Default: 2048; without chunked prefill, max_model_len where that is more.",
        ge=1,
        human=True,
    )
    enable_chunked_prefill: bool = opt(True, "Split long prompts over steps.", optional_value=True)
    long_prefill_token_threshold: int = opt(0, "Longest piece of a prompt in one step; 0: the whole budget.", ge=0)
    scheduling_policy: str = opt("fcfs", "Policy plugin: who runs first.", kind="policy")
    scheduler_cls: str | None = opt(None, "Scheduler plugin. Default: default.", kind="scheduler")
    pipeline_depth: int | None = opt(
        None,
        "Steps in flight: 2 overlaps host and device work. Default: the platform's.",
        ge=1,
        le=4,
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How work is spread."""

    distributed_executor_backend: str | None = opt(None, "Executor plugin. Default: uni.", kind="executor")
    watchdog_timeout: float = opt(120.0, "Seconds without progress, with work waiting, until the engine exits.", gt=0)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What it runs on."""

    device: str = opt(
        "auto", "Platform plugin; auto takes the first that does not refuse, cpu last.", kind="platform", common=True
    )
    attention_backend: str | None = opt(
        None, "Attention plugin. Default: the platform's order.", kind="attention", env="attention_backend"
    )


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The HTTP server."""

    host: str | None = opt(None, "Address to listen on. Default: all interfaces.", server=True, common=True)
    port: int = opt(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535, server=True, common=True)
    uvicorn_log_level: str = opt(
        "info",
        "Log level of the HTTP server.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
        server=True,
    )
    disable_uvicorn_access_log: bool = opt(False, "No log line per HTTP request.", server=True)
    allow_credentials: bool = opt(False, "CORS: allow credentials.", server=True)
    allowed_origins: tuple[str, ...] = opt(("*",), "CORS: allowed origins, a JSON list.", json=True, server=True)
    allowed_methods: tuple[str, ...] = opt(("*",), "CORS: allowed methods, a JSON list.", json=True, server=True)
    allowed_headers: tuple[str, ...] = opt(("*",), "CORS: allowed headers, a JSON list.", json=True, server=True)
    api_key: tuple[str, ...] = opt(
        (),
        "Keys, one of which every route but the public probes asks for.",
        nargs="+",
        secret=True,
        env="api_key",
        common=True,
        server=True,
    )
    chat_template: str | None = opt(None, "Chat template: a file, the text itself, or a name in templates/chat.")
    chat_template_content_format: str = opt(
        "auto", "What the template sees as message content.", choices=("auto", "string", "openai")
    )
    response_role: str = opt("assistant", "Role of the answer.", server=True)
    root_path: str | None = opt(None, "Path prefix when a proxy serves the API below one.", server=True)
    disable_frontend_multiprocessing: bool = opt(False, "Run the engine in the API process.", server=True)
    disable_fastapi_docs: bool = opt(False, "No /docs, /redoc and /openapi.json.", server=True)
    enable_request_id_headers: bool = opt(False, "Answer with X-Request-Id.", server=True)
    enable_prompt_tokens_details: bool = opt(False, "Fill usage.prompt_tokens_details.", server=True)
    return_tokens_as_token_ids: bool = opt(False, "Show tokens in logprobs as token_id:N.", server=True)
    disable_log_requests: bool = opt(False, "No log line per admitted request.", server=True)
    max_log_len: int | None = opt(None, "Most prompt characters or ids in a log line.", ge=0, server=True)
    shutdown_timeout: float = opt(30.0, "Seconds that running requests get after SIGTERM.", ge=0, server=True)
    config: str | None = opt(None, "YAML file with options; the command line wins over it.", common=True)
    routers: tuple[str, ...] = opt(
        (), "Router plugins to serve. Default: all built-in ones.", nargs="+", kind="router", server=True
    )
    enable_auto_tool_choice: bool = opt(False, "The model may call tools; needs --tool-call-parser.", server=True)
    tool_call_parser: str = opt("", "Tool parser plugin.", kind="tool_parser", server=True)
    exclude_tools_when_tool_choice_none: bool = opt(False, 'With "none" the model sees no tools.', server=True)
    reasoning_parser: str = opt("", "Reasoning parser plugin.", kind="reasoning_parser", server=True)


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """What it says about itself."""

    disable_log_stats: bool = opt(False, "No periodic figures in the log, no engine metrics.")
    log_level: str = opt(
        "info", "Level of Ferrule's own log.", choices=("debug", "info", "warning", "error"), env="logging_level"
    )
    debug: bool = opt(False, "Show tracebacks of start-up errors.")


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """Which plugins may be used."""

    plugins_allow: tuple[str, ...] = opt((), "Only these: kind:name or a distribution.", nargs="+")
    plugins_deny: tuple[str, ...] = opt((), "Never these: kind:name or a distribution; wins over allow.", nargs="+")
    plugins_prefer: tuple[str, ...] = opt((), "kind:name=distribution, where two offer one name.", nargs="+")
    plugin: tuple[str, ...] = opt((), "kind=file.py: a plugin from a file.", nargs="+", append=True)
    tool_parser_plugin: str = opt("", "Python file with tool parsers.", server=True)
    reasoning_parser_plugin: str = opt("", "Python file with reasoning parsers.", server=True)
    plugin_adapter: str = opt("", "Module for files written for others: ferrule_plugins.compat_vllm.", server=True)


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What a client may ask for; one gate enforces all of it."""

    max_body_bytes: int = opt(32 << 20, "Largest request body.", ge=1, human=True, server=True)
    max_header_bytes: int = opt(64 << 10, "Largest header block.", ge=1024, human=True, server=True)
    max_json_depth: int = opt(64, "Deepest nesting of a JSON body.", ge=1, server=True)
    max_n: int = opt(128, "Most answers per prompt (n, best_of).", ge=1)
    max_prompts: int = opt(1024, "Most prompts in one request, and most n x prompts.", ge=1)
    max_stop_strings: int = opt(64, "Most stop strings.", ge=0)
    max_stop_length: int = opt(1024, "Longest stop string, in characters.", ge=1)
    max_bad_words: int = opt(256, "Most bad words.", ge=0)
    max_prompt_logprob_cells: int = opt(200_000, "Most prompt tokens x prompt_logprobs.", ge=1, human=True)
    max_waiting_requests: int = opt(2048, "Most requests in the queue; more are answered 429.", ge=1)
    max_waiting_tokens: int = opt(8_000_000, "Most prompt tokens in the queue.", ge=1, human=True)
    max_connections: int = opt(4096, "Most open connections.", ge=1, server=True)
    header_timeout: float = opt(10.0, "Seconds to receive a request's headers.", gt=0, server=True)
    body_timeout: float = opt(30.0, "Seconds without progress while a body is received.", gt=0, server=True)
    write_timeout: float = opt(60.0, "Seconds that a client may stop reading a stream.", gt=0, server=True)
    keep_alive_timeout: int = opt(5, "Seconds that an idle connection is kept.", ge=1, server=True)
    template_timeout: float = opt(2.0, "Seconds to render a chat template.", gt=0)
    trust_request_chat_template: bool = opt(False, "Accept chat_template in requests.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections, resolved once. `env` is what the environment said."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    env: Environment = field(default_factory=Environment)
