"""Tiny configurations of the classes of transformers that run row after row, and of encoders that can be decoders.

`ROWS` maps a model type to what differs from `ferrule_testkit.checkpoints.SIZES`. State sizes are small, and windows,
chunks and convolutions shorter than the texts of tests, so that each kind of cache is filled, cut and slid over. `...`
is what a class does not accept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: dict[str, Any] = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_SPARSE: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # fewer heads have ties at 0
_TWO_MLPS: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_DECODER: dict[str, Any] = {"is_decoder": True, "add_cross_attention": False}
_GPT: dict[str, Any] = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
_BART: dict[str, Any] = {
    **_DECODER,
    "is_encoder_decoder": False,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "scale_embedding": False,
}

_INKLING: dict[str, Any] = {
    "unpadded_vocab_size": 320,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 12,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "d_rel": 8,
    "rel_extent": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

# What people serve.
_SERVED: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "bitnet": {},
    "codegen": {**_GPT, "n_ctx": 256, "rotary_dim": 8},
    "ctrl": {**_GPT, "dff": 96},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"head_dim": 16},
    "doge": {"keep_window_size": 64},
    "exaone_moe": {**_EXPERTS, **MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 16},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 12},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 32},
    "kimi_linear": {
        **MLA,
        **_HYBRID,
        **_TWO_MLPS,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "longcat_flash": {
        **MLA,
        "num_layers": 1,
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "head_dim": 16,  # of the rotated part
    },
    "minimax": {
        "head_dim": 16,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "openai-gpt": _GPT,
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": 12,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 3,
        "head_dim": 16,
    },
    "rwkv": {"attention_hidden_size": 64, "context_length": 256, "rescale_every": 1},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "num_heads": 2, "chunk_size": 16},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}

# The rest of the library's causal language models.
_OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {**_EXPERTS, **MIXED, "num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 16},
    "aria_text": {"head_dim": 16, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**MLA, **_TWO_MLPS},
    "axk2": {**MLA, **_SPARSE, **_TWO_MLPS, "gated_norm_rank": 8},
    "bailing_hybrid": {
        **MLA,
        **_HYBRID,
        **_TWO_MLPS,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "first_k_dense_replace": 1,
    },
    "beam": {
        **_EXPERTS,
        **MIXED,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
    **dict.fromkeys(("bart", "mbart", "mvp", "pegasus", "plbart", "blenderbot", "blenderbot-small", "marian"), _BART),
    "bigbird_pegasus": {**_BART, "attention_type": "original_full"},
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert"), _DECODER),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), _DECODER),
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "cohere2_moe": {
        **_EXPERTS,
        **MIXED,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "head_dim": 16,
        "logit_scale": 0.9,
    },
    "cohere_compass_text": {
        **MIXED,
        "head_dim": 16,
        "rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"), {"rope_type": "default", "rope_theta": 10000.0}
        ),
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "cwm": {**MIXED, "head_dim": 16},
    "deepseek_v4": {
        **MLA,
        **_SPARSE,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe", "moe", "moe"],
        "sliding_window": 12,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
    },
    "dots3_note_text": {**MLA, **_SPARSE, **_TWO_MLPS, "sliding_window": 12, "shared_experts_intermediate_size": 32},
    "electra": {**_DECODER, "embedding_size": 32},
    "flint": {**_EXPERTS, **MIXED, "mlp_only_layers": [0], "head_dim": 16},
    "gemma4_unified_text": {**MIXED, "head_dim": 16},
    "gpt-sw3": _GPT,
    "gpt_neox_japanese": {},
    "granitemoe_swa": {**MIXED, "num_local_experts": 4, "layer_rope_theta": [10000.0] * 3},
    "hrm_text": {"num_hidden_layers": ..., "head_dim": 16, "num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2},
    "hy_v3": {**_EXPERTS, **_TWO_MLPS, "num_shared_experts": 1, "head_dim": 16},
    "hy_v4": {**MLA, **_SPARSE, **_TWO_MLPS, "indexer_types": ["full", "shared"], "hc_mult": 2, "head_dim": 16},
    "hyperclovax": {},
    "inkling_text": {**_INKLING, "intermediate_size": 96, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2, "scoring_func": "sigmoid"},
    "kolibri1": {**_EXPERTS, **MIXED, "num_local_experts": 4, "head_dim": 16},
    "laguna": {
        **_EXPERTS,
        **MIXED,
        "head_dim": 16,
        "num_attention_heads_per_layer": [4, 4, 4],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "lfm3": {"layer_types": ["conv", "full_attention"], "head_dim": 16, "sliding_window": 12},
    "mellum": {**_EXPERTS, **MIXED, "num_local_experts": 4, "head_dim": 16, "mlp_layer_types": ["sparse"] * 3},
    "minimax_m3_vl_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "prophetnet": {
        "num_hidden_layers": ...,
        **_DECODER,
        "is_encoder_decoder": False,
        "num_decoder_layers": 2,
        "num_encoder_layers": 2,
        "decoder_ffn_dim": 96,
        "encoder_ffn_dim": 96,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
    },
    "qwen4_exp_text": {
        **_DELTA,
        **_EXPERTS,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        **_DECODER,
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "feed_forward_size": 96,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "rembert": {**_DECODER, "input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        **_DECODER,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "enable_pronunciation": False,
        "enable_shape": False,
    },
    "roformer": {**_DECODER, "embedding_size": 32},
    "trocr": {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    "whisper": {**_BART, "max_target_positions": 256},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": True, "n_langs": 1},
    "xlnet": {"max_position_embeddings": ..., "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "youtu": MLA,
    "zaya": {
        **_EXPERTS,
        "layer_types": ["hybrid", "hybrid"],
        "head_dim": 16,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}

_SMALL_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}

# Composite configurations: the text part is served where the library has a causal model of it.
COMPOSITE: Mapping[str, Mapping[str, Any]] = {
    kind: {"text_config": {**_TEXT, **changes}, "vision_config": _SMALL_VISION}
    for kind, changes in {
        "gemma3": {**MIXED, "head_dim": 16},
        "gemma4": {**MIXED, "head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "gemma4_unified": {**MIXED, "head_dim": 16},
        "qwen4_exp": _OTHERS["qwen4_exp_text"],
        "dots3_note": _OTHERS["dots3_note_text"],
        "emu3": {},
        "got_ocr2": {},
        "mllama": {"cross_attention_layers": []},
    }.items()
}
SEEDS: Mapping[str, int] = {  # where the weights of seed 0 give near-ties
    "axk2": 1,
    "beam": 1,
    "granitemoe_swa": 1,
    "hy_v4": 1,
    "inkling_text": 5,
    "xlm-roberta-xl": 1,
    "zaya": 1,
    "recurrent_gemma": 1,
}
ROWS: Mapping[str, Mapping[str, Any]] = {**_SERVED, **_OTHERS}
