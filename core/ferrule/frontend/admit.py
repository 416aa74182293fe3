"""From what a client sent to what the engine takes: prompts become ids, and the rules of this model apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ferrule import log
from ferrule.config import Config, checkpoint
from ferrule.engine.cache import capacity
from ferrule.errors import PluginError, RequestError
from ferrule.frontend.client import EngineClient
from ferrule.frontend.detokenize import decode
from ferrule.frontend.render import Renderer
from ferrule.frontend.tokenize import Encoder
from ferrule.frontend.validate import Checked, Rules, check_ids, check_text, fit
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import TokenSampling

_CHARACTERS = 16  # of a prompt, per token of the context (L16)
_SHORT = 2048  # ids that are decoded on the event loop

_logger = log.get("frontend")


class Prepared(Struct, frozen=True):
    """One prompt, ready for the engine. `text` is None when ids were given."""

    ids: tuple[int, ...]
    text: str | None
    sampling: TokenSampling


class PromptReader:
    """Texts, ids and conversations to ids, off the event loop, under the limits. `encoder` None: ids only."""

    def __init__(self, rules: Rules, encoder: Encoder | None, renderer: Renderer) -> None:
        self.rules = rules
        self.renderer = renderer
        self.max_characters = _CHARACTERS * rules.max_model_len
        self._encoder = encoder

    async def prepare(self, prompt: Prompt | ChatPrompt, checked: Checked) -> Prepared:
        """Raises RequestError."""
        ids, text = await self.read(prompt)
        ids, sampling = fit(checked, ids, self.rules, "messages" if isinstance(prompt, ChatPrompt) else "prompt")
        return Prepared(ids, text, sampling)

    async def read(self, prompt: Prompt | ChatPrompt) -> tuple[tuple[int, ...], str | None]:
        """A prompt's ids, and its text if it had one. Raises RequestError."""
        if isinstance(prompt, ChatPrompt):
            encoder, param = self._need_encoder(), "messages"
            text = await self.renderer.render(prompt)
        elif prompt.ids is not None:
            if prompt.text is not None:
                raise RequestError("A prompt is a text or token ids, not both.", "prompt")
            return check_ids(prompt.ids, self.rules, "prompt"), None
        else:
            encoder, param = self._need_encoder(), "prompt"
            text = check_text(prompt.text, self.max_characters, param)
        ids = await encoder.encode(text, add_special_tokens=prompt.add_special_tokens)
        if ids and max(ids) >= self.rules.vocab_size:
            raise RequestError(f"{param} holds a token of the tokenizer that the model does not have.", param)
        return tuple(ids), text

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Id sequences that must not be generated."""
        if not words:
            return ()
        found = await self._need_encoder().bad_words(words)
        return tuple(ids for ids in found if max(ids) < self.rules.vocab_size)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises RequestError."""
        encoder = self._need_encoder()
        if len(ids) > self.max_characters:
            raise RequestError(f"There are {len(ids)} tokens; at most {self.max_characters} are taken.", "tokens")
        checked = check_ids(ids, self.rules, "tokens")
        if len(checked) <= _SHORT:
            return decode(encoder.tokenizer, checked, skip_special_tokens=False)
        return await encoder.offload(lambda: decode(encoder.tokenizer, checked, skip_special_tokens=False))

    async def close(self) -> None:
        await self.renderer.close()
        if self._encoder is not None:
            self._encoder.close()

    def _need_encoder(self) -> Encoder:
        if self._encoder is None:
            raise RequestError("This server runs without a tokenizer: it takes and gives token ids only.", "prompt")
        return self._encoder


def read_rules(
    config: Config, plugins: Plugins, client: EngineClient, tokenizer: Tokenizer | None, folder: Path
) -> Rules:
    """What requests are checked against, from the configuration, the loaded model and its folder."""
    info = client.info
    limits = SchedulerLimits(
        groups=info.groups,
        num_blocks=client.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs or 1,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or info.max_model_len,
        max_model_len=info.max_model_len,
    )
    return Rules(
        limits=config.limits,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        context=capacity(limits),
        max_logprobs=config.model.max_logprobs,
        eos_ids=tuple(token for token in _eos_ids(config, tokenizer, folder) if token < info.vocab_size),
        has_tokenizer=tokenizer is not None,
        processor_pattern=config.model.logits_processor_pattern,
        processors=_processors(config, plugins),
    )


def _processors(config: Config, plugins: Plugins) -> dict[str, Callable[..., Any]]:
    """The logits processors that requests may name: only those are imported. A broken one is left out and reported."""
    found: dict[str, Callable[..., Any]] = {}
    pattern = config.model.logits_processor_pattern
    for name in plugins.names("logits_processor"):
        if pattern is not None and re.fullmatch(pattern, name):
            try:
                found[name] = plugins.load("logits_processor", name)
            except PluginError as error:
                _logger.warning("a logits processor was left out: %s", error.message, processor=name)
    return found


def generation_folder(config: Config, folder: Path) -> Path:
    """Where ``generation_config.json`` is read from."""
    origin = config.model.generation_config
    return folder if origin in {"auto", "vllm"} else Path(origin)


def _eos_ids(config: Config, tokenizer: Tokenizer | None, folder: Path) -> tuple[int, ...]:
    """Ids that end a text: the tokenizer's, those of ``config.json``, and those of ``generation_config.json``."""
    own = tokenizer.eos_token_id if tokenizer is not None else None
    settings = checkpoint.read(folder, config.model.hf_overrides)
    stated = checkpoint.eos_ids(settings, generation_folder(config, folder))
    return tuple(dict.fromkeys((() if own is None else (own,)) + stated))
