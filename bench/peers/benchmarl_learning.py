"""BenchMARL on a VMAS scenario, by its own experiment; evaluated like its own evaluations, in a callback."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch
from benchmarl.algorithms import MappoConfig, QmixConfig
from benchmarl.algorithms.common import AlgorithmConfig
from benchmarl.environments import VmasTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from peers.learning import CurveRecorder, LearningSpec, print_curve, read_learning_spec
from torchrl.envs.utils import ExplorationType, set_exploration_type


class Recording(Callback):
    """Records the curve after each batch."""

    recorder: CurveRecorder

    def on_train_end(self, training_td: torch.Tensor, group: str) -> None:
        self.recorder.record(self.experiment.total_frames)


def algorithm_of(spec: LearningSpec) -> AlgorithmConfig:
    """Returns the config of the algorithm."""
    if spec.algorithm == "qmix":
        return replace(QmixConfig.get_from_yaml(), mixing_embed_dim=spec.mixer_units)
    return replace(
        MappoConfig.get_from_yaml(),
        share_param_critic=True,
        clip_epsilon=spec.clip,
        entropy_coef=0.0,
        critic_coef=0.5,
        lmbda=spec.gae_lambda,
    )


def settings_of(spec: LearningSpec, folder: str) -> ExperimentConfig:
    """Returns the settings that differ from BenchMARL's defaults."""
    return replace(
        ExperimentConfig.get_from_yaml(),
        prefer_continuous_actions=False,
        gamma=spec.gamma,
        lr=spec.lr,
        adam_eps=spec.adam_eps,
        clip_grad_val=spec.max_grad_norm,
        polyak_tau=spec.tau,
        exploration_eps_init=spec.epsilon,
        exploration_eps_end=spec.epsilon_end,
        exploration_anneal_frames=int(spec.epsilon_share * spec.env_steps),
        max_n_frames=spec.env_steps,
        on_policy_collected_frames_per_batch=spec.batch,
        on_policy_n_envs_per_worker=spec.games,
        on_policy_n_minibatch_iters=spec.epochs,
        on_policy_minibatch_size=spec.batch // spec.minibatches,
        off_policy_collected_frames_per_batch=spec.batch,
        off_policy_n_envs_per_worker=spec.games,
        off_policy_n_optimizer_steps=spec.gradient_steps,
        off_policy_train_batch_size=spec.batch_size,
        off_policy_memory_size=spec.env_steps,
        evaluation_episodes=spec.eval_games,
        evaluation=False,  # the callback evaluates
        render=False,
        loggers=[],
        create_json=False,
        save_folder=folder,
    )


@torch.no_grad()
def play_return(experiment: Experiment, spec: LearningSpec) -> float:
    """Returns the mean return of an agent in one game of each copy, played greedily, or at random."""
    policy = None if spec.algorithm == "random" else experiment.policy
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        played = experiment.test_env.rollout(spec.horizon, policy, auto_cast_to_device=True, break_when_any_done=False)
    rewards = played["next", "agents", "reward"].squeeze(-1).mean(-1)  # [games, steps]
    ended = played["next", "done"].squeeze(-1).float()
    playing = torch.cumsum(ended, 1) - ended == 0  # the step that ends a game counts
    return (rewards * playing).sum(1).mean().item()


def main() -> None:
    spec = read_learning_spec()
    torch.set_num_threads(1)
    task = VmasTask[spec.scenario.upper()].get_from_yaml()
    task.config = spec.options | {"max_steps": spec.horizon}
    mlp = MlpConfig(num_cells=list(spec.hidden), layer_class=torch.nn.Linear, activation_class=torch.nn.Tanh)
    recording = Recording()
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(
            task=task,
            algorithm_config=algorithm_of(spec),
            model_config=mlp,
            critic_model_config=mlp,
            seed=spec.seed,
            config=settings_of(spec, folder),
            callbacks=[recording],
        )
        recorder = CurveRecorder(spec, lambda: play_return(experiment, spec))
        recording.recorder = recorder
        recorder.record(0)
        if spec.algorithm != "random":
            experiment.run()
    print_curve(recorder.points, ("benchmarl", "torchrl", "torch", "vmas"))


if __name__ == "__main__":
    main()
