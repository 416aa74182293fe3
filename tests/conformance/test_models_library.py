"""Every causal language model of the installed transformers runs as it should, or is refused with a clear sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_plugins.model.transformers import TransformersModel
from ferrule_testkit.checkpoints import RECIPES, tiny_checkpoint
from ferrule_testkit.harness import Harness

PROMPTS = [
    torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (23, 9)
]
REFUSED = {  # and why: none of them continues text token by token
    "cpmant": "attends in both directions",
    "prophetnet": "attends in both directions",
    "reformer": "draws at random",
    "xlm": "in the place of a mask",
    "xlnet": "attends in both directions",
}
# They are given images, sound or patches of bytes beside or instead of token ids, so there is no text to compare.
OTHER_INPUT = frozenset(
    ("blt", "dots3_note", "emu3", "fuyu", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "git", "mllama")
    + ("moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal")
)
SAME_CLASS = {
    "internlm3": "llama",
    "iquestcoder": "llama",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def recipe_of(kind: str) -> str | None:
    """Return the name of a recipe of this model type."""
    kind = SAME_CLASS.get(kind, kind)
    return next((name for name, recipe in RECIPES.items() if recipe.model_type == kind), None)


def whole_text(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, each from a forward pass of the library over the whole text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, str]]:
    """Collect the outcome of each class, and print it at the end."""
    ways: dict[str, str] = {}
    yield ways
    print("\n".join(f"{kind:26} {way}" for kind, way in ways.items()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_class_of_the_library_runs_or_is_refused(
    kind: str, tmp_path: Path, table: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in OTHER_INPUT:
        table[kind] = "not tried: it needs other input than token ids"
        return
    loaded: list[TransformersModel] = []
    build = TransformersModel.__init__

    def noted(self: TransformersModel, ctx: BuildContext) -> None:
        build(self, ctx)
        loaded.append(self)

    monkeypatch.setattr(TransformersModel, "__init__", noted)
    name = recipe_of(kind)
    assert name is not None, "a new class: give it a recipe"
    folder = tiny_checkpoint(name, tmp_path / "model")
    if kind in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[kind]) as caught:
            Harness(folder, dtype="float32", model_impl="transformers")
        table[kind] = f"refused: {caught.value.message}"
        return
    with Harness(folder, dtype="float32", model_impl="transformers") as harness:
        outputs = harness.engine(max_num_batched_tokens=8).run(PROMPTS, max_tokens=4)
    table[kind] = loaded[-1].way
    assert [output.token_ids for output in outputs] == [whole_text(folder, prompt, 4) for prompt in PROMPTS]
