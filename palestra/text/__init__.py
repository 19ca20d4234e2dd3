"""Trains language agents in text envs. Config objects: `palestra.text.PPO`, `palestra.text.Lora`.

Names are loaded when they are first used.
"""

from typing import Any

from palestra.core.lazy_names import load_name, public_names

_MODULES = {
    "algorithms.distill": ["Distill"],
    "algorithms.dpo": ["DPO"],
    "algorithms.grpo": ["GRPO"],
    "algorithms.kto": ["KTO"],
    "algorithms.ppo": ["PPO"],
    "algorithms.reward_model": ["RewardModel"],
    "algorithms.sft": ["SFT"],
    "configs": ["Frozen", "Full", "Lora"],
    "policies.endpoint": ["EndpointConfig"],
    "policy_configs": ["ExpertConfig", "HumanConfig", "RandomConfig", "ScriptedConfig"],
}

__all__ = public_names(_MODULES)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return list(__all__)
