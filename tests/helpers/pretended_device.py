"""A pretended device: its tensors report the device `meta`, and their numbers are in tensors on the CPU.

Its operations run on the CPU, so that code for a GPU runs on a machine without one. As on a GPU, an operation that
mixes tensors of both devices raises RuntimeError. Operations that wait for the device are counted: copies to the CPU,
numbers read from tensors, and shapes that depend on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("meta")
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select}
INDEXING = {aten.index, aten.index_put, aten.index_put_}  # wait if an index is a mask
WITH_NUMBERS = {aten.add, aten.sub, aten.mul, aten.div, aten.where}  # may have scalars on the CPU
COPIES = {aten.copy_, aten._to_copy}  # operations that may have tensors on two devices


class Held(torch.Tensor):
    """A tensor of the pretended device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Held({self.held})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func is torch.Tensor.tolist:
            PretendedDevice.current.waits.append("tolist")
            return args[0].held.tolist()
        with torch._C.DisableTorchFunctionSubclass():  # a tensor on the CPU stays there
            found = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].held = args[1].held
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendedDevice.current.run(func, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Context with the pretended device; `waits` are the operations that waited for it."""

    current: PretendedDevice

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        PretendedDevice.current = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, Held)]
        others = [tensor for tensor in tensors if not isinstance(tensor, Held)]
        packet = func.overloadpacket
        if any(tensor.device.type == "meta" for tensor in others):
            raise RuntimeError(f"{func}: a tensor was made on the device from a list, which is a copy for each call")
        if there and packet not in COPIES and any(tensor.dim() or packet not in WITH_NUMBERS for tensor in others):
            raise RuntimeError(f"{func}: tensors on the device and on the CPU: {[tuple(t.shape) for t in tensors]}")
        if packet is aten._fused_sdp_choice:
            return 0  # plain operations
        wanted = kwargs.get("device")
        arrives = bool(there) if wanted is None else torch.device(wanted).type == "meta"
        if packet is aten.copy_:
            arrives = isinstance(args[0], Held)
        masks = packet in INDEXING and any(index.dtype == torch.bool for index in args[1] if index is not None)
        if there and (packet in WAITS or masks or (packet in COPIES and not arrives)):
            self.waits.append(str(func))
        if wanted is not None and arrives:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        owners = {id(tensor.held): tensor for tensor in there}
        found = func(*_held(args), **_held(dict(kwargs)))

        def put(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return owners[id(x)] if id(x) in owners else Held(x)

        if not arrives or packet is aten._local_scalar_dense:
            return found if packet is not aten.copy_ else args[0]
        return tree_map(put, found)


def _held(tree: Any) -> Any:
    return tree_map(lambda x: x.held if isinstance(x, Held) else x, tree)


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Context with the pretended device, which is `torch.device("meta")` there."""
    with PretendedDevice() as mode:
        yield mode


def waits_of(mode: PretendedDevice, call: Callable[[], Any]) -> int:
    """Returns the number of waits for the device in a call."""
    before = len(mode.waits)
    call()
    return len(mode.waits) - before
