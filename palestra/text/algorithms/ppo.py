"""Actor-critic for language agents: proximal policy optimisation (Schulman et al., 2017) and the plain policy gradient.

A seat's answers along one trajectory, in order, form one sequence: each token is an action, or each answer. A value
head on the policy's own features, or a critic with an adapter of its own, estimates the value of the state before an
action. Rewards of the team and of the seat that fall between two of its decisions are added to the last token of the
earlier one. Rewards before a seat's first decision are dropped, since no token of it caused them.

The value after the end of a trajectory is 0, also if the env truncated it: a text env's turn limit is part of its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.losses import (
    LOSSES,
    LossFunction,
    LossInputs,
    TensorMetrics,
    actor_critic_loss,
    clipped_policy_loss,
    policy_gradient_loss,
    sequence_sum,
)
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample, Seat, is_sampled, num_sampled
from palestra.text.algorithms.base import TextAlgorithm, build_sample
from palestra.text.credit.estimators import explained_variance, gae, standardise
from palestra.text.credit.importance import ImportanceSampling
from palestra.text.learners.base import Learner
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.tree_rollout import Branching

ActionLevel = Literal["token", "turn"]


# ---- tokens or answers as actions
#
# With tokens as actions, there is a value of the state before each token. With answers as actions, there is one value
# for each answer, of the state between prompt and answer (or after the answer, from a critic of actions). The
# log-probability of an answer is the sum over its tokens, so clipped losses bound the ratio of the whole answer.
# Shapes: `T` tokens of an answer, `M` actions of several sequences.


def action_sums(tokens: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the sum over the tokens of each action [M] float64, from one array [T] for each answer."""
    if level == "turn":
        return np.array([values.astype(np.float64).sum() for values in tokens])
    return np.concatenate(tokens).astype(np.float64)


def of_sampled(tokens: Sequence[np.ndarray], turns: Sequence[Sample], level: ActionLevel) -> list[np.ndarray]:
    """Returns the arrays without the entries of tokens that were forced, which are no actions."""
    if level == "turn":
        return list(tokens)
    return [values[is_sampled(turn)] for values, turn in zip(tokens, turns, strict=True)]


def action_values(values: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the value of the state before each action [M], from one array of the critic's values for each answer:
    [T], or [1] if the critic has one value per answer."""
    return np.concatenate([answer[:1] for answer in values] if level == "turn" else values)


def action_counts(lengths: Sequence[int], level: ActionLevel) -> list[int]:
    """Returns the number of actions of each answer, from its number of tokens."""
    return [1] * len(lengths) if level == "turn" else list(lengths)


def by_token(actions_M: np.ndarray, lengths: Sequence[int], level: ActionLevel) -> list[np.ndarray]:
    """Returns an array [T] float32 for each answer: for each token, the entry of `actions_M` of its action."""
    by_answer = np.split(actions_M.astype(np.float32), np.cumsum(action_counts(lengths, level))[:-1])
    return [np.broadcast_to(values, length).copy() for values, length in zip(by_answer, lengths, strict=True)]


def answer_clipped_loss(tokens: LossInputs, **options: Any) -> tuple[Tensor, TensorMetrics]:
    """`clipped_policy_loss` with the ratios of whole answers."""
    return clipped_policy_loss(with_answer_ratios(tokens), **options)


def answer_actor_critic_loss(tokens: LossInputs, **options: Any) -> tuple[Tensor, TensorMetrics]:
    """`actor_critic_loss` with the ratios of whole answers."""
    return actor_critic_loss(with_answer_ratios(tokens), **options)


def with_answer_ratios(tokens: LossInputs) -> LossInputs:
    """Returns the tokens with `old_logp_M` moved so that each token's ratio has the value of its answer's ratio (the
    product over the answer's tokens) and the gradient of its own log-probability. Summed over an answer, this is the
    gradient of the answer's ratio. The sampler's log-probability moves by the same amount, so the importance ratio does
    not change. Raises ValueError without `sequence_M`.
    """
    sequence_M = tokens.sequence_M
    if sequence_M is None:
        raise ValueError("the ratio of an answer needs the number of each token's sequence")
    gap_M = (tokens.logp_M - tokens.old_logp_M).detach()
    others_M = sequence_sum(gap_M, sequence_M) - gap_M
    sampler_M = None if tokens.sampler_logp_M is None else tokens.sampler_logp_M - others_M
    return tokens._replace(old_logp_M=tokens.old_logp_M - others_M, sampler_logp_M=sampler_M)


def critic_input(
    nodes: Sequence[Node], seats: Sequence[Seat], seat: Seat, *, joint: bool, with_answers: bool = False
) -> np.ndarray:
    """Returns the tokens [P] int32 that a critic reads about the answer of `seat` at the last of `nodes`, the
    trajectory up to this step.

    These are the seat's own prompt and, if `joint`, before it the newest prompt of each other seat, in the order of
    `seats`, followed by its answer if that is from an earlier step. `with_answers` adds the answers of this step, each
    after its prompt: the critic then values the state and the (joint) action. Seats whose policies have no tokens add
    nothing.
    """
    others = [_newest(nodes, other, with_answers) for other in seats if other != seat] if joint else []
    return np.concatenate([*others, _read(nodes[-1].answers[seat], with_answers)]).astype(np.int32)


def _newest(nodes: Sequence[Node], seat: Seat, with_answers: bool) -> np.ndarray:
    now = nodes[-1].answers.get(seat)
    if now is not None:
        return _read(now, with_answers)
    earlier = [node.answers[seat] for node in nodes if seat in node.answers]
    return _read(earlier[-1], with_answer=True) if earlier else np.zeros(0, np.int32)


def _read(answer: Answer, with_answer: bool) -> np.ndarray:
    return np.concatenate([answer.prompt_ids, answer.token_ids]) if with_answer else answer.prompt_ids


KL_COEF_KEY = "kl"  # key in `state`: initial and current coefficient of the adaptive KL penalty
MAX_KL_ERROR = 0.2  # bound of the relative error in the adaptive KL controller


@dataclass(kw_only=True)
class PPOSample(Sample):
    """A sample with its node and seat. Before `finalize_samples`, `advantages` holds the rewards of its tokens and
    `group` the number of its sequence."""

    node: Node
    seat: Seat


class PPO(ImportanceSampling, TextAlgorithm):
    """PPO with a critic, on `group_size` trajectories per start. Epochs and batch sizes are settings of the policy.

    With `surrogate: policy_gradient` it is advantage actor-critic (Mnih et al., 2016). With `action_level: turn` as
    well, it is independent actor-critic for a team's policies (IAC of CoMLRL, Liu et al., 2025), and with `critic:
    central` on top the same with a centralised critic (MAAC of CoMLRL).

    The KL penalty is part of the rewards: -kl_coef * (log-probability minus reference log-probability) for every token
    (Ziegler et al., 2019, eq. 2; Ouyang et al., 2022, sec. 3.5). An adaptive coefficient is stored in `state` and
    carries over to the next stage unless that stage sets another `kl_coef`.

    KL penalty and GAE are computed for the policy that sampled. With `importance_cap`, each normalised advantage is
    then multiplied by its bounded importance ratio. Returns are not corrected.
    """

    type: Literal["ppo"] = "ppo"
    needs_critic: ClassVar[bool] = True
    group_size: int = Field(1, ge=1, le=4096)
    """Trajectories per start."""
    team_weight: float = Field(1.0, ge=0)
    """Weight of the team's reward: rewards are team_weight * team + local."""
    action_level: ActionLevel = "token"
    """The action: a `token`, or the whole answer of a `turn`. An answer's log-probability, also in the clipped ratio,
    is the sum over its tokens; its value is the value of the state after its prompt."""
    critic: Literal["shared", "separate", "central"] = "shared"
    """The critic: a value head on the policy's features (`shared`), an adapter of its own on the same base with a value
    head (`separate`), or such an adapter that reads the prompts of all seats (`central`, with `action_level: turn`)."""
    critic_type: Literal["v", "q"] = "v"
    """What the critic values: the state before an answer (`v`), or the state and the answer (`q`, with `action_level:
    turn` and a `separate` or `central` critic, which reads all seats' answers). The advantage is then the value
    itself."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per action."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda per action: 0 trusts the critic, 1 the rewards."""
    normalize_advantages: bool = True
    """Standardise advantages over all actions of the policy in a step (mean 0, deviation 1)."""
    surrogate: Literal["clipped", "policy_gradient"] = "clipped"
    """`clipped` is PPO's; `policy_gradient` is the log-probability times the advantage, without a ratio (A2C)."""
    clip: float = Field(0.2, gt=0)
    """Clipping distance of the probability ratio below 1 (and above, if `clip_high` is null)."""
    clip_high: float | None = Field(None, gt=0)
    """Clipping distance above 1; null uses `clip`."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a token with negative advantage to this multiple of the advantage; above 1."""
    value_coef: float = Field(0.5, ge=0)
    """Coefficient of the value loss."""
    value_clip: float | None = Field(None, gt=0)
    """Largest change of a value per update that still reduces its loss, in units of return; null does not clip."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the per-token KL penalty in the rewards; the initial one if `kl_target` is set."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL per sequence, in nats; if set, the coefficient adapts to it. Needs `kl_coef` above 0."""
    kl_horizon: int = Field(10000, ge=1)
    """Sequences over which the adaptive coefficient reacts; larger is slower."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""

    @model_validator(mode="after")
    def _adapts(self) -> Self:
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                "kl_target multiplies kl_coef by factors, which leave kl_coef: 0 at 0. Set kl_coef to its initial value"
            )
        return self

    @model_validator(mode="after")
    def _reads_answers(self) -> Self:
        if self.critic == "central" and self.action_level == "token":
            raise ValueError(
                "critic: central reads the prompts of all seats before an answer, and gives no value for each of its "
                "tokens: set action_level: turn"
            )
        if self.critic_type == "q" and (self.critic == "shared" or self.action_level == "token"):
            raise ValueError(
                "critic_type: q reads a whole answer before it values it, which a head on the policy cannot: set "
                "action_level: turn, and critic: separate or central"
            )
        if self.surrogate == "policy_gradient" and (self.clip_high is not None or self.dual_clip is not None):
            raise ValueError(
                "clip_high and dual_clip bound a ratio, and surrogate: policy_gradient has none: leave them out"
            )
        return self

    @property
    def branching(self) -> Branching:
        return Branching("root", self.group_size)

    @property
    def has_separate_critic(self) -> bool:
        return self.critic != "shared"

    @property
    def reads_joint_prompts(self) -> bool:
        return self.critic == "central"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def loss(self) -> LossFunction:
        has_answer_ratios = self.action_level == "turn" and self.surrogate == "clipped"
        if not self.has_separate_critic:
            return answer_actor_critic_loss if has_answer_ratios else LOSSES["actor_critic"]
        if has_answer_ratios:
            return answer_clipped_loss
        return clipped_policy_loss if self.surrogate == "clipped" else policy_gradient_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        fields = {"value_coef", "value_clip"}
        fields |= {"clip", "clip_high", "dual_clip"} if self.surrogate == "clipped" else set()
        options = self.model_dump(include=fields, exclude_none=True) | {"entropy": self.entropy_coef}
        if not self.has_separate_critic:
            if self.surrogate != "clipped":
                options["surrogate"] = self.surrogate
            if self.action_level == "turn":
                options["value_per_answer"] = True
        return options | self.importance_options

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the answers of `policy`, sequence by sequence, with token rewards in place of advantages
        (`finalize_samples` replaces them), and `sequences`, the number of sequences."""
        sequences = list(chain.from_iterable(self._sequences(episode, policy) for episode in episodes))
        samples: list[Sample] = []
        for number, sequence in enumerate(sequences):
            samples += [replace(turn, group=number) for turn in sequence]
        return samples, {"sequences": float(len(sequences))}

    def _sequences(self, episode: Episode, policy: str) -> Iterator[list[PPOSample]]:
        """Yields the policy's samples at each seat of each trajectory; none if the episode failed."""
        for leaf in episode.leaves() if episode.error is None else []:
            for seat in episode.seats:
                if sequence := self._sequence(episode.trajectory(leaf), list(episode.seats), seat, policy):
                    yield sequence

    def _sequence(self, trajectory: Sequence[Node], seats: Sequence[Seat], seat: Seat, policy: str) -> list[PPOSample]:
        sequence: list[PPOSample] = []
        for i, node in enumerate(trajectory):
            answer = node.answers.get(seat)
            if answer is not None and member_name(answer.policy) == policy and len(answer.token_ids):
                rewards = np.zeros(len(answer.token_ids), np.float32)
                plain = build_sample(answer, rewards, **self._as_action(trajectory[: i + 1], seats, seat))
                sequence.append(PPOSample(**vars(plain), node=node, seat=seat))
            if sequence:
                sequence[-1].advantages[-1] += node.reward(seat, self.team_weight)
        return sequence

    def _as_action(self, nodes: Sequence[Node], seats: Sequence[Seat], seat: Seat) -> dict[str, Any]:
        """Returns the sample fields that make the answer of `seat` at the last of `nodes` one action: it counts as one
        in the mean, and `critic_ids` are the tokens that a separate critic reads."""
        if self.action_level == "token":
            return {}
        if not self.has_separate_critic:
            return {"denominator": 1.0}
        read = critic_input(nodes, seats, seat, joint=self.reads_joint_prompts, with_answers=self.critic_type == "q")
        return {"denominator": 1.0, "critic_ids": read}

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with values, returns and advantages, and metrics; writes the mean advantage of an answer
        to its node.

        `explained_variance` is the share of the returns' variance that the values before the update explain;
        `kl_sequence` the mean over sequences of their summed log-ratios to the reference (nats), `kl_coef` the
        coefficient of the penalty in this step.
        """
        if not samples:
            return samples, {}
        turns = cast("list[PPOSample]", samples)
        metrics = Metrics()
        level = self.action_level
        values_M = action_values(of_sampled(await learner.values(turns), turns, level), level)
        rewards_M = action_sums(of_sampled([turn.advantages for turn in turns], turns, level), level)
        if self.kl_coef:
            gaps_M = action_sums(of_sampled(await _reference_gaps(turns, learner), turns, level), level)
            penalty, metrics = self._penalty(gaps_M, len({turn.group for turn in turns}), state)
            rewards_M -= penalty * gaps_M
        sequences = [[num_sampled(turn) for turn in sequence] for _, sequence in groupby(turns, lambda t: t.group)]
        cuts = np.cumsum([sum(action_counts(lengths, level)) for lengths in sequences])[:-1]
        pairs = zip(np.split(rewards_M, cuts), np.split(values_M, cuts), strict=True)
        advantages_M = np.concatenate([gae(*pair, gamma=self.gamma, gae_lambda=self.gae_lambda) for pair in pairs])
        returns_M = advantages_M + values_M
        share = explained_variance(values_M, returns_M)
        metrics |= {} if share is None else {"explained_variance": share}
        if self.critic_type == "q":  # return minus value would have mean 0 with an exact critic, and no signal
            advantages_M = values_M
        if self.normalize_advantages:
            advantages_M = standardise(advantages_M)
        taught = _with_credit(turns, advantages_M, values_M, returns_M, level)
        return await self.add_old_logprobs(taught, learner), metrics

    def _penalty(self, gaps_M: np.ndarray, sequences: int, state: AlgorithmState) -> tuple[float, Metrics]:
        """Returns the KL coefficient of this step and metrics; stores the next coefficient in `state` if it adapts."""
        known = state.get(KL_COEF_KEY, {})
        now = known["now"] if self.kl_target and known.get("began") == self.kl_coef else self.kl_coef
        kl = float(gaps_M.sum() / sequences)
        if self.kl_target:
            then = adapt_kl_coef(now, kl, target=self.kl_target, sequences=sequences, horizon=self.kl_horizon)
            state[KL_COEF_KEY] = {"began": self.kl_coef, "now": then}
        return now, {"kl_sequence": kl, "kl_coef": now}


async def _reference_gaps(turns: Sequence[PPOSample], learner: Learner) -> list[np.ndarray]:
    """Returns log-probability minus reference log-probability of each answer's tokens, [T] float64 each. They are
    exactly 0 while the policy equals its reference: in a step without rewards, rounding errors would be the only
    rewards, and normalisation would make them large."""
    if learner.is_at_reference:
        return [np.zeros(len(turn.logprobs)) for turn in turns]
    known = await learner.logprobs(turns, reference=True)
    return [turn.logprobs.astype(np.float64) - logprobs for turn, logprobs in zip(turns, known, strict=True)]


def adapt_kl_coef(coefficient: float, kl: float, *, target: float, sequences: int, horizon: int) -> float:
    """Returns the KL coefficient after a step with `sequences` sequences of `kl` nats each. It changes in proportion to
    the relative error (kl / target - 1), bounded to 0.2 (Ziegler et al., 2019, sec. 2.2). The gain is sequences /
    horizon, as in their released code; here it is at most 1, since a larger one could make the coefficient negative."""
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1 + error * min(sequences / horizon, 1.0))


def _with_credit(
    turns: Sequence[PPOSample],
    advantages_M: np.ndarray,
    values_M: np.ndarray,
    returns_M: np.ndarray,
    level: ActionLevel,
) -> list[Sample]:
    """Returns the samples with their advantages, values and returns (float32), no longer grouped by sequence; writes
    mean advantages to their nodes."""
    lengths = list(map(num_sampled, turns))
    columns = (by_token(column, lengths, level) for column in (advantages_M, values_M, returns_M))
    taught: list[Sample] = []
    for turn, *credit in zip(turns, *columns, strict=True):
        turn.node.advantages[turn.seat] = float(credit[0].mean())
        advantages, values, returns = (_at_sampled(column, turn) for column in credit)
        taught.append(replace(turn, group=-1, advantages=advantages, values=values, returns=returns))
    return taught


def _at_sampled(values: np.ndarray, turn: Sample) -> np.ndarray:
    """Returns an array [T] with the values of the sampled tokens, and 0 for those that were forced."""
    spread = np.zeros(len(turn.token_ids), np.float32)
    spread[is_sampled(turn)] = values
    return spread
