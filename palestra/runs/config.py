"""Config keys shared by runs: of all kinds (`RunConfig`), and of policies (`PolicyRunConfig`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from palestra.core.config import RunName, StrictModel, check_policy_names
from palestra.core.types import TEAM, Seat
from palestra.runs.headline import algorithm_label
from palestra.runs.mirror.config import OptionalMirror
from palestra.runs.sinks.base import SinkConfigs


class EvalConfig(StrictModel):
    """A held-out evaluation, played before training, after training and optionally in between."""

    episodes: int = Field(100, ge=1, le=1_000_000)
    """Number of episodes: instances 0 to `episodes` - 1 of a text env; spread equally over the copies of a vectorised
    env."""
    every: int = Field(0, ge=0)
    """Steps between evaluations: training steps of language agents; joint steps of networks, rounded up to log
    intervals. 0: only before and after training."""
    seats: dict[Seat, str] = {}
    """Maps seats, or patterns of seats, to policies where the evaluation differs from training, for instance to play a
    fixed opponent. In a vectorised env, only policies that are not trained can be assigned."""


class RunConfig(StrictModel):
    """Base config of a run of any kind. A subclass adds what is trained in `env`, and for how long."""

    name: RunName = "run"
    """Name of the run's folder. If it exists, -2, -3, ... is appended."""
    seed: int = 0
    """Seed of everything random in the run: initial weights, instances, sampling."""
    env: dict[str, Any]
    """The env to train in: `type` and its options; for a vectorised env also `num_envs`, the number of parallel
    copies."""
    tags: list[str] = []
    """Words by which the run is found in the list of runs; a W&B run gets them too."""
    sinks: SinkConfigs = []
    """Trackers that receive the run's metrics, such as TensorBoard or Weights & Biases."""
    mirror: OptionalMirror = None
    """Object store that receives the run's checkpoints and logs while it trains, by URL (`s3://bucket/runs`) or with
    settings (`{url: s3://bucket/runs, final_wait_s: 600}`). Null: none."""

    @property
    def env_label(self) -> str:
        return str(self.env["type"])

    @field_validator("env", mode="before")
    @classmethod
    def _env_by_type(cls, env: Any) -> Any:
        if isinstance(env, str):
            raise ValueError(f"write a mapping, which has room for options: env: {{type: {env}}}")
        return env


class PolicyRunConfig(RunConfig):
    """Base config of a run that trains policies; a subclass narrows types and adds the length."""

    reserved_names: ClassVar[tuple[str, ...]] = (TEAM,)  # TEAM: metrics of all policies together

    policies: Mapping[str, Any]
    """The policies by name. A policy called `default` plays every seat that has no policy of its own."""
    seats: dict[Seat, str] = {}
    """Maps seats to policies where the names differ. Keys may contain the wildcards `*` and `?`; an exact name takes
    precedence over a pattern, an earlier pattern over a later one. A seat that matches no key gets the policy of its
    own name, else `default`, else the only policy."""
    algorithm: Any
    """Training algorithm."""
    evals: Mapping[str, EvalConfig] = {}
    """Held-out evaluations by name."""
    checkpoint_every: int | None
    """Steps between checkpoints, at most: training steps of language agents; joint steps of networks, rounded up to log
    intervals (null: a tenth of the run, at most 1,000,000). Ten minutes after the last checkpoint there is one in any
    case, unless the env cannot save its games. The newest two are kept."""
    keep_every: int = Field(0, ge=0)
    """Steps between checkpoints that are kept permanently: training steps of language agents; joint steps of networks,
    rounded up to log intervals. 0: only the last one of the run."""

    @property
    def algorithm_label(self) -> str:
        """Names of the training algorithms in order, for display."""
        return algorithm_label(self.model_dump(mode="json"))

    @field_validator("policies", mode="before")
    @classmethod
    def _policies_by_name(cls, policies: Any) -> Any:
        is_one = isinstance(policies, Mapping) and isinstance(policies.get("type"), str)
        if is_one or isinstance(policies, str | list | tuple):
            raise ValueError(
                "each policy has a name: write policies: {default: ...} for one that plays every seat, or {SEAT: ...}"
            )
        return policies

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, policies: Mapping[str, Any]) -> Mapping[str, Any]:
        check_policy_names(policies, *cls.reserved_names)
        return policies

    @model_validator(mode="after")
    def _policies_of_evals(self) -> Self:
        if unknown := set(chain.from_iterable(one.seats.values() for one in self.evals.values())) - set(self.policies):
            raise ValueError(f'an evaluation seats "{min(unknown)}", but policies: names {", ".join(self.policies)}')
        return self
