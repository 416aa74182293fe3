"""Spans as a collector gets them, made from what hooks are told; and collectors that are absent, or hang."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
from opentelemetry import trace

from ferrule.config import Config, ObservabilityConfig, ServerSettings
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError, OverloadedError, PluginError
from ferrule.hooks import open_hooks
from ferrule.interfaces.hooks import Arrival
from ferrule.interfaces.stats import RequestStats
from ferrule.plugin import discover
from ferrule.sampling_params import SamplingParams
from ferrule.types import FinishReason, RequestTimes, StepSeconds
from ferrule_plugins.hooks.otlp import Otlp
from ferrule_testkit.server import until
from tests.otlp_collector import Collector, grpc_collector, http_collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Open = Callable[[str], Otlp]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Give a function that makes hooks which send to an endpoint soon; they are stopped when the test ends."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    made: list[Otlp] = []

    def open(endpoint: str, process: str = "api-0") -> Otlp:
        made.append(Otlp())
        made[-1].process_started(process, settings(endpoint))
        return made[-1]

    yield open
    for hooks in made:
        hooks.process_stopping("api-0", 0)


def settings(endpoint: str) -> ServerSettings:
    return ServerSettings.of(resolve(Config(observability=ObservabilityConfig(otlp_traces_endpoint=endpoint))))


def arrival(headers: Mapping[str, str] | None = None, **fields: Any) -> Arrival:
    """Make a request that came a minute ago. It was checked for a second, read for two, and planned for one."""
    at = time.monotonic() - 60
    told: dict[str, Any] = {"num_prompts": 1, "num_choices": 1, "read_from": at + 1, "read": at + 3, **fields}
    return Arrival(at=at, headers=headers or {}, submitted=at + 4, **told)


def stats(told: Arrival, finish: FinishReason = FinishReason.STOP, **fields: Any) -> RequestStats:
    """Figures of a choice that was scheduled a second after its submission, with a token 2 and an end 5 seconds on."""
    at = told.submitted
    values: dict[str, Any] = {
        "times": RequestTimes(told.at, at + 1, at + 3, at + 8, StepSeconds(0.4, 0.3, 0.1)),
        "prompt_tokens": 7,
        "generation_tokens": 5,
        "cached_tokens": 4,
        "max_tokens": 9,
        "n": told.num_choices,
        "time_to_first_token": 7.0,
        "end_to_end": 12.0,
        "queue_time": 5.0,
        "inference_time": 7.0,
        "prefill_time": 2.0,
        "decode_time": 5.0,
        **fields,
    }
    return RequestStats(finish=finish, **values)


def serve(hooks: Otlp, told: Arrival, finish: FinishReason = FinishReason.STOP, **fields: Any) -> None:
    """Tell of a request from its admission to its end."""
    ids = [f"{id(told)}-{number}" for number in range(told.num_choices)]
    params = SamplingParams(n=told.num_choices, temperature=0.5, top_p=0.9, seed=11)
    for each in ids:
        hooks.request_admitted(each, "m", 7, params, told)
    for each in reversed(ids):
        hooks.request_finished(each, stats(told, finish, **fields))


@pytest.mark.parametrize(("protocol", "run"), [("grpc", grpc_collector), ("http/protobuf", http_collector)])
def test_a_request_is_a_span_with_its_phases(
    protocol: str, run: Callable[[], AbstractContextManager[Collector]], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with run() as collector:
        hooks = opened(collector.endpoint)
        told = arrival(chat=True, answer_id="chatcmpl-1")
        serve(hooks, Arrival(**{**vars(told), "rendered": told.at + 2}))
        (span,) = collector.requests()
        children = collector.children(span)
    assert [(each.name, *(round((at - span.start) / 1e9) for at in (each.start, each.end))) for each in children] == [
        ("render", 1, 2),
        ("tokenize", 2, 3),
        ("queue", 4, 5),
        ("prefill", 5, 7),
        ("decode", 7, 12),
        ("parse", 12, round((span.end - span.start) / 1e9)),
    ]
    assert {each.trace_id for each in children} == {span.trace_id}
    assert (span.name, span.parent, span.kind, span.status) == ("llm_request", "", 2, 0)
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ferrule",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.response.id": "chatcmpl-1",
        "ferrule.request.id": span.attributes["ferrule.request.id"],
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": SamplingParams().top_k,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 11,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.time_in_queue": 5.0,
        "gen_ai.latency.time_to_first_token": 7.0,
        "gen_ai.latency.e2e": 12.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 5.0,
        "gen_ai.latency.time_in_model_inference": 7.0,
        "gen_ai.latency.time_in_scheduler": 0.1,
        "gen_ai.latency.time_in_model_execute": 0.4,
        "gen_ai.latency.time_in_model_forward": 0.3,
    }
    assert span.resource["service.name"] == "ferrule"
    assert span.resource["deployment.environment"] == "test"
    assert collector.path in ("", "/v1/traces")


def test_a_trace_is_continued_and_its_sampling_kept(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with grpc_collector() as collector:
        hooks = opened(collector.endpoint)
        serve(hooks, arrival({"traceparent": f"00-{TRACE}-{SPAN}-00"}))
        serve(hooks, arrival({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}))
        serve(hooks, arrival({"traceparent": "00-nonsense"}))
        outer = trace.NonRecordingSpan(trace.SpanContext(5, 6, True, trace.TraceFlags(1)))
        with trace.use_span(outer):  # what a middleware begins is nearer than the client
            serve(hooks, arrival({"traceparent": f"00-{TRACE}-{SPAN}-01"}))
        continued, fresh, within = collector.requests(3)
    assert (continued.trace_id, continued.parent, continued.state) == (TRACE, SPAN, "vendor=1")
    assert (fresh.parent, fresh.resource["service.name"]) == ("", "mine")
    assert (int(within.trace_id, 16), int(within.parent, 16)) == (5, 6)
    assert len(collector.requests(3)) == 3  # the first one's client does not sample it


def test_a_sampler_is_chosen_by_the_environment_and_nothing_is_kept_of_the_others(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with grpc_collector() as collector:
        hooks = opened(collector.endpoint)
        hooks.request_admitted("a", "m", 7, SamplingParams(), arrival())
        assert not hooks._requests
        serve(hooks, arrival({"traceparent": f"00-{TRACE}-{SPAN}-01"}))
        assert [span.trace_id for span in collector.requests()] == [TRACE]


def test_several_choices_are_one_span(opened: Open) -> None:
    with grpc_collector() as collector:
        hooks = opened(collector.endpoint)
        serve(hooks, arrival(num_prompts=2, num_choices=4))
        (span,) = collector.requests()
        children = collector.children(span)
        assert not hooks._requests
    decoded = [each.attributes for each in children if each.name == "decode"]
    assert sorted(each["ferrule.choice"] for each in decoded) == [0, 1, 2, 3]
    assert span.attributes["gen_ai.request.choice.count"] == 4
    assert span.attributes["gen_ai.usage.input_tokens"] == 14
    assert span.attributes["gen_ai.usage.output_tokens"] == 20
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4


def test_failures_have_a_status(opened: Open) -> None:
    with grpc_collector() as collector:
        hooks = opened(collector.endpoint)
        serve(hooks, arrival(), FinishReason.ERROR, error="no memory")
        hooks.request_refused("m", OverloadedError("full"), arrival({"traceparent": f"00-{TRACE}-{SPAN}-01"}))
        serve(hooks, arrival(), FinishReason.ABORT, times=None, time_to_first_token=0.0)
        failed, refused, aborted = collector.requests(3)
        assert [each.name for each in collector.children(aborted)] == ["tokenize", "queue"]
    assert (failed.status, failed.message, failed.attributes["error.type"]) == (2, "no memory", "RequestFailed")
    assert (refused.status, refused.message, refused.trace_id) == (2, "full", TRACE)
    assert refused.attributes == {
        "gen_ai.request.model": "m",
        "error.type": "OverloadedError",
        "http.response.status_code": 429,
    }
    assert aborted.status == 0
    assert "gen_ai.latency.time_to_first_token" not in aborted.attributes


def test_only_processes_that_serve_requests_send(opened: Open) -> None:
    for process in ("launcher", "engine-0"):
        hooks = opened("http://127.0.0.1:1", process)
        assert hooks._provider is None
        serve(hooks, arrival())


def test_without_the_extra_a_start_says_what_to_install_and_others_do_not_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "ferrule_plugins.hooks.otlp")
    open_hooks(discover(), Config())
    assert "ferrule_plugins.hooks.otlp" not in sys.modules
    asked = Config(observability=ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:1"))
    with pytest.raises(PluginError, match=r"pip install 'ferrule\[otel\]'"):
        open_hooks(discover(), asked)


@pytest.mark.parametrize(
    ("protocol", "endpoint", "said"),
    [
        ("http/json", "http://127.0.0.1:4318", "use grpc or http/protobuf"),
        ("http/protobuf", "127.0.0.1:4318", "give a URL of http or https"),
    ],
)
def test_what_cannot_be_sent_stops_the_start(
    protocol: str, endpoint: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ConfigError, match=said):
        Otlp().process_started("launcher", settings(endpoint))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-5"),
    ],
)
def test_a_variable_that_the_sdk_refuses_stops_the_start(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="OpenTelemetry refuses a variable OTEL_"):
        Otlp().process_started("launcher", settings("http://127.0.0.1:1"))


def test_without_the_exporter_a_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's SDK may be there without it: other packages bring it, too."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'ferrule\[otel\]'"):
        Otlp().process_started("launcher", settings("http://127.0.0.1:1"))


def test_headers_of_clients_do_not_fill_the_log(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    hooks = opened("http://127.0.0.1:1")
    hostile = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,a=2,=,b", "baggage": "no pair," * 200}
    hooks.request_admitted("a", "m", 7, SamplingParams(), arrival(hostile))
    assert hooks._requests["a"].span.get_span_context().trace_id == int(TRACE, 16)
    hooks.request_admitted("b", "m", 7, SamplingParams(), arrival({"traceparent": "0" * 1000}))
    assert [record.message for record in caplog.records if not record.name.startswith("ferrule")] == []


def test_compiling_a_grammar_is_a_phase(opened: Open) -> None:
    with grpc_collector() as collector:
        serve(opened(collector.endpoint), arrival(constrained=True))
        (span,) = collector.requests()
        (phase,) = [each for each in collector.children(span) if each.name == "compile"]
        assert [round((at - span.start) / 1e9) for at in (phase.start, phase.end)] == [3, 4]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_absent_is_told_of_once_and_found_again(
    protocol: str, opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    run = grpc_collector if protocol == "grpc" else http_collector
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    caplog.set_level("INFO")
    hooks = opened(f"http://127.0.0.1:{port}")
    serve(hooks, arrival())
    assert until(lambda: caplog.messages)
    exporter = hooks._exporter
    assert exporter is not None
    for _ in range(3):
        serve(hooks, arrival())
        exporter.export([])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("spans cannot be sent now")
    with run(port) as collector:
        assert until(lambda: serve(hooks, arrival()) or time.sleep(0.1) or collector.spans)
        assert until(lambda: "spans are sent again" in caplog.messages)


def test_a_collector_that_hangs_holds_nothing_up(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve and stop while a collector takes connections and never answers: it would be waited for for 10 seconds."""
    monkeypatch.setattr("ferrule_plugins.hooks.otlp._STOP_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hooks = opened(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(500):  # more than the queue has room for
            serve(hooks, arrival())
        hooks.process_stopping("api-0", 0)
        assert any("were not sent" in message for message in caplog.messages)
