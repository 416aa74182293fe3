"""Models that speculators need for their kit: their own, of random weights, and a target with a layer that guesses."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fakes.heads import head_config, layer_shapes, medusa_tensors, mlp_tensors, random_tensors, write_head

HIDDEN, VOCAB = 64, 320  # of the tiny model


def medusa(folder: Path, target: Path) -> None:
    write_head(folder, {"medusa_num_heads": 4}, medusa_tensors(4))


def mlp_speculator(folder: Path, target: Path) -> None:
    config = {"emb_dim": HIDDEN, "inner_dim": 48, "n_predict": 4, "vocab_size": VOCAB}
    write_head(folder, {**config, "model_type": "mlp_speculator"}, mlp_tensors(4, 4, 48))


def eagle(folder: Path, target: Path) -> None:
    shapes = {**layer_shapes("layers__0"), "fc__weight": (HIDDEN, 2 * HIDDEN), "fc__bias": (HIDDEN,)}
    write_head(folder, head_config(), random_tensors(5, **shapes))


def eagle3(folder: Path, target: Path) -> None:
    shapes = {**layer_shapes("midlayer", 2 * HIDDEN), "fc__weight": (HIDDEN, 3 * HIDDEN), "norm__weight": (HIDDEN,)}
    shapes |= {f"midlayer__{name}__weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
    config = head_config(draft_vocab_size=VOCAB, norm_before_residual=False)
    config["eagle_aux_hidden_state_layer_ids"] = (1, 0, 1)
    write_head(folder, config, random_tensors(6, **shapes, lm_head__weight=(VOCAB, HIDDEN)))


def itself(folder: Path, target: Path) -> None:
    """Copy the target: all of its greedy guesses are right."""
    shutil.copytree(target, folder, dirs_exist_ok=True)


def target_of_mtp(folder: Path) -> None:
    """Write a model with a layer behind its last one."""
    from tests.unit.plugins.speculator.test_mtp import write_model

    write_model(folder, "glm4_moe")
