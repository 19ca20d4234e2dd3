"""Measures the lengths, prompts and env steps of episodes (`EpisodeShape`) by playing a few of them.

Seconds of env steps are measured with random agents. The lengths of episodes and answers come from the run's own
untrained policies, if their bases are on this machine and small enough to answer within seconds: random agents seldom
end an episode, and a token limit does not say how long answers are.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from palestra.builders.capacity_workload import MAX_CONCURRENT, EpisodeShape, full_trajectories
from palestra.builders.text import build, make_episode_runner, seat_policies
from palestra.builders.text_config import TextConfig
from palestra.chat import Chat
from palestra.engine.bases import resolve_base
from palestra.engine.memory import model_shape
from palestra.learners.lm_config import LMPolicyConfig
from palestra.policies.base import Query
from palestra.policies.lm import ChatEncoder
from palestra.policies.scripted import RandomPolicy
from palestra.rollouts.tree_rollout import Branching, EpisodeSpec
from palestra.types import Episode

RANDOM_EPISODES, OWN_EPISODES = 4, 16
MAX_PARAMS = 200_000_000  # largest base whose policies are played for a plan
ENV_THREADS = 256  # of `tree_rollout`, for envs that block


def probe_episodes(config: TextConfig, *, own_policies: bool = False) -> EpisodeShape:
    """Returns the shape of episodes of the run's first env, played by random agents or, with `own_policies`, by the
    run's policies with its branching. Raises ValueError if all of them fail."""
    runner, policy = make_episode_runner(config.env_config(), "probe"), RandomPolicy()
    specs = [
        EpisodeSpec(number, dict.fromkeys(seat_policies(config), policy), number) for number in range(RANDOM_EPISODES)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    played = asyncio.run(runner.play_all(specs, Branching()))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    ended = _without_failed(played, "random answers")
    nodes = sum(len(episode.nodes) for episode in ended)
    longest = max(len(episode.nodes) for episode in ended)
    shape = EpisodeShape(
        concurrent=ENV_THREADS if runner.make_env().blocking else MAX_CONCURRENT,
        turns=max(1, round(nodes / len(ended))),
        seats_per_turn=_seats_per_turn(ended),
        prompt_tokens=_prompt_tokens(config, ended),
        env_cpu_s=cpu / nodes,
        env_wait_s=max(0.0, wall - cpu) / longest,  # episodes are played at once
    )
    return _as_played(config, shape) if own_policies else shape


def plays_itself(config: TextConfig) -> bool:
    """True if the run's policies can play for a plan: their bases are folders of this machine, and small."""
    bases = {policy.base for policy in config.policies.values() if isinstance(policy, LMPolicyConfig)}
    here = [base for base in bases if Path(resolve_base(base)).is_dir()]
    if config.sampler or config.engine or len(here) < len(bases):
        return False
    return all(model_shape(base).params <= MAX_PARAMS for base in here)


def _as_played(config: TextConfig, shape: EpisodeShape) -> EpisodeShape:
    """Returns `shape` with the lengths of episodes, answers and prompts of the run's own untrained policies."""
    stage = build(config).stages[0]
    branching = stage.algorithm.branching
    played = asyncio.run(stage.source.play(range(OWN_EPISODES), branching, {}))
    ended = _without_failed(played, "the run's own policies")
    depths = Counter(node.depth for episode in ended for node in episode.nodes)
    lengths = [len(a.token_ids) for e in ended for node in e.nodes for a in node.answers.values() if len(a.token_ids)]
    lines = full_trajectories(branching, len(ended), len(depths))
    return replace(
        shape,
        turns=len(depths),
        going_on=tuple(depths[depth] / (lines[depth] * branching.width(depth)) for depth in range(len(depths))),
        seats_per_turn=_seats_per_turn(ended),
        prompt_tokens=_prompt_tokens(config, ended),
        answer_tokens=sum(lengths) / max(1, len(lengths)) or None,
    )


def _without_failed(played: Sequence[Episode], agents: str) -> list[Episode]:
    """Returns the episodes that did not fail. Raises ValueError if there is none."""
    ended = [episode for episode in played if episode.error is None and episode.nodes]
    if not ended:
        raise ValueError(f"every episode with {agents} failed, so their lengths cannot be measured: {played[0].error}")
    return ended


def _seats_per_turn(episodes: Sequence[Episode]) -> float:
    nodes = [node for episode in episodes for node in episode.nodes]
    return sum(len(node.answers) for node in nodes) / len(nodes)


def _prompt_tokens(config: TextConfig, episodes: Sequence[Episode]) -> int:
    """Returns the mean number of tokens of the episodes' prompts under the first language model of the config."""
    policy = next(p for p in config.policies.values() if isinstance(p, LMPolicyConfig))
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(resolve_base(policy.base)), policy.chat_template_kwargs)
    roles: Mapping[str, str] = make_episode_runner(config.env_config(), "probe").make_env().roles
    lengths = [
        len(_encoded(encoder, roles.get(seat, ""), seen, policy.system))
        for episode in episodes
        for node in episode.nodes
        for seat, seen in node.observations.items()
    ]
    return max(1, round(sum(lengths) / len(lengths)))


def _encoded(encoder: ChatEncoder, role: str, seen: Any, system: str | None) -> Sequence[int]:
    if isinstance(seen, Chat):
        return encoder.encode_conversation(seen, system).tolist()
    return encoder.encode_first_turn(Query(role, seen), system).tolist()
