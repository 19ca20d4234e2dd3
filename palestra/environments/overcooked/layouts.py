"""Kitchens of Overcooked-AI (Carroll et al., 2019), as JaxMARL has them.

A kitchen is drawn with Overcooked-AI's symbols: `X` counter, `O` onions, `D` dishes (plates), `P` pot, `S` serving
counter, a blank for the floor, `1` and `2` where the seats start. Shapes: `C` cells, row by row; `P` pots; `F` floor
cells.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

KitchenName = Literal[
    "cramped_room", "asymmetric_advantages", "coordination_ring", "forced_coordination", "counter_circuit"
]
KITCHENS: dict[str, tuple[str, ...]] = {
    "cramped_room": (
        "XXPXX",
        "O1 2O",
        "X   X",
        "XDXSX",
    ),
    "asymmetric_advantages": (
        "XXXXXXXXX",
        "O XSXOX S",
        "X   P   X",
        "X 1 P2  X",
        "XXXDXDXXX",
    ),
    "coordination_ring": (
        "XXXPX",
        "X 1 P",
        "D2X X",
        "O   X",
        "XOSXX",
    ),
    "forced_coordination": (
        "XXXPX",
        "O X2P",
        "O1X X",
        "D X X",
        "XXXSX",
    ),
    "counter_circuit": (
        "XXXPPXXX",
        "X 1    X",
        "D XXXX S",
        "X     2X",
        "XXXOOXXX",
    ),
}
FLOOR, COUNTER, ONIONS, PLATES, POT, SERVING = range(6)
TILES = {" ": FLOOR, "1": FLOOR, "2": FLOOR, "X": COUNTER, "O": ONIONS, "D": PLATES, "P": POT, "S": SERVING}


class Kitchen(NamedTuple):
    """A layout as arrays, for the kernels. No floor cell is on the border, so that every step leads to a cell."""

    height: int
    width: int
    tile_C: np.ndarray
    pot_C: np.ndarray  # number of the pot on a cell, -1 elsewhere
    pots_P: np.ndarray  # their cells
    floor_F: np.ndarray  # cells to walk on
    start_N: np.ndarray  # cells on which the seats start
    ahead_D: np.ndarray  # distance to the cell above, below, right, left


def build_kitchen(name: str) -> Kitchen:
    """Returns the kitchen of that name."""
    rows = KITCHENS[name]
    drawn = "".join(rows)
    width = len(rows[0])
    tile_C = np.array([TILES[symbol] for symbol in drawn])
    pots_P = np.flatnonzero(tile_C == POT)
    pot_C = np.full(len(drawn), -1)
    pot_C[pots_P] = np.arange(len(pots_P))
    return Kitchen(
        height=len(rows),
        width=width,
        tile_C=tile_C,
        pot_C=pot_C,
        pots_P=pots_P,
        floor_F=np.flatnonzero(tile_C == FLOOR),
        start_N=np.array([drawn.index("1"), drawn.index("2")]),
        ahead_D=np.array([-width, width, 1, -1]),
    )
