"""The conversion of the engine's deltas to outputs: one `Choice` per sequence, one `OutputStream` per request.

There is no other path: a whole answer is the sum of the outputs of a streamed one (`Admitted.answer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from copy import copy
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.errors import EngineDead, RequestFailed, UnavailableError
from ferrule.frontend.admission.ledger import Account, Ledger
from ferrule.frontend.output.answer_tokens import AnswerTokens, Token
from ferrule.frontend.output.reading import OutputReading
from ferrule.interfaces.service import Output, Outputs, Usage, add_up
from ferrule.types import FinishReason, RequestDelta, RequestTimes, TokenLogprobs

_logger = log.get("frontend")
_FAILED = "This request failed on the server."


class Choice:
    """One sequence, which turns its deltas into outputs, in order. `number` is its place among the choices of its
    prompt.

    `param` is the field to blame where the engine finds a request invalid.
    """

    def __init__(self, index: int, number: int, account: Account, reading: OutputReading, param: str | None) -> None:
        self.index = index
        self.id = account.id
        self.account = account
        self.finish: FinishReason | None = None  # as the client has seen it
        self.last: RequestDelta | None = None  # the engine's delta with the finish
        self.ended = False  # nothing more comes from the engine
        self.score = 0.0  # sum of logprobs, those of tokens that are left out included
        self.num_tokens = 0
        self._first = True  # the next output is the first one
        self._reading = reading
        self._param = param
        self._parse = reading.chains[number]
        account.called_tools = self._parse.called
        self._detokenizer = copy(reading.detokenizer)
        self._stops = copy(reading.stops)
        parted = self._parse.reasoning is not None and self._detokenizer is not None
        self._answer_tokens = AnswerTokens() if parted else None  # where thoughts are told from the answer
        self._min_tokens = reading.checked.base.min_tokens
        wanted = reading.checked.base.prompt_logprobs is not None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = (None,) if wanted else None  # not yet sent
        self._num_characters = 0
        self._num_parsed = 0  # characters that went to the parsers
        self._cached = 0
        self._num_answer = 0  # tokens of the answer, as far as they are known

    @property
    def done(self) -> bool:
        """Whether the choice is over for the client; the engine may not know yet."""
        return self.finish is not None

    def receive(self, delta: RequestDelta) -> None:
        """Count the tokens of a delta, whether or not a client reads them. Call it once for each delta, in order."""
        self.account.received += len(delta.token_ids)
        self.account.cached = max(self.account.cached, self.account.cached_of(delta))
        if delta.finish is not None:
            self.last = delta

    def take(self, delta: RequestDelta) -> Output | None:
        """Return the output of a delta, or None for a delta without tokens and without an end."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += delta.prompt_logprobs
        if not delta.token_ids and delta.finish is None:
            return None
        if self._answer_tokens is None or len(delta.token_ids) < 2:
            return self._take(delta)
        outputs: list[Output] = []
        for one in _one_by_one(delta):
            if not self.done:
                outputs.append(self._take(one))
        return add_up(outputs)

    def _take(self, delta: RequestDelta) -> Output:
        self._cached = max(self._cached, self.account.cached_of(delta))
        text, count, offsets = self._read(delta)
        ids, logprobs = delta.token_ids[:count], delta.logprobs[:count]
        self.num_tokens += count
        self._num_parsed += len(text)
        self.score += sum(entry.logprob for entry in logprobs)
        events = self._parse.feed(text, ids, self.num_tokens > self._min_tokens)
        answer = None if self._answer_tokens is None else self._answer(self._answer_tokens, ids, logprobs, offsets)
        if delta.finish is not None or self._matched() is not None:
            events += self._parse.finish()
        matched = self._matched()
        named = self._reading.checked.named_stop_ids  # other stop tokens and the end of the sequence are not reported
        reason = matched or (delta.stop_reason if delta.stop_reason in named else None)
        self.account.called_tools = self._parse.called
        self.finish = finish = delta.finish if matched is None else FinishReason.STOP
        if self._answer_tokens is not None and answer is not None:
            if self.done:
                answer += self._answer_tokens.take([], self._num_characters, *self._parse.parted)
                answer += self._answer_tokens.finish()
            self._num_answer += len(answer)
            if self._reading.hides_thoughts:
                ids, offsets = tuple(token.id for token in answer), tuple(token.start for token in answer)
                logprobs = tuple(token.logprob for token in answer if token.logprob is not None)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if prompt_logprobs is not None:  # the first token has none, and neither have virtual ones
            prompt_logprobs = (*prompt_logprobs[:1], *prompt_logprobs[1 + self.account.num_virtual :])
        first, self._first = self._first, False
        return Output(
            index=self.index,
            first=first,
            events=events,
            called_tools=bool(self._parse.called),
            token_ids=ids,
            logprobs=logprobs,
            token_offsets=offsets,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_reason=reason,
            error=(delta.error or _FAILED) if finish is FinishReason.ERROR else None,
            usage=self._usage(),
            times=None if finish is None else delta.times or self._times(),
            guesses=delta.guesses,
            invalid=delta.invalid,
            param=self._param if delta.invalid else None,
        )

    def _answer(
        self,
        tokens: AnswerTokens,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        offsets: tuple[int, ...],
    ) -> list[Token]:
        """Return the tokens of the answer that are known with one more token."""
        ends = (*offsets[1:], self._num_characters)
        found = zip_longest(ids, logprobs, offsets, ends[: len(ids)])
        return tokens.take([Token(*one) for one in found], self._num_parsed, *self._parse.parted)

    def fail(self) -> Output:
        """Return the last output of a choice whose delta could not be read."""
        self.finish = FinishReason.ERROR
        first, self._first = self._first, False
        return Output(index=self.index, first=first, finish=FinishReason.ERROR, error=_FAILED, usage=self._usage())

    def _times(self) -> RequestTimes:
        account = self.account
        return RequestTimes(account.arrival, first_token=account.first_token, finished=account.last_token)

    def _usage(self) -> Usage:
        reasoning = 0 if self._answer_tokens is None else self.num_tokens - self._num_answer
        return Usage(
            prompt_tokens=self.account.prompt,
            completion_tokens=self.num_tokens,
            cached_tokens=self._cached,
            reasoning_tokens=reasoning,
        )

    def _matched(self) -> str | None:
        """Return the stop string that has ended the answer, or None."""
        stops = self._stops or self._parse.stops
        return None if stops is None else stops.matched

    def _read(self, delta: RequestDelta) -> tuple[str, int, tuple[int, ...]]:
        """Return (text to show, number of tokens up to a stop string's end, offset of each token)."""
        ids = delta.token_ids
        if self._detokenizer is None:
            return "", len(ids), ()
        hidden = delta.finish is FinishReason.STOP and delta.stop_reason is not None
        shown = ids[:-1] if hidden and not self._reading.checked.include_stop else ids
        text, offsets = "", []
        for number, token in enumerate(shown, 1):
            piece = self._detokenizer.feed(token)
            offsets.append(self._num_characters + self._detokenizer.begin)
            self._num_characters += len(piece)
            if self._stops is None or self.num_tokens + number <= self._min_tokens:
                text += piece
                continue
            text += self._stops.feed(piece)
            if self._stops.matched is not None:
                return text, number, tuple(offsets)
        rest = "" if delta.finish is None else self._detokenizer.finish()
        self._num_characters += len(rest)
        offsets += [self._num_characters] * (len(ids) - len(shown))
        if delta.finish is not None:
            if self._stops is not None:
                rest = self._stops.feed(rest)
                if self._stops.matched is None:
                    rest += self._stops.finish()
            text += rest
        return text, len(ids), tuple(offsets)


def size_of(entries: Sequence[TokenLogprobs]) -> int:
    """Estimate the bytes that logprobs take, with the parts of an answer that are made of them."""
    return len(entries) * (200 + 200 * len(entries[0].top)) if entries else 0


def _one_by_one(delta: RequestDelta) -> Iterable[RequestDelta]:
    """Yield a delta for each token; the last one has the end."""
    last = len(delta.token_ids) - 1
    for place, token in enumerate(delta.token_ids):
        logprobs = delta.logprobs[place : place + 1]
        if place == last:
            yield replace(delta, token_ids=(token,), logprobs=logprobs, prompt_logprobs=())
        else:
            yield RequestDelta(
                id=delta.id, token_ids=(token,), logprobs=logprobs, cached=delta.cached, guesses=delta.guesses
            )


class OutputStream(Outputs):
    """The outputs of one request, choices interleaved. All choices are already submitted; `aclose` cancels those that
    run.

    With one choice, deltas are read when an output is asked for; with several, one task per choice reads them.
    """

    def __init__(
        self,
        cancel: Callable[[Sequence[str], FinishReason], None],
        ledger: Ledger,
        choices: Sequence[Choice],
        streams: Sequence[AsyncIterator[RequestDelta]],
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        self._cancel = cancel
        self._ledger = ledger
        self._choices = choices
        self._left = len(choices)
        self._tasks = tasks  # the service's: they may outlive this stream by a step
        # Bounded: unread deltas wait in the streams, which let the engine pause.
        self._arrived: asyncio.Queue[tuple[Choice, RequestDelta] | EngineDead | MemoryError] = asyncio.Queue(
            len(choices)
        )
        self._closed = False
        self._kept = ledger.buffers.share()  # bytes of outputs that are collected for a whole answer
        self.whole = not all(choice.account.streamed for choice in choices)  # the reader keeps all outputs
        self._single = streams[0] if len(streams) == 1 else None
        if self._single is None:
            for choice, stream in zip(choices, streams, strict=True):
                self._start(choice, stream)

    async def __anext__(self) -> Output:
        try:
            while self._left and not self._closed:
                choice, delta = await self._next()
                output = self._take(choice, delta)
                if output is not None:
                    return output
        except BaseException:
            self._abort()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._abort()
        self._kept.close()

    def score(self, index: int) -> float:
        """Return the sum of a choice's logprobs so far."""
        return self._choices[index].score

    async def _next(self) -> tuple[Choice, RequestDelta]:
        if self._single is not None:
            choice = self._choices[0]
            try:
                delta = await anext(self._single)
            except StopAsyncIteration:
                raise EngineDead("The engine ended a request without a last word.") from None
            except EngineDead:
                choice.ended = True
                raise
            choice.receive(delta)
            return choice, delta
        if not self._arrived.empty():
            await asyncio.sleep(0)  # others have their turn
        arrived = await self._arrived.get()
        if isinstance(arrived, EngineDead | MemoryError):
            raise arrived
        return arrived

    def _take(self, choice: Choice, delta: RequestDelta) -> Output | None:
        """Return the output of a delta; an exception while it is read ends this choice and no other."""
        if choice.done:
            return None
        before = choice.num_tokens
        self._keep(size_of(delta.prompt_logprobs))  # sent with the first token
        try:
            output = choice.take(delta)
        except RequestFailed:  # of a parser, which is in the log
            output = choice.fail()
        except Exception:
            _logger.exception("the output of a request could not be read", id=choice.id)
            output = choice.fail()
        if output is None:
            return None
        new = output.usage.completion_tokens - before
        if self.whole:
            self._keep(200 + 100 * len(output.token_ids) + size_of(output.logprobs))
        if new:
            self._ledger.tokens(choice.account, new)
        if choice.done:
            self._finish(choice)
        return output

    def _keep(self, num_bytes: int) -> None:
        self._kept.grow(num_bytes)
        if num_bytes and self._ledger.buffers.full:
            raise UnavailableError("The server is short of memory for answers.", retry_after=1)

    def _finish(self, choice: Choice) -> None:
        self._left -= 1
        if not self._left:
            self._let_go()
        if choice.last is not None:
            self._settle(choice)
            return
        reason = FinishReason.STOP if choice.finish is FinishReason.STOP else FinishReason.ABORT
        self._cancel([choice.id], reason)
        if self._single is not None:
            self._start(choice, self._single)

    def _start(self, choice: Choice, stream: AsyncIterator[RequestDelta]) -> None:
        task = asyncio.get_running_loop().create_task(self._pump(choice, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, choice: Choice, stream: AsyncIterator[RequestDelta]) -> None:
        """Read a choice's deltas to the last one. After the choice's end for the client, deltas are only counted."""
        try:
            async for delta in stream:
                choice.receive(delta)
                if not choice.done:
                    await self._arrived.put((choice, delta))
        except (EngineDead, MemoryError) as error:
            if not choice.done:
                await self._arrived.put(error)
        finally:
            choice.ended = True
            if choice.done:
                self._settle(choice)

    def _let_go(self) -> None:
        """Release the tasks that wait for room in the queue, as nobody reads it any more; they put nothing more into
        it.
        """
        while not self._arrived.empty():
            self._arrived.get_nowait()

    def _settle(self, choice: Choice) -> None:
        self._ledger.settle(choice.account, choice.finish or FinishReason.ABORT, choice.last)

    def _abort(self) -> None:
        """Cancel the choices that run, and leave the queue. Accounts are settled with the engine's last delta, if one
        comes.
        """
        if self._closed:
            return
        self._closed = True
        self._let_go()
        running = [choice for choice in self._choices if not choice.done]
        if running:
            self._cancel([choice.id for choice in running], FinishReason.ABORT)
        for choice in running:
            choice.finish = FinishReason.ABORT
            self._ledger.leave_queue(choice.account)
            if choice.ended or choice.last is not None:
                self._settle(choice)
            elif self._single is not None:
                self._start(choice, self._single)
