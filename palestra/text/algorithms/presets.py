"""Algorithms of language agents by the names of their papers: general algorithms with some settings fixed."""

from __future__ import annotations

from palestra.core.config.presets import Preset

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
