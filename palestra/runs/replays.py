"""Replays: games of evaluations in vectorised envs, as Parquet files: one row per joint step, with a picture or a text.

The schema's metadata says what all rows share: env, seats, players, names of actions and colours of seats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from palestra.core.types import Seat

METADATA_KEY = b"palestra"
SCHEMA = pa.schema(
    [
        ("episode", pa.int32()),  # index within the file
        ("seed", pa.int64()),
        ("picture", pa.binary()),  # PNG of the position in which the actions are taken; null if `text` shows it
        ("text", pa.string()),
        ("acts", pa.list_(pa.bool_())),  # by seat: whether it acts in this step
        ("actions", pa.list_(pa.list_(pa.float32()))),  # by seat; a discrete action is one number
        ("rewards", pa.list_(pa.float32())),  # of this step, by seat
    ]
)


@dataclass(kw_only=True)
class ReplayFrame:
    """One joint step: the position as a PNG or a text, which seats act, their actions and rewards."""

    picture: bytes | None
    text: str | None
    acts: Sequence[bool]
    actions: Sequence[Sequence[float]]
    rewards: Sequence[float] = ()


@dataclass
class GameReplay:
    """One game from its first step on. `end` is "terminated", "truncated", or "cut" if later steps were not recorded;
    `success` is None where the env does not define it, or where it differs between seats."""

    seed: int
    frames: list[ReplayFrame] = field(default_factory=list)
    end: str = ""
    success: bool | None = None


@dataclass(kw_only=True)
class ReplayHeader:
    """The env and players of all replays in a file. `players` names one for each seat; other fields are those of
    `VectorEnv`."""

    env: str
    seats: Sequence[Seat]
    players: Sequence[str]
    action_names: Sequence[str]
    seat_colours: Sequence[tuple[int, int, int]]


def replay_table(header: ReplayHeader, replays: Sequence[GameReplay]) -> pa.Table:
    """Returns replays as a table of `SCHEMA`."""
    rows = [
        {"episode": number, "seed": replay.seed, **vars(frame)}
        for number, replay in enumerate(replays)
        for frame in replay.frames
    ]
    ends = [{"end": replay.end, "success": replay.success} for replay in replays]
    facts = json.dumps(asdict(header) | {"episodes": ends})
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({METADATA_KEY: facts.encode()}))


def read_replays(path: Path) -> tuple[ReplayHeader, list[GameReplay]]:
    """Returns the replays of a file. Raises OSError or ValueError if it cannot be read as one."""
    table = pq.read_table(path)
    facts: dict[str, Any] = json.loads((table.schema.metadata or {})[METADATA_KEY])
    ends = facts.pop("episodes")
    replays = [GameReplay(0, [], **end) for end in ends]
    for row in table.to_pylist():
        replay = replays[row.pop("episode")]
        replay.seed = row.pop("seed")
        replay.frames.append(ReplayFrame(**row))
    return ReplayHeader(**facts), replays
