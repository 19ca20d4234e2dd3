"""The API as the page calls it, over runs that palestra wrote."""

import asyncio
import io
import json
import time
import zipfile

import numpy as np
import pytest
from helpers.long_runs import write_long_run
from starlette.testclient import TestClient
from typer.testing import CliRunner

from palestra.cli.main import app as palestra
from palestra.core.failures import write_error_file
from palestra.core.types import Episode, Node
from palestra.dashboard.app import build_dashboard
from palestra.envs import make_env
from palestra.populations.payoffs import PayoffCell
from palestra.populations.task_json import TaskRecord
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.runs import Run, load_episodes, read_lines
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

HERE = "http://127.0.0.1"


def get(client, path, **params):
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- all runs


def test_run_list(client):
    found = get(client, "runs")
    assert [run["name"] for run in found["runs"]] == ["more", "seed-2", "seed-1", "seed-0"]  # newest first
    more = found["runs"][0]
    assert (more["env"], more["algorithm"], more["kind"], more["seed"]) == ("plan_path", "grpo", "language", 0)
    assert (more["done"], more["total"], more["status"], more["steps"]) == (30, 60, "stopped", 30)
    assert found["runs"][1]["status"] == "done" and "success" in found["runs"][1]["evals"]["dev"]


def test_failed_run_says_so_until_it_is_resumed(tmp_path):
    """Its error is in the list and at its head; a run that goes on is running, then done or stopped."""
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    with Run.create(tmp_path, "steps: 2\n", "broken") as run:
        run.log_metrics(0, "team", {"success": 0.0})
        assert get(client, "runs/broken")["status"] == "running"
        with pytest.raises(KeyError), write_error_file(run.path):
            raise KeyError("boom")
    for line in (get(client, "runs")["runs"][0], get(client, "runs/broken")):
        assert (line["status"], line["error"]) == ("failed", "KeyError: 'boom'")
    with Run.open(run.path) as again, write_error_file(run.path):
        assert get(client, "runs")["runs"][0]["status"] == "running"
        again.log_metrics(1, "team", {"success": 0.0})
    assert [get(client, "runs")["runs"][0][key] for key in ("status", "error")] == ["done", ""]


def test_run_list_has_headlines_and_alarms(tmp_path):
    with Run.create(tmp_path, "steps: 12\nenv: {type: guess}\n", "flat") as run:
        for step in range(12):
            run.log_metrics(step, "team", {"success": 0.0, "failed": 9.0, "episodes": 10.0})
        run.log_eval(11, "test", {"success": 0.53, "episodes": 300.0})
    (line,) = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs")["runs"]
    assert line["headline"] == "test 53.0%" and line["success_label"] == "training success"
    assert line["alarms"] == ["episodes fail"]


def test_failed_episode_has_its_traceback(tmp_path):
    episode = Episode("guess", 3, {"a": "a@0"}, [], error="KeyError: 'boom'", traceback="Traceback ...\n  in step")
    with Run.create(tmp_path, "steps: 1\n", "broken") as run:
        run.write_episodes(0, [episode])
    shown = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs/broken/episodes/1/0")
    assert shown["error"] == "KeyError: 'boom'" and shown["traceback"] == "Traceback ...\n  in step"


def test_locked_run_is_shown_as_running(client, root):
    with Run.open(root / "more"):
        assert {run["name"]: run["status"] for run in get(client, "runs")["runs"]}["more"] == "running"
        system = get(client, "runs/more/system")
        assert system["process"] and system["processes"][0]["memory"] > 0 and system["processes"][0]["cpu"] >= 0
        assert system["machine"]["cores"] >= 1 and system["machine"]["memory"] >= system["machine"]["available"] > 0
    assert get(client, "runs/more/system")["process"] is None


def test_config_diff_lists_differing_keys(client):
    rows = dict(get(client, "difference", run=["seed-0", "more"])["rows"])
    assert rows == {"name": ["seed-0", "more"], "steps": [24, 60]}


def test_config_diff_names_a_group_once_that_a_config_lacks_or_has_of_another_type(tmp_path):
    one = "lr: 1\nmirror: null\noptimizer: {type: muon, betas: {a: 0.9}}\nalgorithm: {type: ppo, clip: 0.2}\n"
    two = "lr: 2\nmirror: s3://b\nalgorithm: {type: grpo, clip: 0.1}\n"
    one, two = f"{one}net: {{width: 8}}\n", f"{two}net: {{width: 9}}\n"
    for name, text in {"one": one, "two": two}.items():
        Run.create(tmp_path, text, name).close()
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    assert dict(get(client, "difference", run=["one", "two"])["rows"]) == {
        "lr": [1, 2],
        "mirror": ["null", "s3://b"],
        "optimizer": [{"type": "muon", "betas": {"a": 0.9}}, None],
        "net.width": [8, 9],
        "algorithm": [{"type": "ppo", "clip": 0.2}, {"type": "grpo", "clip": 0.1}],
    }


# ---- curves


def test_curves_equal_the_log(client, root):
    (curve,) = [
        c for c in get(client, "curves", run="more", metric="metrics/entropy")["curves"] if c["name"] == "planner"
    ]
    logged = [line["entropy"] for line in read_lines(root / "more/metrics.jsonl") if line["policy"] == "planner"]
    assert curve["x"] == list(range(1, 31)) and curve["y"] == pytest.approx(logged, rel=1e-6)


def test_seeds_are_shown_as_a_band(client):
    names = [f"seed-{seed}" for seed in range(3)]
    asked = {"run": [*names, "more"], "metric": "metrics/success"}
    apart = get(client, "curves", **asked)["curves"]
    banded = get(client, "curves", **asked, seeds=True)["curves"]
    assert len(apart) == 4 and [len(curve["runs"]) for curve in banded] == [3, 1]
    each = np.array([curve["y"] for curve in apart[:3]])
    assert banded[0]["y"] == pytest.approx(each.mean(axis=0), rel=1e-5)
    assert banded[0]["low"] == pytest.approx(each.min(axis=0), rel=1e-5)
    assert banded[0]["high"] == pytest.approx(each.max(axis=0), rel=1e-5)


def test_equal_seeds_count_once_by_the_newest_run(tmp_path):
    for name, seed, success, created in (("b", 0, 0.5, 2), ("a", 0, 0.1, 1), ("c", 1, 0.7, 1), ("new", 0, None, 3)):
        with Run.create(tmp_path, f"name: {name}\nsteps: 1\nseed: {seed}\n", name) as run:
            if success is not None:
                run.log_eval(0, "test", {"success": success, "episodes": 10.0})
        meta = tmp_path / name / "meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"created": f"2026-01-0{created}T00:00:00"}))
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    (group,) = get(client, "runs")["groups"]
    assert len(group["runs"]) == 4 and group["result"].startswith("test 60.0% ")
    (band,) = get(client, "curves", run=["b", "a", "c"], metric="evals/success", seeds=True)["curves"]
    assert band["runs"] == ["b", "c"] and band["y"] == [pytest.approx(0.6)]


def test_curves_support_smoothing_ranges_and_time(client):
    asked = {"run": "more", "metric": "metrics/success"}
    (smooth,) = get(client, "curves", **asked, window=5)["curves"]
    assert np.std(np.diff(smooth["y"])) < np.std(np.diff(smooth["raw"]["y"]))
    (part,) = get(client, "curves", **asked, low=10, high=12)["curves"]
    assert part["x"] == [9, 10, 11, 12, 13] and part["to"] == 30
    (clock,) = get(client, "curves", **asked, x="seconds")["curves"]
    assert clock["x"] == [2.0 * n for n in range(1, 31)]  # rollout and training of all learners take a second each
    (evaluation,) = get(client, "curves", run="more", metric="evals/success", window=9)["curves"]
    assert evaluation["name"] == "dev" and "raw" not in evaluation


def test_run_details(client):
    run = get(client, "runs/more")
    assert "entropy" in run["metrics"]["metrics"]["planner"] and run["has_episodes"] and not run["has_population"]
    assert run["phases"] == ["rollout_s", "train_s"]
    assert run["left"] == pytest.approx(2.0 * 30)  # half of 60 steps, at two seconds each


# ---- episodes


def wait_for_index(client, path):
    """The first page once every file of the run is indexed, which may take a while on a busy machine."""
    while (page := get(client, path))["unread"]:
        time.sleep(0.05)
    return page


def test_episodes_are_filtered_sorted_and_paged(client):
    path = "runs/seed-0/episodes"
    whole = wait_for_index(client, path)
    assert whole["of"] == whole["fit"] == 96 and whole["unread"] == 0 and len(whole["rows"]) == 50
    assert sum(whole["spread"]["counts"]) == 96
    rows = whole["rows"] + get(client, path, first=50)["rows"]
    assert len({(row["step"], row["episode"]) for row in rows}) == 96

    def steps(**query):
        return [(row["step"], row["episode"]) for row in get(client, path, count=200, **query)["rows"]]

    def those(test):
        return sorted((row["step"], row["episode"]) for row in rows if test(row))

    assert sorted(steps(outcome="success")) == those(lambda row: row["success"] == 1)
    assert sorted(steps(outcome="failure")) == those(lambda row: row["success"] == 0)
    assert steps(outcome="error") == []
    for typo in ({"outcome": "won"}, {"sort": "date"}):
        answer = client.get("/api/runs/more/episodes", params=typo)
        assert answer.status_code == 400 and next(iter(typo)) in answer.json()["error"]
    assert sorted(steps(least=1.0, most=1.5)) == those(lambda row: 1 <= row["total"] <= 1.5)
    assert sorted(steps(seat="planner", least=0.5)) == those(lambda row: row["returns"]["planner"] >= 0.5)
    assert sorted(steps(policy="planner@7")) == those(lambda row: row["step"] == 8)
    assert sorted(steps(seat="executor", policy="planner")) == []
    assert sorted(steps(step_from=3, step_to=4)) == those(lambda row: 3 <= row["step"] <= 4)
    assert steps(turns_from=3) == [] and len(steps(turns_to=2)) == 96
    assert sorted(steps(invalid=True)) == those(lambda row: row["invalid"] > 0)
    best = get(client, path, sort="total", count=200)["rows"]
    assert [row["total"] for row in best] == sorted((row["total"] for row in rows), reverse=True)


def test_text_search_finds_episodes(client, root):
    path = "runs/more/episodes"
    wait_for_index(client, path)
    assert get(client, path, text="R3 C0", count=10)["rows"][0]["step"] == 30  # case does not matter
    none = get(client, path, text="nobody said this")
    assert none["rows"] == [] and none["searched"] == none["fit"] == 60
    more = get(client, path, text="r3 c0", count=7)
    rest = get(client, path, text="r3 c0", count=200, before=more["searched"])
    assert len(more["rows"]) == 7 and len(rest["rows"]) == 53


def test_episode_tree_with_texts_and_tokens(client):
    path = "runs/seed-0/episodes/6/2"
    tree = get(client, path)
    assert tree["seats"] == {"planner": "planner@5", "executor": "executor@5"}
    assert [(n["id"], n["parent"], n["chosen"]) for n in tree["nodes"]] == [
        (0, None, True),
        (1, None, False),
        (2, 0, True),
        (3, 0, False),
    ]
    line = get(client, f"{path}/words/3")["line"]
    assert [joint["node"] for joint in line] == [0, 3]
    assert line[1]["turns"][0]["answer"] == "r3 c0 r3 c3 r3 c3" and line[1]["turns"][0]["seat"] == "executor"
    (said,) = get(client, f"{path}/tokens/3")["said"]
    assert len(said["ids"]) == len(said["texts"]) == len(said["logprobs"]) == 6 and max(said["logprobs"]) <= 0


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("runs/none", 404, "no run"),
        ("runs/seed-0/episodes/99/0", 404, "no episodes"),
        ("runs/seed-0/episodes/1/99", 404, "no episode 99"),
        ("runs/seed-0/episodes/1/0/words/77", 404, "no node 77"),
        ("runs/seed-0/episodes?least=much", 400, "least"),
        ("runs/seed-0/episodes?bogus=1", 400, "unknown key bogus"),
        ("curves?run=seed-0&metric=secrets/x", 400, "one of the logs"),
        ("curves?run=seed-0&metric=metrics/kl&x=moon", 400, "the axis is one of"),
        ("curves?run=none&metric=metrics/kl", 404, "no run"),
        ("runs/seed-0/population", 400, "no finished task of a population"),
        ("runs/seed-0/checkpoints/3/planner.zip", 404, "no checkpoint"),
        ("runs/seed-0/members/red.zip", 404, "no weights"),
        ("events?run=none", 404, "no run"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_missing_resources_are_named(client, path, status, says):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status and says in answer.text


def test_unchanged_response_is_304(client):
    first = client.get("/api/runs/seed-0")
    again = client.get("/api/runs/seed-0", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and again.headers["etag"] == first.headers["etag"]


def test_api_follows_a_growing_run(tmp_path):
    path = write_long_run(tmp_path, "live", steps=12, total=20)
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    assert get(client, "runs/live")["done"] == 12 and get(client, "runs/live/alarms")["alarms"] == []
    with Run.open(path) as run:
        for step in range(12, 40):
            run.log_metrics(step, "planner", {"entropy": 0.01})
        run.log_metrics(12, "team", {"success": 0.5})
    run = get(client, "runs/live")
    assert run["done"] == 13
    assert [(alarm["name"], alarm["policy"]) for alarm in run["alarms"]] == [("entropy collapse", "planner")]


# ---- agents and populations


def test_checkpoint_download_omits_training_state(tmp_path):
    path = write_long_run(tmp_path, "kept", steps=1)

    def write(folder):
        (folder / "red").mkdir()
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            (folder / "red" / name).write_bytes(b"w" * 3_000_000)
        (folder / "red" / "member.json").write_text('{"version": 12}')

    with Run.open(path) as run:
        run.checkpoint(0, write, {"red": "red"})
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    (red,) = [policy for policy in get(client, "runs/kept/agents")["policies"] if policy["checkpoints"]]
    assert red["name"] == "red" and red["checkpoints"][0]["version"] == 12
    answer = client.get("/api/runs/kept/checkpoints/1/red.zip")
    assert answer.headers["content-disposition"] == 'attachment; filename="red-step-1.zip"'
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    assert archive.namelist() == ["red/adapter_model.safetensors", "red/member.json"] and archive.testzip() is None


@pytest.mark.parametrize(
    ("seats", "shown"),
    [
        ("{}", {"planner": ["planner"], "default": ["all"]}),
        ("{planner: default}", {"planner": [], "default": ["planner"]}),
        ("{executor: planner}", {"planner": ["executor"], "default": ["all others"]}),
    ],
)
def test_policies_are_shown_with_their_seats(tmp_path, seats, shown):
    config = f"name: x\nsteps: 1\npolicies: {{planner: {{type: lora}}, default: {{type: lora}}}}\nseats: {seats}\n"
    with Run.create(tmp_path, config, "x"):
        pass
    policies = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs/x/agents")["policies"]
    assert {policy["name"]: policy["seats"] for policy in policies} == shown


def test_cyclic_population_raises_an_alarm(tmp_path):
    """Rock, paper and scissors, as the scheduler records it."""
    names = ["rock", "paper", "scissors"]

    def cell(wins, losses):
        mean, games = (wins - losses) / (wins + losses), wins + losses
        return PayoffCell(games, (mean, -mean), (9.0, 9.0), (wins, losses))

    with Run.create(tmp_path, "population: {type: league}\nenv: {type: matrix}\n", "rps") as run:
        opponents = Opponents({"agent": {"rock": 1.0}})
        for number, name in enumerate(names):
            task = TrainTask(
                f"train/{name}",
                player="agent",
                learner="main_0",
                opponents=opponents,
                self_play=0.5,
                output_member=name,
            )
            record = TaskRecord(number, task, {}, TrainResult(env_steps=10, mean_return=0.1))
            run.append_line("tasks.jsonl", record.to_json())
            run.log_timings(number, "team", {"task": f"train/{name}", "seconds": 2.0, "elapsed_s": 2.0 * number + 2})
        cells = (("rock", "paper"), ("paper", "scissors"), ("scissors", "rock"))
        play = PlayTask("play", cells=cells, games_per_cell=100)
        run.append_line("tasks.jsonl", TaskRecord(3, play, {}, PlayResult((cell(10, 90),) * 3)).to_json())
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    page = get(client, "runs/rps/population")
    assert page["payoffs"]["mean"][0] == [None, -0.8, 0.8] and page["payoffs"]["rows"] == names
    edges = {names[one]: names[best] for one, best in page["responses"]["edges"]}
    assert edges == {"rock": "paper", "paper": "scissors", "scissors": "rock"}
    assert [row["elo"] for row in page["ratings"]["rows"]] == pytest.approx([1200] * 3)
    assert [(one["member"], one["from"]) for one in page["timeline"]] == [("rock", 0), ("paper", 2), ("scissors", 4)]
    assert page["mixtures"][0]["shares"][0] == [0.5, 0.5]  # itself, and rock
    (alarm,) = get(client, "runs/rps/alarms")["alarms"]
    assert alarm["name"] == "cyclic population" and "rock" in alarm["message"]


def test_foreign_files_are_reported(tmp_path):
    with Run.create(tmp_path, "population: {type: psro}\n", "odd") as run:
        run.append_line("tasks.jsonl", {"kind": "train"})
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    answer = client.get("/api/runs/odd/population")
    assert answer.status_code == 422 and 'tasks.jsonl, line 1: key "number" is missing' in answer.json()["error"]
    assert client.get("/api/runs").json()["of"] == 1


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    """Double oracle on Kuhn poker, with exact values."""
    root = tmp_path_factory.mktemp("populations")
    config = root / "kuhn.yaml"
    config.write_text(
        "name: kuhn\nenv: {type: kuhn_poker}\npopulation: {type: psro, iterations: 4, meta_solver: {type: nash}}\n"
        "oracle: {type: exact}\nbackend: {type: inline}\n"
    )
    done = CliRunner().invoke(palestra, ["train", str(config), "--root", str(root)])
    assert done.exit_code == 0, done.output
    return root


@pytest.mark.slow
def test_population_data(population):
    client = TestClient(build_dashboard(population), base_url=HERE)
    (run,) = get(client, "runs")["runs"]
    assert run["kind"] == "population" and (run["done"], run["total"], run["status"]) == (4, 4, "done")
    page = get(client, "runs/kuhn/population")
    assert page["payoffs"]["rows"][0] == "uniform" and page["payoffs"]["mean"][0][0] == 0.125
    assert page["distance"][0]["nash_conv"] == pytest.approx(11 / 12)
    assert [mixture["player"] for mixture in page["mixtures"]] == ["player_0", "player_1"]
    for mixture in page["mixtures"]:
        assert sum(mixture["shares"][-1]) == pytest.approx(1)
    assert {stretch["learner"] for stretch in page["timeline"]} == {"player_0", "player_1"}
    assert len(page["responses"]["names"]) == sum(page["payoffs"]["of"])
    few = get(client, "runs/kuhn/population", last=2)
    assert len(few["payoffs"]["rows"]) == 2 and few["payoffs"]["of"] == page["payoffs"]["of"]
    assert all(max(edge) < len(few["responses"]["names"]) for edge in few["responses"]["edges"])
    members = get(client, "runs/kuhn/agents")["members"]
    assert members[0]["name"] == "uniform" and members[1]["bytes"] > 0
    archive = zipfile.ZipFile(io.BytesIO(client.get(f"/api/runs/kuhn/members/{members[1]['name']}.zip").content))
    assert archive.namelist() and archive.testzip() is None


# ---- evaluations, instance by instance


def test_agents_have_the_outcome_of_each_held_out_instance_and_the_best_checkpoint(tmp_path):
    config = "steps: 4\npolicies: {a: {type: lora, base: tiny}}\nevals: {test: {episodes: 4}}\n"
    with Run.create(tmp_path, config, "learned") as run:
        for step, outcomes in ((-1, "1000"), (0, "1101"), (1, "1010")):
            solved = outcomes.count("1") / 4
            run.log_eval(step, "test", {"success": solved, "episodes": 4.0, "outcomes": outcomes})
            if step >= 0:
                run.checkpoint(step, lambda folder: (folder / "a").mkdir(), {"a": "a"}, keep=True)
    found = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs/learned/agents")
    (evaluation,) = found["evals"]
    assert [line["outcomes"] for line in evaluation["lines"]] == ["1000", "1101", "1010"]
    assert [line["step"] for line in evaluation["lines"]] == [0, 1, 2]  # steps done
    low, high = evaluation["lines"][1]["interval"]
    assert 0.3 < low < 0.75 < high < 0.96  # Wilson's interval of 3 of 4
    newest, older = found["policies"][0]["checkpoints"]
    assert (older["step"], newest["step"]) == (1, 2)
    assert (older["best"], older["result"]["success"]) == (True, 0.75) and found["leading"] == "test"
    assert (newest["best"], newest["result"]["success"]) == (False, 0.5)


def test_opponents_have_their_own_success_and_their_own_best_checkpoint(tmp_path):
    policies = "{a: {type: lora, base: tiny}, b: {type: lora, base: tiny}}"
    config = f"steps: 4\npolicies: {policies}\nevals: {{test: {{episodes: 4}}}}\n"
    with Run.create(tmp_path, config, "learned") as run:
        for step, won in ((0, 0.75), (1, 0.25)):
            run.log_eval(step, "test", {"success.a": won, "success.b": 1 - won, "return": 0.0, "episodes": 4.0})
            run.checkpoint(
                step, lambda folder: [(folder / name).mkdir() for name in "ab"], {"a": "a", "b": "b"}, keep=True
            )
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    best = {
        policy["name"]: [one["step"] for one in policy["checkpoints"] if one["best"]]
        for policy in get(client, "runs/learned/agents")["policies"]
    }
    assert best["a"] != best["b"] and {len(steps) for steps in best.values()} == {1}
    (run_line,) = get(client, "runs")["runs"]
    assert run_line["headline"] == "test a 25.0% b 75.0%"
    shown = run_line["evals"]["test"]
    assert shown["successes"] == {"a": 0.25, "b": 0.75} and "return" not in shown and shown["interval"] is None


def test_smoothing_keeps_the_first_point(client):
    (curve,) = get(client, "curves", run="more", metric="metrics/success", window=9)["curves"]
    assert curve["y"][0] == curve["raw"]["y"][0] and curve["y"][1:] != curve["raw"]["y"][1:]


# ---- alarms


def test_alarms_list_the_rules_that_do_not_fire_with_remedies(tmp_path):
    for lines, judged in ((7, False), (8, True)):
        with Run.create(tmp_path, "steps: 12\nenv: {type: guess}\n", f"run-{lines}") as run:
            for step in range(lines):
                run.log_metrics(step, "team", {"success": 0.5, "failed": 0.0, "episodes": 10.0})
        found = get(TestClient(build_dashboard(tmp_path), base_url=HERE), f"runs/run-{lines}/alarms")
        assert found["alarms"] == [] and len(found["rules"]) == 12
        assert all(rule["rule"] and rule["remedy"] for rule in found["rules"])
        uncounted = ("mirror is behind", "held-out success fell")
        by_metrics = [rule for rule in found["rules"] if rule["name"] not in uncounted]
        assert all(rule["is_judged"] is judged for rule in by_metrics)


def test_population_has_the_alarm_of_its_mirror(tmp_path):
    with Run.create(tmp_path, "population: {type: psro}\n", "league") as run:
        (run.path / "tasks.jsonl").touch()
        (run.path / "mirror.json").write_text('{"failing_since": "2026-11-28T10:00:00", "error": "it is full"}')
    found = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs/league/alarms")
    assert [alarm["name"] for alarm in found["alarms"]] == ["mirror is behind"]


# ---- one episode


def test_episode_names_its_renderer_and_the_reason_of_an_invalid_answer(tmp_path):
    policy = ScriptedPolicy(["nonsense"])
    runner = EpisodeRunner(lambda: make_env("plan_path"), "train")
    spec = EpisodeSpec(0, {"planner": policy, "executor": policy}, 0)
    episode = asyncio.run(runner.play(spec, Branching()))
    with Run.create(tmp_path, "steps: 1\n", "walls") as run:
        assert load_episodes(run.write_episodes(0, [episode]))[0].picture == "grid"
    shown = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs/walls/episodes/1/0", line="played")
    assert shown["picture"] == "grid"
    (planned,) = shown["line"][0]["turns"]
    assert planned["invalid"] is True and planned["why_invalid"].startswith("it could not be read. A plan is")
    assert "invalid" not in shown["line"][0]["info"] and shown["line"][0]["info"]["success"] is False


def test_metrics_of_runs_have_titles_and_units(client):
    catalog = get(client, "metrics")
    named = {(each["log"], each["name"]) for each in catalog["metrics"]}
    assert len(named) == len(catalog["metrics"])
    assert all(each["title"] and each["unit"] and each["panel"] for each in catalog["metrics"])
    for run in get(client, "runs")["runs"]:
        for keys in get(client, f"runs/{run['name']}")["metrics"]["metrics"].values():
            assert {"success", "entropy"} & set(keys) <= {name for _, name in named}
            assert not {name for log, name in named if log == "metrics"} & set(catalog["uncharted"])


def test_held_out_episodes_are_shown_by_instance_and_steps_done(tmp_path):
    episodes = [
        Episode("guess", seed, {"a": "a@1"}, [Node(0, None, 0, {"a": "what?"}, {}, {"a": 1.0}, done=True)])
        for seed in (5, 6)
    ]
    with Run.create(tmp_path, "steps: 4\nevals: {dev/1: {episodes: 2}}\n", "kept") as run:
        for step in (-1, 3):
            run.log_eval(step, "dev/1", {"success": 0.5, "episodes": 2.0, "outcomes": "10"})
        run.write_eval_episodes(-1, "dev/1", episodes)
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    (evaluation,) = get(client, "runs/kept/agents")["evals"]
    assert [bool(line["recorded"]) for line in evaluation["lines"]] == [True, False]
    assert get(client, "runs/kept/episodes/0/1", eval="dev/1", line="played")["seed"] == 6
    assert get(client, "runs/kept/episodes/0/1/words/0", eval="dev/1")["line"][0]["turns"][0]["observation"] == "what?"
    for path in ("4/1?eval=dev/1", "0/2?eval=dev/1", "0/1?eval=..", "0/1"):
        assert client.get(f"/api/runs/kept/episodes/{path}").status_code == 404


# ---- the list: settings as columns, seeds as groups


def test_settings_are_columns_of_the_list(tmp_path):
    for name, rates in {"one": (0.1, 0.2), "two": (0.1, 0.1)}.items():
        policies = ", ".join(f"{seat}: {{lr: {rate}, rank: 8}}" for seat, rate in zip("ab", rates, strict=True))
        Run.create(tmp_path, f"name: {name}\nsteps: 1\npolicies: {{{policies}}}\n", name).close()
    client = TestClient(build_dashboard(tmp_path), base_url=HERE)
    asked = get(client, "runs", column=["lr", "b.lr", "rank", "clip"], keys="true")
    settings = {line["name"]: line["settings"] for line in asked["runs"]}
    assert settings["one"] == {"lr": "0.1, 0.2", "b.lr": "0.2", "rank": "8", "clip": ""}
    assert settings["two"] == {"lr": "0.1", "b.lr": "0.1", "rank": "8", "clip": ""}
    assert asked["keys"] == ["policies.b.lr"] and get(client, "runs")["keys"] == []


def test_seeds_are_a_group_with_mean_and_interval(tmp_path):
    for name, lr, seed, success in (("a", 1, 0, 0.5), ("b", 1, 1, 0.7), ("c", 2, 0, 0.9)):
        config = f"name: {name}\nsteps: 1\nlr: {lr}\nseed: {seed}\ntags: [{name}]\n"
        with Run.create(tmp_path, config, name) as run:
            run.log_eval(0, "test", {"success": success, "episodes": 10.0})
    found = get(TestClient(build_dashboard(tmp_path), base_url=HERE), "runs")
    (group,) = found["groups"]
    assert sorted(group["runs"]) == ["a", "b"]
    assert group["result"] == "test 60.0% [0.0%, 100.0%]"  # 0.6 ± 12.7 x 0.1 (Student's t of one degree of freedom)
    assert {line["name"]: line["tags"] for line in found["runs"]} == {"a": ["a"], "b": ["b"], "c": ["c"]}
