"""Folders that somebody else made: nothing outside them is read, copied or run, and each refusal is one line in time.

Commands run in this process, on real files; `SIGALRM` ends one that blocks. What a command prints and writes is
searched for the contents of a file outside the folder. Of attacks of one kind, the fast suite has the first few.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from helpers.command_line import invoke
from helpers.long_runs import write_long_run
from starlette.testclient import TestClient

import palestra
from palestra.core.files import read_checksummed, to_checksummed_line, write_arrays
from palestra.core.types import TEAM
from palestra.dashboard.app import build_dashboard
from palestra.environments.code.files import load_programs
from palestra.envs.support.row_reader import read_rows
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Member
from palestra.populations.task_json import MEMBERS_FILE, TaskRecord
from palestra.populations.tasks import PlayResult, PlayTask
from palestra.runs import Run
from palestra.runs.mirror.config import MirrorConfig
from palestra.runs.mirror.copy import send_state
from palestra.runs.mirror.store import WRITER_FILE

SECRET = "BEGIN PRIVATE KEY of somebody"
MAX_SCANNED_BYTES = 2**26
LIMIT_S = 60  # a command that blocks would take for ever; a busy machine may be slow
Attack = Callable[[Path, Path], object]  # of the folder, and of the secret file outside it
DEEP = "[" * 100_000 + "]" * 100_000
ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "tiny",
}


# ---- what is attacked


def write_policy(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(folder / "adapter_model.safetensors", {"a": np.zeros((4, 4), np.float32)})
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "member.json").write_text('{"version": 3}')


def write_run(root: Path, name: str) -> Path:
    """A run of two language agents with a checkpoint."""
    path = write_long_run(root, name, steps=3, episodes=2)
    with Run.open(path) as run:
        run.log_eval(2, "test", {"success": 0.5, "episodes": 100.0})
        names = {"planner": "planner", "executor": "executor"}
        run.checkpoint(2, lambda folder: [write_policy(folder / seat) for seat in names] and None, names)
    return path


def write_population(root: Path, name: str) -> Path:
    """A run of a population with two members and their games."""
    cell = PayoffCell(10, (0.2, -0.2), (1.0, 1.0), (6, 4), 0)
    task = PlayTask("play/0", cells=(("a", "b"),), games_per_cell=10)
    with Run.create(root, "population: {type: psro}\nenv: {type: kuhn}\n", name, {"seed": 0}) as run:
        run.append_checksummed("tasks.jsonl", TaskRecord(0, task, {}, PlayResult((cell,))).to_json())
        run.log_metrics(0, TEAM, {"nash_conv": 0.5})
    members = [asdict(Member(member, "agent", f"members/{member}")) for member in "ab"]
    (run.path / MEMBERS_FILE).write_text(json.dumps(members))
    for member in "ab":
        write_policy(run.path / "members" / member)
    return run.path


def write_published(folder: Path) -> Path:
    write_policy(folder)
    about = {"name": "planner", "version": 3, "role": "Plan.", "speech": {"base": "tiny"}}
    (folder / "palestra.json").write_text(json.dumps(about))
    return folder


def as_model(folder: Path, **config: object) -> None:
    """Makes a published folder one of a whole model."""
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 1} | config))


# ---- ways to attack


def link(name: str) -> Attack:
    def attack(folder: Path, secret: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)

    return attack


def link_folder(name: str) -> Attack:
    def attack(folder: Path, secret: Path) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).symlink_to(secret.parent)

    return attack


def chain(name: str) -> Attack:
    """A link to a link that leads out."""

    def attack(folder: Path, secret: Path) -> None:
        (folder / ".second").symlink_to(secret)
        (folder / name).symlink_to(folder / ".second")

    return attack


def fifo(name: str) -> Attack:
    def attack(folder: Path, secret: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return attack


def unix_socket(name: str) -> Attack:
    def attack(folder: Path, secret: Path) -> None:
        before = Path.cwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        finally:
            os.chdir(before)

    return attack


def text(name: str, content: object) -> Attack:
    written = content if isinstance(content, str) else json.dumps(content)
    return lambda folder, secret: (folder / name).write_text(written)


def sparse(name: str, size: int) -> Attack:
    return lambda folder, secret: os.truncate(folder / name, size)


def changed(file: str, /, **values: object) -> Attack:
    """Changes values of a JSON object."""
    return lambda folder, secret: (folder / file).write_text(
        json.dumps(json.loads((folder / file).read_text()) | values)
    )


def template(source: str) -> Attack:
    return lambda folder, secret: (folder / "chat_template.jinja").write_text(source)


POLICY = "checkpoints/step-000002/planner"
LEADING_OUT: dict[str, Attack] = {
    "a link out": link("notes.md"),
    "a link to a link out": chain("notes.md"),
    "config.yaml is a link out": link("config.yaml"),
    "meta.json is a link out": link("meta.json"),
    "metrics.jsonl is a link out": link("metrics.jsonl"),
    "report.html is a link out": link("report.html"),
    "episodes is a link out": link_folder("episodes"),
    "a link out beside weights": link(f"{POLICY}/notes.md"),
    "weights are a link out": link(f"{POLICY}/adapter_model.safetensors"),
    "a policy is a link out": link_folder(POLICY),
    "config.yaml is a pipe": fifo("config.yaml"),
    "meta.json is a pipe": fifo("meta.json"),
    "tasks.jsonl is a pipe": fifo("tasks.jsonl"),
    "mirror.json is a pipe": fifo("mirror.json"),
    "member.json is a pipe": fifo(f"{POLICY}/member.json"),
    "a socket": unix_socket("door"),
}
FORGED: dict[str, Attack] = {
    "meta.json is a list": text("meta.json", []),
    "meta.json is deep": text("meta.json", DEEP),
    "meta.json is huge": sparse("meta.json", 2**27),
    "created is a number": changed("meta.json", created=7),
    "created is no date": changed("meta.json", created="yesterday"),
    "command is text": changed("meta.json", command="rm"),
    "command holds lists": changed("meta.json", command=[[]]),
    "seed is text": changed("meta.json", seed="x"),
    "mirror.json is deep": text("mirror.json", DEEP),
    "mirror.json fails since a list": text("mirror.json", {"failing_since": [], "error": {}}),
    "metrics of other kinds": text("metrics.jsonl", '{"step": "x", "policy": [], "success": "high"}\n'),
    "success is text": text("metrics.jsonl", '{"step": 0, "policy": "team", "success": "high"}\n'),
    "evals of other kinds": text("evals.jsonl", '{"step": 0, "name": "test", "success": "all", "episodes": []}\n'),
    "evals without a name": text("evals.jsonl", '{"step": 0}\n'),
    "config.yaml is deep": text("config.yaml", "a: " + "[" * 3000),
    "config.yaml is huge": sparse("config.yaml", 2**33),
    "env is a list": text("config.yaml", "env: [1]\nsteps: 3\n"),
    "stages are numbers": text("config.yaml", "env: {type: math}\nstages: [1, 2]\n"),
    "checkpoints.jsonl of other kinds": text("checkpoints.jsonl", '{"step": []}\n'),
    "an episode file is text": text("episodes/step-000002.parquet", "no"),
}
POPULATION: dict[str, Attack] = {
    "population.json without player": text(MEMBERS_FILE, [{"name": "a"}]),
    "population.json of numbers": text(MEMBERS_FILE, [1, 2]),
    "population.json is an object": text(MEMBERS_FILE, {}),
    "population.json is deep": text(MEMBERS_FILE, DEEP),
    "population.json is a pipe": fifo(MEMBERS_FILE),
    "a member leads out": text(MEMBERS_FILE, [{"name": "../../etc", "player": "agent", "weights": "x"}]),
    "a member's file is a link out": link("members/a/notes.md"),
    "a member is a link out": link_folder("members/a"),
}
PUBLISHED: dict[str, Attack] = {
    "a link out": link("notes.md"),
    "weights are a link out": link("adapter_model.safetensors"),
    "palestra.json is a link out": link("palestra.json"),
    "palestra.json is a pipe": fifo("palestra.json"),
    "adapter_config.json is a pipe": fifo("adapter_config.json"),
    "a socket": unix_socket("door"),
    "palestra.json is a list": text("palestra.json", []),
    "palestra.json is deep": text("palestra.json", DEEP),
    "name is a list": changed("palestra.json", name=[1]),
    "speech is null": changed("palestra.json", speech=None),
    "version is text": changed("palestra.json", version="new"),
    "rank is text": changed("adapter_config.json", r="x"),
    "ranks are a list": changed("adapter_config.json", rank_pattern=[1]),
    "header of 2^60 bytes": lambda folder, secret: (folder / "adapter_model.safetensors").write_bytes(
        (2**60).to_bytes(8, "little") + b"{}"
    ),
    "weights are text": text("adapter_model.safetensors", "no"),
    "a billion layers": lambda folder, secret: as_model(folder, num_hidden_layers=10**9),
    "config.json is a list": lambda folder, secret: (folder / "config.json").write_text("[]"),
}
TEMPLATES: dict[str, Attack] = {
    "nested loops": template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    "a long text": template("{{ 'x' * 2000000000 }}{{ 'x' * 2000000000 }}"),
    "doubled text": template(
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
    ),
    "after one that raises": text(
        "tokenizer_config.json",
        {
            "chat_template": [
                {"name": "default", "template": "{{ raise_exception('no system role') }}"},
                {"name": "tool_use", "template": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3},
            ]
        },
    ),
    "in tokenizer_config.json": text(
        "tokenizer_config.json",
        {"chat_template": [{"name": "default", "template": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3}]},
    ),
}


def first(count: int, attacks: Iterable[str]) -> list[Any]:
    """Returns the names of attacks as parameters of a test; those after the first `count` are slow."""
    names = list(attacks)
    return [*names[:count], *(pytest.param(name, marks=pytest.mark.slow) for name in names[count:])]


# ---- commands


@pytest.fixture(autouse=True)
def wide_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders before an attack."""
    root = tmp_path_factory.mktemp("made")
    write_run(root / "runs", "good")
    write_population(root / "runs", "league")
    write_published(root / "planner")
    return root


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/key").write_text(SECRET)
    return tmp_path / "home/key"


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"blocks for {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_command(tmp_path: Path, *words: object) -> Result:
    """Runs a command; nothing outside may be in what it prints and writes."""
    with time_limit():
        done = invoke(*words)
    assert SECRET not in done.output
    for folder in ("out", "store", "fetched"):
        for path in (tmp_path / folder).rglob("*"):
            is_text = path.is_file() and not path.is_symlink() and path.stat().st_size < MAX_SCANNED_BYTES
            assert not is_text or SECRET.encode() not in path.read_bytes(), path
    return done


def check_refused(done: Result) -> None:
    assert done.exit_code in (1, 2), (done.output, done.exception)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    first, *more = done.stderr.splitlines()  # a config with several faults has an indented line for each
    assert first.startswith("error: ") and all(line.startswith("  ") for line in more), done.stderr


def check_answered(done: Result) -> None:
    """It does what it can, or refuses."""
    if done.exit_code:
        check_refused(done)


def commands(run: Path, out: Path) -> dict[str, tuple[object, ...]]:
    out.mkdir(exist_ok=True)
    return {
        "report": ("report", run, "--out", out / "page.html"),
        "plot": ("plot", run, "--out", out / "figure.svg"),
        "publish": ("publish", run, "--member", "planner", "--out", out / "planner"),
        "sync": ("sync", run, "--to", f"file://{out.parent}/store"),
        "eval": ("eval", run, "--episodes", "1"),
        "collect": ("collect", run, "--episodes", "1", "--out", out / "data.parquet"),
        "play": ("play", run),
        "resume": ("train", "--resume", run),
        "serve-agent": ("serve-agent", run),
    }


def received(made: Path, tmp_path: Path, name: str = "good") -> Path:
    """A copy of a run beside an intact one, to be attacked."""
    shutil.copytree(made / "runs/good", tmp_path / "runs/intact")
    shutil.copytree(made / "runs" / name, tmp_path / "runs/bad")
    return tmp_path / "runs/bad"


@pytest.mark.parametrize("attack", first(6, sorted(LEADING_OUT)))
@pytest.mark.few(3)
def test_a_run_that_leads_out_is_refused_by_every_command(
    made: Path, tmp_path: Path, secret: Path, attack: str
) -> None:
    run = received(made, tmp_path)
    LEADING_OUT[attack](run, secret)
    for name in ("report", "plot", "publish", "sync", "eval", "collect", "play", "resume", "serve-agent"):
        check_refused(run_command(tmp_path, *commands(run, tmp_path / "out")[name]))
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("attack", first(12, sorted(LEADING_OUT | FORGED)))
@pytest.mark.few(4)
def test_one_bad_run_does_not_hide_the_others(made: Path, tmp_path: Path, secret: Path, attack: str) -> None:
    run = received(made, tmp_path)
    (LEADING_OUT | FORGED)[attack](run, secret)
    done = run_command(tmp_path, "runs", "--root", tmp_path / "runs")
    listed_run = re.search(r"^ *intact .* done .*test\s[\s\d]*50\.0%", done.output, re.MULTILINE)  # cells may wrap
    assert done.exit_code == 0 and listed_run, done.output
    with time_limit():
        client = TestClient(build_dashboard(tmp_path / "runs"), base_url="http://127.0.0.1")
        listed = client.get("/api/runs")
        page = client.get("/api/runs/bad")
    assert "intact" in [one["name"] for one in listed.json()["runs"]] and page.status_code in (200, 400, 404, 422)
    assert SECRET not in listed.text + page.text


@pytest.mark.parametrize("attack", first(4, FORGED))
def test_forged_files_of_a_run_are_answered_or_refused_in_one_line(
    made: Path, tmp_path: Path, secret: Path, attack: str
) -> None:
    run = received(made, tmp_path)
    FORGED[attack](run, secret)
    for name in ("report", "plot", "publish", "sync"):
        check_answered(run_command(tmp_path, *commands(run, tmp_path / "out")[name]))


@pytest.mark.parametrize("attack", first(3, POPULATION))
def test_a_bad_population_is_refused(made: Path, tmp_path: Path, secret: Path, attack: str) -> None:
    run = received(made, tmp_path, "league")
    POPULATION[attack](run, secret)
    out = tmp_path / "out"
    out.mkdir()
    for words in (
        ("league", "standings", run),
        ("league", "crossplay", run),
        ("league", "plot", run, "--out", out / "population.png"),
        ("report", run, "--out", out / "page.html"),
        ("publish", run, "--member", "a", "--out", out / "a"),
        ("publish", run, "--out", out / "table.json"),
    ):
        check_refused(run_command(tmp_path, *words))


@pytest.mark.parametrize("attack", PUBLISHED)
@pytest.mark.few(6)
def test_a_bad_published_agent_is_refused(made: Path, tmp_path: Path, secret: Path, attack: str) -> None:
    folder = tmp_path / "planner"
    shutil.copytree(made / "planner", folder)
    PUBLISHED[attack](folder, secret)
    for words in (("serve-agent", folder, "--port", "0"), ("publish", folder, "--out", tmp_path / "out")):
        check_refused(run_command(tmp_path, *words))


@pytest.mark.parametrize("place", ["./a/base", "a/base"])
def test_a_bad_base_beside_an_agent_is_refused(
    made: Path, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("planner"), Path("a/base")):
        shutil.copytree(made / "planner", folder)
    as_model(Path("a/base"), num_hidden_layers=10**9)
    changed("palestra.json", speech={"base": place})(Path("planner"), secret)
    done = run_command(tmp_path, "serve-agent", "planner", "--port", "0")
    check_refused(done)
    assert "more layers than there are weights" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("attack", TEMPLATES)
def test_a_chat_template_that_never_ends_is_refused(made: Path, tmp_path: Path, secret: Path, attack: str) -> None:
    folder = tmp_path / "planner"
    shutil.copytree(made / "planner", folder)
    TEMPLATES[attack](folder, secret)
    done = run_command(tmp_path, "serve-agent", folder, "--port", "0")
    check_refused(done)
    assert "chat template" in done.stderr


# ---- copies in a store


def forge(**values: object) -> Attack:
    """Replaces values of the copy's writer.json, whose checksum is right."""

    def attack(folder: Path, secret: Path) -> None:
        path = folder / WRITER_FILE
        (line,) = read_checksummed(path)
        path.write_bytes(to_checksummed_line(line | values))

    return attack


UNREADABLE_COPIES: dict[str, Attack] = {
    "time is a list": forge(time=[]),
    "time is a number": forge(time=7),
    "progress is true": forge(progress=True),
    "writer is an object": forge(writer={}),
    "more values": forge(files=[]),
    "the state was edited": text(WRITER_FILE, "{}\n"),
    "the state is huge": sparse(WRITER_FILE, 2**33),
    "the state is a link": link(WRITER_FILE),
    "the state is a pipe": fifo(WRITER_FILE),
}
FORGED_COPIES: dict[str, Attack] = UNREADABLE_COPIES | {
    "a link out": link("notes.md"),
    "a folder is a link out": link_folder("checkpoints"),
    "the list is a link out": link("checkpoints.jsonl"),
    "the list is a pipe": fifo("checkpoints.jsonl"),
    "the list is huge": sparse("checkpoints.jsonl", 2**33),
    "a pipe": fifo("door"),
    "a socket": unix_socket("door"),
    "a hidden name": text(".lock", ""),
    "2^40 bytes": sparse("metrics.jsonl", 2**40),
}


@pytest.fixture(scope="module")
def copy(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the copy of a run."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(made / "runs/good", folder / "good")
    send_state(folder / "good", MirrorConfig(url=f"file://{folder}/store"))
    return folder / "store"


@pytest.mark.parametrize("attack", FORGED_COPIES)
@pytest.mark.few(6)
def test_a_forged_copy_is_refused(copy: Path, tmp_path: Path, secret: Path, attack: str) -> None:
    shutil.copytree(copy, tmp_path / "store")
    FORGED_COPIES[attack](tmp_path / "store/good", secret)
    url = f"file://{tmp_path}/store"
    check_refused(run_command(tmp_path, "fetch", f"{url}/good", "--root", tmp_path / "fetched"))
    listed = run_command(tmp_path, "runs", "--root", url)
    assert listed.exit_code == 0 and ("good cannot be read" in listed.output) == (attack in UNREADABLE_COPIES)
    assert not list((tmp_path / "fetched").glob("*"))


def test_a_copy_above_the_limit_is_refused_with_the_option(copy: Path, tmp_path: Path) -> None:
    done = run_command(tmp_path, "fetch", f"file://{copy}/good", "--root", tmp_path / "fetched", "--max-gib", "1e-6")
    check_refused(done)
    assert f"palestra fetch file://{copy}/good --root {tmp_path / 'fetched'} --max-gib 1" in done.stderr


# ---- files of data


DATA: dict[str, tuple[str, Attack]] = {
    "a pipe of lines": ("rows.jsonl", fifo("rows.jsonl")),
    "a pipe of JSON": ("rows.json", fifo("rows.json")),
    "a pipe of Parquet": ("rows.parquet", fifo("rows.parquet")),
    "a device": ("rows.jsonl", lambda folder, secret: (folder / "rows.jsonl").symlink_to("/dev/zero")),
    "deep JSON": ("rows.json", text("rows.json", DEEP)),
    "deep lines": ("rows.jsonl", text("rows.jsonl", DEEP + "\n")),
    "Parquet is text": ("rows.parquet", text("rows.parquet", "no")),
    "dataset_dict.json is a list": (".", text("dataset_dict.json", [])),
    "dataset_dict.json without splits": (".", text("dataset_dict.json", {})),
    "dataset_info.json alone": (".", text("dataset_info.json", {})),
    "a pipe in a saved data set": (".", fifo("state.json")),
}


@pytest.mark.parametrize("attack", DATA)
def test_bad_data_is_refused(tmp_path: Path, secret: Path, attack: str) -> None:
    name, attacked = DATA[attack]
    (tmp_path / "data").mkdir()
    attacked(tmp_path / "data", secret)
    with time_limit(), pytest.raises(ValueError, match="data"):
        read_rows(tmp_path / "data" / name)


def test_deep_packed_tests_are_refused(tmp_path: Path) -> None:
    row = {"question_content": "?", "public_test_cases": DEEP, "private_test_cases": "", "starter_code": ""}
    (tmp_path / "problems.jsonl").write_text(json.dumps(row | {"metadata": "{}"}) + "\n")
    with pytest.raises(ValueError, match="row 1"):
        load_programs(tmp_path / "problems.jsonl")


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    done = run_command(tmp_path, "train", "configs/games/kuhn_ppo.yaml", "--root", "/dev/null")
    check_refused(done)


OWN_FILES = {
    "api/agents/serve.py": "the key of the operator",
    "api/agents/model_files.py": "the standard input of a process",
    "evaluation/report/html.py": "the style sheet of the package",
    "runs/run.py": "after `Run` has checked the folder",
    "runs/system_metrics.py": "the system's",
}
RECEIVING = ("api/agents", "cli", "dashboard", "evaluation", "populations", "runs")


def test_no_reader_goes_around_the_checks() -> None:
    """Files of runs, published agents and copies are read by `read_bytes`, `read_json`, `read_lines` and `load`."""
    package = Path(palestra.__file__).parent
    unchecked = re.compile(r"\.read_text\(|\.read_bytes\(|json\.load\(")
    paths = [path for folder in RECEIVING for path in (package / folder).rglob("*.py")]
    found = {str(path.relative_to(package)) for path in paths if unchecked.search(path.read_text())}
    assert found == set(OWN_FILES)
    not_a_run = [path.name for path in package.rglob("*.py") if "it has no config.yaml" in path.read_text()]
    assert not_a_run == ["settings.py"]
