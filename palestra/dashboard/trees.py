"""One episode for display: its tree without texts, the texts along one path, and the tokens of one node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from palestra.core.chat import with_thought
from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.core.types import Episode, Node
from palestra.dashboard.catalog import NotFound
from palestra.engine.bases.packaged_bases import packaged_folder
from palestra.runs.episodes import to_table
from palestra.text.rollouts.metrics import member_name

EPISODE_KEYS = ("env", "seed", "seats", "error", "traceback", "picture")
NODE_KEYS = ("parent", "depth", "chosen", "done", "truncated", "success")
SEAT_KEYS = ("reward", "advantage", "invalid", "draw")
TURN_KEYS = ("seat", "policy", "stop", "reward", "advantage")
TEXT_COLUMNS = ("observation", "observation_json", "answer", "thought", "invalid", "info", "node_error")
BASE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
MAX_NODES = 4000  # nodes of a tree that are sent: a screen cannot resolve more
MAX_TEXT_CHARS = 60_000  # characters sent of one text
Row = dict[str, Any]


@lru_cache(maxsize=8)
def find_tokenizer(base: str) -> Tokenizer | None:
    """Returns the tokenizer of a base by its name: one that ships with palestra, packaged ones once they are converted,
    or one in the local Hugging Face cache; None if it is not on this machine. File paths in a config are not followed:
    a run's files may come from an untrusted source."""
    for path in _places(base):
        if path.is_file():
            return Tokenizer.from_file(str(path))
    return None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns one text per id; joined they are the whole. "" inside a multi-byte character."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, number) or "" for number in ids]


def _places(base: str) -> list[Path]:
    if not BASE_NAME.fullmatch(base):
        return []
    if folder := packaged_folder(base):
        return [folder / "tokenizer.json"]
    if "/" not in base:
        return [SHIPPED_BASES_DIR / base / "tokenizer.json"]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = home / "hub" / f"models--{base.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*/tokenizer.json"))


def read_rows(path: Path, episode: int, columns: list[str] | None = None) -> list[Row]:
    """Returns the rows of one episode. Raises NotFound if the file or the episode does not exist."""
    try:
        with pq.ParquetFile(path) as file:
            known = [name for name in columns or file.schema_arrow.names if name in file.schema_arrow.names]
            table = file.read(columns=list(dict.fromkeys(["episode", *known])))
    except (OSError, pa.ArrowInvalid) as error:
        raise NotFound(f"there are no episodes in {path.name}: {error}") from error
    rows: list[Row] = table.filter(pc.equal(table["episode"], episode)).to_pylist()
    if not rows:
        raise NotFound(f"{path.name} has no episode {episode}")
    return rows


def tree_view(path: Path, episode: int) -> dict[str, Any]:
    """Returns the nodes with rewards and flags by seat; `left_out` counts the nodes beyond `MAX_NODES`."""
    rows = read_rows(path, episode, [*EPISODE_KEYS, "node", *NODE_KEYS, "team_reward", "seat", *SEAT_KEYS])
    nodes: dict[int, Row] = {}
    for row in rows:
        if row["node"] is not None:
            node = nodes.setdefault(row["node"], _bone(row))
            if row["seat"] is not None:
                node["seats"][row["seat"]] = {key: row[key] for key in SEAT_KEYS if row.get(key) is not None}
    head = {key: rows[0][key] for key in ("env", "seed", "error")}
    head |= {"traceback": rows[0].get("traceback"), "picture": rows[0].get("picture") or ""}
    head |= {"seats": json.loads(rows[0]["seats"])}
    return head | {"nodes": list(nodes.values())[:MAX_NODES], "left_out": max(0, len(nodes) - MAX_NODES)}


def _bone(row: Row) -> Row:
    return {"id": row["node"], **{key: row[key] for key in NODE_KEYS}, "team": row["team_reward"], "seats": {}}


def last_played_node(nodes: list[Row]) -> int:
    """Returns the node where the first trajectory ended, else the last played, else the root."""
    played = [node for node in nodes if node["chosen"]]
    return int(next((node for node in played if node["done"]), [*nodes[:1], *played][-1])["id"])


def path_texts(path: Path, episode: int, node: int) -> list[Row]:
    """Returns observations and answers from the root to `node`, of a conversation only the new
    messages. Raises NotFound without such a node, ValueError if the parents form a cycle."""
    rows = read_rows(path, episode, ["node", "parent", "team_reward", *TURN_KEYS, *TEXT_COLUMNS])
    if all(row["node"] != node for row in rows):
        raise NotFound(f"the episode has no node {node}")
    return _line(rows, node)


def episode_texts(episode: Episode) -> list[Row]:
    """Returns observations and answers of an episode in memory on the path to its newest node, like `path_texts`."""
    if not episode.nodes:
        return []
    return _line(to_table(0, [episode]).to_pylist(), episode.nodes[-1].id)


def _line(rows: list[Row], node: int) -> list[Row]:
    parents = {row["node"]: row["parent"] for row in rows if row["node"] is not None}
    line = [node]
    while (parent := parents[line[-1]]) is not None:
        line.append(parent)
        if len(line) > len(parents):
            raise ValueError(f"node {node} of the episode is among its own ancestors: the file was damaged")
    by_node: dict[int, list[Row]] = {}
    for row in rows:
        by_node.setdefault(row["node"], []).append(row)
    seen: dict[str, Any] = {}
    return [_joint(by_node[number], seen) for number in reversed(line)]


def _joint(rows: list[Row], seen: dict[str, Any]) -> Row:
    info = json.loads(rows[0]["info"] or "{}")
    node = Node(rows[0]["node"], None, 0, {}, {}, info=info)
    turns = [_turn(row, seen) | _invalid(row, node) for row in rows if row["seat"] is not None]
    # the others are shown with the answers
    shown = {key: value for key, value in info.items() if key not in ("invalid", "why_invalid")}
    if rows[0].get("node_error"):
        shown["error"] = truncate_text(rows[0]["node_error"])
    return {"node": node.id, "team": rows[0]["team_reward"], "info": shown, "turns": turns}


def _invalid(row: Row, node: Node) -> Row:
    """Returns whether the env rejected the answer, and why; {} if there is none, or it was valid."""
    if not row.get("invalid") or row["answer"] is None:
        return {}
    return {"invalid": True, "why_invalid": truncate_text(node.invalid_reason(row["seat"]))}


def _turn(row: Row, seen: dict[str, Any]) -> Row:
    turn = {key: row[key] for key in TURN_KEYS if row[key] is not None}
    if row["observation"] is not None:
        turn["observation"] = _news(parse_observation(row), seen.get(row["seat"]))
        seen[row["seat"]] = parse_observation(row)
    if row["answer"] is not None:
        turn["answer"] = truncate_text(with_thought(row["answer"], row.get("thought")))
    return turn


def parse_observation(row: Row) -> Any:
    """Returns an observation: a text (cut at `MAX_TEXT_CHARS`), or the parsed JSON."""
    if row["observation_json"]:
        return json.loads(row["observation"])
    return truncate_text(row["observation"])


def _news(now: Any, before: Any) -> Any:
    """Returns the messages of a continued conversation after those that the seat had seen and its own answer."""
    if not (_is_chat(now) and _is_chat(before)):
        return now
    earlier = before["messages"]
    if not 0 < len(earlier) < len(now["messages"]) or now["messages"][: len(earlier)] != earlier:
        return now
    return {"messages": now["messages"][len(earlier) + 1 :], "tools": []}


def _is_chat(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def truncate_text(text: str) -> str:
    """Returns `text`, cut at `MAX_TEXT_CHARS` characters with a note."""
    rest = len(text) - MAX_TEXT_CHARS
    return text if rest <= 0 else f"{text[:MAX_TEXT_CHARS]} … {rest:,} characters more"


def node_tokens(path: Path, episode: int, node: int, bases: dict[str, str]) -> list[Row]:
    """Returns the tokens of a node's answers with their log-probabilities (nats), by seat. `bases` maps policies to
    base models; without a known tokenizer, the texts are None."""
    columns = ["node", "seat", "policy", "token_ids", "logprobs", "advantage", "temperature", "prompt_ids", "answer"]
    rows = [row for row in read_rows(path, episode, columns) if row["node"] == node]
    return [_answer_row(row, bases) for row in rows if row["answer"] is not None]


def _answer_row(row: Row, bases: dict[str, str]) -> Row:
    ids = row["token_ids"] or []
    logprobs = row["logprobs"] or []
    tokenizer = find_tokenizer(bases.get(member_name(row["policy"] or ""), ""))
    return {
        "seat": row["seat"],
        "policy": row["policy"],
        "advantage": row["advantage"],
        "temperature": row["temperature"],
        "prompt": len(row["prompt_ids"] or []),
        "ids": ids,
        "texts": token_texts(tokenizer, ids) if tokenizer else None,
        "logprobs": [round(max(-1e9, value), 4) for value in logprobs],  # no infinity in JSON
    }
