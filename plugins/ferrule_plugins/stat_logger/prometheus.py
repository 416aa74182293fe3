"""`prometheus`: the documented ``vllm:*`` series, under their present and their former names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ferrule.config import Config
from ferrule.interfaces.stats import RequestStats, StatLogger
from ferrule.types import EngineStats, FinishReason, ModelInfo
from ferrule_plugins.stat_logger.series import Histogram, one_two_five

_PREFIX = "vllm:"
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_STEP_TOKENS = (1, *(1 << power for power in range(3, 15)))  # 1, 8, 16 … 16384
_CHOICES = (1, 2, 5, 10, 20)


class Prometheus(StatLogger):
    """One registry per instance. Labels are the served model's name and the engine's number, never a client's text."""

    def __init__(self, config: Config, model: ModelInfo) -> None:
        super().__init__(config, model)
        self._name = (config.model.served_model_name or (config.model.model,))[0]
        self._engines: dict[int, EngineStats] = {}
        self._finished = dict.fromkeys(FinishReason, 0)
        self._prompt_cached = 0
        self._make_histograms(one_two_five(model.max_model_len))
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def _make_histograms(self, tokens: tuple[float, ...]) -> None:
        def histogram(doc: str, bounds: tuple[float, ...], *names: str) -> Histogram:
            return Histogram(doc, bounds, *(_PREFIX + name for name in names))

        self._step_tokens = histogram("Tokens per engine step.", _STEP_TOKENS, "iteration_tokens_total")
        self._ttft = histogram("Seconds to the first token.", _TTFT, "time_to_first_token_seconds")
        self._gap = histogram(
            "Seconds between tokens.", _GAP, "inter_token_latency_seconds", "time_per_output_token_seconds"
        )
        self._mean_gap = histogram(
            "Mean seconds per output token of a request.", _GAP, "request_time_per_output_token_seconds"
        )
        # A field of RequestStats → its histogram.
        self._by_field = {
            "end_to_end": histogram("Seconds from arrival to end.", _LATENCY, "e2e_request_latency_seconds"),
            "queue_time": histogram("Seconds in WAITING.", _LATENCY, "request_queue_time_seconds"),
            "inference_time": histogram("Seconds in RUNNING.", _LATENCY, "request_inference_time_seconds"),
            "prefill_time": histogram("Seconds in PREFILL.", _LATENCY, "request_prefill_time_seconds"),
            "decode_time": histogram("Seconds in DECODE.", _LATENCY, "request_decode_time_seconds"),
            "prompt_tokens": histogram("Prompt tokens per request.", tokens, "request_prompt_tokens"),
            "generation_tokens": histogram(
                "Generated tokens per request.",
                tokens,
                "request_generation_tokens",
                "request_max_num_generation_tokens",
            ),
            "max_tokens": histogram("max_tokens of requests.", tokens, "request_params_max_tokens"),
            "n": histogram("n of requests.", _CHOICES, "request_params_n"),
            "num_preemptions": histogram("Preemptions per request.", (0, *_CHOICES), "request_num_preemptions"),
        }

    # ---- what happens

    def on_engine(self, stats: EngineStats, engine: int) -> None:
        before = self._engines.get(engine, EngineStats())
        if (steps := stats.steps - before.steps) > 0:
            # Several steps may have ended since the last figures: each is counted, with their mean.
            tokens = stats.prompt_tokens + stats.generation_tokens - before.prompt_tokens - before.generation_tokens
            self._step_tokens.observe(tokens / steps, steps)
        self._engines[engine] = stats

    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        (self._ttft if first else self._gap).observe(gap)

    def on_finish(self, stats: RequestStats) -> None:
        self._finished[stats.finish] += 1
        self._prompt_cached += stats.cached_tokens
        for name, histogram in self._by_field.items():
            histogram.observe(getattr(stats, name))
        if stats.generation_tokens > 1:
            self._mean_gap.observe(stats.decode_time / (stats.generation_tokens - 1))

    # ---- what is shown

    def exposition(self) -> tuple[str, str]:
        return CONTENT_TYPE_LATEST, generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        if self.config.observability.disable_log_stats:
            return
        yield from self._of_engines()
        yield self._cache_info()
        labels = {"model_name": self._name, "engine": "0"}
        finished = CounterMetricFamily(
            _PREFIX + "request_success", "Finished requests.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([*labels.values(), reason.value], count)
        yield finished
        cached = CounterMetricFamily(
            _PREFIX + "prompt_tokens_cached",
            "Cached prompt tokens of finished requests.",
            labels=list(labels),
        )
        cached.add_metric(list(labels.values()), self._prompt_cached)
        yield cached
        for histogram in (self._step_tokens, self._ttft, self._gap, self._mean_gap, *self._by_field.values()):
            yield from histogram.families(labels)

    def _of_engines(self) -> Iterator[Metric]:
        """Gauges and counters that the engines keep."""
        engines = self._engines or {0: EngineStats()}
        gauges = (
            ("num_requests_running", "Requests that run.", "running"),
            ("num_requests_waiting", "Requests that wait.", "waiting"),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "cache_usage"),
            ("gpu_cache_usage_perc", "The same under its former name.", "cache_usage"),
        )
        counters = (
            ("num_preemptions", "Preemptions.", "preemptions"),
            ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
            ("generation_tokens", "Tokens generated.", "generation_tokens"),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
            ("prefix_cache_hits", "Prompt tokens found there.", "prefix_hits"),
            ("gpu_prefix_cache_queries", "Queries under their former name.", "prefix_queries"),
            ("gpu_prefix_cache_hits", "Hits under their former name.", "prefix_hits"),
            ("corrupted_requests", "Requests ended by logits that were not finite.", "corrupted_requests"),
        )
        families = [(GaugeMetricFamily, row) for row in gauges] + [(CounterMetricFamily, row) for row in counters]
        for kind, (name, doc, field) in families:
            family = kind(_PREFIX + name, doc, labels=["model_name", "engine"])
            for engine, stats in engines.items():
                family.add_metric([self._name, str(engine)], getattr(stats, field))
            yield family

    def _cache_info(self) -> Metric:
        cache = self.config.cache
        values = {
            "model_name": self._name,
            "engine": "0",
            "block_size": str(cache.block_size or self.model.groups[0].block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(self._engines[0].blocks_total if 0 in self._engines else 0),
        }
        info = GaugeMetricFamily(_PREFIX + "cache_config_info", "Settings of the KV cache.", labels=list(values))
        info.add_metric(list(values.values()), 1)
        return info
