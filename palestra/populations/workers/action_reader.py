"""Tables of what language agents do at every information state of a text game, from the model's own probabilities.

Shapes: `I` information states, `U` distinct observations, `A` actions.
"""

from __future__ import annotations

import numpy as np

from palestra.envs.text.board_games import TextGame
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, uniform_policy
from palestra.text.policies.base import Policy, Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.scripted import RandomPolicy
from palestra.text.policies.word_probabilities import greedy_answers, word_probabilities


class LMActionReader:
    """Action probabilities of the policies of a text game that can be enumerated.

    The probability of answers that are not a legal action is spread evenly over the legal actions, as the env replaces
    such an answer by a random legal action. A policy is read once for each distinct observation, of which there are
    far fewer than information states (tic-tac-toe: 4,520 boards on which somebody moves, 294,778 pasts that lead to
    them).
    """

    def __init__(self, env: TextGame, tree: GameTree | None = None) -> None:
        """Raises ValueError if the game cannot be enumerated. `tree` is its tree, if the caller has it."""
        self.env = env
        self.tree = tree or build_game_tree(env.rules)
        self._legal: list[list[int]] = []
        self.queries: list[Query] = []
        numbers: dict[tuple[int, str], int] = {}
        self._observation_I = np.empty(len(self.tree.state_player), np.int64)
        rows = zip(self.tree.state_player.tolist(), self.tree.info_state_texts, self.tree.action_mask, strict=True)
        for state, (player, text, mask) in enumerate(rows):
            number = numbers.setdefault((player, text), len(self.queries))
            self._observation_I[state] = number
            if number == len(self.queries):
                legal = mask.nonzero()[0].tolist()
                self._legal.append(legal)
                observation = env.format_observation(text, legal)
                self.queries.append(Query(env.roles[env.seats[player]], observation))
        self._policies: dict[str, np.ndarray] = {}

    @property
    def words(self) -> list[list[str]]:
        """The words of the legal actions at each distinct observation, in the order of the actions."""
        return [[self.env.action_words[action] for action in legal] for legal in self._legal]

    def policy(self, name: str, policy: Policy) -> np.ndarray:
        """Returns a member's action probabilities, float64 [I, A], computed once per name. Raises ValueError for a
        policy that is no function of the observation, or no language model."""
        if name not in self._policies:
            self._policies[name] = self.read(policy)
        return self._policies[name]

    def read(self, policy: Policy) -> np.ndarray:
        """Returns what `policy` does, without a name."""
        if isinstance(policy, RandomPolicy):
            return uniform_policy(self.tree)
        if not isinstance(policy, LanguagePolicy):
            raise ValueError(f"policy {policy.name} is no language model, so its action probabilities cannot be listed")
        probabilities_UA = np.zeros((len(self.queries), self.tree.action_mask.shape[1]))
        if policy.sampling.temperature == 0:
            answers = greedy_answers(policy, self.queries)
            for row, answer, legal in zip(probabilities_UA, answers, self._legal, strict=True):
                action = self.env.action_of(answer, legal)
                if action is not None:
                    row[action] = 1.0
        elif self.env.rendering == "full":
            raise ValueError(
                "with rendering: full many answers mean one action, so their probabilities cannot be summed: evaluate "
                "at temperature 0, or use rendering: compact"
            )
        else:
            found = word_probabilities(policy, self.queries, self.words)
            for row, probabilities, legal in zip(probabilities_UA, found, self._legal, strict=True):
                row[legal] = probabilities[: len(legal)]
        table = probabilities_UA[self._observation_I]
        rest = 1.0 - table.sum(1, keepdims=True)
        return table + rest * uniform_policy(self.tree)
