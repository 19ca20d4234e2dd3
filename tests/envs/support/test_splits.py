"""Splits never share a layout, in any rotation or reflection."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.envs import make_env
from palestra.envs.support.splits import SPLIT_SHARES, canonical_layout, split_of_layout, split_of_text, symmetries

GAMES = [pytest.param("sokoban", {"size": 4}, marks=pytest.mark.slow), ("plan_path", {"size": 4, "wall_density": 0.1})]


def test_the_symmetries_of_a_2x2_board():
    assert sorted(symmetries(2)) == sorted(
        [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0), (2, 0, 3, 1), (1, 0, 3, 2), (2, 3, 0, 1), (0, 2, 1, 3), (3, 1, 2, 0)]
    )


@given(st.integers(3, 8).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size * size - 1)))))
def test_every_image_of_a_layout_has_one_canonical_form(drawn):
    size, walls = drawn
    forms = {canonical_layout(size, ({image[c] for c in walls}, (image[0],))) for image in symmetries(size)}
    assert forms == {canonical_layout(size, (walls, (0,)))}


def test_canonical_form_by_hand():
    # One cell in the corner of a 3x3 board can be turned into cell 0; a cell on an edge into cell 1.
    assert canonical_layout(3, ((8,),)) == ((0,),)
    assert canonical_layout(3, ((5,),)) == ((1,),)
    assert canonical_layout(3, ((4, 8),)) == ((0, 4),)


@pytest.mark.parametrize(("game", "options"), GAMES)
def test_no_layout_is_in_two_splits(game, options):
    met: dict[tuple, set[str]] = {}
    for split in SPLIT_SHARES:
        env = make_env(game, split=split, **options)
        for seed in range(1000):
            layout = env.make_layout(seed)
            met.setdefault(canonical_layout(env.size, layout.cell_groups), set()).add(split)
    assert len(met) > 1000
    assert all(len(splits) == 1 for splits in met.values())


def test_shares_are_as_stated():
    cells = [(a, b, c) for a in range(36) for b in range(36) for c in range(36) if len({a, b, c}) == 3 and a < 9]
    counts = Counter(split_of_layout(6, ((a,), (b,), (c,))) for a, b, c in cells[:8000])
    total = sum(counts.values())
    assert {split: round(n / total, 1) for split, n in counts.items()} == SPLIT_SHARES


def test_split_of_a_text_follows_its_sha256():
    # sha256("a") begins with ca978112, .79 of the range; "0" with 5feceb66, .37; "2" with d4735e3a, .83.
    assert (split_of_text("a"), split_of_text("0"), split_of_text("2")) == ("train", "base", "dev")
    counts = Counter(split_of_text(f"{a} + {b}") for a in range(80) for b in range(80))
    assert {split: round(n / 6400, 1) for split, n in counts.items()} == SPLIT_SHARES


def test_split_of_a_layout_follows_its_canonical_form():
    assert split_of_layout(4, ((0, 5), (3,))) == split_of_text(f"4:{canonical_layout(4, ((0, 5), (3,)))}")


def test_too_few_layouts_are_refused():
    env = make_env("sokoban", size=3, boxes=2, walls=4, split="dev")
    with pytest.raises(ValueError, match="too few such layouts"):
        env.reset(0)
