"""Labels of answers by hand, the reference point, and a team that learns from labels alone."""

import asyncio
import json

import numpy as np
import pytest

from palestra.core.config import dump, validate
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.text.algorithms.dpo import DPO
from palestra.text.algorithms.kto import KTO
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.losses import kto_loss
from palestra.text.rollouts.dataset import DataConfig, read_data


def turn(values, said, prompt=(1, 2)):
    """Siblings of seat "a" with these values and the tokens `said`."""
    episode = Episode("hand", 0, {"a": "p"})
    for i, (value, ids) in enumerate(zip(values, said, strict=True)):
        spoken = Answer("x", "p@0", np.array(prompt), np.array(ids), np.zeros(len(ids), np.float32))
        episode.nodes.append(Node(i, None, 0, {}, {"a": spoken}, {}, value, done=True))
    return episode


def run_of(base, root, algorithm):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "epochs": 2, "sampling": {"max_tokens": 1}}
    tree = {
        "steps": 30,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": dict(speech), "walker": dict(speech)},
        "algorithm": algorithm,
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }
    config = validate(TextConfig, tree)
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(build(config), run)
        return run.path


def built(episode, **settings):
    samples, metrics = KTO(**settings).build_samples([episode], "p")
    assert metrics["groups"] == 1
    return [(s.token_ids.tolist(), s.advantages.tolist()) for s in samples], metrics


def test_answers_are_desirable_by_their_siblings_mean():
    """The mean of 0, 3, 1.5 and 1.5 is 1.5: the two equal to it have no label."""
    episode = turn([0.0, 3.0, 1.5, 1.5], [[5], [6, 7], [8], [9]])
    samples, metrics = built(episode, desirable_weight=2.0)
    assert samples == [([5], [-1.0]), ([6, 7], [2.0, 2.0])] and [n.advantages["a"] for n in episode.nodes] == [
        -1,
        1,
        0,
        0,
    ]
    assert (metrics["desirable"], metrics["undesirable"]) == (1, 1)
    assert built(turn([1.0, 1.0], [[5], [6]]))[0] == []


def test_a_threshold_needs_no_siblings():
    assert built(turn([0.0, 3.0], [[5], [6]]), threshold=-1.0)[0] == [([5], [1.0]), ([6], [1.0])]
    assert built(turn([1.0], [[5]]))[0] == [([5], [1.0])] and built(turn([0.0], [[5]]))[0] == [([5], [-1.0])]
    assert built(turn([0.0], [[5]]), undesirable_weight=0.0)[0] == []


def test_a_side_is_a_whole_trajectory_and_counts_once():
    """Two turns of 1 and 2 tokens; the seat's return is that of both turns."""
    episode = turn([0.0, 1.0], [[5], [6, 7]])
    first, then = episode.nodes
    then.parent, first.done = 0, False
    samples, _ = KTO(branch_at="root", group_size=1).build_samples([episode], "p")
    assert [s.group for s in samples] == [0, 0] and [s.advantages.tolist() for s in samples] == [[1], [1, 1]]
    assert sum(s.weight * len(s.token_ids) for s in samples) == pytest.approx(1)


def recorded(folder, *rows):
    """An episode for each row of a table, whose answers have two tokens each."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (file,) = read_data([DataConfig(path=str(folder / "rows.jsonl"))], "writer")
    for node in (node for episode in file.episodes for node in episode.nodes):
        node.answers["writer"] = Answer("x", "p@0", np.array([1]), np.array([5, 6]), np.zeros(2, np.float32))
    return file.episodes


CONVERSATION = [
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "y"},
    {"role": "assistant", "content": "z"},
]


@pytest.mark.parametrize("at", ["root", "turn"])
@pytest.mark.parametrize(("label", "sign"), [(True, 1.0), (False, -1.0)])
def test_every_turn_of_a_conversation_has_its_label(tmp_path, at, label, sign):
    episodes = recorded(tmp_path, {"prompt": "a", "completion": CONVERSATION, "label": label})
    samples, _ = KTO(branch_at=at).build_samples(episodes, "p")
    assert [s.advantages.tolist() for s in samples] == [[sign, sign]] * 2
    assert [node.advantages["writer"] for node in episodes[0].nodes] == [sign] * 2


def test_every_turn_of_a_pair_of_conversations_has_the_label_of_its_side(tmp_path):
    episodes = recorded(tmp_path, {"prompt": "a", "chosen": CONVERSATION, "rejected": CONVERSATION})
    KTO().build_samples(episodes, "p")
    assert [node.advantages["writer"] for node in episodes[0].nodes] == [1, 1, -1, -1]


@pytest.mark.parametrize("at", ["root", "turn"])
@pytest.mark.parametrize(("team", "sign"), [(1.0, 1), (0.25, -1)])
def test_a_played_episode_of_one_branch_is_labelled_by_its_return(at, team, sign):
    """Two seats, three turns; the team is rewarded at the end."""
    episode = Episode("hand", 0, {"a": "p", "b": "q"})
    for i, seat in enumerate("aba"):
        spoken = Answer("x", "p@0" if seat == "a" else "q@0", np.array([1]), np.array([5]), np.zeros(1, np.float32))
        last = i == 2
        episode.nodes.append(Node(i, i - 1 if i else None, i, {}, {seat: spoken}, {}, team * last, done=last))
    algorithm = KTO(branch_at=at, group_size=1)
    assert [s.advantages.tolist() for s in algorithm.build_samples([episode], "p")[0]] == [[sign]] * 2
    assert [s.advantages.tolist() for s in algorithm.build_samples([episode], "q")[0]] == [[sign]]


def test_answers_not_continued_are_compared_by_step_reward():
    """Of two answers only the second was continued, and earned 9 later, which must not count. If both were continued,
    later rewards count: the mean of 4 and 0, and 1."""
    episode = turn([1.0, 0.0, 9.0], [[5], [6], [7]])
    first, second, later = episode.nodes
    first.done = second.done = False
    first.chosen, later.parent = False, 1
    KTO().build_samples([episode], "p")
    assert (first.advantages["a"], second.advantages["a"], later.advantages["a"]) == (1, -1, 1)
    episode = turn([0.0, 0.0, 4.0, 0.0, 1.0], [[5], [6], [7], [8], [9]])
    for node, parent in zip(episode.nodes, (None, None, 0, 0, 1), strict=True):
        node.parent, node.done = parent, parent is not None
    KTO().build_samples([episode], "p")
    assert [node.advantages["a"] for node in episode.nodes] == [1, -1, 1, -1, 1]


class DriftedLearner:
    """A learner for which every token is `gap` likelier than under its reference, whose log-probability is 0.1 times
    the id."""

    is_at_reference = False

    def __init__(self, gap):
        self.gap, self.asked = gap, []

    async def logprobs(self, samples, *, reference=False):
        self.asked.append([(s.prompt_ids.tolist(), s.token_ids.tolist()) for s in samples])
        return [-0.1 * s.token_ids.astype(np.float32) + (0 if reference else self.gap) for s in samples]


def test_the_reference_point_is_that_of_answers_to_other_prompts():
    """Two answers to a prompt, of 2 and 1 tokens, and three to another, of 1, 3 and 1, each with 0.2 nats a token. Each
    prompt is scored with the answers to the other: of 1 and 3, and of 2, 1 and 2 tokens, 9 in all. z_0 is 9 / 5 * 0.2 =
    0.36, which the tokens of a side share."""
    episodes = [
        turn([0.0, 1.0], [[5, 6], [7]]),
        turn([0.0, 1.0, 1.0], [[8], [9, 10, 11], [12]], prompt=[3]),
    ]
    samples, _ = KTO().build_samples(episodes, "p")
    learner = DriftedLearner(0.2)
    found, metrics = asyncio.run(KTO().finalize_samples(samples, learner, {}))
    assert metrics["reference_point"] == pytest.approx(0.36)
    first, second = [([1, 2], [8]), ([1, 2], [9, 10, 11])], [([3], [5, 6]), ([3], [7]), ([3], [5, 6])]
    assert learner.asked[0] == learner.asked[1] == first + second
    assert found[0].reference_logprobs == pytest.approx([-0.5 + 0.18, -0.6 + 0.18])
    assert found[1].reference_logprobs == pytest.approx([-0.7 + 0.36])
    assert asyncio.run(KTO().finalize_samples(samples, DriftedLearner(-0.2), {}))[1]["reference_point"] == 0
    learner.is_at_reference = True
    assert asyncio.run(KTO().finalize_samples(samples, learner, {}))[1]["reference_point"] == 0
    assert asyncio.run(KTO().finalize_samples([], learner, {})) == ([], {})


def test_the_reference_point_of_one_prompt_is_0():
    samples, _ = KTO().build_samples([turn([0.0, 1.0], [[5, 6], [7]])], "p")
    learner = DriftedLearner(0.2)
    found, metrics = asyncio.run(KTO().finalize_samples(samples, learner, {}))
    assert metrics["reference_point"] == 0 and found[1].reference_logprobs == pytest.approx([-0.7])
    assert learner.asked == [[([1, 2], [5, 6]), ([1, 2], [7])]]  # the reference, of the answers themselves


def test_an_answer_to_another_prompt_replays_no_experts():
    """Experts [S, L, K] are of the tokens of the prompt's own answer, which may be fewer."""
    episodes = [turn([0.0, 1.0], [[5, 6], [7]]), turn([0.0, 1.0], [[8], [9]], prompt=[3])]
    for node in episodes[0].nodes:
        answer = node.answers["a"]
        answer.routed_experts = np.zeros((len(answer.token_ids) + 1, 1, 2), np.int16)
    samples, _ = KTO().build_samples(episodes, "p")

    class Replaying(DriftedLearner):
        async def logprobs(self, samples, *, reference=False):
            self.replayed.append([s.routed_experts is not None for s in samples])
            return await super().logprobs(samples, reference=reference)

    learner = Replaying(0.2)
    learner.replayed = []
    asyncio.run(KTO().finalize_samples(samples, learner, {}))
    assert learner.replayed == [[False] * 4, [False] * 4, [True, True, False, False]]


def test_the_loss_is_called_with_what_was_set():
    assert KTO(beta=0.3).loss is kto_loss and KTO(beta=0.3).loss_options == {"beta": 0.3} and KTO().needs_reference


def test_labels_are_rewards(tmp_path):
    """The data have TRL's columns of unpaired preferences."""
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (file,) = read_data([DataConfig(path=str(tmp_path / "rows.jsonl"))], "writer")
    assert [episode.nodes[-1].info["success"] for episode in file.episodes] == [True, False]
    assert [episode.nodes[0].rewards["writer"] for episode in file.episodes] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "kto"},
        {"type": "dpo", "loss_type": "simpo", "beta": 1.0, "target_margin": 6.0},
        {"type": "dpo", "loss_type": "orpo"},
    ],
    ids=["kto", "simpo", "orpo"],
)
def test_a_team_learns_from_labels_and_without_a_reference(base, tmp_path, algorithm):
    """On held-out instances; chance is 1/4."""
    path = run_of(base, tmp_path, algorithm)
    before, after = [line["success"] for line in read_lines(path / "evals.jsonl")]
    assert before < 0.4 and after > 0.7


def test_losses_without_a_reference_ask_for_none():
    for kind, beta in (("simpo", 2.0), ("orpo", 0.1)):
        algorithm = DPO(loss_type=kind)
        assert not algorithm.needs_reference and algorithm.loss_options["beta"] == beta
    assert DPO(loss_type="simpo").loss_options["target_margin"] == 1.0
    with pytest.raises(ValueError, match="target_margin applies only to loss_type: simpo"):
        DPO(target_margin=0.5)
    with pytest.raises(ValueError, match="not to orpo"):
        DPO(loss_type="orpo", label_smoothing=0.1)
