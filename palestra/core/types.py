"""Data types shared by all packages: env steps, policy answers, episode trees, training samples and vector rollouts.

Plain data, no torch. Token ids and log-probabilities are the sampler's own arrays: nothing here is decoded and
tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

Seat = str
TEAM = "team"  # name under which metrics of all policies together are logged
NO_REWARD = "no reward"  # `Node.error` of a branch that its env gave no reward
Message = dict[str, str]  # {"role": "user", "content": "..."}: the chat format of `transformers`


@dataclass(frozen=True)
class Step:
    """The result of an env's `reset` or `step`.

    `observations` holds exactly the seats that act next: one seat in turn-based play, all seats in simultaneous play,
    none when the episode has ended. The rewards are those of this step: `rewards` per seat (local), `team_reward`
    shared by all seats. `legal_actions` lists the legal actions of each seat (None: not restricted), `state` is the
    global state for central critics, `truncated` marks an episode cut off by a limit. `info["reward_terms"]` may hold
    the named terms of each seat's reward (envs/reward_terms.py).

        Step({"executor": "you r2 c3 ..."}, rewards={"planner": 0.4}, team_reward=0.0)
    """

    observations: dict[Seat, Any]
    rewards: dict[Seat, float] = field(default_factory=dict)
    team_reward: float = 0.0
    legal_actions: dict[Seat, list[Any]] | None = None
    state: Any = None
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """True if the episode has ended."""
        return not self.observations

    @property
    def pays(self) -> bool:
        """True if a seat or the team gets a reward other than 0."""
        return bool(self.team_reward or any(self.rewards.values()))


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that could be sampled at each of T positions: `ids` [K] int32, position after position, and the number
    of them at each, `counts` [T] int32 (0: all tokens of the vocabulary; -1: one that was forced, not sampled)."""

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def join(cls, kept_ids: Sequence[np.ndarray]) -> SamplingMask:
        """Returns the mask from the ids of each position."""
        counts = np.array([len(ids) for ids in kept_ids], np.int32)
        return cls(np.concatenate([np.zeros(0, np.int32), *kept_ids]), counts)

    def rows(self) -> list[list[int]]:
        """Returns the ids of each position, as lists."""
        return [part.tolist() for part in np.split(self.ids, np.cumsum(np.abs(self.counts))[:-1])]

    @property
    def is_forced(self) -> np.ndarray:
        """The mask of the tokens that were forced, bool [T]."""
        return self.counts < 0

    def forced_only(self) -> SamplingMask | None:
        """Returns the mask without the effects of top-k and top-p; None if no token was forced."""
        ids = self.ids[np.repeat(self.is_forced, np.abs(self.counts))]
        return SamplingMask(ids, np.minimum(self.counts, 0)) if len(ids) else None


@dataclass
class Answer:
    """The answer of one policy at one seat. Policies without tokens (scripted, human) leave the arrays empty.

    `prompt_ids [P]` and `token_ids [T]` are int32; `logprobs [T]` is float32: the log-probabilities of the sampled
    tokens under the policy that sampled them, at `temperature`. `stop` is "stop" (an end token, which is included in
    `token_ids`) or "length". `versions [T]` int32 are the versions of the policy that sampled each token, empty if all
    tokens have the version in the name `policy`. With a `sampling_mask`, `logprobs` are of the truncated distribution,
    and 0 for tokens that were forced.
    `routed_experts` [P + T - 1, L, K] int32 are the experts that the sampler used in each of L layers, for all tokens
    but the last (None: not recorded).
    """

    text: str
    policy: str
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    stop_reason: str = "stop"
    temperature: float = 1.0
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    sampling_mask: SamplingMask | None = None
    routed_experts: np.ndarray | None = None
    thought: str = ""


@dataclass
class Node:
    """One joint step of an episode tree: observations and answers of the acting seats, and the resulting rewards.

    Siblings (same `parent`) answer the same observations. `chosen` is true for nodes from which play continued, and for
    the last node of a played trajectory. `done` marks the end of the episode. `advantages` per seat is written by the
    algorithm that assigns credit.

    `error` says why a branch was lost: the env or a policy failed in it, or it got no reward. Its nodes are displayed
    and stored, and no metric and no algorithm reads them. A node with an `error` that is `done` got the run's
    `failed_reward` instead, and counts.
    """

    id: int
    parent: int | None
    depth: int
    observations: dict[Seat, Any]
    answers: dict[Seat, Answer]
    rewards: dict[Seat, float] = field(default_factory=dict)
    team_reward: float = 0.0
    chosen: bool = True
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    advantages: dict[Seat, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_lost(self) -> bool:
        """True for a node of a branch that was lost."""
        return self.error is not None and not self.done

    @property
    def success(self) -> float | None:
        """Success of all seats that the env reports in this step, from 0 to 1; None if it reports none, or one by
        seat."""
        success = self.info.get("success")
        if success is None or isinstance(success, dict):
            return None
        return float(success)

    @property
    def seat_success(self) -> dict[Seat, float]:
        """Success that the env reports by seat in this step, as opponents have it; empty if it reports none so."""
        success = self.info.get("success")
        if not isinstance(success, dict):
            return {}
        return {seat: float(value) for seat, value in success.items() if value is not None}

    def reward(self, seat: Seat, team_weight: float = 1.0) -> float:
        """Returns the mixed reward of `seat` for this step: team_weight * team reward + local reward."""
        return team_weight * self.team_reward + self.rewards.get(seat, 0.0)

    def is_invalid(self, seat: Seat) -> bool | None:
        """Returns whether the env flagged this seat's answer as invalid; None if the env sets no flag.
        `info["invalid"]` is a bool for the whole step, a mapping from seat to bool, or a list of seats."""
        flag = self.info.get("invalid")
        if isinstance(flag, dict):
            return bool(flag.get(seat, False))
        if isinstance(flag, (list, tuple, set)):
            return seat in flag
        return None if flag is None else bool(flag)

    def invalid_reason(self, seat: Seat) -> str:
        """Returns why the env rejected this seat's answer: `info["why_invalid"]`, a text or a mapping from seat to
        text; "" if the env does not say."""
        reason = self.info.get("why_invalid", "")
        if isinstance(reason, dict):
            reason = reason.get(seat, "")
        return str(reason)


@dataclass
class Episode:
    """A tree of joint steps played from one env seed. A plain episode is a tree with one branch. An episode that was
    over at reset is one node without answers.

    `seats` maps each seat to the name of its policy. `error` is the message of an env or policy that failed in all
    branches: such an episode is recorded, counted and displayed, and never trained on. `traceback` is the stack trace
    of the error, or of the first lost branch. `picture` is the kind of picture that its observations may be drawn as
    (`Env.picture`). `instance` identifies its problem if several seeds give the same one (`Env.instance_of`).
    """

    env: str
    seed: int
    seats: dict[Seat, str]
    nodes: list[Node] = field(default_factory=list)
    error: str | None = None
    traceback: str | None = None
    picture: str = ""
    instance: Any = None

    @property
    def instance_key(self) -> tuple[str, Any]:
        """The same for episodes of one problem instance."""
        return self.env, self.seed if self.instance is None else self.instance

    @property
    def valid_nodes(self) -> list[Node]:
        """The nodes whose rewards count: those of branches that were not lost."""
        return [node for node in self.nodes if not node.is_lost]

    def children(self, parent: int | None) -> list[Node]:
        """Returns the nodes whose parent is `parent` (None: the roots)."""
        return [node for node in self.nodes if node.parent == parent]

    def leaves(self) -> list[Node]:
        """Returns the last nodes of the trajectories that were played to the end, in the order of their creation."""
        return [node for node in self.nodes if node.done]

    def trajectory(self, leaf: Node) -> list[Node]:
        """Returns the trajectory to `leaf`: the nodes from the root to `leaf`."""
        nodes = [leaf]
        while nodes[-1].parent is not None:
            nodes.append(self.nodes[nodes[-1].parent])
        return nodes[::-1]

    @property
    def failed_share(self) -> float:
        """Share of the branches that an error ended, 1 for a failed episode. One without reward did not fail."""
        if self.error is not None:
            return 1.0
        parents = {node.parent for node in self.nodes}
        ends = [node for node in self.nodes if node.id not in parents]
        return sum(n.is_lost and n.error != NO_REWARD for n in ends) / max(len(ends), 1)

    @property
    def success(self) -> float | None:
        """Mean success of the finished chosen trajectories, from 0 to 1. One that reports none, such as one that was
        cut off, counts as 0; None if none reports it or the episode failed."""
        ends = [node.success for node in self.leaves() if node.chosen]
        if self.error is not None or all(end is None for end in ends):
            return None
        return float(np.mean([end or 0.0 for end in ends]))

    @property
    def seat_success(self) -> dict[Seat, float]:
        """Mean success by seat of the finished chosen trajectories, for seats of which some reports it; the others
        count as 0. Empty if the episode failed."""
        if self.error is not None:
            return {}
        ends = [node.seat_success for node in self.leaves() if node.chosen]
        seats = dict.fromkeys(chain.from_iterable(ends))
        return {seat: float(np.mean([end.get(seat, 0.0) for end in ends])) for seat in seats}


@dataclass
class Sample:
    """One training sequence: a prompt and an answer. Losses use the tokens of the answer only.

    `prompt_ids [P]` and `token_ids [T]` are integers; `logprobs` (of the sampling policy) and `advantages` are floats
    `[T]`. `old_logprobs` [T], under the trainer's weights before an update, are the denominator of a clipped ratio;
    "current" means those of the training pass itself, right for an update of one optimizer step; None means `logprobs`.
    The gap between `old_logprobs` and `logprobs` is the sampler's mismatch. Supervised losses use `advantages` as token
    weights. `weight` is the weight of each token in the batch mean, `denominator` the sample's part of the mean's
    denominator (None: the weights of its tokens). A sample without gradient (`has_gradient` False: an answer whose
    advantage is 0, or that is masked) only adds to the denominator; no pass is made for it. Samples of one `group` (-1:
    none) are adjacent and are never split over micro-batches: their loss compares them. Tokens that are forced in
    the `sampling_mask` have weight 0.

    Some losses need more, [T] each: `reference_logprobs`, log-probabilities of the reference policy of a KL penalty;
    `values`, the critic's value of the state before each token; `returns`, the value target. With a `sampling_mask` all
    log-probabilities and entropies are of the distribution over the tokens that it keeps. `critic_ids` [P] are the
    prompt of a separate critic that gives one value for the whole answer (None: the critic reads what the policy reads
    and gives a value for each token). With `routed_experts`, as in `Answer`, passes use these experts.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    temperature: float = 1.0
    weight: float = 1.0
    denominator: float | None = None
    has_gradient: bool = True
    group: int = -1
    old_logprobs: np.ndarray | Literal["current"] | None = None
    reference_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    critic_ids: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


def is_sampled(answer: Answer | Sample) -> np.ndarray:
    """Returns whether each token [T] of an answer or a sample was sampled, bool. One that was forced, such as the end
    of a thought without budget, is part of the text, and of no mean over tokens."""
    if answer.sampling_mask is None:
        return np.ones(len(answer.token_ids), bool)
    return ~answer.sampling_mask.is_forced


def num_sampled(answer: Answer | Sample) -> int:
    """Returns the number of tokens of an answer or a sample that were sampled."""
    return int(is_sampled(answer).sum())


@dataclass(frozen=True)
class Datum:
    """One training sequence of the training service: position i of `tokens` [N] predicts `targets` [N] or [N, K].
    `inputs` are arrays of the shape of `targets` (weights, logprobs, advantages, clip bounds, ...)."""

    tokens: np.ndarray  # int64 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    inputs: dict[str, np.ndarray]  # float32


@dataclass
class RolloutBatch:
    """A rollout of T joint steps of B parallel games with N seats.

    `obs [T+1, B, N, *view]` (float32 or uint8), `agent_mask [T+1, B, N]` bool (agent mask), `action_mask [T+1, B, N,
    A]` bool (action mask) and `state [T+1, B, S]` float32 have one more step: the result of the last action. If step t
    ended a game (`terminated` or `truncated`, bool [T, B]), index t+1 is the first step of the next game; the last
    observations of ended games are in `final_obs [F, N, *view]` and `final_state [F, S]`, for step `end_index[0]` and
    game `end_index[1]` (integers [F] each). `seat_terminated [T, B, N]` bool is None if all seats end together.
    `actions [T, B, N, ...]` (int32 or float32), `logp [T, B, N]` (of the acting policy; 0 if it has none) and `rewards
    [T, B, N]` float32. `is_first [T+1, B]` bool marks the first step of a game. `recurrent_state` holds the recurrent
    state at index 0 by player; `episode_stats` the statistics of every game that ended, one entry per game. `worker` is
    the number of the rollout worker; `rollout_metrics` are metrics of the rollout itself.
    """

    obs: np.ndarray
    agent_mask: np.ndarray
    actions: np.ndarray
    logp: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray
    end_index: tuple[np.ndarray, np.ndarray]
    final_obs: np.ndarray
    action_mask: np.ndarray | None = None
    state: np.ndarray | None = None
    final_state: np.ndarray | None = None
    seat_terminated: np.ndarray | None = None
    recurrent_state: dict[str, Any] = field(default_factory=dict)
    episode_stats: dict[str, np.ndarray] = field(default_factory=dict)
    worker: int = 0
    rollout_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> np.ndarray:
        """Games that step t ended, bool [T, B]."""
        return np.logical_or(self.terminated, self.truncated)

    @property
    def seats_terminated(self) -> np.ndarray:
        """Seats that terminated at step t or earlier in the same game, bool [T, B, N]: their future value is 0."""
        whole = np.repeat(self.terminated[..., None], self.rewards.shape[2], 2)
        if self.seat_terminated is None:
            return whole
        return whole | self.seat_terminated

    @property
    def seats_done(self) -> np.ndarray:
        """Seats without a further decision in the same game after step t, bool [T, B, N]."""
        return self.seats_terminated | self.done[..., None]


Metrics = dict[str, float]
AlgorithmState = dict[str, Any]  # of an algorithm or a curriculum, kept between steps; must be JSON-serialisable
