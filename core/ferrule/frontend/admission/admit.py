"""The conversion of a client's request to the engine's: prompts become ids, and the rules of this model apply."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ferrule import checkpoint
from ferrule.assembly.limits import scheduler_limits
from ferrule.assembly.vocabulary import eos_ids, generation_folder
from ferrule.client.base import EngineClient
from ferrule.config import PromptAdapter, Resolved
from ferrule.engine.cache import capacity
from ferrule.errors import ConfigError, ForbiddenError, RequestError, nearest
from ferrule.frontend.admission.processors import (
    check_functions,
    check_processors,
    find_function_processor,
    find_processors,
)
from ferrule.frontend.admission.prompt_adapters import PromptAdapters
from ferrule.frontend.admission.tensors import embeds_item, read_embeds
from ferrule.frontend.admission.validate import (
    AdmissionRules,
    Checked,
    check_beam,
    check_count,
    check_ids,
    check_labels,
    check_output_cells,
    check_params,
    check_text,
    fit,
)
from ferrule.frontend.text.detokenize import decode, shown
from ferrule.frontend.text.infill import infill
from ferrule.frontend.text.render import Encoder, Renderer
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import ChatPrompt, Generate, Prompt, ReadPrompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.sampling_params import SamplingParams
from ferrule.types import HostTensor, MediaItem, TokenSampling

_CHARACTERS = 16  # characters of a prompt per token of the context (L16)
_TOKEN_BYTES = 32  # bytes of media that count as one token in the queue
_DECODERS = 2  # tensors that are decoded at once, on threads
_SHORT = 2048  # ids that are decoded on the event loop


class Prepared(Struct, frozen=True):
    """One prompt, ready for the engine: truncated as the request asks.

    `num_virtual` tokens of an adapter stand before those of the client. Nothing that it is told counts or shows them.
    """

    read: ReadPrompt
    sampling: TokenSampling
    media: tuple[MediaItem, ...] = ()
    num_virtual: int = 0  # of the first item of `media`

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids as the engine gets them: 0 for each virtual token, then those of the client."""
        return (0,) * self.num_virtual + self.read.ids

    @property
    def weight(self) -> int:
        """The size of the prompt in the queue's token budget; media count by their bytes."""
        size = sum(len(tensor.data) for item in self.media for tensor in item.data.values())
        return max(len(self.ids), size // _TOKEN_BYTES)


async def check_request(request: Generate, rules: AdmissionRules, remote: bool) -> Checked:
    """Check everything in a request that needs no prompt. `remote`: the engine runs in another process. Raises
    RequestError.
    """
    checked = check_params(request.params, rules)
    priority, salt = check_labels(request.priority, request.cache_salt)
    functions = request.params.logits_processors
    processors = check_functions(functions, rules, remote) if functions else ()
    if request.logits_processors:  # on a thread: modules that the client names have to be imported
        processors += await asyncio.to_thread(check_processors, request.logits_processors, rules)
    if request.beam is not None:
        checked = check_beam(request.beam, request, checked, rules)
    check_count(len(request.prompts), checked.width, rules.limits.max_prompts)
    if checked.base.logprobs is not None:
        check_output_cells(len(request.prompts), checked, rules, request.streamed)
    base = replace(checked.base, processors=processors) if processors else checked.base
    return replace(checked, base=base, priority=priority, cache_salt=salt)


def _cut(given: HostTensor, tokens: int, checked: Checked) -> MediaItem:
    data = given.data[checked.kept(tokens * len(given.data) // given.shape[0])]
    return embeds_item(HostTensor(shape=(tokens, given.shape[1]), dtype=given.dtype, data=data))


class PromptReader:
    """A converter of texts, ids and conversations to ids, off the event loop and under the limits. Without an `encoder`
    it takes ids only. `adapters` are virtual tokens to put before a prompt.
    """

    def __init__(
        self, rules: AdmissionRules, encoder: Encoder | None, renderer: Renderer, adapters: PromptAdapters
    ) -> None:
        self.rules = rules
        self.renderer = renderer
        self._adapters = adapters
        self.num_virtual = adapters.num_virtual
        self._encoder = encoder
        self._decoding = asyncio.Semaphore(_DECODERS)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self._encoder is None else self._encoder.tokenizer

    @property
    def max_characters(self) -> int:
        return _CHARACTERS * self.rules.max_model_len

    def under(self, rules: AdmissionRules, tokenizer: Tokenizer | None = None) -> PromptReader:
        """Return a reader under other rules, and with another tokenizer. It has the threads and children of this one,
        and is closed with it.
        """
        other = copy.copy(self)
        other.rules = rules
        if self._encoder is not None and tokenizer is not None:
            other._encoder = self._encoder.of(tokenizer)
        return other

    async def prepare(self, prompt: Prompt | ChatPrompt, checked: Checked) -> Prepared:
        """Return a prompt ready for the engine: read, truncated as asked, and with its sampling. Raises
        RequestError.
        """
        if isinstance(prompt, Prompt) and prompt.embeds is not None:
            if checked.virtual is not None:
                raise RequestError("A prompt adapter needs a prompt of tokens, not prompt_embeds.", "prompt_embeds")
            return await self._embed(prompt.embeds, checked)
        read = await self.read(prompt)
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        ids, sampling = fit(checked, read.ids, self.rules, param)
        if len(ids) < len(read.ids):
            text = read.text and await self._truncated(read.ids, read.text, checked.kept(len(ids)))
            read = replace(read, ids=ids, text=text)
        media = () if checked.virtual is None else (checked.virtual,)
        return Prepared(read, sampling, media, checked.num_virtual)

    async def _truncated(self, ids: tuple[int, ...], text: str, kept: slice) -> str:
        """Return the part of a prompt's text that belongs to the ids in `kept`."""
        left = shown(self._need_encoder().tokenizer, ids, text)
        within = range(len(ids))[kept]
        return await self._decode(ids[max(left.start, within.start) : min(left.stop, within.stop)])

    async def _embed(self, encoded: str, checked: Checked) -> Prepared:
        rules = self.rules
        if not rules.prompt_embeds:
            raise ForbiddenError("prompt_embeds is off on this server (--enable-prompt-embeds).", "prompt_embeds")
        if not rules.hidden_size:
            raise RequestError("This model takes no prompt_embeds.", "prompt_embeds")
        if checked.base.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs needs a prompt of tokens, not prompt_embeds.", "prompt_logprobs")
        async with self._decoding:
            item = await asyncio.to_thread(read_embeds, encoded, rules.hidden_size, rules.max_model_len)
        ids, sampling = fit(checked, (0,) * item.count, rules, "prompt_embeds")
        if len(ids) < item.count:
            item = await asyncio.to_thread(_cut, item.data["embeds"], len(ids), checked)
        return Prepared(ReadPrompt(ids), sampling, (item,))

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        """Return the ids, the text and the notes of a prompt. Raises RequestError."""
        if isinstance(prompt, Prompt) and prompt.ids is not None:
            if prompt.text is not None or prompt.suffix:
                raise RequestError("A prompt is a text, with or without a suffix, or token ids.", "prompt")
            return ReadPrompt(check_ids(prompt.ids, self.rules, "prompt"))
        encoder, ids = self._need_encoder(), None
        notes: tuple[str, ...] = ()
        rendered_at = 0.0
        if isinstance(prompt, ChatPrompt):
            param = "messages"
            rendered = await self.renderer.write(prompt, encoder)
            text, notes, ids = rendered.text, rendered.notes, rendered.ids
            rendered_at = time.monotonic() if ids is None else 0.0
        else:
            param = "prompt"
            text = check_text(prompt.text, self.max_characters, param)
            if prompt.suffix:
                text = infill(encoder.tokenizer, text, check_text(prompt.suffix, self.max_characters, "suffix"))
        if ids is None:
            ids = tuple(await encoder.encode(text, add_special_tokens=prompt.add_special_tokens))
        if ids and max(ids) >= self.rules.vocab_size:
            raise RequestError(f"{param} holds a token of the tokenizer that the model does not have.", param)
        return ReadPrompt(ids, text, notes, rendered_at)

    async def with_adapter(self, checked: Checked, adapter: PromptAdapter | None) -> Checked:
        """Add the virtual tokens of an adapter. Raises RequestError, RequestFailed."""
        return checked if adapter is None else replace(checked, virtual=await self._adapters.get(adapter))

    async def with_bad_words(self, checked: Checked) -> Checked:
        """Add the id sequences of the texts that must not be generated."""
        found = await self._need_encoder().bad_words(checked.bad_words)
        ids = tuple(ids for ids in found if max(ids) < self.rules.vocab_size)
        return replace(checked, base=replace(checked.base, bad_words=ids))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids from a client. Raises RequestError."""
        self._need_encoder()
        if len(ids) > self.max_characters:
            raise RequestError(f"There are {len(ids)} tokens; at most {self.max_characters} are taken.", "tokens")
        return await self._decode(check_ids(ids, self.rules, "tokens"))

    async def _decode(self, ids: Sequence[int]) -> str:
        encoder = self._need_encoder()
        if len(ids) <= _SHORT:
            return decode(encoder.tokenizer, ids, skip_special_tokens=False)
        return await encoder.offload(lambda: decode(encoder.tokenizer, ids, skip_special_tokens=False))

    async def close(self) -> None:
        await self.renderer.close()
        if self._encoder is not None:
            self._encoder.close()

    def _need_encoder(self) -> Encoder:
        if self._encoder is None:
            raise RequestError("This server runs without a tokenizer: it takes and gives token ids only.", "prompt")
        return self._encoder


def read_rules(
    config: Resolved, plugins: Plugins, client: EngineClient, tokenizer: Tokenizer | None, folder: Path
) -> AdmissionRules:
    """Return the rules that requests are checked against, from the configuration, the loaded model and its folder."""
    info = client.info
    defaults = sampling_defaults(config, folder)
    rules = AdmissionRules(
        limits=config.limits,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        context=capacity(scheduler_limits(config, info, client.num_blocks)),
        max_logprobs=config.model.max_logprobs,
        logits_mode=mode if (mode := config.model.logprobs_mode).endswith("_logits") else None,
        eos_ids=tuple(token for token in eos_ids(config, plugins, tokenizer, folder) if token < info.vocab_size),
        has_tokenizer=tokenizer is not None,
        processor_pattern=config.model.logits_processor_pattern,
        processors=find_processors(config, plugins, tokenizer),
        function_processor=find_function_processor(plugins, tokenizer),
        defaults=defaults,
        max_new_tokens=defaults.get("max_tokens"),
        prompt_embeds=config.model.enable_prompt_embeds,
        hidden_size=info.hidden_size,
        parts_thoughts=bool(config.frontend.reasoning_parser),
    )
    try:
        check_params(SamplingParams(**defaults), rules)
    except RequestError as error:
        raise ConfigError(f"The generation config cannot be used: {error.message}") from None
    return rules


def sampling_defaults(config: Resolved, folder: Path) -> dict[str, Any]:
    """Return the sampling values of the generation config and of options. Raises StartupError."""
    overrides = config.model.override_generation_config
    for name in overrides.keys() - checkpoint.SAMPLING:
        hint = f"There are {', '.join(checkpoint.SAMPLING)}."
        raise ConfigError(f"--override-generation-config has no {name!r}.{nearest(name, checkpoint.SAMPLING)}", hint)
    source = None if config.model.generation_config == "vllm" else generation_folder(config, folder)
    return checkpoint.sampling_defaults(source, overrides)
