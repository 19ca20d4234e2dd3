"""A pool of instances that training returns to, drawn by their measured success: a prompt buffer.

Without a pool every episode has a new instance. With a pool, instances are played again: all equally often, or most
often those where the policies succeed in about half of the attempts. On an instance that always or never succeeds,
siblings have equal rewards and no advantages (sampling for learnability, Rutherford et al., 2024, eq. 1; Tzannetos et
al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from palestra.core.config import StrictModel
from palestra.core.types import AlgorithmState, Episode, Metrics

POOL_KEY = "instance_pool"  # key in `state`: by env, the running success of each instance that was played
UNPLAYED_SUCCESS = 0.5  # assumed before an instance is played; it gives the largest learnability
# an instance counts as solved above, as unsolved below this running success
SOLVED = 0.9
UNSOLVED = 0.1


class InstancePool(StrictModel):
    """The instances that training draws from: the first `size` of each env."""

    size: int = Field(ge=1, le=100_000)
    """Number of instances."""
    sampling: Literal["uniform", "learnability"] = "learnability"
    """`uniform`: all instances alike. `learnability`: in proportion to p(1 - p), where p is an instance's running
    success."""
    floor: float = Field(0.1, ge=0, le=1)
    """With `learnability`, the share of draws that are uniform, from 0 to 1, so that unsolved instances are tried
    again."""
    rate: float = Field(0.5, gt=0, le=1)
    """Step size of an instance's running success, which starts at 0.5; it averages over about 1 / `rate` visits."""

    def probabilities(self, env: str, state: AlgorithmState) -> npt.NDArray[np.float64]:
        """Returns the probability of each instance of `env` [size]."""
        uniform = np.full(self.size, 1 / self.size)
        learnability = _learnability(self._success(state.get(POOL_KEY, {}).get(env, {})))
        if self.sampling == "uniform" or not learnability.sum():
            return uniform
        return self.floor * uniform + (1 - self.floor) * learnability / learnability.sum()

    def observe(self, env: str, outcomes: Sequence[tuple[int, Episode]], state: AlgorithmState) -> Metrics:
        """Updates the running success of the instances of `env` from the episodes played on them; returns metrics.

        `pool_seen` is the share of instances that were played, `pool_solved` and `pool_unsolved` the shares whose
        running success is above 0.9 and below 0.1, `pool_learnability` the mean of p(1 - p) (at most 0.25). Raises
        ValueError if the env reports no success.
        """
        known: dict[str, float] = state.setdefault(POOL_KEY, {}).setdefault(env, {})
        for index, episode in outcomes:
            found = sibling_success(episode)
            if found is not None:
                before = known.get(str(index), UNPLAYED_SUCCESS)
                known[str(index)] = before + self.rate * (found - before)
        if self.sampling == "learnability" and not known and any(e.error is None for _, e in outcomes):
            raise ValueError(
                f'instance_pool: sampling: learnability needs the success of episodes, and env "{env}" reports none of '
                'all seats in the info of its last step: add info={"success": ...} to the env, or set sampling: uniform'
            )
        success = self._success(known)
        return {
            "pool_seen": len(known) / self.size,
            "pool_solved": float(np.mean(success > SOLVED)),
            "pool_unsolved": float(np.mean(success < UNSOLVED)),
            "pool_learnability": float(_learnability(success).mean()),
        }

    def _success(self, known: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        """Returns the running success of each instance [size]."""
        success = np.full(self.size, UNPLAYED_SUCCESS)
        if known:
            success[np.array([int(index) for index in known])] = list(known.values())
        return success


def sibling_success(episode: Episode) -> float | None:
    """Returns the share of the episode's finished trajectories that succeeded, siblings that play did not continue from
    included; None if it failed or its env reports no success."""
    ends = [node.success for node in episode.leaves() if node.success is not None]
    return float(np.mean(ends)) if ends and episode.error is None else None


def _learnability(success: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return success * (1 - success)
