"""Sampling of envs: by weights, by measured success, and reproducibly from the seed."""

import asyncio
from collections import Counter

import pytest
from helpers.toys import Chant, Spoken, Whisper

from palestra.core.types import Episode, Node
from palestra.text.rollouts.sources import SUCCESS_KEY, EnvSource
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner


def games(**options):
    arenas = {"whisper": EpisodeRunner(Whisper, "whisper"), "chant": EpisodeRunner(Chant, "chant")}
    policy = Spoken("p", lambda query, i: "1")
    seats = dict.fromkeys(("guide", "walker", "caller", "herald"), policy)
    plays = {"whisper": Whisper.seats, "chant": Chant.seats}
    return EnvSource(arenas, lambda: seats, options.pop("seed", 3), env_seats=plays, **options)


def drawn(source, count=4000, memory=None):
    return Counter(name for name, _ in source.episode_specs(range(count), memory or {}))


@pytest.mark.parametrize(
    ("weights", "share"), [({}, 0.5), ({"whisper": 3.0}, 0.75), ({"whisper": 0.0}, 0.0), ({"chant": 0.25}, 0.8)]
)
def test_envs_are_sampled_by_weight(weights, share):
    assert drawn(games(weights=weights))["whisper"] / 4000 == pytest.approx(share, abs=0.03)


def test_frontier_prefers_envs_of_medium_success():
    """s(1 - s) is .25 for one env and .09 for the other: .25 / .34 of nine tenths, and half of one tenth."""
    source = games(curriculum="frontier")
    memory = {SUCCESS_KEY: {"whisper": 0.5, "chant": 0.9}}
    assert source.env_probabilities(memory) == pytest.approx(
        {"whisper": 0.05 + 0.9 * 0.25 / 0.34, "chant": 0.05 + 0.9 * 0.09 / 0.34}
    )
    assert drawn(source, memory=memory)["whisper"] / 4000 == pytest.approx(0.712, abs=0.03)


def test_frontier_keeps_a_share_of_solved_envs_and_starts_uniform():
    source = games(curriculum="frontier", floor=0.2)
    assert source.env_probabilities({SUCCESS_KEY: {"whisper": 1.0, "chant": 0.5}}) == pytest.approx(
        {"whisper": 0.1, "chant": 0.9}
    )
    assert source.env_probabilities({SUCCESS_KEY: {"whisper": 1.0, "chant": 0.0}}) == {"whisper": 0.5, "chant": 0.5}
    assert source.env_probabilities({}) == {"whisper": 0.5, "chant": 0.5}


@pytest.mark.parametrize("success", [0.0, 1.0])
def test_frontier_respects_weights_if_every_env_is_solved_or_unsolved(success):
    source = games(curriculum="frontier", weights={"whisper": 3.0, "chant": 1.0})
    solved = {SUCCESS_KEY: {"whisper": success, "chant": 1.0}}
    assert source.env_probabilities(solved) == pytest.approx({"whisper": 0.75, "chant": 0.25})
    excluded = games(curriculum="frontier", weights={"chant": 0.0})
    assert excluded.env_probabilities({SUCCESS_KEY: {"whisper": success}}) == {"whisper": 1.0, "chant": 0.0}


def ended(env, success, error=None, **info):
    node = Node(0, None, 0, {}, {}, done=True, info=info if success is None else {"success": success})
    return Episode(env, 0, {}, [node], error)


def test_success_rate_is_per_env_without_failed_episodes():
    source, memory = games(curriculum="frontier", rate=0.5), {}
    first = [ended("whisper", True), ended("whisper", False), ended("whisper", True, error="broken")]
    assert source.observe(first, memory)["whisper.success"] == 0.5
    assert memory == {SUCCESS_KEY: {"whisper": 0.5}}  # the other env was not played
    figures = source.observe([ended("whisper", True), ended("chant", False)], memory)
    assert memory == {SUCCESS_KEY: {"whisper": 0.75, "chant": 0.0}}
    assert figures["whisper.success"] == 1.0 and figures["chant.share"] == pytest.approx(0.05)


def test_env_without_success_has_no_rate_and_frontier_refuses_it():
    episodes, memory = [ended("whisper", True), ended("chant", None)], {}
    assert set(games().observe(episodes, memory)) == {"whisper.success", "whisper.share", "chant.share"}
    assert memory == {SUCCESS_KEY: {"whisper": 1.0}}
    with pytest.raises(ValueError, match='needs the success of episodes, and env "chant" reports none'):
        games(curriculum="frontier").observe(episodes, {})


def test_trajectories_cut_off_by_the_context_are_no_env_without_success():
    source, cut, memory = games(curriculum="frontier", rate=0.5), ended("chant", None, context_full=True), {}
    source.observe([cut], memory)
    assert memory == {SUCCESS_KEY: {}}  # unknown
    source.observe([ended("chant", True)], memory)
    source.observe([cut], memory)
    assert memory == {SUCCESS_KEY: {"chant": 0.5}}


def test_single_env_keeps_no_success_rates():
    source, memory = EnvSource({"train": EpisodeRunner(Whisper, "train")}, dict, 0), {}
    assert source.observe([ended("train", True)], memory) == {} and memory == {}


def test_episode_specs_have_env_instance_and_seats():
    source = games()
    numbers = range(40, 60)
    episodes = asyncio.run(source.play(numbers, Branching(), {}))
    kinds = [name for name, _ in source.episode_specs(numbers, {})]
    assert [e.env for e in episodes] == kinds and set(kinds) == {"whisper", "chant"}
    assert [e.seed for e in episodes] == [(3 << 32) + n for n in numbers]
    for episode in episodes:
        assert episode.error is None
        assert list(episode.seats) == list({"whisper": Whisper.seats, "chant": Chant.seats}[episode.env])


def test_draws_depend_on_seed_and_episode_number_only():
    whole = games().episode_specs(range(50), {})
    assert games().episode_specs(range(30, 50), {})[0][1].seed == whole[30][1].seed
    assert [name for name, _ in games().episode_specs(range(50), {})] == [name for name, _ in whole]
    assert [name for name, _ in games(seed=4).episode_specs(range(50), {})] != [name for name, _ in whole]
