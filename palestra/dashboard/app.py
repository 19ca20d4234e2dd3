"""The dashboard's server: the built page, the API, and server-sent events on changes.

app = dashboard(Path("runs"), token="", hosts=[])
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from palestra.dashboard.api import Api
from palestra.dashboard.facts import stamp
from palestra.dashboard.guard import Guard
from palestra.dashboard.library import Absent, Library
from palestra.dashboard.logs import FOREIGN
from palestra.web.door import bracketed, listening
from palestra.web.gate import App
from palestra.web.origins import is_loopback
from palestra.web.server import Server, stoppable

STATIC = Path(__file__).parent / "static"
TURN = 0.001  # seconds of Python's thread switch interval: short, so that indexing threads do not delay requests
LOOK = 1.0  # seconds between two reads of file stamps
STREAMS = 200  # event streams open at once
QUIET = 15.0  # seconds without an event after which a keep-alive comment is sent
EPISODE = "/api/runs/{run}/episodes/{step:int}/{episode:int}"
LOG = logging.getLogger("uvicorn.error")


def dashboard(
    root: Path, token: str = "", hosts: Collection[str] = (), ending: Callable[[], bool] = lambda: False
) -> App:
    """Returns the ASGI app over the runs in `root`. Event streams end once `ending()` is true. Raises ValueError if
    `root` is not a folder of runs."""
    library = Library(root)
    api = Api(library)
    addresses: dict[str, Callable[[Request], Response]] = {
        "/api/runs": api.runs,
        "/api/curves": api.curves,
        "/api/difference": api.difference,
        "/api/runs/{run}": api.run,
        "/api/runs/{run}/config": api.config,
        "/api/runs/{run}/alarms": api.alarms,
        "/api/runs/{run}/system": api.system,
        "/api/runs/{run}/episodes": api.episodes,
        EPISODE: api.tree,
        EPISODE + "/words/{node:int}": api.words,
        EPISODE + "/tokens/{node:int}": api.tokens,
        "/api/runs/{run}/population": api.population,
        "/api/runs/{run}/agents": api.agents,
        "/api/runs/{run}/checkpoints/{step:int}/{policy}.zip": api.weights,
        "/api/runs/{run}/members/{member}.zip": api.member,
    }
    routes = [Route(path, _told(ask), methods=["GET"]) for path, ask in addresses.items()]
    routes.append(Route("/api/events", partial(events, Watched(library), ending), methods=["GET"]))
    static = Mount("/", StaticFiles(directory=STATIC, html=True))
    app = Starlette(routes=[*routes, static])
    return Guard(GZipMiddleware(app, minimum_size=2048), token, hosts)


def _told(ask: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Wraps an API method: exceptions become JSON errors (404, 400, 422). Not async, so starlette runs it on a
    thread."""

    def answer(request: Request) -> Response:
        try:
            return ask(request)
        except Absent as error:
            return JSONResponse({"error": str(error)}, 404)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        except (OSError, *FOREIGN) as error:
            LOG.warning("%s", request.url.path, exc_info=True)
            return JSONResponse({"error": f"the run's files are not as palestra writes them: {error!r}"}, 422)

    return answer


class Watched:
    """The file stamps of the runs that event streams follow, read at most once per `LOOK` seconds for all streams
    together."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.streams = 0
        self._looks: dict[str | None, asyncio.Task[dict[str, tuple[int, ...]]]] = {}
        self._times: dict[str | None, float] = {}

    async def stamps(self, name: str | None) -> dict[str, tuple[int, ...]]:
        """Returns run -> numbers that change when the run does, at most `LOOK` seconds old; for all runs if `name` is
        None."""
        known, now = self._looks.get(name), time.monotonic()
        if known is None or (known.done() and now - self._times[name] >= LOOK):
            self._forget(now)
            known = asyncio.create_task(run_in_threadpool(stamps, self.library, name))
            self._looks[name], self._times[name] = known, now
        return await asyncio.shield(known)

    def _forget(self, now: float) -> None:
        for name in [name for name, at in self._times.items() if now - at > QUIET and self._looks[name].done()]:
            del self._looks[name], self._times[name]


async def events(watched: Watched, ending: Callable[[], bool], request: Request) -> Response:
    """Streams a server-sent event whenever a log of the run (`?run=NAME`), or of any run, changes. 429 beyond `STREAMS`
    streams."""
    name = request.query_params.get("run")
    try:
        if name is not None:
            watched.library.run(name)
    except Absent as error:
        return JSONResponse({"error": str(error)}, 404)
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 400)
    if watched.streams >= STREAMS:
        return JSONResponse({"error": f"{STREAMS} pages listen already: close some"}, 429, {"Retry-After": "10"})
    return StreamingResponse(changes(watched, name, ending), media_type="text/event-stream")


async def changes(watched: Watched, name: str | None, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yields the text of server-sent events until the client disconnects or `ending()` is true."""
    watched.streams += 1
    try:
        async for event in _changes(watched, name, ending):
            yield event
    finally:
        watched.streams -= 1


async def _changes(watched: Watched, name: str | None, ending: Callable[[], bool]) -> AsyncIterator[str]:
    before: dict[str, tuple[int, ...]] | None = None
    quiet = 0.0
    while not ending():
        now = await watched.stamps(name)
        if before is None or now != before:
            changed = [run for run in now if before is None or before.get(run) != now[run]]
            yield f"event: change\ndata: {json.dumps(changed if before is not None else [])}\n\n"
            quiet = 0.0
        elif quiet >= QUIET:
            yield ": still here\n\n"
            quiet = 0.0
        before = now
        await asyncio.sleep(LOOK)
        quiet += LOOK


def stamps(library: Library, name: str | None) -> dict[str, tuple[int, ...]]:
    """Returns run -> numbers that change when the run does; for all runs if `name` is None."""
    names = library.names() if name is None else [name]
    return {each: (*stamp(library.root / each), _folder(library.root / each / "episodes")) for each in names}


def _folder(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_dir() else 0


def serve(root: Path, host: str, port: int, token: str, hosts: Collection[str], say: Callable[[str], None]) -> None:
    """Serves the dashboard until a stop signal. Raises ValueError if `root` is not a folder of runs or the port is
    taken."""
    names = {host, socket.gethostname(), *hosts}
    server: Server | None = None
    app = dashboard(root, token, {name.lower() for name in names}, lambda: server is not None and server.should_exit)
    door = listening(host, port)
    address = f"http://{bracketed(host)}:{door.getsockname()[1]}/"
    if not is_loopback(host) and not token:
        say(f"warning: anybody who reaches {host} can read these runs; --token {secrets.token_urlsafe(12)} asks for it")
    say(f"dashboard: {address}{f'?token={token}' if token else ''}")
    server = stoppable(app, drain=5, keep_alive=5)
    sys.setswitchinterval(TURN)
    server.run(sockets=[door])
