"""Writes a trained network as an ONNX model, and checks that the model acts as the network does.

Shapes: `B` games, `O` outputs of the network, `A` actions, `H` recurrent units.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.api.console import require_packages
from palestra.vector.nets.normalise import normalise
from palestra.vector.policies.frozen import NetMember

CHECKED_GAMES = 64
MAX_ERROR = 1e-4  # of outputs; other products round differently, by about 1e-6


class GreedyNetwork(nn.Module):
    """The greedy player of a seat. Observations [B, *shape], then if there are any the recurrent state [B, H] and
    action masks [B, A] -> actions [B, ...], outputs [B, O], and the new state."""

    def __init__(self, member: NetMember, num_actions: int | None) -> None:
        super().__init__()
        self.net = member.net
        self.mapping = member.seat_mapping
        self.norm = member.norm
        self.head = member.head
        self.num_actions = num_actions

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, in order."""
        return ["obs", *["state"] * bool(self.net.recurrent_units), *["action_mask"] * bool(self.num_actions)]

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, in order."""
        return ["action", "outputs", *["new_state"] * bool(self.net.recurrent_units)]

    def forward(self, obs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        by_seat = obs[:, None].expand(-1, self.mapping.num_seats, *obs.shape[1:])
        x = normalise(self.norm, self.mapping.network_inputs(by_seat, 1)[:, :, 0])
        state: list[Tensor] = []
        if self.net.recurrent_units:
            unrolled, memories = self.net.unroll(x[:, None], rest[0][None])
            assert memories is not None
            out = unrolled[:, 0]
            state = [memories[0, 0]]
        else:
            out = self.net(x)
        action_mask = rest[-1][None] if self.num_actions else None
        action = self.head.mode(out, action_mask)
        return action[0], out[0], *state

    def random_inputs(self, example: np.ndarray) -> tuple[Tensor, ...]:
        """Returns inputs of `CHECKED_GAMES` games; `example` is an observation."""
        rng = np.random.default_rng(0)
        obs: np.ndarray = rng.normal(size=(CHECKED_GAMES, *example.shape))
        if example.dtype == np.uint8:
            obs = rng.integers(256, size=obs.shape)
        inputs = [torch.from_numpy(obs.astype(example.dtype))]
        if units := self.net.recurrent_units:
            inputs.append(torch.from_numpy(rng.uniform(-1, 1, (CHECKED_GAMES, units)).astype(np.float32)))
        if self.num_actions:
            mask = rng.random((CHECKED_GAMES, self.num_actions)) < 0.5
            mask[np.arange(CHECKED_GAMES), rng.integers(self.num_actions, size=CHECKED_GAMES)] = True
            inputs.append(torch.from_numpy(mask))
        return tuple(inputs)


def export_network(member: NetMember, example: np.ndarray, num_actions: int | None, path: Path) -> None:
    """Writes the greedy player of a seat to an .onnx file. `example` is an observation, `num_actions` the length of
    action masks (None: there are none).

    Raises ValueError if the file has another suffix, if a package is missing, if the network cannot be exported, or if
    onnxruntime computes other actions or outputs than the network in random games.
    """
    if path.suffix != ".onnx":
        raise ValueError(f"{path}: a network is exported as ONNX, so the name of its file ends in .onnx")
    require_packages("export", "onnx", "onnx", "onnxscript", "onnxruntime")
    network = GreedyNetwork(member, num_actions).eval()
    inputs = network.random_inputs(example)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter, about itself and packages that are not there
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        expected = network(*inputs)
        _write(network, inputs, path)
    actions, outputs, *state = _run(path, network, inputs)
    chosen = network.head.mode(outputs, inputs[-1] if num_actions else None)
    pairs = zip((actions, outputs, *state), (chosen, *expected[1:]), strict=True)
    if not all(torch.allclose(found.float(), right.float(), rtol=MAX_ERROR, atol=MAX_ERROR) for found, right in pairs):
        path.unlink()
        raise ValueError(f"{path} would act otherwise than the network, by onnxruntime: it is not written")


def _write(network: GreedyNetwork, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Writes the model, for any number of games. Raises ValueError if torch cannot express it in ONNX."""
    games = {0: torch.export.Dim("games")}
    shapes: tuple[Any, ...] = (games,)
    if len(inputs) > 1:
        shapes = (games, (games,) * (len(inputs) - 1))
    try:
        torch.onnx.export(
            network,
            inputs,
            path,
            input_names=network.input_names,
            output_names=network.output_names,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"the network cannot be exported as ONNX: {why}") from error


def _run(path: Path, network: GreedyNetwork, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    named = {name: value.numpy() for name, value in zip(network.input_names, inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, named)]
