"""Filters and sorting over columns give the same rows as a plain loop."""

import json
import random

import pyarrow as pa
import pytest

from palestra.dashboard.episode_columns import EpisodeColumns
from palestra.dashboard.episode_filter import EpisodeFilter, matching_rows, page_rows, return_histogram
from palestra.dashboard.index import EMPTY_TABLE

RNG = random.Random(0)


def row(step, episode):
    red, blue = f"red@{step}", RNG.choice(["blue@1", "red@1"])
    return {
        "step": step,
        "episode": episode,
        "env": RNG.choice(["x", "y"]),
        "seed": 1,
        "seats": json.dumps({"a": red, "b": blue}),
        "error": RNG.choice([None, None, "it broke"]),
        "nodes": 4,
        "turns": RNG.randrange(3),
        "success": RNG.choice([None, 0.0, 0.5, 1.0]),
        "team": 0.0,
        "total": RNG.choice([-1.0, 0.25, 2.0]),
        "invalid": RNG.randrange(2),
        "return/a": RNG.choice([None, 0.0, 1.0]),
        "stamp": 7,
    }


ROWS = [row(step, episode) for step in range(12) for episode in range(5)]
COLUMNS = EpisodeColumns(pa.Table.from_pylist(ROWS))

FITS = {
    (): lambda one: True,
    (("outcome", "success"),): lambda one: one["error"] is None and (one["success"] or 0) >= 0.5,
    (("outcome", "failure"),): lambda one: one["error"] is None and one["success"] == 0.0,
    (("outcome", "error"),): lambda one: one["error"] is not None,
    (("least", 0.25), ("most", 1)): lambda one: one["total"] == 0.25,
    (("least", 0.5), ("seat", "a")): lambda one: (one["return/a"] or 0) >= 0.5,
    (("env", "y"), ("invalid", True)): lambda one: one["env"] == "y" and one["invalid"] > 0,
    (("step_from", 3), ("step_to", 4), ("turns_from", 1)): lambda one: one["step"] in (2, 3) and one["turns"] >= 1,
    (("policy", "red@1"), ("seat", "b")): lambda one: '"b": "red@1' in one["seats"],
    (("policy", "blue"),): lambda one: "blue" in one["seats"],
}


@pytest.mark.parametrize("asked", FITS)
@pytest.mark.parametrize("sort", ["step", "total", "success"])
@pytest.mark.parametrize("ascending", [False, True])
def test_filter_and_sort_equal_a_reference(asked, sort, ascending):
    fits = [one for one in ROWS if FITS[asked](one)]
    fits.sort(key=lambda one: (-one["step"], one["episode"]) if sort != "step" or not ascending else (one["step"],))
    if sort != "step":
        sign = 1 if ascending else -1
        fits.sort(key=lambda one: (one[sort] is None, sign * (one[sort] or 0.0)))
    found = matching_rows(COLUMNS, EpisodeFilter(sort=sort, ascending=ascending, **dict(asked)))
    shown = [(one["step"], one["episode"]) for one in page_rows(COLUMNS, found)]
    assert shown == [(one["step"] + 1, one["episode"]) for one in fits]  # a page counts the steps done
    assert sum(return_histogram(COLUMNS, found)["counts"]) == len(fits)


def test_empty_results_are_handled():
    nothing = EpisodeColumns(EMPTY_TABLE)
    found = matching_rows(nothing, EpisodeFilter(outcome="error", sort="total"))
    assert (
        len(found) == 0
        and page_rows(nothing, found) == []
        and return_histogram(nothing, found) == {"edges": [], "counts": []}
    )


def test_tree_response_includes_the_first_texts(client):
    address = "/api/runs/more/episodes/3/1"
    tree = client.get(address, params={"line": "played"}).json()
    assert next(node for node in tree["nodes"] if node["id"] == tree["at"])["done"]
    assert tree["line"] == client.get(f"{address}/words/{tree['at']}").json()["line"]
    other = client.get(address, params={"line": "1"}).json()
    assert other["at"] == 1 and len(other["line"]) == 1
    assert "line" not in client.get(address).json()
    assert client.get(address, params={"line": "99"}).status_code == 404
