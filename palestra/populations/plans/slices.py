"""Training slices, which self-play, leagues and population-based training share.

A learner trains slice after slice; each slice is a `TrainTask` that produces a member.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from palestra.core.config import StrictModel
from palestra.populations.population import Player, Population
from palestra.populations.tasks import Opponents, TrainTask


class SliceConfig(StrictModel):
    """Config keys of plans whose learners train slice after slice."""

    slices: int = Field(ge=1)
    """Slices that each learner trains."""
    env_steps: int = Field(20_000, ge=1)
    """Env steps of each slice."""
    train_steps: int = Field(0, ge=0)
    """Training steps of each slice, for language agents; replaces `env_steps` if above 0."""
    win_rate_decay: float = Field(0.99, gt=0, le=1)
    """Factor by which a pair's earlier results decay with each game; 1: all games count equally."""


def slice_task(
    config: SliceConfig,
    population: Population,
    member: str,
    opponents: Opponents,
    *,
    player: Player,
    start: str | None,
    **more: Any,
) -> TrainTask:
    """Returns the task of the slice of a player that produces `member`, against `opponents`.

    It starts from the weights of member `start` ("" or None: new weights). `more` are further fields of the task.
    """
    return TrainTask(
        f"train/{member}",
        player=player,
        opponents=opponents,
        start=start or None,
        env_steps=None if config.train_steps else config.env_steps,
        train_steps=config.train_steps or None,
        members=population.names_with_files([*opponents.names(), start]),
        output_member=member,
        **more,
    )
