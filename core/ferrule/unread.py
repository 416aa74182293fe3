"""Keys of a ``config.json`` that nothing reads: whatever they ask for is not computed, which the user should know."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import MappingProxyType
from typing import Any

from ferrule import rotary
from ferrule.checkpoint import READ, Values

_SAYS_NOTHING: tuple[Any, ...] = (None, False, 0, 1, "", [], {})  # 1: of a factor
# What says nothing about the computation, or what shapes of tensors say too. Names are those of transformers, and those
# of files that are older than their architecture in transformers.
_WITHOUT_EFFECT = frozenset(
    {
        *("transformers_version", "model_type", "use_cache", "cache_implementation", "attn_implementation"),
        *("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "flash_attn_version", "use_kernels"),
        *("torchscript", "return_dict", "use_bfloat16", "fp16", "bf16", "fp32", "verbose", "onnx_safe", "mup"),
        *("tokenizer_class", "tokenizer_name", "tokenizer_type", "image_processor_type", "processor_class"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "unsloth_version", "unsloth_fixed"),
        *("base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "pretraining_tp", "ep_size"),
        *("gradient_checkpointing", "dropout", "attn_pdrop", "seq_aux", "z_loss_weight", "aux_loss_alpha"),
        *("router_jitter_noise", "input_jitter_noise", "router_z_loss_coef", "layerdrop", "for_llm_compressor"),
        # of generation, which older files have here and newer ones in generation_config.json
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
        *("top_k", "top_p", "typical_p", "diversity_penalty", "repetition_penalty", "length_penalty", "bad_words_ids"),
        *("num_return_sequences", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_new_tokens", "prefix"),
        *("suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "num_logits_to_keep"),
        # sizes that the shapes of tensors state, and that follow from others
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"),
        *("num_experts_per_tok", "n_routed_experts", "num_kv_heads", "expansion_ratio", "qk_head_dim", "n_ctx"),
        *("kv_channels", "attention_head_dim", "attention_hidden_size", "num_query_groups", "mamba_headdim"),
        *("mamba_expand", "time_step_rank", "hybrid_layer_ids", "initial_context_length", "max_window_layers"),
        *("vocab_size", "vocab_size_per_layer_input"),
        # how states begin in training, how far their kernels look at once, and layers that only training has
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "rescale_prenorm_residual"),
        *("use_mamba_kernels", "use_mambapy", "chunk_size", "mamba_chunk_size", "chunk_size_feed_forward"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_num_hidden_layers", "altup_coef_clip"),
        "first_k_dense_replace",  # beside `mlp_layer_types`
        # of kernels of Megatron, which compute the same
        *("masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "softmax_in_fp32"),
        *("scale_attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi"),
        *("use_associative_scan", "moe_shared_expert_overlap", "fused_add_norm", "pad_vocab_size_multiple"),
        *("pad_key_length", "validate_runner_input", "inference_runner", "use_cache_quantization", "use_cache_kernel"),
        # of Qwen 1 beyond its `seq_length`, where a server's context ends; of MPT, which has no such table
        *("use_dynamic_ntk", "use_logn_attn", "learned_pos_emb"),
    }
)
_KINDS = re.compile(
    r"_.*|.*_token_ids?|.*_token_index|.*dropout|.*_dropout_prob|.*_pdrop|.*_aux_loss_coef|output_.*|summary_.*|init_.*"
    r"|initializer_.*"
)
# What nothing reads because no published file has another value.
_USUAL: Mapping[str, Any] = MappingProxyType(
    {
        "layer_switch": 4,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_type": "default",
        "moe_norm_min": 1e-12,
        "no_bias": True,
        "norm_type": "layer_norm",
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rms_norm": True,
        "rotary": True,
        "scale_attn_weights": True,
        "topk_method": "noaux_tc",
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    }
)
# Some files have one setting under several names.
_NAMES = (
    frozenset({"hidden_act", "hidden_activation", "activation_function"}),
    frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}),
    frozenset({"hidden_size", "d_model", "n_embd", "n_embed"}),
    frozenset({"num_hidden_layers", "n_layer", "num_layers"}),
    frozenset({"num_attention_heads", "n_head", "n_heads"}),
    frozenset({"intermediate_size", "d_inner", "n_inner"}),
    frozenset({"num_experts_per_tok", "experts_per_token"}),
)


class Watched(Values):
    """A text part of a ``config.json`` that knows which of its keys were asked for. Copies share this knowledge.

    Whoever goes through all keys, or copies them to a mapping of another type, has asked for all.
    """

    def __init__(self, values: Values) -> None:
        super().__init__(values, values.file, values.raw, values.outer, values.names)
        self._asked: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys of the file's text part that were not asked for, and that would change what is computed."""
        left = self.raw.keys() - self._asked - READ - rotary.KEYS - _WITHOUT_EFFECT
        return tuple(sorted(key for key in left if not _KINDS.fullmatch(key) and self._says_something(key)))

    def _says_something(self, key: str) -> bool:
        value = self.raw[key]
        if (value is not True and value in _SAYS_NOTHING) or value == _USUAL.get(key):
            return False
        others = next((names for names in _NAMES if key in names), frozenset()) & self._asked & self.raw.keys()
        return not any(self.raw[other] == value or isinstance(value, str) for other in others)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._asked.update(super().keys())
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._asked.update(super().keys())
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._asked.update(super().keys())
        return super().items()

    def __copy__(self) -> Watched:
        made = Watched.__new__(Watched)
        dict.update(made, super().items())
        made.__dict__.update(self.__dict__)
        return made
