"""The parsers of a model's folder, each with a small file that it reads, which `test_damaged_files.py` damages."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ferrule import checkpoint
from ferrule.assembly.cache_scales import CacheScales
from ferrule.errors import CheckpointError, ConfigError, RequestError
from ferrule.frontend.admission.tensors import read_embeds
from ferrule.frontend.text.template import compile_template
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin import discover
from ferrule_nn import Linear
from ferrule_plugins.load_format.gguf import Gguf
from ferrule_plugins.quantization.packed import FerrulePacked
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.files import chat_templates, read_settings
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.samples.quantization import PACKED
from ferrule_testkit.tekken import write_tekken
from ferrule_testkit.tokenizers import byte_level, write_tokenizer
from tests.fakes.tokenizers import byte_fallback, metaspace, word_piece
from tests.mutations import Mutation, mutated, rewritten
from tests.unit.plugins.gguf.files import entry, file, tensor
from tests.unit.plugins.tokenizer import test_kimi

PLUGINS = discover()
CPU = fake_caps()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "partial_rotary_factor": 0.5,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
    "auto_map": {},
}
COMPOSITE = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"hidden_size": 32, "max_position_embeddings": 64, "rope_parameters": {"full": {"rope_theta": 1.0}}},
    "vision_config": {"hidden_size": 8},
    "dtype": "float16",
}
PARAMS = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 64,
    "vocab_size": 64,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_seq_len": 128,
    "sliding_window": [None, 64],
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1, "apply_scale": False},
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"},
}
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "unk_token": None,
    "additional_special_tokens": ["<|a|>", {"content": "<|b|>"}],
    "extra_special_tokens": {"image_token": "<img>"},
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "2": {"content": "</s>", "normalized": False}},
    "add_bos_token": True,
    "add_eos_token": True,
    "tokenizer_class": "LlamaTokenizer",
    "auto_map": {"AutoTokenizer": ["a.B", None]},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "x"}],
    "model_max_length": 128,
}


@dataclass(frozen=True)
class Parser:
    """A parser of files. `prepare` writes the folder's files, of which the one called `name` is then damaged; `quick`:
    how often.
    """

    name: str
    prepare: Callable[[Path], object]
    read: Callable[[Path], object]
    mutate: Mutation = rewritten
    refusals: tuple[type[Exception], ...] = (CheckpointError, RequestError)  # of a folder, and of a text to encode
    quick: int = 200


def written(name: str, content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )


def read_config(place: Path) -> None:
    """Read from a configuration what is needed before there is a model."""
    values = checkpoint.read(place.parent, plugins=PLUGINS)
    names = {"dim": "hidden_size"}
    completed = checkpoint.completed(values, names, {"num_hidden_layers": 1})
    checkpoint.check_sizes(completed, names)
    checkpoint.sizes(completed)
    for sliding in (True, False):
        checkpoint.max_length(completed, sliding_window=sliding)
    checkpoint.eos_ids(completed, place.parent)
    checkpoint.remote_code(completed, known=False, trusted=False)


def read_generation(place: Path) -> None:
    checkpoint.sampling_defaults(place.parent)
    checkpoint.eos_ids({}, place.parent)


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown <s> 人 fox")
    tokenizer.decode(ids)
    for token in (*ids, 0, tokenizer.vocab_size - 1, tokenizer.vocab_size):
        tokenizer.token(token)
        tokenizer.piece(token, False)


def open_tokenizer(place: Path) -> None:
    use(AutoTokenizers().open(place.parent, {}))


def tokenizer_of(core: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda folder: write_tokenizer(folder, core(), eos_token="</s>", additional_special_tokens=["<|a|>"])


def settings_of(core: Callable[[], Any], name: str) -> Callable[[Path], object]:
    def prepare(folder: Path) -> None:
        write_tokenizer(folder, core())
        (folder / name).write_text(json.dumps(SETTINGS))

    return prepare


def read_templates(place: Path) -> None:
    found = chat_templates(place.parent, read_settings(place.parent))
    for text in found.values() if isinstance(found, dict) else (found or "",):
        compile_template(text)


def sentencepiece() -> bytes:
    """Return a model of the kind BPE with all bytes, written field by field."""

    def field_of(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    words = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3), *((b"<0x%02X>" % byte, 6) for byte in range(256))]
    words += [(word.encode(), 1) for word in ("▁", "t", "h", "e", "th", "the", "▁the")]
    pieces = b"".join(
        field_of(1, field_of(1, word) + b"\x15" + bytes(4) + bytes([3 << 3, kind])) for word, kind in words
    )
    return pieces + field_of(2, bytes([3 << 3, 2])) + field_of(3, bytes([3 << 3, 1]))


def gguf() -> bytes:
    """Return a Llama of one layer, with a tokenizer."""
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 8,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
        "general.sampling.temp": 0.5,
    }
    shapes = {
        "token_embd.weight": (32, 8),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (32, 16),
        "blk.0.attn_v.weight": (32, 16),
        "blk.0.attn_output.weight": (32, 32),
        **{f"blk.0.ffn_{name}.weight": (32, 32) for name in ("gate", "up", "down")},
    }
    infos, size = [], 0
    for name, shape in shapes.items():
        kind, width = (8, 34) if len(shape) == 2 else (0, 128)  # Q8_0 and F32
        infos.append(tensor(name, shape, kind, size))
        size += -(-width * (shape[1] if len(shape) == 2 else 1) // 32) * 32
    return file([entry(key, value) for key, value in keys.items()], infos, size)


def read_gguf(place: Path) -> None:
    """Read the description, and the configuration and the tokenizer that are made of it."""
    made = Gguf.describe(place)
    assert made is not None
    checkpoint.check_sizes(json.loads(made.texts["config.json"]), {})


def damaged_head(whole: bytes, draw: Any) -> bytes:
    """Damage the head only: data is most of the file, and nothing is read of it."""
    size = whole.index(b"blk.0.ffn_down.weight") + 64
    return mutated(whole[:size], draw) + whole[size:]


def read_packed(place: Path) -> None:
    config = checkpoint.read_json(place)
    if FerrulePacked.refuses(config, CPU, torch.bfloat16) is not None:
        raise CheckpointError("refused")
    made = FerrulePacked(config)
    for name in ("layers.1.mlp.up_proj", "layers.2.mlp.up_proj", "lm_head"):
        Linear(64, 32).quantize(name, made)


def read_scales(place: Path) -> None:
    CacheScales.of(str(place), "fp8")


def read_prompt(place: Path) -> None:
    read_embeds(base64.b64encode(place.read_bytes()).decode(), 8, 400)


def torch_file() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(3, 8), stream)
    return stream.getvalue()


SCALES = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 1, "10": 2.5}}}}
MODELOPT = {"producer": {"name": "modelopt", "version": "1"}, "quantization": {"quant_algo": "FP8"}}
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 5, "top_p": 0.9, "max_new_tokens": 16}
PACKED_CONFIG = PACKED["config"]
TEMPLATE = """{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message['content'] | trim }}
{%- if message.tool_calls is defined %}{% set calls = message.tool_calls | tojson(indent=2) %}{{ calls }}{% endif %}
{%- endfor %}{% generation %}{{ raise_exception('人') if not messages else strftime_now('%d') }}{% endgeneration %}
{%- macro said(text) %}{{ text.split('</think>')[-1] }}{% endmacro %}{{ said(namespace(a=1)) }}"""
EMBEDS = (RequestError,)

PARSERS: dict[str, Parser] = {
    "config.json": Parser("config.json", written("config.json", CONFIG), read_config),
    "config.json, composite": Parser("config.json", written("config.json", COMPOSITE), read_config),
    "params.json": Parser("params.json", written("params.json", PARAMS), read_config),
    "generation_config.json": Parser(
        "generation_config.json", written("generation_config.json", GENERATION), read_generation
    ),
    "hf_quant_config.json": Parser(
        "hf_quant_config.json",
        lambda folder: [written("config.json", CONFIG)(folder), written("hf_quant_config.json", MODELOPT)(folder)],
        lambda place: checkpoint.read(place.parent, plugins=PLUGINS),
    ),
    "--quantization-param-path": Parser(
        "scales.json", written("scales.json", SCALES), read_scales, refusals=(CheckpointError, ConfigError)
    ),
    "ferrule_packed": Parser("packed.json", written("packed.json", PACKED_CONFIG), read_packed),
    "tokenizer.json of bytes": Parser("tokenizer.json", tokenizer_of(byte_level), open_tokenizer, quick=100),
    "tokenizer.json of characters": Parser("tokenizer.json", tokenizer_of(byte_fallback), open_tokenizer, quick=100),
    "tokenizer.json, unigram": Parser("tokenizer.json", tokenizer_of(metaspace), open_tokenizer, quick=100),
    "tokenizer.json, words": Parser("tokenizer.json", tokenizer_of(word_piece), open_tokenizer, quick=100),
    "tokenizer_config.json": Parser(
        "tokenizer_config.json", settings_of(byte_fallback, "tokenizer_config.json"), open_tokenizer, quick=100
    ),
    "special_tokens_map.json": Parser(
        "special_tokens_map.json", settings_of(byte_fallback, "special_tokens_map.json"), open_tokenizer, quick=100
    ),
    "chat_template.json": Parser(
        "chat_template.json", written("chat_template.json", {"chat_template": TEMPLATE}), read_templates
    ),
    "chat_template.jinja": Parser(
        "chat_template.jinja", written("chat_template.jinja", TEMPLATE.encode()), read_templates, mutated, quick=50
    ),
    "tokenizer.model": Parser(
        "tokenizer.model", written("tokenizer.model", sentencepiece()), open_tokenizer, mutated, quick=100
    ),
    "tiktoken.model": Parser("tiktoken.model", test_kimi.write, open_tokenizer, mutated, quick=100),
    "tiktoken.model, its settings": Parser("tokenizer_config.json", test_kimi.write, open_tokenizer, quick=40),
    "tekken.json": Parser("tekken.json", write_tekken, open_tokenizer, quick=40),
    "model.gguf": Parser("model.gguf", written("model.gguf", gguf()), read_gguf, damaged_head),
    "prompt_embeds of torch": Parser("embeds", written("embeds", torch_file()), read_prompt, mutated, EMBEDS),
    "prompt_embeds of safetensors": Parser(
        "embeds", written("embeds", save({"x": torch.ones(3, 8)})), read_prompt, mutated, EMBEDS
    ),
}
