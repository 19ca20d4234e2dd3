"""Liar's dice for two players, as in OpenSpiel."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import NativeEnv, store_ended
from palestra.envs.batch.rng import RNG_WORDS, random_below
from palestra.envs.rules.liars_dice import check_dice
from palestra.envs.vector.kuhn import clear_games
from palestra.envs.vector_base import Discrete, empty_step


class LiarsDiceArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    dice: np.ndarray  # [B, 2, D] faces from 0, sorted for each player
    turn: np.ndarray  # [B]
    bid: np.ndarray  # [B] last bid, -1 before the first
    obs: np.ndarray
    action_mask: np.ndarray
    agent_mask: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def _roll(stream: np.ndarray, dice: np.ndarray, faces: int) -> None:
    """Rolls a player's dice and sorts them."""
    for count in range(len(dice)):
        face = int(random_below(stream, faces))
        at = count
        while at > 0 and dice[at - 1] > face:
            dice[at] = dice[at - 1]
            at -= 1
        dice[at] = face


@jit
def _begin_games(t: LiarsDiceArrays, faces: int, chosen: np.ndarray) -> None:
    """Rolls the dice and writes the first observations of the chosen games."""
    most = t.dice.shape[2]
    liar = t.action_mask.shape[2] - 1
    clear_games(t.obs, t.state, chosen)
    for b in range(len(chosen)):
        if chosen[b]:
            t.turn[b], t.bid[b] = 0, -1
            for n in range(2):
                _roll(t.rng[b], t.dice[b, n], faces)
                t.obs[b, n, n] = 1
                for die in range(most):
                    at = faces * die + t.dice[b, n, die]
                    t.obs[b, n, 2 + at], t.state[b, most * faces * n + at] = 1, 1
                for action in range(liar):
                    t.action_mask[b, n, action] = True
                t.action_mask[b, n, liar] = False


@jit
def _move(t: LiarsDiceArrays, faces: int, actions: np.ndarray) -> None:
    """Plays the action of the player to move (the lowest legal one if it is illegal) and writes it
    to the history. After a bid, only higher bids and the call are legal; the call ends the game.
    Both seats get the action mask of the player to move."""
    own = t.dice.shape[2] * faces
    liar = t.action_mask.shape[2] - 1
    for b in range(len(t.turn)):
        action = int(actions[b, t.turn[b]])
        if not (0 <= action <= liar and t.action_mask[b, t.turn[b], action]):
            action = t.bid[b] + 1
        t.obs[b, 0, 2 + own + action], t.obs[b, 1, 2 + own + action], t.state[b, 2 * own + action] = 1, 1, 1
        t.terminated[b] = action == liar
        if not t.terminated[b]:
            for n in range(2):
                for lower in range(t.bid[b] + 1, action + 1):
                    t.action_mask[b, n, lower] = False
                t.action_mask[b, n, liar] = True
            t.turn[b], t.bid[b] = 1 - t.turn[b], action


@jit
def _pay(t: LiarsDiceArrays, faces: int) -> None:
    """Writes the rewards. A bid is true if at least that many dice show its face or the highest face, which is wild."""
    for b in range(len(t.turn)):
        t.rewards[b, 0], t.rewards[b, 1] = 0, 0
        if t.terminated[b]:
            quantity = t.bid[b] // faces + 1
            face = t.bid[b] % faces
            shown = 0
            for n in range(2):
                for die in range(t.dice.shape[2]):
                    shown += t.dice[b, n, die] == face or t.dice[b, n, die] == faces - 1
            winner = t.turn[b]
            if shown >= quantity:
                winner = 1 - winner
            t.rewards[b, winner], t.rewards[b, 1 - winner] = 1, -1


@jit
def _write_turn(agent_mask: np.ndarray, turn: np.ndarray) -> None:
    for b in range(len(turn)):
        agent_mask[b, 0], agent_mask[b, 1] = turn[b] == 0, turn[b] == 1


@jit
def _step(t: LiarsDiceArrays, faces: int, actions: np.ndarray) -> None:
    _move(t, faces, actions)
    _pay(t, faces)
    store_ended(t, t.terminated)
    _begin_games(t, faces, t.terminated)
    _write_turn(t.agent_mask, t.turn)


class LiarsDice(NativeEnv):
    """Liar's dice: each player rolls `dice` dice of `faces` faces in secret; bids on all dice rise until one is called
    a lie.

    Bid `(quantity - 1) * faces + face` (faces count from 0) claims that at least `quantity` dice show that face; the
    highest face is wild and counts as any. A bid must be higher than the last one; the last action, legal after the
    first bid, calls the last bid a lie. The player who is right gets 1, the other -1. An illegal action becomes the
    lowest legal one. An observation is OpenSpiel's information state: the seat number, the sorted dice (one-hot each),
    then for every bid and for the call whether it was made. The state is the dice of both players, then the bids in the
    same form. `internal_state["dice"]` (int64 [B, 2, dice]) are the faces.

    Raises ValueError if `num_envs` or `dice` is below 1 or `faces` below 2.
    """

    name: ClassVar[str] = "liars_dice"
    seats = ("player_0", "player_1")

    def __init__(self, num_envs: int = 64, *, dice: int = 1, faces: int = 6) -> None:
        check_dice(dice, faces)
        own = dice * faces
        actions = 2 * dice * faces + 1
        self.num_envs = num_envs
        self.faces = faces
        self.state_size = 2 * own + actions
        bids = [f"{bid // faces + 1} x {bid % faces + 1}" for bid in range(actions - 1)]
        self.action_names = (*bids, "liar")
        self.observation_shapes = ((2 + own + actions,),) * 2
        self.action_spaces = (Discrete(actions),) * 2
        self.vector_step = empty_step(
            num_envs, 2, self.observation_shapes[0], num_actions=actions, state_size=self.state_size
        )
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "dice": np.zeros((num_envs, 2, dice), np.int64),
            "turn": np.zeros(num_envs, np.int64),
            "bid": np.zeros(num_envs, np.int64),
        }
        self._table = self.build_table(LiarsDiceArrays)

    def render(self, game: int) -> str:
        """Returns the dice of each player, faces from 1, and the last bid."""
        rows = [
            f"{seat}  {' '.join(str(face + 1) for face in self.internal_state['dice'][game, n])}"
            for n, seat in enumerate(self.seats)
        ]
        bid = int(self.internal_state["bid"][game])
        return "\n".join([*rows, f"last bid  {self.action_names[bid] if bid >= 0 else '-'}"])

    def _begin(self) -> None:
        _begin_games(self._table, self.faces, np.ones(self.num_envs, bool))
        _write_turn(self.vector_step.agent_mask, self.internal_state["turn"])

    def _advance(self, actions: np.ndarray) -> None:
        _step(self._table, self.faces, actions.astype(np.int32, copy=False))
