"""Offline learning: updates computed row by row, known answers, state, and policies better than those of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, Track, assert_same_state, mean_return, snapshot, train
from torch import Tensor, nn

from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS, random_below
from palestra.envs.vector_base import Arrays, Discrete, VectorEnv, empty_step
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.cql import CQL
from palestra.vector.algorithms.experimental.imitation import BC
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.replay import TransitionBatch
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2, max_grad_norm=10)
SEATS = {"one": [0, 2], "two": [1, 3]}


def learner(config: Any, env: VectorEnv, seats: dict[str, list[int]], policy: NetPolicyConfig = POLICY) -> Any:
    return config.build_learner(env, seats, dict.fromkeys(seats, policy), {name: i + 5 for i, name in enumerate(seats)})


def record_uniform_play(env: VectorEnv, steps: int, path: Path, seed: int = 3) -> str:
    """Writes episodes of uniform play."""
    record_vector_episodes(env, [UniformVectorPolicy(env, range(len(env.seats)))], steps, path, seed=seed)
    return str(path)


# ---- updates, by an implementation of one network and one row at a time


class Naive:
    """A network of a stack, alone, with torch's own layers, Adam and clipping."""

    def __init__(self, net: Any, p: int) -> None:
        layers = [*net.body.layers, net.head]
        modules: list[nn.Module] = []
        for layer in layers:
            plain = nn.Linear(*layer.weight.shape[1:])
            plain.weight.data, plain.bias.data = layer.weight[p].detach().T.clone(), layer.bias[p, 0].detach().clone()
            modules += [plain, nn.Tanh()]
        self.net = nn.Sequential(*modules[:-1])
        self.adam = torch.optim.Adam(self.net.parameters(), POLICY.lr, eps=POLICY.optimizer.eps)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def step(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), POLICY.max_grad_norm)
        self.adam.step()

    def follow(self, fast: Naive, tau: float) -> None:
        for slow, quick in zip(self.net.parameters(), fast.net.parameters(), strict=True):
            slow.data = (1 - tau) * slow.data + tau * quick.data

    def assert_is(self, net: Any, p: int) -> None:
        same = Naive(net, p)
        for mine, theirs in zip(self.net.parameters(), same.net.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class NaiveIQL:
    """IQL of policy `p` of the first stack: row by row, as in the paper's equations."""

    def __init__(self, made: Any, p: int) -> None:
        self.p, self.config, stack, critic = p, made.config, made.stacks[0], made.critics[0]
        P = len(stack.seat_mapping.names)
        self.policy, self.value = Naive(stack.net, p), Naive(made.value_nets[0], p)
        self.critics, self.targets = ([Naive(net, k * P + p) for k in range(2)] for net in (critic.net, critic.target))
        self.seats, self.discrete = stack.seat_mapping.seats[p], critic.value_per_action

    def q(self, critics: list[Naive], obs: Tensor, action: Tensor) -> list[Tensor]:
        if self.discrete:
            return [critic(obs)[int(action)] for critic in critics]
        return [critic(torch.cat([obs, action.clamp(-1, 1)]))[0] for critic in critics]

    def logp(self, obs: Tensor, action: Tensor, legal: Tensor | None) -> Tensor:
        out = self.policy(obs)
        if self.discrete:
            masked = out if legal is None else torch.where(legal, out, -torch.inf)
            return torch.log_softmax(masked, -1)[int(action)]
        mean, log_std = out.chunk(2)
        return torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp()).log_prob(action).sum()

    def step(self, batch: TransitionBatch) -> None:
        config, rows = self.config, []
        for seat in self.seats:
            (own,) = batch.weight[:, seat].nonzero(as_tuple=True)
            rows += [(int(m), seat, 1 / len(own)) for m in own]
        seen = {(m, s): (batch.obs[m, s, :4], batch.actions[m, s]) for m, s, _ in rows}
        with torch.no_grad():
            q = {at: min(self.q(self.targets, *seen[at])) for at in seen}
        loss = torch.zeros(())
        for m, s, share in rows:
            short = q[m, s] - self.value(batch.obs[m, s, :4])[0]
            loss = loss + share * abs(config.expectile - (1 if short < 0 else 0)) * short**2
        self.value.step(loss)
        with torch.no_grad():
            advantage = {at: q[at] - self.value(seen[at][0])[0] for at in seen}
            goal = {
                (m, s): batch.rewards[m, s] + batch.discounts[m, s] * self.value(batch.next_obs[m, s])[0]
                for m, s, _ in rows
            }
        loss = torch.zeros(())
        for m, s, share in rows:
            legal = None if batch.action_mask is None else batch.action_mask[m, s]
            weight = min(torch.exp(config.beta * advantage[m, s]).item(), config.max_weight)
            loss = loss - share * weight * self.logp(*seen[m, s], legal)
        self.policy.step(loss)
        for k, critic in enumerate(self.critics):
            loss = torch.zeros(())
            for m, s, share in rows:
                loss = loss + share * 0.5 * (self.q(self.critics, *seen[m, s])[k] - goal[m, s]) ** 2
            critic.step(loss)
        for slow, quick in zip(self.targets, self.critics, strict=True):
            slow.follow(quick, config.tau)

    def assert_is(self, made: Any) -> None:
        P = len(made.stacks[0].seat_mapping.names)
        self.policy.assert_is(made.stacks[0].net, self.p)
        self.value.assert_is(made.value_nets[0], self.p)
        for k in range(2):
            self.critics[k].assert_is(made.critics[0].net, k * P + self.p)
            self.targets[k].assert_is(made.critics[0].target, k * P + self.p)


@pytest.mark.parametrize("kind", ["masks", "turns", "continuous"])
def test_iql_update_equals_a_reference_implementation(kind: str, tmp_path: Path) -> None:
    """Two policies at two seats each in one stack, with ends of games and illegal actions."""
    env: VectorEnv = Track(4, steps=3) if kind == "continuous" else Countdown(4, turns=kind == "turns", seats=4)
    seats = {"one": [0]} if kind == "continuous" else SEATS
    config = IQL(
        data=record_uniform_play(env, 12, tmp_path / "moves.parquet"), gamma=0.9, tau=0.3, batch_size=12, beta=0.5
    )
    made = learner(config, env, seats)
    assert len(made.stacks) == 1
    naive = [NaiveIQL(made, p) for p in range(len(seats))]
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = made.replay.sample(12, rng)
        made.train_step(batch, torch.Generator(), 0.0)
        for one in naive:
            one.step(batch)
    for one in naive:
        one.assert_is(made)


@pytest.mark.parametrize("turns", [False, True])
def test_cql_update_equals_a_reference_implementation(turns: bool, tmp_path: Path) -> None:
    env = Countdown(4, turns=turns, seats=4)
    data = record_uniform_play(env, 12, tmp_path / "moves.parquet")
    config = CQL(data=data, gamma=0.9, tau=0.3, batch_size=12, gradient_steps=1, n_step=2, conservative_coef=0.7)
    made = learner(config, env, SEATS)
    naive = [(Naive(made.stacks[0].net, p), Naive(made.target_nets[0], p)) for p in range(2)]
    for step in range(3):
        rng = np.random.default_rng(step)
        batch = made.replay.sample(12, np.random.default_rng(step))
        for p, (net, target) in enumerate(naive):
            rows = [(m, s) for s in made.stacks[0].seat_mapping.seats[p] for m in range(12) if batch.weight[m, s]]
            loss = torch.zeros(())
            for m, s in rows:
                q, action = net(batch.obs[m, s]), int(batch.actions[m, s])
                legal, after = batch.action_mask[m, s], batch.next_action_mask[m, s]
                with torch.no_grad():
                    choice = int(torch.where(after, net(batch.next_obs[m, s]), -torch.inf).argmax())
                    goal = batch.rewards[m, s] + batch.discounts[m, s] * target(batch.next_obs[m, s])[choice]
                likely = torch.log_softmax(torch.where(legal, q, -torch.inf), -1)[action]
                loss = loss + (0.5 * (q[action] - goal) ** 2 - 0.7 * likely) / len(rows)
            net.step(loss)
            target.follow(net, 0.3)
        made._step(rng, 0.0)
    for p, (net, target) in enumerate(naive):
        net.assert_is(made.stacks[0].net, p)
        target.assert_is(made.target_nets[0], p)


# ---- known answers


@pytest.mark.parametrize(("level", "critic"), [(0.5, "own"), (0.9, "central")])
@pytest.mark.few(1)
def test_iql_values_and_policy_of_a_bandit(level: float, critic: Any, tmp_path: Path, check_score: Any) -> None:
    """One of three actions, equally often in the data, is paid 1. The expectile is t / (t + 2 (1 - t)); the policy
    plays the right action with odds exp(beta) : 2. A seat's reward does not depend on the other's action."""
    env = Cues(64, seats=2)
    data = record_uniform_play(env, 40, tmp_path / "moves.parquet")
    config = IQL(data=data, expectile=level, beta=2.0, tau=0.05, batch_size=256, critic=critic)
    made = learner(
        config, env, {"a": [0, 1]}, POLICY.model_copy(update={"seat_one_hot": True, "lr_schedule": "linear"})
    )
    batch = VectorRollout(env, np.arange(64)).collect(made.rollout_policies(0.0), 1, 0)
    for i in range(6):
        figures = made.update(batch, i / 6)
    check_score(abs(figures["a"]["value"] - level / (level + 2 * (1 - level))), "error of the values")
    check_score(abs(figures["a"]["q"] - 1 / 3), "error of the action values")
    right = mean_return(env, made.rollout_policies(1.0), 40)
    check_score(np.abs(right - np.exp(2) / (np.exp(2) + 2)).max(), "error of the policy")
    check_score(mean_return(env, made.greedy_policies(), 20).min(), "greedy")


def test_cql_values_of_a_bandit(tmp_path: Path, check_score: Any) -> None:
    """At the minimum, with p the softmax of the values and f = 1/3 the frequency of each action in the data,
    f (Q(a) - r(a)) + alpha (p(a) - f) = 0."""
    env = Cues(64, seats=1)
    config = CQL(data=record_uniform_play(env, 40, tmp_path / "moves.parquet"), conservative_coef=0.5, batch_size=1024)
    made = learner(config, env, {"a": [0]}, POLICY.model_copy(update={"lr": 5e-3}))
    batch = VectorRollout(env, np.arange(64)).collect(made.rollout_policies(0.0), 1, 0)
    for _ in range(8):
        made.update(batch, 0.0)
    known, reward = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for _ in range(2000):
        known -= 0.1 * ((known - reward) / 3 + 0.5 * (known.softmax(0) - 1 / 3))
    assert known[0] < 0.8  # 1 without the conservative term
    errors = []
    for cue in range(3):
        view = torch.tensor([*np.eye(3)[cue], 1.0], dtype=torch.float32)
        values = made.stacks[0].net(view[None, None])[0, 0].detach().roll(-cue)
        errors.append((values - known).abs().max().item())
    check_score(max(errors))


def test_seat_that_terminated_does_not_bootstrap(tmp_path: Path, check_score: Any) -> None:
    """The seat is paid 1 and terminates, and the partner is truncated later: the value is 1, not 1 / (1 - gamma)."""
    env = PettingZooEnv(4, env="helpers.mortal_games:parting", options={"length": 6})
    data = record_uniform_play(env, 24, tmp_path / "moves.parquet")
    policy = POLICY.model_copy(update={"lr": 2e-2})
    common: dict[str, Any] = {"data": data, "gamma": 0.99, "tau": 0.2, "batch_size": 64}
    seats = {"early": [0], "late": [1]}
    batch = VectorRollout(env, np.arange(4)).collect([UniformVectorPolicy(env, [0, 1])], 1, 0)
    for config in (IQL(**common), CQL(**common, conservative_coef=0)):
        made = learner(config, env, seats, policy)
        for _ in range(4):
            figures = made.update(batch, 0.0)
        check_score(abs(figures["early"]["q"] - 1), config.type)


def test_cql_without_its_term_is_deep_q_learning_on_the_data(tmp_path: Path) -> None:
    env = Countdown(4, seats=2)
    data = record_uniform_play(env, 12, tmp_path / "moves.parquet")
    seats, same = {"a": [0], "b": [1]}, {"batch_size": 16, "gradient_steps": 4}
    offline = learner(CQL(data=data, conservative_coef=0, **same), env, seats)
    online = learner(DQN(duelling=False, n_step=1, **same), env, seats)
    online.replay = offline.replay
    for step in range(8):
        for made in (offline, online):
            made._step(np.random.default_rng(step), 0.0)
    for key in ("net.0/head.weight", "target.0/head.weight"):
        np.testing.assert_array_equal(offline.state_arrays()[key], online.state_arrays()[key])


# ---- state


@pytest.mark.parametrize("kind", ["iql", "central", "cql"])
def test_resume_from_state_arrays_is_bit_identical(kind: str, tmp_path: Path) -> None:
    env = Countdown(4, seats=3)
    data = [record_uniform_play(env, 12, tmp_path / f"{seed}.parquet", seed) for seed in range(2)]
    common: dict[str, Any] = {"data": data, "batch_size": 32, "gradient_steps": 4}
    config = CQL(**common) if kind == "cql" else IQL(**common, critic="central" if kind == "central" else "own")
    policy = NetPolicyConfig(hidden=[6], normalize_observations=True, lr_schedule="linear")
    made, again = (learner(config, env, {"a": [0], "b": [1, 2]}, policy) for _ in range(2))
    batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0.0), 4, 0)
    made.update(batch, 0.0)
    again.load_arrays(snapshot(made))
    assert sum(array.nbytes for key, array in made.state_arrays().items() if key.startswith("replay/")) == 32
    for one in (made, again):
        one.update(batch, 0.5)
    assert_same_state(made, again)
    record_uniform_play(env, 12, tmp_path / "1.parquet", seed=9)
    with pytest.raises(ValueError, match=r"1\.parquet are not those that the checkpoint was trained on"):
        learner(config, env, {"a": [0], "b": [1, 2]}, policy).load_arrays(snapshot(made))


@pytest.mark.parametrize("config", [IQL, CQL])
def test_rollouts_are_not_trained_on(config: Any, tmp_path: Path) -> None:
    env = Countdown(4)
    data = record_uniform_play(env, 12, tmp_path / "moves.parquet")
    made, other = (learner(config(data=data, batch_size=16, gradient_steps=4), env, {"a": [0, 1]}) for _ in range(2))
    for one, seed in ((made, 1), (other, 2)):
        one.update(VectorRollout(env, np.arange(4)).collect(one.rollout_policies(0.0), 4, seed), 0.0)
    assert_same_state(made, other)


# ---- refused settings


def test_unsupported_offline_settings_are_refused(tmp_path: Path) -> None:
    env = Cues(2, turns=True)
    data = record_uniform_play(env, 1, tmp_path / "moves.parquet")
    for config, name in ((IQL(data=data), "iql"), (CQL(data=data), "cql")):
        with pytest.raises(ValueError, match="no step has an action of policy a and what followed: record more steps"):
            learner(config, env, {"a": [0], "b": [1]})
        with pytest.raises(ValueError, match=f"policy a is recurrent, but {name} learns from single transitions"):
            learner(config, env, {"a": [0], "b": [1]}, NetPolicyConfig(gru_units=4))
    with pytest.raises(ValueError, match=r"cql compares the values of single actions, .* for continuous actions"):
        learner(CQL(data=record_uniform_play(Track(2), 4, tmp_path / "track.parquet")), Track(2), {"a": [0]})
    with pytest.raises(ValueError, match=r"none\.parquet does not hold episodes"):
        learner(IQL(data=str(tmp_path / "none.parquet")), env, {"a": [0, 1]})
    with pytest.raises(ValueError, match="at least 1 item"):
        IQL(data=[])


# ---- learning


class Corridors(NativeEnv):
    """Every seat walks along its own nine places, starting in one of the first eight: left, stay or right. It observes
    its place, one-hot, and is paid 1 for each of 16 steps that ends at the last place; then the game is truncated."""

    name, PLACES, LENGTH = "corridors", 9, 16

    def __init__(self, games: int = 32) -> None:
        self.num_envs, self.seats = games, ("first", "second")
        self.observation_shapes, self.action_spaces = ((self.PLACES,),) * 2, (Discrete(3),) * 2
        self.vector_step = empty_step(games, 2, (self.PLACES,))
        self.internal_state: Arrays = {
            "rng": np.zeros((games, RNG_WORDS), np.uint64),
            "place": np.zeros((games, 2), np.int64),
            "time": np.zeros(games, np.int64),
        }

    def _begin(self) -> None:
        self.internal_state["time"][:] = 0
        self.start(np.arange(self.num_envs))
        self.vector_step.obs[:] = np.eye(self.PLACES)[self.internal_state["place"]]

    def start(self, games: np.ndarray) -> None:
        for b in games:
            for seat in range(2):
                self.internal_state["place"][b, seat] = random_below(self.internal_state["rng"][b], 8)

    def _advance(self, actions: np.ndarray) -> None:
        frame, place, time = self.vector_step, self.internal_state["place"], self.internal_state["time"]
        place[:] = np.clip(place + actions - 1, 0, self.PLACES - 1)
        frame.rewards[:] = place == self.PLACES - 1
        time += 1
        frame.truncated[:] = time == self.LENGTH
        frame.final_obs[:] = np.eye(self.PLACES)[place]
        time[frame.truncated] = 0
        self.start(np.flatnonzero(frame.truncated))
        frame.obs[:] = np.eye(self.PLACES)[place]


@pytest.mark.parametrize("config", [IQL, CQL])
def test_time_limit_of_recorded_games_counts_as_the_algorithm_says(config: Any, tmp_path: Path) -> None:
    """Games end by their limit only: each seat has one last step in 16, whose value is bootstrapped or 0."""
    env = Corridors(8)
    path = record_uniform_play(env, 64, tmp_path / "moves.parquet")

    def ended(**options: Any) -> float:
        made = learner(config(data=path, **options), env, {"a": [0], "b": [1]})
        sampled = made.replay.sample(4000, np.random.default_rng(0))
        return float((sampled.discounts[sampled.weight > 0] == 0).float().mean())

    assert ended() == 0
    assert ended(time_limit="ends") == pytest.approx(1 / 16, abs=0.015)


def test_behaviour_cloning_refuses_a_time_limit_that_ends() -> None:
    with pytest.raises(ValueError, match="time_limit: ends is about the values of states, and bc learns none"):
        BC(demonstrations="unread", time_limit="ends")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], float]:
    """Files of two players, and the return of the better one. Two thirds are of a player that walks to the middle and
    turns back, one third of one that walks on only from the middle. Both sometimes act at random."""
    rng, paths, best = np.random.default_rng(0), [], 0.0
    env = Corridors(32)

    def record_player(first: bool) -> Any:
        def script(env: VectorEnv, seat: int) -> np.ndarray:
            place = env.internal_state["place"][:, seat]  # type: ignore[attr-defined]
            action = np.where((place < 4) == first, 2, 0)
            return np.where(rng.random(env.num_envs) < 0.3, rng.integers(0, 3, env.num_envs), action).astype(np.int32)

        return script

    for first, steps in ((True, 128), (False, 64)):
        player = ScriptedVectorPolicy(env, [0, 1], record_player(first))
        paths.append(str(tmp_path_factory.mktemp("mixed") / "moves.parquet"))
        record_vector_episodes(env, [player], steps, paths[-1])
        best = max(best, float(mean_return(env, [player], 64).mean()))
    return paths, best


def greedy_return(config: Any, env: VectorEnv, updates: int) -> float:
    """Mean return of the greedy policies, one for each seat, in games of other seeds."""
    made = learner(config, env, {"a": [0], "b": [1]}, NetPolicyConfig(hidden=[32], lr=1e-2))
    train(made, VectorRollout(env, np.arange(env.num_envs)), config.rollout_length, updates)
    return float(mean_return(env, made.greedy_policies(), 64).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iql", "cql"])
def test_offline_learning_combines_parts_of_both_players(kind: str, mixed: tuple[list[str], float]) -> None:
    """A player that walks straight from place s is paid for 9 + s steps, 12.5 on average; a clone turns back like most
    of the data."""
    paths, best = mixed
    env = Corridors(32)
    common: dict[str, Any] = {"data": paths, "gamma": 0.9, "tau": 0.1, "rollout_length": 2, "batch_size": 128}
    config = IQL(**common, expectile=0.9, beta=5) if kind == "iql" else CQL(**common, conservative_coef=0.2)
    score = greedy_return(config, env, 8)
    cloned = greedy_return(BC(demonstrations=paths, rollout_length=2, gradient_steps=64), env, 4)
    assert score > 11 and score > best + 4 and score > cloned + 4, (score, best, cloned)


@pytest.mark.slow
def test_iql_of_continuous_actions_beats_the_data(tmp_path: Path) -> None:
    """The data have uniform actions, whose mean leaves the cart where it starts."""
    env = Track(32)
    data = record_uniform_play(env, 60, tmp_path / "moves.parquet")
    chance = mean_return(env, [UniformVectorPolicy(env, [0])], 40).item()
    scores = []
    iql = IQL(data=data, gamma=0.7, tau=0.1, beta=10, batch_size=128)
    for config in (iql, BC(demonstrations=data, gradient_steps=32)):
        made = learner(config, env, {"a": [0]}, NetPolicyConfig(hidden=[32], lr=1e-2))
        train(made, VectorRollout(env, np.arange(32)), 2, 8)
        scores.append(mean_return(env, made.greedy_policies(), 40).item())
    assert scores[0] > 0.4 * max(scores[1], chance), (scores, chance)
