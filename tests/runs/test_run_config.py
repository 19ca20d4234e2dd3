"""Settings shared by the configs of all kinds of runs, and by those of language agents and of vectorised envs."""

from typing import Any

import pytest

from palestra.core.config import validate
from palestra.core.config.descriptions import describe_keys
from palestra.populations.build.build import PopulationConfig
from palestra.runs.config import EvalConfig, PolicyRunConfig, RunConfig
from palestra.text.config import TextConfig, TextEvalConfig
from palestra.vector.config import VectorConfig, VectorEvalConfig

TREES: dict[type[PolicyRunConfig], dict[str, Any]] = {
    TextConfig: {"env": {"type": "sokoban"}, "policies": {"default": {"type": "lora"}}},
    VectorConfig: {"env": {"type": "matrix"}, "policies": {"default": {"type": "net"}}},
}


@pytest.mark.parametrize("model", TREES)
def test_shared_rules_apply_to_every_run_with_policies(model: type[PolicyRunConfig]) -> None:
    config = validate(model, TREES[model] | {"evals": {"dev": {"seats": {"*": "default"}}}})
    assert isinstance(config, PolicyRunConfig) and config.evals["dev"].episodes == 100
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


@pytest.mark.parametrize(
    ("base", "model"),
    [(PolicyRunConfig, TextConfig), (PolicyRunConfig, VectorConfig), (RunConfig, PopulationConfig)],
)
def test_shared_keys_have_one_description_and_come_first(base: type[RunConfig], model: type[RunConfig]) -> None:
    shared = {key.key: key.text for key in describe_keys(base)}
    keys = {key.key: key.text for key in describe_keys(model)}
    assert list(keys)[: len(shared)] == list(shared)
    differing = {name for name, text in shared.items() if keys[name] != text}
    assert differing <= {"env", "policies", "algorithm"}


def test_an_untrained_policy_has_no_optimizer_settings() -> None:
    frozen = validate(TextConfig, TREES[TextConfig] | {"policies": {"default": {"type": "frozen", "dtype": "float32"}}})
    assert frozen.policies["default"].dtype == "float32"
    for key in ("lr", "optimizer", "critic_lr", "batch_size"):
        with pytest.raises(ValueError, match=rf"policies\.default\.{key}"):
            validate(TextConfig, TREES[TextConfig] | {"policies": {"default": {"type": "frozen", key: 1}}})


def test_evaluations_have_one_description() -> None:
    evals = {key.key: key.text for key in describe_keys(EvalConfig)}
    for eval_model in (TextEvalConfig, VectorEvalConfig):
        assert evals.items() <= {key.key: key.text for key in describe_keys(eval_model)}.items()


def test_only_language_agents_reserve_the_name_base() -> None:
    assert "base" in validate(VectorConfig, TREES[VectorConfig] | {"policies": {"base": {"type": "net"}}}).policies
    with pytest.raises(ValueError, match='cannot be called "base"'):
        validate(TextConfig, TREES[TextConfig] | {"policies": {"base": {"type": "lora"}}})


def test_a_population_has_the_keys_of_every_run() -> None:
    tree = {"env": {"type": "matrix"}, "population": {"type": "psro"}, "oracle": {"type": "exact"}}
    config = validate(PopulationConfig, tree)
    assert isinstance(config, RunConfig) and (config.name, config.seed, config.env_label) == ("population", 0, "matrix")
    shared = {key.key: key.text for key in describe_keys(RunConfig)}
    assert set(shared) == {"name", "seed", "tags", "env", "sinks", "mirror"}
    assert shared.items() <= {key.key: key.text for key in describe_keys(PopulationConfig)}.items()
    with pytest.raises(ValueError, match="cannot be the name of a run"):
        validate(PopulationConfig, tree | {"name": "a/b"})
