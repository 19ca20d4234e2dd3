"""Proximal policy optimisation with a critic (Schulman et al., 2017), token by token, for language agents.

A seat's answers in one line of play, in their order, are one chain of tokens: each token is an action, and a value head
on the policy's own features says what the state before it is worth. The team's rewards and the seat's own that fall
between one of its decisions and its next (by whoever's move) land on the last token of the earlier one. Rewards before
a seat's first decision land nowhere: nothing it did had a part in them.

The end of a line is worth 0, also of one that the env cut off: a text env's limits on turns are part of its task, and
beyond them nothing is to be had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from palestra.algorithms.text.base import TextAlgorithm, corrected
from palestra.algorithms.text.returns import explained, gae, standardised
from palestra.learners.base import Learner
from palestra.losses.policy import LOSSES
from palestra.rollouts.figures import member
from palestra.rollouts.play import Branching
from palestra.types import Episode, Memory, Metrics, Node, Sample, Seat

COEFFICIENT = "kl"  # in memory: what the coefficient of an adaptive penalty began with, and what it is now
MOST = 0.2  # of a relative error that the controller of that penalty heeds


@dataclass(kw_only=True)
class Turn(Sample):
    """A sample that knows its place in the episode. Until it is refined, its `advantages` are its tokens' rewards, and
    its `group` is the number of its chain."""

    node: Node
    seat: Seat


class PPO(TextAlgorithm):
    """PPO over `k` lines from each start. `alpha` mixes rewards as alpha * team + local; `gamma` and `lam` are those of
    GAE, for each token. `normalise` gives the advantages of all the policy's tokens in a step mean 0 and deviation 1.
    How often and in what batches they are gone through is the policy's own setting.

    `kl` is the coefficient of a penalty within the rewards, -kl * (log-probability less that under the reference) for
    every token (Ziegler et al., 2019, eq. 2; Ouyang et al., 2022, sec. 3.5). With `kl_target`, in nats for a chain, it
    adapts (`adapted`) and is kept in memory; one stage's goes on in the next unless that has another `kl`.

    With `correction`, credit comes first: rewards, the penalty in them, and GAE are of the policy that sampled, whose
    choices they judge. Then each token's advantage, normalised, is multiplied by its importance ratio, of at most so
    much. Returns are not corrected.
    """

    type: Literal["ppo"] = "ppo"
    k: int = Field(1, ge=1, le=4096)
    alpha: float = Field(1.0, ge=0)
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    normalise: bool = True
    clip: float = Field(0.2, gt=0)
    clip_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    value_coef: float = Field(0.5, ge=0)
    value_clip: float | None = Field(None, gt=0)
    correction: float | None = Field(None, gt=0)
    kl: float = Field(0.0, ge=0)
    kl_target: float | None = Field(None, gt=0)
    kl_horizon: int = Field(10000, ge=1)
    entropy: float = 0.0

    @model_validator(mode="after")
    def _adapts(self) -> Self:
        if self.kl_target and not self.kl:
            raise ValueError("kl_target adapts kl by factors, and no factor moves kl: 0. Set kl to what it begins with")
        return self

    @property
    def branching(self) -> Branching:
        return Branching("root", self.k)

    @property
    def critic(self) -> bool:
        return True

    @property
    def refers(self) -> bool:
        return self.kl > 0

    @property
    def loss(self) -> Callable:
        return LOSSES["actor_critic"]

    @property
    def loss_options(self) -> dict[str, Any]:
        fields = {"clip", "clip_high", "dual_clip", "value_coef", "value_clip", "entropy"}
        return self.model_dump(include=fields, exclude_none=True)

    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]:
        """The answers of `policy`, chain by chain, with their tokens' rewards; how many chains there are. What they
        were better than is for `refined` to say, which notes the advantages."""
        chains = [chain for episode in episodes for chain in self._chains(episode, policy)]
        samples: list[Sample] = [replace(turn, group=number) for number, chain in enumerate(chains) for turn in chain]
        return samples, {"chains": float(len(chains))}

    def _chains(self, episode: Episode, policy: str) -> Iterator[list[Turn]]:
        """The policy's turns at each seat of each line; none of an episode that failed."""
        for leaf in episode.leaves() if episode.error is None else []:
            for seat in episode.seats:
                if chain := self._chain(episode.line(leaf), seat, policy):
                    yield chain

    def _chain(self, line: Sequence[Node], seat: Seat, policy: str) -> list[Turn]:
        chain: list[Turn] = []
        for node in line:
            answer = node.answers.get(seat)
            if answer is not None and member(answer.policy) == policy and len(answer.token_ids):
                ids, rewards = answer.token_ids, np.zeros(len(answer.token_ids), np.float32)
                more: dict[str, Any] = {"temperature": answer.temperature, "node": node, "seat": seat}
                chain.append(Turn(answer.prompt_ids, ids, answer.logprobs, rewards, **more))
            if chain:
                chain[-1].advantages[-1] += node.reward(seat, self.alpha)
        return chain

    async def refined(self, samples: list[Sample], learner: Learner, memory: Memory) -> tuple[list[Sample], Metrics]:
        """The samples with values, returns and advantages; notes the mean of an answer's advantages at its node.

        `explained` is the share of the returns' variance that the values, as they are before the update, explain;
        `kl_chain` the mean over chains of their summed log-ratios to the reference, `kl_coef` the penalty's coefficient
        in this step.
        """
        if not samples:
            return samples, {}
        turns, figures = cast("list[Turn]", samples), Metrics()
        values_M = np.concatenate(await learner.values(turns))
        rewards_M = np.concatenate([turn.advantages for turn in turns]).astype(np.float64)
        if self.kl:
            reference_M = np.concatenate(await learner.logprobs(turns, reference=True))
            gaps_M = np.concatenate([turn.logprobs for turn in turns]).astype(np.float64) - reference_M
            penalty, figures = self._penalty(gaps_M, len({turn.group for turn in turns}), memory)
            rewards_M -= penalty * gaps_M
        cuts = _cuts([sum(len(turn.token_ids) for turn in chain) for _, chain in groupby(turns, lambda t: t.group)])
        parts = zip(np.split(rewards_M, cuts), np.split(values_M, cuts), strict=True)
        advantages_M = np.concatenate([gae(*part, gamma=self.gamma, lam=self.lam) for part in parts])
        returns_M = advantages_M + values_M
        share = explained(values_M, returns_M)
        figures |= {} if share is None else {"explained": share}
        if self.normalise:
            advantages_M = standardised(advantages_M)
        taught = _with_credit(turns, advantages_M, values_M, returns_M)
        if self.correction:
            taught, more = await corrected(taught, learner, self.correction)
            figures |= more
        return taught, figures

    def _penalty(self, gaps_M: np.ndarray, chains: int, memory: Memory) -> tuple[float, Metrics]:
        """The coefficient of the KL penalty for this step. The next one's goes to memory, where it adapts."""
        known = memory.get(COEFFICIENT, {})
        now = known["now"] if self.kl_target and known.get("began") == self.kl else self.kl
        kl = float(gaps_M.sum() / chains)
        if self.kl_target:
            then = adapted(now, kl, target=self.kl_target, chains=chains, horizon=self.kl_horizon)
            memory[COEFFICIENT] = {"began": self.kl, "now": then}
        return now, {"kl_chain": kl, "kl_coef": now}


def adapted(coefficient: float, kl: float, *, target: float, chains: int, horizon: int) -> float:
    """The coefficient after a step of `chains` in which KL was `kl` nats a chain: moved in proportion to how far off
    `target` that is, relative to it, 0.2 at most (Ziegler et al., 2019, sec. 2.2). Their gain is chains / horizon, in
    the code that they released; here it is 1 at most, since a large one would turn the coefficient's sign."""
    error = min(max(kl / target - 1, -MOST), MOST)
    return coefficient * (1 + error * min(chains / horizon, 1.0))


def _cuts(lengths: Sequence[int]) -> np.ndarray:
    """Where `np.split` parts arrays of these lengths that lie end to end."""
    return np.cumsum(lengths)[:-1]


def _with_credit(
    turns: Sequence[Turn], advantages_M: np.ndarray, values_M: np.ndarray, returns_M: np.ndarray
) -> list[Sample]:
    """The turns with what is said of each of their tokens, as samples that may be parted. Noted at their nodes."""
    cuts = _cuts([len(turn.token_ids) for turn in turns])
    columns = (np.split(column.astype(np.float32), cuts) for column in (advantages_M, values_M, returns_M))
    taught: list[Sample] = []
    for turn, advantages, values, returns in zip(turns, *columns, strict=True):
        turn.node.advantages[turn.seat] = float(advantages.mean())
        taught.append(replace(turn, group=-1, advantages=advantages, values=values, returns=returns))
    return taught
