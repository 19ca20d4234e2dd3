"""Runs mirrored to stores in memory and in folders: state after a crash, uploaded objects, and refusals."""

from __future__ import annotations

import time

import pytest
from helpers.command_line import invoke, palestra, refused
from runs.mirror.stores import FlakyFileSystem, contents, new_run, train

from palestra.api.run import open_run, run_request
from palestra.cli.runs import print_alarms
from palestra.core.files import DamagedFile
from palestra.core.http.retry import RetryPolicy
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback
from palestra.runs.mirror.config import MirrorConfig
from palestra.runs.mirror.fetch import fetch_run
from palestra.runs.mirror.follow import Mirror, MirrorFailed, mirror_run, mirror_status, send_state
from palestra.runs.mirror.snapshot import STAGING_FOLDER, stage, take_snapshot
from palestra.runs.mirror.store import RunStore, StoreError, check_store_url
from palestra.runs.mirror.uploader import MirrorTaken, Uploader

URL = "flaky://bucket/runs"


@pytest.fixture(autouse=True)
def store():
    FlakyFileSystem.reset()
    yield FlakyFileSystem
    FlakyFileSystem.reset()


@pytest.fixture
def fast_retries(monkeypatch):
    """Retries within milliseconds."""
    monkeypatch.setattr("palestra.runs.mirror.follow.RETRY", RetryPolicy(0.02, 0.05))
    monkeypatch.setattr("palestra.runs.mirror.follow.OPEN_RETRY", RetryPolicy(0.02, 0.02, timeout_s=0.1))
    monkeypatch.setattr("palestra.runs.mirror.follow.POLL_INTERVAL_S", 0.02)


def open_mirror(path):
    uploader = Uploader(path, f"{URL}/{path.name}")
    uploader.open()
    return uploader


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- consistency


def test_crash_at_any_write_leaves_a_complete_state(tmp_path, store):
    """The upload of a new state crashes before its first write, its second, ...: the copy is the old or the new state,
    and a new writer completes it."""
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        uploader = open_mirror(run.path)
        states = {1: contents(run.path)}
        train(run, 1)
        states[2] = contents(run.path)
    before, store.num_writes = {key: bytes(file.getvalue()) for key, file in store.store.items()}, 0
    assert uploader.sync()
    num_writes, found = store.num_writes, []
    for writes in range(num_writes + 1):
        store.reset()
        fs = store()
        for key, data in before.items():
            fs.pipe_file(key, data)
        store.writes_left = writes
        crashed = Uploader(run.path, uploader.store.url)
        crashed.writer, crashed.manifest = uploader.writer, uploader.store.read_manifest(1)
        crashed._kept, crashed._stored = [crashed.manifest], crashed.manifest.blocks
        if writes < num_writes:
            with pytest.raises(StoreError, match="killed before this write"):
                crashed.sync()
        else:
            crashed.sync()
        store.writes_left = None
        fetched = fetch_run(uploader.store.url, tmp_path / f"fetched-{writes}")
        assert contents(fetched.path) == states[fetched.manifest.progress]
        found.append(fetched.manifest.progress)
        open_mirror(run.path).sync()
        assert contents(fetch_run(uploader.store.url, tmp_path / f"again-{writes}").path) == states[2]
        named = {block for number in RunStore(uploader.store.url).generations() for block in _blocks(uploader, number)}
        assert RunStore(uploader.store.url).objects() == named  # objects left by the crash are deleted
    assert num_writes >= 5 and found == [1] * num_writes + [2]


def _blocks(uploader, number):
    return uploader.store.read_manifest(number).blocks


def test_only_changes_are_sent_and_old_states_are_deleted(tmp_path):
    with new_run(tmp_path) as run:
        uploader = open_mirror(run.path)
        sent = []
        for _ in range(4):
            train(run, 1)
            before = uploader.sent_bytes
            assert uploader.sync() and not uploader.sync()
            sent.append(uploader.sent_bytes - before)
        assert sent[0] > 400_000 and max(sent[1:]) < 20_000  # the base is uploaded once
        assert uploader.store.generations() == [5, 4]
        checkpoints = {name.split("/")[1] for name in uploader.manifest.files if name.startswith("checkpoints/")}
        assert checkpoints == {"step-000002", "step-000003"}  # as many as the run itself keeps
        kept = uploader.store.read_manifest(4).blocks | uploader.store.read_manifest(5).blocks
        assert uploader.store.objects() == kept


def test_a_grown_log_sends_its_last_block(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.runs.mirror.manifest.LOG_BLOCK_BYTES", 1000)
    with new_run(tmp_path) as run:
        train(run, 1)
        uploader = open_mirror(run.path)
        for step in range(200):
            run.log_metrics(1, "other", {"loss": step})
        train(run, 1)
        uploader.sync()
        first = uploader.manifest.files["metrics.jsonl"].blocks
        train(run, 1)
        uploader.sync()
        second = uploader.manifest.files["metrics.jsonl"].blocks
    assert len(first) == len(second) > 5 and first[:-1] == second[:-1] and first != second
    fetched = fetch_run(uploader.store.url, tmp_path / "fetched").path
    assert (fetched / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_logs_after_the_checkpoint_are_not_mirrored(tmp_path):
    with new_run(tmp_path) as run:
        train(run, 2)
        run.log_metrics(2, "planner", {"loss": 9.0})
        run.write_episodes(1, [])
        run.write_episodes(2, [])
        (run.path / ".tmp-half").write_text("half")
        open_mirror(run.path)
    fetched = fetch_run(f"{URL}/demo", tmp_path / "fetched").path
    assert [line["step"] for line in read_lines(fetched / "metrics.jsonl")] == [0, 1]
    assert [path.name for path in (fetched / "episodes").iterdir()] == ["step-000001.parquet"]
    assert not list(fetched.glob(".*"))
    with Run.open(fetched) as again:
        assert again.resume().step == 1


def test_a_checkpoint_is_sent_although_the_run_prunes_it(tmp_path):
    with new_run(tmp_path) as run:
        train(run, 1)
        staged = stage(run.path, take_snapshot(run.path))
        train(run, 3)
        assert not (run.path / "checkpoints" / "step-000000").exists()
        weights = [source for source in staged.sources if source.name.startswith("checkpoints/")]
        assert len(weights) == 2 and all(len(source.path.read_bytes()) == source.num_bytes for source in weights)
        uploader = open_mirror(run.path)
        uploader.sync()
        assert not (run.path / STAGING_FOLDER).exists()


def test_a_damaged_checkpoint_is_not_mirrored(tmp_path):
    with new_run(tmp_path) as run:
        uploader = open_mirror(run.path)
        train(run, 1)
        weights = run.path / "checkpoints" / "step-000000" / "planner" / "weights.safetensors"
        weights.write_bytes(b"x" * weights.stat().st_size)
        with pytest.raises(DamagedFile, match="differs from what was written, and is not mirrored"):
            uploader.sync()
    assert fetch_run(f"{URL}/demo", tmp_path / "fetched").manifest.progress == 0


# ---- refusals


def test_damaged_object_error_names_the_last_complete_generation(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        uploader = open_mirror(run.path)
        train(run, 1)
        uploader.sync()
    (new,) = uploader.manifest.files["checkpoints/step-000001/planner/weights.safetensors"].blocks
    store().pipe_file(f"bucket/runs/demo/objects/{new}", b"bad")
    said = invoke("fetch", f"{URL}/demo", "--root", tmp_path / "b")
    assert said.exit_code == 1, said.output
    message = " ".join(said.stderr.split())
    assert f"objects/{new} is damaged" in message and "checkpoints/step-000001/planner/weights.safetensors" in message
    assert f"palestra fetch {URL}/demo --generation 1" in message and "after 1 steps" in message
    assert not (tmp_path / "b" / "demo").exists()

    palestra("fetch", f"{URL}/demo", "--root", tmp_path / "b", "--generation", 1)
    with Run.open(tmp_path / "b" / "demo") as again:  # continues from there, and repairs the copy
        assert again.resume().step == 0
        mended = open_mirror(again.path)
        train(again, 1)
        mended.sync()
    assert contents(fetch_run(f"{URL}/demo", tmp_path / "c").path).keys() == contents(again.path).keys()


def test_missing_object_without_complete_generation_is_refused(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        uploader = open_mirror(run.path)
    (block,) = uploader.manifest.files["config.yaml"].blocks
    store().rm_file(f"bucket/runs/demo/objects/{block}")
    with pytest.raises(DamagedFile, match=r"is missing; it is a part of config\.yaml\. No earlier generation is whole"):
        fetch_run(f"{URL}/demo", tmp_path / "b")


def test_torn_manifest_is_skipped(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        uploader = open_mirror(run.path)
        train(run, 1)
        uploader.sync()
    data = store().cat_file("bucket/runs/demo/manifests/00000002")
    store().pipe_file("bucket/runs/demo/manifests/00000002", data[:100])
    said = palestra("fetch", f"{URL}/demo", "--root", tmp_path / "b")
    assert "generation 2 is passed over" in said and "the run after 1 steps" in said


def test_manifest_with_paths_outside_the_run_is_refused(tmp_path, store):
    with new_run(tmp_path / "runs") as run:
        uploader = open_mirror(run.path)
    for name in ("../outside", "/etc/passwd", ".lock", "a/../../b"):
        uploader.manifest.files[name] = uploader.manifest.files["config.yaml"]
        uploader.store.write_manifest(uploader.manifest)
        with pytest.raises(ValueError, match="has no copy of a run"):
            fetch_run(f"{URL}/demo", tmp_path / "b")
        del uploader.manifest.files[name]


def test_second_writer_takes_over_the_copy(tmp_path):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        first = open_mirror(run.path)
    fetched = fetch_run(f"{URL}/demo", tmp_path / "b").path
    second = open_mirror(fetched)
    with Run.open(run.path) as run:
        train(run, 1)
    with pytest.raises(MirrorTaken, match=rf"{second.writer} has taken over .*Stop one of the two"):
        first.sync()
    with new_run(tmp_path / "c") as other, pytest.raises(MirrorTaken, match="is the copy of another run"):
        open_mirror(other.path)


def test_an_older_folder_does_not_replace_a_newer_copy(tmp_path):
    with new_run(tmp_path / "runs") as run:
        train(run, 1)
        uploader = open_mirror(run.path)
        old = fetch_run(f"{URL}/demo", tmp_path / "old").path
        train(run, 1)
        uploader.sync()
    with pytest.raises(MirrorTaken, match=r"has this run after 2 steps, and .* after 1 only: move that folder away"):
        open_mirror(old)
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
        mirror = Mirror(run.path, MirrorConfig(url=URL))
        with pytest.raises(ValueError, match="is writing the mirror of"):
            Mirror(run.path, MirrorConfig(url=URL))
        mirror.close()


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
    assert len(list((tmp_path / "store" / "demo" / "manifests").iterdir())) == 2  # each process claims the copy
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
