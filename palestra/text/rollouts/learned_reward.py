"""Rewards of a reward model, given to the answers of episodes after they are played: a learned judge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from pydantic import Field

from palestra.core.config import StrictModel
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node
from palestra.envs.reward_terms import REWARD_TERMS_KEY, TEAM_TERMS_KEY
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.sources import ENV_TERM, LEARNED_TERM, EpisodeCallback, EpisodeSource
from palestra.text.rollouts.tree_rollout import Branching

Score = Callable[[Sequence[Answer]], Awaitable[Sequence[float]]]  # the reward of each answer


class LearnedRewardConfig(StrictModel):
    """Rewards of a reward model that another run trained (`algorithm: {type: reward_model}`)."""

    path: str
    """The run, or RUN:NAME for one of several policies."""
    weight: float = 1.0
    """Weight of the reward model's rewards: each answer in training gets one, added to the rewards of its seat."""
    env_weight: float = Field(0.0, ge=0)
    """Weight of the env's own rewards. 0: training uses only the reward model's; success and evaluations are still the
    env's."""


@dataclass
class LearnedRewardSource:
    """The episodes of `source`, with rewards by `score` for the answers of the policies in `learners`. The rewards are
    computed after play, so branches cannot be chosen by them."""

    source: EpisodeSource
    score: Score
    config: LearnedRewardConfig
    learners: Collection[str]

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers, in order, with their new rewards."""
        episodes = await self.source.play(numbers, branching, state, on_episode)
        valid = [episode for episode in episodes if episode.error is None]
        nodes = [(episode, node) for episode in valid for node in episode.valid_nodes]
        answers: dict[int, Answer] = {}
        for _, node in nodes:
            answers.update((id(answer), answer) for answer in self._learner_answers(node).values())
        values = await self.score(list(answers.values())) if answers else []
        scores = dict(zip(answers, values, strict=True))
        for episode, node in nodes:
            node_answers = self._learner_answers(node)
            self._reward(episode, node, {seat: scores[id(answer)] for seat, answer in node_answers.items()})
        return episodes

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        return self.source.observe(episodes, state)

    def _learner_answers(self, node: Node) -> dict[str, Answer]:
        """Returns the answers of the learners that have tokens, by seat."""
        own = {seat: a for seat, a in node.answers.items() if self._learns(a.policy)}
        return {seat: answer for seat, answer in own.items() if len(answer.token_ids)}

    def _reward(self, episode: Episode, node: Node, scores: dict[str, float]) -> None:
        """Replaces the learners' rewards at a node and the named terms of these. A learner also gets env rewards at
        nodes at which it does not act, such as the loser's at the last move; these have no score."""
        env = self.config.env_weight
        learned = self.config.weight
        terms = {seat: dict(own) for seat, own in node.info.get(REWARD_TERMS_KEY, {}).items()}
        paid = [seat for seat in {**node.rewards, **terms} if self._learns(episode.seats.get(seat, ""))]
        for seat in dict.fromkeys([*scores, *paid]):
            own = terms.get(seat) or {ENV_TERM: node.rewards.get(seat, 0.0)}
            more = {LEARNED_TERM: learned * scores[seat]} if seat in scores else {}
            terms[seat] = {name: env * value for name, value in own.items()} | more
            node.rewards[seat] = env * node.rewards.get(seat, 0.0) + sum(more.values())
        node.team_reward *= env
        node.info = node.info | {REWARD_TERMS_KEY: terms}
        if team := node.info.get(TEAM_TERMS_KEY):
            node.info[TEAM_TERMS_KEY] = {name: env * value for name, value in team.items()}

    def _learns(self, policy: str) -> bool:
        return member_name(policy) in self.learners
