"""The tools env: tasks that need tools, with one seat or two, and rewards by hand."""

import asyncio
import importlib
import json
import random
import sys
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from palestra.core.chat import Chat, messages_after, render_message, tool_calls_of
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.environments.tools.env import FOUND_REWARD, INVALID_PENALTY, NOTE_REWARD, VALID_CALLS_REWARD, Tools
from palestra.environments.tools.library import BUILT_IN_CORPUS, open_index
from palestra.environments.tools.synthetic_world import PLACE_NAMES, SyntheticLibrary
from palestra.environments.tools.tasks import TASK_KINDS, is_correct
from palestra.envs import make_env
from palestra.envs.base import check_env
from palestra.envs.support.splits import SPLIT_SHARES
from palestra.sandbox import open_sandbox
from palestra.testing import tiny_tokenizer
from palestra.text.policies.lm import DemonstrationPolicy, LanguagePolicy
from palestra.text.policies.scripted import ExpertPolicy, ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

LIGHT = ["lookup", "compute", "lookup_compute", "files"]  # all but python, which starts a process per call


def tools(**options):
    """The env from its options' schema, as a config builds it; unsafe only if no sandbox works."""
    try:
        open_sandbox()
    except ValueError:
        options["unsafe"] = True
    return make_env("palestra.environments.tools.env:Tools", **options)


def tool_call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env, seed, player=None):
    """The steps of an episode, and the observations and answers that led to them."""
    rng = random.Random(seed)

    async def whole():
        step = env.reset(seed)
        steps, turns = [step], []
        while not step.done:
            ((seat, seen),) = step.observations.items()
            answer = player(seat, seen, rng) if player else env.expert(seat, rng)
            turns.append((seat, seen, answer))
            step = await env.step({seat: answer})
            steps.append(step)
        return steps, turns

    return asyncio.run(whole())


def find(env, kind, start=0):
    """A seed whose task is of this kind."""
    return next(seed for seed in range(start, start + 500) if env.reset(seed).info["kind"] == kind)


# ---- the env check


def random_answer(seat, seen, rng):
    """Random answers: valid calls, invalid calls and final answers, in any mixture."""
    sayings = [
        tool_call("search", query="vellamore inhabitants"),
        tool_call("search", query="toka bilu"),
        tool_call("read_document", title="Vellamore"),
        tool_call("calculator", expression="2 ** 70"),
        tool_call("write_file", path=rng.choice(["a", "../a"]), text="x"),
        tool_call("list_files"),
        tool_call("nothing"),
        "<tool_call>{",
        "hm",
    ]
    if rng.random() < 0.2:
        return rng.choice(["#### 12", "12", "", "who knows"])
    return "\n".join(rng.choices(sayings, k=rng.randint(1, 3)))


@pytest.mark.parametrize("reward", ["dense", "outcome"])
@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("world", ["corpus", "drills"])
@pytest.mark.parametrize("team", ["single", "researcher_solver"])
@pytest.mark.few(4)
def test_env_passes_the_env_check(team, world, rendering, reward):
    def make():
        return tools(team=team, task_source=world, rendering=rendering, reward=reward, kinds=LIGHT, max_turns=4)

    check_env(make, seeds=range(3))
    check_env(make, seeds=range(3), act=random_answer)


def test_program_tasks_pass_the_env_check():
    def act(seat, seen, rng):
        return tool_call("python", code=rng.choice(["x = 1\nopen('a', 'a').write('x')", "x", "1 / 0"]))

    check_env(lambda: tools(kinds=["program"], max_turns=4), seeds=range(1), act=act)


# ---- who can solve the tasks


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("team", ["single", "researcher_solver"])
@pytest.mark.parametrize(
    ("world", "kind"), [*(("corpus", kind) for kind in TASK_KINDS), *(("drills", k) for k in LIGHT)]
)
@pytest.mark.few(12)
def test_expert_solves_every_task(world, kind, team, rendering):
    env = tools(task_source=world, kinds=[kind], team=team, rendering=rendering)
    for seed in range(4 if kind == "program" else 30):
        steps, turns = play(env, seed)
        assert steps[-1].info["success"] and steps[-1].team_reward == 1 and not steps[-1].truncated
        assert not any(any(step.info["invalid"].values()) or step.info["failures"] for step in steps)
        assert any(tool_calls_of(message) for _, seen, _ in turns for message in seen.messages), "some tool is called"


def guessing_players():
    """Players that never call a tool."""
    documents = open_index(BUILT_IN_CORPUS).documents
    words = sorted({value for document in documents for value in document.facts.values()})

    def echo(seat, seen, rng):
        """A number from the question, or otherwise a word."""
        asked = str(seen.messages[-1]["content"]).replace("?", "").split()
        numbers = [word for word in asked if word.isdecimal()]
        return f"#### {rng.choice(numbers or asked)}"

    def constant(text):
        return lambda seat, seen, rng: text

    return {
        "nothing": constant("#### 0"),
        "done": constant("#### done"),
        "a year": constant("#### 1500"),
        "a workshop": constant("#### the Guild of Nine"),
        "an item": constant("#### zithers"),
        "a number": lambda seat, seen, rng: f"#### {rng.randint(100, 999)}",
        "a fact": lambda seat, seen, rng: f"#### {rng.choice(words)}",
        "echo": echo,
    }


@pytest.mark.parametrize("world", ["corpus", "drills"])
@pytest.mark.few(1)
def test_tasks_need_tools(world):
    env = tools(task_source=world, kinds=LIGHT)
    for name, player in guessing_players().items():
        solved = sum(play(env, seed, player)[0][-1].info["success"] for seed in range(200))
        assert solved < 0.05 * 200, name


def test_program_answers_cannot_be_guessed():
    env = tools(kinds=["program"])
    answers = Counter(env.world.task(seed).answer for seed in range(150))
    assert max(answers.values()) <= 2


def test_correct_answers_are_accepted():
    assert (
        is_correct("48,211", "48211")
        and is_correct("48211.0", "48,211")
        and is_correct("It has 48,211 inhabitants.", "48211")
    )
    assert (
        not is_correct("48211 or 48212", "48211") and not is_correct("-48211", "48211") and not is_correct("", "48211")
    )
    assert is_correct(" the GUILD of nine.", "the Guild of Nine") and is_correct("Guild of Nine", "the Guild of Nine")
    assert not is_correct("Guild of Ten", "the Guild of Nine") and not is_correct("9" * 5000, "1")


# ---- observations


def test_conversation_extends_the_previous_one():
    """So a policy's prompt begins with the tokens of its earlier turn."""
    for team in ("single", "researcher_solver"):
        env = tools(team=team, kinds=["lookup_compute"])
        _, turns = play(env, 0)
        pairs = [(one, other) for one, other in pairwise(turns) if one[0] == other[0]]
        assert pairs
        for (_, before, answer), (_, after, _) in pairs:
            new = messages_after(after, before, answer)
            assert new and all(message["role"] == "tool" for message in new)


def test_a_policys_prompt_begins_with_its_earlier_tokens():
    tokenizer = tiny_tokenizer()
    called = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template.replace(
        "m['content'] + '<|end|>' }}", "m['content'] }}" + called
    )
    student = LanguagePolicy("s", None, ChatEncoder(tokenizer), None)
    env = {"kinds": ["lookup_compute"], "split": "base"}
    arena = EpisodeRunner(lambda: tools(**env), "tools")
    seat = {"agent": DemonstrationPolicy(student, ExpertPolicy())}
    episode = asyncio.run(arena.play(EpisodeSpec(3, seat, 3), Branching()))
    assert episode.error is None and episode.success == 1 and len(episode.nodes) >= 3
    for one, other in pairwise(node.answers["agent"] for node in episode.nodes):
        earlier = [*one.prompt_ids, *one.token_ids]
        assert list(other.prompt_ids[: len(earlier)]) == earlier


def test_each_seat_has_its_tools_and_the_note_is_passed_on():
    env = tools(team="researcher_solver", kinds=["lookup_compute"])
    _, turns = play(env, 1)
    names = {seat: {tool["function"]["name"] for tool in seen.tools} for seat, seen, _ in turns}
    assert names["researcher"] == {"search", "read_document"}
    assert names["solver"] == {"calculator", "python", "write_file", "read_file", "list_files"}
    note = next(answer for seat, _, answer in reversed(turns) if seat == "researcher")
    first = next(seen for seat, seen, _ in turns if seat == "solver")
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert env.task.question in first.messages[1]["content"] and first.messages[1]["content"].endswith(note)
    assert sum("search" in str(message) for message in first.messages) <= 1, "the solver sees no calls of the other's"


def test_first_prompt_by_hand():
    chat = tools(kinds=["files"]).reset(0).observations["agent"]
    assert isinstance(chat, Chat) and [message["role"] for message in chat.messages] == ["system", "user"]
    assert len(chat.tools) == 7 and "#### " in chat.messages[0]["content"]
    assert chat.messages[1]["content"].endswith(("scratch folder: stock.csv", "scratch folder: north.txt, south.txt"))
    small = tools(task_source="drills", kinds=["lookup"], rendering="compact").reset(0).observations["agent"]
    (asked,) = small.messages
    assert small.tools == () and asked["role"] == "user"
    name, people = asked["content"].split()
    assert name in PLACE_NAMES and people == "people"


def test_compact_conversations_are_short():
    """Lengths in tokens of a vocabulary of 512 trained on such texts, like that of the shipped bases."""
    options = {"task_source": "drills", "rendering": "compact"}

    def written(env, seeds):
        for seed in seeds:
            _, turns = play(env, seed)
            last = {seat: (seen, answer) for seat, seen, answer in turns}
            for seen, answer in last.values():
                turns = [*((m["role"], render_message(m)) for m in seen.messages), ("assistant", answer)]
                yield "".join(f"<|{role}|>{text}<|end|>" for role, text in turns)

    texts = [
        text
        for team in ("single", "researcher_solver")
        for text in written(tools(team=team, split="base", **options), range(150))
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet, marks = pre_tokenizers.ByteLevel.alphabet(), ["<tool_call>", "</tool_call>", "<|end|>"]
    marks += [f"<|{role}|>" for role in ("user", "assistant", "tool")]
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, special_tokens=marks, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    lengths = [len(bpe.encode(text).ids) for text in written(tools(split="test", **options), range(100))]
    assert max(lengths) < 120


def test_invalid_call_in_compact_rendering():
    env = tools(task_source="drills", kinds=["lookup"], rendering="compact")
    env.reset(0)
    step = asyncio.run(
        env.step({"agent": f"{tool_call('search')}\n{tool_call('search', query='toka')}\n<tool_call>so</tool_call>"})
    )
    replies = step.observations["agent"].messages[2:]
    assert (replies[0]["role"], replies[0]["content"]) == ("tool", "error")
    assert replies[1]["content"].startswith("toka ") and replies[2] == {"role": "user", "content": "error"}


# ---- rewards, by hand


def after(env, seed, *answers):
    env.reset(seed)

    async def answer_in_turn():
        return [await env.step({env._acting: answer}) for answer in answers]

    return asyncio.run(answer_in_turn())


def test_rewards_of_one_seat():
    env = tools(task_source="drills", kinds=["lookup_compute"], max_turns=10)
    env.reset(0)
    high, low = (need.expected_words[0] for need in env.task.requirements[0])
    (work,) = (need.calls[0].arguments["expression"] for need in env.task.requirements[1])
    steps = after(
        env,
        0,
        tool_call("search", query=high),  # a new valid call, which finds one of three things
        tool_call("search", query=high),  # nothing new
        f"{tool_call('search')} {tool_call('search', query=low)}",  # one invalid call of two, and another thing found
        "<tool_call>what?",
        tool_call("calculator", expression=work),
        "#### " + env.task.answer,
    )
    rewards = [step.rewards["agent"] for step in steps]
    assert rewards == pytest.approx(
        [
            VALID_CALLS_REWARD + FOUND_REWARD / 3,
            0,
            FOUND_REWARD / 3 - INVALID_PENALTY / 2,
            -INVALID_PENALTY,
            FOUND_REWARD / 3,
            0,
        ]
    )
    assert [step.team_reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.info["invalid"]["agent"] for step in steps] == [False, False, True, True, False, False]
    assert steps[-1].info["success"] and steps[-1].info["calls"] == 6


def test_rewards_of_two_seats():
    env = tools(task_source="drills", kinds=["lookup_compute"], team="researcher_solver")
    env.reset(0)
    high, low = env.task.requirements[0]
    (work,) = (need.calls[0].arguments["expression"] for need in env.task.requirements[1])
    steps = after(
        env,
        0,
        "\n".join(tool_call("search", query=need.expected_words[0]) for need in (high, low)),
        f"I only pass on: {high.note}",
        tool_call("search", query=high.expected_words[0]),  # a tool that the solver does not have
        tool_call("calculator", expression=work),
        "#### 1",
    )
    assert [step.rewards for step in steps] == [
        {"researcher": VALID_CALLS_REWARD + FOUND_REWARD},
        {"researcher": NOTE_REWARD / 2},
        {"solver": -INVALID_PENALTY},
        {"solver": VALID_CALLS_REWARD + FOUND_REWARD},
        {"solver": 0.0},
    ]
    assert not steps[-1].info["success"] and steps[-1].team_reward == 0 and not steps[-1].truncated


def test_outcome_reward_pays_for_the_answer_only():
    env = tools(task_source="drills", reward="outcome", team="researcher_solver")
    steps, _ = play(env, 0)
    assert all(not any(step.rewards.values()) for step in steps)
    assert [step.team_reward for step in steps] == [0] * (len(steps) - 1) + [1]
    assert after(env, 0, "", "<tool_call>", "")[-1].rewards == {"solver": 0}


def test_unreadable_answer_has_a_penalty():
    env = tools(task_source="drills", kinds=["compute"])
    for said_last, cost in (("", -INVALID_PENALTY), ("no idea", -INVALID_PENALTY), ("#### 7", 0.0)):
        (step,) = after(env, 0, said_last)
        assert step.done and step.rewards == {"agent": cost} and step.info["invalid"] == {"agent": cost < 0}


def test_episode_is_truncated_at_the_turn_limit():
    env = tools(task_source="drills", kinds=["lookup"], max_turns=2, team="researcher_solver")
    look = tool_call("search", query="toka")
    steps = after(env, 0, look, look, tool_call("list_files"), tool_call("list_files"))
    assert list(steps[1].observations) == ["solver"] and "(there is none)" in str(steps[1].observations["solver"])
    assert steps[-1].done and steps[-1].truncated and not steps[-1].info["success"]
    short = tools(kinds=["lookup_compute"], max_turns=1)
    steps, _ = play(short, 0)
    assert len(steps) == 2 and steps[-1].info["success"], "an expert does not begin what it cannot end"


def test_calls_in_one_answer_are_counted():
    env = tools(task_source="drills", kinds=["lookup"], max_calls=2)
    (step,) = after(env, 0, tool_call("list_files") * 5)
    replies = [message["content"] for message in step.observations["agent"].messages if message["role"] == "tool"]
    assert replies == ["no files"] * 2 + ["Error: not called: one answer may hold 2 calls"] * 3
    assert step.rewards["agent"] == pytest.approx(-INVALID_PENALTY * 3 / 5)


def test_a_file_must_hold_the_answer():
    env = tools(kinds=["files"])
    seed = next(seed for seed in range(100) if env.world.task(seed).output_file)
    answer = env.world.task(seed).answer
    assert not after(env, seed, f"#### {answer}")[-1].info["success"]
    wrong = tool_call("write_file", path="total.txt", text="1")
    steps = after(env, seed, wrong)
    assert env.expert("agent", random.Random(0)) != "#### done"
    while not steps[-1].done:
        steps.append(asyncio.run(env.step({"agent": env.expert("agent", random.Random(0))})))
    assert steps[-1].info["success"] and env.scratch.files["total.txt"] == answer


# ---- sources of tasks


def test_a_task_is_of_one_split():
    keys = {split: {tools(split=split).world.task(seed).split_key for seed in range(15)} for split in SPLIT_SHARES}
    assert sum(map(len, keys.values())) == len(set().union(*keys.values()))
    assert {tools().reset(seed).info["kind"] for seed in range(60)} == set(TASK_KINDS)


def test_synthetic_worlds_differ_between_seeds():
    one, same, other = SyntheticLibrary(1), SyntheticLibrary(1), SyntheticLibrary(2)
    names = sorted(PLACE_NAMES)
    assert len(names) > 2000
    assert [one.population(name) for name in names] == [same.population(name) for name in names]
    assert sum(one.population(name) == other.population(name) for name in names) < 20
    assert min(map(one.population, names)) >= 100 and max(map(one.population, names)) <= 999
    assert max(Counter(map(one.population, names)).values()) < 12, "no number is more likely than another"


def test_custom_tasks_are_played(tmp_path):
    rows = [
        {"question": "How high?", "answer": 12, "split": "train"},
        {"question": "Who?", "answer": "Ann", "files": {"a/b.txt": "it was Ann"}, "split": "train"},
        {"question": "When?", "answer": "1,204", "split": "test"},
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "arle.md").write_text("Arle was founded in 1204.")
    options = {"tasks": str(tmp_path / "tasks.jsonl"), "documents": str(tmp_path / "documents")}
    env = tools(**options)
    seen = {env.reset(seed).observations["agent"].messages[1]["content"]: seed for seed in range(20)}
    assert set(seen) == {"How high?", "Who?\nFiles in the scratch folder: a/b.txt"}
    steps = after(env, max(seen.values()), tool_call("search", query="founded"))
    assert "arle: Arle was founded in 1204." in str(steps[-1].observations["agent"])
    for split in ("train", "test"):
        assert play(tools(split=split, **options), 0)[0][-1].info["success"]
    with pytest.raises(ValueError, match='no task of split "dev"'):
        tools(split="dev", **options)


def test_custom_facts_are_played(tmp_path):
    rows = [
        {"title": f"Hill {name}", "text": f"It is {n} m high.", "facts": {"elevation": n}}
        for n, name in enumerate("abcdefghijklm", 100)
    ]
    (tmp_path / "hills.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = tools(documents=str(tmp_path / "hills.jsonl"), kinds=["lookup", "lookup_compute"])
    questions = {env.reset(seed).observations["agent"].messages[1]["content"] for seed in range(60)}
    assert any(question.startswith("What is the elevation of Hill ") for question in questions)
    assert any(question.startswith("By how much is the elevation of Hill ") for question in questions)
    assert all(play(env, seed)[0][-1].info["success"] for seed in range(10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', 'row 1 needs a "question" and an "answer"'),
        ('{"question": "a", "answer": [1]}', 'row 1 needs a "question" and an "answer"'),
        ('{"question": "a", "answer": 1, "split": "dev2"}', "split 'dev2' is none of"),
        ('{"question": "a", "answer": 1, "files": {"a": 1}}', '"files" must be'),
        ('{"question": "a", "answer": 1, "files": {"../a": ""}}', "leads out"),
    ],
)
def test_invalid_task_files_are_refused(tmp_path, line, message):
    (tmp_path / "tasks.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        tools(tasks=str(tmp_path / "tasks.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["program"], "built_in": ["search"]}, "need the tool python"),
        ({"kinds": ["program"], "task_source": "drills"}, "drills has no tasks of kind program"),
        ({"kinds": []}, "kinds: is empty"),
        ({"tasks": "none.jsonl"}, "no tasks at"),
        ({"documents": "none"}, "no documents at"),
        ({"documents": "x", "task_source": "drills"}, "leave documents and tasks out"),
        ({"tasks": "x", "kinds": ["files"]}, "one or the other"),
        ({"max_turns": 0}, "max_turns=0 is out of range"),
        ({"tools": ["nowhere:convert"]}, "cannot be loaded"),
        (
            {"kinds": ["compute"], "built_in": ["calculator"], "team": "researcher_solver"},
            "the researcher has no tools",
        ),
        ({"kind": ["files"]}, "did you mean kinds"),
    ],
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tools(**options)


# ---- users' tools, some of which hang

MODULE = '''
import asyncio
import threading

RELEASED = threading.Event()

def convert(kilometres: float) -> float:
    """Converts kilometres to miles."""
    return kilometres / 1.609344

def wait() -> None:
    """Waits."""
    RELEASED.wait()

async def wait_async() -> None:
    """Waits."""
    await asyncio.sleep(3600)

async def answer_async(number: int) -> int:
    """Answers."""
    await asyncio.sleep(0.001)
    return number + 1
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_tools", raising=False)
    found = importlib.import_module("own_tools")
    yield found
    found.RELEASED.set()


def test_custom_tool_by_path(module):
    env = tools(tools=["own_tools:convert"], kinds=["compute"], team="researcher_solver")
    steps = after(env, 0, "no note", tool_call("convert", kilometres=1.609344))
    chat = steps[-1].observations["solver"]
    assert chat.messages[-1]["content"] == "1.0"
    assert chat.tools[-1]["function"]["description"] == "Converts kilometres to miles."


@pytest.mark.slow
def test_hung_tools_do_not_block_others(module):
    """200 episodes, of which 20 call a tool that hangs: the 180 end before the first of the 20, which get an error and
    continue."""
    hanging = [tool_call("wait"), tool_call("wait_async"), tool_call("python", code="import time\ntime.sleep(60)")]
    quick = [
        tool_call("convert", kilometres=1),
        tool_call("answer_async", number=1),
        tool_call("calculator", expression="1 + 1"),
    ]
    names = ["convert", "wait", "wait_async", "answer_async"]
    options = {"kinds": ["compute"], "call_time_limit_s": 4.0, "tools": [f"own_tools:{name}" for name in names]}
    arena, done = EpisodeRunner(lambda: tools(**options), "tools"), []

    def match(i):
        call = hanging[i % 3] if i % 10 == 0 else quick[i % 3]
        return EpisodeSpec(i, {"agent": ScriptedPolicy([call, "#### 0"])}, i)

    episodes = asyncio.run(arena.play_all([match(i) for i in range(200)], Branching(), lambda e: done.append(e.seed)))
    assert all(episode.error is None and len(episode.nodes) == 2 for episode in episodes)
    assert {seed for seed in done[:180] if seed % 10 == 0} == set()
    for episode in episodes:
        reply = episode.nodes[1].observations["agent"].messages[-1]["content"]
        assert ("did not answer within 4 seconds" in reply or "took too long" in reply) == (episode.seed % 10 == 0)
        assert not episode.nodes[0].info["invalid"]["agent"], "that a tool hangs is not the agent's mistake"


@pytest.mark.slow
def test_hung_programs_do_not_block_others():
    """The same if all episodes run programs, as many as the machine can run at the same time."""
    hanging, quick = tool_call("python", code="import time\ntime.sleep(600)"), tool_call("python", code="print(1 + 1)")
    arena, done = EpisodeRunner(lambda: tools(kinds=["program"], call_time_limit_s=40.0), "tools"), []
    matches = [
        EpisodeSpec(i, {"agent": ScriptedPolicy([hanging if i % 10 == 0 else quick, "0"])}, i) for i in range(200)
    ]
    episodes = asyncio.run(arena.play_all(matches, Branching(), lambda e: done.append(e.seed)))
    assert all(episode.error is None for episode in episodes)
    assert {seed for seed in done[:180] if seed % 10 == 0} == set()


def test_tool_state_is_forked_with_the_episode():
    env = tools(kinds=["files"])
    env.reset(0)

    async def both():
        await env.step({"agent": tool_call("write_file", path="a", text="one")})
        twin = env.fork()
        await twin.step({"agent": tool_call("write_file", path="a", text="two")})
        return [await each.step({"agent": tool_call("read_file", path="a")}) for each in (env, twin)]

    assert [step.observations["agent"].messages[-1]["content"] for step in asyncio.run(both())] == ["one", "two"]


def test_step_after_the_end_is_refused():
    env = Tools(task_source="drills")
    with pytest.raises(ValueError, match="call reset"):
        asyncio.run(env.step({"agent": ""}))
    env.reset(0)
    with pytest.raises(ValueError, match="it is the turn of agent"):
        asyncio.run(env.step({"solver": ""}))
