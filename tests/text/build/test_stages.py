"""A run in stages, and a run in several envs: per-stage settings, state carried over, and exact resume of both."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from palestra.api.agents.trained_agent import find_agents
from palestra.core.config import dump, override, parse, validate
from palestra.core.types import TEAM
from palestra.evaluation.evaluate import evaluate
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.algorithms.grpo import GRPO
from palestra.text.build.build import build
from palestra.text.config import TextConfig

STAGES = [
    {"name": "copy", "steps": 3, "algorithm": {"type": "sft"}, "policies": {"walker": {"teacher": "expert"}}},
    {"name": "play", "steps": 4, "episodes": 6, "env": {"turns": 2}, "policies": {"guide": {"lr": 0.0}}},
    {
        "name": "hold",
        "steps": 3,
        "algorithm": {"type": "grpo", "group_size": 4, "kl_coef": 0.1, "branch_at": "root"},
        "policies": {"walker": {"sampling": {"max_tokens": 1}}},
    },
]


def config(base, *settings, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    whole = {
        "name": "stages",
        "episodes": 8,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": dict(speech), "walker": dict(speech), "expert": {"type": "expert"}},
        "algorithm": {"type": "grpo", "group_size": 4},
        "checkpoint_every": 2,
    }
    return validate(TextConfig, override(whole | tree, settings))


def run_of(config, root, stop=lambda: False):
    setup = build(config)
    with Run.create(root, dump(config), config.name) as run:
        run_training(setup, run, should_stop=stop)
        return run.path, setup


def resumed(config, path):
    setup = build(validate(TextConfig, parse((path / "config.yaml").read_text())))
    with Run.open(path) as run:
        restore_checkpoint(setup, run)
        assert run_training(setup, run)
    return setup


def logged(path, policy):
    return [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == policy]


def adapter(path, name, step=-1):
    return load_file(list_checkpoints(path)[step].path / name / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def staged(base, tmp_path_factory):
    whole = config(base, stages=STAGES, keep_every=1, checkpoint_every=1)
    return run_of(whole, tmp_path_factory.mktemp("runs"))


def test_stages_have_their_own_steps_episodes_env_and_algorithm(staged):
    path, setup = staged
    assert setup.steps == 10
    team, walker = logged(path, TEAM), logged(path, "walker")
    assert [line["episodes"] for line in team] == [8] * 3 + [6] * 4 + [8] * 3
    assert [line["steps_per_episode"] for line in team] == [2] * 3 + [4] * 4 + [2] * 3
    assert ["target_fraction" in line for line in walker] == [True] * 3 + [False] * 7
    assert ["reference_kl" in line for line in walker] == [False] * 7 + [True] * 3
    assert [line["lr"] for line in logged(path, "guide")][3:] == [0.0] * 4 + [1e-2] * 3


@pytest.mark.parametrize(("steps", "most"), [(7, 2), (None, 1)])
def test_evaluations_and_served_agents_have_the_settings_of_the_stage_that_trained_them(staged, steps, most):
    path, _ = staged
    played = evaluate(path, episodes=20, in_process=True, checkpoint=steps).episodes
    answers = [node.answers["walker"] for episode in played for node in episode.nodes if "walker" in node.answers]
    assert max(len(answer.token_ids) for answer in answers) == most
    (walker,) = find_agents(path, ["walker"], steps)
    assert walker.lm_settings["sampling"]["max_tokens"] == most


def test_episode_numbers_continue_across_stages(staged):
    path, _ = staged
    seeds = [e.seed for file in sorted((path / "episodes").iterdir()) for e in load_episodes(file)]
    assert seeds == list(range(3 * 8 + 4 * 6 + 3 * 8))


def test_teacher_is_used_in_its_stage_only(staged):
    path, _ = staged
    for step in range(10):
        for episode in load_episodes(path / "episodes" / f"step-{step:06d}.parquet"):
            answers = [node.answers["walker"] for node in episode.nodes if "walker" in node.answers]
            assert all((not answer.logprobs.any()) == (step < 3) for answer in answers)


def test_answers_are_scored_by_the_teacher_of_the_stage(staged, base, tmp_path):
    """The first teacher is the base, with which the untrained student agrees; the second has been trained."""
    trained = list_checkpoints(staged[0])[-1].path / "walker"
    frozen, students = {"type": "frozen", "base": str(base)}, ("guide", "walker")
    tree = json.loads(config(base).model_dump_json())
    tree["policies"] |= {"first": frozen, "second": frozen | {"path": str(trained)}}
    tree |= {
        "algorithm": {"type": "distill"},
        "stages": [
            {"steps": 1, "policies": {name: {"teacher": teacher, "lr": 1e-5} for name in students}}
            for teacher in ("first", "second")
        ],
    }
    path, _ = run_of(validate(TextConfig, tree), tmp_path)
    first, second = [line["teacher_kl"] for line in logged(path, "walker")]
    assert abs(first) < 1e-6 and abs(second) > 1e-3


def test_weights_carry_over_and_the_reference_is_the_stage_start(staged):
    path, _ = staged
    walker = logged(path, "walker")
    assert walker[7]["reference_kl"] == pytest.approx(0, abs=1e-6) and walker[9]["reference_kl"] > 1e-6
    reference = load_file(list_checkpoints(path)[-1].path / "walker" / "reference" / "adapter_model.safetensors")
    began = adapter(path, "walker", 6)
    assert reference.keys() == began.keys() and all(torch.equal(reference[key], began[key]) for key in began)
    still, before = adapter(path, "guide", 6), adapter(path, "guide", 2)
    assert all(torch.equal(still[key], before[key]) for key in before)  # lr: 0 in the second stage


@pytest.mark.parametrize("steps", [2, 3, 5, 8])
def test_resume_in_any_stage_is_bit_identical(staged, steps, base, tmp_path):
    path, _ = staged
    whole = config(base, stages=STAGES, keep_every=1, checkpoint_every=1)
    calls = iter(range(100))
    stopped, _ = run_of(whole, tmp_path, stop=lambda: next(calls) == steps - 1)
    assert len(logged(stopped, TEAM)) == steps
    resumed(whole, stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()
    for name in ("guide", "walker"):
        one, other = adapter(stopped, name), adapter(path, name)
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_stage_inherits_unset_keys(base):
    whole = config(base, stages=STAGES, steps=7)
    copy, play, hold = whole.stage_configs()
    assert (copy.steps, play.steps, copy.episodes, play.episodes) == (3, 4, 8, 6)
    assert play.algorithm == GRPO(group_size=4) and hold.algorithm == GRPO(group_size=4, kl_coef=0.1, branch_at="root")
    assert play.env["turns"] == 2 and "turns" not in hold.env
    assert play.policies["walker"] == whole.policies["walker"] and play.policies["guide"].lr == 0
    (only,) = config(base, steps=7).stage_configs()
    assert only.steps == 7
    (unsaid,) = config(base, stages=[{}], steps=7).stage_configs()
    assert unsaid.steps == 7 and unsaid.algorithm == GRPO(group_size=4)


def test_stage_changes_single_keys_of_sampling(base):
    """The other keys keep the run's values. A stage that changed the temperature had the default token limit."""
    whole = config(base, stages=[{"steps": 1, "policies": {"walker": {"sampling": {"temperature": 0.5}}}}])
    (part,) = whole.stage_configs()
    sampling = part.policies["walker"].sampling
    assert (sampling.max_tokens, sampling.temperature) == (2, 0.5)


def test_an_evaluation_is_held_out_unless_it_says_otherwise(base):
    evals = {"small": {"env": {"turns": 2}}, "test": {}, "train": {"env": {"split": "train"}}}
    setup = build(config(base, evals=evals))
    assert {each.name: each.runner.make_env().split for each in setup.evals} == {
        "small": "dev",
        "test": "test",
        "train": "train",
    }


def test_a_full_model_can_rest_in_a_stage(base):
    """As docs/algorithms/stages.md says of policies that should not learn in a stage."""
    policies = {"guide": {"type": "full", "base": str(base)}, "walker": {"type": "expert"}}
    (still,) = config(base, policies=policies, stages=[{"policies": {"guide": {"lr": 0}}}]).stage_configs()
    assert still.policies["guide"].lr == 0


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"policies": {"wanderer": {"lr": 0.1}}}, 'a stage changes policy "wanderer", but policies: names guide'),
        ({"policies": {"guide": {"rank": 4}}}, r'cannot change what a policy or its trainer is made of \("rank"\)'),
        ({"policies": {"guide": {"use_rslora": True}}}, r'made of \("use_rslora"\)'),
        ({"policies": {"guide": {"quantize": "nf4"}}}, r'made of \("quantize"\)'),
        ({"policies": {"guide": {"optimizer": {"type": "muon"}}}}, r'made of \("optimizer"\)'),
        (
            {"policies": {"guide": {"teacher": "expert"}}},
            "policies.guide has a teacher, whose answers are for imitation",
        ),
        ({"policies": {"guide": {"lrr": 0.1}}}, "lrr"),
        ({"step": 3}, "step"),
        ({"algorithm": {"type": "grpo", "group_size": 1}}, "group_size"),
    ],
)
def test_invalid_stages_are_refused_before_loading(base, stage, message):
    with pytest.raises(ValueError, match=message):
        config(base, stages=[stage])


def test_stages_change_untrained_policies_and_templates(base, tmp_path):
    """Each stage has its own answers of a scripted walker, and its own option of the guide's chat template."""
    whole = config(base).model_dump(mode="json", exclude={"stages"})
    whole["policies"]["walker"] = {"type": "scripted", "answers": ["north"]}
    told = {"guide": {"chat_template_kwargs": {"asks": "loudly"}}, "walker": {"answers": ["south"]}}
    _, setup = run_of(config(base, **whole | {"steps": 1, "stages": [{}, {"policies": told}]}), tmp_path)
    for step, answer in enumerate(("north", "south")):
        (file,) = tmp_path.glob(f"*/episodes/step-{step:06d}.parquet")
        nodes = [node for episode in load_episodes(file) for node in episode.nodes]
        assert {node.answers["walker"].text for node in nodes if "walker" in node.answers} == {answer}
    assert setup.learners["guide"].policy().encoder.options == {"asks": "loudly"}


# ---- several envs

ENVS = {"short": {"type": "helpers.toys:Whisper"}, "long": {"type": "helpers.toys:Whisper", "turns": 3}}
SEVERAL = {"env": {}, "envs": ENVS, "steps": 8, "mix": {"curriculum": "frontier", "rate": 0.5}}


def test_several_envs_train_one_team_by_success(base, tmp_path):
    evals = {name: {"base_env": name, "episodes": 5, "env": {"split": "test"}} for name in ENVS}
    path, setup = run_of(config(base, evals=evals, **SEVERAL), tmp_path)
    lines = logged(path, TEAM)
    for step, line in enumerate(lines):
        episodes = load_episodes(path / "episodes" / f"step-{step:06d}.parquet")
        for name, turns in (("short", 1), ("long", 3)):
            own = [e for e in episodes if e.env == name]
            assert all(len(e.trajectory(leaf)) == 2 * turns for e in own for leaf in e.leaves() if leaf.chosen)
            if own:
                assert line[f"{name}.success"] == pytest.approx(sum(e.success for e in own) / len(own))
        assert line["short.share"] + line["long.share"] == pytest.approx(1)
    assert any(one["short.share"] != other["short.share"] for one, other in pairwise(lines))
    memory = json.loads((list_checkpoints(path)[-1].path / "algorithm_state.json").read_text())
    assert memory["success"] == setup.algorithm_state["success"] and set(memory["success"]) == {"short", "long"}
    assert {line["name"] for line in read_lines(path / "evals.jsonl")} == {"short", "long"}


def test_curriculum_resume_is_bit_identical(base, tmp_path):
    whole = config(base, **SEVERAL)
    path, _ = run_of(whole, tmp_path / "one")
    calls = iter(range(100))
    stopped, _ = run_of(whole, tmp_path / "other", stop=lambda: next(calls) == 4)
    resumed(whole, stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"envs": ENVS}, "one env or several"),
        ({"env": {}}, "one env or several"),
        (
            {"env": {}, "envs": ENVS, "mix": {"weights": {"middle": 1}}},
            'no env called "middle": envs: names short, long',
        ),
        ({"env": {}, "envs": ENVS, "evals": {"dev": {"base_env": "wide"}}}, 'no env called "wide"'),
        ({"env": {}, "envs": ENVS, "seats": {"nobody": "guide"}}, 'seats names "nobody"'),
    ],
)
def test_incompatible_envs_are_refused(base, tree, message):
    with pytest.raises(ValueError, match=message):
        build(config(base, **tree))
