"""Training mirrored to an S3 server that is slow or down, by processes that are killed. Run by `make test-s3`."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from runs.mirror.proxy import Proxy

from palestra.runs import list_checkpoints, read_lines

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

STORE = "s3://bucket/runs"
GAMES = {
    "name": "run",
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "policies": {"default": {"type": "net", "hidden": [128, 128]}},
    "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 4, "minibatches": 4},
    "env_steps": 3200,
    "log_every": 32,
    "checkpoint_every": 64,
}


@pytest.fixture(scope="module")
def server():
    """The port of a server with one bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def proxy(server, monkeypatch):
    """A proxy in front of the server, with an empty bucket."""
    s3fs = pytest.importorskip("s3fs")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "a-secret-of-this-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with closing(Proxy(server)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        direct = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{server}", skip_instance_cache=True)
        if direct.exists("bucket"):
            direct.rm("bucket", recursive=True)
        direct.mkdir("bucket")
        proxy.bucket = direct
        yield proxy


def language(base):
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 3}, "lr": 1e-3}
    return {
        "name": "run",
        "steps": 12,
        "episodes": 6,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech | {"history": "conversation"}, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 4},
        "evals": {"dev": {"episodes": 4, "every": 3}},
        "checkpoint_every": 2,
    }


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """`palestra ARGUMENTS` as a process in `folder`."""
    folder.mkdir(exist_ok=True)
    tests = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from palestra.cli.main import app; app()", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def finish(process, code=0):
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out + err


def write_config(folder, tree, **changes):
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def wait_until(condition, process):
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def files(proxy):
    """The names of the files of the copy."""
    proxy.bucket.invalidate_cache()
    try:
        return {
            path.removeprefix("bucket/runs/run/"): proxy.bucket.size(path)
            for path in proxy.bucket.find("bucket/runs/run")
        }
    except FileNotFoundError:
        return set()


def copied_steps(proxy):
    """The steps up to which the copy has the run."""
    try:
        data = proxy.bucket.cat_file("bucket/runs/run/writer.json")
    except FileNotFoundError:
        return 0
    return json.loads(data)["progress"]


def assert_same(run, whole):
    for log in ("metrics.jsonl", "evals.jsonl"):
        if (whole / log).exists():
            assert (run / log).read_bytes() == (whole / log).read_bytes(), log
    last = list_checkpoints(whole)[-1].path
    files = [file for file in last.rglob("*") if file.is_file()]
    assert files
    for file in files:
        assert (run / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


def train_killed(folder, proxy, tree, point):
    """Trains until there is a complete state, then kills the process: in the middle of a file's upload, or between two,
    when some files of a new checkpoint but not its line are in the store."""
    config = write_config(folder, tree, mirror={"url": STORE, "min_interval_s": 0})
    process = start(folder, "train", config)
    wait_until(lambda: copied_steps(proxy) > 0, process)
    proxy.bytes_per_s = 20_000  # all connections together send several times this
    steps = copied_steps(proxy)
    before = files(proxy)
    if point == "file":
        sent = proxy.sent_bytes
        wait_until(lambda: proxy.sent_bytes > sent + 15_000, process)
    else:
        wait_until(
            lambda: any(name.startswith("checkpoints/") for name in files(proxy).keys() - before.keys()), process
        )
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    proxy.bytes_per_s = None
    assert copied_steps(proxy) < tree.get("steps", 100) and copied_steps(proxy) >= steps
    shutil.rmtree(folder / "runs")


@pytest.mark.parametrize("point", ["file", "between"])
@pytest.mark.parametrize("kind", ["games", "language"])
def test_resume_on_another_machine_after_a_kill_during_an_upload(kind, point, proxy, base, tmp_path):
    tree = GAMES if kind == "games" else language(base)
    whole = tmp_path / "whole"
    plain = start(whole, "train", write_config(whole, tree))
    train_killed(tmp_path / "a", proxy, tree, point)
    finish(plain)
    said = finish(start(tmp_path / "b", "train", "--resume", f"{STORE}/run"))
    assert "fetched runs/run: the run after" in said and "resuming after" in said
    assert_same(tmp_path / "b" / "runs" / "run", whole / "runs" / "run")

    finish(start(tmp_path / "c", "fetch", f"{STORE}/run"))  # the copy has the end of the run, and nothing else
    assert_same(tmp_path / "c" / "runs" / "run", whole / "runs" / "run")
    assert "1 steps" not in finish(start(tmp_path / "c", "runs", "--root", STORE))
    kept = {name.split("/")[1] for name in files(proxy) if name.startswith("checkpoints/")}
    assert kept == {path.name for path in (tmp_path / "b/runs/run/checkpoints").iterdir()}
    for file in (tmp_path / "b" / "runs" / "run").rglob("*"):
        assert not file.is_file() or b"a-secret-of-this-test" not in file.read_bytes(), file
    assert "a-secret-of-this-test" not in said


def test_copy_catches_up_after_the_store_was_down(proxy, tmp_path):
    tree = GAMES | {"env_steps": 3200, "checkpoint_every": 320}
    process = start(tmp_path, "train", write_config(tmp_path, tree, mirror={"url": STORE, "min_interval_s": 0}))
    run = tmp_path / "runs" / "run"
    wait_until(lambda: copied_steps(proxy) > 0, process)
    proxy.is_down = True
    steps = len(read_lines(run / "metrics.jsonl"))
    wait_until(lambda: '"failing_since": "' in (run / "mirror.json").read_text(), process)
    wait_until(lambda: len(read_lines(run / "metrics.jsonl")) > steps + 4, process)  # training continues
    proxy.is_down = False
    said = finish(process)
    assert f"alarm: the mirror {STORE}/run is behind, training continues without it:" in said
    assert "alarm: mirror is behind" not in said and '"failing_since": null' in (run / "mirror.json").read_text()
    finish(start(tmp_path / "b", "fetch", f"{STORE}/run"))
    assert_same(tmp_path / "b" / "runs" / "run", run)


def test_a_store_that_refuses_at_the_end_is_an_error(proxy, tmp_path):
    settings = {"url": STORE, "min_interval_s": 0, "final_wait_s": 1}
    process = start(tmp_path, "train", write_config(tmp_path, GAMES, mirror=settings))
    wait_until(lambda: copied_steps(proxy) > 0, process)
    proxy.is_down = True
    said = " ".join(finish(process, code=1).split())
    assert "error: the run is in runs/run, and its last state is not in its mirror; it has that after" in said
    assert "Then send it: palestra sync runs/run --to s3://bucket/runs" in said
    assert "mirror" in finish(start(tmp_path, "runs"))  # the alarm, in a narrow column
    proxy.is_down = False
    assert "has the run after 100 steps" in finish(start(tmp_path, "sync", "runs/run", "--to", STORE))
    finish(start(tmp_path / "b", "fetch", f"{STORE}/run"))
    assert_same(tmp_path / "b" / "runs" / "run", tmp_path / "runs" / "run")


def test_a_damaged_checkpoint_is_passed_over_and_a_missing_bucket_is_refused(proxy, tmp_path):
    tree = GAMES | {"env_steps": 640}
    finish(start(tmp_path, "train", write_config(tmp_path, tree), "--mirror", STORE))
    finish(start(tmp_path, "train", "--resume", "runs/run", "--set", "env_steps=960"))
    newest = max(name for name in files(proxy) if name.startswith("checkpoints/") and name.endswith(".safetensors"))
    proxy.bucket.pipe_file(f"bucket/runs/run/{newest}", b"bad")
    said = " ".join(finish(start(tmp_path / "b", "train", "--resume", f"{STORE}/run")).split())
    assert f"the checkpoint after 30 steps is passed over: {STORE}/run/{newest} is damaged" in said
    assert_same(tmp_path / "b/runs/run", tmp_path / "runs/run")
    finish(start(tmp_path / "d", "fetch", f"{STORE}/run"))  # the resumed run has sent it again
    assert_same(tmp_path / "d/runs/run", tmp_path / "runs/run")
    said = finish(
        start(tmp_path / "c", "train", write_config(tmp_path / "c", tree), "--mirror", "s3://none/runs"), code=1
    )
    assert "error: the store s3://none/runs/run does not answer: FileNotFoundError" in said
    assert "does the bucket or folder exist?" in said
