"""The kit of stat loggers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ferrule.config import Config, ModelConfig, ObservabilityConfig, StatSettings
from ferrule.config.resolve import resolve
from ferrule.interfaces.stats import HttpStats, RequestStats, StatLogger
from ferrule.types import EngineStats, FinishReason
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.service import fake_model

HOSTILE = ('a"b', "a\\b", "a\nb", "a{b}", "ä你🙂", "", "x" * 300, "a\\nb", 'a",engine="9')
_OF_THE_PROCESS = ("process_", "python_")
_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
_COUNTERS = (
    *("steps", "prompt_tokens", "generation_tokens", "choice_prompt_tokens", "choice_generation_tokens"),
    *("prefix_queries", "preemptions", "drafts", "draft_tokens"),
)
_GROWING = ("_total", "_count", "_sum", "_bucket", "_created")

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class StatLoggerKit(Kit):
    """A stat logger takes whatever happens, and what it shows is text that Prometheus can read.

    One without an exposition (it sends or logs its figures) has only to take what happens.
    """

    kind = "stat_logger"

    def make(self, name: str = "served", **observability: Any) -> StatLogger:
        config = resolve(
            Config(
                model=ModelConfig(model="m", served_model_name=(name,) if name else ()),
                observability=ObservabilityConfig(**observability),
            )
        )
        logger: StatLogger = self.new(StatSettings.of(config), fake_model())
        return logger

    # ------------------------------------------------------------------------------------ promises

    def test_everything_that_happens_is_taken(self) -> None:
        """Accept idle engines, many engines, empty answers, huge figures and every way to end, without raising."""
        logger = self.make()
        for tell in _events(1):
            tell(logger)
        for finish in FinishReason:
            logger.on_finish(_stats(finish=finish, prompt_tokens=0, generation_tokens=0))
        logger.on_finish(_stats(prompt_tokens=2**53, generation_tokens=2**53, end_to_end=1e12))
        for engine in (0, 1, 7):
            logger.on_engine(EngineStats(), engine)
        logger.on_tokens(True, 0, 0.0)
        logger.on_tokens(False, 10_000, 1e9)
        for status in (100, 200, 301, 404, 499, 500, 503, 599):
            logger.on_http(_http(status=status, seconds=0.0, received=0, sent=0))
        logger.on_http(_http(route="none", method="OTHER", seconds=1e9, received=2**53, sent=2**53))
        self._series(logger)

    def test_the_text_can_be_read(self) -> None:
        """Write Prometheus text at any time: each series once, each number a number."""
        logger = self.make()
        self._series(self._shown(logger))
        for tell in _events(2, rounds=10):
            tell(logger)
            self._series(logger)

    def test_counters_never_fall(self) -> None:
        """Never lower totals, counts, sums and buckets, and never drop a series."""
        logger = self._shown(self.make())
        before: Series = {}
        for tell in _events(3, rounds=10):
            tell(logger)
            after = self._series(logger)
            for key, value in before.items():
                promise(key in after, f"{key[0]} has gone")
                if key[0].endswith(_GROWING):
                    promise(after[key] >= value, f"{key[0]} falls from {value} to {after[key]}")
            before = after

    def test_buckets_are_cumulative(self) -> None:
        """Hold no more in any bucket of a histogram than in a larger one, and the count in the last."""
        logger = self._shown(self.make())
        for tell in _events(4):
            tell(logger)
        buckets: dict[Any, list[tuple[float, float]]] = {}
        series = self._series(logger)
        for (name, labels), value in series.items():
            if name.endswith("_bucket"):
                rest = frozenset(label for label in labels if label[0] != "le")
                buckets.setdefault((name.removesuffix("_bucket"), rest), []).append((float(dict(labels)["le"]), value))
        for (name, rest), found in buckets.items():
            values = [value for _, value in sorted(found)]
            promise(values == sorted(values), f"the buckets of {name} fall: {values}")
            promise(values[-1] == series.get((f"{name}_count", rest)), f"the last bucket of {name} is not its count")

    def test_each_event_counts_once(self) -> None:
        """Raise counters by one, or not at all, for each HTTP call and each request that is refused."""
        for what, tell in (("on_http", _tell_http), ("on_rejected", _tell_rejected)):
            logger = self._shown(self.make())
            tell(logger)
            before = self._stable(logger)
            for _ in range(3):
                tell(logger)
            for key, value in self._stable(logger).items():
                counts = key[0].endswith(("_count", "_bucket")) or (key[0].endswith("_total") and "bytes" not in key[0])
                grown = value - before.get(key, 0)
                promise(not counts or grown in (0, 3), f"{key[0]} grows by {grown:g} with 3 calls of {what}")

    def test_calls_are_told_without_log_stats(self) -> None:
        """Count HTTP calls with --disable-log-stats as without it."""
        shown = []
        for disabled in (False, True):
            logger = self._shown(self.make(disable_log_stats=disabled))
            first = self._stable(logger)
            _tell_http(logger)
            after = self._stable(logger)
            shown.append({key: value for key, value in after.items() if value != first.get(key, 0)})
        promise(shown[0] == shown[1], f"an HTTP call changes {shown[0]} with log stats and {shown[1]} without")

    def test_hostile_labels(self) -> None:
        """Escape any name of a model: it can neither break the text nor make up a series."""
        self._shown(self.make())
        plain = {name for name, _ in self._series(self.make())}
        for hostile in HOSTILE:
            series = self._series(self.make(hostile))
            promise({name for name, _ in series} == plain, f"the name {shown(hostile)} changes the series")
            values = {value for _, labels in series for key, value in labels if key == "model_name"}
            promise(not values or values <= {hostile, "m"}, f"the name {shown(hostile)} is shown as {shown(values)}")

    def test_the_number_of_series_is_bounded(self) -> None:
        """Add no series for more requests."""
        logger = self._shown(self.make())
        for tell in _events(5):
            tell(logger)
        before = len(self._series(logger))
        for seed in range(6, 12):
            for tell in _events(seed):
                tell(logger)
        promise(len(self._series(logger)) == before, f"{before} series become {len(self._series(logger))}")

    def test_two_loggers_share_nothing(self) -> None:
        """Count separately for two servers in one process."""
        first, second = self.make(), self._shown(self.make())
        before = self._stable(second)
        for tell in _events(13):
            tell(first)
        promise(self._stable(second) == before, "one logger's figures change with another's")

    def test_switched_off(self) -> None:
        """Accept every event with --disable-log-stats, and still show text that can be read."""
        logger = self.make(disable_log_stats=True)
        for tell in _events(14):
            tell(logger)
        self._series(logger)

    # ------------------------------------------------------------------------------------ parts

    def _shown(self, logger: StatLogger) -> StatLogger:
        if logger.exposition() is None:
            does_not_apply("it has no exposition")
        return logger

    def _series(self, logger: StatLogger) -> Series:
        found = logger.exposition()
        if found is None:
            return {}
        media_type, text = found
        promise(media_type.startswith("text/plain"), f"the media type is {media_type!r}")
        promise(not text or text.endswith("\n"), "the text does not end with a line")
        series: Series = {}
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            promise(False, f"the text cannot be read: {error}")
        for family in families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                promise(key not in series, f"{sample.name} {dict(key[1])} is there twice")
                promise(not math.isnan(sample.value), f"{sample.name} is not a number")
                series[key] = sample.value
        return series

    def _stable(self, logger: StatLogger) -> Series:
        """Return the series without those that describe the process."""
        return {key: value for key, value in self._series(logger).items() if not key[0].startswith(_OF_THE_PROCESS)}


def _http(**changes: Any) -> HttpStats:
    given = {"route": "/v1/completions", "method": "POST", "status": 200, "seconds": 0.5, "received": 70, "sent": 900}
    return HttpStats(**{**given, **changes})


def _tell_http(logger: StatLogger) -> None:
    logger.on_http(_http())


def _tell_rejected(logger: StatLogger) -> None:
    logger.on_rejected(_REASONS[0])


def _stats(**changes: Any) -> RequestStats:
    given = {
        "finish": FinishReason.STOP,
        "prompt_tokens": 7,
        "generation_tokens": 5,
        "cached_tokens": 4,
        "max_tokens": 16,
        "n": 2,
        "time_to_first_token": 0.1,
        "end_to_end": 0.6,
        "queue_time": 0.01,
        "inference_time": 0.5,
        "prefill_time": 0.1,
        "decode_time": 0.4,
    }
    return RequestStats(**{**given, **changes})


def _events(seed: int, rounds: int = 30) -> Iterator[Any]:
    """Yield events of a server, as functions of a logger; the engine's counters only grow."""
    rng = random.Random(seed)
    totals: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
    for _ in range(rounds):
        totals = {name: value + rng.randrange(20) for name, value in totals.items()}
        gauges: dict[str, Any] = {
            "running": rng.randrange(9),
            "waiting": rng.randrange(9),
            "blocks_used": rng.randrange(50),
        }
        gauges |= {"blocks_total": 64, "prefix_hits": totals["prefix_queries"] // 2}
        gauges |= {"running_adapters": rng.choice(((), ("a",), ("a", "b"))), "waiting_adapters": ("c",)}
        stats = EngineStats(**(gauges | totals))
        done = _stats(
            finish=rng.choice(list(FinishReason)),
            generation_tokens=rng.randrange(300),
            end_to_end=rng.random() * 100,
            num_preemptions=rng.randrange(3),
        )
        first, count, gap = rng.random() < 0.3, rng.randrange(1, 9), rng.random() ** 4 * 50
        call = _http(status=rng.choice((200, 200, 400, 499, 503)), seconds=rng.random() * 9, sent=rng.randrange(9999))
        reason = rng.choice(_REASONS)
        yield lambda logger, stats=stats: logger.on_engine(stats, 0)
        yield lambda logger, call=call: logger.on_http(call)
        yield lambda logger, reason=reason: logger.on_rejected(reason)
        yield lambda logger, args=(first, count, gap): logger.on_tokens(*args)
        yield lambda logger, done=done: logger.on_finish(done)
