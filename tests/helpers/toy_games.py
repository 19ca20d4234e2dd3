"""Single-game envs that several tests play in this process and in others, which must be able to import them."""

import os
import signal
import time

import numpy as np

from palestra.envs.batch.sync_vector import SingleStep, VectorEnvSpec
from palestra.envs.vector_base import Discrete


class Counting:
    """Two seats observe seed and time, the first also the sum of all actions; each is paid its action. Seat "long"
    terminates after 3 steps; a game ends after 5 to 9 steps, and is truncated if their number is odd. Action 3 is only
    legal at even times."""

    spec = VectorEnvSpec(
        ("wide", "long"),
        ((3,), (2,)),
        (Discrete(4), Discrete(3)),
        state_size=1,
        has_action_mask=True,
        reports_success=True,
        has_seat_terminated=True,
    )

    def reset(self, seed: int) -> SingleStep:
        self.seed, self.time, self.sum = seed, 0, 0
        self.limit = 5 + seed % 5
        return self.moment()

    def step(self, actions: np.ndarray) -> SingleStep:
        self.time += 1
        self.sum += int(actions.sum())
        moment = self.moment()
        moment.rewards = [float(actions[0]), float(actions[1]) * (self.time <= 3)]
        over = self.time == self.limit
        moment.terminated, moment.truncated = over and self.limit % 2 == 0, over and self.limit % 2 == 1
        moment.success = moment.terminated and self.sum % 2 == 0
        moment.seat_terminated = [moment.terminated, self.time >= 3]
        return moment

    def moment(self) -> SingleStep:
        views = [np.array([self.seed % 2**20, self.time, self.sum]), np.array([self.seed % 2**20, self.time])]
        legal = [np.array([1, 1, 1, self.time % 2 == 0], bool), np.ones(3, bool)]
        return SingleStep(views, [True, self.time < 3], action_mask=legal, state=np.array([self.sum]))

    def close(self) -> None:
        pass


class Falls(Counting):
    """Counting that fails at a given time of any game whose seed is divisible by `every`."""

    def __init__(self, how: str, at: int = 0, every: int = 1) -> None:
        self.how, self.at, self.every = how, at, every

    def moment(self) -> SingleStep:
        if self.time == self.at and self.seed % self.every == 0:
            if self.how == "error":
                raise RuntimeError("the fifth wheel came off")
            if self.how == "sleep":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().moment()


class Unmakable(Counting):
    def __init__(self) -> None:
        raise RuntimeError("no such wheel")
