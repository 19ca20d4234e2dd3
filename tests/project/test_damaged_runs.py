"""A run with damaged files resumes to the end of the undamaged run, or is refused with a reason in one line.

Each case damages a copy of one stopped run and resumes it. Those of SAME must end byte for byte like the undamaged run;
those of REFUSED must raise one ValueError of one line, and change nothing outside the run.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helpers.damages import (
    Damage,
    again,
    append,
    both,
    config,
    copy,
    cut,
    flip,
    folder,
    foreign,
    forge,
    lines,
    link,
    meta,
    pipe,
    remove,
    swap,
    write,
    zero,
)
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.config import parse, validate
from palestra.evaluation.report.run_charts import plot_run
from palestra.runs import Run, check_config, explain_disk_errors
from palestra.runs.checkpoints import list_all_checkpoints
from palestra.runs.loop import Callback, restore_checkpoint, run_training
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

TREE: dict[str, Any] = {
    "name": "tiny",
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "policies": {"agent": {"type": "net", "hidden": [4]}},
    "algorithm": {"type": "ppo", "rollout_length": 4, "epochs": 1, "minibatches": 1},
    "evals": {"held_out": {"episodes": 4, "every": 32}},
    "env_steps": 128,
    "log_every": 1,
    "checkpoint_every": 32,
}
OLD, NEW = "checkpoints/step-000003", "checkpoints/step-000005"
LEARNER = "training-0/learner.safetensors"


class Case(NamedTuple):
    name: str
    damage: Damage
    refusal: str = ""  # the start of the error line, or "" if the run must end like the undamaged one


class StopAfter(Callback):
    """Requests a stop after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, step: int, metrics: object) -> None:
        self.left -= 1


def train(run: Run, stop_after: int = 1000) -> None:
    """Trains from the run's current state."""
    setup = build_vector_run(validate(VectorConfig, parse(run.config)))
    watcher = StopAfter(stop_after)
    restore_checkpoint(setup, run)
    run_training(setup, run, watcher, should_stop=lambda: watcher.left <= 0)


def new_run(root: Path, steps: int, **changes: object) -> Path:
    with Run.create(root, yaml.safe_dump(TREE | changes), "tiny") as run:
        train(run, steps)
    return run.path


def resume(path: Path) -> None:
    """As `palestra train --resume` does, without plots."""
    with explain_disk_errors(path):
        check_config(path)
        with Run.open(path) as run:
            train(run)


class Stopped(NamedTuple):
    run: Path
    whole: dict[str, bytes]
    foreign: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run that stopped after 6 of its 8 steps, the result of the uninterrupted run, and a run of another seed."""
    root = tmp_path_factory.mktemp("stopped")
    whole = new_run(root / "whole", 1000)
    return Stopped(new_run(root / "stopped", 6), contents(whole), new_run(root / "foreign", 6, seed=1))


def contents(run: Path) -> dict[str, bytes]:
    """The files of a finished run that are determined by the seed."""
    files = [run / "metrics.jsonl", run / "evals.jsonl", *(run / "checkpoints/step-000007").rglob("*")]
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.is_file()}


OUT = "../outside"
SOME = {"bytes": 8, "sha256": "0" * 64}
NO_CHECKPOINT, UNTRUSTED = "no checkpoint of .* is intact", "do not resume a run that you do not trust"
NOT_THEN, NOT_A_LINE = "not as it was (then|written)", "is not the line of a checkpoint"
SAME = [
    Case("nothing", lambda run: None),
    Case("weights, first byte", flip(f"{NEW}/agent/policy.safetensors", 0)),
    Case("weights, last byte", flip(f"{NEW}/agent/policy.safetensors", -1)),
    Case("learner, a byte of the header", flip(f"{NEW}/{LEARNER}", 2)),
    Case("learner, a byte of a number", flip(f"{NEW}/{LEARNER}", -3)),
    Case("learner cut short", cut(f"{NEW}/{LEARNER}", 100)),
    Case("learner empty", cut(f"{NEW}/{LEARNER}", 0)),
    Case("learner grown", append(f"{NEW}/{LEARNER}", b"\0")),
    Case("learner missing", remove(f"{NEW}/{LEARNER}")),
    Case("optimizer zeroed", zero(f"{NEW}/{LEARNER}")),
    Case("env state, a byte", flip(f"{NEW}/training-0/env_state.safetensors", -1)),
    Case("member.json, a byte", flip(f"{NEW}/agent/member.json", 5)),
    Case("member.json empty", cut(f"{NEW}/agent/member.json", 0)),
    Case("a folder in place of weights", folder(f"{NEW}/agent/policy.safetensors")),
    Case("the checkpoint missing", remove(NEW)),
    Case("a file in place of the checkpoint", both(remove(NEW), write(NEW, b"x"))),
    Case("the older checkpoint damaged", flip(f"{OLD}/{LEARNER}", -3)),
    Case("the older checkpoint in place of the newer", copy(OLD, NEW)),
    Case("a checkpoint of another run", foreign(NEW)),
    Case("one file of another run", foreign(f"{NEW}/{LEARNER}")),
    Case("one more file in the checkpoint", write(f"{NEW}/notes.txt", b"mine")),
    Case("a link within the checkpoint", link(f"{NEW}/{LEARNER}", f"{NEW}/kept")),
    Case("a link that leads to itself", lambda run: (run / "loop").symlink_to(run / "loop")),
    Case("a log of W&B that is elsewhere", link("sinks/wandb/wandb/run-1/logs/debug-core.log", f"{OUT}/precious")),
    Case("last line torn", cut("checkpoints.jsonl", -40)),
    Case("last line missing", lines(lambda kept: kept[:-1])),
    Case("first line missing", lines(lambda kept: kept[1:])),
    Case("lines twice", lines(lambda kept: kept + kept)),
    Case("lines reversed", lines(lambda kept: kept[::-1])),
    Case("zeros at the end of the lines", append("checkpoints.jsonl", bytes(100))),
    Case("two checkpoints of one step", again(files={"agent/member.json": {"bytes": 3, "sha256": "0" * 64}})),
    Case("a step of the future", both(again(step=6, path="checkpoints/step-000006"))),
    Case("metrics, a byte after the older checkpoint", flip("metrics.jsonl", -3)),
    Case("metrics, the last line missing", lines(lambda kept: kept[:-1], "metrics.jsonl")),
    Case("metrics, the last line torn", cut("metrics.jsonl", -7)),
    Case("metrics with lines of the future", append("metrics.jsonl", b'{"step": 6}\nnonsense\n{"st')),
    Case("timings, a byte after the older checkpoint", flip("timings.jsonl", -3)),
    Case("evals torn", append("evals.jsonl", b'{"step": 6, "na')),
    Case("evals of the future", append("evals.jsonl", b'{"step": 6, "name": "x"}\n')),
    Case("a comment in the config", config("name: tiny", "# mine\nname: tiny")),
    Case("a half-written checkpoint", write(f"{NEW}/../.tmp-step-000007", b"half")),
    Case("a half-written checkpoint folder", folder("checkpoints/.tmp-step-000007")),
    Case("a half-removed checkpoint", folder("checkpoints/.tmp-old-step-000001")),
    Case("half-written lines", folder(".tmp-checkpoints.jsonl")),
    Case("a checkpoint without a line", folder("checkpoints/step-000099")),
    Case("odd names", both(write("checkpoints/step-abc", b""), folder("episodes/step-x.parquet"))),
    Case("a line without its rename", lambda run: unnamed(run)),
]
REFUSED = [
    Case("both checkpoints", both(flip(f"{NEW}/{LEARNER}", -3), cut(f"{OLD}/{LEARNER}", 9)), NO_CHECKPOINT),
    Case("checkpoints swapped", swap(NEW, OLD), NO_CHECKPOINT),
    Case("no checkpoints folder", remove("checkpoints"), NO_CHECKPOINT),
    Case(
        "lines and checkpoints of another run", both(*map(foreign, ("checkpoints", "checkpoints.jsonl"))), NO_CHECKPOINT
    ),
    Case("a pipe in the checkpoint", pipe(f"{NEW}/pipe"), "neither a file nor a folder"),
    Case("a pipe in place of weights", pipe(f"{NEW}/{LEARNER}"), "neither a file nor a folder"),
    Case("weights are a link that leads out", link(f"{NEW}/{LEARNER}", f"{OUT}/weights"), "a link that leads out"),
    Case("the checkpoint is a link that leads out", link(NEW, f"{OUT}/step"), "a link that leads out"),
    Case("checkpoints is a link that leads out", link("checkpoints", f"{OUT}/steps"), "a link that leads out"),
    Case("the folder of W&B is a link that leads out", link("sinks/wandb/wandb", OUT), "a link that leads out"),
    Case("a link to nowhere", link("nowhere", "/nowhere/at/all"), "a link that leads out"),
    Case("the lock is a link that leads out", link(".lock", f"{OUT}/precious"), "a link that leads out"),
    Case("the lock is a folder", folder(".lock"), "cannot use .*Is a directory"),
    Case("no lines", remove("checkpoints.jsonl"), "checkpoints.jsonl is missing"),
    Case("lines empty", cut("checkpoints.jsonl", 0), "has no line for step-000003"),
    Case("lines, a byte", flip("checkpoints.jsonl", 30), "line 1 is not as it was written"),
    Case("lines, a byte of a checksum", flip("checkpoints.jsonl", -5), "line 3 is not as it was written"),
    Case("lines, garbage between", lines(lambda kept: [kept[0], b"\xff\xfe\n", *kept[1:]]), "line 2 is not as it was"),
    Case("lines of JSON without checksums", write("checkpoints.jsonl", b'{"step": 5}\n'), "line 1 is not as it was"),
    Case("lines are a folder", folder("checkpoints.jsonl"), "is not a file"),
    Case("lines are a pipe", pipe("checkpoints.jsonl"), "neither a file nor a folder"),
    Case("path beside the run", forge(path=OUT), UNTRUSTED),
    Case("path absolute", forge(path="/tmp"), UNTRUSTED),
    Case("path is the run", forge(path="."), UNTRUSTED),
    Case("path of another step", forge(path=NEW), UNTRUSTED),
    Case("path of a wrong type", forge(path=[NEW]), UNTRUSTED),
    Case("name beside the checkpoint", forge(names={"agent": f"../../{OUT}"}), UNTRUSTED),
    Case("name absolute", forge(names={"agent": "/etc"}), UNTRUSTED),
    Case("name with a NUL", forge(names={"agent": "a\0b"}), UNTRUSTED),
    Case("name empty", forge(names={"agent": ""}), UNTRUSTED),
    Case("name too long", forge(names={"agent": "a" * 300}), UNTRUSTED),
    Case("name of a wrong type", forge(names={"agent": 3}), UNTRUSTED),
    Case("names of a wrong type", forge(names=["agent"]), UNTRUSTED),
    Case(
        "file beside the checkpoint",
        forge(files={f"../../{OUT}/precious": SOME}),
        UNTRUSTED,
    ),
    Case("files of a wrong type", forge(files=["agent"]), NOT_A_LINE),
    Case("file without a checksum", forge(files={"agent/member.json": {"bytes": 3}}), NOT_A_LINE),
    Case("file of a size that is not a number", forge(files={"x": SOME | {"bytes": float("nan")}}), NOT_A_LINE),
    Case("step that is text", forge(step="5"), NOT_A_LINE),
    Case("step that is huge", forge(step=10**400), NOT_A_LINE),
    Case("step that is not a number", forge(step=float("nan")), NOT_A_LINE),
    Case("step that is negative", forge(step=-5), NOT_A_LINE),
    Case("step that is true", forge(step=True), NOT_A_LINE),
    Case("no keep", forge(keep=None), NOT_A_LINE),
    Case("logs of other names", forge(logs={f"{OUT}/precious": SOME}), NOT_A_LINE),
    Case("metrics, first byte", flip("metrics.jsonl", 0), NOT_THEN),
    Case("metrics, a digit", lines(lambda kept: [kept[0].replace(b"1", b"2"), *kept[1:]], "metrics.jsonl"), NOT_THEN),
    Case("metrics, lines reversed", lines(lambda kept: kept[::-1], "metrics.jsonl"), NOT_THEN),
    Case("metrics empty", cut("metrics.jsonl", 0), "metrics.jsonl has 0 bytes"),
    Case("metrics missing", remove("metrics.jsonl"), "metrics.jsonl has 0 bytes"),
    Case("metrics are a folder", folder("metrics.jsonl"), "is not a file"),
    Case("metrics are a pipe", pipe("metrics.jsonl"), "neither a file nor a folder"),
    Case("metrics are a link that leads out", link("metrics.jsonl", f"{OUT}/precious"), "a link that leads out"),
    Case("timings, first byte", flip("timings.jsonl", 0), NOT_THEN),
    Case("timings missing", remove("timings.jsonl"), "timings.jsonl has 0 bytes"),
    Case("evals, first byte", flip("evals.jsonl", 0), NOT_THEN),
    Case("evals missing", remove("evals.jsonl"), "evals.jsonl has 0 bytes"),
    Case("evals with garbage", append("evals.jsonl", b"nonsense\n"), "line 5 is not a JSON object"),
    Case("evals with a list", append("evals.jsonl", b"[[1, 2]]\n"), "line 5 is not a JSON object, but list"),
    Case("evals, deep", append("evals.jsonl", b"[" * 100_000 + b"\n"), "line 5 is not a JSON object"),
    Case("evals with a step that is text", append("evals.jsonl", b'{"step": "5"}\n'), "whose step is '5'"),
    Case("another seed", config("name: tiny", "name: tiny\nseed: 3"), r"seed: not set -> 3"),
    Case("another size", config("hidden:\n    - 4", "hidden:\n    - 8"), r"hidden: \[4\] -> \[8\]"),
    Case("longer by hand", config("env_steps: 128", "env_steps: 256"), r"env_steps: 128 -> 256.*by --set"),
    Case("config empty", cut("config.yaml", 0), "algorithm.type: ppo -> not set"),
    Case("config missing", remove("config.yaml"), "cannot read config .*: No such file"),
    Case("config is not YAML", write("config.yaml", b"a: [1"), r"config.yaml, line \d"),
    Case("config is not text", write("config.yaml", b"\xff\xfe"), "cannot read .*config.yaml"),
    Case("config is a list", write("config.yaml", b"[1]"), "a config is a mapping"),
    Case("config is a folder", folder("config.yaml"), "is not a file"),
    Case("config is a pipe", pipe("config.yaml"), "is not a file"),
    Case("config is a link that leads out", link("config.yaml", f"{OUT}/config.yaml"), "a link that leads out"),
    Case("meta missing", remove("meta.json"), "cannot read .*meta.json"),
    Case("meta is not JSON", write("meta.json", b"{"), "cannot read .*meta.json"),
    Case("meta is a list", meta(lambda facts: [facts]), "holds list, not dict"),
    Case("meta without a config", meta(lambda facts: {"created": facts["created"]}), "does not have the config"),
    Case("meta, changes of a wrong type", meta(lambda facts: facts | {"changed": 3}), "is not the object"),
]
NOT_ROOT = [
    Case("the lock is read-only", lambda run: (run / ".lock").chmod(0o400), "cannot use .*Permission denied"),
    Case("weights cannot be read", lambda run: (run / NEW / LEARNER).chmod(0), "cannot use .*Permission denied"),
    Case("checkpoints is read-only", lambda run: (run / "checkpoints").chmod(0o500), "cannot use .*Permission denied"),
]


def unnamed(run: Path) -> None:
    """The process died between writing a checkpoint's line and its rename."""
    (run / NEW).rename((run / NEW).with_name(".tmp-step-000005"))


@pytest.fixture
def copied(stopped: Stopped, tmp_path: Path) -> Iterator[Path]:
    """A copy of the stopped run, beside a file and a run of another seed, which must not change."""
    run = tmp_path / "tiny"
    shutil.copytree(stopped.run, run)
    shutil.copytree(stopped.foreign, tmp_path / "foreign")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    yield run
    for path in (run, run / "checkpoints"):
        if path.is_dir():
            path.chmod(0o700)


def outside(run: Path) -> dict[str, bytes]:
    """Every file beside the run."""
    files = [file for name in ("outside", "foreign") for file in (run.parent / name).rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files}


@pytest.mark.parametrize("case", SAME, ids=[case.name for case in SAME])
@pytest.mark.few(16)
def test_damaged_run_resumes_to_the_undamaged_result(stopped: Stopped, copied: Path, case: Case) -> None:
    case.damage(copied)
    before = outside(copied)
    resume(copied)
    assert contents(copied) == stopped.whole
    assert outside(copied) == before


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_damaged_run_is_refused_in_one_line(copied: Path, case: Case) -> None:
    case.damage(copied)
    before = outside(copied)
    with pytest.raises(ValueError, match=case.refusal) as refusal:
        resume(copied)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 700
    assert outside(copied) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
@pytest.mark.parametrize("case", NOT_ROOT, ids=[case.name for case in NOT_ROOT])
def test_permission_errors_are_explained(copied: Path, case: Case) -> None:
    test_damaged_run_is_refused_in_one_line(copied, case)


def resume_by_command(run: Path) -> tuple[int, str]:
    """The exit code of `palestra train --resume`, and its output."""
    done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert "Traceback" not in done.output and isinstance(done.exception, SystemExit | None)
    return done.exit_code, done.output


def test_resume_command_names_what_it_skipped(stopped: Stopped, copied: Path) -> None:
    flip(f"{NEW}/{LEARNER}", -3)(copied)
    code, out = resume_by_command(copied)
    (line,) = [line for line in out.splitlines() if "passed over" in line]
    assert line.startswith("the checkpoint after 6 steps is passed over: ") and f"{NEW}/{LEARNER} is damaged" in line
    assert code == 0 and "resuming after 4 steps" in out and contents(copied) == stopped.whole
    assert "already complete; --set env_steps=N extends it" in resume_by_command(copied)[1]


def test_resume_command_refuses_in_one_line(copied: Path) -> None:
    forge(path=f"{OUT}")(copied)
    code, out = resume_by_command(copied)
    assert code == 1 and len(out.splitlines()) == 1 and UNTRUSTED in out
    assert (
        len(list_all_checkpoints(copied.parent / "foreign")) == 3 and (copied.parent / "outside" / "precious").exists()
    )


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the block no file may grow beyond `size` bytes, as with `ulimit -f` or on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 600, 1600, 2300, 2580, 2900])
def test_full_disk_is_explained_and_the_run_resumes(stopped: Stopped, copied: Path, size: int) -> None:
    """At 10 bytes the lock cannot record its process; later a line of a log is torn, or a checkpoint is incomplete."""
    with largest_file(size), pytest.raises(ValueError, match=r"File too large; raise the limit .*ulimit -f") as refusal:
        resume(copied)
    assert "\n" not in str(refusal.value) and f"palestra train --resume {copied}" in str(refusal.value)
    resume(copied)
    assert contents(copied) == stopped.whole


@pytest.mark.parametrize("name", ["curves.png", ".tmp-curves.png"])
def test_plots_are_not_written_through_symlinks(copied: Path, name: str) -> None:
    """Plotting does not need the run's lock, and opens the run for nothing else."""
    link(name, f"{OUT}/precious")(copied)
    before = outside(copied)
    plot_run(copied)
    assert outside(copied) == before and not (copied / "curves.png").is_symlink()
