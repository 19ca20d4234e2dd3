"""Which answers are desirable, worked by hand; the reference point; and that a team learns from labels alone."""

import asyncio
import json

import numpy as np
import pytest

from palestra.algorithms.text.dpo import DPO
from palestra.algorithms.text.kto import KTO
from palestra.builders.text import build
from palestra.builders.text_config import TextConfig
from palestra.config import dump, validate
from palestra.losses.preferences import kto_loss
from palestra.rollouts.dataset import DataConfig, read_data
from palestra.runs import Run, read_lines
from palestra.training.loop import run_training
from palestra.types import Answer, Episode, Node


def turn(values, said):
    """Siblings of seat "a" that earned `values` and said the tokens `said`."""
    episode = Episode("hand", 0, {"a": "p"})
    for i, (value, ids) in enumerate(zip(values, said, strict=True)):
        spoken = Answer("x", "p@0", np.array([1, 2]), np.array(ids), np.zeros(len(ids), np.float32))
        episode.nodes.append(Node(i, None, 0, {}, {"a": spoken}, {}, value, done=True))
    return episode


def run_of(base, root, algorithm):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    tree = {
        "steps": 20,
        "env": {"type": "toys:Whisper"},
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
    """Of 0, 3, 1.5, 1.5 the mean is 1.5: two are neither."""
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
    """Two turns of 1 and 2 tokens; the seat's return is that of both."""
    episode = turn([0.0, 1.0], [[5], [6, 7]])
    first, then = episode.nodes
    then.parent, first.done = 0, False
    samples, _ = KTO(branch_at="root", group_size=1).build_samples([episode], "p")
    assert [s.group for s in samples] == [0, 0] and [s.advantages.tolist() for s in samples] == [[1], [1, 1]]
    assert sum(s.weight * len(s.token_ids) for s in samples) == pytest.approx(1)


class Moved:
    """A learner that finds every token `gap` likelier than its reference does, which finds it 0.1 times its id."""

    is_at_reference = False

    def __init__(self, gap):
        self.gap, self.asked = gap, []

    async def logprobs(self, samples, *, reference=False):
        self.asked.append([(s.prompt_ids.tolist(), s.token_ids.tolist()) for s in samples])
        return [-0.1 * s.token_ids.astype(np.float32) + (0 if reference else self.gap) for s in samples]


def test_the_reference_point_is_that_of_answers_to_other_prompts():
    """Answers of 2 and of 1 tokens, 0.2 nats a token: z_0 is 0.3, which two tokens share."""
    samples, _ = KTO().build_samples([turn([0.0, 1.0], [[5, 6], [7]])], "p")
    samples[1].prompt_ids = np.array([3])
    learner = Moved(0.2)
    found, metrics = asyncio.run(KTO().finalize_samples(samples, learner, {}))
    assert metrics["reference_point"] == pytest.approx(0.3)
    assert learner.asked[0] == learner.asked[1] == [([1, 2], [7]), ([3], [5, 6])]
    assert found[0].reference_logprobs == pytest.approx([-0.5 + 0.15, -0.6 + 0.15])
    assert found[1].reference_logprobs == pytest.approx([-0.7 + 0.3])
    assert asyncio.run(KTO().finalize_samples(samples, Moved(-0.2), {}))[1]["reference_point"] == 0
    learner.is_at_reference = True
    assert asyncio.run(KTO().finalize_samples(samples, learner, {}))[1]["reference_point"] == 0
    assert asyncio.run(KTO().finalize_samples([], learner, {})) == ([], {})


def test_the_loss_is_called_with_what_was_set():
    assert KTO(beta=0.3).loss is kto_loss and KTO(beta=0.3).loss_options == {"beta": 0.3} and KTO().needs_reference


def test_labels_are_rewards(tmp_path):
    """TRL's columns of unpaired preferences."""
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (file,) = read_data([DataConfig(path=str(tmp_path / "rows.jsonl"))], "writer")
    assert [episode.nodes[-1].info["success"] for episode in file.episodes] == [True, False]
    assert [episode.nodes[0].rewards["writer"] for episode in file.episodes] == [1, 0]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "kto"},
        {"type": "dpo", "loss_type": "simpo", "target_margin": 4.0},
        {"type": "dpo", "loss_type": "orpo"},
    ],
    ids=["kto", "simpo", "orpo"],
)
def test_a_team_learns_from_labels_and_without_a_reference(base, tmp_path, algorithm):
    """Held out; one in four by chance."""
    path = run_of(base, tmp_path, algorithm)
    before, after = [line["success"] for line in read_lines(path / "evals.jsonl")]
    assert before < 0.4 and after > 0.7


def test_losses_without_a_reference_ask_for_none():
    for kind, beta in (("simpo", 2.0), ("orpo", 0.1)):
        algorithm = DPO(loss_type=kind)
        assert not algorithm.needs_reference and algorithm.loss_options["beta"] == beta
    assert DPO(loss_type="simpo").loss_options["target_margin"] == 1.0
    with pytest.raises(ValueError, match="target_margin is of loss_type: simpo"):
        DPO(target_margin=0.5)
    with pytest.raises(ValueError, match="orpo has none"):
        DPO(loss_type="orpo", label_smoothing=0.1)
