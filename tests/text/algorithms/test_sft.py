"""SFT: imitation and next-observation targets on token arrays by hand, and a learned world model."""

import asyncio

import numpy as np
import pytest
from helpers.toy_worlds import Dials

from palestra.core.config import validate
from palestra.core.losses import LOSSES
from palestra.core.types import Answer, Episode, Node
from palestra.text.algorithms.sft import SFT, new_tokens
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.rollouts.tree_rollout import Branching
from palestra.text.training.update import update_learner


def ids(*numbers):
    return np.array(numbers, np.int32)


def answer(prompt, said, policy="p@0"):
    return Answer("x", policy, ids(*prompt), ids(*said), np.full(len(said), -0.5, np.float32))


def episode(*turns, parents=None, ends=None, rewards=None):
    """A tree from turns {seat: answer}, in order; `parents` default to one trajectory, `ends` says which leaf
    succeeded."""
    parents = parents or [None, *range(len(turns) - 1)]
    ends = {len(turns) - 1: True} if ends is None else ends
    grown = Episode("hand", 0, {"a": "p", "b": "p"})
    for i, (answers, parent) in enumerate(zip(turns, parents, strict=True)):
        node = Node(i, parent, 0, {}, answers, (rewards or {}).get(i, {}), done=i in ends)
        node.info = {"success": ends[i]} if i in ends else {}
        grown.nodes.append(node)
    return grown


def lists(samples):
    return [(s.prompt_ids.tolist(), s.token_ids.tolist(), s.weight) for s in samples]


# ---- new tokens of the next prompt


@pytest.mark.parametrize(
    ("prompt", "said", "later", "new"),
    [
        ([1, 2], [5, 9], [1, 2, 5, 9, 3, 4], [3, 4]),  # a conversation: everything after the answer
        ([1, 2, 7], [5], [1, 2, 8, 4], [8, 4]),  # separate prompts: from the first difference, not one token after it
        ([1, 2, 7], [5], [1, 2, 8], [8]),
        ([1, 2, 7], [5], [3, 2, 7], [3, 2, 7]),  # nothing in common
        ([1, 2], [5, 9], [1, 2, 5, 8], [5, 8]),  # begins with the prompt, but not with the whole answer
        ([1, 2], [5, 9], [1, 2, 5], [5]),
        ([1, 2, 7], [5], [1, 2], []),
        ([1, 2, 7], [5], [1, 2, 7], []),  # the same prompt again
        ([1, 2], [5, 9], [1, 2, 5, 9], []),
    ],
)
def test_new_tokens_of_the_next_prompt(prompt, said, later, new):
    assert new_tokens(answer(prompt, said), answer(later, [0])).tolist() == new


def test_world_model_targets_are_the_seats_next_observation():
    """b's turn lies between a's; the last turn of each has no next observation."""
    play = episode(
        {"a": answer([1, 2, 7], [5, 9])},
        {"b": answer([6, 6], [8])},
        {"a": answer([1, 2, 8, 4], [5])},
        {"b": answer([6, 6, 8, 3], [7, 7])},
    )
    samples, figures = SFT(imitate="none", world_model_weight=2.0).build_samples([play], "p")
    assert lists(samples) == [([1, 2, 7, 5, 9], [8, 4], 2.0), ([6, 6, 8], [3], 2.0)]
    assert figures == {"target_fraction": 0.0, "world_model_fraction": 0.5}
    for sample in samples:
        assert not sample.logprobs.any() and (sample.advantages == 1).all()
        assert len(sample.logprobs) == len(sample.advantages) == len(sample.token_ids)
    assert not any(node.advantages for node in play.nodes)


def test_imitation_and_world_model_targets_have_separate_weights():
    play = episode({"a": answer([1, 2], [5, 9])}, {"a": answer([1, 2, 5, 9, 3], [4])})
    samples, figures = SFT(world_model_weight=0.25).build_samples([play], "p")
    assert lists(samples) == [([1, 2], [5, 9], 1.0), ([1, 2, 5, 9, 3], [4], 1.0), ([1, 2, 5, 9], [3], 0.25)]
    assert samples[0].logprobs.tolist() == [-0.5, -0.5] and samples[0].advantages.tolist() == [1, 1]
    assert figures == {"target_fraction": 1.0, "world_model_fraction": 0.5}
    assert [node.advantages for node in play.nodes] == [{"a": 1.0}, {"a": 1.0}]
    assert (
        SFT(world_model_weight=0.25).loss is LOSSES["cross_entropy"] and not SFT(world_model_weight=0.25).loss_options
    )


def test_no_world_model_weight_gives_no_observation_targets():
    play = episode({"a": answer([1, 2], [5])}, {"a": answer([1, 3], [4])})
    samples, figures = SFT().build_samples([play], "p")
    assert len(samples) == 2 and figures == {"target_fraction": 1.0}


def test_only_own_answers_are_targets():
    play = episode({"a": answer([1], [5], "q@3")}, {"a": answer([2], [4], "q@3")}, {"b": answer([3], [4])})
    samples, figures = SFT(world_model_weight=1.0).build_samples([play], "p")
    assert lists(samples) == [([3], [4], 1.0)] and figures == {"target_fraction": 1.0, "world_model_fraction": 0.0}
    play.error = "lost"
    assert SFT(world_model_weight=1.0).build_samples([play], "p") == (
        [],
        {"target_fraction": 0.0, "world_model_fraction": 0.0},
    )


def two_lines(**more):
    """Two trajectories with a shared first turn; the first fails, the second succeeds."""
    turns = [{"a": answer([1], [5])}, {"a": answer([2, 2], [6])}, {"a": answer([2, 2], [7])}]
    return episode(*turns, parents=[None, 0, 0], ends={1: False, 2: True}, **more)


def test_successful_trajectories_are_targets_with_shared_prefix_once():
    samples, figures = SFT().build_samples([two_lines()], "p")
    assert lists(samples) == [([1], [5], 1.0), ([2, 2], [7], 1.0)] and figures["target_fraction"] == 0.5
    samples, figures = SFT(imitate="all", world_model_weight=1.0).build_samples([two_lines()], "p")
    assert [s.token_ids.tolist() for s in samples] == [[5], [6], [7], [2, 2]]  # siblings had the same observation
    assert figures == {"target_fraction": 1.0, "world_model_fraction": 1 / 3}
    samples, figures = SFT(imitate="none", world_model_weight=1.0).build_samples([two_lines()], "p")
    assert lists(samples) == [([1, 5], [2, 2], 1.0)]  # also of failed trajectories


def test_shared_answer_is_one_target_recorded_at_each_sibling():
    same = answer([1], [5])
    turns = [{"a": same, "b": answer([3], [8])}, {"a": same, "b": answer([3], [9])}]
    play = episode(*turns, parents=[None, None], ends={0: True, 1: True})
    samples, _ = SFT().build_samples([play], "p")
    assert sorted(s.token_ids.tolist() for s in samples) == [[5], [8], [9]]
    assert [node.advantages for node in play.nodes] == [{"a": 1.0, "b": 1.0}] * 2


def test_trajectories_are_selected_by_seat_return():
    """Its own 1.5 and 1 in the first trajectory and 1.5 in the second; the second also has half of the team's 4."""
    play = two_lines(rewards={0: {"a": 1.5}, 1: {"a": 1.0}})
    for least, kept in ((2.5, [[5], [6]]), (2.6, []), (1.5, [[5], [6], [7]]), (None, [[5], [6], [7]])):
        samples, _ = SFT(imitate="all", min_return=least).build_samples([play], "p")
        assert [s.token_ids.tolist() for s in samples] == kept, least
    play.nodes[2].team_reward = 4.0
    samples, figures = SFT(imitate="all", min_return=3.5, team_weight=0.5).build_samples([play], "p")
    assert [s.token_ids.tolist() for s in samples] == [[5], [7]] and figures["target_fraction"] == 0.5


def test_best_of_n_imitates_each_seats_highest_return():
    """Of a's returns 1, 3 and 3 the second is kept, of b's 5, 0 and 4 the first; no trajectory succeeded."""
    turns = [{"a": answer([1], [10 + i]), "b": answer([2], [20 + i])} for i in range(3)]
    rewards = {0: {"a": 1.0, "b": 5.0}, 1: {"a": 3.0}, 2: {"a": 3.0, "b": 4.0}}
    play = episode(*turns, parents=[None] * 3, ends=dict.fromkeys(range(3), False), rewards=rewards)
    samples, figures = SFT(imitate="best", group_size=3).build_samples([play, play], "p")
    assert [sample.token_ids.tolist() for sample in samples] == [[11], [20]]
    assert figures == {"target_fraction": pytest.approx(1 / 3)}
    assert [sorted(node.advantages) for node in play.nodes] == [["b"], ["a"], []]
    assert len(SFT(imitate="best", min_return=4.0).build_samples([play], "p")[0]) == 1


@pytest.mark.slow
def test_policy_improves_by_imitating_its_best_answers(base, check_score):
    """Half of the answers to noise are right, or slightly more; of four answers from one start one nearly always is."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    tree = {
        "steps": 24,
        "env": {"type": "helpers.toys:Odd"},
        "policies": {"agent": speech},
        "algorithm": {"type": "sft", "imitate": "best", "group_size": 4},
    }
    setup = build(validate(TextConfig, tree))

    async def train():
        success = []
        for step in range(setup.steps):
            moment = setup.position_of(step)
            episodes = await moment.stage.source.play(moment.episode_numbers, moment.stage.algorithm.branching, {})
            success.append(np.mean([e.success for e in episodes]))
            await update_learner(moment.stage.algorithm, setup.learners["agent"], episodes, moment.progress, {})
        return success

    success = asyncio.run(train())
    check_score(success[-1] - success[0], "gain")


def test_settings_without_targets_are_refused():
    with pytest.raises(ValueError, match="nothing to learn: set world_model_weight: 1"):
        SFT(imitate="none")


# ---- a learned world model


def world_model_setup(base, split):
    """A learner of the next observation of Dials, in episodes of random play."""
    hand = {"type": "lora", "base": str(base), "lr": 1e-2, "lr_schedule": "linear", "history": "conversation"}
    config = {
        "steps": 120,
        "episodes": 64,
        "env": {"type": "helpers.toy_worlds:Dials", "split": split},
        "policies": {
            "hand": hand | {"teacher": "chance"},
            "chance": {"type": "random", "words": ["0", "1"], "length": 1},
        },
        "algorithm": {"type": "sft", "imitate": "none", "world_model_weight": 1.0},
    }
    return build(validate(TextConfig, config))


def test_evaluation_positions_are_held_out():
    shown = {
        split: {Dials(split=split).reset(i).observations["hand"] for i in range(64)} for split in ("train", "test")
    }
    assert len(shown["train"]) == 56 and len(shown["test"]) == 8 and not shown["train"] & shown["test"]


@pytest.mark.slow  # its targets are test_world_model_targets_are_the_seats_next_observation
def test_world_model_generalises_to_held_out_positions(base):
    """A next observation is two letters of eight and three tokens of the template: a model that knows only the template
    has a loss of 2 log(8) / 5 = 0.83 nats per token."""
    asyncio.run(learned(world_model_setup(base, "train"), world_model_setup(base, "test")))


async def learned(setup, test):
    stage, learner = setup.stages[0], setup.learners["hand"]
    held_out, _ = SFT(imitate="none", world_model_weight=1.0).build_samples(
        await test.stages[0].source.play(range(64), Branching(), {}), "hand"
    )

    async def nll():
        return -float(np.concatenate(await learner.logprobs(held_out)).mean())

    before = await nll()
    for step in range(setup.steps):
        moment = setup.position_of(step)
        episodes = await stage.source.play(moment.episode_numbers, stage.algorithm.branching, {})
        figures = await update_learner(stage.algorithm, learner, episodes, moment.progress, {})
    assert figures["world_model_fraction"] == 0.5 and figures["samples"] == 64
    assert len(held_out) == 64 and {len(sample.token_ids) for sample in held_out} == {5}
    assert await nll() < 0.6 < 5 < before
