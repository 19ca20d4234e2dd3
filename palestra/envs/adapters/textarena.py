"""Wrapper of TextArena games (Guertler et al., 2025) for one or more players.

TextArena draws from the global generators of Python and NumPy. Each game here keeps its own states of both and installs
them during each call: concurrent games are independent, and equal seeds give equal games.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from palestra.core.config.key_hints import nearest
from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, OUTCOME_TERM, terms_info, total_rewards
from palestra.envs.support.answers import answer_text
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.options import RewardMode, check_range

INVALID_PENALTY = 0.1  # subtracted from a seat's reward for a move that the game calls invalid
ROLE_PROMPT = (
    "You are {seat} in a text game for {players}. The game tells you its rules and what has been said. Think briefly "
    "if you need to, then end your answer with #### and what you say to the game, in the form that it asks for."
)
_ONE_AT_A_TIME = threading.Lock()  # the global generators are shared by all threads


class RngState:
    """One game's states of the global generators of Python and NumPy."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def install_states(self) -> Iterator[None]:
        """Installs the states in the global generators; on exit saves them and restores the previous states."""
        with _ONE_AT_A_TIME:
            before = random.getstate(), np.random.get_state()
            random.setstate(self.python)
            np.random.set_state(self.numpy)
            try:
                yield
            finally:
                self.python = random.getstate()
                self.numpy = np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


class EliminatedPlayers(list[int]):
    """List of eliminated players that avoids an endless loop in TextArena.

    TextArena passes the turn on until it reaches a player who is not eliminated, forever if all are. Once all are,
    `in` is False for every player, and the wrapper ends the game.
    """

    def __init__(self, players: int, out: Iterable[int] = ()) -> None:
        super().__init__(out)
        self.players = players

    @property
    def all_eliminated(self) -> bool:
        """True if all players are eliminated."""
        return len(set(self)) >= self.players

    def __contains__(self, player: object) -> bool:
        return not self.all_eliminated and super().__contains__(player)


class TextArena(Env):
    """The game registered in TextArena as `game`, with seats "player_0", ...; `options` are passed to the game.

    "TicTacToe-v0" shows the whole dialogue, "TicTacToe-v0-train" the rules and the board. The action is the text after
    the last "####" of an answer. The game's rewards are paid per seat at its end, as the term `outcome`. A move that
    the game calls invalid is flagged and costs 0.1, the term `form` (nothing with `reward: outcome`); a second one in a
    row usually loses the game. If all players are eliminated by invalid moves, each is paid -1. A one-player game is a
    success if its reward is at least 1. A game that has not ended after `max_steps` answers is truncated and pays
    nothing.

    Raises ValueError if the game is not registered, does not accept the options or the number of players, or needs
    unavailable resources: some games need a model API, some need word lists that NLTK downloads.
    """

    name: ClassVar[str] = "textarena"

    def __init__(
        self,
        *,
        game: str = "TicTacToe-v0",
        players: int = 2,
        options: dict[str, Any] | None = None,
        max_steps: int = 500,
        reward: RewardMode = "dense",
    ) -> None:
        check_range("players", players, 1, 100)
        check_range("max_steps", max_steps, 1, 100_000)
        self.game = game
        self.players = players
        self.options = dict(options or {})
        self.steps = max_steps
        self.reward = reward
        self.seats = tuple(f"player_{number}" for number in range(players))
        company = "one player" if players == 1 else f"{players} players"
        self.roles = {seat: ROLE_PROMPT.format(seat=seat.replace("_", " "), players=company) for seat in self.seats}
        self._over = True
        self._begin(0)

    def reset(self, seed: int) -> Step:
        self._begin(seed)
        self._moves: tuple[str, ...] = ()
        self._over = False
        return Step(self._observations())

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(None if self._over else self.seats[self._mover], actions)
        move = answer_text(actions[seat])
        done, invalid = self._say(move)
        info: dict[str, Any] = {"invalid": {seat: invalid}}
        terms = {seat: {FORM_TERM: -INVALID_PENALTY if invalid and self.reward == "dense" else 0.0}}
        self._over = done or len(self._moves) >= self.steps
        if not self._over:
            return Step(self._observations(), total_rewards(terms), info=info | terms_info(terms))
        paid, end_info = self._ends() if done else ({}, {})
        for number, won in paid.items():
            terms[self.seats[number]] = terms.get(self.seats[number], {}) | {OUTCOME_TERM: won}
        if self.players == 1:
            info["success"] = paid.get(0, 0.0) >= 1
        return Step({}, total_rewards(terms), truncated=not done, info=info | end_info | terms_info(terms))

    def fork(self) -> Self:
        """Returns a copy of the game; if it cannot be copied, a new game with the same answers replayed."""
        twin = copy.copy(self)
        twin._dice = copy.copy(self._dice)
        try:
            twin._arena = copy.deepcopy(self._arena)
        except (TypeError, RecursionError):  # it holds an uncopyable object: a generator, a lock, a client
            twin._again()
        return twin

    # ---- the TextArena game

    def _begin(self, seed: int) -> None:
        self._seed = seed
        self._dice = RngState(seed)
        with self._dice.install_states():
            self._arena = make_game(self.game, self.options)
            try:
                self._arena.reset(num_players=self.players, seed=seed)
            except (AssertionError, ValueError, LookupError, OSError) as error:
                message = f'"{self.game}" does not begin with players={self.players}: {error!r}'
                raise ValueError(f"{message}; set players to a number that the game takes") from error
            state = self._arena.state
            if isinstance(getattr(state, "elimination_order", None), list):
                state.elimination_order = EliminatedPlayers(self.players, state.elimination_order)
            self._mover, self._shown = _seen_by_mover(self._arena)

    def _say(self, move: str) -> tuple[bool, bool]:
        """Plays one action; returns whether the game has ended and whether it called the move invalid."""
        self._moves = (*self._moves, move)
        with self._dice.install_states(), _complaints(self._arena.state) as complaints:
            done, _ = self._arena.step(action=move)
        done = done or self._all_out
        if not done:
            with self._dice.install_states():
                self._mover, self._shown = _seen_by_mover(self._arena)
        return bool(done), bool(complaints)

    @property
    def _all_out(self) -> bool:
        out = getattr(self._arena.state, "elimination_order", None)
        return isinstance(out, EliminatedPlayers) and out.all_eliminated

    def _again(self) -> None:
        moves = self._moves
        self._begin(self._seed)
        self._moves = ()
        for answer in moves:
            self._say(answer)

    def _ends(self) -> tuple[dict[int, float], dict[str, Any]]:
        """Returns the reward of each player, and info with the reason why the game ended."""
        if self._all_out and not self._arena.state.done:
            return dict.fromkeys(range(self.players), -1.0), {"reason": "every player is out by invalid moves"}
        rewards, infos = self._arena.close()
        reasons = {str(one["reason"]) for one in (infos or {}).values() if isinstance(one, dict) and one.get("reason")}
        # A few games put the reason of an invalid move in place of its reward: that pays nothing.
        paid = {int(number): float(won) for number, won in (rewards or {}).items() if isinstance(won, (int, float))}
        return paid, {"reason": "; ".join(sorted(reasons))} if reasons else {}

    def _observations(self) -> dict[Seat, str]:
        return {self.seats[self._mover]: self._shown}


def make_game(game: str, options: dict[str, Any]) -> Any:
    """Makes a TextArena game by its name, before its reset. Raises ValueError if it cannot be made."""
    arena = _textarena()
    registry = arena.envs.registration.ENV_REGISTRY
    if game not in registry:
        raise ValueError(f'TextArena has no game "{game}"{nearest(game, list(registry))}')
    try:
        return arena.make(game, **options)
    except TypeError as error:
        raise ValueError(f'"{game}" does not take the options {options}: {error}') from error
    except (LookupError, ImportError, ValueError, SyntaxError, OSError) as error:
        # NLTK's word lists, packages, keys of APIs, and a Python whose syntax is newer
        why = " ".join(str(error).replace("*", "").split())[:200]
        raise ValueError(f'"{game}" cannot be created, it needs more than TextArena provides: {why}') from error


def _textarena() -> ModuleType:
    try:
        import textarena
    except ImportError as error:
        raise ValueError(f"TextArena cannot be loaded ({error}): pip install 'palestra[textarena]'") from error
    module: ModuleType = textarena
    return module


def _seen_by_mover(arena: Any) -> tuple[int, str]:
    """Returns the player to move and its observation; unwrapped games ("-raw") observe a list of messages."""
    mover, seen = arena.get_observation()
    if not isinstance(seen, str):
        seen = "\n".join(str(message[1]) for message in seen)
    return int(mover), seen.strip()


@contextmanager
def _complaints(state: Any) -> Iterator[list[object]]:
    """Records the game's reports of invalid moves; the game's own count is reset when a player is eliminated."""
    heard: list[object] = []
    tell = getattr(state, "set_invalid_move", None)

    def note(*arguments: Any, **named: Any) -> Any:
        heard.append(arguments or named)
        return tell(*arguments, **named)  # type: ignore[misc]

    if tell:
        state.set_invalid_move = note
    try:
        yield heard
    finally:
        if tell:
            del state.set_invalid_move
