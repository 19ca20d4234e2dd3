"""Populations from configs: every plan with every oracle, on the command line, killed and resumed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import peft
import pytest
import torch
import yaml
from helpers.command_line import invoke
from helpers.terminal_text import plain
from helpers.warm_processes import start_palestra
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from palestra.core.config import dump, load, override, parse
from palestra.core.config.shipped import DATA_DIR
from palestra.engine.bases.names import resolve_base
from palestra.populations.build.build import build_population, run_population
from palestra.populations.build.validation import validate_population
from palestra.populations.scheduler import PlanCallback
from palestra.runs import Run, read_lines

ROOT = Path(__file__).parents[2]
EXACT = {
    "name": "small",
    "env": {"type": "kuhn_poker"},
    "population": {"type": "psro", "iterations": 8},
    "oracle": {"type": "exact"},
    "backend": {"type": "inline"},
}
NET = {
    "type": "net",
    "policy": {"hidden": [8]},
    "algorithm": {"type": "ppo", "rollout_length": 4, "epochs": 1, "minibatches": 1, "gamma": 1.0},
}
LEARNED = EXACT | {"oracle": NET, "env": {"type": "kuhn_poker", "num_envs": 8}}
TALK = {
    "type": "language",
    "policy": {"rank": 4, "lr": 3e-3, "batch_size": 64, "sampling": {"max_tokens": 2}},
    "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 2, "scale": "none"},
    "episodes": 4,
    "imitation_steps": 8,
    "payoffs": "exact",
}
VOCABULARY = {"J": "1", "Q": "2", "K": "3", "pass": "up", "bet": "down"}
PLANS = {
    "psro": {"iterations": 2, "env_steps": 64, "games_per_cell": 20, "adaptive_games": 40},
    "self_play": {"slices": 3, "env_steps": 64, "matchmaker": {"type": "pfsp"}},
    "league": {"slices": 2, "env_steps": 64, "games_per_cell": 20, "main_exploiters": 1, "league_exploiters": 1},
    "pbt": {"num_learners": 2, "slices": 3, "env_steps": 64, "select_every": 1},
}


def check(tree, *settings):
    return validate_population(override(tree, settings))


def train_tree(folder, tree):
    config = check(tree)
    setup = build_population(config)
    with Run.create(folder, dump(config), config.name) as run:
        assert run_population(setup, run, PlanCallback())
    return setup.plan, folder / config.name


def write_config(folder, tree):
    path = folder / "population.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


# configs


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_networks(plan, tmp_path):
    tree = LEARNED | {"population": {"type": plan, **PLANS[plan]}}
    made, run = train_tree(tmp_path, tree)
    names = {member["name"] for member in json.loads((run / "population.json").read_text())}
    assert names == set(made.population.members) and len(names) >= 3
    folders = {folder.name for folder in (run / "members").iterdir()}
    assert names - {"uniform"} <= folders
    assert all((run / "members" / name / "policy.safetensors").exists() for name in names - {"uniform"})
    assert made.summary()["iteration"] == made.summary()["iterations"]


@pytest.mark.slow
def test_fictitious_play_by_networks_approaches_an_equilibrium(tmp_path):
    """NashConv of the average policy: 0.88, 0.78 and 0.84 for three seeds after 12 slices, and falling. With `start:
    last`, policies that have become deterministic do not change any more, and it rises to 1.85."""
    tree = load("configs/populations/goofspiel_self_play.yaml")
    plan, _ = train_tree(tmp_path, override(tree, ["population.slices=12", "backend={type: inline}"]))
    assert plan.nash_convs[12] < 1.0 and plan.nash_convs[12] < plan.nash_convs[6]


# the other plans with networks are fast tests
@pytest.mark.parametrize("plan", ["psro", *(pytest.param(p, marks=pytest.mark.slow) for p in PLANS if p != "psro")])
def test_every_plan_trains_language_agents(plan, tmp_path):
    """The same plans with LoRA adapters on one base that play poker in words: a member is a name and its weights."""
    env = {"type": "text_kuhn", "vocabulary": VOCABULARY}
    shape = {key: value for key, value in PLANS[plan].items() if key not in ("env_steps", "adaptive_games")} | {
        "train_steps": 2
    }
    made, run = train_tree(tmp_path, EXACT | {"env": env, "oracle": TALK, "population": {"type": plan, **shape}})
    learned = set(made.population.members) - {"uniform"}
    assert len(learned) >= 2
    assert all((run / "members" / name / "adapter_model.safetensors").exists() for name in learned)
    weights = {(run / "members" / name / "adapter_model.safetensors").read_bytes() for name in learned}
    assert len(weights) == len(learned)
    assert made.summary()["iteration"] == made.summary()["iterations"]


def test_language_members_start_from_a_saved_adapter(tmp_path):
    """At learning rate 0 each member has the weights of the folder that `path` names."""
    model = AutoModelForCausalLM.from_pretrained(resolve_base("tiny"))
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    policy = TALK["policy"] | {"lr": 0, "path": str(tmp_path / "saved"), "target_modules": ["q_proj"]}
    oracle = TALK | {"policy": policy, "imitation_steps": 0}
    plan = {"type": "self_play", "slices": 1, "train_steps": 1}
    env = {"type": "text_kuhn", "vocabulary": VOCABULARY}
    made, run = train_tree(tmp_path, EXACT | {"env": env, "oracle": oracle, "population": plan})
    start = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    for name in set(made.population.members) - {"uniform"}:
        weights = load_file(run / "members" / name / "adapter_model.safetensors")
        assert all(torch.equal(weights[key], start[key]) for key in start)


def test_psro_run_logs_its_results(tmp_path):
    plan, run = train_tree(tmp_path, EXACT)
    lines = [line for line in read_lines(run / "metrics.jsonl") if "nash_conv" in line]
    assert {line["iteration"]: line["nash_conv"] for line in lines} == plan.nash_convs
    table = (run / "payoffs.csv").read_text().splitlines()
    assert len(table) == 1 + 9 * 9 and table[0].startswith("members_0,members_1,mean_0,mean_1")
    tasks = read_lines(run / "tasks.jsonl")
    assert len(read_lines(run / "timings.jsonl")) == len(tasks)


def test_shared_population_plays_every_seat_if_the_plan_needs_it():
    assert build_population(check(EXACT, "symmetric=true")).plan.seats == ("agent", "agent")
    assert build_population(check(EXACT)).plan.population.players == ("player_0", "player_1")
    league = LEARNED | {"population": {"type": "league"}}
    assert build_population(check(league)).plan.population.players == ("agent",)


def test_config_survives_dump_and_parse():
    for tree in (EXACT, LEARNED):
        config = check(tree)
        assert check(parse(dump(config))) == config
        assert "env" not in parse(dump(config))["oracle"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["population.type=psr"], "did you mean psro"),
        (["population.iterations=0"], "population.iterations: should be greater"),
        (["population.meta_solver.type=cce", "population.pipeline_levels=2"], "set pipeline_levels: 1"),
        (["oracle.env={type: leduc_poker}"], "is set at the top"),
        (["oracle.type=nett"], "did you mean net"),
        (["oracle.type=language"], "set oracle.type to net or exact"),
        (["population.train_steps=3"], "oracle.type is exact: set population.env_steps"),
        (["oracle.type=language", "population.env_steps=500"], "set population.train_steps, or oracle.steps"),
        (["env.type=kuhn"], 'unknown env "kuhn"'),
        (["env.num_env=3"], "did you mean num_envs"),
        (["env={type: pong}"], "no rules here, so best responses cannot be computed"),
        (["env={type: pong, num_envs: 2}", "oracle={type: net}"], "set population.nash_conv_every: 0"),
        (["env={type: openspiel, game: 'goofspiel(num_cards=3)'}"], 'game: "turn_based_simultaneous_game(game=goofsp'),
        (["env={type: text_kuhn}"], "set oracle.type to language"),
        (["env.players=3"], "meta_solver nash is for two seats"),
        (["backend.address=auto"], "address is for backend type ray"),
        (["backend={type: local, placement: {train: {workers: 1}}}"], "placement is for backend type ray"),
    ],
)
def test_invalid_configs_are_refused_with_the_fix(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build_population(check(EXACT, *settings))


@pytest.mark.slow
def test_a_game_too_large_for_exact_values_is_refused_before_the_run_starts():
    big = ["env={type: openspiel, game: 'dark_hex(num_rows=3,num_cols=3)'}"]
    with pytest.raises(ValueError, match=r"more than 1,000,000 nodes.*population.nash_conv_every: 0"):
        build_population(check(EXACT, *big))
    build_population(check(LEARNED, *big, "population.nash_conv_every=0"))


# on the command line


def test_train_prints_progress_and_resumes(tmp_path):
    path = write_config(tmp_path, EXACT)
    done = invoke("train", path, "--root", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    out = plain(done.output)
    assert "kuhn_poker, psro by exact, 1 at once" in out and re.search(r"17 members, NashConv -?0\.0\d\d", out)
    again = invoke("train", "--resume", tmp_path / "runs/small")
    assert again.exit_code == 0 and "resuming after" in plain(again.output) and "17 members" in plain(again.output)


def test_backend_may_change_on_resume(tmp_path):
    path = write_config(tmp_path, EXACT)
    shown = invoke("train", path, "--backend", "local", "--workers", 3, "--dry-run")
    assert parse(shown.output)["backend"] == {
        "type": "local",
        "workers": 3,
        "tasks_at_once": 0,
        "torch_threads": 1,
        "address": None,
        "placement": {},
        "as_completed": False,
    }
    assert invoke("train", path, "--root", tmp_path / "runs").exit_code == 0
    on = invoke("train", "--resume", tmp_path / "runs/small", "--backend", "local", "--workers", 2)
    assert on.exit_code == 0 and "2 at once" in plain(on.output)
    assert parse((tmp_path / "runs/small/config.yaml").read_text())["backend"]["type"] == "inline"


@pytest.mark.parametrize("plan", ["psro", pytest.param("xdo", marks=pytest.mark.slow)])
def test_finished_run_is_extended(plan, tmp_path):
    """The extended run equals one that was as long from the start."""
    curves = {}
    for name, before in (("grown", 2), ("whole", 4)):
        tree = EXACT | {"name": name, "population": {"type": plan, "iterations": before}}
        assert invoke("train", write_config(tmp_path, tree), "--root", tmp_path).exit_code == 0
        done = invoke("train", "--resume", tmp_path / name, "--steps", "4")
        assert done.exit_code == 0, done.output
        curves[name] = [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "nash_conv" in line]
    assert len(curves["whole"]) == (5 if plan == "psro" else 4) and curves["grown"] == curves["whole"]


def test_league_cannot_be_extended(tmp_path):
    tree = LEARNED | {"population": {"type": "league"} | PLANS["league"]}
    assert invoke("train", write_config(tmp_path, tree), "--root", tmp_path).exit_code == 0
    refused = invoke("train", "--resume", tmp_path / "small", "--set", "population.slices=4")
    assert refused.exit_code == 2 and "this kind cannot be made longer" in plain(refused.stderr)
    refused = invoke("train", "--resume", tmp_path / "small", "--steps", "4")
    assert refused.exit_code == 2 and "--steps does not fit this run: its stages, or its" in plain(refused.stderr)


def test_placement_is_refused_for_other_runs(tmp_path):
    path = write_config(tmp_path, {"env": {"type": "kuhn_poker"}})
    done = invoke("train", path, "--workers", 2)
    assert done.exit_code == 2 and "place the tasks of a population" in plain(done.output)


def test_eval_refuses_populations(tmp_path):
    done = invoke("eval", write_config(tmp_path, EXACT))
    assert done.exit_code == 2 and "trains a population" in plain(done.output)


# kills


def start(folder, *arguments):
    return start_palestra("train", *arguments, cwd=folder, with_stderr=False)


def wait_for_tasks(process, run, tasks):
    """Returns once the run has done this many tasks."""
    while len(read_lines(run / "tasks.jsonl")) < tasks:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def assert_same(run, uninterrupted):
    for name in ("metrics.jsonl", "tasks.jsonl", "population.json"):
        assert (run / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert (run / "payoffs.csv").exists() == (uninterrupted / "payoffs.csv").exists()
    if (uninterrupted / "payoffs.csv").exists():
        assert (run / "payoffs.csv").read_bytes() == (uninterrupted / "payoffs.csv").read_bytes()
    ours, theirs = (
        {str(f.relative_to(r)): f for f in (r / "members").rglob("*") if f.is_file()} for r in (run, uninterrupted)
    )
    assert ours.keys() == theirs.keys()
    assert all(file.read_bytes() == theirs[name].read_bytes() for name, file in ours.items())


LONGER = {
    **LEARNED,
    "population": {"type": "psro", "iterations": 3, "env_steps": 160, "games_per_cell": 50, "adaptive_games": 50},
}


def kill(process, run, tasks):
    """SIGKILL once the run has done this many tasks."""
    wait_for_tasks(process, run, tasks)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run."""
    return train_tree(tmp_path_factory.mktemp("whole"), LONGER)[1]


@pytest.mark.timeout(900)
def test_resume_after_kill_is_bit_identical(uninterrupted, tmp_path):
    process, run = start(tmp_path, write_config(tmp_path, LONGER)), tmp_path / "runs/small"
    kill(process, run, 12)
    assert len(read_lines(run / "tasks.jsonl")) < len(read_lines(uninterrupted / "tasks.jsonl"))
    assert invoke("train", "--resume", run).exit_code == 0
    assert_same(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_after_kill_with_two_workers_equals_one_worker(uninterrupted, tmp_path):
    local = ("--backend", "local", "--workers", 2)
    process, run = start(tmp_path, write_config(tmp_path, LONGER), *local), tmp_path / "runs/small"
    kill(process, run, 9)
    process = start(tmp_path, "--resume", run, *local)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert_same(run, uninterrupted)


SHIPPED = DATA_DIR / "configs/populations"
SHORT = {
    "kuhn_psro": ["population.iterations=3", "population.env_steps=4000", "population.games_per_cell=200"],
    "kuhn_self_play": ["population.slices=3", "population.env_steps=4000"],
    "kuhn_league": ["population.slices=3", "population.env_steps=8192"],
    "rps_league": ["population.slices=3"],
    "kuhn_pbt": ["population.slices=3"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHORT)
def test_shipped_configs_with_two_workers_are_reproducible(name, tmp_path):
    for where in (["local", 2], ["local", 2], ["inline", 0]):
        tree = parse((SHIPPED / f"{name}.yaml").read_text())
        tree["backend"] = dict(zip(("type", "workers"), where, strict=True))
        train_tree(tmp_path / f"{where[0]}-{len(list(tmp_path.iterdir()))}", override(tree, SHORT[name]))
    first, *others = (next(root.iterdir()) for root in sorted(tmp_path.iterdir()))
    for other in others:
        assert_same(other, first)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resume_after_repeated_kills_is_bit_identical(uninterrupted, tmp_path):
    process, run = start(tmp_path, write_config(tmp_path, LONGER)), tmp_path / "runs/small"
    for tasks in (1, 5, 9, 13, 16):
        kill(process, run, tasks)
        process = start(tmp_path, "--resume", run)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert_same(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_with_two_workers_keeps_finished_tasks(tmp_path):
    tree = LONGER | {"backend": {"type": "local", "workers": 2}}
    process, run = start(tmp_path, write_config(tmp_path, tree)), tmp_path / "runs/small"
    kept = []
    for tasks in (1, 4, 8, 12):
        kill(process, run, tasks)
        kept.append((run / "tasks.jsonl").read_bytes().rpartition(b"\n")[0])
        process = start(tmp_path, "--resume", run)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    ended = (run / "tasks.jsonl").read_bytes()
    assert all(ended.startswith(lines) for lines in kept) and len(set(kept)) == len(kept)
    assert len(json.loads((run / "population.json").read_text())) == 1 + 2 * 3  # uniform, and two for each iteration
    out, _ = start(tmp_path, "--resume", run).communicate()
    assert "already complete; --set population.iterations=N extends it" in out
    assert (run / "tasks.jsonl").read_bytes() == ended


@pytest.mark.timeout(900)
def test_run_can_be_resumed_after_ctrl_c(uninterrupted, tmp_path):
    process, run = start(tmp_path, write_config(tmp_path, LONGER)), tmp_path / "runs/small"
    wait_for_tasks(process, run, 6)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 0 and "palestra train --resume runs/small" in out, out
    assert 6 <= len(read_lines(run / "tasks.jsonl")) < len(read_lines(uninterrupted / "tasks.jsonl"))
    assert invoke("train", "--resume", run).exit_code == 0
    assert_same(run, uninterrupted)
