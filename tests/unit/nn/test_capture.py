"""Layers ask the device for nothing and give it nothing while they run, so that a step can be recorded as a graph."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ferrule.interfaces.model import BuildContext, InputEmbeds, Model
from ferrule_plugins.model import gemma2, gpt2, granite, llama, mistral, opt, phi3, qwen2, qwen3, transformers

META = torch.device("meta")  # has no numbers: whoever asks for one fails
CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 4,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0], "factor": 2.0}
MODELS: dict[str, tuple[Callable[[BuildContext], Any], dict[str, Any]]] = {
    "gemma2": (gemma2.Gemma2, {"sliding_window": 8}),
    "gpt2": (gpt2.GPT2, {"n_positions": 64, "n_head": 4, "n_embd": 16}),
    "granite": (granite.Granite, {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "llama": (llama.Llama, {}),
    "llama, dynamic": (llama.Llama, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama, longrope": (llama.Llama, {"rope_scaling": LONG}),
    "llama, yarn": (llama.Llama, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "mistral": (mistral.Mistral, {"sliding_window": 8}),
    "opt": (opt.OPT, {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "phi3": (phi3.Phi3, {}),
    "qwen2": (qwen2.Qwen2, {}),
    "qwen3": (qwen3.Qwen3, {}),
    "transformers": (transformers.TransformersModel, {"model_type": "llama"}),
}


class Watch(TorchDispatchMode):
    """A mode that raises on operations that wait for numbers of a device, or that compute beside it."""

    _WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.lstrip("_").partition(".")[0] in {wait.lstrip("_") for wait in self._WAITS}:
            raise AssertionError(f"{func} stops a recording")
        out = func(*args, **(kwargs or {}))
        made = [each for each in (out if isinstance(out, tuple | list) else (out,)) if isinstance(each, torch.Tensor)]
        if any(each.device != META and each.numel() for each in made):
            raise AssertionError(f"{func} computes on the host")
        return out


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse tensors made of Python's numbers, which begin on the host: copying them to the device cannot be
    recorded.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor is made of the host's numbers")

    for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
        monkeypatch.setattr(torch, name, refuse)


def _model(name: str) -> Model:
    make, changes = MODELS[name]
    config = {**CONFIG, **changes}
    ctx = BuildContext(config=config, dtype=torch.bfloat16, device=META, block_size=4, max_model_len=64)
    model: Model = make(ctx)
    model.cache_specs()
    return model


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("given", [False, True])
def test_a_step_can_be_recorded(name: str, given: bool, request: pytest.FixtureRequest) -> None:
    model, tokens = _model(name), 6
    request.getfixturevalue("no_copies")
    width = model.embed_size()
    places = torch.empty(tokens, dtype=torch.int64, device=META)
    embeds = InputEmbeds(places[:2], torch.empty(2, width, device=META)) if given else None
    ctx: Any = SimpleNamespace(
        positions=places, lengths=places + 1, embeds=embeds, attend=lambda layer, q, k, v, options: torch.empty_like(q)
    )
    with torch.inference_mode(), Watch():
        hidden = model.forward(places, ctx)
        logits = model.logits(hidden[:2])
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, 40), torch.float32, "meta")


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x * torch.tensor(2.0, device=META),
        lambda x: x + torch.ones(3),
    ],
)
@pytest.mark.usefixtures("no_copies")
def test_the_watch_sees(fault: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), Watch():
        fault(torch.empty(3, device=META))
