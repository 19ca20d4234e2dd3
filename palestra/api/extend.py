"""Resuming a run with a larger step count, or a run of networks on another device. Other changes of the config are
rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.core.config import Tree, override

# Population types whose earlier iterations do not depend on the total number of iterations.
EXTENDABLE_PLANS = {"psro": "population.iterations", "xdo": "population.iterations"}


def extend_config(tree: Tree, settings: Sequence[str], vectorised: bool) -> Tree:
    """Returns the config of a run, changed by settings such as "steps=200" or, for networks, "device=cpu". Raises
    ValueError if the settings change anything else, or make the run shorter."""
    length = length_setting(tree, vectorised)
    may_change = {length, "device"} if vectorised and "population" not in tree else {length}
    if other := next((setting for setting in settings if setting.partition("=")[0].strip() not in may_change), None):
        may = f"only its length may change: --set {length}=N" if length else "and this kind cannot be made longer"
        may += " (or its device: --set device=cpu)" if "device" in may_change else ""
        raise ValueError(f"{other}: a resumed run keeps its config, {may}. Start a new one instead.")
    changed = override(tree, settings)
    if not length:
        return changed
    before = _at(tree, length)
    now = _at(changed, length)
    if not isinstance(now, int) or now < before:
        raise ValueError(f"{length}={now}: the run has {length}={before}, and can only be made longer")
    return changed


def complete_message(tree: Tree, vectorised: bool = False) -> str:
    """Returns the message for a resumed run that has no steps left."""
    length = length_setting(tree, vectorised)
    return f"already complete; --set {length}=N extends it" if length else "already complete"


def length_setting(tree: Tree, vectorised: bool) -> str:
    """Returns the setting that determines the length of a run; "" if it cannot be extended."""
    if "population" in tree:
        return EXTENDABLE_PLANS.get(tree["population"]["type"], "")
    if vectorised:
        return "env_steps"
    return "" if tree.get("stages") else "steps"


def _at(tree: Tree, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree
