"""The server of `palestra play --browser`: the built page and the JSON API of its games.

    POST /api/games                 starts a game of the next instance: {"id": ...}
    GET  /api/games/ID              the state that the page shows
    GET  /api/games/ID/events       a server-sent event whenever the state changes
    POST /api/games/ID/answer       {"turn": 0, "text": "..."}; 409 if that turn is not open
    POST /api/games/ID/give-up
    POST /api/games/ID/pause        {"paused": true}: of a game that is looked on (`palestra play --watch`)

Errors are `{"error": TEXT}`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from palestra.core.config import StrictModel, validate
from palestra.core.http.bodies import read_json
from palestra.core.http.limits import AsgiApp, HttpLimits
from palestra.core.http.listen import open_listener, url_host
from palestra.core.http.origin_middleware import is_loopback
from palestra.core.http.server import build_server
from palestra.dashboard.app import ERROR_HANDLERS, KEEPALIVE_S, STATIC, error_handler, json_response
from palestra.dashboard.auth import guard, with_token
from palestra.dashboard.catalog import NotFound
from palestra.dashboard.play_session import OutOfTurn, PlaySession, PlaySessions

LIMITS = HttpLimits(max_body_bytes=256 * 1024, max_requests=512)


class MoveRequest(StrictModel):
    """The body of POST /api/games/ID/answer."""

    turn: int
    """Number of the person's turn that this answers, from 0."""
    text: str
    """The answer."""


class PauseRequest(StrictModel):
    """The body of POST /api/games/ID/pause."""

    paused: bool
    """True: the game waits before its next turn; false: it goes on."""


def build_play_app(sessions: PlaySessions, token: str = "", hosts: Collection[str] = ()) -> AsgiApp:
    """Returns the ASGI app over `sessions`."""
    routes = [
        Route("/", lambda _: RedirectResponse("play"), methods=["GET"]),
        Route("/play", lambda _: FileResponse(STATIC / "index.html"), methods=["GET"]),
        Route("/api/games", partial(start_game, sessions), methods=["POST"]),
        Route("/api/games/{game}", partial(get_state, sessions), methods=["GET"]),
        Route("/api/games/{game}/events", partial(stream_events, sessions), methods=["GET"]),
        Route("/api/games/{game}/answer", partial(post_answer, sessions), methods=["POST"]),
        Route("/api/games/{game}/give-up", partial(post_resign, sessions), methods=["POST"]),
        Route("/api/games/{game}/pause", partial(post_pause, sessions), methods=["POST"]),
        Mount("/", StaticFiles(directory=STATIC)),
    ]
    handlers = {**ERROR_HANDLERS, OutOfTurn: error_handler(409)}
    app = GZipMiddleware(Starlette(routes=routes, exception_handlers=handlers), minimum_size=2048)
    return guard(app, token, hosts, LIMITS, cookie="palestra_play")


async def start_game(sessions: PlaySessions, request: Request) -> Response:
    """POST /api/games: starts a game."""
    return JSONResponse({"id": sessions.start().id}, 201)


async def get_state(sessions: PlaySessions, request: Request) -> Response:
    """GET /api/games/ID: returns the state that the page shows."""
    return json_response(request, _game(sessions, request).state())


async def post_answer(sessions: PlaySessions, request: Request) -> Response:
    """POST /api/games/ID/answer: answers the person's open turn."""
    game = _game(sessions, request)
    move = validate(MoveRequest, read_json(await request.body()))
    game.answer(move.turn, move.text)
    return JSONResponse({"turn": move.turn})


async def post_resign(sessions: PlaySessions, request: Request) -> Response:
    """POST /api/games/ID/give-up: resigns."""
    _game(sessions, request).resign()
    return JSONResponse({})


async def post_pause(sessions: PlaySessions, request: Request) -> Response:
    """POST /api/games/ID/pause: holds the game, or lets it go on."""
    game = _game(sessions, request)
    game.pause(validate(PauseRequest, read_json(await request.body())).paused)
    return JSONResponse({})


async def stream_events(sessions: PlaySessions, request: Request) -> Response:
    """GET /api/games/ID/events: streams an event whenever the state changes."""
    return StreamingResponse(change_events(sessions, _game(sessions, request)), media_type="text/event-stream")


async def change_events(sessions: PlaySessions, game: PlaySession) -> AsyncIterator[str]:
    """Yields the text of server-sent events while the game is open and the client is connected."""
    game.num_viewers += 1
    try:
        known = -1
        while not game.closed:
            if not await game.wait_for_change(known, KEEPALIVE_S):
                yield ": still here\n\n"
            elif not game.closed:
                known = game.state_version
                yield f"event: change\ndata: {known}\n\n"
    finally:
        game.num_viewers -= 1
        sessions.start_idle_timer(game)


def _game(games: PlaySessions, request: Request) -> PlaySession:
    game = games.find(request.path_params["game"])
    if game is None:
        raise NotFound("this game has ended: its page was closed, or the server was restarted")
    return game


def serve(sessions: PlaySessions, host: str, port: int, print_line: Callable[[str], None]) -> None:
    """Serves until a stop signal. For a `host` other than loopback it generates a token, which is part of the printed
    address. Raises ValueError if the port is taken."""
    token = "" if is_loopback(host) else secrets.token_urlsafe(12)
    listener = open_listener(host, port)
    address = f"http://{url_host(host)}:{listener.getsockname()[1]}/play"
    print_line(f"play at: {with_token(address, token)}")
    app = build_play_app(sessions, token, {host, socket.gethostname().lower()})
    build_server(app, drain=5, keep_alive=5, on_shutdown=sessions.close).run(sockets=[listener])
