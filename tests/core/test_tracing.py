"""Traces: one trace follows an episode from its group or task to the weight update, over all processes."""

import asyncio
import contextvars
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import ROOT, palestra, refused
from helpers.otlp_collector import Collector, Span, collector

from palestra.core import tracing
from palestra.core.tracing import continue_trace, end_shared_span, shared_span, span, trace_context, tracing_to
from palestra.parallel.task_queue import TaskQueue
from palestra.parallel.tasks import Task

needs_sdk = pytest.mark.usefixtures("sdk")


@pytest.fixture(scope="module")
def sdk() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs pip install 'palestra[otel]'")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'palestra[otel]'")


def assert_whole(spans: list[Span]) -> None:
    """Asserts that a trace has one root span, and that every other span has a parent in it and starts after the
    parent."""
    by_id = {span.id: span for span in spans}
    assert [span.name for span in spans if not span.parent] in (["step"], ["task"])
    for each in spans:
        assert not each.parent or by_id[each.parent].start_ns <= each.start_ns <= each.end_ns


# ---- tracing off


def test_nothing_is_created_or_imported_while_tracing_is_off() -> None:
    assert span("step", step=1) is shared_span("a", "b") is continue_trace(None) is span("other")
    assert trace_context() is None
    queue, task = TaskQueue(), Task("play/0")
    queue.add(task)
    assert queue.traces == {}
    code = (
        "import sys; from palestra.core.tracing import span, trace_context\n"
        "import palestra.api.run, palestra.text.training.trainer\n"
        "with span('step'): assert trace_context() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_span_costs_less_than_a_microsecond_while_tracing_is_off() -> None:
    """The best of many rounds; an `if` and a shared context take a tenth of that on an idle machine."""

    def one_round() -> float:
        start = time.perf_counter()
        for _ in range(1000):
            with span("step"):
                pass
        return (time.perf_counter() - start) / 1000

    assert min(one_round() for _ in range(50)) < 1e-6


def test_wrong_urls_and_a_missing_sdk_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='"localhost:4318" must be an address like http'), tracing_to("localhost:4318"):
        raise AssertionError
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = "configs/games/kuhn_ppo.yaml"
    assert "pip install 'palestra[otel]'" in refused("train", config, "--root", tmp_path, "--traces", "http://x:1")
    assert not list(tmp_path.iterdir()) and not tracing.is_tracing()


# ---- spans


@needs_sdk
def test_contexts_cross_processes_threads_and_coroutines() -> None:
    with collector() as found, tracing_to(found.url):
        with span("first", number=1):
            carrier = json.loads(json.dumps(trace_context()))
            with asyncio.Runner() as runner:
                runner.run(within(), context=contextvars.copy_context())
        with continue_trace(carrier), span("beside"), pytest.raises(ValueError), span("wrong"):
            raise ValueError("so")
    assert trace_context() is None and not tracing.is_tracing()
    (first,) = found.named("first", number=1)
    assert {each.name: each.parent for each in found.trace(first)} == {
        "first": "",
        "within": first.id,
        "beside": first.id,
        "wrong": found.named("beside")[0].id,
    }


async def within() -> None:
    with span("within"):
        await asyncio.sleep(0)


@needs_sdk
def test_shared_span_starts_early_and_has_no_parent() -> None:
    """Like the spans of steps whose episodes are played ahead."""
    with collector() as found, tracing_to(found.url):
        with shared_span("step 0", "step", step=0):
            with shared_span("step 1", "step", step=1), span("episode"):
                pass
            with span("update"):
                pass
        end_shared_span("step 0")
        with shared_span("step 1", "step", step=1), span("update"):
            pass  # it is ended together with tracing
    steps = found.named("step")
    assert [(step.attributes["step"], step.parent) for step in steps] == [(0, ""), (1, "")]
    assert sorted(span.name for span in found.trace(steps[0])) == ["step", "update"]
    assert sorted(span.name for span in found.trace(steps[1])) == ["episode", "step", "update"]
    assert steps[1].start_ns < steps[0].end_ns < steps[1].end_ns


@needs_sdk
def test_unreachable_collector_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last spans have a time limit, and each kind of warning is printed once."""
    monkeypatch.setattr(tracing, "STOP_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with tracing_to(url):
        for number in range(5000):  # more than the buffer keeps
            with span("step", step=number):
                pass
    assert time.monotonic() - start < 15
    printed = [record.msg for record in caplog.records]
    assert any("Queue full" in each for each in printed) and len(set(printed)) == len(printed)


# ---- runs


def config_of(base: Path, folder: Path, **changes: Any) -> Path:
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    tree = {
        "name": "short",
        "steps": 3,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "evals": {"dev": {"episodes": 2}},
    }
    tree |= {"policies": {"guide": speech, "walker": speech}, "algorithm": {"type": "grpo", "group_size": 2}}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def traced(*arguments: object) -> Collector:
    """The spans of `palestra train ARGUMENTS`."""
    with collector() as found:
        palestra("train", *arguments, "--traces", found.url)
    return found


@needs_sdk
def test_the_trace_of_a_step_in_one_process(base: Path, tmp_path: Path) -> None:
    """Tracing does not change the run."""
    config = config_of(base, tmp_path, steps=2)
    found = traced(config, "--root", tmp_path)
    palestra("train", config, "--root", tmp_path, "--name", "plain")
    assert (tmp_path / "plain/metrics.jsonl").read_bytes() == (tmp_path / "short/metrics.jsonl").read_bytes()
    for step in found.named("step"):
        spans = found.trace(step)
        assert_whole(spans)
        parents = {span.id: span.name for span in spans} | {"": ""}
        assert sorted((span.name, parents[span.parent]) for span in spans) == [
            ("collect", "step"),
            *[("episode", "collect")] * 4,
            ("step", ""),
            ("train", "update"),
            ("update", "step"),
        ]


@needs_sdk
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_trace_of_a_step_holds_rollouts_of_workers_and_the_update(
    base: Path, tmp_path: Path, staleness: int
) -> None:
    """Also if episodes are played a step ahead."""
    config = config_of(base, tmp_path, staleness=staleness)
    placed = ("--root", tmp_path, "--set", "backend={type: local, workers: 2, slices: 2}")
    found = traced(config, *placed)
    steps = found.named("step")
    assert [step.attributes["step"] for step in steps] == [0, 1, 2] and len({step.trace for step in steps}) == 3
    for step in steps:
        spans = found.trace(step)
        assert_whole(spans)
        counts = {name: sum(span.name == name for span in spans) for name in {span.name for span in spans}}
        assert counts == {"step": 1, "collect": 1, "update": 1, "train": 1, "episode": 4, "work": 2}
        here, there = ({span.process for span in spans if span.name in names} for names in (DRIVER, WORKERS))
        assert here == {os.getpid()} and os.getpid() not in there
    assert len({span.process for span in found.named("episode")}) == 2
    assert len(found.named("evaluate")) == 2 and len(found.named("checkpoint")) == 1
    if staleness:
        ahead = [span for span in found.trace(steps[1]) if span.name == "episode"]
        assert min(span.start_ns for span in ahead) < steps[0].end_ns


DRIVER, WORKERS = ("step", "collect", "update", "train"), ("work", "episode")


@needs_sdk
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trace_of_a_step_goes_on_in_the_learners_actor(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray the driver neither plays nor trains: rollouts and gradients run in other processes."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}{os.pathsep}{ROOT}")  # so that actors import toys
    settings = "backend={type: ray, workers: 1, slices: 1}"
    found = traced(config_of(base, tmp_path, steps=2, evals={}), "--root", tmp_path, "--set", settings)
    for step in found.named("step"):
        spans = found.trace(step)
        assert_whole(spans)
        trained = [span for span in spans if span.name in ("forward_backward", "optim_step")]
        assert {span.name for span in trained} == {"forward_backward", "optim_step"}
        (learner,), (player,) = ({span.process for span in own} for own in (trained, found.named("episode")))
        assert len({os.getpid(), learner, player}) == 3
        by_id = {span.id: span for span in spans}
        assert all(by_id[span.parent].attributes["policy"] == span.attributes["policy"] for span in trained)


@needs_sdk
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trace_of_a_task_goes_from_matchmaking_to_the_update(tmp_path: Path) -> None:
    """In a population the driver makes the matches; rollouts and updates happen in the task's worker."""
    tree = {
        "env": {"type": "kuhn_poker", "num_envs": 8},
        "population": {"type": "psro", "iterations": 1, "env_steps": 512, "games_per_cell": 64, "nash_conv_every": 0},
        "oracle": {
            "type": "net",
            "policy": {"hidden": [8]},
            "algorithm": {"type": "ppo", "rollout_length": 16, "epochs": 4, "minibatches": 4},
        },
        "backend": {"type": "local", "workers": 2},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    found = traced(tmp_path / "tiny.yaml", "--root", tmp_path, "--name", "tiny")
    tasks = [json.loads(line)["task"]["name"] for line in (tmp_path / "tiny/tasks.jsonl").read_text().splitlines()]
    assert sorted(span.attributes["task"] for span in found.named("task")) == sorted(tasks)
    for task in found.named("task", kind="train"):
        spans = found.trace(task)
        assert_whole(spans)
        assert task.process == os.getpid() and task.attributes["members"] == "uniform"
        (work,) = (span for span in spans if span.name == "work")
        inside = [span for span in spans if span.parent == work.id]
        assert [span.name for span in sorted(inside, key=lambda span: span.start_ns)] == ["rollout", "train"] * 4
        assert {span.process for span in inside} == {work.process} != {os.getpid()}
