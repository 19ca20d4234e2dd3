"""The whole training loop in worker processes: the run does not depend on where its parts execute, also after kills."""

from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import invoke
from helpers.toy_loops import assert_same, config, inline_backend, run_of, run_with_kill

from palestra.core.config import dump, parse
from palestra.runs import list_checkpoints, read_lines
from palestra.runs.loop import Callback
from palestra.text.build import build as text
from palestra.text.build.distributed import build
from palestra.text.training.trainer import TextTrainer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def inline_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose slices are played by one worker in this process."""
    asked = config(base)
    return run_of(build(asked, inline_backend), tmp_path_factory.mktemp("whole"), asked)


# ---- in one process


def test_one_slice_equals_no_slices(base: Path, tmp_path: Path) -> None:
    asked = config(base, backend={"type": "local", "slices": 1})
    assert_same(run_of(build(asked, inline_backend), tmp_path, asked), run_of(text.build(asked), tmp_path, asked))


def test_several_slices_agree_up_to_rounding(base: Path, inline_run: Path, tmp_path: Path) -> None:
    """Sums over other batches differ in their last bits; the sampled tokens are the same."""
    one = run_of(text.build(asked := config(base)), tmp_path, asked)
    lines, others = read_lines(one / "metrics.jsonl"), read_lines(inline_run / "metrics.jsonl")
    assert len(lines) == len(others) == 9
    for line, other in zip(lines, others, strict=True):
        assert line.pop("policy") == other.pop("policy")
        assert line == pytest.approx(other, abs=1e-5)
    assert (one / "evals.jsonl").read_bytes() == (inline_run / "evals.jsonl").read_bytes()


def test_stages_data_teachers_and_frozen_policies_equal_one_process(base: Path, tmp_path: Path) -> None:
    """First the guide learns from an expert, then from a file of that play, then both policies by reinforcement."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 1}}
    tree = {
        "policies": {
            "guide": speech | {"teacher": "expert"},
            "walker": speech,
            "expert": {"type": "expert"},
            "base": {"type": "random", "words": ["a", "b"], "length": 1},
            "old": {"type": "frozen", "base": str(base), "sampling": {"max_tokens": 1}},
        },
        "env": {"type": "helpers.toys:Whisper"},
        "evals": {"old": {"episodes": 4, "seats": {"walker": "old"}}},
        "backend": {"type": "local", "slices": 1},
        "steps": 1,
        "stages": [
            {"name": "teach", "algorithm": {"type": "sft", "imitate": "all"}, "steps": 2},
            {"name": "play", "policies": {"guide": {"teacher": None, "lr": 1e-4, "sampling": {"max_tokens": 2}}}},
        ],
    }
    del tree["policies"]["base"]
    first = run_of(build(asked := config(base, **tree), inline_backend), tmp_path, asked)
    assert_same(first, run_of(text.build(asked), tmp_path, asked))
    data = [{"path": str(first / "episodes" / "step-000000.parquet")}]
    tree["stages"].insert(0, {"name": "read", "data": data, "algorithm": {"type": "sft", "imitate": "all"}})
    asked = config(base, **tree)
    assert_same(run_of(build(asked, inline_backend), tmp_path, asked), run_of(text.build(asked), tmp_path, asked))


def test_full_model_and_critic_are_sent_to_workers(base: Path, tmp_path: Path) -> None:
    full = {"type": "full", "base": str(base), "sampling": {"max_tokens": 2}}
    lora = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    backend = {"type": "local", "slices": 1}
    asked = config(base, policies={"guide": full, "walker": lora}, algorithm={"type": "ppo"}, backend=backend)
    assert_same(run_of(build(asked, inline_backend), tmp_path, asked), run_of(text.build(asked), tmp_path, asked))


class StoredMembers(Callback):
    """Records after each step which members are still stored."""

    def __init__(self, made: TextTrainer) -> None:
        self.troupe = made.stages[0].source.dispatcher  # type: ignore[attr-defined]
        self.most = 0

    def on_step(self, step: int, metrics: Any) -> None:
        self.most = max(self.most, len(self.troupe.published))


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_old_members_are_removed(base: Path, tmp_path: Path, staleness: int) -> None:
    asked = config(base, steps=6, staleness=staleness, evals={}, policies={"default": config(base).policies["guide"]})
    made = build(asked, inline_backend)
    watcher = StoredMembers(made)
    run_of(made, tmp_path, asked, watcher)
    assert 1 <= watcher.most <= staleness + 2
    for folder in {folder.parent for folder in watcher.troupe.published.values()}:
        assert {path.name for path in folder.iterdir()} == set(watcher.troupe.published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": {"type": "ray", "placement": {"assess": {}}}}, "placement.assess is unknown"),
        ({"backend": {"type": "local", "address": "auto"}}, "address is for backend type ray"),
    ],
)
def test_incompatible_settings_are_refused(base: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(base, **changes)


def test_command_line_selects_the_backend(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump(config(base, backend={"type": "inline"})))
    shown = parse(invoke("train", path, "--backend", "ray", "--workers", 3, "--dry-run").output)["backend"]
    assert (shown["type"], shown["workers"]) == ("ray", 3)
    alone = invoke("train", path, "--workers", 2, "--dry-run")
    assert "workers: 2 play in processes of their own: set type: local" in " ".join(alone.stderr.split())
    games = invoke("train", "configs/games/kuhn_ppo.yaml", "--workers", 2)
    assert games.exit_code == 2 and "or the episodes of language agents" in " ".join(games.stderr.split())
    plain = parse(invoke("train", "configs/demo.yaml", "--workers", 2, "--dry-run").output)["backend"]
    assert (plain["type"], plain["workers"]) == ("local", 2)


def test_episode_that_cannot_be_sent_fails_with_the_name_of_its_env(base: Path, tmp_path: Path) -> None:
    asked = config(base, env={"type": "helpers.toys_mortal:Odd"}, evals={}, policies={"default": {"type": "random"}})
    with pytest.raises(ValueError, match=r'step 1: 6 of 6 .*env "whisper" puts a function into info'):
        run_of(build(asked, inline_backend), tmp_path, asked)


# ---- in processes on this machine


@pytest.mark.slow  # parallel/test_backends.py retries tasks of killed workers, the tests above compare the runs
@pytest.mark.parametrize(("workers", "staleness"), [(1, 0), (2, 1)])
def test_killed_worker_is_replaced_without_changing_the_run(
    base: Path, tmp_path: Path, workers: int, staleness: int
) -> None:
    """The env kills the first worker that plays instance 8, of the second step; also with asynchronous rollouts."""
    backend = {"type": "local", "workers": workers, "slices": 3}
    inline_run = run_of(build(plain := config(base, staleness=staleness), inline_backend), tmp_path, plain)
    env = {"type": "helpers.toys_mortal:Mortal", "turns": 2, "fatal": 8, "mark": str(tmp_path / "mark")}
    asked = config(base, env=env, staleness=staleness, backend=backend)
    assert_same(run_of(build(asked), tmp_path, asked), inline_run)
    assert (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 1])
def test_resume_after_driver_kill_is_bit_identical(base: Path, tmp_path: Path, staleness: int) -> None:
    asked = config(base, steps=8, staleness=staleness)
    run = run_with_kill(tmp_path, asked, 13)
    other = run_of(build(asked, inline_backend), tmp_path, asked)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [5, 7]
    if staleness == 0:
        assert_same(run, other)
    else:  # unfinished episodes are played again with the weights of the resume, which may be newer
        assert len(read_lines(run / "metrics.jsonl")) == len(read_lines(other / "metrics.jsonl"))
