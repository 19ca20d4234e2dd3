"""Returns of the presets of CoMLRL's algorithms, compared with its own trainers: returns, advantages and losses of the
same joint answers.

comlrl_1.4.3.jsonl has its numbers; comlrl_numbers.py writes them, in a virtual environment with the package.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.core.config.presets import expand_preset
from palestra.core.types import Answer, Episode, Node
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.presets import TEXT_PRESETS

CASES = [json.loads(line) for line in Path(__file__).with_name("comlrl_1.4.3.jsonl").read_text().splitlines()]
SEATS = ("a", "b")
GENERATIONS = 3


def algorithm(case: dict[str, Any]) -> GRPO:
    """The preset of a case. All of CoMLRL's baselines are the mean where it standardises what is left."""
    joints = {"aligned": "paired", "cross": "crossed"}[case["joint_mode"]]
    settings = {"group_size": GENERATIONS, "joints": joints, "max_completion_length": 1}
    name = "magrpo" if case["normalised"] else case["name"]
    scale = {} if case["normalised"] else {"scale": "none"}
    return GRPO.model_validate(expand_preset({"type": name, **settings, **scale}, TEXT_PRESETS))


def episode_of(case: dict[str, Any]) -> Episode:
    """The rollout tree: siblings are the joint answers of a turn; each has the joint answers of the next turn as
    children."""
    episode = Episode("toy", 0, {seat: seat for seat in SEATS})
    parents: list[int | None] = [None]
    for turn in case["nodes"]:
        parent = parents.pop(0)
        answers = [
            [answer_of(seat, value) for value in own["logprobs"]]
            for seat, own in zip(SEATS, turn["agents"], strict=True)
        ]
        crossed = case["joint_mode"] == "cross"
        joints = itertools.product(*answers) if crossed else zip(*answers, strict=True)
        for joint, reward in zip(joints, turn["rewards"], strict=True):
            last = turn["turn"] + 1 == case["turns"]
            node = Node(
                len(episode.nodes),
                parent,
                turn["turn"],
                {},
                dict(zip(SEATS, joint, strict=True)),
                {},
                reward,
                done=last,
            )
            episode.nodes.append(node)
            parents += [] if last else [node.id]
    return episode


def answer_of(seat: str, logprob: float) -> Answer:
    """An answer of one token with this log-probability: CoMLRL's loss depends on the sum over tokens only."""
    return Answer("", f"{seat}@0", np.ones(1, np.int32), np.ones(1, np.int32), np.array([logprob], np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, list(c.values())[:4])))
def test_returns_and_losses_are_those_of_comlrl(case: dict[str, Any]) -> None:
    """CoMLRL's mode "cross" adds up an answer's returns; palestra takes their mean. Without standardisation, CoMLRL's
    loss is larger by the number of an answer's partners."""
    config, episode = algorithm(case), episode_of(case)
    partners = GENERATIONS if case["joint_mode"] == "cross" else 1
    found = {seat: list(config.groups(episode)) for seat in SEATS}
    for number, seat in enumerate(SEATS):
        groups = [group for group in found[seat] if group.seat == seat]
        samples, _ = config.build_samples([episode], seat)
        for i, (turn, group) in enumerate(zip(case["nodes"], groups, strict=True)):
            expected = turn["agents"][number]
            assert group.values == pytest.approx([value / partners for value in expected["returns"]], abs=1e-5)
            own = samples[i * GENERATIONS : (i + 1) * GENERATIONS]
            # the loss of an on-policy step: the mean over answers of -A log p, each with a denominator of 1
            assert all(sample.denominator == 1 for sample in own)
            loss = -np.mean([sample.advantages[0] * sample.logprobs[0] for sample in own])
            assert loss * (1 if case["normalised"] else partners) == pytest.approx(expected["loss"], abs=2e-4)


def test_normalised_baselines_are_all_the_mean() -> None:
    """CoMLRL 1.4 standardises advantages by default, whichever baseline was subtracted: the four are one algorithm."""
    default = [case for case in CASES if case["normalised"] and case["joint_mode"] == "aligned"]
    losses = [[own["loss"] for own in case["nodes"][0]["agents"]] for case in default]
    assert len(losses) == 4
    for each in losses[1:]:
        assert each == pytest.approx(losses[0], abs=1e-4)
