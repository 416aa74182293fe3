"""`ferrule quantize --to gptq` and `--to awq`: the numbers, their layouts, the layers that run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ferrule import LLM, SamplingParams
from ferrule.config import Config, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import StartupError
from ferrule.plugin import discover
from ferrule_files.offline import outline
from ferrule_nn import Linear, RMSNorm
from ferrule_quantize import QuantizeCommand
from ferrule_quantize.calibrated import awq, gptq
from ferrule_quantize.calibrated.numbers import AwqLayout, GptqLayout, Numbers, output_error
from ferrule_quantize.calibrated.prompts import Prompts
from ferrule_quantize.calibrated.walk import Inputs, Walk
from ferrule_quantize.source import open_source
from ferrule_testkit.checkpoints import tiny_checkpoint
from tests.shared import once
from tests.unit.plugins.quantization import packers

TEXT = "The quick brown fox jumps over the lazy dog. What is the capital of France? The answer is Paris. "
IDS = list(range(5, 29))


@pytest.fixture(scope="session")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "gemma2-calibrated", lambda folder: tiny_checkpoint("gemma2", folder))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 40)
    return file


def run(source: Path, out: Path, to: str, text: Path | str, *more: str) -> int:
    words = [str(source), "--to", to, "-o", str(out), "--group-size", "16", "--evaluate", "none"]
    words += ["--calibration", str(text), "--calibration-samples", "4", "--calibration-length", "48", *more]
    return QuantizeCommand().run(words, discover())


def drawn(outputs: int, inputs: int, tokens: int = 256) -> tuple[torch.Tensor, Inputs]:
    """Return weights, and inputs of which a few directions have most of the size, and a few channels are large."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=draw)
    mixed = torch.randn(tokens, inputs // 4, generator=draw) @ torch.randn(inputs // 4, inputs, generator=draw)
    x = mixed + 0.3 * torch.randn(tokens, inputs, generator=draw)
    x[:, ::16] *= 8
    given = Inputs(inputs)
    given.add(x)
    return weight, given


def logprobs(folder: Path) -> torch.Tensor:
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), use_tqdm_on_load=False, dtype="float32", device="cpu") as llm:
        told: Any = llm.generate([{"prompt_token_ids": IDS}], asked, use_tqdm=False)[0].prompt_logprobs
    return torch.tensor([position[token].logprob for token, position in zip(IDS[1:], told[1:], strict=True)])


def walk_of(source: Path) -> Walk:
    plugins = discover()
    config = resolve(Config(model=ModelConfig(model=str(source))))
    found = outline(config, plugins)
    return Walk(found.model, found.context, found.architecture)


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_loses_less_than_rounding(bits: int, ordered: bool) -> None:
    weight, inputs = drawn(48, 64)
    plain = gptq.rounded(weight, inputs.products.diagonal() / inputs.count, bits, 16)
    found = gptq.quantize(weight, inputs, bits, 16, ordered)
    own, other = (output_error(each.restored - weight, inputs.products) for each in (found, plain))
    assert 0 < own < 0.6 * other
    assert torch.equal(found.index.bincount(), torch.full((4,), 16))
    assert ordered != torch.equal(found.index, torch.arange(64) // 16)


def test_gptq_follows_the_definition() -> None:
    """Follow the paper's steps, one weight at a time, with one group, and numbers of so many bits that rounding is
    fine.
    """
    weight, inputs = drawn(3, 16)
    found = gptq.quantize(weight, inputs, 8, 16, False)
    products = (inputs.products / inputs.count).double()
    products += 0.01 * products.diagonal().mean() * torch.eye(16)
    left, scale = weight.double(), found.scales[:, 0].double()
    for at in range(16):
        inverse = torch.linalg.inv(products[at:, at:])  # of the inputs that are not rounded yet
        number = (left[:, at] / scale).round().clamp(-128, 127)
        assert torch.equal(found.numbers[:, at].double(), number + 128)
        error = (left[:, at] - number * scale) / inverse[0, 0]
        left[:, at:] -= error.unsqueeze(1) * inverse[0]


def test_inputs_that_tell_little() -> None:
    """Quantize with inputs of zeros, copies of each other, few tokens and none: finite, and no worse than rounding."""
    weight, inputs = drawn(8, 32)
    inputs.products[3], inputs.products[:, 3] = 0, 0
    inputs.products[:, 7], inputs.products[7] = inputs.products[:, 6], inputs.products[6]
    few = Inputs(32)
    few.add(torch.ones(2, 32))
    for given in (inputs, few, Inputs(32)):
        found = gptq.quantize(weight, given, 4, 16, True).restored
        plain = gptq.rounded(weight, given.products.diagonal() / max(1, given.count), 4, 16).restored
        assert float((found - weight).abs().max()) < 1.5
        assert output_error(found - weight, given.products) <= output_error(plain - weight, given.products)


def test_awq_loses_less_than_rounding() -> None:
    weight, inputs = drawn(48, 64)
    layer = Linear(64, 48)
    layer.weight.data.copy_(weight)
    divided: list[torch.Tensor] = []

    def divide(factors: torch.Tensor) -> torch.Tensor:
        divided.append(factors)
        return factors

    fold = awq.Fold(("",), divide)
    plain = output_error(awq.rounded(weight, 16) - weight, inputs.products)
    awq.apply([layer], [inputs], fold, awq.search([layer], [inputs], 16, fold))
    assert torch.allclose(layer.weight, weight * divided[0])
    folded = output_error(awq.rounded(layer.weight, 16) - layer.weight, inputs.products)
    cut = output_error(awq.quantize(layer.weight.detach(), inputs, 16).restored - layer.weight, inputs.products)
    assert 0 < cut < folded < 0.8 * plain


def test_a_norm_that_feeds_more_than_linear_layers_is_noticed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.proj = RMSNorm(32), Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            out: torch.Tensor = self.proj(y) + y
            return out

    layer, x = Odd(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layer.norm.weight.data.fill_(1.0)
    layer.proj.weight.data.copy_(drawn(32, 32)[0])
    before = layer(x)
    (fold,) = awq.folds(layer, lambda: layer(x), {"norm.weight": torch.bfloat16})
    inputs = Inputs(32)
    inputs.add(x)
    awq.apply([layer.proj], [inputs], fold, torch.linspace(0.5, 2, 32))
    with pytest.raises(StartupError, match="feed more than linear layers"):
        awq.check_same(before, layer(x))


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_layout_of_gptq(bits: int) -> None:
    given = packers.drawn(64, 96, bits, 32, symmetric=True, shuffled=True)
    made = GptqLayout(bits, 32, True).tensors(Numbers(given.numbers, given.zeros, given.scales.float(), given.index))
    expected = packers.gptq(given, bits)
    forms = GptqLayout(bits, 32, True).forms(64, 96)
    assert made.keys() == expected.keys() == forms.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor)
        assert (made[name].dtype, made[name].shape) == (forms[name].dtype, forms[name].shape)


def test_the_layout_of_awq() -> None:
    """Put each output of a word where AutoAWQ's kernels look for it."""
    given = packers.drawn(16, 64, 4, 32)
    made = AwqLayout(32).tensors(Numbers(given.numbers, given.zeros, given.scales.float(), given.index))
    for name, values in (("qweight", given.numbers), ("qzeros", given.zeros)):
        for output in range(16):
            shift = 4 * [0, 4, 1, 5, 2, 6, 3, 7][output % 8]
            assert torch.equal(made[name][:, output // 8] >> shift & 15, values[output].int())
    assert torch.equal(made["scales"], given.scales.t())


# ------------------------------------------------------------------------------------------ layers


def test_a_walk_computes_what_the_model_does(gemma2: Path) -> None:
    """Compute windows, a cap on scores, norms with offsets on both sides: layer by layer, as the engine does at
    once.
    """
    walk, tensors = walk_of(gemma2), open_source(gemma2)
    (state,) = walk.embedded(tensors, [IDS])
    for index in range(walk.num_layers):
        own = {name: tensor for name, tensor in tensors.items() if walk.index_of(name) == index}
        with walk.layer(index, own) as layer:
            state = walk.run(layer, index, state)
    norm = RMSNorm(state.shape[1], walk.model.spec.norm_eps, 1.0)
    norm.weight.data.copy_(tensors["model.norm.weight"])
    cap = walk.model.spec.logits_soft_cap
    logits = norm(state) @ tensors["model.embed_tokens.weight"].float().t()
    own_logprobs = (torch.tanh(logits / cap) * cap).log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:]).unsqueeze(1))
    assert torch.allclose(own_logprobs.squeeze(1), logprobs(gemma2), atol=2e-3)


@pytest.mark.parametrize(
    ("to", "more"),
    [
        ("gptq", ("--bits", "8", "--desc-act")),
        pytest.param("gptq", ("--bits", "4"), marks=pytest.mark.slow),
        ("awq", ()),
    ],
)
def test_what_is_written_is_served(
    to: str, more: tuple[str, ...], gemma2: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    ignored = "model.layers.1.self_attn.o_proj"
    assert run(gemma2, out, to, text, "--ignore", re_escaped(ignored), *more) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Error of layers"))
    own, plain = (float(word.strip("%.")) for word in told.replace(",", "").split() if word[0].isdigit())
    assert 0 < own < plain
    found, stated = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert stated["quantization_config"]["quant_method"] == to
    assert f"{ignored}.weight" in found
    assert "model.layers.0.self_attn.q_proj.qweight" in found
    change = float((logprobs(out) - logprobs(gemma2)).abs().max())
    assert 0 < change < (0.3 if "8" in more else 4)


def re_escaped(name: str) -> str:
    return name.replace(".", r"\.")


def test_experts(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrate each expert by the tokens that reach it; those that too few reach are rounded, and this is told."""
    source, out = tiny_checkpoint("qwen3_moe", tmp_path / "in"), tmp_path / "out"
    few = ("--bits", "8", "--calibration-samples", "1", "--calibration-length", "32")
    assert run(source, out, "gptq", text, *few) == 0
    assert "fewer than 32 tokens and are rounded alone" in capsys.readouterr().out
    found = load_file(out / "model.safetensors")
    assert "model.layers.0.mlp.experts.0.gate_proj.qweight" in found
    assert "model.layers.0.mlp.gate.weight" in found
    assert float((logprobs(out) - logprobs(source)).abs().max()) < 0.5
    with pytest.raises(StartupError, match="AWQ does not quantize experts"):
        run(source, tmp_path / "other", "awq", text)


def test_the_same_twice(gemma2: Path, tmp_path: Path, text: Path) -> None:
    for name in ("a", "b"):
        assert run(gemma2, tmp_path / name, "gptq", text) == 0
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert one == other


# ------------------------------------------------------------------------------------------ texts


def samples(source: Path, file: Path, most: int = 4, length: int = 16) -> list[list[int]]:
    plugins = discover()
    config = resolve(Config(model=ModelConfig(model=str(source))))
    return Prompts(str(file), most, length).samples(config, plugins, 256)


def test_texts_and_conversations(gemma2: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"text": "Hello world"}, {"messages": [{"role": "user", "content": "Hello"}]}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    plain, chat = samples(gemma2, file)
    with LLM(str(gemma2), use_tqdm_on_load=False, device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        assert plain == tokenizer.encode("Hello world")
        assert chat == tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n")[:16]


def test_a_long_text_is_cut(gemma2: Path, text: Path) -> None:
    found = samples(gemma2, text)
    assert [len(ids) for ids in found] == [16] * 4
    assert samples(gemma2, text, 2, 8) == [found[0][:8], found[0][8:]]


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", "", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.txt", "a", "no text of two tokens"),
        ("a.jsonl", '{"text": "Hello world"}\n[1]', "line 2.*not an object"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", '\n{"prompt": "Hello"}', 'line 2 has neither "text" nor "messages"'),
        ("a.jsonl", '{"messages": [{"role": 1}]}', "line 1: "),
    ],
)
def test_texts_that_are_refused(name: str, content: str, told: str, gemma2: Path, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(StartupError, match=told):
        run(gemma2, tmp_path / "out", "gptq", file)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("place", ["/dev/zero", "."])
def test_texts_are_in_a_file(place: str, gemma2: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not a file"):
        run(gemma2, tmp_path / "out", "gptq", Path(place))


@pytest.mark.parametrize(
    ("to", "more", "told"),
    [
        ("gptq", ("--calibration", "/does/not/exist"), "cannot be read"),
        ("gptq", ("--calibration-length", "1000"), "more than the model's context of 256"),
        ("gptq", ("--group-size", "24"), "groups of 24"),
        ("gptq", ("--group-size", "1000000000"), "groups of 1000000000"),
        ("awq", ("--bits", "4", "--desc-act"), "--desc-act is for --to gptq"),
        ("awq", ("--bits", "8"), "--bits is for --to gptq"),
        ("int8", (), "--calibration is for --to gptq, awq"),
        ("gptq", ("--bits", "5"), "bits"),
    ],
)
def test_options_that_are_refused(
    to: str, more: tuple[str, ...], told: str, gemma2: Path, tmp_path: Path, text: Path
) -> None:
    with pytest.raises(StartupError, match=told):
        run(gemma2, tmp_path / "out", to, text, *more)
    assert [path.name for path in tmp_path.iterdir()] == [text.name]


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_nan_is_found_before_the_work(gemma2: Path, tmp_path: Path, text: Path) -> None:
    folder = copied(gemma2, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.down_proj.*not finite"):
        run(folder, tmp_path / "out", "gptq", text)
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer(gemma2: Path, tmp_path: Path, text: Path) -> None:
    folder = copied(gemma2, tmp_path / "in")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartupError, match="model's tokenizer"):
        run(folder, tmp_path / "out", "gptq", text)


def test_a_full_disk(gemma2: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(StartupError, match="free space"):
        run(gemma2, tmp_path / "out", "gptq", text)
    assert [path.name for path in tmp_path.iterdir()] == [text.name]


def test_an_interrupted_run_leaves_nothing(
    gemma2: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gptq, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(gemma2, tmp_path / "out", "gptq", text)
    assert [path.name for path in tmp_path.iterdir()] == [text.name]


@pytest.mark.parametrize(
    ("name", "to", "told"),
    [
        ("olmo2", "awq", "no norm of a layer feeds"),
        ("opt", "gptq", "OPTForCausalLM cannot be calibrated"),
        ("qwen3_next", "gptq", "keep states"),
    ],
)
def test_models_that_are_refused(name: str, to: str, told: str, tmp_path: Path, text: Path) -> None:
    with pytest.raises(StartupError, match=told):
        run(tiny_checkpoint(name, tmp_path / "in"), tmp_path / "out", to, text)
    assert not (tmp_path / "out").exists()
