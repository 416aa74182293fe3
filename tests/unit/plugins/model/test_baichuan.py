"""Baichuan 2, whose files differ from those of version 1 in the size of the vocabulary alone."""

from __future__ import annotations

import pytest
import torch

from ferrule.interfaces.model import BuildContext
from ferrule_plugins.model.baichuan import Baichuan


@pytest.mark.parametrize(("vocabulary", "normed"), [(125696, True), (64000, False)])
def test_version_2_divides_each_row_of_the_head_by_its_length(vocabulary: int, normed: bool) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "vocab_size": vocabulary}
    device = torch.device("cpu")
    model = Baichuan(BuildContext(config=config, dtype=torch.float32, device=device, block_size=4, max_model_len=8))
    weights = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    model.load_weights(weights.items())
    given = weights["lm_head.weight"]
    wanted = given / given.norm(dim=1, keepdim=True) if normed else given
    torch.testing.assert_close(model.lm_head.weight, torch.nn.Parameter(wanted, requires_grad=False))
    assert model.spec.alibi_slopes == (0.0625, 0.00390625)  # not 4096 wide
