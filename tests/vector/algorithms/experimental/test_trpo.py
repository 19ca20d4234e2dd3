"""TRPO and HATRPO: Fisher matrices and steps by hand, the bound, exact resumption, and teams that improve."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, Push, Track, assert_resume_is_exact, mean_return, train
from torch import Tensor
from torch.distributions import Categorical, Normal
from torch.distributions import kl_divergence as torch_kl_divergence

from palestra.core.config.presets import expand_preset
from palestra.core.types import RolloutBatch
from palestra.envs.vector.matrix import PAYOFFS, MatrixGame
from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.vector.algorithms.experimental.trpo import TRPO, TRPOLearner, conjugate_gradient, dot, fisher_product
from palestra.vector.algorithms.presets import VECTOR_PRESETS
from palestra.vector.learners.policy_stack import NetPolicyConfig, PolicyStack
from palestra.vector.nets.heads import CategoricalHead, GaussianHead, MultiCategoricalHead, kl_divergence
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

SMALL = NetPolicyConfig(hidden=[3], lr=1e-2)


def learner(config: TRPO, env: VectorEnv, seats: dict[str, list[int]], policy: NetPolicyConfig = SMALL) -> TRPOLearner:
    seeds = {name: number + 7 for number, name in enumerate(seats)}
    made = config.build_learner(env, seats, dict.fromkeys(seats, policy), seeds)
    assert isinstance(made, TRPOLearner)
    return made


def hatrpo(**settings: Any) -> TRPO:
    return TRPO(**{"critic": "central", "sequential": True} | settings)


# ---- divergences, products, conjugate gradients


def test_divergences_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 2, 5, 4).clamp(-2, 2).unbind()  # the bounds of a log deviation are -5 and 2
    mask = torch.tensor([True, False, True, True])
    masked = [Categorical(logits=torch.where(mask, x, -torch.inf)[..., mask]) for x in (old, new)]
    found = kl_divergence(CategoricalHead(Discrete(4)), old, new, mask.expand(2, 5, 4))
    torch.testing.assert_close(found, torch_kl_divergence(*masked))
    head = MultiCategoricalHead(MultiDiscrete((3, 1)))
    expected = torch_kl_divergence(*(Categorical(logits=x[..., :3]) for x in (old, new)))
    torch.testing.assert_close(kl_divergence(head, old, new, None), expected)
    gaussians = [Normal(x[..., :2], x[..., 2:].exp()) for x in (old, new)]
    found = kl_divergence(GaussianHead(Continuous((0.0, -1.0), (4.0, 1.0))), old, new, None)
    torch.testing.assert_close(found, torch_kl_divergence(*gaussians).sum(-1))


def test_conjugate_gradients_solve_the_systems_of_all_members() -> None:
    """After as many steps as there are unknowns the solutions are exact; a member that is done first stays there."""
    torch.manual_seed(0)
    root = torch.randn(3, 6, 6)
    matrix = root @ root.mT + 0.5 * torch.eye(6)
    matrix[1], b = torch.eye(6) * 2, torch.randn(3, 6)
    b[2] = 0

    def product(vector: Tensor) -> Tensor:
        return (matrix @ vector[..., None])[..., 0]

    torch.testing.assert_close(conjugate_gradient(product, b, 12), torch.linalg.solve(matrix, b), rtol=1e-3, atol=1e-4)
    one = conjugate_gradient(product, b, 1)
    torch.testing.assert_close(one, dot(b, b) / dot(b, product(b)).clamp(min=1e-9) * b)
    assert not one[2].any()


def scores_and_shares(made: TRPOLearner, stack: PolicyStack, batch: RolloutBatch, p: int) -> list[tuple[Any, float]]:
    """The gradients of the log-probabilities of all actions, [A, D], with their probabilities [A], in each row where
    the policy acts; and the share of the row."""
    (seat,) = stack.seat_mapping.seats[p]
    rows = [
        (t, b) for b in range(batch.rewards.shape[1]) for t in range(len(batch.rewards)) if batch.agent_mask[t, b, seat]
    ]
    found = []
    for t, b in rows:
        view = torch.from_numpy(batch.obs[t, b, seat]).expand(len(stack.seat_mapping.names), 1, -1)
        out = stack.net(view)[p, 0]
        if batch.action_mask is not None:
            out = out[torch.from_numpy(batch.action_mask[t, b, seat])]
        logp = torch.log_softmax(out, -1)
        slopes = [torch.autograd.grad(one, stack.optimizer.parameters, retain_graph=True) for one in logp]
        flat = torch.stack([torch.cat([g[p].flatten() for g in each]) for each in slopes])
        found.append(((flat, logp.detach().exp()), 1 / len(rows)))
    return found


def fisher_by_hand(made: TRPOLearner, stack: PolicyStack, batch: RolloutBatch, p: int) -> Tensor:
    """The mean over rows of the expectation over actions of score score' [D, D]."""
    total = torch.zeros(())
    for (scores, probabilities), share in scores_and_shares(made, stack, batch, p):
        total = total + share * (scores.T * probabilities) @ scores
    return total


@pytest.mark.parametrize("turns", [False, True])
def test_fisher_product_equals_the_fisher_matrix(turns: bool) -> None:
    """Two members of a stack, with illegal actions."""
    env = Countdown(3, turns=turns)
    made = learner(TRPO(normalize_advantages=False), env, {"a": [0], "b": [1]})
    (stack,) = made.stacks
    batch = VectorRollout(env, np.arange(3)).collect(made.rollout_policies(0), 6, 0)
    ones = torch.from_numpy(batch.agent_mask[:-1].copy())
    rows = made.policy_rows(stack, RolloutTensors.of(batch), ones.float(), torch.ones_like(ones.float()), ones)
    before = made.surrogate(stack, rows, 0.0)
    product, D = fisher_product(before.divergence, stack.optimizer.parameters), stack.optimizer.flat.shape[1]
    assert before.divergence.abs().max() < 1e-6
    columns = torch.stack([product(torch.eye(D)[i].expand(2, D)) for i in range(D)], 2)
    for p in range(2):
        expected = fisher_by_hand(made, stack, batch, p)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(columns[p], expected, rtol=1e-4, atol=1e-5)


# ---- one update


def step_by_hand(
    made: TRPOLearner, stack: PolicyStack, batch: RolloutBatch, advantages: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights [D] of the policy of a stack after its step, computed with explicit matrices, and the ratios [T, B]
    of new to old probabilities of its actions. `advantages` [T, B, N] are normalised and weighted."""
    config, (seat,) = made.config, stack.seat_mapping.all_seats
    here = [(t, b) for t, b in np.ndindex(*known.shape[:2]) if known[t, b, seat]]
    old = {at: math.exp(float(batch.logp[(*at, seat)])) for at in np.ndindex(*known.shape[:2])}

    def logp(net: Any, t: int, b: int) -> Tensor:
        out = net(torch.from_numpy(batch.obs[t, b, seat])[None, None])[0, 0]
        assert batch.action_mask is not None
        return torch.log_softmax(torch.where(torch.from_numpy(batch.action_mask[t, b, seat]), out, -torch.inf), -1)

    def surrogate(net: Any) -> Tensor:
        ratios = [logp(net, *at)[int(batch.actions[(*at, seat)])].exp() / old[at] for at in here]
        gained = [ratio * advantages[(*at, seat)] for ratio, at in zip(ratios, here, strict=True)]
        return torch.stack(gained).mean()

    net = copy.deepcopy(stack.net)
    parameters = list(net.parameters())
    slope = torch.cat([g[0].flatten() for g in torch.autograd.grad(surrogate(net), parameters)])
    matrix = torch.zeros(len(slope), len(slope))
    before = {at: logp(net, *at) for at in here}
    for at in here:
        legal = torch.isfinite(before[at])
        for one in before[at][legal]:
            score = torch.autograd.grad(one, parameters, retain_graph=True)
            flat = torch.cat([g[0].flatten() for g in score])
            matrix += one.detach().exp() * flat[:, None] * flat / len(here)
    matrix += config.cg_damping * torch.eye(len(slope))
    direction = torch.linalg.solve(matrix, slope)
    step = direction * torch.sqrt(2 * config.kl_bound / (direction @ matrix @ direction))
    start, least = torch.cat([x.detach()[0].flatten() for x in parameters]), surrogate(net).item()
    for j in range(config.line_search_steps):
        moved = start + config.backtrack**j * step
        for x, own in zip(parameters, moved.split([x[0].numel() for x in parameters]), strict=True):
            x.data = own.view(x.shape)
        divergences = [(before[at].exp() * (before[at] - logp(net, *at))).nansum() for at in here]
        if surrogate(net).item() > least and torch.stack(divergences).mean().item() <= config.kl_bound:
            break
    else:
        raise AssertionError("no step")
    ratio = torch.ones(known.shape[:2])
    for t, b in np.ndindex(*known.shape[:2]):
        if batch.agent_mask[t, b, seat]:
            ratio[t, b] = logp(net, t, b)[int(batch.actions[t, b, seat])].exp().detach() / old[t, b]
    return moved, ratio


@pytest.mark.parametrize("turns", [False, True])
def test_sequential_update_equals_a_reference_implementation(turns: bool) -> None:
    """Steps by explicit matrices, in either order of the two policies; the second has advantages times the ratios of
    the first."""
    env = Countdown(4, turns=turns)
    made = learner(hatrpo(gamma=0.9, cg_steps=60, kl_bound=0.02), env, {"a": [0], "b": [1]})
    batch = VectorRollout(env, np.array([1, 5, 9, 13])).collect(made.rollout_policies(0), 8, 0)
    advantages, _, known = made._credit(RolloutTensors.of(batch), torch.from_numpy(batch.logp), 0.0)
    for seat in range(2):
        own = advantages[..., seat][known[..., seat]]
        advantages[..., seat] = (advantages[..., seat] - own.mean()) / (own.std(correction=0) + 1e-8)
    expected = {}
    for order in ((0, 1), (1, 0)):
        weighted = advantages.clone()
        for i in order:
            expected[order, i], ratio = step_by_hand(made, made.stacks[i], batch, weighted, known)
            weighted = weighted * ratio[..., None]
    figures = made.update(batch, 0.0)
    differences = [
        max((made.stacks[i].optimizer.flat[0] - expected[order, i]).abs().max().item() for i in order)
        for order in ((0, 1), (1, 0))
    ]
    right, wrong = sorted(differences)
    assert right < 2e-3 and (turns or wrong > 5 * right), differences
    assert all(0 < line["kl"] <= 0.02 and line["improvement"] > 0 for line in figures.values())


@pytest.mark.parametrize("kind", ["discrete", "continuous", "vectors", "memory"])
def test_divergence_stays_within_the_bound(kind: str, check_score: Any) -> None:
    """Measured on the rollout, with the policies before and after each update, also if two policies share a stack."""
    envs: dict[str, VectorEnv] = {
        "continuous": Track(16),
        "vectors": Push(16, (MultiDiscrete((2, 3)),) * 2),
        "memory": Cues(16, steps=3, fleeting=True),
    }
    env = envs.get(kind, Countdown(16))
    policy = NetPolicyConfig(hidden=[8], lr=1e-2, gru_units=4 if kind == "memory" else 0)
    made = learner(
        TRPO(kl_bound=0.02, rollout_length=12), env, {"a": [0], "b": [1]} if len(env.seats) > 1 else {"a": [0]}, policy
    )
    sweeper, steps = VectorRollout(env, np.arange(16)), []
    for i in range(6):
        batch = sweeper.collect(made.rollout_policies(0), 12, i)
        before = [copy.deepcopy(stack.net) for stack in made.stacks]
        figures = made.update(batch, 0.0)
        for old, stack in zip(before, made.stacks, strict=True):
            views, memory = (
                stack.observations(batch.obs)[:, :-1],
                batch.recurrent_state.get("+".join(stack.seat_mapping.names)),
            )
            first = stack.seat_mapping.repeat_games(torch.from_numpy(batch.is_first))[:, :-1]
            masks = None if batch.action_mask is None else stack.rows(batch.action_mask)[:, :-1]
            was, now = (net.unroll(views, memory, first)[0] for net in (old, stack.net))
            acts = stack.rows(batch.agent_mask[:-1]).float()
            divergence = (acts * kl_divergence(stack.head, was, now, masks)).sum((1, 2)) / acts.sum((1, 2))
            for name, own in zip(stack.seat_mapping.names, divergence.tolist(), strict=True):
                assert 0 <= own <= 0.02 * (1 + 1e-3) and own == pytest.approx(figures[name]["kl"], abs=2e-3)
                steps.append(own)
    check_score(np.mean(np.array(steps) > 0.005))  # the steps are not trivially small


def test_policy_without_an_improving_step_is_unchanged() -> None:
    """If every action earns the same, no step improves, and no NaN appears."""
    env = Cues(8, team=True)
    made = learner(TRPO(normalize_advantages=False), env, {"a": [0], "b": [1]})
    batch = VectorRollout(env, np.arange(8)).collect(made.rollout_policies(0), 4, 0)
    known = torch.ones(4, 8, 2, dtype=torch.bool)
    before = made.stacks[0].optimizer.flat.clone()
    zeros = torch.zeros(4, 8, 2)
    rows = made.policy_rows(made.stacks[0], batch, zeros, torch.ones_like(zeros), known)
    figures = made._train_policies(made.stacks[0], rows, zeros, 0.0)
    assert torch.equal(made.stacks[0].optimizer.flat, before)
    assert all(line["step_size"] == line["kl"] == line["improvement"] == 0 for line in figures.values())


# ---- state, settings


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.few(2)
def test_resume_from_state_arrays_is_bit_identical(sequential: bool, memory: int) -> None:
    env = Countdown(4, seats=4)
    config = TRPO(rollout_length=9, critic="central", sequential=sequential, value_norm=True)
    policy = NetPolicyConfig(hidden=[6], normalize_observations=True, gru_units=memory)
    made, again = (learner(config, env, {"a": [0], "b": [1], "c": [2, 3]}, policy) for _ in range(2))
    assert_resume_is_exact(made, again, env, 9)


def test_hatrpo_equals_sequential_trpo_with_a_central_critic() -> None:
    tree = expand_preset({"type": "hatrpo", "kl_bound": 0.005}, VECTOR_PRESETS)
    assert TRPO(**tree) == hatrpo(kl_bound=0.005)
    with pytest.raises(ValueError, match="aux_value_coef: steps of trpo follow the policy's own loss only"):
        TRPO(aux_value_coef=1.0)


# ---- learning


def expected_return(made: TRPOLearner, payoff: np.ndarray) -> float:
    """The exact return of a one-shot matrix game between policies "a" and "b"."""
    chosen: list[np.ndarray] = []
    for stack in made.stacks:
        view = torch.zeros(len(stack.seat_mapping.names), 1, *made.env.observation_shapes[0])
        chosen += list(stack.net(view)[:, 0].softmax(-1).detach().double().numpy())
    return float(chosen[0] @ payoff @ chosen[1])


@pytest.mark.parametrize("game", ["climbing", "penalty", "coordination"])
@pytest.mark.few(1)
def test_joint_policy_improves_monotonically(game: Any, check_score: Any) -> None:
    """The exact return never falls by more than the sampling error of 2,048 games, and rises from -3.4, -19.8 or 0.5 to
    near an equilibrium."""
    payoff, env = np.array(PAYOFFS[game], float), MatrixGame(256, game=game)
    made = learner(hatrpo(rollout_length=8, kl_bound=0.05, value_norm=True), env, {"a": [0], "b": [1]})
    sweeper, returns = VectorRollout(env, np.arange(256)), [expected_return(made, payoff)]
    for i in range(12):
        made.update(sweeper.collect(made.rollout_policies(0), 8, i), 0.0)
        returns.append(expected_return(made, payoff))
    check_score(np.diff(returns).min() / np.ptp(payoff), "worst step")
    check_score(returns[-1])


@pytest.mark.parametrize("sequential", [True, False])
def test_sequential_steps_account_for_each_other(sequential: bool, check_score: Any) -> None:
    """Each of two policies prefers the action that the other avoids. With long simultaneous steps they swap actions
    again and again; in sequential updates the second step takes the first into account."""
    payoff, env = np.array(PAYOFFS["coordination"], float), MatrixGame(512, game="coordination")
    config = TRPO(critic="central", sequential=sequential, rollout_length=4, kl_bound=0.5, gae_lambda=1.0)
    made = learner(config, env, {"a": [0], "b": [1]})
    for stack in made.stacks:
        for p, name in enumerate(stack.seat_mapping.names):
            lean = 0.4 if name == "a" else -0.4
            stack.net.head.bias.data[p, 0] = torch.tensor([lean, -lean])
    sweeper, returns = VectorRollout(env, np.arange(512)), [expected_return(made, payoff)]
    for i in range(3):
        made.update(sweeper.collect(made.rollout_policies(0), 4, i), 0.0)
        returns.append(expected_return(made, payoff))
    if sequential:
        check_score(returns[1] - returns[0], "gain of the first step")
        check_score(returns[3])
    else:
        check_score(max(returns))


@pytest.mark.slow
def test_hatrpo_learns_to_spread(check_score: Any) -> None:
    """Three policies, one for each agent: the return rises from -27 (random play) to -22.7 ± 0.5 in 15 updates."""
    env = SimpleSpread(64)
    config = hatrpo(rollout_length=25, gamma=0.95, value_norm=True, epochs=2, minibatches=2)
    made = learner(config, env, {f"agent_{i}": [i] for i in range(3)}, NetPolicyConfig(hidden=[32], lr=3e-3))
    assert mean_return(env, [UniformVectorPolicy(env, [0, 1, 2])], 50).mean() < -26
    train(made, VectorRollout(env, np.arange(64)), 25, 15)
    check_score(mean_return(env, made.rollout_policies(1.0), 50).mean())
