"""Parallelised Q-learning: targets and updates computed decision by decision, state, and learning alone and in
teams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, mean_return, snapshot, train

from palestra.core.types import RolloutBatch
from palestra.envs.vector.matrix import TwoStepGame
from palestra.envs.vector_base import Continuous, VectorEnv
from palestra.vector.algorithms.pqn import PQN, PQNLearner
from palestra.vector.config import VectorConfig
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.dense import LayerNorm
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.policies.base import UniformVectorPolicy, VectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2, activation="relu", max_grad_norm=10)


def learner(
    config: PQN, env: VectorEnv, seats: dict[str, list[int]], policies: dict[str, NetPolicyConfig] | None = None
) -> PQNLearner:
    own = policies or dict.fromkeys(seats, POLICY)
    made = config.build_learner(env, seats, own, {name: number + 5 for number, name in enumerate(seats)})
    assert isinstance(made, PQNLearner)
    return made


# ---- targets and one update, decision by decision


def q_values(made: PQNLearner, seat: int, view: np.ndarray) -> torch.Tensor:
    """The values of all actions at one observation, with their graph."""
    for stack in made.stacks:
        for p, own in enumerate(stack.seat_mapping.seats):
            if seat in own:
                rows = torch.from_numpy(view).expand(len(stack.seat_mapping.names), 1, *view.shape)
                return stack.net(rows)[p, 0]
    raise AssertionError(seat)


def best(made: PQNLearner, batch: RolloutBatch, t: int, b: int, seat: int) -> float:
    legal = batch.action_mask[t, b, seat]  # type: ignore[index]
    return float(q_values(made, seat, batch.obs[t, b, seat]).detach().numpy()[legal].max())


def final(made: PQNLearner, batch: RolloutBatch, t: int, b: int, seat: int, last: int) -> float:
    """The best value of the last observation of the game that ended at step t, with the action mask of step `last`."""
    (f,) = [i for i, pair in enumerate(zip(*batch.end_index, strict=True)) if tuple(map(int, pair)) == (t, b)]
    legal = batch.action_mask[last, b, seat]  # type: ignore[index]
    return float(q_values(made, seat, batch.final_obs[f, seat]).detach().numpy()[legal].max())


def expected_targets(made: PQNLearner, batch: RolloutBatch, b: int, team: list[int]) -> dict[int, float]:
    """The targets of a team (or of a single seat) in game b, by step; last decision first."""
    gamma, lam, T, found = made.config.gamma, made.config.q_lambda, len(batch.rewards), {}
    own = [t for t in range(T + 1) if batch.agent_mask[t, b, team].any()]
    following: tuple[float, float] | None = None  # best value and target of the next decision
    for t in own[::-1]:
        here = sum(best(made, batch, t, b, s) for s in team if batch.agent_mask[t, b, s])
        later = [u for u in own if u > t]
        ends = [u for u in range(t, T) if batch.done[u, b]]
        if t < T and ends and (not later or ends[0] < later[0]):
            stop, ahead = ends[0], 0.0
            if not batch.terminated[stop, b]:
                acting = [s for s in team if batch.agent_mask[stop, b, s]]
                acting = acting or [s for s in team if batch.agent_mask[t, b, s]] if len(team) == 1 else acting
                ahead = sum(final(made, batch, stop, b, s, t) for s in acting)
        elif t < T and later:
            stop = later[0] - 1
            assert following is not None
            ahead = (1 - lam) * following[0] + lam * following[1]
        else:  # the last decision has no target but its own value
            following = here, here
            continue
        found[t] = float(batch.rewards[t : stop + 1, b, team].mean(-1).sum()) + gamma * ahead
        following = here, found[t]
    return found


@pytest.mark.parametrize("mixer", ["none", "vdn"])
@pytest.mark.parametrize("turns", [False, True])
def test_update_equals_a_reference_implementation(turns: bool, mixer: Any) -> None:
    """Seats 0, 1 and 3 learn, in two stacks; seat 2 plays at random and is not part of the team."""
    env = Countdown(5, turns=turns, seats=4)
    config = PQN(gamma=0.9, q_lambda=0.7, epochs=1, minibatches=1, mixer=mixer)
    policies = {"one": POLICY, "two": NetPolicyConfig(hidden=[8], lr=1e-2), "three": POLICY}
    made = learner(config, env, {"one": [0], "two": [1], "three": [3]}, policies)
    assert [stack.seat_mapping.names for stack in made.stacks] == [("one", "three"), ("two",)]
    players: list[VectorPolicy] = [*made.rollout_policies(0.0), UniformVectorPolicy(env, [2])]
    batch = VectorRollout(env, np.arange(5)).collect(players, 12, 0)
    targets, known = made.targets(RolloutTensors.of(batch))
    losses: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for team in [(0, 1, 3)] if mixer == "vdn" else [(0,), (1,), (3,)]:
        losses[team] = []
        for b in range(5):
            expected = expected_targets(made, batch, b, list(team))
            for t in range(12):
                acts = [s for s in team if batch.agent_mask[t, b, s]]
                assert [bool(known[t, b, s]) for s in acts] == [t in expected] * len(acts)
                if t not in expected:
                    continue
                assert targets[t, b, acts].tolist() == pytest.approx([expected[t]] * len(acts), abs=1e-4)
                seats = [q_values(made, s, batch.obs[t, b, s])[int(batch.actions[t, b, s])] for s in acts]
                q = torch.stack(seats).sum()
                losses[team].append(0.5 * (q - expected[t]) ** 2)
    loss = torch.stack([torch.stack(own).mean() for own in losses.values()]).sum()
    slopes = torch.autograd.grad(loss, [p for stack in made.stacks for p in stack.net.parameters()])
    lines = made.update(batch, 0.0)
    count = len(list(made.stacks[0].net.parameters()))
    for name, p, own in (("one", 0, slopes[:count]), ("three", 1, slopes[:count]), ("two", 0, slopes[count:])):
        norm = torch.cat([g[p].flatten() for g in own]).norm().item()
        assert lines[name]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    if mixer == "vdn":
        assert lines["one"]["q_loss"] == pytest.approx(loss.item(), rel=1e-3) or turns
    else:
        assert sum(line["q_loss"] for line in lines.values()) == pytest.approx(loss.item(), rel=1e-3)


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("mixer", ["none", "vdn"])
def test_resume_from_state_arrays_is_bit_identical(mixer: Any, memory: int) -> None:
    config, env = PQN(rollout_length=9, mixer=mixer, minibatches=3), Countdown(4)
    policy = NetPolicyConfig(hidden=[8], gru_units=memory, normalize_observations=True, lr_schedule="linear")
    made, other = (learner(config, env, {"a": [0], "b": [1]}, dict.fromkeys("ab", policy)) for _ in range(2))
    train(made, VectorRollout(env, np.arange(4)), 9, 3)
    other.load_arrays(snapshot(made))
    for each in (made, other):
        train(each, VectorRollout(Countdown(4), np.arange(4)), 9, 2)
    for key, value in made.state_arrays().items():
        np.testing.assert_array_equal(other.state_arrays()[key], value, err_msg=key)


# ---- networks and settings


def test_networks_have_layer_norm_unless_it_is_off(tmp_path: Any) -> None:
    env = Countdown(4)
    off = POLICY.model_copy(update={"layer_norm": False})
    for policy, count in ((POLICY, 1), (off, 0)):
        made = learner(PQN(), env, {"a": [0, 1]}, {"a": policy})
        assert sum(isinstance(each, LayerNorm) for each in made.stacks[0].net.modules()) == count
        folder = tmp_path / str(count)
        folder.mkdir()
        made.member_writers()["a"](folder)
        read = read_policy(folder, env, [0, 1])
        played = [
            VectorRollout(env, np.arange(4)).collect([p], 9, 0).actions.copy() for p in (*made.greedy_policies(), read)
        ]
        np.testing.assert_array_equal(played[0], played[1])


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="pqn compares the values of single actions"):
        learner(PQN(), Countdown(space=Continuous((-1.0,), (1.0,))), {"one": [0, 1]})


def test_asynchronous_actors_are_refused() -> None:
    with pytest.raises(ValueError, match="off_policy_correction: vtrace"):
        VectorConfig(
            name="x", env={"type": "two_step"}, policies={"a": {"type": "net"}}, algorithm={"type": "pqn"}, num_actors=2
        )


# ---- learning


def test_seats_learn_their_own_tasks(check_score: Any) -> None:
    env = Cues(32, seats=2)
    made = learner(PQN(rollout_length=8, gamma=0.9, epsilon_share=0.1), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(32)), 8, 25)
    check_score(mean_return(env, made.greedy_policies(), 20).min())


def test_turn_based_seats_learn_from_terminal_rewards(check_score: Any) -> None:
    env = Cues(32, seats=2, steps=2, turns=True)
    made = learner(PQN(rollout_length=16, gamma=1.0), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(32)), 16, 30)
    check_score(mean_return(env, made.greedy_policies(), 40).min())


@pytest.mark.slow
def test_memory_task_needs_recurrence() -> None:
    env = Cues(32, seats=1, steps=4, fleeting=True)
    for memory in (16, 0):
        policy = POLICY.model_copy(update={"gru_units": memory})
        made = learner(PQN(rollout_length=16, gamma=0.9, minibatches=4), env, {"a": [0]}, {"a": policy})
        train(made, VectorRollout(env, np.arange(32)), 16, 40)
        score = mean_return(env, made.greedy_policies(), 80).item()
        assert score > 0.9 if memory else score < 0.5


@pytest.mark.parametrize("mixer", ["none", "vdn"])
def test_team_reward_is_credited_to_the_right_seat(mixer: Any, check_score: Any) -> None:
    """Each of three seats is paid the share of correct seats; no seat observes whether it was correct."""
    env = Cues(16, seats=3, team=True)
    policy = POLICY.model_copy(update={"seat_one_hot": True, "hidden": [32]})
    made = learner(PQN(rollout_length=8, mixer=mixer), env, {"a": [0, 1, 2]}, {"a": policy})
    train(made, VectorRollout(env, np.arange(16)), 8, 20)
    check_score(mean_return(env, made.greedy_policies(), 50).min())


@pytest.mark.slow
def test_vdn_learns_the_values_of_the_two_step_game() -> None:
    """With random actions, the sums nearest to [[0, 1], [1, 8]] are [[-1.5, 2.5], [2.5, 6.5]], as with VDN's replay."""
    env = TwoStepGame(num_envs=64)
    config = PQN(rollout_length=8, mixer="vdn", epsilon_end=1.0, q_lambda=0.0)
    policy = POLICY.model_copy(update={"hidden": [32], "lr_schedule": "linear"})
    made = learner(config, env, {"a": [0], "b": [1]}, dict.fromkeys("ab", policy))
    train(made, VectorRollout(env, np.arange(64)), 8, 150)
    q = made.stacks[0].net(torch.eye(3).expand(2, 3, 3)).detach()
    team = (q[0, :, :, None] + q[1, :, None, :]).numpy()
    assert team[1] == pytest.approx(np.full((2, 2), 7), abs=0.3)
    assert team[2] == pytest.approx(np.array([[-1.5, 2.5], [2.5, 6.5]]), abs=0.5)
