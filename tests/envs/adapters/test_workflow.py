"""Users' agent programs: their model calls are observations, policies' answers are returned to them, their return value
is the reward."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from palestra.core.chat import Chat
from palestra.core.types import Answer
from palestra.envs import make_env
from palestra.envs.adapters.workflow import Workflow
from palestra.envs.base import check_env
from palestra.runs.episodes import load_episodes, to_table
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

PAIR = ["guide", "walker"]
TESTS = Path(__file__).parents[2]


def obedient(query, rng):
    """Answers `say X` and `repeat X` with X."""
    return query.observation.messages[-1]["content"].split(" ", 1)[1]


def play(env, policies, seed=0, branching=None, **options):
    arena = EpisodeRunner(lambda: make_env(type="workflow", **env), "workflow", **options)
    return asyncio.run(arena.play(EpisodeSpec(seed, policies, seed), branching or Branching()))


@pytest.mark.parametrize("function", ["relay", "graph"])
def test_program_is_played_by_policies(function):
    speaker = ScriptedPolicy(obedient)
    episode = play({"function": f"helpers.toy_workflows:{function}", "seats": PAIR}, dict.fromkeys(PAIR, speaker))
    assert episode.error is None
    assert [list(node.answers) for node in episode.nodes] == [["guide"], ["walker"]]
    assert isinstance(episode.nodes[0].observations["guide"], Chat)
    assert episode.success == 1 and episode.nodes[-1].team_reward == 1


def test_rewards_belong_to_the_step_that_earned_them():
    speaker = ScriptedPolicy(obedient)
    env = {"function": "helpers.toy_workflows:relay", "seats": PAIR}
    good = play(env, dict.fromkeys(PAIR, speaker))
    assert [node.rewards for node in good.nodes] == [{"guide": 1.0}, {"walker": 1.0}]
    bad = play(env, {"guide": ScriptedPolicy(["black"]), "walker": speaker})
    assert [node.rewards for node in bad.nodes] == [{"guide": 0.0}, {"walker": 1.0}] and bad.success == 0
    assert bad.nodes[-1].info["word"] in ("red", "green", "blue")


def test_tools_are_called_and_their_results_are_observed():
    def clerk(query, rng):
        seen = query.observation.messages[-1]
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        return seen["content"] if seen["role"] == "tool" else call

    episode = play({"function": "helpers.toy_workflows:sums", "seats": ["agent"]}, {"agent": ScriptedPolicy(clerk)})
    assert episode.error is None and episode.nodes[-1].rewards == {"agent": 1.0}
    asked, answered = (node.observations["agent"] for node in episode.nodes)
    assert asked.tools[0]["function"]["name"] == "add"
    assert [message["role"] for message in answered.messages] == ["user", "assistant", "tool"]


class Counted:
    """A policy whose answers have tokens, and are cut."""

    name = "counted"

    async def act(self, query):
        ids = np.arange(5, dtype=np.int32)
        text, thought = "five tokens", "not for the program"
        return [Answer(text, self.name, ids[:3], ids, np.zeros(5, np.float32), "length", thought=thought)] * query.n


def test_replies_have_token_counts_and_say_that_an_answer_was_cut():
    episode = play({"function": "helpers.toy_workflows:counting", "seats": ["agent"]}, {"agent": Counted()})
    assert episode.error is None
    info = episode.nodes[-1].info
    assert info["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert info["choice"]["finish_reason"] == "length"
    assert info["choice"]["message"] == {"role": "assistant", "content": "five tokens"}


def test_an_answer_that_is_not_in_the_form_asked_for_is_invalid():
    """It reaches the program as it is; a replay says the same, and calls that ask for no form say nothing."""
    clerk = ScriptedPolicy(lambda query, rng: rng.choice(["three", '{"people": 3}']))
    branching = Branching("turn", 6, "best")
    episode = play(
        {"function": "helpers.toy_workflows:forms", "seats": ["agent"]}, {"agent": clerk}, branching=branching
    )
    assert episode.error is None
    said = {(node.depth, node.answers["agent"].text): node.info for node in episode.nodes}
    assert len(said) == 4
    for (depth, text), info in said.items():
        assert info.get("invalid") == ({"agent": text == "three"} if depth == 0 else None)
        wrong = {"agent": "the answer is no JSON object, and response_format asks for one"}
        assert info.get("why_invalid") == ((wrong if text == "three" else {}) if depth == 0 else None)
        assert info.get("heard", [text])[-1] == text


def test_siblings_are_tried_at_every_turn():
    """The guide of each branch answers differently; every branch is played to its end."""
    wild = ScriptedPolicy(lambda query, rng: rng.choice(("red", "green", "blue")))
    env = {"function": "helpers.toy_workflows:relay", "seats": PAIR}
    for branching in (Branching("turn", 4, "best"), Branching("root", 4)):
        episode = play(env, {"guide": wild, "walker": ScriptedPolicy(obedient)}, branching=branching)
        assert episode.error is None
        assert len(episode.children(None)) == 4
        assert all(node.info["success"] == (node.team_reward == 1) for node in episode.leaves())


def test_nondeterministic_program_is_reported_on_replay():
    agent = {"agent": ScriptedPolicy(["hm"])}
    env = {"function": "helpers.toy_workflows:restless", "seats": ["agent"]}
    assert play(env, agent, branching=Branching("root", 3)).error is None
    lost = [node.error for node in play(env, agent, branching=Branching("turn", 3)).nodes if node.error]
    assert lost and all("cannot be forked" in error for error in lost)


def test_program_of_a_failed_fork_is_ended():
    def running():
        return [thread for thread in threading.enumerate() if thread.name == "workflow 4711"]

    async def fork():
        env = Workflow(seats=["agent"], function="helpers.toy_workflows:restless")
        await env.reset(4711)
        await env.step({"agent": "hm"})
        assert len(running()) == 1
        with pytest.raises(ValueError, match="cannot be forked"):
            await env.fork()
        env.close()

    asyncio.run(fork())
    for thread in running():
        thread.join(10)
    assert not running()


def test_env_passes_the_env_check():
    def speaker(seat, observation, rng):
        return rng.choice(("red", "green", observation.messages[-1]["content"]))

    check_env(lambda: Workflow(seats=PAIR, function="helpers.toy_workflows:relay"), seeds=range(2), act=speaker)


def test_step_before_a_model_call_is_refused():
    env = Workflow(seats=PAIR, function="helpers.toy_workflows:relay")
    with pytest.raises(ValueError, match="no seat acts next: call reset"):
        asyncio.run(env.step({"guide": "red"}))


def write_program(folder, before="", after=""):
    """A command that repeats its seed by one call of a model, with lines before and after the call."""
    program = folder / "agent.py"
    program.write_text(
        "import json, os, sys, time, urllib.request\n"
        f"{before}\n"
        "asked = {'role': 'user', 'content': 'say ' + os.environ['PALESTRA_SEED']}\n"
        "body = json.dumps({'model': 'openai/agent', 'messages': [asked]}).encode()\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body,\n"
        "    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'})\n"
        "heard = json.load(urllib.request.urlopen(request))['choices'][0]['message']['content']\n"
        "right = heard == os.environ['PALESTRA_SEED']\n"
        f"{after}\n"
        "print('thinking'); print(json.dumps({'rewards': {'agent': 0.5}, 'team': 1.0 * right, 'success': right}))\n"
    )
    return program


STUCK = "print('asking the database', file=sys.stderr, flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("where", "limits", "message"),
    [
        (
            "before",
            {"timeout": 60, "start_timeout": 2},
            "for 2 s: see start_timeout; the end of its stderr: asking the",
        ),
        ("after", {"timeout": 2, "start_timeout": 60}, "for 2 s: see timeout; the end of its stderr: asking the"),
    ],
)
def test_a_command_that_hangs_says_what_it_wrote(tmp_path, where, limits, message):
    """Its start has a limit of its own."""
    command = [sys.executable, str(write_program(tmp_path, **{where: STUCK}))]
    episode = play({"command": command, "seats": ["agent"], **limits}, {"agent": ScriptedPolicy(obedient)})
    assert message in episode.error


def test_a_slow_start_of_a_command_is_not_in_its_timeout(tmp_path):
    command = [sys.executable, str(write_program(tmp_path, "time.sleep(1.5)"))]
    episode = play({"command": command, "seats": ["agent"], "timeout": 1}, {"agent": ScriptedPolicy(obedient)}, seed=3)
    assert episode.error is None and episode.success == 1


def test_few_commands_run_at_once(tmp_path):
    """Two of five; those that wait are in no time limit, and the siblings of an episode do not wait for each other."""
    note = "open({!r}, 'a').write(f'{} {{time.time()}}\\n')"
    times = tmp_path / "times.txt"
    before, after = (note.format(str(times), what) for what in (1, -1))
    env = {"command": [sys.executable, str(write_program(tmp_path, before, after))], "seats": ["agent"]}
    arena = EpisodeRunner(lambda: make_env(type="workflow", **env, max_processes=2), "workflow")
    specs = [EpisodeSpec(seed, {"agent": ScriptedPolicy(obedient)}, seed) for seed in range(5)]
    episodes = asyncio.run(arena.play_all(specs, Branching()))
    assert [episode.success for episode in episodes] == [1] * 5
    rows = sorted((float(when), int(change)) for change, when in map(str.split, times.read_text().splitlines()))
    assert len(rows) == 10 and max(np.cumsum([change for _, change in rows])) <= 2
    arena = EpisodeRunner(lambda: make_env(type="workflow", **env, max_processes=1), "workflow")
    (episode,) = asyncio.run(arena.play_all(specs[:1], Branching(group_size=3, branch_at="turn")))
    assert episode.error is None and len(episode.nodes) == 3


def test_command_line_workflows_are_supported(tmp_path):
    program = write_program(tmp_path)
    env = {"command": [sys.executable, str(program)], "seats": ["agent"]}
    episode = play(env, {"agent": ScriptedPolicy(obedient)}, seed=7)
    assert episode.error is None and episode.success == 1 and episode.nodes[-1].rewards == {"agent": 0.5}
    program.write_text("import sys; sys.exit('no money left')")
    assert "no money left" in play(env, {"agent": ScriptedPolicy(obedient)}).error
    program.write_text("print('all done')")
    assert "must print" in play(env, {"agent": ScriptedPolicy(obedient)}).error


@pytest.mark.parametrize(
    ("printed", "success", "error"),
    [
        ("{'rewards': {'agent': 0.5}}", None, None),
        ("{'rewards': None, 'success': 0.25}", 0.25, None),
        ("{'rewards': {'agent': 0.5}, 'success': 'false'}", None, "reports the success 'false' (str)"),
        ("{'rewards': {'agent': '0.5'}}", None, "the reward of agent is '0.5', which is not a number"),
        ("{'team': '2'}", None, "the team's reward is '2', which is not a number"),
        ("{'team_reward': 5}", None, "prints 'team_reward': the keys are rewards, team, success"),
        ("{'Success': True}", None, "prints 'Success': the keys are rewards, team, success"),
    ],
)
def test_the_result_of_a_command_is_taken_as_it_is(tmp_path, printed, success, error):
    program = tmp_path / "agent.py"
    program.write_text(f"import json\nprint(json.dumps({printed}))\n")
    env = {"command": [sys.executable, str(program)], "seats": ["agent"]}
    episode = play(env, {"agent": ScriptedPolicy(obedient)})
    if error:
        assert error in episode.error
    else:
        assert episode.error is None and episode.success == success


def test_hung_workflow_does_not_block_others():
    arena = EpisodeRunner(
        lambda: Workflow(seats=["agent"], function="helpers.toy_workflows:hanging", timeout=4),
        "workflow",
        max_concurrent=256,
    )
    done: list[float] = []
    start = time.monotonic()
    matches = [EpisodeSpec(seed, {"agent": ScriptedPolicy(["yes"])}, seed) for seed in range(1, 201)]
    episodes = asyncio.run(
        arena.play_all(matches, Branching(), lambda e: done.append(time.monotonic() - start) if not e.error else None)
    )
    failed = [episode for episode in episodes if episode.error]
    assert len(failed) == 20 and all("neither called a model nor ended for 4 s" in episode.error for episode in failed)
    assert len(done) == 180 and all(e.nodes[-1].rewards == {"agent": 1.0} for e in episodes if not e.error)
    assert time.monotonic() - start < max(done) + 4 + 5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("helpers.toy_workflows:broken", "KeyError: 'no such thing'"),
        ("helpers.toy_workflows:silly", 'pays "nobody", but its seats are agent'),
    ],
)
def test_failing_program_gives_a_failed_episode(function, message):
    assert message in play({"function": function, "seats": ["agent"]}, {"agent": ScriptedPolicy(["hm"])}).error


def test_invalid_model_calls_are_refused():
    async def scenario():
        env = Workflow(seats=["agent"], function="helpers.toy_workflows:restless")
        await env.reset(0)
        session = env._running.session
        url, key = f"{session.url}/chat/completions", {"Authorization": f"Bearer {session.key}"}
        good = {"model": "agent", "messages": [{"role": "user", "content": "?"}]}
        wrong = [
            {"model": "other"},
            {"n": 2},
            {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"response_format": {"type": "grammar"}},
            {"messages": [{"role": "user", "content": "?", "weight": 2}]},
        ]
        async with httpx.AsyncClient() as client:
            refused = [await client.post(url, json=good | part, headers=key) for part in wrong]
            stranger = await client.post(url, json=good, headers={"Authorization": "Bearer guess"})
            models = await client.get(f"{session.url}/models", headers=key)
            env.close()
            late = await client.post(url, json=good, headers=key)
        return refused, stranger, models, late

    refused, stranger, models, late = asyncio.run(scenario())
    assert [response.status_code for response in refused] == [400] * 6
    assert "there is no model 'other' here, but agent" in refused[0].json()["error"]["message"]
    assert "'response_format' is " in refused[4].json()["error"]["message"]
    assert "'weight'" in refused[5].json()["error"]["message"]
    assert (stranger.status_code, late.status_code) == (401, 401)
    assert [model["id"] for model in models.json()["data"]] == ["agent"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either function"),
        ({"function": "helpers.toy_workflows:relay", "command": ["x"]}, "either function"),
        ({"function": "helpers.toy_workflows:gone"}, "has no attribute 'gone'"),
        ({"function": "nowhere.near:play"}, f"there is no module nowhere in .*{TESTS}.* or the installed packages"),
        ({"function": "nowhere"}, "write module:name"),
        ({"function": "helpers.toy_workflows:relay", "timeout": 0}, "timeout=0.0 is out of range: give 0.001 to 86400"),
        ({"command": ["x"], "start_timeout": 0}, "start_timeout=0.0 is out of range"),
        ({"command": ["x"], "max_processes": 0}, "max_processes=0 is out of range"),
        ({"function": "helpers.toy_workflows:relay", "max_processes": 2}, "max_processes limits command: programs"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_env(type="workflow", seats=["agent"], **options)


def test_seats_must_differ():
    with pytest.raises(ValueError, match="each once"):
        Workflow(seats=["a", "a"], function="helpers.toy_workflows:relay")


def test_episodes_are_recorded_whole(tmp_path):
    episode = play(
        {"function": "helpers.toy_workflows:relay", "seats": PAIR}, dict.fromkeys(PAIR, ScriptedPolicy(obedient))
    )
    pq.write_table(to_table(0, [episode]), tmp_path / "e.parquet")
    (again,) = load_episodes(tmp_path / "e.parquet")
    assert [node.observations for node in again.nodes] == [node.observations for node in episode.nodes]
    asked = {"role": "user", "content": f"say {episode.nodes[-1].info['word']}"}
    assert again.nodes[0].observations["guide"] == Chat((asked,))


def test_programs_of_opponents_report_success_by_seat():
    async def over_at_once():
        env = Workflow(seats=["pro", "con"], function="helpers.toy_teams:settle")
        return await env.reset(0)

    assert asyncio.run(over_at_once()).info["success"] == {"pro": True, "con": False}
