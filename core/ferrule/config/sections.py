"""Every option: one field, one flag. The parser, help, YAML keys, validation and the reference page derive from here.

A field's flag is its name with dashes. `opt` carries the sentence of the reference page, bounds, choices and the
form in which a value is written. A value that is left open here is None; `ferrule.config.resolved` says what is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrule.config.option import opt
from ferrule.config.suffixes import BACKEND_SUFFIXES
from ferrule.env import Environment


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and what it is used for."""

    model: str = opt("", "Folder or hub id of the model; without one the embedded model is served.", common=True)
    task: str = opt(
        "auto",
        "What the model is for; auto: what its architecture can do.",
        choices=("auto", "generate", "embedding", "embed", "classify", "score", "reward", "transcription", "draft"),
        accepted=("generate", "embed", "embedding"),
        missing="models for other tasks than generate and embed",
    )
    tokenizer: str | None = opt(None, "Folder or hub id of the tokenizer. Default: the model's.")
    tokenizer_mode: str = opt("auto", "Tokenizer plugin.", kind="tokenizer")
    trust_remote_code: bool = opt(False, "Allow Python code that a checkpoint brings to run.")
    code_revision: str | None = opt(
        None,
        "Branch, tag or commit of that code. It is fetched with the weights, so it must be the same as --revision; "
        "without --trust-remote-code no code is fetched.",
    )
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
    hub: str = opt("huggingface", "Hub plugin: where a model that is not a local folder comes from.", kind="hub")
    hf_token: str | None = opt(
        None, "Hub token. Default, and what the bare option means: the stored one.", bare=True, secret=True
    )
    quantization_param_path: str | None = opt(
        None, "JSON file with the scales of each layer's fp8 KV cache. Default: the checkpoint's, or 1."
    )
    hf_config_path: str | None = opt(None, "Folder whose config.json is read instead of the model's.")
    config_format: str = opt(
        "auto",
        "Form of the configuration: config.json (hf) or Mistral's params.json (mistral); auto takes the latter where "
        "there is no config.json.",
        choices=("auto", "hf", "mistral"),
    )
    hf_overrides: dict[str, Any] = opt({}, "Values that replace those of config.json.", json=True)
    max_model_len: int | None = opt(
        None,
        "Longest prompt plus output, in tokens. Default: the model's own limit, or what the KV cache has room for.",
        ge=1,
        le=1 << 27,
        human=True,
        opens=("auto", "-1"),
        common=True,
    )
    max_logprobs: int = opt(20, "Most logprobs that a request may ask for.", ge=-1)
    logprobs_mode: str = opt(
        "raw_logprobs",
        "What logprobs are: log-probabilities or logits, of the model (raw), or as tokens are drawn from them, after "
        "penalties, biases, bans, temperature, top_k, top_p and min_p (processed). Those of prompts are always raw.",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    disable_sliding_window: bool = opt(False, "Cap the context to the sliding window instead of sliding.")
    skip_tokenizer_init: bool = opt(False, "Load no tokenizer: prompts and outputs are token ids.")
    served_model_name: tuple[str, ...] = opt(
        (),
        "Names under which the model answers; responses carry the first.",
        nargs="+",
        common=True,
        opens=("None",),
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
    max_seq_len_to_capture: int = opt(8192, "Longest sequence that graphs are captured for.", ge=0)
    quantization: str | None = opt(
        None, "Quantization plugin. Default: what the checkpoint asks for.", kind="quantization", aliases=("-q",)
    )
    sampler: str = opt("default", "Sampler plugin: from logits to tokens.", kind="sampler")
    enable_prompt_embeds: bool = opt(False, "Accept prompts as embeddings (prompt_embeds) in completions.")
    enable_sleep_mode: bool = opt(False, "Serve /sleep and /wake_up, which release and restore weights and cache.")
    pooler_config: dict[str, Any] = opt(
        {},
        "How prompts become vectors: pooling_type (CLS, MEAN, LAST) and normalize. Default: as the checkpoint says.",
        json=True,
        opens=("None",),
    )
    logits_processor_pattern: str | None = opt(
        None,
        "Regular expression of the logits processors that requests may use: plugins by name, functions by import path. "
        "Default: none.",
    )


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Reading of weights."""

    load_format: str = opt(
        "auto", "Weight format plugin; auto takes the first that finds its files.", kind="load_format"
    )
    download_dir: str | None = opt(None, "Folder for downloads. Default: the hub's cache.")
    model_loader_extra_config: dict[str, Any] = opt({}, "Options of the load format.", json=True)
    ignore_patterns: tuple[str, ...] = opt(("original/**/*",), "Files that are neither downloaded nor read.", nargs="+")
    verify_weights: bool = opt(
        False,
        "Compare the model's files with their digests before they are loaded: those of a file SHA256SUMS in its "
        "folder, or those that the Hugging Face cache names its files by.",
    )
    load_timeout: float = opt(
        0.0,
        "Seconds without another tensor after which a start that loads weights gives up; 0: it waits, and says so.",
        ge=0,
        server=True,
    )
    use_tqdm_on_load: bool = opt(True, "Show a progress bar while loading.")
    pt_load_map_location: str = opt(
        "cpu",
        "Device that tensors of .bin and .pt files are put on before they are copied to the model's; or an object of "
        'devices by the locations that files state, such as {"cuda:1": "cuda:0"}.',
        objects=True,
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = opt(16, "Tokens per cache block.", choices=(1, 2, 4, 8, 16, 32, 64, 128), opens=("None",))
    gpu_memory_utilization: float = opt(
        0.9, "Share of device memory that this instance may use.", gt=0, le=1, aliases=("--device-memory-utilization",)
    )
    cpu_offload_gb: float = opt(0.0, "GiB of weights that stay with the host, from where the GPU reads them.", ge=0)
    kv_cache_memory_bytes: int | None = opt(
        None,
        "Memory of the cache on any device, in place of what --gpu-memory-utilization leaves or a CPU's default.",
        ge=1,
        le=1 << 50,
        human=True,
    )
    num_gpu_blocks_override: int | None = opt(None, "Exact number of cache blocks.", ge=1, le=2**31 - 2)
    enable_prefix_caching: bool = opt(True, "Reuse the cache of equal prompt beginnings.")
    cache_scope: str = opt(
        "auto",
        "Who may reuse the cache of a prompt: everybody, or only requests with the same API key, so that no client can "
        "tell by the time of an answer what others have asked; auto: key where there are several keys.",
        choices=("auto", "global", "key"),
        server=True,
    )
    prefix_caching_hash_algo: str = opt(
        "sha256",
        "Hash of cache blocks. xxhash (XXH3, 128 bits) and builtin (Python's) are quicker, and without protection "
        "against made-up collisions; names with _cbor hash canonical CBOR. xxhash and _cbor need ferrule[hashes].",
        choices=("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    )
    kv_cache_dtype: str = opt(
        "auto",
        "Type of cache entries; auto: the model's; fp8 is fp8_e4m3. Of 8 bits, twice the tokens fit.",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"),
    )
    calculate_kv_scales: bool = opt(
        False,
        "Calculate the scales of an fp8 KV cache when the model is loaded. Default: the checkpoint's, or 1.",
        optional_value=True,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The choice of requests for each step."""

    max_num_seqs: int | None = opt(None, "Most requests that run at once. Default: 256.", ge=1, le=1 << 16, common=True)
    max_num_batched_tokens: int | None = opt(
        None,
        "Most tokens in one step. Default: 2048; without chunked prefill, max_model_len where that is more.",
        ge=1,
        le=1 << 27,
        human=True,
    )
    enable_chunked_prefill: bool = opt(True, "Split long prompts over steps.", optional_value=True, opens=("None",))
    long_prefill_token_threshold: int = opt(
        0, "Longest piece of a prompt in one step; 0: what the platform gives it beside requests that decode.", ge=0
    )
    max_num_partial_prefills: int = opt(
        1, "Most prompts in progress at once, that is computed in pieces. They share a step's tokens evenly.", ge=1
    )
    max_long_partial_prefills: int = opt(
        1,
        "Most of them that are long: longer than --long-prefill-token-threshold, or than 4 % of the context if that is "
        "0. With fewer than --max-num-partial-prefills, shorter prompts pass long ones that wait for another.",
        ge=1,
    )
    target_first_token_ms: float | None = opt(
        None,
        "Milliseconds in which a first token is to come. Steps give prompts what the most urgent one needs, and those "
        "that can be in time come before those that cannot. Requests may then have their own target.",
        gt=0,
        le=3.6e6,
    )
    target_inter_token_ms: float | None = opt(
        None,
        "Milliseconds that a step may take while requests wait for their next token in it. Default: a balance of both "
        "waits. Requests may then have a longer one.",
        gt=0,
        le=3.6e6,
    )
    scheduling_policy: str = opt("fcfs", "Policy plugin: who runs first.", kind="policy")
    scheduler_cls: str = opt(
        "default",
        "Scheduler plugin, by its name or as the import path of a class, package.module.Class.",
        kind="scheduler",
        opens=("None", "vllm.core.scheduler.Scheduler"),
        foreign=("vllm.core.scheduler.Scheduler",),
    )
    cuda_graph_sizes: tuple[int, ...] = opt(
        (512,),
        "Batch sizes of graphs; of one number n: 1, 2, 4, 8, 16, 24, ... n.",
        ge=0,
        nargs="+",
        aliases=("--CUDA-graph-sizes", "--cudagraph-capture-sizes"),
    )
    pipeline_depth: int | None = opt(
        None,
        "Steps in flight: 2 overlaps host and device work. Default: the platform's.",
        ge=1,
        le=4,
    )


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Output of a given form."""

    guided_decoding_backend: str = opt(
        "auto",
        "Backend plugin that enforces the form of outputs; auto asks each in turn. Behind a colon: no-fallback, "
        "disable-any-whitespace, unbounded-whitespace, disable-additional-properties, which are the options below.",
        kind="guided_decoding",
        suffixes={word: f"--guided-decoding-{name.replace('_', '-')}" for word, name in BACKEND_SUFFIXES.items()},
    )
    guided_decoding_disable_fallback: bool = opt(
        False,
        "Refuse a form that the named backend cannot enforce, instead of asking another backend.",
        optional_value=True,
    )
    guided_decoding_disable_any_whitespace: bool = opt(
        False, "JSON of a given form has no optional white space.", optional_value=True
    )
    guided_decoding_unbounded_whitespace: bool = opt(
        False,
        "JSON of a given form may have any white space between its parts, and not just one space, or one line break "
        "with an indentation.",
        optional_value=True,
    )
    guided_decoding_disable_additional_properties: bool = opt(
        False, "JSON of a given form has no properties that its schema does not name.", optional_value=True
    )
    structured_outputs_config: dict[str, Any] = opt(
        {},
        "The five options above as one object: backend, disable_fallback, disable_any_whitespace, "
        "unbounded_whitespace, disable_additional_properties.",
        json=True,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    speculative_config: dict[str, Any] = opt(
        {},
        "Guess next tokens, and verify several in one step: method (a speculator plugin), model, "
        "num_speculative_tokens, further keys of all methods, and those of the method.",
        json=True,
        aliases=("-sc",),
        opens=("None",),
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Distribution of work over processes and devices."""

    distributed_executor_backend: str = opt("uni", "Executor plugin.", kind="executor", opens=("None",))
    watchdog_timeout: float = opt(120.0, "Seconds without progress, with work waiting, until the engine exits.", gt=0)
    engine_restarts: int = opt(
        0, "Times in a row that an engine that has died is started again; 0: the server exits.", ge=0, server=True
    )
    worker_extension_cls: str = opt("", "Class (module.Class) whose methods collective_rpc may call on workers.")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters."""

    enable_lora: bool = opt(False, "Serve LoRA adapters.", optional_value=True, opens=("None",), common=True)
    lora_modules: tuple[str, ...] = opt(
        (),
        "Adapters to serve from the start: name=path, or objects {name, path, base_model_name}. A path is a folder or "
        "a hub id.",
        nargs="+",
        objects=True,
        opens=("None",),
    )
    max_loras: int = opt(1, "Most adapters in one step; requests for others wait.", ge=1, le=1024)
    max_lora_rank: int = opt(16, "Largest rank of an adapter.", ge=1, le=512)
    max_cpu_loras: int | None = opt(
        None, "Most adapters that are kept in host memory. Default: --max-loras.", ge=1, le=1 << 16
    )
    lora_dtype: str = opt(
        "auto",
        "Type of adapters' weights; auto: the model's. int8: rounded, with a scale for each row.",
        choices=("auto", "float16", "bfloat16", "float32", "int8"),
    )
    enable_lora_bias: bool = opt(
        False, "Apply the biases of adapters; without it, an adapter with biases is refused.", optional_value=True
    )
    lora_extra_vocab_size: int = opt(
        256,
        "Most tokens that an adapter may add to the vocabulary; 0: an adapter that adds some is refused.",
        ge=0,
        le=1 << 16,
    )
    long_lora_scaling_factors: tuple[float, ...] = opt(
        (),
        "Factors of linear position scaling that adapters may have been trained with, besides the model's own. A "
        "request for such an adapter may be as many times longer as the model's.",
        nargs="+",
        opens=("None",),
        ge=1,
        le=1024,
    )
    fully_sharded_loras: bool = opt(
        False,
        "Divide both factors of adapters over tensor-parallel workers.",
        optional_value=True,
        inert="there is one worker, which has adapters whole",
    )
    adapter_bank: str = opt(
        "lora", "Adapter bank plugin: what reads adapters and computes with them.", kind="adapter_bank"
    )
    lora_resolvers: tuple[str, ...] = opt(
        (),
        "Resolver plugins: where an adapter comes from when a request names one that is not loaded. Default: the "
        "built-in ones that the two options below configure.",
        nargs="+",
        kind="lora_resolver",
        server=True,
    )
    lora_resolver_cache_dir: str | None = opt(
        None, "Folder whose subfolders are adapters, which requests may name without having them loaded.", server=True
    )
    lora_resolver_hf_repo_list: tuple[str, ...] = opt(
        (),
        "Repositories of the hub whose adapters requests may name: REPOSITORY, or REPOSITORY/FOLDER of one.",
        nargs="+",
        server=True,
    )
    allowed_lora_path: tuple[str, ...] = opt(
        (),
        "Folders below which /v1/load_lora_adapter may load adapters, besides those of --lora-modules and "
        "--lora-resolver-cache-dir.",
        nargs="+",
        server=True,
    )


@dataclass(frozen=True, kw_only=True)
class PromptAdapterConfig:
    """Prompt adapters."""

    enable_prompt_adapter: bool = opt(
        False, "Serve prompt adapters: trained virtual tokens before a prompt.", optional_value=True, opens=("None",)
    )
    prompt_adapters: tuple[str, ...] = opt(
        (),
        "Prompt adapters to serve: name=path. A path is a folder as PEFT writes it, or a hub id.",
        nargs="+",
        opens=("None",),
        server=True,
    )
    max_prompt_adapters: int = opt(
        1,
        "Most prompt adapters that a process keeps in memory; others are read again when they are used. A step may "
        "have any number of them.",
        ge=1,
        le=1 << 16,
    )
    max_prompt_adapter_token: int = opt(
        0, "Most virtual tokens of a prompt adapter; needed with --enable-prompt-adapter.", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The device that the model runs on."""

    device: str = opt(
        "auto",
        "Platform plugin; auto takes the first that does not refuse, the CPU last.",
        kind="platform",
        lower=True,
        common=True,
    )
    attention_backend: str | None = opt(
        None, "Attention plugin. Default: the platform's order.", kind="attention", lower=True, env="attention_backend"
    )
    compilation_config: dict[str, Any] = opt(
        {},
        "Level of compilation (0 eager, 1 and 2 graphs, 3 compiled parts and graphs; default 2), or an object.",
        json=True,
        aliases=("-O", "-cc"),
        scalar="level",
        le=3,
    )


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The HTTP server."""

    host: str | None = opt(None, "Address to listen on. Default: all interfaces.", server=True, common=True)
    port: int = opt(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535, server=True, common=True)
    probe_port: int | None = opt(
        None,
        "Port that answers probes only (/health, /ping, /metrics), without TLS and however busy the server is; 0 takes "
        "a free one.",
        ge=0,
        le=65535,
        server=True,
    )
    uds: str | None = opt(None, "Unix socket to listen on instead of host and port.", server=True)
    api_server_count: int = opt(1, "API processes that share the port.", ge=1, le=64, server=True, aliases=("-asc",))
    ssl_keyfile: str | None = opt(None, "TLS: file of the private key.", server=True)
    ssl_certfile: str | None = opt(None, "TLS: file of the certificate chain; switches HTTPS on.", server=True)
    ssl_ca_certs: str | None = opt(
        None, "TLS: file of the authorities that client certificates come from.", server=True
    )
    ssl_cert_reqs: int = opt(
        0, "TLS: client certificates are 0 not asked for, 1 optional, 2 required.", choices=(0, 1, 2), server=True
    )
    ssl_ciphers: str | None = opt(None, "TLS: ciphers up to TLS 1.2, in OpenSSL's form.", server=True)
    enable_ssl_refresh: bool = opt(False, "TLS: take changed certificate files without a restart.", server=True)
    middleware: tuple[str, ...] = opt(
        (), "ASGI middleware class or per-request function, module.name; repeatable.", append=True, server=True
    )
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
        opens=("None",),
        secret=True,
        env="api_key",
        common=True,
        server=True,
    )
    api_key_file: str | None = opt(
        None,
        "YAML file of keys, NAME: KEY or NAME: {sha256: …, max_requests: …, tokens_per_minute: …, admin: true}; read "
        "again on SIGHUP. Logs and metrics have the names.",
        server=True,
    )
    allowed_hosts: tuple[str, ...] = opt(
        (),
        "Domains under which a server without API keys answers, such as llm.example.com or *.example.com; * for all. "
        "Addresses and names inside a network need not be told.",
        nargs="+",
        server=True,
    )
    admin_key: str | None = opt(
        None,
        "Key of the routes for administration; without one the API key opens them.",
        secret=True,
        env="admin_key",
        server=True,
    )
    chat_template: str | None = opt(None, "Chat template: a file, its text, or a name that `ferrule templates` lists.")
    chat_template_content_format: str = opt(
        "auto", "What the template sees as message content.", choices=("auto", "string", "openai")
    )
    response_role: str = opt("assistant", "Role of the answer.", server=True)
    response_store: str = opt(
        "auto",
        "Response store plugin, for /v1/responses; auto is memory, and sqlite with several API processes.",
        kind="response_store",
        lower=True,
        server=True,
    )
    root_path: str = opt("", "Path prefix when a proxy serves the API below one.", opens=("None",), server=True)
    disable_frontend_multiprocessing: bool = opt(False, "Run the engine in the API process.", server=True)
    disable_fastapi_docs: bool = opt(False, "No /docs, /redoc and /openapi.json.", server=True)
    disable_ui: bool = opt(False, "No page at /ui.", server=True)
    public_metrics: bool = opt(False, "Answer /metrics without a key, for scrapers that send none.", server=True)
    enable_request_id_headers: bool = opt(False, "Answer with X-Request-Id.", server=True)
    enable_server_load_tracking: bool = opt(False, "Count requests in flight for GET /load.", server=True)
    enable_tokenizer_info_endpoint: bool = opt(False, "Answer GET /tokenizer_info.", server=True)
    sse_keepalive: float = opt(
        15.0,
        "Seconds of silence until a stream gets a comment; 0: never.",
        ge=0,
        server=True,
        aliases=("--sse-keep-alive-interval",),
    )
    strict_requests: bool = opt(False, "Answer request fields that nothing knows with 400.", server=True)
    enable_prompt_tokens_details: bool = opt(False, "Fill usage.prompt_tokens_details.", server=True)
    return_tokens_as_token_ids: bool = opt(False, "Show tokens in logprobs as token_id:N.", server=True)
    disable_log_requests: bool = opt(False, "No log line per admitted request.", server=True)
    enable_log_requests: bool = opt(False, "The log line of an admitted request has its prompt.", server=True)
    max_log_len: int | None = opt(None, "Most prompt characters or ids in a log line.", ge=0, server=True)
    shutdown_timeout: float = opt(30.0, "Seconds that running requests get after SIGTERM.", ge=0, server=True)
    config: str | None = opt(None, "YAML file with options; the command line wins over it.", common=True)
    routers: tuple[str, ...] = opt(
        (), "Router plugins to serve. Default: all built-in ones.", nargs="+", kind="router", server=True
    )
    enable_auto_tool_choice: bool = opt(False, "The model may call tools; needs --tool-call-parser.", server=True)
    tool_call_parser: str = opt("", "Tool parser plugin.", kind="tool_parser", opens=("None",), server=True)
    exclude_tools_when_tool_choice_none: bool = opt(False, 'With "none" the model sees no tools.', server=True)
    reasoning_parser: str = opt("", "Reasoning parser plugin.", kind="reasoning_parser", opens=("None",))


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Logs, metrics and traces."""

    disable_log_stats: bool = opt(False, "No periodic figures in the log, no engine metrics.")
    show_hidden_metrics_for_version: str | None = opt(
        None, "Show metrics that are hidden since version X.Y as well.", server=True
    )
    otlp_traces_endpoint: str | None = opt(
        None, "URL of the collector that a span of each request is sent to, by OpenTelemetry's protocol."
    )
    collect_detailed_traces: tuple[str, ...] = opt(
        (),
        "Seconds of steps in the spans: `worker`, planning and execution; `model`, also the forward pass, which waits "
        "for the device in each step; `all`, both.",
        nargs="+",
        opens=("None",),
    )
    log_config_file: str | None = opt(
        None, "JSON file in the form of logging.config.dictConfig, for all processes.", env="logging_config_path"
    )
    log_level: str = opt(
        "info",
        "Level of Ferrule's own log.",
        choices=("debug", "info", "warning", "error"),
        lower=True,
        env="logging_level",
    )
    debug: bool = opt(False, "Show tracebacks of start-up errors; check the engine's invariants when all work is done.")


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """The choice of plugins that may be used."""

    plugins_allow: tuple[str, ...] = opt((), "Only these: kind:name or a distribution.", nargs="+")
    plugins_deny: tuple[str, ...] = opt((), "Never these: kind:name or a distribution; wins over allow.", nargs="+")
    plugins_prefer: tuple[str, ...] = opt((), "kind:name=distribution, where two offer one name.", nargs="+")
    plugin: tuple[str, ...] = opt(
        (), "kind=file.py: a plugin from a file; or kind=package.module.Class.", nargs="+", append=True
    )
    plugin_config: dict[str, Any] = opt(
        {},
        "Options of a plugin, kind:name={...}; --help=kind:name shows which it has.",
        json=True,
        keyed=True,
    )
    tool_parser_plugin: str = opt("", "Python file with tool parsers.", server=True)
    reasoning_parser_plugin: str = opt("", "Python file with reasoning parsers.")
    plugin_import_timeout: float = opt(
        300.0, "Seconds that the import of a plugin may take; 0: any number.", ge=0, server=True
    )
    plugin_adapter: str = opt("", "Module for files written for others: ferrule_plugins.compat_vllm.", server=True)


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits on what a client may ask for, enforced by one gate."""

    max_body_bytes: int = opt(32 << 20, "Largest request body.", ge=1, human=True, server=True)
    max_header_bytes: int = opt(64 << 10, "Largest header block.", ge=1024, human=True, server=True)
    max_json_depth: int = opt(64, "Deepest nesting of a JSON body.", ge=1, server=True)
    max_json_values: int = opt(
        1 << 20, "Most numbers in a JSON body. A string, list or object counts as eight.", ge=1, server=True
    )
    max_n: int = opt(128, "Most answers per prompt (n, best_of).", ge=1)
    max_prompts: int = opt(1024, "Most prompts in one request, and most n x prompts.", ge=1)
    max_stop_strings: int = opt(64, "Most stop strings.", ge=0)
    max_stop_length: int = opt(1024, "Longest stop string, in characters.", ge=1)
    max_bad_words: int = opt(256, "Most bad words.", ge=0)
    max_prompt_logprob_cells: int = opt(
        200_000, "Most tokens of all prompts x n x prompt_logprobs in one request.", ge=1, human=True
    )
    max_logprob_cells: int = opt(
        1_000_000,
        "Most prompts x n x max_tokens x (logprobs + 1) in one request whose answers are kept until they are whole.",
        ge=1,
        human=True,
    )
    max_waiting_requests: int = opt(
        2048, "Most requests in the queue; more are answered 429.", ge=1, aliases=("--max-num-queued-reqs",)
    )
    max_waiting_tokens: int = opt(
        8_000_000, "Most prompt tokens in the queue.", ge=1, human=True, aliases=("--max-num-queued-tokens",)
    )
    max_key_requests: int | None = opt(None, "Most requests in progress for one API key.", ge=1, server=True)
    key_tokens_per_minute: int | None = opt(
        None, "Most tokens of prompts and answers in a minute for one API key.", ge=1, human=True, server=True
    )
    max_buffered_bytes: int = opt(
        512 << 20,
        "Most memory, about, that an API process keeps for its clients: bodies, prompts in the queue, unread output.",
        ge=1 << 20,
        human=True,
        server=True,
    )
    max_connections: int = opt(4096, "Most open connections.", ge=1, server=True)
    header_timeout: float = opt(10.0, "Seconds to receive a request's headers.", gt=0, server=True)
    body_timeout: float = opt(30.0, "Seconds without progress while a body is received.", gt=0, server=True)
    write_timeout: float = opt(60.0, "Seconds that a client may stop reading a stream.", gt=0, server=True)
    keep_alive_timeout: int = opt(5, "Seconds that an idle connection is kept.", ge=1, server=True)
    template_timeout: float = opt(2.0, "Seconds to render a chat template.", gt=0)
    trust_request_chat_template: bool = opt(False, "Accept chat_template in requests.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections as given. `env` is what the environment said. `resolve` makes a `Resolved` of it.

    `places` tells where options stand whose values a configuration file gave, and the keys in these values:
    {"port": "serve.yaml:3", "hf_overrides.rope_parameters": "serve.yaml:5"}. `origins` tells where each option was
    given: {"port": "command line"}.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    prompt_adapter: PromptAdapterConfig = field(default_factory=PromptAdapterConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    env: Environment = field(default_factory=Environment)
    places: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
