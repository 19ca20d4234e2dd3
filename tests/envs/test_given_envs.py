"""Envs given as classes and functions: `check_env` and `train` recognise those of PettingZoo and Gymnasium."""

import asyncio
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from helpers.package_envs import Meet, Unseeded, Walk

import palestra as pl
from palestra.envs import make_env
from palestra.envs.local import env_config
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.envs.vector.kuhn import KuhnPoker

ENVS = {
    "PettingZoo": Meet,
    "makes PettingZoo": lambda: Meet(),
    "Gymnasium": Walk,
    "makes Gymnasium": lambda: Walk(3),
    "text": PlanPath,
    "vector": KuhnPoker,
}


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_envs_of_every_kind_are_checked_in_a_notebook(env: Any) -> None:
    async def cell() -> None:
        pl.check_env(env)

    asyncio.run(cell())


def test_errors_of_package_envs_are_found_through_the_adapter() -> None:
    with pytest.raises(ValueError, match=r"env Unseeded: differs in obs .* Fix: reset"):
        pl.check_env(Unseeded)


def test_what_cannot_be_checked_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"env is an instance, and several are played: give Meet, or lambda: Meet"):
        pl.check_env(Meet())
    pole = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match=r'or \{"type": "gymnasium", "id": "CartPole-v1"\}'):
        pl.check_env(pole)
    with pytest.raises(ValueError, match=r"KuhnPoker is a VectorEnv.*num_envs=copies"):
        pl.check_env(lambda: make_env("kuhn_poker", num_envs=4))
    for nothing in (5, "sokoban", Path, lambda: Path()):
        with pytest.raises(ValueError, match=r"give a name, a config.*PettingZoo or Gymnasium"):
            pl.check_env(nothing)
    with pytest.raises(ValueError, match=r'write env: \{type: pettingzoo, env: "helpers.package_envs:Meet"\}'):
        make_env("helpers.package_envs:Meet")


def test_package_envs_are_named_in_the_config_by_their_adapter() -> None:
    assert env_config(Meet) == {"type": "pettingzoo", "env": "helpers.package_envs:Meet"}
    walk = env_config(Walk)
    assert walk == {"type": "gymnasium", "id": "helpers.package_envs:Walk"}
    assert make_env(**walk, num_envs=2, options={"length": 2}).seats == ("agent",)

    class OnlyHere(Meet):
        pass

    assert env_config(OnlyHere) == env_config(OnlyHere) == {"type": "local:OnlyHere"}
    assert make_env("local:OnlyHere", num_envs=3).seats == ("red", "blue")


@pytest.mark.parametrize("env", [Meet, lambda: Walk(3)], ids=["importable", "local"])
def test_package_envs_train_as_they_are(env: Any, tmp_path: Path) -> None:
    seats = ("red", "blue") if env is Meet else ("agent",)
    nets = {seat: pl.Net(hidden=[8]) for seat in seats}
    run = pl.train(env=env, policies=nets, algorithm=pl.vector.PPO(), env_steps=2_000, root=tmp_path)
    assert run.evaluate(episodes=4).metrics["episodes"] == 4
    assert run.config["env"].get("env", "local") in ("helpers.package_envs:Meet", "local")
