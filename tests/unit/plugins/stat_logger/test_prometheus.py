"""Stat loggers: the documented series, and the line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from ferrule.config import Config, ModelConfig, ObservabilityConfig, StatSettings
from ferrule.config.resolve import resolve
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.parsers import CallStart, Content, Event, TextDelta, ToolParser
from ferrule.interfaces.stats import HttpStats, RequestStats
from ferrule.types import EngineStats, FinishReason
from ferrule_plugins.stat_logger import catalog
from ferrule_plugins.stat_logger.console import Console
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_plugins.stat_logger.series import Histogram, Store, one_two_five
from ferrule_testkit.fakes import VirtualClock
from ferrule_testkit.service import fake_model


def settings(**sections: Any) -> StatSettings:
    """Return the settings that a plugin gets of a configuration with these sections."""
    return StatSettings.of(resolve(Config(**sections)))


CONFIG = settings(model=ModelConfig(model="m", served_model_name=("served", "alias")))


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


def families(text: str) -> dict[str, Family]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def family_name(name: str, kind: str) -> str:
    """Return the parser's name of a family."""
    return name.removesuffix("_total") if kind == "counter" else name


def test_every_name_is_there_from_the_first_scrape_with_its_type_labels_and_buckets() -> None:
    found = families(Prometheus(CONFIG, fake_model()).exposition()[1])
    for metric in catalog.SERVED:
        if metric.deprecated:
            assert metric.name not in found
            continue
        family = found[family_name(metric.name, metric.kind)]
        assert family.type == metric.kind
        assert family.samples or metric.values is None  # of keys there are none yet
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*metric.common, *metric.labels}, metric.name
        if metric.kind == "histogram" and metric.buckets is not catalog.TOKENS:
            bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
            assert bounds == [*metric.buckets, float("inf")]
    for name, kind, labels, _ in catalog.PROCESS:
        family = found[family_name(name, kind)]
        assert (family.type, set(family.samples[0].labels)) == (kind, set(labels))


GAUGES = """num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc num_requests_swapped
    cpu_cache_usage_perc cpu_prefix_cache_hit_rate gpu_prefix_cache_hit_rate num_requests_waiting_by_reason
    engine_sleep_state cache_config_info lora_requests_info ferrule:state_snapshots ferrule:buffered_bytes
    spec_decode_draft_acceptance_rate spec_decode_efficiency"""
COUNTERS = """spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    spec_decode_num_accepted_tokens_per_pos_total spec_decode_num_emitted_tokens_total num_preemptions_total
    prompt_tokens_total generation_tokens_total request_success_total
    gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total prefix_cache_queries_total prefix_cache_hits_total
    corrupted_requests_total prompt_tokens_cached_total prompt_tokens_by_source_total admission_rejections_total
    tool_call_parser_invocations_total ferrule:key_choices_total ferrule:key_prompt_tokens_total
    ferrule:key_generation_tokens_total ferrule:engine_restarts_total"""
HISTOGRAMS = """iteration_tokens_total time_to_first_token_seconds time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_params_n request_params_max_tokens inter_token_latency_seconds request_time_per_output_token_seconds
    request_num_preemptions request_prefill_kv_computed_tokens time_in_queue_requests
    model_forward_time_milliseconds model_execute_time_milliseconds"""


def test_the_table_has_every_documented_name() -> None:
    table = {metric.name.removeprefix("vllm:"): metric.kind for metric in catalog.SERVED}
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    assert table == {name: kind for kind, names in kinds.items() for name in names.split()}
    assert not {name.removeprefix("vllm:") for name, _, _ in catalog.ABSENT} & set(table)


@pytest.mark.parametrize(
    ("version", "shows"), [(None, False), ("0.7", True), ("0.8.4", True), ("0.9", True), ("0.10", False)]
)
def test_hidden_names_come_back_when_they_are_asked_for(version: str | None, shows: bool) -> None:
    config = replace(CONFIG, observability=ObservabilityConfig(show_hidden_metrics_for_version=version))
    logger = Prometheus(config, fake_model())
    logger.on_engine(EngineStats(prefix_queries=8, prefix_hits=2), 0)
    logger.on_finish(request_stats())
    found = samples(logger)
    for name in (
        "num_requests_swapped",
        "cpu_cache_usage_perc",
        "gpu_prefix_cache_hit_rate",
        "cpu_prefix_cache_hit_rate",
    ):
        assert ((name, frozenset()) in found) is shows
    if shows:
        assert found["gpu_prefix_cache_hit_rate", frozenset()] == 0.25
        assert found["time_in_queue_requests_sum", frozenset()] == pytest.approx(0.01)
        executed = 1e3 * found["request_inference_time_seconds_sum", frozenset()]
        for name in ("model_forward_time_milliseconds_sum", "model_execute_time_milliseconds_sum"):
            assert found[name, frozenset()] == pytest.approx(executed)
            assert executed > 0


def test_nothing_outlives_its_deprecation() -> None:
    """Remove what is deprecated in X.Y and hidden in X.Y+1 in X.Y+2."""
    now = catalog.parse_version(catalog.API)
    for metric in catalog.SERVED:
        if metric.deprecated:
            major, minor = catalog.parse_version(metric.deprecated)
            assert now < (major, minor + 2), f"{metric.name} is to be taken out of the table"


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
    assert value(logger, "num_requests_waiting_by_reason", reason="capacity") == 2


def test_sleep_and_sources_of_prompt_tokens() -> None:
    logger = Prometheus(CONFIG, fake_model())
    assert value(logger, "engine_sleep_state", sleep_state="awake") == 0  # not heard of yet
    for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
        logger.on_engine(EngineStats(sleep_level=level, choice_prompt_tokens=10, choice_prompt_cached=4), 0)
        states = {key: number for key, number in samples(logger).items() if key[0] == "engine_sleep_state"}
        assert [key[1] for key, number in states.items() if number] == [frozenset({("sleep_state", state)})]
    assert value(logger, "prompt_tokens_by_source_total", source="local_compute") == 6
    assert value(logger, "prompt_tokens_by_source_total", source="local_cache_hit") == 4
    assert value(logger, "prompt_tokens_cached_total") == 4


def test_a_step_is_counted_once_however_often_it_is_told() -> None:
    logger = Prometheus(CONFIG, fake_model())
    for steps, prompt, generated in ((1, 8, 1), (1, 8, 1), (3, 28, 3)):
        logger.on_engine(EngineStats(steps=steps, prompt_tokens=prompt, generation_tokens=generated), 0)
    assert value(logger, "iteration_tokens_total_count") == 3
    assert value(logger, "iteration_tokens_total_sum") == 31
    assert value(logger, "iteration_tokens_total_bucket", le="8.0") == 0
    assert value(logger, "iteration_tokens_total_bucket", le="16.0") == 3


def test_choices_of_keys_are_counted_by_their_names() -> None:
    logger = Prometheus(CONFIG, fake_model())
    assert "ferrule:key_choices_total{" not in logger.exposition()[1]
    for _ in range(2):
        logger.on_finish(request_stats(key_name="alice"))
    found = {
        sample.name: (sample.labels["key"], sample.value)
        for family in families(logger.exposition()[1]).values()
        for sample in family.samples
        if "key" in sample.labels
    }
    stats = request_stats()
    assert found == {
        "ferrule:key_choices_total": ("alice", 2),
        "ferrule:key_prompt_tokens_total": ("alice", 2 * stats.prompt_tokens),
        "ferrule:key_generation_tokens_total": ("alice", 2 * stats.generation_tokens),
    }


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
    assert value(logger, "request_prompt_tokens_sum") == 7  # as in the total: with a first token
    assert value(logger, "request_prompt_tokens_count") == 2
    assert value(logger, "request_prefill_kv_computed_tokens_sum") == 3
    assert value(logger, "request_params_n_count") == 0  # counted with the last of a prompt's choices
    logger.on_finish(request_stats(longest=9))
    assert value(logger, "request_params_n_bucket", le="1.0") == 0
    assert value(logger, "request_params_n_bucket", le="2.0") == 1
    assert value(logger, "request_max_num_generation_tokens_sum") == 9
    assert value(logger, "request_time_per_output_token_seconds_sum") == pytest.approx(0.2)


def test_two_loggers_share_nothing() -> None:
    first, second = Prometheus(CONFIG, fake_model()), Prometheus(CONFIG, fake_model())
    first.on_finish(request_stats())
    assert value(second, "e2e_request_latency_seconds_count") == 0


def test_no_engine_figures_when_switched_off() -> None:
    logger = Prometheus(settings(observability=ObservabilityConfig(disable_log_stats=True)), fake_model())
    text = logger.exposition()[1]
    assert "vllm:" not in text
    assert "process_resident_memory_bytes" in text


def test_histogram_borders() -> None:
    cells = Store().cells(("a",), 4)
    histogram = Histogram(cells, (1, 2))
    for number in (0.5, 1, 1.5, 2, 3):
        histogram.observe(number)
    assert list(cells) == [2, 2, 1, 8.0]


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


def test_guesses_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    console, logger = Console(CONFIG, fake_model(), clock), Prometheus(CONFIG, fake_model())
    stats = EngineStats(steps=9, drafts=10, draft_tokens=40, accepted_by_place=(8, 5, 2))
    with caplog.at_level(logging.INFO, "ferrule.stats"):
        console.on_engine(EngineStats(), 0)
        clock.advance(10)
        console.on_engine(stats, 0)
    line = caplog.records[1].getMessage()
    assert line.endswith(
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 tokens/s, Drafted throughput: "
        "4.00 tokens/s, Accepted: 15 tokens, Drafted: 40 tokens, Per-position acceptance rate: 0.800, 0.500, 0.200, "
        "Avg Draft acceptance rate: 37.5%"
    )
    logger.on_engine(stats, 0)
    assert [value(logger, "spec_decode_num_accepted_tokens_per_pos_total", position=str(n)) for n in range(3)] == [
        8,
        5,
        2,
    ]
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "num_emitted_tokens_total")
    assert [value(logger, f"spec_decode_{name}") for name in names] == [10, 40, 15, 25]
    assert value(logger, "spec_decode_draft_acceptance_rate") == 15 / 40
    assert value(logger, "spec_decode_efficiency") == 25 / 50


def test_console_is_silent_when_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    console = Console(settings(observability=ObservabilityConfig(disable_log_stats=True)), fake_model(), clock)
    with caplog.at_level(logging.INFO, "ferrule.stats"):
        for steps in range(5):
            console.on_engine(EngineStats(steps=steps, running=1), 0)
            clock.advance(20)
    assert not caplog.records


def call(route: str = "/v1/models", method: str = "GET", status: int = 200, seconds: float = 0.003) -> HttpStats:
    return HttpStats(route=route, method=method, status=status, seconds=seconds, received=100, sent=5000)


def test_http_figures() -> None:
    logger = Prometheus(CONFIG, fake_model())
    logger.on_http(call())
    logger.on_http(call(method="OTHER", status=404, seconds=0.02))
    found = families(logger.exposition()[1])
    for metric in catalog.HTTP:
        family = found[family_name(metric.name, metric.kind)]
        assert family.type == metric.kind
        assert {frozenset(set(sample.labels) - {"le"}) for sample in family.samples} == {frozenset(metric.labels)}
    labels = [sample.labels for sample in found["http_requests"].samples]
    assert {"handler": "/v1/models", "method": "OTHER", "status": "4xx"} in labels
    counts = {
        sample.labels.get("le"): sample.value
        for sample in found["http_request_duration_seconds"].samples
        if sample.labels["method"] == "GET"
    }
    assert (counts["0.005"], counts["0.01"], counts["+Inf"]) == (1, 1, 1)
    sums = {sample.name: sample.value for family in found.values() for sample in family.samples}
    assert (sums["http_request_size_bytes_sum"], sums["http_response_size_bytes_sum"]) == (200, 10_000)
    assert sums["http_request_duration_highr_seconds_count"] == 2


def test_rejections_and_tools() -> None:
    logger = Prometheus(CONFIG, fake_model())
    logger.on_rejected("max_num_queued_reqs")
    logger.on_finish(request_stats())  # no tool parser read it
    logger.on_finish(request_stats(called_tools=True))
    logger.on_finish(request_stats(called_tools=False, streamed=False))
    text = logger.exposition()[1]
    assert 'vllm:admission_rejections_total{model_name="served",reason="max_num_queued_reqs"} 1.0' in text
    invoked = families(text)["vllm:tool_call_parser_invocations"].samples
    counted = {(sample.labels["mode"], sample.labels["outcome"]) for sample in invoked if sample.value}
    assert counted == {("streaming", "tool_call"), ("non_streaming", "no_tool_call")}


def shown(logger: Prometheus) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the figures that processes must agree on."""
    found = {}
    for family in families(logger.exposition()[1]).values():
        for sample in family.samples:
            if not sample.name.startswith(("process_", "python_")):
                found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def test_processes_add_up(tmp_path: Path) -> None:
    """Show in each process the sum of what requests and HTTP did, and the engine once."""
    loggers = [Prometheus(CONFIG, fake_model()) for _ in range(3)]
    for number, logger in enumerate(loggers):
        logger.share(tmp_path, number)
    stats = EngineStats(steps=4, prompt_tokens=30, generation_tokens=10, running=2, blocks_total=9, blocks_used=3)
    loggers[0].on_engine(stats, 0)
    for number, logger in enumerate(loggers):
        for _ in range(number + 1):
            logger.on_finish(request_stats())
            logger.on_tokens(True, 1, 0.05)
            logger.on_http(call())
    loggers[2].on_http(call("/metrics"))
    views = [shown(logger) for logger in loggers]
    assert views[0] == views[1] == views[2]
    assert value(loggers[1], "request_success_total", finished_reason="stop") == 6
    assert value(loggers[1], "time_to_first_token_seconds_count") == 6
    assert value(loggers[1], "request_prompt_tokens_sum") == 42
    assert value(loggers[2], "num_requests_running") == 2
    assert value(loggers[2], "iteration_tokens_total_sum") == 40
    assert 'num_gpu_blocks="9"' in loggers[2].exposition()[1]
    http = {key: number for key, number in views[1].items() if key[0] == "http_requests_total"}
    assert sorted(http.values()) == [1, 6]


def test_processes_are_told_apart(tmp_path: Path) -> None:
    loggers = [Prometheus(CONFIG, fake_model()) for _ in range(2)]
    for number, logger in enumerate(loggers):
        logger.share(tmp_path, number)
    found = families(loggers[1].exposition()[1])
    for name, kind, _, _ in catalog.PROCESS[:6]:
        labels = [sample.labels for sample in found[family_name(name, kind)].samples]
        assert labels == [{"process": "api-0"}, {"process": "api-1"}]
    assert "python_gc_collections" not in found


def test_a_store_that_is_full_loses_what_is_new_and_keeps_what_it_has(tmp_path: Path) -> None:
    store, reader = Store(tmp_path / "figures-0"), None
    store.cells(("first",), 1)[0] = 7
    room = store.cells(("large",), 1 << 19)
    room[-1] = 1
    for number in range(3):
        store.cells((f"{number}",), 1 << 19)[0] = 5
    reader = Store(tmp_path / "figures-0", read_only=True)
    assert list(reader.records()) == [("first",), ("large",)]
    assert reader.records()["first",][0] == 7
    store.cells(("first",), 1)[0] = 8
    assert reader.records()["first",][0] == 8


class Shouting(ToolParser):
    """A call for each exclamation mark, told in the end where there was no more text."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._late = False

    def constraint(self, choice: Any) -> None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self._late = delta.text.endswith("!")
        return [Content(delta.text)]

    def finish(self) -> Sequence[Event]:
        return [CallStart(0, "x", "f")] if self._late else []


@pytest.mark.parametrize(("text", "tools", "called"), [("a!", True, True), ("a", True, False), ("a!", False, None)])
def test_a_parse_chain_knows_whether_tools_were_called(text: str, tools: bool, called: bool | None) -> None:
    chain = ParseChain(Parsers(tools=Shouting), [{"type": "function"}] if tools else None)
    chain.feed(text)
    chain.finish()
    assert chain.called is called
