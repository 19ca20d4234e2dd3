"""Tables of what language agents do in every information state of a text game.

They come from the model's own probabilities.

Shapes: `I` information states, `U` distinct observations, `A` actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from palestra.envs.text.board_games import TextGame
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, uniform_policy
from palestra.text.policies.base import Policy, Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.scripted import RandomPolicy
from palestra.text.policies.word_probabilities import greedy_answers, word_probabilities


class LMActionReader:
    """Action probabilities of the policies of a text game that can be enumerated.

    The probability of answers that are not a legal action is spread evenly over the legal actions,
    as the env replaces such an answer by a random legal action. A policy is read once for each
    distinct observation, of which there are far fewer than information states (tic-tac-toe: 4,520
    boards on which somebody moves, 294,778 pasts that lead to them).
    """

    def __init__(self, env: TextGame, tree: GameTree | None = None) -> None:
        """Raises ValueError if the game cannot be enumerated. `tree` is its tree, if there is one."""
        self.env = env
        self.tree = tree or build_game_tree(env.rules)
        self.queries: list[Query] = []
        self._legal: list[list[int]] = []
        self._observation_I = np.empty(len(self.tree.state_player), np.int64)
        self._policies: dict[str, np.ndarray] = {}
        self._number_observations()

    def _number_observations(self) -> None:
        """Makes one query of all information states in which a player observes the same."""
        numbers: dict[tuple[int, str], int] = {}
        players = self.tree.state_player.tolist()
        for state, key in enumerate(zip(players, self.tree.info_state_texts, strict=True)):
            number = numbers.setdefault(key, len(self.queries))
            self._observation_I[state] = number
            if number == len(self.queries):
                player, text = key
                legal = self.tree.action_mask[state].nonzero()[0].tolist()
                role = self.env.roles[self.env.seats[player]]
                words = [self.env.action_words[action] for action in legal]
                self.queries.append(Query(role, self.env.format_observation(text, legal), legal_actions=words))
                self._legal.append(legal)

    @property
    def words(self) -> list[list[str]]:
        """The words of the legal actions at each distinct observation, in their order."""
        return [query.legal_actions or [] for query in self.queries]

    def policy(self, name: str, policy: Policy) -> np.ndarray:
        """Returns a member's action probabilities, float64 [I, A], computed once per name.

        Raises ValueError for a policy that is no function of the observation, or no language model.
        """
        if name not in self._policies:
            self._policies[name] = self.read(policy)
        return self._policies[name]

    def read(self, policy: Policy) -> np.ndarray:
        """Returns what `policy` returns for a policy whose name may be that of another, too."""
        table = self._legal_table(policy)[self._observation_I]
        return table + (1.0 - table.sum(1, keepdims=True)) * uniform_policy(self.tree)

    def _legal_table(self, policy: Policy) -> np.ndarray:
        """Returns the probability [U, A] that an answer selects a legal action."""
        if isinstance(policy, RandomPolicy):
            rows = (policy.weights(query, len(query.legal_actions or [])) for query in self.queries)
            weights_UA = self._fill(rows)
            return weights_UA / weights_UA.sum(1, keepdims=True)
        if not isinstance(policy, LanguagePolicy):
            raise ValueError(f"policy {policy.name} is no language model, so its action probabilities cannot be listed")
        if policy.sampling.temperature == 0:
            chosen = map(self.env.action_of, greedy_answers(policy, self.queries), self._legal)  # None: no legal action
            return self._fill(np.array(legal) == action for legal, action in zip(self._legal, chosen, strict=True))
        if self.env.rendering == "full":
            raise ValueError(
                "with rendering: full many answers mean one action, so their probabilities cannot "
                "be summed: evaluate at temperature 0, or use rendering: compact"
            )
        return self._fill(word_probabilities(policy, self.queries, self.words))

    def _fill(self, rows: Iterable[Sequence[float] | np.ndarray]) -> np.ndarray:
        """Returns the numbers of the legal actions of each observation as a table [U, A] with zeros elsewhere."""
        table_UA = np.zeros((len(self.queries), self.tree.action_mask.shape[1]))
        for row, legal, numbers in zip(table_UA, self._legal, rows, strict=True):
            row[legal] = numbers[: len(legal)]
        return table_UA
