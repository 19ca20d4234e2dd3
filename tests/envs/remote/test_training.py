"""A run whose envs are on servers equals the run without servers, even if servers are lost."""

import json
import random
import time

import pytest
import yaml
from helpers.env_servers import serving
from helpers.processes import finish, start
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.config import dump, load, override, validate
from palestra.envs.remote.address import pop_metrics
from palestra.runs import Run, load_episodes, read_lines
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig

TOYS = "helpers.remote_toys:Secret"
LOGS = ("metrics.jsonl", "evals.jsonl")


def config(base, steps, **env):
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 3}, "lr": 1e-3}
    return {
        "name": "run",
        "steps": steps,
        "episodes": 6,
        "env": {"type": TOYS, "turns": 2, **env},
        "policies": {"guide": speech, "walker": speech | {"batch_size": 10}},
        "algorithm": {"type": "grpo", "branch_at": "turn", "group_size": 3},
        "evals": {"dev": {"episodes": 4}},
        "checkpoint_every": 50,
    }


def train(folder, base, steps, *settings):
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(config(base, steps)))
    words = [word for setting in settings for word in ("--set", setting)]
    return start(folder, "run.yaml", *words), folder / "runs/run"


def assert_same(run, other):
    for log in LOGS:
        assert (run / log).read_bytes() == (other / log).read_bytes(), log


def env_metrics(run):
    """The sums of what the run recorded about its envs."""
    lines = read_lines(run / "timings.jsonl")
    return {key: sum(line.get(key, 0) for line in lines) for key in ("env_sessions", "env_lost", "env_replays")}


def train_here(folder, tree):
    """The folder of a run trained in this process."""
    checked = validate(TextConfig, tree)
    with Run.create(folder, dump(checked), "run") as run:
        assert run_training(build(checked), run)
    return folder / "run"


def test_env_on_a_server_gives_the_same_run(base, tmp_path):
    tree = config(base, 1)
    pop_metrics()
    with serving(TOYS) as server:
        here = train_here(tmp_path / "here", tree)
        there = train_here(tmp_path / "there", override(tree, [f"env.at=[{server.address}]"]))
    assert_same(here, there)
    metrics = env_metrics(there)
    assert metrics["env_sessions"] >= 6 and metrics["env_lost"] == 0
    assert "env_sessions" not in (here / "timings.jsonl").read_text()
    assert load(there / "config.yaml")["env"]["at"] == [server.address]


def test_run_does_not_depend_on_how_long_an_env_takes(base, tmp_path):
    """Three runs in which each step takes up to 20 ms, at random, are equal bit for bit."""
    tree = override(config(base, 2), ["env.type=helpers.remote_toys:Unhurried", "episodes=12", "evals.dev.every=1"])
    first = train_here(tmp_path / "first", tree)
    for name in ("second", "third"):
        assert_same(first, train_here(tmp_path / name, tree))


@pytest.mark.slow
def test_command_line_supports_local_and_remote_envs(base, tmp_path):
    """Training, evaluation during and after it, and demonstrations by the env's expert, with local and remote envs."""
    with serving(f"{TOYS},text_tic_tac_toe") as server:
        local, here = train(tmp_path / "here", base, 2)
        finish(local)
        remote, there = train(tmp_path / "there", base, 2, f"env.at=[{server.address}]")
        finish(remote)
        assert_same(here, there)
        asked = ["eval", str(there), "--episodes", "5", "--json"]
        figures = [json.loads(CliRunner().invoke(app, [*asked, *more]).stdout) for more in ([], ["--env", "at=null"])]
        assert figures[0] == figures[1]
        seats = ["--seats", "player_0=expert", "--seats", "player_1=expert", "--episodes", "3"]
        for name, place in (("a", "at=null"), ("b", f"at={server.address}")):
            out = str(tmp_path / f"{name}.parquet")
            done = CliRunner().invoke(app, ["collect", "text_tic_tac_toe", "--out", out, *seats, "--env", place])
            assert done.exit_code == 0, done.output
    said = [[answers(episode) for episode in load_episodes(tmp_path / f"{n}.parquet")] for n in "ab"]
    assert said[0] == said[1] and len(said[0]) == 3


def answers(episode):
    return [(node.observations, {seat: answer.text for seat, answer in node.answers.items()}) for node in episode.nodes]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_is_unchanged_by_servers_killed_for_three_minutes(base, tmp_path):
    """One of three servers is killed every 20 seconds, and started again 5 seconds later: the run is unchanged."""
    steps = 54
    quiet, whole = train(tmp_path / "quiet", base, steps)
    finish(quiet)
    with serving(TOYS) as one, serving(TOYS) as two, serving(TOYS) as three:
        servers, rng, kills = [one, two, three], random.Random(0), 0
        places = ",".join(server.address for server in servers)
        process, run = train(tmp_path / "killed", base, steps, f"env.at=[{places}]", "env.seconds=0.7")
        began = time.monotonic()
        while not ends_before(process, began + 20 * (kills + 1)) and kills < 9:
            victim = rng.choice(servers)
            victim.kill()
            kills += 1
            ends_before(process, time.monotonic() + 5)
            victim.start()
        finish(process)
        seconds = time.monotonic() - began
    assert_same(run, whole)
    metrics = env_metrics(run)
    assert (
        kills >= 7 and kills / 2 <= metrics["env_lost"] <= 30 * kills and metrics["env_replays"] == metrics["env_lost"]
    ), (
        kills,
        metrics,
    )
    failed = [line["failed"] for line in read_lines(run / "metrics.jsonl") if line["policy"] == "team"]
    assert len(failed) == steps and sum(failed) == 0
    print(f"{kills} kills in {seconds:.0f} s: {metrics}")


def ends_before(process, until):
    """True if the process ends before that time."""
    while time.monotonic() < until:
        if process.poll() is not None:
            return True
        time.sleep(0.05)
    return False
