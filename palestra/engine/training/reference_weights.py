"""The reference of a full model: a copy of its weights, for KL penalties."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from palestra.engine.bases.model import replaced_data

REFERENCE_FILE = "weights.safetensors"


class ReferenceWeights:
    """A copy of `parameters` as they are now, in their own dtype: in the memory of their device, or with `on_disk` in a
    temporary folder, read whole for every pass. For a pass of the reference the model's parameters point to the frozen
    tensors, without copying. `is_base` is True until the base's weights are replaced."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, on_disk: bool) -> None:
        self.parameters = list(parameters)
        self.is_base = True
        self._folder: Path | None = None
        if on_disk:
            self._folder = Path(tempfile.mkdtemp(prefix="palestra-reference-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._tensors: list[Tensor] = []
        self._store([parameter.detach() for parameter in self.parameters])

    def replace(self) -> None:
        """Replaces the reference by a copy of the current parameters."""
        self._store([parameter.detach() for parameter in self.parameters])
        self.is_base = False

    def in_place(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the frozen weights."""
        return replaced_data(self.parameters, self._load())

    def save(self, path: Path) -> None:
        """Writes the frozen weights to `path`."""
        tensors = {str(i): tensor.cpu().contiguous() for i, tensor in enumerate(self._load())}
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        """Reads the weights that `save` wrote. Raises ValueError if they are of another model."""
        stored = load_file(path)
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        if [tuple(stored[str(i)].shape) for i in range(len(stored))] != shapes:
            raise ValueError(f"the reference at {path} is of another model")
        self._store([stored[str(i)] for i in range(len(stored))])
        self.is_base = False

    def _store(self, tensors: Sequence[Tensor]) -> None:
        if self._folder:
            kept = {str(i): tensor.cpu().contiguous() for i, tensor in enumerate(tensors)}
            save_file(kept, self._folder / REFERENCE_FILE)
            return
        places = zip(tensors, self.parameters, strict=True)
        self._tensors = [torch.empty_like(p, requires_grad=False).copy_(tensor) for tensor, p in places]

    def _load(self) -> list[Tensor]:
        if not self._folder:
            return self._tensors
        stored = load_file(self._folder / REFERENCE_FILE)
        return [stored[str(i)].to(parameter.device) for i, parameter in enumerate(self.parameters)]
