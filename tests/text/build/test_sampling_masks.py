"""Training with top-k or top-p: the warning at the start, the masks from the sampler to the update, and refused
settings."""

import asyncio

import numpy as np
import pytest
from helpers.actor_critic_runs import run_of, whisper

from palestra.core.config import dump, parse, validate
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.runs.episodes import load_episodes
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.training.update import update_learner

CUT = {"max_tokens": 4, "top_k": 12, "top_p": 0.8, "temperature": 0.9, "stop_at_eos": False}
KEEP = {**CUT, "keep_sampling_mask": True}


def config(base, sampling, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": sampling}
    plain = {
        "name": "cut",
        "steps": 4,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech, "walker": {"type": "scripted", "answers": ["0"]}},
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 3, "scale": "none"},
        "evals": {"test": {"episodes": 2}},
    }
    return validate(TextConfig, plain | tree)


def warning_of(setup):
    return [note for note in setup.notes if note.startswith("biased")]


def test_start_warns_of_biased_training(base):
    (note,) = warning_of(build(config(base, CUT)))
    assert note == (
        "biased: guide samples with top_k: 12 and top_p: 0.8, and its gradient is taken as if from all tokens: set "
        "policies.guide.sampling.keep_sampling_mask: true, or top_p: 1.0 and top_k: 0"
    )
    assert "with top_p: 0.5, and" in warning_of(build(config(base, {"top_p": 0.5})))[0]


def test_start_warns_of_training_on_greedy_answers(base):
    (note,) = warning_of(build(config(base, {"temperature": 0, "top_k": 5})))
    assert (
        note.startswith("biased: guide always takes the most likely token") and "sampling.temperature above 0" in note
    )
    still = {"type": "lora", "base": str(base), "lr": 0, "sampling": {"temperature": 0}}
    still_team = {"guide": still, "walker": {"type": "scripted", "answers": ["0"]}}
    assert not warning_of(build(config(base, {}, policies=still_team)))


@pytest.mark.parametrize("sampling", [KEEP, {}], ids=["kept", "whole"])
def test_no_warning_without_bias(base, sampling):
    assert not warning_of(build(config(base, sampling)))


def test_imitation_uses_whole_distributions(base):
    """A loss without the sampler's log-probabilities is not biased by top-p, and masks would change its target."""
    imitation = {"algorithm": {"type": "sft", "min_return": None}}
    assert not warning_of(build(config(base, CUT, **imitation)))
    with pytest.raises(ValueError, match=r"policies.guide.sampling.keep_sampling_mask trains .* type: sft trains that"):
        build(config(base, KEEP, **imitation))


def update(setup):
    """Plays the first step and updates the guide: every answer gets a different advantage, since rewards are rare."""
    moment = setup.position_of(0)
    branching = moment.stage.algorithm.branching
    episodes = asyncio.run(moment.stage.source.play(moment.episode_numbers, branching, setup.algorithm_state))
    draws = np.random.default_rng(0)
    for episode in episodes:
        for node in episode.nodes:
            node.team_reward = float(draws.normal())
    learner = setup.learners["guide"]
    return episodes, asyncio.run(update_learner(moment.stage.algorithm, learner, episodes, 0.0))


@pytest.mark.parametrize("algorithm", ["grpo", "kl in the loss", "kl in rewards", "ppo"])
def test_sampler_and_trainer_agree_under_masks(base, algorithm):
    """The first ratio to the trainer's own log-probabilities is exactly 1, that to the sampler's 1 up to rounding. The
    KL to the reference, under the same masks, is 0."""
    root = {"type": "grpo", "branch_at": "root", "group_size": 3, "scale": "none", "kl_coef": 0.1}
    settings = {
        "grpo": root | {"kl_coef": 0.0},
        "kl in the loss": root,
        "kl in rewards": root | {"kl_in_reward": True},
        "ppo": {"type": "ppo", "kl_coef": 0.1},
    }
    episodes, metrics = update(build(config(base, KEEP, algorithm=settings[algorithm])))
    answers = [node.answers["guide"] for episode in episodes for node in episode.nodes if "guide" in node.answers]
    assert answers and all(answer.sampling_mask.counts.max() <= 12 for answer in answers)
    assert metrics["kl"] == 0 and metrics["clip_fraction"] == 0
    assert metrics["sampler_kl"] == pytest.approx(0, abs=1e-4)
    assert metrics.get("reference_kl", 0.0) == pytest.approx(0, abs=1e-6)
    _, whole = update(build(config(base, CUT, algorithm=settings[algorithm])))
    assert metrics["entropy"] < np.log(12) < whole["entropy"]


def test_masks_survive_a_stop_and_are_recorded(base, tmp_path):
    """Episodes stored on disk keep their masks, so a stopped run resumes byte for byte. One group is sampled at a time,
    since rounding depends on which groups share a pass, and that on timing."""
    tree = config(base, KEEP, staleness=1, save_episodes_every=1, checkpoint_every=1, max_num_seqs=3)
    paths = []
    for halt in (None, 2):
        with Run.create(tmp_path, dump(tree), tree.name) as run:
            stopped = lambda run=run, halt=halt: len(read_lines(run.path / "metrics.jsonl")) == halt  # noqa: E731
            run_training(build(tree), run, should_stop=stopped)
            paths.append(run.path)
    with Run.open(paths[1]) as run:
        setup = build(validate(TextConfig, parse(run.config)))
        restore_checkpoint(setup, run)
        assert run_training(setup, run)
    one, other = (list_checkpoints(path)[-1].path / "guide" / "adapter_model.safetensors" for path in paths)
    assert one.read_bytes() == other.read_bytes()
    training = [file for file in (paths[0] / "episodes").rglob("*.parquet") if "eval" not in str(file)]
    assert training
    for file in training:
        said = [n.answers["guide"] for e in load_episodes(file) for n in e.nodes if "guide" in n.answers]
        assert said and all(int(a.sampling_mask.counts.sum()) == len(a.sampling_mask.ids) > 0 for a in said)
        assert all(len(a.sampling_mask.counts) == len(a.token_ids) for a in said)


def test_evaluations_record_no_masks(base):
    setup = build(config(base, KEEP))
    (policy,) = [p for p in setup.evals[0].seat_policies().values() if p.name.startswith("guide")]
    assert policy.sampling.top_k == 12 and not policy.sampling.keep_sampling_mask


def test_training_on_a_server_is_refused(base):
    """The protocol of the service has no field for masks."""
    client = pytest.importorskip("palestra.text.tinker.client")
    tree = config(base, {**KEEP, "temperature": 1.0})
    engines = client.RemoteEngines(None)
    with pytest.raises(ValueError, match=r"guide.sampling keeps only some tokens .* no field for them"):
        engines.check_supported(tree.algorithm.loss, tree.algorithm.loss_options, tree.policies)


@pytest.mark.slow
def test_two_agents_learn_from_truncated_samples(base, tmp_path):
    """Held-out games; chance is 1/4 if answers are digits."""
    sampling = {"max_tokens": 1, "top_k": 20, "top_p": 0.8, "keep_sampling_mask": True}
    algorithm = {"type": "grpo", "branch_at": "root", "group_size": 4, "scale": "none"}
    path = run_of(whisper(base, steps=16, episodes=24, algorithm=algorithm, policy={"sampling": sampling}), tmp_path)
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.4 and after > 0.7
