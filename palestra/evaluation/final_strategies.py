"""The final strategies of a population's run, which are exported and whose exploitability is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.evaluation.report.population_data import PopulationRecord
from palestra.populations.build.build import PlanConfig
from palestra.populations.plans.league_rules import LeagueConfig
from palestra.populations.plans.pbt import PBTConfig
from palestra.populations.plans.self_play import SelfPlayConfig
from palestra.populations.population import Mix, Player

MAX_NAMED = 4  # largest number of members of a mixture that are listed by name


def final_mixtures(record: PopulationRecord, plan: PlanConfig) -> dict[Player, Mix]:
    """Returns the final strategy of each player of a run with this plan.

    PSRO and XDO: the last meta-strategy. Self-play: the policy whose NashConv the run measures, which is the uniform
    mixture over all members, or the newest member with `nash_conv_of: latest`. League: the newest copy of a main agent.
    PBT: the latest member of the learner with the highest rating. Raises ValueError if a player has none yet.
    """
    mixtures = _last_meta_strategies(record)
    for player in dict.fromkeys(record.payoffs.seats):
        mixtures.setdefault(player, _without_meta_strategies(record, plan, player))
    return mixtures


def describe_mixtures(mixtures: Mapping[Player, Mix]) -> str:
    """Formats mixtures for the screen: "player_0: uniform 0.25, player_0-1 0.75; player_1: a mixture of 31 members"."""
    return "; ".join(f"{player}: {_describe(mix)}" for player, mix in mixtures.items())


def _describe(mix: Mix) -> str:
    if len(mix) == 1:
        return next(iter(mix))
    if len(mix) > MAX_NAMED:
        return f"a mixture of {len(mix)} members"
    return ", ".join(f"{name} {p:.2f}" for name, p in mix.items())


def _last_meta_strategies(record: PopulationRecord) -> dict[Player, Mix]:
    mixes = {line["policy"]: mix for line in record.metrics if (mix := _mix(line))}
    return {player: mixes[player] for player in dict.fromkeys(record.payoffs.seats) if player in mixes}


def _mix(line: Mapping[str, Any]) -> Mix:
    return {key.removeprefix("mix/"): p for key, p in line.items() if key.startswith("mix/") and p > 0}


def _without_meta_strategies(record: PopulationRecord, plan: PlanConfig, player: Player) -> Mix:
    members = [member for member in record.members if member.player == player and member.weights]
    names = [member.name for member in members]
    which = f"trained member of {player}"
    if isinstance(plan, SelfPlayConfig) and plan.nash_conv_of == "average" and members:
        everyone = record.payoffs.members[player]
        return dict.fromkeys(everyone, 1 / len(everyone))
    if isinstance(plan, LeagueConfig):
        names = [member.name for member in members if member.info.get("role") == "main"]
        which = "frozen copy of a main agent"
    if isinstance(plan, PBTConfig):
        names = _best_rated(record, player)
    if not names:
        raise ValueError(f"{record.path} has no {which} yet: train it for longer")
    return {names[-1]: 1.0}


def _best_rated(record: PopulationRecord, player: Player) -> list[str]:
    """Returns the latest member of the player's learner of population-based training whose last rating is the highest,
    the first of equals; [] if none has a member in the population."""
    ratings = {line["policy"]: line["rating"] for line in record.metrics if line.get("rating") is not None}
    members = {member.name for member in record.members if member.player == player}
    latest = {task.learner: task.output_member for task in record.train_tasks}
    rated = [name for name in ratings if latest.get(name) in members]
    return [latest[max(rated, key=ratings.__getitem__)]] if rated else []
