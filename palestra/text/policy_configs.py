"""Config models of the policies of a language-agent run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from palestra.core.config import StrictModel
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.learners.lm_config import FullPolicyConfig, LMPolicyConfig, LoraPolicyConfig
from palestra.text.policies.endpoint import EndpointConfig


class LoraWithTeacherConfig(LoraPolicyConfig):
    """A trained LoRA adapter, optionally with a teacher policy that acts in its place (on-line imitation) or scores its
    answers (on-policy distillation)."""

    teacher: str | None = None
    """Name of the policy that this one learns from: with `algorithm: {type: sft}` the teacher acts at this policy's
    seats, with `distill` it scores this policy's answers. It must be one of `policies`; a teacher that acts has no
    teacher itself. Null: no teacher."""


class FrozenConfig(LMPolicyConfig):
    """A language model policy that is not trained."""

    type: Literal["frozen"] = "frozen"
    path: str | None = None
    """Folder of a saved adapter or full model. Null: the base model without an adapter."""

    @classmethod
    def of(cls, policy: LMPolicyConfig, path: str | Path | None, sampling: SamplingConfig) -> Self:
        """Returns the config of a policy that plays the weights at `path` with the base and prompt of `policy`."""
        shared = {key: getattr(policy, key) for key in LMPolicyConfig.model_fields}
        return cls(**shared | {"sampling": sampling, "path": None if path is None else str(path)})


class RandomConfig(StrictModel):
    """A random policy: over the legal actions if the env lists them, else random words."""

    type: Literal["random"] = "random"
    words: list[str] = ["up", "down", "left", "right"]
    """Vocabulary for envs that list no legal actions."""
    length: int = Field(3, ge=1, le=10_000)
    """Largest number of words in an answer made from `words`; the number is uniform from 1 to `length`."""
    odds: float = Field(1.0, ge=1)
    """The largest odds between two legal actions, which then follow from the observation: who imitates such a player
    learns to tell observations apart. 1: all are equally likely. Refused in an env that lists no legal actions."""


class ScriptedConfig(StrictModel):
    """A policy with fixed answers."""

    type: Literal["scripted"] = "scripted"
    answers: list[str] = Field(min_length=1)
    """The answers, one per turn of a trajectory; after the last one the list starts over."""


class ExpertConfig(StrictModel):
    """The env's built-in expert, which has access to the solution. Use it to record or imitate demonstrations, not as
    an opponent in evaluations. Not every env has one."""

    type: Literal["expert"] = "expert"


class HumanConfig(StrictModel):
    """A person who types the answers at the terminal."""

    type: Literal["human"] = "human"


def _policy_of_word(tree: Any) -> Any:
    """Returns the config of a policy given as a word: a type that needs no keys, or a base to train by LoRA."""
    if not isinstance(tree, str):
        return tree
    return {"type": tree} if tree in ("random", "expert", "human") else {"type": "lora", "base": tree}


PolicyConfig = Annotated[
    LoraWithTeacherConfig
    | FullPolicyConfig
    | FrozenConfig
    | EndpointConfig
    | RandomConfig
    | ScriptedConfig
    | ExpertConfig
    | HumanConfig,
    Field(discriminator="type"),
    BeforeValidator(_policy_of_word),
]
