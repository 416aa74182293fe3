"""What a command that converts a checkpoint does with its model: without weights, and without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ferrule.assembly.choose import ModelChoice, PluginChooser
from ferrule.assembly.model import build
from ferrule.assembly.model import outline as outlined
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.text.render import Renderer
from ferrule.interfaces.model import AttentionOptions, BuildContext, Model
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import ChatPrompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.locate.localise import localise
from ferrule_kernels import attention as kernel

__all__ = ["Outline", "Texts", "attend_text", "localise", "outline"]


@dataclass(frozen=True)
class Outline:
    """A model on the meta device, which takes no memory, and the context that it was built with."""

    model: Model
    context: BuildContext
    architecture: str
    _choice: ModelChoice

    def built(self, config: Mapping[str, Any]) -> Model:
        """Return a model of the same implementation for another ``config.json``, with float weights, on the meta
        device.

        Raises CheckpointError.
        """
        context = replace(self.context, config=config, device=torch.device("meta"))
        return build(replace(self._choice, context=context, quantization=None, method=None))


def outline(config: Resolved, plugins: Plugins) -> Outline:
    """Build the model that the configuration names, without weights; its folder must be on this machine.

    Raises StartupError where a server would not start, as far as headers of files show.
    """
    choice, model = outlined(config, PluginChooser(plugins))
    return Outline(model, choice.context, choice.architecture, choice)


class Texts:
    """The tokenizer and the chat templates of a model. `close` ends the process that renders conversations."""

    def __init__(self, config: Resolved, plugins: Plugins, longest: int) -> None:
        """Open the model's tokenizer and templates; `longest` is the most tokens that the model takes.

        Raises StartupError, also where there is no tokenizer.
        """
        inputs = open_inputs(config, plugins)
        if inputs.tokenizer is None:
            raise ConfigError("The model has no tokenizer.")
        self.tokenizer: Tokenizer = inputs.tokenizer
        specials = inputs.tokenizer.special_tokens
        self._renderer = Renderer(config.frontend, config.limits, inputs.templates, specials, longest)

    async def render(self, chat: ChatPrompt) -> str:
        """Render a conversation by the model's chat template. Raises RequestError."""
        return await self._renderer.render(chat)

    async def close(self) -> None:
        """End the process that renders."""
        await self._renderer.close()


def attend_text(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Compute the attention of one text that is computed as a whole; nothing is cached.

    q [tokens, heads, dim]; k, v [tokens, kv_heads, dim]. Returns [tokens, heads, dim].
    """
    positions = torch.arange(len(q), device=q.device).unsqueeze(0)
    seen = kernel.visible(positions, positions, options.window, options.chunk)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if kernel.is_plain(options):
        out = kernel.attend_sdpa(query, key, value, seen, options.scale)
    else:
        distance = positions.unsqueeze(-1) - positions.unsqueeze(-2)
        out = kernel.attend_math(query, key, value, seen, options, distance)
    return out[0].transpose(0, 1)
