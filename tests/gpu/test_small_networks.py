"""Small networks on a GPU: their numbers equal those of the CPU, they learn, and their runs resume without a GPU.

`pytest -m gpu tests/gpu` runs these, on a machine with CUDA, in less than a minute.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.core.config import dump, validate
from palestra.core.config.presets import expand_preset
from palestra.evaluation.evaluate import evaluate
from palestra.runs import Run, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.vector.algorithms.presets import VECTOR_PRESETS
from palestra.vector.build.build import build_vector_run, check_vector_run
from palestra.vector.config import VectorConfig
from palestra.vector.trainer import VectorTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WHOLE = {"rollout_length": 10, "epochs": 2, "minibatches": 1}  # one minibatch, since GPUs shuffle differently
REPLAYED = {"rollout_length": 8, "gradient_steps": 4, "batch_size": 64, "buffer_size": 2000, "learning_starts": 1}
MEMORY = {"gru_units": 16}
RETENTION = {"attention_type": "retention", "retention_decay": 0.9}

# algorithm, env options, policy options
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"type": "ppo", **WHOLE}, {}, {"normalize_observations": True}),
    "ppo with memory": ({"type": "ppo", **WHOLE}, {}, MEMORY),
    "mappo": ({"type": "mappo", **WHOLE, "value_norm": True}, {}, {"share_network": False}),
    "dqn": ({"type": "dqn", **REPLAYED, "priority_exponent": 0.6}, {}, {}),
    "qmix": ({"type": "qmix", **REPLAYED}, {}, MEMORY),
    "sac": ({"type": "sac", **REPLAYED}, {}, {}),
    "sac, continuous": ({"type": "sac", **REPLAYED, "critic": "central"}, {"continuous_actions": True}, {}),
    "transformer": ({"type": "mat", **WHOLE}, {}, {"attention_heads": 2}),
    "transformer with memory": ({"type": "mat", **WHOLE}, {}, RETENTION),
}


def tree(algorithm: dict[str, Any], env: dict[str, Any], policy: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "env": {"type": "simple_spread", "num_envs": 32, "max_cycles": 7, **env},
        "policies": {"agent": {"type": "net", "hidden": [32], "lr": 1e-3, **policy}},
        "algorithm": algorithm,
        "evals": {},
        **settings,
    }


def trainer_of(config: dict[str, Any]) -> VectorTrainer:
    return check_vector_run(validate(VectorConfig, config))


def run_of(config: dict[str, Any], root: Path) -> Path:
    """Trains a run to its end; returns its folder."""
    checked = validate(VectorConfig, config)
    with Run.create(root, dump(checked), "run", {"seed": checked.seed}) as run:
        trainer = build_vector_run(checked)
        restore_checkpoint(trainer, run)  # steps of all processes
        assert run_training(trainer, run)
        return run.path


def returns_of(path: Path) -> Sequence[float]:
    return [line["return"] for line in read_lines(path / "metrics.jsonl") if line.get("policy") == "team"]


@pytest.mark.parametrize("name", CASES)
def test_first_update_equals_the_cpu(name: str) -> None:
    here, there = (trainer_of(tree(*CASES[name], device=device)) for device in ("cpu", "cuda"))
    players = here.learner.rollout_policies(0.0)
    batch = here.rollout.collect(players, here.rollout_length, 5)
    expected, found = here.learner.update(batch, 0.0), there.learner.update(batch, 0.0)
    there.learner.check_finite()
    for policy, line in expected.items():
        assert found[policy] == pytest.approx(line, rel=2e-3, abs=2e-4)
    kept, wanted = there.learner.state_arrays(), here.learner.state_arrays()  # type: ignore[attr-defined]
    wanted = {key: array for key, array in wanted.items() if not key.startswith("noise.")}  # only `here` has played
    assert kept.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_allclose(kept[key], array, rtol=1e-2, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["ppo", "ppo with memory", "sac, continuous", "transformer"])
def test_actions_equal_the_cpu(name: str) -> None:
    """Greedy actions, with the same weights and observations."""
    here, there = (trainer_of(tree(*CASES[name], device=device)) for device in ("cpu", "cuda"))
    step, first = here.rollout.vector_step, np.ones(32, bool)  # type: ignore[union-attr]
    for player, other in zip(here.learner.greedy_policies(), there.learner.greedy_policies(), strict=True):
        actions, found = (each.act(step, each.initial_state(32), first)[0] for each in (player, other))
        assert found.dtype in (np.int32, np.float32)
        assert np.isclose(found, actions, atol=1e-3).mean() > 0.99  # almost equal values may swap


def test_rollouts_on_the_gpu_match_their_policy() -> None:
    """Log-probabilities recorded while acting equal those of training, and the seed determines the actions."""
    trainer = trainer_of(tree(*CASES["ppo with memory"], device="cuda"))
    players = trainer.learner.rollout_policies(0.0)
    batch = trainer.rollout.collect(players, 10, 5)
    assert len(np.unique(batch.actions)) == 5 and (batch.logp < 0).all()
    metrics = trainer.learner.update(batch, 0.0)["agent"]
    assert metrics["kl"] < 0.05  # a rollout that mixes up games or actions would differ greatly
    again = trainer_of(tree(*CASES["ppo with memory"], device="cuda"))
    same = again.rollout.collect(again.learner.rollout_policies(0.0), 10, 5)
    assert np.array_equal(batch.actions, same.actions) and np.array_equal(batch.logp, same.logp)


def test_run_of_a_gpu_resumes_and_is_evaluated_on_the_cpu(tmp_path: Path) -> None:
    algorithm, env, policy = CASES["ppo with memory"]
    config = tree(algorithm, env, policy, device="cuda", env_steps=1280, log_every=1, checkpoint_every=320)
    path = run_of(config, tmp_path)
    longer = config | {"env_steps": 2560, "device": "cpu"}
    with Run.open(path) as run:
        trainer = check_vector_run(validate(VectorConfig, longer))
        restore_checkpoint(trainer, run)
        assert run.next_step == 4 and all(p.is_cpu for p in trainer.learner.acting_tensors())  # type: ignore[attr-defined]
        assert run_training(trainer, run)
    assert len(returns_of(path)) == 8 and np.isfinite(returns_of(path)).all()
    assert evaluate(path, episodes=32).metrics["episodes"] == 32  # by its config, on the GPU


def test_resumed_run_on_the_gpu_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    algorithm, env, policy = CASES["ppo with memory"]
    config = tree(algorithm | {"minibatches": 2}, env, policy, device="cuda", log_every=1, checkpoint_every=320)
    whole = returns_of(run_of(config | {"env_steps": 1920}, tmp_path / "whole"))
    path = run_of(config | {"env_steps": 960}, tmp_path / "half")
    with Run.open(path) as run:
        trainer = check_vector_run(validate(VectorConfig, config | {"env_steps": 1920}))
        restore_checkpoint(trainer, run)
        assert run_training(trainer, run)
    assert returns_of(path) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["mappo", "dqn"])
def test_learns_on_the_gpu(algorithm: str, tmp_path: Path) -> None:
    """Two seats must choose the same of two actions in each round: 10 of 20 rounds by chance."""
    settings = {
        "mappo": {"type": "mappo", "rollout_length": 20, "epochs": 2, "minibatches": 2},
        "dqn": {"type": "dqn", "learning_starts": 20_000, "gradient_steps": 16, "epsilon_share": 0.2},
    }[algorithm]
    assert expand_preset(settings, presets=VECTOR_PRESETS)
    config = {
        "env": {"type": "matrix", "game": "coordination", "rounds": 20, "num_envs": 2048},
        "policies": {"player": {"type": "net", "hidden": [32], "lr": 3e-3}},
        "algorithm": settings,
        "evals": {"after": {"episodes": 512, "greedy": algorithm == "dqn"}},
        "env_steps": 1_000_000,
        "device": "cuda",
    }
    path = run_of(config, tmp_path)
    before, after = [line["return"] for line in read_lines(path / "evals.jsonl")]
    assert after > 18, f"return of {after:.1f} after training, {before:.1f} before"


@pytest.mark.parametrize("processes", [{"num_processes": 2}, {"num_actors": 1}], ids=["processes", "actors"])
def test_several_processes_train_on_one_gpu(processes: dict[str, int], tmp_path: Path) -> None:
    algorithm = {"type": "ppo", **WHOLE, "off_policy_correction": "vtrace" if "num_actors" in processes else "none"}
    config = tree(algorithm, {}, MEMORY, device="cuda", env_steps=960, log_every=1, **processes)
    found = returns_of(run_of(config, tmp_path))
    assert len(found) == 3 and np.isfinite(found).all()
