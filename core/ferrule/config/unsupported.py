"""Options that vLLM documents and nothing here reads: one field each, in the form of `ferrule.config.sections`.

Each has one of three marks: `inert`, why it is accepted without effect; `replaced`, the option that gets its value; or
`missing`, the feature that is not in this build. When a feature lands, its fields move to `ferrule.config.sections` and
lose the mark. A class whose name is the one of a section there belongs to the same group in help and documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ferrule.config.option import opt
from ferrule.config.parse import config_sections

_DATA_PARALLEL = "data parallelism"
_MEDIA = "multimodal inputs"
_NEURON = "the Neuron platform"
_PARALLEL = "parallel workers"
_PLATFORM_OPTIONS = "options of a platform"
_RAY = "Ray workers"

_NO_SWAP = "a preempted request is computed again, nothing is swapped out"
_NO_POOL = "API processes tokenize, there is no pool"
_DEFAULT_MEDIA_LIMITS = tuple({name: 1} for name in ("image", "video", "audio"))  # documented before 0.9
_JSON_BOOLEAN = MappingProxyType({"True": "true", "False": "false"})


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The HTTP server."""

    headless: bool = opt(
        False,
        "Run engines only, without an HTTP server: for further nodes.",
        optional_value=True,
        missing=_DATA_PARALLEL,
    )
    data_parallel_start_rank: int = opt(
        0, "First data-parallel rank of this node.", ge=0, aliases=("-dpr",), missing=_DATA_PARALLEL
    )
    engine_use_ray: bool = opt(False, "Run the engine in a Ray process.", optional_value=True, missing=_RAY)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and what it is used for."""

    runner: str = opt(
        "auto",
        "The same as --task.",
        choices=("auto", "generate", "pooling", "draft"),
        replaced="--task",
        renamed={"pooling": "embed"},
    )
    convert: str = opt(
        "auto",
        "The same as --task.",
        choices=("auto", "none", "embed", "classify"),
        replaced="--task",
        renamed={"none": "auto"},
    )
    rope_scaling: dict[str, Any] = opt({}, "Scaling of positions.", json=True, replaced="--hf-overrides.rope_scaling")
    rope_theta: float | None = opt(None, "Base of the rotary embedding.", ge=0, replaced="--hf-overrides.rope_theta")
    max_context_len_to_capture: int | None = opt(
        None, "The older name of --max-seq-len-to-capture.", ge=0, replaced="--max-seq-len-to-capture"
    )
    disable_cascade_attn: bool = opt(
        False, "Do not use cascade attention.", optional_value=True, inert="no attention plugin uses cascade attention"
    )
    disable_async_output_proc: bool = opt(
        False,
        "Process outputs in the engine's step, not beside it.",
        optional_value=True,
        inert="outputs are processed in the API processes",
    )
    tokenizer_pool_size: int = opt(
        0, "Number of tokenizer workers.", ge=0, inert="API processes tokenize; --api-server-count sets their number"
    )
    tokenizer_pool_type: str = opt("", "Type of the tokenizer workers.", inert=_NO_POOL)
    tokenizer_pool_extra_config: dict[str, Any] = opt(
        {}, "Options of the tokenizer workers.", json=True, inert=_NO_POOL, opens=("None",)
    )
    override_pooler_config: dict[str, Any] = opt(
        {}, "The older name of --pooler-config.", json=True, replaced="--pooler-config", opens=("None",)
    )
    override_neuron_config: dict[str, Any] = opt({}, "Options of Neuron devices.", json=True, missing=_NEURON)


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Reading of weights."""

    qlora_adapter_name_or_path: str | None = opt(
        None, "Name or path of a QLoRA adapter.", inert="vLLM ignores it too since 0.9"
    )
    safetensors_load_strategy: str = opt(
        "lazy",
        "How safetensors are read.",
        choices=("lazy", "eager", "prefetch", "torchao"),
        inert="files are mapped and read as needed (lazy)",
    )


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Output of a given form."""

    enable_reasoning: bool = opt(
        False, "Split reasoning from the answer.", optional_value=True, inert="--reasoning-parser NAME is enough"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Distribution of work over processes and devices."""

    worker_use_ray: bool = opt(
        False,
        "Use Ray workers.",
        optional_value=True,
        replaced="--distributed-executor-backend",
        renamed={"True": "ray"},
    )
    pipeline_parallel_size: int = opt(1, "Number of pipeline stages.", ge=0, aliases=("-pp",), missing=_PARALLEL)
    tensor_parallel_size: int = opt(1, "Number of shards of each layer.", ge=0, aliases=("-tp",), missing=_PARALLEL)
    data_parallel_size: int = opt(1, "Number of replicas of the model.", ge=0, aliases=("-dp",), missing=_DATA_PARALLEL)
    data_parallel_size_local: int | None = opt(
        None, "Number of replicas on this node.", ge=0, aliases=("-dpl",), missing=_DATA_PARALLEL, accepted=(1,)
    )
    data_parallel_address: str | None = opt(
        None, "Data parallelism: address of the first node.", aliases=("-dpa",), missing=_DATA_PARALLEL
    )
    data_parallel_rpc_port: int | None = opt(
        None, "Data parallelism: port of the first node.", ge=0, aliases=("-dpp",), missing=_DATA_PARALLEL
    )
    data_parallel_backend: str = opt(
        "mp",
        "Data parallelism: what starts the replicas.",
        choices=("mp", "ray"),
        aliases=("-dpb",),
        missing=_DATA_PARALLEL,
    )
    enable_expert_parallel: bool = opt(
        False, "Spread experts over devices.", optional_value=True, aliases=("-ep",), missing=_PARALLEL
    )
    enable_multimodal_encoder_data_parallel: bool = opt(
        False, "Replicate the vision encoder.", optional_value=True, missing=_MEDIA
    )
    max_parallel_loading_workers: int | None = opt(
        None,
        "Most workers that load weights at once.",
        ge=0,
        inert="there is one worker, which loads alone",
        accepted=(1,),
    )
    ray_workers_use_nsight: bool = opt(False, "Profile Ray workers.", optional_value=True, missing=_RAY)
    disable_custom_all_reduce: bool = opt(
        False, "Use the vendor's all-reduce.", optional_value=True, inert="there is one worker"
    )
    worker_cls: str = opt("auto", "Import path of the worker class.", missing="other classes of workers")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    swap_space: float = opt(4.0, "GiB of host memory for preempted requests.", ge=0, inert=_NO_SWAP)


@dataclass(frozen=True, kw_only=True)
class MultiModalConfig:
    """Images, video and audio in prompts."""

    allowed_local_media_path: str = opt("", "Folder below which file:// media may lie.", missing=_MEDIA)
    limit_mm_per_prompt: dict[str, Any] = opt(
        {},
        "Most media items per prompt, by modality.",
        json=True,
        key_values=True,
        missing=_MEDIA,
        accepted=_DEFAULT_MEDIA_LIMITS,
    )
    mm_processor_kwargs: dict[str, Any] = opt(
        {}, "Options of the multimodal processor.", json=True, missing=_MEDIA, opens=("None",)
    )
    mm_processor_cache_gb: float = opt(
        4.0, "GiB of processed media that are cached.", ge=0, missing=_MEDIA, accepted=(0,)
    )
    disable_mm_preprocessor_cache: bool = opt(
        False,
        "Do not cache processed media.",
        optional_value=True,
        replaced="--mm-processor-cache-gb",
        renamed={"True": "0"},
    )
    mm_cache_preprocessor: bool = opt(
        False, "Cache processed media.", optional_value=True, replaced="--mm-processor-cache-gb", renamed={"True": "4"}
    )
    disable_chunked_mm_input: bool = opt(
        False, "Never split a media item over steps.", optional_value=True, missing=_MEDIA
    )
    image_input_type: str | None = opt(
        None, "Form in which images are given to the model.", choices=("pixel_values", "image_features"), missing=_MEDIA
    )
    image_token_id: int | None = opt(None, "Id of the image token.", ge=0, missing=_MEDIA)
    image_input_shape: str | None = opt(None, "Largest shape of an image input.", missing=_MEDIA)
    image_feature_size: int | None = opt(None, "Number of tokens that an image takes.", ge=0, missing=_MEDIA)
    image_processor: str | None = opt(None, "Folder or hub id of the image processor.", missing=_MEDIA)
    image_processor_revision: str | None = opt(None, "Branch, tag or commit of the image processor.", missing=_MEDIA)
    disable_image_processor: bool = opt(False, "Use no image processor.", optional_value=True, missing=_MEDIA)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    spec_method: str | None = opt(None, "Method of speculative decoding.", replaced="--speculative-config.method")
    speculative_model: str | None = opt(
        None, "Draft model.", aliases=("--spec-model",), replaced="--speculative-config.model"
    )
    speculative_model_quantization: str | None = opt(
        None, "Quantization of the draft model.", replaced="--speculative-config.quantization"
    )
    num_speculative_tokens: int | None = opt(
        None,
        "Number of draft tokens per step.",
        ge=0,
        aliases=("--spec-tokens",),
        replaced="--speculative-config.num_speculative_tokens",
    )
    speculative_draft_tensor_parallel_size: int | None = opt(
        None,
        "Tensor-parallel size of the draft model.",
        ge=0,
        aliases=("-spec-draft-tp",),
        replaced="--speculative-config.draft_tensor_parallel_size",
    )
    speculative_max_model_len: int | None = opt(
        None, "Longest sequence, in tokens, that is drafted for.", ge=0, replaced="--speculative-config.max_model_len"
    )
    speculative_disable_by_batch_size: int | None = opt(
        None,
        "Queue length from which on nothing is drafted.",
        ge=0,
        replaced="--speculative-config.disable_by_batch_size",
    )
    speculative_disable_mqa_scorer: bool = opt(
        False,
        "Use the older scorer of drafts.",
        optional_value=True,
        replaced="--speculative-config.disable_mqa_scorer",
        renamed=_JSON_BOOLEAN,
    )
    ngram_prompt_lookup_max: int | None = opt(
        None, "Longest n-gram to look up.", ge=0, replaced="--speculative-config.prompt_lookup_max"
    )
    ngram_prompt_lookup_min: int | None = opt(
        None, "Shortest n-gram to look up.", ge=0, replaced="--speculative-config.prompt_lookup_min"
    )
    spec_decoding_acceptance_method: str = opt(
        "rejection_sampler",
        "Rule by which draft tokens are accepted.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        replaced="--speculative-config.acceptance_method",
    )
    typical_acceptance_sampler_posterior_threshold: float | None = opt(
        None,
        "Typical acceptance: lower bound of the posterior probability.",
        ge=0,
        replaced="--speculative-config.posterior_threshold",
        accepted=(0.09,),
    )
    typical_acceptance_sampler_posterior_alpha: float | None = opt(
        None,
        "Typical acceptance: factor of the entropy-based threshold.",
        ge=0,
        replaced="--speculative-config.posterior_alpha",
        accepted=(0.3,),
    )
    disable_logprobs_during_spec_decoding: bool | None = opt(
        None,
        "No logprobs while tokens are drafted.",
        optional_value=True,
        replaced="--speculative-config.disable_logprobs",
        renamed=_JSON_BOOLEAN,
        accepted=(True,),
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The choice of requests for each step."""

    async_scheduling: bool | None = opt(
        None,
        "Overlap host and device work of consecutive steps.",
        optional_value=True,
        replaced="--pipeline-depth",
        renamed={"True": "2", "False": "1"},
    )
    num_lookahead_slots: int = opt(
        0, "Extra KV cache slots per request.", ge=0, inert="slots are allocated when they are needed"
    )
    scheduler_delay_factor: float = opt(
        0.0,
        "Delay before the next prompt, as a factor of the last prompt's latency.",
        ge=0,
        inert="a prompt starts in the next step",
    )
    preemption_mode: str | None = opt(
        None,
        "What happens to preempted requests.",
        choices=("recompute", "swap"),
        inert=_NO_SWAP,
        accepted=("recompute",),
    )
    num_scheduler_steps: int = opt(
        1, "Model steps per schedule.", ge=0, inert="--pipeline-depth overlaps steps instead"
    )
    multi_step_stream_outputs: bool = opt(
        True, "Stream the tokens of each of several steps.", optional_value=True, inert="every step is streamed"
    )
    use_v2_block_manager: bool = opt(
        True, "Use the second version of the block manager.", optional_value=True, inert="there is one block manager"
    )
    disable_hybrid_kv_cache_manager: bool = opt(
        False,
        "Use one KV cache size for all layers.",
        optional_value=True,
        inert="layers with a sliding window always cache the window only",
    )


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Options that concern more than one part of the server."""

    kv_transfer_config: dict[str, Any] = opt(
        {}, "Options of KV cache transfer.", json=True, missing="transfer of the KV cache", opens=("None",)
    )
    kv_events_config: dict[str, Any] = opt(
        {}, "Options of publishing KV cache events.", json=True, missing="KV events", opens=("None",)
    )
    additional_config: dict[str, Any] = opt({}, "Options of a platform.", json=True, missing=_PLATFORM_OPTIONS)


UNSUPPORTED: Mapping[str, type] = MappingProxyType(
    {
        "unsupported_frontend": FrontendConfig,
        "unsupported_model": ModelConfig,
        "unsupported_load": LoadConfig,
        "unsupported_decoding": DecodingConfig,
        "unsupported_parallel": ParallelConfig,
        "unsupported_cache": CacheConfig,
        "multimodal": MultiModalConfig,
        "unsupported_speculative": SpeculativeConfig,
        "unsupported_scheduler": SchedulerConfig,
        "vllm": VllmConfig,
    }
)


def engine_sections() -> Mapping[str, type]:
    """Return every option that a command which runs an engine understands: the sections of `Config`, and those of this
    module.
    """
    return {**config_sections(), **UNSUPPORTED}
