"""The words that users of other libraries type: each is answered with the key that does it here."""

import pytest

import palestra as pl
from palestra.core.config import validate
from palestra.core.config.key_hints import NAMES_ELSEWHERE
from palestra.core.config.tree import override
from palestra.text.config import TextConfig
from palestra.vector.config import VectorConfig

TEAM = {
    "env": {"type": "sokoban"},
    "algorithm": {"type": "grpo"},
    "policies": {"planner": {"type": "lora"}, "mover": {"type": "lora"}},
}
GAME = {"env": {"type": "simple_spread"}, "policies": {"agent": {"type": "net"}}, "algorithm": {"type": "ppo"}}


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("policies.mover.learning_rate=1e-3", "lr"),
        ("policies.mover.r=8", "rank"),
        ("policies.mover.lora_alpha=8", "alpha"),
        ("policies.mover.sampling.max_new_tokens=9", "max_tokens"),
        ("policies.mover.max_new_tokens=9", "policies.mover.sampling.max_tokens or policies.mover.context.max_tokens"),
        ("policies.mover.temperature=1", "policies.mover.sampling.temperature"),
        ("policies.mover.group_size=4", "algorithm.group_size"),
        ("algorithm.num_generations=4", "group_size"),
        ("algorithm.beta=0.1", "kl_coef"),
        ("algorithm.lr=0.1", "policies.planner.lr or policies.mover.lr"),
        ("learning_rate=1e-3", "policies.planner.lr or policies.mover.lr"),
        ("num_generations=8", "algorithm.group_size"),
        ("num_train_epochs=3", "steps"),
        ("max_steps=3", "steps"),
        ("stpes=3", "steps"),
        ("policies.mover.rnak=3", "rank"),
        ("policies.mover.adam_betas=[0.9,0.99]", "policies.mover.optimizer.betas"),
        ("policies.mover.weight_decay=0.1", "policies.mover.optimizer.weight_decay"),
    ],
)
def test_a_text_config_names_the_key_that_was_meant(setting, meant):
    with pytest.raises(ValueError, match=rf"unknown key {setting.split('=')[0]}: did you mean {meant}[? ]"):
        validate(TextConfig, override(TEAM, [setting]))


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("algorithm.n_steps=8", "rollout_length"),
        ("algorithm.ent_coef=0.1", "entropy_coef"),
        ("algorithm.learning_rate=0.1", "policies.agent.lr"),
        ("total_timesteps=100", "env_steps"),
        ("algorithm.num_sgd_iter=4", "epochs"),
    ],
)
def test_a_vector_config_names_the_key_that_was_meant(setting, meant):
    with pytest.raises(ValueError, match=rf"unknown key {setting.split('=')[0]}: did you mean {meant}[? ]"):
        validate(VectorConfig, override(GAME, [setting]))


def test_every_name_of_another_library_is_unknown_here_and_leads_to_a_key():
    keys = key_names(TextConfig.model_json_schema()) | key_names(VectorConfig.model_json_schema())
    assert set(NAMES_ELSEWHERE.values()) <= keys


def key_names(schema) -> set[str]:
    """All names of properties in a JSON schema."""
    if isinstance(schema, list):
        return set().union(*map(key_names, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", ())).union(*map(key_names, schema.values()))


def test_two_faults_in_python_are_a_list():
    with pytest.raises(ValueError, match=r"2 faults in the config:\n  group_size: .*\n  unknown key lrr"):
        pl.GRPO(group_size=0, lrr=1)


def test_a_word_stands_for_an_algorithm_and_for_a_policy():
    config = validate(
        TextConfig,
        {
            "env": {"type": "sokoban"},
            "algorithm": "dr_grpo",
            "policies": {"planner": "tiny", "executor": "expert"},
        },
    )
    assert config.algorithm.type == "grpo" and config.algorithm.scale == "none"
    assert config.policies["planner"].type == "lora" and config.policies["planner"].base == "tiny"
    assert config.policies["executor"].type == "expert"
    game = validate(
        VectorConfig, GAME | {"algorithm": "mappo", "policies": {"agent": {"type": "net", "optimizer": "sgd"}}}
    )
    assert game.algorithm.critic == "central"
    assert game.policies["agent"].optimizer.type == "sgd"
