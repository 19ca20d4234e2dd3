"""Stacks of small-network policies: their state, their optimizer (which clips each member's gradient), and the files of
a single policy.

Shapes: `P` members of a stack, `T` steps, `B` games, `S` seats of a member, `N` seats, `F` ended games, `O` outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.files import read_arrays, write_arrays
from palestra.core.optimizers import Adam, OptimizedPolicy
from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.vector.learners.optimizers import NetOptimizer, StackedOptimizer
from palestra.vector.nets.continuous_heads import SquashedHead, TanhHead
from palestra.vector.nets.heads import ActionHead, CategoricalHead, GaussianHead, MultiCategoricalHead
from palestra.vector.nets.layers import (
    Net,
    NetConfig,
    Team,
    make_generators,
    member_weights,
    states_at,
    with_member_weights,
)
from palestra.vector.nets.normalise import RunningNorm, normalise
from palestra.vector.nets.on_device import CPU, RolloutTensors
from palestra.vector.nets.seat_mapping import SeatMapping, group_into_stacks
from palestra.vector.nets.transformer import MultiAgentTransformer
from palestra.vector.policies.frozen import NetMember
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy, greedy_selector

MAX_NORMALISED_INPUT = 10.0  # deviations from the mean; first observations can be extreme


class NetPolicyConfig(OptimizedPolicy, NetConfig):
    """A small network in training."""

    type: Literal["net"] = "net"
    """Kind of policy: a small network in training."""
    lr: float = Field(3e-4, gt=0, le=1_000_000)
    """Learning rate, above 0."""
    optimizer: NetOptimizer = Adam()
    """The optimizer and its options: {type: adam}, adamw or sgd, or "module:Class" for a
    torch.optim.Optimizer of one's own."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """"constant", or "linear": the learning rate falls to 0 over the run."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Maximum gradient norm of one optimizer step, per member."""
    normalize_observations: bool = False
    """Normalise observations, and the inputs of central critics and mixers, by their running mean and deviation."""
    seat_one_hot: bool = False
    """Add the seat as a one-hot vector to the observations of a policy that plays several seats."""

    def with_lr(self, lr: float | None) -> Self:
        """Returns the config with another learning rate; None keeps it."""
        return self.model_copy(update={"lr": lr or self.lr})

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.graph_neighbours is not None and self.encoder != "graph":
            raise ValueError(
                "graph_neighbours sets the edges of encoder: graph: set encoder: graph, or leave graph_neighbours out"
            )
        if self.retention_decay and self.attention_type != "retention":
            raise ValueError(
                "retention_decay: only attention_type: retention has a memory of earlier steps, and this policy has "
                f"attention_type: {self.attention_type}: set retention (with type: mat), or leave retention_decay out"
            )
        if self.encoder != "flat" and self.normalize_observations:
            raise ValueError(
                f"normalize_observations: encoder: {self.encoder} embeds all entities of a kind with the same weights, "
                "and absent ones are zeros, so their columns must not be scaled one by one: leave "
                "normalize_observations out"
            )
        return self


@dataclass
class PolicyStack:
    """Policies of one shape, stacked: networks, action distribution, optimizer and observation norm."""

    seat_mapping: SeatMapping
    config: NetPolicyConfig
    head: ActionHead
    net: Net
    optimizer: StackedOptimizer
    norm: RunningNorm | None
    version: int = 0

    def rows(self, x: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """Selects the members' rows: [T, B, N, ...] -> [P, T, B*S, ...]."""
        return self.seat_mapping.select_seats(x, lead).flatten(lead, lead + 1)

    def optional_rows(self, x: np.ndarray | Tensor | None, lead: int = 2) -> Tensor | None:
        """Selects the members' rows like `rows`; None stays None."""
        return None if x is None else self.rows(x, lead)

    def observations(self, obs: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """Returns the networks' inputs: [T, B, N, *view] -> [P, T, B*S, *view], normalised if configured."""
        return normalise(self.norm, self.seat_mapping.network_inputs(obs, lead).flatten(lead, lead + 1))

    def actions(self, batch: RolloutBatch | RolloutTensors) -> Tensor:
        """Returns the members' actions [P, T, B*S, ...], int64 or float32."""
        return self.action_rows(batch.actions)

    def action_rows(self, actions: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """Selects the members' rows of the actions of all seats, int64 or float32, like `rows`."""
        rows = self.rows(actions, lead)
        if self.head.width:  # they are padded to the longest action of any seat
            rows = rows[..., : self.head.width]
        elif rows.dim() > lead + 1:  # other seats have actions of several numbers
            rows = rows[..., 0]
        if not isinstance(self.seat_mapping.action_space, Continuous):
            rows = rows.long()
        return rows

    def action_masks(self, batch: RolloutBatch | RolloutTensors) -> Tensor | None:
        """Returns the masks of the members' actions [P, T, B*S, A]; None: every action is legal."""
        return None if batch.action_mask is None else self.rows(batch.action_mask)[:, :-1]

    def unroll(self, batch: RolloutTensors) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs of the networks at every step [P, T+1, B*S, O], and at the last observations of the games
        that ended [P, F*S, O] (None: none did)."""
        is_first = self.seat_mapping.repeat_games(batch.is_first)
        memory = batch.recurrent_state.get(self.seat_mapping.label)
        out, memories = self.net.unroll(self.observations(batch.obs), memory, is_first)
        times, games = batch.end_index
        if not len(times):
            return out, None
        before = states_at(memories, len(self.seat_mapping.seats[0]), times, games)
        ends, _ = self.net.unroll(self.observations(batch.final_obs, 1)[:, None], before)
        return out, ends[:, 0]

    @torch.no_grad()
    def action_logp(self, batch: RolloutTensors) -> Tensor:
        """Returns the log-probability of the actions of the members' seats under the current
        policies, [T, B, P*S] with seats in the order of `seat_mapping.all_seats`."""
        is_first = self.seat_mapping.repeat_games(batch.is_first)[:, :-1]
        memory = batch.recurrent_state.get(self.seat_mapping.label)
        actions = self.actions(batch)
        acts = self.rows(batch.agent_mask)[:, :-1]
        observations = self.observations(batch.obs)[:, :-1]
        out, _ = self.net.unroll_with_values(observations, memory, is_first, Team(acts, actions))
        logp, _ = self.head.evaluate_actions(out, actions, self.action_masks(batch))
        return self.seat_mapping.by_seat(logp)

    def build_policy(self, selector: ActionSelector) -> NetVectorPolicy:
        """Returns a player of these policies that selects actions with `selector`."""
        versions = [self.version] * len(self.seat_mapping.names)
        return NetVectorPolicy(self.seat_mapping, self.net, selector, versions, self.norm)


HEADS: dict[str, type[Any]] = {
    "CategoricalHead": CategoricalHead,
    "MultiCategoricalHead": MultiCategoricalHead,
    "GaussianHead": GaussianHead,
    "SquashedHead": SquashedHead,
    "TanhHead": TanhHead,
    "ValueHead": CategoricalHead,  # outputs are action values: the mode is the best action, sampling is not used
}
SPACES: dict[type, type] = {CategoricalHead: Discrete, MultiCategoricalHead: MultiDiscrete}  # of others: Continuous


def write_policy(stack: PolicyStack, p: int, folder: Path) -> None:
    """Writes one policy of a stack: weights to policy.safetensors; shape, config and version to member.json."""
    weights = {name: value.cpu().numpy() for name, value in member_weights(stack.net, p).items()}
    if stack.norm is not None:
        weights |= {f"norm/{k}": v[p].cpu().numpy() for k, v in stack.norm.state_dict().items()}
    write_arrays(folder / "policy.safetensors", weights)
    facts = {
        "name": stack.seat_mapping.names[p],
        "head": type(stack.head).__name__,
        "network": type(stack.net).__name__,
        "plays_team": stack.net.plays_team,
        "version": stack.version,
        "seat_id": stack.seat_mapping.seat_id,
        "config": stack.config.model_dump(),
    }
    (folder / "member.json").write_text(json.dumps(facts, indent=2) + "\n")


def policy_writers(stacks: Iterable[PolicyStack]) -> dict[str, Callable[[Path], None]]:
    """Returns for each policy of the stacks a function that writes it to a folder."""
    writers: dict[str, Callable[[Path], None]] = {}
    for stack in stacks:
        writers |= {name: partial(write_policy, stack, p) for p, name in enumerate(stack.seat_mapping.names)}
    return writers


def read_frozen_member(
    folder: Path, env: VectorEnv, seats: Sequence[int], *, best: bool = False
) -> tuple[NetMember, int]:
    """Loads a policy that `write_policy` wrote, for the seats `seats` of an env; returns it and its version. `best`
    plays the most likely actions instead of sampling.

    Raises ValueError if it does not fit these seats.
    """
    facts = json.loads((folder / "member.json").read_text())
    settings = {key: value for key, value in facts["config"].items() if key != "optimizer"}  # playing imports no class
    config = NetPolicyConfig(**settings)
    (alone,) = group_into_stacks(env, {facts["name"]: list(seats)}, {facts["name"]: config})
    seat_mapping = replace(alone, seat_id=facts["seat_id"])
    kind = HEADS[facts["head"]]
    if not isinstance(seat_mapping.action_space, SPACES.get(kind, Continuous)):
        raise ValueError(
            f'{folder}: the policy "{facts["name"]}" acts by a {kind.__name__}, and seat {env.seats[seats[0]]} takes '
            f"{seat_mapping.action_space}: choose a policy that was trained for such a seat"
        )
    head = kind(seat_mapping.action_space)
    shape = replace(seat_mapping, names=("",))  # without the name, members of one shape share a cached network
    pattern = _pattern(facts.get("network", "Net"), shape, facts["head"], config.model_dump_json())
    arrays = read_arrays(folder / "policy.safetensors")
    net = with_member_weights(pattern, arrays)
    norm = None
    if config.normalize_observations and (kept := strip_prefix(arrays, "norm")):
        norm = RunningNorm(1, seat_mapping.input_shape[0], clip=MAX_NORMALISED_INPUT)
        norm.load_state_dict({key: torch.from_numpy(value[None].copy()) for key, value in kept.items()})
    return NetMember(seat_mapping, net, head, norm, best or facts["head"] == "ValueHead"), facts["version"]


def plays_team(folder: Path) -> bool:
    """Returns whether the policy that `write_policy` wrote must play all seats of its team together."""
    return bool(json.loads((folder / "member.json").read_text()).get("plays_team"))


@lru_cache(maxsize=16)
def _pattern(network: str, seat_mapping: SeatMapping, head: str, config_json: str) -> Net:
    """Returns a network of the class `network` for the seats of a policy, with arbitrary weights. It is built once for
    each shape, since initialising a network takes far longer than reading its weights."""
    config = NetPolicyConfig.model_validate_json(config_json)
    generators = make_generators([0])
    shape = seat_mapping.input_shape
    team_size = len(seat_mapping.seats[0])
    layout = seat_mapping.layout
    if network == MultiAgentTransformer.__name__:
        space = seat_mapping.action_space
        return MultiAgentTransformer(shape, space, config, generators, team_size=team_size, layout=layout)
    outputs = HEADS[head](seat_mapping.action_space).outputs
    return Net(shape, outputs, config, generators, team_size=team_size, layout=layout)


def read_policy(
    folder: Path, env: VectorEnv, seats: Sequence[int], *, best: bool = False, device: torch.device = CPU
) -> NetVectorPolicy:
    """Loads a policy like `read_frozen_member`, as a separate player that acts on `device`."""
    member, version = read_frozen_member(folder, env, seats, best=best)
    head = member.head.to(device)
    selector: ActionSelector = greedy_selector(head) if member.greedy else head.sample
    norm = member.norm
    if norm is not None:
        norm = norm.to(device)
    return NetVectorPolicy(member.seat_mapping, member.net.to(device), selector, [version], norm)


def strip_prefix(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names begin with `name/`, without that prefix."""
    return {key[len(name) + 1 :]: value for key, value in arrays.items() if key.startswith(f"{name}/")}
