"""Measures the cost of a span: `python bench/tracing.py` prints its CPU time with tracing off and on, export included.

With tracing on, spans go to a collector in another process. Each of five rounds has ten thousand spans; the best
counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

from palestra.core.tracing import span, tracing_to

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish

SPANS, ROUNDS = 10_000, 5


class Collector(BaseHTTPRequestHandler):
    """A collector that answers every request with 200 and drops the spans."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


def serve(pipe: Connection) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    pipe.send(server.server_address[1])
    server.serve_forever()


def make_spans(pause_s: float) -> None:
    """Makes spans, with pauses so that none is dropped."""
    for number in range(SPANS):
        with span("episode", env="plan_path", instance=number):
            pass
        if pause_s and number % 500 == 499:
            time.sleep(pause_s)


def cpu_s(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) / SPANS


def traced(url: str) -> None:
    with tracing_to(url):
        make_spans(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: a smoke test")
    quick = parser.parse_args().quick
    here, there = multiprocessing.Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    collector.start()
    url = f"http://127.0.0.1:{here.recv()}"
    rounds = 1 if quick else ROUNDS
    off = min(cpu_s(lambda: make_spans(0.0)) for _ in range(rounds))
    on = min(cpu_s(lambda: traced(url)) for _ in range(rounds))
    finish("tracing", {"span_off_us": 1e6 * off, "span_on_us": 1e6 * on}, {}, is_stored=not quick)


if __name__ == "__main__":
    main()
