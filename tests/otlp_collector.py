"""A collector of spans, which speaks OpenTelemetry's protocol over HTTP or gRPC as a real one does."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from ferrule_testkit.server import until


@dataclass(frozen=True)
class Received:
    """A span as it came. Ids are hexadecimal; times are nanoseconds since 1970. `status`: 0 unset, 2 an error."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    state: str  # W3C tracestate
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    status: int
    message: str
    resource: dict[str, Any]


@dataclass
class Collector:
    """What a collector has received, and where it listens. `path` is that of the last call over HTTP."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    path: str = ""

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            of = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [
                    Received(
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        state=span.trace_state,
                        kind=span.kind,
                        start=span.start_time_unix_nano,
                        end=span.end_time_unix_nano,
                        attributes=_values(span.attributes),
                        status=span.status.code,
                        message=span.status.message,
                        resource=of,
                    )
                    for span in scope.spans
                ]

    def requests(self, count: int = 1) -> list[Received]:
        """Wait for spans of so many requests in all, and return them in the order in which they began."""
        assert until(lambda: len(self._named("llm_request")) >= count), self.spans
        return sorted(self._named("llm_request"), key=lambda span: span.start)

    def children(self, parent: Received) -> list[Received]:
        """Return the children of a span that has come, in the order in which they began: they are sent before it."""
        found = [span for span in tuple(self.spans) if span.parent == parent.span_id]
        return sorted(found, key=lambda span: (span.start, span.end))

    def _named(self, name: str) -> list[Received]:
        return [span for span in tuple(self.spans) if span.name == name]


def _values(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def http_collector(port: int = 0) -> Iterator[Collector]:
    """Run a collector of http/protobuf, by default on a port of its own."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.path = self.path
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


@contextmanager
def grpc_collector(port: int = 0) -> Iterator[Collector]:
    """Run a collector of grpc, by default on a port of its own."""
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    yield collector
    server.stop(None).wait()
