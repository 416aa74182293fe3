"""Adapters that add tokens: their rows are those of a model with more tokens that PEFT has merged them into."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import LoRAConfig
from ferrule.types import Adapter
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.fakes.added_tokens import make_adapter
from tests.fakes.lora_files import write_adapter

SIZE = 320  # tokens of the tiny checkpoint
PROMPTS = [[5, 6, SIZE, 8, SIZE + 2, 9], list(range(5, 35)), [SIZE + 1, *range(7, 23)]]
PLAIN = [[one if one < SIZE else one - SIZE for one in prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def section(**changes: Any) -> LoRAConfig:
    return LoRAConfig(**{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | changes)


def check(found: Output, wanted: Output) -> None:
    assert (found.error, found.token_ids) == (None, wanted.token_ids)
    assert [each.logprob for each in found.logprobs] == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-3)


def alone(folder: Path, prompts: list[list[int]], **sampling: Any) -> list[Output]:
    with Harness(folder, dtype="float32", block_size=16) as opened:
        return opened.engine().run(prompts, max_tokens=12, **sampling)


FORMS: dict[str, dict[str, Any]] = {
    "whole": {"target_modules": ["q_proj", "v_proj"]},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "separate": {"target_modules": ["q_proj"], "separate": True},
    "separate-ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "separate": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_added_tokens(llama: Path, tmp_path: Path, form: str) -> None:
    adapter = make_adapter(llama, tmp_path / "more", 3, **FORMS[form])
    fewer = make_adapter(llama, tmp_path / "fewer", 1, seed=2, target_modules=["q_proj"])
    plain, wanted = alone(llama, PLAIN), alone(tmp_path / "more" / "merged", PROMPTS)
    other = alone(tmp_path / "fewer" / "merged", PLAIN)
    assert any(id >= SIZE for output in wanted for id in output.token_ids)
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        engine = opened.engine(max_num_batched_tokens=16)
        for _ in range(3):  # the later ones with recorded steps, and behind cached prefixes
            for output, reference in zip(engine.run(PLAIN, max_tokens=12), plain, strict=True):
                check(output, reference)
            prompts, adapters = [PROMPTS[0], PLAIN[1], PROMPTS[2], PLAIN[0]], [adapter, None, adapter, fewer]
            found = engine.run(prompts, max_tokens=12, adapters=adapters)
            for output, reference in zip(found, (wanted[0], plain[1], wanted[2], other[0]), strict=True):
                check(output, reference)
        assert opened.executor.call("describe_adapter", ("more",))["num_added"] == 3
        bad = engine.run([PROMPTS[0], PROMPTS[1]], max_tokens=4, adapters=[fewer, fewer])
        assert "outside the vocabulary" in str(bad[0].error)
        assert bad[1].error is None


def test_a_head_that_shares_the_table_has_its_added_rows(tmp_path: Path) -> None:
    base = tiny_checkpoint("gemma2", tmp_path / "base")  # tied, scaled embeddings, capped logits
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    adapter = make_adapter(base, tmp_path / "more", 2, target_modules=["q_proj"])
    prompts = [[5, size, 7, size + 1], [size + 1, *range(7, 20)]]
    wanted = alone(tmp_path / "more" / "merged", prompts, logit_bias=((size, 3.0), (size + 1, 3.0)))
    assert any(id >= size for output in wanted for id in output.token_ids)
    with Harness(base, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        bias = ((size, 3.0), (size + 1, 3.0))
        for output, reference in zip(
            opened.engine().run(prompts, max_tokens=12, adapters=[adapter] * 2, logit_bias=bias), wanted, strict=True
        ):
            check(output, reference)


def test_nothing_is_wider_until_an_adapter_needs_it(llama: Path, tmp_path: Path) -> None:
    more = make_adapter(llama, tmp_path / "more", 2, target_modules=["q_proj"])
    plain = Adapter(name="plain", path=str(write_adapter(llama, tmp_path / "plain", 1)))
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        engine, seen = opened.engine(), list[int]()
        runner = opened.executor._started()._worker.model_runner  # type: ignore[attr-defined]
        bank, sample = runner._adapters, runner._sampler.sample

        def noted(logits: torch.Tensor, batch: Any) -> Any:
            seen.append(logits.shape[1])
            return sample(logits, batch)

        runner._sampler.sample = noted
        engine.run(PLAIN, max_tokens=4, adapters=[plain, None])
        assert all(rows.data is None for rows in bank._added.values())
        assert (set(seen), bank.revision) == ({SIZE}, 0)
        engine.run(PLAIN, max_tokens=4, adapters=[more, None])
        assert set(seen) == {SIZE, SIZE + 2}
        seen.clear()
        engine.run(PLAIN, max_tokens=4, adapters=[plain, None])
        assert set(seen) == {SIZE}
        assert bank.revision == 2  # the embedding's rows and the head's


HIDDEN = 64
TABLE, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
Change = Callable[[Path], object]


def tensors(change: Callable[[dict[str, torch.Tensor]], object], name: str = "adapter_model") -> Change:
    def changed(folder: Path) -> None:
        file = folder / f"{name}.safetensors"
        content = load_file(file) if file.exists() else {}
        change(content)
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, file)

    return changed


def set_to(row: int, value: float, key: str = TABLE) -> Change:
    def change(content: dict[str, torch.Tensor]) -> None:
        content[key][row, 0] = value

    return tensors(change)


def new(**rows: torch.Tensor) -> Change:
    return tensors(lambda content: content.update(rows), "new_embeddings")


FAULTS: dict[str, tuple[Change, str]] = {
    "not a number": (set_to(SIZE + 1, float("nan")), "embed_tokens.weight' has values that are not finite"),
    "endless": (set_to(SIZE, float("inf"), HEAD), "lm_head.weight' has values that are not finite"),
    "trained whole": (set_to(7, 3.5), "embed_tokens.weight' has other rows than the model"),
    "a head trained whole": (set_to(0, 3.5, HEAD), "lm_head.weight' has other rows than the model"),
    "no rows of the head": (tensors(lambda content: content.pop(HEAD)), "adds 3 tokens, and has no rows of lm_head"),
    "no rows of the table": (tensors(lambda content: content.pop(TABLE)), "has no rows of embed_tokens"),
    "numbers that differ": (
        tensors(lambda content: content.update({HEAD: content[HEAD][:-1]})),
        r"adds different numbers of tokens: 2 in .*, 3 in",
    ),
    "one number alone": (
        tensors(lambda content: content.update({HEAD: content[HEAD][:SIZE]})),
        r"adds different numbers of tokens: 0 in .*, 3 in",
    ),
    "too many": (
        tensors(lambda content: content.update({key: content[key].repeat(2, 1) for key in (TABLE, HEAD)})),
        f"adds {SIZE + 6} tokens, and --lora-extra-vocab-size is 256",
    ),
    "too few": (
        tensors(lambda content: content.update({TABLE: content[TABLE][: SIZE - 1]})),
        rf"has the shape \({SIZE - 1}, 64\), and the model needs \({SIZE} \+ added, 64\)",
    ),
    "another width": (
        tensors(lambda content: content.update({TABLE: content[TABLE][:, :8]})),
        rf"has the shape \({SIZE + 3}, 8\)",
    ),
    "one dimension": (tensors(lambda content: content.update({TABLE: content[TABLE][:, 0]})), "has the shape"),
    "both forms": (new(input_embeddings=torch.zeros(3, HIDDEN)), "are both for embed_tokens"),
    "new rows of another width": (
        new(input_embeddings=torch.zeros(3, 8)),
        r"\(3, 8\), and the model needs \(added, 64",
    ),
    "another name": (new(embeddings=torch.zeros(3, HIDDEN)), "new_embeddings.safetensors has the tensor 'embeddings'"),
    "no file": (lambda folder: (folder / "new_embeddings.safetensors").write_bytes(b"{" * 64), "not a safetensors"),
    "a pickle": (
        lambda folder: (folder / "new_embeddings.bin").write_bytes(b"cos\nsystem\n(S'x'\ntR."),
        "was refused",
    ),
    "integers": (
        tensors(lambda content: content.update({TABLE: content[TABLE].to(torch.int8)})),
        "is of torch.int8",
    ),
}


@pytest.fixture(scope="module")
def more(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "more"
    make_adapter(llama, folder, 3, target_modules=["q_proj"])
    shutil.rmtree(folder / "merged")
    return folder


@pytest.fixture(scope="module")
def opened(llama: Path) -> Iterator[Harness]:
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as found:
        yield found


def refusal(opened: Harness, folder: Path) -> str:
    (found,) = opened.engine().run([[5, 6]], max_tokens=1, adapters=[Adapter(name=str(folder), path=str(folder))])
    assert found.invalid
    assert str(found.error).count(str(folder)) == 1  # as its name, here
    return str(found.error)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_clear_error(opened: Harness, more: Path, tmp_path: Path, what: str) -> None:
    change, message = FAULTS[what]
    folder = Path(shutil.copytree(more, tmp_path / "bad"))
    change(folder)
    assert re.search(message, refusal(opened, folder)), refusal(opened, folder)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("llama", {"lora": section(lora_extra_vocab_size=0)}, "adds 3 tokens, and --lora-extra-vocab-size is 0"),
        ("llama", {"lora": section(lora_extra_vocab_size=2)}, "adds 3 tokens, and --lora-extra-vocab-size is 2"),
        ("phi", {"lora": section()}, "the model's head has a bias"),
    ],
)
def test_servers_that_take_none(tmp_path: Path, model: str, changes: dict[str, Any], said: str) -> None:
    base = tiny_checkpoint(model, tmp_path / "base")
    make_adapter(base, tmp_path / "more", 3, target_modules=["q_proj"])
    with Harness(base, dtype="float32", block_size=16, sections=changes) as opened:
        assert said in refusal(opened, tmp_path / "more")


def test_guesses_know_no_added_tokens(llama: Path, more: Path) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 2}
    with Harness(llama, dtype="float32", sections={"lora": section()}, speculative=guesses) as opened:
        assert re.search(
            r"adds 3 tokens \(.*\), and --speculative-config has no guesses of such", refusal(opened, more)
        )


def test_tables_of_the_models_own_rows_add_nothing(opened: Harness, llama: Path, tmp_path: Path) -> None:
    make_adapter(llama, tmp_path / "same", 0, target_modules=["q_proj"])
    (found,) = opened.engine().run([[5, 6]], max_tokens=1, adapters=[Adapter(name="same", path=str(tmp_path / "same"))])
    assert found.error is None
    assert opened.executor.call("describe_adapter", ("same",))["num_added"] == 0
