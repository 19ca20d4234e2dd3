"""A user's own network in a stack: one module whose weights are those of each member in turn.

Shapes: `P` members, `T` time, `R` rows, `H` features, `S` numbers of a recurrent state.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.func import functional_call

from palestra.core.config import load_object
from palestra.core.config.own_types import OwnObject
from palestra.vector.nets.dense import Linear

ROWS = 3  # of the observations with which a new network is tried


class OwnNetwork(OwnObject):
    """A network of one's own: a torch.nn.Module that is made with `observation_shape` and the options."""

    @model_validator(mode="after")
    def _check_class(self) -> Self:
        self.check_class(nn.Module, "network", leave_out=("observation_shape",))
        return self

    @property
    def is_recurrent(self) -> bool:
        """True if the class's `forward` takes a recurrent state after the observations."""
        return len(inspect.signature(load_object(self.type, "network").forward).parameters) > len(("self", "obs"))


class OwnBody(nn.Module):
    """P networks of a user's class, from observations [P, R, *view] to features [P, R, H].

    A user's module is one network: it takes observations [R, *view] (float32; pixels as the env gives them) and returns
    features [R, H]. A recurrent one takes a state [R, S] as well, zeros at the start of a game, and returns the
    features and the next state; its attribute `state_size` is S. Each member is initialised by its own seed.

    Raises ValueError if the module fails, returns other shapes, or keeps what is not a parameter.
    """

    def __init__(
        self, network: OwnNetwork, observation_shape: tuple[int, ...], generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()
        modules = [_build_member(network, observation_shape, generator.initial_seed()) for generator in generators]
        self.label = f"network {network.type}"
        self.state_size = int(getattr(modules[0], "state_size", 0))
        if network.is_recurrent != bool(self.state_size):
            raise ValueError(
                f"{self.label}: a forward with a state needs an attribute state_size above 0, and no other"
            )
        self._check_module(modules[0])
        self.units = self._count_units(modules[0], observation_shape)
        self._template = (modules[0].requires_grad_(False),)  # in a tuple: its parameters are no weights
        stacked = {}
        for name, _ in modules[0].named_parameters():
            members = [module.get_parameter(name).detach() for module in modules]
            # names of parameters of a module have no points
            stacked[name.replace(".", "/")] = nn.Parameter(torch.stack(members))
        self.weights = nn.ParameterDict(stacked)

    def _check_module(self, module: nn.Module) -> None:
        if kept := sorted({name for name, _ in module.named_buffers()} & module.state_dict().keys()):
            raise ValueError(
                f"{self.label} has the buffer {kept[0]}, which would be the same in all policies and would not be "
                "saved: make it a parameter, or register it with persistent=False if it is a constant (in place of "
                "batch normalisation use layer normalisation)"
            )
        if any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules()):
            raise ValueError(f"{self.label} has dropout, whose random numbers a resumed run would not repeat: leave it")
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{self.label} has no parameters, so there is nothing to train")

    @torch.no_grad()
    def _count_units(self, module: nn.Module, shape: tuple[int, ...]) -> int:
        """Returns the number of features that the module returns for observations of zeros."""
        takes = f"observations of shape {(ROWS, *shape)}"
        must = f"features [{ROWS}, N]"
        inputs = [torch.zeros(ROWS, *shape)]
        wanted: list[tuple[int, ...]] = []
        if self.state_size:
            takes += f" and a state of shape {(ROWS, self.state_size)}"
            must += f" and a state {[ROWS, self.state_size]}"
            inputs.append(torch.zeros(ROWS, self.state_size))
            wanted = [(ROWS, self.state_size)]
        try:
            returned = module(*inputs)
        except Exception as error:  # a user's code may raise anything
            raise ValueError(f"{self.label} fails for {takes}: {type(error).__name__}: {error}") from error
        features, *states = _parts(returned)
        fits = isinstance(features, Tensor) and features.dim() == 2 and len(features) == ROWS
        if not fits or [_shape(state) for state in states] != wanted:
            shapes = ", ".join(str(_shape(part)) for part in (features, *states))
            raise ValueError(f"{self.label} returns {shapes} for {takes}: it must return {must}")
        if wrong := [part.dtype for part in (features, *states) if part.dtype != torch.float32]:
            raise ValueError(f"{self.label} returns {wrong[0]} for {takes}: it must return torch.float32")
        self._check_rows(module, [zeros.shape for zeros in inputs])
        return int(features.shape[1])

    def _check_rows(self, module: nn.Module, shapes: Sequence[torch.Size]) -> None:
        """Raises ValueError if features are drawn at random, or depend on the other rows, which are other games."""
        inputs = [torch.rand(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
        first, again = (_parts(module(*inputs))[0] for _ in range(2))
        if not torch.equal(first, again):
            raise ValueError(
                f"{self.label} returns other features for equal inputs, which a resumed run would not repeat: leave "
                "chance out"
            )
        alone = _parts(module(*(part[:1] for part in inputs)))[0]
        if not torch.allclose(first[:1], alone, atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{self.label} returns other features for a row when other rows, which are other games, are there: "
                "normalise over features, not over the batch"
            )

    def forward(self, obs: Tensor, last: Linear | None = None) -> Tensor:
        """Returns the features [P, R, H]; with `last`, the output of that linear layer after them."""
        x = torch.stack([self._call(p, member) for p, member in enumerate(obs)])
        return x if last is None else last(x)

    def unroll(self, obs: Tensor, state: Tensor, is_first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns features [P, T, R, H] and the states after each step [P, T, R, S], from observations [P, T, R, *view]
        and the first state [P, R, S]. Where `is_first` [P, T, R] is set the state is zeroed before the step."""
        features = []
        states = []
        for t in range(obs.shape[1]):
            if is_first is not None:
                state = state.masked_fill(is_first[:, t, :, None], 0.0)
            stepped = [self._call(p, *inputs) for p, inputs in enumerate(zip(obs[:, t], state, strict=True))]
            state = torch.stack([after for _, after in stepped])
            features.append(torch.stack([feature for feature, _ in stepped]))
            states.append(state)
        return torch.stack(features, 1), torch.stack(states, 1)

    def _call(self, p: int, obs: Tensor, *state: Tensor) -> Any:
        weights = {key.replace("/", "."): weight[p] for key, weight in self.weights.items()}
        if obs.dtype != torch.uint8:
            obs = obs.float()
        return functional_call(self._template[0], weights, (obs, *state))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves the constants of the module along with the weights."""
        self._template[0]._apply(fn)
        return super()._apply(fn, recurse)


def _parts(returned: Any) -> tuple[Any, ...]:
    """Returns the features and states that a module returned, which may be the features alone."""
    return returned if isinstance(returned, tuple) else (returned,)


def _build_member(network: OwnNetwork, observation_shape: tuple[int, ...], seed: int) -> nn.Module:
    """Returns a new network whose initial weights follow from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module: nn.Module = network.build(observation_shape)
        except Exception as error:  # a user's code may raise anything
            raise ValueError(
                f"network {network.type} cannot be made for observations of shape {observation_shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return module


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
