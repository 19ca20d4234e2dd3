"""Settings shared by the configs of language agents and of vectorised envs."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.builders.run_config import EvalConfig, RunConfig
from palestra.builders.text_config import TextConfig, TextEvalConfig
from palestra.builders.vector_config import VectorConfig, VectorEvalConfig
from palestra.config import validate
from palestra.config.descriptions import describe_keys

TREES: dict[type[RunConfig], dict[str, Any]] = {
    TextConfig: {"env": {"type": "sokoban"}, "policies": {"default": {"type": "lora"}}},
    VectorConfig: {"env": {"type": "matrix"}, "policies": {"default": {"type": "net"}}},
}


@pytest.mark.parametrize("model", TREES)
def test_shared_rules_apply_to_every_kind_of_run(model: type[RunConfig]) -> None:
    config = validate(model, TREES[model] | {"evals": {"dev": {"seats": {"*": "default"}}}})
    assert isinstance(config, RunConfig) and config.evals["dev"].episodes == 100
    policy = TREES[model]["policies"]["default"]
    for changes, message in (
        ({"policies": {"team": policy}}, 'a policy cannot be called "team"'),
        ({"policies": {"a/b": policy}}, 'a policy cannot be called "a/b"'),
        ({"evals": {"dev": {"seats": {"a": "nobody"}}}}, 'an evaluation seats "nobody", but policies: names default'),
        ({"evals": {"dev": {"episodes": 0}}}, "evals.dev.episodes"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"name": "a/b"}, "cannot be the name of a run"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(model, TREES[model] | changes)


def test_shared_keys_have_one_description_and_come_first() -> None:
    shared = {key.key: key.text for key in describe_keys(RunConfig)}
    for model in TREES:
        keys = {key.key: key.text for key in describe_keys(model)}
        assert list(keys)[: len(shared)] == list(shared)
        differing = {name for name, text in shared.items() if keys[name] != text}
        assert differing <= {"env", "policies", "algorithm"}
    evals = {key.key: key.text for key in describe_keys(EvalConfig)}
    for eval_model in (TextEvalConfig, VectorEvalConfig):
        assert evals.items() <= {key.key: key.text for key in describe_keys(eval_model)}.items()


def test_only_language_agents_reserve_the_name_base() -> None:
    assert "base" in validate(VectorConfig, TREES[VectorConfig] | {"policies": {"base": {"type": "net"}}}).policies
    with pytest.raises(ValueError, match='cannot be called "base"'):
        validate(TextConfig, TREES[TextConfig] | {"policies": {"base": {"type": "lora"}}})
