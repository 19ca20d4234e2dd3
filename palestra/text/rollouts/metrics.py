"""Metrics of text episodes, for logs, progress bars and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from palestra.core.types import NO_REWARD, Answer, Episode, Metrics, Node
from palestra.envs.reward_terms import EXACT_GRADE_KEY, REWARD_TERMS_KEY, TEAM_TERMS_KEY
from palestra.runs.headline import TEAM_RETURN, TEAM_SUCCESS

CONTEXT_FULL_KEY = "context_full"  # key in the info of a trajectory's last node: the next prompt did not fit
REDRAWS_KEY = "redraws"  # key in the info of an episode's first node: number of episodes that it replaces


def member_name(policy: str) -> str:
    """Returns the member of a versioned policy name: "planner@12" -> "planner"."""
    return policy.split("@", 1)[0]


def chosen_nodes(episode: Episode) -> list[Node]:
    """Returns the nodes of the trajectories that were continued, without siblings that were only tried."""
    return [node for node in episode.nodes if node.chosen]


def answers_of(episodes: Sequence[Episode], policy: str | None = None) -> list[Answer]:
    """Returns every answer of `policy` (None: of all policies), also those of unchosen siblings. An answer that
    siblings share is returned once."""
    found: dict[int, Answer] = {}
    for node in chain.from_iterable(episode.nodes for episode in episodes):
        found |= {id(answer): answer for answer in node.answers.values()}
    return [answer for answer in found.values() if policy in (None, member_name(answer.policy))]


def played_trajectories(episodes: Sequence[Episode]) -> list[tuple[Episode, list[Node]]]:
    """Returns the finished trajectories that were continued, each with its episode."""
    found = []
    for episode in episodes:
        found += [(episode, episode.trajectory(leaf)) for leaf in episode.leaves() if leaf.chosen]
    return found


def episode_return(episode: Episode) -> float:
    """Returns the team reward plus the mean of the seats' own rewards, averaged over the trajectories that were
    continued; for a failed episode, the rewards up to the failure."""
    lines = played_trajectories([episode]) or [(episode, chosen_nodes(episode))]
    return _mean([_trajectory_return(*line) for line in lines])


def episode_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Returns success (if an env reports it), joint steps per trajectory, return and team return, number of episodes,
    and how many failed.

    Means are over the episodes that did not fail, and absent if all did; `failed` counts the rest. `return` is the
    team's reward plus the mean of the seats' own. Success is over the envs of which some trajectory reports it; their
    other trajectories count as 0. Success that is reported by seat is `success.NAME` (`success_by_policy`); returns of
    opponents are `return.NAME` (`returns_of_opponents`). Only if there are any: `redraws`, the number of episodes that
    were played and replaced (refill.py); `context_full_fraction`, the share of trajectories that ended because the next
    prompt did not fit into a model's context; `failed_branches` and `no_reward_branches`, the numbers of branches that
    an error ended (also if they got the run's `failed_reward`), and that the env gave no reward.
    """
    valid = [e for e in episodes if e.error is None]
    ends = played_trajectories(valid)
    lines = [line for _, line in ends]
    reporting = reporting_envs(valid)
    redraws = [e.nodes[0].info.get(REDRAWS_KEY, 0) for e in valid if e.nodes]
    more: Metrics = {}
    if reporting:
        more["success"] = _mean([e.success or 0.0 for e in valid if e.env in reporting and e.leaves()])
    more |= {f"{TEAM_SUCCESS}{name}": value for name, value in success_by_policy(valid).items()}
    counts = {"redraws": sum(redraws)} | _lost_branches(valid)
    more |= {name: float(count) for name, count in counts.items() if count}
    full = [bool(line[-1].info.get(CONTEXT_FULL_KEY)) for line in lines]
    if any(full):
        more["context_full_fraction"] = _mean(full)
    if lines:
        more["steps_per_episode"] = sum(bool(node.answers) for node in chain.from_iterable(lines)) / len(lines)
        more["return"] = _mean([_trajectory_return(e, line) for e, line in ends])
        more["team_return"] = _mean([_team_return(line) for line in lines])
        more |= {f"{TEAM_RETURN}{name}": value for name, value in returns_of_opponents(ends).items()}
    return more | {"episodes": float(len(episodes)), "failed": float(len(episodes) - len(valid))}


def _lost_branches(episodes: Sequence[Episode]) -> dict[str, int]:
    errors = []
    for episode in episodes:
        parents = {node.parent for node in episode.nodes}
        errors += [node.error for node in episode.nodes if node.error is not None and node.id not in parents]
    unpaid = errors.count(NO_REWARD)
    return {"failed_branches": len(errors) - unpaid, "no_reward_branches": unpaid}


def reporting_envs(episodes: Sequence[Episode]) -> set[str]:
    """Returns the names of the envs that report the success of some trajectory."""
    return {episode.env for episode, line in played_trajectories(episodes) if line[-1].success is not None}


def success_by_policy(episodes: Sequence[Episode]) -> Metrics:
    """Returns the success of each policy in the envs that report it by seat, a mean over episodes and the policy's
    seats; if one policy plays all seats, as against itself, that of each seat. Seats that never report it are left out;
    one that reports it in some trajectories of an env has none in the others."""
    ended = [e for e in episodes if e.error is None and e.leaves()]
    reporting: set[tuple[str, str]] = set()
    policies: set[str] = set()
    for episode in ended:
        reporting.update((episode.env, seat) for seat in episode.seat_success)
        policies.update(map(member_name, episode.seats.values()))
    found: dict[str, list[float]] = {}
    for episode in ended:
        success = episode.seat_success
        for seat, policy in episode.seats.items():
            if (episode.env, seat) in reporting:
                name = seat if len(policies) == 1 else member_name(policy)
                found.setdefault(name, []).append(success.get(seat, 0.0))
    return {name: _mean(values) for name, values in found.items()}


def returns_of_opponents(ends: Sequence[tuple[Episode, Sequence[Node]]]) -> Metrics:
    """Returns the own return of each policy, a mean over trajectories and its seats (of each seat, if one policy plays
    all), if the seats' own rewards cancel in every trajectory: their mean is 0 then, whatever they learn. Nothing
    otherwise."""
    policies = {member_name(policy) for episode, _ in ends for policy in episode.seats.values()}
    found: dict[str, list[float]] = {}
    for episode, line in ends:
        own = {seat: _seat_return(line, seat) for seat in episode.seats}
        if abs(sum(own.values())) > 1e-6 * max(map(abs, own.values()), default=0.0):
            return {}
        for seat, value in own.items():
            name = seat if len(policies) == 1 else member_name(episode.seats[seat])
            found.setdefault(name, []).append(value)
    has_opponents = len(found) > 1 and any(any(values) for values in found.values())
    return {name: _mean(values) for name, values in found.items()} if has_opponents else {}


def _trajectory_return(episode: Episode, line: Sequence[Node]) -> float:
    """Returns the return of a trajectory: the team's reward plus the mean of the seats' own."""
    return _team_return(line) + _mean([_seat_return(line, seat) for seat in episode.seats])


def _team_return(line: Sequence[Node]) -> float:
    return sum(node.team_reward for node in line)


def _seat_return(line: Sequence[Node], seat: str) -> float:
    return sum(node.rewards.get(seat, 0.0) for node in line)


def seat_returns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Returns `returns`: each seat's own return, averaged over the trajectories of episodes that did not fail, and
    `returns_ci95`: half the width of its 95 % confidence interval (normal approximation over instances, since
    trajectories of one instance are not independent); likewise `return_ci95` of the return of `episode_metrics`.
    `instances` is the number of different ones, if it is not that of the episodes' seeds."""
    valid = [e for e in episodes if e.error is None]
    ends = played_trajectories(valid)
    own: dict[str, list[float]] = {}
    for seat in dict.fromkeys(chain.from_iterable(episode.seats for episode in valid)):
        own[seat] = [_seat_return(line, seat) for _, line in ends]
    instances = number_instances([e for e, _ in ends])
    found: dict[str, Any] = {"returns": {seat: _mean(values) for seat, values in own.items()}, "returns_ci95": {}}
    if len(set(instances)) != len({(e.env, e.seed) for e in valid}):
        found["instances"] = float(len(set(instances)))
    if len(set(instances)) > 1:
        whole = [_trajectory_return(e, line) for e, line in ends]
        found["return_ci95"] = 1.96 * _standard_error(whole, instances)
        found["returns_ci95"] = {seat: 1.96 * _standard_error(values, instances) for seat, values in own.items()}
    return found


def number_instances(episodes: Sequence[Episode]) -> list[int]:
    """Returns, for each episode, the index of its instance among the different ones, by first appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(episode.instance_key, len(numbers)) for episode in episodes]


def _standard_error(values: Sequence[float], groups: Sequence[int]) -> float:
    """Returns the standard error of the mean of values that are independent between groups only (Liang and Zeger, 1986;
    with the factor G / (G - 1) of G groups). Of groups of one size it is the one of the groups' means."""
    sums = np.bincount(groups, np.asarray(values) - np.mean(values))
    return float(np.sqrt(len(sums) / (len(sums) - 1) * np.sum(sums**2))) / len(values)


def first_of_each_instance(episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the first episode of each different instance, in order."""
    numbers = number_instances(episodes)
    return [episode for i, episode in enumerate(episodes) if numbers.index(numbers[i]) == i]


def instance_outcomes(episodes: Sequence[Episode]) -> dict[str, str]:
    """Returns `outcomes`, a letter for each different instance in order, by its first episode: "1" for a success, "0"
    for none, "x" for an episode that failed or got no reward; {} if the env reports no success."""
    if not reporting_envs(episodes):
        return {}
    first = first_of_each_instance(episodes)
    letters = ["x" if e.error is not None or not e.leaves() else str(int((e.success or 0.0) >= 0.5)) for e in first]
    return {"outcomes": "".join(letters)}


def policy_metrics(episodes: Sequence[Episode], policy: str) -> Metrics:
    """Returns metrics of one policy's answers, also those of unchosen siblings: local and team reward per answer,
    share of invalid answers, tokens per answer, share cut at the token limit, and `reward/TERM`, each term of the
    local and the team's reward (envs/reward_terms.py), and `exact_grade` if the env reports it beside a judge's
    verdict. An answer shared by siblings counts once, with the mean of their rewards. Rewards that a seat gets in
    steps in which it does not act, such as the loser's in the last step of a turn-based game, are added to the
    seat's earlier answer, as a mean over siblings."""
    valid = [episode for episode in episodes if episode.error is None]
    turns = []
    for node in chain.from_iterable(episode.valid_nodes for episode in valid):
        for seat, answer in node.answers.items():
            if member_name(answer.policy) == policy:
                turns.append((node, seat, answer))
    times = Counter(id(answer) for _, _, answer in turns)
    shares = [1 / times[id(answer)] for _, _, answer in turns]
    steps = [(node, seat, share) for (node, seat, _), share in zip(turns, shares, strict=True)]
    steps += chain.from_iterable(_steps_of_others(episode, policy) for episode in valid)
    terms = [(node.info.get(REWARD_TERMS_KEY, {}).get(seat, {}), share) for node, seat, share in steps]
    terms += [(node.info.get(TEAM_TERMS_KEY, {}), share) for node, _, share in steps]
    grades = [(node.info.get(EXACT_GRADE_KEY, {}), seat, share) for node, seat, share in steps]
    count = len(times) or 1
    sums: dict[str, float] = {}
    for own, share in terms:
        for name, value in own.items():
            sums[f"reward/{name}"] = sums.get(f"reward/{name}", 0) + value * share
    if any(seat in own for own, seat, _ in grades):
        sums[EXACT_GRADE_KEY] = sum(own.get(seat, 0.0) * share for own, seat, share in grades)
    return {name: total / count for name, total in sums.items()} | {
        "answers": float(len(times)),
        "local_reward": sum(node.rewards.get(seat, 0.0) * share for node, seat, share in steps) / count,
        "team_reward": sum(node.team_reward * share for node, _, share in steps) / count,
        "invalid": _mean([bool(node.is_invalid(seat)) for node, seat, _ in turns], shares),
        "tokens": _mean([len(answer.token_ids) for _, _, answer in turns], shares),
        "truncated_fraction": _mean([answer.stop_reason == "length" for _, _, answer in turns], shares),
    }


def _steps_of_others(episode: Episode, policy: str) -> Iterator[tuple[Node, str, float]]:
    """Yields each node at which a seat of `policy` does not act, that seat, and the number of its answers that the node
    stands for: those in its last group, divided by the number of siblings of this group from which play continued (one,
    or all), and in the same way at each later step, where the node's own siblings are all counted."""
    nodes = episode.valid_nodes
    siblings = Counter(node.parent for node in nodes)
    chosen = Counter(node.parent for node in nodes if node.chosen)
    for seat in (seat for seat, name in episode.seats.items() if member_name(name) == policy):
        groups: dict[int | None, set[int]] = {}
        for node in nodes:
            if seat in node.answers:
                groups.setdefault(node.parent, set()).add(id(node.answers[seat]))
        given: dict[int | None, float] = {None: 1.0}  # answers that the steps after a node stand for
        for node in nodes:  # parents come first
            count = len(groups[node.parent]) if seat in node.answers else given[node.parent]
            given[node.id] = count / max(chosen[node.parent], 1)
            if seat not in node.answers:
                yield node, seat, count / siblings[node.parent]


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    return float(np.average(values, weights=weights)) if len(values) else 0.0
