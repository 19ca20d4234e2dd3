"""OpenSpiel games, turn-based or simultaneous, of perfect or imperfect information, with or without
chance, as vector envs and as rules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyspiel
from open_spiel.python.policy import Policy

from palestra.core.config.key_hints import nearest
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import SingleStep, VectorEnvSpec
from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.vector_base import Discrete

TensorKind = Literal["information_state", "observation"]
DEFAULT_GAME = "leduc_poker"
MAX_CHANCE_STEPS = 100_000  # chance outcomes in a row


class OpenSpielGame:
    """One game by its OpenSpiel string ("leduc_poker", "goofspiel(num_cards=4,points_order=descending)"). Chance
    outcomes are drawn from `numpy.random.default_rng(seed)`; a game that draws them itself is loaded anew for each
    episode, with the seed as its `rng_seed`. Only seats that act get new observations; rewards are those of the step in
    which they occur.

    Raises ValueError for unknown games, mean-field games, games without the tensor `view`, games that draw chance
    outcomes themselves and take no seed, and in `reset` or `step` for actions beyond the number that the game declares
    and for endless chance.
    """

    def __init__(self, game: str, tensor_kind: TensorKind | None) -> None:
        self.game = _load_game(game)
        self.draws_itself = self.game.get_type().chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
        if self.draws_itself and "rng_seed" in game:
            raise ValueError(f'"{game}": rng_seed is set for each episode: leave it out')
        own_name = self.game.get_type().short_name == game.partition("(")[0].strip()  # no game of another game
        if self.draws_itself and not (own_name and "rng_seed" in self.game.get_parameters()):
            raise ValueError(
                f'"{game}" draws its chance outcomes itself and takes no rng_seed, so that all its episodes would be '
                "one: choose another game"
            )
        seats = self.game.num_players()
        self.tensor_kind = _tensor_kind(self.game, tensor_kind)
        size = int(np.prod(getattr(self.game, f"{self.tensor_kind}_tensor_shape")()))
        self.spec = VectorEnvSpec(
            tuple(f"player_{n}" for n in range(seats)),
            ((size,),) * seats,
            (Discrete(self.game.num_distinct_actions()),) * seats,
            has_action_mask=True,
        )

    def reset(self, seed: int) -> SingleStep:
        self.rng = np.random.default_rng(seed)
        if self.draws_itself:
            parameters = self.game.get_parameters() | {"rng_seed": seed}
            self.game = pyspiel.load_game(self.game.get_type().short_name, parameters)
        self.state = self.game.new_initial_state()
        self.observe = getattr(self.state, f"{self.tensor_kind}_tensor")
        self.returns = np.zeros(len(self.spec.seats))
        self._draw()
        return self._build_step()

    def step(self, actions: np.ndarray) -> SingleStep:
        if self.state.is_simultaneous_node():
            self.state.apply_actions([int(action) for action in actions])
        else:
            self.state.apply_action(int(actions[self.state.current_player()]))
        self._draw()
        step = self._build_step()
        returns = np.array(self.state.returns())
        step.rewards = returns - self.returns
        self.returns = returns
        return step

    def render(self) -> str:
        """Returns OpenSpiel's text of the state."""
        return str(self.state)

    def _draw(self) -> None:
        """Samples chance outcomes until a player must act. Raises ValueError if none must after `MAX_CHANCE_STEPS`."""
        drawn_before = 0
        while self.state.is_chance_node():
            if drawn_before == MAX_CHANCE_STEPS:
                raise ValueError(f'"{self.game}" draws {MAX_CHANCE_STEPS:,} chance outcomes and no player acts')
            drawn_before += 1
            outcomes = self.state.chance_outcomes()
            left = self.rng.random()
            drawn = outcomes[-1][0]  # if rounding leaves the sum of probabilities below the number drawn
            for outcome, chance in outcomes:
                left -= chance
                if left < 0:
                    drawn = outcome
                    break
            self.state.apply_action(drawn)

    def _build_step(self) -> SingleStep:
        seats = range(len(self.spec.seats))
        if self.state.is_terminal():
            return SingleStep([None for _ in seats], terminated=True)
        mover = self.state.current_player()
        action_mask = [self._legal(n) if mover in (n, pyspiel.PlayerId.SIMULTANEOUS) else None for n in seats]
        agent_mask = [mask is not None and bool(mask.any()) for mask in action_mask]
        observations = [np.array(self.observe(n), np.float32) if acts else None for n, acts in enumerate(agent_mask)]
        return SingleStep(observations, agent_mask, action_mask=action_mask)

    def _legal(self, seat: int) -> np.ndarray:
        mask = np.zeros(self.game.num_distinct_actions(), bool)
        legal = self.state.legal_actions(seat)
        if legal and max(legal) >= len(mask):
            raise ValueError(
                f'"{self.game.get_type().short_name}" allows action {max(legal)} of {len(mask)} distinct actions: its '
                "actions are not a fixed set, so no network can choose among them; choose another game"
            )
        mask[legal] = True
        return mask

    def close(self) -> None:
        pass


def _load_game(game: str) -> Any:
    try:
        loaded = pyspiel.load_game(game)
    except (pyspiel.SpielError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        hint = nearest(game, pyspiel.registered_names())
        raise ValueError(f'OpenSpiel cannot load the game "{game}" ({why}){hint}') from error
    if loaded.get_type().dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise ValueError(f'"{game}" is a mean-field game, which has no seats: choose one played by single players')
    return loaded


def _tensor_kind(game: Any, view: TensorKind | None) -> TensorKind:
    """Returns the tensor that seats see: `view`, by default the information state if the loaded
    game has its tensor. Raises ValueError if the game has no such tensor."""
    kind: TensorKind = view or ("information_state" if _has(game, "information_state") else "observation")
    if not _has(game, kind):
        raise ValueError(f'"{game}" has no {kind} tensor, so its seats would see nothing: choose another game')
    return kind


def _has(game: Any, tensor: str) -> bool:
    return bool(getattr(game.get_type(), f"provides_{tensor}_tensor"))


class OpenSpielEnv(PackageVectorEnv):
    """The OpenSpiel game of the string `game`. `view` is the observation tensor: "information_state" (all that a player
    knows; the default if the game has it) or "observation" (what it sees now).

    Games are only terminated, as OpenSpiel reports, never truncated; `final_obs` is then each seat's last observation.
    Raises ValueError if OpenSpiel cannot load the game or it has no such tensor.
    """

    name: ClassVar[str] = "openspiel"

    def __init__(
        self, num_envs: int = 64, *, game: str = DEFAULT_GAME, view: TensorKind | None = None, num_processes: int = 0
    ) -> None:
        super().__init__(partial(OpenSpielGame, game, view), num_envs, num_processes, game)


class OpenSpielState:
    """An immutable OpenSpiel state; states with equal histories are equal."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.history = tuple(state.history())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenSpielState) and self.history == other.history

    def __hash__(self) -> int:
        return hash(self.history)


class OpenSpielRules(Rules[OpenSpielState]):
    """Rules of a turn-based OpenSpiel game. `info_state` is the tensor `view`, as in `OpenSpielEnv`; the texts of
    actions are their numbers.

    Information states of games of imperfect information are identified by OpenSpiel's information state string, because
    the tensor may say less (in dark hex it does not tell when a stone was placed, and observations leave out the past).
    In other games they are identified by the tensor and OpenSpiel's text of it together, since either may say less.
    Raises ValueError for games with simultaneous moves, with chance outcomes that cannot be enumerated, or without the
    tensor.
    """

    def __init__(self, game: str = DEFAULT_GAME, view: TensorKind | None = None) -> None:
        self.name = game
        self.game = _load_game(game)
        if why := why_not_enumerable(game):
            raise ValueError(f'"{game}" cannot be enumerated: {why}')
        self.tensor_kind = _tensor_kind(self.game, view)
        kind = self.game.get_type()
        imperfect = kind.information == pyspiel.GameType.Information.IMPERFECT_INFORMATION
        self.has_string_keys = imperfect and bool(kind.provides_information_state_string)
        self.num_players = self.game.num_players()
        self.action_names = tuple(str(action) for action in range(self.game.num_distinct_actions()))

    def initial_state(self) -> OpenSpielState:
        return OpenSpielState(self.game.new_initial_state())

    def current_player(self, state: OpenSpielState) -> int:
        player = int(state.state.current_player())
        return {int(pyspiel.PlayerId.CHANCE): CHANCE, int(pyspiel.PlayerId.TERMINAL): TERMINAL}.get(player, player)

    def legal_actions(self, state: OpenSpielState) -> list[int]:
        return list(state.state.legal_actions())

    def chance_outcomes(self, state: OpenSpielState) -> list[tuple[int, float]]:
        return list(state.state.chance_outcomes())

    def next_state(self, state: OpenSpielState, action: int) -> OpenSpielState:
        return OpenSpielState(state.state.child(action))

    def returns(self, state: OpenSpielState) -> tuple[float, ...]:
        return tuple(state.state.returns())

    def info_state(self, state: OpenSpielState, player: int) -> np.ndarray:
        return np.array(getattr(state.state, f"{self.tensor_kind}_tensor")(player), np.float32)

    def info_state_text(self, state: OpenSpielState, player: int) -> str:
        if self.has_string_keys:
            return str(state.state.information_state_string(player))
        return str(getattr(state.state, f"{self.tensor_kind}_string")(player))

    def info_state_key(self, state: OpenSpielState, player: int) -> Hashable:
        text = self.info_state_text(state, player)
        return text if self.has_string_keys else (text, super().info_state_key(state, player))


class TablePolicy(Policy):
    """A tabular policy for OpenSpiel's algorithms: for each player, action probabilities by
    information state, under the names of `OpenSpielRules.info_state_text`."""

    def __init__(self, rules: OpenSpielRules, players: Sequence[Mapping[str, Mapping[int, float]]]) -> None:
        super().__init__(rules.game, list(range(rules.num_players)))
        self.rules = rules
        self.players = players

    def action_probabilities(self, state: Any, player_id: int | None = None) -> dict[int, float]:
        """Returns the probabilities of the legal actions of the player to move."""
        player = state.current_player() if player_id is None else player_id
        return dict(self.players[player][self.rules.info_state_text(OpenSpielState(state), player)])


def why_not_enumerable(game: str) -> str:
    """Returns why a game cannot be enumerated, "" if it can. Raises ValueError if it is unknown."""
    loaded = _load_game(game)
    kind = loaded.get_type()
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        return f'its players move at once; game: "turn_based_simultaneous_game(game={game})" makes them take turns'
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return "it draws chance outcomes itself and does not list them"
    if not _has(loaded, "information_state") and not _has(loaded, "observation"):
        return "it shows its players no tensor"
    return ""
