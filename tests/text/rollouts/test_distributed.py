"""Ranks that share a rollout: each plays its part, and all get all episodes in order."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

import pytest

from palestra.core.types import Episode
from palestra.envs import Env
from palestra.text.rollouts.rank_split import RankSplit, RankSplitRunner, RankSplitSource
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec


@dataclass
class ThreadGroup:
    """A meeting point of threads that stand for processes."""

    size: int
    things: dict = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=20)


@dataclass
class Member:
    rank: int
    meeting: ThreadGroup

    @property
    def world_size(self):
        return self.meeting.size

    def all_gather(self, thing):
        self.meeting.things[self.rank] = thing
        self.meeting.barrier.wait()
        found = [self.meeting.things[rank] for rank in range(self.world_size)]
        self.meeting.barrier.wait()
        return found


class Numbers:
    """A source whose episodes are their numbers; it records which rank played which."""

    def __init__(self):
        self.played = []

    async def play(self, numbers, branching, memory, on_episode=None):
        self.played += numbers
        episodes = [Episode("counting", number, {}) for number in numbers]
        for episode in episodes:
            on_episode(episode)
        return episodes

    def observe(self, episodes, memory):
        return {"seen": float(len(episodes))}


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_ranks_split_episodes_and_gather_them_in_order(size):
    meeting, readied = ThreadGroup(size), []
    sources, results, heard = ([Numbers() for _ in range(size)], [None] * size, [[] for _ in range(size)])

    @contextlib.contextmanager
    def opened():
        readied.append("open")
        yield
        readied.append("closed")

    def run_rank(rank):
        shared = RankSplitSource(sources[rank], RankSplit(Member(rank, meeting), opened))
        on_episode = heard[rank].append
        results[rank] = asyncio.run(shared.play(range(10, 17), Branching(), {}, on_episode))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([e.seed for e in episodes] == list(range(10, 17)) for episodes in results)
    assert sorted(n for source in sources for n in source.played) == list(range(10, 17))
    assert max(len(source.played) for source in sources) == -(-7 // size)
    assert all(sorted(e.seed for e in ears) == list(range(10, 17)) for ears in heard)
    assert readied.count("open") == readied.count("closed") == size
    assert RankSplitSource(sources[0], RankSplit(Member(0, meeting), opened)).observe(results[0], {}) == {"seen": 7.0}


def test_distributed_runner_records_failed_episodes():
    class Broken(Env):
        name, seats, roles = "broken", ("agent",), {}

        def reset(self, seed):
            raise RuntimeError("no such game")

        def step(self, actions):
            raise AssertionError("reset failed")

    arena = RankSplitRunner(
        EpisodeRunner(Broken, "broken"), RankSplit(Member(0, ThreadGroup(1)), contextlib.nullcontext)
    )
    (episode,) = asyncio.run(arena.play_all([EpisodeSpec(3, {}, 0)], Branching()))
    assert episode.error == "RuntimeError: no such game" and arena.name == "broken"
