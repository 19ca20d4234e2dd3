"""Options of a LoRA adapter, with the names and meanings that PEFT gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from palestra.core.config import StrictModel, is_changed

T = TypeVar("T")


class LoraVariantsConfig(StrictModel):
    """Options beyond rank, scale and target layers."""

    use_rslora: bool = False
    """Rank-stabilised LoRA (Kalajdzievski, 2023): the scale is alpha / sqrt(rank) instead of alpha / rank."""
    use_dora: bool = False
    """DoRA (Liu et al., 2024): also trains the length of each row of an adapted layer's weight, apart from its
    direction. Slower in sampling."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which a value at the adapter's input is set to 0, in training passes of `sft` and
    `reward_model`. Other algorithms compare log-probabilities with passes that have no dropout."""
    rank_pattern: dict[str, int] = {}
    """Ranks of some layers, by regular expression of the end of their names, for example `{q_proj: 4}`; others have
    `rank`."""
    alpha_pattern: dict[str, float] = {}
    """Values of `alpha` of some layers, by regular expression of the end of their names; others have `alpha`."""
    target_parameters: list[str] = []
    """Stacked weights of experts with an adapter, by the end of their names, for example
    `[mlp.experts.gate_up_proj]`. Slower in sampling."""
    modules_to_save: list[str] = []
    """Modules whose weights are trained in full beside the adapter, by the end of their names: linear layers, the
    output head (`lm_head`) and the embeddings of tokens (`embed_tokens`). Slower in sampling."""

    @model_validator(mode="after")
    def _valid_variants(self) -> Self:
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} in rank_pattern or alpha_pattern is not a regular expression ({error})"
                ) from error
        if low := [name for name, rank in self.rank_pattern.items() if rank < 1]:
            raise ValueError(f"rank_pattern.{low[0]} must be at least 1: a rank is the number of columns of a matrix")
        if low := [name for name, alpha in self.alpha_pattern.items() if alpha <= 0]:
            raise ValueError(f"alpha_pattern.{low[0]} must be above 0: it scales the adapter's output")
        if self.target_parameters and (self.use_dora or self.lora_dropout):
            other = "use_dora" if self.use_dora else "lora_dropout"
            raise ValueError(
                f"target_parameters cannot be combined with {other}: experts are adapted by adding to their stacked "
                f"weights. Leave {other} out, or adapt linear layers only"
            )
        return self

    @property
    def variants(self) -> dict[str, Any]:
        """Returns the options of this class that are not their defaults."""
        return {name: getattr(self, name) for name in LoraVariantsConfig.model_fields if is_changed(self, name)}


class LoraConfig(LoraVariantsConfig):
    """Rank, scale and target layers of an adapter."""

    rank: int = Field(8, ge=1)
    """Rank of the low-rank matrices, at least 1."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with an adapter: "all-linear" (all linear layers of the decoder layers, without the head), or name
    suffixes such as "q_proj" and "lm_head"."""

    def rank_of(self, name: str) -> int:
        """Returns the rank at the layer or stacked weight `name`."""
        return _by_pattern(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Returns the factor of the adapter's output at the layer or stacked weight `name`."""
        alpha = _by_pattern(self.alpha_pattern, name, self.alpha)
        rank: float = self.rank_of(name)
        if self.use_rslora:
            rank = math.sqrt(rank)
        return alpha / rank

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raises ValueError for a pattern that matches none of the adapted `names`."""
        names = list(names)
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                if not any(matches_pattern(pattern, name) for name in names):
                    kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
                    raise ValueError(f"{key}.{pattern} matches no adapted layer. Adapted are {kinds}: correct the key.")


def _by_pattern(patterns: Mapping[str, T], name: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if matches_pattern(pattern, name)), default)


def names_of_targets(names: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Returns the names that are one of `targets`, or end in one after a dot."""
    endings = tuple(f".{target}" for target in targets)
    return [name for name in names if f".{name}".endswith(endings)]


def matches_pattern(pattern: str, name: str) -> bool:
    """Returns whether PEFT (`get_pattern_key`) takes `pattern` for `name`."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
