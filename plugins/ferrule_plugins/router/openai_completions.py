"""``POST /v1/completions``: outputs become chunks; a whole answer is the fold of the chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from ferrule.errors import RequestError
from ferrule.interfaces.parsers import Content, Reasoning
from ferrule.interfaces.router import Call, EventStream, Reply, RouterContext
from ferrule.interfaces.service import Generate, Output, Prompt
from ferrule.types import TokenLogprobs
from ferrule_plugins.router.openai_answers import Completion, CompletionChoice, CompletionLogprobs
from ferrule_plugins.router.openai_params import (
    Asked,
    Meter,
    beam,
    check,
    finish_of,
    finite,
    processors,
    sampling,
)
from ferrule_plugins.router.openai_schema import CompletionBody
from ferrule_plugins.router.stream import Closing

_MAX_TOKENS = 16  # the documented default


class Completions:
    """The handler."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, call: Call) -> Reply | EventStream:
        body: CompletionBody = call.body
        service = self._ctx.service
        check(body, self._ctx.config)
        if body.prompt_embeds is not None and (body.echo or body.suffix):
            name = "echo" if body.echo else "suffix"
            raise RequestError(f"{name} needs a prompt of text or tokens, so prompt_embeds excludes it.", name)
        request = self._request(body)
        asked = Asked.of("cmpl", call, request, service, self._ctx.config)
        outputs = await service.generate(request)
        count = len(request.prompts) * request.params.n
        embedded = sum(prompt.embeds is not None for prompt in request.prompts)
        writer = _Writer(body, asked, count, embedded * request.params.n)
        if body.stream:
            return EventStream(Closing(writer.chunks(outputs), outputs), asked.notes.headers)
        async with aclosing(outputs):  # type: ignore[type-var]
            return Reply(await writer.whole(outputs), headers=asked.notes.headers)

    def _request(self, body: CompletionBody) -> Generate:
        service = self._ctx.service
        defaults = service.sampling_defaults()
        most = body.max_tokens if body.max_tokens is not None else defaults.get("max_tokens", _MAX_TOKENS)
        given: dict[str, Any] = {"max_tokens": most, "logprobs": body.logprobs}
        if body.echo:
            given["max_tokens"] = most or 1  # 0: only the prompt is wanted, yet a step must run for its logprobs
            if body.logprobs is not None and body.prompt_logprobs is None:
                given["prompt_logprobs"] = body.logprobs
        return Generate(
            prompts=prompts_of(body),
            params=sampling(body, service, given),
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            logits_processors=processors(body),
            beam=beam(body),
            raw=True,
        )


def prompts_of(body: CompletionBody) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids; before them, what came as embeddings."""
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    embedded = tuple(Prompt(embeds=item) for item in embeds)
    if embedded and not body.prompt:  # the official client cannot leave `prompt` out
        return embedded
    return embedded + _tokens_of(body)


def _tokens_of(body: CompletionBody) -> tuple[Prompt, ...]:
    special, suffix = body.add_special_tokens is not False, body.suffix or None
    prompt = body.prompt
    if prompt is None:
        raise RequestError("prompt is required.", "prompt")
    given = [prompt] if isinstance(prompt, str) else prompt
    kinds = {type(item) for item in given}
    if kinds == {str}:
        return tuple(Prompt(text=text, suffix=suffix, add_special_tokens=special) for text in given)  # type: ignore[arg-type]
    if suffix:
        raise RequestError("suffix needs a prompt of text.", "suffix")
    if kinds == {int}:
        return (Prompt(ids=tuple(given)),)  # type: ignore[arg-type]
    if kinds == {list}:
        return tuple(Prompt(ids=tuple(ids)) for ids in given)  # type: ignore[arg-type]
    what = "is empty" if not kinds else "mixes forms"
    raise RequestError(
        f"prompt {what}: give a string, a list of strings, a list of token ids, or a list of such lists.", "prompt"
    )


class _Writer:
    """From outputs to chunks, for one request."""

    def __init__(self, body: CompletionBody, asked: Asked, count: int, num_embedded: int) -> None:
        options = body.stream_options
        self._asked = asked
        self._echo = bool(body.echo)
        self._only_prompt = bool(body.echo) and body.max_tokens == 0
        self._logprobs = body.logprobs
        self._prompt_text = bool(body.return_prompt_text)
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._include_usage = options is not None and bool(options.include_usage)
        self._each_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._meter = Meter(asked, count)
        self._count = count
        self._num_embedded = num_embedded  # choices whose prompts have no ids: the first ones
        self._texts = [""] * count  # the echoed prompt's text, which shifts the offsets of tokens
        self._waiting: dict[int, tuple[int, ...]] = {}  # prompt ids of choices whose echo waits for logprobs
        self._extension = asked.notes.extension  # for the first chunk

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[Completion]:
        async for output in outputs:
            choice = await self._choice(output)
            if choice is not None:
                yield self._chunk([choice], self._meter.of(choice.index) if self._each_usage else None)
        if self._include_usage:
            yield self._chunk([], self._meter.total())

    async def whole(self, outputs: AsyncIterator[Output]) -> Completion:
        choices = [CompletionChoice(index=index) for index in range(self._count)]
        if self._logprobs is not None:
            for choice in choices:
                choice.logprobs = CompletionLogprobs([], [], [], [])
        async for output in outputs:
            piece = await self._choice(output)
            if piece is not None:
                _fold(choices[piece.index], piece)
        answer = self._chunk(choices, None)
        answer.usage = self._meter.total()
        return answer

    def _chunk(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        asked, extension = self._asked, self._extension
        self._extension = UNSET
        return Completion(
            id=asked.id,
            created=asked.created,
            model=asked.model,
            choices=choices,
            system_fingerprint=asked.fingerprint,
            usage=usage if self._include_usage else UNSET,
            ferrule=extension,
        )

    async def _choice(self, output: Output) -> CompletionChoice | None:
        """What one output adds to its choice, or None."""
        self._meter.see(output)
        choice = CompletionChoice(index=output.index, finish_reason=finish_of(output), stop_reason=output.stop_reason)
        if self._echo:
            await self._add_prompt(choice, output)
        if output.prompt_ids is not None and self._asked.token_ids and output.index >= self._num_embedded:
            choice.prompt_token_ids = list(output.prompt_ids)
        if output.prompt_text is not None and self._prompt_text:
            choice.prompt_text = output.prompt_text
        if output.prompt_logprobs is not None and self._prompt_logprobs:
            choice.prompt_logprobs = self._asked.prompt_logprobs(output.prompt_logprobs)
        if not self._only_prompt:
            self._add_tokens(choice, output)
        about_prompt = choice.prompt_token_ids or choice.prompt_logprobs or choice.prompt_text
        if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids or about_prompt:
            return choice
        return None

    def _add_tokens(self, choice: CompletionChoice, output: Output) -> None:
        choice.text += "".join(event.text for event in output.events if isinstance(event, (Content, Reasoning)))
        if self._asked.token_ids:
            choice.token_ids = list(output.token_ids)
        if self._logprobs is not None and output.logprobs:
            lists = choice.logprobs = choice.logprobs or CompletionLogprobs([], [], [], [])
            shift = len(self._texts[output.index])
            offsets = output.token_offsets or (0,) * len(output.logprobs)  # none without a tokenizer
            for offset, entry in zip(offsets, output.logprobs, strict=True):
                self._add_logprob(lists, offset + shift, entry)

    async def _add_prompt(self, choice: CompletionChoice, output: Output) -> None:
        """Echo: the prompt's text, and with logprobs its tokens, before anything else of the choice."""
        asked, index = self._asked, output.index
        if output.prompt_ids is not None:
            text = output.prompt_text
            self._texts[index] = await asked.service.detokenize(output.prompt_ids) if text is None else text
            self._waiting[index] = output.prompt_ids
        if index not in self._waiting or (self._logprobs is not None and output.prompt_logprobs is None):
            return
        ids = self._waiting.pop(index)
        choice.text = self._texts[index]
        if self._logprobs is None:
            return
        choice.logprobs = lists = CompletionLogprobs([], [], [], [])
        offset = 0
        for token_id, entry in zip(ids, output.prompt_logprobs or (), strict=True):
            if entry is None:
                lists.text_offset.append(offset)
                lists.tokens.append(asked.token(token_id))
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
            else:
                self._add_logprob(lists, offset, entry)
            offset += len(asked.service.token_text(token_id))

    def _add_logprob(self, lists: CompletionLogprobs, offset: int, entry: TokenLogprobs) -> None:
        token = self._asked.token(entry.token_id)
        logprob = finite(entry.logprob)
        lists.text_offset.append(offset)
        lists.tokens.append(token)
        lists.token_logprobs.append(logprob)
        most = None if self._logprobs == -1 else self._logprobs  # -1: all
        top = {self._asked.token(token_id): finite(value) for token_id, value in entry.top[:most]}
        lists.top_logprobs.append({token: logprob, **top})


def _fold(choice: CompletionChoice, piece: CompletionChoice) -> None:
    """Add a chunk's choice to the whole one."""
    choice.text += piece.text
    if piece.logprobs is not None and choice.logprobs is not None:
        for name in CompletionLogprobs.__struct_fields__:
            getattr(choice.logprobs, name).extend(getattr(piece.logprobs, name))
    if piece.token_ids is not UNSET:
        choice.token_ids = (choice.token_ids or []) + piece.token_ids
    if piece.prompt_token_ids is not UNSET:
        choice.prompt_token_ids = piece.prompt_token_ids
    if piece.prompt_text is not UNSET:
        choice.prompt_text = piece.prompt_text
    if piece.prompt_logprobs is not UNSET:
        choice.prompt_logprobs = piece.prompt_logprobs
    if piece.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
