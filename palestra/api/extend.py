"""Resuming a run with another number of steps or other learning rates, or a run of networks on another device. Other
changes of the config are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.core.config import Tree, override
from palestra.core.files import read_lines
from palestra.core.types import TEAM
from palestra.envs import is_vector_config
from palestra.runs.checkpoints import list_checkpoints

# Population types whose earlier iterations do not depend on the total number of iterations.
EXTENDABLE_PLANS = {"psro": "population.iterations", "xdo": "population.iterations"}


def extend_config(tree: Tree, settings: Sequence[str], path: Path) -> Tree:
    """Returns the config of the run at `path`, changed by settings such as "steps=200", "policies.planner.lr=1e-4" or,
    for networks, "device=cpu". Raises ValueError if the settings change anything else, or make the run shorter than
    what is done; that of a population cannot be made shorter."""
    length = length_setting(tree)
    may_change = _changeable(tree, length)
    if other := next((setting for setting in settings if setting.partition("=")[0].strip() not in may_change), None):
        may = "and this kind cannot be made longer"
        if may_change:
            may = f"only --set {'=..., '.join(may_change)}=... may change"
        raise ValueError(f"{other}: a resumed run keeps its config, {may}. Start a new one instead.")
    changed = override(tree, settings)
    if not length:
        return changed
    before = _at(tree, length)
    now = _at(changed, length)
    least = min(before, max(1, steps_done(path))) if "population" not in tree else before
    if not isinstance(now, int) or now < least:
        raise ValueError(f"{length}={now}: the run has {length}={before}, and can have any number from {least} on")
    return changed


def _changeable(tree: Tree, length: str) -> list[str]:
    """Returns the settings that may change at a resume."""
    may_change = []
    if length:
        may_change.append(length)
    if "population" in tree:
        return may_change
    may_change += [f"policies.{name}.lr" for name, policy in tree.get("policies", {}).items() if "lr" in policy]
    if is_vector_config(tree):
        may_change.append("device")
    return may_change


def steps_done(path: Path) -> int:
    """Returns the training steps, or the env steps of networks, up to the newest checkpoint of a run."""
    step = max((checkpoint.step for checkpoint in list_checkpoints(path)), default=-1)
    if step < 0:
        return 0
    lines = read_lines(path / "metrics.jsonl")
    team = next((line for line in lines if line["step"] == step and line["policy"] == TEAM), {})
    return int(team.get("env_steps", step + 1))


def complete_message(tree: Tree) -> str:
    """Returns the message for a resumed run that has no steps left."""
    message = "already complete"
    if length := length_setting(tree):
        message += f"; --set {length}=N extends it"
    return message


def length_setting(tree: Tree) -> str:
    """Returns the setting that determines the length of a run; "" if it cannot be extended."""
    if "population" in tree:
        return EXTENDABLE_PLANS.get(tree["population"]["type"], "")
    if is_vector_config(tree):
        return "env_steps"
    if tree.get("stages"):
        return ""
    return "steps"


def required_length_setting(tree: Tree, asked: str) -> str:
    """Returns the setting that determines the length of a run. Raises ValueError, which names the option `asked`, if
    several do."""
    if not (key := length_setting(tree)):
        raise ValueError(f"{asked} does not fit this run: its stages, or its population, have lengths of their own")
    return key


def _at(tree: Tree, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree
