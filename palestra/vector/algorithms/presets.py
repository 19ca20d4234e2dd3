"""Algorithms of networks by the names of their papers: general algorithms with some settings fixed."""

from __future__ import annotations

from typing import Any

from palestra.core.config.presets import Preset, preset_name

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


def algorithm_name(config: Any) -> str:
    """Returns the name of an algorithm of networks in messages: that of its paper, if its config sets what makes it."""
    return preset_name(config, VECTOR_PRESETS)
