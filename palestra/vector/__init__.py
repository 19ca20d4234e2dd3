"""Trains small networks in vector envs. Config objects: `palestra.vector.PPO`, `palestra.vector.Net`.

Names are loaded when they are first used.
"""

from typing import Any

from palestra.core.lazy_names import load_name, public_names

_MODULES = {
    "algorithms.ddpg": ["DDPG", "TD3"],
    "algorithms.dqn": ["DQN"],
    "algorithms.nfsp": ["NFSP"],
    "algorithms.ppo": ["A2C", "PPO"],
    "algorithms.pqn": ["PQN"],
    "algorithms.qmix": ["QMIX"],
    "algorithms.sac": ["SAC"],
    "algorithms.experimental.coma": ["COMA"],
    "algorithms.experimental.cql": ["CQL"],
    "algorithms.experimental.cql_sac": ["CQLSAC"],
    "algorithms.experimental.facmac": ["FACMAC"],
    "algorithms.experimental.imitation": ["BC", "GAIL"],
    "algorithms.experimental.iql": ["IQL"],
    "algorithms.experimental.mat": ["MAT"],
    "algorithms.experimental.maven": ["MAVEN"],
    "algorithms.experimental.trpo": ["TRPO"],
    "config": [
        "FrozenNetConfig as Frozen",
        "RandomActionsConfig as Random",
        "ScriptConfig as Script",
        "TrainedNetConfig as Net",
    ],
}

__all__ = public_names(_MODULES)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return list(__all__)
