import numpy as np

from palestra.envs import VectorEnv
from palestra.envs.vector_base import Discrete, VectorStep, empty_step


class MyEnv(VectorEnv):
    """The first seat sees a number, the second only what the first said; both are paid if the second says it."""

    name = "my_env"
    seats = ("first", "second")

    def __init__(self, num_envs: int = 64, *, numbers: int = 4, rounds: int = 3) -> None:
        self.num_envs, self.numbers, self.rounds = num_envs, numbers, rounds
        self.observation_shapes = ((numbers,), (numbers,))
        self.action_spaces = (Discrete(numbers), Discrete(numbers))
        self.vector_step = empty_step(num_envs, 2, (numbers,))  # arrays [num_envs, seat, ...], reused in every step

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.round = np.zeros(self.num_envs, int)
        self.vector_step.rewards[:] = 0
        self.vector_step.terminated[:] = False
        return self._begin_round()

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = self.vector_step
        frame.rewards[:] = 0
        frame.terminated[:] = False
        if self.said is None:
            self.said = actions[:, 0].copy()
            return self._show(1, self.said)
        frame.rewards[:] = (actions[:, 1] == self.number)[:, None]
        self.round += 1
        frame.terminated[:] = self.round == self.rounds
        frame.final_obs[:] = 0  # the last observation of the games that end; `obs` is then the next game's first
        self.round[frame.terminated] = 0
        return self._begin_round()

    def _begin_round(self) -> VectorStep:
        self.number = np.array([rng.integers(self.numbers) for rng in self.rngs])
        self.said = None
        return self._show(0, self.number)

    def _show(self, seat: int, numbers: np.ndarray) -> VectorStep:
        """Returns the step in which only `seat` acts, and sees its game's number."""
        self.vector_step.obs[:] = 0
        self.vector_step.obs[np.arange(self.num_envs), seat, numbers] = 1
        self.vector_step.agent_mask[:] = np.arange(2) == seat
        return self.vector_step
