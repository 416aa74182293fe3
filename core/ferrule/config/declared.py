"""Documented options of vLLM that nothing here reads: each is inert, replaced, or of a feature that is not here.

One row per option: its default, or the type of one that is None by default; what it is about; its fate; the rest of
its `Option`. The fate is a feature that is not here, the option string that replaces it, or why it has no effect. When
a feature lands, its row moves to `ferrule.config.sections` as an ordinary field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import make_dataclass
from types import MappingProxyType
from typing import Any

from ferrule.config.option import Lacks, opt
from ferrule.config.parse import config_sections

_LORA, _PROMPT_ADAPTERS = Lacks("LoRA adapters", "model"), Lacks("prompt adapters", "model")
_MEDIA, _POOLING = Lacks("multimodal inputs", "model"), Lacks("pooling models", "model")
_SMALL_CACHE = Lacks("scales of a quantized KV cache", "attention")
_PARALLEL, _REPLICAS = Lacks("parallel workers", "executor"), Lacks("data parallelism", "executor")
_RAY, _GUIDED = Lacks("Ray workers", "executor"), Lacks("guided decoding", "guided_decoding")
_SPECULATION, _TRACES = Lacks("speculative decoding", "speculator"), Lacks("tracing", "hooks")
_RECOMPUTE = "a preempted request is computed again, nothing is swapped out"
_MANY = {"nargs": "+"}
_FLAG = {"True": "true", "False": "false"}
_NO_GUIDED = "--guided-decoding-disable-"
_COLON = {"no-fallback": f"{_NO_GUIDED}fallback"} | {
    f"disable-{what}": f"{_NO_GUIDED}{what}" for what in ("any-whitespace", "additional-properties")
}

_CHOICES = {
    "collect_detailed_traces": "model worker all None",
    "config_format": "auto hf mistral",
    "convert": "auto none embed classify",
    "data_parallel_backend": "mp ray",
    "guided_decoding_backend": "auto guidance lm-format-enforcer outlines xgrammar",
    "image_input_type": "pixel_values image_features",
    "lora_dtype": "auto float16 bfloat16 float32",
    "preemption_mode": "recompute swap",
    "runner": "auto generate pooling draft",
    "safetensors_load_strategy": "lazy eager prefetch torchao",
    "spec_decoding_acceptance_method": "rejection_sampler typical_acceptance_sampler",
}

_LISTS = {"long_lora_scaling_factors": tuple[float, ...]}

_Row = tuple[Any, str, Lacks | str] | tuple[Any, str, Lacks | str, dict[str, Any]]

_FRONTEND: dict[str, _Row] = {
    "headless": (False, "No HTTP server, only engines: for further nodes.", _REPLICAS),
    "data_parallel_start_rank": (0, "First data-parallel rank of this node.", _REPLICAS, {"aliases": ("-dpr",)}),
    "lora_modules": ((), "Adapters to serve: name=path, or JSON.", _LORA, _MANY | {"objects": True}),
    "prompt_adapters": ((), "Prompt adapters to serve: name=path.", _PROMPT_ADAPTERS, _MANY),
    "engine_use_ray": (False, "Run the engine in a Ray process.", _RAY),
}
_MODEL: dict[str, _Row] = {
    "runner": ("auto", "The same as --task.", "--task", {"renamed": {"pooling": "embed"}}),
    "convert": ("auto", "The same as --task.", "--task", {"renamed": {"none": "auto"}}),
    "config_format": ("auto", "Form of config.json.", Lacks("reader of Mistral's files", "hub"), {"passes": ("hf",)}),
    "code_revision": (str, "Branch, tag or commit of the model's own code.", Lacks("code apart from weights", "hub")),
    "quantization_param_path": (str, "File with scales of an fp8 KV cache.", _SMALL_CACHE),
    "rope_scaling": ({}, "Scaling of positions.", "--hf-overrides.rope_scaling"),
    "rope_theta": (float, "Base of the rotary embedding.", "--hf-overrides.rope_theta"),
    "max_context_len_to_capture": (int, "Its older name.", "--max-seq-len-to-capture"),
    "disable_cascade_attn": (False, "No cascade attention.", "no attention plugin here cascades"),
    "disable_async_output_proc": (False, "Process outputs in step.", "API processes do it, apart from the engine"),
    "tokenizer_pool_size": (0, "Workers that tokenize.", "API processes tokenize; --api-server-count adds some"),
    "tokenizer_pool_type": ("ray", "What the tokenizer's workers are.", "there is no such pool"),
    "tokenizer_pool_extra_config": ({}, "Options of the tokenizer's workers.", "there is no such pool"),
    "pooler_config": ({}, "Pooling type and normalisation.", _POOLING),
    "override_pooler_config": ({}, "Its older name.", "--pooler-config"),
    "override_neuron_config": ({}, "Options of Neuron devices.", Lacks("Neuron platform", "platform")),
}
_LOAD: dict[str, _Row] = {
    "pt_load_map_location": ("cpu", "Where pickles are read to.", "host memory, always; then moved", {"objects": True}),
    "qlora_adapter_name_or_path": (str, "Nothing.", "it has had none since 0.9"),
    "safetensors_load_strategy": ("lazy", "How safetensors are read.", "files are mapped and read as needed (lazy)"),
}
_DECODING: dict[str, _Row] = {
    "guided_decoding_backend": ("auto", "Grammars.", _GUIDED, {"suffixes": _COLON}),
    "guided_decoding_disable_fallback": (False, "Take no other back end.", _GUIDED),
    "guided_decoding_disable_any_whitespace": (False, "Compact JSON.", _GUIDED),
    "guided_decoding_disable_additional_properties": (False, "Only properties that the schema names.", _GUIDED),
    "structured_outputs_config": ({}, "The same as one object.", _GUIDED),
    "enable_reasoning": (False, "Split reasoning from the answer.", "--reasoning-parser NAME says it all"),
}
_SPREAD: dict[str, _Row] = {
    "worker_use_ray": (False, "Ray workers.", "--distributed-executor-backend", {"renamed": {"True": "ray"}}),
    "pipeline_parallel_size": (1, "Stages of the model.", _PARALLEL, {"aliases": ("-pp",)}),
    "tensor_parallel_size": (1, "Shards of each layer.", _PARALLEL, {"aliases": ("-tp",)}),
    "data_parallel_size": (1, "Replicas of the model.", _REPLICAS, {"aliases": ("-dp",)}),
    "data_parallel_size_local": (int, "Replicas on this node.", _REPLICAS, {"aliases": ("-dpl",), "passes": (1,)}),
    "data_parallel_address": (str, "Address of the first node.", _REPLICAS, {"aliases": ("-dpa",)}),
    "data_parallel_rpc_port": (int, "Port of the first node.", _REPLICAS, {"aliases": ("-dpp",)}),
    "data_parallel_backend": ("mp", "Starts them.", _REPLICAS, {"aliases": ("-dpb",)}),
    "enable_expert_parallel": (False, "Spread experts over devices.", _PARALLEL, {"aliases": ("-ep",)}),
    "enable_multimodal_encoder_data_parallel": (False, "Replicate the vision encoder.", _MEDIA),
    "max_parallel_loading_workers": (int, "Workers that load at once.", "one worker loads", {"passes": (1,)}),
    "ray_workers_use_nsight": (False, "Profile Ray workers.", _RAY),
    "disable_custom_all_reduce": (False, "Use the vendor's collective.", "one worker has nobody to talk to"),
    "worker_cls": ("auto", "Class of workers.", Lacks("other classes of workers", "executor")),
}
_CACHE: dict[str, _Row] = {
    "swap_space": (4.0, "GiB of host memory for preempted requests.", _RECOMPUTE),
    "calculate_kv_scales": (False, "Find the scales of an fp8 cache while running.", _SMALL_CACHE),
}
_MULTIMODAL: dict[str, _Row] = {
    "allowed_local_media_path": ("", "Folder below which file:// media may lie.", _MEDIA),
    "limit_mm_per_prompt": ({}, "Most items per prompt, of each sort.", _MEDIA, {"pairs": True}),
    "mm_processor_kwargs": ({}, "Options of the processor of media.", _MEDIA),
    "mm_processor_cache_gb": (4.0, "GiB of processed media to keep.", _MEDIA, {"passes": (0,)}),
    "disable_mm_preprocessor_cache": (False, "Keep none.", "--mm-processor-cache-gb", {"renamed": {"True": "0"}}),
    "mm_cache_preprocessor": (False, "Keep some.", "--mm-processor-cache-gb", {"renamed": {"True": "4"}}),
    "disable_chunked_mm_input": (False, "Never split an item over steps.", _MEDIA),
    "image_input_type": (str, "Form of images.", _MEDIA),
    "image_token_id": (int, "Id of the image token.", _MEDIA),
    "image_input_shape": (str, "Largest shape of an image.", _MEDIA),
    "image_feature_size": (int, "Tokens of an image.", _MEDIA),
    "image_processor": (str, "Folder or hub id of the image processor.", _MEDIA),
    "image_processor_revision": (str, "Branch, tag or commit of the image processor.", _MEDIA),
    "disable_image_processor": (False, "Use no image processor.", _MEDIA),
}
_ADAPTERS: dict[str, _Row] = {
    "enable_lora": (False, "Serve LoRA adapters.", _LORA),
    "enable_lora_bias": (False, "Apply the biases of adapters.", _LORA),
    "max_loras": (1, "Most adapters in a step.", _LORA),
    "max_lora_rank": (16, "Largest rank.", _LORA),
    "lora_extra_vocab_size": (256, "Most tokens that an adapter adds.", _LORA),
    "lora_dtype": ("auto", "Type of adapters.", _LORA),
    "long_lora_scaling_factors": ((), "Scaling factors of contexts.", _LORA, _MANY),
    "max_cpu_loras": (int, "Most adapters in host memory.", _LORA),
    "fully_sharded_loras": (False, "Shard adapters fully.", _LORA),
    "enable_prompt_adapter": (False, "Serve prompt adapters.", _PROMPT_ADAPTERS),
    "max_prompt_adapters": (1, "Most prompt adapters in a step.", _PROMPT_ADAPTERS),
    "max_prompt_adapter_token": (0, "Most tokens of prompt adapters.", _PROMPT_ADAPTERS),
}
_DRAFTS: dict[str, _Row] = {
    "speculative_config": ({}, "Who drafts, and how, in one object.", _SPECULATION, {"aliases": ("-sc",)}),
    "spec_method": (str, "Who drafts.", ".method"),
    "speculative_model": (str, "The model that drafts.", ".model", {"aliases": ("--spec-model",)}),
    "speculative_model_quantization": (str, "How it is quantized.", ".quantization"),
    "num_speculative_tokens": (int, "Drafts per step.", ".num_speculative_tokens", {"aliases": ("--spec-tokens",)}),
    "speculative_draft_tensor_parallel_size": (
        *(int, "Its shards.", ".draft_tensor_parallel_size"),
        {"aliases": ("-spec-draft-tp",)},
    ),
    "speculative_max_model_len": (int, "Longest context with drafts.", ".max_model_len"),
    "speculative_disable_by_batch_size": (int, "No drafts with a longer queue.", ".disable_by_batch_size"),
    "speculative_disable_mqa_scorer": (False, "The older scorer.", ".disable_mqa_scorer", {"renamed": _FLAG}),
    "ngram_prompt_lookup_max": (int, "Longest n-gram to look up.", ".prompt_lookup_max"),
    "ngram_prompt_lookup_min": (int, "Shortest n-gram to look up.", ".prompt_lookup_min"),
    "spec_decoding_acceptance_method": ("rejection_sampler", "How drafts are accepted.", ".acceptance_method"),
    "typical_acceptance_sampler_posterior_threshold": (float, "Lower bound.", ".posterior_threshold"),
    "typical_acceptance_sampler_posterior_alpha": (float, "Scale of the bound.", ".posterior_alpha"),
    "disable_logprobs_during_spec_decoding": (bool, "No logprobs.", ".disable_logprobs", {"renamed": _FLAG}),
}
_OBSERVABILITY: dict[str, _Row] = {
    "otlp_traces_endpoint": (str, "URL that spans are sent to.", _TRACES),
    "collect_detailed_traces": ((), "Parts with more timings.", _TRACES, _MANY | {"passes": (("None",),)}),
}
_SCHEDULER: dict[str, _Row] = {
    "async_scheduling": (bool, "Overlap steps.", "--pipeline-depth", {"renamed": {"True": "2", "False": "1"}}),
    "num_lookahead_slots": (0, "Extra cache slots per request.", "slots are made when they are needed"),
    "scheduler_delay_factor": (0.0, "Delay before a prompt.", "a prompt starts in the next step"),
    "preemption_mode": (str, "What becomes of the preempted.", _RECOMPUTE, {"passes": ("recompute",)}),
    "num_scheduler_steps": (1, "Model steps per schedule.", "--pipeline-depth overlaps steps instead"),
    "multi_step_stream_outputs": (True, "Stream within several steps.", "every step is streamed"),
    "use_v2_block_manager": (True, "Nothing.", "there is one block manager"),
    "disable_hybrid_kv_cache_manager": (False, "One cache size for all layers.", "sliding layers keep their window"),
}
_VLLM: dict[str, _Row] = {
    "kv_transfer_config": ({}, "Transfer of the KV cache.", Lacks("transfer of the KV cache", "kv_connector")),
    "kv_events_config": ({}, "Publishing of KV events.", Lacks("KV events", "kv_events")),
    "additional_config": ({}, "Options of a platform.", Lacks("platform that takes options", "platform")),
}


def engine_sections() -> Mapping[str, type]:
    """What a command that runs an engine understands: the sections of `Config`, and all that was documented besides."""
    return {**config_sections(), **DECLARED}


def _class(title: str, rows: Mapping[str, _Row], summary: str = "Options without a reader.") -> type:
    """A section like the others, which no component is given. `title` may be that of one: then they are one group."""
    return make_dataclass(title, _fields(rows), namespace={"__doc__": summary}, frozen=True, kw_only=True)


def _fields(rows: Mapping[str, _Row]) -> Iterator[tuple[str, Any, Any]]:
    for name, (default, doc, fate, *more) in rows.items():
        optional = isinstance(default, type)
        base: Any = default if optional else type(default)
        meta: dict[str, Any] = {"choices": tuple(_CHOICES.get(name, "").split())}
        if base is tuple:
            base = _LISTS.get(name, tuple[str, ...])
        elif base in (int, float):
            meta["ge"] = 0
        elif base in (dict, bool):
            meta["json" if base is dict else "optional_value"] = True
        if isinstance(fate, Lacks):
            meta["lacks"] = fate
        else:
            fate = f"--speculative-config{fate}" if fate[0] == "." else fate
            meta["replaced" if fate.startswith("--") and " " not in fate else "inert"] = fate
        meta |= more[0] if more else {}
        yield name, base | None if optional else base, opt(None if optional else default, doc, **meta)


DECLARED: Mapping[str, type] = MappingProxyType(
    {
        "declared_frontend": _class("FrontendConfig", _FRONTEND),
        "declared_model": _class("ModelConfig", _MODEL),
        "declared_load": _class("LoadConfig", _LOAD),
        "decoding": _class("DecodingConfig", _DECODING, "Output of a given form."),
        "declared_parallel": _class("ParallelConfig", _SPREAD),
        "declared_cache": _class("CacheConfig", _CACHE),
        "multimodal": _class("MultiModalConfig", _MULTIMODAL, "Images, video and audio in prompts."),
        "lora": _class("LoRAConfig", _ADAPTERS, "Adapters."),
        "speculative": _class("SpeculativeConfig", _DRAFTS, "Drafts that the model checks."),
        "declared_observability": _class("ObservabilityConfig", _OBSERVABILITY),
        "declared_scheduler": _class("SchedulerConfig", _SCHEDULER),
        "whole": _class("VllmConfig", _VLLM, "What concerns more than one part."),
    }
)
