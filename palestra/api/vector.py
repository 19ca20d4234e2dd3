"""Config objects of runs in vectorised envs, apart from those of language agents with the same names:
`palestra.vector.PPO`."""

from palestra.algorithms.vector.a2c import A2C
from palestra.algorithms.vector.coma import COMA
from palestra.algorithms.vector.cql import CQL
from palestra.algorithms.vector.cql_sac import CQLSAC
from palestra.algorithms.vector.ddpg import DDPG, TD3
from palestra.algorithms.vector.dqn import DQN
from palestra.algorithms.vector.facmac import FACMAC
from palestra.algorithms.vector.imitation import BC, GAIL
from palestra.algorithms.vector.iql import IQL
from palestra.algorithms.vector.mat import MAT
from palestra.algorithms.vector.maven import MAVEN
from palestra.algorithms.vector.nfsp import NFSP
from palestra.algorithms.vector.ppo import PPO
from palestra.algorithms.vector.pqn import PQN
from palestra.algorithms.vector.qmix import QMIX
from palestra.algorithms.vector.sac import SAC
from palestra.algorithms.vector.trpo import TRPO
from palestra.builders.vector_config import FrozenNetConfig as Frozen
from palestra.builders.vector_config import RandomActionsConfig as Random
from palestra.builders.vector_config import ScriptConfig as Script
from palestra.builders.vector_config import TrainedNetConfig as Net

__all__ = [
    "A2C",
    "BC",
    "COMA",
    "CQL",
    "CQLSAC",
    "DDPG",
    "DQN",
    "FACMAC",
    "GAIL",
    "IQL",
    "MAT",
    "MAVEN",
    "NFSP",
    "PPO",
    "PQN",
    "QMIX",
    "SAC",
    "TD3",
    "TRPO",
    "Frozen",
    "Net",
    "Random",
    "Script",
]
