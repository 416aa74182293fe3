"""``POST /v1/completions``: from a body to a request, and from outputs to chunks or to a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrule.errors import RequestError
from ferrule.interfaces.router import JSON, CurrentRequest, EventStream, RouterContext
from ferrule.interfaces.service import Admitted, Generate, Output, Prompt, ReadPrompt
from ferrule.types import TokenLogprobs
from ferrule_plugins.router.openai.answers import CompletionChoice, CompletionLogprobs
from ferrule_plugins.router.openai.form import Asked, Form, respond
from ferrule_plugins.router.openai.params import check, common
from ferrule_plugins.router.openai.schema import CompletionBody
from ferrule_protocol import finite, sampling, spelling

_MAX_TOKENS = 16  # the documented default


class Completions:
    """The handler of completions."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def complete(self, body: CompletionBody, info: CurrentRequest) -> JSON | EventStream:
        check(body, self._ctx.config)
        if body.prompt_embeds is not None and (body.echo or body.suffix):
            name = "echo" if body.echo else "suffix"
            raise RequestError(f"{name} needs a prompt of text or tokens, so prompt_embeds excludes it.", name)
        request = self._request(body)
        asked, admitted = await Asked.admit("cmpl", body, info, request, self._ctx)
        form = CompletionForm(body, asked, admitted.prompts, await self._echoes(body, admitted))
        return await respond(form, admitted, body.stream)

    async def _echoes(self, body: CompletionBody, admitted: Admitted) -> list[str]:
        """Return the text to repeat of each prompt."""
        if not body.echo:
            return [""] * len(admitted.prompts)
        detokenize = (admitted.tokens or self._ctx.service).detokenize
        try:
            return [await detokenize(one.ids) if one.text is None else one.text for one in admitted.prompts]
        except BaseException:
            await admitted.outputs().aclose()
            raise

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
            raw=True,
            names=spelling(body),
            **common(body),
        )


def prompts_of(body: CompletionBody) -> tuple[Prompt, ...]:
    """Return the prompts of a body: those given as embeddings, then a string, a list of strings, token ids, or a list
    of lists of token ids.
    """
    embedded = tuple(Prompt(embeds=item) for item in embeds_of(body))
    if embedded and not body.prompt:  # the official client cannot leave `prompt` out
        return embedded
    return embedded + _tokens_of(body)


def embeds_of(body: CompletionBody) -> list[str]:
    """Return the prompts that were given as embeddings."""
    return [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []


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


class CompletionForm(Form):
    """The form of one request's answer. `echoes` are the texts to repeat of its prompts."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, body: CompletionBody, asked: Asked, prompts: Sequence[ReadPrompt], echoes: Sequence[str]
    ) -> None:
        super().__init__(asked, asked.notes.extension)
        self._echo = body.echo
        self._only_prompt = body.echo and body.max_tokens == 0
        self._logprobs = body.logprobs
        self._prompt_text = body.return_prompt_text
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._prompts = prompts
        self._num_embedded = len(embeds_of(body))  # prompts without ids: the first ones
        self._echoes = echoes

    def chunk(self, output: Output) -> list[dict[str, Any]]:
        choice = self._choice(output)
        told = ("text", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "prompt_text", "prompt_logprobs")
        if not any(choice.get(name) for name in told):
            return []
        return [self.chunk_of(choice, output)]

    def choice(self, output: Output) -> CompletionChoice:
        choice = self._choice(output)
        if self._logprobs is not None and choice["logprobs"] is None:
            choice["logprobs"] = _no_logprobs()
        return choice

    def _choice(self, output: Output) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": output.index,
            "text": "",
            "logprobs": None,
            "finish_reason": None if output.finish is None else output.finish.value,
            "stop_reason": output.stop_reason,
        }
        prompt = output.index // self.asked.num_per_prompt
        if output.first:
            self._begin(choice, output, prompt)
        if output.prompt_logprobs is not None and self._prompt_logprobs:
            choice["prompt_logprobs"] = self.asked.prompt_logprobs(output.prompt_logprobs)
        if not self._only_prompt:
            self._add_tokens(choice, output, len(self._echoes[prompt]))
        return choice

    def _begin(self, choice: CompletionChoice, first: Output, prompt: int) -> None:
        """Add the prompt's text and log-probabilities, before anything else of the choice."""
        ids, text = self._prompts[prompt].ids, self._prompts[prompt].text
        if self.asked.token_ids and prompt >= self._num_embedded:
            choice["prompt_token_ids"] = list(ids)
        if text is not None and self._prompt_text:
            choice["prompt_text"] = text
        if self._echo:
            choice["text"] = self._echoes[prompt]
            if self._logprobs is not None:
                self._echo_logprobs(choice, first, ids)

    def _add_tokens(self, choice: CompletionChoice, output: Output, shift: int) -> None:
        """Add the new tokens, whose offsets the echoed prompt shifts."""
        choice["text"] += output.text
        if self.asked.token_ids:
            choice["token_ids"] = list(output.token_ids)
        if self._logprobs is not None and output.logprobs:
            lists = choice["logprobs"] = choice["logprobs"] or _no_logprobs()
            offsets = output.token_offsets or (0,) * len(output.logprobs)  # none without a tokenizer
            for offset, entry in zip(offsets, output.logprobs, strict=True):
                self._add_logprob(lists, offset + shift, entry)

    def _echo_logprobs(self, choice: CompletionChoice, first: Output, ids: Sequence[int]) -> None:
        asked = self.asked
        choice["logprobs"] = lists = _no_logprobs()
        offsets = asked.tokens.text_offsets(ids, choice["text"])
        for offset, token_id, entry in zip(offsets, ids, first.prompt_logprobs or (), strict=True):
            if entry is None:
                lists["text_offset"].append(offset)
                lists["tokens"].append(asked.token(token_id))
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
            else:
                self._add_logprob(lists, offset, entry)

    def _add_logprob(self, lists: CompletionLogprobs, offset: int, entry: TokenLogprobs) -> None:
        token = self.asked.token(entry.token_id)
        logprob = finite(entry.logprob)
        lists["text_offset"].append(offset)
        lists["tokens"].append(token)
        lists["token_logprobs"].append(logprob)
        most = None if self._logprobs == -1 else self._logprobs  # -1: all
        named = {token: entry.token_id}
        values = {token: logprob}
        for token_id, value in entry.top[:most]:
            name = self.asked.token(token_id)
            if named.setdefault(name, token_id) != token_id:  # another token with the same text
                name = f"token_id:{token_id}"
            values[name] = finite(value)
        lists["top_logprobs"].append(values)


def _no_logprobs() -> CompletionLogprobs:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
