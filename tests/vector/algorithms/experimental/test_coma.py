"""Counterfactual credit: by hand, one update against a plain reference implementation, and learning."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, Track, assert_same_state, mean_return, snapshot, train

from palestra.core.optimizers import Adam
from palestra.core.types import RolloutBatch
from palestra.envs.vector.matrix import MatrixGame, TwoStepGame
from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import VectorEnv
from palestra.vector.algorithms.experimental.coma import COMA, COMALearner, counterfactual_advantages
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.layers import member_weights
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.policies.base import UniformVectorPolicy, VectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2)
Weights = dict[str, torch.Tensor]


def learner(
    config: COMA,
    env: VectorEnv,
    seats: dict[str, list[int]],
    policies: Mapping[str, NetPolicyConfig] | NetPolicyConfig = POLICY,
) -> COMALearner:
    own = dict.fromkeys(seats, policies) if isinstance(policies, NetPolicyConfig) else policies
    return config.build_learner(env, seats, own, {name: number for number, name in enumerate(seats)})


# ---- by hand


def test_counterfactual_advantage_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0, 6.0], [1.0, 2.0, 6.0], [-1.0, 0.0, 9.0]])
    policy = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    credit = counterfactual_advantages(q, policy, torch.tensor([2, 1, 0]))
    # 6 - (.5 + .5 + 1.5); nothing for the only action there is; -1 - (-.5), whatever the value of an illegal action
    assert credit.tolist() == pytest.approx([3.5, 0.0, -0.5])


def test_expected_advantage_is_zero() -> None:
    """So the baseline does not change the expected gradient (Foerster et al., 2018, lemma 1)."""
    q = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    policy = torch.softmax(q.flip(0), 1)
    credit = torch.stack([counterfactual_advantages(q, policy, torch.full((5,), action)) for action in range(4)], 1)
    torch.testing.assert_close((policy * credit).sum(1), torch.zeros(5), atol=1e-6, rtol=0)


class Textbook:
    """The first update of a policy at one seat with a central critic: networks of one hidden layer of tanh, targets by
    the recursion y = r + gamma * ((1 - lam) * Q' + lam * y')."""

    def __init__(
        self, made: COMALearner, batch: RolloutBatch, learning: dict[str, int], name: str, config: COMA
    ) -> None:
        stack, judge = next(
            (s, j) for s, j in zip(made.stacks, made.critics, strict=True) if name in s.seat_mapping.names
        )
        p = stack.seat_mapping.names.index(name)
        self.policy = {key: w.clone().requires_grad_() for key, w in member_weights(stack.net, p).items()}
        self.critic = {key: w.clone().requires_grad_() for key, w in member_weights(judge.net, p).items()}
        self.batch, self.seat, self.config = batch, learning[name], config
        self.others = [seat for seat in learning.values() if seat != self.seat]

    @staticmethod
    def net(w: Weights, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ w["body.layers.0.weight"] + w["body.layers.0.bias"][0])
        return hidden @ w["head.weight"] + w["head.bias"][0]

    def q(self, w: Weights, state: np.ndarray, done: dict[int, int]) -> torch.Tensor:
        """A value for each action; `done` are the others' actions."""
        N = len(self.batch.rewards[0, 0])
        codes = torch.zeros(N, 3)
        for seat, action in done.items():
            codes[seat, action] = 1
        return self.net(w, torch.cat([torch.from_numpy(state), codes.flatten(), torch.eye(N)[self.seat]]))

    def done(self, t: int, b: int) -> dict[int, int]:
        return {n: int(self.batch.actions[t, b, n]) for n in self.others if self.batch.agent_mask[t, b, n]}

    def logits(self, view: np.ndarray, action_mask: np.ndarray) -> torch.Tensor:
        out = self.net(self.policy, torch.from_numpy(view))
        return torch.log_softmax(out.masked_fill(~torch.from_numpy(action_mask.copy()), -torch.inf), 0)

    def taken(self, t: int, b: int) -> float:
        values = self.q(self.critic, self.batch.state[t, b], self.done(t, b))
        return values[int(self.batch.actions[t, b, self.seat])].item()

    def expected(self, state: np.ndarray, view: np.ndarray, action_mask: np.ndarray) -> float:
        assert not self.others  # their actions would be drawn
        return (self.logits(view, action_mask).exp() * self.q(self.critic, state, {})).sum().item()

    def targets(self) -> dict[tuple[int, int], float]:
        batch, config, found = self.batch, self.config, {}
        T = len(batch.rewards)
        for b in range(batch.rewards.shape[1]):
            own = [t for t in range(T + 1) if batch.agent_mask[t, b, self.seat]]
            for t in own[::-1]:
                later = next((u for u in own if u > t), None)
                end = next((u for u in range(t, T) if batch.done[u, b]), None)
                if t == T or (later is None and end is None):
                    continue
                ended = end is not None and (later is None or end < later)
                stop = end if ended else later - 1
                reward = float(batch.rewards[t : stop + 1, b, self.seat].sum())
                if ended:
                    at = [(int(u), int(g)) for u, g in zip(*batch.end_index, strict=True)].index((end, b))
                    last = batch.final_state[at], batch.final_obs[at, self.seat], batch.action_mask[end, b, self.seat]
                    follows = 0.0 if batch.terminated[end, b] else self.expected(*last)
                elif later == T:
                    follows = self.expected(
                        batch.state[T, b], batch.obs[T, b, self.seat], batch.action_mask[T, b, self.seat]
                    )
                else:
                    follows = (1 - config.td_lambda) * self.taken(later, b) + config.td_lambda * found[later, b]
                found[t, b] = reward + config.gamma * follows
        return found

    def step(self, w: Weights, loss: torch.Tensor, policy: NetPolicyConfig) -> Weights:
        """Adam's first step moves each weight by lr * g / (|g| + eps)."""
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        clipped = {key: g * min(1.0, policy.max_grad_norm / (norm.item() + 1e-6)) for key, g in gradients.items()}
        return {key: w[key].detach() - policy.lr * g / (g.abs() + policy.optimizer.eps) for key, g in clipped.items()}

    def critic_after(self, policy: NetPolicyConfig) -> Weights:
        loss, targets = torch.zeros(()), self.targets()
        for (t, b), target in targets.items():
            values = self.q(self.critic, self.batch.state[t, b], self.done(t, b))
            loss = loss + 0.5 * (values[int(self.batch.actions[t, b, self.seat])] - target) ** 2 / len(targets)
        return self.step(self.critic, loss, policy)

    def policy_after(self, policy: NetPolicyConfig) -> Weights:
        """Advantages are those of the critic after its own update."""
        loss, critic = torch.zeros(()), {key: w.detach() for key, w in self.critic_after(policy).items()}
        moves = [(int(t), int(b)) for t, b in np.argwhere(self.batch.agent_mask[:-1, :, self.seat])]
        for t, b in moves:
            logp = self.logits(self.batch.obs[t, b, self.seat], self.batch.action_mask[t, b, self.seat])
            q = self.q(critic, self.batch.state[t, b], self.done(t, b))
            action = int(self.batch.actions[t, b, self.seat])
            credit = (q[action] - (logp.exp() * q).sum()).detach()
            entropy = -sum(x.exp() * x for x in logp if torch.isfinite(x))
            loss = loss - (logp[action] * credit + self.config.entropy_coef * entropy) / len(moves)
        return self.step(self.policy, loss, policy)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    "learning, steps",
    [
        ({"a": 0, "b": 1, "c": 2}, 7),  # games of 3 and 4 steps
        ({"a": 1}, 14),  # one of 5 too, which is cut off, and one of 2
        ({"a": 1}, 13),  # the last game continues
    ],
)
def test_update_equals_a_reference_implementation(learning: dict[str, int], steps: int, turns: bool) -> None:
    env, policy = (
        Countdown(4, turns=turns, seats=3),
        NetPolicyConfig(hidden=[6], lr=1e-3, optimizer=Adam(eps=1e-2), max_grad_norm=0.4),
    )
    config = COMA(gamma=0.9, td_lambda=0.7, entropy_coef=0.05, epochs=1, minibatches=1)
    made = learner(config, env, {name: [seat] for name, seat in learning.items()}, policy)
    free = [seat for seat in range(3) if seat not in learning.values()]
    players: list[VectorPolicy] = [*made.rollout_policies(0), *([UniformVectorPolicy(env, free)] if free else [])]
    batch = VectorRollout(env, np.array([1, 5, 9, 13])).collect(players, steps, 0)
    assert (~batch.action_mask).any() and batch.truncated.any() == (steps > 7) and batch.done[-1].all() == (steps != 13)
    if turns and steps == 13:
        assert batch.agent_mask[-1, :, 1].all()
    books = {name: Textbook(made, batch, learning, name, config) for name in learning}
    expected = {name: (book.critic_after(policy), book.policy_after(policy)) for name, book in books.items()}
    made.update(batch, 0.0)
    (stack,), (judge,) = made.stacks, made.critics
    for p, name in enumerate(stack.seat_mapping.names):
        for before, after, net in zip(
            (books[name].critic, books[name].policy), expected[name], (judge.net, stack.net), strict=True
        ):
            for key, weight in member_weights(net, p).items():
                assert (weight - before[key]).abs().max() > 1e-6, key
                torch.testing.assert_close(weight, after[key], rtol=1e-3, atol=2e-6)
        for key, weight in member_weights(judge.target, p).items():
            assert torch.equal(weight, books[name].critic[key])  # the target network is not updated yet


# ---- target network, resume, inputs


def test_target_network_is_updated_at_its_interval() -> None:
    env = Countdown(4)
    made = learner(COMA(target_interval=3), env, {"a": [0, 1]})
    sweeper, renewed = VectorRollout(env, np.arange(4)), []
    for i in range(6):
        made.update(sweeper.collect(made.rollout_policies(0), 5, i), 0.0)
        pairs = zip(made.critics[0].net.parameters(), made.critics[0].target.parameters(), strict=True)
        renewed.append(all(torch.equal(new, old) for new, old in pairs))
    assert renewed == [False, False, True] * 2


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.few(2)
def test_resume_from_state_arrays_is_bit_identical(memory: int, turns: bool) -> None:
    policy = NetPolicyConfig(hidden=[6], gru_units=memory, normalize_observations=True, seat_one_hot=True)
    seats = {"a": [0], "b": [3], "c": [1, 2]}
    env = Countdown(4, seats=4, turns=turns)
    made, again = (learner(COMA(target_interval=2), env, seats, policy) for _ in range(2))
    sweeper = VectorRollout(env, np.arange(4))
    batches = []
    for i in range(5):
        batch = sweeper.collect(made.rollout_policies(0), 6, i)
        if i == 3:
            again.load_arrays(snapshot(made))
        made.update(batch, i / 5)
        if i >= 3:
            again.update(batch, i / 5)
        batches.append(batch)
    assert len(made.stacks) == 2
    expected = snapshot(made)
    for key, value in snapshot(again).items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)
    assert expected["updates"] == 5 and expected["versions"].tolist() == [5, 5]


@pytest.mark.parametrize("horizon", [1, 2, 7])
def test_short_rollouts_are_accepted(horizon: int) -> None:
    """With and without ends of games, with and without decisions of known value."""
    env = Countdown(4, turns=True, seats=3)
    made = learner(COMA(rollout_length=horizon), env, {"a": [0], "b": [1, 2]})
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(6):
        figures = made.update(sweeper.collect(made.rollout_policies(0), horizon, i), 0.0)
    assert set(figures) == {"a", "b"}
    for line in figures.values():
        assert set(line) == {"value_loss", "policy_loss", "entropy", "grad_norm"}
        assert np.isfinite(list(line.values())).all()


def test_seats_that_do_not_act_have_no_gradient() -> None:
    env = Countdown(4, turns=True)
    made, other = (learner(COMA(), env, {"a": [0], "b": [1]}) for _ in range(2))
    batch = VectorRollout(env, np.array([1, 5, 9, 13])).collect(made.rollout_policies(0), 14, 0)
    made.update(batch, 0.0)
    batch.actions[~batch.agent_mask[:-1]] = 2
    other.update(batch, 0.0)
    assert_same_state(made, other)


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(ValueError, match=r'coma needs a value of every action .* "track" has seats without discrete'):
        learner(COMA(), Track(2), {"a": [0]})


# ---- learning


def test_seat_gets_no_credit_for_others_actions(check_score: Any) -> None:
    """The second player alone decides what both get. Once the critics have learned this, the first player's gradient
    vanishes, however much its returns vary; that of the plain policy gradient does not."""
    env = MatrixGame(32, payoff=[[-1, 1], [-1, 1]])
    made = learner(COMA(rollout_length=4, entropy_coef=0.0), env, {"a": [0], "b": [1]}, POLICY)
    figures = train(made, VectorRollout(env, np.arange(32)), 4, 40)
    probability = made.rollout_policies(0)[0].net(torch.zeros(2, 1, 4)).softmax(-1)[:, 0, 1]
    check_score(abs(probability[0].item() - 0.5), "first, from 1/2")
    check_score(probability[1].item(), "second")
    check_score(figures["a"]["grad_norm"], "first's gradient")


@pytest.mark.slow
def test_independent_policies_learn_to_coordinate(check_score: Any) -> None:
    env = MatrixGame(32, game="coordination")
    made = learner(COMA(rollout_length=4), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(32)), 4, 120)
    check_score(mean_return(env, made.rollout_policies(0), 40).mean())


@pytest.mark.slow
def test_two_step_game_is_learned() -> None:
    env = TwoStepGame(32)
    made = learner(COMA(rollout_length=4), env, {"a": [0], "b": [1]})
    by_chance = mean_return(env, made.rollout_policies(0), 40).mean()
    train(made, VectorRollout(env, np.arange(32)), 4, 80)
    assert by_chance < 5.5 and mean_return(env, made.greedy_policies(), 4).mean() >= 7


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.few(1)
def test_recurrent_team_learns_from_a_team_reward(turns: bool, check_score: Any) -> None:
    env = Cues(32, seats=2, steps=2, fleeting=True, team=True, turns=turns)
    policy = NetPolicyConfig(hidden=[16], gru_units=16, lr=1e-2)
    made = learner(COMA(rollout_length=8, gamma=1.0), env, {"a": [0], "b": [1]}, policy)
    train(made, VectorRollout(env, np.arange(32)), 8, 60)
    check_score(mean_return(env, made.greedy_policies(), 20).mean())  # a third by chance


@pytest.mark.slow
def test_simple_spread_is_learned_beyond_chance() -> None:
    env = SimpleSpread(32, agents=2)
    config = COMA(rollout_length=10, gamma=0.9, entropy_coef=0.0, minibatches=8, critic_lr=3e-3)
    made = learner(config, env, {"agent": [0, 1]}, NetPolicyConfig(hidden=[64], lr=5e-3))
    chance = mean_return(env, [UniformVectorPolicy(env, [0, 1])], 50).mean()
    train(made, VectorRollout(env, np.arange(32)), 10, 100)
    assert mean_return(env, made.greedy_policies(), 50).mean() > chance + 3


class OwnMasks(Countdown):
    """Shows action masks to the seat that acts only."""

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        super().show(obs, state)
        if self.vector_step.action_mask is not None:
            self.vector_step.action_mask &= self.vector_step.agent_mask[..., None]


def test_truncated_seat_that_waits_has_the_mask_of_its_last_decision() -> None:
    """Its mask in the last step of the game says nothing: targets assumed that all actions, also illegal ones, are
    equally likely then."""
    found = []
    for env in (Countdown(6, turns=True), OwnMasks(6, turns=True)):
        made = learner(COMA(), env, {"a": [0], "b": [1]}, NetPolicyConfig(hidden=[16], lr=1e-2))
        batch = VectorRollout(env, np.arange(6)).collect(made.rollout_policies(0), 24, 0)
        made.random = torch.Generator().manual_seed(0)
        _, targets, known = made._credit(RolloutTensors.of(batch))
        found.append(torch.where(known, targets, 0.0))
    torch.testing.assert_close(found[1], found[0])
