"""Attention over entities: layouts by hand, invariance to order and number, and learners that use it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, mean_return, ppo, train
from torch import Tensor

from palestra.environments.combat.env import Combat
from palestra.environments.foraging.env import Foraging
from palestra.envs.vector.mpe import SimpleSpread, SimpleTag
from palestra.envs.vector_base import Discrete, Entities, VectorEnv, VectorStep, empty_step
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.entities import EntityEncoder, EntityLayout, entity_layout, nearest
from palestra.vector.nets.layers import make_generators
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[8], encoder="attention", attention_heads=2, lr=1e-2)
ENVS: dict[str, Any] = {
    "spread": lambda: SimpleSpread(4, agents=4),
    "tag": lambda: SimpleTag(4, num_good=2, num_adversaries=3),
    "foraging": lambda: Foraging(4, agents=3, food=2),
    "combat": lambda: Combat(4, map="3m"),
}


def random_observations(env: VectorEnv, steps: int = 6) -> np.ndarray:
    """Observations of random play [T, B, N, D]."""
    policy = UniformVectorPolicy(env, range(len(env.seats)))
    return VectorRollout(env, np.arange(env.num_envs)).collect([policy], steps, 0).obs


# ---- layouts of entities


def test_layout_by_hand() -> None:
    """Two seats with one and two entities of width 2, at columns in any order; the seat's own numbers come first."""
    layout = EntityLayout(1, (2,), (2,), ((4, 0, 2, 3, 1), (2, 1, 0, -1, -1), None))
    obs = torch.tensor([[10.0, 11, 12, 13, 14], [20, 21, 22, 0, 0]])
    assert layout.arrange(obs, torch.tensor([0, 1])).tolist() == [[14, 10, 12, 13, 11], [22, 21, 20, 0, 0]]
    assert layout.arrange(obs[1], torch.tensor(1)).tolist() == [22, 21, 20, 0, 0]


def test_entities_of_spread_and_tag_have_relative_positions() -> None:
    """Positions relative to the agent, compared with the env's state."""
    env = SimpleSpread(4, agents=3)
    obs = random_observations(env)[-1]
    landmarks, others = env.observation_entities[0]
    assert landmarks.position == others.position == (0, 1)
    pos = env.internal_state["pos"]
    for i, columns in enumerate(landmarks.columns):
        np.testing.assert_allclose(obs[:, 0][:, columns], pos[:, 3 + i] - pos[:, 0], atol=1e-6)
    for i, columns in enumerate(others.columns):
        expected = np.concatenate([pos[:, 1 + i] - pos[:, 0], np.zeros((4, 2))], 1)
        np.testing.assert_allclose(obs[:, 0][:, columns], expected, atol=1e-6)
    tag = SimpleTag(4, num_good=2, num_adversaries=3)
    obs, pos, vel = random_observations(tag)[-1], tag.internal_state["pos"], tag.internal_state["vel"]
    for seat in (1, 4):
        obstacles, hunters, good = tag.observation_entities[seat]
        for kind, first, members in ((obstacles, 5, range(2)), (hunters, 0, range(3)), (good, 3, range(2))):
            seen = [first + member for member in members if first + member != seat]
            assert len(kind.columns) == len(seen) and kind.position == (0, 1)
            for entity, columns in zip(seen, kind.columns, strict=True):
                there = [pos[:, entity] - pos[:, seat]] + ([vel[:, entity]] if kind is good else [])
                np.testing.assert_allclose(obs[:, seat][:, columns], np.concatenate(there, 1), atol=1e-6)


@pytest.mark.slow  # combat takes long to compile
def test_positions_of_allies_are_relative() -> None:
    """For units in sight their length equals the distance, which is observed too."""
    env = Combat(4, map="3m")
    (allies,) = env.observation_entities[0]
    each = random_observations(env)[:, :, 0][..., [list(columns) for columns in allies.columns]]
    x, y = allies.position
    np.testing.assert_allclose(np.hypot(each[..., x], each[..., y]), each[..., 1], atol=1e-6)
    assert each[..., 1].max() > 0.1


@pytest.mark.parametrize("name", ENVS)
def test_all_columns_are_used_once(name: str) -> None:
    env = ENVS[name]()
    for seat in range(len(env.seats)):
        columns = entity_layout(env, [seat]).columns[seat]
        assert columns is not None and sorted(columns) == list(range(env.observation_shapes[seat][0]))


# ---- the encoder


def outputs(env: VectorEnv, seats: dict[str, list[int]], obs: np.ndarray, policy: NetPolicyConfig = POLICY) -> Tensor:
    """Outputs of the first stack [P, T, B*S, O]."""
    made = PPO().build_learner(env, seats, dict.fromkeys(seats, policy), dict.fromkeys(seats, 3))
    made.stacks[0].net.head.weight.data.mul_(100)
    found: Tensor = made.stacks[0].net.unroll(made.stacks[0].observations(obs))[0].detach()
    return found


@pytest.mark.parametrize("name", [pytest.param(e, marks=[pytest.mark.slow] * (e == "combat")) for e in ENVS])
def test_outputs_do_not_depend_on_the_order_of_entities(name: str) -> None:
    """Those of a flat network depend on it."""
    env, rng = ENVS[name](), np.random.default_rng(0)
    obs = random_observations(env)
    shuffled = obs.copy()
    for kind in env.observation_entities[0]:
        order = rng.permutation(len(kind.columns))[::-1]
        order = np.roll(order, 1) if (order == np.arange(len(order))).all() else order
        for old, new in enumerate(order):
            shuffled[:, :, 0, list(kind.columns[old])] = obs[:, :, 0, list(kind.columns[new])]
    assert np.abs(shuffled - obs).max() > 0.1
    seats = {"a": [0]}
    before, after = outputs(env, seats, obs), outputs(env, seats, shuffled)
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    assert np.ptp(before.numpy(), axis=(1, 2)).max() > 0.1
    flat = NetPolicyConfig(hidden=[8])
    assert (outputs(env, seats, obs, flat) - outputs(env, seats, shuffled, flat)).abs().max() > 1e-2


def test_absent_entities_change_nothing() -> None:
    torch.manual_seed(0)
    few, many = (EntityLayout(2, (count, 1), (3, 2), ()) for count in (1, 4))
    net = EntityEncoder(many, many.size, 8, 2, 2, "tanh", make_generators([0]))
    obs = torch.randn(1, 5, many.size)
    obs[..., 5:14] = 0
    smaller = torch.cat([obs[..., :5], obs[..., 14:]], -1)
    before = net(obs)
    net.layout = few
    torch.testing.assert_close(net(smaller), before)


def test_one_policy_plays_seats_with_different_numbers_of_entities() -> None:
    """Adversaries and agents of simple_tag, whose observations differ in length; each seat's outputs equal those of a
    separate policy with the same weights."""
    env = SimpleTag(4, num_good=2, num_adversaries=3)
    assert len(set(env.observation_shapes)) == 2
    obs = random_observations(env)
    together = outputs(env, {"all": [0, 1, 2, 3, 4]}, obs).unflatten(2, (4, 5))
    for seat in range(5):
        torch.testing.assert_close(outputs(env, {"all": [seat]}, obs), together[:, :, :, seat])


def test_saved_policy_plays_with_more_agents(tmp_path: Path) -> None:
    env = SimpleSpread(4, agents=3)
    made = PPO().build_learner(env, {"a": [0, 1, 2]}, {"a": POLICY}, {"a": 3})
    made.member_writers()["a"](tmp_path)
    larger = SimpleSpread(4, agents=5)
    player = read_policy(tmp_path, larger, [0, 1, 2, 3, 4])
    player.reset_rng(0)
    actions = player.act(larger.reset(np.arange(4)), None, np.ones(4, bool))[0]
    assert actions.shape == (4, 5)


# ---- graphs


def observation_on_a_line(*places: float) -> Tensor:
    """An observation [1, 1, D] of a seat at 0 whose entities are at `places`, with random other features."""
    others = torch.randn(len(places), 2)
    entities = torch.cat([torch.tensor(places)[:, None], others], 1)
    return torch.cat([torch.tensor([0.5, -0.5]), entities.flatten()])[None, None]


def graph(entities: int, neighbours: int | None, blocks: int = 1) -> EntityEncoder:
    layout = EntityLayout(2, (entities,), (3,), (), ((0,),))
    return EntityEncoder(layout, layout.size, 8, blocks, 1, "tanh", make_generators([0]), neighbours)


def test_edges_by_hand() -> None:
    """The nearest neighbours of the seat at 0 and of entities at 1, 1.75 and -3, with one absent entity; and two
    entities at equal distance."""
    places = torch.tensor([0, 1, 1.75, -3, 0])[None, None, :, None]
    present = torch.tensor([True, True, True, True, False])[None, None]
    edges = [
        [[i for i in range(5) if row[i]] for row in nearest(places, present, k)[0, 0].tolist()] for k in (1, 2, 3, 9)
    ]
    assert edges[0] == [[0, 1], [1, 2], [1, 2], [0, 3], [0, 4]]
    assert edges[1] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert edges[2] == [[0, 1, 2, 3]] * 4 + [[0, 1, 2, 4]] and edges[3] == [[0, 1, 2, 3]] * 4 + [[0, 1, 2, 3, 4]]
    tied = nearest(torch.tensor([0, 2, -2.0, 5])[None, None, :, None], torch.ones(1, 1, 4, dtype=torch.bool), 1)
    assert tied[0, 0, 0].tolist() == [True, True, True, False]


def test_graph_of_three_nodes_by_hand() -> None:
    """The seat at 0, entities at 1 and 1.75, each with one neighbour, one head: the seat attends to itself and the
    first entity, whose neighbour is the second."""
    torch.manual_seed(0)
    net, obs = graph(2, 1, blocks=2), observation_on_a_line(1.0, 1.75)
    w = {name: parameter.detach()[0] for name, parameter in net.named_parameters()}

    def dense(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"][0]

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()

    def node(block: int, own: Tensor, *read: Tensor) -> Tensor:
        name = f"blocks.{block}"
        keys, values = zip(*[dense(f"{name}.attention.key_value", one).chunk(2) for one in read], strict=True)
        query = dense(f"{name}.attention.query", own)
        scores = torch.stack([query @ key / 8**0.5 for key in keys]).softmax(0)
        told = dense(f"{name}.attention.out", sum(s * v for s, v in zip(scores, values, strict=True)))
        x = norm(own + told)
        hidden = dense(f"{name}.feed_forward.inner", x).tanh()
        return norm(x + dense(f"{name}.feed_forward.outer", hidden))

    seat = dense("own", obs[0, 0, :2]).tanh()
    first, second = (dense("kinds.0", obs[0, 0, at : at + 3]).tanh() for at in (2, 5))
    seat_1, first_1 = node(0, seat, seat, first), node(0, first, first, second)
    torch.testing.assert_close(net(obs)[0, 0], node(1, seat_1, seat_1, first_1))


def test_messages_pass_one_edge_in_each_block() -> None:
    """The seat at 0 gets information of the entity at 1.75 after two blocks, of that at -3 never."""
    torch.manual_seed(0)
    for blocks, known in ((1, [True, False, False]), (2, [True, True, False]), (3, [True, True, False])):
        obs = observation_on_a_line(1.0, 1.75, -3.0).requires_grad_()
        (gradient,) = torch.autograd.grad(graph(3, 1, blocks)(obs).square()[..., 0].sum(), obs)
        assert (gradient[0, 0, 2:].view(3, 3).abs().amax(1) > 1e-6).tolist() == known


def test_order_of_nodes_does_not_matter() -> None:
    torch.manual_seed(0)
    net, obs = graph(4, 2, blocks=2), observation_on_a_line(1.0, 1.75, -3.0, 0.4)
    own, entities = obs[..., :2], obs[..., 2:].unflatten(-1, (4, 3))
    shuffled = torch.cat([own, entities[:, :, [2, 0, 3, 1]].flatten(2)], -1)
    torch.testing.assert_close(net(shuffled), net(obs))


def test_graph_of_all_edges_is_attention() -> None:
    """With at least as many neighbours as entities; with fewer the outputs differ. Seats of simple_tag observe
    different numbers of entities."""
    env, seats = SimpleTag(4, num_good=2, num_adversaries=3), {"all": [0, 1, 2, 3, 4]}
    obs = random_observations(env)
    attention = outputs(env, seats, obs)
    for neighbours, equal in ((None, True), (6, True), (2, False)):
        policy = POLICY.model_copy(update={"encoder": "graph", "graph_neighbours": neighbours})
        found = outputs(env, seats, obs, policy)
        assert torch.allclose(found, attention, atol=1e-5) == equal
    for seat in range(5):  # a separate policy with the same weights for each seat
        alone = outputs(env, {"all": [seat]}, obs, policy)
        torch.testing.assert_close(alone, found.unflatten(2, (4, 5))[:, :, :, seat])


# ---- learners


@pytest.mark.parametrize("kind", ["ppo", "mappo", "a seat each", "trpo", "mat", "dqn", "sac", "memory", "graph"])
@pytest.mark.few(4)
def test_learners_train_the_encoder(kind: str) -> None:
    """Every layer of the encoder is trained, and play uses the trained weights."""
    config: Any = {
        "mappo": ppo(critic="central", rollout_length=8),
        "trpo": TRPO(rollout_length=8),
        "mat": MAT(rollout_length=8),
        "dqn": DQN(rollout_length=8, learning_starts=1, batch_size=8),
        "sac": SAC(rollout_length=8, learning_starts=1, batch_size=8),
    }.get(kind, ppo(rollout_length=8))
    env = SimpleTag(4, num_good=2, num_adversaries=2)
    seats = {f"seat{i}": [i] for i in range(4)} if kind == "a seat each" else {"all": [0, 1, 2, 3]}
    changes: dict[str, Any] = {
        "memory": {"gru_units": 4, "seat_one_hot": True},
        "graph": {"encoder": "graph", "graph_neighbours": 2},
    }
    policy = POLICY.model_copy(update=changes.get(kind, {}))
    made = config.build_learner(env, seats, dict.fromkeys(seats, policy), dict.fromkeys(seats, 3))
    (net,) = {stack.net for stack in made.stacks} if kind != "a seat each" else {made.stacks[0].net}
    before = {name: value.clone() for name, value in net.entity_encoder.named_parameters()}
    train(made, VectorRollout(env, np.arange(4)), 8, 3)
    for name, value in net.entity_encoder.named_parameters():
        assert not torch.equal(value, before[name]) or "bias" in name, name


def test_incompatible_settings_are_refused() -> None:
    near = {"encoder": "graph", "graph_neighbours": 1}
    with pytest.raises(ValueError, match="the env does not say which numbers of every entity are its position"):
        PPO().build_learner(Foraging(2), {"a": [0]}, {"a": NetPolicyConfig(**near)}, {"a": 0})
    with pytest.raises(ValueError, match="graph_neighbours sets the edges of encoder: graph"):
        NetPolicyConfig(encoder="attention", graph_neighbours=1)
    with pytest.raises(ValueError, match="normalize_observations: encoder: graph embeds all entities"):
        NetPolicyConfig(encoder="graph", normalize_observations=True)
    with pytest.raises(ValueError, match='env "countdown" does not say where they are'):
        PPO().build_learner(Countdown(2), {"a": [0, 1]}, {"a": POLICY}, {"a": 0})
    with pytest.raises(ValueError, match="normalize_observations: encoder: attention embeds all entities"):
        NetPolicyConfig(encoder="attention", normalize_observations=True)


class Marked(VectorEnv):
    """One of four entities in random order is marked; the seat is paid 1 for the sign of its number."""

    name = "marked"
    seats = ("seat",)
    observation_entities = ((Entities.in_a_row(1, 4, 2),),)

    def __init__(self, num_envs: int = 64) -> None:
        self.num_envs, self.observation_shapes, self.action_spaces = num_envs, ((9,),), (Discrete(2),)
        self.vector_step = empty_step(num_envs, 1, (9,))
        self.vector_step.agent_mask[:] = True

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.rng = np.random.default_rng(seeds)
        self.vector_step.rewards[:], self.vector_step.terminated[:] = 0, False
        return self.draw()

    def draw(self) -> VectorStep:
        numbers = self.rng.choice([-1.0, 1.0], size=(self.num_envs, 4))
        marked = self.rng.integers(4, size=self.num_envs)
        self.answer = numbers[np.arange(self.num_envs), marked] > 0
        self.vector_step.obs[:, 0, 0] = 1
        self.vector_step.obs[:, 0, 1::2], self.vector_step.obs[:, 0, 2::2] = numbers, np.eye(4)[marked]
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        self.vector_step.rewards[:], self.vector_step.terminated[:] = actions == self.answer[:, None], True
        self.vector_step.final_obs[:] = self.vector_step.obs
        return self.draw()


@pytest.mark.slow
def test_attention_learns_which_entity_counts(check_score: Any) -> None:
    env, config = Marked(), PPO(rollout_length=4, gamma=0.0, minibatches=2)
    policy = NetPolicyConfig(hidden=[16], encoder="attention", lr=1e-2)
    made = config.build_learner(env, {"a": [0]}, {"a": policy}, {"a": 3})
    train(made, VectorRollout(env, np.arange(64)), 4, 30)
    check_score(mean_return(env, made.greedy_policies(), 8).mean())


class Nearby(Marked):
    """The same with the nearest of four entities on a line in place of the marked one."""

    name = "nearby"
    observation_entities = ((Entities.in_a_row(1, 4, 2, (0,)),),)

    def draw(self) -> VectorStep:
        places, numbers = self.rng.uniform(-1, 1, (self.num_envs, 4)), self.rng.choice([-1.0, 1.0], (self.num_envs, 4))
        self.answer = numbers[np.arange(self.num_envs), np.abs(places).argmin(1)] > 0
        self.vector_step.obs[:, 0, 0] = 1
        self.vector_step.obs[:, 0, 1::2], self.vector_step.obs[:, 0, 2::2] = places, numbers
        return self.vector_step


def test_graph_learns_from_its_nearest_neighbour(check_score: Any) -> None:
    """The return is 1; guessing, or an edge to another entity, gives 0.5."""
    env, config = Nearby(), ppo(rollout_length=4, gamma=0.0)
    policy = NetPolicyConfig(hidden=[16], encoder="graph", graph_neighbours=1, lr=1e-2)
    made = config.build_learner(env, {"a": [0]}, {"a": policy}, {"a": 3})
    train(made, VectorRollout(env, np.arange(64)), 4, 10)
    check_score(mean_return(env, made.greedy_policies(), 8).mean())


@pytest.mark.slow
def test_graph_learns_to_spread() -> None:
    """The return rises from -27 of random play, with two neighbours."""
    env = SimpleSpread(64)
    policy = NetPolicyConfig(
        hidden=[32], activation="relu", lr=2e-3, encoder="graph", graph_neighbours=2, attention_blocks=2
    )
    made = ppo(rollout_length=25, critic="central", value_norm=True).build_learner(
        env, {"team": [0, 1, 2]}, {"team": policy}, {"team": 7}
    )
    train(made, VectorRollout(env, np.arange(64)), 25, 24)
    assert mean_return(env, made.greedy_policies(), 25).mean() > -25
