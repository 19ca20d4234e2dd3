"""Games that a person plays, or looks on, in the browser: the turns, and what the page may show.

A player's page receives exactly the `Query` that a policy at the person's seat would receive: observations and answers
of other seats only as far as the env shows them to this seat. After the game it receives the whole episode. A page that
looks on receives the turns of all seats as they end.

Everything runs on one event loop, which plays the games and serves the pages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

from palestra.core.types import Answer, Episode, Node, Seat
from palestra.dashboard.trees import episode_texts
from palestra.text.policies.base import Policy, Query
from palestra.text.rollouts.metrics import episode_metrics, seat_returns

MAX_SESSIONS = 32  # open games
WATCH_PACE_S = 1.0  # seconds to read a turn, where a person looks on
IDLE_TIMEOUT_S = 60.0  # seconds without a connected page after which a game ends; a page reload takes less

PlayEpisode = Callable[[int, Any], Awaitable[Episode]]  # the instance, and `ask` or `show_turn` of a session


class OutOfTurn(Exception):
    """Raised for an answer that is not expected now; the message says why."""


class Resigned(Exception):
    """Raised in a game whose player resigned; it ends the episode."""


class GameSetup(NamedTuple):
    """Settings shared by all games of a server: the env, the policy at each seat, and the person's seat `human_seat`
    ("": the person looks on). `rules` are shown if the env's role text of that seat does not contain them."""

    env: str
    seats: dict[Seat, str]
    human_seat: Seat
    rules: str = ""
    picture: str = ""  # `Env.picture`


class PlaySession:
    """One game in progress: the policy at the person's seat calls `ask`, the page calls `answer` and `resign`."""

    def __init__(self, setup: GameSetup, seed: int) -> None:
        self.setup = setup
        self.seed = seed
        self.id = secrets.token_urlsafe(16)  # an unguessable id: knowing it is the permission to play
        self.state_version = 0
        self.num_viewers = 0  # connected event streams
        self.closed = False  # closed before the episode ended
        self.idle_timer: asyncio.TimerHandle | None = None  # ends the game if no page is connected by then
        self._turns: list[tuple[Seat, Any, Answer]] = []  # those that the page may show
        self._running = asyncio.Event()  # not set: paused
        self._running.set()
        self._role = ""
        self._asked: tuple[Query, asyncio.Future[str]] | None = None
        self.resigned = False
        self._episode: Episode | None = None
        self._news = asyncio.Event()

    async def ask(self, query: Query) -> str:
        """Waits for the person's answer and returns it. Raises Resigned if the person resigned."""
        if self.resigned:
            raise Resigned
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._role = query.role
        self._asked = (query, answer)
        self._tell()
        return await answer

    def answer(self, turn: int, text: str) -> None:
        """Answers the person's turn number `turn` (from 0). Raises OutOfTurn if that turn is not the open one."""
        if self._episode or self.closed:
            raise OutOfTurn("the game is over: nothing is asked any more")
        if turn < len(self._turns):
            raise OutOfTurn(f"turn {turn} is answered already: this was not taken")
        if self._asked is None or turn > len(self._turns):
            raise OutOfTurn("it is not your turn: nothing is asked of your seat now")
        query, answer = self._asked
        self._turns.append((self.setup.human_seat, query.observation, Answer(text, "human")))
        self._asked = None
        answer.set_result(text)
        self._tell()

    async def show_turn(self, seat: Seat, policy: Policy, query: Query) -> list[Answer]:
        """Returns the policy's answers after showing them, unless the game is paused: then it waits first."""
        await self._running.wait()
        answers = await policy.act(query)
        self._turns.append((seat, query.observation, answers[0]))
        self._tell()
        await asyncio.sleep(WATCH_PACE_S)
        return answers

    def pause(self, paused: bool) -> None:
        """Holds the game that is looked on before its next turn, or lets it go on."""
        if paused:
            self._running.clear()
        else:
            self._running.set()
        self._tell()

    def resign(self) -> None:
        """Ends the game by resignation: at once if the person is asked, otherwise at their next turn."""
        self.resigned = True
        if self._asked:
            self._asked[1].set_exception(Resigned())
            self._asked = None

    def finish(self, episode: Episode) -> None:
        """Stores the episode and cancels an open question: another seat may have failed."""
        self._episode = episode
        self._take_back()

    def close(self) -> None:
        """Closes the game: wakes all waiters of `wait_for_change`."""
        self.closed = True
        self._take_back()

    def _take_back(self) -> None:
        if self._asked:
            self._asked[1].cancel()
            self._asked = None
        self._tell()

    def _tell(self) -> None:
        self.state_version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for_change(self, known_version: int, timeout_s: float) -> bool:
        """Waits for `state_version` to change, at most `timeout_s`; returns whether it did."""
        if self.state_version == known_version:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    # ---- state for the page

    def state(self) -> dict[str, Any]:
        """Returns all that the page shows, ready for JSON."""
        rules = self.setup.rules
        if rules in self._role:
            rules = ""
        legal_actions = []
        if self._asked:
            legal_actions = [str(word) for word in self._asked[0].legal_actions or []]
        state = {
            "env": self.setup.env,
            "picture": self.setup.picture,
            "seat": self.setup.human_seat,
            "seats": self.setup.seats,
            "rules": rules,
            "turn": len(self._turns),
            "now": self._now(),
            "role": self._role,
            "legal_actions": legal_actions,
            "line": episode_texts(self._episode or self._so_far()),
            "end": None,
        }
        if self._episode:
            state["end"] = self._end(self._episode)
        return state

    def _now(self) -> str:
        if self._episode:
            return "over"
        if not self.setup.human_seat:
            return "watching" if self._running.is_set() else "paused"
        return "asked" if self._asked else "waiting"

    def _so_far(self) -> Episode:
        """Returns an episode of the turns that may be shown and the open question."""
        seat = self.setup.human_seat
        nodes: list[Node] = []
        parent = None
        for number, (of, seen, answer) in enumerate(self._turns):
            nodes.append(Node(number, parent, number, {of: seen}, {of: answer}))
            parent = number
        if self._asked:
            nodes.append(Node(len(nodes), parent, len(nodes), {seat: self._asked[0].observation}, {}))
        return Episode(self.setup.env, self.seed, self.setup.seats, nodes)

    def _end(self, episode: Episode) -> dict[str, Any]:
        """Returns the outcome. The reason of a failure is not sent to the page: it may name addresses and files."""
        head: dict[str, Any] = {"instance": episode.seed, "gave_up": self.resigned, "failed": episode.error is not None}
        if episode.error:
            return head | {"success": None, "team": 0.0, "returns": {}}
        metrics = episode_metrics([episode])
        success = bool(metrics["success"]) if "success" in metrics else None
        if (own := episode.seat_success.get(self.setup.human_seat)) is not None:
            success = bool(own)
        return head | {"success": success, "team": metrics.get("team_return", 0.0), **seat_returns([episode])}


class PlaySessions:
    """The open games of all pages, one instance number after another from `first_instance`. `print_line` prints why a
    game failed; a game that no page is connected to for `idle_timeout_s` seconds ends."""

    def __init__(
        self,
        play: PlayEpisode,
        setup: GameSetup,
        *,
        first_instance: int = 0,
        print_line: Callable[[str], None] = print,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._play = play
        self._setup = setup
        self._print_line = print_line
        self._idle_timeout_s = idle_timeout_s
        self._instances = count(first_instance)
        self._open: dict[str, tuple[PlaySession, asyncio.Task[None]]] = {}

    def start(self) -> PlaySession:
        """Starts a new game. Raises ValueError if `MAX_SESSIONS` games are open."""
        if len(self._open) >= MAX_SESSIONS:
            raise ValueError(f"{MAX_SESSIONS} games are open here: close the page of one, and come back in a minute")
        game = PlaySession(self._setup, next(self._instances))
        self._open[game.id] = game, asyncio.create_task(self._run(game))
        self.start_idle_timer(game)
        return game

    def find(self, name: str) -> PlaySession | None:
        """Returns the open game with this id; None if there is none."""
        return self._open[name][0] if name in self._open else None

    async def _run(self, game: PlaySession) -> None:
        on_turn = game.ask if game.setup.human_seat else game.show_turn
        episode = await self._play(game.seed, on_turn)
        if episode.error and not game.resigned:
            self._print_line(f"the game of instance {game.seed} ended early: {episode.error}")
        game.finish(episode)

    def start_idle_timer(self, game: PlaySession) -> None:
        """Starts the timer that ends the game if no page is connected to it after the idle timeout of the sessions."""
        if game.idle_timer:
            game.idle_timer.cancel()
        game.idle_timer = asyncio.get_running_loop().call_later(self._idle_timeout_s, self._drop, game)

    def _drop(self, game: PlaySession) -> None:
        if not game.num_viewers and game.id in self._open:
            self._open.pop(game.id)[1].cancel()
            game.close()

    def close(self) -> None:
        """Ends all games and their event streams."""
        for game, task in self._open.values():
            task.cancel()
            game.close()
        self._open.clear()
