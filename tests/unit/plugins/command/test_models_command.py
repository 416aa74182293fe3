"""`ferrule models`: every architecture, and one model's block, from config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ferrule.config import Config, FrontendConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.frontend.text.builtin import builtin_templates
from ferrule.plugin import discover
from ferrule_plugins.command.families import FAMILIES, find_family, suggestions
from ferrule_plugins.command.models import ModelsCommand

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def written(folder: Path, config: dict[str, object]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_native_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "qwen3-tiny", QWEN)
    assert ModelsCommand().run([folder, "--dtype", "bfloat16", "--json"], discover()) == 0
    report = json.loads(capsys.readouterr().out)
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert report["parameters"] == 1000 * 64 + 2 * layer + 64
    assert report["weights"]["bfloat16"] == 2 * report["parameters"]
    assert report["weights"]["int4"] < report["weights"]["int8"] < report["weights"]["bfloat16"]
    assert report["token_bytes"] == 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers, bytes
    assert (report["context"], report["fits"]) == (512, 512)
    assert report["flags"] == ["--tool-call-parser hermes", "--enable-auto-tool-choice", "--reasoning-parser qwen3"]


def test_a_model_that_would_be_refused_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "t5", {"architectures": ["T5Model"], "model_type": "t5", "is_encoder_decoder": True})
    assert ModelsCommand().run([folder], discover()) == 1
    assert "no: T5Model has an encoder and a decoder" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_a_decoder_with_the_head_of_another_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str) -> None:
    folder = written(tmp_path / "llama", {"architectures": [f"LlamaFor{task}"], "model_type": "llama"})
    assert ModelsCommand().run([folder], discover()) == 1
    assert re.search(rf"no: LlamaFor{task} (classifies|finds)", capsys.readouterr().out)


@pytest.mark.parametrize("named", ["BertForMaskedLM", "BertLMHeadModel"])
def test_an_encoder_whose_class_can_be_a_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    config = {"model_type": "bert", "architectures": [named], "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
    assert ModelsCommand().run([written(tmp_path / "encoder", config)], discover()) == 1
    assert "no: BertLMHeadModel of transformers attends in both directions" in capsys.readouterr().out
    assert ModelsCommand().run([written(tmp_path / "decoder", config | {"is_decoder": True})], discover()) == 0


def test_an_encoder_that_gives_vectors_runs_as_no_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64}
    assert ModelsCommand().run([written(tmp_path / "encoder", config)], discover()) == 0
    assert ModelsCommand().run([written(tmp_path / "decoder", config | {"is_decoder": True})], discover()) == 1
    assert "makes this BERT a decoder" in capsys.readouterr().out


def test_the_list_has_native_and_other_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert ModelsCommand().run(["--json"], discover()) == 0
    rows = {row["architecture"]: row["through"] for row in json.loads(capsys.readouterr().out)}
    assert rows["CodeGenForCausalLM"] == "transformers"
    assert rows["LlamaForCausalLM"].startswith("ferrule")


def test_a_server_without_parsers_names_those_that_suit(tmp_path: Path) -> None:
    folder = written(tmp_path / "qwen3-tiny", QWEN)
    plain = resolve(Config(model=ModelConfig(model=folder)))
    (line,) = suggestions(plain, discover())
    assert "Qwen 3" in line
    assert "--tool-call-parser hermes" in line
    given = resolve(Config(model=ModelConfig(model=folder), frontend=FrontendConfig(reasoning_parser="qwen3")))
    assert not suggestions(given, discover())


def test_the_table_names_what_is_there() -> None:
    plugins, templates = discover(), builtin_templates()
    for family in FAMILIES:
        assert not family.tool or family.tool in plugins.names("tool_parser"), family
        assert not family.reasoning or family.reasoning in plugins.names("reasoning_parser"), family
        assert not family.template or family.template in templates, family
        if family.template and templates[family.template].parser:
            assert templates[family.template].parser == family.tool, family


@pytest.mark.parametrize(
    ("kind", "named", "title"),
    [
        ("qwen3", "Qwen/Qwen3-0.6B", "Qwen 3"),
        ("qwen3_moe", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen 3 Coder"),
        ("llama", "meta-llama/Llama-3.2-1B-Instruct", "Llama 3.2"),
        ("llama", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "DeepSeek R1, distilled"),
        ("deepseek_v3", "/cache/models--moonshotai--Kimi-K2-Instruct/snapshots/0123", "Kimi K2"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3.1", "DeepSeek V3.1"),
        ("bloom", "bigscience/bloom", None),
    ],
)
def test_a_family_is_found_by_type_and_name(kind: str, named: str, title: str | None) -> None:
    family = find_family({"model_type": kind}, (named,))
    assert (family and family.title) == title
