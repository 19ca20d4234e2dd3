"""Deep Q-learning: updates against a plain reference implementation, exploration, state, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pretended_group import PretendedGroup
from helpers.vector_toys import POLICY, Countdown, Cues, learner, mean_return, snapshot, train_on_play

from palestra.core.seeding import derive_seed
from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.matrix import TwoStepGame
from palestra.envs.vector_base import Continuous, MultiDiscrete, Space, VectorEnv
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.q_learning import QLearner, QLearningConfig, as_sequences
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.layers import member_weights
from palestra.vector.nets.replay import ReplayBuffer, TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch, SequenceReplay
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

QUICK: dict[str, Any] = {"rollout_length": 4, "gradient_steps": 2, "batch_size": 16, "learning_starts": 0}


# ---- one update, computed row by row


def values(weights: dict[str, torch.Tensor], view: torch.Tensor, duelling: bool) -> torch.Tensor:
    """The value of each action, by a network of one hidden layer of tanh."""
    hidden = torch.tanh(view @ weights["body.layers.0.weight"] + weights["body.layers.0.bias"][0])
    out = hidden @ weights["head.weight"] + weights["head.bias"][0]
    return out[0] + out[1:] - out[1:].mean() if duelling else out


def member(made: QLearner, name: str, target: bool = False) -> dict[str, torch.Tensor]:
    for stack, slow in zip(made.stacks, made.target_nets, strict=True):
        if name in stack.seat_mapping.names:
            weights = member_weights(slow if target else stack.net, stack.seat_mapping.names.index(name))
            return {key: weight.requires_grad_() for key, weight in weights.items()}
    raise AssertionError(name)


def next_draw(made: QLearner, config: QLearningConfig) -> TransitionBatch:
    """The rows of replay that the next gradient step draws."""
    rng = np.random.default_rng(derive_seed(made.seeds[made.names[0]], "moments", made.steps))
    assert isinstance(made.replay, ReplayBuffer)
    return made.replay.sample(config.batch_size, rng, config.priority_beta)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("duelling", [True, False])
@pytest.mark.parametrize("turns", [True, False])
def test_update_equals_a_reference_implementation(turns: bool, duelling: bool, double: bool) -> None:
    """Policy one plays seats 0 and 2, two plays seat 1; with priorities, so that rows count differently."""
    env = Countdown(games=5, turns=turns, seats=3)
    config = DQN(
        **QUICK | {"gradient_steps": 1}, duelling=duelling, double=double, priority_exponent=0.7, n_step=2, gamma=0.9
    )
    seats = {"one": [0, 2], "two": [1]}
    made = learner(config, env, seats)
    train_on_play(made, env, 4)
    drawn, before = next_draw(made, config), {n: (member(made, n), member(made, n, True)) for n in seats}
    lines, error, known = made.train_step(as_sequences(drawn), 0.0)

    sizes: dict[int, list[float]] = {}
    for name, own in seats.items():
        fast, slow = before[name]
        losses = []
        for m in range(16):
            for s in own:
                if not drawn.weight[m, s]:
                    continue
                with torch.no_grad():
                    after = values(slow, drawn.next_obs[m, s], duelling)
                    assert drawn.next_action_mask is not None
                    chooser = (values(fast, drawn.next_obs[m, s], duelling) if double else after).clone()
                    chooser[~drawn.next_action_mask[m, s]] = -torch.inf
                    target = drawn.rewards[m, s] + drawn.discounts[m, s] * after[chooser.argmax()]
                off = target - values(fast, drawn.obs[m, s], duelling)[drawn.actions[m, s]]
                losses.append(drawn.weight[m, s] * 0.5 * off**2)
                sizes.setdefault(m, []).append(abs(off.item()))
        loss = torch.stack(losses).mean()
        (line,) = [x for x, stack in zip(lines, made.stacks, strict=True) if name in stack.seat_mapping.names]
        p = next(stack.seat_mapping.names.index(name) for stack in made.stacks if name in stack.seat_mapping.names)
        assert line["q_loss"][p].item() == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        norm = torch.cat([w.grad.flatten() for w in fast.values() if w.grad is not None]).norm()
        assert line["grad_norm"][p].item() == pytest.approx(norm.item(), rel=1e-4)
    assert error[0].tolist() == pytest.approx([np.mean(sizes.get(m, [0])) for m in range(16)], rel=1e-4)
    assert known[0].tolist() == [m in sizes for m in range(16)]


def test_td_errors_become_priorities() -> None:
    env = Countdown(games=5)
    config = DQN(**QUICK | {"gradient_steps": 1, "batch_size": 4, "n_step": 1}, priority_exponent=0.5)
    made = learner(config, env, {"one": [0, 1]})
    made.replay.add(VectorRollout(env, np.arange(5)).collect(made.rollout_policies(0), 4, 1))
    drawn = next_draw(made, config)
    assert made.replay.ring.tree is not None and set(made.replay.ring.tree.of(np.arange(20))) == {1.0}
    again = DQN(**config.model_dump()).build_learner(env, {"one": [0, 1]}, {"one": POLICY}, {"one": 5})
    _, error, _ = again.train_step(as_sequences(drawn), 0.0)
    rng = np.random.default_rng(derive_seed(5, "moments", 0))
    made._step(rng, 0.0)
    kept = made.replay.ring.tree.of(drawn.index.numpy())
    assert kept == pytest.approx((error[0].numpy() + 1e-6) ** 0.5, rel=1e-4)


def test_target_networks_follow_by_polyak() -> None:
    env = Cues(games=4)
    made = learner(DQN(**QUICK | {"gradient_steps": 3}, tau=0.25, target_interval=3), env, {"a": [0], "b": [1]})
    before = member(made, "b", True)
    train_on_play(made, env, 1)
    fast, slow = member(made, "b"), member(made, "b", True)
    for key, weight in slow.items():
        assert torch.allclose(weight, 0.75 * before[key] + 0.25 * fast[key])
    made.config = made.config.model_copy(update={"gradient_steps": 2})
    train_on_play(made, env, 1)
    assert all(torch.equal(weight, slow[key]) for key, weight in member(made, "b", True).items())
    made.config = made.config.model_copy(update={"gradient_steps": 1, "tau": 1.0})
    train_on_play(made, env, 1)
    assert all(torch.equal(weight, member(made, "b")[key]) for key, weight in member(made, "b", True).items())


# ---- recurrent networks


def sequences_of(made: QLearner, drawn: int = 6) -> SequenceBatch:
    assert isinstance(made.replay, SequenceReplay)
    return made.replay.sample(drawn, np.random.default_rng(0))


@pytest.mark.parametrize("turns", [True, False])
def test_recurrent_values_equal_step_by_step_play(turns: bool) -> None:
    env = Countdown(games=4, turns=turns, seats=2)
    config = DQN(**QUICK | {"rollout_length": 7}, gamma=0.9, n_step=1 if turns else 2)
    made = learner(config, env, {"one": [0], "two": [1]}, NetPolicyConfig(hidden=[8], gru_units=5, lr=1e-2))
    train_on_play(made, env, 3)
    drawn = sequences_of(made)
    _, taken, following = made.online_and_target_values(0, drawn)
    stack, head, slow = made.stacks[0], made.heads[0], made.target_nets[0]
    checked = cut = 0
    with torch.no_grad():
        for m in range(6):
            memories = [drawn.recurrent_states["one+two"][:, m : m + 1]] * 2
            now: list[list[torch.Tensor]] = [[], []]
            last: list[dict[int, torch.Tensor]] = [{}, {}]
            for which, net in enumerate((stack.net, slow)):
                for t in range(8):
                    memories[which] = memories[which] * ~drawn.is_first[t, m]
                    out, kept = net.unroll(drawn.obs[t, m][:, None, None], memories[which])
                    assert kept is not None
                    now[which].append(head.values(out)[:, 0, 0])
                    memories[which] = kept[:, 0]
                    for f in range(len(drawn.truncations[0])):
                        if (drawn.truncations[0][f], drawn.truncations[1][f]) == (t, m):
                            out, _ = net.unroll(drawn.final_obs[f][:, None, None], memories[which])
                            last[which][8 + t] = head.values(out)[:, 0, 0]
            for t in range(7):
                for s in range(2):
                    assert taken[s, t, m].item() == pytest.approx(now[0][t][s, drawn.actions[t, m, s]].item(), abs=1e-5)
                    at = int(drawn.step_index[t, m, s])
                    if not drawn.weight[t, m, s] or (at > 7 and at not in last[0]):
                        continue
                    fast_q, slow_q = (now[w][at][s] if at < 8 else last[w][at][s] for w in (0, 1))
                    assert drawn.next_action_mask is not None
                    choice = fast_q.masked_fill(~drawn.next_action_mask[t, m, s], -torch.inf).argmax()
                    assert following[s, t, m].item() == pytest.approx(slow_q[choice].item(), abs=1e-5)
                    checked, cut = checked + 1, cut + (at > 7)
    assert checked > 10 and cut > 0


def test_sequences_and_transitions_agree_without_memory() -> None:
    env = Countdown(games=4, turns=True, seats=3)
    made = learner(DQN(**QUICK), env, {"one": [0, 2], "two": [1]})
    batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0), 20, 1)
    segments, replay = SequenceReplay(4), ReplayBuffer(80)
    for kept in (segments, replay):
        kept.add(batch)
        many = len(kept)
        kept.ring.sample = lambda count, rng, beta, many=many: (np.arange(many), np.ones(many))  # type: ignore
    stretches, moves = (kept.sample(0, np.random.default_rng(0)) for kept in (segments, replay))
    assert isinstance(moves, TransitionBatch)
    for i, stack in enumerate(made.stacks):
        long, short = (made.online_and_target_values(i, drawn)[1:] for drawn in (stretches, as_sequences(moves)))
        known = stack.rows(stretches.weight) * stack.rows(stretches.discounts) > 0
        assert known.sum() > 5
        for a, b in zip(long, short, strict=True):
            assert torch.allclose(a[known], b.view(a.shape)[known], atol=1e-6)


# ---- exploration


def collected_actions(made: QLearner, env: VectorEnv, progress: float, steps: int = 60) -> tuple[np.ndarray, Any]:
    batch = VectorRollout(env, np.arange(env.num_envs)).collect(made.rollout_policies(progress), steps, 3)
    return batch.actions.copy(), batch


def test_rollouts_play_legal_actions_only() -> None:
    env = Countdown(games=20)
    made = learner(DQN(**QUICK | {"learning_starts": 100}), env, {"one": [0, 1]})
    for seen in (0, 100):
        made.env_steps_seen = seen
        for players in (made.rollout_policies(1.0), made.greedy_policies()):
            batch = VectorRollout(env, np.arange(20)).collect(players, 30, 3)
            assert batch.action_mask is not None
            assert np.take_along_axis(batch.action_mask[:-1], batch.actions[..., None], -1).all()


def test_epsilon_sets_the_share_of_random_actions() -> None:
    env = Cues(games=50)
    config = DQN(**QUICK | {"learning_starts": 10}, epsilon=0.9, epsilon_end=0.3, epsilon_share=0.5)
    assert [round(config.epsilon_at(x), 6) for x in (0, 0.25, 0.5, 1)] == [0.9, 0.6, 0.3, 0.3]
    made = learner(config, env, {"one": [0, 1]})
    best = VectorRollout(env, np.arange(50))
    greedy = best.collect(made.greedy_policies(), 60, 3).actions.copy()
    # a random action of three is also the greedy one; before learning starts all actions are random
    assert (collected_actions(made, env, 1.0)[0] != greedy).mean() == pytest.approx(2 / 3, abs=0.02)
    made.env_steps_seen = 10
    for progress, epsilon in ((0.25, 0.6), (1.0, 0.3)):
        assert (collected_actions(made, env, progress)[0] != greedy).mean() == pytest.approx(epsilon * 2 / 3, abs=0.02)


def test_random_actions_are_uniform_over_legal_ones() -> None:
    head = learner(DQN(**QUICK), Cues(games=4), {"one": [0, 1]}).heads[0]
    action_mask = torch.tensor([True, False, True]).expand(1, 9000, 3)
    action, logp = head.epsilon_greedy(1.0)(torch.zeros(1, 9000, 4), action_mask, torch.Generator().manual_seed(0))
    assert torch.bincount(action[0], minlength=3).numpy() / 9000 == pytest.approx([0.5, 0, 0.5], abs=0.02)
    assert logp is None


def test_no_update_before_learning_starts() -> None:
    env = Cues(games=4)
    made = learner(DQN(**QUICK | {"learning_starts": 33}), env, {"one": [0, 1]})
    sweeper = VectorRollout(env, np.arange(4))
    for i, steps in enumerate((0, 0, 2)):  # 16 transitions each
        assert bool(made.update(sweeper.collect(made.rollout_policies(0), 4, i), 0.0)["one"]) == (i == 2)
        assert made.steps == steps


def test_processes_start_learning_together() -> None:
    env = Cues(games=4)
    together = PretendedGroup()  # as if the other process could not learn yet
    made = DQN(**QUICK).build_learner(env, {"one": [0, 1]}, {"one": POLICY}, {"one": 1}, together)
    train_on_play(made, env, 2)
    assert made.steps == 0


# ---- state


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({}, 0),
        ({"priority_exponent": 0.6, "n_step": 3, "duelling": False}, 0),
        ({"priority_exponent": 0.6, "burn_in": 2}, 6),
    ],
)
def test_resume_is_bit_identical(options: dict[str, Any], memory: int) -> None:
    env = Countdown(games=4, turns=True)
    config = DQN(**QUICK | {"buffer_size": 60}, **options)
    policy = NetPolicyConfig(hidden=[8], gru_units=memory, normalize_observations=True)
    made, other = (learner(config, env, {"one": [0], "two": [1]}, policy) for _ in range(2))
    train_on_play(made, env, 6)
    other.load_arrays(snapshot(made))
    for each in (made, other):
        train_on_play(each, Countdown(games=4, turns=True), 3)
    for name, array in made.state_arrays().items():
        assert np.array_equal(array, other.state_arrays()[name]), name
    assert made.steps == 18


@pytest.mark.parametrize("memory", [0, 6])
@pytest.mark.parametrize("duelling", [True, False])
def test_exported_policy_plays_identically(tmp_path: Path, duelling: bool, memory: int) -> None:
    env = Countdown(games=12)
    policy = NetPolicyConfig(hidden=[8, 8], gru_units=memory, lr=1e-2, normalize_observations=True)
    made = learner(DQN(**QUICK, duelling=duelling), env, {"one": [0], "two": [1]}, policy)
    train_on_play(made, env, 10)
    for name, write in made.member_writers().items():
        write(tmp_path / name)
    read = [read_policy(tmp_path / name, env, [seat], best=True) for seat, name in enumerate(("one", "two"))]
    a, b = (
        VectorRollout(env, np.arange(12)).collect(players, 20, 3).actions.copy()
        for players in (made.greedy_policies(), read)
    )
    assert np.array_equal(a, b) and len(np.unique(a)) > 1


@pytest.mark.parametrize("space", [Continuous((-1.0,), (1.0,)), MultiDiscrete((2, 3))])
def test_non_discrete_actions_are_refused(space: Space) -> None:
    with pytest.raises(
        ValueError, match='dqn compares the values of single actions, but seat "seat0" of env "countdown" takes'
    ):
        learner(DQN(), Countdown(space=space), {"one": [0, 1]})


def test_burn_in_shorter_than_the_sequence_is_required() -> None:
    with pytest.raises(ValueError, match="burn_in is 8, but sequences have 8 steps"):
        DQN(burn_in=8)


# ---- learning


def test_cue_task_is_learned(check_score: Any) -> None:
    env = Cues(games=16)
    config = DQN(
        rollout_length=4, gradient_steps=4, batch_size=64, learning_starts=100, tau=0.05, priority_exponent=0.6
    )
    made = learner(config, env, {"one": [0], "two": [1]})
    train_on_play(made, env, 60)
    check_score(mean_return(env, made.greedy_policies(), 50).min())


@pytest.mark.slow
def test_best_response_to_uniform_kuhn_poker_is_learned() -> None:
    """Against uniform play a best response earns 1/2 as the first player and 5/12 as the second, so uniform play has a
    NashConv of 11/12 (OpenSpiel). Each seat is learned in turn against uniform play."""
    env = KuhnPoker(num_envs=64)
    config = DQN(
        rollout_length=4,
        gradient_steps=4,
        batch_size=128,
        learning_starts=1000,
        tau=0.05,
        n_step=2,
        gamma=1.0,
        epsilon_share=0.8,
    )
    for seat, value in ((0, 1 / 2), (1, 5 / 12)):
        made = learner(config, env, {"one": [seat]}, NetPolicyConfig(hidden=[32], lr=5e-3))
        train_on_play(made, env, 100, [UniformVectorPolicy(env, [1 - seat])])
        held_out = KuhnPoker(num_envs=1024)
        earned = mean_return(held_out, [*made.greedy_policies(), UniformVectorPolicy(held_out, [1 - seat])], 40)[seat]
        assert earned == pytest.approx(value, abs=0.07), seat


@pytest.mark.slow
def test_recurrent_network_learns_a_memory_task() -> None:
    """The cue is observed in the first of three steps; the answer is rewarded in the last."""
    env = Cues(games=16, steps=3, fleeting=True, seats=1)
    config = DQN(rollout_length=6, gradient_steps=4, batch_size=192, learning_starts=100, tau=0.05, gamma=0.9)
    made = learner(config, env, {"one": [0]}, NetPolicyConfig(hidden=[16], gru_units=16, lr=1e-2))
    train_on_play(made, env, 100)
    assert mean_return(env, made.greedy_policies(), 60)[0] > 0.95


def test_independent_dqn_misses_the_optimum_of_the_two_step_game(check_score: Any) -> None:
    """The two-step game of Rashid et al. (2018), all actions random: an independent seat learns means over the other's
    actions, 0.5 and 4.5 after the risky action, discounted to 4.455 at the first step; so both choose the certain 7."""
    env = TwoStepGame(num_envs=16)
    config = DQN(
        epsilon=1,
        epsilon_end=1,
        rollout_length=4,
        gradient_steps=2,
        batch_size=256,
        learning_starts=64,
        tau=1,
        target_interval=10,
        n_step=1,
    )
    policy = NetPolicyConfig(hidden=[32], lr=1e-2, max_grad_norm=10, lr_schedule="linear")
    made = learner(config, env, {"one": [0], "two": [1]}, policy)
    train_on_play(made, env, 100)
    q = made.heads[0].values(made.stacks[0].net(torch.eye(3).expand(2, 3, 3))).detach().numpy()
    check_score(np.abs(q[0, 0] - [0.99 * 7, 0.99 * 4.5]).max(), "error of the first step")
    check_score(np.abs(q[:, 1] - 7).max(), "error where all pay 7")
    check_score(np.abs(q[:, 2] - [0.5, 4.5]).max(), "error where one may earn 8")
    check_score(np.abs(mean_return(env, made.greedy_policies(), 4) - 7).max(), "return, from 7")
