"""The multi-agent transformer: sequential and parallel decoding agree, values by hand, masks, and teams that learn."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Push, assert_resume_is_exact, mean_return, ppo, train
from torch import Tensor

from palestra.environments.combat.env import Combat
from palestra.envs.vector.matrix import MatrixGame
from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.vector.algorithms.experimental.mat import MAT, MATLearner
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.layers import NetConfig, make_generators
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.transformer import MultiAgentTransformer
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

SMALL = NetPolicyConfig(hidden=[8], activation="relu", lr=3e-3, attention_heads=2, attention_blocks=2)
DIFFERENT = {"rollout_length": 8, "entropy_coef": 0.2}
BOTH = pytest.mark.parametrize("attention", ["softmax", "retention"])
KINDS = ["discrete", "turns", "vectors", "continuous", "dead", pytest.param("combat", marks=pytest.mark.slow)]


def small(attention: Any) -> NetPolicyConfig:
    return SMALL.model_copy(update={"attention_type": attention})


class Mortal(Countdown):
    """A countdown whose seats die after 1 to 5 steps, which differ between seats and games."""

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        super().show(obs, state)
        lives = 1 + (self.seeds + self.number)[:, None] * (2 + np.arange(len(self.seats))) % 5
        self.vector_step.agent_mask[:] = self.time[:, None] < lives
        self.vector_step.agent_mask[:, -1] |= ~self.vector_step.agent_mask.any(1)


def learner(
    env: VectorEnv, seats: dict[str, list[int]], policy: NetPolicyConfig = SMALL, scale: float = 50, **settings: Any
) -> MATLearner:
    """A learner whose last layer is scaled by `scale`, so that every input matters."""
    seeds = {name: number + 7 for number, name in enumerate(seats)}
    made = MAT(**settings).build_learner(env, seats, dict.fromkeys(seats, policy), seeds)
    assert isinstance(made, MATLearner)
    for stack in made.stacks:
        stack.net.head.weight.data.mul_(scale)
    return made


def transformer(seats: int, view: int = 3, **settings: Any) -> MultiAgentTransformer:
    config = NetConfig(**{"hidden": [8], "attention_heads": 2, "attention_blocks": 2} | settings)
    return MultiAgentTransformer((view,), Discrete(4), config, make_generators([3]), gain=1.0, team_size=seats)


# ---- decoding


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_parallel_and_sequential_decoding_agree(kind: str, attention: str) -> None:
    """Log-probabilities of acting equal those of training to 1e-5, for two teams in a stack, masks, seats that wait or
    are dead, and all kinds of actions. For retention they differ by up to 2e-5: it is normalised, and some sums nearly
    cancel."""
    envs: dict[str, VectorEnv] = {
        "discrete": Countdown(6, seats=6),
        "turns": Countdown(6, seats=6, turns=True),
        "vectors": Push(6, (MultiDiscrete((2, 3)),) * 6),
        "continuous": Push(6, (Continuous((-1.0, 0.0), (1.0, 4.0)),) * 6),
        "dead": Mortal(6, seats=6),
    }
    env = envs.get(kind) or Combat(6, map="3m")
    seats = {"units": [0, 1, 2]} if kind == "combat" else {"a": [0, 2, 4], "b": [1, 3, 5]}
    made = learner(env, seats, small(attention))
    own = [seat for team in seats.values() for seat in team]
    others = [UniformVectorPolicy(env, [seat for seat in range(len(env.seats)) if seat not in own])]
    batch = VectorRollout(env, np.arange(6)).collect([*made.rollout_policies(0), *others], 40, 0)
    acts = batch.agent_mask[:-1]
    assert acts[..., own].all() == (kind not in ("turns", "dead", "combat"))
    atol = 5e-5 if attention == "retention" else 1e-5
    np.testing.assert_allclose(made._logp(RolloutTensors.of(batch))[acts], batch.logp[acts], atol=atol)
    assert np.ptp(batch.logp[..., own][acts[..., own]]) > 0.1


@BOTH
def test_actions_depend_on_earlier_seats_only(attention: str) -> None:
    """Each action depends on all earlier seats, and on the observations of all seats."""
    torch.manual_seed(0)
    net, obs, actions = transformer(4, attention_type=attention), torch.randn(1, 5, 4, 3), torch.randint(4, (1, 5, 4))
    everyone = torch.ones(1, 5, 4, dtype=torch.bool)
    before = net.decode(net.encode(obs, everyone), actions, everyone)
    for seat in range(4):
        changed = actions.clone()
        changed[..., seat] = (changed[..., seat] + 1) % 4
        moved = (net.decode(net.encode(obs, everyone), changed, everyone) - before).abs().amax((0, 1, 3))
        assert (moved[: seat + 1] == 0).all() and (moved[seat + 1 :] > 1e-4).all()
        seen = obs.clone()
        seen[:, :, seat] += 1
        assert ((net.decode(net.encode(seen, everyone), actions, everyone) - before).abs().amax((0, 1, 3)) > 1e-4).all()


@BOTH
def test_seats_that_do_not_act_are_left_out(attention: str) -> None:
    """Outputs and values of the other seats equal those of a smaller team, up to rounding."""
    torch.manual_seed(0)
    net, obs, actions = transformer(4, attention_type=attention), torch.randn(1, 6, 4, 3), torch.randint(4, (1, 6, 4))
    for living in ([0, 1, 3], [1, 2], [2], [0, 3]):
        acts = torch.zeros(1, 6, 4, dtype=torch.bool)
        acts[..., living] = True
        encoded, smaller = net.encode(obs, acts), net.encode(obs[:, :, living], acts[..., living])
        torch.testing.assert_close(encoded[:, :, living], smaller)
        torch.testing.assert_close(net.values(encoded)[..., living], net.values(smaller))
        outputs = net.decode(encoded, actions, acts)[:, :, living]
        torch.testing.assert_close(outputs, net.decode(smaller, actions[..., living], acts[..., living]))
        if len(living) == 1:
            torch.testing.assert_close(outputs[:, :, 0], net(obs[:, :, living[0]]))


def layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()


@BOTH
def test_outputs_by_hand(attention: str) -> None:
    """One block, one head, two seats: the layers of Wen et al. (2022, figure 2) one row at a time, and retention (Sun
    et al., 2023, eq. 5 and 8) in its recurrent form."""
    torch.manual_seed(0)
    net = transformer(2, attention_heads=1, attention_blocks=1, attention_type=attention)
    obs, actions = torch.randn(2, 3), [3, 1]
    w = {name: parameter.detach()[0] for name, parameter in net.named_parameters()}

    def dense(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"][0]

    def attend(name: str, x: Tensor, context: list[Tensor], position: int) -> Tensor:
        keys, values = zip(*[dense(f"{name}.key_value", c).chunk(2) for c in context], strict=True)
        if attention == "retention":
            state = torch.zeros(8, 8)
            for key, value in zip(keys, values, strict=True):
                state = state + key[:, None] * value / 8**0.5
            retained, gate = dense(f"{name}.query", x) @ state, dense(f"{name}.gate", context[position])
            return dense(f"{name}.out", gate * torch.sigmoid(gate) * layer_norm(retained))
        scores = torch.stack([dense(f"{name}.query", x) @ key / 8**0.5 for key in keys]).softmax(0)
        return dense(f"{name}.out", sum(s * v for s, v in zip(scores, values, strict=True)))

    def feed_forward(name: str, x: Tensor) -> Tensor:
        return dense(f"{name}.feed_forward.outer", dense(f"{name}.feed_forward.inner", x).tanh())

    embedded = [layer_norm(dense("body.layers.0", view).tanh()) for view in obs]
    attended = [layer_norm(x + attend("encoder.0.attention", x, embedded, i)) for i, x in enumerate(embedded)]
    encoded = [layer_norm(x + feed_forward("encoder.0", x)) for x in attended]
    start, first = torch.tensor([0.0, 0, 0, 0, 1]), torch.tensor([0.0, 0, 0, 1, 0])  # no action; action 3
    tokens = [layer_norm(dense("action_embedding", token).tanh()) for token in (start, first)]
    known = [layer_norm(tokens[i] + attend("decoder.0.to_actions", tokens[i], tokens[: i + 1], i)) for i in (0, 1)]
    asked = [layer_norm(encoded[i] + attend("decoder.0.to_encoding", encoded[i], known[: i + 1], i)) for i in (0, 1)]
    decoded = [layer_norm(x + feed_forward("decoder.0", x)) for x in asked]
    outputs = torch.stack([dense("head", dense("before_head", x).tanh()) for x in decoded])
    values = torch.cat([dense("value_head", dense("before_value", x).tanh()) for x in encoded])

    everyone = torch.ones(1, 1, 2, dtype=torch.bool)
    found = net.encode(obs[None, None], everyone)
    torch.testing.assert_close(net.values(found)[0, 0], values)
    torch.testing.assert_close(net.decode(found, torch.tensor([[actions]]), everyone)[0, 0], outputs)


def test_probabilities_of_joint_actions_sum_to_one() -> None:
    torch.manual_seed(0)
    net, obs = transformer(3), torch.randn(1, 1, 3, 3)
    joint = torch.tensor(list(itertools.product(range(4), repeat=3)))[None]
    everyone = torch.ones(joint.shape, dtype=torch.bool)
    outputs = net.decode(net.encode(obs.expand(1, 64, 3, 3), everyone), joint, everyone)
    logp = outputs.detach().log_softmax(-1).gather(-1, joint[..., None]).sum((2, 3))
    assert float(logp.exp().sum()) == pytest.approx(1, abs=1e-5) and np.ptp(logp.numpy()) > 0.5


# ---- updates


def loss_by_hand(made: MATLearner, batch: Any) -> float:
    """The mean over seats and steps of clipped ratios times advantages, from joint log-probabilities one team at a
    time."""
    (stack,) = made.stacks
    net, old = stack.net, torch.from_numpy(batch.logp)
    assert isinstance(net, MultiAgentTransformer)
    advantages, _, known = made._credit(RolloutTensors.of(batch), old, 0.0)
    advantages = (advantages - advantages[known].mean()) / (advantages[known].std(correction=0) + 1e-8)
    losses = []
    for t, b in np.ndindex(*batch.rewards.shape[:2]):
        acts = torch.from_numpy(batch.agent_mask[t, b])[None, None]
        encoded = net.encode(torch.from_numpy(batch.obs[t, b])[None, None], acts)
        outputs = net.decode(encoded, torch.from_numpy(batch.actions[t, b]).long()[None, None], acts)[0, 0]
        legal = torch.from_numpy(batch.action_mask[t, b])
        logp = outputs.masked_fill(~legal, -torch.inf).log_softmax(-1)
        for seat in range(batch.rewards.shape[2]):
            if known[t, b, seat]:
                ratio = (logp[seat, int(batch.actions[t, b, seat])] - old[t, b, seat]).exp()
                advantage = advantages[t, b, seat]
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage).item())
    return float(np.mean(losses))


@pytest.mark.parametrize("turns", [False, True])
def test_policy_loss_equals_a_reference_implementation(turns: bool) -> None:
    env = Countdown(5, seats=3, turns=turns)
    made = learner(env, {"team": [0, 1, 2]}, clip=0.05, epochs=1, minibatches=1, entropy_coef=0.0)
    sweeper = VectorRollout(env, np.arange(5))
    batch = sweeper.collect(made.rollout_policies(0), 12, 0)
    with torch.no_grad():  # other values than at initialisation
        for parameter in made.stacks[0].net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    expected = loss_by_hand(made, batch)
    figures = made.update(batch, 0.0)["team"]
    assert figures["policy_loss"] == pytest.approx(expected, abs=1e-5)
    assert figures["clip_fraction"] > 0.2 and figures["value_loss"] > 0


@pytest.mark.parametrize(("normed", "decay"), [(False, 0.0), ("popart", 0.0), ("popart", 0.8)])
@pytest.mark.few(1)
def test_resume_from_state_arrays_is_bit_identical(normed: Any, decay: float) -> None:
    env = Countdown(4, seats=4, turns=True)
    attention: Any = "retention" if decay else "softmax"
    policy = NetPolicyConfig(hidden=[6], normalize_observations=True, attention_type=attention, retention_decay=decay)
    seats = {"a": [0, 1], "b": [2, 3]}
    made, again = (learner(env, seats, policy, rollout_length=9, value_norm=normed) for _ in range(2))
    assert_resume_is_exact(made, again, env, 9)
    assert not any("critic" in key for key in made.state_arrays())  # the encoder is saved once


def test_saved_policies_play_as_a_team(tmp_path: Any) -> None:
    """Loaded from files, at all seats and at fewer."""
    env = Countdown(4, seats=4)
    made = learner(env, {"team": [0, 1, 2, 3]})
    made.member_writers()["team"](tmp_path)
    step = env.reset(np.arange(4))
    (own,) = made.greedy_policies()
    again = read_policy(tmp_path, env, [0, 1, 2, 3], best=True)
    np.testing.assert_array_equal(own.act(step, None, np.ones(4, bool))[0], again.act(step, None, np.ones(4, bool))[0])
    two = read_policy(tmp_path, env, [1, 3], best=True)
    assert two.act(step, None, np.ones(4, bool))[0].shape == (4, 2)


def test_incompatible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="the critic of mat is its own encoder"):
        MAT(critic="central")
    with pytest.raises(ValueError, match="gru_units, communication_rounds: the transformer"):
        learner(Countdown(2), {"a": [0, 1]}, NetPolicyConfig(gru_units=4))
    with pytest.raises(ValueError, match="attention_heads: 3 heads do not divide 8 units"):
        learner(Countdown(2), {"a": [0, 1]}, NetPolicyConfig(hidden=[8], attention_heads=3))
    with pytest.raises(ValueError, match="8 heads have one unit each"):
        learner(Countdown(2), {"a": [0, 1]}, NetPolicyConfig(hidden=[8], attention_heads=8, attention_type="retention"))
    with pytest.raises(ValueError, match="attention_type applies only to the transformer of algorithm mat"):
        PPO().build_learner(Countdown(2), {"a": [0, 1]}, {"a": small("retention")}, {"a": 0})


# ---- learning


@BOTH
@pytest.mark.few(1)
def test_team_finds_different_actions(attention: Any, check_score: Any) -> None:
    """Both seats are paid if their actions differ, and observe nothing. Seats that share a network and act
    independently earn 0.5 at most; if the second seat knows the first one's action, they always earn 1."""
    env = MatrixGame(64, payoff=[[0, 1], [1, 0]])
    policy = NetPolicyConfig(hidden=[16], lr=1e-2, lr_schedule="linear", attention_type=attention)
    made = learner(env, {"team": [0, 1]}, policy, 1, **DIFFERENT)
    train(made, VectorRollout(env, np.arange(64)), 8, 16)
    check_score(mean_return(env, made.sampling_policies(), 8).min())
    batch = VectorRollout(env, np.arange(64)).collect(made.sampling_policies(), 8, 3)
    lean = abs(batch.actions[..., 0].mean() - 0.5)
    check_score(lean, "first seat's lean")  # the entropy bonus keeps the first seat undecided


def test_independent_seats_do_not_find_different_actions(check_score: Any) -> None:
    env = MatrixGame(64, payoff=[[0, 1], [1, 0]])
    policy = NetPolicyConfig(hidden=[16], lr=1e-2)
    made = ppo(**DIFFERENT).build_learner(env, {"team": [0, 1]}, {"team": policy}, {"team": 7})
    train(made, VectorRollout(env, np.arange(64)), 8, 12)
    check_score(mean_return(env, made.sampling_policies(), 8).max())


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "updates"), [("softmax", 6), ("retention", 24)])
def test_transformer_learns_to_spread(attention: Any, updates: int) -> None:
    """The return rises from -27 (random play) to above -25; with retention, greedy play reaches it after 16 updates."""
    env = SimpleSpread(64)
    policy = NetPolicyConfig(hidden=[32], activation="relu", lr=2e-3, attention_type=attention)
    made = learner(env, {"team": [0, 1, 2]}, policy, 1, rollout_length=25, value_norm=True)
    train(made, VectorRollout(env, np.arange(64)), 25, updates)
    assert mean_return(env, made.greedy_policies(), 25).mean() > -25
