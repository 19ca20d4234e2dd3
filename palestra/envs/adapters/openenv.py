"""Client env for OpenEnv servers, over their WebSocket protocol: one session per episode.

Only the protocol is implemented (reset, step, close as JSON over `/ws`), so the OpenEnv package, which depends on web
servers and user interfaces, is not required.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from types import ModuleType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from palestra.core.http.origin_middleware import is_loopback
from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, terms_info, total_rewards
from palestra.envs.support.answers import answer_text
from palestra.envs.support.options import RewardMode, check_range

INVALID_PENALTY = 0.1
SERVER_TERM = "server"  # the term of the server's rewards
MAX_MESSAGE_BYTES = 64 * 2**20  # maximum bytes of a message
CLOSE_TIMEOUT_S = 5.0  # seconds to wait for a server to end a session
ROLE_PROMPT = (
    "You act in an environment that tells you what it shows after each of your actions. Think briefly if you need to, "
    "then end your answer with #### and your action{form}."
)


class OpenEnv(Env):
    """The env of the OpenEnv server at `url`, with one seat "agent".

    The text after the last "####" of an answer is the action: a JSON object is sent as it is, any other text as the
    action's field `field`. An action rejected by the server's schema is flagged and costs 0.1; the last observation is
    repeated with the server's error. The agent observes all fields of the observation, or those listed in `show`.

    The server's rewards are passed on per step, or with `reward: outcome` summed at the end, as the term `server`.
    `success` is the server's metadata field of that name, or else a total reward of at least `success` in a finished
    episode. After `max_steps` actions the episode is truncated. `reset` holds extra fields of the reset message, beside
    the seed. If the server fails, or does not answer within `timeout` seconds, the episode fails.

    A fork opens a new session and replays the actions: the server must allow several sessions (`max_concurrent_envs`)
    and be deterministic given seed and actions.

    Raises ValueError if an option is out of range, or `reset` finds no server at `url`.
    """

    name: ClassVar[str] = "openenv"
    seats = ("agent",)

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        url: str,
        field: str = "message",
        show: list[str] | None = None,
        reset: dict[str, Any] | None = None,
        role: str | None = None,
        max_steps: int = 100,
        success: float = 1.0,
        timeout: float = 60.0,
        reward: RewardMode = "dense",
    ) -> None:
        check_range("max_steps", max_steps, 1, 100_000)
        check_range("timeout", timeout, 0.001, 86_400)
        self.url = _ws_url(url)
        self.field = field
        self.show = show
        self.options = dict(reset or {})
        self.steps = max_steps
        self.success = success
        self.timeout = timeout
        self.reward = reward
        if role is None:
            role = ROLE_PROMPT.format(form=f" ({field})" if field else " as a JSON object")
        self.roles = {"agent": role}
        self._session: _Session | None = None
        self._over = True

    async def reset(self, seed: int) -> Step:
        await self.close()
        self._seed = seed
        self._actions = list[dict[str, Any]]()
        self._total = 0.0
        self._owed = 0.0
        self._session = await _Session.open(self.url, self.timeout)
        reply = await self._session.ask("reset", {**self.options, "seed": seed})
        self._shown = self._text(reply)
        self._over = False
        self._count = 0
        return self._step(reply, {})

    async def step(self, actions: dict[Seat, Any]) -> Step:
        return await self._send(self._action(answer_text(actions["agent"])))

    async def _send(self, action: dict[str, Any]) -> Step:
        if self._over or self._session is None:
            raise ValueError("the game is over: call reset(seed) before step")
        self._count += 1
        try:
            reply = await self._session.ask("step", action)
        except ActionRejected as error:
            cost = INVALID_PENALTY if self.reward == "dense" else 0.0
            return self._step({}, {"agent": True}, f"{self._shown}\nYour action was refused: {error}", cost)
        self._actions.append(action)
        self._shown = self._text(reply)
        return self._step(reply, {"agent": False})

    async def fork(self) -> Self:
        """Replays the actions in a new session. Raises ValueError if the last observation differs."""
        twin = copy.copy(self)
        vars(twin)["_session"] = None  # keeps the original's session open
        try:
            await twin.reset(self._seed)
            for action in self._actions:
                await twin._send(action)
            if twin._shown != self._shown:
                raise ValueError(
                    f"{self.url} gave another observation when the same actions were replayed, so it cannot be forked "
                    "within an episode. Let the server draw from the seed, or set algorithm.branch_at: root"
                )
        except BaseException:  # also a cancellation: only this method knows the twin
            await twin.close()
            raise
        twin._count = self._count
        twin._over = self._over
        twin._total = self._total
        twin._owed = self._owed
        return twin

    async def close(self) -> None:  # callers await the result of `Env.close`
        if self._session:
            session = self._session
            self._session = None
            await session.close()

    # ---- actions and observations

    def _action(self, text: str) -> dict[str, Any]:
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            action = json.loads(text)
            if isinstance(action, dict):
                return action
        return {self.field: text}

    def _text(self, reply: dict[str, Any]) -> str:
        shown = reply.get("observation") or {}
        if not isinstance(shown, dict):
            return str(shown)
        names = [name for name in shown if name != "metadata"] if self.show is None else self.show
        if len(names) == 1:
            return _to_text(shown.get(names[0]))
        return "\n".join(f"{name}: {_to_text(shown.get(name))}" for name in names)

    def _step(self, reply: dict[str, Any], invalid: dict[Seat, bool], shown: str = "", cost: float = 0) -> Step:
        earned = float(reply.get("reward") or 0.0)
        self._total = self._total + earned
        self._owed = self._owed + earned
        done = bool(reply.get("done"))
        self._over = done or self._count >= self.steps
        paid = 0.0
        if self._over or self.reward == "dense":
            paid = self._owed
            self._owed = 0.0
        success = (reply.get("metadata") or {}).get("success")
        if not isinstance(success, bool):
            success = done and self._total >= self.success
        terms = {"agent": {SERVER_TERM: paid, FORM_TERM: 0.0 - cost}}
        info = {"success": success, "invalid": invalid} | terms_info(terms)
        seen = {} if self._over else {"agent": shown or self._shown}
        return Step(seen, total_rewards(terms), truncated=self._over and not done, info=info)


class ActionRejected(Exception):
    """The server rejected an action that does not match its schema; the message holds the reason."""


class _Session:
    """The WebSocket session of one episode."""

    def __init__(self, url: str, timeout: float, socket: Any) -> None:
        self.url = url
        self.timeout = timeout
        self.socket = socket
        self.silent = False

    @classmethod
    async def open(cls, url: str, timeout: float) -> _Session:
        """Connects to `url`. Raises ValueError if no server answers."""
        # a proxy cannot reach servers on this machine
        proxy = None if is_loopback(urlsplit(url).hostname or "") else True
        client = _websockets().asyncio.client
        try:
            socket = await client.connect(url, open_timeout=timeout, max_size=MAX_MESSAGE_BYTES, proxy=proxy)
        except (OSError, _websockets().exceptions.WebSocketException) as error:
            raise ValueError(f"no OpenEnv server answers at {url}: {error}; start it, or correct url") from error
        return cls(url, timeout, socket)

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the reply's data: observation, reward, done, metadata.

        Raises ActionRejected if the server rejects the action, RuntimeError on any other server error, TimeoutError if
        no reply arrives within the timeout.
        """
        closed = _websockets().exceptions.ConnectionClosed
        try:
            async with asyncio.timeout(self.timeout):
                with contextlib.suppress(closed):  # a server at capacity sends its error and disconnects immediately
                    await self.socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self.socket.recv())
        except TimeoutError:
            self.silent = True
            raise TimeoutError(f"{self.url} did not answer a {kind} for {self.timeout:g} s: see timeout") from None
        except closed as error:
            raise RuntimeError(f"{self.url} closed the connection at a {kind}: {error}") from error
        reply = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(reply)
        # of an invalid action one message per field
        errors = [one for one in reply.get("errors") or () if isinstance(one, dict)]
        fields = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors]
        why = "; ".join(fields) or str(reply.get("message", "it does not say why"))
        code = reply.get("code")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ActionRejected(why)
        fix = "; let the server hold more (max_concurrent_envs)" if code == "CAPACITY_REACHED" else ""
        raise RuntimeError(f"{self.url} failed at a {kind} with {code}: {why}{fix}")

    async def close(self) -> None:
        """Ends the session and waits for the server to release it; capacity may be limited. No wait after a timeout."""
        with contextlib.suppress(TimeoutError, _websockets().exceptions.ConnectionClosed):
            async with asyncio.timeout(0 if self.silent else CLOSE_TIMEOUT_S):
                await self.socket.send(json.dumps({"type": "close"}))
                await self.socket.wait_closed()
        self.socket.transport.abort()
        await self.socket.wait_closed()


def _websockets() -> ModuleType:
    try:
        import websockets.asyncio.client
        import websockets.exceptions
    except ImportError as error:
        raise ValueError(f"OpenEnv servers need the package {error.name}: pip install 'palestra[openenv]'") from error
    module: ModuleType = websockets
    return module


def _ws_url(url: str) -> str:
    """Returns the WebSocket address of a server: http://host:8000 becomes ws://host:8000/ws."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    known = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not mark or scheme not in known or not rest:
        raise ValueError(f"url: {url} is not an address of a server; give one such as http://localhost:8000")
    return f"{known[scheme]}://{rest.removesuffix('/ws')}/ws"


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
