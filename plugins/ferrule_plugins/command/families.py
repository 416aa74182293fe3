"""The table of model families, with the tool parser, reasoning parser and chat template that suit each.

A row is found by the checkpoint's `model_type` and, where models of one type write in several forms, by a word in the
model's name. The first row that fits counts. `ferrule models` shows it, and `ferrule serve` without parsers logs the
row's parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule import checkpoint
from ferrule.config import Resolved
from ferrule.interfaces.plugins import Plugins


@dataclass(frozen=True)
class Family:
    """A family of models and the parsers that suit it.

    One of `words` must be in the model's name, in lower case; without words any name fits. A parser of "" means that
    there is none.
    """

    title: str
    kinds: tuple[str, ...]
    words: tuple[str, ...] = ()
    tool: str = ""
    reasoning: str = ""
    template: str = ""  # a built-in one, for checkpoints without a template or with one that has no tools

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of `ferrule serve` that switch the parsers on."""
        tools = (f"--tool-call-parser {self.tool}", "--enable-auto-tool-choice") if self.tool else ()
        return (*tools, f"--reasoning-parser {self.reasoning}") if self.reasoning else tools


_LLAMA, _QWEN2, _QWEN3 = ("llama",), ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe", "qwen3_next")
_MISTRAL = ("mistral", "mixtral", "ministral", "ministral3", "mistral3")
_DEEPSEEK = ("deepseek_v2", "deepseek_v3")

FAMILIES = (
    Family("gpt-oss", ("gpt_oss",), (), "openai", "openai_gptoss"),
    Family("DeepSeek R1, distilled", (*_LLAMA, *_QWEN2, "qwen3"), ("deepseek-r1", "r1-distill"), "", "deepseek_r1"),
    Family("Hermes", (*_LLAMA, *_MISTRAL, *_QWEN2, *_QWEN3), ("hermes",), "hermes", "", "hermes"),
    Family("xLAM on Llama", _LLAMA, ("xlam",), "xlam", "", "xlam_llama"),
    Family("xLAM on Qwen", _QWEN2, ("xlam",), "xlam", "", "xlam_qwen"),
    Family("ToolACE", _LLAMA, ("toolace",), "pythonic", "", "toolace"),
    Family("Qwen 3 Coder", _QWEN3, ("coder",), "qwen3_coder", "", "qwen3_coder"),
    Family("Qwen 3.5", ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), (), "qwen3_coder", "qwen3"),
    Family("Qwen 3 Instruct", _QWEN3, ("instruct",), "hermes"),
    Family("Qwen 3", _QWEN3, (), "hermes", "qwen3"),
    Family("QwQ", _QWEN2, ("qwq",), "hermes", "deepseek_r1"),
    Family("Qwen 2 and 2.5", _QWEN2, (), "hermes", "", "hermes"),
    Family("Llama 3.2", _LLAMA, ("llama-3.2", "llama3.2"), "llama3_json", "", "llama3.2_json"),
    Family("Llama 3.1 and 3.3", _LLAMA, ("llama-3", "llama3"), "llama3_json", "", "llama3.1_json"),
    Family("Llama 4", ("llama4", "llama4_text"), (), "llama4_pythonic", "", "llama4_pythonic"),
    Family("Magistral", _MISTRAL, ("magistral",), "mistral", "mistral"),
    Family("Mistral", _MISTRAL, (), "mistral", "", "mistral"),
    Family("Kimi K2", ("kimi_k2", "deepseek_v3"), ("kimi",), "kimi_k2", "kimi_k2"),
    Family("Kimi K2", ("kimi_k2",), (), "kimi_k2", "kimi_k2"),
    Family("DeepSeek V3.1", _DEEPSEEK, ("v3.1",), "deepseek_v31", "deepseek_v3", "deepseek_v31"),
    Family("DeepSeek R1", _DEEPSEEK, ("r1",), "deepseek_v3", "deepseek_r1", "deepseek_r1"),
    Family("DeepSeek V3", ("deepseek_v3",), (), "deepseek_v3", "", "deepseek_v3"),
    Family("DeepSeek V3.2", ("deepseek_v32",), (), "deepseek_v32", "deepseek_v3"),
    Family("MiniMax M2", ("minimax_m2",), (), "minimax_m2", "minimax_m2"),
    Family("GLM 5", ("glm_moe_dsa",), (), "glm47", "glm45"),
    Family("GLM 4.7", ("glm4_moe", "glm4_moe_lite"), ("4.7",), "glm47", "glm45"),
    Family("GLM 4.5 and 4.6", ("glm4_moe",), (), "glm45", "glm45"),
    Family("Granite 4", ("granitemoehybrid",), (), "granite4"),
    Family("Granite 3", ("granite", "granitemoe", "granitemoeshared"), (), "granite", "granite", "granite"),
    Family("Granite 20B", ("gpt_bigcode",), ("granite",), "granite-20b-fc", "", "granite_20b_fc"),
    Family("InternLM", ("internlm2", "internlm3"), (), "internlm", "", "internlm2"),
    Family("Jamba", ("jamba",), (), "jamba", "", "jamba"),
    Family("Hunyuan A13B", ("hunyuan_v1_moe",), (), "hunyuan_a13b", "hunyuan_a13b", "hunyuan_a13b"),
    Family("Phi-4 mini", ("phi3",), ("phi-4-mini", "phi4-mini"), "phi4_mini_json", "", "phi4_mini"),
    Family("Phi-3", ("phi3", "phimoe"), (), "", "", "phi3"),
    Family("OLMo 3", ("olmo3",), (), "olmo3", "olmo3"),
    Family("LFM2", ("lfm2", "lfm2_moe"), (), "lfm2"),
    Family("FunctionGemma", ("gemma3", "gemma3_text"), ("function",), "functiongemma"),
    Family("Gemma 3", ("gemma3", "gemma3_text"), (), "pythonic", "", "gemma3_pythonic"),
    Family("Gemma 4", ("gemma4", "gemma4_text"), (), "gemma4", "gemma4"),
    Family("Gemma", ("gemma", "gemma2"), (), "", "", "gemma"),
    Family("Command R7B and A", ("cohere2",), (), "cohere_command3"),
    Family("ERNIE 4.5", ("ernie4_5", "ernie4_5_moe"), (), "ernie45", "ernie45"),
    Family("Seed-OSS", ("seed_oss",), (), "seed_oss", "seed_oss"),
    Family("Step 3", ("step3", "step3_text"), (), "step3", "step3"),
)


def find_family(config: Mapping[str, Any], names: Sequence[str]) -> Family | None:
    """Return the family of a checkpoint, by its ``config.json`` and its names; of a path, the last part counts."""
    outer = getattr(config, "outer", config)
    kinds = {config.get("model_type"), outer.get("model_type")}
    called = [*names, str(outer.get("_name_or_path") or "")]
    text = " ".join(_last(name) for name in called).lower()
    for family in FAMILIES:
        if kinds.intersection(family.kinds) and (not family.words or any(word in text for word in family.words)):
            return family
    return None


def suggestions(config: Resolved, plugins: Plugins) -> list[str]:
    """Name the options for parsers that suit the model, where there are some and none was given."""
    given = config.frontend.tool_call_parser or config.frontend.reasoning_parser
    family = find_family(
        checkpoint.configured(config.model, plugins),
        (*config.model.served_model_name, config.model.model),
    )
    if given or family is None or not family.flags:
        return []
    return [f"this looks like a model of the family {family.title}, for which there are {' '.join(family.flags)}"]


def _last(name: str) -> str:
    """Return the name of a folder; for a folder in the hub's cache, the name of its repository."""
    cached = re.search(r"models--[^/]*--([^/]+)", name)
    return cached.group(1) if cached else Path(name).name
