"""The games of OpenSpiel: in turn or simultaneous, of perfect or imperfect information, with or without chance."""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyspiel

from palestra.envs.rules.base import CHANCE, OVER, Rules
from palestra.envs.vector.base import Discrete
from palestra.envs.vector.loop import GameSpec, Moment
from palestra.envs.vector.processes import Hosted

Tensor = Literal["information_state", "observation"]


class OpenSpielGame:
    """One game by its string ("leduc_poker", "goofspiel(num_cards=4,points_order=descending)"). Chance draws from
    `numpy.random.default_rng(seed)`. Only the seats that act are shown anew; rewards are those of the step in which
    they fall."""

    def __init__(self, game: str, view: Tensor | None) -> None:
        self.game = _loaded(game)
        seats = self.game.num_players()
        self.view = view or ("information_state" if _has(self.game, "information_state") else "observation")
        if not _has(self.game, self.view):
            raise ValueError(f'"{game}" has no {self.view} tensor, so its seats would see nothing: choose another game')
        size = int(np.prod(getattr(self.game, f"{self.view}_tensor_shape")()))
        self.spec = GameSpec(
            tuple(f"player_{n}" for n in range(seats)),
            ((size,),) * seats,
            (Discrete(self.game.num_distinct_actions()),) * seats,
            masks=True,
        )

    def reset(self, seed: int) -> Moment:
        self.rng = np.random.default_rng(seed)
        self.state = self.game.new_initial_state()
        self.see = getattr(self.state, f"{self.view}_tensor")
        self.returns = np.zeros(len(self.spec.seats))
        self._draw()
        return self._moment()

    def step(self, actions: np.ndarray) -> Moment:
        if self.state.is_simultaneous_node():
            self.state.apply_actions([int(action) for action in actions])
        else:
            self.state.apply_action(int(actions[self.state.current_player()]))
        self._draw()
        moment = self._moment()
        returns = np.array(self.state.returns())
        moment.rewards, self.returns = returns - self.returns, returns
        return moment

    def _draw(self) -> None:
        """Lets chance move until a player must."""
        while self.state.is_chance_node():
            outcomes, left = self.state.chance_outcomes(), self.rng.random()
            drawn = outcomes[-1][0]  # where rounding leaves the sum of chances below the number drawn
            for outcome, chance in outcomes:
                left -= chance
                if left < 0:
                    drawn = outcome
                    break
            self.state.apply_action(drawn)

    def _moment(self) -> Moment:
        seats = range(len(self.spec.seats))
        if self.state.is_terminal():
            return Moment([None for _ in seats], terminated=True)
        mover = self.state.current_player()
        legal = [self._legal(n) if mover in (n, pyspiel.PlayerId.SIMULTANEOUS) else None for n in seats]
        acting = [mask is not None and bool(mask.any()) for mask in legal]
        views = [np.array(self.see(n), np.float32) if acts else None for n, acts in enumerate(acting)]
        return Moment(views, acting, legal=legal)

    def _legal(self, seat: int) -> np.ndarray:
        mask = np.zeros(self.game.num_distinct_actions(), bool)
        mask[self.state.legal_actions(seat)] = True
        return mask

    def close(self) -> None:
        pass


def _loaded(game: str) -> Any:
    try:
        loaded = pyspiel.load_game(game)
    except (pyspiel.SpielError, RuntimeError) as error:
        near = difflib.get_close_matches(game, pyspiel.registered_names(), 3, 0.4)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(f'OpenSpiel cannot load the game "{game}"{hint}: {str(error).splitlines()[0]}') from error
    if loaded.get_type().dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise ValueError(f'"{game}" is a mean-field game, which has no seats: choose one played by single players')
    return loaded


def _has(game: Any, view: str) -> bool:
    return bool(getattr(game.get_type(), f"provides_{view}_tensor"))


class OpenSpielEnv(Hosted):
    """The game that OpenSpiel's string `game` names. `view` chooses between the tensors of all a player knows
    ("information_state", the default where the game has it) and of what it sees now ("observation").

    A game ends where OpenSpiel says so, never by being cut off; `final_obs` is then what each seat saw last.
    """

    name: ClassVar[str] = "openspiel"

    def __init__(
        self, games: int = 64, *, game: str = "leduc_poker", view: Tensor | None = None, processes: int = 0
    ) -> None:
        super().__init__(partial(OpenSpielGame, game, view), games, processes)


class SpielState:
    """A state of OpenSpiel's that is never changed; equal where the histories are."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.history = tuple(state.history())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpielState) and self.history == other.history

    def __hash__(self) -> int:
        return hash(self.history)


class SpielRules(Rules[SpielState]):
    """The rules of a game of OpenSpiel's that is played in turn. Views are information states, or, in games that have
    none, observations; the words for actions are their numbers. Raises ValueError for games with simultaneous moves,
    where chance cannot be listed, and where players are shown nothing; and by `view`, where the tensor of information
    states says less than OpenSpiel's strings do: what is exact of the tensors would be of a coarser game."""

    def __init__(self, game: str) -> None:
        self.name, self.game = game, _loaded(game)
        if why := _no_rules(self.game):
            raise ValueError(f'"{game}" cannot be walked through: {why}')
        self.kind: Tensor = "information_state" if _has(self.game, "information_state") else "observation"
        imperfect = self.game.get_type().information == pyspiel.GameType.Information.IMPERFECT_INFORMATION
        self.told: dict[tuple[int, bytes], str] | None = {} if imperfect and self.kind == "information_state" else None
        self.players = self.game.num_players()
        self.actions = tuple(str(action) for action in range(self.game.num_distinct_actions()))

    def initial(self) -> SpielState:
        return SpielState(self.game.new_initial_state())

    def turn(self, state: SpielState) -> int:
        player = int(state.state.current_player())
        return {int(pyspiel.PlayerId.CHANCE): CHANCE, int(pyspiel.PlayerId.TERMINAL): OVER}.get(player, player)

    def legal(self, state: SpielState) -> list[int]:
        return list(state.state.legal_actions())

    def chances(self, state: SpielState) -> list[tuple[int, float]]:
        return list(state.state.chance_outcomes())

    def next(self, state: SpielState, action: int) -> SpielState:
        return SpielState(state.state.child(action))

    def returns(self, state: SpielState) -> tuple[float, ...]:
        return tuple(state.state.returns())

    def view(self, state: SpielState, player: int) -> np.ndarray:
        view = np.array(getattr(state.state, f"{self.kind}_tensor")(player), np.float32)
        if self.told is not None and state.state.current_player() == player:
            words = self.words(state, player)
            if (known := self.told.setdefault((player, view.tobytes()), words)) != words:
                raise ValueError(
                    f'"{self.name}" has no exact values here: its tensor is the same in the information states '
                    f'"{_line(known)}" and "{_line(words)}" of player {player}, so they would be those of a coarser '
                    "game; set assess: 0, and train networks instead of exact responses"
                )
        return view

    def words(self, state: SpielState, player: int) -> str:
        return str(getattr(state.state, f"{self.kind}_string")(player))


def _line(words: str) -> str:
    """Words in one line."""
    return " / ".join(words.splitlines())


def spiel_rules(game: str) -> SpielRules | None:
    """The rules of OpenSpiel's `game`, or None where it cannot be walked through. Raises ValueError for no game."""
    return None if _no_rules(_loaded(game)) else SpielRules(game)


def _no_rules(game: Any) -> str:
    """Why a game cannot be walked through, "" where it can."""
    kind = game.get_type()
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        return "its players move at once (turn_based_simultaneous_game(game=...) makes them take turns)"
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return "it draws chance itself and does not list what may come"
    if not _has(game, "information_state") and not _has(game, "observation"):
        return "it shows its players no tensor"
    return ""
