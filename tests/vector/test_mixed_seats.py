"""Training of seats with different kinds of actions and observations, each by an algorithm of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.mixed_envs import Hunt

import palestra as pl
from palestra.core.config import validate
from palestra.core.types import RolloutBatch
from palestra.envs.batch.sync_vector import episode_seed
from palestra.runs import list_checkpoints, read_lines
from palestra.runs.replays import read_replays
from palestra.vector.build.build import check_vector_run
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorConfig
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.policies.frozen import NetMember, UniformMember
from palestra.vector.policies.mixture import IndependentSampler, Mixture
from palestra.vector.rollouts.episodes import read_vector_episodes, record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

NET = {"type": "net", "hidden": [16]}
GRU = NET | {"gru_units": 8}
REPLAY = {"batch_size": 16, "learning_starts": 16, "gradient_steps": 2, "buffer_size": 300}
DQN = {"type": "dqn", **REPLAY}
PPO = {"type": "ppo", "epochs": 2, "minibatches": 2}


def config(hunters: Any = DQN, prey: Any = PPO, net: Any = NET, **options: Any) -> dict[str, Any]:
    """A run of `Hunt`, in which hunters choose and the prey gives numbers."""
    return {
        "name": "hunt",
        "env": {"type": "pettingzoo", "env": "helpers.mixed_envs:hunt", "options": options, "num_envs": 2},
        "policies": {"hunters": net | {"algorithm": hunters}, "prey": net | {"algorithm": prey}},
        "seats": {"hunter_*": "hunters", "prey": "prey"},
        "algorithm": {"type": "ppo", "rollout_length": 8},
        "env_steps": 2 * 8 * 6,
    }


def team(algorithm: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A run in which one algorithm trains all seats, as one team with one reward."""
    tree = config(team=True, **options)
    policies = {"hunters": NET, "prey": NET}
    return tree | {"policies": policies, "algorithm": {"rollout_length": 8} | algorithm, "teams": {"*": "all"}}


def train_step(tree: dict[str, Any], steps: int = 3) -> Mapping[str, Mapping[str, float]]:
    """Trains for some steps; returns the metrics of the last by policy."""
    trainer = check_vector_run(validate(VectorConfig, tree))
    try:
        for step in range(steps):
            metrics = trainer.update(step, trainer.collect(step)).learner_metrics
        return metrics
    finally:
        trainer.close()


# ---- what learners see


def expected_row(observation: Any) -> np.ndarray:
    """Returns an observation of `Hunt` as one row, by hand."""
    if isinstance(observation, dict) and "observation" in observation:
        observation = observation["observation"]
    if isinstance(observation, dict):
        return np.concatenate([observation["camera"].ravel() / 255, observation["where"]])
    if observation.dtype == np.uint8:
        return observation.ravel() / 255
    if observation.ndim == 3:
        return observation.transpose(1, 2, 0).ravel()
    return observation


def pettingzoo_actions(game: Hunt, actions: np.ndarray) -> dict[str, Any]:
    """Returns the actions [N, W] of a joint step as the game takes them, by hand."""
    given: dict[str, Any] = {}
    for agent, action in zip(game.possible_agents, actions, strict=True):
        space = game.action_space(agent)
        if isinstance(space, spaces.Discrete):
            given[agent] = int(np.ravel(action)[0])
        elif isinstance(space, spaces.MultiDiscrete):
            given[agent] = action.astype(np.int64)
        else:
            given[agent] = action.clip(-1, 1)
    return given


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"velocity": "multi", "sizes": True},
        {"masks": True},
        {"seen": "sizes", "masks": True},
        {"seen": "picture"},
        {"seen": "dict", "masks": True},
        {"seen": "pictures"},
    ],
    ids=str,
)
def test_learners_see_what_pettingzoos_own_loop_gives(options: dict[str, Any]) -> None:
    """With the same seeds and actions: observations, masks, rewards and ends of 40 steps, three episodes."""
    tree = config(**options)
    if options.get("sizes"):
        tree["policies"]["hunters"]["share_network"] = False
    tree["algorithm"]["rollout_length"] = 40
    trainer = check_vector_run(validate(VectorConfig, tree))
    seeds = np.array([5, 11])
    trainer.rollout.restart(seeds)
    batch, _ = trainer.collect(0)
    for game_index, seed in enumerate(seeds):
        game = Hunt(**options)
        compare_with_own_loop(game, int(seed), batch, game_index)
    trainer.close()


def compare_with_own_loop(game: Hunt, seed: int, batch: RolloutBatch, b: int) -> None:
    number = 0
    seen = game.reset(seed=episode_seed(seed, number))[0]
    ends = {(int(t), int(g)): i for i, (t, g) in enumerate(zip(*batch.end_index, strict=True))}
    for t in range(len(batch.rewards)):
        assert_sees(game, batch, batch.obs[t, b], seen, None if batch.action_mask is None else batch.action_mask[t, b])
        seen, rewards, _, truncated, _ = game.step(pettingzoo_actions(game, batch.actions[t, b]))
        assert batch.rewards[t, b].tolist() == [np.float32(rewards[agent]) for agent in game.possible_agents]
        assert batch.truncated[t, b] == truncated["prey"] and not batch.terminated[t, b]
        if truncated["prey"]:
            assert_sees(game, batch, batch.final_obs[ends[t, b]], seen, None)
            number += 1
            seen = game.reset(seed=episode_seed(seed, number))[0]
    assert number == 3


def assert_sees(
    game: Hunt, batch: RolloutBatch, obs: np.ndarray, seen: dict[str, Any], action_mask: np.ndarray | None
) -> None:
    for seat, agent in enumerate(game.possible_agents):
        row = expected_row(seen[agent])
        np.testing.assert_allclose(obs[seat, : len(row)], row, rtol=1e-6, atol=1e-7)
        assert not obs[seat, len(row) :].any()
        if action_mask is None:
            continue
        if agent == "prey":
            assert action_mask[seat].all()
        else:
            mask = seen[agent]["action_mask"]
            assert action_mask[seat].tolist() == [*mask.astype(bool), *[False] * (action_mask.shape[1] - len(mask))]


def test_learners_train_on_the_actions_of_their_own_seats() -> None:
    """Hunters on whole numbers, the prey on two floats, as they were played."""
    trainer = check_vector_run(validate(VectorConfig, config()))
    batch, _ = trainer.collect(0)
    stacks = {learner.names[0]: learner.stacks[0] for learner in trainer.learner.learners}  # type: ignore[attr-defined]
    hunters: PolicyStack = stacks["hunters"]
    actions = hunters.actions(batch)
    assert actions.shape == (1, 8, 4) and actions.dtype.is_floating_point is False
    assert np.array_equal(actions[0].view(8, 2, 2).numpy(), batch.actions[:, :, :2, 0])
    moves = stacks["prey"].actions(batch)
    assert moves.shape == (1, 8, 2, 2) and np.array_equal(moves[0].numpy(), batch.actions[:, :, 2])
    trainer.close()


# ---- learning


@pytest.mark.slow
def test_hunters_by_dqn_and_prey_by_ppo_learn_in_one_run(tmp_path: Path) -> None:
    """The prey, which gives numbers, reaches its burrow, and the hunters, which choose, follow it. Untrained, the prey
    earns 0 and the hunters -10 to 1 together; each could earn at most 12."""
    run = pl.train(
        config({"type": "dqn", "learning_starts": 500, "gradient_steps": 4, "buffer_size": 20_000}, {"type": "ppo"}),
        root=tmp_path,
        steps=20_000,
        env={"type": "pettingzoo", "env": "helpers.mixed_envs:hunt", "num_envs": 16},
        evals={"held_out": {"episodes": 64}},
        **{"policies.hunters.lr": 1e-3, "policies.prey.lr": 3e-3, "algorithm.rollout_length": 24},
    )
    returns = read_lines(run.path / "evals.jsonl")[-1]["returns"]
    assert returns["prey"] > 6
    assert returns["hunter_0"] + returns["hunter_1"] > 2


@pytest.mark.parametrize("name", ["mappo", "happo", "hatrpo", "maddpg", "matd3", "masac", "facmac"])
def test_a_team_of_several_kinds_is_trained_by(name: str) -> None:
    """Also with action masks. The joint action of central critics has both kinds."""
    replay = {} if "ppo" in name or "trpo" in name else REPLAY
    metrics = train_step(team({"type": name, **replay}, masks=True))
    for line in metrics.values():
        assert np.isfinite(line["policy_loss"])


@pytest.mark.parametrize(
    ("hunters", "net"),
    [
        ({"type": "qmix", **REPLAY}, GRU),
        ({"type": "qplex", **REPLAY}, NET),
        ({"type": "maven", **REPLAY}, NET),
        ({"type": "pqn", "epochs": 1, "minibatches": 1}, NET),
        ({"type": "nfsp", **REPLAY}, NET),
        ({"type": "coma"}, GRU),
        ({"type": "mat", "epochs": 1, "minibatches": 1}, NET),
        (DQN, GRU),
        ({"type": "sac", **REPLAY}, NET),
    ],
    ids=lambda value: value.get("type") + ("_gru" if value.get("gru_units") else ""),
)
def test_hunters_are_trained_beside_a_prey_that_gives_numbers(hunters: dict[str, Any], net: dict[str, Any]) -> None:
    tree = config(hunters, {"type": "sac", **REPLAY}, masks=True)
    tree["policies"]["hunters"] = net | {"algorithm": hunters}
    metrics = train_step(tree)
    losses = [value for line in metrics.values() for key, value in line.items() if "loss" in key]
    assert len(losses) > 1 and np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (team(DQN), 'dqn compares the values of single actions, but seat "prey" .* takes Continuous.*: use ppo'),
        (team({"type": "vdn", **REPLAY}), 'vdn compares the values of single actions, but seat "prey" .* takes Cont'),
        (team({"type": "qmix", **REPLAY}), 'qmix compares the values of single actions, but seat "prey" .* takes Co'),
        (team({"type": "coma"}), "coma needs a value of every action of a seat, .* without discrete actions: use ppo"),
        (
            config(DQN, {"type": "sac", **REPLAY}, velocity="multi"),
            "takes several choices at once, which sac cannot learn",
        ),
        (config(DQN, {"type": "sac", **REPLAY}, seen="dict"), "critics of sac cannot see the pixels .* beside actions"),
        (config({"type": "qmix", **REPLAY}, seen="dict"), "the mixer of qmix cannot see the pixels .* set mixer: vdn"),
        (config(net=NET | {"normalize_observations": True}, seen="dict"), "hunters sees an image beside other numbers"),
        (config(net=NET | {"encoder": "attention"}, seen="dict"), "does not say where they are .*: use encoder: flat"),
        (
            config() | {"policies": {"one": NET}, "seats": {"*": "one"}},
            "differ in observation shape or action space .*: give each kind of seat a policy of its own",
        ),
    ],
)
def test_what_a_method_cannot_train_is_refused_with_the_remedy(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_vector_run(validate(VectorConfig, tree))
    assert len(str(error.value).splitlines()) == 1


def test_a_critic_of_one_seat_sees_no_pixels_of_the_others() -> None:
    """Only the prey sees an image; `critic: central` would need it."""
    hunters = {"type": "sac", **REPLAY}
    assert np.isfinite(train_step(config(hunters, seen="picture"))["hunters"]["critic_loss"])
    with pytest.raises(ValueError, match="critics of masac cannot see the pixels"):
        check_vector_run(validate(VectorConfig, config(hunters | {"type": "masac"}, seen="picture")))


# ---- runs


class StopAt(pl.Callback):
    """Ends a run after some log lines."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def on_step(self, step: int, metrics: Any) -> None:
        self.lines -= 1
        if self.lines == 0:
            self.stop()


def contents(run: Path) -> dict[str, bytes]:
    """Returns the metrics, evaluations and the newest checkpoint of a run."""
    newest = list_checkpoints(run)[-1].path
    files = [run / "metrics.jsonl", run / "evals.jsonl", *(file for file in newest.rglob("*") if file.is_file())]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


@pytest.mark.parametrize(
    "tree",
    [
        config(net=GRU, masks=True),
        config({"type": "sac", **REPLAY}, {"type": "sac", **REPLAY}),
        config(net=NET | {"convolutions": "small"}, seen="dict", velocity="multi"),
        config()
        | {"env": {"type": "helpers.mixed_envs:Band", "num_envs": 2}}
        | {
            "policies": {name: NET | {"algorithm": PPO if name == "piano" else DQN} for name in ("drum", "piano")}
            | {"slide": NET | {"algorithm": {"type": "a2c"}}},
            "seats": {},
        },
    ],
    ids=["masks, recurrent", "sac", "images", "native"],
)
def test_resume_is_bit_identical(tree: dict[str, Any], tmp_path: Path) -> None:
    tree = tree | {"evals": {"held_out": {"episodes": 2, "every": 32, "replays": 1}}, "log_every": 16}
    whole = pl.train(tree, root=tmp_path / "whole")
    stopped = pl.train(tree, root=tmp_path / "parts", callbacks=[StopAt(3)])
    assert list_checkpoints(stopped.path)[-1].step < list_checkpoints(whole.path)[-1].step
    resumed = pl.train(resume=stopped)
    assert contents(resumed.path) == contents(whole.path)


def test_agents_of_a_mixed_run_play_evaluate_and_are_recorded(tmp_path: Path) -> None:
    run = pl.train(
        config(net=NET | {"convolutions": "small"}, masks=True, seen="dict")
        | {"evals": {"held_out": {"episodes": 2, "replays": 1}}, "env_steps": 16},
        root=tmp_path,
    )
    game = Hunt(masks=True, seen="dict")
    seen, _ = game.reset(seed=1)
    hunter = pl.load_agent(run.path, "hunters").act(seen["hunter_0"])
    assert isinstance(hunter, int) and seen["hunter_0"]["action_mask"][hunter]
    velocity = pl.load_agent(run.path, "prey").act(seen["prey"])
    assert game.action_space("prey").contains(velocity)
    result = pl.evaluate(run.path, seats={"prey": "random"}, episodes=2)
    assert np.isfinite(result.metrics["returns"]["hunter_0"])
    header, replays = read_replays(next((run.path / "replays").rglob("*.parquet")))
    assert tuple(header.seats) == tuple(seen)
    assert [len(action) for action in replays[0].frames[0].actions] == [1, 1, 2]
    for path, message in (
        (f"{run.path}:hunters", r'"hunters" acts by a CategoricalHead, and seat prey takes Continuous\(.*\): choose'),
        (str(run.path), "there is no saved policy in .*: name one as RUN:NAME"),
    ):
        tree = config(masks=True, seen="dict")
        tree["policies"]["prey"] = {"type": "frozen", "path": path}
        with pytest.raises(ValueError, match=message):
            pl.train(tree, root=tmp_path / "other")


@pytest.mark.parametrize("name", ["bc", "gail", "iql"])
def test_recorded_play_of_several_kinds_is_learned_from(name: str, tmp_path: Path) -> None:
    """What is read from the file is what was played."""
    env = make_vector_env(config(masks=True)["env"])
    recorded = tmp_path / "episodes.parquet"
    players = [UniformVectorPolicy(env, range(3))]
    record_vector_episodes(env, players, 30, recorded, seed=4)
    batch = VectorRollout(env, 4 + np.arange(2)).collect(players, 30, 4)
    read = read_vector_episodes([recorded], env)
    for game in (0, 1):
        assert np.array_equal(read.actions[30 * game : 30 * (game + 1), 0], batch.actions[:, game])
    env.close()
    source = {"data": str(recorded)} if name == "iql" else {"demonstrations": str(recorded)}
    metrics = train_step(team({"type": name, **source}, masks=True))
    assert len(metrics) == 2 and all(np.isfinite(list(line.values())).all() for line in metrics.values())


def test_a_mixture_plays_seats_of_several_kinds() -> None:
    """Networks and random members, at seats that choose and at one that gives numbers: `Hunt` refuses any action that
    is not in its space, and masks are heeded."""
    trainer = check_vector_run(validate(VectorConfig, config(net=GRU, masks=True)))
    env = trainer.rollout.env
    mixtures = []
    for learner in trainer.learner.learners:  # type: ignore[attr-defined]
        stack = learner.stacks[0]
        members = {"net": NetMember(stack.seat_mapping, stack.net, stack.head), "random": UniformMember()}
        seats = stack.seat_mapping.all_seats
        sampler = IndependentSampler([{0: 0.5, 1: 0.5}] * len(seats))
        mixtures.append(Mixture(env, seats, members, sampler, learner.names[0]))
    batch = VectorRollout(env, np.arange(2)).collect(mixtures, 60, 0)
    assert batch.action_mask is not None
    chosen = batch.actions[:, :, :2, 0].astype(int)
    assert np.take_along_axis(batch.action_mask[:-1, :, :2], chosen[..., None], -1).all()
    assert not batch.actions[:, :, :2, 1].any() and len(np.unique(batch.actions[:, :, 2])) > 100
    trainer.close()


@pytest.mark.slow
def test_a_population_plays_sides_of_several_kinds(tmp_path: Path) -> None:
    tree = {
        "name": "hunts",
        "env": config(masks=True)["env"],
        "seats": {"hunter_*": "hunters", "prey": "prey"},
        "population": {
            "type": "psro",
            "iterations": 2,
            "env_steps": 192,
            "games_per_cell": 4,
            "nash_conv_every": 0,
            "meta_solver": {"type": "prd"},
        },
        "oracle": {"type": "net", "policy": {"hidden": [8]}, "algorithm": {"type": "ppo", "rollout_length": 12}},
        "backend": {"type": "inline"},
    }
    run = pl.train(tree, root=tmp_path)
    agent = pl.load_agent(run.path, "prey-1")
    assert Hunt().action_space("prey").contains(agent.act(np.zeros(2, np.float32)))
