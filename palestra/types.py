"""The nouns every room shares: what an env says, what a policy answers, the tree an episode grows, what a learner eats.

Plain data, no torch. Token ids and log-probabilities are the sampler's own arrays: nothing here is ever decoded and
tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Seat = str
TEAM = "team"  # the name under which figures of all policies together are logged
Message = dict[str, str]  # {"role": "user", "content": "..."}: the chat format of `transformers`


@dataclass(frozen=True)
class Step:
    """What an env says after `reset` or `step`.

    `observations` names exactly the seats that act next: one seat in turn-based play, all of them in simultaneous play,
    none when the game is over. Rewards are those of the step just made: `rewards` per seat (local), `team_reward` for
    all.

        Step({"executor": "you r2 c3 ..."}, rewards={"planner": 0.4}, team_reward=0.0)
    """

    observations: dict[Seat, Any]
    rewards: dict[Seat, float] = field(default_factory=dict)
    team_reward: float = 0.0
    legal: dict[Seat, list[Any]] | None = None
    state: Any = None
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return not self.observations


@dataclass
class Answer:
    """One policy's answer at one seat. Policies without tokens (scripted, human) leave the arrays empty.

    `prompt_ids [P]` and `token_ids [T]` int32; `logprobs [T]` float32, of the sampled tokens under the policy that
    sampled them at `temperature`; `stop` is "stop" (an end token, included in token_ids) or "length".
    """

    text: str
    policy: str
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    stop: str = "stop"
    temperature: float = 1.0


@dataclass
class Node:
    """One joint step of an episode's tree: what the acting seats saw, what they answered, and what came of it.

    Siblings (same `parent`) answered the same observations. `chosen` marks nodes from which play went on (the last node
    of a played line included). `advantages` is written by the algorithm that assigns credit.
    """

    id: int
    parent: int | None
    depth: int
    observations: dict[Seat, Any]
    answers: dict[Seat, Answer]
    rewards: dict[Seat, float] = field(default_factory=dict)
    team_reward: float = 0.0
    chosen: bool = True
    over: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    advantages: dict[Seat, float] = field(default_factory=dict)

    def reward(self, seat: Seat, alpha: float = 1.0) -> float:
        """alpha * team + local: the mixed reward of this seat for this step."""
        return alpha * self.team_reward + self.rewards.get(seat, 0.0)

    def invalid(self, seat: Seat) -> bool | None:
        """Whether the env flagged this seat's answer; None where it flags none. `info["invalid"]` may flag the step as
        a whole, each seat in a mapping, or list the seats that erred."""
        flag = self.info.get("invalid")
        if isinstance(flag, dict):
            return bool(flag.get(seat, False))
        if isinstance(flag, (list, tuple, set)):
            return seat in flag
        return None if flag is None else bool(flag)


@dataclass
class Episode:
    """A tree of joint steps grown from one env seed. A plain episode is a tree with one branch.

    `error` holds the message of an env or policy that failed, `traceback` where it did: such an episode is recorded,
    counted and shown, and never trained on.
    """

    env: str
    seed: int
    seats: dict[Seat, str]
    nodes: list[Node] = field(default_factory=list)
    error: str | None = None
    traceback: str | None = None

    def children(self, parent: int | None) -> list[Node]:
        return [node for node in self.nodes if node.parent == parent]

    def leaves(self) -> list[Node]:
        """The ends of the lines that were played out, one for each in the order they grew."""
        return [node for node in self.nodes if node.over]

    def line(self, leaf: Node) -> list[Node]:
        """The nodes from the root to `leaf`."""
        nodes = [leaf]
        while nodes[-1].parent is not None:
            nodes.append(self.nodes[nodes[-1].parent])
        return nodes[::-1]

    @property
    def success(self) -> float:
        """Share of the lines played out to their end that the env calls a success; 0 for a failed episode."""
        ends = [node for node in self.leaves() if node.chosen]
        return float(np.mean([bool(node.info.get("success")) for node in ends])) if ends and not self.error else 0.0


@dataclass
class Sample:
    """One trained sequence: prompt, then answer; the loss reads the answer's tokens only.

    `token_ids`, `logprobs` (of the sampling policy) and `advantages` are `[T]`; `prompt_ids` is `[P]`. Supervised
    losses read `advantages` as token weights. `weight` is how much each token counts in the batch's mean. Samples of
    one `group` (-1: none), which stand next to each other, are never parted: their loss compares them. Some losses read
    more, [T] each: `reference`, the log-probabilities of the policy that a penalty holds to; `values`, what a critic
    thought each token's state was worth, and `returns`, what it turned out to be.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    temperature: float = 1.0
    weight: float = 1.0
    group: int = -1
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None


@dataclass(frozen=True)
class Datum:
    """One trained sequence as a training service has it: position i of `tokens` [N] predicts `targets` [N] or [N, K];
    `inputs` are arrays of the same shape as targets (weights, logprobs, advantages, clip bounds, ...)."""

    tokens: np.ndarray  # int64 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    inputs: dict[str, np.ndarray]  # float32


@dataclass
class Batch:
    """T joint steps of B games for N seats, as a `VectorEnv` and those who played it said them.

    `obs [T+1, B, N, *view]`, `acting [T+1, B, N]`, `legal [T+1, B, N, A]` and `state [T+1, B, S]` have one more moment:
    what the last step led to. Where step t ended a game (`terminated` or `truncated` [T, B]), moment t+1 is the first
    of the next game; the last views of ended games are `final_obs [F, N, *view]` and `final_state [F, S]`, of step
    `ends[0]` and game `ends[1]` (F each). `seat_terminated [T, B, N]` is None where all seats end together. `actions
    [T, B, N, ...]`, `logp [T, B, N]` (of the policy that acted; 0 where it has none), `rewards [T, B, N]`. `fresh [T+1,
    B]` marks the first moment of a game. `memory` holds what recurrent players remembered at the first moment, by
    player; `games` the figures of every game that ended. `source` numbers who played, where several do; `notes` are
    figures of the playing itself.
    """

    obs: np.ndarray
    acting: np.ndarray
    actions: np.ndarray
    logp: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    fresh: np.ndarray
    ends: tuple[np.ndarray, np.ndarray]
    final_obs: np.ndarray
    legal: np.ndarray | None = None
    state: np.ndarray | None = None
    final_state: np.ndarray | None = None
    seat_terminated: np.ndarray | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    games: dict[str, np.ndarray] = field(default_factory=dict)
    source: int = 0
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> np.ndarray:
        """Games that step t ended [T, B]."""
        return np.logical_or(self.terminated, self.truncated)

    @property
    def terminated_seats(self) -> np.ndarray:
        """Seats whose game terminated at step t or earlier in the same game [T, B, N]: what follows is worth 0."""
        whole = np.repeat(self.terminated[..., None], self.rewards.shape[2], 2)
        return whole if self.seat_terminated is None else whole | self.seat_terminated

    @property
    def over_seats(self) -> np.ndarray:
        """Seats that have no decision in the same game after step t [T, B, N]."""
        return self.terminated_seats | self.over[..., None]


Metrics = dict[str, float]
Memory = dict[str, Any]  # what an algorithm or a curriculum knows from earlier steps, as JSON has it
