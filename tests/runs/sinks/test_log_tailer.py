"""A run's metrics in TensorBoard, read back by its own reader, and independence of the run from its sinks."""

import json
import threading

import pytest
from helpers.command_line import palestra, refused
from helpers.trained import lines, two_agents
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from palestra.core.config import validate
from palestra.core.http.retry import RetryPolicy
from palestra.runs import Run
from palestra.runs.sinks.base import SinksConfig, metrics_of_line
from palestra.runs.sinks.log_tailer import follow_run, read_new_lines

LINE = {"loss": 0.5, "note": "text", "nothing": None}


def read_scalars(folder):
    """Every scalar in a folder of event files: {name: [(step, value)]}."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def a_run(root, steps=3):
    with Run.create(root, "name: a\nsteps: 3\n", "a", {"seed": 0}) as run:
        run.log_eval(-1, "test", {"success": 0.25, "returns": {"x": 1.0}})
        for step in range(steps):
            run.log_metrics(step, "planner", LINE | {"loss": step / 4})
            run.log_timings(step, "team", {"rollout_s": 2.0})
    return run.path


def config(*sinks):
    return validate(SinksConfig, {"sinks": list(sinks)}).sinks


def test_metrics_of_log_lines():
    assert metrics_of_line("metrics.jsonl", {"step": 4, "policy": "p", **LINE}) == (5, {"p/loss": 0.5})
    assert metrics_of_line("evals.jsonl", {"step": -1, "name": "t", "returns": {"a": 1}}) == (
        0,
        {"eval/t/returns/a": 1.0},
    )


def test_existing_run_is_sent_once(tmp_path):
    path = a_run(tmp_path)
    assert "7 lines sent" in palestra("sync", path, "--to", "tensorboard")
    assert "0 lines sent" in palestra("sync", path, "--to", "tensorboard")
    sent = read_scalars(path / "sinks" / "tensorboard")
    assert sent.pop("time/team/cpu_percent") and sent.pop("time/team/rss_gib")
    assert sent == {
        "planner/loss": [(1, 0.0), (2, 0.25), (3, 0.5)],
        "time/team/rollout_s": [(1, 2.0), (2, 2.0), (3, 2.0)],
        "eval/test/success": [(0, 0.25)],
        "eval/test/returns/x": [(0, 1.0)],
    }
    with Run.open(path) as run:
        run.log_eval(1, "late", {"success": 1.0})
    assert "1 lines sent" in palestra("sync", path, "--to", "tensorboard")
    assert len(read_scalars(path / "sinks" / "tensorboard")["planner/loss"]) == 3


def test_rewritten_steps_are_sent_again_and_replaced(tmp_path):
    path = a_run(tmp_path)
    palestra("sync", path, "--to", "tensorboard")
    kept = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(kept[0])
    palestra("sync", path, "--to", "tensorboard")
    (path / "metrics.jsonl").write_bytes(b"".join(kept[:2]))
    palestra("sync", path, "--to", "tensorboard")
    assert read_scalars(path / "sinks" / "tensorboard")["planner/loss"] == [(1, 0.0), (2, 0.25)]


def test_partial_lines_and_truncation_are_handled(tmp_path):
    log = tmp_path / "metrics.jsonl"
    offsets = {}

    def new_steps():
        return [line["step"] for _, line in read_new_lines(tmp_path, offsets)]

    assert new_steps() == []
    log.write_bytes(b'{"step": 0, "policy": "p"}\n{"step": 1, "po')
    assert new_steps() == [0]
    with open(log, "ab") as file:
        file.write(b'licy": "p"}\n')
    assert new_steps() == [1]
    log.write_bytes(b'{"step": 0, "policy": "p"}\n')
    assert new_steps() == []
    with open(log, "ab") as file:
        file.write(b'{"step": 1}\n')
    assert new_steps() == [1]
    offsets["metrics.jsonl"] = 5  # in the middle of a line
    assert new_steps() == [1]


def test_failing_sink_warns_once_without_stopping_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.runs.sinks.log_tailer.POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr("palestra.runs.sinks.log_tailer.RETRY", RetryPolicy(0.04, 0.04))
    path, messages, looked = a_run(tmp_path), [], threading.Event()
    (tmp_path / "file").write_text("in the way")
    with follow_run(path, config({"type": "tensorboard", "folder": str(tmp_path / "file")}), messages.append):
        looked.wait(0.3)
    (line,) = messages
    assert "the sink tensorboard fails, training continues without it" in line
    assert "7 lines sent" in palestra("sync", path, "--to", "tensorboard")  # no line was lost


def test_concurrent_senders_are_refused(tmp_path):
    path = a_run(tmp_path)
    with follow_run(path, config("tensorboard"), print):
        for _ in range(200):
            if (path / "sinks" / "tensorboard" / "sent.json").exists():
                break
            threading.Event().wait(0.02)
        assert "is writing the sink tensorboard" in refused("sync", path, "--to", "tensorboard")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tensorbord"], "did you mean tensorboard?"),
        (["--to", "tensorboard", "--set", "foldr=x"], "did you mean folder?"),
    ],
)
def test_invalid_options_are_refused_with_the_reason(tmp_path, arguments, message):
    assert message in refused("sync", a_run(tmp_path), *arguments)


def test_folder_that_is_not_a_run_is_refused(tmp_path):
    assert "is not a run" in refused("sync", tmp_path, "--to", "tensorboard")


@pytest.mark.slow
def test_training_sends_metrics_live_also_after_resume(base, tmp_path):
    path = two_agents(base, tmp_path, sinks=["tensorboard"])
    whole = read_scalars(path / "sinks" / "tensorboard")
    for name in ("guide", "walker"):
        expected = [
            (line["step"] + 1, line["tokens"]) for line in lines(path / "metrics.jsonl") if line["policy"] == name
        ]
        assert whole[f"{name}/tokens"] == [(step, pytest.approx(count, rel=1e-5)) for step, count in expected]
    assert [step for step, _ in whole["eval/dev/returns/guide"]] == [0, 3]
    palestra("train", "--resume", path, "--set", "steps=5")
    again = read_scalars(path / "sinks" / "tensorboard")
    assert [step for step, _ in again["guide/tokens"]] == [1, 2, 3, 4, 5]
    sent = json.loads((path / "sinks" / "tensorboard" / "sent.json").read_text())
    assert sent["metrics.jsonl"] == (path / "metrics.jsonl").stat().st_size
