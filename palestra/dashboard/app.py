"""The dashboard's server: the built page, the API, and server-sent events on changes.

app = build_dashboard(Path("runs"), token="", hosts=[])
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from palestra.core.files import DamagedFile, to_json_types
from palestra.core.http.limits import AsgiApp, HttpLimits
from palestra.core.http.listen import open_listener, url_host
from palestra.core.http.origin_middleware import is_loopback
from palestra.core.http.server import HttpServer, build_server
from palestra.dashboard.api import DashboardApi
from palestra.dashboard.auth import guard, with_token
from palestra.dashboard.catalog import NotFound, RunCatalog
from palestra.dashboard.run_status import file_stamp
from palestra.dashboard.training_server import TrainingServer
from palestra.runs.metric_log import PARSE_ERRORS

STATIC = Path(__file__).parent / "static"
SWITCH_INTERVAL_S = (
    0.001  # seconds of Python's thread switch interval: short, so that indexing threads do not delay requests
)
LIMITS = HttpLimits(max_body_bytes=2**14)  # no request has a body
POLL_INTERVAL_S = 1.0  # seconds between two reads of file stamps
MAX_STREAMS = 200  # event streams open at once
KEEPALIVE_S = 15.0  # seconds without an event after which a keep-alive comment is sent
EPISODE_PATH = "/api/runs/{run}/episodes/{step:int}/{episode:int}"
LOG = logging.getLogger("uvicorn.error")


def build_dashboard(
    root: Path,
    token: str = "",
    hosts: Collection[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
    engine: str = "",
) -> AsgiApp:
    """Returns the ASGI app over the runs in `root`, and over the training server at `engine`. Event streams end once
    `is_stopping()` is true. Raises ValueError if `root` is not a folder of runs, or `engine` not an address."""
    library = RunCatalog(root)
    api = DashboardApi(library)
    addresses: dict[str, Callable[[Request], Any]] = {
        "/api/server": TrainingServer(engine).view,
        "/api/runs": api.runs,
        "/api/curves": api.curves,
        "/api/metrics": api.metrics,
        "/api/difference": api.difference,
        "/api/runs/{run}": api.run,
        "/api/runs/{run}/config": api.config,
        "/api/runs/{run}/alarms": api.alarms,
        "/api/runs/{run}/system": api.system,
        "/api/runs/{run}/episodes": api.episodes,
        EPISODE_PATH: api.tree,
        EPISODE_PATH + "/words/{node:int}": api.words,
        EPISODE_PATH + "/tokens/{node:int}": api.tokens,
        "/api/runs/{run}/replays": api.replays,
        "/api/runs/{run}/replays/{name:path}": api.replay,
        "/api/runs/{run}/population": api.population,
        "/api/runs/{run}/agents": api.agents,
    }
    downloads = {
        "/api/runs/{run}/checkpoints/{step:int}/{policy}.zip": api.weights,
        "/api/runs/{run}/members/{member}.zip": api.member,
    }
    asks = {path: partial(_answer_json, ask) for path, ask in addresses.items()} | downloads
    routes = [Route(path, ask, methods=["GET"]) for path, ask in asks.items()]
    routes.append(Route("/api/events", partial(events, RunWatcher(library), is_stopping), methods=["GET"]))
    static = Mount("/", StaticFiles(directory=STATIC, html=True))
    app = Starlette(routes=[*routes, static], exception_handlers=ERROR_HANDLERS)
    return guard(GZipMiddleware(app, minimum_size=2048), token, hosts, LIMITS)


def json_response(request: Request, tree: Any) -> Response:
    """Returns `tree` as JSON with an ETag; 304 without a body if the client has that version."""
    text = json.dumps(to_json_types(tree), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")  # JSON may hold a lone surrogate, which UTF-8 cannot encode
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})


def _answer_json(ask: Callable[[Request], Any], request: Request) -> Response:
    return json_response(request, ask(request))


def error_handler(status: int) -> Callable[[Request, Exception], Response]:
    """Returns an exception handler that answers with `status` and the message as JSON."""
    return lambda request, error: JSONResponse({"error": str(error)}, status)


def _answer_unreadable(request: Request, error: Exception) -> Response:
    LOG.warning("%s", request.url.path, exc_info=error)
    return JSONResponse({"error": f"the run's files are not as palestra writes them: {error!r}"}, 422)


ERROR_HANDLERS: dict[Any, Any] = {
    NotFound: error_handler(404),
    DamagedFile: error_handler(422),
    ValueError: error_handler(400),
    **dict.fromkeys((OSError, *PARSE_ERRORS), _answer_unreadable),
}


class RunWatcher:
    """The file stamps of runs, read once per `POLL_INTERVAL_S` for all event streams together."""

    def __init__(self, library: RunCatalog) -> None:
        self.library = library
        self.num_streams = 0
        self._looks: dict[str | None, tuple[float, asyncio.Task[dict[str, tuple[int, ...]]]]] = {}

    async def current_stamps(self, name: str | None) -> dict[str, tuple[int, ...]]:
        """Returns run -> numbers that change when the run does, at most `POLL_INTERVAL_S` seconds old; for all runs if
        `name` is None."""
        now = time.monotonic()
        at, look = self._looks.get(name, (0.0, None))
        if look is None or (look.done() and now - at >= POLL_INTERVAL_S):
            self._looks = {
                name: (at, look)
                for name, (at, look) in self._looks.items()
                if now - at <= KEEPALIVE_S or not look.done()
            }
            look = asyncio.create_task(run_in_threadpool(run_stamps, self.library, name))
            self._looks[name] = (now, look)
        return await asyncio.shield(look)


async def events(watcher: RunWatcher, is_stopping: Callable[[], bool], request: Request) -> Response:
    """Streams a server-sent event whenever a log of the run (`?run=NAME`), or of any run, changes. 429 beyond
    `MAX_STREAMS` streams."""
    name = request.query_params.get("run")
    if name is not None:
        watcher.library.run(name)
    if watcher.num_streams >= MAX_STREAMS:
        return JSONResponse({"error": f"{MAX_STREAMS} pages listen already: close some"}, 429, {"Retry-After": "10"})
    return EventStream(watcher, change_events(watcher, name, is_stopping))


class EventStream(StreamingResponse):
    """A response of server-sent events, counted in `watcher.num_streams` from its first step to its last.

    Not from its first event: requests that arrive together would all be admitted before one of them counts.
    """

    def __init__(self, watcher: RunWatcher, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.watcher.num_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.watcher.num_streams -= 1


async def change_events(watched: RunWatcher, name: str | None, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yields the text of server-sent events until the client disconnects or `ending()` is true."""
    before: dict[str, tuple[int, ...]] | None = None
    quiet = 0.0
    while not ending():
        now = await watched.current_stamps(name)
        if before is None or now != before:
            changed = [run for run in now if before is not None and before.get(run) != now[run]]
            yield f"event: change\ndata: {json.dumps(changed)}\n\n"
            quiet = 0.0
        elif quiet >= KEEPALIVE_S:
            yield ": still here\n\n"
            quiet = 0.0
        before = now
        await asyncio.sleep(POLL_INTERVAL_S)
        quiet += POLL_INTERVAL_S


def run_stamps(library: RunCatalog, name: str | None) -> dict[str, tuple[int, ...]]:
    """Returns run -> numbers that change when the run does; for all runs if `name` is None."""
    names = library.names() if name is None else [name]
    stamps = {}
    for each in names:
        episodes = library.root / each / "episodes"
        stamps[each] = (*file_stamp(library.root / each), episodes.stat().st_mtime_ns if episodes.is_dir() else 0)
    return stamps


def serve(
    root: Path,
    host: str,
    port: int,
    token: str,
    hosts: Collection[str],
    engine: str,
    print_line: Callable[[str], None],
) -> None:
    """Serves the dashboard until a stop signal. Raises ValueError if `root` is not a folder of runs, `engine` not an
    address, or the port is taken."""
    names = {host, socket.gethostname(), *hosts}
    server: HttpServer | None = None
    app = build_dashboard(
        root, token, {name.lower() for name in names}, lambda: server is not None and server.should_exit, engine
    )
    listener = open_listener(host, port)
    address = f"http://{url_host(host)}:{listener.getsockname()[1]}/"
    if not is_loopback(host) and not token:
        shown = "these runs and what their training server does" if engine else "these runs"
        print_line(
            f"warning: anyone who reaches {host} can read {shown}; protect them: --token {secrets.token_urlsafe(12)}"
        )
    print_line(f"dashboard: {with_token(address, token)}")
    server = build_server(app, drain=5, keep_alive=5)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server.run(sockets=[listener])
