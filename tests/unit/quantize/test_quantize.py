"""`ferrule quantize`: the layout by a reader of its own, the error that the bits imply, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule.errors import StartupError
from ferrule.plugin import discover
from ferrule_quantize import QuantizeCommand
from ferrule_quantize.layers import choose
from ferrule_quantize.run import write
from ferrule_quantize.targets import target_of
from ferrule_testkit.checkpoints import tiny_checkpoint

# The relative error (root of the mean square) that uniform or float numbers of so many bits have with normal weights.
BOUNDS = {"int8": 0.01, "fp8": 0.03, "int4": 0.11}
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("source"), shard_bytes=100_000)


def run(source: Path, out: Path, to: str, *more: str) -> int:
    words = [str(source), "--to", to, "-o", str(out), "--group-size", "32", "--evaluate", "none", *more]
    return QuantizeCommand().run(words, discover())


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def decoded(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """Return the weights of a layer, read as compressed-tensors documents it, in numpy where torch wrote them."""
    scale = tensors[f"{layer}.weight_scale"].float()
    if f"{layer}.weight" in tensors:
        return tensors[f"{layer}.weight"].float() * scale
    rows, columns = tensors[f"{layer}.weight_shape"].tolist()
    data = tensors[f"{layer}.weight_packed"].numpy().tobytes()
    numbers = np.array(
        [(word >> 4 * place & 15) - 8 for (word,) in struct.iter_unpack("<I", data) for place in range(8)]
    )
    return torch.from_numpy(numbers).view(rows, columns).float() * scale.repeat_interleave(columns // scale.shape[1], 1)


@pytest.mark.parametrize("to", BOUNDS)
def test_a_layer_is_as_exact_as_its_bits(to: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, inputs = torch.randn(64, 256, generator=generator), torch.randn(32, 256, generator=generator)
    target = target_of(to, 32)
    exact, got = inputs @ weight.T, inputs @ target.restored(target.quantized(weight)).T
    error = float((got - exact).norm() / exact.norm())
    assert BOUNDS[to] / 10 < error < BOUNDS[to]  # no less, or nothing was quantized


@pytest.mark.parametrize("to", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_zeros_stay_zeros(to: str, dtype: torch.dtype) -> None:
    target = target_of(to, 32)
    restored = target.restored(target.quantized(torch.zeros(8, 64, dtype=dtype)))
    assert torch.equal(restored, torch.zeros(8, 64))


@pytest.mark.parametrize("to", BOUNDS)
def test_what_is_written_is_served(to: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(source, out, to, "--ignore", r".*\.o_proj") == 0
    assert f"Serve it: ferrule serve {out}" in capsys.readouterr().out
    floats, found = contents(source), contents(out)
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(stated["ignore"]) == {"lm_head", *(f"model.layers.{n}.self_attn.o_proj" for n in range(2))}
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == set(found)
    for name, tensor in floats.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_scale" in found:
            assert float((decoded(found, layer) - tensor.float()).norm() / tensor.float().norm()) < BOUNDS[to]
        else:
            assert torch.equal(found[name], tensor)
    assert f"{LAYER}.weight_scale" in found
    exact, got = logprobs(source), logprobs(out)
    assert 0 < max(abs(a - b) for a, b in zip(exact, got, strict=True)) < 20 * BOUNDS[to]


@pytest.mark.parametrize("to", BOUNDS)
def test_the_formats_own_library_reads_the_same_weights(to: str, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert run(source, out, to) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model(torch.tensor([[5, 6, 7]]))
    assert torch.equal(model.get_submodule(LAYER).weight, decoded(contents(out), LAYER))


def test_rounded_activations_are_the_whole_difference_between_programs(source: Path, tmp_path: Path) -> None:
    """Get Ferrule's logprobs from transformers, with Ferrule's rounding of activations: the weights are exact.
    compressed-tensors divides a token's largest number by 127.5, where Ferrule divides by 127. On a random model that
    alone changes logprobs by 0.2, as much as rounding at all does.
    """
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert run(source, out, "int8") == 0
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found, largest = contents(out), 127.0

    def rounded(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        scale = inputs[0].abs().amax(-1, keepdim=True) / largest
        return (inputs[0] / scale).round() * scale

    for name, module in model.named_modules():
        if f"{name}.weight_scale" in found:
            module.weight.data = decoded(found, name)
            module.register_forward_pre_hook(rounded)
    ids = torch.arange(5, 29)

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)

    exact = theirs()
    assert torch.allclose(torch.tensor(logprobs(out)), exact, atol=1e-3)
    largest = 127.5
    assert float((theirs() - exact).abs().max()) > 0.05


def test_experts_in_one_tensor_are_refused() -> None:
    tensor = torch.empty(4, 64, 64, device="meta")
    with pytest.raises(StartupError, match="all experts in one tensor"):
        choose({"model.layers.0.mlp.experts.gate_up_proj": tensor}, target_of("int8", 32), ())


def logprobs(folder: Path) -> list[float]:
    """Return the logprobs of a prompt's tokens."""
    ids = list(range(5, 29))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), use_tqdm_on_load=False, dtype="float32", device="cpu") as llm:
        told: Any = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0].prompt_logprobs
    return [position[token].logprob for token, position in zip(ids[1:], told[1:], strict=True)]


def test_perplexity_before_and_after(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog.")
    assert run(source, tmp_path / "out", "int8", "--evaluate", str(text)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Perplexity: "))
    before, after = (float(word) for word in line.split() if word.replace(".", "").isdigit())
    assert after == pytest.approx(before, rel=0.02)


def changed(source: Path, folder: Path, values: dict[str, Any]) -> Path:
    """Copy the checkpoint with other values in its configuration."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "more", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, (), "is quantized already"),
        ({"architectures": ["GPT2LMHeadModel"]}, (), "inputs first"),
        ({}, ("--ignore", "("), "not a regular expression"),
        ({}, ("--ignore", ".*"), "no linear layer"),
        ({}, ("--group-size", "24"), "groups of 24"),
        ({}, ("--evaluate", "/does/not/exist"), "cannot be read"),
        ({}, ("--evaluate", "/dev/zero"), "is not a file"),
        ({}, ("--to", "int3"), "int3"),
        ({}, ("--skip-tokenizer",), "is for GGUF files"),
    ],
)
def test_what_is_refused(
    values: dict[str, Any], more: tuple[str, ...], told: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=told.replace("(", r"\(")):
        run(changed(source, tmp_path / "in", values), tmp_path / "out", "int4", *more)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["in"], [])


def test_nan_in_a_tensor(source: Path, tmp_path: Path) -> None:
    folder = changed(source, tmp_path / "in", {})
    file = next(file for file in sorted(folder.glob("*.safetensors")) if f"{LAYER}.weight" in load_file(file))
    tensors = load_file(file)
    tensors[f"{LAYER}.weight"][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StartupError, match=f"{LAYER}.weight.*not finite"):
        run(folder, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_only_its_own_folders_are_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(StartupError, match="not a folder that"):
        run(source, out, "int8", "--force")
    out.rmdir()
    assert run(source, out, "int8") == 0
    with pytest.raises(StartupError, match="exists"):
        run(source, out, "fp8")
    assert run(source, out, "fp8", "--force") == 0
    assert contents(out)[f"{LAYER}.weight"].dtype == torch.float8_e4m3fn


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(StartupError, match="free space"):
        run(source, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def test_routers_stay_floats(tmp_path: Path) -> None:
    source, out = tiny_checkpoint("qwen3_moe", tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    write(source, out, target_of("int8", 32))
    found = contents(out)
    gates = [name for name in found if name.endswith("mlp.gate.weight")]
    assert gates
    assert all(found[name].is_floating_point() for name in gates)
    assert any(".experts." in name and name.endswith("weight_scale") for name in found)
    with LLM(str(out), use_tqdm_on_load=False, device="cpu") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4)
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)[0].outputs[0].token_ids
