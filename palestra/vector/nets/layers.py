"""Small networks. Several networks of one shape are computed together, as a stack of `P` members in one call.

Shapes: `P` members, `T` time, `R` rows (games times seats), `H` units. Members are independent; each is initialised
from its own generator, so that it is the same network in any stack. Floats are float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from palestra.core.config import StrictModel, is_changed
from palestra.core.config.own_types import OwnTypes
from palestra.vector.nets.attention import AttentionType, rowwise
from palestra.vector.nets.dense import GAIN, MLP, Activation, Linear
from palestra.vector.nets.entities import EntityEncoder, EntityLayout
from palestra.vector.nets.images import ConvolutionKind, Convolutions, ImageEncoder, ImageLayout
from palestra.vector.nets.own_network import OwnBody, OwnNetwork


class Communication(nn.Module):
    """Rounds of communication: [P, R, H] -> [P, R, H]. In each, a seat's features h become
    activation(A h + B c + b), where c is the mean of the features of the team's other seats that
    act, or 0 (Sukhbaatar et al., 2016, eq. 1 and 2). `team_size` consecutive rows are a team."""

    def __init__(self, units: int, rounds: int, activation: Activation, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.activation = activation
        self.rounds = nn.ModuleList(Linear(2 * units, units, GAIN[activation], generators) for _ in range(rounds))

    def forward(self, x: Tensor, acts: Tensor | None, team_size: int) -> Tensor:
        """Returns features [P, R, H] after all rounds. Seats without `acts` [P, R] send nothing."""
        for layer in self.rounds:
            x = layer(torch.cat([x, mean_of_others(x, acts, team_size)], -1), self.activation)
        return x


def mean_of_others(x: Tensor, acts: Tensor | None, team_size: int) -> Tensor:
    """Returns for each row the mean of the other acting rows of its team [P, R, H]; 0 where there are none."""
    by_team = x.unflatten(1, (-1, team_size))  # [P, G, S, H]
    sends = by_team.new_ones(by_team.shape[:3]) if acts is None else acts.view(by_team.shape[:3]).float()
    sent = by_team * sends[..., None]
    others = (sends.sum(2, keepdim=True) - sends).clamp(min=1)[..., None]
    return ((sent.sum(2, keepdim=True) - sent) / others).flatten(1, 2)


M = TypeVar("M", bound=nn.Module)
Layout = EntityLayout | ImageLayout


class NetConfig(StrictModel):
    """Shape of a network: convolutions for pixels, fully connected layers, then perhaps a GRU."""

    hidden: list[Annotated[int, Field(ge=1, le=65_536)]] = Field([64, 64], min_length=1, max_length=64)
    """Units of each hidden layer."""
    activation: Activation = "tanh"
    """Activation function of the hidden layers."""
    layer_norm: bool | None = None
    """Layer normalisation (Ba et al., 2016) of the hidden layers, before the activation function.
    null: on for `pqn`, which needs it, otherwise off."""
    gru_units: int = Field(0, ge=0, le=65_536)
    """Units of a GRU after the hidden layers; 0: a feed-forward network."""
    communication_rounds: int = Field(0, ge=0, le=64)
    """Rounds in which the seats that a policy plays send each other the mean of their hidden features before they act
    (CommNet; Sukhbaatar et al., 2016); 0: none. For `ppo`, `a2c` and `trpo`."""
    encoder: Literal["flat", "attention", "graph"] = "flat"
    """Input of the hidden layers. `flat`: all numbers of the observation. `attention`: the result of attention between
    the seat and the entities that it sees; their order does not matter, their number may differ between seats, and the
    env must say which numbers are entities. `graph`: attention only along the edges of `graph_neighbours`, as in DGN
    (Jiang et al., 2020); each of `attention_blocks` passes messages along one edge."""
    graph_neighbours: int | None = Field(None, ge=1)
    """Edges of `encoder: graph`: the seat and each entity attend to themselves and to this number of nearest others;
    the env must say which numbers are positions. null: all attend to all, as with `encoder: attention`."""
    attention_blocks: int = Field(1, ge=1, le=64)
    """Number of attention blocks in `encoder: attention` or `graph`, and in both encoder and decoder of `mat`."""
    attention_heads: int = Field(1, ge=1, le=1024)
    """Heads of every attention layer; they must divide the units of the last hidden layer."""
    attention_type: AttentionType = "softmax"
    """Layers of the encoder and the decoder of `mat`: attention with a `softmax`, or `retention` (Sun et al., 2023) as
    in Sable (Mahjoub et al., 2024). The cost of retention per acting seat does not grow with the team. It spans the
    seats of one step, and with a `retention_decay` above 0 the earlier steps of the episode, too."""
    retention_decay: float = Field(0.0, ge=0, le=1)
    """Memory of `attention_type: retention`: the share of its state that each step of an episode
    leaves to the next is this number times 1 - 1/32 in the first head, and up to 1 - 1/512 in the
    last. 0: no memory; 1: that of Sable, the longest."""
    convolutions: ConvolutionKind = "nature"
    """Convolutions for pixel observations (three dimensions): `nature` (Mnih et al., 2015), or
    `small` (Mnih et al., 2013), which takes half the time on a CPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which convolutions are computed; weights stay float32. `bfloat16` is two to three
    times as fast on CPUs with matrix instructions for it (AMX)."""
    network: Annotated[OwnNetwork, OwnTypes("network", OwnNetwork, config=OwnNetwork)] | None = None
    """A network of one's own, {type: "module:Class", ...options}: a torch.nn.Module from observations to features, in
    place of all layers but the last, which is added; the critics of the policy are of it, too. Only `gru_units` and
    `communication_rounds` may add layers. null: the layers that the other keys describe."""

    @property
    def is_recurrent(self) -> bool:
        """True if the network has a recurrent state."""
        return self.gru_units > 0 or (self.network is not None and self.network.is_recurrent)

    def without_memory(self) -> Self:
        """Returns the config of a network without a recurrent state. Raises ValueError if the user's own has one."""
        if self.network is not None and self.network.is_recurrent:
            raise ValueError(
                f"network {self.network.type} has a recurrent state, and this algorithm trains a critic or a "
                "discriminator without one: set gru_units on a network without a state, or use ppo or a2c"
            )
        return self.model_copy(update={"gru_units": 0})

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        combined = {"network", "gru_units", "communication_rounds"}
        changed = [name for name in NetConfig.model_fields if is_changed(self, name)]
        if self.network and (unused := [name for name in changed if name not in combined]):
            raise ValueError(
                f"network: {self.network.type} replaces the layers that {unused[0]} describes: leave {unused[0]} out, "
                "or make it an option of your class"
            )
        return self


class GRU(nn.Module):
    """P gated recurrent units (Cho et al., 2014, in PyTorch's variant): inputs [P, T, R, in] and
    recurrent state [P, R, H] -> recurrent states after each step [P, T, R, H]. Where `is_first [P,
    T, R]` (bool) is set, a game begins and the recurrent state is zeroed before that step."""

    def __init__(self, inputs: int, units: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.units = units
        self.inputs = Linear(inputs, 3 * units, 1.0, generators)
        self.recurrent = Linear(units, 3 * units, 1.0, generators)

    def forward(self, x: Tensor, recurrent_state: Tensor, is_first: Tensor | None) -> Tensor:
        P, T, R, _ = x.shape
        projected = self.inputs(x.reshape(P, T * R, -1)).view(P, T, R, -1)
        outputs = []
        for t in range(T):
            if is_first is not None:
                recurrent_state = recurrent_state.masked_fill(is_first[:, t, :, None], 0.0)
            reset_x, update_x, new_x = projected[:, t].chunk(3, -1)
            reset_h, update_h, new_h = self.recurrent(recurrent_state).chunk(3, -1)
            update = torch.sigmoid(update_x + update_h)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            recurrent_state = new + update * (recurrent_state - new)
            outputs.append(recurrent_state)
        return torch.stack(outputs, 1)


class Team(NamedTuple):
    """Inputs, besides observations, of a network that plays all seats of a team: the seats that act
    `acts` [P, T, R] bool, and their `actions` [P, T, R, ...] for a network whose outputs depend on
    them. The seats of a team are consecutive rows."""

    acts: Tensor
    actions: Tensor | None = None


def acting_team(acts: Tensor | None, actions: Tensor | None = None) -> Team | None:
    """Returns the seats that act, with their actions, as input of networks; None for networks that play no teams."""
    return None if acts is None else Team(acts, actions)


class Net(nn.Module):
    """P networks from observations to `outputs` numbers. `gain` scales the last layer's initial
    weights: small for policies, so that they start nearly uniform (Andrychowicz et al., 2021). With
    `with_value_head` a second last layer outputs a value. `team_size` consecutive rows are the
    seats of a team. `layout` says where entities or images are in observations (None: neither)."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        outputs: int,
        config: NetConfig,
        generators: Sequence[torch.Generator],
        gain: float = 1.0,
        with_value_head: bool = False,
        team_size: int = 1,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        self.observation_shape = observation_shape
        self.team_size = team_size
        self.recurrent_units = config.gru_units  # of a row's recurrent state; 0: there is none
        self.settings = tuple(str(getattr(config, name)) for name in NetConfig.model_fields)
        self.pixels: Convolutions | None = None
        self.image_encoder: ImageEncoder | None = None
        self.entity_encoder: EntityEncoder | None = None
        units = config.hidden[-1]
        if config.network is not None:
            own = OwnBody(config.network, observation_shape, generators)
            if own.state_size and (config.gru_units or config.communication_rounds):
                raise ValueError(
                    f"network {config.network.type} has a recurrent state of its own (state_size): leave gru_units and "
                    "communication_rounds out"
                )
            self.body: MLP | OwnBody = own
            self.recurrent_units = own.state_size or config.gru_units
            units = own.units
        else:
            dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
            if len(observation_shape) == 3:
                self.pixels = Convolutions(observation_shape, generators, config.convolutions, dtype)
                inputs = self.pixels.units
            else:
                inputs = math.prod(observation_shape)
            if isinstance(layout, ImageLayout):
                self.image_encoder = ImageEncoder(layout, inputs, generators, config.convolutions, dtype)
                inputs = self.image_encoder.units
            if isinstance(layout, EntityLayout):
                blocks = config.attention_blocks
                heads = config.attention_heads
                self.entity_encoder = EntityEncoder(
                    layout, inputs, units, blocks, heads, config.activation, generators, config.graph_neighbours
                )
                inputs = units
            self.body = MLP(inputs, config.hidden, config.activation, generators, layer_norm=bool(config.layer_norm))
        self.communication: Communication | None = None
        if config.communication_rounds:
            self.communication = Communication(units, config.communication_rounds, config.activation, generators)
        self.gru: GRU | None = None
        if config.gru_units:
            self.gru = GRU(units, config.gru_units, generators)
        features = config.gru_units or units
        self.head = Linear(features, outputs, gain, generators)
        self.value_head = Linear(features, 1, 1.0, generators) if with_value_head else None

    @property
    def plays_team(self) -> bool:
        """True if outputs of a row depend on the other rows of its team, so that teams must not be split."""
        return self.communication is not None

    def forward(self, obs: Tensor, team: Team | None = None) -> Tensor:
        """Returns outputs without a recurrent state: [P, R, *view] -> [P, R, outputs], for feed-forward networks."""
        out: Tensor
        if self.communication is None:
            out = self.body(self._body_inputs(obs), self.head)
        else:
            out = self.head(self._communicate(self._encode_obs(obs), team))
        return out

    def unroll(
        self,
        obs: Tensor,
        recurrent_state: Tensor | None = None,
        is_first: Tensor | None = None,
        team: Team | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns outputs over time, [P, T, R, *view] -> [P, T, R, outputs], and the recurrent
        state after each step [P, T, R, H] (None for feed-forward networks)."""
        if not self.recurrent_units:
            P, T, R = obs.shape[:3]
            return self.forward(obs.reshape(P, T * R, *obs.shape[3:]), team).view(P, T, R, -1), None
        features, memories = self.features(obs, recurrent_state, is_first, team)
        return rowwise(self.head, features), memories

    def unroll_with_values(
        self, obs: Tensor, recurrent_state: Tensor | None, is_first: Tensor | None, team: Team | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns outputs [P, T, R, outputs] and values [P, T, R] (None without `value_head`)."""
        if self.value_head is None:
            return self.unroll(obs, recurrent_state, is_first, team)[0], None
        features, _ = self.features(obs, recurrent_state, is_first, team)
        return rowwise(self.head, features), rowwise(self.value_head, features)[..., 0]

    def features(
        self, obs: Tensor, recurrent_state: Tensor | None, is_first: Tensor | None, team: Team | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the inputs of the last layers [P, T, R, H], and the recurrent state after each
        step (None for feed-forward networks)."""
        P, T, R = obs.shape[:3]
        if recurrent_state is None and self.recurrent_units:
            recurrent_state = self.initial_state(P, R)
        if isinstance(self.body, OwnBody) and self.body.state_size:
            assert recurrent_state is not None
            return self.body.unroll(obs, recurrent_state, is_first)
        x = self._communicate(self._encode_obs(obs.reshape(P, T * R, *obs.shape[3:])), team).view(P, T, R, -1)
        if self.gru is None:
            return x, None
        x = self.gru(x, recurrent_state, is_first)
        return x, x

    def _encode_obs(self, obs: Tensor) -> Tensor:
        """Returns the output of the feed-forward layers: [P, R, *view] -> [P, R, H]."""
        seen: Tensor = self.body(self._body_inputs(obs))
        return seen

    def _body_inputs(self, obs: Tensor) -> Tensor:
        """Returns the inputs of the fully connected layers: [P, R, *view] -> [P, R, in]."""
        if isinstance(self.body, OwnBody):
            return obs
        x = self.pixels(obs) if self.pixels else obs.reshape(*obs.shape[:2], -1).float()
        if self.image_encoder:
            x = self.image_encoder(x)
        return self.entity_encoder(x) if self.entity_encoder else x

    def _communicate(self, x: Tensor, team: Team | None) -> Tensor:
        """Returns features [P, R, H] after the rounds of communication, if there are any."""
        if self.communication is None:
            return x
        acts = team.acts.reshape(x.shape[:2]) if team is not None else None
        out: Tensor = self.communication(x, acts, self.team_size)
        return out

    def initial_state(self, members: int, rows: int) -> Tensor:
        """Returns the recurrent state at the start of a game, zeros [P, R, H]."""
        return self.head.weight.new_zeros(members, rows, self.recurrent_units)


def states_at(states: Tensor | None, seats: int, times: Tensor, games: Tensor) -> Tensor | None:
    """Returns the recurrent states [P, F*S, W] after the steps `times` [F] of `games` [F], from
    those after all steps [P, T, B*S, W]. None stays None."""
    if states is None:
        return None
    return states.unflatten(2, (-1, seats))[:, times, games].flatten(1, 2)


def make_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Returns a random generator for each member's weights."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def member_weights(module: nn.Module, p: int) -> dict[str, Tensor]:
    """Returns the weights of one member of a stack, without the member dimension."""
    return {name: parameter.detach()[p].clone() for name, parameter in module.named_parameters()}


def with_member_weights(module: M, weights: Mapping[str, np.ndarray | Tensor], prefix: str = "") -> M:
    """Returns a copy of `module`, a stack of one member, with its own parameters, set to weights that `member_weights`
    returned. Everything that is not a parameter is shared with `module`, and nothing is initialised: the copy takes a
    fifteenth of the time of building a small network. Raises ValueError if names or shapes do not match."""
    twin: M = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    parameters = module._parameters.items()
    twin.__dict__["_parameters"] = {
        name: parameter if parameter is None else _stack_of_one(parameter, prefix + name, weights)
        for name, parameter in parameters
    }
    twin.__dict__["_modules"] = {
        name: child if child is None else with_member_weights(child, weights, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return twin


def _stack_of_one(parameter: nn.Parameter, name: str, weights: Mapping[str, np.ndarray | Tensor]) -> nn.Parameter:
    """Returns the weights called `name` as a parameter [1, ...]. Raises ValueError if they are
    missing or do not have the shape of a member of `parameter`."""
    stored = weights.get(name)
    if stored is None or tuple(stored.shape) != tuple(parameter.shape[1:]):
        have = "none" if stored is None else tuple(stored.shape)
        raise ValueError(
            f"the weights belong to another network: {name} should have shape {tuple(parameter.shape[1:])} and has "
            f"{have}"
        )
    value = torch.as_tensor(stored, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(value[None].clone(memory_format=torch.contiguous_format), parameter.requires_grad)
