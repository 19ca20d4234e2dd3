"""Envs by chance, by seed, endless, empty for a step, and with rewards, observations and masks of odd kinds: each is
played right, or refused in one line with the name of the env."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import invoke
from helpers.odd_envs import LENGTH, Words
from helpers.vector_toys import Countdown

import palestra as pl
from palestra.core.failures import RunFailed
from palestra.envs.vector_base import GamesDiffer
from palestra.populations.population import Sides
from palestra.populations.workers.net_oracle import play_cells
from palestra.testing import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.vector.build.envs import make_vector_env, seed_notes
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.policies.frozen import UniformMember
from palestra.vector.rollouts.replay_recorder import ReplayRecorder
from palestra.vector.rollouts.rollout import VectorRollout
from palestra.vector.trainer import play_eval


def gymnasium_env(odd: str, **options: Any) -> dict[str, Any]:
    return {
        "type": "gymnasium",
        "id": f"helpers.odd_envs:odd-{odd.replace(' ', '-') or 'plain'}",
        "num_envs": 2,
    } | options


def pettingzoo_env(odd: str, factory: str = "pair") -> dict[str, Any]:
    return {"type": "pettingzoo", "env": f"helpers.odd_envs:{factory}", "options": {"odd": odd}, "num_envs": 2}


def openspiel_env(game: str, num_envs: int = 16) -> dict[str, Any]:
    return {"type": "openspiel", "game": game, "num_envs": num_envs}


def returns_of(config: dict[str, Any], episodes: int = 2) -> dict[str, float]:
    """Returns the mean returns by seat of an evaluation with random players, as a run plays it."""
    env = make_vector_env(config)
    try:
        players = [UniformVectorPolicy(env, range(len(env.seats)))]
        returns: dict[str, float] = play_eval(ReplayRecorder(env, 1), players, episodes, 0)["returns"]
        return returns
    finally:
        env.close()


PAID = {
    "gymnasium": (gymnasium_env(""), {"agent": LENGTH}),
    "gymnasium, array of one number as reward": (gymnasium_env("array of one number"), {"agent": LENGTH}),
    "gymnasium, in processes": (gymnasium_env("", num_processes=2), {"agent": LENGTH}),
    "parallel": (pettingzoo_env(""), {"a": LENGTH, "b": LENGTH}),
    "parallel, array of one number as reward": (pettingzoo_env("array of one number"), {"a": LENGTH, "b": LENGTH}),
    "parallel, no observation in one step": (pettingzoo_env("empty"), {"a": LENGTH - 1, "b": LENGTH - 1}),
    "parallel, b comes in step 3": (pettingzoo_env("late"), {"a": LENGTH, "b": LENGTH - 3}),
    "parallel, observations of absent agents": (pettingzoo_env("all observed"), {"a": LENGTH, "b": LENGTH - 3}),
    "parallel, None for an agent that died": (pettingzoo_env("b dies unseen"), {"a": LENGTH, "b": 3}),
    "turn-based": (pettingzoo_env("", "turns"), {"a": 4, "b": 4}),
    "turn-based, rewards only in `rewards`": (pettingzoo_env("rewards not booked", "turns"), {"a": 4, "b": 4}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "processes" in name else name for name in PAID]
)
def test_returns_are_those_by_hand(name: str) -> None:
    config, expected = PAID[name]
    assert returns_of(config) == expected


REFUSED = {
    "gymnasium, None as reward": (gymnasium_env("no reward"), 'seat "agent" is paid None, which is not a number'),
    "gymnasium, text as reward": (gymnasium_env("text reward"), "seat \"agent\" is paid '1', which is not a number"),
    "gymnasium, three rewards for one seat": (gymnasium_env("array"), "pay one number, or one for each of 1 seats"),
    "gymnasium, shape of another space": (
        gymnasium_env("wrong shape"),
        r'seat "agent" sees an array \[1\], and its .*\[2\]',
    ),
    "gymnasium, NaN as reward": (gymnasium_env("nan reward"), 'gives seat "agent" a reward of nan in game 0'),
    "parallel, the API of before": (
        pettingzoo_env("old api"),
        r"step returned 4 values: return \(observation, reward, terminated, truncated, info\)",
    ),
    "gymnasium, text as observation": (gymnasium_env("text"), "could not convert string to float"),
    "gymnasium, NaN as observation": (gymnasium_env("nan"), 'shows seat "agent" observations that are not finite'),
    "gymnasium, masked observation": (gymnasium_env("masked"), "an observation is a masked array.*fill it"),
    "gymnasium, complex observation": (gymnasium_env("complex"), "an observation has complex numbers: show real"),
    "gymnasium, integer that is rounded": (
        gymnasium_env("large integer"),
        "an observation has an integer of size 16777217, and float32 rounds those above 16777216: scale it",
    ),
    "gymnasium, no legal action": (gymnasium_env("no legal action"), 'lets seat "agent" act in game 0 and gives it no'),
    "parallel, no legal action": (
        pettingzoo_env("no legal action"),
        'lets seat "b" act in game 0 and gives it no legal',
    ),
    "parallel, ends without flags": (
        pettingzoo_env("silent end"),
        "drops agent (a|b) from its agents without a flag: set its termination or its truncation to True",
    ),
    "parallel, nobody after reset": (
        pettingzoo_env("nobody at first"),
        "pair shows none of its `agents` an observation",
    ),
    "parallel, None as observation": (pettingzoo_env("none"), 'pair shows agent "a" None: show it an observation'),
    "parallel, None as reward": (pettingzoo_env("no reward"), 'seat "b" is paid None, which is not a number'),
    "parallel, reward of an unknown agent": (pettingzoo_env("unknown reward"), "pair pays agent 'c', which is none of"),
    "parallel, a list of rewards": (pettingzoo_env("listed"), "pair returned rewards as a list: a ParallelEnv gives a"),
    "parallel, an unknown agent": (pettingzoo_env("unknown observation"), "pair observes agent 'c', which is none of"),
    "turn-based, reward of an unknown agent": (
        pettingzoo_env("unknown reward", "turns"),
        "turns pays agent 'c', which",
    ),
    "turn-based, rewards twice": (
        pettingzoo_env("rewards kept", "turns"),
        "turns pays agent . 1 in `rewards` and adds 0",
    ),
    "turn-based, rewards unseen": (
        pettingzoo_env("rewards booked", "turns"),
        "turns pays agent . 0 in `rewards` and adds 1",
    ),
    "turn-based, ended agents stay": (
        pettingzoo_env("ended agents stay", "turns"),
        "turns selects agent b again and again",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_name_of_the_env(name: str) -> None:
    """The name is that of the user's env, not of what wraps it."""
    config, message = REFUSED[name]
    with pytest.raises(RunFailed, match=message) as error:
        returns_of(config)
    assert f'env "{config.get("id") or config["env"]}" ' in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_gymnasium_env_of_the_api_before_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"Line.*step returned 4 values: return \(observation, reward, terminated"):
        make_vector_env(gymnasium_env("old api"))


def test_a_tuple_of_actions_for_one_observation_is_refused_with_the_remedy() -> None:
    message = "acts in a Tuple, of which each part is a seat, and shows 1 .*: wrap the env so that"
    with pytest.raises(ValueError, match=message):
        make_vector_env(gymnasium_env("tuple of actions"))


# ---- endless


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.vector.rollouts.rollout.MAX_EPISODE_STEPS", 200)


@pytest.mark.usefixtures("short_limit")
def test_evaluation_of_an_endless_env_ends_with_its_name(tmp_path: Path) -> None:
    """In a run, whose first evaluation comes first."""
    with pytest.raises(RunFailed, match=r'env "helpers\.odd_envs:odd-endless" has not ended after 200 steps in game 0'):
        pl.train(
            env=gymnasium_env("endless"),
            policies={"default": {"type": "net", "hidden": [8]}},
            algorithm={"type": "ppo", "rollout_length": 8},
            steps=64,
            evals={"test": {"episodes": 2}},
            root=tmp_path,
        )


@pytest.mark.usefixtures("short_limit")
def test_payoffs_of_an_endless_game_end_with_its_name() -> None:
    env = make_vector_env(gymnasium_env("endless"))
    with pytest.raises(RunFailed, match=r'env "helpers\.odd_envs:odd-endless" has not ended after 200 steps'):
        rollout = VectorRollout(env, np.arange(2))
        play_cells(rollout, {"uniform": UniformMember()}, [["uniform"]], 4, 0, sides=Sides.of(env.seats))


@pytest.mark.usefixtures("short_limit")
def test_long_games_that_end_are_not_refused() -> None:
    assert returns_of(gymnasium_env(""), episodes=2 * 60) == {"agent": LENGTH}


# ---- by seed and by chance


def first_observations(config: dict[str, Any]) -> list[np.ndarray]:
    """Returns the first observations of two resets to the same seeds [B, ...]."""
    env = make_vector_env(config)
    return [env.reset(np.arange(env.num_envs)).obs.copy() for _ in range(2)]


@pytest.mark.parametrize("game", ["negotiation", "bridge_uncontested_bidding", "negotiation(num_items=4)"])
def test_games_that_draw_chance_themselves_differ_by_seed_and_repeat(game: str) -> None:
    """All copies played one instance, and a second reset to the same seed began another."""
    one, again = first_observations(openspiel_env(game))
    np.testing.assert_array_equal(one, again)
    assert len(np.unique(one.reshape(16, -1), axis=0)) > 12


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("misere(game=negotiation())", "draws its chance outcomes itself and takes no rng_seed"),
        ("restricted_nash_response(game=negotiation())", "takes no rng_seed"),
        ("negotiation(rng_seed=3)", "rng_seed is set for each episode: leave it out"),
    ],
)
def test_games_that_take_no_seed_are_refused(game: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vector_env(openspiel_env(game))


@pytest.mark.parametrize(
    "config",
    [
        {"type": "gymnasium", "id": "CartPole-v1", "num_envs": 4},
        {"type": "gymnasium", "id": "Taxi-v4", "num_envs": 4},
        {"type": "gymnasium", "id": "FrozenLake-v1", "num_envs": 4, "num_processes": 2},
        {"type": "pettingzoo", "env": "mpe2.simple_tag_v3:parallel_env", "num_envs": 4},
        {"type": "pettingzoo", "env": "pettingzoo.classic.tictactoe.tictactoe:env", "num_envs": 4},
        {"type": "pettingzoo", "env": "pettingzoo.classic.connect_four.connect_four:env", "num_envs": 4},
        {"type": "pettingzoo", "env": "pettingzoo.classic.rps.rps:parallel_env", "num_envs": 4},
        openspiel_env("negotiation", 4),
        openspiel_env("leduc_poker", 4),
        openspiel_env("goofspiel(num_cards=4)", 4),
        gymnasium_env(""),
        pettingzoo_env("empty"),
    ],
    ids=lambda config: str(config.get("id") or config.get("env") or config.get("game")),
)
@pytest.mark.few(4)
def test_envs_that_keep_their_seed_are_saved_and_restored(config: dict[str, Any]) -> None:
    """They play on as if never saved, and nothing is said about their seeds."""
    env, other = make_vector_env(config), make_vector_env(config)
    assert seed_notes(env) == []
    players = [UniformVectorPolicy(env, range(len(env.seats)))]
    rollout, restored = VectorRollout(env, np.arange(env.num_envs)), VectorRollout(other, np.arange(env.num_envs) + 50)
    rollout.collect(players, 11, 0)
    saved = rollout.save()
    assert saved is not None
    restored.load(saved, players)
    expected = rollout.collect(players, 9, 1)
    batch = restored.collect([UniformVectorPolicy(other, range(len(other.seats)))], 9, 1)
    np.testing.assert_array_equal(batch.obs, expected.obs)
    np.testing.assert_array_equal(batch.rewards, expected.rewards)
    env.close()
    other.close()


COPIES = 64  # of 16, once in 500 times, all games that end by chance were played again as they had been


def train_by_chance(odd: str, root: Path, steps: int, **options: Any) -> Any:
    env = gymnasium_env(odd, **{"num_envs": COPIES} | options)
    policies = {"default": {"type": "net", "hidden": [8]}}
    algorithm = {"type": "ppo", "rollout_length": 13, "minibatches": 1}
    return pl.train(env=env, policies=policies, algorithm=algorithm, steps=steps, root=root, name="run")


def test_env_that_ignores_its_seed_is_named_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_by_chance("ignores its seed", tmp_path, COPIES * 13)
    line = (
        'env "helpers.odd_envs:odd-ignores-its-seed" begins other games when it is reset to the same seeds (obs differ)'
    )
    assert line in " ".join(capsys.readouterr().out.split())


def test_evaluation_names_an_env_that_ignores_its_seed(tmp_path: Path) -> None:
    run = train_by_chance("ignores its seed", tmp_path, COPIES * 13)
    line = 'env "helpers.odd_envs:odd-ignores-its-seed" begins other games when it is reset to the same seeds'
    shown = invoke("eval", run.path, "--episodes", 4)
    assert line in " ".join(shown.stdout.split())
    assert line in json.loads(invoke("eval", run.path, "--episodes", 4, "--json").stdout)["not_repeatable"]


def test_population_names_an_env_that_ignores_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle = {"type": "net", "policy": {"hidden": [4]}, "algorithm": {"type": "ppo", "rollout_length": 16}}
    plan = {"type": "psro", "iterations": 1, "env_steps": 64, "games_per_cell": 4, "nash_conv_every": 0}
    env, backend = pettingzoo_env("ignores its seed"), {"type": "inline"}
    pl.train(env=env, oracle=oracle, population=plan, backend=backend, root=tmp_path)
    line = 'env "helpers.odd_envs:pair" begins other games when it is reset to the same seeds (obs differ)'
    assert line in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("num_processes", [0, 2])
@pytest.mark.parametrize("odd", ["ends by chance", "ignores its seed"])
@pytest.mark.few(2)
def test_games_by_chance_begin_anew_at_a_resume(
    odd: str, num_processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a run could not be resumed, or went on with other games under the saved observations."""
    run = train_by_chance(odd, tmp_path, 2 * COPIES * 13, num_processes=num_processes)
    capsys.readouterr()
    resumed = pl.train(resume=run, steps=4 * COPIES * 13)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f'env "helpers.odd_envs:odd-{odd.replace(" ", "-")}" is not a function of its seeds, so its games begin anew'
        in shown
    )
    team = resumed.metrics[resumed.metrics["policy"] == "team"]
    assert team["env_steps"].iloc[-1] == 4 * COPIES * 13 and np.isfinite(team["return"].dropna()).all()


def test_saved_games_of_another_env_are_not_continued() -> None:
    env, other = make_vector_env(gymnasium_env("")), make_vector_env(gymnasium_env(""))
    env.reset(np.arange(2))
    saved = env.save()
    assert saved is not None
    saved["frame.obs"] = saved["frame.obs"] + 1
    with pytest.raises(GamesDiffer, match="obs after the saved actions differ from those saved"):
        other.load(saved)


# ---- envs of one's own


def test_own_env_without_a_legal_action_is_refused_by_its_name() -> None:
    env = Countdown(3)
    assert env.vector_step.action_mask is not None
    rollout = VectorRollout(env, np.arange(3))
    env.show = lambda obs, state: env.vector_step.action_mask.fill(False)  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match='env "countdown" lets seat "seat0" act in game 0 and gives it no legal action'):
        rollout.collect([UniformVectorPolicy(env, [0, 1])], 4, 0)


# ---- text envs


def play_words(odd: str) -> Any:
    runner = EpisodeRunner(lambda: Words(odd), "words", max_steps=20)
    spec = EpisodeSpec(0, {"agent": ScriptedPolicy(["2"], "agent")}, 0)
    return asyncio.run(runner.play(spec, Branching()))


def test_text_env_is_played() -> None:
    episode = play_words("")
    assert episode.error is None and [node.rewards for node in episode.nodes] == [{"agent": 1.0}] * 2


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("endless", 'env "words" has not ended after 20 joint steps'),
        ("unknown reward", "env \"words\" gives a reward to seat 'Agent', and its seats are agent: correct the name"),
        ("no reward", 'env "words" gives seat "agent" a reward of None (NoneType): rewards must be finite numbers'),
        ("text reward", 'env "words" gives seat "agent" a reward of \'1.0\' (str): rewards must be finite numbers'),
        (
            "array reward",
            'env "words" gives seat "agent" a reward of array([1.]) (ndarray): rewards must be finite numbers',
        ),
        ("list of messages", "env \"words\" shows seat \"agent\" [{'role': 'user', 'content': '1 + 1?'}]"),
        ("none seen", 'env "words" shows seat "agent" None, which no prompt can show'),
    ],
)
def test_text_env_is_refused_by_its_name(odd: str, message: str) -> None:
    episode = play_words(odd)
    assert episode.error is not None and message in episode.error and len(episode.error.splitlines()) == 1
