"""Card and board games in words: what a seat knows is told in full each time, and it answers with one word.

The rules are those that exact solvers walk through (`palestra.envs.rules`), so that what a language agent does can be
judged exactly: every information state is one observation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from palestra.envs.base import Env
from palestra.envs.rules import CHANCE, OVER, Rules
from palestra.envs.rules.bargaining import BargainingRules
from palestra.envs.rules.kuhn import KuhnRules
from palestra.envs.rules.leduc import LeducRules
from palestra.envs.rules.liars_dice import LiarsDiceRules
from palestra.envs.rules.tic_tac_toe import TicTacToeRules
from palestra.types import Seat, Step


class TextGame(Env):
    """A game by `rules`. An answer counts if it is one of the words offered, letter for letter; any other has a word
    drawn for it, all alike, and costs the seat `penalty`. Rewards are the game's returns, at its end.

    `spoken` puts other words in place of the game's own, for models that know few: `{"pass": "no", "bet": "yes"}`.
    Raises ValueError where two words would become one.
    """

    def __init__(self, rules: Rules[Any], penalty: float, spoken: Mapping[str, str] | None) -> None:
        self.rules, self.penalty, self.spoken = rules, penalty, dict(spoken or {})
        self.seats = tuple(f"player_{player}" for player in range(rules.players))
        self.roles = dict.fromkeys(self.seats, rules.name.replace("_", " "))
        self.words = [self.spoken.get(word, word) for word in rules.actions]
        if len({*self.spoken.values()}) < len(self.spoken) or len({*self.words}) < len(self.words):
            raise ValueError(f"spoken: {self.spoken} says two things by one word, which nobody could tell apart")
        ours = sorted(map(re.escape, self.spoken), key=len, reverse=True)
        self._own_words = re.compile(rf"(?<![\w-])(?:{'|'.join(ours)})(?![\w-])") if ours else None

    def reset(self, seed: int) -> Step:
        self.rng = random.Random(seed)
        self.state = self.rules.initial()
        return self._said({}, {})

    def step(self, actions: dict[Seat, Any]) -> Step:
        ((seat, answer),) = actions.items()
        legal = self.rules.legal(self.state)
        said = [action for action in legal if self.words[action] == str(answer)]
        action = said[0] if said else self.rng.choice(legal)
        self.state = self.rules.next(self.state, action)
        info = {"invalid": {seat: not said}, "action": self.words[action]}
        return self._said({} if said else {seat: -self.penalty}, info)

    def asks(self, told: str, legal: list[int]) -> str:
        """What a seat is shown that by the rules knows `told` and may do what is legal."""
        if self._own_words:
            told = self._own_words.sub(lambda found: self.spoken[found[0]], told)
        return f"{told} Say {' or '.join(self.words[action] for action in legal)}."

    def _said(self, rewards: dict[Seat, float], info: dict[str, Any]) -> Step:
        """What is said once chance has done its part."""
        while (turn := self.rules.turn(self.state)) == CHANCE:
            actions, weights = zip(*self.rules.chances(self.state), strict=True)
            self.state = self.rules.next(self.state, self.rng.choices(actions, weights)[0])
        if turn == OVER:
            for seat, won in zip(self.seats, self.rules.returns(self.state), strict=True):
                rewards[seat] = rewards.get(seat, 0.0) + won
            return Step({}, rewards, info=info)
        legal, seat = self.rules.legal(self.state), self.seats[turn]
        shown = self.asks(self.rules.words(self.state, turn), legal)
        return Step({seat: shown}, rewards, legal={seat: [self.words[action] for action in legal]}, info=info)


class TextKuhn(TextGame):
    """Kuhn poker in words."""

    name: ClassVar[str] = "text_kuhn"

    def __init__(self, *, players: int = 2, penalty: float = 0.5, spoken: dict[str, str] | None = None) -> None:
        super().__init__(KuhnRules(players), penalty, spoken)


class TextLeduc(TextGame):
    """Leduc poker in words."""

    name: ClassVar[str] = "text_leduc"

    def __init__(self, *, penalty: float = 0.5, spoken: dict[str, str] | None = None) -> None:
        super().__init__(LeducRules(), penalty, spoken)


class TextLiarsDice(TextGame):
    """Liar's dice in words."""

    name: ClassVar[str] = "text_liars_dice"

    def __init__(
        self, *, dice: int = 1, faces: int = 6, penalty: float = 0.5, spoken: dict[str, str] | None = None
    ) -> None:
        super().__init__(LiarsDiceRules(dice, faces), penalty, spoken)


class TextTicTacToe(TextGame):
    """Tic-tac-toe in words."""

    name: ClassVar[str] = "text_tic_tac_toe"

    def __init__(self, *, penalty: float = 0.5, spoken: dict[str, str] | None = None) -> None:
        super().__init__(TicTacToeRules(), penalty, spoken)


class TextBargaining(TextGame):
    """Two divide books, hats and balls whose worth to each only that one knows."""

    name: ClassVar[str] = "text_bargaining"

    def __init__(
        self,
        *,
        counts: tuple[int, ...] = (1, 2),
        total: int = 6,
        turns: int = 4,
        penalty: float = 0.5,
        spoken: dict[str, str] | None = None,
    ) -> None:
        super().__init__(BargainingRules(counts, total, turns), penalty, spoken)
