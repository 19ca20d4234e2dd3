"""Builds the source of episodes that a reward model scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from palestra.core.config import load, validate
from palestra.core.types import Answer
from palestra.runs import find_run, list_checkpoints
from palestra.text.algorithms.reward_model import scoring_sample
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.learners.lm import LanguageLearner
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig
from palestra.text.rollouts.learned_reward import LearnedRewardSource
from palestra.text.rollouts.sources import EnvSource


def learned_reward_source(
    part: TextConfig, source: EnvSource, engines: object, learners: Mapping[str, LanguageLearner]
) -> LearnedRewardSource:
    """Returns `source` with the rewards of the reward model that a stage's `reward_model` names.

    Raises ValueError if the run or policy has no reward model, if its vocabulary differs from the learners', if the
    algorithm chooses branches by reward, or if the run plays or trains in other processes.
    """
    settings = part.reward_model
    assert settings is not None
    if not isinstance(engines, Engines) or engines.ranks.world_size > 1 or part.backend.type != "inline":
        raise ValueError(
            "reward_model needs a run that plays and trains in one process: leave out engine:, backend: and torchrun"
        )
    branching = part.algorithm.branching
    if branching.branch_at == "turn" and branching.continue_from in ("best", "epsilon"):
        raise ValueError(
            f"continue_from: {branching.continue_from} chooses by rewards during play, and reward_model gives its "
            "rewards after play: set algorithm.branch_at: root, or continue_from: random or all"
        )
    judge = _load(settings.path, engines)
    for name, learner in learners.items():
        if learner.encoder.tokenizer.get_vocab() != judge.encoder.tokenizer.get_vocab():
            raise ValueError(
                f"reward_model: {settings.path} scores the tokens of policies.{name}, but has a different vocabulary: "
                "train a reward model on the same base"
            )
    return LearnedRewardSource(source, partial(score_answers, judge), settings, set(learners))


async def score_answers(judge: LanguageLearner, answers: Sequence[Answer]) -> list[float]:
    """Returns the reward of each answer."""
    return [float(value[0]) for value in await judge.values([scoring_sample(answer) for answer in answers])]


def _load(path: str, engines: Engines) -> LanguageLearner:
    """Returns the reward model of a run's newest checkpoint."""
    folder, _, name = path.rpartition(":") if not Path(path).exists() else (path, "", "")
    run = Path(folder)
    checkpoints = list_checkpoints(find_run(run)) if (run / "config.yaml").exists() else []
    if not checkpoints:
        raise ValueError(f"reward_model: {path} is not a run with a checkpoint: give the folder of a run, or RUN:NAME")
    config, checkpoint = validate(TextConfig, load(run / "config.yaml")), checkpoints[-1].verify()
    name = name or next(iter(checkpoint.names))
    if name not in checkpoint.names or not (checkpoint.path / checkpoint.names[name] / "critic.safetensors").exists():
        raise ValueError(
            f"reward_model: {path} has no reward model: train one with algorithm: {{type: reward_model}}; the run has "
            f"{', '.join(checkpoint.names)}"
        )
    policy = config.policies[name]
    assert isinstance(policy, LoraPolicyConfig | FullPolicyConfig)
    judge = engines.build_learner(name, policy, 0, critic=True)
    judge.load(checkpoint.path / checkpoint.names[name])
    return judge
