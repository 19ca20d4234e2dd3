"""Actor-critic learning: one update against a plain reference implementation, invariances, and learning."""

from pathlib import Path
from typing import Any

import numpy as np
import pyspiel
import pytest
import torch
from helpers.pretended_group import PretendedGroup
from helpers.vector_toys import POLICY, Countdown, Cues, Push, Track, learner, mean_return, ppo, snapshot, train
from open_spiel.python.algorithms.exploitability import nash_conv
from open_spiel.python.policy import tabular_policy_from_callable

from palestra.core.optimizers import Adam
from palestra.core.types import RolloutBatch
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS, random_below
from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.matrix import MatrixGame
from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv, empty_step
from palestra.vector.algorithms.actor_critic import ActorCriticConfig, ActorCriticLearner
from palestra.vector.algorithms.ppo import A2C, PPO
from palestra.vector.learners.optimizers import NonFiniteGradient
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.layers import member_weights
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout


def collect_rollout(
    made: ActorCriticLearner, env: VectorEnv, steps: int, seed: int = 0, sweeps: int = 1
) -> RolloutBatch:
    """The last of `sweeps` rollouts; the earlier ones make the games differ in their steps."""
    sweeper = VectorRollout(env, np.arange(env.num_envs))
    for i in range(sweeps):
        batch = sweeper.collect([*made.rollout_policies(0)], steps, seed + i)
    return batch


def weights(made: ActorCriticLearner, name: str) -> dict[str, torch.Tensor]:
    """The weights of a policy and of its critic."""
    found = {}
    for stack in made.stacks:
        if name in stack.seat_mapping.names:
            found |= {f"net.{k}": v for k, v in member_weights(stack.net, stack.seat_mapping.names.index(name)).items()}
    for critic in made.critics:
        if name in critic.seat_mapping.names:
            found |= {
                f"critic.{k}": v for k, v in member_weights(critic.net, critic.seat_mapping.names.index(name)).items()
            }
    return found


# ---- one update, computed decision by decision


class Textbook:
    """The first update of a policy at one seat with its own critic: networks of one hidden layer of tanh."""

    def __init__(
        self, made: ActorCriticLearner, batch: RolloutBatch, name: str, seat: int, config: ActorCriticConfig
    ) -> None:
        self.weights = {key: w.clone().requires_grad_() for key, w in weights(made, name).items()}
        self.batch, self.seat, self.config = batch, seat, config
        self.factor = np.ones(batch.rewards.shape[:2])  # of the advantages

    def net(self, kind: str, view: np.ndarray, last: str = "head") -> torch.Tensor:
        w, x = self.weights, torch.from_numpy(view)
        hidden = torch.tanh(x @ w[f"{kind}.body.layers.0.weight"] + w[f"{kind}.body.layers.0.bias"][0])
        return hidden @ w[f"{kind}.{last}.weight"] + w[f"{kind}.{last}.bias"][0]

    def value(self, view: np.ndarray) -> float:
        return self.net("critic", view).item()

    def moves(self, b: int) -> list[tuple[int, float, bool]]:
        """Decisions of game b, last first: step, error, and whether the next decision belongs to the same game."""
        batch, seat, found = self.batch, self.seat, []
        T = len(batch.rewards)
        own = [t for t in range(T + 1) if batch.agent_mask[t, b, seat]]
        for t in own[::-1]:
            later = [u for u in own if u > t]
            ends = [u for u in range(t, T) if batch.done[u, b]]
            if t == T or not (later or ends):
                continue
            if ends and (not later or ends[0] < later[0]):
                last = next(
                    i
                    for i, pair in enumerate(zip(*batch.end_index, strict=True))
                    if tuple(map(int, pair)) == (ends[0], b)
                )
                follows = 0.0 if batch.terminated[ends[0], b] else self.value(batch.final_obs[last, seat])
                stop, same = ends[0], False
            else:
                follows, stop, same = self.value(batch.obs[later[0], b, seat]), later[0] - 1, True
            reward = float(batch.rewards[t : stop + 1, b, seat].sum())
            found.append((t, reward + self.config.gamma * follows - self.value(batch.obs[t, b, seat]), same))
        return found

    def update(self, policy: NetPolicyConfig) -> dict[str, torch.Tensor]:
        """Adam's first step moves each weight by lr * g / (|g| + eps)."""
        advantages: list[tuple[int, int, float]] = []
        for b in range(self.batch.rewards.shape[1]):
            estimate = 0.0
            for t, error, same in self.moves(b):
                estimate = error + self.config.gamma * self.config.gae_lambda * estimate * same
                advantages.append((t, b, estimate))
        credit = np.array([a for *_, a in advantages])
        mean, deviation = (credit.mean(), credit.std()) if self.config.normalize_advantages else (0.0, 1.0)
        actor = critic = torch.zeros(())
        for t, b, advantage in advantages:
            view = self.batch.obs[t, b, self.seat]
            logp = self.logp(t, b)
            entropy = -sum(x.exp() * x for x in logp if torch.isfinite(x))
            taken = logp[int(self.batch.actions[t, b, self.seat])]
            advantage_now = (advantage - mean) / (deviation + 1e-8) * self.factor[t, b]
            actor = actor - taken * advantage_now - self.config.entropy_coef * entropy
            value = self.net("critic", view)[0]
            target = value.item() + advantage
            critic = critic + 0.5 * (value - target) ** 2
            if self.config.aux_value_coef:
                besides = self.net("net", view, "value_head")[0]
                actor = actor + self.config.aux_value_coef * 0.5 * (besides - target) ** 2
        ((actor + critic) / len(advantages)).backward()
        return {
            key: w.detach()
            - policy.lr * self.clipped(key, policy) / (self.clipped(key, policy).abs() + policy.optimizer.eps)
            for key, w in self.weights.items()
        }

    def logp(self, t: int, b: int) -> torch.Tensor:
        """Log-probabilities of the actions at step t of game b."""
        out = self.net("net", self.batch.obs[t, b, self.seat])
        if self.batch.action_mask is not None:
            out = out.masked_fill(~torch.from_numpy(self.batch.action_mask[t, b, self.seat].copy()), -torch.inf)
        return torch.log_softmax(out, 0)

    def ratios(self, updated: dict[str, torch.Tensor]) -> np.ndarray:
        """New over old probability of each action [T, B] with the weights `updated`; 1 where the seat does not act."""
        before, self.weights = self.weights, updated
        found = np.ones(self.batch.rewards.shape[:2])
        for t, b in zip(*np.nonzero(self.batch.agent_mask[:-1, :, self.seat]), strict=True):
            new = self.logp(t, b)[int(self.batch.actions[t, b, self.seat])].item()
            found[t, b] = np.exp(new - self.batch.logp[t, b, self.seat])
        self.weights = before
        return found

    def clipped(self, key: str, policy: NetPolicyConfig) -> torch.Tensor:
        kind = key.split(".")[0]
        gradients = {k: w.grad for k, w in self.weights.items() if k.startswith(kind) and w.grad is not None}
        norm = torch.sqrt(sum((g.square().sum() for g in gradients.values()), torch.zeros(())))
        return gradients[key] * min(1.0, policy.max_grad_norm / (norm.item() + 1e-6))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        A2C(gamma=0.9, gae_lambda=0.8, entropy_coef=0.05),
        A2C(gamma=0.9, gae_lambda=0.8, normalize_advantages=False, entropy_coef=0),
        ppo(gamma=0.9, gae_lambda=0.8, epochs=1, minibatches=1),  # ratios of 1: the plain policy gradient
        A2C(
            gamma=0.9, gae_lambda=1.0, normalize_advantages=False, entropy_coef=0, off_policy_correction="vtrace"
        ),  # on-policy V-trace equals GAE with lambda 1
        A2C(gamma=0.9, gae_lambda=0.8, aux_value_coef=0.7),
    ],
)
def test_update_equals_a_reference_implementation(config: ActorCriticConfig, turns: bool) -> None:
    env, policy = (
        Countdown(4, turns=turns),
        NetPolicyConfig(hidden=[6], lr=1e-3, optimizer=Adam(eps=1e-2), max_grad_norm=0.4),
    )
    made = learner(config, env, {"a": [0], "b": [1]}, policy)
    sweeper = VectorRollout(env, np.array([1, 5, 9, 13]))  # games of 3, 4, 5 (cut off) and 2 steps
    batch = sweeper.collect(made.rollout_policies(0), 14, 0)
    assert batch.done[-1].all() and batch.truncated.any() and (~batch.action_mask).any()
    books = {name: Textbook(made, batch, name, seat, config) for seat, name in enumerate("ab")}
    expected = {name: book.update(policy) for name, book in books.items()}
    made.update(batch, 0.0)
    for name, found in expected.items():
        for key, weight in weights(made, name).items():
            moved = (weight - books[name].weights[key]).abs().max()
            assert moved > 1e-6, key
            torch.testing.assert_close(weight, found[key], rtol=1e-3, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("turns", [False, True])
def test_sequential_update_equals_a_reference_implementation(turns: bool) -> None:
    """The second policy of the random order has advantages times the ratios of the first."""
    env, policy = (
        Countdown(4, turns=turns),
        NetPolicyConfig(hidden=[6], lr=5e-2, optimizer=Adam(eps=1e-2), max_grad_norm=10),
    )
    config = ppo(gamma=0.9, gae_lambda=0.8, epochs=1, minibatches=1, sequential=True)
    made = learner(config, env, {"a": [0], "b": [1]}, policy)
    assert [stack.seat_mapping.names for stack in made.stacks] == [("a",), ("b",)]
    batch = VectorRollout(env, np.array([1, 5, 9, 13])).collect(made.rollout_policies(0), 14, 0)
    expected = {}
    for first, second in ("ab", "ba"):
        books = {name: Textbook(made, batch, name, seat, config) for seat, name in enumerate("ab")}
        found = {first: books[first].update(policy)}
        books[second].factor = books[first].ratios(found[first])
        expected[first] = found | {second: books[second].update(policy)}
        assert np.abs(books[second].factor - 1).max() > 0.05
    made.update(batch, 0.0)
    differences = {
        first: max(
            (weight - each[name][key]).abs().max().item()
            for name in "ab"
            for key, weight in weights(made, name).items()
        )
        for first, each in expected.items()
    }
    right, wrong = sorted(differences.values())
    assert right < 1e-5 and (turns or wrong > 1e-4), differences


# ---- invariances


ALL_OPTIONS = ppo(
    rollout_length=9,
    epochs=2,
    minibatches=2,
    critic="central",
    critics="one",
    value_norm=True,
    off_policy_correction="vtrace",
)
ALL_OPTIONS_AND_AUX_VALUE = ALL_OPTIONS.model_copy(update={"aux_value_coef": 0.5})
SMALL = NetPolicyConfig(hidden=[6], normalize_observations=True, lr_schedule="linear")


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize(
    "config",
    [
        ALL_OPTIONS_AND_AUX_VALUE,
        ppo(rollout_length=9, epochs=2, minibatches=3),
        A2C(rollout_length=9),
        ppo(rollout_length=9, epochs=2, minibatches=2, sequential=True),
        ppo(rollout_length=9, epochs=2, minibatches=2, value_norm="popart", value_clip=0.1),
    ],
)
@pytest.mark.few(4)
def test_resume_from_state_arrays_is_bit_identical(config: ActorCriticConfig, memory: int) -> None:
    policy = SMALL.model_copy(update={"gru_units": memory})
    seats = {"a": [0], "b": [1], "c": [2, 3]}

    def train_twice(made: ActorCriticLearner, sweeper: VectorRollout, first: int) -> None:
        for i in range(first, first + 2):
            made.update(sweeper.collect(made.rollout_policies(i / 9), 9, i), i / 9)

    env, other = Countdown(4, seats=4), Countdown(4, seats=4)
    made, again = learner(config, env, seats, policy), learner(config, other, seats, policy)
    one, two = VectorRollout(env, np.arange(4)), VectorRollout(other, np.arange(4))
    train_twice(made, one, 0)
    kept = snapshot(made)
    train_twice(again, two, 0)  # another learner after as many updates, with other weights
    again.update(two.collect(again.rollout_policies(0), 9, 99), 0.5)
    train_twice(made, one, 2)
    again.load_arrays(kept)
    two = VectorRollout(other, np.arange(4))
    is_first = learner(config, other, seats, policy)
    train_twice(is_first, two, 0)  # makes the games' state equal
    train_twice(again, two, 2)
    expected = snapshot(made)
    assert set(expected) == set(snapshot(again))
    for key, value in snapshot(again).items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)
    assert any(not np.array_equal(kept[key], expected[key]) for key in kept if "net.0" in key)


@pytest.mark.parametrize("memory", [0, 5])
def test_policies_learn_the_same_in_any_stack(memory: int) -> None:
    """With one minibatch; with more, decisions are assigned to minibatches in another order."""
    config = ppo(rollout_length=8, epochs=2, minibatches=1)
    policy = NetPolicyConfig(hidden=[6], gru_units=memory)
    apart = {"a": policy, "b": policy.model_copy(update={"optimizer": Adam(eps=1.0001e-5)})}
    env = Countdown(4)
    together, alone = (
        learner(config, env, {"a": [0], "b": [1]}, policy),
        learner(config, env, {"a": [0], "b": [1]}, apart),
    )
    assert (len(together.stacks), len(alone.stacks)) == (1, 2)
    batch = collect_rollout(together, env, 8)
    first = together.update(batch, 0.0)
    if memory:
        batch.recurrent_state |= {"a": batch.recurrent_state["a+b"][:1], "b": batch.recurrent_state["a+b"][1:]}
    second = alone.update(batch, 0.0)
    for key, value in weights(together, "a").items():
        torch.testing.assert_close(weights(alone, "a")[key], value, rtol=1e-4, atol=1e-6)
    assert first["a"]["policy_loss"] == pytest.approx(second["a"]["policy_loss"], abs=1e-5)
    assert first["a"]["entropy"] == pytest.approx(second["a"]["entropy"], rel=1e-4)


@pytest.mark.parametrize("auxiliary", [0.0, 0.5])
def test_rewards_of_one_policy_do_not_affect_another(auxiliary: float) -> None:
    config, env = (
        ppo(rollout_length=8, epochs=2, minibatches=2, value_norm=True, aux_value_coef=auxiliary),
        Countdown(4),
    )
    made, other = (learner(config, env, {"a": [0], "b": [1]}) for _ in range(2))
    batch = collect_rollout(made, env, 8)
    made.update(batch, 0.0)
    batch.rewards[..., 1] *= 3
    other.update(batch, 0.0)
    assert all(torch.equal(value, weights(other, "a")[key]) for key, value in weights(made, "a").items())
    assert not all(torch.equal(value, weights(other, "b")[key]) for key, value in weights(made, "b").items())


@pytest.mark.parametrize("turns", [False, True])
def test_steps_without_an_action_have_no_gradient(turns: bool) -> None:
    """A seat that does not act has no part in the loss: its recorded action and reward may be anything."""
    config, env = A2C(rollout_length=9), Countdown(4, turns=turns)
    made, other = (learner(config, env, {"a": [0], "b": [1]}) for _ in range(2))
    batch = collect_rollout(made, env, 9)
    made.update(batch, 0.0)
    waits = ~batch.agent_mask[:-1]
    batch.actions[waits], batch.logp[waits] = 1, -5.0
    other.update(batch, 0.0)
    for name in "ab":
        assert all(torch.equal(value, weights(other, name)[key]) for key, value in weights(made, name).items())
    assert waits.any() == turns


@pytest.mark.parametrize("critics", ["each", "one"])
@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.parametrize("memory", [0, 4])
def test_seats_without_learner_are_ignored(critic: str, critics: str, memory: int) -> None:
    env = Countdown(4, seats=3)
    config = ppo(rollout_length=7, epochs=1, minibatches=2, critic=critic, critics=critics)  # type: ignore[arg-type]
    made = learner(config, env, {"a": [2]}, NetPolicyConfig(hidden=[6], gru_units=memory))
    sweeper, others = VectorRollout(env, np.arange(4)), [UniformVectorPolicy(env, [0, 1])]
    for i in range(3):
        figures = made.update(sweeper.collect([*made.rollout_policies(0), *others], 7, i), 0.0)
    assert set(figures) == {"a"} and np.isfinite(list(figures["a"].values())).all()


def test_learning_rate_anneals_to_zero() -> None:
    env = Countdown(4)
    for schedule, moves in (("linear", False), ("constant", True)):
        policy = NetPolicyConfig(hidden=[6], lr_schedule=schedule)  # type: ignore[arg-type]
        made = learner(ppo(rollout_length=8), env, {"a": [0, 1]}, policy)
        before = weights(made, "a")
        made.update(collect_rollout(made, env, 8), 1.0)
        assert moves != all(torch.equal(value, before[key]) for key, value in weights(made, "a").items())


@pytest.mark.parametrize(
    "configs",
    [
        (
            ppo(rollout_length=8, entropy_coef=0.3, entropy_coef_end=0.1),
            ppo(rollout_length=8, entropy_coef=0.2),
            ppo(rollout_length=8, entropy_coef=0.3),
        ),
        (
            ppo(rollout_length=8, gamma=0.5, gamma_end=0.9),
            ppo(rollout_length=8, gamma=0.7),
            ppo(rollout_length=8, gamma=0.5),
        ),
    ],
    ids=["entropy", "gamma"],
)
def test_scheduled_values_are_interpolated_linearly(configs: tuple[PPO, ...]) -> None:
    """The update equals that of a run with this mean value throughout, and not that with the first value."""
    found = []
    for config in configs:
        env = Countdown(4)
        made = learner(config, env, {"a": [0, 1]})
        made.update(collect_rollout(made, env, 8), 0.5)
        found.append(weights(made, "a"))
    for key, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][key])
    assert any(not torch.allclose(weight, found[2][key]) for key, weight in found[0].items())


def test_scheduled_values_run_from_start_to_end() -> None:
    config = ppo(entropy_coef=0.3, entropy_coef_end=0.1, gamma=0.9, gamma_end=0.99)
    assert [config.entropy_at(x) for x in (0.0, 1.0)] == pytest.approx([0.3, 0.1])
    assert [config.gamma_at(x) for x in (0.0, 1.0)] == pytest.approx([0.9, 0.99])
    assert [ppo(entropy_coef=0.3).entropy_at(1.0), ppo(gamma=0.9).gamma_at(1.0)] == [0.3, 0.9]


def test_observations_are_normalised_by_statistics_before_the_update() -> None:
    """So the ratios of a batch start at 1."""
    env = Countdown(4)
    made = learner(ppo(rollout_length=8, epochs=1, minibatches=1), env, {"a": [0, 1]}, SMALL)
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(3):
        batch = sweeper.collect(made.rollout_policies(0), 8, i)
        figures = made.update(batch, 0.0)["a"]
        assert figures["kl"] == pytest.approx(0, abs=1e-9) and figures["clip_fraction"] == 0
    norm = made.stacks[0].norm
    assert norm is not None and norm.count.item() == 3 * 8 * 4 * 2
    assert not np.allclose(norm.mean, 0)


@pytest.mark.parametrize("correct", ["none", "vtrace"])
def test_on_policy_ratios_are_one_with_recurrence(correct: str) -> None:
    env, policy = Countdown(4, turns=True), NetPolicyConfig(hidden=[6], gru_units=5)
    config = ppo(rollout_length=8, epochs=1, minibatches=1, off_policy_correction=correct)  # type: ignore[arg-type]
    made = learner(config, env, {"a": [0], "b": [1]}, policy)
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(3):
        for figures in made.update(sweeper.collect(made.rollout_policies(0), 8, i), 0.0).values():
            assert figures["kl"] == pytest.approx(0, abs=1e-9)


def test_vtrace_corrects_off_policy_batches() -> None:
    """If the recorded log-probability of an action is much lower than the true one, its ratio is cut to 1 and nothing
    changes; if it is higher, the advantage has less weight."""
    config = A2C(rollout_length=8, off_policy_correction="vtrace", normalize_advantages=False, gae_lambda=1.0)
    env = Countdown(4)
    figures = []
    for shift in (0.0, -3.0, 3.0):
        made = learner(config, env, {"a": [0, 1]})
        batch = collect_rollout(made, env, 8)
        batch.logp += shift
        figures.append(made.update(batch, 0.0)["a"]["policy_loss"])
    assert figures[1] == pytest.approx(figures[0])
    assert abs(figures[2]) < 0.2 * abs(figures[0])


@pytest.mark.parametrize("turns", [False, True])
def test_importance_weights_are_applied_once(turns: bool) -> None:
    """PPO's first pass makes the step of A2C: V-trace has already weighted the actions of an older policy, so the
    ratios start at 1 and none is clipped before the first step."""
    env, made = Countdown(4, turns=turns), []
    for config in (ppo, A2C):
        own = config(rollout_length=8, epochs=1, minibatches=1, off_policy_correction="vtrace")
        made.append(learner(own, env, {"a": [0, 1]}))
        batch = collect_rollout(made[-1], env, 8)
        batch.logp += np.random.default_rng(0).normal(0, 2, batch.logp.shape).astype(np.float32)
        figures = made[-1].update(batch, 0.0)["a"]
        assert "kl" not in figures or (abs(figures["kl"]) < 1e-9 and figures["clip_fraction"] == 0)
    for key, value in snapshot(made[0]).items():
        np.testing.assert_allclose(value, snapshot(made[1])[key], atol=1e-6, err_msg=key)


def test_nonfinite_loss_raises_before_the_update() -> None:
    config, env = ppo(rollout_length=8), Countdown(4)
    made = learner(config, env, {"a": [0], "b": [1]})
    batch = collect_rollout(made, env, 8)
    before = snapshot(made)
    batch.rewards[3, 2, 1] = np.nan
    with pytest.raises(NonFiniteGradient, match="policy b") as caught:
        made.update(batch, 0.0)
    assert caught.value.policy == "b"
    for key, value in snapshot(made).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, metrics: loss, "returned a tensor of shape .*: return a scalar tensor and a dictionary"),
        (lambda loss, metrics: (loss, None), "return a scalar tensor and a dictionary of metrics"),
        (lambda loss, metrics: (loss.item(), metrics), "as loss: return a scalar tensor with a gradient"),
        (lambda loss, metrics: (loss.detach(), metrics), "without gradient as loss"),
        (lambda loss, metrics: (loss[None], metrics), r"a tensor of shape \[1\] as loss"),
        (lambda loss, metrics: (loss, metrics | {"return": loss}), "a metric return, which the run logs itself"),
        (lambda loss, metrics: (loss, {"mine": "high"}), "returned 'high' as metric mine: return a number"),
    ],
)
def test_a_loss_of_ones_own_returns_a_scalar_and_metrics(change: Any, message: str) -> None:
    class Odd(PPO):
        def loss(self, rows: Any) -> Any:
            return change(*super().loss(rows))

    env = Countdown(4)
    made = learner(Odd(rollout_length=8, minibatches=1, value_norm=False), env, {"a": [0, 1]})
    with pytest.raises(ValueError, match=rf"Odd\.loss.*{message}"):
        made.update(collect_rollout(made, env, 8), 0.0)


def test_shared_critic_needs_equal_observations_or_a_central_state() -> None:
    env = SimpleSpread(2)
    env.observation_shapes = ((18,), (18,), (17,))
    with pytest.raises(ValueError, match="critics: one needs seats with observations of the same shape"):
        learner(ppo(critics="one"), env, {"a": [0], "b": [2]})


@pytest.mark.parametrize("memory", [0, 4])
def test_two_processes_with_equal_games_equal_one(memory: int) -> None:
    config, env = ppo(rollout_length=8, epochs=2, minibatches=2, value_norm=True), Countdown(4)
    policy = SMALL.model_copy(update={"gru_units": memory})
    two = PretendedGroup(lambda x: 2 * x)
    made = learner(config, env, {"a": [0], "b": [1]}, policy)
    other = config.build_learner(env, {"a": [0], "b": [1]}, dict.fromkeys("ab", policy), {"a": 5, "b": 6}, two)
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(2):
        batch = sweeper.collect(made.rollout_policies(0), 8, i)
        made.update(batch, 0.0)
        other.update(batch, 0.0)
    for name in "ab":
        for key, value in weights(made, name).items():
            torch.testing.assert_close(weights(other, name)[key], value, rtol=1e-4, atol=1e-5)


def test_gradients_are_clipped_per_member() -> None:
    """Adam's first step hides a gradient's scale except through `eps`: a large `eps` shows it."""
    env, policy = Countdown(4), NetPolicyConfig(hidden=[6], max_grad_norm=0.01, optimizer=Adam(eps=100.0), lr=1.0)
    made = learner(A2C(rollout_length=8, normalize_advantages=False), env, {"a": [0], "b": [1]}, policy)
    batch = collect_rollout(made, env, 8)
    batch.rewards[..., 1] *= 100
    before = {name: weights(made, name) for name in "ab"}
    figures = made.update(batch, 0.0)
    assert figures["b"]["grad_norm"] > 10 * figures["a"]["grad_norm"] > 10 * policy.max_grad_norm
    for name in "ab":
        moved = [(v - before[name][k]).square().sum() for k, v in weights(made, name).items() if k.startswith("net")]
        assert torch.stack(moved).sum().sqrt().item() == pytest.approx(0.01 / 100, rel=0.02)


@pytest.mark.parametrize("memory", [0, 4])
def test_exported_policy_plays_identically(memory: int, tmp_path: Path) -> None:
    env = Countdown(4, seats=3)
    policy = SMALL.model_copy(update={"gru_units": memory, "seat_one_hot": True})
    made = learner(ppo(rollout_length=8, aux_value_coef=0.5), env, {"a": [0, 1], "b": [2]}, policy)
    train(made, VectorRollout(env, np.arange(4)), 8, 3)
    for name, write in made.member_writers().items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    own = VectorRollout(env, np.arange(4)).collect(made.greedy_policies(), 9, 0).actions.copy()
    read = [read_policy(tmp_path / name, env, seats, best=True) for name, seats in (("a", [0, 1]), ("b", [2]))]
    np.testing.assert_array_equal(VectorRollout(env, np.arange(4)).collect(read, 9, 0).actions, own)
    assert [player.names for player in read] == [["a@48"], ["b@48"]]


# ---- learning


def test_seats_learn_their_own_tasks(check_score: Any) -> None:
    env = Cues(32, seats=2)
    made = learner(ppo(rollout_length=8, gamma=0.9), env, {"a": [0], "b": [1]})
    assert mean_return(env, [UniformVectorPolicy(env, [0, 1])], 100) == pytest.approx(1 / 3, abs=0.05)
    train(made, VectorRollout(env, np.arange(32)), 8, 25)
    check_score(mean_return(env, made.greedy_policies(), 20).min())


def test_shared_policy_needs_the_seat_one_hot_for_distinct_tasks(check_score: Any) -> None:
    env = Cues(32, seats=2)
    for seat_id in (True, False):
        policy = NetPolicyConfig(hidden=[16], lr=1e-2, seat_one_hot=seat_id)
        made = learner(ppo(rollout_length=8, gamma=0.9), env, {"a": [0, 1]}, policy)
        train(made, VectorRollout(env, np.arange(32)), 8, 25)
        both = mean_return(env, made.greedy_policies(), 20).mean()
        check_score(both, "with one-hot" if seat_id else "without")  # one answer cannot be right for both seats


@pytest.mark.parametrize(
    "config",
    [
        A2C(rollout_length=8, gamma=0.9),
        A2C(rollout_length=8, gamma=0.9, off_policy_correction="vtrace"),
        ppo(rollout_length=8, gamma=0.9, critic="central", critics="one", value_norm=True),
    ],
)
@pytest.mark.few(1)
def test_team_learns_from_a_team_reward(config: ActorCriticConfig, check_score: Any) -> None:
    env = Cues(64, seats=2, team=True)
    made = learner(config, env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(64)), 8, 60)
    check_score(mean_return(env, made.greedy_policies(), 20).mean())


def test_turn_based_seats_learn_from_terminal_rewards(check_score: Any) -> None:
    env = Cues(32, seats=2, steps=2, turns=True)
    made = learner(ppo(rollout_length=16, gamma=1.0), env, {"a": [0], "b": [1]})
    train(made, VectorRollout(env, np.arange(32)), 16, 30)
    check_score(mean_return(env, made.greedy_policies(), 40).min())


@pytest.mark.slow
def test_memory_task_needs_recurrence() -> None:
    env = Cues(32, seats=1, steps=4, fleeting=True)
    for memory in (16, 0):
        policy = NetPolicyConfig(hidden=[16], lr=1e-2, gru_units=memory)
        made = learner(ppo(rollout_length=16, gamma=1.0, minibatches=2), env, {"a": [0]}, policy)
        train(made, VectorRollout(env, np.arange(32)), 16, 40)
        score = mean_return(env, made.greedy_policies(), 80).item()
        assert score > 0.9 if memory else score < 0.5


@pytest.mark.slow
def test_continuous_cart_is_balanced(check_score: Any) -> None:
    env = Track(32)
    made = learner(ppo(rollout_length=40, gamma=0.9, entropy_coef=0.0), env, {"a": [0]})
    still = mean_return(env, [UniformVectorPolicy(env, [0])], 40).item()
    train(made, VectorRollout(env, np.arange(32)), 40, 30)
    check_score(mean_return(env, made.greedy_policies(), 40).item() / still)  # the share of a random player's loss


class Product(NativeEnv):
    """Games of one step: each of two seats observes a sign, and both are paid the product, whatever their actions."""

    name = "product"

    def __init__(self, games: int, state: bool) -> None:
        self.num_envs, self.seats, self.observation_shapes, self.action_spaces = (
            games,
            ("a", "b"),
            ((2,), (1,)),
            (Discrete(2),) * 2,
        )
        self.state_size = 2 if state else 0
        self.vector_step = empty_step(games, 2, (2,), state_size=self.state_size)
        self.internal_state = {"rng": np.zeros((games, RNG_WORDS), np.uint64)}

    def _begin(self) -> None:
        for b, row in enumerate(self.internal_state["rng"]):
            self.vector_step.obs[b, :, 0] = random_below(row, 2) * 2 - 1, random_below(row, 2) * 2 - 1
        if self.vector_step.state is not None:
            self.vector_step.state[:] = self.vector_step.obs[..., 0]

    def _advance(self, actions: np.ndarray) -> None:
        self.vector_step.rewards[:] = self.vector_step.obs[..., 0].prod(1, keepdims=True)
        self.vector_step.terminated[:] = True
        self._begin()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("critics", ["each", "one"])
@pytest.mark.few(1)
def test_central_critic_uses_the_global_state(critics: str, state: bool, check_score: Any) -> None:
    env = Product(64, state)
    for critic, loss in (("own", 0.5), ("central", 0.0)):  # half the variance of a sign it does not know, or nothing
        if (critic, critics) == ("own", "one"):
            continue
        config = A2C(rollout_length=8, critic=critic, critics=critics, epochs=4)  # type: ignore[arg-type]
        made = learner(config, env, {"a": [0], "b": [1]})
        figures = train(made, VectorRollout(env, np.arange(64)), 8, 40)
        check_score(max(abs(line["value_loss"] - loss) for line in figures.values()), critic)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.few(1)
def test_auxiliary_value_loss_matches_the_critic(norm: bool, check_score: Any) -> None:
    """The auxiliary loss is in the critic's units, from the same observations: its error is about as large."""
    env = Countdown(32)
    made = learner(ppo(rollout_length=8, aux_value_coef=1.0, value_norm=norm), env, {"a": [0], "b": [1]})
    lines = train(made, VectorRollout(env, np.arange(32)), 8, 40).values()
    missed, judged = (np.mean([line[key] for line in lines]) for key in ("auxiliary_loss", "value_loss"))
    check_score(abs(missed / judged - 1))


@pytest.mark.parametrize("config", [ppo(rollout_length=4), ppo(rollout_length=4, critic="central", sequential=True)])
@pytest.mark.few(1)
def test_independent_policies_learn_to_coordinate(config: PPO, check_score: Any) -> None:
    env = MatrixGame(32, game="coordination")
    made = learner(config, env, {"a": [0], "b": [1]})
    assert mean_return(env, made.rollout_policies(0), 40).mean() == pytest.approx(0.5, abs=0.1)
    train(made, VectorRollout(env, np.arange(32)), 4, 30)
    check_score(mean_return(env, made.rollout_policies(0), 40).mean())


def nash_conv_of(made: ActorCriticLearner) -> float:
    """NashConv of the policy in Kuhn poker: what both players together could gain by best responses."""
    game, head = pyspiel.load_game("kuhn_poker"), made.stacks[0].head

    def probabilities(state: Any) -> dict[int, float]:
        out = made.stacks[0].net(torch.tensor(state.information_state_tensor())[None, None])[0, 0]
        return {a: head.evaluate_actions(out, torch.tensor(a), None)[0].exp().item() for a in state.legal_actions()}

    return nash_conv(game, tabular_policy_from_callable(game, probabilities))


@pytest.mark.slow
def test_self_play_lowers_nash_conv_in_kuhn_poker() -> None:
    """With enough entropy; without, the policy follows best responses to its current play in circles."""
    env, policy = KuhnPoker(128), NetPolicyConfig(hidden=[32], lr=3e-3)
    config = ppo(rollout_length=16, gamma=1.0, entropy_coef=0.3, epochs=2, minibatches=1, normalize_advantages=False)
    made = learner(config, env, {"a": [0, 1]}, policy)
    assert nash_conv_of(made) == pytest.approx(11 / 12, abs=0.02)  # of nearly uniform play
    train(made, VectorRollout(env, np.arange(128)), 16, 100)
    assert nash_conv_of(made) < 11 / 24


@pytest.mark.slow
def test_simple_spread_is_learned_beyond_chance() -> None:
    env = SimpleSpread(64)
    policy = NetPolicyConfig(hidden=[64], lr=2e-3)
    config = ppo(rollout_length=25, gamma=0.95, critic="central", critics="one", value_norm=True)
    made = learner(config, env, {"a": [0, 1, 2]}, policy)
    chance = mean_return(env, [UniformVectorPolicy(env, [0, 1, 2])], 25).mean()
    train(made, VectorRollout(env, np.arange(64)), 25, 40)
    assert mean_return(env, made.greedy_policies(), 25).mean() > chance + 4


# ---- regressions


def test_critic_loss_is_reported_per_policy() -> None:
    env, apart = Countdown(4), {"a": POLICY, "b": NetPolicyConfig(hidden=[8])}
    shown = []
    for scale in (1, 10):
        made = learner(ppo(rollout_length=8), env, {"a": [0], "b": [1]}, apart)
        batch = collect_rollout(made, env, 8)
        batch.rewards[..., 1] *= scale
        shown.append(made.update(batch, 0.0)["a"]["value_loss"])
    assert shown[0] == pytest.approx(shown[1])


def unit(width: int) -> Continuous:
    return Continuous((-1.0,) * width, (1.0,) * width)


@pytest.mark.parametrize(
    "spaces", [(unit(1), unit(3)), (unit(2), unit(3)), (MultiDiscrete((2, 3)), MultiDiscrete((2, 2, 2)))]
)
def test_seats_may_have_action_spaces_of_different_sizes(spaces: tuple[Space, ...]) -> None:
    env = Push(4, spaces)
    made = learner(ppo(rollout_length=8, epochs=1, minibatches=1), env, {"a": [0], "b": [1]})
    batch = collect_rollout(made, env, 8)
    assert not batch.actions[:, :, 0, make_head(spaces[0]).width :].any()
    for figures in made.update(batch, 0.0).values():
        assert figures["kl"] == pytest.approx(0, abs=1e-9)


def test_rollout_without_completed_decisions_changes_nothing() -> None:
    env = Countdown(4, turns=True)
    made = learner(A2C(rollout_length=1), env, {"a": [0]})
    before = weights(made, "a")
    batch = VectorRollout(env, np.arange(4)).collect([*made.rollout_policies(0), UniformVectorPolicy(env, [1])], 1, 0)
    assert not batch.done.any() and not batch.agent_mask[-1, :, 0].any()
    figures = made.update(batch, 0.0)["a"]
    assert figures["policy_loss"] == figures["value_loss"] == 0
    assert all(torch.equal(value, before[key]) for key, value in weights(made, "a").items())
