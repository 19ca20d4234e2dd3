"""Tool-use env: questions that require tools, on facts of a fictional world, long sums, files and programs.

A seat observes the whole conversation and answers with tool calls, whose results it observes next, or with its final
answer. Steps depend only on the seed and the answers, provided that the user's own tools are deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.chat import CALL, Call, Chat, Json, assistant, calls_of, spelled
from palestra.envs.base import Env
from palestra.envs.text.grids import within
from palestra.envs.text.options import Rendering, Reward
from palestra.envs.text.splits import Split
from palestra.envs.text.toolbox import Result, Toolbox, load_tool
from palestra.envs.tooling import prompts
from palestra.envs.tooling.offered import ALL, BuiltIn, built_in_tools, check_offered, held_by
from palestra.envs.tooling.scratch import Scratch
from palestra.envs.tooling.tasks import Kind, Need
from palestra.envs.tooling.worlds import WorldName, open_world
from palestra.types import Seat, Step

Team = Literal["single", "researcher_solver"]
SEATS: dict[Team, tuple[Seat, ...]] = {"single": ("agent",), "researcher_solver": ("researcher", "solver")}

SOLVED = 1.0  # team reward for the correct answer
VALID = 0.05  # local reward, once, for the first answer whose calls are all valid
FOUND = 0.25  # local reward for all facts that a seat must obtain with tools; each pays its share once
PASSED = 0.25  # researcher's reward, times the share of the required facts in its note
UNREADABLE = (
    'Error: a call could not be read. Write it as <tool_call>{"name": "...", "arguments": {...}}</tool_call>, in JSON.'
)
INVALID = 0.1  # local penalty, times the share of invalid calls; or for an unreadable answer


class Tools(Env):
    """One agent with all tools, or a researcher with the search tools, which passes a note to a solver with the others.

    A seat has `turns` answers, each with up to `calls` calls; an answer without a call is its last. A call is limited
    to `time_limit` seconds, a result to `longest` characters, a search to `results` documents.

    Tasks are of `kinds`, by default all kinds of the `world`: "corpus" asks about `documents` (a folder of .txt and .md
    files, or a .jsonl with titles, texts and facts; default: the shipped ones), "drills" is a small world generated for
    each instance. `tasks`, a .jsonl with the user's questions, replaces them. `built_in` selects the built-in tools,
    `tools` adds the user's ("module:function"), which in a team belong to the solver. The python tool needs a sandbox,
    or `unsafe`.

    Dense rewards pay a seat for valid calls and for the required facts in their results, and penalise invalid calls;
    the team is paid 1 for the correct answer. With `reward: outcome` only that is paid.

    Raises ValueError if an option is out of range, or a tool, document or task file cannot be loaded.
    """

    name: ClassVar[str] = "tools"
    replaces_state = True

    def __init__(
        self,
        *,
        team: Team = "single",
        world: WorldName = "corpus",
        kinds: list[Kind] | None = None,
        documents: Path | None = None,
        tasks: Path | None = None,
        built_in: list[BuiltIn] | None = None,
        tools: list[str] | None = None,
        turns: int = 8,
        calls: int = 8,
        results: int = 3,
        time_limit: float = 10.0,
        longest: int = 4000,
        unsafe: bool = False,
        split: Split = "train",
        reward: Reward = "dense",
        rendering: Rendering = "full",
    ) -> None:
        within("turns", turns, 1, 1000)
        within("calls", calls, 1, 100)
        within("results", results, 1, 50)
        within("time_limit", time_limit, 0.05, 3600)
        within("longest", longest, 20, 1_000_000)
        self.seats, self.turns, self.calls, self.reward = SEATS[team], turns, calls, reward
        self.is_compact = rendering == "compact"
        self.world = open_world(world, kinds, documents, tasks, split)
        offered = built_in if built_in is not None else ALL[world]
        check_offered(offered, self.world.kinds)
        ours = built_in_tools(tuple(offered), results, self.is_compact, time_limit, unsafe)
        own = [load_tool(path) for path in tools or ()]
        self.toolboxes = {seat: Toolbox(held_by(seat, ours, own), time_limit, longest) for seat in self.seats}
        self.described = {seat: () if self.is_compact else box.described() for seat, box in self.toolboxes.items()}
        self.roles = {seat: prompts.role(seat, turns, self.is_compact) for seat in self.seats}
        self._over = True

    # ---- env interface

    def reset(self, seed: int) -> Step:
        self.task = self.world.task(seed)
        self.needs = tuple(need for stage in self.task.needs for need in stage)
        self.scratch = Scratch(self.task.library or self.world.library, dict(self.task.files))
        self.messages: tuple[Json, ...] = ()  # conversation of the seat to act
        self.found: frozenset[int] = frozenset()  # indices into `needs`
        self._good: frozenset[Seat] = frozenset()  # seats already paid VALID
        self._made, self._turn, self._over = 0, 0, False
        self._begin(self.seats[0], None)
        return self._step({}, {})

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if self._over:
            raise ValueError("the game is over: call reset(seed) before step")
        seat = self._acting
        if set(actions) != {seat}:
            raise ValueError(f'"{seat}" acts next, but the actions are for {sorted(actions)}')
        message = assistant(str(actions[seat]))
        self.messages, self._turn = (*self.messages, message), self._turn + 1
        if not message.get("tool_calls") and not CALL.search(message["content"]):
            return self._said(seat, message["content"])
        if self._turn >= self.turns:  # no later turn could use the results
            return self._said(seat, "", late=True)
        return await self._call(seat, message)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the calls for the next missing facts, then the answer; the answer at once if turns run out."""
        left = self.turns - self._turn - 1
        for stage in self.task.needs if left else ():
            missing = [need for need in stage if self._must(seat, need) and not self._is_found(need)]
            if calls := [call for need in missing for call in self._untried(need)[:1]]:
                return "\n".join(spelled(call.name, call.arguments) for call in calls)
        if seat == "researcher":
            return " ".join(need.note for need in self.needs if need.note) or "none"
        if not self.task.writes:
            return self.task.answer if self.is_compact else f"#### {self.task.answer}"
        if left and not self.task.solved("", self.scratch.files):
            return spelled("write_file", {"path": self.task.writes, "text": self.task.answer})
        return "done" if self.is_compact else "#### done"

    # ---- one answer

    async def _call(self, seat: Seat, message: Json) -> Step:
        """Runs the calls of an answer and appends their results to the conversation."""
        calls = calls_of(message)
        results = await self.toolboxes[seat].call_all(calls[: self.calls], self.scratch)
        self.scratch = results[-1].scratch if results else self.scratch
        dropped = f"Error: not called: one answer may hold {self.calls} calls"
        results += [Result(dropped, False, self.scratch)] * (len(calls) - len(results))
        told = [
            self._told(sent, call, result)
            for sent, call, result in zip(message.get("tool_calls", ()), calls, results, strict=True)
        ]
        unreadable = len(CALL.findall(message["content"]))
        if unreadable:  # as a user message: endpoints accept a tool message only as the reply to a parsed call
            told.append({"role": "user", "content": "error" if self.is_compact else UNREADABLE})
        self.messages = (*self.messages, *told)
        self._made += len(calls) + unreadable
        bad = unreadable + sum(not result.good and not result.failure for result in results)
        reward = self._shown(seat, results) - INVALID * bad / (len(calls) + unreadable)
        if not bad and seat not in self._good:
            self._good, reward = self._good | {seat}, reward + VALID
        failures = [result.failure for result in results if result.failure]
        return self._step({seat: reward}, {seat: bad > 0}, failures=failures)

    def _told(self, sent: Json, call: Call, result: Result) -> Json:
        good = result.good and not result.failure
        text = result.text if good or not self.is_compact else "error"
        return {"role": "tool", "tool_call_id": sent["id"], "name": call.name, "content": text}

    def _shown(self, seat: Seat, results: Sequence[Result]) -> float:
        """Records which of the seat's needs the results meet; returns their share of FOUND."""
        texts = [result.text for result in results if result.good and not result.failure]
        own = [i for i, need in enumerate(self.needs) if self._must(seat, need)]
        new = {i for i in own if i not in self.found and any(map(self.needs[i].met_by, texts))}
        self.found |= new
        return FOUND * len(new) / len(own) if new else 0.0

    def _said(self, seat: Seat, said: str, *, late: bool = False) -> Step:
        """Handles a seat's final answer: the researcher's is the note for the solver, any other is graded."""
        if seat == "researcher":
            note = said[: prompts.LONGEST_NOTE]
            facts = [need for need in self.needs if need.note]
            passed = PASSED * sum(need.met_by(note) for need in facts) / len(facts) if facts else 0.0
            self._begin("solver", note)
            return self._step({seat: passed}, {seat: False})
        answer = said if self.is_compact else said.rpartition("####")[2].strip()
        success = not late and self.task.solved(answer, self.scratch.files)
        readable = late or self.task.readable(answer)
        self._over = True
        return self._step({seat: 0.0 if readable else -INVALID}, {seat: not readable}, success=success, late=late)

    # ---- observations

    def _begin(self, seat: Seat, note: str | None) -> None:
        system = [] if self.is_compact else [{"role": "system", "content": self.roles[seat]}]
        asked = {"role": "user", "content": prompts.asked(self.task, note, self.is_compact)}
        self._acting, self._turn, self.messages = seat, 0, (*system, asked)

    def _step(
        self,
        rewards: dict[Seat, float],
        invalid: dict[Seat, bool],
        *,
        success: bool = False,
        late: bool = False,
        failures: Sequence[str] = (),
    ) -> Step:
        info = {"success": success, "kind": self.task.kind, "calls": self._made, "invalid": invalid}
        if self.reward == "outcome":
            rewards = dict.fromkeys(rewards, 0.0)
        seen = {} if self._over else {self._acting: Chat(self.messages, self.described[self._acting])}
        return Step(seen, rewards, SOLVED * success, truncated=late, info=info | {"failures": [*failures]})

    # ---- required facts and the seat that must obtain them

    def _must(self, seat: Seat, need: Need) -> bool:
        return len(self.seats) == 1 or (seat == "researcher") == bool(need.note)

    def _is_found(self, need: Need) -> bool:
        return self.needs.index(need) in self.found

    def _untried(self, need: Need) -> list[Call]:
        made = [call for message in self.messages if message["role"] == "assistant" for call in calls_of(message)]
        return [call for call in need.calls if call not in made]
