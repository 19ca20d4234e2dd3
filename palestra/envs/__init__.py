"""Envs by name: built-in envs, envs of installed packages, any class given as "module:Class", and "local:Name" for a
class without an importable name (local.py).

The options of an env are the keyword arguments of its `__init__`: their names, type hints and defaults are its schema.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from palestra.core.config.key_hints import hint, nearest
from palestra.core.config.own_types import init_options
from palestra.core.config.user_modules import entry_point_paths, explain_import_error, import_object
from palestra.core.user_functions import check_overrides
from palestra.envs.base import Env
from palestra.envs.base import check_env as check_one
from palestra.envs.local import (
    KEYS_OF_PATHS,
    LOCAL_PREFIX,
    EnvClass,
    adapt_env,
    find_local_env,
    made_class,
    new_env,
    package_of,
)
from palestra.envs.vector_base import VectorEnv
from palestra.envs.vector_check import check_vector_env

__all__ = [
    "ENTRY_POINT_GROUP",
    "TEXT_ENVS",
    "VECTOR_ENVS",
    "Env",
    "VectorEnv",
    "check_env",
    "env_options",
    "known_envs",
    "load_env_class",
    "make_env",
    "new_env",
    "validate_env_options",
]

ENTRY_POINT_GROUP = "palestra.envs"
TEXT_ENVS: dict[str, str] = {
    "plan_path": "palestra.envs.text.grid.plan_path:PlanPath",
    "sokoban": "palestra.envs.text.grid.sokoban:Sokoban",
    "math": "palestra.environments.math.env:Math",
    "math_review": "palestra.environments.math.review:MathReview",
    "math_judge": "palestra.environments.math.judge:MathJudge",
    "math_relay": "palestra.environments.math.relay:MathRelay",
    "tool_review": "palestra.environments.tools.review:ToolReview",
    "code": "palestra.environments.code.env:CoderTester",
    "debate": "palestra.environments.debate.env:Debate",
    "tools": "palestra.environments.tools.env:Tools",
    "workflow": "palestra.envs.adapters.workflow:Workflow",
    "chain": "palestra.envs.text.chain:ChainOfFile",
    "sudoku": "palestra.environments.sudoku.env:Sudoku",
    "guess_number": "palestra.environments.guessing.env:GuessNumber",
    "twenty_questions": "palestra.environments.guessing.twenty_questions:TwentyQuestions",
    "describe_guess": "palestra.environments.guessing.describe:DescribeGuess",
    "textarena": "palestra.envs.adapters.textarena:TextArena",
    "verifiers": "palestra.envs.adapters.verifiers:Verifiers",
    "openenv": "palestra.envs.adapters.openenv:OpenEnv",
    "text_kuhn": "palestra.envs.text.board_games:TextKuhn",
    "text_leduc": "palestra.envs.text.board_games:TextLeduc",
    "text_liars_dice": "palestra.envs.text.board_games:TextLiarsDice",
    "text_tic_tac_toe": "palestra.envs.text.board_games:TextTicTacToe",
    "text_connect_four": "palestra.envs.text.board_games:TextConnectFour",
    "text_bargaining": "palestra.envs.text.board_games:TextBargaining",
    "arena": "palestra.evaluation.arena.match:ArenaMatch",
}
VECTOR_ENVS: dict[str, str] = {  # vector envs
    "simple_spread": "palestra.envs.vector.mpe:SimpleSpread",
    "simple_adversary": "palestra.envs.vector.mpe:SimpleAdversary",
    "simple_tag": "palestra.envs.vector.mpe:SimpleTag",
    "simple_speaker_listener": "palestra.envs.vector.mpe:SimpleSpeakerListener",
    "kuhn_poker": "palestra.envs.vector.kuhn:KuhnPoker",
    "leduc_poker": "palestra.envs.vector.leduc:LeducPoker",
    "liars_dice": "palestra.envs.vector.liars_dice:LiarsDice",
    "matrix": "palestra.envs.vector.matrix:MatrixGame",
    "two_step": "palestra.envs.vector.matrix:TwoStepGame",
    "m_step": "palestra.envs.vector.matrix:MStepGame",
    "foraging": "palestra.environments.foraging.env:Foraging",
    "combat": "palestra.environments.combat.env:Combat",
    "overcooked": "palestra.environments.overcooked.env:Overcooked",
    "pong": "palestra.environments.pong.env:Pong",
    "pettingzoo": "palestra.envs.adapters.pettingzoo.games:PettingZooEnv",
    "gymnasium": "palestra.envs.adapters.gymnasium:GymnasiumEnv",
    "openspiel": "palestra.envs.adapters.openspiel:OpenSpielEnv",
    "envpool": "palestra.envs.adapters.envpool:EnvPoolEnv",
    "jaxmarl": "palestra.envs.adapters.jaxmarl:JaxMarlEnv",
    "vmas": "palestra.envs.adapters.vmas:VmasEnv",
    "atari": "palestra.envs.adapters.atari:AtariEnv",
    "highway": "palestra.envs.adapters.highway:HighwayEnv",
}
ENVS_WITH_EXTRA = (  # envs that need the extra of the same name
    *("pettingzoo", "gymnasium", "openspiel", "envpool", "jaxmarl", "vmas", "atari", "highway"),
    *("textarena", "verifiers", "openenv"),
)


def check_env(make_env: Callable[..., Any], **options: Any) -> None:
    """Plays an env at random and raises ValueError, with the fix, if it violates the env contract.

    Calls `check_one` (`palestra.envs.base.check_env`) for a factory of `Env`, and `check_vector_env` for a factory of
    `VectorEnv` that takes the number of parallel copies. A class of PettingZoo or Gymnasium, or a function that makes
    such an env, is checked through its adapter.
    """
    takes = {} if inspect.isclass(make_env) or not callable(make_env) else inspect.signature(make_env).parameters
    if any(parameter.default is parameter.empty for parameter in takes.values()):
        return check_vector_env(make_env, **options)
    cls = made_class(make_env)
    if package_of(cls):
        adapted = adapt_env(make_env, cls)
        return check_vector_env(lambda num_envs: new_env(adapted, {"num_envs": num_envs}), **options)
    if not issubclass(cls, VectorEnv):
        return check_one(lambda: new_env(make_env, {}), **options)
    if not (inspect.isclass(make_env) or takes):
        raise ValueError(
            f"{cls.__name__} is a VectorEnv, and is checked with several numbers of copies: give a function of it, "
            "check_env(lambda copies: make_env(..., num_envs=copies))"
        )
    return check_vector_env(make_env, **options)


def make_env(type: str, **options: Any) -> Any:
    """Returns a new env: `make_env("sokoban", size=4)`.

    Raises ValueError for an unknown name or option, with the nearest spelling.
    """
    cls = load_env_class(type)
    return new_env(cls, validate_env_options(cls, options))


def is_vector_config(tree: Mapping[str, Any]) -> bool:
    """True if the env of a config is a `VectorEnv` of this process: many copies of a game at once, on arrays."""
    env = tree.get("env")
    if not isinstance(env, Mapping) or env.get("at"):
        return False
    kind = env.get("type")
    return isinstance(kind, str) and bool(kind) and issubclass(load_env_class(kind), VectorEnv)


def known_envs() -> dict[str, str]:
    """Returns the import path ("module:Class") of every named env: entry points, built-in text and vector envs."""
    return entry_point_paths(ENTRY_POINT_GROUP) | TEXT_ENVS | VECTOR_ENVS


def load_env_class(type: str) -> type[Env] | type[VectorEnv]:
    """Returns the class that `type` names: a built-in env, an entry point of group "palestra.envs", or "module:Class".

    Raises ValueError if the name is unknown, cannot be imported, or is not a subclass of `Env` or `VectorEnv`.
    """
    if not isinstance(type, str):
        raise ValueError(f"the type of an env is its name, as text, not {type!r:.40}: `palestra info` lists the envs")
    if type.startswith(LOCAL_PREFIX):
        return _check_class(find_local_env(type))
    named = TEXT_ENVS | VECTOR_ENVS
    if type not in named:
        named = known_envs()  # slow: scans all installed packages
    path = named.get(type, type)
    if ":" not in path:
        known = sorted(named)
        meant = nearest(type, known)
        if re.search(r"-v\d+$", type):
            meant = f': of Gymnasium it is env: {{type: gymnasium, id: "{type}"}}'
        elif Path(f"{type}.py").is_file():
            meant = f': {type}.py is a module, write "{type}:CLASS"'
        raise ValueError(f'unknown env "{type}"{meant}; known: {", ".join(known)}, or "module:Class"')
    try:
        cls = import_object(path)
    except (ImportError, AttributeError) as error:
        extra = f"; it needs more packages: pip install 'palestra[{type}]'" if type in ENVS_WITH_EXTRA else ""
        reason = explain_import_error(path, error)
        raise ValueError(f'env "{type}" cannot be loaded from {path}: {reason}{extra}') from error
    if inspect.isclass(cls) and (package := package_of(cls)):
        key = KEYS_OF_PATHS[package]
        raise ValueError(f'{path} is an env of {package}: write env: {{type: {package}, {key}: "{path}"}}')
    if not (inspect.isclass(cls) and issubclass(cls, Env | VectorEnv)):
        raise ValueError(f'env "{type}" is {path}, which is not a subclass of palestra.envs.Env or VectorEnv')
    return _check_class(cls)


@cache
def _check_class(cls: EnvClass) -> EnvClass:
    """Returns an env's class. Raises ValueError if a method cannot be called as an env's."""
    check_overrides(cls, f'env "{cls.name or cls.__name__}": {cls.__name__}', may_be_coroutines=issubclass(cls, Env))
    return cls


def validate_env_options(cls: type[Env] | type[VectorEnv], options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` checked and coerced against the keyword arguments of `cls.__init__`; defaults are left out.

    Raises ValueError that lists every unknown or ill-typed option, an unknown one with the nearest spelling.
    """
    model = env_options(cls)
    try:
        valid = model(**options)
    except ValidationError as error:
        lines = [_complaint(cls, model, detail["loc"], detail["type"], detail["msg"]) for detail in error.errors()]
        raise ValueError("; ".join(lines)) from error
    return {name: getattr(valid, name) for name in valid.model_fields_set}


def env_options(cls: type[Env] | type[VectorEnv]) -> type[BaseModel]:
    """Returns the options of an env as a model: the keyword arguments of `cls.__init__`, with types and defaults."""
    return init_options(cls)


def _complaint(
    cls: type[Env] | type[VectorEnv], model: type[BaseModel], where: tuple[int | str, ...], kind: str, message: str
) -> str:
    name = ".".join(map(str, where))
    env = cls.name or cls.__name__
    if kind == "extra_forbidden":
        if len(where) > 1:
            return f'env "{env}" has no option "{name}"'
        known = list(model.model_fields)
        meant = hint("", name, known, lambda _: ())
        return f'env "{env}" has no option "{name}"{meant} (options: {", ".join(known)})'
    return f'option "{name}" of env "{env}": {message[0].lower()}{message[1:]}'
