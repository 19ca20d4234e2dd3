"""Actors keep playing while the learner trains; a dead actor is replaced, and only its games are lost."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.core.config import validate
from palestra.envs.vector_base import VectorEnv
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, restore_checkpoint, run_training
from palestra.vector.build.build import ActorSetup, build_vector_run, make_actor_setup
from palestra.vector.config import VectorConfig
from palestra.vector.rollouts.actors import ActorPool

CONFIG: dict[str, Any] = {
    "name": "actors",
    "env_steps": 8 * 5 * 30,
    "env": {"type": "simple_spread", "num_envs": 16, "max_cycles": 6},
    "policies": {"agent": {"type": "net", "hidden": [8], "gru_units": 4}},
    "algorithm": {"type": "a2c", "rollout_length": 5, "off_policy_correction": "vtrace"},
    "num_actors": 2,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def pools() -> Iterator[list[ActorPool]]:
    """The pool that tests share, in a list; empty before the first test, and after one that closes it."""
    pools: list[ActorPool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def actors(pools: list[ActorPool]) -> ActorPool:
    """Two actors, which play without a pause: the tests that use them are the last ones in this file."""
    if not pools:
        config = validate(VectorConfig, CONFIG | {"algorithm": CONFIG["algorithm"] | {"time_limit": "ends"}})
        pools.append(ActorPool(make_actor_setup(config), [partial(make_actor_setup, config)] * 2, 5, 0))
    return pools[0]


def broken() -> ActorSetup:
    raise RuntimeError("no such game")


def test_actors_need_an_off_policy_correction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="off_policy_correction: vtrace"):
        validate(VectorConfig, CONFIG | {"algorithm": {"type": "ppo"}})


def test_actors_that_fail_to_start_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    own = make_actor_setup(validate(VectorConfig, CONFIG))
    actors = ActorPool(own, [broken], 5, 0)
    with pytest.raises(ValueError, match="actor 0 died 3 times in a row without a batch"):
        actors.collect([], 5, 0)
    actors.close()
    assert "no such game" in capfd.readouterr().err


@pytest.mark.slow
def test_run_with_actors_learns_logs_lag_and_resumes(tmp_path: Path) -> None:
    config = validate(VectorConfig, CONFIG | {"checkpoint_every": 400})
    with Run.create(tmp_path, "", "a") as run:
        setup = build_vector_run(config)
        stops = iter([False] * 12 + [True] * 100)
        assert not run_training(setup, run, Callback(), lambda: next(stops))
    lines = [line for line in read_lines(tmp_path / "a" / "metrics.jsonl") if line["policy"] == "team"]
    assert len(lines) == 13 and all({"lag", "dropped", "restarts"} <= line.keys() for line in lines)
    with Run.open(tmp_path / "a") as run:
        setup = build_vector_run(config)
        assert restore_checkpoint(setup, run) == 13
        assert run_training(setup, run, Callback())


def test_actor_env_declares_its_spaces() -> None:
    env = make_actor_setup(validate(VectorConfig, CONFIG)).env
    assert isinstance(env, VectorEnv) and env.num_envs == 8


def test_batches_are_complete_and_come_from_all_actors(actors: ActorPool) -> None:
    sources = set()
    while len(sources) < 2:
        batch = actors.collect([], 5, 0)
        sources.add(batch.worker)
        assert batch.obs.shape == (6, 8, 3, 18) and np.isfinite(batch.obs).all()
        assert batch.actions.max() <= 4 and (batch.logp < 0).all()
        assert (batch.is_first[1:] == batch.terminated).all() and not batch.truncated.any()
        assert len(batch.episode_stats["lengths"]) == 0 or (batch.episode_stats["lengths"] == 6).all()
        assert batch.rollout_metrics["lag"] >= 0
    assert sources == {0, 1}


def test_actors_use_the_newest_weights(actors: ActorPool) -> None:
    actors.collect([], 5, 0)
    for tensor in actors.weights:
        with torch.no_grad():
            tensor.zero_()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = actors.collect([], 5, 0)
        if np.allclose(batch.logp, np.log(1 / 5), atol=1e-6):  # all outputs zero: uniform play
            return
    raise AssertionError("no batch of the new weights came")


def test_actors_drop_batches_instead_of_blocking(actors: ActorPool) -> None:
    actors.collect([], 5, 0)
    dropped = 0.0
    deadline = time.monotonic() + 60
    while not dropped and time.monotonic() < deadline:
        time.sleep(0.2)  # they fill their slots, and continue
        dropped += actors.collect([], 5, 0).rollout_metrics["dropped"]
    assert dropped > 0


def kill_actors(actors: ActorPool, kills: int) -> None:
    rng, before = np.random.default_rng(0), actors.restarts
    for kill in range(before, before + kills):
        victim = int(rng.integers(2))
        for _ in range(4):
            actors.collect([], 5, 0)
        while actors.collect([], 5, 0).worker != victim:
            pass  # a batch between two deaths shows that actors can start
        os.kill(actors.actors[victim].process.pid, signal.SIGKILL)
        for _ in range(4):
            batch = actors.collect([], 5, 0)
            assert np.isfinite(batch.obs).all() and (batch.is_first[1:] == batch.done).all()
        while actors.restarts <= kill:
            actors.collect([], 5, 0)
    assert actors.restarts == before + kills


def test_killed_actors_are_replaced(actors: ActorPool) -> None:
    kill_actors(actors, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_actors_are_replaced(actors: ActorPool) -> None:
    kill_actors(actors, 20)


def test_close_ends_processes_and_frees_shared_memory(actors: ActorPool, pools: list[ActorPool]) -> None:
    pools.remove(actors)
    actors.collect([], 5, 0)
    names, pids = (
        [buffers.shared_memory.name for buffers in actors.all_buffers],
        [actor.process.pid for actor in actors.actors],
    )
    actors.close()
    for name in names:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
