"""Which policy plays each seat: the same rules for text and vectorised envs."""

import pytest

from palestra.core.config import validate
from palestra.runs.seats import resolve_seats
from palestra.vector.build.build import seat_policies
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorConfig

SEATS = ("red_0", "red_1", "blue")


def resolve(policies: str, *assignments: dict[str, str]) -> list[str]:
    return list(resolve_seats(SEATS, policies.split(), "env plays red_0, red_1, blue", *assignments).values())


def test_seat_resolves_to_own_name_then_default_then_only_policy() -> None:
    assert resolve("blue default") == ["default", "default", "blue"]
    assert resolve("shared") == ["shared"] * 3


def test_exact_names_precede_patterns_and_earlier_patterns_later_ones() -> None:
    assert resolve("a b c", {"red_*": "a", "*": "b", "red_1": "c"}) == ["a", "c", "b"]


def test_earlier_assignments_take_precedence() -> None:
    assert resolve("a b", {"*": "b"}, {"red_0": "a", "red_*": "a", "blue": "a"}) == ["b"] * 3


@pytest.mark.parametrize(
    ("policies", "assignment", "message"),
    [
        ("a b", {"green*": "a"}, 'seats names "green\\*", but env plays red_0'),
        ("a b", {"blue": "c"}, 'gives "blue" to "c", but policies: names only a, b'),
        ("a blue", {}, 'seat "red_0" has no policy.*Add policies.red_0, or set policies.default'),
    ],
)
def test_invalid_assignments_are_refused_with_the_reason(
    policies: str, assignment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(policies, assignment)


def test_evaluation_seats_take_precedence() -> None:
    tree = {
        "env": {"type": "kuhn_poker", "num_envs": 2},
        "policies": {"net": {"type": "net"}, "random": {"type": "random"}},
        "seats": {"player_0": "net", "player_1": "net"},
    }
    config = validate(VectorConfig, tree)
    env = make_vector_env(config.env)
    assert seat_policies(config, env, {"player_1": "random"}) == {"player_0": "net", "player_1": "random"}
    assert seat_policies(config, env, {"*": "random"}) == {"player_0": "random", "player_1": "random"}
