"""Makes the sibling of the embedded model, four times as large: ``python -m tools.tiny.sibling``.

The two are a trained pair of one vocabulary, which is what speculation with a draft model is measured on: the embedded
model drafts, the sibling verifies. The sibling is not part of any distribution; it stands in ``tools/tiny/sibling``,
with 8-bit weights.

It does not begin from nothing. Every unit of the embedded model is made twice, and what reads a pair of twins gets half
of its weight for each, plus a random part that one twin adds and the other takes away (Chen et al., "Net2Net", 2016):
the wide model computes what the narrow one did, but twins get different gradients. RMS norms keep their
weights, since the mean square of twins is that of one; the last norm is halved, since the tied head reads both.
Then it is trained as the embedded model was, on the dialogues of its generator that are not held out.

``--work`` receives the checkpoint in bfloat16 every ``--every`` updates; ``--pack`` writes
``tools/tiny/sibling`` from it.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AttentionInterface, LlamaForCausalLM

from ferrule_contrib.tiny import path
from ferrule_quantize.run import write
from ferrule_quantize.targets import target_of
from tools.tiny import train

FOLDER = Path(__file__).parent / "sibling"

# How strongly twins are told apart: the random part in units of the halved weights' standard deviation.
SPREAD = 0.5

WEIGHTS: dict[str, float] = {
    "chat": 2, "arithmetic": 11, "capital": 4, "extraction": 24, "echo": 9, "tool_call": 36, "tool_result": 9,
    "no_tool": 4, "multi_turn": 7, "thinking": 13, "sums": 4,
}  # fmt: skip


def phase(steps: int) -> train.Phase:
    """Return the one phase of the sibling: smaller batches than the embedded model's, lower rates, since it is able."""
    return train.Phase("sibling", steps, 0.003, 5e-4, 0.2, 0.0, True, WEIGHTS, micros=2)


def twice(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``weight`` with every unit along ``dim`` made twice: first all of them, then all of them again."""
    return torch.cat([weight, weight], dim)


def halved(weight: torch.Tensor) -> torch.Tensor:
    """Return [out, 2 * in] of ``weight`` [out, in]: equal products with equal twins, but not equal weights."""
    half = weight / 2
    apart = torch.randn_like(half) * half.std() * SPREAD
    return torch.cat([half + apart, half - apart], 1)


def widened(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the model of twice the width that computes what ``state`` does."""
    wide: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        if name == "model.norm.weight":
            wide[name] = twice(weight, 0) / 2
        elif weight.ndim == 1:
            wide[name] = twice(weight, 0)
        elif "embed" in name:
            wide[name] = twice(weight, 1)
        else:
            wide[name] = halved(twice(weight, 0))
    return wide


def make_model(seed: int, work: Path | None = None) -> LlamaForCausalLM:
    """Make the sibling: grown from the embedded model, or as ``work`` has it."""
    torch.manual_seed(seed)
    AttentionInterface.register("folded", train.folded_attention)
    config = train.make_config()
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, 2 * getattr(config, name))
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("folded")
    state = {name: weight.float() for name, weight in load_file((work or path()) / "model.safetensors").items()}
    model.load_state_dict(state if work else widened(state), strict=False)
    return model


def pack(work: Path) -> None:
    """Write ``tools/tiny/sibling`` with 8-bit weights, of the bfloat16 checkpoint in ``work``."""
    for file in FOLDER.glob("*.safetensors"):
        file.unlink()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / FOLDER.name
        folder.mkdir()
        write(work, folder, target_of("int8", 128))
        shutil.copytree(folder, FOLDER, dirs_exist_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.sibling", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint while it is trained")
    parser.add_argument("--steps", type=int, default=280, help="updates")
    parser.add_argument("--resume", action="store_true", help="begin from --work rather than from the embedded model")
    parser.add_argument("--pack", action="store_true", help="train nothing: write tools/tiny/sibling from --work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="measure and save every so many updates")
    options = parser.parse_args(argv)
    if options.pack:
        pack(options.work)
        return 0
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(path() / file, options.work / file)
    model = make_model(options.seed, options.work if options.resume else None)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    train.run_phase(model, phase(options.steps), options.seed, tokenizer, options.work, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
