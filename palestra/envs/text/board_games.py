"""Card and board games as text: each observation is the full information state, each action one word.

The rules are shared with the exact solvers (`palestra.envs.rules_by_env`) and every information state is one
observation, so the play of a language agent can be evaluated exactly.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, Self

from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, OUTCOME_TERM, terms_info, total_rewards
from palestra.envs.rules.bargaining import BargainingRules
from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.rules.connect_four import ConnectFourRules, ConnectFourState, line_heuristic
from palestra.envs.rules.kuhn import KuhnRules
from palestra.envs.rules.leduc import LeducRules
from palestra.envs.rules.liars_dice import LiarsDiceRules
from palestra.envs.rules.tic_tac_toe import TicTacToeRules, TicTacToeState
from palestra.envs.support.answers import answer_words, mark_answer
from palestra.envs.support.options import Rendering, RewardMode

WORD_GAMES = 50  # games of random play in which the words of a game are sought
WORD = re.compile(r"\w+")
SEARCH_DEPTH = 4  # search depth of connect four's expert, in moves
ANSWER_FORMAT = (
    "Each time you are told what you know and the words that you may say now. Think briefly if you need to, then end "
    "your answer with #### and one of these words."
)


class TextGame(Env):
    """Base class of games with exact `rules`.

    An answer is valid if it is one of the legal words. An invalid answer is replaced by a uniformly drawn legal word
    and costs the seat `illegal_penalty` (nothing with `reward: outcome`), the reward's term `form`. The game's returns
    are paid at its end, as the term `outcome`. There are no teams, hence no `success` in info.

    Both renderings show the same information states. `compact`: the role is the name of the game, and an answer must
    equal a word exactly, so a policy is a table of word probabilities. `full`: the role explains the rules, and the
    word after the last "####" counts, in upper or lower case.

    `vocabulary` replaces the game's words, for models with a small vocabulary: `{"pass": "up", "bet": "down"}`. Raises
    ValueError if that maps two words to one.
    """

    rules_text: ClassVar[str] = ""  # rules in the full rendering's role prompt
    is_enumerable: ClassVar[bool] = True  # False where the states are too many to enumerate

    def __init__(
        self,
        rules: Rules[Any],
        illegal_penalty: float,
        vocabulary: Mapping[str, str] | None,
        reward: RewardMode,
        rendering: Rendering,
    ) -> None:
        self.rules = rules
        self.vocabulary = dict(vocabulary or {})
        self.rendering = rendering
        self.illegal_penalty = illegal_penalty if reward == "dense" else 0.0
        self.seats = tuple(f"player_{player}" for player in range(rules.num_players))
        self.action_words = [self.vocabulary.get(word, word) for word in rules.action_names]
        if any(len({*words}) < len(words) for words in (self.vocabulary.values(), self.action_words)):
            raise ValueError(f"vocabulary: {self.vocabulary} has one word for two things: give each its own")
        ours = sorted(map(re.escape, self.vocabulary), key=len, reverse=True)
        self._own_words = re.compile(rf"(?<![\w-])(?:{'|'.join(ours)})(?![\w-])")
        name = rules.name.replace("_", " ")
        role = name if rendering == "compact" else f"{self._in_its_words(self.rules_text)}\n{ANSWER_FORMAT}"
        self.roles = dict.fromkeys(self.seats, role)

    @property
    def is_tabular(self) -> bool:
        """True if a policy is a table: the states can be enumerated, and each action is exactly one answer."""
        return self.is_enumerable and self.rendering == "compact"

    @cached_property
    def told_words(self) -> list[str]:
        """The words that some observations of random play have and others have not: what a player must tell apart."""
        seen = []
        for seed in range(WORD_GAMES):
            game = copy.copy(self)
            step = game.reset(seed)
            while step.observations:
                seen += [set(WORD.findall(text)) for text in step.observations.values()]
                step = game.step({seat: game.rng.choice(words) for seat, words in (step.legal_actions or {}).items()})
        return sorted(set().union(*seen) - set.intersection(*seen))

    def rules_for(self, seat: Seat) -> str:
        if self.rendering == "full":
            return self.roles[seat]
        words = "Answer with exactly one of the words that are listed each time."
        return f"{self._in_its_words(self.rules_text)}\n{words}".strip()

    def reset(self, seed: int) -> Step:
        self.rng = random.Random(seed)
        self.state = self.rules.initial_state()
        return self._step_result({}, {})

    def step(self, actions: dict[Seat, Any]) -> Step:
        ((seat, answer),) = actions.items()
        legal = self.rules.legal_actions(self.state)
        action = self.action_of(answer, legal)
        is_invalid = action is None
        if action is None:
            action = self.rng.choice(legal)
        self.state = self.rules.next_state(self.state, action)
        info: dict[str, Any] = {"invalid": {seat: is_invalid}, "action": self.action_words[action]}
        terms = {}
        if is_invalid:
            words = ", ".join(self.action_words[action] for action in legal)
            info["why_invalid"] = {seat: f"it is none of the words allowed ({words}); one was drawn at random"}
            terms[seat] = {FORM_TERM: 0.0 - self.illegal_penalty}
        return self._step_result(terms, info)

    def fork(self) -> Self:
        """Returns an independent copy; states are immutable, so only the random generator is copied."""
        twin = copy.copy(self)
        twin.rng = copy.copy(self.rng)
        return twin

    def action_of(self, answer: Any, legal: Sequence[int]) -> int | None:
        """Returns the one of the `legal` actions that an answer selects; None if it selects none."""
        return next((action for action in legal if self._means(answer, self.action_words[action])), None)

    def _means(self, answer: Any, word: str) -> bool:
        if self.rendering == "compact":
            return str(answer) == word
        return answer_words(answer) == answer_words(word)

    def says(self, action: int) -> str:
        """Returns an answer that selects this action."""
        return mark_answer(self.action_words[action], is_compact=self.rendering == "compact")

    def format_observation(self, state_text: str, legal: list[int]) -> str:
        """Returns the observation for information state `state_text` and the `legal` action indices."""
        return f"{self._in_its_words(state_text)} Say {' or '.join(self.action_words[action] for action in legal)}."

    def _in_its_words(self, state_text: str) -> str:
        if not self.vocabulary:
            return state_text
        return self._own_words.sub(lambda found: self.vocabulary[found[0]], state_text)

    def _step_result(self, terms: dict[Seat, dict[str, float]], info: dict[str, Any]) -> Step:
        """Samples pending chance moves, then returns the next step, whose rewards so far are `terms`."""
        while (turn := self.rules.current_player(self.state)) == CHANCE:
            actions, weights = zip(*self.rules.chance_outcomes(self.state), strict=True)
            self.state = self.rules.next_state(self.state, self.rng.choices(actions, weights)[0])
        if turn == TERMINAL:
            for seat, won in zip(self.seats, self.rules.returns(self.state), strict=True):
                terms[seat] = terms.get(seat, {}) | {OUTCOME_TERM: won}
            return Step({}, total_rewards(terms), info=info | terms_info(terms))
        legal = self.rules.legal_actions(self.state)
        seat = self.seats[turn]
        shown = self.format_observation(self.rules.info_state_text(self.state, turn), legal)
        words = {seat: [self.action_words[action] for action in legal]}
        return Step({seat: shown}, total_rewards(terms), legal_actions=words, info=info | terms_info(terms))


class TextKuhn(TextGame):
    """Kuhn poker as a text game, for 2 to 4 players."""

    name: ClassVar[str] = "text_kuhn"
    rules_text = (
        "You play Kuhn poker. There is one card more than there are players: J, Q, K from low to high with two "
        "players, J, Q, K, A with three, T, J, Q, K, A with four. Each player holds one, which the others do not see, "
        "and has paid 1. In turn each passes or bets 1 more. After a bet each of the others answers once: bet to pay "
        "1 as well, pass to give up. Of those who bet, or of all if nobody did, the highest card wins what was paid. "
        "Your reward is what you win or lose."
    )

    def __init__(
        self,
        *,
        players: int = 2,
        illegal_penalty: float = 0.5,
        vocabulary: dict[str, str] | None = None,
        reward: RewardMode = "dense",
        rendering: Rendering = "compact",
    ) -> None:
        super().__init__(KuhnRules(players), illegal_penalty, vocabulary, reward, rendering)


class FixedRulesGame(TextGame):
    """Base class of games whose rules have no options."""

    rules_class: ClassVar[type[Rules[Any]]]

    def __init__(
        self,
        *,
        illegal_penalty: float = 0.5,
        vocabulary: dict[str, str] | None = None,
        reward: RewardMode = "dense",
        rendering: Rendering = "compact",
    ) -> None:
        super().__init__(self.rules_class(), illegal_penalty, vocabulary, reward, rendering)


class TextLeduc(FixedRulesGame):
    """Leduc poker as a text game."""

    name: ClassVar[str] = "text_leduc"
    rules_class = LeducRules
    rules_text = (
        "You play Leduc poker with one other. The six cards are J, Q and K in the two suits s and h; each player "
        "holds one, which the other does not see, and has paid 1. In turn you fold (give up), call (match what the "
        "other has paid, or check) or raise, by 2 in the first round and by 4 in the second, at most two raises a "
        "round. Between the rounds one card is laid open. A pair with that card wins, else the higher rank (K, then "
        "Q, then J); equal ranks share. Your reward is what you win or lose."
    )


class TextLiarsDice(TextGame):
    """Liar's dice as a text game."""

    name: ClassVar[str] = "text_liars_dice"
    rules_text = (
        "You play liar's dice with one other. Each has rolled dice in secret. In turn you bid on all the dice of "
        "both: 2x5 says that at least two of them show a five, and the highest face is wild and counts as any. A bid "
        "must be higher than the last: more dice, or as many of a higher face. Instead of bidding you may say liar: "
        "if the last bid is true, who said liar loses, else who bid it. The winner's reward is 1, the loser's -1."
    )

    def __init__(
        self,
        *,
        dice: int = 1,
        faces: int = 6,
        illegal_penalty: float = 0.5,
        vocabulary: dict[str, str] | None = None,
        reward: RewardMode = "dense",
        rendering: Rendering = "compact",
    ) -> None:
        super().__init__(LiarsDiceRules(dice, faces), illegal_penalty, vocabulary, reward, rendering)


class TextTicTacToe(FixedRulesGame):
    """Tic-tac-toe as a text game."""

    name: ClassVar[str] = "text_tic_tac_toe"
    picture = "board"
    rules_class = TicTacToeRules
    rules_text = (
        "You play tic-tac-toe with one other. You are told the board row by row from the top, the marks x and o and "
        "'.' for an empty square. Rows are a, b and c from the top, columns 1, 2 and 3 from the left: b3 is the "
        "middle row's right square. x begins. Three of your marks in a row, column or diagonal win: reward 1, for the "
        "loser -1; a full board is a draw, reward 0."
    )

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns an optimal move; ties between equally fast moves are broken at random."""
        return self.says(rng.choice(_perfect(self.state)))


@cache  # 5,478 boards
def _perfect(board: TicTacToeState) -> tuple[int, ...]:
    return tuple(best_actions(TicTacToeRules(), board, 9, lambda *_: 0.0))


class TextConnectFour(FixedRulesGame):
    """Connect four as a text game."""

    name: ClassVar[str] = "text_connect_four"
    picture = "board"
    rules_class = ConnectFourRules
    is_enumerable = False
    rules_text = (
        "You play connect four with one other. You are told the board row by row from the top, the stones x and o and "
        "'.' for an empty cell. In turn each says a column, 1 to 7 from the left, and a stone falls to the lowest "
        "empty cell of it; x begins. Four of your stones in a row, column or diagonal win: reward 1, for the loser "
        "-1; a full board is a draw, reward 0."
    )

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the best move of a search to depth `SEARCH_DEPTH`; ties are broken at random."""
        return self.says(rng.choice(_ahead(self.state)))


@lru_cache(maxsize=4096)
def _ahead(stones: ConnectFourState) -> tuple[int, ...]:
    return tuple(best_actions(ConnectFourRules(), stones, SEARCH_DEPTH, line_heuristic))


class TextBargaining(TextGame):
    """Bargaining as a text game: two players divide items, whose values are private."""

    name: ClassVar[str] = "text_bargaining"
    rules_text = (
        "You divide books, hats and balls with one other. You are told what there is and what an item of each kind is "
        "worth to you; the other values them otherwise, and you are not told how. In turn you offer a division by "
        "saying what you keep: keep-1-0-2 keeps one of the first kind, none of the second and two of the third, and "
        "leaves the rest to the other. Or you agree to the other's last offer. Whoever speaks last can only agree or "
        "refuse. If you agree, your reward is what your share is worth to you; without agreement nobody gets "
        "anything."
    )

    def __init__(
        self,
        *,
        counts: tuple[int, ...] = (1, 2),
        total: int = 6,
        turns: int = 4,
        illegal_penalty: float = 0.5,
        vocabulary: dict[str, str] | None = None,
        reward: RewardMode = "dense",
        rendering: Rendering = "compact",
    ) -> None:
        super().__init__(BargainingRules(counts, total, turns), illegal_penalty, vocabulary, reward, rendering)


StateEvaluator = Callable[[Any, int], float]  # estimated value of a state for a player, in (-1, 1)
EARLY_RESULT_BONUS = 1e-4  # relative bonus per unused move of depth: an earlier win beats a later one


def best_actions(rules: Rules[Any], state: Any, depth: int, evaluate_state: StateEvaluator) -> list[int]:
    """Returns the actions of highest value for the player to move, by negamax with alpha-beta pruning, `depth` moves
    deep.

    `evaluate_state(state, player)` estimates states where play has not ended by then; if `depth` covers the longest
    game, play is perfect. For two-player zero-sum games without chance.
    """
    worth: dict[int, float] = {}
    player = rules.current_player(state)
    for action in rules.legal_actions(state):
        after = rules.next_state(state, action)
        best = max(worth.values(), default=-math.inf)
        # The next float below the best value: an action that equals the best then differs from a worse one.
        floor = math.nextafter(best, -math.inf)
        worth[action] = _negamax(rules, after, player, depth - 1, evaluate_state, floor, math.inf)
    best = max(worth.values())
    return [action for action, value in worth.items() if value == best]


def _negamax(
    rules: Rules[Any], state: Any, player: int, depth: int, evaluate_state: StateEvaluator, floor: float, ceiling: float
) -> float:
    """Returns the value of `state` for `player`; exact only between `floor` and `ceiling`."""
    turn = rules.current_player(state)
    if turn == TERMINAL:
        return float(rules.returns(state)[player] * (1 + EARLY_RESULT_BONUS * depth))
    if depth <= 0:
        return evaluate_state(state, player)
    if turn != player:
        return -_negamax(rules, state, turn, depth, evaluate_state, -ceiling, -floor)
    best = -math.inf
    for action in rules.legal_actions(state):
        after = rules.next_state(state, action)
        best = max(best, _negamax(rules, after, player, depth - 1, evaluate_state, max(floor, best), ceiling))
        if best >= ceiling:
            break
    return best
