"""Chooses the critic of each learner by the algorithms of a run's stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import LMPolicyConfig


def critic_kind(parts: Sequence[TextConfig], used: Collection[str]) -> dict[str, bool]:
    """Returns the arguments of `build_learner` that select a critic; `used` are the policies that play. Raises
    ValueError if stages select different critics, or if a central critic would read prompts of policies on different
    bases."""
    separate = {part.algorithm.has_separate_critic for part in parts if part.algorithm.needs_critic}
    if len(separate) > 1:
        raise ValueError(
            "one stage has critic: shared and another critic: separate or central, but a policy has one critic for "
            "the whole run: set the same in all stages"
        )
    for part in parts:
        policies = {name: part.policies[name] for name in sorted(used) if name in part.policies}
        bases = {name: policy.base for name, policy in policies.items() if isinstance(policy, LMPolicyConfig)}
        if part.algorithm.reads_joint_prompts and len(set(bases.values())) > 1:
            raise ValueError(
                f"critic: central reads the tokens of all seats, and {' and '.join(bases)} are on different bases "
                f"({', '.join(dict.fromkeys(bases.values()))}): use one base, or critic: separate"
            )
    return {"critic": bool(separate), "separate_critic": True in separate}
