"""Config schema of a run of neural-network policies in a vectorised env."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from palestra.core.config import StrictModel, check_policy_names
from palestra.core.config.own_types import OwnTypes
from palestra.core.types import Seat
from palestra.runs.config import EvalConfig, PolicyRunConfig
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.coma import COMA
from palestra.vector.algorithms.experimental.cql import CQL
from palestra.vector.algorithms.experimental.cql_sac import CQLSAC
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.imitation import BC, GAIL
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.experimental.maven import MAVEN
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.nfsp import NFSP
from palestra.vector.algorithms.ppo import A2C, PPO
from palestra.vector.algorithms.pqn import PQN
from palestra.vector.algorithms.presets import VECTOR_PRESETS
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.nets import AlgorithmConfig
from palestra.vector.learners.policy_stack import NetPolicyConfig

VectorAlgorithmConfig = Annotated[
    PPO
    | A2C
    | TRPO
    | MAT
    | DQN
    | PQN
    | QMIX
    | MAVEN
    | NFSP
    | COMA
    | SAC
    | DDPG
    | TD3
    | FACMAC
    | BC
    | GAIL
    | IQL
    | CQL
    | CQLSAC,
    Field(discriminator="type"),
    OwnTypes("algorithm", AlgorithmConfig, presets=VECTOR_PRESETS),
]


class TrainedNetConfig(NetPolicyConfig):
    """A neural-network policy that is trained."""

    share_network: bool = True
    """True: all seats of the policy share one network. False: each seat gets its own network, named after the seat."""
    algorithm: VectorAlgorithmConfig | None = None
    """Training algorithm of this policy, on rollouts of the run's length. Null: the run's `algorithm`."""


class FrozenNetConfig(StrictModel):
    """A policy that another run trained."""

    type: Literal["frozen"] = "frozen"
    path: str
    """RUN:NAME for policy NAME in the newest checkpoint of folder RUN, or the folder of a policy in a checkpoint."""
    greedy: bool = False
    """True: take the most probable action. False: sample actions."""


class RandomActionsConfig(StrictModel):
    """A random policy: uniform over legal actions."""

    type: Literal["random"] = "random"


class ScriptConfig(StrictModel):
    """A scripted player that the env provides."""

    type: Literal["script"] = "script"
    script: str
    """Name of the script; the docs of the env list them."""


VectorPolicyConfig = Annotated[
    TrainedNetConfig | FrozenNetConfig | RandomActionsConfig | ScriptConfig, Field(discriminator="type")
]


class VectorEvalConfig(EvalConfig):
    """A held-out evaluation in a vectorised env."""

    greedy: bool = True
    """True: trained policies act greedily. False: they sample actions as in training."""
    env: dict[str, Any] = {}
    """Env options that differ from training. They must not change seats or observation shapes."""
    replays: int = Field(2, ge=0, le=16)
    """Games of each evaluation that are recorded step by step, as pictures or text, for the
    dashboard; at most one per env copy. 0: none."""


class VectorConfig(PolicyRunConfig):
    """A training run of neural-network policies in a vectorised env."""

    env_steps: int = Field(1_000_000, ge=1)
    """Length of the run in joint steps, summed over all env copies; rounded up to whole rollouts."""
    policies: dict[str, VectorPolicyConfig]
    """The policies by name; at least one has `type: net`, which is trained. A policy called
    `default` plays every seat that has no policy of its own."""
    teams: dict[Seat, str] = {}
    """Maps seats to teams, with patterns as in `seats`. A seat that matches no key is in the team of its policy. What
    combines the seats of a team (the mixers of `qmix`, `maven`, `facmac` and `pqn`, the factor of `sequential`, `mat`)
    trains each team by itself, and metrics are also reported by team."""
    algorithm: VectorAlgorithmConfig = PPO()
    """Training algorithm: `type` is one of these, or "module:Class" for a subclass of AlgorithmConfig."""
    evals: dict[str, VectorEvalConfig] = {}
    start_from: str | None = None
    """Folder of a run from whose newest checkpoint all networks start (policies, critics, mixers, and the statistics
    that normalise), for example to go on in a harder env; optimizers and replay begin anew. Its policies must have
    these names, shapes and algorithms; a resumed run needs it, too. Null: random weights."""
    log_every: int = Field(0, ge=0)
    """Joint steps between log lines, rounded up to whole rollouts. 0: about 500 lines in the run."""
    checkpoint_every: int | None = Field(None, ge=1)
    device: str = "cpu"
    """Torch device of networks, optimizers and minibatches: `cpu`, `cuda`, `cuda:1`, or `auto`,
    which is `cuda` if there is a GPU. Envs run on the CPU. A GPU is faster for wide networks and
    thousands of env copies, but not for small networks and few copies."""
    torch_threads: int = Field(1, ge=1, le=1024)
    """Torch threads per process. More than one usually slows training down on few cores."""
    num_processes: int = Field(1, ge=1, le=1024)
    """Number of processes that train together, synchronously: each steps its share of the env
    copies, and gradients are averaged."""
    num_actors: int = Field(0, ge=0, le=1024)
    """Actor processes that step the env copies asynchronously while this process trains on slightly older data; needs
    `algorithm.off_policy_correction: vtrace` and `num_processes: 1`. 0: this process steps the env itself."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not any(isinstance(policy, TrainedNetConfig) for policy in self.policies.values()):
            raise ValueError("no policy is trained: set type: net for at least one of policies:")
        return self

    @model_validator(mode="after")
    def _have_one_rollout(self) -> Self:
        shared = {key: getattr(self.algorithm, key) for key in ("rollout_length", "time_limit")}
        for name, policy in self.policies.items():
            if not isinstance(policy, TrainedNetConfig) or policy.algorithm is None:
                continue
            own = policy.algorithm
            for key, value in shared.items():
                if key in own.model_fields_set and getattr(own, key) != value:
                    raise ValueError(
                        f"policies.{name}.algorithm.{key}: {getattr(own, key)} differs from the run's {value}, and all "
                        f"policies learn from the same rollouts: set algorithm.{key}, and leave it out here"
                    )
            self.policies[name] = policy.model_copy(update={"algorithm": own.model_copy(update=shared)})
        if self.algorithm not in (*self.algorithms, PPO(**shared)):
            raise ValueError(
                f"algorithm: {self.algorithm.type} trains no policy, since each has an algorithm of its own: write "
                f"algorithm: {{type: ppo, rollout_length: {self.algorithm.rollout_length}, time_limit: "
                f"{self.algorithm.time_limit}}}, for the rollouts alone"
            )
        return self

    @property
    def algorithms(self) -> list[AlgorithmConfig]:
        """The algorithms of the trained policies, each once."""
        found: list[AlgorithmConfig] = []
        for name, policy in self.policies.items():
            if isinstance(policy, TrainedNetConfig) and self.algorithm_of(name) not in found:
                found.append(self.algorithm_of(name))
        return found

    def algorithm_of(self, name: str) -> AlgorithmConfig:
        """Returns the algorithm of a trained policy."""
        return getattr(self.policies[name], "algorithm", None) or self.algorithm

    @model_validator(mode="after")
    def _team_names(self) -> Self:
        check_policy_names(self.teams.values(), *self.reserved_names)
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.num_actors and self.num_processes > 1:
            raise ValueError("num_actors: needs a single learner process: set num_processes: 1, or num_actors: 0")
        corrections = {getattr(algorithm, "off_policy_correction", None) for algorithm in self.algorithms}
        if self.num_actors and corrections != {"vtrace"}:
            raise ValueError(
                "num_actors: play with weights that are some updates old: set algorithm.off_policy_correction: vtrace "
                "(ppo and a2c have it)"
            )
        return self
