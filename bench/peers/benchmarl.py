"""BenchMARL on VMAS's simple_spread, which steps all games as tensors: IPPO with parameters shared by all agents.

`train` counts whole iterations of its experiment, without evaluation and logging; `sample` counts the batches of the
experiment's collector."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import vmas
from benchmarl.algorithms import IppoConfig
from benchmarl.environments import VmasTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from peers.timing import CYCLES, SEATS, Spec, measure, print_result, read_spec


class Enough(Exception):
    """Raised in a callback to end the experiment."""


class Clock(Callback):
    """Counts the joint steps of whole iterations after the first, which warms up; ends the experiment after
    `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.ends, self.made = seconds, list[float](), 0

    def on_batch_collected(self, batch: torch.Tensor) -> None:
        if self.ends:
            self.made += batch.numel()

    def on_train_end(self, training_td: torch.Tensor, group: str) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > 2 and self.ends[-1] - self.ends[0] >= self.seconds:
            raise Enough

    def figures(self) -> dict[str, float]:
        spent = self.ends[-1] - self.ends[0]
        return {"env_steps_per_s": self.made / spent, "env_steps": self.made, "seconds": spent}


def experiment(spec: Spec, folder: str, clock: Clock) -> Experiment:
    task = VmasTask.SIMPLE_SPREAD.get_from_yaml()
    task.config["max_steps"] = CYCLES
    mlp = MlpConfig(num_cells=list(spec.hidden), layer_class=torch.nn.Linear, activation_class=torch.nn.Tanh)
    config = replace(
        ExperimentConfig.get_from_yaml(),
        prefer_continuous_actions=False,
        on_policy_collected_frames_per_batch=spec.batch,
        on_policy_n_envs_per_worker=spec.games,
        on_policy_n_minibatch_iters=spec.epochs,
        on_policy_minibatch_size=spec.batch // spec.minibatches,
        max_n_frames=10**12,
        lr=3e-4,
        clip_grad_val=0.5,
        evaluation=False,
        render=False,
        loggers=[],
        create_json=False,
        save_folder=folder,
    )
    return Experiment(
        task=task,
        algorithm_config=replace(IppoConfig.get_from_yaml(), entropy_coef=0.01, lmbda=0.95, share_param_critic=True),
        model_config=mlp,
        critic_model_config=mlp,
        seed=0,
        config=config,
        callbacks=[clock],
    )


def random_play(spec: Spec) -> Callable[[], int]:
    """VMAS alone: a function that plays random moves in every game for one game's length and returns the joint
    steps."""
    env = vmas.make_env(
        "simple_spread", num_envs=spec.games, device="cpu", continuous_actions=False, seed=0, n_agents=SEATS
    )

    def advance() -> int:
        env.reset()
        for _ in range(CYCLES):
            env.step([env.get_random_action(agent) for agent in env.agents])
        return CYCLES * spec.games

    return advance


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(spec.seconds)
        if spec.what == "random":
            figures = measure(random_play(spec), spec.seconds)
        elif spec.what == "sample":
            batches = iter(experiment(spec, folder, clock).collector)
            figures = measure(lambda: next(batches).numel(), spec.seconds)
        else:
            try:
                experiment(spec, folder, clock).run()
            except Enough:
                figures = clock.figures()
    notes = "own env VMAS simple_spread on tensors, equal batch, one thread"
    print_result(figures, ("benchmarl", "torchrl", "vmas", "torch"), notes)


if __name__ == "__main__":
    main()
