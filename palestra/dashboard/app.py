"""The dashboard's server: the built page, the API, and the events that say that something is new.

app = dashboard(Path("runs"), token="", hosts=[])
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from palestra.dashboard.api import Api
from palestra.dashboard.facts import stamp
from palestra.dashboard.guard import App, Guard
from palestra.dashboard.library import Absent, Library
from palestra.web.door import bracketed, listening

STATIC = Path(__file__).parent / "static"
TURN = 0.001  # seconds after which a thread that counts files or sorts lets one go on that somebody waits for
LOOK = 1.0  # seconds between two looks at what somebody watches
QUIET = 15.0  # seconds after which a word says that the connection lives
EPISODE = "/api/runs/{run}/episodes/{step:int}/{episode:int}"
FOREIGN = (KeyError, IndexError, TypeError, AttributeError)  # files that somebody else wrote, or changed
LOG = logging.getLogger("uvicorn.error")
LOCAL = ("127.0.0.1", "localhost", "::1")


def dashboard(
    root: Path, token: str = "", hosts: Collection[str] = (), ending: Callable[[], bool] = lambda: False
) -> App:
    """The app over the runs in `root`; those who wait for events are let go once it is `ending`. Raises ValueError
    where that is no folder of runs."""
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
    routes.append(Route("/api/events", partial(events, library, ending), methods=["GET"]))
    static = Mount("/", StaticFiles(directory=STATIC, html=True))
    app = Starlette(routes=[*routes, static])
    return Guard(GZipMiddleware(app, minimum_size=2048), token, hosts)


def _told(ask: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Answers with what went wrong in words; starlette runs it on a thread."""

    def answer(request: Request) -> Response:
        try:
            return ask(request)
        except Absent as error:
            return JSONResponse({"error": str(error)}, 404)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        except FOREIGN as error:
            LOG.warning("%s", request.url.path, exc_info=True)
            return JSONResponse({"error": f"the run's files are not as palestra writes them: {error!r}"}, 422)

    return answer


async def events(library: Library, ending: Callable[[], bool], request: Request) -> Response:
    """A server-sent event whenever a log of the run (`?run=NAME`), or of any run, has changed."""
    name = request.query_params.get("run")
    try:
        if name is not None:
            library.run(name)
    except Absent as error:
        return JSONResponse({"error": str(error)}, 404)
    return StreamingResponse(changes(library, name, ending), media_type="text/event-stream")


async def changes(library: Library, name: str | None, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Text of server-sent events, as long as somebody listens."""
    before: dict[str, tuple[int, ...]] | None = None
    quiet = 0.0
    while not ending():
        now = await run_in_threadpool(stamps, library, name)
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
    """By run, numbers that change when it does."""
    names = library.names() if name is None else [name]
    return {each: (*stamp(library.root / each), _folder(library.root / each / "episodes")) for each in names}


def _folder(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_dir() else 0


def serve(root: Path, host: str, port: int, token: str, hosts: Collection[str], say: Callable[[str], None]) -> None:
    """Serves until it is told to stop. Raises ValueError where the folder or the port is not to be had."""
    names = {host, socket.gethostname(), *hosts}
    server: uvicorn.Server | None = None
    app = dashboard(root, token, {name.lower() for name in names}, lambda: server is not None and server.should_exit)
    door = listening(host, port)
    address = f"http://{bracketed(host)}:{door.getsockname()[1]}/"
    if host not in LOCAL and not token:
        say(f"warning: anybody who reaches {host} can read these runs; --token {secrets.token_urlsafe(12)} asks for it")
    say(f"dashboard: {address}{f'?token={token}' if token else ''}")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    sys.setswitchinterval(TURN)
    server.run(sockets=[door])
