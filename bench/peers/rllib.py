"""RLlib on PettingZoo envs: PPO, one policy for all seats, two env runners with 8 games each.

`sample` calls the function that its PPO calls between updates; `random` uses the same env runners with random actions.
`train` counts whole iterations of `Algorithm.train`.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from peers import zoo
from peers.timing import Spec, measure, print_result, read_spec
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env

GAMES = 8  # per env runner


def make_env(settings: dict[str, Any]) -> ParallelPettingZooEnv:
    return ParallelPettingZooEnv(zoo.make(settings["env"], floats=True))


def config(spec: Spec) -> PPOConfig:
    net = DefaultModelConfig(fcnet_hiddens=list(spec.hidden), fcnet_activation="tanh", vf_share_layers=False)
    return (
        PPOConfig()
        .environment("game", env_config={"env": spec.env})
        .env_runners(num_env_runners=spec.workers, num_envs_per_env_runner=GAMES)
        .learners(num_learners=0)  # in the main process
        .multi_agent(policies={"agent"}, policy_mapping_fn=lambda *_, **__: "agent")
        .rl_module(model_config=net)
        .training(
            train_batch_size_per_learner=spec.batch,
            num_epochs=spec.epochs,
            minibatch_size=spec.batch * zoo.SEATS[spec.env] // spec.minibatches,
            lr=3e-4,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            entropy_coeff=0.01,
            grad_clip=0.5,
            use_kl_loss=False,
        )
    )


def main() -> None:
    spec = read_spec()
    ray.init(num_cpus=spec.workers + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    register_env("game", make_env)
    algorithm = config(spec).build_algo()
    counted = 0

    def train() -> int:
        nonlocal counted
        before, counted = counted, int(algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"])
        return counted - before

    def sample() -> int:
        episodes, _ = synchronous_parallel_sample(
            worker_set=algorithm.env_runner_group,
            max_env_steps=spec.batch,
            concat=False,
            random_actions=spec.what == "random",
            _uses_new_env_runners=True,
            _return_metrics=True,
        )
        return sum(len(episode) for part in episodes for episode in (part if isinstance(part, list) else [part]))

    figures = measure(train if spec.what == "train" else sample, spec.seconds)
    algorithm.stop()
    ray.shutdown()
    notes = f"{spec.workers} env runners x {GAMES} games; equal batch"
    print_result(figures, ("ray", "torch", "mpe2", "pettingzoo", "numpy"), notes)


if __name__ == "__main__":
    main()
