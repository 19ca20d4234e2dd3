"""Sample Factory on PettingZoo envs: APPO, one policy for all seats, two workers with 32 games each that keep playing
while it learns.

Sample Factory counts the steps of each agent; here they are divided by the number of seats. `train` counts the steps
that it has learned from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from threading import Thread
from typing import Any

import gymnasium
import numpy as np
import torch
from peers import zoo
from peers.timing import CYCLES, Spec, measure, print_result, read_spec
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.sampling.simplified_sampling_api import SamplingLoop
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

GAMES = 32  # per worker
Row = list[Any]


class Game(gymnasium.Env):
    """A PettingZoo env with lists by agent, as Sample Factory needs it; it resets itself when a game ends."""

    def __init__(self, name: str) -> None:
        self.env = zoo.make(name, floats=True)
        self.agents = self.env.possible_agents
        self.num_agents, self.is_multiagent = len(self.agents), True
        self.observation_space = self.env.observation_space(self.agents[0])
        self.action_space = self.env.action_space(self.agents[0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, Row]:
        seen, _ = self.env.reset(seed=seed)
        return self.row(seen), [{} for _ in self.agents]

    def step(self, actions: np.ndarray) -> tuple[Row, Row, Row, Row, Row]:
        given = {agent: int(action) for agent, action in zip(self.agents, actions, strict=True)}
        seen, rewards, terminated, truncated, _ = self.env.step(given)
        if not self.env.agents:
            seen, _ = self.env.reset()
        return (
            self.row(seen),
            self.row(rewards),
            self.row(terminated),
            self.row(truncated),
            [{} for _ in self.agents],
        )

    def row(self, by_agent: dict[str, Any]) -> Row:
        return [by_agent[agent] for agent in self.agents]


def make_env(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Game:
    return Game(name)


def settings(spec: Spec, folder: str) -> dict[str, Any]:
    """The settings that differ from Sample Factory's defaults; batch sizes count steps of single agents."""
    return {
        "algo": "APPO",
        "env": spec.env,
        "experiment": "bench",
        "train_dir": folder,
        "device": "cpu",
        "num_workers": spec.workers,
        "num_envs_per_worker": GAMES,
        "rollout": CYCLES,
        "batch_size": spec.batch * zoo.SEATS[spec.env] // spec.minibatches,
        "num_batches_per_epoch": spec.minibatches,
        "num_epochs": spec.epochs,
        "use_rnn": False,
        "actor_critic_share_weights": False,
        "nonlinearity": "tanh",
        "normalize_input": False,
        "normalize_returns": False,
        "decorrelate_experience_max_seconds": 0,  # otherwise games begin with minutes of random moves
        "decorrelate_envs_on_one_worker": False,
        "learning_rate": 3e-4,
        "ppo_clip_ratio": 0.2,
        "exploration_loss_coeff": 0.01,
        "max_grad_norm": 0.5,
        "save_every_sec": 10**6,
        "log_to_file": False,
    }


def parsed(spec: Spec, folder: str) -> Any:
    given = [f"--{name}={value}" for name, value in settings(spec, folder).items()]
    given += ["--encoder_mlp_layers", *(str(size) for size in spec.hidden)]
    parser, _ = parse_sf_args(given)
    return parse_full_cfg(parser, given)


class Clock(AlgoObserver):
    """Records the time and the steps learned from at each iteration; after `seconds`, prints the result and ends the
    process. The first two iterations warm up."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.notes = spec, list[tuple[float, int]]()

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        if training_iteration_since_resume < 2:
            return
        self.notes.append((time.perf_counter(), sum(runner.env_steps.values())))
        if len(self.notes) > 2 and self.notes[-1][0] - self.notes[0][0] >= self.spec.seconds:
            say(self.figures(), self.spec)
            shutil.rmtree(runner.cfg.train_dir, ignore_errors=True)
            os._exit(0)  # a regular end hangs now and then; the caller ends the other processes

    def figures(self) -> dict[str, float]:
        (start, before), (end, after) = self.notes[0], self.notes[-1]
        made = (after - before) / zoo.SEATS[self.spec.env]
        return {"env_steps_per_s": made / (end - start), "env_steps": made, "seconds": end - start}


def train(cfg: Any, spec: Spec) -> None:
    """Trains until `Clock` ends the process."""
    _, runner = make_runner(cfg)
    runner.register_observer(Clock(spec))
    runner.init()
    runner.run()


def sample(cfg: Any, spec: Spec) -> None:
    """Measures the sampling loop alone; trajectories are dropped."""
    made = 0
    loop = SamplingLoop(cfg, obtain_env_info_in_a_separate_process(cfg))

    def played(trajectory: Any, buffers: list[Any], device: str) -> None:
        nonlocal made
        made += samples_per_trajectory(trajectory)
        loop.yield_trajectory_buffers(buffers, device)

    def wait() -> int:
        """Waits for as many steps as all games have in one trajectory, since these arrive in waves; returns joint
        steps."""
        before = made
        while made - before < spec.workers * GAMES * CYCLES * zoo.SEATS[spec.env]:
            time.sleep(0.002)
        return (made - before) // zoo.SEATS[spec.env]

    loop.init()
    loop.set_new_trajectory_callback(played)
    thread = Thread(target=loop.run)
    thread.start()
    loop.wait_until_ready()
    loop.start()
    figures = measure(wait, spec.seconds, warmup=2)
    loop.stop_sampling()
    thread.join()
    say(figures, spec)


def say(figures: dict[str, float], spec: Spec) -> None:
    notes = f"{spec.workers} workers x {GAMES} games; equal batch, but asynchronous: policies act while others learn"
    print_result(figures, ("sample-factory", "torch", "mpe2", "pettingzoo", "numpy"), notes)


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(1)
    register_env(spec.env, make_env)
    with tempfile.TemporaryDirectory() as folder:
        cfg = parsed(spec, folder)
        (train if spec.what == "train" else sample)(cfg, spec)


if __name__ == "__main__":
    main()
