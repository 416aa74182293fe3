"""`prometheus`: the documented ``vllm:*`` series, under their present and their former names, and those of HTTP."""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.utils import floatToGoString

from ferrule.config import StatSettings
from ferrule.interfaces.stats import HttpStats, RequestStats, StatLogger
from ferrule.types import EngineStats, ModelInfo
from ferrule_plugins.stat_logger import catalog
from ferrule_plugins.stat_logger.series import Histogram, Key, Stores, one_two_five, read_text, write_text

_BLOCKS = ("blocks",)  # key of a figure that is not shown by itself
_PID = ("pid",)
_ADAPTERS = ("adapters",)
_ADAPTERS_WIDTH = 4096  # characters, about, that are kept of their names
_GC = ("gc",)
_GC_FIGURES = (  # of a generation, in the order of the cells
    ("collected", "python_gc_objects_collected", "Objects collected during gc"),
    ("uncollectable", "python_gc_objects_uncollectable", "Uncollectable objects found during GC"),
    ("collections", "python_gc_collections", "Number of times this generation was collected"),
)

Series = list[tuple[list[str], list[float]]]  # values of labels, and cells


class Prometheus(StatLogger):
    """Metrics in Prometheus' format, one registry per instance.

    Labels are names of the served model and its adapters, and the engine's number, never text from clients. With
    several API processes each shows the sum over all of them; see `series`.
    """

    def __init__(self, config: StatSettings, model: ModelInfo) -> None:
        super().__init__(config, model)
        self._name = config.model_names[0]
        self._tokens = one_two_five(model.max_model_len)
        self._max_adapters = model.adapter_slots
        self._engines: dict[int, EngineStats] = {}
        version = config.observability.show_hidden_metrics_for_version
        self._shown = [metric for metric in catalog.SERVED if catalog.shown(metric, version)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        PlatformCollector(registry=self._registry)
        self._open(Stores())

    def share(self, folder: Path, number: int) -> None:
        self._open(Stores(folder, number))

    def follow(self, folder: Path) -> None:
        self._open(Stores(folder, None))

    def _open(self, stores: Stores) -> None:
        """Make every series whose labels are known, so that each is there from the first scrape."""
        self._stores = stores
        stores.own.cells(_PID, 1)[0] = os.getpid()
        stores.own.cells(_BLOCKS, 1)
        self._note_collections()
        self._histograms: dict[Key, Histogram] = {}
        for metric in (*catalog.SERVED, *catalog.HTTP):
            for values in () if metric.same_as else metric.values or ():
                key = _key(metric, values)
                if metric.kind == "histogram":
                    self._histogram(metric, key)
                else:
                    stores.own.cells(key, 1)
        self._by_name = {key[0]: histogram for key, histogram in self._histograms.items()}

    def _histogram(self, metric: catalog.Metric, key: Key) -> Histogram:
        found = self._histograms.get(key)
        if found is None:
            bounds = self._bounds(metric)
            found = self._histograms[key] = Histogram(self._stores.own.cells(key, len(bounds) + 2), bounds)
        return found

    def _bounds(self, metric: catalog.Metric) -> Sequence[float]:
        return self._tokens if metric.buckets is catalog.TOKENS else metric.buckets

    def _note_collections(self) -> None:
        """Write the figures of this process's garbage collector into its store, for the process that exports them."""
        figures = [float(stat[name]) for stat in gc.get_stats() for name, _, _ in _GC_FIGURES]
        self._stores.own.cells(_GC, len(figures))[:] = array("d", figures)

    def _count(self, *key: str, value: float = 1) -> None:
        self._stores.own.cells(key, 1)[0] += value

    # ---- what happens

    def on_engine(self, stats: EngineStats, engine: int) -> None:
        before = self._engines.get(engine, EngineStats())
        if (steps := stats.steps - before.steps) > 0:
            # Several steps may have ended since the last figures: each is counted, with their mean.
            tokens = stats.prompt_tokens + stats.generation_tokens - before.prompt_tokens - before.generation_tokens
            self._by_name[catalog.STEP_TOKENS].observe(tokens / steps, steps)
        self._engines[engine] = stats
        for metric in catalog.SERVED:
            if metric.engine is not None:
                for values, value in metric.engine(stats).items():
                    self._stores.own.cells(_key(metric, values, engine), 1)[0] = value
        if engine == 0:
            self._stores.own.cells(_BLOCKS, 1)[0] = stats.blocks_total

        self._note_adapters(stats)
        self._note_collections()

    def _note_adapters(self, stats: EngineStats) -> None:
        """Write which adapters are at work, and when, as labels for the process that exports them."""
        if self._max_adapters:
            noted = (str(time.time()), *map(",".join, (stats.waiting_adapters, stats.running_adapters)))
            write_text(self._stores.own.cells(_ADAPTERS, _ADAPTERS_WIDTH), "\n".join(noted))

    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        """Note the time since the previous tokens, which tokens that arrive together share; with the first token, the
        others count as 0.
        """
        if first:
            self._by_name[catalog.FIRST_TOKEN].observe(gap)
            num_tokens, gap = num_tokens - 1, 0.0
        if num_tokens:
            self._by_name[catalog.GAP].observe(gap / num_tokens, num_tokens)

    def on_finish(self, stats: RequestStats) -> None:
        self._count(catalog.SUCCESS, "0", stats.finish.value)
        if stats.called_tools is not None:
            mode = "streaming" if stats.streamed else "non_streaming"
            self._count(catalog.TOOLS, mode, "tool_call" if stats.called_tools else "no_tool_call", "chat_completions")
        if stats.key_name:
            self._count(catalog.KEY_CHOICES, stats.key_name)
            self._count(catalog.KEY_PROMPT, stats.key_name, value=catalog.prompt_tokens(stats))
            self._count(catalog.KEY_GENERATION, stats.key_name, value=stats.generation_tokens)
        for metric in catalog.SERVED:
            if metric.choice is not None and (value := metric.choice(stats)) is not None:
                self._by_name[metric.name].observe(value)

    def on_rejected(self, reason: str) -> None:
        self._count(catalog.REJECTED, reason)

    def on_stall(self, seconds: float) -> None:
        self._by_name[catalog.STALL].observe(seconds)

    def on_http(self, stats: HttpStats) -> None:
        self._count(catalog.CALLS, stats.route, stats.method, f"{stats.status // 100}xx")
        figures = {
            catalog.DURATION: ((stats.route, stats.method), stats.seconds),
            catalog.DURATION_FINE: ((), stats.seconds),
            catalog.RECEIVED: ((stats.route,), stats.received),
            catalog.SENT: ((stats.route,), stats.sent),
        }
        for metric in catalog.HTTP:
            if metric.name in figures:
                values, value = figures[metric.name]
                self._histogram(metric, (metric.name, *values)).observe(value)

    # ---- what is shown

    def exposition(self) -> tuple[str, str]:
        return CONTENT_TYPE_LATEST, generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this for each scrape."""
        totals: dict[str, Series] = {}
        for (name, *values), figures in self._stores.totals().items():
            totals.setdefault(name, []).append((values, figures))
        shown = () if self.config.observability.disable_log_stats else self._shown
        for metric in (*shown, *catalog.HTTP):
            if metric.name == catalog.ADAPTERS:
                yield self._adapters(metric, totals.get(_ADAPTERS[0], []))
            elif metric.name == catalog.CACHE_INFO:
                yield self._cache_info(totals[_BLOCKS[0]][0][1][0])
            else:
                yield self._family(metric, totals.get(metric.same_as or metric.name, []))
        yield from self._processes()

    def _family(self, metric: catalog.Metric, series: Series) -> Metric:
        named = [self._name] if "model_name" in metric.common else []
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        family = kinds[metric.kind](metric.name, metric.doc, labels=[*metric.common, *metric.labels])
        for values, figures in series:
            if metric.kind == "histogram":
                family.add_metric([*named, *values], *_buckets(figures, self._bounds(metric)))
            else:
                family.add_metric([*named, *values], figures[0])
        return family

    def _processes(self) -> Iterator[Metric]:
        """Yield the figures of one process as they are; of several, each with its name, without what their interpreters
        say of themselves.
        """
        if self._stores.folder is None:
            yield from ProcessCollector(registry=None).collect()
            yield from GCCollector(CollectorRegistry()).collect()
            return
        processes = self._stores.by_process()
        families: dict[str, Metric] = {}
        for number, store in processes:
            pid = store.records().get(_PID)
            if pid is None:  # the other process is just starting
                continue
            labels = {"process": f"api-{number}"} if len(processes) > 1 else {}
            for family in ProcessCollector(pid=lambda pid=pid: int(pid[0]), registry=None).collect():
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        if len(processes) == 1:
            yield from _collections(processes[0][1].records().get(_GC, ()))

    def _adapters(self, metric: catalog.Metric, series: Series) -> Metric:
        family = GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for _, cells in series:
            if len(noted := read_text(cells).split("\n")) == 3:  # else it is just being written
                family.add_metric([str(self._max_adapters), *noted[1:]], float(noted[0]))
        return family

    def _cache_info(self, blocks: float) -> Metric:
        cache = self.config.cache
        values = {
            "model_name": self._name,
            "engine": "0",
            "block_size": str(cache.block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": f"{blocks:.0f}",
            "num_gpu_blocks_override": str(cache.num_gpu_blocks_override),
            "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        }
        info = GaugeMetricFamily(catalog.CACHE_INFO, "Settings of the KV cache, always 1.", labels=list(values))
        info.add_metric(list(values.values()), 1)
        return info


def _key(metric: catalog.Metric, values: Sequence[str], engine: int = 0) -> Key:
    return (metric.name, *([str(engine)] if "engine" in metric.common else []), *values)


def _collections(figures: Sequence[float]) -> Iterator[Metric]:
    """Yield the families of `GCCollector`, from the cells of another process."""
    for place, (_, name, doc) in enumerate(_GC_FIGURES):
        family = CounterMetricFamily(name, doc, labels=["generation"])
        for generation, value in enumerate(list(figures)[place :: len(_GC_FIGURES)]):
            family.add_metric([str(generation)], value)
        yield family


def _buckets(figures: list[float], bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Return a histogram's cells as Prometheus shows them: cumulative, and the sum."""
    counts = accumulate(figures[:-1])
    return [
        (floatToGoString(bound), count) for bound, count in zip((*bounds, float("inf")), counts, strict=True)
    ], figures[-1]
