"""Episode sources: episodes played now, in one env or in several drawn by weight and success.

The env and the instance of an episode are a function of the run's seed, the episode's number, and the success measured
so far.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.core.types import AlgorithmState, Episode, Metrics, Seat
from palestra.text.policies.base import Policy
from palestra.text.rollouts.instance_pool import POOL_KEY, InstancePool
from palestra.text.rollouts.metrics import episode_metrics
from palestra.text.rollouts.reward_weights import RewardWeights, seen_terms, weights_at
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

Curriculum = Literal["fixed", "frontier"]
EpisodeCallback = Callable[[Episode], None] | None
SUCCESS_KEY = "success"  # key in `state`: the running success of each env
ATTEMPT_STRIDE = 2**28  # attempt a at episode n (refill.py) has number n + a * ATTEMPT_STRIDE, below 2**32
STAGE_START_KEY = "stage_start"  # key in `state`: numbers of the first step and the first episode of the stage
TERMS_CHECKED_KEY = "reward_terms_checked"  # key in `state`: true after a step in which rewards had the named terms
STATE_KEYS = (SUCCESS_KEY, POOL_KEY, STAGE_START_KEY)  # keys in `state` that decide what is played

# Terms that learned_reward.py adds after play, when `reward_weights` has been applied:
LEARNED_TERM = "reward_model"  # name of the reward model's part of a reward
ENV_TERM = "env"  # name of the env's part, if the env names none itself


class EpisodeSource(Protocol):
    """Provides the episodes of a step by number, and updates `state` from the results."""

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers, in order; calls `on_episode` with each one when it ends."""
        ...

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        """Updates `state` from the results of all episodes of a step, replaced ones included; returns metrics."""
        ...


@dataclass
class EnvSource:
    """Episodes played on demand, each in one of `runners`. `seats` returns the current policy of each seat; `env_seats`
    lists the seats of an env (default: all).

    Envs are drawn by their `weights` (default: equal); `curriculum: frontier` multiplies these by s(1 - s), where s is
    the env's running success: largest at s = 1/2, as in sampling for learnability (Rutherford et al., 2024, eq. 1).
    `floor` is the share drawn by weight alone. The running success is an exponential average over about 1 / `rate`
    steps. Instances are new ones, or come from `pool`. `reward_weights` weigh the named terms of rewards and may depend
    on the step of the run; a step of this stage has `episodes` episodes. `failed_reward` is that of `EpisodeSpec`.
    """

    runners: Mapping[str, EpisodeRunner]
    seats: Callable[[], dict[Seat, Policy]]
    seed: int
    weights: Mapping[str, float] = field(default_factory=dict)
    curriculum: Curriculum = "fixed"
    floor: float = 0.1
    rate: float = 0.2
    env_seats: Mapping[str, Sequence[Seat]] = field(default_factory=dict)
    pool: InstancePool | None = None
    reward_weights: RewardWeights = field(default_factory=dict)
    episodes: int = 1
    failed_reward: float | None = None

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers, in order; all of one step have the same policies."""
        specs = self.episode_specs(numbers, state)
        own: dict[str, list[EpisodeSpec]] = {name: [] for name in self.runners}
        for name, spec in specs:
            own[name].append(spec)
        played = await asyncio.gather(
            *(self.runners[name].play_all(part, branching, on_episode) for name, part in own.items())
        )
        each = {name: iter(episodes) for name, episodes in zip(own, played, strict=True)}
        return [next(each[name]) for name, _ in specs]

    def episode_specs(self, numbers: Sequence[int], state: AlgorithmState) -> list[tuple[str, EpisodeSpec]]:
        """Returns the episode specs of these numbers, each with the name of its runner. Runs of different seeds have
        different instances."""
        seats = self.seats()
        shares = self.env_probabilities(state)
        pools = {name: np.cumsum(self.pool.probabilities(name, state)) for name in self.runners} if self.pool else {}
        start = state.get(STAGE_START_KEY, (0, 0))
        return [self._episode_spec(number, self._step(number, *start), seats, shares, pools) for number in numbers]

    def _step(self, number: int, first_step: int, first_episode: int) -> int:
        """Returns the step of the run that an episode belongs to; the stage starts at `first_step`."""
        return first_step + (number % ATTEMPT_STRIDE - first_episode) // self.episodes

    def _episode_spec(
        self,
        number: int,
        step: int,
        seats: Mapping[Seat, Policy],
        shares: Mapping[str, float],
        pools: Mapping[str, np.ndarray],
    ) -> tuple[str, EpisodeSpec]:
        """Returns one episode spec and the name of its runner; `pools` are cumulative probabilities of instances."""
        rng = random.Random(derive_seed(self.seed, "env", number))
        name = rng.choices(list(shares), list(shares.values()))[0]
        own = {seat: seats[seat] for seat in self.env_seats.get(name, seats)}
        index = int(np.searchsorted(pools[name][:-1], rng.random(), side="right")) if pools else number
        seed = derive_seed(self.seed, "play", number)
        weights = weights_at(self.reward_weights, step)
        return name, EpisodeSpec(self._first_instance + index, own, seed, weights, self.failed_reward)

    @property
    def _first_instance(self) -> int:
        return self.seed % 2**31 << 32

    def env_probabilities(self, state: AlgorithmState) -> dict[str, float]:
        """Returns the current probability of each env."""
        plain = _normal({name: self.weights.get(name, 1.0) for name in self.runners})
        if self.curriculum == "fixed":
            return plain
        measured = state.get(SUCCESS_KEY, {})
        success = {name: measured.get(name, 0.5) for name in self.runners}
        products = {name: plain[name] * (s * (1 - s)) for name, s in success.items()}
        aimed = _normal(products) if any(products.values()) else plain  # plain: each env always or never succeeds
        return {name: self.floor * plain[name] + (1 - self.floor) * aimed[name] for name in self.runners}

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        """Updates the running success of each env that was played, and of the instances of its pool. With several envs,
        returns each one's success in this step, if it reports one, and its probability in the next; with a pool, its
        metrics. Raises ValueError if `reward_weights` names a term that no reward of the run's first step has."""
        self._check_terms(episodes, state)
        pooled = self._observe_pools(episodes, state)
        return pooled if len(self.runners) == 1 else pooled | self._observe_envs(episodes, state)

    def _check_terms(self, episodes: Sequence[Episode], state: AlgorithmState) -> None:
        """Checks the names of `reward_weights` in the first step of a run that played episodes: later ones, after a
        resume or in another stage, may lack a term that an env names only where it applies."""
        valid = [episode for episode in episodes if episode.error is None]
        if not self.reward_weights or not valid or state.get(TERMS_CHECKED_KEY):
            return
        terms = seen_terms(valid)
        terms -= {LEARNED_TERM, ENV_TERM} if LEARNED_TERM in terms else set()
        if unknown := self.reward_weights.keys() - terms:
            raise ValueError(
                f"reward_weights names {', '.join(sorted(unknown))}, and no reward of the first step has such a term; "
                f"it has {', '.join(sorted(terms)) or 'no named terms'}. Correct the name, or let the env name the "
                "term also where it is 0"
            )
        state[TERMS_CHECKED_KEY] = True

    def _observe_pools(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        """Updates the running success of the pools' instances; returns metrics, by env if there are several."""
        metrics: Metrics = {}
        for name in self.runners if self.pool else ():
            assert self.pool is not None
            outcomes = [(episode.seed - self._first_instance, episode) for episode in episodes if episode.env == name]
            prefix = f"{name}." if len(self.runners) > 1 else ""
            metrics |= {f"{prefix}{k}": v for k, v in self.pool.observe(name, outcomes, state).items()}
        return metrics

    def _observe_envs(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        metrics: Metrics = {}
        running = state.setdefault(SUCCESS_KEY, {})
        for name in self.runners:
            own = [episode for episode in episodes if episode.env == name and episode.error is None]
            success = self._env_success(name, own, is_known=name in running) if own else None
            if success is not None:
                running[name] = running.get(name, success) + self.rate * (success - running.get(name, success))
                metrics[f"{name}.success"] = success
        return metrics | {f"{name}.share": share for name, share in self.env_probabilities(state).items()}

    def _env_success(self, name: str, own: Sequence[Episode], *, is_known: bool) -> float | None:
        """Returns the success rate of the valid episodes of an env; None if it reports none. `is_known`: it reported
        one before, so that trajectories without one were cut off. Raises ValueError if `frontier` needs the rate."""
        metrics = episode_metrics(own)
        if is_known or "success" in metrics:
            return metrics.get("success", 0.0)
        if self.curriculum == "frontier" and metrics.get("context_full_fraction", 0.0) < 1:
            raise ValueError(
                f'mix: curriculum: frontier needs the success of episodes, and env "{name}" reports none of all seats '
                'in the info of its last step: add info={"success": ...} to the env, or set mix.curriculum: fixed'
            )
        return None


def _normal(values: Mapping[str, float]) -> dict[str, float]:
    """Returns values divided by their sum; equal shares if all are 0."""
    total = sum(values.values())
    return {name: value / total if total else 1 / len(values) for name, value in values.items()}
