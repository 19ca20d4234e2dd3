"""palestra as its users run it: `train` runs `palestra train` and reads the run's timings; others collect rollouts.

`workers` processes share the games. Training ends by SIGINT, as a user would end it, after `seconds`. The run's first
line, which includes compiling, is left out.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from peers import zoo
from peers.timing import CYCLES, Spec, measure, print_result, read_spec

from palestra.core.config import validate
from palestra.vector.build.build import check_vector_run
from palestra.vector.config import VectorConfig
from palestra.vector.policies.base import UniformVectorPolicy

FOREVER = 10**12


def env_of(spec: Spec) -> dict[str, Any]:
    """The config of an env: palestra's own, or one of OpenSpiel or PettingZoo through palestra's adapter."""
    if spec.env == "simple_spread":
        return {"type": "simple_spread", "max_cycles": CYCLES}
    if spec.env == "overcooked":
        return {"type": "overcooked"}
    if spec.env == "hanabi":
        return {"type": "openspiel", "game": "hanabi"}
    adapter = "palestra.envs.adapters.pettingzoo.games:PettingZooEnv"
    return {"type": adapter, "env": zoo.FUNCTIONS[spec.env], "options": zoo.options(spec.env)}


def config(spec: Spec, games: int) -> dict[str, Any]:
    """The config of a run: independent PPO, one policy for all seats."""
    return {
        "env": env_of(spec) | {"num_envs": games},
        "env_steps": FOREVER,
        "log_every": 1,
        "checkpoint_every": FOREVER,
        "policies": {"agent": {"type": "net", "hidden": list(spec.hidden), "activation": "tanh"}},
        "algorithm": {
            "type": "ppo",
            "rollout_length": spec.horizon,
            "epochs": spec.epochs,
            "minibatches": spec.minibatches,
            "critic": "own",
            "value_norm": False,
        },
    }


def train(spec: Spec) -> dict[str, float]:
    """Trains a run; returns its joint steps per second, from the run's timings. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, settings = (
            folder / "spread.yaml",
            [f"num_processes={spec.workers}", f"log_every={max(spec.batch, 12_000)}"],
        )
        file.write_text(json.dumps(config(spec, spec.games)))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "palestra"), "train", str(file), "--root", name]
        command += [part for setting in settings for part in ("--set", setting)]
        with (folder / "output").open("w") as output:
            run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                lines = follow(run, folder / "run" / "timings.jsonl", spec.seconds)
            finally:
                run.send_signal(signal.SIGINT)
                run.wait()
        if len(lines) < 2:
            raise SystemExit((folder / "output").read_text()[-2000:])
    seconds = [line["rollout_s"] + line["train_s"] for line in lines]
    steps = [line["env_steps_per_s"] * spent for line, spent in zip(lines, seconds, strict=True)]
    return {
        "env_steps_per_s": sum(steps) / sum(seconds),
        "env_steps": sum(steps),
        "seconds": sum(seconds),
        "cpu_seconds": sum(line["rollout_cpu_s"] + line["train_cpu_s"] for line in lines),
    }


def follow(run: subprocess.Popen, timings: Path, seconds: float) -> list[dict[str, float]]:
    """Waits until the run's timings cover `seconds` or the run has ended; returns their lines without the first."""
    lines: list[dict[str, float]] = []
    while run.poll() is None and (len(lines) < 2 or sum(x["rollout_s"] + x["train_s"] for x in lines) < seconds):
        time.sleep(0.1)
        written = timings.read_text().split("\n")[1:-1] if timings.exists() else []  # the last may be half a line
        lines = [json.loads(line) for line in written]
    return lines


def play(spec: Spec) -> dict[str, float]:
    """Joint steps per second of rollouts on one process's share of the games."""
    setup = check_vector_run(validate(VectorConfig, config(spec, spec.games // spec.workers)))
    sweeper, numbers = setup.rollout, iter(range(FOREVER))
    random = [UniformVectorPolicy(sweeper.env, range(len(sweeper.env.seats)))]
    players = random if spec.what == "random" else setup.learner.rollout_policies(0.0)

    def advance() -> int:
        return sweeper.collect(players, spec.horizon, next(numbers)).terminated.size

    return measure(advance, spec.seconds, warmup=3)


def one_of_many(spec: Spec, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    barrier.wait()
    results.put(play(spec))


def play_together(spec: Spec) -> dict[str, float]:
    """Plays in several processes at the same time, each on its own; returns the sum of their speeds."""
    context = get_context("spawn")
    barrier, results = context.Barrier(spec.workers), context.Queue()
    workers = [context.Process(target=one_of_many, args=(spec, barrier, results)) for _ in range(spec.workers)]
    for worker in workers:
        worker.start()
    results_by_worker = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return {
        "env_steps_per_s": sum(one["env_steps_per_s"] for one in results_by_worker),
        "env_steps": sum(one["env_steps"] for one in results_by_worker),
        "seconds": max(one["seconds"] for one in results_by_worker),
    }


def main() -> None:
    spec = read_spec()
    figures = train(spec) if spec.what == "train" else play(spec) if spec.workers == 1 else play_together(spec)
    batch = f"{spec.games} games x {spec.horizon} steps"
    print_result(
        figures, ("palestra", "torch", "numpy"), f"{batch} in {spec.workers} process{'es' * (spec.workers > 1)}"
    )


if __name__ == "__main__":
    main()
