"""gpt-oss with experts in mxfp4, beside the same weights as floats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import CheckpointError
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by its lower three bits
PROMPT = [5, 17, 200, 31, 99, 250, 8, 44]


def _value(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode [experts, outputs, groups, 16] and [experts, outputs, groups] to [experts, outputs, inputs], number by
    number.
    """
    halves = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(-2).long()
    signed = torch.tensor(VALUES)[halves % 8] * (1 - 2 * (halves // 8))
    return (signed * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model as floats and in mxfp4."""
    root = tmp_path_factory.mktemp("gpt-oss")
    floats = tiny_checkpoint("gpt_oss", root / "floats")
    packed = Path(shutil.copytree(floats, root / "packed"))
    tensors, others = load_file(floats / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(121, 125, blocks.shape[:3], dtype=torch.uint8, generator=draw)
        tensors[name] = _value(blocks, scales).mT.contiguous()
        others[f"{name}_blocks"], others[f"{name}_scales"] = blocks, scales
    save_file(tensors, floats / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in others}
    save_file({**rest, **others}, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return floats, packed


def test_equals_the_floats_that_it_stands_for(folders: tuple[Path, Path]) -> None:
    outputs = []
    for folder in folders:
        with Harness(folder, dtype="float32") as harness:
            outputs.append(harness.engine().run([PROMPT], max_tokens=6, logprobs=1)[0])
    plain, packed = outputs
    assert packed.token_ids == plain.token_ids
    for ours, theirs in zip(packed.logprobs, plain.logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 5e-3


def test_a_scale_that_is_no_number_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[1], tmp_path / "damaged"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a finite number"):
        Harness(folder, dtype="float32").__enter__()


def test_floats_become_mxfp4_of_few_bits(folders: tuple[Path, Path]) -> None:
    """Encode experts and other layers, but not the head; the numbers of experts are those of mxfp4 already."""
    found = {}
    for method in (None, "mxfp4"):
        with Harness(folders[0], dtype="float32", quantization=method) as harness:
            found[method] = harness.info.weight_bytes
            assert harness.engine().run([PROMPT], max_tokens=6)[0].token_ids
    assert found["mxfp4"] < 0.5 * found[None]
