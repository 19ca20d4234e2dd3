"""The envs of PettingZoo that several frameworks play, made alike for all of them: mpe2's simple_spread, and Atari's
Pong for two, whose players see the console's 128 bytes of memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from peers.timing import CYCLES

FUNCTIONS = {"mpe2": "mpe2.simple_spread_v3:parallel_env", "atari_pong": "pettingzoo.atari.pong_v3:parallel_env"}
SEATS = {"mpe2": 3, "atari_pong": 2}


def options(env: str) -> dict[str, Any]:
    """What an env's function is called with; Pong's ROM is the one in ale-py's wheel."""
    if env == "mpe2":
        return {"max_cycles": CYCLES, "continuous_actions": False}
    found = importlib.util.find_spec("ale_py")
    if found is None or found.origin is None:
        raise ValueError("Atari's Pong needs ale-py and multi-agent-ale-py: pip install -e '.[atari]'")
    return {"obs_type": "ram", "auto_rom_install_path": str(Path(found.origin).parent)}


def make(env: str) -> Any:
    """A new env for parallel play."""
    module, function = FUNCTIONS[env].split(":")
    return getattr(importlib.import_module(module), function)(**options(env))
