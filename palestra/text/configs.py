"""Config objects of language-model policies, with the base as first argument: `Lora("tiny", rank=8)`."""

from __future__ import annotations

from typing import Any

from palestra.text.learners.lm_config import FullPolicyConfig
from palestra.text.policy_configs import FrozenConfig, LoraWithTeacherConfig


class Lora(LoraWithTeacherConfig):
    """A LoRA adapter in training, on `base`."""

    def __init__(self, base: str = "tiny", **settings: Any) -> None:
        super().__init__(base=base, **settings)


class Full(FullPolicyConfig):
    """A full language model in training, which begins as a copy of `base`."""

    def __init__(self, base: str = "tiny", **settings: Any) -> None:
        super().__init__(base=base, **settings)


class Frozen(FrozenConfig):
    """A language model that is not trained: `base`, or with `path` a saved adapter or model."""

    def __init__(self, base: str = "tiny", **settings: Any) -> None:
        super().__init__(base=base, **settings)
