"""MAVEN: latents of games, the update computed row by row, saved state, and committed exploration."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import POLICY, Countdown, Cues, learner, mean_return, snapshot, train, train_on_play

from palestra.core.seeding import derive_seed
from palestra.envs.vector.matrix import MStepGame
from palestra.envs.vector_base import Discrete
from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.vector.algorithms.experimental.latents import LatentPolicy
from palestra.vector.algorithms.experimental.maven import MAVEN, LatentHead, MAVENLearner
from palestra.vector.algorithms.q_learning import as_sequences
from palestra.vector.algorithms.qmix import MixingConfig, QMIXLearner
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.mixers import SeatValues
from palestra.vector.nets.replay import ReplayBuffer
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

QUICK: dict[str, Any] = {"rollout_length": 4, "gradient_steps": 2, "batch_size": 16, "learning_starts": 0}
TWO = {"one": [0], "two": [1]}


class Stateless(Countdown):
    """A countdown that shows no state."""

    def __init__(self) -> None:
        super().__init__(games=4)
        self.state_size, self.vector_step.state, self.vector_step.final_state = 0, None, None

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        super().show(obs, np.zeros((4, 2)))


class Unpaid(Cues):
    """Cues that pay nothing."""

    def _advance(self, actions: np.ndarray) -> None:
        super()._advance(actions)
        self.vector_step.rewards[:] = 0


# ---- latents


def test_head_selects_the_block_of_a_latent() -> None:
    head = LatentHead(Discrete(2), duelling=False, latents=3)
    out = torch.tensor([[1.0, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]])
    assert head.outputs == 6 and head.num_actions == 2
    assert head.select(out, torch.tensor([2, 0])).tolist() == [[5, 6], [10, 20]]
    assert head.values(out).tolist() == out.tolist()
    duelling = LatentHead(Discrete(2), duelling=True, latents=2)
    # a value and two advantages for each latent: 1 + (2, 4) - 3, and 5 + (0, 2) - 1
    assert duelling.values(torch.tensor([1.0, 2, 4, 5, 0, 2])).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("memory", [0, 6])
def test_seats_share_the_latent_of_a_game_until_it_ends(memory: int) -> None:
    """Two stacks, one of them of two policies: every action is the greedy one in the block of the game's latent."""
    env = Countdown(games=6, seats=3)
    policy = NetPolicyConfig(hidden=[16], gru_units=memory)
    policies = {"one": policy, "two": policy.model_copy(update={"lr": 1e-2}), "three": policy}
    config = MAVEN(**QUICK, latents=3, epsilon=0, epsilon_end=0)
    made = learner(config, env, {"one": [0], "two": [1], "three": [2]}, policies)
    assert len(made.stacks) == 2
    with torch.no_grad():
        for stack in made.stacks:
            stack.optimizer.flat.normal_(generator=torch.Generator().manual_seed(1))
    sweeper = VectorRollout(env, np.arange(6))
    batch = sweeper.collect(made.rollout_policies(0.0), 20, 3)
    latent = made.latent_policy.latents_of(batch)
    goes_on = ~batch.is_first[1:]
    assert (latent[1:][goes_on] == latent[:-1][goes_on]).all()
    begun = latent[:-1][batch.is_first[:-1]]
    assert len(begun) > 20 and set(begun) == {0, 1, 2}
    for stack in made.stacks:
        with torch.no_grad():
            first = torch.from_numpy(batch.is_first).expand(len(stack.seat_mapping.names), 21, 6)
            out = stack.net.unroll(stack.observations(batch.obs), None, first)[0][:, :-1]
        mask = stack.rows(batch.action_mask)[:, :-1]
        blocks = out.unflatten(-1, (3, 3))
        for p, (seat,) in enumerate(stack.seat_mapping.seats):
            for t in range(20):
                for b in range(6):
                    own = blocks[p, t, b, latent[t, b]].masked_fill(~mask[p, t, b], -math.inf)
                    assert batch.actions[t, b, seat] == own.argmax()


def test_replay_has_the_latents_beside_the_state() -> None:
    env = Countdown(games=4)
    made = learner(MAVEN(**QUICK, latents=3), env, TWO)
    batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0.0), 12, 1)
    latent = made.latent_policy.latents_of(batch)
    made.remember(batch)
    rows = made.replay.ring.columns
    assert rows["state"][:48, :2].tolist() == batch.state[:-1].reshape(48, 2).tolist()  # type: ignore[index]
    assert rows["state"][:48, 2:].argmax(1).tolist() == latent[:-1].flatten().tolist()
    known = rows["known"][:48].all(1) & (rows["discounts"][:48, 0] > 0)
    assert known.sum() > 10
    assert (rows["next_state"][:48, 2:] == rows["state"][:48, 2:])[known].all()


def test_returns_and_initial_states_of_ended_games() -> None:
    """Over two rollouts, compared with games that the test puts together; seat 1 is not part of the team."""
    env = Countdown(games=4, seats=2)
    made = learner(MAVEN(**QUICK, latents=3), env, {"one": [0]})
    sweeper, others = VectorRollout(env, np.arange(4)), [UniformVectorPolicy(env, [1])]
    open_games: dict[int, tuple[list[float], int, float]] = {}
    for number in range(2):
        batch = sweeper.collect([*made.rollout_policies(0.0), *others], 7, number)
        latent, expected = made.latent_policy.latents_of(batch), []
        for t in range(7):
            for b in range(4):
                if batch.is_first[t, b]:
                    open_games[b] = (batch.state[t, b].tolist(), int(latent[t, b]), 0.0)  # type: ignore[index]
                start, own, total = open_games[b]
                open_games[b] = (start, own, total + float(batch.rewards[t, b, 0]))
                if batch.done[t, b]:
                    expected.append(open_games[b])
        features = made.global_features(batch.obs, batch.state, 2)
        found = made.latent_policy.ended_games(batch, features, batch.rewards[..., 0])
        assert [tuple(x.tolist() for x in row) for row in zip(*found, strict=True)] == expected and len(expected) > 5


def test_rollouts_of_other_players_are_refused() -> None:
    env = Countdown(games=4)
    made = learner(MAVEN(**QUICK), env, TWO)
    batch = VectorRollout(env, np.arange(4)).collect([UniformVectorPolicy(env, [0, 1])], 4, 0)
    with pytest.raises(ValueError, match="latents were drawn for 0 steps, the rollout has 4"):
        made.update(batch, 0.0)


def test_loss_of_the_policy_of_latents_by_hand() -> None:
    """Returns 1 and 3 have mean 2 and deviation 1, so advantages of -1 and 1; uniform probabilities of 1/2."""
    policy = LatentPolicy(state=3, latents=2, units=4, seed=0)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.zero_()
    bias = policy.net.get_parameter("layers.1.bias")
    starts, returns = torch.zeros(2, 3), torch.tensor([1.0, 3.0])
    loss = policy.loss(starts, torch.tensor([0, 1]), returns, 0.5, lambda x: x)
    assert loss.item() == pytest.approx(-0.5 * math.log(2))  # the advantages cancel, the entropy stays
    (slope,) = torch.autograd.grad(loss, bias)
    # d log p(z) / d logit = 1[z] - 1/2; mean of -1 * (1/2, -1/2) and 1 * (-1/2, 1/2), negated
    assert slope.flatten().tolist() == pytest.approx([0.5, -0.5])
    assert policy.loss(starts[:0], torch.zeros(0, dtype=torch.int64), returns[:0], 0.5, lambda x: x) == 0


def test_policy_of_latents_learns_which_suits_a_state(check_score: Any) -> None:
    """Latent 0 pays in one state, latent 2 in the other."""
    policy, generator = LatentPolicy(state=2, latents=3, units=16, seed=0), torch.Generator().manual_seed(0)
    adam = StackedOptimizer(policy.net, ["z"], NetPolicyConfig(lr=2e-2), SINGLE_PROCESS)
    features, first = torch.eye(2).repeat(16, 1), np.ones(32, bool)
    for _ in range(60):
        policy.draw(features, first, generator)
        latent = torch.from_numpy(policy.current)
        pays = (latent == torch.where(features[:, 0] == 1, 0, 2)).float()
        adam.step(policy.loss(features, latent, pays, 0.02, lambda x: x), 0.0)
    chances = policy.net(torch.eye(2)[None])[0].softmax(-1)
    check_score(min(chances[0, 0].item(), chances[1, 2].item()))
    policy.starts = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert policy.preferred_latent() == 0


# ---- one update, computed row by row


def block(made: MAVENLearner, nets: Any, seat: int, view: torch.Tensor, latent: int) -> torch.Tensor:
    """The values of a seat's actions in the block of a latent."""
    for stack, net in zip(made.stacks, nets, strict=True):
        for p, own in enumerate(stack.seat_mapping.seats):
            if seat in own:
                out = net(view.expand(len(stack.seat_mapping.names), 1, *view.shape))[p, 0]
                found: torch.Tensor = out.view(made.config.latents, -1)[latent]
                return found
    raise AssertionError(seat)


@pytest.mark.parametrize("turns", [True, False])
def test_update_equals_a_reference_implementation(turns: bool) -> None:
    """Seats 0, 1 and 3 learn, in two stacks; seat 2 plays at random and is not part of the team."""
    env = Countdown(games=5, turns=turns, seats=4)
    config = MAVEN(**QUICK | {"gradient_steps": 1}, mixer_units=3, n_step=2, gamma=0.9, latents=3, mi_coef=0.7)
    policies = {"one": POLICY, "two": NetPolicyConfig(hidden=[8], lr=1e-2), "three": POLICY}
    made = learner(config, env, {"one": [0], "two": [1], "three": [3]}, policies)
    assert [stack.seat_mapping.names for stack in made.stacks] == [("one", "three"), ("two",)]
    train_on_play(made, env, 4, [UniformVectorPolicy(env, [2])])
    assert isinstance(made.replay, ReplayBuffer)
    drawn = made.replay.sample(16, np.random.default_rng(derive_seed(5, "moments", made.steps)))
    assert drawn.action_mask is not None and drawn.next_action_mask is not None
    assert drawn.state is not None and drawn.next_state is not None

    online, slow = [stack.net for stack in made.stacks], made.target_nets
    losses, entropies, known = [], [], 0
    for m in range(16):
        if not drawn.weight[m, 0]:
            continue
        known += 1
        latent, one_hot = int(drawn.state[m, 2:].argmax()), drawn.state[m, 2:]
        now, then, chances = [], [], []
        for s in (0, 3, 1):  # in the order of the stacks
            q, acts = block(made, online, s, drawn.obs[m, s], latent), drawn.agent_mask[m, s]
            now.append(q[drawn.actions[m, s]] * acts)
            chances.append(q.masked_fill(~drawn.action_mask[m, s], -torch.inf).softmax(0) * acts)
            chooser = block(made, online, s, drawn.next_obs[m, s], latent).detach()
            choice = chooser.masked_fill(~drawn.next_action_mask[m, s], -torch.inf).argmax()
            then.append(block(made, slow, s, drawn.next_obs[m, s], latent)[choice] * drawn.next_agent_mask[m, s])
        total = made.mixer(SeatValues(torch.stack(now)[None]), drawn.state[m : m + 1])[0]
        following = torch.cat([drawn.next_state[m, :2], one_hot])[None]
        after = made.target_mixer(SeatValues(torch.stack(then)[None]), following)[0].detach()
        reward = (drawn.rewards[m, 0] + drawn.rewards[m, 1] + drawn.rewards[m, 3]) / 3
        losses.append(0.5 * (reward + drawn.discounts[m, 0] * after - total) ** 2)
        seen = torch.cat([drawn.state[m, :2], *chances])
        entropies.append(-made.variational(seen[None, None])[0, 0].log_softmax(0)[latent])
    loss, entropy = sum(losses) / known, sum(entropies) / known
    nets = [list(net.parameters()) for net in online]
    slopes = torch.autograd.grad(loss + 0.7 * entropy, [*nets[0], *nets[1]], retain_graph=True)
    mine = torch.autograd.grad(entropy, list(made.variational.parameters()))

    average = made.variational_adam.rule.exp_avg.clone()
    lines, _, _ = made.train_step(as_sequences(drawn), 0.0)
    assert [line["q_loss"][0].item() for line in lines] == pytest.approx([loss.item()] * 2, rel=1e-4)
    assert [line["mi_loss"][0].item() for line in lines] == pytest.approx([entropy.item()] * 2, rel=1e-4)
    for p, own in [(0, 0), (0, 1), (1, 0)]:
        parts = slopes[: len(nets[0])] if p == 0 else slopes[len(nets[0]) :]
        norm = torch.cat([g[own].flatten() for g in parts]).norm().item()
        assert lines[p]["grad_norm"][own].item() == pytest.approx(norm, rel=1e-3)
    ours = (made.variational_adam.rule.exp_avg - 0.9 * average).flatten()  # a tenth of the gradient, clipped in norm
    given = torch.cat([g.flatten() for g in mine])
    assert torch.allclose(ours / ours.norm(), given / given.norm(), atol=1e-5)


@pytest.mark.slow
def test_mutual_information_makes_latents_differ(check_score: Any) -> None:
    """Without rewards only the mutual-information bound changes behaviour: with it the cross-entropy falls towards 0,
    without it stays at log 3 nats, that of a guess."""
    for coef in (1.0, 0.0):
        env = Unpaid(games=8)
        config = MAVEN(**QUICK | {"gradient_steps": 4, "batch_size": 64}, latents=3, mi_coef=coef, epsilon_end=1)
        made = learner(config, env, TWO, NetPolicyConfig(hidden=[16], lr=1e-2))
        check_score(train_on_play(made, env, 40)["one"]["mi_loss"], f"coefficient {coef}")


# ---- state


@pytest.mark.parametrize(
    ("mixer", "memory", "state"), [("qmix", 0, True), ("qmix", 6, True), ("qplex", 0, False), ("vdn", 6, False)]
)
@pytest.mark.few(2)
def test_resume_is_bit_identical(mixer: Any, memory: int, state: bool) -> None:
    def build() -> Any:
        env = Countdown(games=4) if state else Stateless()
        config = MAVEN(**QUICK | {"buffer_size": 60}, mixer=mixer, priority_exponent=0.6, n_step=2, duelling=True)
        policy = NetPolicyConfig(hidden=[8], gru_units=memory, normalize_observations=True)
        return learner(config, env, TWO, policy), VectorRollout(env, np.arange(4))

    def continue_training(made: Any, sweeper: VectorRollout, seeds: range) -> None:
        for k in seeds:
            made.update(sweeper.collect(made.rollout_policies(0.1), 5, k), 0.1)

    (made, sweeper), (other, later) = build(), build()
    continue_training(made, sweeper, range(5))
    games = sweeper.save()
    assert games is not None and made.latent_policy.returns.any()  # in the middle of games
    other.load_arrays(snapshot(made))
    later.load(games, other.rollout_policies(0.1))
    for each, played_by in ((made, sweeper), (other, later)):
        continue_training(each, played_by, range(5, 9))
    for name, array in made.state_arrays().items():
        assert np.array_equal(array, other.state_arrays()[name]), name
    assert {"games/current", "latent_adam/0.exp_avg", "variational_adam/0.exp_avg"} <= set(made.state_arrays())


@pytest.mark.parametrize(("memory", "duelling"), [(0, False), (0, True), (6, True)])
def test_saved_policies_play_the_preferred_latent(tmp_path: Path, memory: int, duelling: bool) -> None:
    env = Countdown(games=4)
    config = MAVEN(**QUICK, latents=3, duelling=duelling)
    made = learner(config, env, TWO, NetPolicyConfig(hidden=[8], gru_units=memory, normalize_observations=True))
    train_on_play(made, env, 6)
    actions = []
    for preferred in range(3):
        with torch.no_grad():
            made.latent_policy.net.layers[-1].bias.copy_(9 * torch.eye(3)[preferred])
        assert made.latent_policy.preferred_latent() == preferred
        for name, write in made.member_writers().items():
            (tmp_path / str(preferred) / name).mkdir(parents=True)
            write(tmp_path / str(preferred) / name)
        loaded = [read_policy(tmp_path / str(preferred) / name, env, own, best=True) for name, own in TWO.items()]
        both = []
        for players in (made.greedy_policies(), loaded):
            both.append(VectorRollout(Countdown(games=4), np.arange(4)).collect(players, 20, 1).actions.copy())
        assert np.array_equal(both[0], both[1])
        actions.append(both[0])
    assert not np.array_equal(actions[0], actions[1]) or not np.array_equal(actions[1], actions[2])


def test_evaluations_leave_the_games_of_training_alone() -> None:
    env = Countdown(games=4)
    made = learner(MAVEN(**QUICK), env, TWO)
    sweeper = VectorRollout(env, np.arange(4))
    batch = sweeper.collect(made.rollout_policies(0.0), 4, 0)
    latent = made.latent_policy.latents_of(batch)
    for players in (made.greedy_policies(), made.sampling_policies()):
        mean_return(Countdown(games=7), players, 10)
    assert np.array_equal(made.latent_policy.latents_of(batch), latent)


def test_pixels_without_a_state_are_refused() -> None:
    env = Countdown()
    env.observation_shapes, env.state_size = ((40, 40, 3),) * 2, 0
    for mixer in ("vdn", "qmix"):
        with pytest.raises(ValueError, match="maven draws latents from a global state"):
            learner(MAVEN(mixer=mixer), env, TWO)


# ---- learning


def m_step_return(config: MixingConfig, seed: int, updates: int) -> float:
    """The greedy return in the game of ten steps: 13 at best, 10 in the branch that is easier to find."""
    env = MStepGame(16, steps=10)
    policy = NetPolicyConfig(hidden=[32], activation="relu", lr=5e-3, max_grad_norm=10)
    made = config.build_learner(env, TWO, dict.fromkeys(TWO, policy), {"one": 2 * seed + 1, "two": 2 * seed + 2})
    assert isinstance(made, QMIXLearner)
    sweeper = VectorRollout(env, np.arange(16))
    train(made, sweeper, config.rollout_length, updates)
    return float(mean_return(env, made.greedy_policies(), 20)[0])


COMMITTED: dict[str, Any] = {
    "rollout_length": 8,
    "gradient_steps": 2,
    "batch_size": 128,
    "learning_starts": 256,
    "tau": 1,
    "target_interval": 50,
    "epsilon_share": 0.3,
    "buffer_size": 20_000,
}


@pytest.mark.slow
def test_maven_finds_the_better_branch_of_the_m_step_game() -> None:
    """With this seed, not with every seed (docs/games.md)."""
    assert m_step_return(MAVEN(**COMMITTED), 4, 120) == 13
