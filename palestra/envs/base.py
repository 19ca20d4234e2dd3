"""The env interface (`Env`) and its conformance check (`check_env`).

An env is a deterministic function of its seed and the actions. It names seats; the run assigns policies to them. To
write one, subclass `Env` (two methods, a third if `fork` needs more than a copy) and test it with `check_env`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from palestra.core.event_loop import call_outside_loop
from palestra.core.plain_values import short_repr
from palestra.core.types import Seat, Step
from palestra.envs.reward_terms import REWARD_TERMS_KEY, TEAM_TERMS_KEY, check_terms
from palestra.envs.step_values import checked_step

ENV_THREADS = ThreadPoolExecutor(256, "env")  # mostly waiting on blocking envs; asyncio's default pool is too small

NO_REWARD_KEY = "no_reward"  # key in a step's info: the trajectory has no reward, and is left out of its group

Picture = Literal["", "grid", "board", "sudoku"]


class Env(ABC):
    """A game or task for one or more seats.

    `seats` lists every seat that may act. `roles` holds a text for each seat that describes its task (a language policy
    puts it in the system message). `blocking = True` runs `step` in a thread, for envs that wait on something slow.
    `replaces_state = True` promises that `step` replaces what it changes and never mutates it: a fork then shares
    state. `picture` names the form of text observations that the dashboard can draw: "grid" (a world of cells, compact
    or drawn), "board" or "sudoku"; observations of other forms ("") are shown as text. `takes_answers = True`: actions
    may be a policy's whole `Answer` instead of its text. `is_paid_at_end = True`: only the last of several steps is
    rewarded, so that a run which compares the answers of one step is refused. Methods may also be coroutines.
    """

    name: ClassVar[str] = ""
    picture: ClassVar[Picture] = ""
    blocking: ClassVar[bool] = False
    replaces_state: ClassVar[bool] = False
    takes_answers: ClassVar[bool] = False
    is_paid_at_end: bool = False
    seats: tuple[Seat, ...]
    roles: Mapping[Seat, str] = {}

    @abstractmethod
    def reset(self, seed: int) -> Step | Awaitable[Step]:
        """Returns the first step of the instance given by `seed`. Equal seeds give equal instances, on any machine."""

    @abstractmethod
    def step(self, actions: dict[Seat, Any]) -> Step | Awaitable[Step]:
        """Plays one joint step: one action for each of the seats last observed, and for no other.

        An invalid action is the agent's mistake and costs reward; it must not raise.
        """

    def fork(self) -> Self | Awaitable[Self]:
        """Returns an independent copy of the game in its current state."""
        if self.replaces_state:
            return copy.copy(self)
        generators = [value for value in vars(self).values() if type(value) is random.Random]
        try:
            return copy.deepcopy(self, {id(rng): _same_state(rng) for rng in generators})
        except TypeError as error:  # a lock, a file, a generator
            raise ValueError(f"{type(self).__name__} cannot be copied ({error}): define fork(self)") from error

    def instance_of(self, seed: int) -> Any:
        """Returns what identifies the instance of `seed`, a number, a text or a tuple of such, by
        default the seed: equal values stand for one instance, which then counts once in the
        intervals of evaluations. Called after `reset`."""
        return seed

    def rules_for(self, seat: Seat) -> str:
        """Returns the text that a person at `seat` reads before playing: rules and the form of an answer, by default
        the seat's role."""
        return self.roles.get(seat, "")

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - most envs hold no resources
        """Releases the resources of the env."""


def _same_state(rng: random.Random) -> random.Random:
    """Returns a copy of a generator, without deepcopy's visit to each of the 625 numbers of its state."""
    twin = random.Random(0)
    twin.setstate(rng.getstate())
    return twin


# ---- the conformance check

Act = Callable[[Seat, Any, random.Random], Any]
RANDOM_WORDS = ("up", "down", "left", "right", "yes", "no", "0", "1", "2", "a", "b", "####", "hello", "r1 c1")
BAD_ACTIONS = ("", "\x00 ;DROP TABLE \U0001f9e8 {[(<", "up " * 50_000)


def check_env(
    make_env: Callable[[], Env], *, seeds: Iterable[int] = range(5), act: Act | None = None, max_steps: int = 1000
) -> None:
    """Plays an env at random and raises ValueError, with the fix, if it violates the env contract.

    Checked at every seed: equal seeds and actions give equal steps in two instances and after a second reset; a fork
    and its original do not affect each other; observations and rewards are for known seats, rewards are finite, and the
    sum of their terms where a step names terms; what a step holds can be stored; the game ends within `max_steps`;
    invalid actions do not raise; the last step reports `success` if any step does.
    `act(seat, observation, rng)` samples actions; by default they are random short texts, or choices from
    `legal_actions` if the env lists it.
    """

    def check_all() -> None:
        with asyncio.Runner() as runner:
            for seed in seeds:
                check = _Check(make_env, seed, act, max_steps, runner)
                game = check.play()
                check.check_second_instance(game)
                check.check_forks(game)
                check.check_bad_actions()

    call_outside_loop(check_all)


@dataclass
class _Game:
    """One playthrough: `actions[i]` led from `steps[i]` to `steps[i + 1]`."""

    steps: list[Step]
    actions: list[dict[Seat, Any]]


@dataclass
class _Check:
    make_env: Callable[[], Env]
    seed: int
    act: Act | None
    max_steps: int
    runner: asyncio.Runner

    def play(self) -> _Game:
        """Plays one game, checks every step and a second reset, and returns the game."""
        env = self.make_env()
        rng = random.Random(self.seed)
        game = _Game([self.check_seats(env, self.call(env.reset, self.seed))], [])
        if game.steps[0].pays and not game.steps[0].done:
            self.fail("pays in reset, before anybody acted", "pay in the first step")
        while not game.steps[-1].done:
            if len(game.actions) == self.max_steps:
                self.fail(f"did not end within {self.max_steps} steps", "give it a limit, or raise max_steps")
            game.actions.append(self.sample_actions(game.steps[-1], rng))
            game.steps.append(self.check_seats(env, self.call(env.step, game.actions[-1])))
        if any("success" in step.info for step in game.steps) and "success" not in game.steps[-1].info:
            self.fail('reports "success" in a step but not in the last one', 'put "success" into the last step\'s info')
        again = self.call(env.reset, self.seed)
        self.check_equal(again, game.steps[0], "a second reset with the same seed", "reset must set every field")
        self.call(env.close)
        return game

    def check_second_instance(self, game: _Game) -> None:
        """Checks that a second instance gives the same steps for the same seed and actions."""
        env = self.make_env()
        fix = "draw all randomness from the seed, and share no state between instances"
        self.check_equal(self.call(env.reset, self.seed), game.steps[0], "reset in a second instance", fix)
        self.replay_from(env, game, 0, "the same actions in a second instance", fix)
        self.call(env.close)

    def check_forks(self, game: _Game) -> None:
        """Forks half-way and plays both to the end, the original first, then again with the fork first."""
        half = len(game.actions) // 2
        fix = "fork must copy whatever step changes"
        for place in ("last", "first"):
            env = self.make_env()
            self.call(env.reset, self.seed)
            for action in game.actions[:half]:
                self.call(env.step, action)
            twin = self.call(env.fork)
            order = [(twin, "a fork"), (env, "the original of a fork")]
            if place == "last":
                order.reverse()
            for player, label in order:
                self.replay_from(player, game, half, f"{label} (forks play {place})", fix)
            self.call(env.close)
            self.call(twin.close)

    def check_bad_actions(self) -> None:
        """Checks that invalid actions do not raise."""
        for bad in BAD_ACTIONS:
            env = self.make_env()
            step = self.call(env.reset, self.seed)
            for _ in range(5):
                if step.done:
                    break
                try:
                    step = self.result(env.step, dict.fromkeys(step.observations, bad))
                except Exception as error:  # any exception of a user's env is a violation
                    self.fail(f"raised {error!r} at the action {bad[:20]!r}", "let a bad action cost reward instead")
                self.check_seats(env, step)
            self.call(env.close)

    def sample_actions(self, step: Step, rng: random.Random) -> dict[Seat, Any]:
        def one(seat: Seat, observation: Any) -> Any:
            if self.act:
                return self.act(seat, observation, rng)
            if step.legal_actions and step.legal_actions.get(seat):
                return rng.choice(step.legal_actions[seat])
            return " ".join(rng.choices(RANDOM_WORDS[: rng.choice((4, len(RANDOM_WORDS)))], k=rng.randint(1, 6)))

        return {seat: one(seat, observation) for seat, observation in step.observations.items()}

    def replay_from(self, env: Env, game: _Game, start: int, where: str, fix: str) -> None:
        for action, expected in zip(game.actions[start:], game.steps[start + 1 :], strict=True):
            self.check_equal(self.call(env.step, action), expected, where, fix)

    def check_seats(self, env: Env, step: Step) -> Step:
        """Returns `step`; fails if it names unknown seats or holds what a rollout refuses."""
        for what, named in (
            ("observes", step.observations),
            ("rewards", step.rewards),
            ("lists moves of", step.legal_actions),
        ):
            if unknown := set(named or {}) - set(env.seats):
                self.fail(f"{what} unknown seats {sorted(unknown)}; it has {list(env.seats)}", "add them to env.seats")
        try:
            checked_step(step, env.name or type(env).__name__, env.seats)
        except ValueError as error:
            self.fail(str(error), "correct what the step holds")
        if step.info.keys() & {REWARD_TERMS_KEY, TEAM_TERMS_KEY}:
            check_terms(step)
        return step

    def check_equal(self, step: Step, expected: Step, where: str, fix: str) -> None:
        for part in fields(Step):
            got = getattr(step, part.name)
            want = getattr(expected, part.name)
            if not _same(got, want):
                self.fail(f"differs in {part.name} after {where}: {short_repr(got)} is not {short_repr(want)}", fix)

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.result(method, *arguments)
        except Exception as error:  # whatever a user's env raises here is the finding
            raise ValueError(
                f"env {type(self.make_env()).__name__}, seed {self.seed}: {method.__name__} raised {error!r}. "
                f"Fix: correct {method.__name__}; the error above says where."
            ) from error

    def result(self, method: Callable[..., Any], *arguments: Any) -> Any:
        result = method(*arguments)
        if inspect.iscoroutine(result):
            result = self.runner.run(result)
        if method.__name__ in ("reset", "step"):
            require_step(result, method.__name__)
        return result

    def fail(self, what: str, fix: str) -> None:
        raise ValueError(f"env {type(self.make_env()).__name__}, seed {self.seed}: {what}. Fix: {fix}.")


def require_step(result: Any, method: str) -> Step:
    """Returns `result`, the return value of an env's `reset` or `step`. Raises ValueError if it is not a `Step`."""
    if isinstance(result, Step):
        return result
    hint = ", as in Gymnasium" if isinstance(result, tuple) else ""
    raise ValueError(
        f"{method} must return a palestra.Step, and returned a {type(result).__name__}{hint}: "
        "write return Step({seat: observation}, rewards={seat: reward})"
    )


def _same(a: Any, b: Any) -> bool:
    """True if equal; compares containers, arrays and data classes by their parts, and nan equals nan."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a):
        return all(_same(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))
    return bool(a == b or (a != a and b != b))
