"""Runs mirrored to stores in memory and in folders: state after a crash, uploaded objects, and refusals."""

import time
from contextlib import closing, contextmanager

import pytest
from helpers.command_line import palestra, refused
from runs.mirror.stores import FlakyFileSystem, contents, new_run, train

from palestra.api.run import open_run, run_request
from palestra.cli.runs import print_alarms
from palestra.core.files import DamagedFile
from palestra.core.http.retry import RetryPolicy
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback
from palestra.runs.mirror.config import MirrorConfig
from palestra.runs.mirror.copy import (
    STAGING_FOLDER,
    Mirror,
    MirrorFailed,
    MirrorTaken,
    mirror_run,
    mirror_status,
    send_state,
)
from palestra.runs.mirror.fetch import fetch_run
from palestra.runs.mirror.store import StoreError, check_store_url

URL = "flaky://bucket/runs"


@pytest.fixture(autouse=True)
def store():
    FlakyFileSystem.reset()
    yield FlakyFileSystem
    FlakyFileSystem.reset()


@pytest.fixture
def fast_retries(monkeypatch):
    """Retries within milliseconds."""
    monkeypatch.setattr("palestra.runs.mirror.copy.RETRY", RetryPolicy(0.02, 0.05))
    monkeypatch.setattr("palestra.runs.mirror.copy.OPEN_RETRY", RetryPolicy(0.02, 0.02, timeout_s=0.1))
    monkeypatch.setattr("palestra.runs.mirror.copy.POLL_INTERVAL_S", 0.02)


@contextmanager
def mirror_of(path, url=URL):
    """The open mirror of a run."""
    with closing(Mirror(path, MirrorConfig(url=url))) as mirror:
        mirror.open()
        yield mirror


def fetch(to):
    return fetch_run(f"{URL}/demo", to)


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- consistency


def test_crash_at_any_write_leaves_a_complete_state(tmp_path, store):
    """The upload of a new state crashes before its first write, its second, ...: what is fetched resumes from the old
    or the new state, and a new writer completes the copy."""
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        with mirror_of(run.path) as mirror:
            mirror.sync()
        old = contents(run.path)
        train(run, 1)
    before = {key: bytes(file.getvalue()) for key, file in store.store.items()}
    steps = []
    for writes in range(100):
        store.reset()
        for key, data in before.items():
            store().pipe_file(key, data)
        with mirror_of(run.path) as mirror:
            store.writes_left = writes
            try:
                mirror.sync()
            except StoreError as error:
                assert "killed before this write" in str(error)
            is_complete = store.writes_left > 0
        store.writes_left = None
        with Run.open(fetch(tmp_path / f"fetched-{writes}").path) as fetched:
            steps.append(fetched.resume().step)
        if steps[-1] == 0:
            resumed = contents(fetched.path)
            assert {name: resumed[name] for name in old} == old
        send_state(run.path, MirrorConfig(url=URL))
        assert contents(fetch(tmp_path / f"again-{writes}").path) == contents(run.path)
        if is_complete:
            break
    assert steps[0] == 0 and steps[-1] == 1 and steps == sorted(steps) and len(steps) > 6


def test_only_changes_are_sent_and_pruned_checkpoints_are_deleted(tmp_path, store):
    with new_run(tmp_path) as run, mirror_of(run.path) as mirror:
        sent = []
        for _ in range(4):
            train(run, 1)
            before = mirror.sent_files
            assert mirror.sync() and not mirror.sync()
            sent.append(mirror.sent_files - before)
        assert sent[1:] == [6, 6, 6]  # two files of a checkpoint, three logs, the list
        checkpoints = {name.split("/")[1] for name in mirror.store.list_files() if name.startswith("checkpoints/")}
        assert checkpoints == {"step-000002", "step-000003"}  # as many as the run itself keeps
        assert (mirror.state.text, mirror.state.num_bytes) == ("4 steps", sum(mirror.store.list_files().values()))
    with Run.open(run.path), mirror_of(run.path) as mirror:
        (run.path / "notes.md").unlink(missing_ok=True)
        store().pipe_file("bucket/runs/demo/notes.md", b"left by an older state")
    with mirror_of(run.path) as mirror:
        mirror.sync()
        assert "notes.md" not in mirror.store.list_files()


def test_unfinished_files_and_lines_are_not_mirrored(tmp_path):
    with new_run(tmp_path) as run:
        train(run, 2)
        run.log_metrics(2, "planner", {"loss": 9.0})
        run.write_episodes(1, [])
        run.write_episodes(2, [])
        with open(run.path / "metrics.jsonl", "a") as log:
            log.write('{"step": 3')
        (run.path / ".tmp-half").write_text("half")
        (run.path / "link").symlink_to(run.path / "config.yaml")
        send_state(run.path, MirrorConfig(url=URL))
    fetched = fetch(tmp_path / "fetched").path
    assert [line["step"] for line in read_lines(fetched / "metrics.jsonl")] == [0, 1, 2]
    assert (fetched / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert not list(fetched.glob(".*")) and not (fetched / "link").exists()
    with Run.open(fetched) as again:
        assert again.resume().step == 1
    assert [path.name for path in (fetched / "episodes").iterdir()] == ["step-000001.parquet"]


def test_a_checkpoint_is_sent_although_the_run_prunes_it(tmp_path, store, monkeypatch):
    """The run makes three checkpoints while the first one is sent."""
    put = store.put_file
    with new_run(tmp_path) as run, mirror_of(run.path) as mirror:
        train(run, 1)

        def put_slowly(self, lpath, rpath, **kwargs):
            if not (run.path / "checkpoints" / "step-000003").exists():
                train(run, 3)
            put(self, lpath, rpath, **kwargs)

        monkeypatch.setattr("palestra.runs.mirror.copy.NUM_THREADS", 1)
        monkeypatch.setattr(store, "put_file", put_slowly)
        mirror.sync()
        assert not (run.path / "checkpoints" / "step-000000").exists()
        assert not (run.path / STAGING_FOLDER).exists()
        with Run.open(fetch(tmp_path / "fetched").path) as fetched:
            assert fetched.resume().step == 0


def test_a_run_without_a_checkpoint_has_no_copy_yet(tmp_path):
    with new_run(tmp_path / "a") as run, mirror_of(run.path) as mirror:
        run.log_metrics(0, "planner", {"loss": 1.0})
        assert not mirror.sync() and mirror.state.text == "0 steps"
    assert "has nothing of the run yet" in refused("fetch", f"{URL}/demo", "--root", tmp_path / "b")
    with new_run(tmp_path / "c") as other:  # the job begins again, on another machine
        train(other, 1)
        assert send_state(other.path, MirrorConfig(url=URL)) == "1 steps"


# ---- refusals


def test_a_damaged_checkpoint_is_passed_over_and_sent_again(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 2)
        send_state(run.path, MirrorConfig(url=URL))
    store().pipe_file("bucket/runs/demo/checkpoints/step-000001/planner/weights.safetensors", b"bad")
    said = palestra("fetch", f"{URL}/demo", "--root", tmp_path / "b")
    weights = f"{URL}/demo/checkpoints/step-000001/planner/weights.safetensors"
    assert f"the checkpoint after 2 steps is passed over: {weights} is damaged" in said
    with Run.open(tmp_path / "b" / "demo") as again, mirror_of(tmp_path / "b" / "demo") as mirror:
        assert again.resume().step == 0
        train(again, 1)
        mirror.sync()
    assert contents(fetch(tmp_path / "c").path) == contents(again.path)


def test_a_copy_without_an_intact_checkpoint_is_refused(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        send_state(run.path, MirrorConfig(url=URL))
    store().rm_file("bucket/runs/demo/checkpoints/step-000000/planner/weights.safetensors")
    with pytest.raises(DamagedFile, match=rf"no checkpoint of {URL}/demo is intact .*weights.safetensors is missing"):
        fetch(tmp_path / "b")
    assert not (tmp_path / "b" / "demo").exists()


@pytest.mark.parametrize("name", [".lock", "config.yaml/x", f"{'a/' * 600}b", "a/../../b"])
def test_a_copy_with_names_that_no_run_has_is_refused(name, tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        send_state(run.path, MirrorConfig(url=URL))
    store.store[f"/bucket/runs/demo/{name}"] = store.store["/bucket/runs/demo/config.yaml"]
    with pytest.raises(DamagedFile, match=r"is hidden, too long, or both|is not a path inside"):
        fetch(tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())


def test_second_writer_takes_over_the_copy(tmp_path):
    with new_run(tmp_path / "runs") as run, mirror_of(run.path) as first:
        train(run, 1)
        first.sync()
        with mirror_of(fetch(tmp_path / "b").path) as second:
            train(run, 1)
            with pytest.raises(MirrorTaken, match=rf"{second.writer} has taken over .*Stop one of the two"):
                first.sync()
    with (
        new_run(tmp_path / "c") as other,
        pytest.raises(MirrorTaken, match="is the copy of another run"),
        mirror_of(other.path),
    ):
        pass


def test_a_folder_that_is_no_copy_is_left_alone(tmp_path, store):
    store().pipe_file("bucket/runs/demo/thesis.tex", b"mine")
    with (
        new_run(tmp_path / "runs") as run,
        pytest.raises(MirrorTaken, match="holds files that are no copy of a run"),
        mirror_of(run.path),
    ):
        pass
    assert store().cat_file("bucket/runs/demo/thesis.tex") == b"mine"


def test_an_older_folder_does_not_replace_a_newer_copy(tmp_path):
    with new_run(tmp_path / "runs") as run, mirror_of(run.path) as mirror:
        train(run, 1)
        mirror.sync()
        old = fetch(tmp_path / "old").path
        train(run, 1)
        mirror.sync()
    with (
        pytest.raises(MirrorTaken, match=r"has this run after 2 steps, and .* after 1 only: move that folder away"),
        mirror_of(old),
    ):
        pass
    said = refused("fetch", f"{URL}/demo", "--root", tmp_path / "old")
    assert "is an older copy of this run, after 1 steps" in said
    assert "is there already" in palestra("fetch", f"{URL}/demo", "--root", tmp_path / "runs")
    new_run(tmp_path / "other").close()
    assert "is another run of that name" in refused("fetch", f"{URL}/demo", "--root", tmp_path / "other")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs", "is not the URL of a store"),
        ("s3://key:secret@host/runs", "holds credentials, which would be written"),
        ("nowhere://x", "fsspec knows no stores of the kind"),
        ("gs://bucket/runs", "needs a package"),
    ],
)
def test_invalid_urls_are_refused(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_store_url(url)
    assert "secret" not in str(caught.value)


# ---- a store that fails during training


def test_training_continues_while_the_store_is_down(tmp_path, store, fast_retries, capsys):
    said = []
    config = MirrorConfig(url=URL, min_interval_s=0.0)
    with new_run(tmp_path) as run, mirror_run(run.path, config, said.append):
        train(run, 1)
        wait_until(lambda: mirror_status(run.path)["state"] == "1 steps")
        store.is_down = True
        train(run, 1)
        wait_until(lambda: mirror_status(run.path)["failing_since"] and said)  # the status is written before the alarm
        (line,) = said
        assert line.startswith(f"alarm: the mirror {URL}/demo is behind, training continues without it:")
        assert "the store is down" in line
        print_alarms(run.path)
        assert "alarm: mirror is behind: since" in capsys.readouterr().out
        train(run, 1)
        store.is_down = False
        wait_until(lambda: mirror_status(run.path)["state"] == "3 steps")
        wait_until(lambda: said[1:] == [f"the mirror {URL}/demo has caught up"])
        assert not mirror_status(run.path)["failing_since"]
    assert contents(fetch_run(f"{URL}/demo", tmp_path / "b").path) == contents(run.path)


def test_store_failure_at_the_end_fails_the_run(tmp_path, store, fast_retries):
    config = MirrorConfig(url=URL, final_wait_s=0.1)
    with new_run(tmp_path) as run:
        with (
            pytest.raises(
                MirrorFailed, match=r"its last state is not in its mirror; it has that after 0 steps:"
            ) as error,
            mirror_run(run.path, config, print),
        ):
            store.is_down = True
            train(run, 1)
        assert f"palestra sync {run.path} --to {URL}" in str(error.value)
        store.is_down = False
        assert send_state(run.path, MirrorConfig(url=URL)) == "1 steps"


def test_mirror_error_does_not_hide_the_runs_error(tmp_path, store, fast_retries):
    said = []
    with new_run(tmp_path) as run:
        with pytest.raises(KeyError, match="the env"), mirror_run(run.path, MirrorConfig(url=URL), said.append):
            store.is_down = True
            raise KeyError("the env")
        assert "does not have the run's last state" in said[-1]


def test_store_failure_at_the_start_prevents_training(tmp_path, store, fast_retries):
    store.is_down = True
    with new_run(tmp_path) as run:
        with pytest.raises(StoreError, match=r"does not answer: OSError: the store is down; is it up") as error:
            mirror_run(run.path, MirrorConfig(url=URL), print).__enter__()
        assert f"palestra train --resume {run.path}" in error.value.__notes__[0]
        store.is_down = False
        with mirror_of(run.path), pytest.raises(ValueError, match="is writing the mirror of"):
            Mirror(run.path, MirrorConfig(url=URL))


# ---- the commands, on a store that is a folder

GAMES = {
    "name": "games",
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "policies": {"default": {"type": "net", "hidden": [4]}},
    "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 4, "minibatches": 4},
    "env_steps": 640,
    "log_every": 32,
    "checkpoint_every": 64,
}


class StopAfter(Callback):
    """Stops the run after a log line."""

    def __init__(self, step):
        self.last = step

    def on_step(self, step, metrics):
        if step >= self.last:
            self.stop()


def train_run(tree, root, *callbacks):
    """The folder of a run trained in this process, without plots."""
    with open_run(run_request(tree, root=root)) as opened:
        opened.train(callbacks)
    return opened.run.path


def test_resume_from_a_mirror_is_bit_identical(tmp_path):
    url = f"file://{tmp_path}/store"
    whole = train_run(GAMES, tmp_path / "whole")
    stopped = train_run(GAMES | {"mirror": {"url": url, "min_interval_s": 0}}, tmp_path / "a", StopAfter(9))
    assert len(read_lines(stopped / "metrics.jsonl")) < len(read_lines(whole / "metrics.jsonl"))
    assert " games " in palestra("runs", "--root", url)
    said = palestra("train", "--resume", f"{url}/games", "--root", tmp_path / "b")
    assert f"fetched {tmp_path}/b/games: the run after" in said
    run = tmp_path / "b" / "games"
    assert_same_training(run, whole)
    assert "not behind its mirror" in palestra("fetch", f"{url}/games", "--root", tmp_path / "b")
    back = fetch_run(f"{url}/games", tmp_path / "c").path
    assert_same_training(back, whole)
    assert mirror_status(run)["failing_since"] is None and not mirror_status(back)


def test_sync_uploads_a_finished_run(tmp_path):
    url = f"file://{tmp_path}/store"
    with new_run(tmp_path) as run:
        train(run, 2)
    for _ in range(2):
        assert f"{url}/demo has the run after 2 steps" in palestra("sync", run.path, "--to", url)
    assert not list((tmp_path / "store").rglob(".*"))
    assert contents(fetch_run(f"{url}/demo", tmp_path / "b").path) == contents(run.path)


def assert_same_training(run, whole):
    ours, theirs = contents(run), contents(whole)
    last = max(name.split("/")[1] for name in theirs if name.startswith("checkpoints/"))
    same = ["metrics.jsonl", *(name for name in theirs if last in name)]
    assert len(same) > 2 and all(ours[name] == theirs[name] for name in same)


@pytest.mark.slow
def test_population_resumes_from_its_mirror(tmp_path):
    tree = {
        "name": "psro",
        "env": {"type": "kuhn_poker"},
        "population": {"type": "psro", "iterations": 2},
        "oracle": {"type": "exact"},
    }
    whole, url = train_run(tree, tmp_path / "whole"), f"file://{tmp_path}/store"
    train_run(tree | {"mirror": url}, tmp_path / "a", StopAfter(4))
    fetched = fetch_run(f"{url}/psro", tmp_path / "b").path
    assert 4 < len(read_lines(fetched / "tasks.jsonl")) < len(read_lines(whole / "tasks.jsonl"))
    with open_run(run_request(tree, resume=fetched)) as opened:
        assert opened.train()
    for log in ("metrics.jsonl", "tasks.jsonl", "payoffs.csv"):
        assert (fetched / log).read_bytes() == (whole / log).read_bytes(), log
