"""Learning from files as a user does: record an expert, train on its episodes, beat the untrained base."""

import json
import random
import re

import pytest
import yaml
from helpers.command_line import palestra, refused
from helpers.toys import Whisper

from palestra.core.config import dump, parse, validate
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig


def write(path, tree):
    path.write_text(yaml.safe_dump(tree))
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- episodes of an expert


GUESSER = {
    "name": "cloned",
    "steps": 40,
    "episodes": 64,
    "env": {"type": "guess_number", "rendering": "compact"},
    "data": "expert.parquet",
    "policies": {
        "guesser": {"type": "lora", "base": "tiny", "lr": 3e-3, "lr_schedule": "linear", "sampling": {"max_tokens": 12}}
    },
    "algorithm": {"type": "sft"},
    "evals": {"test": {"episodes": 100, "env": {"split": "test"}}},
    "save_episodes_every": 10,
}


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A run trained on an expert's episodes, and the recorded episodes."""
    folder = tmp_path_factory.mktemp("offline")
    config = write(folder / "cloned.yaml", GUESSER | {"data": str(folder / "expert.parquet")})
    palestra("collect", "guess_number", "--env", "rendering=compact", "--seats", "guesser=expert",
             "--episodes", 400, "--out", folder / "expert.parquet")  # fmt: skip
    output = palestra("train", config, "--root", folder / "runs")
    return folder / "runs" / "cloned", folder / "expert.parquet", output


@pytest.mark.slow
def test_imitation_of_recorded_expert_play_generalises(cloned):
    path, _, output = cloned
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.05 and after > 0.12
    assert "guess_number, guesser by sft" in re.sub(r"\s+", " ", output)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guesser"]
    assert lines[0]["target_fraction"] == 1 and lines[-1]["nll"] < 0.75 * lines[0]["nll"]


@pytest.mark.slow
def test_training_samples_are_recorded_as_the_runs_episodes(cloned):
    path, source, _ = cloned
    expert = {episode.seed: episode for episode in load_episodes(source)}
    learned = load_episodes(path / "episodes" / "step-000010.parquet")
    assert len({episode.seed for episode in learned}) == 64  # no episode occurs twice within an epoch
    for episode in learned:
        for node, was in zip(episode.nodes, expert[episode.seed].nodes, strict=True):
            answer, said = node.answers["guesser"], was.answers["guesser"]
            assert (answer.policy, answer.text) == ("guesser@10", said.text) and node.observations == was.observations
            assert len(answer.token_ids) and not len(said.token_ids) and node.advantages == {"guesser": 1.0}


@pytest.mark.slow
def test_run_folder_is_accepted_as_data(cloned, tmp_path):
    """The run's folder stands for its episodes, whose tokens are used unchanged."""
    path, _, _ = cloned
    tree = GUESSER | {"data": {"path": str(path)}, "steps": 1, "evals": {}, "name": "next"}
    palestra("train", write(tmp_path / "next.yaml", tree), "--root", tmp_path)
    (line,) = (line for line in read_lines(tmp_path / "next" / "metrics.jsonl") if line["policy"] == "guesser")
    assert line["samples"] == line["answers"] > 64


# ---- refused data


@pytest.mark.slow
def test_incompatible_data_is_refused_before_training(cloned, tmp_path):
    _, source, _ = cloned
    config = write(tmp_path / "x.yaml", GUESSER | {"data": str(source)})

    def with_(*settings):
        return refused("train", config, "--dry-run", *(part for setting in settings for part in ("--set", setting)))

    message = with_("algorithm.type=grpo")
    assert 'no log-probabilities for the answers of seat "guesser", which grpo needs' in message
    assert "dpo finds nothing to learn in" in with_("algorithm={type: dpo}")
    assert (
        'has answers of seat "guesser", which the env does not have: env "helpers.toys:Whisper" plays guide, walker'
        in with_(
            "env={type: 'helpers.toys:Whisper'}", "policies.guide.type=lora", "policies.walker.type=lora", "seats={}"
        )
    )
    assert "names no file" in with_("data=nowhere/*.parquet")
    assert "this config names no env" in with_("env={}")
    assert "add env: as it was played" in with_("env={}", "evals={}")
    assert 'seat "guesser" has no policy: the data has answers of guesser' in with_(
        "env={}", "evals={}", "policies={other: {type: lora}, another: {type: lora}}"
    )
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "a"}])
    assert "name the seat of its answers, seat: NAME" in with_(
        f"data={rows}", "env={type: 'helpers.toys:Whisper'}", "policies={default: {type: lora}}"
    )


# ---- tables


def speech(base, **more):
    return {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}} | more


def secrets(count, seed):
    """A guide's observation in Whisper's training split, and the secret in it."""
    return [
        (shown, shown[-1]) for i in range(count) for shown in [Whisper().reset((seed << 20) + i).observations["guide"]]
    ]


@pytest.mark.slow
def test_dpo_learns_preferences_from_a_file(base, tmp_path):
    """First imitation of digits, whichever; then, of two digits, the preferred one."""
    rng = random.Random(0)
    demos = [{"prompt": shown, "completion": rng.choice("01")} for shown, _ in secrets(200, 1)]
    prefer = [{"prompt": shown, "chosen": secret, "rejected": "10"[int(secret)]} for shown, secret in secrets(400, 2)]
    guide, demos, prefer = (
        "guide",
        write_lines(tmp_path / "demos.jsonl", demos),
        write_lines(tmp_path / "p.jsonl", prefer),
    )
    tree = {
        "name": "preferred",
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech(base), "walker": {"type": "scripted", "answers": ["0"]}},
        "stages": [
            {"steps": 10, "data": {"path": demos, "seat": guide}, "algorithm": {"type": "sft"}},
            {
                "steps": 40,
                "data": {"path": prefer, "seat": guide},
                "algorithm": {"type": "dpo", "beta": 0.3},
                "policies": {"guide": {"lr": 3e-3}},  # at 1e-2 other tokens than the digits gain with some seeds
            },
        ],
        "evals": {"test": {"episodes": 200, "every": 10, "env": {"split": "test"}}},
    }
    palestra("train", write(tmp_path / "p.yaml", tree), "--root", tmp_path)
    lines = read_lines(tmp_path / "preferred" / "metrics.jsonl")
    dpo = [line for line in lines if line["policy"] == "guide" and line["step"] >= 10]
    assert dpo[0]["pairs"] == 32 and dpo[0]["accuracy"] < 0.75 < 0.9 < dpo[-1]["accuracy"]
    right = {line["step"]: line["returns"]["guide"] for line in read_lines(tmp_path / "preferred" / "evals.jsonl")}
    assert right[9] < 0.65 and right[49] > 0.8


def test_sft_without_env_learns_a_table(base, tmp_path, check_score):
    rows = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "y"}]} for i in range(9)
    ]
    data = write_lines(tmp_path / "a.jsonl", rows)
    tree = {"name": "chat", "steps": 6, "episodes": 4, "data": data, "policies": {"talker": speech(base)}}
    output = palestra("train", write(tmp_path / "a.yaml", tree | {"algorithm": {"type": "sft"}}), "--root", tmp_path)
    lines = [line for line in read_lines(tmp_path / "chat" / "metrics.jsonl") if line["policy"] == "talker"]
    assert len(lines) == 6 and str(data) in output.replace("\n", "")
    check_score(lines[-1]["nll"] / lines[0]["nll"])


# ---- resume


def table_run(base, data):
    """Nine rows, four per step: epochs start in the middle of steps."""
    tree = {
        "name": "table",
        "steps": 6,
        "episodes": 4,
        "data": data,
        "policies": {"talker": speech(base, batch_size=3)},
    }
    return validate(TextConfig, tree | {"algorithm": {"type": "sft"}})


def test_resume_after_stop_is_bit_identical(base, tmp_path):
    rows = [{"prompt": str(i), "completion": "y" * i} for i in range(1, 10)]
    config = table_run(base, write_lines(tmp_path / "a.jsonl", rows))
    with Run.create(tmp_path, dump(config), "whole") as whole:
        assert run_training(build(config), whole)
    with Run.create(tmp_path, dump(config), "stopped") as stopped:
        asked = iter([False, True])
        assert not run_training(build(config), stopped, should_stop=lambda: next(asked))
    with Run.open(stopped.path) as again:
        setup = build(validate(TextConfig, parse(again.config)))
        assert restore_checkpoint(setup, again) == 2 and run_training(setup, again)
    files = [file for part in ("checkpoints", "episodes") for file in (whole.path / part).rglob("*") if file.is_file()]
    for file in [whole.path / "metrics.jsonl", *files]:
        other = stopped.path / file.relative_to(whole.path)
        assert other.read_bytes() == file.read_bytes(), file
    assert list_checkpoints(whole.path)[-1].step == list_checkpoints(stopped.path)[-1].step == 5
    seen = [e.seed for step in range(6) for e in load_episodes(whole.path / "episodes" / f"step-{step:06d}.parquet")]
    assert sorted(seen[:9]) == sorted(seen[9:18]) == list(range(9)) and seen[:9] != seen[9:18]
    write_lines(tmp_path / "a.jsonl", rows[1:])
    with Run.open(stopped.path) as again:
        setup = build(config.model_copy(update={"steps": 7}))
        restore_checkpoint(setup, again)
        with pytest.raises(ValueError, match="have changed since the run began"):
            run_training(setup, again)
