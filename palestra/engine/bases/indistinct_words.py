"""Words that a base cannot tell apart: its training has not seen their tokens, and left all such with one embedding.

An adapter reads what the embeddings tell it, so it cannot learn to tell the words apart either.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import torch

from palestra.engine.bases.model import Engine

# Cosine from which two embeddings count as one: in the shipped bases it is at least 0.9997 between tokens that were not
# seen, and at most 0.86 between others.
SAME_DIRECTION = 0.999


def check_words(engine: Engine, told: Iterable[str], said: Iterable[str]) -> None:
    """Raises ValueError if the base has one embedding for two of the words that it is `told`, which stand after a
    space, or of those that it says (`said`), which an answer begins with, too. Does nothing for a base that is sharded
    over ranks."""
    if engine.sharded_params:
        return
    said = list(said)
    for start, words in ((" ", [*said, *told]), ("", said)):
        for one, other in combinations(dict.fromkeys(words), 2):
            if _are_one(engine, start + one, start + other):
                raise ValueError(
                    f'base {engine.name} has one embedding for the words "{one}" and "{other}", as for all tokens that '
                    "its training has not seen, so it cannot tell them apart: set env.vocabulary to words that it "
                    "knows, or take another base"
                )


def _are_one(engine: Engine, one: str, other: str) -> bool:
    """Returns whether two texts have equally many tokens, and those that differ have one embedding."""
    ids, others = (engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (one, other))
    if len(ids) != len(others):
        return False
    with torch.inference_mode():
        both = engine.model.get_input_embeddings()(engine.tensor([ids, others])).float()
    return bool((torch.cosine_similarity(both[0], both[1], dim=-1) > SAME_DIRECTION).all())
