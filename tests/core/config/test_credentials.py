"""Credentials in configs and on the command line are refused, and written to no run and no message."""

import time
from pathlib import Path

import pytest
import yaml
from helpers.command_line import invoke
from helpers.warm_processes import run_palestra, start_palestra

from palestra.api.run import run_request
from palestra.core.config import check_no_credentials, hide_credentials, load, parse, validate
from palestra.core.config.shipped import templates
from palestra.core.failures import write_error_file
from palestra.dashboard.catalog import read_config
from palestra.runs import Run
from palestra.runs.sinks.base import SinksConfig
from palestra.runs.sinks.log_tailer import follow_run

KEY = "sk-Zq81TOPSECRET"
GAME = load("configs/games/two_step_dqn.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("--traces", f"http://user:{KEY}@127.0.0.1:1"),
        ("--traces", f"http://127.0.0.1:1/?api_key={KEY}"),
        ("--address", f"ray://user:{KEY}@127.0.0.1:1"),
        ("--mirror", f"github://{KEY}@org:repo"),
        ("--mirror", f"s3://key:{KEY}@bucket/runs"),
        ("--mirror", f"s3://bucket/runs?secret={KEY}"),
        ("--engine", f"http://user:{KEY}@127.0.0.1:1"),
        ("--set", f"sampler.urls=[http://user:{KEY}@127.0.0.1:1]"),
        ("--set", f"policies.judge.endpoint.body={{api_key: {KEY}}}"),
        ("--set", f"policies.judge.endpoint.body.headers.Authorization=Bearer {KEY}"),
        ("--set", f"policies.judge.endpoint.url=https://127.0.0.1/v1?key={KEY}"),
        ("--set", f"sinks=[{{type: mlflow, uri: 'postgresql://user:{KEY}@127.0.0.1/db'}}]"),
        ("--set", f"sinks=[{{type: wandb, api_key: {KEY}}}]"),
        ("--set", f"env.at=[grpc://user:{KEY}@127.0.0.1:1]"),
        ("--set", f"env.token={KEY}"),
        ("--set", f"env.api_key: {KEY}"),  # without "=": the message quotes the setting
        ("--set", f"env={{api_key: {KEY}"),  # no YAML
    ],
)
def test_credentials_on_the_command_line_are_refused_and_not_shown(words: tuple[str, str], tmp_path: Path) -> None:
    done = invoke("train", "configs/demo.yaml", "--root", tmp_path / "runs", *words)
    assert done.exit_code == 2, done.output
    assert KEY not in done.output + done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "grid", "info"])
def test_credentials_in_any_file_of_settings_are_refused(command: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"runs": [{"set": {"mlflow.uri": f"http://user:{KEY}@127.0.0.1"}}]}))
    words = ("--config",) if command == "info" else ()
    done = invoke(command, *words, path)
    assert done.exit_code == 2 and "runs.set.mlflow.uri holds credentials" in " ".join(done.stderr.split())
    assert KEY not in done.output + done.stderr


def test_python_callers_are_refused_too() -> None:
    with pytest.raises(ValueError, match=r"^env\.api_key holds credentials") as caught:
        run_request(GAME | {"env": {"type": "two_step", "api_key": KEY}})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"endpoint": {"url": "https://api.example.com/v1", "key_env": "A_KEY"}, "max_tokens": 5, "pad_token": "<pad>"},
        {"mirror": "abfs://container@account.dfs.core.windows.net/runs", "keys": ["a"], "secret": None},
        {"mirror": "sftp://me@nas/runs"},
        {"env": {"type": "helpers.toys:Whisper", "token": "x"}, "other": {"token": "<pad>"}},
        {"url": "https://api.example.com/v1?max_tokens=5&sort_key=name&author=me&passes=2&design=a&top_tokens=3"},
        {"prompt": f"write to http://user:{KEY}@host in the text", "url": "s3://bucket/runs?version=2"},
    ],
)
def test_other_settings_are_accepted(tree: dict) -> None:
    check_no_credentials(tree)


def test_shipped_configs_hold_no_credentials() -> None:
    paths = [template.path for template in templates()]
    assert len([load(path) for path in paths]) > 20


def test_command_and_errors_are_written_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["palestra", "train", f"--traces=http://user:{KEY}@h", f"http://h/?api_key={KEY}", f"api_key={KEY}"]
    monkeypatch.setattr("sys.argv", command)
    with Run.create(tmp_path, "name: x\n", "x") as run:
        run.replace_config("name: x\nsteps: 3\n")
        with pytest.raises(RuntimeError), write_error_file(run.path):
            raise RuntimeError(f"401 for http://user:{KEY}@h/v1?token={KEY}, sent Authorization: Bearer {KEY}")
    texts = [file.read_text() for file in run.path.rglob("*") if file.is_file()]
    assert any("http://REDACTED@h" in text for text in texts) and not any(KEY in text for text in texts)


def test_warning_of_a_sink_shows_no_credentials(tmp_path: Path) -> None:
    """A run of before, whose config holds credentials: W&B and MLflow are not sent it."""
    said: list[str] = []
    with Run.create(tmp_path, f"name: x\nendpoint: {{url: 'http://user:{KEY}@h'}}\n", "x") as run:
        run.log_metrics(0, "team", {"success": 1.0})
        config = validate(SinksConfig, parse("sinks: [{type: tensorboard, folder: /dev/null/x}]")).sinks
        with follow_run(run.path, config, said.append):
            pass
    assert said and KEY not in said[0]


def test_hidden_text_keeps_everything_else() -> None:
    text = f"error at http://user:{KEY}@h:8000/a?x=1&api_key={KEY}, 'password': '{KEY}', policies: key_env, a@b.org"
    wanted = (
        "error at http://REDACTED@h:8000/a?x=1&api_key=REDACTED, 'password': 'REDACTED', policies: key_env, a@b.org"
    )
    assert hide_credentials(text) == wanted


@pytest.mark.parametrize("text", ["a" * 30_000, "a." * 15_000, "x://" + "?" * 30_000])
def test_long_words_are_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    assert hide_credentials(text) == text
    assert time.process_time() - start < 1.0  # 5 s or more if each start of a word is read to its end


@pytest.mark.slow
def test_one_of_four_starts_of_one_name_trains(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(GAME | {"env_steps": 60_000}))
    words = ("train", path, "--root", tmp_path / "runs", "--name", "x", "--auto-resume")
    processes = [start_palestra(*words) for _ in range(4)]
    done = [(process.communicate(timeout=250), process.returncode) for process in processes]
    assert sorted(code for _, code in done) == [0, 2, 2, 2], done
    refusals = [err.strip() for (_, err), code in done if code]
    assert all("process " in line and " is writing the run" in line and "\n" not in line for line in refusals), refusals
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["x"]
    assert run_palestra(*words).returncode == 0  # a start after them continues it


def test_a_start_that_died_before_its_config_was_written_is_repeated(tmp_path: Path) -> None:
    path, folder = tmp_path / "x.yaml", tmp_path / "runs" / "x"
    path.write_text(yaml.safe_dump(GAME | {"env_steps": 128}))
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{")
    words = ("train", path, "--root", tmp_path / "runs", "--name", "x", "--auto-resume")
    assert invoke(*words).exit_code == 0
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["x"]
    (folder / "config.yaml").rename(folder / "notes.txt")
    done = invoke(*words)
    assert done.exit_code == 2 and "which another process wrote" in " ".join(done.stderr.split())


def test_dashboard_shows_a_run_of_before_without_its_credentials(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"endpoint: {{url: 'http://user:{KEY}@h', body: {{api_key: {KEY}}}}}\nsteps: 2\n")
    tree = read_config(path)
    assert tree["steps"] == 2 and KEY not in str(tree)
