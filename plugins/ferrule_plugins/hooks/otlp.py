"""`otlp`: a span for each request, sent to an OpenTelemetry collector (``--otlp-traces-endpoint``).

A request is one span, `llm_request`, whichever API process serves it and however many choices it has; its children are
the phases, for each choice those in the engine. It is made of what hooks are told anyway: a span is begun when the
engine gets the request, which is when the sampler decides, and what was not sampled is forgotten at once. All else is
done when the last choice has ended, with the instants of the phases, so no token costs anything. Spans leave by the
SDK's batch processor: a thread of its own with a bounded queue, which drops spans when the collector is slow or absent.

Attributes have the names of vLLM's spans, and those of OpenTelemetry's conventions for generative AI:
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

import ferrule
from ferrule.env import trace_protocol
from ferrule.errors import ConfigError, FerruleError
from ferrule.interfaces.hooks import Arrival, Hooks
from ferrule.interfaces.stats import RequestStats
from ferrule.log import Log
from ferrule.sampling_params import SamplingParams
from ferrule.types import FinishReason, RequestTimes, StepSeconds

if TYPE_CHECKING:
    from ferrule.config import ServerSettings

_STOP_SECONDS = 3.0  # for the spans that are left when a process ends
_PATH = "/v1/traces"  # of a collector that speaks HTTP
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
_LOGGERS_OF_HEADERS = (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation",
    "opentelemetry.trace.span",
)
_log = Log("traces")


class Otlp(Hooks):
    """Hooks that send spans. In processes that serve no requests they do nothing."""

    only_with = "otlp_traces_endpoint"

    def __init__(self) -> None:
        self._exporter: _Watched | None = None
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer = trace.NoOpTracer()
        self._requests: dict[str, _Request] = {}  # sampled ones, by the engine's id of each choice that runs
        self._told: Arrival | None = None  # the last request that was admitted
        self._sampled: _Request | None = None  # the same request, if it was sampled

    def process_started(self, process: str, config: ServerSettings) -> None:
        endpoint = config.observability.otlp_traces_endpoint
        if endpoint is None or process.startswith("engine"):
            return
        exporter, provider = _open(endpoint)
        if process == "launcher":  # which only checks that it can be done, before a model is loaded
            provider.shutdown()
            return
        for name in _LOGGERS_OF_HEADERS:  # what a client writes into its headers is no concern of the log
            logging.getLogger(name).setLevel(logging.ERROR)
        self._exporter, self._provider = exporter, provider
        self._tracer = provider.get_tracer("ferrule", ferrule.__version__)

    def process_stopping(self, process: str, status: int) -> None:
        if self._provider is None or self._exporter is None:
            return
        stopping = threading.Thread(target=self._provider.shutdown, name="ferrule-traces-stop", daemon=True)
        stopping.start()
        stopping.join(_STOP_SECONDS)
        if stopping.is_alive():
            self._exporter.give_up("spans were not sent: the collector does not answer")

    def request_refused(self, model: str, error: FerruleError, arrival: Arrival) -> None:
        span = self._begin(arrival)
        if span.is_recording():
            status = getattr(error, "status", 500)
            span.set_attributes(
                {
                    "gen_ai.request.model": model,
                    "error.type": type(error).__name__,
                    "http.response.status_code": status,
                }
            )
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()

    def request_admitted(
        self, request_id: str, model: str, prompt_tokens: int, params: SamplingParams | None, arrival: Arrival
    ) -> None:
        if arrival is not self._told:
            span = self._begin(arrival)
            self._told = arrival
            self._sampled = None
            if span.is_recording():
                self._sampled = _Request(span, model, params, arrival)
        if self._sampled is not None:
            self._sampled.ids.append(request_id)
            self._requests[request_id] = self._sampled

    def request_finished(self, request_id: str, stats: RequestStats) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.ended[request_id] = stats, time.monotonic()
        if len(request.ended) == request.arrival.num_choices:
            request.send(self._tracer)

    def _begin(self, arrival: Arrival) -> Span:
        """Begin the span of a request, as a child of the span that is current, or else of the client's."""
        outer = trace.get_current_span().get_span_context().is_valid  # a middleware may have begun one
        parent = get_current() if outer else propagate.extract(arrival.headers)
        return self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=_to_epoch()(arrival.at))


@dataclass(eq=False)
class _Request:
    """A request that was sampled. `ended` has the figures of the choices that have ended, each with the instant.

    `ids` are the engine's ids of the choices, in their order; the first is in the log.
    """

    span: Span
    model: str
    params: SamplingParams | None
    arrival: Arrival
    ids: list[str] = field(default_factory=list)
    ended: dict[str, tuple[RequestStats, float]] = field(default_factory=dict)

    def send(self, tracer: trace.Tracer) -> None:
        """End the span, with its attributes, and make those of the phases."""
        epoch, inside = _to_epoch(), trace.set_span_in_context(self.span)
        choices = [self.ended[id][0] for id in self.ids]
        self.span.set_attributes({**self._asked(choices[0]), **self._answered(choices)})
        failed = next((stats for stats in choices if stats.finish is FinishReason.ERROR), None)
        if failed is not None:
            self.span.set_attribute("error.type", "RequestFailed")
            self.span.set_status(Status(StatusCode.ERROR, failed.error))
        for phase in self._phases():
            phase.send(tracer, inside, epoch)
        self.span.end(epoch(max(instant for _, instant in self.ended.values())))

    def _asked(self, first: RequestStats) -> Mapping[str, Any]:
        """Return the attributes that are about the request."""
        params = self.params
        operation = "embeddings" if params is None else "chat" if self.arrival.chat else "text_completion"
        asked: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ferrule",
            "gen_ai.request.id": self.arrival.answer_id or self.ids[0],
            "ferrule.request.id": self.ids[0],
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
        }
        if self.arrival.answer_id:
            asked["gen_ai.response.id"] = self.arrival.answer_id
        if params is not None:
            asked["gen_ai.request.n"] = params.n
            if params.n > 1:
                asked["gen_ai.request.choice.count"] = params.n
            asked["gen_ai.request.max_tokens"] = first.max_tokens
            names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
            values = {name: getattr(params, name) for name in names}
            asked |= {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}
        return asked

    def _answered(self, choices: Sequence[RequestStats]) -> Mapping[str, Any]:
        """Return the attributes that are about the answer. Of several choices, the longest time counts."""
        arrival = self.arrival
        per_prompt = max(1, arrival.num_choices // max(1, arrival.num_prompts))
        read = sum(stats.prompt_tokens for stats in choices) // per_prompt
        written = sum(stats.generation_tokens for stats in choices)
        answered: dict[str, Any] = {
            "gen_ai.response.finish_reasons": [stats.finish.value for stats in choices],
            "gen_ai.usage.prompt_tokens": read,
            "gen_ai.usage.completion_tokens": written,
            "gen_ai.usage.input_tokens": read,
            "gen_ai.usage.output_tokens": written,
            "gen_ai.usage.cache_read.input_tokens": sum(stats.cached_tokens for stats in choices) // per_prompt,
            "gen_ai.latency.time_in_queue": max(stats.queue_time for stats in choices),
            "gen_ai.latency.time_in_model_prefill": max(stats.prefill_time for stats in choices),
            "gen_ai.latency.time_in_model_decode": max(stats.decode_time for stats in choices),
            "gen_ai.latency.time_in_model_inference": max(stats.inference_time for stats in choices),
            "gen_ai.latency.e2e": max(stats.end_to_end for stats in choices),
        }
        first = [stats.time_to_first_token for stats in choices if stats.time_to_first_token]
        if first:
            answered["gen_ai.latency.time_to_first_token"] = min(first)
        measured = [stats.times.seconds for stats in choices if stats.times and stats.times.seconds]
        return answered | _measured(measured)

    def _phases(self) -> Iterator[_Phase]:
        arrival = self.arrival
        if arrival.rendered:
            yield _Phase("render", arrival.read_from, arrival.rendered)
        yield _Phase("tokenize", arrival.rendered or arrival.read_from, arrival.read)
        if arrival.constrained:
            yield _Phase("compile", arrival.read, arrival.submitted)
        for number, id in enumerate(self.ids):
            stats, ended = self.ended[id]
            choice = {"ferrule.choice": number} if len(self.ids) > 1 else {}
            for phase in _in_engine(stats, arrival.submitted, ended):
                yield _Phase(phase.name, phase.begin, phase.end, {**choice, **phase.attributes})


@dataclass(frozen=True)
class _Phase:
    """A part of a request's time, in seconds on the monotonic clock. Without an end or a beginning it did not come."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def send(self, tracer: trace.Tracer, inside: Context, epoch: Callable[[float], int]) -> None:
        if self.begin and self.end >= self.begin:
            span = tracer.start_span(self.name, inside, attributes=self.attributes, start_time=epoch(self.begin))
            span.end(epoch(self.end))


def _in_engine(stats: RequestStats, submitted: float, ended: float) -> Iterator[_Phase]:
    """Yield the phases of one choice. The phase in which a choice was ended lasts until its end."""
    times = stats.times or RequestTimes()
    finished = times.finished or ended
    yield _Phase("queue", submitted, times.scheduled or finished)
    prompt = {"gen_ai.usage.prompt_tokens": stats.prompt_tokens, "ferrule.cached_tokens": stats.cached_tokens}
    yield _Phase("prefill", times.scheduled, times.first_token or finished, prompt)
    written = {"gen_ai.usage.completion_tokens": stats.generation_tokens}
    yield _Phase("decode", times.first_token, finished, written)
    yield _Phase("parse", times.finished, ended)  # what is left of the text when the engine has ended: its last output


def _measured(choices: Sequence[StepSeconds]) -> dict[str, float]:
    """Return what --collect-detailed-traces has measured."""
    if not choices:
        return {}
    found = {
        "gen_ai.latency.time_in_scheduler": max(seconds.scheduler for seconds in choices),
        "gen_ai.latency.time_in_model_execute": max(seconds.execute for seconds in choices),
    }
    forward = max(seconds.forward for seconds in choices)
    return found | ({"gen_ai.latency.time_in_model_forward": forward} if forward else {})


def _to_epoch() -> Callable[[float], int]:
    """Return a function from seconds on the monotonic clock to nanoseconds since 1970, as the clocks are now."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda instant: offset + int(instant * 1e9)


def _open(endpoint: str) -> tuple[_Watched, TracerProvider]:
    """Return an exporter, and a provider of spans with a thread that sends them. Raises ConfigError, also for variables
    of OpenTelemetry that the SDK refuses.
    """
    try:
        exporter = _Watched(_exporter_of(endpoint, trace_protocol()))
        named = {SERVICE_NAME: "ferrule", SERVICE_VERSION: ferrule.__version__}
        resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"--otlp-traces-endpoint: {error}: pip install 'ferrule[otel]' brings it.") from error
    except Exception as error:  # the SDK has no class of its own for values that it does not understand
        raise ConfigError(f"--otlp-traces-endpoint: OpenTelemetry refuses a variable OTEL_…: {error}") from error
    return exporter, provider


def _exporter_of(endpoint: str, protocol: str) -> SpanExporter:
    """Return the exporter for a protocol. Raises ConfigError, and what the SDK raises for its variables."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint)
    if protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol!r:.80}: use grpc or http/protobuf.")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint!r:.120}: with http/protobuf, give a URL of http or https.")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    url = endpoint if parts.path.strip("/") else parts._replace(path=_PATH).geturl()
    return Http(endpoint=url)


class _Watched(SpanExporter):
    """An exporter that logs one line when spans cannot be sent, and one when they can be again.

    The SDK logs each attempt, from several loggers: these now tell this object alone.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.propagate = False
            logger.handlers = [_Handler(self._fail)]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._fail("the collector does not take them")
        elif self._failing:
            self._failing = False
            _log.info("spans are sent again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def give_up(self, reason: str) -> None:
        """Stop sending at once. The reason is the last line that is logged."""
        _log.warning(reason)
        self._failing = True
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _fail(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            _log.warning("spans cannot be sent now, and are dropped if that lasts: %s", reason)


class _Handler(logging.Handler):
    """A handler that passes the text of warnings on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())
