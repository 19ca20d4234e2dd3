"""Config of a run's mirror."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from palestra.core.config import StrictModel


class MirrorConfig(StrictModel):
    """The store to which a run is mirrored while it trains. A text is its `url`."""

    url: str
    """Folder of runs in the store, as an fsspec URL: s3://bucket/runs, gs://bucket/runs, file:///mnt/shared/runs. The
    run's name is appended. Credentials come from the environment."""
    min_interval_s: float = Field(10.0, ge=0)
    """Seconds between two states sent, at least. A state is a checkpoint, or finished tasks of a population."""
    final_wait_s: float = Field(300.0, ge=0)
    """Seconds for which the end of the run repeats attempts to send the last state to a store that fails. After that
    the run exits with code 1."""


def _expand(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


OptionalMirror = Annotated[MirrorConfig | None, BeforeValidator(_expand)]
