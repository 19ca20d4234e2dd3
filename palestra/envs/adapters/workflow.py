"""Runs a user's agent program as an env: each model that it calls is a seat, each model call a step.

The program runs unchanged, in any framework, and calls a chat-completions endpoint on this machine. Its requests are
the observations, the policies' answers are the endpoint's replies, and its return value holds the rewards. Tree
rollouts, credit assignment, opponents and evaluation work as in any other env.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import IO, Any, ClassVar, Self

from palestra.core.chat import same_message
from palestra.core.config import load_object
from palestra.core.files import parse_json
from palestra.core.http.answer_form import AnswerForm
from palestra.core.http.calls import CallRefused, ChatCall, ChatReply, assistant_message
from palestra.core.http.chat_server import ChatSession
from palestra.core.plain_values import short_repr
from palestra.core.types import Answer, Seat, Step
from palestra.core.user_functions import check_function
from palestra.envs.base import Env
from palestra.envs.reward_terms import Terms, terms_info, total_rewards
from palestra.envs.step_values import number
from palestra.envs.support.options import check_range
from palestra.envs.support.splits import Split
from palestra.parallel.processes import exit_reason

PROGRAM_TERM = "program"  # the term of a reward that the program gives no name
PRINTED = ("rewards", "team", "success")  # keys of the last line of a command; others are info
MISSPELT = {"reward", "rewards", "team", "team_reward", "team_rewards", "success", "successes", "succeeded"}
OUTPUT_TAIL_CHARS = 2000  # characters of a failed command's output quoted in the error


@dataclass(frozen=True)
class WorkflowResult:
    """Result of an episode: rewards by seat, the team reward, success (true, false or a number from 0 to 1; of
    opponents: by seat; None: the program does not say), and extra info. A seat's
    reward is a number, or several by name, its terms (envs/reward_terms.py): `{"solver": {"correct": 1.0, "form":
    -0.1}}`."""

    rewards: Mapping[Seat, float | Terms] = field(default_factory=dict)
    team_reward: float = 0.0
    success: bool | float | Mapping[Seat, bool | float] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkflowContext:
    """Input of an agent program: the instance (`seed`, of `split`), and the address of its models.

    `base_url` and `api_key` configure any client of OpenAI's chat completions; the model names are the seats.
    `add_reward(seat, reward, term)` pays a seat for its last action while the program is running; the name of the
    reward's term may be left out.
    """

    seed: int
    split: Split
    base_url: str
    api_key: str
    seats: tuple[Seat, ...]
    options: Mapping[str, Any]
    add_reward: Callable[..., None]


class Workflow(Env):
    """Runs `function` or `command` once per episode.

    `function` is "module:function", called with a `WorkflowContext`, plain or a coroutine function; it returns a
    `WorkflowResult`, or rewards by seat. `command` is a program with its arguments; its environment has
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `PALESTRA_SEED`, `PALESTRA_SPLIT` and `PALESTRA_OPTIONS` (JSON), and its last
    output line must be `{"rewards": {...}, "team": 0, "success": true}`.

    `timeout`: maximum seconds between an answer and the program's next call or its end. `settle`: seconds to wait for
    further concurrent calls, which then form one joint step. Of a `command`, `start_timeout` is the maximum number of
    seconds from its start to its first call, and `max_processes` that of commands which run in this process at once:
    further episodes wait for one to end, without a limit. Forks do not wait, since they would wait for each other.

    Forking requires that the same seed and answers lead to the same calls; only then can an algorithm branch at every
    turn. Other programs can still branch at the root.

    Raises ValueError if not exactly one of `function` and `command` is given, the function cannot be loaded, `seats`
    are empty or repeated, or a time is out of range.
    """

    name: ClassVar[str] = "workflow"
    takes_answers: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913 - the options of the env
        self,
        *,
        seats: list[str],
        function: str | None = None,
        command: list[str] | None = None,
        split: Split = "train",
        timeout: float = 60.0,
        settle: float = 0.0,
        start_timeout: float = 300.0,
        max_processes: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if (function is None) == (not command):
            raise ValueError("a workflow is either function: module:name or command: [program, argument, ...]")
        if not seats or len({*seats}) < len(seats):
            raise ValueError(f"seats: {seats} must name at least one model, and each once")
        check_range("timeout", timeout, 0.001, 86_400)
        check_range("settle", settle, 0, 86_400)
        check_range("start_timeout", start_timeout, 0.001, 86_400)
        if max_processes is not None:
            check_range("max_processes", max_processes, 1, 100_000)
        if function and max_processes:
            raise ValueError("max_processes limits command: programs; a function: runs in this process")
        self.seats = tuple(seats)
        self.split = split
        self.timeout = timeout
        self.settle = settle
        self.start_timeout = start_timeout
        self.max_processes = max_processes
        self._is_fork = False
        self.options = options or {}
        self.program: Callable[[WorkflowContext], Any] | None = None
        if function:
            self.program = load_object(function, "function")
            check_function(self.program, f"function: {function}", "play")
        self.command = command or []
        self._running: _ProgramRun | None = None
        self._asked: dict[Seat, ChatCall] = {}

    async def reset(self, seed: int) -> Step:
        self.close()
        self._seed = seed
        self._played = list[dict[Seat, tuple[ChatCall, ChatReply]]]()
        self._running = _ProgramRun(self, seed, None if self._is_fork else self.max_processes)
        await self._running.started.wait()
        return await self._next("start_timeout" if self.command else "timeout")

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if not self._asked:
            raise ValueError("no seat acts next: call reset(seed) before step")
        if set(actions) != set(self._asked):
            raise ValueError(f"{sorted(self._asked)} acts next, but the actions are for {sorted(actions)}")
        turn = {seat: (asked, _reply(actions[seat])) for seat, asked in self._asked.items()}
        self._played.append(turn)
        checked = _check_forms(turn)
        for asked, reply in turn.values():
            if not asked.answer.done():  # else the program closed the connection
                asked.answer.set_result(reply)
        step = await self._next()
        return replace(step, info={**checked, **step.info})

    async def fork(self) -> Self:
        """Restarts the program and replays the answers. Raises ValueError if its requests differ."""
        twin = copy.copy(self)
        twin._running = None
        twin._is_fork = True
        try:
            await twin.reset(self._seed)
            twin._is_fork = False
            for earlier in self._played:
                twin._check(earlier)
                await twin.step({seat: reply for seat, (_, reply) in earlier.items()})
        except BaseException:  # also a cancellation: only this method knows the twin
            twin.close()
            raise
        return twin

    def close(self) -> None:
        if self._running:
            self._running.close()
            self._running = None

    async def _next(self, limit: str = "timeout") -> Step:
        """Waits for the program's next model calls, or its end, for the seconds of the option
        `limit`; returns the step."""
        assert self._running is not None
        running = self._running
        await running.news(limit, getattr(self, limit), self.settle)
        terms = running.take_rewards()
        self._asked = running.take()
        if self._asked:
            seen = {seat: asked.chat for seat, asked in self._asked.items()}
            return Step(seen, total_rewards(terms), info=terms_info(terms))
        score = running.score()
        self.close()
        for seat, reward in score.rewards.items():
            terms.setdefault(seat, {})
            for name, value in reward.items() if isinstance(reward, Mapping) else [(PROGRAM_TERM, reward)]:
                _add_term(terms, seat, name, _number(value, f"the reward of {seat}"))
        info = dict(score.info)
        if score.success is not None:
            info["success"] = score.success
        team = _number(score.team_reward, "the team's reward")
        return Step({}, total_rewards(terms), team, info=info | terms_info(terms))

    def _check(self, earlier: Mapping[Seat, tuple[ChatCall, ChatReply]]) -> None:
        before = {seat: asked.chat for seat, (asked, _) in earlier.items()}
        now = {seat: asked.chat for seat, asked in self._asked.items()}
        if before.keys() != now.keys() or not all(_alike(before[seat], now[seat]) for seat in before):
            raise ValueError(
                "the workflow made other requests when it was replayed with the same answers, so it cannot be forked "
                "within an episode. Draw all its randomness from play.seed, or set algorithm.branch_at: root"
            )


class _RunningCommands:
    """The number of commands that run in this process."""

    def __init__(self) -> None:
        self.number = 0
        self.changed = threading.Condition()

    @contextmanager
    def enter(self, most: int | None, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Context of one command. Waits until fewer than `most` run (None: not at all). Raises
        CallRefused once `is_closed` returns True."""
        with self.changed:
            self.changed.wait_for(lambda: most is None or self.number < most or is_closed())
            if is_closed():
                raise CallRefused("the episode is over")
            self.number += 1
        try:
            yield
        finally:
            with self.changed:
                self.number -= 1
                self.changed.notify_all()

    def wake(self) -> None:
        """Lets those that wait see whether they are closed."""
        with self.changed:
            self.changed.notify_all()


_running_commands = _RunningCommands()


class _ProgramRun:
    """A program running on its own thread; its calls and result are delivered to the env's event
    loop. A command starts once fewer than `most` run (None: at once)."""

    def __init__(self, env: Workflow, seed: int, most: int | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.started = asyncio.Event()
        self.changed = asyncio.Event()
        self.most = most
        self.is_closed = False
        self.waiting: dict[Seat, deque[ChatCall]] = {seat: deque() for seat in env.seats}
        self.unanswered: list[ChatCall] = []
        self.paid: list[tuple[Seat, str, float]] = []
        self.ended: Future[WorkflowResult] = Future()
        self.process: subprocess.Popen[str] | None = None
        self.stderr: IO[bytes] | None = None  # of a command that has started
        self.session = ChatSession(env.seats, lambda asked: self._tell(self._hear, asked))
        play = WorkflowContext(
            seed, env.split, self.session.url, self.session.key, env.seats, env.options, self._pay(env.seats)
        )
        threading.Thread(target=self._run, args=(env, play), name=f"workflow {seed}", daemon=True).start()

    async def news(self, limit: str, timeout: float, settle: float) -> None:
        """Waits until a model is called or the program has ended. Raises TimeoutError, with the
        option `limit` and the last lines of a command's stderr, after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not self.ended.done() and not self._asking():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            written = f"; the end of its stderr: {tail}" if (tail := self._stderr_tail()) else ""
            raise TimeoutError(
                f"the workflow neither called a model nor ended for {timeout:g} s: see {limit}{written}"
            ) from None
        if settle and not self.ended.done():
            await asyncio.sleep(settle)

    def _asking(self) -> bool:
        """True while a model call waits for an answer; drops calls whose client has disconnected."""
        for calls in self.waiting.values():
            while calls and calls[0].answer.done():
                calls.popleft()
        return any(self.waiting.values())

    def take(self) -> dict[Seat, ChatCall]:
        """Removes and returns the oldest waiting call of each seat."""
        self._asking()
        calls_by_seat = {seat: calls.popleft() for seat, calls in self.waiting.items() if calls}
        self.unanswered = list(calls_by_seat.values())
        return calls_by_seat

    def take_rewards(self) -> dict[Seat, dict[str, float]]:
        """Removes and returns the rewards paid since the last call, summed by seat and term."""
        paid = self.paid
        self.paid = []
        totals = dict[Seat, dict[str, float]]()
        for seat, term, reward in paid:
            _add_term(totals, seat, term, reward)
        return totals

    def score(self) -> WorkflowResult:
        """Returns the result of the ended program. Raises RuntimeError if it failed."""
        if error := self.ended.exception():
            raise RuntimeError(f"the workflow failed with {type(error).__name__}: {error}") from error
        return self.ended.result()

    def close(self) -> None:
        """Rejects the pending model calls and kills a running command, or keeps a waiting one from its start."""
        self.is_closed = True
        self.session.close()
        for asked in [*self.unanswered, *chain.from_iterable(self.waiting.values())]:
            if not asked.answer.done():
                asked.answer.set_exception(CallRefused("the episode is over"))
        if self.process:
            self.process.kill()
        _running_commands.wake()

    def _stderr_tail(self) -> str:
        """Returns the end of what a running command wrote to stderr; "" of a function."""
        if self.stderr is None or self.stderr.closed:
            return ""
        file = self.stderr.fileno()  # whose position the command shares: `pread` leaves it
        start = max(0, os.fstat(file).st_size - OUTPUT_TAIL_CHARS)
        return os.pread(file, OUTPUT_TAIL_CHARS, start).decode(errors="replace").strip()

    def _pay(self, seats: tuple[Seat, ...]) -> Callable[..., None]:
        def pay(seat: Seat, reward: float, term: str = PROGRAM_TERM) -> None:
            if seat not in seats or not math.isfinite(reward):
                raise ValueError(f"cannot pay {seat!r} {reward!r}: seats are {', '.join(seats)}, rewards are numbers")
            self.paid.append((seat, term, float(reward)))

        return pay

    def _hear(self, asked: ChatCall) -> None:
        self.waiting[asked.model].append(asked)
        self.changed.set()

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *arguments)

    def _run(self, env: Workflow, play: WorkflowContext) -> None:
        try:
            if env.command:
                with _running_commands.enter(self.most, lambda: self.is_closed):
                    self._tell(self.started.set)
                    result = self._command(env.command, play)
            else:
                self._tell(self.started.set)
                result = _run_program(env.program, play)
            score = WorkflowResult(result) if isinstance(result, Mapping) else result
            if not isinstance(score, WorkflowResult):
                raise ValueError(
                    f"a workflow must return a WorkflowResult or rewards by seat; this one returned {result!r}"
                )
            if unknown := sorted(set(score.rewards) - set(env.seats)):
                raise ValueError(f'a workflow pays "{unknown[0]}", but its seats are {", ".join(env.seats)}')
            self.ended.set_result(score)
        except BaseException as error:  # any error of the user's program fails the episode; `score` raises it
            self.ended.set_exception(error)
        self._tell(self.changed.set)

    def _command(self, command: list[str], play: WorkflowContext) -> Any:
        variables = {
            "OPENAI_BASE_URL": play.base_url,
            "OPENAI_API_BASE": play.base_url,
            "OPENAI_API_KEY": play.api_key,
            "PALESTRA_SEED": str(play.seed),
            "PALESTRA_SPLIT": play.split,
            "PALESTRA_OPTIONS": json.dumps(dict(play.options)),
        }
        with (
            tempfile.TemporaryFile() as self.stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=self.stderr, text=True, env=os.environ | variables
            ) as self.process,
        ):
            if self.is_closed:  # in the meantime
                self.process.kill()
            out, _ = self.process.communicate()
            errors = self._stderr_tail()
        if self.process.returncode:
            raise ValueError(f"{command[0]} ended with {exit_reason(self.process.returncode)}: {errors}")
        try:
            last = parse_json(out.strip().splitlines()[-1])
            misspelt = [key for key in last.keys() - set(PRINTED) if key.lower() in MISSPELT]
        except (IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f'{command[0]} must print {{"rewards": {{...}}}} as its last line; it printed '
                f"{out[-OUTPUT_TAIL_CHARS:]!r}"
            ) from error
        if misspelt:
            raise ValueError(f"{command[0]} prints {misspelt[0]!r}: the keys are {', '.join(PRINTED)}")
        return WorkflowResult(last.pop("rewards", None) or {}, last.pop("team", 0.0), last.pop("success", None), last)


def _reply(action: Any) -> ChatReply:
    """Returns the endpoint's reply with a policy's answer. Its thought stays with the policy."""
    if isinstance(action, ChatReply):  # of a turn that is played again
        return action
    if not isinstance(action, Answer):
        return ChatReply(str(action))
    counts = (len(action.prompt_ids), len(action.token_ids)) if len(action.token_ids) else None
    return ChatReply(action.text, action.stop_reason == "length", counts)


def _check_forms(turn: Mapping[Seat, tuple[ChatCall, ChatReply]]) -> dict[str, Any]:
    """Returns the step's info with the answers that break the form their call asks for; empty if
    none asks for one."""
    reasons = {
        seat: asked.form.check(assistant_message(reply.text, "", asked.chat))
        for seat, (asked, reply) in turn.items()
        if asked.form != AnswerForm()
    }
    if not reasons:
        return {}
    broken = {seat: reason for seat, reason in reasons.items() if reason}
    return {"invalid": {seat: seat in broken for seat in reasons}, "why_invalid": broken}


def _number(value: Any, what: str) -> float:
    """Returns a number of a program's result as a float. Raises ValueError for texts and others."""
    if (found := number(value)) is None:
        raise ValueError(f"{what} is {short_repr(value)}, which is not a number: give one")
    return found


def _add_term(terms: dict[Seat, dict[str, float]], seat: Seat, name: str, reward: float) -> None:
    """Adds a reward to a seat's term."""
    seat_terms = terms.setdefault(seat, {})
    seat_terms[name] = seat_terms.get(name, 0.0) + reward


def _run_program(program: Callable[[WorkflowContext], Any] | None, play: WorkflowContext) -> Any:
    assert program is not None
    result = program(play)
    return asyncio.run(_await_result(result)) if inspect.isawaitable(result) else result


async def _await_result(result: Any) -> Any:
    return await result


def _alike(one: Any, other: Any) -> bool:
    return len(one.messages) == len(other.messages) and all(map(same_message, one.messages, other.messages))
