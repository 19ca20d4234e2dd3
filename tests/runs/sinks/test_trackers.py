"""Weights & Biases, MLflow and Trackio, offline, read back from their files. Run by `make test-sinks`."""

import json
import sqlite3
import struct
import time

import pytest
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.runs import Run

pytestmark = pytest.mark.peers

LOSSES = [(1, 0.0), (2, 0.25), (3, 0.5)]


@pytest.fixture
def path(tmp_path):
    """A run of three steps with an evaluation before them."""
    with Run.create(tmp_path, "name: a\npolicies: {planner: {lr: 1e-3}}\n", "a", {"seed": 0}) as run:
        run.log_eval(-1, "test", {"success": 0.25})
        for step, loss in LOSSES:
            run.log_metrics(step - 1, "planner", {"loss": loss})
    return run.path


def sync(path, kind, *settings):
    """Sends the run, one more line, and the rest; no line is sent twice."""
    options = [part for setting in settings for part in ("--set", setting)]
    for count in (4, 0):
        done = CliRunner().invoke(app, ["sync", str(path), "--to", kind, *options], catch_exceptions=False)
        assert done.exit_code == 0 and f"{count} lines sent" in done.output, done.output
    with Run.open(path) as run:
        run.log_metrics(3, "planner", {"loss": 0.75})
    assert CliRunner().invoke(app, ["sync", str(path), "--to", kind, *options]).exit_code == 0


def test_wandb_offline(path):
    pytest.importorskip("wandb", reason="pip install 'palestra[wandb]', or make test-sinks")
    sync(path, "wandb", "mode=offline", "project=games")
    until = time.monotonic() + 20
    while len(rows := history(records := wandb_records(path))) < 5 and time.monotonic() < until:
        time.sleep(0.2)  # wandb writes in its own process, which may end after the run
    seen = [(row["training_step"], row["planner/loss"]) for row in rows if "planner/loss" in row]
    assert seen == [*LOSSES, (4, 0.75)]
    assert [(row["training_step"], row["eval/test/success"]) for row in rows if "eval/test/success" in row] == [
        (0, 0.25)
    ]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    # resumed, not started again
    assert {run.project for run in runs} == {"games"} and len({run.run_id for run in runs}) == 1
    metrics = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "training_step" for metric in metrics)


def history(records):
    """The metrics of each call, by name."""
    return [
        {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_records(path):
    """The records of all wandb files of a run."""
    files = sorted(path.glob("sinks/wandb/wandb/offline-run-*/*.wandb"))
    return [record for file in files for record in read_records(file)]


def read_records(file):
    """The records of one file: LevelDB's log format, in blocks of 32 KiB, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several fragments
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_on_a_local_database(path, tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'palestra[mlflow]', or make test-sinks")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sync(path, "mlflow", f"uri={uri}", "experiment=games")
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("games").experiment_id])
    assert run.info.run_name == "a" and run.info.status == "FINISHED"
    assert run.data.params["policies.planner.lr"] == "0.001"
    seen = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "planner/loss")]
    assert seen == [*LOSSES, (4, 0.75)]
    assert run.data.metrics["eval/test/success"] == 0.25


def test_trackio_on_a_local_database(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'palestra[trackio]', or make test-sinks")
    sync(path, "trackio", "project=games")
    with sqlite3.connect(tmp_path / "trackio" / "games.db") as database:
        rows = [(name, step, json.loads(metrics)) for name, step, metrics in
                database.execute("select run_name, step, metrics from metrics order by id")]  # fmt: skip
    assert len({name for name, _, _ in rows}) == 1
    seen = [(step, metrics["planner/loss"]) for _, step, metrics in rows if "planner/loss" in metrics]
    assert seen == [*LOSSES, (4, 0.75)]
