"""Algorithms by the names of their papers: each is a general algorithm with some settings fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Preset = dict[str, Any]
COMLRL: Preset = {"type": "grpo", "branch_at": "turn", "continue_from": "all", "loss_aggregation": "constant"}
TEXT_PRESETS: dict[str, Preset] = {
    "at_grpo": {"type": "grpo", "branch_at": "turn", "continue_from": "best"},  # Zhao et al., 2025
    "dr_grpo": {  # Liu et al., 2025
        "type": "grpo",
        "branch_at": "root",
        "scale": "none",
        "loss_aggregation": "constant",
    },
    "dapo": {  # Yu et al., 2025
        "type": "grpo",
        "branch_at": "root",
        "clip_high": 0.28,
        "flat_groups": "refill",
        "overlong": "penalty",
    },
    "rloo": {"type": "grpo", "branch_at": "root", "baseline": "others", "scale": "none"},  # Ahmadian et al., 2024
    "reinforce_pp": {  # Hu et al., 2025
        "type": "grpo",
        "branch_at": "root",
        "group_size": 1,
        "baseline": "batch",
        "scale": "batch",
    },
    # CoMLRL 1.4 (Liu et al., 2025, arXiv:2508.04652): trees of joint answers; `joints: crossed` is its mode "cross"
    "magrpo": COMLRL,
    "marloo": COMLRL | {"baseline": "others", "scale": "none"},
    "mareinforce": COMLRL | {"baseline": "none", "scale": "none"},
    "maremax": COMLRL | {"baseline": "max", "scale": "none"},
    "iac": {"type": "ppo", "action_level": "turn", "surrogate": "policy_gradient", "gae_lambda": 0.0},
    "maac": {
        "type": "ppo",
        "action_level": "turn",
        "surrogate": "policy_gradient",
        "gae_lambda": 0.0,
        "critic": "central",
    },
    "madpo": {"type": "dpo", "branch_at": "turn", "margin": "joint", "reference_free": True},
}
VECTOR_PRESETS: dict[str, Preset] = {
    "ippo": {"type": "ppo", "critic": "own"},  # de Witt et al., 2020
    "mappo": {"type": "ppo", "critic": "central"},  # Yu et al., 2022
    "hatrpo": {"type": "trpo", "critic": "central", "sequential": True},  # Kuba et al., 2022
    "happo": {"type": "ppo", "critic": "central", "sequential": True},  # Kuba et al., 2022
    "pqn_vdn": {"type": "pqn", "mixer": "vdn"},  # Gallici et al., 2024
    "maddpg": {"type": "ddpg", "critic": "central"},  # Lowe et al., 2017
    "matd3": {"type": "td3", "critic": "central"},  # Ackermann et al., 2019
    "masac": {"type": "sac", "critic": "central"},
    "vdn": {"type": "qmix", "mixer": "vdn"},  # Sunehag et al., 2018
    "qplex": {"type": "qmix", "mixer": "qplex"},  # Wang et al., 2021
}


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
