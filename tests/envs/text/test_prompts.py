"""Prompts with a reward function: what rewards may be, messages as prompts, and the order of rows."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from helpers.toys import Spoken

import palestra as pl
from palestra.core.chat import Chat
from palestra.text.rollouts.metrics import episode_metrics
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

ROWS = [{"prompt": f"Add {n} and {n}.", "sum": 2 * n} for n in range(30)]
RUN = 5 << 32  # the first instance of training with seed 5


def judged(reward, answers=("0", "1"), rows=ROWS):
    """The episode of one prompt with these siblings."""
    prompts = pl.Prompts(rows, reward)
    speaker = Spoken("agent@1", lambda query, i: answers[i])
    runner = EpisodeRunner(lambda: prompts("test"), "train")
    spec = EpisodeSpec(0, {"agent": speaker}, 0)
    return asyncio.run(runner.play(spec, Branching("root", len(answers)))), prompts


@pytest.mark.parametrize("reward", [True, False, np.True_, np.False_])
def test_truth_values_are_success(reward):
    episode, _ = judged(lambda row, answer: reward)
    assert [n.info for n in episode.nodes] == [{"success": bool(reward)}] * 2
    assert [n.team_reward for n in episode.nodes] == [float(reward)] * 2


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), np.array(0.5)])
def test_numbers_are_rewards_without_success(reward):
    episode, _ = judged(lambda row, answer: reward)
    assert [n.team_reward for n in episode.nodes] == [0.5] * 2 and "success" not in episode_metrics([episode])


def test_a_coroutine_function_is_awaited():
    async def judge(row, answer):
        await asyncio.sleep(0)
        return answer == "1"

    episode, _ = judged(judge)
    assert [n.info["success"] for n in episode.nodes] == [False, True]


def test_none_is_no_reward_for_this_answer():
    episode, _ = judged(lambda row, answer: None if answer == "1" else 2.0, answers=("0", "1", "2"))
    assert episode.error is None and [n.error for n in episode.nodes] == [None, "no reward", None]
    assert episode_metrics([episode])["return"] == 2.0


@pytest.mark.parametrize("reward", [[1.0], math.nan, math.inf, "1.0", np.zeros(2), {"score": 1}, object()])
def test_what_is_no_reward_is_refused_with_the_row_and_the_function(reward):
    def score(row, answer):
        return reward if answer == "1" else 0.0

    episode, prompts = judged(score)
    (lost,) = [node for node in episode.nodes if node.is_lost]
    number = ROWS.index(prompts.rows["test"][0])
    assert 'the reward function "score" returned' in lost.error and f"for row {number}: return a" in lost.error
    assert episode.error is None and len(episode.leaves()) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_that_raises_costs_its_answer(is_async):
    def score(row, answer):
        return {"0": 0.0}[answer]

    async def score_later(row, answer):
        return score(row, answer)

    episode, prompts = judged(score_later if is_async else score)
    (lost,) = [node for node in episode.nodes if node.is_lost]
    number = ROWS.index(prompts.rows["test"][0])
    assert f"failed for row {number} with KeyError: '1'" in lost.error and "score" in lost.error
    assert "KeyError" in episode.traceback


def test_prompts_may_be_messages():
    shots = [{"role": "system", "content": "You add."}, {"role": "user", "content": "1 + 1"}]
    shots += [{"role": "assistant", "content": "2"}]
    rows = [{"prompt": [*shots, {"role": "user", "content": f"{n} + 1"}], "n": n} for n in range(10)]
    seen = []
    prompts = pl.Prompts(rows, lambda row, answer: seen.append(row["n"]) or 1.0)
    assert sum(map(len, prompts.rows.values())) == 10 and len(prompts.rows["test"]) == 1
    step = prompts("test").reset(0)
    assert step.observations["agent"] == Chat(tuple(prompts.rows["test"][0]["prompt"]))
    pl.check_env(lambda: prompts("train"))


def test_a_policy_reads_the_messages_as_its_template_renders_them(tmp_path):
    """The system message, the worked example and the question, in training and in the stored episode."""
    messages = [{"role": role, "content": f"{role} words"} for role in ("system", "user", "assistant", "user")]
    rows = [{"prompt": [*messages[:-1], {"role": "user", "content": f"question {n}"}]} for n in range(4)]
    run = pl.train(
        env=pl.Prompts(rows, lambda row, answer: float(len(answer))),
        policies={"default": pl.Lora("tiny", rank=2, sampling={"max_tokens": 2})},
        algorithm=pl.GRPO(group_size=2),
        steps=1,
        episodes=2,
        root=tmp_path,
    )
    from palestra.engine.bases.model import Engine, resolve_base

    tokenizer = Engine.load(resolve_base("tiny")).tokenizer
    for episode in run.trees():
        chat = episode.nodes[0].observations["agent"]
        assert list(chat.messages[:3]) == messages[:3]
        text = tokenizer.apply_chat_template(list(chat.messages), tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert episode.nodes[0].answers["agent"].prompt_ids.tolist() == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "row 0 has no prompt"),
        ([], "row 0, prompt: .* is neither a text nor a list of messages"),
        ([{"role": "user"}], "row 0, prompt: messages.0: the message has no content"),
        ([{"role": "user", "content": "hi", "weight": 0}], "row 0, prompt: messages.0: .*'weight'"),
        ([{"role": "user", "content": "\ud800"}], "has text with a lone surrogate, .*, which no tokenizer encodes"),
        (["hi"], "row 0, prompt: messages must be a list of messages, each with a role"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure"}], "messages end with an answer"),
    ],
)
def test_other_prompts_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        pl.Prompts([{"prompt": prompt}], lambda row, answer: 0.0)


def test_training_shuffles_rows_in_each_epoch_and_evaluation_does_not():
    prompts = pl.Prompts(ROWS, lambda row, answer: 0.0)
    env = prompts("train")
    size = len(env.rows)
    epochs = [[env.instance_of(RUN + epoch * size + i) for i in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(size))]}) == 4
    assert epochs[0] == [prompts("train").instance_of(RUN + i) for i in range(size)]
    assert epochs[0] != [env.instance_of((6 << 32) + i) for i in range(size)]  # another run
    held_out = prompts("test")
    assert [held_out.reset(i).observations["agent"] for i in range(4)] == [
        prompts.rows["test"][i % len(prompts.rows["test"])]["prompt"] for i in range(4)
    ]


def _lines(run):
    return run.metrics.to_dict("records")


@pytest.mark.parametrize("options", [{}, {"staleness": 1}], ids=["sync", "async"])
@pytest.mark.few(1)
def test_a_resumed_run_sees_the_same_rows_and_loses_the_same_answers(options, tmp_path):
    """Some answers have no reward, some rewards fail: a run of four steps equals one that is stopped after two."""

    def score(row, answer):
        kind = sum(map(ord, answer + row["prompt"])) % 7
        return None if kind == 0 else 1 / (kind - 1)

    class StopAfterTwo(pl.Callback):
        def on_step(self, step, metrics):
            if step == 1:
                self.stop()

    def train(name, *callbacks):
        return pl.train(
            env=pl.Prompts(ROWS, score),
            policies={"default": pl.Lora("tiny", rank=2, sampling={"max_tokens": 3})},
            algorithm=pl.GRPO(group_size=8, branch_at="root"),
            steps=4,
            episodes=6,
            callbacks=callbacks,
            root=tmp_path,
            name=name,
            seed=3,
            **options,
        )

    whole, part = train("whole"), train("part", StopAfterTwo())
    assert len(set(part.metrics["step"])) == 2
    part = pl.train(resume=part)
    assert str(_lines(whole)) == str(_lines(part))  # as text, since absent values are NaN
    asked = Counter(e.nodes[0].observations["agent"] for step in range(4) for e in whole.trees(step))
    assert len(asked) == 24 and set(asked.values()) == {1}  # each of the rows once
    team = whole.metrics[whole.metrics["policy"] == "team"]
    assert team["failed"].sum() == 0 and team["failed_branches"].sum() > 4 and team["no_reward_branches"].sum() > 4


def test_a_prompt_is_a_template_over_any_columns():
    rows = [{"n": n, "agent": "a column"} for n in range(12)]
    prompts = pl.Prompts(rows, {"even": lambda row, answer: row["n"] % 2 == 0}, prompt="Is {n} even? {agent}")
    row = prompts.rows["test"][0]
    env = prompts("test")
    assert env.reset(0).observations == {"agent": f"Is {row['n']} even? a column"}
    step = asyncio.run(env.step({"agent": "yes"}))
    assert step.info == {"success": row["n"] % 2 == 0, "team_reward_terms": {"even": float(row["n"] % 2 == 0)}}
    with pytest.raises(ValueError, match="row 0 has no prompt, which the prompt of agent shows; there are n, agent"):
        pl.Prompts(rows, lambda row, answer: 0.0)
    with pytest.raises(ValueError, match=r"takes \(row\), and is called with \(row, answer\)"):
        pl.Prompts(ROWS, lambda row: 0.0)
