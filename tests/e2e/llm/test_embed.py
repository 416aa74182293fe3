"""`LLM.embed` with a BERT: the vectors of transformers, by cls and mean, as the folder or the user says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer

from ferrule import LLM, PoolingParams
from ferrule.errors import CheckpointError, ConfigError, RequestError
from ferrule_testkit import server as servers
from ferrule_testkit.checkpoints import SIZES, tiny_checkpoint

TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "dog"]
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "the", "quick", "brown", "fox", "do", "##g"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint("bert-encoder", tmp_path_factory.mktemp("bert"))
    tokenizer = Tokenizer(models.WordPiece({word: id for id, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def llm(bert: Path) -> Iterator[LLM]:
    with LLM(str(bert), dtype="float32", max_num_seqs=4) as opened:
        yield opened


def states(bert: Path, text: str) -> tuple[list[int], torch.Tensor]:
    """Return the library's ids of a text, and its hidden states."""
    ids = AutoTokenizer.from_pretrained(bert)(text)["input_ids"]
    model = AutoModel.from_pretrained(bert, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return ids, model(torch.tensor([ids])).last_hidden_state[0]


def close(found: list[float], wanted: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), wanted, atol=1e-5, rtol=1e-4)


def test_vectors_are_those_of_transformers_by_cls_and_of_length_one(llm: LLM, bert: Path) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    for text, output in zip(TEXTS, outputs, strict=True):
        ids, hidden = states(bert, text)
        assert (output.prompt_token_ids, output.finished, output.outputs.hidden_size) == (ids, True, 64)
        assert close(output.outputs.embedding, hidden[0] / hidden[0].norm())
    plain = llm.embed({"prompt": TEXTS[0]}, use_tqdm=False, pooling_params=PoolingParams(normalize=False))
    assert close(plain[0].outputs.embedding, states(bert, TEXTS[0])[1][0])
    assert llm.embed(outputs[1].prompt_token_ids, use_tqdm=False)[0].outputs == outputs[1].outputs


def test_more_prompts_than_slots_and_the_longest_one(llm: LLM) -> None:
    prompts = [[2, *([4 + n % 9] * length), 3] for n, length in enumerate((1, 7, 254, 3, 100, 20, 2, 254, 9))]
    together = [output.outputs for output in llm.embed(prompts, use_tqdm=False)]
    alone = [llm.embed([prompt], use_tqdm=False)[0].outputs for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert close(a.embedding, torch.tensor(b.embedding))


@pytest.mark.slow
def test_a_server_gives_the_vectors_of_transformers_to_the_client_of_ollama(bert: Path, tmp_path: Path) -> None:
    """Cut what is too long, also for the tokenizer, as transformers does: the token that ends a text stays."""
    with servers.running([str(bert), "--dtype", "float32", "--served-model-name", "bert"], tmp_path / "log") as server:
        client = ollama.Client(server.url)
        long = "hello " * 5000
        most = SIZES["max_position_embeddings"]
        cut = AutoTokenizer.from_pretrained(bert)(long, truncation=True, max_length=most)["input_ids"]
        model = AutoModel.from_pretrained(bert, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            wanted = [*(states(bert, text)[1][0] for text in TEXTS), model(torch.tensor([cut])).last_hidden_state[0, 0]]
        found = client.embed("bert", [*TEXTS, long])
        for vector, reference in zip(found.embeddings, wanted, strict=True):
            assert close(list(vector), reference / reference.norm())
        assert client.embeddings("bert", TEXTS[0]).embedding == found.embeddings[0]
        assert client.show("bert").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="at most"):
            client.embed("bert", long, truncate=False)
        with pytest.raises(ollama.ResponseError, match="for embed, and not for generate"):
            client.generate("bert", "hello")


def test_a_folder_of_sentence_transformers_says_how(bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        (tmp_path / file.name).symlink_to(file)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in _MODULES]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    _, hidden = states(bert, TEXTS[1])
    with LLM(str(tmp_path), dtype="float32") as opened:
        assert close(opened.embed(TEXTS[1], use_tqdm=False)[0].outputs.embedding, hidden.mean(0))
    options: dict[str, Any] = {"override_pooler_config": {"pooling_type": "LAST", "normalize": True}, "task": "embed"}
    with LLM(str(tmp_path), dtype="float32", **options) as opened:
        assert close(opened.embed(TEXTS[1], use_tqdm=False)[0].outputs.embedding, hidden[-1] / hidden[-1].norm())


_MODULES = [("Transformer", ""), ("Pooling", "1_Pooling")]  # without Normalize


def test_what_cannot_be_embedded_is_refused(llm: LLM, bert: Path) -> None:
    longest = SIZES["max_position_embeddings"]
    for prompt, said in (
        ([5] * (longest + 1), f"{longest + 1} tokens; a vector can be computed of at most {longest}"),
        ([], "no tokens"),
        ({"prompt_embeds": torch.ones(2, 64)}, "not of prompt_embeds"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.embed([prompt], use_tqdm=False)
    with pytest.raises(RequestError, match="BertModel is for embed, and not for generate"):
        llm.generate("hello", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"task": "generate"}, ConfigError, "--task generate: the model implementation BertModel is for embed"),
        ({"max_num_batched_tokens": 100}, ConfigError, "for a model whose prompts cannot be split"),
        ({"attention_backend": "cpu"}, ConfigError, "no attention over what follows a token"),
        ({"hf_overrides": {"is_decoder": True}}, CheckpointError, "decoder"),
        ({"hf_overrides": {"position_embedding_type": "relative_key"}}, CheckpointError, "position_embedding_type"),
    ],
)
def test_what_cannot_start_says_why(bert: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        LLM(str(bert), dtype="float32", **options)
