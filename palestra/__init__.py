"""palestra: train language agents and small networks together, in teams, in games and as populations.

    import palestra as pl

    run = pl.train("configs/demo.yaml", steps=30)
    run = pl.train(env="sokoban", policies={"default": pl.Lora("tiny", rank=8)}, algorithm=pl.GRPO(group_size=8))
    run.metrics, run.evals, run.evaluate(split="test"), run.plot()

Names are loaded when they are first used, so that `import palestra` and `palestra --help` are fast.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {  # module: names that it gives to `import palestra`
    "api.train": ["train"],
    "api.trained_run": ["TrainedRun", "evaluate", "load_run"],
    "api.configs": ["Frozen", "Full", "Lora"],
    "api.vector": [
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
    "algorithms.text.distill": ["Distill"],
    "algorithms.text.dpo": ["DPO"],
    "algorithms.text.grpo": ["GRPO"],
    "algorithms.text.kto": ["KTO"],
    "algorithms.text.ppo": ["PPO"],
    "algorithms.text.reward_model": ["RewardModel"],
    "algorithms.text.sft": ["SFT"],
    "builders.text_policies": ["ExpertConfig", "HumanConfig", "RandomConfig", "ScriptedConfig"],
    "policies.endpoint": ["EndpointConfig"],
    "populations.psro": ["PSROConfig"],
    "populations.xdo": ["XDOConfig"],
    "populations.self_play": ["SelfPlayConfig"],
    "populations.league": ["LeagueConfig"],
    "populations.pbt": ["PBTConfig"],
    "populations.matchmaking": ["HistoryMatchmaker", "LatestMatchmaker", "MetaSolverMatchmaker", "PFSPMatchmaker"],
    "populations.solvers": [
        "AlphaRank",
        "CoarseCorrelatedEquilibrium",
        "CorrelatedEquilibrium",
        "FictitiousPlay",
        "Nash",
        "ProjectedReplicator",
        "RegretMatching",
        "Uniform",
    ],
    "launch.population": ["ExactOracle", "NetOracle"],
    "workers.lm_oracle": ["LanguageOracle"],
    "envs": ["Env", "VectorEnv", "check_env", "make_env"],
    "evaluation.game_policy": ["GamePolicy"],
    "envs.text.prompt_rows": ["Prompts"],
    "training.loop": ["Callback"],
    "types": ["Step"],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "vector"])


def __getattr__(name: str) -> Any:
    """The public names, each loaded when it is first used (PEP 562)."""
    if name == "vector":  # config objects of vectorised envs: `palestra.vector.PPO`
        value: Any = import_module("palestra.api.vector")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"palestra.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
