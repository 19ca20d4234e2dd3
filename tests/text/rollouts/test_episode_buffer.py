"""Finished episodes on disk: unchanged, by number, and removed when no longer needed."""

import asyncio

import pytest
from helpers.toys import Spoken, Whisper

from palestra.runs.episodes import load_episodes
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.training.async_rollouts import EpisodeBuffer


def played(number, k=2):
    team = {seat: Spoken(f"{seat}@{number}", lambda query, i: str((query.seed + i) % 2)) for seat in Whisper.seats}
    return asyncio.run(EpisodeRunner(Whisper, "whisper").play(EpisodeSpec(number, team, number), Branching("turn", k)))


def filled(folder, numbers):
    buffer = EpisodeBuffer(folder)
    for number in numbers:
        asyncio.run(buffer.put(number, number // 2, played(number)))
    return buffer


def files(folder):
    return sorted(file.name for file in folder.iterdir())


def test_buffered_episodes_survive_a_disk_round_trip(tmp_path):
    buffer = filled(tmp_path / "buffer", [5])
    assert 5 in buffer and 4 not in buffer and files(tmp_path / "buffer") == ["episode-000005@2.parquet"]
    again, began = EpisodeBuffer(tmp_path / "buffer").get(5)
    ours = played(5)
    assert (again.env, again.seed, again.seats, began) == ("whisper", 5, {"guide": "guide@5", "walker": "walker@5"}, 2)
    assert len(again.nodes) == len(ours.nodes) == 6
    for node, other in zip(again.nodes, ours.nodes, strict=True):
        assert (node.rewards, node.team_reward, node.chosen) == (other.rewards, other.team_reward, other.chosen)
        for seat, answer in node.answers.items():
            assert answer.token_ids.tobytes() == other.answers[seat].token_ids.tobytes()
            assert answer.logprobs.tobytes() == other.answers[seat].logprobs.tobytes()
    (file,) = (tmp_path / "buffer").iterdir()
    assert load_episodes(file)[0].seed == 5  # the format of all recorded episodes
    with pytest.raises(KeyError):
        buffer.get(4)


def test_partially_written_episodes_are_ignored(tmp_path):
    filled(tmp_path / "buffer", [1])
    (tmp_path / "buffer" / ".tmp-episode-000002@1.parquet").write_bytes(b"PAR1")
    buffer = EpisodeBuffer(tmp_path / "buffer")
    assert 1 in buffer and 2 not in buffer


def test_drop_removes_only_the_given_episodes(tmp_path):
    buffer = filled(tmp_path / "buffer", range(4))
    buffer.drop(2)
    assert [number in buffer for number in range(4)] == [False, False, True, True]
    assert files(tmp_path / "buffer") == ["episode-000002@1.parquet", "episode-000003@1.parquet", "first"]
    assert 3 in EpisodeBuffer(tmp_path / "buffer", 2) and 3 in EpisodeBuffer(tmp_path / "buffer", 3)
    buffer.close()
    assert not (tmp_path / "buffer").exists()


def test_buffer_is_empty_after_rollback_before_dropped_episodes(tmp_path):
    """Episodes of weights after the rollback point are useless: the weights will be others."""
    filled(tmp_path / "buffer", range(4)).drop(2)
    buffer = EpisodeBuffer(tmp_path / "buffer", 1)
    assert not any(number in buffer for number in range(4))
    asyncio.run(buffer.put(1, 0, played(1)))
    assert 1 in EpisodeBuffer(tmp_path / "buffer", 1)  # and episodes played after that are stored again
