"""palestra on a VMAS scenario, as its users run it from Python."""

from __future__ import annotations

import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peers.learning import LearningSpec, Point, print_curve, read_learning_spec

import palestra as pl
from palestra.envs.adapters.vmas import VmasEnv
from palestra.runs import read_lines
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.trainer import play_eval


def env_of(spec: LearningSpec, games: int) -> dict[str, Any]:
    """Returns the options of the env."""
    options = spec.options | {"continuous_actions": False}
    return {"scenario": spec.scenario, "steps": spec.horizon, "options": options, "num_envs": games}


def algorithm_of(spec: LearningSpec) -> dict[str, Any]:
    """Returns the config of the algorithm. BenchMARL's VMAS ends a game at its time limit."""
    if spec.algorithm == "mappo":
        return {
            "time_limit": "ends",
            "type": "mappo",
            "rollout_length": spec.rollout_length,
            "gamma": spec.gamma,
            "gae_lambda": spec.gae_lambda,
            "clip": spec.clip,
            "epochs": spec.epochs,
            "minibatches": spec.minibatches,
            "entropy_coef": 0.0,
            "normalize_advantages": False,
            "value_norm": False,
        }
    return {
        "type": "qmix",
        "time_limit": "ends",
        "rollout_length": spec.rollout_length,
        "gamma": spec.gamma,
        "gradient_steps": spec.gradient_steps,
        "batch_size": spec.batch_size,
        "buffer_size": spec.env_steps,
        "learning_starts": 0,
        "double": False,
        "tau": spec.tau,
        "mixer_units": spec.mixer_units,
        "epsilon": spec.epsilon,
        "epsilon_end": spec.epsilon_end,
        "epsilon_share": spec.epsilon_share,
    }


def config_of(spec: LearningSpec) -> dict[str, Any]:
    """Returns the config of the run."""
    evaluation = {"episodes": spec.eval_games, "every": spec.eval_every, "env": {"num_envs": spec.eval_games}}
    policy = {
        "type": "net",
        "hidden": list(spec.hidden),
        "activation": "tanh",
        "lr": spec.lr,
        "max_grad_norm": spec.max_grad_norm,
        "optimizer": {"type": "adam", "eps": spec.adam_eps},
    }
    return {
        "seed": spec.seed,
        "env": {"type": "vmas"} | env_of(spec, spec.games),
        "env_steps": spec.env_steps,
        "log_every": 1,
        "policies": {"agent": policy},
        "algorithm": algorithm_of(spec),
        "evals": {"held_out": evaluation | {"replays": 0}},
    }


def read_curve(run: Path, spec: LearningSpec) -> list[Point]:
    """Returns the curve of a run; its CPU seconds are those of rollouts and updates."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["policy"] == "team"]
    spent = [0.0, *accumulate(line["rollout_cpu_s"] + line["train_cpu_s"] for line in lines)]
    evals = [(line["step"] + 1, line["return"]) for line in read_lines(run / "evals.jsonl")]
    return [(step * spec.batch, spent[step], value) for step, value in evals]


def play_at_random(spec: LearningSpec) -> float:
    """Returns the return of uniform actions."""
    env = VmasEnv(**env_of(spec, spec.eval_games))
    players = [UniformVectorPolicy(env, range(len(env.seats)))]
    return play_eval(env, players, spec.eval_games, spec.seed)["return"]


def main() -> None:
    spec = read_learning_spec()
    torch.set_num_threads(1)
    if spec.algorithm == "random":
        points = [(0, 0.0, play_at_random(spec))]
    else:
        with tempfile.TemporaryDirectory() as folder:
            points = read_curve(pl.train(config_of(spec), name="run", root=folder).path, spec)
    print_curve(points, ("torch", "vmas"))


if __name__ == "__main__":
    main()
