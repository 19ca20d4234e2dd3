"""Envs by name, and the error messages for wrong names and options."""

import sys
import types

import pytest

from palestra.envs import load_env_class, make_env, validate_env_options
from palestra.envs.base import Env
from palestra.envs.text.grid.sokoban import Sokoban


def test_built_in_names_and_defaults():
    env = make_env("sokoban")
    assert isinstance(env, Sokoban) and (env.size, env.walls) == (6, 3)
    assert make_env("sokoban", size=4).walls == 1
    assert make_env("plan_path", size="5").size == 5


def test_options_are_coerced_and_defaults_left_out():
    assert validate_env_options(Sokoban, {"size": "4", "team": "single"}) == {"size": 4, "team": "single"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sokobn", {}, 'unknown env "sokobn": did you mean sokoban.*plan_path.*sokoban'),
        ("sokoban", {"sise": 4}, 'no option "sise": did you mean size'),
        ("gymnasium", {"game": "CartPole-v1"}, 'no option "game": did you mean id'),
        ("pettingzoo", {"id": "mpe2.simple_v3"}, 'no option "id": did you mean env'),
        ("openspiel", {"env": "kuhn_poker"}, 'no option "env": did you mean game'),
        ("sokoban", {"size": "big"}, 'option "size" of env "sokoban": input should be a valid integer'),
        ("sokoban", {"team": "pair"}, "'planner_executor', 'alternating' or 'single'"),
        ("sokoban", {"size": 99}, "size=99 is out of range: give 3 to 12"),
        ("math", {"team": "single", "tool_time_limit_s": 5}, "tool_time_limit_s is for programs, and team: single"),
        ("debate", {"weights": {"form": 2}}, r'"debate" has no option "weights\.form"$'),
        ("debate", {"weights": {"evidence": -1}}, 'option "weights.evidence" of env "debate": input should be greater'),
        ("nowhere:Env", {}, "cannot be loaded"),
        ("os:path", {}, "not a subclass"),
    ],
)
def test_invalid_names_and_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_env(name, **options)


def test_env_class_by_import_path(monkeypatch):
    module = types.ModuleType("their_envs")

    class CustomEnv(Env):
        seats = ("a",)

        def __init__(self, level: int, **more: str) -> None:
            self.level, self.more = level, more

        def reset(self, seed):
            raise NotImplementedError

        def step(self, actions):
            raise NotImplementedError

    module.CustomEnv = CustomEnv
    monkeypatch.setitem(sys.modules, "their_envs", module)
    assert load_env_class("their_envs:CustomEnv") is CustomEnv
    env = make_env("their_envs:CustomEnv", level="2", colour="red")
    assert (env.level, env.more) == (2, {"colour": "red"})
    with pytest.raises(ValueError, match='option "level"'):
        make_env("their_envs:CustomEnv")
