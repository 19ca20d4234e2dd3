"""Agent programs of five frameworks, in venvs of their own: `make test-frameworks` makes them and runs these tests.

The programs of examples/frameworks/ know nothing of palestra but an address, a key and the names of the models. Here
they are solved by scripted agents, which shows what a framework sends, and trained, which shows what becomes of it.
"""

import asyncio
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import palestra
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from palestra.core.chat import Chat, parse_assistant_message, render_message, render_tool_call, same_message
from palestra.core.types import Answer, Episode, Node
from palestra.engine.bases.names import resolve_base
from palestra.envs.adapters.workflow import Workflow
from palestra.runs.checkpoints import list_checkpoints
from palestra.runs.episodes import load_episodes
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
SEATS = ["caller", "checker"]
SEED = 3
TRIES = 2  # the scripted checker's first answer is not in its form
STEPS = 2
GROUP_SIZE = 3


@dataclass(frozen=True)
class Framework:
    """What a framework sends: the seats whose answers are streamed, the keys of the checker's schema, whether every
    answer of the caller must be a call, and whether earlier calls come back as calls (else as text)."""

    streamed: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ("people",)
    must_call: bool = False
    sends_calls_back: bool = True


FRAMEWORKS = {
    "langgraph": Framework(frozenset({"caller"})),
    "openai_agents": Framework(frozenset({"caller"})),
    "smolagents": Framework(frozenset({"caller"}), ("thought", "code"), must_call=True, sends_calls_back=False),
    "autogen": Framework(frozenset({"caller"})),
    "crewai": Framework(frozenset({"checker"})),
}


def command(name: str) -> list[str]:
    python = ROOT / ".cache" / "frameworks" / name / "bin" / "python"
    assert python.exists(), f"{python} is not there: `make test-frameworks` makes it"
    return [str(python), str(EXAMPLES / f"{name}_team.py")]


def load_census() -> Any:
    spec = importlib.util.spec_from_file_location("census", EXAMPLES / "census.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw_census(SEED, "train")


def scripted_agents(name: str, census: Any) -> dict[str, ScriptedPolicy]:
    """A caller that searches for both places in one answer, then calculates, then says it; a checker that answers in
    its form at the second attempt."""
    tries: list[str] = []

    def call(query: Any, rng: Any) -> str:
        seen = "\n".join(map(render_message, query.observation.messages))
        numbers = [str(census.people(place)) for place in (census.one, census.other)]
        if not all(number in seen for number in numbers):
            return "\n".join(render_tool_call("search", {"query": place}) for place in (census.one, census.other))
        if str(census.truth) not in seen:
            return render_tool_call("calculator", {"expression": f" {census.sign} ".join(numbers)})
        end = str(census.truth)
        return render_tool_call("final_answer", {"answer": end}) if FRAMEWORKS[name].must_call else end

    def check(query: Any, rng: Any) -> str:
        tries.append("")
        if len(tries) < TRIES:
            return "hm"
        code = {"thought": "sure", "code": f"final_answer({census.truth})"}
        return json.dumps(code if "code" in FRAMEWORKS[name].keys else {"people": census.truth})

    return {"caller": ScriptedPolicy(call), "checker": ScriptedPolicy(check)}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_program_is_solved_by_scripted_agents(name: str) -> None:
    """Two calls in one answer, their results, streams, system prompts, schemas and a second attempt."""
    framework, census = FRAMEWORKS[name], load_census()
    envs: list[Workflow] = []

    def make() -> Workflow:
        envs.append(Workflow(command=command(name), seats=SEATS))
        return envs[-1]

    spec = EpisodeSpec(SEED, scripted_agents(name, census), SEED)
    episode = asyncio.run(EpisodeRunner(make, "workflow").play(spec, Branching()))
    assert episode.error is None and episode.success == 1
    assert episode.nodes[-1].rewards == {"caller": 1.0, "checker": 1.0}

    (env,) = envs
    calls = [(seat, asked) for turn in env._played for seat, (asked, _) in turn.items()]
    assert [seat for seat, _ in calls] == ["caller"] * 3 + ["checker"] * TRIES
    assert {seat for seat, asked in calls if asked.stream} == framework.streamed
    assert all(tuple(asked.form.schema["required"]) == framework.keys for seat, asked in calls if seat == "checker")
    assert {asked.form.tool for seat, asked in calls if seat == "caller"} == {"" if framework.must_call else None}
    role = {"caller": "tools agent", "checker": "math reasoner"}
    for seat, asked in calls:
        first = asked.chat.messages[0]
        assert first["role"] == "system" and role[seat] in render_message(first)
        named = {tool["function"]["name"] for tool in asked.chat.tools}
        assert {"search", "calculator"} <= named if seat == "caller" else not named

    last = calls[2][1].chat.messages
    results = [render_message(message) for message in last if message["role"] == "tool"]
    ids = [call["id"] for message in last for call in message.get("tool_calls") or ()]
    found = [f"{place} {census.people(place)}" for place in (census.one, census.other)]
    if framework.sends_calls_back:
        assert results == [*found, str(census.truth)] and len({*ids}) == 3
    else:
        assert not ids and "\n".join(found) in "\n".join(map(render_message, last))

    invalid = [node.is_invalid("checker") for node in episode.nodes if "checker" in node.answers]
    assert invalid == [True] * (TRIES - 1) + [False]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_both_roles_of_a_program_are_trained(name: str, tmp_path: Path) -> None:
    """An adapter each, on the tokens that were sampled."""
    template = str(EXAMPLES / "tools.jinja")
    policy = {"type": "lora", "base": "tasks", "rank": 4, "lr": 3e-3, "chat_template": template}
    config = {
        "name": "team",
        "steps": STEPS,
        "episodes": 1,
        "env": {"type": "workflow", "command": command(name), "seats": SEATS, "max_processes": 1, "timeout": 300},
        "policies": {seat: policy | {"sampling": {"max_tokens": 80}} for seat in SEATS},
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": GROUP_SIZE},
    }
    (tmp_path / "team.yaml").write_text(json.dumps(config))
    palestra("train", tmp_path / "team.yaml", "--root", tmp_path / "runs")
    run = tmp_path / "runs" / "team"

    episodes = [episode for file in sorted((run / "episodes").glob("*.parquet")) for episode in load_episodes(file)]
    assert len(episodes) == STEPS
    for episode in episodes:
        assert episode.error is None and not any(node.error for node in episode.nodes)
        assert len(episode.children(None)) == GROUP_SIZE
        for leaf in episode.leaves():
            check_calls(name, path_to(episode, leaf))
    check_adapters(run)
    check_logprobs([answer for node in episodes[0].nodes for answer in node.answers.values()])
    continued = [pair for episode in episodes for pair in continuations(name, episode)]
    assert continued, "no program continued a conversation"
    for earlier, later in continued:
        begun = np.concatenate([earlier.prompt_ids, earlier.token_ids])
        assert later.prompt_ids[: len(begun)].tolist() == begun.tolist()


def path_to(episode: Episode, leaf: Node) -> list[Node]:
    """The nodes from the first call of a program to its last."""
    path = [leaf]
    while path[0].parent is not None:
        path.insert(0, episode.nodes[path[0].parent])
    return path


def check_calls(name: str, path: list[Node]) -> None:
    """First the caller, then the checker; both have tokens of their own policy, and log-probabilities for each."""
    seats = [seat for node in path for seat in node.answers]
    assert set(seats) == {*SEATS} and seats == sorted(seats)
    for node in path:
        for seat, answer in node.answers.items():
            assert answer.policy.partition("@")[0] == seat
            assert 0 < len(answer.token_ids) == len(answer.logprobs) and len(answer.prompt_ids)
            asks_for_form = seat == "checker" or FRAMEWORKS[name].must_call
            assert asks_for_form or node.is_invalid(seat) is None


def continuations(name: str, episode: Episode) -> list[tuple[Answer, Answer]]:
    """An answer, and the next one of the same seat whose conversation begins with the former and its prompt: all of a
    caller whose framework sends calls back, but for CrewAI's last one, which has no tools, and for a text beside calls,
    which frameworks may drop."""
    found = []
    for node in episode.nodes:
        parent = None if node.parent is None else episode.nodes[node.parent]
        for seat, answer in node.answers.items():
            if parent is not None and seat in parent.answers:
                before, now = parent.observations[seat], node.observations[seat]
                has_calls_only = not parse_assistant_message(parent.answers[seat].text)["content"]
                sends_back = seat == "caller" and FRAMEWORKS[name].sends_calls_back
                is_kept = sends_back and has_calls_only and now.tools == before.tools
                if is_kept or continues(before, now, parent.answers[seat]):
                    found.append((parent.answers[seat], answer))
    return found


def continues(before: Chat, now: Chat, answer: Answer) -> bool:
    """Whether `now` has all messages of `before`, then the answer as it was said."""
    number = len(before.messages)
    if len(now.messages) <= number + 1 or now.tools != before.tools:
        return False
    has_prefix = all(map(same_message, before.messages, now.messages))
    said = "".join(render_message(now.messages[number]).split())
    return has_prefix and said == "".join(answer.text.split())


def check_adapters(run: Path) -> None:
    """Both adapters begin with B = 0, and have learned something different."""
    folder = list_checkpoints(run)[-1].path
    caller, checker = (load_file(folder / seat / "adapter_model.safetensors") for seat in SEATS)
    keys = [key for key in caller if "lora_B" in key]
    assert keys and caller.keys() == checker.keys()
    assert all(np.abs(adapter[key]).max() > 0 for adapter in (caller, checker) for key in keys)
    assert any(np.abs(caller[key] - checker[key]).max() > 1e-4 for key in keys)


def check_logprobs(answers: list[Answer]) -> None:
    """The recorded log-probabilities are those of the recorded tokens under the base, which sampled the first step."""
    model = AutoModelForCausalLM.from_pretrained(resolve_base("tasks"))
    for answer in answers:
        ids = torch.tensor(np.concatenate([answer.prompt_ids, answer.token_ids]), dtype=torch.long)
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, len(answer.prompt_ids) - 1 : -1]
        expected = logits_TV.log_softmax(-1).gather(1, ids[len(answer.prompt_ids) :, None])[:, 0]
        assert np.abs(expected.numpy() - answer.logprobs).max() < 1e-3
