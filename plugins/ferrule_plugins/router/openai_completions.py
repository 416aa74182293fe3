"""``POST /v1/completions``: outputs become chunks; a whole answer is the fold of the chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from ferrule.errors import RequestError
from ferrule.interfaces.parsers import Content, Reasoning
from ferrule.interfaces.router import JSON, EventStream, RequestInfo, RouterContext
from ferrule.interfaces.service import Generate, Output, Prompt, ReadPrompt
from ferrule.structured_outputs import grammar_of
from ferrule.types import TokenLogprobs
from ferrule_plugins.router.openai_answers import Completion, CompletionChoice, CompletionLogprobs, UsageInfo
from ferrule_plugins.router.openai_params import Asked, beam, check, finish_of, processors, targets, usage_of
from ferrule_plugins.router.openai_schema import CompletionBody
from ferrule_protocol import Closing, Meter, finite, sampling, spelling

_MAX_TOKENS = 16  # the documented default


class Completions:
    """The handler."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, body: CompletionBody, info: RequestInfo) -> JSON | EventStream:
        check(body, self._ctx.config)
        if body.prompt_embeds is not None and (body.echo or body.suffix):
            name = "echo" if body.echo else "suffix"
            raise RequestError(f"{name} needs a prompt of text or tokens, so prompt_embeds excludes it.", name)
        request = self._request(body)
        asked, admitted = await Asked.admit("cmpl", body, info, request, self._ctx)
        embedded = sum(isinstance(prompt, Prompt) and prompt.embeds is not None for prompt in request.prompts)
        writer = _Writer(body, asked, admitted.prompts, embedded * request.params.n)
        outputs = admitted.outputs()
        if body.stream:
            return EventStream(Closing(writer.chunks(outputs), outputs), asked.notes.headers)
        async with aclosing(outputs):
            return JSON(await writer.whole(outputs), headers=asked.notes.headers)

    def _request(self, body: CompletionBody) -> Generate:
        service = self._ctx.service
        most = body.max_tokens
        if most is None:
            most = service.sampling_defaults().get("max_tokens", _MAX_TOKENS)
        given: dict[str, Any] = {"extra_args": body.vllm_xargs, "max_tokens": most, "logprobs": body.logprobs}
        if body.echo:
            given["max_tokens"] = most or 1  # 0: only the prompt is wanted, yet a step must run for its logprobs
            if body.logprobs is not None and body.prompt_logprobs is None:
                given["prompt_logprobs"] = body.logprobs
        return Generate(
            prompts=prompts_of(body),
            params=sampling(body, service, given),
            model=body.model,
            priority=body.priority,
            targets=targets(body),
            cache_salt=body.cache_salt,
            grammar=grammar_of(body),
            logits_processors=processors(body),
            beam=beam(body),
            raw=True,
            streamed=body.stream,
            names=spelling(body),
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
    if not prompt and not isinstance(prompt, str):
        raise RequestError("prompt must not be empty.", "prompt")
    given: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(given[0], str):
        return tuple(Prompt(text=text, suffix=suffix, add_special_tokens=special) for text in given)
    if suffix:
        raise RequestError("suffix needs a prompt of text.", "suffix")
    return tuple(Prompt(ids=tuple(ids)) for ids in (given if isinstance(given[0], list) else [given]))


class _Writer:
    """From outputs to chunks, for one request."""

    def __init__(self, body: CompletionBody, asked: Asked, prompts: Sequence[ReadPrompt], num_embedded: int) -> None:
        options, count = body.stream_options, len(prompts) * asked.num_per_prompt
        self._asked = asked
        self._echo = body.echo
        self._only_prompt = body.echo and body.max_tokens == 0
        self._logprobs = body.logprobs
        self._prompt_text = body.return_prompt_text
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._include_usage = options is not None and bool(options.include_usage)
        self._each_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._meter = Meter(count, asked.num_per_prompt)
        self._count = count
        self._num_embedded = num_embedded  # choices whose prompts have no ids: the first ones
        self._texts = [""] * count  # the echoed prompt's text, which shifts the offsets of tokens
        self._prompts = {index: prompts[index // asked.num_per_prompt] for index in range(count)}  # not told yet
        self._extension = asked.notes.extension  # for the first chunk

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[Completion]:
        async for output in outputs:
            choice = await self._choice(output)
            if choice is not None:
                yield self._chunk([choice], usage_of(self._meter.of(choice["index"])) if self._each_usage else None)
        if self._include_usage:
            yield self._chunk([], self._asked.usage(self._meter.total()))

    async def whole(self, outputs: AsyncIterator[Output]) -> Completion:
        choices = [_choice(index) for index in range(self._count)]
        if self._logprobs is not None:
            for choice in choices:
                choice["logprobs"] = _no_logprobs()
        async for output in outputs:
            piece = await self._choice(output)
            if piece is not None:
                _fold(choices[piece["index"]], piece)
        answer = self._chunk(choices, None)
        answer["usage"] = self._asked.usage(self._meter.total())
        return answer

    def _chunk(self, choices: list[CompletionChoice], usage: UsageInfo | None) -> Completion:
        asked = self._asked
        chunk: Completion = {
            "id": asked.id,
            "object": "text_completion",
            "created": asked.created,
            "model": asked.model,
            "choices": choices,
            "system_fingerprint": asked.fingerprint,
        }
        if self._include_usage:
            chunk["usage"] = usage
        if self._extension is not None:
            chunk["ferrule"] = self._extension
            self._extension = None
        return chunk

    async def _choice(self, output: Output) -> CompletionChoice | None:
        """What one output adds to its choice, or None."""
        self._meter.see(output)
        choice = _choice(output.index)
        choice["finish_reason"], choice["stop_reason"] = finish_of(output), output.stop_reason
        if output.index in self._prompts:
            await self._begin(choice, output, self._prompts.pop(output.index))
        if output.prompt_logprobs is not None and self._prompt_logprobs:
            choice["prompt_logprobs"] = self._asked.prompt_logprobs(output.prompt_logprobs)
        if not self._only_prompt:
            self._add_tokens(choice, output)
        told = ("text", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "prompt_text", "prompt_logprobs")
        return choice if any(choice.get(name) for name in told) else None

    def _add_tokens(self, choice: CompletionChoice, output: Output) -> None:
        choice["text"] += "".join(event.text for event in output.events if isinstance(event, (Content, Reasoning)))
        if self._asked.token_ids:
            choice["token_ids"] = list(output.token_ids)
        if self._logprobs is not None and output.logprobs:
            lists = choice["logprobs"] = choice["logprobs"] or _no_logprobs()
            shift = len(self._texts[output.index])
            offsets = output.token_offsets or (0,) * len(output.logprobs)  # none without a tokenizer
            for offset, entry in zip(offsets, output.logprobs, strict=True):
                self._add_logprob(lists, offset + shift, entry)

    async def _begin(self, choice: CompletionChoice, first: Output, prompt: ReadPrompt) -> None:
        """Add what is told of the prompt, before anything else of the choice."""
        if self._asked.token_ids and first.index >= self._num_embedded:
            choice["prompt_token_ids"] = list(prompt.ids)
        if prompt.text is not None and self._prompt_text:
            choice["prompt_text"] = prompt.text
        if self._echo:
            text = await self._asked.service.detokenize(prompt.ids) if prompt.text is None else prompt.text
            choice["text"] = self._texts[first.index] = text
            if self._logprobs is not None:
                self._echo_logprobs(choice, first, prompt.ids)

    def _echo_logprobs(self, choice: CompletionChoice, first: Output, ids: Sequence[int]) -> None:
        asked = self._asked
        choice["logprobs"] = lists = _no_logprobs()
        offsets = asked.service.text_offsets(ids, choice["text"])
        for offset, token_id, entry in zip(offsets, ids, first.prompt_logprobs or (), strict=True):
            if entry is None:
                lists["text_offset"].append(offset)
                lists["tokens"].append(asked.token(token_id))
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
            else:
                self._add_logprob(lists, offset, entry)

    def _add_logprob(self, lists: CompletionLogprobs, offset: int, entry: TokenLogprobs) -> None:
        token = self._asked.token(entry.token_id)
        logprob = finite(entry.logprob)
        lists["text_offset"].append(offset)
        lists["tokens"].append(token)
        lists["token_logprobs"].append(logprob)
        most = None if self._logprobs == -1 else self._logprobs  # -1: all
        named = {token: entry.token_id}
        values = {token: logprob}
        for token_id, value in entry.top[:most]:
            name = self._asked.token(token_id)
            if named.setdefault(name, token_id) != token_id:  # another token with the same text
                name = f"token_id:{token_id}"
            values[name] = finite(value)
        lists["top_logprobs"].append(values)


def _choice(index: int) -> CompletionChoice:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}


def _no_logprobs() -> CompletionLogprobs:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _fold(choice: CompletionChoice, piece: CompletionChoice) -> None:
    """Add a chunk's choice to the whole one."""
    choice["text"] += piece["text"]
    ours, theirs = choice["logprobs"], piece["logprobs"]
    if ours is not None and theirs is not None:
        ours["text_offset"] += theirs["text_offset"]
        ours["token_logprobs"] += theirs["token_logprobs"]
        ours["tokens"] += theirs["tokens"]
        ours["top_logprobs"] += theirs["top_logprobs"]
    if "token_ids" in piece:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if "prompt_token_ids" in piece:
        choice["prompt_token_ids"] = piece["prompt_token_ids"]
    if "prompt_text" in piece:
        choice["prompt_text"] = piece["prompt_text"]
    if "prompt_logprobs" in piece:
        choice["prompt_logprobs"] = piece["prompt_logprobs"]
    if piece["finish_reason"] is not None:
        choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
