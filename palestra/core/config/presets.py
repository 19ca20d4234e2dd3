"""Algorithms by the names of their papers: each is a general algorithm with some settings fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Preset = dict[str, Any]


def expand_preset(tree: Any, presets: Mapping[str, Preset]) -> Any:
    """Returns an algorithm's config with the general `type` and the settings that a preset's name stands for; any other
    config unchanged. Raises ValueError if the config sets one of these to another value."""
    preset = presets.get(str(tree.get("type"))) if isinstance(tree, Mapping) else None
    if preset is None:
        return tree
    given = {key: value for key, value in tree.items() if key != "type"}
    for key, value in given.items():
        if key in preset and value != preset[key]:
            raise ValueError(
                f"type: {tree['type']} is type: {preset['type']} with {key}: {preset[key]}, and this config sets "
                f"{key}: {value}: leave {key} out, or set type: {preset['type']}"
            )
    return preset | given


def preset_name(config: Any, presets: Mapping[str, Preset]) -> str:
    """Returns the `type` with which an algorithm may have been configured, for messages: the name of a preset all of
    whose settings the config sets, else its own type."""
    settings = config.model_dump(include=config.model_fields_set)
    fitting = [name for name, preset in presets.items() if preset.items() <= settings.items()]
    return max(fitting, key=lambda name: len(presets[name]), default=getattr(config, "type", "this algorithm"))
