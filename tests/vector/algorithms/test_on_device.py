"""Every algorithm on another device than the CPU: on a pretended one (pretended_device.py) its numbers equal those of
the CPU, no operation mixes tensors of both, and neither acting nor an update synchronises with the device more often
than needed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pretended_device import DEVICE, PretendedDevice, pretended_device, waits_of
from helpers.pretended_group import PretendedGroup
from helpers.vector_toys import Countdown, ppo

from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.parallel.shared_memory import SharedMemoryAllReduce
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.coma import COMA
from palestra.vector.algorithms.experimental.cql import CQL
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.imitation import BC, GAIL
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.experimental.maven import MAVEN
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.nfsp import NFSP
from palestra.vector.algorithms.ppo import A2C
from palestra.vector.algorithms.pqn import PQN
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner
from palestra.vector.learners.optimizers import NonFiniteGradient
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

ALL = ("one", "two")
STARTS = {"learning_starts": 1, "buffer_size": 64, "batch_size": 16, "gradient_steps": 3}
STEPS = 8  # steps of a rollout
FAST = ("mappo", "ppo with memory", "qmix", "sac, continuous", "coma")  # the others are slow tests

# With a larger rate rounding errors of 1e-7 grow a thousandfold in two updates, on the CPU, too.
RETENTION = {"attention_type": "retention", "retention_decay": 0.9, "lr": 1e-3}

# algorithm, env, settings of the policies
CASES: dict[str, tuple[AlgorithmConfig, str, dict[str, Any]]] = {
    "ppo": (ppo(), "turns", {}),
    "mappo": (ppo(critic="central", critics="one", value_norm="popart"), "discrete", {"normalize_observations": True}),
    "ppo with memory": (ppo(minibatches=2, aux_value_coef=0.5, value_clip=0.2), "turns", {"gru_units": 4}),
    "ppo, continuous": (ppo(off_policy_correction="vtrace"), "continuous", {}),
    "ppo, several choices": (ppo(), "vectors", {}),
    "ppo, attention": (ppo(), "spread", {"encoder": "attention", "seat_one_hot": True}),
    "happo": (ppo(sequential=True), "discrete", {}),
    "commnet": (A2C(), "turns", {"communication_rounds": 1}),
    "trpo": (TRPO(), "discrete", {}),
    "trpo, continuous": (TRPO(sequential=True), "continuous", {}),
    "mat": (MAT(value_norm=True), "turns", {}),
    "mat with memory": (MAT(minibatches=2), "turns", RETENTION),
    "coma": (COMA(), "turns", {"normalize_observations": True}),
    "dqn": (DQN(**STARTS, priority_exponent=0.6), "turns", {"normalize_observations": True}),
    "dqn with memory": (DQN(**STARTS, burn_in=2), "discrete", {"gru_units": 4}),
    "qmix": (QMIX(**STARTS), "turns", {}),
    "qmix with memory": (QMIX(**STARTS), "discrete", {"gru_units": 4}),
    "vdn": (QMIX(mixer="vdn", **STARTS), "discrete", {}),
    "qplex": (QMIX(mixer="qplex", **STARTS), "discrete", {}),
    "maven": (MAVEN(**STARTS), "discrete", {}),
    "nfsp": (NFSP(**STARTS, eta=0.5), "turns", {}),
    "pqn": (PQN(), "turns", {"gru_units": 4}),
    "pqn, team": (PQN(mixer="vdn"), "turns", {}),
    "sac": (SAC(**STARTS), "turns", {"normalize_observations": True}),
    "sac, continuous": (SAC(**STARTS, critic="central"), "continuous", {}),
    "maddpg": (DDPG(**STARTS, critic="central"), "turns", {}),
    "td3": (TD3(**STARTS), "continuous", {}),
    "facmac": (FACMAC(**STARTS), "discrete", {}),
    "bc": (BC(demonstrations=["FILE"], sequence_length=4), "turns", {"gru_units": 4}),
    "gail": (GAIL(demonstrations=["FILE"], discriminator_steps=2), "turns", {}),
    "iql": (IQL(data=["FILE"], gradient_steps=2, critic="central"), "turns", {}),
    "cql": (CQL(data=["FILE"], gradient_steps=2), "turns", {}),
}


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with pretended_device() as mode:
        yield mode


def make_env(kind: str) -> VectorEnv:
    if kind == "spread":
        return SimpleSpread(6, max_cycles=5)
    spaces = {"vectors": MultiDiscrete((3, 2)), "continuous": Continuous((-1.0, 0.0), (1.0, 3.0))}
    return Countdown(6, turns=kind == "turns", space=spaces.get(kind, Discrete(3)))


def make(
    config: AlgorithmConfig,
    kind: str,
    settings: dict[str, Any],
    device: torch.device,
    *,
    shared: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> NetLearner:
    """A learner of two policies, or of one that all seats share."""
    env = make_env(kind)
    policy = NetPolicyConfig(**{"hidden": [8], "lr": 1e-2} | settings)
    numbers = list(range(len(env.seats)))
    seats = {"one": numbers} if shared or settings else {"one": numbers[:1], "two": numbers[1:]}
    seeds = {name: i + 3 for i, name in enumerate(seats)}
    learner: NetLearner = config.build_learner(
        env, seats, dict.fromkeys(seats, policy), seeds, process_group, device=device
    )
    return learner


def update_metrics(learner: NetLearner, updates: int = 2) -> list[dict[str, dict[str, float]]]:
    """The metrics of `updates` updates."""
    rollout = VectorRollout(learner.env, np.arange(learner.env.num_envs))
    found = []
    for i in range(updates):
        batch = rollout.collect(learner.rollout_policies(i / updates), STEPS, i)
        found.append(learner.update(batch, i / updates))
        learner.check_finite()
    return found


def with_file(config: AlgorithmConfig, kind: str, folder: Path) -> AlgorithmConfig:
    """The config, with a file of recorded episodes if it learns from one."""
    key = next((key for key in ("demonstrations", "data") if hasattr(config, key)), None)
    if key is None:
        return config
    env, path = make_env(kind), folder / "episodes.parquet"
    record_vector_episodes(env, [UniformVectorPolicy(env, range(len(env.seats)))], 40, path)
    return config.model_copy(update={key: [str(path)]})


def test_pretended_device_refuses_mixed_tensors_and_counts_waits(device: PretendedDevice) -> None:
    there, here = torch.arange(3.0).to(DEVICE), torch.ones(3)
    assert (
        (there + 1).device == DEVICE and (there + 1).tolist() == [1, 2, 3] and (there * 2).cpu().tolist() == [0, 2, 4]
    )
    assert waits_of(device, lambda: bool((there > 1).any())) == waits_of(device, lambda: there[there > 1]) == 1
    for mixed in (lambda: there + here, lambda: torch.stack([there[0], here[0]]), lambda: there[[0, 1]]):
        with pytest.raises(RuntimeError, match="on the device"):
            mixed()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
@pytest.mark.few(2)
def test_numbers_are_those_of_the_cpu(name: str, device: PretendedDevice, tmp_path: Path) -> None:
    config, kind, settings = CASES[name]
    config = with_file(config, kind, tmp_path)
    here, there = (make(config, kind, settings, torch.device(each)) for each in ("cpu", DEVICE))
    expected, found = update_metrics(here), update_metrics(there)
    assert [list(line) for line in found] == [list(line) for line in expected]
    for line, other in zip(found, expected, strict=True):
        for policy in line:
            assert line[policy] == pytest.approx(other[policy], rel=1e-3, abs=1e-4)
    kept, wanted = there.state_arrays(), here.state_arrays()
    assert kept.keys() == wanted.keys() and all(type(array) is np.ndarray for array in kept.values())
    for key, array in wanted.items():
        np.testing.assert_allclose(kept[key], array, rtol=1e-3, atol=2e-4, err_msg=key)


@pytest.mark.parametrize("name", ["ppo", "ppo with memory", "ppo, continuous", "mat", "mat with memory", "dqn"])
def test_acting_waits_once_per_step(name: str, device: PretendedDevice) -> None:
    config, kind, settings = CASES[name]
    learner = make(config, kind, settings, DEVICE, shared=True)
    (player,) = learner.rollout_policies(0.0)
    step, first = learner.env.reset(np.arange(6)), np.ones(6, bool)
    player.reset_rng(0)
    state = player.initial_state(6)
    player.act(step, state, first)  # the first call creates constants
    assert waits_of(device, lambda: player.act(step, state, first)) == 1


@pytest.mark.parametrize(
    "name",
    [
        *["ppo", "mappo", "coma", "qmix", "sac"],
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo with memory", "mat", "mat with memory")),
    ],
)
@pytest.mark.few(2)
def test_waits_of_an_update_do_not_grow_with_its_gradient_steps(name: str, device: PretendedDevice) -> None:
    config, kind, settings = CASES[name]
    found = []
    for few in (True, False):
        if hasattr(config, "minibatches"):
            config = config.model_copy(update={"minibatches": 2 if few else 6})
        else:
            config = config.model_copy(update={"gradient_steps": 2 if few else 6})
        learner = make(config, kind, settings, DEVICE, shared=True)
        batch = VectorRollout(learner.env, np.arange(6)).collect(learner.rollout_policies(0.0), STEPS, 0)
        found.append(waits_of(device, lambda learner=learner, batch=batch: learner.update(batch, 0.0)))  # type: ignore[misc]
    assert found[0] == found[1] <= 8


def test_nonfinite_gradients_change_no_weights_and_raise_after_the_update(device: PretendedDevice) -> None:
    learner = make(ppo(), "discrete", {}, DEVICE)
    batch = VectorRollout(learner.env, np.arange(6)).collect(learner.rollout_policies(0.0), STEPS, 0)
    before = learner.state_arrays()
    batch.rewards[3, 2, 1] = np.inf
    learner.update(batch, 0.0)
    after = learner.state_arrays()
    assert all(np.array_equal(after[key], before[key]) for key in before if "/0." not in key and key.startswith("net"))
    with pytest.raises(NonFiniteGradient, match="policy two"):
        learner.check_finite()


def test_gradients_are_summed_over_processes_from_any_device(device: PretendedDevice) -> None:
    """Each learner is one of two processes; the other one's gradients and statistics are 0."""
    config, kind, settings = CASES["mappo"]
    found = []
    for each in (torch.device("cpu"), DEVICE):
        together = PretendedGroup(partial(SharedMemoryAllReduce(1).all_reduce, rank=0))
        found.append(update_metrics(make(config, kind, settings, each, process_group=together)))
    for line, other in zip(*found, strict=True):
        for policy in line:
            assert line[policy] == pytest.approx(other[policy], rel=1e-3, abs=1e-4)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("name", [pytest.param("ppo with memory", marks=pytest.mark.slow), "qmix with memory"])
def test_checkpoint_of_the_device_resumes_on_the_cpu(name: str, device: PretendedDevice, tmp_path: Path) -> None:
    """The state, the saved policies and the running games."""
    config, kind, settings = CASES[name]
    here, there, again = (make(config, kind, settings, torch.device(each)) for each in ("cpu", DEVICE, "cpu"))
    update_metrics(here)
    update_metrics(there)
    there.write_state(tmp_path)
    again.read_state(tmp_path)
    for line, other in zip(update_metrics(again), update_metrics(here), strict=True):
        for policy in line:
            assert line[policy] == pytest.approx(other[policy], rel=2e-3, abs=2e-4)
    there.member_writers()["one"](tmp_path / "one")
    seats, step, first = [0, 1], there.env.reset(np.arange(6)), np.ones(6, bool)
    players = [
        read_policy(tmp_path / "one", there.env, seats, best=True, device=d) for d in (torch.device("cpu"), DEVICE)
    ]
    actions = [player.act(step, player.initial_state(6), first)[0] for player in players]
    assert np.array_equal(*actions) and players[1].device == DEVICE
    rollout = VectorRollout(there.env, np.arange(6))
    rollout.collect(there.rollout_policies(0.0), STEPS, 0)
    kept = rollout.save()
    assert kept is not None and all(type(array) is np.ndarray for array in kept.values())
    rollout.load(kept, again.rollout_policies(0.0))
    rollout.collect(again.rollout_policies(0.0), STEPS, 1)
