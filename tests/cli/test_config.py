"""`palestra config`, and where the descriptions of config keys are shown."""

import os

import pytest
from helpers.terminal_text import plain
from helpers.warm_processes import run_palestra
from typer.testing import CliRunner

from palestra.api.config_reference import config_models
from palestra.cli.main import app
from palestra.core.config.descriptions import describe_keys


def config_output(*arguments):
    """What `palestra config` prints, in this process."""
    done = CliRunner().invoke(app, ["config", *arguments])
    assert done.exit_code == 0, done.output
    return plain(done.output)


def refused(*arguments):
    done = CliRunner().invoke(app, ["config", *arguments])
    assert done.exit_code == 2 and done.stdout == ""
    return plain(done.stderr)


def test_config_command_prints_every_key_of_an_algorithm():
    from palestra.text.algorithms.grpo import GRPO

    done = run_palestra("config", "grpo", env=os.environ | {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = plain(done.stdout)
    assert text.startswith("algorithm, type: grpo, in a run of language agents GRPO, AT-GRPO and variants.")
    assert "group_size: whole number, ≥ 1, ≤ 4096; default `8` Siblings per group (group size). 1 needs" in text
    for key in describe_keys(GRPO):
        assert f"{key.key}: {key.values_and_default} {key.text}" in text


def test_train_help_names_the_config_command():
    text = plain(CliRunner().invoke(app, ["train", "--help"]).output)
    assert "palestra config text" in text and "palestra config grpo" in text


def test_kind_of_run_shows_own_and_shared_keys():
    for kind, own in (("text", "steps: whole number, ≥ 1; default `100`"), ("vector", "env_steps: whole number, ≥ 1")):
        text = config_output(kind)
        assert own in text and "sinks:" in text and "Trackers that receive the run's metrics" in text
    assert "symmetric: true or false; default `false`" in config_output("population")


def test_type_without_model_is_shown_as_key():
    text = config_output("backend")
    assert "backend, in a run of language agents" in text
    assert "type: `inline`, `local`, `ray`; default `local`" in text


def test_one_key_is_shown_for_every_algorithm_that_has_it():
    text = config_output("algorithm", "clip")
    assert text.count("clip: number, > 0; default `0.2`") == 5
    assert "type: grpo, in a run of language agents" in text and "type: ppo, in a run in a vectorised env" in text
    assert "type: dpo" not in text and "group_size" not in text


def test_preset_is_shown_as_its_algorithm():
    text = config_output("at_grpo")
    assert text.startswith("type: at_grpo stands for type: grpo, branch_at: turn, continue_from: best")
    assert "group_size: whole number" in text
    assert config_output("mappo", "critic").startswith("type: mappo stands for type: ppo, critic: central critic: ")


def test_an_env_is_shown_with_its_options():
    text = config_output("sokoban")
    assert text.startswith("env, type: sokoban Push all boxes onto goals.") and "split: " in text
    assert "turns: whole number; default" in config_output("helpers.toys:Whisper")


def test_names_that_can_be_looked_up_are_listed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = config_output()
    for name in (
        "text",
        "vector",
        "population",
        "grpo",
        "at_grpo",
        "lora",
        "psro",
        "evals",
        "wandb",
        "mappo",
        "sokoban",
    ):
        assert f" {name}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grop"], 'no config has "grop": did you mean grpo?'),
        (["grop"], "`palestra config` lists the names"),
        (["grpo", "group_sise"], 'grpo has no key "group_sise": did you mean group_size?; its keys: branch_at'),
        (["nowhere:Env"], "cannot be loaded from nowhere:Env"),
    ],
)
def test_an_unknown_name_is_refused(arguments, message):
    assert message in refused(*arguments)


def test_every_key_of_every_config_has_a_description():
    models = config_models()
    without = [f"{one.title}: {key.key}" for one in models for key in describe_keys(one.model) if not key.text]
    assert without == [] and len(models) > 40
