"""From a config to trained agents: each learns its own part, and nothing else changes."""

import asyncio
import io
import json
import signal

import pytest
import torch
from helpers.toys import Whisper
from rich.console import Console
from safetensors.torch import load_file

from palestra.core.config import dump, override, parse, validate
from palestra.core.types import TEAM
from palestra.evaluation.evaluate import evaluate
from palestra.evaluation.report.run_charts import plot_run
from palestra.evaluation.report.run_report import summary_table
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines
from palestra.runs.loop import Callback, Evaluation, restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.rollouts.metrics import member_name

BAR = 0.85  # held-out success of a trained pair; chance is 1/4


def whisper(base, *settings, steps=20, **tree):
    """The config of a pair that learns Whisper: two adapters of one base by default."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    config = {
        "name": "whisper",
        "steps": steps,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": dict(speech), "walker": dict(speech)},
        "algorithm": {"type": "grpo", "group_size": 8},
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }
    return validate(TextConfig, override(config | tree, settings))


def run_of(config, root, setup=None):
    setup = setup or build(config)
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(setup, run)
        return run.path, setup


def matches(setup, step):
    """The episode specs of a step, in its only env."""
    moment = setup.position_of(step)
    return [match for _, match in moment.stage.source.episode_specs(moment.episode_numbers, setup.algorithm_state)]


def arena_of(setup):
    return setup.stages[0].source.runners["train"]


def scores(path):
    return [line["success"] for line in read_lines(path / "evals.jsonl")]


def adapter_weights(path, name):
    return load_file(list_checkpoints(path)[-1].path / name / "adapter_model.safetensors")


def weights_of(setup, name):
    return {key: value.clone() for key, value in setup.learners[name].sampler.engine.model.state_dict().items()}


# ---- learning


@pytest.fixture(scope="module")
def trained_pair(base, tmp_path_factory):
    """A trained pair, and the base's weights before and after. Without entropy a tenth of seeds is half right."""
    config = whisper(base, "algorithm.entropy_coef=0.02")
    setup = build(config)
    before = weights_of(setup, "guide")
    path, setup = run_of(config, tmp_path_factory.mktemp("runs"), setup)
    return path, setup, before


def test_two_adapters_learn_to_cooperate(trained_pair, check_score):
    path, _, _ = trained_pair
    before, after = scores(path)
    check_score(before, "untrained")
    check_score(after)


def test_lora_training_changes_adapters_and_not_the_base(trained_pair):
    path, setup, before = trained_pair
    after = weights_of(setup, "guide")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert setup.learners["guide"].sampler.engine is setup.learners["walker"].sampler.engine  # one base in memory
    guide, walker = adapter_weights(path, "guide"), adapter_weights(path, "walker")
    for adapter in (guide, walker):
        assert all(tensor.any() for tensor in adapter.values())  # B starts at zero: every pair was trained
    assert any(not torch.equal(guide[key], walker[key]) for key in guide)


def test_run_records_episodes_policies_and_advantages(trained_pair):
    path, _, _ = trained_pair
    metrics = read_lines(path / "metrics.jsonl")
    assert [(line["step"], line["policy"]) for line in metrics] == [
        (step, name) for step in range(20) for name in ("guide", "walker", TEAM)
    ]
    for line in metrics[:6]:
        if line["policy"] == TEAM:
            assert line["episodes"] == 32 and line["failed"] == 0 and line["steps_per_episode"] == 2
        else:
            assert line["answers"] == line["groups"] * 8 == 256 and line["updates"] == 1 and line["lr"] == 1e-2
            assert line["samples"] == 256 and line["kl"] == pytest.approx(0, abs=1e-6)
    episodes = load_episodes(path / "episodes" / "step-000019.parquet")
    assert [e.seed for e in episodes] == list(range(19 * 32, 20 * 32))
    for episode in episodes:
        for node in episode.nodes:
            ((seat, answer),) = node.answers.items()
            updates = sum(x["updates"] for x in metrics if x["policy"] == seat and x["step"] < 19)
            assert answer.policy == f"{seat}@{updates:.0f}" and seat in node.advantages


def test_train_instances_are_unique_and_evaluation_is_held_out(trained_pair):
    path, setup, _ = trained_pair
    seeds = [e.seed for file in sorted((path / "episodes").iterdir()) for e in load_episodes(file)]
    assert seeds == list(range(20 * 32))
    env = Whisper(split="test")
    trained = {Whisper().reset(seed).observations["guide"] for seed in seeds}
    examined = {env.reset(seed).observations["guide"] for seed in range(200)}
    assert not trained & examined
    assert setup.evals[0].runner.make_env().split == "test" and arena_of(setup).make_env().split == "train"


def examine(path, seats=None, *, swap=False, sampling=None, checkpoint=None, episodes=200, env=None):
    return evaluate(path, env, seats, swap=swap, episodes=episodes, sampling=sampling or {}, checkpoint=checkpoint)[:2]


def test_trained_run_is_evaluated_with_swapped_and_base_policies(trained_pair, check_score):
    path, setup, _ = trained_pair
    guide, walker = (setup.learners[name].policy().name for name in ("guide", "walker"))
    who, figures = examine(path)
    assert who == {"guide": guide, "walker": walker}  # the versions that the recorded episodes name
    assert figures["success"] == scores(path)[-1]  # the evaluation called "test", again
    who, swapped = examine(path, swap=True)
    assert who == {"guide": walker, "walker": guide}
    check_score(swapped["success"], "swapped")
    who, bare = examine(path, {"guide": "base"})
    assert who["guide"] == "base"
    check_score(bare["success"], "base")
    who, other = examine(path, {"walker": f"{path}:walker"}, sampling={"temperature": 0})
    assert who == {"guide": guide, "walker": walker}
    check_score(other["success"], "greedy")
    assert examine(path, env={"turns": 2}, episodes=5)[1]["steps_per_episode"] == 4


def test_invalid_evaluations_are_refused_with_the_reason(trained_pair):
    path, _, _ = trained_pair
    with pytest.raises(ValueError, match="no checkpoint after 3 steps; it has: 10, 20"):
        examine(path, checkpoint=3)
    with pytest.raises(ValueError, match='no policy "nobody"; the run has guide, walker'):
        examine(path, {"guide": "nobody"})
    with pytest.raises(ValueError, match="unknown key temprature: did you mean temperature"):
        examine(path, sampling={"temprature": 0})
    with pytest.raises(ValueError, match=r'no seat "guid".*guide, walker'):
        examine(path, {"guid": "walker"})


@pytest.mark.slow
def test_shared_policy_learns_both_seats(base, tmp_path):
    config = whisper(base, policies={"default": whisper(base).policies["guide"].model_dump()}, steps=25)
    path, setup = run_of(config, tmp_path)
    assert list(setup.learners) == ["default"] and scores(path)[-1] > BAR
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "default"]
    assert lines[0]["answers"] == 512  # both seats'


@pytest.mark.slow
def test_root_branching_learns(base, tmp_path):
    path, _ = run_of(whisper(base, "algorithm.branch_at=root", "algorithm.entropy_coef=0.02", steps=30), tmp_path)
    before, after = scores(path)
    assert before < 0.5 and after > BAR


@pytest.mark.slow
def test_full_model_learns_and_its_weights_change(base, tmp_path):
    policies = {
        "guide": {"type": "full", "base": str(base), "lr": 1e-3, "sampling": {"max_tokens": 1}},
        "walker": {"type": "scripted", "answers": ["0"]},
    }
    config = whisper(base, policies=policies, steps=15)
    setup = build(config)
    before = weights_of(setup, "guide")
    path, setup = run_of(config, tmp_path, setup)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guide"]
    assert lines[-1]["local_reward"] > 0.9 > 0.7 > lines[0]["local_reward"]
    after = weights_of(setup, "guide")
    assert all(not torch.equal(before[key], after[key]) for key in before)
    saved = load_file(list_checkpoints(path)[-1].path / "guide" / "model.safetensors")
    assert all(torch.equal(saved[key], after[key]) for key in saved)
    who, figures = examine(path)
    assert who == {"guide": setup.learners["guide"].policy().name, "walker": "walker"}
    assert figures["success"] == scores(path)[-1]


def test_students_imitate_their_teachers(base, tmp_path, check_score):
    """The teacher answers "1" to everything: the students must learn to answer just that, and then to stop."""
    student = {"type": "lora", "base": str(base), "lr": 1e-2, "teacher": "master", "sampling": {"max_tokens": 4}}
    config = whisper(
        base,
        policies={"guide": student, "walker": student, "master": {"type": "scripted", "answers": ["1"]}},
        algorithm={"type": "sft", "imitate": "all"},
        episodes=8,
    )
    path, setup = run_of(config, tmp_path)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guide"]
    assert lines[0]["target_fraction"] == 1.0
    check_score(lines[0]["nll"], "untrained")
    check_score(lines[-1]["nll"])
    assert list(setup.learners) == ["guide", "walker"]
    seats = setup.evals[0].seat_policies()  # in evaluations the student acts itself
    episodes = asyncio.run(setup.evals[0].runner.play_all(matches(setup, 0), setup.stages[0].algorithm.branching))
    assert member_name(seats["guide"].name) == "guide" and episodes[0].error is None
    spoken = asyncio.run(seats["guide"].act(query("g", "hhhhhh1", n=20)))
    check_score([a.text for a in spoken].count("1"), "right answers of 20")


def query(role, observation, n):
    from palestra.text.policies.base import Query

    return Query(role, observation, n=n, seed=3)


def test_sft_trains_on_successful_trajectories_only(base, tmp_path):
    config = whisper(base, algorithm={"type": "sft", "group_size": 4}, steps=1, evals={})
    path, _ = run_of(config, tmp_path)
    episodes = load_episodes(path / "episodes" / "step-000000.parquet")
    leaves = [leaf for e in episodes for leaf in e.leaves()]
    wins = [leaf for leaf in leaves if leaf.info["success"]]
    assert len(leaves) == 128 and 0 < len(wins) < 128
    line = read_lines(path / "metrics.jsonl")[0]
    assert line["target_fraction"] == len(wins) / 128 and line["samples"] == len(wins)
    taught = [n.id for e in episodes for n in e.nodes if n.advantages]
    expected = [
        n.id for e in episodes for n in e.nodes if any(n in e.trajectory(leaf) for leaf in e.leaves() if leaf in wins)
    ]
    assert taught == expected


# ---- policies in training and others


def test_frozen_and_scripted_policies_are_not_trained(base, trained_pair, tmp_path):
    path, _, _ = trained_pair
    folder = list_checkpoints(path)[-1].path / "guide"
    frozen = {"type": "frozen", "base": str(base), "path": str(folder), "sampling": {"max_tokens": 1}}
    config = whisper(base, policies={"guide": frozen, "walker": whisper(base).policies["walker"].model_dump()}, steps=4)
    setup = build(config)
    bytes_before = (folder / "adapter_model.safetensors").read_bytes()
    snapshot = setup.stages[0].source.seats()["guide"].adapter
    weights = {name: (a.clone(), b.clone()) for name, (a, b) in snapshot.weights.items()}
    new, setup = run_of(config, tmp_path, setup)
    assert list(setup.learners) == ["walker"]
    assert setup.stages[0].source.seats()["guide"].adapter is snapshot
    assert all(
        torch.equal(a, weights[n][0]) and torch.equal(b, weights[n][1]) for n, (a, b) in snapshot.weights.items()
    )
    assert (folder / "adapter_model.safetensors").read_bytes() == bytes_before
    assert {line["policy"] for line in read_lines(new / "metrics.jsonl")} == {"walker", TEAM}
    assert [p.name for p in list_checkpoints(new)[-1].path.iterdir() if p.is_dir()] == ["walker"]
    episodes = load_episodes(new / "episodes" / "step-000003.parquet")
    assert {a.policy for e in episodes for n in e.nodes for a in n.answers.values()} == {"guide", "walker@3"}


def test_random_policy_needs_no_model(base, tmp_path):
    policies = {
        "guide": whisper(base).policies["guide"].model_dump(),
        "walker": {"type": "random", "words": ["0", "1"]},
    }
    path, setup = run_of(whisper(base, policies=policies, steps=2, evals={}), tmp_path)
    assert list(setup.learners) == ["guide"] and len(read_lines(path / "metrics.jsonl")) == 4


def test_policies_may_have_different_bases(base, other_base, tmp_path):
    config = whisper(base, f"policies.walker.base={other_base}", "policies.walker.rank=3", steps=2, evals={})
    path, setup = run_of(config, tmp_path)
    guide, walker = setup.learners["guide"], setup.learners["walker"]
    assert guide.sampler.engine is not walker.sampler.engine
    assert (guide.sampler.engine.name, walker.sampler.engine.name) == (str(base), str(other_base))
    for name, where, rank in (("guide", base, 8), ("walker", other_base, 3)):
        about = json.loads((list_checkpoints(path)[-1].path / name / "adapter_config.json").read_text())
        assert about["base_model_name_or_path"] == str(where) and about["r"] == rank
    who, _ = examine(path, episodes=5)
    assert who == {"guide": "guide@2", "walker": "walker@2"}


def test_policy_without_samples_is_not_updated(base, tmp_path):
    """If the guide is always wrong the walker's team reward never differs: no groups, no update, and no crash."""
    policies = {"guide": {"type": "scripted", "answers": [""]}, "walker": whisper(base).policies["walker"].model_dump()}
    path, setup = run_of(whisper(base, policies=policies, steps=2, evals={}), tmp_path)
    assert setup.learners["walker"].version == 0
    line = read_lines(path / "metrics.jsonl")[0]
    assert line["updates"] == 0 and line["zero_std_fraction"] == 1
    with Run.open(path) as run:
        again = build(whisper(base, policies=policies, steps=2, evals={}))
        assert restore_checkpoint(again, run) == 2 and again.learners["walker"].version == 0


def test_batches_and_epochs_set_the_number_of_optimizer_steps(base, tmp_path):
    config = whisper(base, "policies.guide.batch_size=50", "policies.guide.epochs=2", steps=1, evals={})
    path, setup = run_of(config, tmp_path)
    line = read_lines(path / "metrics.jsonl")[0]
    assert line["updates"] == 2 * -(-line["samples"] // 50) == setup.learners["guide"].version
    assert line["kl"] > 0  # the second batch is off-policy


def test_learning_rate_follows_its_schedule(base, tmp_path):
    linear = ("policies.guide.lr_schedule=linear", "policies.walker.warmup_ratio=0.5")
    path, _ = run_of(whisper(base, *linear, "episodes=4", steps=4, evals={}), tmp_path)
    lr = {
        name: [x["lr"] for x in read_lines(path / "metrics.jsonl") if x["policy"] == name]
        for name in ("guide", "walker")
    }
    assert lr["guide"] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert lr["walker"] == pytest.approx([0, 0.5e-2, 1e-2, 1e-2], abs=1e-9)


def test_evaluations_may_have_their_own_sampling_params(base):
    setup = build(whisper(base, "eval_sampling.temperature=0"))
    assert setup.evals[0].seat_policies()["guide"].sampling.temperature == 0
    assert setup.stages[0].source.seats()["guide"].sampling.temperature == 1


def test_evaluations_run_before_during_and_after_training():
    due = [step for step in range(-1, 10) if Evaluation(name="x", episodes=1, every=4).is_due(step, 10)]
    assert due == [-1, 3, 7, 9]
    assert [step for step in range(-1, 10) if Evaluation(name="x", episodes=1).is_due(step, 10)] == [-1, 9]


# ---- determinism, stopping, failures


def lines(path):
    return (path / "metrics.jsonl").read_bytes() + (path / "evals.jsonl").read_bytes()


def small(base, *settings, **tree):
    evals = {"test": {"episodes": 10, "env": {"split": "test"}, "every": 2}}
    return whisper(base, "algorithm.group_size=3", *settings, **({"steps": 4, "episodes": 4, "evals": evals} | tree))


def test_equal_seeds_give_equal_runs_and_others_differ(base, tmp_path):
    first, _ = run_of(small(base), tmp_path)
    second, _ = run_of(small(base), tmp_path)
    other, _ = run_of(small(base, "seed=1"), tmp_path)
    assert lines(first) == lines(second) != lines(other)
    for name in ("guide", "walker"):
        ours, theirs = adapter_weights(first, name), adapter_weights(second, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_sampling_depends_on_run_seed_and_instance_only(base):
    ours, again, other = (build(small(base, f"seed={seed}")) for seed in (0, 0, 1))
    drawn = [match.seed for step in range(3) for match in matches(ours, step)]
    assert len(set(drawn)) == 12
    assert drawn == [match.seed for step in range(3) for match in matches(again, step)]
    assert not set(drawn) & {match.seed for step in range(3) for match in matches(other, step)}
    played = [{m.instance for step in range(3) for m in matches(setup, step)} for setup in (ours, other)]
    assert [len(instances) for instances in played] == [12, 12] and not played[0] & played[1]


def resumed_after(config, root, steps):
    """A run that was stopped after `steps` steps and resumed with a new setup."""
    with Run.create(root, dump(config), config.name) as run:
        played = []
        done = run_training(build(config), run, Noted(played), lambda: len(played) == steps)
        assert not done and len(played) == steps and list_checkpoints(run.path)[-1].step == steps - 1
    with Run.open(run.path) as run:
        setup = build(validate(TextConfig, parse(run.config)))
        assert restore_checkpoint(setup, run) == steps
        assert run_training(setup, run)
    return run.path


class Noted(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_step(self, step, metrics):
        self.steps.append(step)


MIXES = {
    "two adapters": {},
    "a full model": {"policies.walker.type": "full", "policies.walker.lr": 1e-4},
    "a conversation": {
        "env.turns": 3,
        "policies.guide.history": "conversation",
        "policies.walker.history": "conversation",
    },
    "batches": {"policies.guide.batch_size": 5, "policies.guide.epochs": 2, "policies.guide.lr_schedule": "cosine"},
    "whole lines": {"algorithm.branch_at": "root"},
}


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
@pytest.mark.few(3)
def test_resume_after_stop_is_bit_identical(base, tmp_path, changes):
    config = small(base, *(f"{key}={value}" for key, value in changes.items()))
    whole, _ = run_of(config, tmp_path)
    stopped = resumed_after(config, tmp_path, 1)
    assert lines(whole) == lines(stopped)
    for file in list_checkpoints(whole)[-1].path.rglob("*.safetensors"):
        assert (
            file.read_bytes()
            == (list_checkpoints(stopped)[-1].path / file.relative_to(list_checkpoints(whole)[-1].path)).read_bytes()
        )


def test_resume_with_stateful_frozen_policies_is_bit_identical(base, other_base, tmp_path):
    """Neither a script's position nor a frozen model's cache may depend on earlier steps."""
    policies = {
        "guide": {"type": "frozen", "base": str(other_base), "history": "conversation", "sampling": {"max_tokens": 2}},
        "walker": whisper(base).policies["walker"].model_dump(),
    }
    env = {"type": "helpers.toys:Chant", "turns": 4}
    config = small(base, policies=policies, env=env, evals={}, steps=6, seats={"herald": "guide", "caller": "script"})
    config = validate(
        TextConfig,
        config.model_dump() | {"policies": policies | {"script": {"type": "scripted", "answers": ["a", "b", "c"]}}},
    )
    whole, _ = run_of(config, tmp_path)
    stopped = resumed_after(config, tmp_path, 3)
    assert (whole / "metrics.jsonl").read_bytes() == (stopped / "metrics.jsonl").read_bytes()
    for file in sorted((whole / "episodes").iterdir()):
        assert file.read_bytes() == (stopped / "episodes" / file.name).read_bytes(), file.name


def test_failed_episodes_do_not_stop_the_run(base, tmp_path, monkeypatch):
    (tmp_path / "shaky.py").write_text(
        "from helpers.toys import Whisper\n\n\n"
        "class Shaky(Whisper):\n"
        "    def step(self, actions):\n"
        "        if self.rng.random() < 0.1:\n"
        '            raise RuntimeError("[/lost]")\n'
        "        return super().step(actions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path, _ = run_of(whisper(base, env={"type": "shaky:Shaky"}, steps=2, evals={}), tmp_path)
    team = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == TEAM]
    assert all(0 < line["failed"] < 32 and line["episodes"] == 32 for line in team)
    episodes = load_episodes(path / "episodes" / "step-000001.parquet")
    errors = [e.error for e in episodes if e.error]
    assert len(errors) == team[1]["failed"] and set(errors) == {"RuntimeError: [/lost]"}
    assert not any(n.advantages for e in episodes if e.error for n in e.nodes)


def test_step_of_failed_episodes_only_changes_no_weights(base, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        "from helpers.toys import Whisper\n\n\n"
        "class Broken(Whisper):\n"
        "    def reset(self, seed):\n"
        '        raise OSError("no")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    path, setup = run_of(whisper(base, env={"type": "broken:Broken"}, steps=1, max_failed=1.0), tmp_path)
    assert setup.learners["guide"].version == 0
    assert read_lines(path / "metrics.jsonl")[-1]["failed"] == 32
    assert read_lines(path / "evals.jsonl")[0]["failed"] == 200


# ---- invalid configs are refused before anything is loaded

WRONG = [
    ({"policies.walker": None}, "policies.walker"),
    ({"seats.walker": "nobody"}, 'seats gives "walker" to "nobody".*names only guide, walker'),
    ({"seats.wlker": "guide"}, 'seats names "wlker", but env "helpers.toys:Whisper" plays guide, walker'),
    ({"env.turn": 3}, 'has no option "turn": did you mean turns'),
    ({"env.type": "whisper"}, 'unknown env "whisper"'),
    ({"env.type": "helpers.toys:Nothing"}, "cannot be loaded from helpers.toys:Nothing"),
    ({"env.type": "helpers.toys:Spoken"}, "not a subclass"),
    ({"evals.test.env.splt": "x"}, 'has no option "splt": did you mean split'),
    ({"eval_sampling.temprature": 0}, "eval_sampling: unknown key temprature: did you mean temperature"),
    ({"policies.guide.base": "tinny"}, 'cannot load the base "tinny"'),
    ({"policies.guide.base": "/nowhere"}, "no model at /nowhere"),
    ({"policies.guide.target_modules": "q_porj"}, "LoRA target 'q_porj' matches no linear layer"),
    ({"policies.guide.teacher": "master"}, 'teacher is "master", which must be one of'),
    ({"policies.guide.teacher": "walker"}, "algorithm: {type: sft}"),
    ({"policies.guide.dtype": "float23"}, "policies.guide.dtype"),
    ({"algorithm.kl_coef": 0.1, "policies.guide": {"type": "full", "base": "BASE"}}, "the algorithm needs a reference"),
    ({"policies.team": {"type": "random"}}, 'cannot be called "team"'),
    ({"policies.base": {"type": "random"}}, 'cannot be called "base"'),
    ({"policies.a/b": {"type": "random"}}, 'cannot be called "a/b"'),
    ({"policies.a@b": {"type": "random"}}, 'cannot be called "a@b"'),
    ({"policies.a:b": {"type": "random"}}, 'cannot be called "a:b"'),
    (
        {"policies.guide": {"type": "frozen", "base": "BASE", "path": "/nowhere"}},
        "no model at /nowhere: it does not exist",
    ),
    ({"algorithm.group_size": 1}, "algorithm: group_size: 1 leaves an answer no sibling"),
    ({"algorithm.continue_from": "bst"}, "algorithm.continue_from"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_invalid_configs_are_refused_with_the_reason(base, changes, message):
    settings = [f"{key}={json.dumps(value).replace('BASE', str(base))}" for key, value in changes.items()]
    with pytest.raises(ValueError, match=message):
        build(whisper(base, *settings))


def test_seat_without_policy_is_refused_with_the_fix(base):
    tree = whisper(base).model_dump()
    tree["policies"]["runner"] = tree["policies"].pop("walker")
    with pytest.raises(
        ValueError, match=r'seat "walker" has no policy.*Add policies\.walker, or set policies\.default'
    ):
        build(validate(TextConfig, tree))


def test_misspelt_policy_name_is_refused_with_a_suggestion(base):
    tree = whisper(base).model_dump()
    tree["policies"] = {"default": tree["policies"]["guide"], "giude": tree["policies"]["walker"]}
    with pytest.raises(ValueError, match=r"policies\.giude plays nowhere.*did you mean policies\.guide"):
        build(validate(TextConfig, tree))


def test_evaluation_may_assign_other_policies_to_seats(base, tmp_path):
    """The expert at both seats always wins; with the expert at one seat the untrained policy at the other decides."""
    evals = {
        "both": {"episodes": 20, "seats": {"guide": "expert", "walker": "expert"}},
        "one": {"episodes": 20, "seats": {"guide": "expert"}},
        "none": {"episodes": 20},
    }
    path, _ = run_of(whisper(base, "policies.expert.type=expert", steps=1, evals=evals), tmp_path)
    success = {line["name"]: line["success"] for line in read_lines(path / "evals.jsonl") if line["step"] == -1}
    assert success["both"] == 1.0 and 0 < success["one"] < 1 and success["none"] < 1


@pytest.mark.parametrize(
    ("seats", "message"),
    [({"nobody": "guide"}, 'evals.dev.seats names "nobody"'), ({"guide": "who"}, 'an evaluation seats "who"')],
)
def test_evaluation_with_unknown_policies_is_refused(base, seats, message):
    with pytest.raises(ValueError, match=message):
        build(whisper(base, evals={"dev": {"seats": seats}}))


def test_evaluation_env_with_other_seats_needs_policies_for_them(base):
    evals = {"dev": {"episodes": 2, "env": {"type": "helpers.toys:Chant"}}}
    with pytest.raises(ValueError, match=r'evaluation dev is of env "helpers\.toys:Chant"'):
        build(whisper(base, evals=evals))
    setup = build(whisper(base, "policies.default.type=random", evals=evals))
    assert set(setup.evals[0].seat_policies()) == {"caller", "herald", "walker"}


def test_env_without_success_is_reported_by_returns_per_seat(base, tmp_path):
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 1}}
    tree = {"env": {"type": "text_kuhn"}, "policies": {"player": speech, "other": {"type": "random"}}}
    tree |= {"seats": {"player_0": "player", "player_1": "other"}, "evals": {"dev": {"episodes": 20}}}
    config = whisper(base, steps=1, **tree, algorithm={"type": "grpo", "branch_at": "root", "group_size": 4})
    path, _ = run_of(config, tmp_path)
    for line in read_lines(path / "evals.jsonl"):
        assert "success" not in line and sum(line["returns"].values()) <= 0  # zero-sum except for penalties
    assert "success" not in read_lines(path / "metrics.jsonl")[-1]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(path))
    assert "dev: return of player_0" in (shown := console.export_text()) and "success" not in shown
    assert plot_run(path).stat().st_size > 10_000


class Printed:
    """Counts how often it is formatted."""

    times = 0

    def __repr__(self):
        self.times += 1
        return "printed"


def test_episodes_of_a_step_are_not_formatted_for_a_signal_handler(base):
    """Python formats a SIGINT handler when it is asked for, asyncio's handler holds the task, and a task its result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the test was started from
    setup = build(whisper(base))

    async def play(episodes):
        return episodes

    with asyncio.Runner() as setup.event_loop:
        plain = setup.event_loop.run(play(Printed()))
        assert plain.times > 0 and setup.run_async(play(Printed())).times == 0
