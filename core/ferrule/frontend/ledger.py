"""`Ledger`: what is open now, and the figures of it. Budgets are reserved here before any work is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ferrule import log
from ferrule.config import LimitsConfig
from ferrule.errors import OverloadedError, RequestError
from ferrule.interfaces.stats import RequestStats, StatLogger
from ferrule.plugin.hooks import HookRunner
from ferrule.types import EngineStats, FinishReason, RequestTimes

_MAX_FAILURES = 3
_logger = log.get("stats")


class Loggers:
    """Stat loggers, guarded: one that raises is logged, and left out after three times."""

    def __init__(self, loggers: Sequence[StatLogger], hooks: HookRunner | None = None) -> None:
        self.hooks = hooks or HookRunner()
        self._loggers = list(loggers)
        self._failures: dict[StatLogger, int] = {}

    def tell(self, say: Callable[[StatLogger], None]) -> None:
        for logger in tuple(self._loggers):
            try:
                say(logger)
            except Exception:
                name = type(logger).__name__
                count = self._failures[logger] = self._failures.get(logger, 0) + 1
                _logger.exception("a stat logger failed", logger=name, times=count)
                if count >= _MAX_FAILURES:
                    self._loggers.remove(logger)

    def exposition(self) -> tuple[str, str]:
        """The metrics of all loggers that speak the first one's media type, and those of hooks."""
        found: list[tuple[str, str]] = []

        def ask(logger: StatLogger) -> None:
            text = logger.exposition()
            if text is not None:
                found.append(text)

        self.tell(ask)
        media_type = found[0][0] if found else "text/plain; charset=utf-8"
        kind = media_type.partition(";")[0]
        texts = [text for other, text in found if other.partition(";")[0] == kind]
        return media_type, "".join(texts) + self.hooks.metrics()


class Account:
    """One choice in the books: reserved, then (with its first token) no longer waiting, then settled, once."""

    __slots__ = (
        "arrival",
        "cached",
        "first_token",
        "generated",
        "id",
        "last_token",
        "max_tokens",
        "n",
        "prompt",
        "settled",
        "waits",
    )

    def __init__(self, arrival: float, num_prompt: int, max_tokens: int, n: int) -> None:
        self.id = ""  # of the engine's request, once there is one
        self.arrival = arrival
        self.prompt = num_prompt
        self.max_tokens = max_tokens
        self.n = n
        self.waits = True
        self.settled = False
        self.cached = 0
        self.generated = 0
        self.first_token = 0.0
        self.last_token = arrival


class Reservation:
    """Places in the queue that are not yet accounts."""

    def __init__(self, ledger: Ledger, count: int) -> None:
        self._ledger = ledger
        self.count = count
        self.tokens = 0

    def add_tokens(self, tokens: int) -> None:
        """Raises OverloadedError when the queue's token budget is full, RequestError when it can never hold these."""
        limit = self._ledger.limits.max_waiting_tokens
        if tokens > limit:
            raise RequestError(f"The prompts have {tokens} tokens in all; the queue takes {limit}.", "prompt")
        if self._ledger.waiting_tokens + tokens > limit:
            raise OverloadedError("The queue is full: too many prompt tokens wait.", self._ledger.retry_after)
        self._ledger.waiting_tokens += tokens
        self.tokens += tokens


class Ledger:
    """`waiting` counts choices that were admitted and have no token yet, from before their prompt is rendered."""

    def __init__(self, limits: LimitsConfig, loggers: Loggers, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.loggers = loggers
        self.waiting = 0
        self.waiting_tokens = 0
        self.open = 0
        self.retry_after = 1
        self._clock = clock
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def reserve(self, count: int) -> Iterator[Reservation]:
        """Hold places for `count` choices; those that did not become accounts are given back at the end."""
        limit = self.limits.max_waiting_requests
        if count > limit:
            raise RequestError(f"The request asks for {count} answers in all; the queue takes {limit}.", "n")
        if self.waiting + count > limit:
            raise OverloadedError("The queue is full: too many requests wait.", self.retry_after)
        held = Reservation(self, count)
        self._change(waiting=count, opened=count)
        try:
            yield held
        finally:
            self.waiting_tokens -= held.tokens
            self._change(waiting=-held.count, opened=-held.count)

    def account(self, held: Reservation, arrival: float, num_prompt: int, max_tokens: int, n: int) -> Account:
        """Turn a reserved place into an account."""
        held.count -= 1
        held.tokens -= num_prompt
        return Account(arrival, num_prompt, max_tokens, n)

    def tokens(self, account: Account, count: int, cached: int) -> None:
        """A delta with tokens arrived."""
        now = self._clock()
        first, gap = account.waits, now - account.last_token
        self._stop_waiting(account)
        if first:
            account.first_token = now
        account.last_token = now
        account.generated += count
        account.cached = max(account.cached, cached)
        self.loggers.tell(lambda logger: logger.on_tokens(first, count, gap))

    def settle(self, account: Account, finish: FinishReason, times: RequestTimes | None, preemptions: int = 0) -> None:
        """The choice is over for client and engine; later calls for it do nothing."""
        if account.settled:
            return
        account.settled = True
        self._stop_waiting(account)
        self._change(waiting=0, opened=-1)
        stats = _stats(account, finish, times or RequestTimes(), preemptions, self._clock())
        self.loggers.tell(lambda logger: logger.on_finish(stats))
        if account.id:
            self.loggers.hooks.request_finished(account.id, stats)

    def drop(self, account: Account) -> None:
        """Forget an account that never reached the engine."""
        account.settled = True
        self._stop_waiting(account)
        self._change(waiting=0, opened=-1)

    def engine(self, stats: EngineStats) -> None:
        self.loggers.tell(lambda logger: logger.on_engine(stats, 0))

    async def quiet(self) -> None:
        """Return when nothing is open."""
        await self._quiet.wait()

    def _stop_waiting(self, account: Account) -> None:
        if account.waits:
            account.waits = False
            self.waiting -= 1
            self.waiting_tokens -= account.prompt

    def _change(self, waiting: int, opened: int) -> None:
        self.waiting += waiting
        self.open += opened
        if self.open:
            self._quiet.clear()
        else:
            self._quiet.set()


def _stats(account: Account, finish: FinishReason, times: RequestTimes, preemptions: int, now: float) -> RequestStats:
    def between(start: float, end: float) -> float:
        return max(0.0, end - start) if start and end else 0.0

    return RequestStats(
        finish=finish,
        prompt_tokens=account.prompt,
        generation_tokens=account.generated,
        cached_tokens=account.cached,
        max_tokens=account.max_tokens,
        n=account.n,
        time_to_first_token=between(account.arrival, account.first_token),
        end_to_end=between(account.arrival, now),
        queue_time=between(times.arrival, times.scheduled),
        inference_time=between(times.scheduled, times.finished),
        prefill_time=between(times.scheduled, times.first_token),
        decode_time=between(times.first_token, times.finished),
        num_preemptions=preemptions,
    )
