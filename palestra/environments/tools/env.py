"""Tool-use env: questions that require tools, on facts of a fictional world, long sums, files and programs.

A seat observes the whole conversation and answers with tool calls, whose results it observes next, or with its final
answer. Steps depend only on the seed and the answers, provided that the user's own tools are deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.core.chat import (
    TOOL_CALL_PATTERN,
    Chat,
    Json,
    ToolCall,
    parse_assistant_message,
    render_tool_call,
    tool_calls_of,
)
from palestra.core.types import Seat, Step
from palestra.environments.tools.builtin_tools import (
    TOOLS_BY_WORLD,
    BuiltInTool,
    built_in_tools,
    check_tools_suffice,
    tools_of_seat,
)
from palestra.environments.tools.task_source import WorldName, open_task_source
from palestra.environments.tools.tasks import TaskKind, ToolRequirement, ToolTask
from palestra.environments.tools.tool_state import ToolState
from palestra.environments.tools.toolbox import Toolbox, ToolResult, load_tool
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, Terms, terms_info, total_rewards
from palestra.envs.support.answers import mark_answer
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split

SEAT_PROMPTS = {
    "agent": "You answer a question with the help of tools.",
    "researcher": (
        "You and a partner answer a question together. You alone can search the documents; your partner, the solver, "
        "can work with files, calculate and run programs, but knows of the documents only what you write."
    ),
    "solver": (
        "You and a partner answer a question together. Your partner, the researcher, has searched the documents and "
        "left you a note; you have the other tools, and give the answer."
    ),
}
ANSWER_INSTRUCTION = (
    "When you know the answer, reply without a call, and end your reply with #### and nothing but the answer, for "
    "example: #### 1204."
)
REPLY_INSTRUCTIONS = {
    "agent": ANSWER_INSTRUCTION,
    "researcher": "When you have found what the question needs, reply without a call: your reply is the note.",
    "solver": ANSWER_INSTRUCTION,
}
LOOKUP_HINT = "Facts that it asks for are in the documents, and nowhere else: look them up."
CALCULATE_HINT = "Numbers are too large for the head: have a tool do the sums."
HINTS = {"agent": f"{LOOKUP_HINT} {CALCULATE_HINT}", "researcher": LOOKUP_HINT, "solver": CALCULATE_HINT}
MAX_NOTE_CHARS = 2000  # characters of the researcher's note that the solver receives


def system_prompt(seat: Seat, turns: int, is_compact: bool) -> str:
    """Returns the system message of a seat; in the compact rendering only the env and seat names."""
    if is_compact:
        return f"tools {seat}"
    replies = f"One reply may hold several calls, and you have {turns} replies in all."
    return f"{SEAT_PROMPTS[seat]} {HINTS[seat]} {replies} {REPLY_INSTRUCTIONS[seat]}"


def task_prompt(task: ToolTask, note: str | None, is_compact: bool) -> str:
    """Returns the first user message of a seat; for a solver it includes the researcher's note."""
    if is_compact and note is None:
        return task.short_question
    if is_compact:
        return f"{task.short_question} note {note or 'none'}"
    lines = [task.question]
    if task.files:
        lines.append(f"Files in the scratch folder: {', '.join(sorted(task.files))}")
    if note is not None:
        lines += ["Your partner's note:", note or "(there is none)"]
    return "\n".join(lines)


ToolsTeam = Literal["single", "researcher_solver"]
SEATS: dict[ToolsTeam, tuple[Seat, ...]] = {"single": ("agent",), "researcher_solver": ("researcher", "solver")}

SOLVED_REWARD = 1.0  # team reward for the correct answer
VALID_CALLS_REWARD = 0.05  # local reward, once, for the first answer whose calls are all valid
FOUND_REWARD = 0.25  # local reward for all facts that a seat must obtain with tools; each pays its share once
NOTE_REWARD = 0.25  # researcher's reward, times the share of the required facts in its note
UNREADABLE_CALL_MESSAGE = (
    'Error: a call could not be read. Write it as <tool_call>{"name": "...", "arguments": {...}}</tool_call>, in JSON.'
)
INVALID_PENALTY = 0.1  # local penalty, times the share of invalid calls; or for an unreadable answer


class Tools(Env):
    """One agent with all tools, or a researcher with the search tools, which passes a note to a solver with the others.

    A seat has `max_turns` answers, each with up to `max_calls` calls; an answer without a call is its last. A call is
    limited to `call_time_limit_s` seconds, a result to `max_result_chars` characters, a search to `max_results`
    documents.

    Tasks are of `kinds`, by default all kinds of the `task_source`: "corpus" asks about `documents` (a folder of .txt
    and .md files, or a .jsonl with titles, texts and facts; default: the shipped ones), "drills" is a small world
    generated for each instance. `tasks`, a .jsonl with the user's questions, replaces them. `built_in` selects the
    built-in tools, `tools` adds the user's ("module:function"), which in a team belong to the solver. The python tool
    needs a sandbox, or `unsafe`.

    Dense rewards pay a seat for valid calls and for the required facts in their results, and penalise invalid calls;
    the team is paid 1 for the correct answer. With `reward: outcome` only that is paid.

    Raises ValueError if an option is out of range, or a tool, document or task file cannot be loaded.
    """

    name: ClassVar[str] = "tools"
    replaces_state = True

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        team: ToolsTeam = "single",
        task_source: WorldName = "corpus",
        kinds: list[TaskKind] | None = None,
        documents: Path | None = None,
        tasks: Path | None = None,
        built_in: list[BuiltInTool] | None = None,
        tools: list[str] | None = None,
        max_turns: int = 8,
        max_calls: int = 8,
        max_results: int = 3,
        call_time_limit_s: float = 10.0,
        max_result_chars: int = 4000,
        unsafe: bool = False,
        split: Split = "train",
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        check_range("max_turns", max_turns, 1, 1000)
        check_range("max_calls", max_calls, 1, 100)
        check_range("max_results", max_results, 1, 50)
        check_range("call_time_limit_s", call_time_limit_s, 0.05, 3600)
        check_range("max_result_chars", max_result_chars, 20, 1_000_000)
        self.seats = SEATS[team]
        self.turns = max_turns
        self.calls = max_calls
        self.reward = reward
        self.is_compact = rendering == "compact"
        self.world = open_task_source(task_source, kinds, documents, tasks, split)
        offered = built_in if built_in is not None else TOOLS_BY_WORLD[task_source]
        check_tools_suffice(offered, self.world.kinds)
        ours = built_in_tools(tuple(offered), max_results, self.is_compact, call_time_limit_s, unsafe)
        loaded = [load_tool(path) for path in tools or ()]
        self.toolboxes = {
            seat: Toolbox(tools_of_seat(seat, ours, loaded), call_time_limit_s, max_result_chars) for seat in self.seats
        }
        self.tool_schemas = {
            seat: () if self.is_compact else box.openai_schemas() for seat, box in self.toolboxes.items()
        }
        self.roles = {seat: system_prompt(seat, max_turns, self.is_compact) for seat in self.seats}
        self._acting: Seat | None = None

    # ---- env interface

    def instance_of(self, seed: int) -> int | str:
        """Returns what identifies a task; of one with documents of its own, its seed."""
        task = self.world.task(seed)
        if task.library is not None:
            return seed
        return task.split_key

    def reset(self, seed: int) -> Step:
        self.task = self.world.task(seed)
        self.needs = tuple(chain.from_iterable(self.task.requirements))
        self.scratch = ToolState(self.task.library or self.world.library, dict(self.task.files))
        self.messages: tuple[Json, ...] = ()  # conversation of the seat to act
        self.found_needs: frozenset[int] = frozenset()  # indices into `requirements`
        self._good: frozenset[Seat] = frozenset()  # seats already paid VALID_CALLS_REWARD
        self._made = 0
        self._turn = 0
        self._begin(self.seats[0], None)
        return self._step({}, {})

    async def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._acting, actions)
        message = parse_assistant_message(str(actions[seat]))
        self.messages = (*self.messages, message)
        self._turn = self._turn + 1
        if not message.get("tool_calls") and not TOOL_CALL_PATTERN.search(message["content"]):
            return self._receive_text(seat, message["content"])
        if self._turn >= self.turns:  # no later turn could use the results
            return self._receive_text(seat, "", late=True)
        return await self._call(seat, message)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the calls for the next missing facts, then the answer; the answer at once if turns run out."""
        left = self.turns - self._turn - 1
        for stage in self.task.requirements if left else ():
            unmet = [need for need in stage if self.needs.index(need) not in self.found_needs]
            missing = [need for need in unmet if self._must(seat, need)]
            if calls := list(chain.from_iterable(self._untried_calls(need)[:1] for need in missing)):
                return "\n".join(render_tool_call(call.name, call.arguments) for call in calls[: self.calls])
        if seat == "researcher":
            return " ".join(need.note for need in self.needs if need.note) or "none"
        if not self.task.output_file:
            return mark_answer(self.task.answer, is_compact=self.is_compact)
        if left and not self.task.is_solved("", self.scratch.files):
            return render_tool_call("write_file", {"path": self.task.output_file, "text": self.task.answer})
        return mark_answer("done", is_compact=self.is_compact)

    # ---- one answer

    async def _call(self, seat: Seat, message: Json) -> Step:
        """Runs the calls of an answer and appends their results to the conversation."""
        calls = tool_calls_of(message)
        results = await self.toolboxes[seat].call_all(calls[: self.calls], self.scratch)
        if results:
            self.scratch = results[-1].scratch
        dropped = f"Error: not called: one answer may hold {self.calls} calls"
        results += [ToolResult(dropped, False, self.scratch)] * (len(calls) - len(results))
        replies = [
            self._tool_message(sent, call, result)
            for sent, call, result in zip(message.get("tool_calls", ()), calls, results, strict=True)
        ]
        unreadable = len(TOOL_CALL_PATTERN.findall(message["content"]))
        if unreadable:  # as a user message: endpoints accept a tool message only as the reply to a parsed call
            replies.append({"role": "user", "content": "error" if self.is_compact else UNREADABLE_CALL_MESSAGE})
        self.messages = (*self.messages, *replies)
        self._made += len(calls) + unreadable
        bad = unreadable + sum(not result.is_valid and not result.failure for result in results)
        terms = {FORM_TERM: 0.0 - INVALID_PENALTY * bad / (len(calls) + unreadable), "calls": 0.0}
        terms["facts"] = self._reward_found_facts(seat, results)
        if not bad and seat not in self._good:
            self._good, terms["calls"] = self._good | {seat}, VALID_CALLS_REWARD
        failures = [result.failure for result in results if result.failure]
        return self._step({seat: terms}, {seat: bad > 0}, failures=failures)

    def _tool_message(self, sent: Json, call: ToolCall, result: ToolResult) -> Json:
        message = {"role": "tool", "tool_call_id": sent["id"], "name": call.name, "content": result.text}
        if self.is_compact and (result.failure or not result.is_valid):
            message["content"] = "error"
        return message

    def _reward_found_facts(self, seat: Seat, results: Sequence[ToolResult]) -> float:
        """Records which of the seat's needs the results meet; returns their share of `FOUND_REWARD`."""
        texts = [result.text for result in results if result.is_valid and not result.failure]
        numbers = [i for i, need in enumerate(self.needs) if self._must(seat, need)]
        new = {i for i in numbers if i not in self.found_needs and any(map(self.needs[i].is_met_by, texts))}
        self.found_needs |= new
        return FOUND_REWARD * len(new) / max(len(numbers), 1)

    def _receive_text(self, seat: Seat, text: str, *, late: bool = False) -> Step:
        """Handles a seat's final answer: the researcher's is the note for the solver, any other is graded."""
        if seat == "researcher":
            note = text[:MAX_NOTE_CHARS]
            facts = [need for need in self.needs if need.note]
            passed = NOTE_REWARD * sum(need.is_met_by(note) for need in facts) / max(len(facts), 1)
            self._begin("solver", note)
            return self._step({seat: {"facts": passed}}, {seat: False})
        if not self.is_compact:
            text = text.rpartition("####")[2].strip()
        success = not late and self.task.is_solved(text, self.scratch.files)
        readable = late or self.task.is_readable(text)
        self._acting = None
        return self._step(
            {seat: {FORM_TERM: 0.0 if readable else -INVALID_PENALTY}}, {seat: not readable}, success=success, late=late
        )

    # ---- observations

    def _begin(self, seat: Seat, note: str | None) -> None:
        self._acting = seat
        self._turn = 0
        self.messages = ({"role": "user", "content": task_prompt(self.task, note, self.is_compact)},)
        if not self.is_compact:
            self.messages = ({"role": "system", "content": self.roles[seat]}, *self.messages)

    def _step(
        self,
        terms: dict[Seat, Terms],
        invalid: dict[Seat, bool],
        *,
        success: bool = False,
        late: bool = False,
        failures: Sequence[str] = (),
    ) -> Step:
        info = {"success": success, "kind": self.task.kind, "calls": self._made, "invalid": invalid}
        if self.reward == "outcome":
            terms = {seat: {} for seat in terms}
        rewards = total_rewards(terms)
        info |= terms_info(terms)
        info |= {"failures": [*failures]}
        observations = {}
        if self._acting is not None:
            observations = {self._acting: Chat(self.messages, self.tool_schemas[self._acting])}
        return Step(observations, rewards, SOLVED_REWARD * success, truncated=late, info=info)

    # ---- required facts and the seat that must obtain them

    def _must(self, seat: Seat, need: ToolRequirement) -> bool:
        return len(self.seats) == 1 or (seat == "researcher") == bool(need.note)

    def _untried_calls(self, need: ToolRequirement) -> list[ToolCall]:
        tried = [call for message in self.messages if message["role"] == "assistant" for call in tool_calls_of(message)]
        return [call for call in need.calls if call not in tried]
