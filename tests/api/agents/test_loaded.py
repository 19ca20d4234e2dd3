"""`palestra.load_agent`: a trained agent acts in a script, in the raw env that it was trained in."""

import asyncio

import gymnasium
import numpy as np
import pytest
import torch
from helpers.trained import two_agents

import palestra as pl
from palestra.api.agents import export
from palestra.api.agents.export import GreedyNetwork
from palestra.envs.vector_base import Discrete
from palestra.evaluation.evaluate import evaluate
from palestra.evaluation.game_policy import find_fixed_policy
from palestra.evaluation.target import find_target
from palestra.vector.build.build import make_fixed_player
from palestra.vector.build.envs import make_vector_env

EXPORTED = [
    ({"type": "leduc_poker"}, {}),
    ({"type": "simple_spread"}, {"gru_units": 8, "seat_one_hot": True, "normalize_observations": True}),
    ({"type": "gymnasium", "id": "Pendulum-v1"}, {"hidden": [64, 64]}),
]


@pytest.fixture(scope="module")
def team(base, tmp_path_factory):
    """A run of two language agents."""
    return two_agents(base, tmp_path_factory.mktemp("team"))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    """Returns a function that trains a policy "agent" for some steps in an env."""
    root = tmp_path_factory.mktemp("networks")

    def train(name, env, env_steps, **policy):
        return pl.train(
            env=env,
            policies={"agent": {"type": "net", "hidden": [16], "lr": 3e-3, **policy}},
            algorithm={"type": "ppo", "rollout_length": 32, "epochs": 4, "minibatches": 4},
            env_steps=env_steps,
            name=name,
            root=root,
        ).path

    return train


@pytest.fixture(scope="module")
def cart_pole(make_run):
    return make_run("cart_pole", {"type": "gymnasium", "id": "CartPole-v1", "num_envs": 8}, 4096)


def test_agent_of_legal_actions_is_told_them(tmp_path):
    """An agent that chose among legal actions in training answers with one of those that it is given."""
    speech = {"type": "lora", "base": "tiny", "rank": 2, "sampling": {"max_tokens": 2, "legal_only": True}}
    run = pl.train(
        env={"type": "text_kuhn", "vocabulary": {"J": "1", "Q": "2", "K": "3", "pass": "up", "bet": "down"}},
        policies={"default": speech},
        algorithm={"type": "grpo", "branch_at": "root", "group_size": 2},
        steps=1,
        episodes=4,
        name="legal",
        root=tmp_path,
    )
    agent = pl.load_agent(run.path)
    seen = "You are player 0. You hold 3. Moves: none. Say up or down."
    assert {agent.act(seen, legal_actions=["up", "down"]) for _ in range(20)} <= {"up", "down"}
    assert agent.act(seen, legal_actions=["down"]) == "down"
    assert agent.act(seen, legal_actions=[7], stop="7") == "7"  # an action as a number, and no end before its own
    with pytest.raises(ValueError, match="legal_actions is a list of actions, not a text such as 'up'"):
        agent.act(seen, legal_actions="up")
    with pytest.raises(ValueError, match=r"default chose among legal actions in training .* give act"):
        agent.act(seen)


def played(env, act, seed):
    """The return of one episode of a Gymnasium env."""
    obs, _ = env.reset(seed=seed)
    total = 0.0
    while True:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        total += reward
        if terminated or truncated:
            return total


@pytest.mark.parametrize("seed", range(3))
def test_a_network_plays_the_raw_env_as_its_evaluation_does(cart_pole, seed):
    env = make_vector_env({"type": "gymnasium", "id": "CartPole-v1"}, 1)
    player = make_fixed_player(find_fixed_policy(find_target(cart_pole), "agent", greedy=True), env, env.seats, "agent")
    step = env.reset(np.array([seed]))
    total = 0.0
    while not total or not step.done[0]:
        step = env.step(player.act(step, None, step.done)[0])
        total += step.rewards[0, 0]
    agent = pl.load_agent(cart_pole, greedy=True)
    assert played(gymnasium.make("CartPole-v1"), agent.act, seed) == total
    assert isinstance(agent.act(np.zeros(4, np.float32)), np.integer | int)


@pytest.mark.parametrize("gru_units", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_actions_are_those_of_the_player_of_evaluations(make_run, gru_units):
    env_config = {"type": "simple_spread", "num_envs": 4}
    run = make_run(f"spread_{gru_units}", env_config, 1024, gru_units=gru_units)
    env = make_vector_env(env_config, 3)
    player = make_fixed_player(find_fixed_policy(find_target(run), "agent", greedy=True), env, env.seats, "agent")
    agents = [pl.load_agent(run, seat=seat, greedy=True) for seat in env.seats]
    step = env.reset(np.arange(3))
    state = player.initial_state(3)
    first = np.ones(3, bool)
    for _ in range(60):  # more than two games
        if first.all():
            for agent in agents:
                agent.reset()
        actions, _, state = player.act(step, state, first)
        for seat, agent in enumerate(agents):
            assert np.array_equal(agent.act(step.obs[:, seat]), actions[:, seat])
        step = env.step(actions)
        first = step.done


def test_one_game_and_several_take_the_same_actions(cart_pole):
    agent = pl.load_agent(cart_pole, greedy=True)
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    several = agent.act(rows)
    agent.reset()
    assert [agent.act(row) for row in rows] == several
    with pytest.raises(ValueError, match="played 1 games and now observes 6: call reset between"):
        agent.act(rows)
    with pytest.raises(ValueError, match=r"observes arrays of shape \(4,\)"):
        agent.act(np.zeros(5))


def test_an_action_mask_holds(make_run):
    run = make_run("kuhn", {"type": "leduc_poker", "num_envs": 8}, 512)
    agent = pl.load_agent(run, seed=3)
    size = agent.act.__self__._seat_shape[0]
    obs = np.zeros((200, size), np.float32)
    mask = np.tile([False, True, False], (200, 1))
    assert agent.act(obs, mask) == [1] * 200
    agent.reset()
    for wrong, match in (
        ([0, 0, 0], "allows no action"),
        ([1, 1], r"has 3 actions, but the action_mask has shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=match):
            agent.act(obs[0], wrong)
    with pytest.raises(ValueError, match="1 for each legal action"):
        agent.act(obs[0], [0, -1e9, 0])  # a mask that is added to logits
    with pytest.raises(ValueError, match="leave one out"):
        agent.act({"observation": obs[0], "action_mask": [1, 1, 1]}, [1, 1, 1])
    with pytest.raises(ValueError, match="is not finite"):
        agent.act(np.full(size, np.nan), [1, 1, 1])


def test_continuous_actions_are_within_their_bounds(make_run):
    agent = pl.load_agent(make_run("pendulum", {"type": "gymnasium", "id": "Pendulum-v1", "num_envs": 4}, 256))
    actions = np.stack(agent.act(np.zeros((200, 3), np.float32)))
    assert actions.min() == -2 and actions.max() == 2  # a new policy has a deviation of 1 or more, cut at the bounds


def test_the_network_to_export_takes_the_agent_s_greedy_actions(make_run):
    run = make_run("kuhn_memory", {"type": "leduc_poker", "num_envs": 8}, 512, gru_units=8, seat_one_hot=True)
    agent = pl.load_agent(run, greedy=True)
    network = GreedyNetwork(agent._member, 3).eval()
    assert network.input_names == ["obs", "state", "action_mask"]
    obs, _, mask = network.random_inputs(np.zeros(agent._seat_shape, np.float32))
    state = torch.zeros(len(obs), 8)
    with torch.no_grad():
        for _ in range(3):  # the state is given back
            actions, outputs, state = network(obs, state, mask)
            assert actions.tolist() == agent.act(obs.numpy(), mask.numpy())
    assert outputs.shape == (len(obs), 3) and state.abs().sum() > 0


def test_an_export_that_cannot_be_is_refused_in_one_line(cart_pole, tmp_path, monkeypatch):
    agent = pl.load_agent(cart_pole)
    with pytest.raises(ValueError, match=r"ends in \.onnx"):
        agent.export(tmp_path / "pole.pt")
    monkeypatch.setattr("palestra.api.console.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'palestra\[onnx\]'"):
        agent.export(tmp_path / "pole.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("env, policy", EXPORTED)
def test_an_exported_model_acts_as_the_agent(make_run, env, policy, tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    run = make_run(f"exported_{env.get('id', env['type'])}", {**env, "num_envs": 4}, 256, **policy)
    agent = pl.load_agent(run, greedy=True)
    agent.export(tmp_path / "agent.onnx")
    model = onnxruntime.InferenceSession(tmp_path / "agent.onnx")
    network = GreedyNetwork(agent._member, agent._num_actions)
    inputs = network.random_inputs(np.zeros(agent._seat_shape, agent._dtype))
    named = {name: value.numpy()[:5] for name, value in zip(network.input_names, inputs, strict=True)}
    if "state" in named:
        named["state"][:] = 0
    found = model.run(["action"], named)[0]
    space = agent._space
    found = found if isinstance(space, Discrete) else found.clip(space.low, space.high)
    np.testing.assert_allclose(found, agent.act(named["obs"], named.get("action_mask")), rtol=1e-4, atol=1e-4)
    right = export._run
    monkeypatch.setattr(export, "_run", lambda *arguments: [found + 1 for found in right(*arguments)])
    with pytest.raises(ValueError, match="would act otherwise"):
        agent.export(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_member_of_a_population_plays_the_seat_of_its_player(tmp_path):
    short = {"population.iterations": 1, "population.env_steps": 1024, "backend": {"type": "inline"}}
    run = pl.train("configs/populations/kuhn_psro.yaml", root=tmp_path, **short)
    assert [pl.load_agent(run.path, f"player_{n}-1").seat for n in range(2)] == ["player_0", "player_1"]


def test_a_language_agent_answers_as_in_its_evaluation(team):
    result = evaluate(team, episodes=4, seed=5, sampling={"temperature": 0.0})
    guide = pl.load_agent(team, "guide", greedy=True)
    nodes = [node for episode in result.episodes for node in episode.nodes if "guide" in node.answers]
    assert len(nodes) == 4
    for node in nodes:
        assert guide.act(node.observations["guide"]) == node.answers["guide"].text


def test_sampling_is_by_seed_and_settings_are_those_of_chat_completions(team):
    def answers(seed):
        agent = pl.load_agent(team, "walker", seed=seed)
        return [agent.act("say 0 or 1") for _ in range(8)]

    assert answers(1) == answers(1) != answers(2)
    agent = pl.load_agent(team, "walker")
    told = [{"role": "system", "content": "walk"}, {"role": "user", "content": "say 0 or 1"}]
    assert agent.act(told, temperature=0.0) == agent.act(told, temperature=0.0)
    with pytest.raises(ValueError, match="nothing that walker could answer"):
        agent.act([])
    with pytest.raises(ValueError, match="act takes no setting 'temprature'"):
        agent.act("say 0 or 1", temprature=0)
    for wrong, why in (
        ({"role": "user"}, r"messages\.0: the message has no content"),
        ({"content": "say 0 or 1"}, "each with a role"),
        ("say 0 or 1", "each with a role"),
        ({"role": "user", "content": "say 0 or 1", "colour": "red"}, "has the field 'colour', which is not used"),
    ):
        with pytest.raises(ValueError, match=why):
            agent.act([wrong])


def test_it_acts_inside_a_running_loop(team):
    agent = pl.load_agent(team, "walker", greedy=True)

    async def in_a_notebook():
        return agent.act("say 0 or 1")

    assert asyncio.run(in_a_notebook()) == agent.act("say 0 or 1")


def test_what_cannot_be_loaded_says_why(team, cart_pole, tmp_path):
    for arguments, options, match in (
        ([team], {}, "several agents: name one of guide, walker"),
        ([team, "nobody"], {}, 'no trained agent "nobody"'),
        ([team, "guide"], {"seat": "guide"}, "leave out seat"),
        ([tmp_path / "none"], {}, "no run and no published agent"),
        ([cart_pole], {"seat": "driver"}, 'no seat "driver": env ".*" has agent'),
    ):
        with pytest.raises(ValueError, match=match):
            pl.load_agent(*arguments, **options)
