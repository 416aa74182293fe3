"""`ferrule quantize` to a GGUF file: what the readers make of it is what the checkpoint has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from ferrule import LLM, SamplingParams
from ferrule.errors import StartupError
from ferrule.plugin import discover
from ferrule_files.gguf.architectures import ARCHITECTURES, read_config
from ferrule_files.gguf.names import Names
from ferrule_files.gguf.reader import GgufModel, read_model
from ferrule_files.gguf.splits import SPLITS
from ferrule_plugins.gguf.tensors import Reader
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_quantize import QuantizeCommand
from ferrule_quantize.gguf.vocabulary import describe
from ferrule_quantize.gguf_file import MIXES
from ferrule_testkit import checkpoints
from ferrule_testkit.checkpoints import tiny_checkpoint
from tests.unit.plugins.gguf.test_tokens import TEXTS, of_spm
from tests.unit.quantize.test_quantize import changed

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def recipe(name: str, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint of the testkit with other sizes."""
    values = dict(checkpoints.RECIPES[name].changes) | changes
    made = {**checkpoints.RECIPES, name: dataclasses.replace(checkpoints.RECIPES[name], changes=values)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "RECIPES", made)
        return tiny_checkpoint(name, folder)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def parameters(model: GgufModel) -> dict[str, torch.Tensor]:
    config = read_config(model)
    names = Names(ARCHITECTURES[model.architecture], config)
    reader = Reader(names, {}, torch.float32, bool(config["tie_word_embeddings"]))
    return {name: tensor.clone() for _, name, tensor in reader.read(model)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe("qwen3", tmp_path_factory.mktemp("source"), **WIDE, num_hidden_layers=8, tie_word_embeddings=True)


def run(source: Path, out: Path, to: str, *more: str) -> int:
    return QuantizeCommand().run([str(source), "--to", to, "-o", str(out), "--evaluate", "none", *more], discover())


TYPES = {
    "q8_0": {"token_embd": "Q8_0", "blk.0.attn_v": "Q8_0", "blk.1.attn_v": "Q8_0", "blk.0.attn_q": "Q8_0"},
    "q4_0": {"token_embd": "Q6_K", "blk.0.attn_v": "Q4_0", "blk.1.attn_v": "Q4_0", "blk.0.attn_q": "Q4_0"},
    "q4_k_m": {"token_embd": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.1.attn_v": "Q4_K", "blk.0.attn_q": "Q4_K"},
}


@pytest.mark.parametrize("to", MIXES)
def test_types_are_those_of_llama_cpp(
    to: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.gguf"
    assert run(source, out, to, "--ignore", r".*\.layers\.3\..*") == 0
    assert f"Serve it: ferrule serve {out}" in capsys.readouterr().out
    model = read_model([out])
    found = {name: model.tensors[f"{name}.weight"].type.name for name in TYPES[to]}
    assert found == TYPES[to]
    # The first and last of eight layers, and every third between them; the fourth is ignored.
    finer = [n for n in range(8) if model.tensors[f"blk.{n}.ffn_down.weight"].type.name == "Q6_K"]
    assert finer == ([0, 6, 7] if to == "q4_k_m" else [])
    assert model.tensors["blk.3.ffn_down.weight"].type.name == "F32"
    assert model.tensors["blk.0.attn_norm.weight"].type.name == "F32"
    exact, got = contents(source), parameters(model)
    for own, tensor in exact.items():
        error = (got[own] - tensor.float()).norm() / tensor.float().norm()
        assert error < (0.01 if to == "q8_0" else 0.1), own


def test_what_is_written_is_served(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    assert run(source, out, "q8_0") == 0
    ids = list(range(5, 29))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    told = []
    for model in (source, out):
        with LLM(str(model), use_tqdm_on_load=False, dtype="float32", device="cpu") as llm:
            tokenizer: Any = llm.get_tokenizer()
            output: Any = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0].prompt_logprobs
            told.append([position[token].logprob for token, position in zip(ids[1:], output[1:], strict=True)])
            texts = tokenizer.encode("Hello <|im_start|> 12 world"), tokenizer.chat_template, tokenizer.eos_token_id
            told.append(texts)
    assert told[1] == told[3]
    assert 0 < max(abs(a - b) for a, b in zip(told[0], told[2], strict=True)) < 0.3


@pytest.mark.parametrize(
    ("values", "more", "told"),
    [
        ({"architectures": ["HeliumForCausalLM"], "head_dim": 64}, (), "Helium.* is not written to GGUF"),
        ({"hidden_act": "gelu"}, (), "would take 'hidden_act' as silu, not gelu"),
        (
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": 8 * ["sliding_attention"]},
            (),
            "which layers are of which kind",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, (), "'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 3.0}},
            (),
            "would take 'rope'",
        ),
        ({"num_attention_heads": 0}, (), "num_attention_heads"),
        ({"rope_parameters": {"rope_type": "linear"}}, (), "needs 'factor'"),
        ({"num_hidden_layers": 7}, (), "has no name in GGUF files"),
        ({"num_hidden_layers": 10**12}, (), "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, (), "is quantized already"),
        ({}, ("-o", "folder"), "must end in .gguf"),
    ],
)
def test_what_is_refused(
    values: dict[str, Any],
    more: tuple[str, ...],
    told: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = changed(source, tmp_path / "in", values)
    with pytest.raises(StartupError, match=told):
        run(folder, tmp_path / "out.gguf", "q4_k_m", *more)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nan_in_a_tensor(source: Path, tmp_path: Path) -> None:
    folder = changed(source, tmp_path / "in", {})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StartupError, match=r"blk.1.ffn_up.weight.*not finite"):
        run(folder, tmp_path / "out.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_only_gguf_files_are_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("something else")
    with pytest.raises(StartupError, match="is not a GGUF file"):
        run(source, out, "q8_0", "--force")
    out.unlink()
    assert run(source, out, "q8_0") == 0
    with pytest.raises(StartupError, match="exists"):
        run(source, out, "q4_0")
    assert run(source, out, "q4_0", "--force", "--skip-tokenizer") == 0
    assert read_model([out]).metadata["tokenizer.ggml.model"] == "no_vocab"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"partial_rotary_factor": 1e12}, "partial_rotary_factor"),  # would be a terabyte of angles
        ({"head_dim": 10**12}, "head_dim"),
        ({"num_attention_heads": []}, "num_attention_heads|cannot build"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}}, "no number of 32 bits"),
        ({"rope_scaling": {"rope_type": []}}, "rope_type"),
        ({"layer_types": 7}, "layer_types|cannot build"),
    ],
)
def test_configurations_that_no_file_states(values: dict[str, Any], told: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=told):
        run(changed(source, tmp_path / "in", values), tmp_path / "out.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# ---------------------------------------------------------------------------------------------------- tokenizers


TOKENIZERS = AutoTokenizers()


def folder_of(core: Tokenizer, folder: Path, **settings: Any) -> Path:
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": [2, 3]}))
    return folder


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    core, _ = of_spm(prefix)
    folder = folder_of(core, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ x }}")
    found = describe(folder, 400, TOKENIZERS)
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 4, 6]
    assert found["tokenizer.ggml.token_type"][-1] == 5
    assert [found[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "eot", "unknown")] == [1, 2, 3, 0]
    assert found["tokenizer.chat_template"] == "{{ x }}"


def byte_level(cuts: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    core.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return core


@pytest.mark.parametrize("name", ["gpt-2", "dbrx", "deepseek-r1-qwen", "deepseek-v3", "tekken"])
def test_how_texts_are_cut_has_a_name(name: str, tmp_path: Path) -> None:
    core = byte_level(SPLITS[name])
    if name == "tekken":
        core.model.ignore_merges = True
    assert describe(folder_of(core, tmp_path), 256, TOKENIZERS)["tokenizer.ggml.pre"] == name


def lowered(core: Tokenizer) -> Tokenizer:
    core.normalizer = normalizers.Lowercase()
    return core


def test_unigrams(tmp_path: Path) -> None:
    core = Tokenizer(models.Unigram())
    steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    core.normalizer, core.pre_tokenizer = normalizers.Sequence(steps), pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(TEXTS * 3, trainer)
    found = describe(folder_of(core, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), 130, TOKENIZERS)
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
    assert (ggml["model"], ggml["unknown_token_id"], ggml["add_space_prefix"]) == ("t5", 0, True)
    assert ggml["remove_extra_whitespaces"] is True
    assert ggml["token_type"][:4] == [2, 3, 3, 1]
    assert len(ggml["scores"]) == len(ggml["tokens"]) == 130
    assert min(ggml["scores"]) < -1


def test_word_pieces(tmp_path: Path) -> None:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    core.train_from_iterator(
        TEXTS * 3, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    found = describe(folder_of(core, tmp_path, **names), 210, TOKENIZERS)
    assert found["tokenizer.ggml.model"] == "bert"
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens[:4] == special
    own = sorted(core.get_vocab(), key=core.token_to_id)
    whole, rest = (next(index for index, token in enumerate(own) if token.startswith(start)) for start in ("x", "##"))
    assert (tokens[whole], tokens[rest]) == (f"\u2581{own[whole]}", own[rest][2:])
    assert [found[f"tokenizer.ggml.{role}_token_id"] for role in ("cls", "seperator", "padding")] == [2, 3, 0]


@pytest.mark.parametrize(
    ("core", "told"),
    [
        (byte_level((r"\p{L}",)), "no name that is known"),
        (Tokenizer(models.WordLevel({"a": 0}, "a")), "of the kind 'WordLevel' are not written"),
        (lowered(Tokenizer(models.Unigram([("a", 0.0), ("h", -1.0)], 0))), "would make other tokens"),
    ],
)
def test_other_tokenizers_are_refused(core: Tokenizer, told: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=told):
        describe(folder_of(core, tmp_path), 256, TOKENIZERS)


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has the id 255, of 255"):
        describe(folder_of(byte_level(SPLITS["gpt-2"]), tmp_path), 255, TOKENIZERS)
