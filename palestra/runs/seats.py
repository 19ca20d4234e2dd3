"""Assignment of policies to seats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from palestra.core.types import Seat


def resolve_seats(
    seats: Sequence[Seat], policies: Sequence[str], plays: str, *assignments: Mapping[str, str]
) -> dict[Seat, str]:
    """Returns the name of the policy at each seat.

    `assignments` map seats to policies; an earlier one takes precedence over a later one. Keys may contain the
    wildcards `*` and `?`; within one assignment an exact name takes precedence over a pattern, an earlier pattern over
    a later one. A seat that no key matches gets the policy of its own name, else the policy `default`, else the only
    policy. `plays` names the seats in error messages: 'env "relay" plays planner, coder'.

    Raises ValueError for a key that matches no seat, for an unknown policy and for a seat without a policy.
    """
    for assignment in assignments:
        for key, name in assignment.items():
            check_matches(key, seats, "seats", plays)
            if name not in policies:
                raise ValueError(f'seats gives "{key}" to "{name}", but policies: names only {", ".join(policies)}')
    return {seat: _policy(seat, policies, plays, assignments) for seat in seats}


def resolve_teams(policies: Mapping[Seat, str], teams: Mapping[str, str], plays: str) -> dict[Seat, str]:
    """Returns the team of each seat: the one that `teams` gives it, with keys as in `resolve_seats`, else the policy
    that plays it. Raises ValueError for a key that matches no seat."""
    for key in teams:
        check_matches(key, policies, "teams", plays)
    return {seat: find_assigned(seat, teams) or policy for seat, policy in policies.items()}


def check_matches(key: str, seats: Iterable[Seat], where: str, plays: str) -> None:
    """Raises ValueError for a key of the setting `where` that matches no seat. `plays` is as in `resolve_seats`."""
    if not any(fnmatchcase(seat, key) for seat in seats):
        raise ValueError(f'{where} names "{key}", but {plays}')


def find_assigned(seat: Seat, assignment: Mapping[str, str]) -> str | None:
    """Returns what `assignment` gives a seat: by its exact name, else by the first pattern; None if no key matches."""
    if seat in assignment:
        return assignment[seat]
    return next((name for pattern, name in assignment.items() if fnmatchcase(seat, pattern)), None)


def _policy(seat: Seat, policies: Sequence[str], plays: str, assignments: Sequence[Mapping[str, str]]) -> str:
    for assignment in assignments:
        if name := find_assigned(seat, assignment):
            return name
    for name in (seat, "default"):
        if name in policies:
            return name
    if len(policies) == 1:
        return policies[0]
    named = f"names only {', '.join(policies)}" if policies else "is empty"
    raise ValueError(
        f'seat "{seat}" has no policy: {plays}, but policies: {named}. Add policies.{seat}, or set policies.default.'
    )


def idle_notes(policies: Iterable[str], playing: Collection[str]) -> list[str]:
    """Returns a note for the user on policies that play in neither training nor evaluations, else no note."""
    idle = [name for name in policies if name not in playing]
    return [f"no seat is played by: {', '.join(idle)} (policies)"] if idle else []
