"""The index of episodes follows its folder, and writes only into its cache."""

import os

import pytest
from helpers.long_runs import write_long_run

from palestra.dashboard.index import EpisodeIndex, cache_file
from palestra.runs import Run, load_episodes


@pytest.fixture
def run(tmp_path):
    return write_long_run(tmp_path / "runs", steps=70, episodes=2)


def steps(index):
    table, missing = index.table(timeout_s=30)
    assert missing == 0
    return table["step"].to_pylist()


def test_index_grows_with_the_run(run):
    index = EpisodeIndex(run / "episodes")
    assert steps(index) == sorted([*range(70), *range(70)])
    with Run.open(run) as writer:
        episodes = load_episodes(run / "episodes" / "step-000007.parquet")
        writer.write_episodes(70, episodes)
        writer.write_episodes(8, episodes[:1])
    now = steps(index)
    assert now[-2:] == [70, 70] and now.count(8) == 1
    (run / "episodes" / "step-000070.parquet").unlink()
    assert 70 not in steps(index)


def test_broken_file_is_named_and_skipped(run):
    (run / "episodes" / "step-000005.parquet").write_bytes(b"torn")
    index = EpisodeIndex(run / "episodes")
    assert set(steps(index)) == set(range(70)) - {5}
    assert "step-000005" in index.unreadable[5]


def test_links_are_not_followed(run, tmp_path):
    outside = tmp_path / "outside.parquet"
    (run / "episodes" / "step-000003.parquet").rename(outside)
    (run / "episodes" / "step-000003.parquet").symlink_to(outside)
    assert 3 not in steps(EpisodeIndex(run / "episodes"))


def test_cached_index_is_reused_by_the_next_server(run, cache):
    def files():
        return {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    before = files()
    first = EpisodeIndex(run / "episodes", cache_file(run / "episodes"))
    whole, _ = first.table(timeout_s=30)
    assert files() == before  # the run is unchanged
    assert first._worker is not None
    first._worker.join()
    assert len(list(cache.rglob("*.parquet"))) == 1
    for file, changed in before.items():  # the files are not read again
        if file.suffix == ".parquet":
            file.write_bytes(b"0" * file.stat().st_size)
            os.utime(file, ns=(changed, changed))
    second = EpisodeIndex(run / "episodes", cache_file(run / "episodes"))
    table, missing = second.table(timeout_s=30)
    assert missing == 0 and table.equals(whole)


def test_corrupt_cache_is_rebuilt(run):
    file = cache_file(run / "episodes")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not parquet")
    assert len(steps(EpisodeIndex(run / "episodes", file))) == 140


def test_index_of_no_episodes_is_empty(tmp_path):
    assert steps(EpisodeIndex(tmp_path / "none")) == []
