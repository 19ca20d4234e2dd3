"""Math env: a reasoner and a tool user solve one problem in parallel until they agree, or one seat solves it alone.

Follows the math workflow of Stronger-MAS (arXiv 2510.11062), with one difference: a seat's local reward is the change
since its last turn, so extra turns earn nothing by themselves.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.core.types import Seat, Step
from palestra.environments.math.answer_extraction import final_answer, multiline_answer, parse_number, parse_relation
from palestra.environments.math.expressions import evaluate
from palestra.environments.math.grader_client import require_package
from palestra.environments.math.grading import INCORRECT, AnswerGrade, grade_answer, grade_directly
from palestra.environments.math.problem import Problem, ProblemKind
from palestra.environments.math.problem_source import ProblemSource
from palestra.environments.math.reasoning import grade_reasoning
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, Terms, terms_gained, terms_info, total_rewards
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split
from palestra.sandbox import ResourceLimits, RunResult, Sandbox, open_sandbox

CORRECT_REWARD = 1.0  # local reward, times the grade
UNREADABLE_PENALTY = 0.1  # local penalty of the reasoner for an answer that cannot be read
# of the tool: its program fails; prints nothing readable
NO_RUN_PENALTY = 0.05
UNREADABLE_OUTPUT_PENALTY = 0.05
SOLVED_REWARD = 1.0  # team reward for a correct final answer
TOOL_TIME_LIMIT_S = 10.0  # default time limit of a program

MathTeam = Literal["solver_checker", "single"]
SEATS: dict[MathTeam, tuple[Seat, ...]] = {"solver_checker": ("reasoner", "tool"), "single": ("reasoner",)}
DEFAULT_TURNS: dict[MathTeam, int] = {"solver_checker": 4, "single": 1}


class Math(Env):
    """Math problems for a reasoner and a tool user, or a reasoner alone. The final answer is the reasoner's.

    Problems are generated (`kinds`, `difficulty`), read from a file (`path`, `columns`), or `reasoning` tasks. The
    episode ends when both answers agree (for one seat: when its answer repeats), independently of the correct answer;
    otherwise after `max_turns`, as `truncated`. Info: `success` (the final answer is correct), `turn`, and by seat
    `answers`, `invalid` and `unjudged` (grading timed out, counted as wrong); in the last step `answer` (the final
    one), `gold` and `agreed`.

    Raises ValueError if an option is out of range, or the problem source or the sandbox is unavailable.
    """

    name: ClassVar[str] = "math"
    replaces_state = True

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        team: MathTeam = "solver_checker",
        max_turns: int | None = None,
        kinds: list[ProblemKind] | None = None,
        difficulty: int | list[int] | None = None,
        path: Path | None = None,
        columns: dict[str, str] | None = None,
        reasoning: list[str] | None = None,
        split: Split | Literal["all"] = "train",
        tool_time_limit_s: float | None = None,
        grader_time_limit_s: float = 2.0,
        unsafe: bool = False,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        self.seats = SEATS[team]
        self.turns = DEFAULT_TURNS[team] if max_turns is None else max_turns
        check_range("max_turns", self.turns, 1, 100)
        if tool_time_limit_s is not None and "tool" not in self.seats:
            raise ValueError(f"tool_time_limit_s is for programs, and team: {team} writes none: leave it out")
        self.tool_seconds = TOOL_TIME_LIMIT_S if tool_time_limit_s is None else tool_time_limit_s
        check_range("tool_time_limit_s", self.tool_seconds, 0.1, 600)
        check_range("grader_time_limit_s", grader_time_limit_s, 0.1, 600)
        self.judge_seconds = grader_time_limit_s
        self.reward = reward
        self.is_compact = rendering == "compact"
        self.source = ProblemSource(kinds, difficulty, split, path, columns, reasoning)
        self.roles = role_prompts(self.seats, self.turns, self.tool_seconds, self._form(), self.is_compact)
        if reasoning is None and not (self.source.is_generated and self.is_compact):
            require_package("math")
        self.sandbox = open_sandbox(unsafe) if "tool" in self.seats else None
        self._over = True

    # ---- env interface

    def instance_of(self, seed: int) -> int | tuple[str, int]:
        return self.source.instance_of(seed)

    def reset(self, seed: int) -> Step:
        self.problem = self.source.problem(seed)
        self.history: tuple[MathTurn, ...] = ()
        self._over = False
        return Step(self._views(), info={"turn": 0, "success": False})

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if self._over or actions.keys() != set(self.seats):
            why = f"all of {self.seats} act at once"
            if self._over:
                why = "the game is over: call reset(seed) before step"
            raise ValueError(f"the actions are for {sorted(actions)}, but {why}")
        replies = await asyncio.gather(*(self._reply(seat, str(actions[seat])) for seat in self.seats))
        turn = dict(zip(self.seats, replies, strict=True))
        agreed = await self._answers_agree(turn)
        terms = {seat: self._dense_terms(seat, turn) for seat in self.seats}
        self.history += (turn,)
        self._over = agreed or len(self.history) >= self.turns
        success = self._over and turn["reasoner"].verdict.is_correct
        info = self._info(turn) | {"success": success}
        if self._over:
            info |= {"answer": turn["reasoner"].answer, "gold": self.problem.answer, "agreed": agreed}
        truncated = self._over and not agreed and (len(self.seats) > 1 or self.turns > 1)
        rewards = total_rewards(terms)
        info |= terms_info(terms)
        return Step(self._views(), rewards, SOLVED_REWARD * success, truncated=truncated, info=info)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns a correct answer; for the tool seat a program that prints it."""
        problem = self.problem
        if seat == "tool":
            program = problem.solution_program
            if self.is_compact:
                return program
            if not program.startswith(("print(", "from ")):
                program = f"print({program})"
            begun = rng.choice(("This program prints the answer:", "It can be worked out:"))
            return f"{begun}\n```python\n{program}\n```"
        if self.is_compact:
            return problem.answer
        return f"{rng.choice(('So the answer is:', 'That makes:', 'Worked out:'))}\n#### {problem.answer}"

    def _form(self) -> str:
        """Returns the sentence about the form of answers in the role prompts."""
        if self.source.is_generated:
            return EXACT_NUMBER_FORMAT
        if self.source.reasoning is not None:
            return ""
        return NUMBER_FORMAT

    # ---- one answer

    async def _reply(self, seat: Seat, text: str) -> Reply:
        if seat == "tool":
            return await self._ran(extract_program(text))
        answer = self._find_answer(text, bare=self.is_compact)
        return Reply(text, answer, await self._grade_answer(answer))

    async def _ran(self, program: str) -> Reply:
        assert self.sandbox
        printed = await run_program(program, self.sandbox, self.tool_seconds)
        answer = None
        if not printed.error:
            answer = self._find_answer(printed.text, bare=True, last=True)
        return Reply(program, answer, await self._grade_answer(answer), printed.error)

    def _find_answer(self, text: str, *, bare: bool, last: bool = False) -> str | None:
        """Returns the answer in a text, or in its last line; None if there is none.

        In the compact rendering, answers to generated problems must be a number or a relation and nothing else.
        """
        if self.problem.reasoning_entry:
            return multiline_answer(text, allow_unmarked=bare)
        if last:
            text = text.strip().rpartition("\n")[2]
        answer = final_answer(text, allow_unmarked=bare)
        needs_number = self.is_compact and self.problem.needs_computation
        if answer and needs_number and not (parse_number(answer) or parse_relation(answer)):
            return None
        return answer

    async def _grade_answer(self, answer: str | None) -> AnswerGrade:
        problem = self.problem
        if problem.reasoning_entry:
            return await grade_reasoning(answer, problem, self.judge_seconds)
        return await grade_answer(answer, problem.answer, question=problem.question, cpu_limit_s=self.judge_seconds)

    async def _answers_agree(self, turn: MathTurn) -> bool:
        """True if both seats' answers agree, or a lone seat's last two. The correct answer is not used."""
        if len(self.seats) > 1:
            other = turn["tool"]
        elif self.history:
            other = self.history[-1]["reasoner"]
        else:
            return False
        own = turn["reasoner"]
        if not (own.verdict.is_graded and other.verdict.is_graded):
            return False
        if own.answer is None or other.answer is None:
            return False
        if self.problem.reasoning_entry:
            return (grade_directly(own.answer, other.answer) or INCORRECT).is_correct
        grade = await grade_answer(own.answer, other.answer, cpu_limit_s=self.judge_seconds)
        return grade.is_correct

    # ---- rewards and observations

    def _dense_terms(self, seat: Seat, turn: MathTurn) -> Terms:
        if self.reward == "outcome":
            return {}
        terms = _local_terms(seat, turn[seat])
        if not self.history:
            return terms
        return terms_gained(terms, _local_terms(seat, self.history[-1][seat]))

    def _info(self, turn: MathTurn) -> dict[str, Any]:
        reasons = {seat: _why_invalid(reply) for seat, reply in turn.items()}
        return {
            "turn": len(self.history),
            "answers": {seat: reply.answer for seat, reply in turn.items()},
            "invalid": {seat: bool(reason) for seat, reason in reasons.items()},
            "why_invalid": {seat: reason for seat, reason in reasons.items() if reason},
            "unjudged": {seat: not reply.verdict.is_graded for seat, reply in turn.items()},
        }

    def _views(self) -> dict[Seat, Any]:
        if self._over:
            return {}
        return {
            seat: format_observation(self.problem, seat, self.history, self.turns, self.is_compact)
            for seat in self.seats
        }


def _why_invalid(reply: Reply) -> str:
    """Returns why a reply is invalid; "" if it is valid."""
    if reply.error:
        return reply.error
    if not reply.verdict.is_readable:
        return "no answer could be read in it"
    return ""


def _local_terms(seat: Seat, reply: Reply) -> dict[str, float]:
    """Returns the local score of a reply by terms; together at most 1."""
    unreadable = not reply.verdict.is_readable
    cost = UNREADABLE_PENALTY * unreadable
    if seat == "tool":
        cost = NO_RUN_PENALTY * (reply.error is not None) + UNREADABLE_OUTPUT_PENALTY * unreadable
    return {FORM_TERM: 0.0 - cost, "correct": CORRECT_REWARD * reply.verdict.score}


# ---- prompts and observations: full ones for language models, compact ones for tiny models


MAX_QUOTE_CHARS = 2000  # maximum characters of a quoted reply
MAX_COMPACT_QUOTE_CHARS = 24  # maximum characters of an answer in the compact rendering

ANSWER_FORMAT = "End with #### and the final answer alone, for example #### 42, or put it in \\boxed{}."
EXACT_NUMBER_FORMAT = "A number is an integer or a fraction in lowest terms, such as 7/2."
NUMBER_FORMAT = "Work the answer out: a number is an integer, a decimal or a fraction in lowest terms, such as 7/2."


@dataclass(frozen=True)
class Reply:
    """A seat's reply in one turn, the answer extracted from it, and the grader's verdict.

    For the tool seat, `text` is the program and `error` a one-line description of its failure.
    """

    text: str
    answer: str | None
    verdict: AnswerGrade
    error: str | None = None


MathTurn = Mapping[Seat, Reply]


def role_prompts(seats: Sequence[Seat], turns: int, seconds: float, exact: str, compact: bool) -> dict[Seat, str]:
    """Returns the system message of each seat; `exact` is a sentence about the form of answers, or ""."""
    if compact:
        return {seat: f"math {seat}" for seat in seats}
    numbers = f" {exact}" if exact else ""
    if len(seats) == 1:
        again = f" You are asked up to {turns} times, until your answer stays the same." if turns > 1 else ""
        return {
            "reasoner": f"You solve a mathematics problem.{again}\n"
            f"Think it through step by step. {ANSWER_FORMAT}{numbers}"
        }
    together = (
        "You and a partner solve the same mathematics problem at the same time. After each turn both of you see what "
        f"both answered. It is over when your two answers agree, after {turns} turns at the latest; the reasoner's "
        "last answer is the team's."
    )
    reasoner = f"You are the reasoner; your partner writes programs. Think step by step. {ANSWER_FORMAT}"
    tool = (
        "You are the tool user; your partner reasons. Write one Python program that prints the answer on its last "
        f"line, in a ```python block. It runs alone, without network, for at most {seconds:g} seconds."
    )
    return {"reasoner": f"{together}\n{reasoner}{numbers}", "tool": f"{together}\n{tool}{numbers}"}


def format_observation(problem: Problem, seat: Seat, turns: Sequence[MathTurn], max_turns: int, compact: bool) -> str:
    """Returns the observation of a seat: the problem and the replies so far."""
    if compact:
        return " ".join([problem.short_question, *(_compact(turn, seat) for turn in turns)])
    texts = [f"Problem: {problem.question}"]
    for number, turn in enumerate(turns, start=1):
        texts.append("\n".join([f"Turn {number}", *(_quote_reply(who, turn[who], who == seat) for who in turn)]))
    if max_turns > 1:
        texts.append(f"This is turn {len(turns) + 1} of {max_turns}.")
        if turns:
            texts[-1] += " Check, and correct what is wrong."
    return "\n\n".join(texts)


def _compact(turn: MathTurn, seat: Seat) -> str:
    """Returns one turn in compact form, the seat's own answer last: "tool 26 you 24"."""
    others = [f"{who} {_brief(reply)}" for who, reply in turn.items() if who != seat]
    return " ".join([*others, f"you {_brief(turn[seat])}"])


def _brief(reply: Reply) -> str:
    if reply.error:
        return "error"
    if not reply.answer:
        return "none"
    return " ".join(reply.answer.split())[:MAX_COMPACT_QUOTE_CHARS]


def _quote_reply(who: Seat, reply: Reply, is_own: bool) -> str:
    if who == "tool":
        outcome = f"It printed: {reply.answer or 'no answer'}"
        if reply.error:
            outcome = f"It failed: {reply.error}"
        whose = "Your" if is_own else "The tool user's"
        return f"{whose} program:\n```python\n{reply.text[-MAX_QUOTE_CHARS:]}\n```\n{outcome}"
    answer = reply.answer or "none was found: end with #### and the answer"
    return f"{'You' if is_own else 'The reasoner'} said:\n{reply.text[-MAX_QUOTE_CHARS:]}\nAnswer: {answer}"


# ---- the tool seat's Python: a program that prints an answer, or a single expression


MAX_PROGRAM_CHARS = 20_000  # maximum characters of a program
LIMIT_MESSAGES = {
    "signal": "it was killed",
    "wall": "it ran out of time",
    "cpu": "it ran out of time",
    "memory": "it ran out of memory",
    "output": "it printed too much",
}
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PLAIN = re.compile(r"[0-9+\-*/%(). ]{1,200}")

# Like Python's interactive prompt: the value of a single expression is printed.
RUNNER_SOURCE = """
source = open("program.py", encoding="utf-8").read().strip()
names = {"__name__": "__main__"}
try:
    code = compile(source, "program.py", "eval")
except SyntaxError:
    exec(compile(source, "program.py", "exec"), names)
else:
    shown = eval(code, names)
    if shown is not None:
        print(shown)
"""


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program, and a one-line error, None on success."""

    text: str
    error: str | None = None


def extract_program(text: str) -> str:
    """Returns the last fenced Python block of a text, or the whole text without one."""
    blocks = _FENCED.findall(text) or [text]
    return str(blocks[-1]).strip()


async def run_program(source: str, sandbox: Sandbox, seconds: float) -> ProgramOutput:
    """Runs `source` in the sandbox for at most `seconds` of wall and CPU time. Arithmetic is evaluated in process."""
    if len(source) > MAX_PROGRAM_CHARS:
        return ProgramOutput("", f"the program is longer than {MAX_PROGRAM_CHARS} characters")
    if plain := arithmetic_output(source):
        return plain
    limits = ResourceLimits(wall=seconds, cpu=seconds)
    outcome = await sandbox.run_python(
        RUNNER_SOURCE, files={"program.py": source.encode("utf-8", "replace")}, limits=limits
    )
    return ProgramOutput(outcome.stdout.strip(), _error(outcome))


def arithmetic_output(source: str) -> ProgramOutput | None:
    """Returns the output or error of an arithmetic expression, or of `print` of one; None for any other program."""
    text = source.strip()
    inner = text[len("print(") : -1] if text.startswith("print(") and text.endswith(")") else text
    if not _PLAIN.fullmatch(inner):
        return None
    try:
        return ProgramOutput(str(evaluate(inner)))
    except ZeroDivisionError as error:
        return ProgramOutput("", f"ZeroDivisionError: {error}")
    except SyntaxError as error:
        if inner is not text:  # "print(1)(2)" fails differently
            return None
        return ProgramOutput("", f"SyntaxError: {error.msg}")
    except ValueError:
        return None


def _error(outcome: RunResult) -> str | None:
    if outcome.ended != "exit":
        return LIMIT_MESSAGES[outcome.ended]
    if outcome.code:
        return (outcome.stderr.strip().splitlines() or [f"exit status {outcome.code}"])[-1][:200]
    if not outcome.stdout.strip():
        return "nothing was printed"
    return None
