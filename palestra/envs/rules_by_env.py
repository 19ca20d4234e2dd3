"""Rules of turn-based games, and the rules of each env by its name."""

from __future__ import annotations

import inspect
from typing import Any

from palestra.envs.rules.bargaining import BargainingRules
from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.rules.kuhn import KuhnRules
from palestra.envs.rules.leduc import LeducRules
from palestra.envs.rules.liars_dice import LiarsDiceRules
from palestra.envs.rules.tic_tac_toe import TicTacToeRules

__all__ = ["CHANCE", "RULES_BY_ENV", "TERMINAL", "Rules", "may_have_rules", "rules_for_env", "why_no_rules"]

RULES_BY_ENV: dict[str, type[Rules[Any]]] = {
    "kuhn_poker": KuhnRules,
    "leduc_poker": LeducRules,
    "liars_dice": LiarsDiceRules,
    "tic_tac_toe": TicTacToeRules,
    "bargaining": BargainingRules,
    "text_kuhn": KuhnRules,
    "text_leduc": LeducRules,
    "text_liars_dice": LiarsDiceRules,
    "text_tic_tac_toe": TicTacToeRules,
    "text_bargaining": BargainingRules,
}


def rules_for_env(env_type: str, **options: Any) -> Rules[Any] | None:
    """Returns the rules of the env with this name and these options, or None if it has none.

    An env has no rules here if its game is too large for exact solvers or is not turn-based. Options that concern only
    the env (`num_processes`) are ignored.
    """
    if not may_have_rules(env_type) or why_no_rules(env_type, **options):
        return None
    if env_type == "openspiel":
        from palestra.envs.adapters.openspiel import OpenSpielRules

        rules: type[Rules[Any]] = OpenSpielRules
    else:
        rules = RULES_BY_ENV[env_type]
    known = inspect.signature(rules).parameters
    return rules(**{name: value for name, value in options.items() if name in known})


def may_have_rules(env_type: str) -> bool:
    """True if the env with this name has rules here, with some options at least."""
    return env_type == "openspiel" or env_type in RULES_BY_ENV


def why_no_rules(env_type: str, **options: Any) -> str:
    """Returns why an env has no rules here, as part of a sentence; "" if it has, or why is unknown."""
    if env_type != "openspiel":
        return ""
    from palestra.envs.adapters.openspiel import DEFAULT_GAME, why_not_enumerable

    return why_not_enumerable(options.get("game", DEFAULT_GAME))
