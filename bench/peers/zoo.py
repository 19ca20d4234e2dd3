"""The PettingZoo envs that several frameworks play, with the same options for all: mpe2's simple_spread, and Atari's
two-player Pong with the console's 128 bytes of memory as observation."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from peers.timing import CYCLES
from pettingzoo.utils.wrappers import BaseParallelWrapper

FUNCTIONS = {"mpe2": "mpe2.simple_spread_v3:parallel_env", "atari_pong": "pettingzoo.atari.pong_v3:parallel_env"}
SEATS = {"mpe2": 3, "atari_pong": 2}


def options(env: str) -> dict[str, Any]:
    """Keyword arguments of an env's function. Pong's ROM is the one in ale-py's wheel; ValueError if it is missing."""
    if env == "mpe2":
        return {"max_cycles": CYCLES, "continuous_actions": False}
    found = importlib.util.find_spec("ale_py")
    if found is None or found.origin is None or not importlib.util.find_spec("multi_agent_ale_py"):
        raise ValueError("Atari's Pong needs ale-py and multi-agent-ale-py: pip install -e '.[atari]'")
    return {"obs_type": "ram", "auto_rom_install_path": str(Path(found.origin).parent)}


def make(env: str, floats: bool = False) -> Any:
    """A new env with the parallel API; `floats` converts observations to floats, for frameworks that do not."""
    module, function = FUNCTIONS[env].split(":")
    made = getattr(importlib.import_module(module), function)(**options(env))
    return Floats(made) if floats and made.observation_space(made.possible_agents[0]).dtype.kind != "f" else made


class Floats(BaseParallelWrapper):
    """An env with observations as float32."""

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        views = self.env.observation_space(agent)
        return gymnasium.spaces.Box(float(views.low.min()), float(views.high.max()), views.shape)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        seen, infos = self.env.reset(seed=seed, options=options)
        return self._floats(seen), infos

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        seen, *rest = self.env.step(actions)
        return self._floats(seen), *rest

    def _floats(self, seen: dict[str, Any]) -> dict[str, Any]:
        return {agent: view.astype(np.float32) for agent, view in seen.items()}
