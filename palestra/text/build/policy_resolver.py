"""Resolves the seats of a stage to policies at their current weights; makes the functions by which teachers score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.core.types import Sample, Seat
from palestra.engine.sampling.scoring import answer_logprobs
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.learners.lm import LanguageLearner, Scorer
from palestra.text.policies.base import Policy
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy, answer_logprobs_at
from palestra.text.policies.in_flight import InFlightPolicy
from palestra.text.policies.lm import DemonstrationPolicy, LanguagePolicy
from palestra.text.policies.scripted import ExpertPolicy, HumanPolicy, RandomPolicy, ScriptedPolicy
from palestra.text.policy_configs import ExpertConfig, HumanConfig, RandomConfig, ScriptedConfig

if TYPE_CHECKING:
    from palestra.text.tinker.client import RemoteEngines


@dataclass(frozen=True)
class PolicyResolver:
    """Resolves seats to policies at their current weights: `learners` are trained, `fixed` are not. Policies in
    `in_flight` play instead of the learners of the same names in training."""

    learners: Mapping[str, LanguageLearner]
    fixed: Mapping[str, Policy]
    engines: Engines | RemoteEngines
    in_flight: Mapping[str, InFlightPolicy] = field(default_factory=dict)

    def training_policies(self, seats: Mapping[Seat, str], teachers: Mapping[str, str]) -> dict[Seat, Policy]:
        """Returns the policy of each seat at its current weights; a policy with a teacher is played by the teacher."""
        self.engines.clear_caches()
        playing = {name: policy for name, policy in self.in_flight.items() if name not in teachers}
        return {seat: playing.get(name) or self.current_policy(name, teachers) for seat, name in seats.items()}

    def eval_policies(self, seats: Mapping[Seat, str], sampling: dict[str, Any]) -> dict[Seat, Policy]:
        """Returns the policy of each seat at its current weights, with the sampling of evaluations and without
        teachers."""
        self.engines.clear_caches()
        return {seat: _with_eval_sampling(self.current_policy(name), sampling) for seat, name in seats.items()}

    def encoding_policies(self, seats: Mapping[Seat, str]) -> dict[Seat, Policy]:
        """Returns the policy of each seat for encoding recorded answers into tokens, without exporting its weights."""
        return {seat: self._scribe(name) for seat, name in seats.items()}

    def _scribe(self, name: str) -> Policy:
        """Policy `name` with its current version and encoder, but without an adapter."""
        if name not in self.learners:
            return self.fixed[name]
        learner = self.learners[name]
        config = learner.config
        versioned = f"{name}@{learner.version}"
        return LanguagePolicy(versioned, learner.sampler, learner.encoder, config.sampling, **config.prompt_options)

    def current_policy(self, name: str, teachers: Mapping[str, str] = {}) -> Policy:
        """Returns policy `name` at its current weights; one with a teacher is played by the teacher."""
        if name not in self.learners:
            return self.fixed[name]
        policy = self.learners[name].policy()
        return DemonstrationPolicy(policy, self.current_policy(teachers[name])) if name in teachers else policy


def stage_resolver(part: TextConfig, config: TextConfig, resolver: PolicyResolver) -> PolicyResolver:
    """Returns `resolver` with the untrained policies whose settings a stage changes, such as their sampling."""
    changed = {name: part.policies[name] for name in resolver.fixed if part.policies[name] != config.policies[name]}
    own = {name: make_policy(name, policy, resolver.engines) for name, policy in changed.items()}
    return replace(resolver, fixed={**resolver.fixed, **own}) if own else resolver


def make_policy(name: str, config: Any, engines: Engines | RemoteEngines) -> Policy:
    """Returns the untrained policy that `config` describes, called `name`."""
    if isinstance(config, RandomConfig):
        return RandomPolicy(config.words, config.length, odds=config.odds)
    if isinstance(config, ScriptedConfig):
        return ScriptedPolicy(config.answers, name)
    if isinstance(config, HumanConfig):
        return HumanPolicy()
    if isinstance(config, ExpertConfig):
        return ExpertPolicy(name)
    if isinstance(config, EndpointConfig):
        return EndpointPolicy(name, config)
    return engines.build_frozen_policy(name, config)


def _with_eval_sampling(policy: Policy, changes: dict[str, Any]) -> Policy:
    """Returns the policy with the sampling of evaluations, which never record sampling masks."""
    if not isinstance(policy, LanguagePolicy):
        return policy
    changes = changes | ({"keep_sampling_mask": False} if policy.sampling.keep_sampling_mask else {})
    return policy.with_sampling(changes) if changes else policy


# ---- teachers


def teachers_of(part: TextConfig) -> dict[str, str]:
    """Returns the teacher of each policy that has one, by name."""
    return {name: teacher for name, p in part.policies.items() if (teacher := getattr(p, "teacher", None))}


def stage_scorers(part: TextConfig, resolver: PolicyResolver) -> dict[str, Scorer]:
    """Returns the function by which each distilled learner's answers are scored in a stage: its teacher's. Raises
    ValueError if a learner has no teacher, or if the teacher has a different vocabulary or is not a language model in
    this process."""
    if not part.algorithm.needs_teacher:
        return {}
    teachers = teachers_of(part)
    scorers = {}
    for name, learner in resolver.learners.items():
        if name in teachers:
            scorers[name] = _scorer(learner, teachers[name], resolver)
        elif name not in teachers.values():  # a learner may teach without being taught
            raise ValueError(f"policies.{name} is distilled but has no teacher: set policies.{name}.teacher")
    return scorers


def _scorer(learner: LanguageLearner, teacher: str, resolver: PolicyResolver) -> Scorer:
    """Returns the function that scores answers of `learner` by the policy `teacher`. Raises ValueError if it cannot."""
    name = learner.name
    policy = resolver.current_policy(teacher)
    if isinstance(policy, EndpointPolicy):  # its vocabulary is not known here
        return partial(answer_logprobs_at, policy.config)
    if not isinstance(policy, LanguagePolicy) or policy.sampler.engine is None:
        raise ValueError(
            f"policies.{name}.teacher: {teacher} cannot score tokens: name a language model in this process (type: "
            "frozen or lora), or an endpoint with prompt log-probabilities"
        )
    if policy.encoder.tokenizer.get_vocab() != learner.encoder.tokenizer.get_vocab():
        raise ValueError(
            f"policies.{name}.teacher: {teacher} scores the tokens of {name}, but has a different vocabulary: take "
            "a teacher of the same family of models"
        )
    return partial(_scores_of, teacher, resolver)


async def _scores_of(teacher: str, resolver: PolicyResolver, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns log-probabilities [T] of each sample's tokens under the teacher at its current weights."""
    policy = resolver.current_policy(teacher)
    assert isinstance(policy, LanguagePolicy) and policy.sampler.engine is not None
    return answer_logprobs(policy.sampler.engine, policy.adapter, samples)
