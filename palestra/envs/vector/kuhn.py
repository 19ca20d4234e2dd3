"""Kuhn poker (Kuhn, 1950) for two to four players, as in OpenSpiel; and kernels shared by the card games."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import NativeEnv, store_ended
from palestra.envs.batch.rng import RNG_WORDS, random_below
from palestra.envs.rules.kuhn import BET, check_players
from palestra.envs.vector_base import Discrete, empty_step

CARD_NAMES = ("9", "10", "J", "Q", "K")  # the highest cards; a game of two players uses J, Q, K


class KuhnArrays(NamedTuple):
    """The arrays that the kernels change: first the env's own state, then the arrays of the frame."""

    rng: np.ndarray
    cards: np.ndarray  # [B, P + 1] the deck: a card for each player in turn, then the unused card
    stakes: np.ndarray  # [B, P]
    moves: np.ndarray  # [B] number of moves made
    first_bet: np.ndarray  # [B] index of the move, -1: no bet yet
    obs: np.ndarray
    agent_mask: np.ndarray
    state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    final_obs: np.ndarray
    final_state: np.ndarray


@jit
def deal_cards(stream: np.ndarray, deck: np.ndarray, count: int) -> None:
    """Moves `count` random cards to the front of `deck`, without replacement (Fisher-Yates)."""
    for at in range(count):
        other = at + int(random_below(stream, len(deck) - at))
        deck[at], deck[other] = deck[other], deck[at]


@jit
def clear_games(obs: np.ndarray, state: np.ndarray, chosen: np.ndarray) -> None:
    """Zeroes observations and state of the chosen games. Loops compile ten times as fast as slice assignments."""
    for b in range(len(chosen)):
        if chosen[b]:
            for n in range(obs.shape[1]):
                for at in range(obs.shape[2]):
                    obs[b, n, at] = 0
            for at in range(state.shape[1]):
                state[b, at] = 0


# Each part of a step loops over all games: passing the tuple of arrays to a function for every game would cost more
# than the moves.


@jit
def _begin_games(t: KuhnArrays, chosen: np.ndarray) -> None:
    """Deals, takes antes and writes the first observations of the chosen games."""
    players = t.stakes.shape[1]
    deck = t.cards.shape[1]
    clear_games(t.obs, t.state, chosen)
    for b in range(len(chosen)):
        if chosen[b]:
            deal_cards(t.rng[b], t.cards[b], players)
            t.moves[b], t.first_bet[b] = 0, -1
            for n in range(players):
                t.stakes[b, n] = 1
                t.agent_mask[b, n] = n == 0
                t.obs[b, n, n], t.obs[b, n, players + t.cards[b, n]] = 1, 1
                t.state[b, deck * n + t.cards[b, n]] = 1


@jit
def _move(t: KuhnArrays, actions: np.ndarray) -> None:
    """Makes the move of the player to move and marks the games that it ended. After a bet, each
    other player answers once; a player that passes then is out."""
    games, players = t.stakes.shape
    for b in range(games):
        move = t.moves[b]
        turn = t.moves[b] % players
        bet = actions[b, turn] == BET
        at = 2 * move + bet
        for n in range(players):
            t.obs[b, n, 2 * players + 1 + at] = 1
            t.agent_mask[b, n] = n == (move + 1) % players
        t.state[b, players * (players + 1) + at] = 1
        if bet:
            t.stakes[b, turn] = 2
            if t.first_bet[b] < 0:
                t.first_bet[b] = move
        t.moves[b] = move + 1
        t.terminated[b] = move + 1 == players + max(t.first_bet[b], 0)


@jit
def _pay(t: KuhnArrays) -> None:
    """Writes the rewards. The highest card of the players that bet (of all players if none bet) wins the pot."""
    games, players = t.stakes.shape
    for b in range(games):
        asked = 1 + (t.first_bet[b] >= 0)
        pot = 0
        winner = -1
        for n in range(players):
            pot += t.stakes[b, n]
            if t.stakes[b, n] == asked and (winner < 0 or t.cards[b, n] > t.cards[b, winner]):
                winner = n
        for n in range(players):
            t.rewards[b, n] = t.terminated[b] * (pot * (n == winner) - t.stakes[b, n])


@jit
def _step(t: KuhnArrays, actions: np.ndarray) -> None:
    _move(t, actions)
    _pay(t)
    store_ended(t, t.terminated)
    _begin_games(t, t.terminated)


class KuhnPoker(NativeEnv):
    """Kuhn poker: one card each from a deck of one more card than players; an ante of 1 and at most one bet of 1.

    In turn each player passes (0) or bets (1), until all players have passed or all others have answered the bet.
    Rewards, at the end of the game, are chips won or lost. An action out of range is a pass. An observation is
    OpenSpiel's information state: the seat number and its card (both one-hot), then for each move so far pass or bet
    (one-hot). The state is the card of every player, then the moves in the same form. `internal_state["cards"]` (int8
    [B, players + 1]) are the players' cards in turn order.

    Raises ValueError if `num_envs` is below 1 or `players` is not 2 to `MAX_PLAYERS`.
    """

    name: ClassVar[str] = "kuhn_poker"
    action_names = ("pass", "bet")

    def __init__(self, num_envs: int = 64, *, players: int = 2) -> None:
        check_players(players)
        deck = players + 1
        moves = 2 * players - 1
        self.num_envs = num_envs
        self.state_size = players * deck + 2 * moves
        self.seats = tuple(f"player_{n}" for n in range(players))
        self.observation_shapes = ((players + deck + 2 * moves,),) * players
        self.action_spaces = (Discrete(2),) * players
        self.vector_step = empty_step(num_envs, players, self.observation_shapes[0], state_size=self.state_size)
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "cards": np.zeros((num_envs, deck), np.int8),
            "stakes": np.zeros((num_envs, players), np.int8),
            "moves": np.zeros(num_envs, np.int8),
            "first_bet": np.zeros(num_envs, np.int8),
        }
        self._table = self.build_table(KuhnArrays)

    def render(self, game: int) -> str:
        """Returns the card and the stake of each player."""
        cards = self.internal_state["cards"][game]
        stakes = self.internal_state["stakes"][game]
        hands = zip(self.seats, cards, stakes, strict=False)
        return "\n".join(f"{seat}  {CARD_NAMES[card - len(cards)]}  {stake} in the pot" for seat, card, stake in hands)

    def _begin(self) -> None:
        self.internal_state["cards"][:] = np.arange(self.internal_state["cards"].shape[1])
        _begin_games(self._table, np.ones(self.num_envs, bool))

    def _advance(self, actions: np.ndarray) -> None:
        _step(self._table, actions.astype(np.int32, copy=False))
