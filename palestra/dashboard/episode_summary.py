"""Episode summaries: one row per episode, by which the dashboard filters and sorts without reading any text.

An episode file has a row per (episode, node, seat). `summarize_episodes` reads its narrow columns only, and sums
rewards along the played trajectories: siblings that were only tried do not count. The table that it returns has, for
each episode:

    step episode env seed seats error   as in the file
    nodes     joint steps of the tree, including tried ones
    turns     joint steps of the longest played trajectory
    success   share of the trajectories that the env calls a success; null if the env does not report success
    team      team rewards along a trajectory, averaged over trajectories
    return/S  the same for seat S's own rewards; null if the seat does not take part
    total     team reward plus own rewards of all seats
    invalid   answers on played trajectories that the env rejected
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HEAD_COLUMNS = ["step", "episode", "env", "seed", "seats", "error"]
NODE_COLUMNS = ["node", "parent", "depth", "chosen", "done", "team_reward", "success"]
COLUMNS = [*HEAD_COLUMNS, *NODE_COLUMNS, "seat", "reward", "invalid"]
RETURN_PREFIX = "return/"


def summarize_episodes(paths: Sequence[Path]) -> pa.Table:
    """Returns one row per episode of the files, in their order; reading several small files at once is cheaper than one
    by one. Raises ValueError if a file cannot be read as episodes."""
    return _digest(pa.concat_tables([_narrow(path) for path in paths]))


def _narrow(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=COLUMNS, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"cannot read episodes from {path}: {error}") from error
    if table.num_columns != len(COLUMNS):
        raise ValueError(f"{path} is a Parquet file, but not of palestra episodes: it has {table.column_names}")
    return table


def _digest(table: pa.Table) -> pa.Table:
    new_R = _changes(_ints(table, "step")) | _changes(_ints(table, "episode"))
    of_R = np.cumsum(new_R) - 1  # episode number of each row
    tree = _Tree(table, of_R)
    team_E = tree.mean_over_trajectories(_floats(table, "team_reward")[tree.first_N])
    returns = _returns(table, tree)
    own_E = np.sum([np.nan_to_num(values) for values in returns.values()], axis=0) if returns else 0.0
    refused_R = (_floats(table, "invalid") == 1) & (_floats(table, "chosen") == 1)
    metrics = {
        "nodes": np.bincount(tree.of_N, minlength=tree.episodes),
        "turns": tree.turns(),
        "success": tree.success(_floats(table, "success")[tree.first_N]),
        "team": team_E,
        "total": team_E + own_E,
        "invalid": np.bincount(of_R[refused_R], minlength=tree.episodes),
        **{f"{RETURN_PREFIX}{seat}": values for seat, values in returns.items()},
    }
    heads = table.select(HEAD_COLUMNS).take(pa.array(np.flatnonzero(new_R)))
    for name, values in metrics.items():
        heads = heads.append_column(name, pa.array(values, from_pandas=True))  # NaN becomes null
    return heads


class _Tree:
    """The N nodes of E episodes as arrays; sums propagate from parents to children, one depth at a time."""

    def __init__(self, table: pa.Table, of_R: np.ndarray) -> None:
        node_R = _ints(table, "node", -1)
        # The rows of a node are adjacent, and the first holds its values; a failed episode may have no node.
        self.is_first_R = (node_R >= 0) & (_changes(of_R) | _changes(node_R))
        self.first_N = np.flatnonzero(self.is_first_R)
        self.of_N = of_R[self.first_N]
        self.episodes = int(of_R[-1]) + 1 if len(of_R) else 0
        self.depth_N = _ints(table, "depth")[self.first_N]
        self.chosen_N = _floats(table, "chosen")[self.first_N] == 1
        self.end_N = self.chosen_N & (_floats(table, "done")[self.first_N] == 1)
        starts_E = np.searchsorted(self.of_N, np.arange(self.episodes))
        parent_N = _ints(table, "parent", -1)[self.first_N]
        self.parent_N = np.where(parent_N < 0, -1, starts_E[self.of_N] + parent_N)  # node ids restart in each episode

    def sum_from_root(self, values_N: np.ndarray) -> np.ndarray:
        """Returns the sum of the values from the root to each node, [N]."""
        sums = np.nan_to_num(values_N)
        for depth in np.unique(self.depth_N[self.depth_N > 0]):
            at = np.flatnonzero(self.depth_N == depth)
            sums[at] += sums[self.parent_N[at]]
        return sums

    def mean_over_trajectories(self, values_N: np.ndarray) -> np.ndarray:
        """Returns the mean return over the played trajectories of each episode, [E] float64."""
        return self.mean(self.sum_from_root(values_N), self.end_N)

    def mean(self, values_N: np.ndarray, which_N: np.ndarray) -> np.ndarray:
        """Returns the mean [E] over the nodes of each episode that the mask which_N selects; 0 if it selects none."""
        of = self.of_N[which_N]
        count = np.bincount(of, minlength=self.episodes)
        return np.bincount(of, weights=values_N[which_N], minlength=self.episodes) / np.maximum(count, 1)

    def turns(self) -> np.ndarray:
        """Returns the number of joint steps of the longest played trajectory, [E] int."""
        turns = np.zeros(self.episodes, int)
        np.maximum.at(turns, self.of_N[self.chosen_N], self.depth_N[self.chosen_N] + 1)
        return turns

    def success(self, success_N: np.ndarray) -> np.ndarray:
        """Returns the share of played trajectories that succeeded, [E] float64; NaN if the env does not report it."""
        known_N = self.end_N & ~np.isnan(success_N)
        known_E = np.bincount(self.of_N[known_N], minlength=self.episodes) > 0
        return np.where(known_E, self.mean(success_N, known_N), np.nan)


def _returns(table: pa.Table, tree: _Tree) -> dict[str, np.ndarray]:
    """Returns the mean return [E] float64 over trajectories by seat; NaN where it has no row."""
    codes = table.column("seat").combine_chunks().dictionary_encode()
    seat_R = codes.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    node_of_R = np.cumsum(tree.is_first_R) - 1
    reward_R = np.nan_to_num(_floats(table, "reward"))
    returns = {}
    for number, seat in enumerate(codes.dictionary.to_pylist()):
        rows = np.flatnonzero(seat_R == number)
        values_N = np.zeros(len(tree.of_N))
        values_N[node_of_R[rows]] = reward_R[rows]
        plays_E = np.bincount(tree.of_N[node_of_R[rows]], minlength=tree.episodes) > 0
        returns[seat] = np.where(plays_E, tree.mean_over_trajectories(values_N), np.nan)
    return returns


def _changes(values: np.ndarray) -> np.ndarray:
    """Returns a bool mask of the values that differ from their predecessor; true for the first."""
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


def _ints(table: pa.Table, name: str, default: int = 0) -> np.ndarray:
    values: Any = table.column(name).fill_null(default).to_numpy()
    return np.asarray(values, np.int64)


def _floats(table: pa.Table, name: str) -> np.ndarray:
    """Returns a column as float64: booleans as 0 and 1, null as NaN."""
    column = table.column(name)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return np.asarray(column.to_numpy(), float)
