"""Chains: seats that act in turn on their own prompts, from rows and reward functions, in Python and by config."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from helpers.command_line import invoke, refused

import palestra as pl
from palestra.core.chat import Chat
from palestra.core.files import read_lines
from palestra.envs.reward_terms import check_terms

CELLS = [f"r{row} c{column}" for row in range(4) for column in range(4)]
ROWS = [{"you": you, "goal": goal} for you in CELLS for goal in CELLS if you != goal]
PROMPTS = {"lookout": "size 4 you {you} goal {goal}", "pilot": "size 4 you {you} plan {lookout}"}
MODULE = """
def top_row(row, answers):
    return answers["lookout"].startswith("r0")


async def goes_up(row, answers):
    return answers["pilot"].startswith("up")
"""


def top_row(row, answers):
    return answers["lookout"].startswith("r0")


async def goes_up(row, answers):
    return answers["pilot"].startswith("up")


def play(chain, *answers):
    """The prompts of one training episode, and its last step."""
    env = chain()
    step = env.reset(0)
    prompts = []
    for answer in answers:
        ((seat, prompt),) = step.observations.items()
        prompts.append(prompt)
        step = asyncio.run(env.step({seat: answer}))
    assert step.done
    return prompts, step


def chain(reward, prompts=PROMPTS, rows=ROWS[:1], **options):
    return pl.Chain(rows, prompts=prompts, reward=reward, **options)


def test_each_seat_reads_its_columns_and_earlier_answers():
    seen = []
    pair = chain(lambda row, answers: seen.append((row, answers, answers.turns)) or 0.5)
    prompts, step = play(pair, "r1 c1", "up")
    assert prompts == ["size 4 you r0 c0 goal r0 c1", "size 4 you r0 c0 plan r1 c1"]
    assert seen == [(ROWS[0], {"lookout": "r1 c1", "pilot": "up"}, [("lookout", "r1 c1"), ("pilot", "up")])]
    assert (step.team_reward, step.rewards, step.info) == (0.5, {}, {})
    pl.check_env(pair)


def test_a_debate_repeats_seats_and_shows_the_transcript():
    debate = pl.Chain(
        [{"motion": "Tea {first}"}],
        seats=["pro", "con", "pro", "judge"],
        prompts={
            "pro": ["For: {motion}", "{con}. Reply."],
            "con": "{motion}? {pro}",
            "judge": "{transcript}\n{{who?}}",
        },
        reward=lambda row, answers: {"pro": answers["judge"] == answers["pro"], "con": answers.turns[0][1] == "b"},
    )
    prompts, step = play(debate, "a", "b", "c", "c")
    assert prompts == ["For: Tea {first}", "Tea {first}? a", "b. Reply.", "pro: a\ncon: b\npro: c\n{who?}"]
    assert step.rewards == {"pro": 1.0, "con": 0.0} and step.info == {"success": {"pro": True, "con": False}}


def test_prompts_may_be_messages_with_a_system_message_of_the_row():
    shots = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    prompts = {
        "a": [*shots, {"role": "user", "content": "{n} + 1"}],
        "b": [{"role": "system", "content": "{style}"}, {"role": "user", "content": "{a:>3} of {n:.1f}"}],
        "c": "{ready}",
    }
    ready = [{"role": "user", "content": "ready"}]
    asked, _ = play(chain(lambda row, answers: 1, prompts, [{"n": 4, "style": "Be brief.", "ready": ready}]), *"xyz")
    assert asked[0] == Chat((*shots, {"role": "user", "content": "4 + 1"})) and asked[0].num_shared == 2
    assert [message["content"] for message in asked[1].messages] == ["Be brief.", "  x of 4.0"]
    assert asked[1].num_shared == 0 and asked[2] == Chat(tuple(ready))


def test_several_rewards_are_summed_and_named():
    async def by_seat(row, answers):
        return {"pilot": 0.25, "lookout": True}

    functions = {"half": lambda row, answers: 0.5, "none": lambda row, answers: None, "by_seat": by_seat}
    _, step = play(chain(functions, success=lambda row, answers: 0.75), "a", "b")
    assert (step.team_reward, step.rewards) == (0.5, {"lookout": 1.0, "pilot": 0.25})
    assert step.info == {
        "success": 0.75,
        "reward_terms": {"lookout": {"by_seat": 1.0}, "pilot": {"by_seat": 0.25}},
        "team_reward_terms": {"half": 0.5},
    }
    check_terms(step)
    with pytest.raises(ValueError, match=r"the team earns 0\.5, and its terms are"):
        check_terms(pl.Step({}, team_reward=0.5, info={"team_reward_terms": {"half": 0.25}}))


@pytest.mark.parametrize(
    ("answers", "info"),
    [(("r0", "up"), {"success": True}), (("r0", "down"), {"success": False}), (("r1", "up"), {"success": False})],
)
def test_success_is_that_all_truth_values_are_true(answers, info):
    _, step = play(chain([top_row, goes_up, lambda row, answers: 0.1]), *answers)
    assert {"success": step.info["success"]} == info
    assert step.info["team_reward_terms"] == {
        "top_row": answers[0] == "r0",
        "goes_up": answers[1] == "up",
        "<lambda>": 0.1,
    }


def test_reward_functions_may_have_the_form_of_trl():
    """TRL calls `reward(prompts=[...], completions=[...], column=[...], ...)`; conversations have messages."""
    seen = []

    def exact(prompts, completions, goal, **columns):
        seen.append((prompts, completions, goal, columns))
        return [float(goal[0] in completions[0])]

    async def short(completions, limit=3):
        return [len(completions[0]) <= limit]

    _, step = play(chain([exact, short]), "r1 c1", "to r0 c1")
    assert seen == [
        (["size 4 you r0 c0 plan r1 c1"], ["to r0 c1"], ["r0 c1"], {"you": ["r0 c0"], "lookout": ["r1 c1"],
         "pilot": ["to r0 c1"]})
    ]  # fmt: skip
    assert step.info["team_reward_terms"] == {"exact": 1.0, "short": 0.0}
    prompt = [{"role": "user", "content": "hi"}]
    play(pl.Prompts([{"prompt": prompt, "goal": "x"}], exact, success=lambda row, answer: answer == "x"), "x")
    assert seen[1][:2] == ([prompt], [[{"role": "assistant", "content": "x"}]])
    with pytest.raises(ValueError, match=r"returned 1.0 \(float\) for row 0: return a list with a number for each"):
        play(chain(lambda completions, **columns: 1.0), "a", "b")
    for wrong in ({"x": 1.0}, {1.0}):
        with pytest.raises(ValueError, match="for row 0: return a list with a number for each"):
            play(chain(lambda completions, wrong=wrong: wrong), "a", "b")
    rows = [{"prompt": "p", "completions": "c"}]
    with pytest.raises(ValueError, match="asks for completions, which is also a column of the rows: rename"):
        pl.Prompts(rows, lambda completions: [1.0])


def test_reward_functions_get_row_and_answer_in_this_order():
    with pytest.raises(
        ValueError, match=r'"by_name" takes \(answers, row\), and is called with \(row, answers\): swap'
    ):

        def by_name(answers, row):
            return 1.0

        chain(by_name)


def test_a_reward_function_that_changes_its_row_changes_no_prompt():
    def greedy(row, answer):
        row["goals"].append("more")
        return len(row.pop("goals")) == 3

    env = pl.Prompts([{"prompt": "p", "goals": ["x", "y"]}], greedy)
    for _ in range(2):
        assert play(env, "a")[1].info["success"] is True


def test_a_reward_function_gets_the_objects_of_its_row():
    """A model, or a checker with a lock, is not copied; the lists around it are."""
    lock = threading.Lock()

    def held(row, answer):
        row["checkers"].append(answer)
        return row["checkers"][0] is lock

    env = pl.Prompts([{"prompt": "p", "checkers": [lock]}], held)
    for _ in range(2):
        assert play(env, "a")[1].info["success"] is True

    def both(completions, checkers):
        return [checkers[0][0] is lock]

    assert play(pl.Prompts([{"prompt": "p", "checkers": [lock]}], both), "a")[1].info["success"] is True


def test_truth_values_of_arrays_are_successes_and_an_empty_mapping_is_no_reward():
    for value in (True, np.bool_(True), np.array(True), torch.tensor(True)):
        _, step = play(pl.Prompts([{"prompt": "p"}], lambda row, answer, value=value: value), "a")
        assert (step.team_reward, step.info["success"]) == (1.0, True)
    with pytest.raises(ValueError, match=r"returned \{\} .* for row 0: return a finite number"):
        play(pl.Prompts([{"prompt": "p"}], lambda row, answer: {}), "a")


def test_a_reward_function_that_exits_is_an_error():
    with pytest.raises(ValueError, match=r'"exit" failed for row 0 with RuntimeError: it called sys\.exit\(3\)'):
        play(pl.Prompts([{"prompt": "p"}], {"exit": lambda row, answer: sys.exit(3)}), "a")


def test_a_column_called_as_the_answers_so_far_is_refused():
    rows = [{"transcript": "t"}]
    assert play(pl.Prompts(rows, lambda row, answer: 1.0, prompt="{transcript}"), "a")[0] == ["t"]
    with pytest.raises(ValueError, match="transcript is a column of the rows, and in prompts all answers so far"):
        pl.Chain(rows, prompts={"a": "say", "b": "{transcript}"}, reward=top_row)


def test_rows_may_be_a_dataset_or_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for rows in (datasets.Dataset.from_list(ROWS), path, str(path), iter(ROWS)):
        read = chain(top_row, rows=rows)
        assert read.rows == chain(top_row, rows=ROWS).rows
        assert {split: len(part) for split, part in read.rows.items()} == {"test": 24, "dev": 24, "train": 192}


def test_rows_may_be_a_dataset_by_its_name(tmp_path, monkeypatch):
    """`datasets` takes a folder of that name for the dataset of the hub, so that nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/data").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:30])):
        Path(f"own/data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def num_rows(name):
        return sum(map(len, chain(top_row, rows=name).rows.values()))

    assert [num_rows(f"own/data:{rest}") for rest in ("", ":test", "default:train[:12]")] == [len(ROWS), 30, 12]
    env = {"type": "chain", "rows": "own/data::test", "prompts": PROMPTS, "reward": "helpers.toys:nothing"}
    with pytest.raises(ValueError, match="helpers.toys:nothing".replace(".", r"\.")):  # its rows are
        pl.make_env(**env)
    for rest, message in ((":dev", 'Unknown split "dev"'), ("x", "'x' not found. Available: .'default'.")):
        with pytest.raises(ValueError, match=message):
            num_rows(f"own/data:{rest}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="by the package `datasets`, which is missing: pip install datasets"):
        num_rows("own/data::test")


def test_rows_are_split_by_what_prompts_show():
    """Columns that no prompt shows do not move a row to another split."""
    more = chain(top_row, rows=[{**row, "number": i} for i, row in enumerate(ROWS + ROWS)])
    plain = chain(top_row, rows=ROWS)
    for split, rows in more.rows.items():
        assert [{"you": row["you"], "goal": row["goal"]} for row in rows] == plain.rows[split] * 2


def one_row(**row):
    return {"rows": [row]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": {"a": "{yuo}"}}, r"row 0 has no yuo, which the prompt of a shows: did you mean you\?"),
        ({"prompts": {"a": "{b}", "b": "{you}"}}, r"a shows \{b\}, who has not answered then \(turns: a, b"),
        ({"seats": [*"aba"], "prompts": {"a": "{b}", "b": "{you}"}}, "write a list of prompts for a, one for each"),
        ({"seats": ["a", "a"], "prompts": {"a": ["{you}"]}}, "a has 1 prompts and 2 turns"),
        ({"seats": ["a"]}, "prompts are of lookout, pilot, and seats are a: a is only in one of them"),
        ({"prompts": {}}, "prompts: there are none"),
        ({"prompts": {"a": "you"}}, r'the prompt of a is the word "you": for the column, write "\{you\}"'),
        ({"prompts": {"a": "{you"}}, "prompts: a: '{you' is no template .*: write {{ and }} for braces"),
        ({"prompts": {"a": "{you.__class__}"}}, "row 0 has no you.__class__, which"),
        ({"prompts": {"a": "{you:{size}}"}}, "row 0 has no size, which"),
        ({"prompts": {"a": 5}}, "prompts: a: 5 is neither a text nor a list of messages"),
        ({"prompts": {"a": [{"role": "user", "text": "x"}]}}, "prompts: a: messages.0: .*'text'"),
        ({"prompts": {"you": "x", "b": "y"}}, "you is a seat and a column of the rows"),
        ({"rows": [*ROWS, {"you": "r0 c0"}]}, "row 240 has no goal, which the prompts show"),
        ({"rows": []}, "rows: there are none"),
        ({"rows": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))}, "row 0 is 'train', and no mapping"),
        ({"rows": "openai/gsm8k"}, "openai/gsm8k is no file or folder here, and no dataset .*: Couldn't reach .* Hub"),
        ({"rows": "openai/gsm8k.jsonl"}, "openai/gsm8k.jsonl does not exist: give a .jsonl"),
        ({**one_row(you=["a"], goal="x")}, r"row 0, you: \['a'\] is a list: write a text or a number"),
        ({**one_row(you="\ud800", goal="x")}, "row 0, you: the .* lone surrogate, .* no tokenizer encodes"),
        ({"reward": None}, "must be a function of .*, and is None"),
        ({"reward": []}, r"reward: there is no function: write def reward\(row, answers\)"),
        ({"reward": [len]}, r'the reward function "len" takes .*, and is called with \(row, answers\)'),
        ({"reward": lambda row: 1}, r'function "<lambda>" takes \(row\), and is called with \(row, answers\)'),
        ({"reward": [top_row, top_row]}, "two functions have one name: name them"),
        ({"reward": {"a": top_row, "b": 3}}, "must be a function of .*, and is 3"),
        ({"reward": lambda completions, trainer_state: [1]}, 'asks for trainer_state, and there are completions, goal'),
        ({"reward": "no_such_module:f"}, 'reward "no_such_module:f" cannot be loaded: there is no module'),
        ({"success": lambda answer: True}, 'the success function "<lambda>" takes'),
    ],
)  # fmt: skip
def test_mistakes_are_refused_in_one_line_before_a_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        pl.Chain(**{"rows": ROWS, "prompts": PROMPTS, "reward": top_row} | options)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda row, answers: {"editor": 1.0}, r"returned {'editor': 1.0} .* or such by seat \(lookout, pilot\)"),
        (lambda row, answers: {"pilot": "1"}, "returned {'pilot': '1'} .* return a finite number"),
        (lambda row, answers: row["gaol"], "failed for row 0 with KeyError: 'gaol'"),
    ],
)
def test_what_a_reward_function_must_not_return(reward, message):
    with pytest.raises(ValueError, match=message):
        play(chain(reward), "a", "b")


def train(root, env, **changes):
    settings = {
        "policies": {name: pl.Lora("tiny", rank=4, lr=8e-3, sampling={"max_tokens": 3}) for name in PROMPTS},
        "algorithm": pl.GRPO(branch_at="root", group_size=8),
        "steps": 1,
        "episodes": 8,
    }
    return pl.train(env=env, root=root, **settings | changes)


def test_two_agents_learn_what_their_prompts_ask(tmp_path, check_score):
    """Neither base often names a cell of the top row, or goes up; each has an adapter and a reward of its own."""

    def own(row, answers):
        return {"lookout": answers["lookout"].startswith("r0"), "pilot": answers["pilot"].startswith("up")}

    run = train(tmp_path, chain(own, rows=ROWS), steps=12, evals={"test": {"episodes": 24}})
    before, after = run.evals["return"]
    assert before < 0.3
    check_score(after)


def test_rewards_are_weighed_by_name(tmp_path):
    weights = {"always": 0.0, "twice": 2.0}
    always, twice = (lambda row, answers: 1.0), (lambda row, answers: float(len(answers["pilot"]) % 3))
    run = train(tmp_path, chain({"always": always, "twice": twice}, rows=ROWS), reward_weights=weights)
    line = run.metrics[run.metrics["policy"] == "pilot"].iloc[0]
    assert line["reward/always"] == 0 and line["team_reward"] == pytest.approx(line["reward/twice"])
    rewards = {node.team_reward for episode in run.trees() for node in episode.nodes}
    assert rewards <= {0.0, 2.0, 4.0} and len(rewards) > 1


@pytest.mark.parametrize("algorithm", [{"type": "grpo"}, {"type": "dpo", "continue_from": "random"}])
def test_a_run_in_which_only_the_last_seat_would_learn_is_refused(algorithm, tmp_path):
    no_model = {"default": pl.Lora("./no_such_base")}
    with pytest.raises(ValueError, match=r"pays after its last turn, .* set algorithm.branch_at: root"):
        train(tmp_path, chain(top_row, rows=ROWS), algorithm=algorithm, policies=no_model)
    with pytest.raises(ValueError, match="no_such_base"):
        train(tmp_path, chain(top_row, rows=ROWS), algorithm={**algorithm, "continue_from": "all"}, policies=no_model)


def config(folder, **env):
    """A config of a chain, with its rows and reward functions, in `folder`."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "chain_rewards.py").write_text(MODULE)
    functions = ["chain_rewards:top_row", "chain_rewards:goes_up"]
    tree = {
        "name": "pair",
        "steps": 2,
        "episodes": 4,
        "env": {"type": "chain", "rows": str(folder / "rows.jsonl"), "prompts": PROMPTS, "reward": functions} | env,
        "policies": {"default": {"type": "lora", "base": "tiny", "rank": 2, "sampling": {"max_tokens": 3}}},
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4},
        "evals": {"dev": {"episodes": 4}},
    }
    path = folder / "pair.json"
    path.write_text(json.dumps(tree))
    return path


def test_a_config_trains_a_chain_and_resumes_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke("train", config(tmp_path), "--root", tmp_path)
    assert done.exit_code == 0, done.output
    lines = read_lines(tmp_path / "pair" / "metrics.jsonl")
    assert {line["policy"] for line in lines} >= {"default"} and "reward/top_row" in lines[-2]
    resumed = invoke("train", "--resume", tmp_path / "pair", "--set", "steps=3")
    assert resumed.exit_code == 0, resumed.output
    assert "lookout says" in invoke("eval", tmp_path / "pair", "--episodes", "1", "--show", "1").output


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"prompts": {"lookout": "{yuo}"}}, "row 0 has no yuo"),
        ({"rows": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"reward": "chain_rewards:absent"}, 'reward "chain_rewards:absent" cannot be loaded'),
        ({"prompt": "x"}, 'env "chain" has no option "prompt": did you mean prompts?'),
        ({"split": "all"}, "option \"split\" of env \"chain\": input should be 'train', 'dev' or 'test'"),
    ],
)
def test_mistakes_in_a_config_are_refused_in_one_line(env, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused("train", config(tmp_path, **env), "--root", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_own_prompts_of_two_agents_train_a_real_model(tmp_path):
    """SmolLM2: a writer names an animal, an editor makes a sentence of it."""
    rows = [{"place": place} for place in ("sea", "wood", "sky", "desert", "farm", "river")]
    prompts = {
        "writer": "Name one animal of the {place}. Answer with one word.",
        "editor": [
            {"role": "system", "content": "You write for children."},
            {"role": "user", "content": "Write one short sentence about: {writer}"},
        ],
    }
    rewards = {
        "one_word": lambda row, answers: {"writer": len(answers["writer"].split()) == 1},
        "short": lambda row, answers: -abs(len(answers["editor"].split()) - 6) / 6,
    }
    policies = {name: pl.Lora("smollm2", rank=4, sampling={"max_tokens": 16}) for name in prompts}
    run = train(tmp_path, pl.Chain(rows, prompts=prompts, reward=rewards), policies=policies, steps=2, episodes=2)
    line = run.metrics[run.metrics["policy"] == "editor"].iloc[-1]
    assert line["updates"] >= 1 and line["reward/short"] < 0
    for episode in run.trees():
        first, second = episode.trajectory(episode.leaves()[0])
        written = first.answers["writer"].text
        assert second.observations["editor"].messages[1]["content"] == f"Write one short sentence about: {written}"
