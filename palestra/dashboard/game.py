"""A game that a person plays on a page: who is asked what, and what the page may know of it.

The page is told what a policy at the person's seat is told, a `Query`, and nothing else: what others see and say comes
to it only as far as the env shows it to this seat. Once the game is over it is told everything.

All of this happens on one event loop, which plays the games and serves the pages; who waits sleeps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

from palestra.dashboard.trees import told
from palestra.policies.base import Query
from palestra.policies.scripted import Ask
from palestra.rollouts.figures import seat_returns, summary
from palestra.types import Answer, Episode, Node, Seat

MOST = 32  # games at once
ALONE = 60.0  # seconds after which a game ends that no page looks at: a page that is loaded anew is back before

Play = Callable[[int, Ask], Awaitable[Episode]]


class OutOfTurn(Exception):
    """An answer that nobody waits for, and why."""


class GaveUp(Exception):
    """What ends the game of a person who wants no more of it."""


class Setting(NamedTuple):
    """What all games of a server have in common: the env, who sits where, and which seat is the person's. `rules` are
    for a person whose seat is told them in no more than a name."""

    env: str
    seats: dict[Seat, str]
    mine: Seat
    rules: str = ""


class Game:
    """One game: `ask` is the person's end of it, `answer` and `give_up` are the page's."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.seed = setting, seed
        self.id = secrets.token_urlsafe(16)  # whoever knows it may play
        self.changes = 0
        self.pages = 0  # that look at it
        self.left = False  # whether it ended before its end
        self.clock: asyncio.TimerHandle | None = None  # to when it ends if no page looks at it
        self._turns: list[tuple[Any, str]] = []  # what the person saw, and said
        self._role = ""
        self._asked: tuple[Query, asyncio.Future[str]] | None = None
        self.gave_up = False
        self._episode: Episode | None = None
        self._news = asyncio.Event()

    async def ask(self, query: Query) -> str:
        """The person's answer. Raises GaveUp where there is to be none."""
        if self.gave_up:
            raise GaveUp
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._role, self._asked = query.role, (query, answer)
        self._tell()
        return await answer

    def answer(self, turn: int, text: str) -> None:
        """Gives the answer of the person's turn number `turn` (from 0). Raises OutOfTurn where it is not its turn."""
        if self._episode or self.left:
            raise OutOfTurn("the game is over: nothing is asked any more")
        if turn < len(self._turns):
            raise OutOfTurn(f"turn {turn + 1} is answered already: this was not taken")
        if self._asked is None or turn > len(self._turns):
            raise OutOfTurn("it is not your turn: nothing is asked of your seat now")
        query, answer = self._asked
        self._turns.append((query.observation, text))
        self._asked = None
        answer.set_result(text)
        self._tell()

    def give_up(self) -> None:
        """Ends the game at once, or when the person would be asked next."""
        self.gave_up = True
        if self._asked:
            self._asked[1].set_exception(GaveUp())
            self._asked = None

    def end(self, episode: Episode) -> None:
        """Notes what came of it. It may have failed at another seat while the person was asked."""
        self._episode = episode
        self._take_back()

    def leave(self) -> None:
        """Lets those go who wait for news."""
        self.left = True
        self._take_back()

    def _take_back(self) -> None:
        if self._asked:
            self._asked[1].cancel()
            self._asked = None
        self._tell()

    def _tell(self) -> None:
        self.changes += 1
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, known: int, patience: float) -> bool:
        """Whether more has changed than `known` within `patience` seconds."""
        if self.changes == known:
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except TimeoutError:
                return False
        return True

    # ---- what the page is told

    def state(self) -> dict[str, Any]:
        """All that the page shows, as JSON has it."""
        seen = self._episode or self._so_far()
        return {
            "env": self.setting.env,
            "seat": self.setting.mine,
            "seats": self.setting.seats,
            "rules": "" if self.setting.rules in self._role else self.setting.rules,
            "turn": len(self._turns),
            "now": "over" if self._episode else "asked" if self._asked else "waiting",
            "role": self._role,
            "legal": [str(word) for word in self._asked[0].legal or []] if self._asked else [],
            "line": told(seen),
            "end": self._end(self._episode) if self._episode else None,
        }

    def _so_far(self) -> Episode:
        """The person's own turns, and what is asked now."""
        seat = self.setting.mine
        nodes = [
            Node(i, i - 1 if i else None, i, {seat: seen}, {seat: Answer(said, "human")})
            for i, (seen, said) in enumerate(self._turns)
        ]
        if self._asked:
            at = len(nodes)
            nodes.append(Node(at, at - 1 if at else None, at, {seat: self._asked[0].observation}, {}))
        return Episode(self.setting.env, self.seed, self.setting.seats, nodes)

    def _end(self, episode: Episode) -> dict[str, Any]:
        """The outcome. Why a game failed is for the terminal: it may name addresses and files."""
        head: dict[str, Any] = {"instance": episode.seed, "gave_up": self.gave_up, "failed": episode.error is not None}
        if episode.error:
            return head | {"success": None, "team": 0.0, "returns": {}}
        figures = summary([episode])
        success = bool(figures["success"]) if "success" in figures else None
        return head | {"success": success, "team": figures["team_return"], **seat_returns([episode])}


class Games:
    """The games of all pages, each of the next instance from `first` on. `say` tells the terminal why a game failed;
    one that no page looks at for `alone` seconds ends."""

    def __init__(
        self,
        play: Play,
        setting: Setting,
        *,
        first: int = 0,
        say: Callable[[str], None] = print,
        alone: float = ALONE,
    ) -> None:
        self._play, self._setting, self._say, self._alone = play, setting, say, alone
        self._instances = count(first)
        self._open: dict[str, tuple[Game, asyncio.Task[None]]] = {}

    def begin(self) -> Game:
        """A new game. Raises ValueError where there are too many."""
        if len(self._open) >= MOST:
            raise ValueError(f"{MOST} games are open here: close the page of one, and come back in a minute")
        game = Game(self._setting, next(self._instances))
        self._open[game.id] = game, asyncio.create_task(self._run(game))
        self.look_after(game)
        return game

    def find(self, name: str) -> Game | None:
        return self._open[name][0] if name in self._open else None

    async def _run(self, game: Game) -> None:
        episode = await self._play(game.seed, game.ask)
        if episode.error and not game.gave_up:
            self._say(f"the game of instance {game.seed} ended early: {episode.error}")
        game.end(episode)

    def look_after(self, game: Game) -> None:
        """Ends the game if nobody looks at it for a while from now."""
        if game.clock:
            game.clock.cancel()
        game.clock = asyncio.get_running_loop().call_later(self._alone, self._drop, game)

    def _drop(self, game: Game) -> None:
        if not game.pages and game.id in self._open:
            self._open.pop(game.id)[1].cancel()
            game.leave()

    def close(self) -> None:
        """Ends all games, and lets their pages go."""
        for game, task in self._open.values():
            task.cancel()
            game.leave()
        self._open.clear()
