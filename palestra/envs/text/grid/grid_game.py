"""Base class of grid games: seats, turn order, rewards and observations, independent of the game's rules.

A turn is a planner's answer followed by an executor's, or one answer in the other teams. Team and local rewards are
separate: the team reward is for changes of the board, a local reward for what only that seat controls.
"""

from __future__ import annotations

import copy
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, Terms, terms_info, total_rewards
from palestra.envs.support.answers import mark_answer
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.options import BoardRendering, RewardMode, check_range
from palestra.envs.text.grid.grid import DIRECTIONS, parse_moves

SOLVED_REWARD = 1.0  # team reward for solving the puzzle; planner's reward for a plan that would solve it
UNREADABLE_PENALTY = 0.1  # local penalty for an answer that cannot be read
ILLEGAL_PENALTY = 0.1  # local penalty, times the share of illegal moves
PLAN_REWARD = 0.5  # executor's reward, times the share of the plan it carried out

GridTeam = Literal["planner_executor", "alternating", "single"]
SEATS: dict[GridTeam, tuple[Seat, ...]] = {
    "planner_executor": ("planner", "executor"),
    "alternating": ("first", "second"),
    "single": ("agent",),
}
MAX_QUOTE_CHARS = 1000  # maximum characters of the planner's answer shown to the executor in the ascii rendering


class GridGame(Env):
    """A grid puzzle for a team of one or two. Subclasses define states, and how moves and plans change them.

    Info: `success`, `turn` (turns completed), `invalid` (the last answer was unreadable or held an illegal move) and
    then `why_invalid`, in the last step `steps` (moves made). Running out of turns is `truncated`. Between steps,
    `instance` is the layout, `state` the game's state, and `plan` the planner's last plan, None if unreadable. Raises
    ValueError if an option is out of range.
    """

    replaces_state = True
    picture = "grid"
    size: int  # cells of a side
    compact_name = ""  # the game's name in compact role prompts
    plan_format = ""
    plan_parts = 1  # maximum parts of a plan
    rules_text = ""

    def __init__(
        self, team: GridTeam, max_turns: int, max_moves: int, reward: RewardMode, rendering: BoardRendering
    ) -> None:
        check_range("max_turns", max_turns, 1, 1000)
        check_range("max_moves", max_moves, 1, 100)
        self.seats = SEATS[team]
        self.turns = max_turns
        self.moves = max_moves
        self.reward = reward
        self.rendering = rendering
        self.roles: Mapping[Seat, str] = {seat: self._role(seat) for seat in self.seats}
        self._over = True

    # ---- implemented by each game; states are immutable, so a fork copies references only

    @abstractmethod
    def make_layout(self, seed: int) -> Any:
        """Returns the instance for `seed`, with its initial state `start`."""

    @abstractmethod
    def parse_plan(self, answer: Any) -> tuple[Any, ...] | None:
        """Parses the planner's answer; None if it is unreadable."""

    @abstractmethod
    def write_plan(self, plan: tuple[Any, ...]) -> str: ...

    def fork(self) -> Self:
        """Returns an independent copy: states are replaced, not changed."""
        return copy.copy(self)

    @abstractmethod
    def milestones(self, state: Any, plan: tuple[Any, ...]) -> list[Any]:
        """Returns the state after each part of the plan, as far as it can be carried out from `state`."""

    @abstractmethod
    def plan_progress(self, plan: tuple[Any, ...], states: Sequence[Any]) -> float:
        """Returns the share, in [0, 1], of the feasible part of `plan` that `states` carry out in order.

        The first of `states` is the executor's initial state. Progress towards the next part counts as a fraction.
        """

    @abstractmethod
    def solution(self, state: Any) -> tuple[Any, ...]:
        """Returns the parts of a plan that solves the puzzle, of any number; () if there is none."""

    @abstractmethod
    def moves_of(self, state: Any, plan: tuple[Any, ...]) -> list[int]:
        """Returns the moves that carry out the plan as far as possible, of any number."""

    @abstractmethod
    def move(self, state: Any, direction: int) -> Any | None:
        """Returns the state after one move, None if the move is illegal."""

    @abstractmethod
    def potential(self, state: Any) -> int:
        """Returns a distance from the solution, positive until solved."""

    @abstractmethod
    def is_solved(self, state: Any) -> bool: ...

    @abstractmethod
    def compact_observation(self) -> str: ...

    @abstractmethod
    def ascii_observation(self) -> str: ...

    # ---- env interface

    def reset(self, seed: int) -> Step:
        self.instance = self.make_layout(seed)
        self.state = self.instance.start
        self.initial_potential = self.potential(self.state)
        self._acting = 0
        self._turn = 0
        self._steps = 0
        self.plan: tuple[Any, ...] | None = None
        self._message = ""
        self._over = False
        return self._step({}, 0.0)

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(None if self._over else self.seats[self._acting], actions)
        answer = actions[seat]
        if self.seats[self._acting] == "planner":
            self.plan = self.parse_plan(answer)
            self._message = str(answer)[-MAX_QUOTE_CHARS:]
            self._acting = 1
            refused = "" if self.plan else f"it could not be read. {self.plan_format}"
            return self._step({"planner": self._plan_terms()}, 0.0, refused)
        return self._move(answer)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns an answer from a solution: a planner's is its next parts, an executor carries out its plan, and any
        mover that has no feasible plan walks on to the solution. A lost puzzle is played at random."""
        return mark_answer(self._expert_answer(seat, rng), is_compact=self.rendering == "compact")

    def _expert_answer(self, seat: Seat, rng: random.Random) -> str:
        moves: list[int] = []
        if seat == "executor" and self.plan:
            moves = self.moves_of(self.state, self.plan)
        if not moves:  # a solution is searched for only then
            solution = self.solution(self.state)
            if seat == "planner" and solution:
                return self.write_plan(solution[: self.plan_parts])
            moves = self.moves_of(self.state, solution) or [rng.randrange(4)]
        return " ".join(DIRECTIONS[direction] for direction in moves[: self.moves])

    # ---- one answer

    def _plan_terms(self) -> Terms:
        if self.plan is None and self.reward == "outcome":
            return {}
        if self.plan is None:
            return {FORM_TERM: -UNREADABLE_PENALTY, "progress": 0.0}
        after = [self.state, *self.milestones(self.state, self.plan)][-1]
        if self.reward == "outcome":
            return {"solved": SOLVED_REWARD * self.is_solved(after)}
        return {FORM_TERM: 0.0, "progress": self._gain(self.state, after)}

    def _move(self, answer: Any) -> Step:
        seat = self.seats[self._acting]
        before = self.state
        moves = parse_moves(answer, self.moves)
        states, illegal = self._walk(moves or ())
        self._turn += 1
        self._acting = (self._acting + 1) % len(self.seats)
        refused = self._why_refused(moves, illegal)
        if self.reward == "outcome":
            return self._step({seat: {}}, SOLVED_REWARD * self.is_solved(self.state), refused)
        terms = {FORM_TERM: -UNREADABLE_PENALTY}
        if moves:
            terms[FORM_TERM] = 0.0 - ILLEGAL_PENALTY * illegal / len(moves)
        if seat == "executor":
            terms["plan"] = 0.0
            if self.plan:
                terms["plan"] = PLAN_REWARD * self.plan_progress(self.plan, [before, *states])
        return self._step({seat: terms}, self._gain(before, self.state), refused)

    def _why_refused(self, moves: tuple[int, ...] | None, illegal: int) -> str:
        """Returns why an answer with these moves is invalid; "" if it is valid."""
        if moves is None:
            return f"it could not be read: an answer is 1 to {self.moves} of up, down, left and right"
        if illegal:
            return f"moves that are not possible, and were skipped: {illegal} of {len(moves)}"
        return ""

    def _walk(self, moves: tuple[int, ...]) -> tuple[list[Any], int]:
        """Makes the moves until the puzzle is solved; returns the states passed and the number of
        illegal moves, which are skipped."""
        states = []
        illegal = 0
        for direction in moves:
            if (after := self.move(self.state, direction)) is None:
                illegal += 1
                continue
            self.state = after
            states.append(after)
            if self.is_solved(self.state):
                break
        self._steps += len(states)
        return states, illegal

    def _gain(self, before: Any, after: Any) -> float:
        """Returns the dense reward: the decrease of the potential as a share of the initial one,
        plus `SOLVED_REWARD` once solved."""
        closed = (self.potential(before) - self.potential(after)) / self.initial_potential
        return closed + SOLVED_REWARD * self.is_solved(after)

    # ---- observations

    def _step(self, terms: dict[Seat, Terms], team_reward: float, refused: str = "") -> Step:
        success = self.is_solved(self.state)
        self._over = success or self._turn >= self.turns
        rewards = total_rewards(terms)
        info: dict[str, Any] = {"success": success, "turn": self._turn, "invalid": bool(refused)} | terms_info(terms)
        if refused:
            info["why_invalid"] = refused
        if self._over:
            return Step({}, rewards, team_reward, truncated=not success, info=info | {"steps": self._steps})
        seat = self.seats[self._acting]
        return Step({seat: self._observation(seat)}, rewards, team_reward, info=info)

    def _observation(self, seat: Seat) -> str:
        if self.rendering == "compact":
            if seat != "executor":
                return self.compact_observation()
            return f"{self.compact_observation()} plan {self.write_plan(self.plan or ()) or 'none'}"
        message = ""
        if seat == "executor":
            message = f"\nYour planner message:\n{self._message}"
        return f"{self.ascii_observation()}\nTurn {self._turn + 1} of {self.turns}.{message}"

    def _role(self, seat: Seat) -> str:
        if self.rendering == "compact":
            return f"{self.compact_name} {seat}"
        return self.rules_for(seat)

    def rules_for(self, seat: Seat) -> str:
        words = ""
        if self.rendering == "compact":
            words = "\nThe board is told in words: r2 c3 is the cell in row 2 and column 3."
        return f"{self.rules_text}{words}\n{self._task(seat)}"

    def _task(self, seat: Seat) -> str:
        turns = f"The team has {self.turns} turns."
        if seat == "planner":
            return f"You are the planner; your partner, the executor, will read your plan and move. {turns}\n" + (
                f"{self.plan_format} Think briefly if you need to, then end your answer with #### and the plan."
            )
        partner = {
            "executor": "You are the executor: carry out your planner's plan, or better it where it is wrong.",
            "first": "You and a partner move in turn; you move first.",
            "second": "You and a partner move in turn; you move second.",
            "agent": "You play alone.",
        }[seat]
        return (
            f"{partner} {turns}\nAnswer with 1 to {self.moves} moves, each one of {', '.join(DIRECTIONS)}. Think "
            "briefly if you need to, then end your answer with #### and the moves, for example: #### up up left"
        )
