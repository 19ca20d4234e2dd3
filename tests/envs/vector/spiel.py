"""Games of palestra's envs replayed in OpenSpiel, decision by decision."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyspiel

from palestra.envs.vector_base import VectorEnv, VectorStep


class Mirror:
    """The games of `env`, each also as a state of OpenSpiel's `game`; `chance(b)` returns the chance outcomes of the
    game just begun at index b. Reset and step compare the acting seat, its legal actions, every seat's information
    state, and the rewards."""

    def __init__(self, env: VectorEnv, game: str, chance: Callable[[int], list[int]]) -> None:
        self.env, self.chance = env, chance
        self.game = pyspiel.load_game(game)
        self.players = range(len(env.seats))
        self.states: list[Any] = [None] * env.num_envs
        self.deals: list[Iterator[int]] = [iter([])] * env.num_envs
        self.ended = 0

    def reset(self, seeds: np.ndarray) -> VectorStep:
        frame = self.env.reset(seeds)
        for b in range(self.env.num_envs):
            self.begin(b)
        self.compare(frame)
        return frame

    def begin(self, b: int) -> None:
        self.states[b], self.deals[b] = self.game.new_initial_state(), iter(self.chance(b))
        self.deal(b)

    def deal(self, b: int) -> None:
        while self.states[b].is_chance_node():
            self.states[b].apply_action(next(self.deals[b]))

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = self.env.step(actions)
        for b, state in enumerate(self.states):
            state.apply_action(int(actions[b, state.current_player()]))
            self.deal(b)
            assert frame.terminated[b] == state.is_terminal()
            assert frame.rewards[b].tolist() == state.returns()
            if state.is_terminal():
                assert np.array_equal(frame.final_obs[b], self.known(state))
                self.ended += 1
                self.begin(b)
        assert not frame.truncated.any()
        self.compare(frame)
        return frame

    def compare(self, frame: VectorStep) -> None:
        assert np.array_equal(frame.obs, [self.known(state) for state in self.states])
        turns = np.array([state.current_player() for state in self.states])
        assert np.array_equal(frame.agent_mask, turns[:, None] == self.players)
        action_mask = np.array([state.legal_actions_mask() for state in self.states], bool)
        assert (
            action_mask.all()
            if frame.action_mask is None
            else np.array_equal(frame.action_mask[np.arange(len(turns)), turns], action_mask)
        )

    def known(self, state: Any) -> list[list[float]]:
        return [state.information_state_tensor(n) for n in self.players]


def play(mirror: Mirror, games: int, choose: Callable[[VectorStep], np.ndarray]) -> None:
    """Plays until `games` games have ended."""
    frame = mirror.reset(np.arange(mirror.env.num_envs))
    while mirror.ended < games:
        frame = mirror.step(choose(frame))


def assert_equal_spaces(env: VectorEnv, game: str) -> None:
    """Asserts that the sizes of observations and actions equal OpenSpiel's."""
    theirs = pyspiel.load_game(game)
    assert env.observation_shapes == (tuple(theirs.information_state_tensor_shape()),) * theirs.num_players()
    assert all(space.n == theirs.num_distinct_actions() for space in env.action_spaces)  # type: ignore[union-attr]
    assert env.seats == tuple(f"player_{n}" for n in range(theirs.num_players()))


def chi_square(counts: np.ndarray) -> float:
    """Pearson's chi-square of counts that should be uniform."""
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())
