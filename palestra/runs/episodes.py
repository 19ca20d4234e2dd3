"""Episodes as Parquet files: one row per (episode, node, seat), readable by any tool and restored without loss.

A row holds what one seat observed and answered in one joint step. A seat that only received something in that step (a
reward at the end of a turn-based game) has a row without an answer; a failed episode without nodes has one row without
a node. Siblings may share an answer: their rows have the same `draw`, and reading them restores one shared object.
Observations and info are stored as JSON (core/plain_values.py): arrays and tuples come back as lists.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from palestra.core.chat import Chat
from palestra.core.plain_values import plain_value
from palestra.core.types import Answer, Episode, Node, SamplingMask, Seat

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("episode", pa.int32()),  # index within the file
        ("env", pa.string()),
        ("seed", pa.int64()),
        ("seats", pa.string()),  # JSON: seat -> policy
        ("error", pa.string()),
        ("traceback", pa.string()),  # of the error
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("depth", pa.int32()),
        ("seat", pa.string()),
        ("policy", pa.string()),
        ("chosen", pa.bool_()),
        ("done", pa.bool_()),
        ("truncated", pa.bool_()),
        ("observation", pa.string()),  # the text, or JSON where `observation_json`
        ("observation_json", pa.bool_()),
        ("answer", pa.string()),
        ("stop", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("temperature", pa.float64()),
        ("reward", pa.float64()),  # of the seat
        ("team_reward", pa.float64()),
        ("advantage", pa.float64()),
        ("success", pa.bool_()),  # copied from `info`, for queries
        ("invalid", pa.bool_()),
        ("info", pa.string()),  # JSON
        ("draw", pa.int32()),  # index among the seat's answers to this observation
        ("picture", pa.string()),  # kind of picture of the observations (Env.picture); null for text
        ("versions", pa.list_(pa.int32())),  # of the policy, by token; null if `policy` names the version of all
        ("mask_ids", pa.list_(pa.int32())),  # tokens that top-k and top-p kept, token after token; null if not recorded
        ("mask_counts", pa.list_(pa.int32())),  # their numbers, by token
        ("experts", pa.list_(pa.int32())),  # of a sampler's routers, token after token; null if not recorded
        ("experts_shape", pa.list_(pa.int32())),  # tokens, layers, experts of a token
        ("thought", pa.string()),  # of a model that thinks before it answers; null if there is none
        ("node_error", pa.string()),  # of a lost branch, or of one that ended with `failed_reward`
    ]
)
OPTIONAL_COLUMNS = (
    "draw",
    "traceback",
    "picture",
    "versions",
    "mask_ids",
    "mask_counts",
    "experts",
    "experts_shape",
    "thought",
    "node_error",
)
NODE_COLUMNS = ("parent", "depth", "chosen", "done", "truncated", "team_reward")  # fields of `Node`


def to_table(step: int, episodes: list[Episode], *, first: int = 0) -> pa.Table:
    """Returns the rows of `SCHEMA` of episodes, numbered from `first` on. Raises ValueError if a
    value cannot be stored as JSON."""
    rows = [{"step": step, "episode": i} | row for i, episode in enumerate(episodes, first) for row in _rows(episode)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def read_episodes(path: str | Path) -> pa.Table:
    """Returns the table of an episode file, for queries. Raises ValueError if the file is not one."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"cannot read episodes from {path}: {error}") from error
    for name in set(OPTIONAL_COLUMNS) - set(table.schema.names):
        table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    if sorted(table.schema.names) != sorted(SCHEMA.names):
        raise ValueError(
            f"{path} is a Parquet file, but not of palestra episodes: its columns are {table.schema.names}"
        )
    return table.select(SCHEMA.names)


def load_episodes(path: str | Path) -> list[Episode]:
    """Returns the episodes of a file as they were written: trees, and token arrays (`prompt_ids`, `token_ids` int32,
    `logprobs` float32, 1-D). Raises ValueError if the file is not one, or rows of an episode are missing or belong to
    another one of the same number."""
    episodes: dict[tuple[int, int], Episode] = {}
    shared: dict[tuple[tuple[int, int], int | None, Seat, int], Answer] = {}
    last: tuple[int, int] | None = None
    for row in _read_rows(read_episodes(path)):
        number = (row["step"], row["episode"])
        if number in episodes and number != last:
            raise ValueError(
                f"{path} has episode {row['episode']} twice: number the episodes of joined files one after the other, "
                "or keep the files apart"
            )
        last = number
        if number not in episodes:
            seats = json.loads(row["seats"])
            failure = {name: row[name] for name in ("error", "traceback")}
            episodes[number] = Episode(row["env"], row["seed"], seats, **failure, picture=row["picture"] or "")
        if row["node"] is not None:
            node = _add(episodes[number], row, path)
            if row["draw"] is not None:
                key = (number, node.parent, row["seat"], row["draw"])
                node.answers[row["seat"]] = shared.setdefault(key, node.answers[row["seat"]])
    return list(episodes.values())


def _rows(episode: Episode) -> Iterator[dict[str, Any]]:
    head: dict[str, Any] = {"env": episode.env, "seed": episode.seed, "seats": _json(episode.seats)}
    head |= {"error": episode.error, "traceback": episode.traceback, "picture": episode.picture or None}
    if not episode.nodes:
        yield head
    draws = _draws(episode)
    for node in episode.nodes:
        own = head | _node_row(node)
        seats = node.observations | node.answers | node.rewards | node.advantages
        for row in [_seat_row(node, seat, episode.seats) for seat in seats] or [{}]:
            yield own | row | {"draw": draws.get((node.id, row.get("seat")))}


def _draws(episode: Episode) -> dict[tuple[int, Seat | None], int]:
    """Returns, by node id and seat, the index of the answer among the seat's distinct answers to this observation.
    Siblings with the same index share an answer object."""
    seen: dict[tuple[int | None, Seat], dict[int, int]] = {}
    found: dict[tuple[int, Seat | None], int] = {}
    for node in episode.nodes:
        for seat, answer in node.answers.items():
            own = seen.setdefault((node.parent, seat), {})
            found[node.id, seat] = own.setdefault(id(answer), len(own))
    return found


def _node_row(node: Node) -> dict[str, Any]:
    success = None if node.success is None else node.success >= 0.5
    row = {"node": node.id, "node_error": node.error, "success": success, "info": _json(node.info)}
    return row | {name: getattr(node, name) for name in NODE_COLUMNS}


def _seat_row(node: Node, seat: Seat, seats: dict[Seat, str]) -> dict[str, Any]:
    row = {
        "seat": seat,
        "policy": seats.get(seat),
        "reward": node.rewards.get(seat),
        "advantage": node.advantages.get(seat),
        "invalid": node.is_invalid(seat),
    }
    if seat in node.observations:
        seen = node.observations[seat]
        plain = isinstance(seen, str)
        row |= {"observation": seen if plain else _json(seen), "observation_json": not plain}
    if seat in node.answers:
        row |= _answer_row(node.answers[seat])
    return row


def _answer_row(answer: Answer) -> dict[str, Any]:
    arrays = {"prompt_ids": answer.prompt_ids, "token_ids": answer.token_ids, "logprobs": answer.logprobs}
    columns = {
        "policy": answer.policy,
        "answer": answer.text,
        "thought": answer.thought or None,
        "stop": answer.stop_reason,
        "temperature": answer.temperature,
    }
    if len(answer.versions):
        arrays["versions"] = answer.versions
    if answer.sampling_mask:
        arrays |= {"mask_ids": answer.sampling_mask.ids, "mask_counts": answer.sampling_mask.counts}
    if answer.routed_experts is not None:
        shape = np.array(answer.routed_experts.shape, np.int32)
        arrays |= {"experts": answer.routed_experts.ravel(), "experts_shape": shape}
    return columns | arrays


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Chat):
        return {"messages": value.messages, "tools": value.tools}
    try:
        return plain_value(value)
    except ValueError as error:
        raise ValueError(
            f"cannot store {error} in an episode: observations and info hold text, numbers, arrays, lists and "
            "mappings; convert it in the env"
        ) from error


def _read_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows as dicts. Token columns are NumPy arrays, never lists of numbers."""
    table = table.combine_chunks()
    columns = {name: _column(table.column(name)) for name in table.column_names}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _column(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_list(column.type) or not len(column):
        return column.to_pylist()
    array = column.chunk(0)
    flat = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    return [flat[a:b].copy() for a, b in itertools.pairwise(offsets)]


def _read_observation(row: dict[str, Any]) -> Any:
    """Restores an observation; conversations become `Chat` objects again."""
    if not row["observation_json"]:
        return row["observation"]
    found = json.loads(row["observation"])
    if isinstance(found, dict) and found.keys() == {"messages", "tools"}:
        return Chat(tuple(found["messages"]), tuple(found["tools"]))
    return found


def _add(episode: Episode, row: dict[str, Any], path: str | Path) -> Node:
    """Adds one row to the tree, and its node if that is new; returns the node."""
    if not episode.nodes or episode.nodes[-1].id != row["node"]:
        if row["node"] != len(episode.nodes) or not (row["parent"] is None or 0 <= row["parent"] < row["node"]):
            raise ValueError(
                f"rows of episode {row['episode']} are missing in {path}, or in another order: keep or drop whole "
                "episodes, or number those of joined files one after the other"
            )
        fields = {name: row[name] for name in NODE_COLUMNS}
        fields |= {"info": json.loads(row["info"]), "error": row["node_error"]}
        episode.nodes.append(Node(row["node"], observations={}, answers={}, **fields))
    node = episode.nodes[-1]
    seat = row["seat"]
    if row["observation"] is not None:
        node.observations[seat] = _read_observation(row)
    if row["answer"] is not None:
        arrays = (row["prompt_ids"], row["token_ids"], row["logprobs"])
        values = (row["answer"], row["policy"], *arrays, row["stop"], row["temperature"])
        answer = Answer(*values, versions=row["versions"], thought=row["thought"] or "")
        if len(row["mask_counts"]):
            answer.sampling_mask = SamplingMask(row["mask_ids"], row["mask_counts"])
        if len(row["experts_shape"]):
            answer.routed_experts = row["experts"].reshape(row["experts_shape"])
        node.answers[seat] = answer
    if row["reward"] is not None:
        node.rewards[seat] = row["reward"]
    if row["advantage"] is not None:
        node.advantages[seat] = row["advantage"]
    return node
