"""A collector of traces over OTLP/HTTP in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Span(NamedTuple):
    """An exported span; `parent` is "" for the root of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    process: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """The received spans, and the address to send them to."""

    def __init__(self, url: str) -> None:
        self.url, self.spans = url, list[Span]()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            facts = _plain(resource.resource.attributes)
            assert facts["service.name"] == "palestra" and facts["host.name"]
            for span in [span for scope in resource.scope_spans for span in scope.spans]:
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                self.spans.append(Span(span.name, *ids, facts["process.pid"], *times, _plain(span.attributes)))

    def trace(self, of: Span) -> list[Span]:
        """All spans of the trace of a span."""
        return [span for span in self.spans if span.trace == of.trace]

    def named(self, name: str, **attributes: Any) -> list[Span]:
        """The spans with this name and these attributes, in the order of their starts."""
        found = [span for span in self.spans if span.name == name and attributes.items() <= span.attributes.items()]
        return sorted(found, key=lambda span: span.start_ns)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            found.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
