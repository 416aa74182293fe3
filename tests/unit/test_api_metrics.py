"""Stat loggers: the documented series, and the line in the log."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule.api.figures import HttpFigures
from ferrule.config import Config, ModelConfig, ObservabilityConfig
from ferrule.interfaces.stats import RequestStats
from ferrule.types import EngineStats, FinishReason
from ferrule_plugins.stat_logger.console import Console
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_plugins.stat_logger.series import Histogram, one_two_five
from ferrule_testkit.fakes import VirtualClock
from ferrule_testkit.service import fake_model

CONFIG = Config(model=ModelConfig(model="m", served_model_name=("served", "alias")))

# The names that the documents list, without those that they call deprecated.
DOCUMENTED = """
num_requests_running num_requests_waiting gpu_cache_usage_perc num_preemptions_total prompt_tokens_total
generation_tokens_total iteration_tokens_total_count time_to_first_token_seconds_bucket
time_per_output_token_seconds_sum e2e_request_latency_seconds_count request_queue_time_seconds_count
request_inference_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count
request_prompt_tokens_count request_generation_tokens_count request_max_num_generation_tokens_count
request_params_n_count request_params_max_tokens_count request_success_total gpu_prefix_cache_queries_total
gpu_prefix_cache_hits_total kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
inter_token_latency_seconds_count request_time_per_output_token_seconds_count request_num_preemptions_count
corrupted_requests_total cache_config_info
"""


def request_stats(**values: float) -> RequestStats:
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
    return RequestStats(**{**given, **values})  # type: ignore[arg-type]


def samples(logger: Prometheus) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    _, text = logger.exposition()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in {"model_name", "engine"}}
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "served"
                found[sample.name.removeprefix("vllm:"), frozenset(labels.items())] = sample.value
    return found


def value(logger: Prometheus, name: str, **labels: str) -> float:
    return samples(logger)[name, frozenset(labels.items())]


def test_documented_names_are_there_from_the_first_scrape() -> None:
    names = {name for name, _ in samples(Prometheus(CONFIG, fake_model()))}
    assert set(DOCUMENTED.split()) - names == set()


def test_engine_figures() -> None:
    logger = Prometheus(CONFIG, fake_model())
    stats = EngineStats(
        running=3, waiting=2, blocks_total=10, blocks_used=5, prefix_queries=9, prefix_hits=4, preemptions=1, steps=1
    )
    logger.on_engine(stats, 0)
    assert value(logger, "num_requests_running") == 3
    assert value(logger, "num_requests_waiting") == 2
    assert value(logger, "kv_cache_usage_perc") == value(logger, "gpu_cache_usage_perc") == 0.5
    assert value(logger, "prefix_cache_hits_total") == value(logger, "gpu_prefix_cache_hits_total") == 4
    assert value(logger, "num_preemptions_total") == 1


def test_a_step_is_counted_once_however_often_it_is_told() -> None:
    logger = Prometheus(CONFIG, fake_model())
    for steps, prompt, generated in ((1, 8, 1), (1, 8, 1), (3, 28, 3)):
        logger.on_engine(EngineStats(steps=steps, prompt_tokens=prompt, generation_tokens=generated), 0)
    assert value(logger, "iteration_tokens_total_count") == 3
    assert value(logger, "iteration_tokens_total_sum") == 31
    assert value(logger, "iteration_tokens_total_bucket", le="8.0") == 0
    assert value(logger, "iteration_tokens_total_bucket", le="16.0") == 3


def test_latencies_and_requests() -> None:
    logger = Prometheus(CONFIG, fake_model())
    logger.on_tokens(True, 1, 0.05)
    logger.on_tokens(False, 1, 0.03)
    logger.on_finish(request_stats())
    logger.on_finish(request_stats(finish=FinishReason.ABORT, generation_tokens=0))
    assert value(logger, "time_to_first_token_seconds_bucket", le="0.04") == 0
    assert value(logger, "time_to_first_token_seconds_bucket", le="0.06") == 1
    assert value(logger, "time_per_output_token_seconds_sum") == pytest.approx(0.03)
    assert value(logger, "request_success_total", finished_reason="stop") == 1
    assert value(logger, "request_success_total", finished_reason="abort") == 1
    assert value(logger, "request_success_total", finished_reason="error") == 0
    assert value(logger, "request_prompt_tokens_sum") == 14
    assert value(logger, "prompt_tokens_cached_total") == 8
    assert value(logger, "request_params_n_bucket", le="1.0") == 0
    assert value(logger, "request_params_n_bucket", le="2.0") == 2
    assert value(logger, "request_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_two_loggers_share_nothing() -> None:
    first, second = Prometheus(CONFIG, fake_model()), Prometheus(CONFIG, fake_model())
    first.on_finish(request_stats())
    assert value(second, "e2e_request_latency_seconds_count") == 0


def test_no_engine_figures_when_switched_off() -> None:
    logger = Prometheus(Config(observability=ObservabilityConfig(disable_log_stats=True)), fake_model())
    assert "vllm:" not in logger.exposition()[1]


def test_histogram_borders() -> None:
    histogram = Histogram("", (1, 2), "a", "b")
    for number in (0.5, 1, 1.5, 2, 3):
        histogram.observe(number)
    families = histogram.families({})
    assert [family.name for family in families] == ["a", "b"]
    buckets = {sample.labels["le"]: sample.value for sample in families[0].samples if sample.name == "a_bucket"}
    assert buckets == {"1.0": 2, "2.0": 4, "+Inf": 5}


def test_buckets_by_one_two_five() -> None:
    assert one_two_five(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert one_two_five(5) == (1, 2, 5)


def test_console_says_rates_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    console = Console(CONFIG, fake_model(), clock)
    with caplog.at_level(logging.INFO, "ferrule.stats"):
        console.on_engine(EngineStats(), 0)
        clock.advance(9)
        console.on_engine(EngineStats(steps=1, prompt_tokens=500), 0)
        assert not caplog.records
        clock.advance(1)
        stats = EngineStats(
            steps=5, prompt_tokens=1000, generation_tokens=200, running=2, waiting=1, prefix_queries=10, prefix_hits=5
        )
        console.on_engine(stats, 0)
        line = caplog.records[0].getMessage()
        assert "prompt throughput: 100.0 tokens/s" in line
        assert "generation throughput: 20.0 tokens/s" in line
        assert "Running: 2 reqs, Waiting: 1 reqs" in line
        assert "hit rate: 50.0%" in line
        clock.advance(10)
        console.on_engine(EngineStats(steps=5), 0)  # idle since the last line
        assert len(caplog.records) == 1


def test_console_is_silent_when_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    console = Console(Config(observability=ObservabilityConfig(disable_log_stats=True)), fake_model(), clock)
    with caplog.at_level(logging.INFO, "ferrule.stats"):
        for steps in range(5):
            console.on_engine(EngineStats(steps=steps, running=1), 0)
            clock.advance(20)
    assert not caplog.records


def test_http_figures_are_parseable() -> None:
    figures = HttpFigures()
    figures.observe("/v1/models", "GET", 200, 0.003)
    figures.observe("/v1/models", "BREW", 404, 0.02)
    families = {family.name: family for family in text_string_to_metric_families(figures.exposition())}
    labels = [sample.labels for sample in families["http_requests"].samples]
    assert {"handler": "/v1/models", "method": "OTHER", "status": "4xx"} in labels
    counts = {s.labels.get("le"): s.value for s in families["http_request_duration_seconds"].samples}
    assert (counts["0.005"], counts["0.01"], counts["0.025"], counts["+Inf"]) == (1, 1, 2, 2)
