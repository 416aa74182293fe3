"""`Ledger`: what is open now, and the figures of it. Budgets are reserved here before any work is done.

Totals of tokens are counted here and not in the engine: a client may leave before it has read what the engine
generated, an engine may die between two reports, and a beam search sends each prompt many times. A token is counted
once, for its choice and for the total on the board, when a client reads it, or else when the engine's last word on the
choice has come. A choice whose client has left gives back its place in the queue at once; its account is settled with
that last word, which says how long it waited and ran. The metric of tokens per step is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from ferrule import log
from ferrule.api_keys import BACKGROUND, Visit
from ferrule.config import LimitsConfig
from ferrule.errors import OverloadedError, RequestError
from ferrule.frontend.stat_loggers import Loggers
from ferrule.interfaces.stats import RequestStats
from ferrule.shared_memory.board import (
    BUFFERED,
    GENERATION_TOKENS,
    PROMPT_CACHED,
    PROMPT_TOKENS,
    WAITING,
    WAITING_TOKENS,
    Board,
)
from ferrule.shared_memory.buffers import Buffers
from ferrule.types import EngineStats, FinishReason, RequestDelta, RequestTimes

_logger = log.get("frontend")
TOKEN_BYTES = 40  # bytes of a prompt's token as a Python object, with its place in a tuple


@dataclass(slots=True, eq=False)
class Account:
    """The account of one choice: reserved, then (with its first token) no longer waiting, then settled, once.

    `received` counts the tokens that the engine has sent for the choice, `generated` those of them that were counted in
    the totals.
    """

    arrival: float
    prompt: int  # tokens, without those of a prompt adapter
    max_tokens: int
    n: int
    weight: int  # tokens of the queue's budget
    id: str = ""  # of the engine's request
    waits: bool = True
    settled: bool = False
    cached: int = 0
    received: int = 0
    generated: int = 0
    first_token: float = 0.0
    streamed: bool = True
    called_tools: bool | None = None  # None: no tool parser reads it
    caller: Visit | None = None
    group: Sequence[Account] = ()  # all choices of the prompt
    last_token: float = 0.0
    num_virtual: int = 0  # tokens of a prompt adapter, before the prompt

    def cached_of(self, delta: RequestDelta) -> int:
        """Return how many of the prompt's tokens came from the prefix cache."""
        return max(0, delta.cached - self.num_virtual)


@dataclass(slots=True)
class Reservation:
    """Places in the queue that are not yet accounts, and room for the tokens of their prompts."""

    ledger: Ledger
    count: int
    tokens: int = 0

    def add_tokens(self, tokens: int) -> None:
        """Reserve room for tokens of prompts.

        Raises OverloadedError when the queue's token budget is full, RequestError when it can never hold that many.
        """
        ledger, limit = self.ledger, self.ledger.limits.max_waiting_tokens
        if tokens > limit:
            raise RequestError(f"The prompts have {tokens} tokens in all; the queue takes {limit}.", "prompt")
        short = ledger.buffers.used + tokens * TOKEN_BYTES > ledger.buffers.limit
        if short or (ledger.waiting_tokens and ledger.waiting_tokens + tokens > _part(limit)):
            raise ledger.full("prompt tokens", "max_num_queued_tokens")
        ledger.hold(tokens)
        self.tokens += tokens

    def turn(self, account: Account) -> None:
        """Turn one of the places into `account`."""
        self.count -= 1
        self.tokens -= account.weight
        if account.caller is not None:
            account.caller.spend(account.prompt)


class Ledger:
    """The accounts of the choices that are open, and their totals. `waiting` counts choices that were admitted and have
    no token yet, from before their prompt is rendered.

    All API processes share one queue: its limits hold for the sum. A token is counted once, for its choice and for the
    totals, so the sums over finished choices are the totals once nothing is open, however choices end.
    """

    def __init__(
        self, limits: LimitsConfig, loggers: Loggers, clock: Callable[[], float], board: Board | None = None
    ) -> None:
        self.limits = limits
        self.loggers = loggers
        self.board = board or Board()
        self.buffers = Buffers(self.board, limits.max_buffered_bytes)
        self.open = 0
        self.retry_after = 1
        self.logs_requests = False  # with the guesses that were made for them
        self._clock = clock

    @property
    def waiting(self) -> int:
        return self.board.total(WAITING)

    @property
    def waiting_tokens(self) -> int:
        return self.board.total(WAITING_TOKENS)

    def hold(self, tokens: int) -> None:
        """Count tokens of prompts that wait; a negative number for prompts that no longer wait."""
        self.board.add(WAITING_TOKENS, tokens)
        self.board.add(BUFFERED, tokens * TOKEN_BYTES)

    def full(self, what: str, reason: str) -> OverloadedError:
        """Count a rejection, and return the error for it."""
        self.loggers.tell("on_rejected", reason)
        return OverloadedError(f"The queue is full: too many {what} wait.", self.retry_after)

    def check_room(self, ahead: int) -> None:
        """Raise OverloadedError when the queue has no place for one more choice behind `ahead` others."""
        if self.waiting + ahead >= _part(self.limits.max_waiting_requests):
            raise self.full("requests", "max_num_queued_reqs")

    @contextmanager
    def reserve(self, count: int) -> Iterator[Reservation]:
        """Reserve places for `count` choices; places that did not become accounts are given back at the end.

        Raises RequestError, OverloadedError.
        """
        limit = self.limits.max_waiting_requests
        if count > limit:
            raise RequestError(f"The request asks for {count} answers in all; the queue takes {limit}.", "n")
        if self.waiting:
            self.check_room(count - 1)
        reservation = Reservation(self, count)
        self.board.add(WAITING, count)
        self.open += count
        try:
            yield reservation
        finally:
            self.hold(-reservation.tokens)
            self.board.add(WAITING, -reservation.count)
            self.open -= reservation.count

    def tokens(self, account: Account, count: int) -> None:
        """Count tokens that a client reads."""
        now = self._clock()
        first, gap = account.waits, now - (account.last_token or account.arrival)
        self.leave_queue(account)
        if first:
            account.first_token = now
        account.last_token = now
        self._count(account, count)
        self.loggers.tell("on_tokens", first, count, gap)

    def settle(self, account: Account, finish: FinishReason, last: RequestDelta | None) -> None:
        """Close the account of a choice that is over for client and engine; later calls for it do nothing.

        `last` is the engine's last delta, None when the engine has died. Tokens that no client has read are counted
        now.
        """
        if account.settled:
            return
        account.settled = True
        self.leave_queue(account)
        self.open -= 1
        self._count(account, account.received - account.generated)
        now = self._clock()
        times = last and last.times
        times = times or RequestTimes(account.arrival, first_token=account.first_token, finished=now)
        stats = _stats(account, finish, times, last, now)
        self.loggers.tell("on_finish", stats)
        if self.logs_requests and (guesses := stats.guesses) is not None:
            told = {"output_tokens": stats.generation_tokens, "guesses": guesses.draft_tokens}
            _logger.info("guesses of a request", id=account.id, **told, held=guesses.accepted_tokens)
        if account.id:
            self.loggers.hooks.request_finished(account.id, stats)

    def pooled(self, account: Account) -> None:
        """Count the prompt of a vector that was computed."""
        account.first_token = self._clock()
        self.leave_queue(account)
        self._count_prompt(account)

    def engine(self, stats: EngineStats) -> None:
        """Report the engine's figures to the loggers, from the first API process alone, for all of them."""
        if self.board.leads:
            stats = replace(
                stats,
                buffered_bytes=self.board.total(BUFFERED),
                choice_prompt_tokens=self.board.total(PROMPT_TOKENS),
                choice_prompt_cached=self.board.total(PROMPT_CACHED),
                choice_generation_tokens=self.board.total(GENERATION_TOKENS),
            )
            self.loggers.tell("on_engine", stats, 0)

    def leave_queue(self, account: Account) -> None:
        """Give back the place of a choice that no longer waits."""
        if account.waits:
            account.waits = False
            self.board.add(WAITING, -1)
            self.hold(-account.weight)

    def _count_prompt(self, account: Account) -> None:
        self.board.add(PROMPT_TOKENS, account.prompt)
        self.board.add(PROMPT_CACHED, account.cached)

    def _count(self, account: Account, count: int) -> None:
        """Count tokens for the choice, in the totals, and for the API key that is charged; with the first ones also the
        prompt.
        """
        if not count:
            return
        if not account.generated:
            self._count_prompt(account)
        account.generated += count
        self.board.add(GENERATION_TOKENS, count)
        if account.caller is not None:
            account.caller.spend(count)


def _part(limit: int) -> int:
    """Return the part of a limit of the queue that the request may use which is being served.

    The server's own requests, such as the lines of a batch, may use half: those of clients always find room.
    """
    return max(1, limit // 2) if BACKGROUND.get() else limit


def _stats(
    account: Account, finish: FinishReason, times: RequestTimes, last: RequestDelta | None, now: float
) -> RequestStats:
    """Return the figures of a choice. The phase in which a choice was ended lasts until its end."""

    def between(start: float, end: float) -> float:
        return max(0.0, end - start) if start and end else 0.0

    group = account.group or (account,)
    first = times.first_token or times.finished
    return RequestStats(
        finish=finish,
        prompt_tokens=account.prompt,
        generation_tokens=account.generated,
        cached_tokens=account.cached,
        max_tokens=account.max_tokens,
        n=account.n,
        time_to_first_token=between(account.arrival, account.first_token),
        end_to_end=between(account.arrival, now),
        queue_time=between(times.arrival, times.scheduled or first),
        inference_time=between(times.scheduled, times.finished),
        prefill_time=between(times.scheduled, first),
        decode_time=between(times.first_token, times.finished),
        num_preemptions=last.num_preemptions if last else 0,
        longest=max(one.generated for one in group) if all(one.settled for one in group) else None,
        called_tools=account.called_tools,
        key_name=account.caller.name if account.caller else "",
        streamed=account.streamed,
        times=times,
        guesses=last.guesses if last else None,
        error=last.error if last else None,
    )
