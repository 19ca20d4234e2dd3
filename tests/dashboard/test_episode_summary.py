"""The episode index agrees with the episodes."""

import numpy as np
import pytest

from palestra.core.types import Answer, Episode, Node
from palestra.dashboard.episode_summary import summarize_episodes
from palestra.runs import Run, load_episodes


def node(number, parent, depth, seat="a", reward=0.0, team=0.0, **options):
    info = options.pop("info", {})
    return Node(
        number,
        parent,
        depth,
        {seat: "seen"},
        {seat: Answer("said", f"{seat}@1")},
        {seat: reward},
        team,
        info=info,
        **options,
    )


def tree():
    """Two trajectories that were played to the end, one of them won, and siblings that were not continued."""
    return Episode(
        "toy",
        7,
        {"a": "a@1", "b": "b@1"},
        [
            node(0, None, 0, reward=1.0),
            node(1, None, 0, reward=50.0, chosen=False),
            node(2, 0, 1, "b", 2.0, 1.0, done=True, info={"success": True, "invalid": True}),
            node(3, 0, 1, "b", 4.0, 0.0, done=True, info={"success": False, "invalid": {"b": False}}),
            node(4, 0, 1, "b", 90.0, 9.0, chosen=False, done=True, info={"success": True, "invalid": True}),
        ],
    )


@pytest.fixture
def path(tmp_path):
    episodes = [
        tree(),
        Episode("toy", 8, {"a": "a@1"}, error="the env broke"),
        Episode("toy", 9, {"a": "a@1"}, [node(0, None, 0, reward=0.5, done=True)]),
        Episode("toy", 10, {"a": "a@1"}, [node(0, None, 0, reward=0.25, done=True)]),
    ]
    with Run.create(tmp_path, "name: toy\n", "toy") as run:
        return run.write_episodes(3, episodes)


def test_episode_summary_by_hand(path):
    rows = summarize_episodes([path]).to_pylist()
    first = rows[0]
    assert (first["step"], first["episode"], first["seed"], first["nodes"], first["turns"]) == (3, 0, 7, 5, 2)
    assert first["success"] == 0.5 and first["team"] == 0.5  # means over the two trajectories
    assert first["return/a"] == 1.0 and first["return/b"] == 3.0 and first["total"] == 4.5
    assert first["invalid"] == 1
    assert rows[1]["error"] == "the env broke" and rows[1]["nodes"] == rows[1]["turns"] == 0
    assert rows[1]["return/b"] is None and rows[1]["success"] is None
    assert [row["return/a"] for row in rows[2:]] == [0.5, 0.25] and rows[2]["success"] is None


def test_episode_summary_agrees_with_the_episodes(root):
    paths = sorted((root / "more" / "episodes").glob("*.parquet"))
    rows = summarize_episodes(paths).to_pylist()
    episodes = [episode for path in paths for episode in load_episodes(path)]
    assert len(rows) == len(episodes) == 60
    for row, episode in zip(rows, episodes, strict=True):
        line = [n for n in episode.nodes if n.chosen]
        assert row["success"] == episode.success and row["turns"] == len(line)
        assert row["team"] == pytest.approx(sum(n.team_reward for n in line))
        for seat in episode.seats:
            assert row[f"return/{seat}"] == pytest.approx(sum(n.rewards.get(seat, 0.0) for n in line))
        assert row["invalid"] == sum(bool(n.is_invalid(seat)) for n in line for seat in n.answers)
    assert np.unique([row["step"] for row in rows]).tolist() == list(range(30))


def test_foreign_files_are_refused(tmp_path):
    other = tmp_path / "step-000000.parquet"
    other.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot read episodes"):
        summarize_episodes([other])
