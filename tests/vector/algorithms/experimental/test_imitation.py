"""Imitation: losses by hand, and policies that imitate an expert from few games."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, Push, Track, assert_same_state, mean_return, snapshot, train

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv
from palestra.vector.algorithms.experimental.imitation import BC, GAIL
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.losses import discriminator_loss, gradient_penalty, imitation_reward
from palestra.vector.nets.heads import encode_actions, make_head
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy, VectorPolicy
from palestra.vector.rollouts.episodes import read_vector_episodes, record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2)


def learner(config: BC | GAIL, env: VectorEnv, seats: dict[str, list[int]], policy: NetPolicyConfig = POLICY) -> Any:
    seeds = {name: number for number, name in enumerate(seats)}
    return config.build_learner(env, seats, dict.fromkeys(seats, policy), seeds)


def right_answers(env: VectorEnv, seat: int) -> np.ndarray:
    """The right answers of `Cues`."""
    return ((env.internal_state["cue"] + seat) % 3).astype(np.int32)  # type: ignore[attr-defined]


def stop_cart(env: VectorEnv, seat: int) -> np.ndarray:
    """Stops the cart of `Track`."""
    place, speed = env.internal_state["cart"].T  # type: ignore[attr-defined]
    return np.clip(-2.0 * place - 2.0 * speed, -1, 1).astype(np.float32)[:, None]


def record_script(env: VectorEnv, script: Callable[[VectorEnv, int], np.ndarray], steps: int, path: Path) -> str:
    """Records a script's play at all seats; returns the path of the file."""
    record_vector_episodes(env, [ScriptedVectorPolicy(env, range(len(env.seats)), script)], steps, path)
    return str(path)


# ---- losses by hand


def test_discriminator_loss_by_hand() -> None:
    expert, policy = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[-math.log(4), 0.5]])
    loss, figures = discriminator_loss(expert, policy)
    # D is 1/2 and 3/4 of the expert's moves, 1/5 and sigmoid(.5) of the policy's
    by_hand = -(math.log(1 / 2) + math.log(3 / 4)) / 2 - (math.log(4 / 5) + math.log(1 - 1 / (1 + math.exp(-0.5)))) / 2
    assert loss.tolist() == pytest.approx([by_hand])
    assert figures["discriminator_accuracy"].item() == (1 / 2 + 1 / 2) / 2


def test_undecided_discriminator_loss_is_two_log_two() -> None:
    loss, _ = discriminator_loss(torch.zeros(2, 5), torch.zeros(2, 7))
    assert loss.tolist() == pytest.approx([2 * math.log(2)] * 2)


def test_optimal_discriminator_logit_is_the_log_frequency_ratio() -> None:
    """The expert's frequencies are 3/4, 1/4, 0, the policy's 1/4, 1/4, 1/2: at the logits log(3) and log(1) the
    gradient is 0."""
    logit = torch.tensor([math.log(3), 0.0, -40.0], requires_grad=True)
    expert, policy = logit[[0, 0, 0, 1]], logit[[0, 1, 2, 2]]
    discriminator_loss(expert[None], policy[None])[0].sum().backward()
    assert logit.grad is not None and logit.grad.tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_discriminator_losses_are_per_member() -> None:
    expert = torch.zeros(2, 3, requires_grad=True)
    discriminator_loss(expert, torch.zeros(2, 3))[0][1].backward()
    assert expert.grad is not None and not expert.grad[0].any() and (expert.grad[1] < 0).all()


@pytest.mark.parametrize("logit", [-30.0, -1.0, 0.0, 2.0, 30.0])
def test_imitation_rewards_by_hand(logit: float) -> None:
    likely = 1 / (1 + math.exp(-logit))
    positive = imitation_reward(torch.tensor(logit, dtype=torch.float64), "positive").item()
    assert positive == pytest.approx(-math.log(1 - likely) if likely < 1 - 1e-9 else logit, rel=1e-6)
    assert imitation_reward(torch.tensor(logit), "logit").item() == logit


def test_gradient_penalty_interpolates_expert_and_policy() -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)  # a plane: its slope is 5 everywhere
    penalty = gradient_penalty(lambda x: x @ weight, torch.ones(1, 6, 2), torch.zeros(1, 6, 2), torch.rand(1, 6, 1))
    assert penalty.tolist() == pytest.approx([16])
    penalty.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == pytest.approx([2 * 4 * 3 / 5, 2 * 4 * 4 / 5])
    bowl = gradient_penalty(  # half the square of x, whose gradient is x
        lambda x: x.square().sum(-1) / 2,
        torch.full((1, 1, 1), 6.0),
        torch.full((1, 1, 1), 2.0),
        torch.full((1, 1, 1), 0.25),
    )
    assert bowl.tolist() == pytest.approx([(3 - 1) ** 2])


def test_actions_are_encoded_as_numbers() -> None:
    assert encode_actions(Discrete(3), torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert encode_actions(MultiDiscrete((2, 3)), torch.tensor([[1, 0]])).tolist() == [[0, 1, 1, 0, 0]]
    sides = Continuous((0.0, -1.0), (4.0, 1.0))
    assert encode_actions(sides, torch.tensor([[3.0, 0.5], [9.0, -9.0]])).tolist() == [[0.5, 0.5], [1, -1]]
    assert encode_actions(Continuous((0.0,), (4.0,)), torch.tensor([[3.0, 7.0]])).tolist() == [
        [0.5]
    ]  # the rest is padding
    open_ended = Continuous((0.0, -1.0), (math.inf, 1.0))
    assert encode_actions(open_ended, torch.tensor([[3.0, 9.0]])).tolist() == [[3, 1]]


# ---- demonstrations


def test_policy_without_demonstrated_actions_is_refused(tmp_path: Path) -> None:
    env = Cues(2, turns=True)
    path = record_script(env, right_answers, 1, tmp_path / "moves.parquet")
    with pytest.raises(ValueError, match="no step has an action of policy b"):
        learner(BC(demonstrations=path), env, {"a": [0], "b": [1]})


# ---- behaviour cloning


def test_clone_matches_the_expert_frequencies(tmp_path: Path, check_score: Any) -> None:
    """The likelihood is highest at the expert's frequencies: per cue, answers with probabilities 1/2, 1/4, 1/4."""
    env = Cues(64, seats=1)
    rng = np.random.default_rng(0)
    drawn = record_script(
        env, lambda env, seat: (right_answers(env, 0) + rng.integers(0, 4, 64) % 3) % 3, 40, tmp_path / "moves.parquet"
    )
    made = learner(BC(demonstrations=drawn, batch_size=2048), env, {"a": [0]})
    figures = train(made, VectorRollout(env, np.arange(64)), 16, 15)
    moves, errors = read_vector_episodes([drawn], env), []
    for cue in range(3):
        own = moves.obs[:-1, :, 0, cue] == 1
        counts = np.bincount(moves.actions[:, :, 0][own], minlength=3) / int(own.sum())
        view = torch.tensor([*np.eye(3)[cue], 1.0], dtype=torch.float32)
        played = made.stacks[0].net(view[None, None])[0, 0].softmax(0).detach().numpy()
        errors.append(np.abs(played - counts).max())
    check_score(max(errors), "error of the frequencies")
    check_score(abs(figures["a"]["nll"] - 1.5 * math.log(2)), "error of the likelihood")
    check_score(abs(figures["a"]["entropy"] - 1.5 * math.log(2)), "error of the entropy")


@pytest.mark.parametrize("turns", [False, True])
def test_behaviour_cloning_learns_from_few_games(turns: bool, tmp_path: Path, check_score: Any) -> None:
    env = Cues(16, seats=2, turns=turns)
    # 16 games with one action per seat
    path = record_script(env, right_answers, 2 if turns else 1, tmp_path / "moves.parquet")
    made = learner(BC(demonstrations=path, batch_size=64), env, {"a": [0], "b": [1]})
    assert mean_return(env, [UniformVectorPolicy(env, [0, 1])], 100).mean() == pytest.approx(1 / 3, abs=0.05)
    train(made, VectorRollout(env, np.arange(16)), 4, 10)
    check_score(mean_return(env, made.greedy_policies(), 40).min())


def test_recurrent_clone_solves_a_memory_task(tmp_path: Path, check_score: Any) -> None:
    env = Cues(32, seats=1, steps=4, fleeting=True)
    path = record_script(env, right_answers, 10, tmp_path / "moves.parquet")  # the third game of each is cut short
    for memory in (16, 0):
        policy = NetPolicyConfig(hidden=[16], lr=1e-2, gru_units=memory)
        made = learner(BC(demonstrations=path, sequence_length=6, batch_size=384), env, {"a": [0]}, policy)
        train(made, VectorRollout(env, np.arange(32)), 4, 15)
        score = mean_return(env, made.greedy_policies(), 80).item()
        check_score(score, "recurrent" if memory else "without memory")


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.few(1)
def test_behaviour_cloning_of_continuous_actions(normalise: bool, tmp_path: Path, check_score: Any) -> None:
    env = Track(8)
    path = record_script(env, stop_cart, 20, tmp_path / "moves.parquet")  # 8 games
    expert, chance = (
        mean_return(env, [p], 60).item()
        for p in (ScriptedVectorPolicy(env, [0], stop_cart), UniformVectorPolicy(env, [0]))
    )
    made = learner(
        BC(demonstrations=path),
        env,
        {"a": [0]},
        NetPolicyConfig(hidden=[16], lr=1e-2, normalize_observations=normalise),
    )
    train(made, VectorRollout(env, np.arange(8)), 4, 40)
    learned = mean_return(env, made.greedy_policies(), 60).item()
    check_score((expert - learned) / (expert - chance))  # 0 of the expert, 1 of random play


def test_behaviour_cloning_uses_the_action_masks(tmp_path: Path) -> None:
    """If only one action is legal, choosing it has no information: a clone of such actions alone has no gradient."""
    env = Countdown(4, space=Discrete(2))
    env.reset(np.arange(4))
    path = tmp_path / "moves.parquet"
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1])], 30, path)
    table = pq.read_table(path)
    acts = [row["acts"] and row["action_mask"] is not None and not row["action_mask"][1] for row in table.to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("acts"), "acts", [acts]), path)
    figures = learner(BC(demonstrations=str(path)), env, {"a": [0, 1]}).update(None, 0.0)
    assert figures["a"]["nll"] == figures["a"]["grad_norm"] == 0


@pytest.mark.parametrize(
    "spaces",
    [(Continuous((-1.0,), (1.0,)), Continuous((-1.0,) * 3, (1.0,) * 3)), (MultiDiscrete((2,)), MultiDiscrete((2, 3)))],
)
@pytest.mark.few(1)
def test_seats_may_have_action_spaces_of_different_sizes(
    spaces: tuple[Space, Space], tmp_path: Path, check_score: Any
) -> None:
    env = Push(4, spaces)
    first = np.array([0.5, 0.25, -0.75]) if isinstance(spaces[0], Continuous) else np.array([1, 2])
    width = make_head(spaces[1]).width

    def script(env: VectorEnv, seat: int) -> np.ndarray:
        own = first * (np.arange(width) < make_head(spaces[seat]).width)
        return np.tile(own, (4, 1)).astype(first.dtype)

    path = record_script(env, script, 5, tmp_path / "moves.parquet")
    made = learner(BC(demonstrations=path, batch_size=16), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(4)), 1, 30)
    played = VectorRollout(env, np.arange(4)).collect(made.greedy_policies(), 1, 0).actions[0, 0]
    own = make_head(spaces[0]).width
    check_score(max(np.abs(played[0, :own] - first[:own]).max(), np.abs(played[1] - first).max()))
    rival = learner(GAIL(demonstrations=path, rollout_length=5, discriminator_batch_size=8), env, {"a": [0], "b": [1]})
    figures = train(rival, VectorRollout(env, np.arange(4)), 5, 2)
    assert all(np.isfinite(list(line.values())).all() for line in figures.values())


@pytest.mark.parametrize("memory", [0, 5])
def test_clone_resume_from_state_arrays_is_bit_identical(memory: int, tmp_path: Path) -> None:
    env = Countdown(4, seats=3)
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1, 2])], 12, tmp_path / "moves.parquet")
    config = BC(demonstrations=str(tmp_path / "moves.parquet"), batch_size=32, sequence_length=4)
    policy = NetPolicyConfig(hidden=[6], gru_units=memory, normalize_observations=True)
    made, again = (learner(config, env, {"a": [0], "b": [1, 2]}, policy) for _ in range(2))
    made.update(None, 0.0)
    again.load_arrays(snapshot(made))
    for one in (made, again):
        one.update(None, 0.5)
    assert_same_state(made, again)
    assert made.state_arrays()["versions"].tolist() == [16, 16]


# ---- GAIL


def test_env_rewards_are_not_used(tmp_path: Path) -> None:
    env = Countdown(4, turns=True)
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1])], 20, tmp_path / "moves.parquet")
    config = GAIL(demonstrations=str(tmp_path / "moves.parquet"), discriminator_batch_size=16)
    made, other = (learner(config, env, {"a": [0], "b": [1]}) for _ in range(2))
    batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0), 8, 0)
    first = made.update(batch, 0.0)
    batch.rewards[:] = np.nan
    assert other.update(batch, 0.0) == first
    assert np.isnan(batch.rewards).all()  # and the batch of play is not modified
    assert_same_state(made, other)


def test_gail_resume_from_state_arrays_is_bit_identical(tmp_path: Path) -> None:
    env = Countdown(4, seats=3)
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1, 2])], 20, tmp_path / "moves.parquet")
    config = GAIL(demonstrations=str(tmp_path / "moves.parquet"), discriminator_batch_size=16, reward="logit")
    policy = NetPolicyConfig(hidden=[6], gru_units=4, normalize_observations=True, seat_one_hot=True)
    made, again = (learner(config, env, {"a": [0], "b": [1, 2]}, policy) for _ in range(2))
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(4):
        batch = sweeper.collect(made.rollout_policies(0), 6, i)
        if i == 2:
            again.load_arrays(snapshot(made))
        made.update(batch, 0.0)
        if i >= 2:
            again.update(batch, 0.0)
    assert_same_state(made, again)
    assert any(key.startswith("discriminator.1/") for key in made.state_arrays())


def test_policies_without_actions_in_a_step_are_skipped(tmp_path: Path) -> None:
    env = Cues(3, turns=True, steps=2)
    path = record_script(env, right_answers, 8, tmp_path / "moves.parquet")
    made = learner(GAIL(demonstrations=path, rollout_length=1), env, {"a": [0], "b": [1]})
    sweeper = VectorRollout(env, np.arange(3))
    reported = []
    for i in range(4):
        figures = made.update(sweeper.collect(made.rollout_policies(0), 1, i), 0.0)
        reported.append(sorted(name for name, line in figures.items() if "discriminator_accuracy" in line))
    assert all(np.isfinite(list(line.values())).all() for line in figures.values())
    assert reported == [[]] * 4  # the two share a stack, and one of them never acts


def test_pixel_observations_are_refused(tmp_path: Path) -> None:
    env: VectorEnv = Track(2)
    env.observation_shapes = ((36, 36, 1),)
    with pytest.raises(ValueError, match='gail cannot see the pixels of env "track" beside actions: use bc'):
        learner(GAIL(demonstrations="unread"), env, {"a": [0]})


@pytest.mark.parametrize("reward", ["positive", "logit"])
@pytest.mark.few(1)
def test_gail_learns_from_few_games(reward: Any, tmp_path: Path, check_score: Any) -> None:
    env = Cues(32, seats=2, steps=2)
    path = record_script(env, right_answers, 2, tmp_path / "moves.parquet")  # 32 games
    made = learner(GAIL(demonstrations=path, rollout_length=8, gamma=0.9, reward=reward), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(32)), 8, 20)
    check_score(mean_return(env, made.greedy_policies(), 40).min())  # the expert's return is 1, chance 1/3


@pytest.mark.slow
def test_gail_of_continuous_actions(tmp_path: Path) -> None:
    env = Track(32)
    path = record_script(Track(8), stop_cart, 20, tmp_path / "moves.parquet")
    others: list[VectorPolicy] = [ScriptedVectorPolicy(env, [0], stop_cart), UniformVectorPolicy(env, [0])]
    expert, chance = (mean_return(env, [player], 40).item() for player in others)
    made = learner(GAIL(demonstrations=path, rollout_length=20, gamma=0.9), env, {"a": [0]})
    train(made, VectorRollout(env, np.arange(32)), 20, 60)
    assert mean_return(env, made.greedy_policies(), 40).item() > expert + 0.03 * (chance - expert)
