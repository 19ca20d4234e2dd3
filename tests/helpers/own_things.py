"""One of each thing that a user may add from outside the package. The tests copy this file to a folder of its own."""

import numpy as np
import torch

from palestra.core.losses import policy_gradient_loss
from palestra.core.types import Step
from palestra.envs import Env, VectorEnv
from palestra.envs.vector_base import Discrete, empty_step
from palestra.runs.sinks.base import OwnSinkConfig
from palestra.text.algorithms.grpo import GRPO
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner


class Echo(VectorEnv):
    """Each of two seats sees one of four numbers, and is paid 1 for saying it. A game is one step."""

    name = "echo"
    seats = ("left", "right")

    def __init__(self, num_envs: int = 32) -> None:
        self.num_envs = num_envs
        self.observation_shapes = ((4,), (4,))
        self.action_spaces = (Discrete(4), Discrete(4))
        self.vector_step = empty_step(num_envs, 2, (4,))

    def reset(self, seeds):
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.vector_step.rewards[:] = 0
        self.vector_step.terminated[:] = False
        return self._deal()

    def step(self, actions):
        self.vector_step.final_obs[:] = self.vector_step.obs
        self.vector_step.rewards[:] = actions == self.numbers
        self.vector_step.terminated[:] = True
        return self._deal()

    def _deal(self):
        self.numbers = np.stack([rng.integers(4, size=2) for rng in self.rngs])
        self.vector_step.obs[:] = np.eye(4, dtype=np.float32)[self.numbers]
        return self.vector_step


class Letters(Env):
    """A language agent is paid 1 for an answer that does not begin with h, as those of the tiny base do. A game is one
    answer."""

    name = "letters"
    seats = ("writer",)
    roles = {"writer": "write"}

    def reset(self, seed: int) -> Step:
        return Step({"writer": f"game {seed % 1000}"})

    def step(self, actions):
        is_other = not actions["writer"].startswith("h")
        return Step({}, team_reward=float(is_other), info={"success": is_other})


class Reinforce(AlgorithmConfig):
    """REINFORCE for games of one step: each action is weighted by its reward minus the mean reward."""

    type: str = "own_things:Reinforce"
    entropy_coef: float = 0.01

    def learner_class(self):
        return ReinforceLearner


class ReinforceLearner(NetLearner):
    def __init__(self, config, spec):
        super().__init__(spec)
        self.config = config

    def update(self, batch, progress):
        metrics = {}
        for stack in self.stacks:
            outputs, _ = stack.net.unroll(stack.observations(batch.obs)[:, :-1])
            logp, entropy = stack.head.evaluate_actions(outputs, stack.actions(batch), None)
            rewards = stack.rows(batch.rewards)
            advantages = rewards - rewards.mean((1, 2), keepdim=True)
            losses = -(advantages * logp + self.config.entropy_coef * entropy).mean((1, 2))
            stack.optimizer.step(losses.sum(), progress)
            stack.version += 1
            for name, loss in zip(stack.seat_mapping.names, losses.tolist(), strict=True):
                metrics[name] = {"policy_loss": loss, "reward_of_rollout": float(rewards.mean())}
        return metrics


class UnclippedPPO(PPO):
    """PPO with the plain policy gradient as its loss."""

    type: str = "own_things:UnclippedPPO"
    epochs: int = 1

    def loss(self, rows):
        return policy_gradient_loss(rows)


class Median(GRPO):
    """GRPO whose advantages are against the median of a group."""

    type: str = "own_things:Median"

    def advantages(self, values, group):
        return (np.array(values) - np.median(values)).tolist()


class Layers(torch.nn.Module):
    """Two layers with an activation function that palestra does not have."""

    def __init__(self, observation_shape: tuple[int, ...], *, units: int = 32) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(observation_shape[0], units), torch.nn.GELU(), torch.nn.Linear(units, units)
        )

    def forward(self, obs):
        return torch.nn.functional.silu(self.layers(obs))


class Memory(torch.nn.Module):
    """An LSTM, whose recurrent state is its hidden and its cell state."""

    def __init__(self, observation_shape: tuple[int, ...], *, units: int = 16) -> None:
        super().__init__()
        self.state_size = 2 * units
        self.cell = torch.nn.LSTMCell(observation_shape[0], units)

    def forward(self, obs, state):
        hidden, cell = self.cell(obs, state.chunk(2, -1))
        return hidden, torch.cat([hidden, cell], -1)


class Flat(torch.nn.Linear):
    """A network that forgets the rows."""

    def __init__(self, observation_shape: tuple[int, ...]) -> None:
        super().__init__(observation_shape[0], 8)

    def forward(self, obs):
        return super().forward(obs).flatten()


class Double(Layers):
    """A network of other numbers."""

    def forward(self, obs):
        return super().forward(obs).double()


class Noisy(Layers):
    """A network with chance in it."""

    def forward(self, obs):
        return super().forward(obs) + torch.randn(1)


class Centred(Layers):
    """A network in which each row depends on all rows."""

    def forward(self, obs):
        features = super().forward(obs)
        return features - features.mean(0)


class Normed(Layers):
    """A network with statistics that are no parameters."""

    def __init__(self, observation_shape: tuple[int, ...]) -> None:
        super().__init__(observation_shape)
        self.layers.append(torch.nn.BatchNorm1d(32))


class SignDescent(torch.optim.Optimizer):
    """Signed momentum, as in Lion (Chen et al., 2023)."""

    def __init__(self, params, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, self.state[parameter], group)

    def _change(self, parameter, state, group):
        state["steps"] = state.get("steps", 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - group["beta"])
        parameter.sub_(momentum.sign(), alpha=group["lr"])


class LinesConfig(OwnSinkConfig):
    """A sink that writes one metric of each step to a file."""

    type: str = "own_things:LinesConfig"
    metric: str

    def open(self, run, folder):
        return Lines(run / "lines.txt", self.metric)


class Lines:
    def __init__(self, path, metric: str) -> None:
        self.path = path
        self.metric = metric

    def write(self, step, metrics):
        if self.metric in metrics:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{step} {metrics[self.metric]}\n")

    def flush(self):
        pass

    def close(self):
        pass
