"""The user's own agent program as an env: each model that it asks is a seat, each call of a model a step.

The program runs as it is, in whatever framework, and asks an endpoint on this machine. What it asks becomes the seat's
observation, what the policy says becomes the endpoint's answer, and what the program returns are the rewards. Trees,
credit, opponents, evaluation: all as in any other env.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import json
import math
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from palestra.chat import same
from palestra.envs.base import Env
from palestra.envs.text.splits import Split
from palestra.types import Seat, Step
from palestra.web.calls import Asked, Refused
from palestra.web.endpoint import Session

TAIL = 2000  # characters of a failed command's output that its error quotes


@dataclass(frozen=True)
class Score:
    """How an episode ended: rewards by seat, one for the team, whether it counts as a success, and what else is worth
    keeping."""

    rewards: Mapping[Seat, float] = field(default_factory=dict)
    team: float = 0.0
    success: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Play:
    """What a program is told: the instance it is to play (`seed`, of `split`), and where its models are.

    `base_url` and `api_key` are for any client of OpenAI's chat completions; a model's name is its seat's. `reward`
    pays a seat for what it did last, while the program goes on.
    """

    seed: int
    split: Split
    base_url: str
    api_key: str
    seats: tuple[Seat, ...]
    options: Mapping[str, Any]
    reward: Callable[[Seat, float], None]


class Workflow(Env):
    """Plays `function` ("module:function", called with a `Play`; it may be a coroutine function) or `command` (a
    program with its arguments, told by environment variables) once an episode.

    A function returns a `Score`, or rewards by seat. A command prints as its last line `{"rewards": {...}, "team": 0,
    "success": true}`; it finds `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `PALESTRA_SEED`, `PALESTRA_SPLIT` and
    `PALESTRA_OPTIONS` (JSON) in its environment. `timeout` is how many seconds may pass between an answer and what the
    program does next; `settle` is how long calls that come at once are waited for, so that they make one step.

    The same seed and answers must lead to the same calls, or an episode cannot be forked: only then may an algorithm
    branch at every turn. What cannot be so repeated can still branch at the root.
    """

    name: ClassVar[str] = "workflow"

    def __init__(
        self,
        *,
        seats: list[str],
        function: str | None = None,
        command: list[str] | None = None,
        split: Split = "train",
        timeout: float = 60.0,
        settle: float = 0.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        if (function is None) == (not command):
            raise ValueError("a workflow is either function: module:name or command: [program, argument, ...]")
        if not seats or len({*seats}) < len(seats):
            raise ValueError(f"seats: {seats} must name at least one model, and each once")
        if timeout <= 0 or settle < 0:
            raise ValueError("timeout must be above 0 seconds, and settle not below 0")
        self.seats, self.split, self.timeout, self.settle = tuple(seats), split, timeout, settle
        self.options = options or {}
        self.program = _found(function) if function else None
        self.command = command or []
        self._running: _Running | None = None
        self._asked: dict[Seat, Asked] = {}

    async def reset(self, seed: int) -> Step:
        self.close()
        self._seed, self._played = seed, list[dict[Seat, tuple[Asked, str]]]()
        self._running = _Running(self, seed)
        return await self._next()

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if not self._asked:
            raise ValueError("nobody acts next: call reset(seed) before step")
        if set(actions) != set(self._asked):
            raise ValueError(f"{sorted(self._asked)} acts next, but the actions are for {sorted(actions)}")
        said = {seat: (asked, str(actions[seat])) for seat, asked in self._asked.items()}
        self._played.append(said)
        for asked, text in said.values():
            if not asked.answer.done():  # else the program has hung up
                asked.answer.set_result(text)
        return await self._next()

    async def fork(self) -> Self:
        """The program started anew and told the same answers. Raises ValueError where it does not ask the same."""
        twin = copy.copy(self)
        twin._running = None
        await twin.reset(self._seed)
        for earlier in self._played:
            twin._check(earlier)
            await twin.step({seat: text for seat, (_, text) in earlier.items()})
        return twin

    def close(self) -> None:
        if self._running:
            self._running.close()
            self._running = None

    async def _next(self) -> Step:
        """What the program does next: asks somebody, or ends."""
        assert self._running is not None
        running = self._running
        await running.news(self.timeout, self.settle)
        rewards = running.take_rewards()
        self._asked = running.take()
        if self._asked:
            return Step({seat: asked.chat for seat, asked in self._asked.items()}, rewards)
        score = running.score()
        self.close()
        for seat, reward in score.rewards.items():
            rewards[seat] = rewards.get(seat, 0.0) + float(reward)
        return Step({}, rewards, float(score.team), info={**score.info, "success": bool(score.success)})

    def _check(self, earlier: Mapping[Seat, tuple[Asked, str]]) -> None:
        before = {seat: asked.chat for seat, (asked, _) in earlier.items()}
        now = {seat: asked.chat for seat, asked in self._asked.items()}
        if before.keys() != now.keys() or not all(_alike(before[seat], now[seat]) for seat in before):
            raise ValueError(
                "the workflow asked something else when it was played again with the same answers: it cannot be forked "
                "in its midst. Draw all its randomness from play.seed, or let the algorithm branch at: root"
            )


class _Running:
    """A program under way on a thread of its own: what it asks and returns, as heard in the env's event loop."""

    def __init__(self, env: Workflow, seed: int) -> None:
        self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
        self.waiting: dict[Seat, deque[Asked]] = {seat: deque() for seat in env.seats}
        self.unanswered: list[Asked] = []
        self.paid: list[tuple[Seat, float]] = []
        self.ended: Future[Score] = Future()
        self.process: subprocess.Popen[str] | None = None
        self.session = Session(env.seats, lambda asked: self._tell(self._hear, asked))
        play = Play(seed, env.split, self.session.url, self.session.key, env.seats, env.options, self._pay(env.seats))
        threading.Thread(target=self._run, args=(env, play), name=f"workflow {seed}", daemon=True).start()

    async def news(self, timeout: float, settle: float) -> None:
        """Returns when somebody is asked or the program has ended. Raises TimeoutError where neither comes."""
        try:
            async with asyncio.timeout(timeout):
                while not self.ended.done() and not self._asking():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise TimeoutError(f"the workflow neither asked nor ended for {timeout:g} s: see its timeout") from None
        if settle and not self.ended.done():
            await asyncio.sleep(settle)

    def _asking(self) -> bool:
        """Whether anybody is asked who has not been hung up on."""
        for calls in self.waiting.values():
            while calls and calls[0].answer.done():
                calls.popleft()
        return any(self.waiting.values())

    def take(self) -> dict[Seat, Asked]:
        """The oldest call of each seat that has one."""
        self._asking()
        taken = {seat: calls.popleft() for seat, calls in self.waiting.items() if calls}
        self.unanswered = list(taken.values())
        return taken

    def take_rewards(self) -> dict[Seat, float]:
        paid, self.paid, found = self.paid, [], dict[Seat, float]()
        for seat, reward in paid:
            found[seat] = found.get(seat, 0.0) + reward
        return found

    def score(self) -> Score:
        """Raises RuntimeError where the program failed."""
        error = self.ended.exception()
        if error:
            raise RuntimeError(f"the workflow failed with {type(error).__name__}: {error}") from error
        return self.ended.result()

    def close(self) -> None:
        """Refuses what the program still asks; a command is killed."""
        self.session.close()
        for asked in [*self.unanswered, *(asked for calls in self.waiting.values() for asked in calls)]:
            if not asked.answer.done():
                asked.answer.set_exception(Refused("the episode is over"))
        if self.process:
            self.process.kill()

    def _pay(self, seats: tuple[Seat, ...]) -> Callable[[Seat, float], None]:
        def pay(seat: Seat, reward: float) -> None:
            if seat not in seats or not math.isfinite(reward):
                raise ValueError(f"cannot pay {seat!r} {reward!r}: seats are {', '.join(seats)}, rewards are numbers")
            self.paid.append((seat, float(reward)))

        return pay

    def _hear(self, asked: Asked) -> None:
        self.waiting[asked.model].append(asked)
        self.changed.set()

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *arguments)

    def _run(self, env: Workflow, play: Play) -> None:
        try:
            result = self._command(env.command, play) if env.command else _called(env.program, play)
            self.ended.set_result(_score(result, env.seats))
        except BaseException as error:  # whatever a user's program raises is the episode's failure, told in `score`
            self.ended.set_exception(error)
        self._tell(self.changed.set)

    def _command(self, command: list[str], play: Play) -> Any:
        told = {
            "OPENAI_BASE_URL": play.base_url,
            "OPENAI_API_BASE": play.base_url,
            "OPENAI_API_KEY": play.api_key,
            "PALESTRA_SEED": str(play.seed),
            "PALESTRA_SPLIT": play.split,
            "PALESTRA_OPTIONS": json.dumps(dict(play.options)),
        }
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | told) as self.process:
            out, errors = self.process.communicate()
        if self.process.returncode:
            raise ValueError(f"{command[0]} ended with code {self.process.returncode}: {errors[-TAIL:].strip()}")
        try:
            last = json.loads(out.strip().splitlines()[-1])
            return Score(last.pop("rewards", {}), last.pop("team", 0.0), last.pop("success", False), last)
        except (IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f'{command[0]} must print {{"rewards": {{...}}}} as its last line; it printed {out[-TAIL:]!r}'
            ) from error


def _found(function: str) -> Callable[[Play], Any]:
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load function: {function} ({error}); write module:name") from error
    if not callable(found):
        raise ValueError(f"function: {function} is no function")
    return found


def _called(program: Callable[[Play], Any] | None, play: Play) -> Any:
    assert program is not None
    result = program(play)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _score(result: Any, seats: tuple[Seat, ...]) -> Score:
    score = Score(result) if isinstance(result, Mapping) else result
    if not isinstance(score, Score):
        raise ValueError(f"a workflow must return a Score or rewards by seat; this one returned {result!r}")
    if unknown := sorted(set(score.rewards) - set(seats)):
        raise ValueError(f'a workflow pays "{unknown[0]}", but its seats are {", ".join(seats)}')
    return score


def _alike(one: Any, other: Any) -> bool:
    return len(one.messages) == len(other.messages) and all(map(same, one.messages, other.messages))
