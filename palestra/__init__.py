"""palestra: train language agents and small networks together, in teams, in games and as populations.

    import palestra as pl

    run = pl.train("configs/demo.yaml", steps=30)
    run = pl.train(env="sokoban", policies={"default": pl.Lora("tiny", rank=8)}, algorithm=pl.GRPO(group_size=8))
    run.metrics, run.evals, run.evaluate(split="test"), run.plot()

Names are loaded when they are first used, so that `import palestra` and `palestra --help` are fast. Names that both
kinds of run have are those of language agents; `palestra.vector.PPO` is that of networks.
"""

from __future__ import annotations

from importlib import import_module

from palestra.core.lazy_names import load_name, public_names

# As in typing, which is not imported here: `python -m palestra` would take it from the folder in which it is typed.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_PACKAGES = ("text", "vector")
_MODULES = {
    "api.train": ["train"],
    "api.agents.loaded": ["load_agent"],
    "api.trained_run": ["TrainedRun", "evaluate", "load_run"],
    "text": [
        "DPO",
        "Distill",
        "EndpointConfig",
        "ExpertConfig",
        "Frozen",
        "Full",
        "GRPO",
        "HumanConfig",
        "KTO",
        "Lora",
        "PPO",
        "RandomConfig",
        "RewardModel",
        "SFT",
        "ScriptedConfig",
    ],
    "vector": [
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
        "Net",
        "PQN",
        "QMIX",
        "SAC",
        "TD3",
        "TRPO",
    ],
    "populations.plans.psro": ["PSROConfig"],
    "populations.plans.xdo": ["XDOConfig"],
    "populations.plans.self_play": ["SelfPlayConfig"],
    "populations.plans.league": ["LeagueConfig"],
    "populations.plans.pbt": ["PBTConfig"],
    "populations.plans.matchmaking": [
        "HistoryMatchmaker",
        "LatestMatchmaker",
        "MetaSolverMatchmaker",
        "PFSPMatchmaker",
    ],
    "populations.plans.solvers": [
        "AlphaRank",
        "CoarseCorrelatedEquilibrium",
        "CorrelatedEquilibrium",
        "FictitiousPlay",
        "Nash",
        "ProjectedReplicator",
        "RegretMatching",
        "Uniform",
    ],
    "populations.build.build": ["ExactOracle", "NetOracle"],
    "populations.workers.lm_oracle": ["LanguageOracle"],
    "envs": ["Env", "VectorEnv", "check_env", "make_env"],
    "envs.text.chain": ["Chain", "Prompts"],
    "evaluation.game_policy": ["GamePolicy"],
    "runs.loop": ["Callback"],
    "core.types": ["Step"],
}

__all__ = sorted([*public_names(_MODULES), *_PACKAGES])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"palestra.{name}")
    if name.isupper() and name not in __all__:
        from palestra.text.algorithms.presets import TEXT_PRESETS
        from palestra.vector.algorithms.presets import VECTOR_PRESETS

        if preset := {**TEXT_PRESETS, **VECTOR_PRESETS}.get(name.lower()):
            settings = ", ".join(f"{key}={value!r}" for key, value in preset.items() if key != "type")
            raise AttributeError(
                f"palestra has no class {name}: it is {preset['type']} with {settings}. Write "
                f'algorithm="{name.lower()}", or {{"type": "{name.lower()}", ...}} with further keys'
            )
    return load_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
