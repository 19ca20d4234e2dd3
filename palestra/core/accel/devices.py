"""Names of devices: what they resolve to on this machine."""

from __future__ import annotations

import torch


class DeviceNotThere(ValueError):
    """Raised if this machine, or this PyTorch, does not have a device."""


def resolve_device(device: str) -> str:
    """Resolves "auto" to cuda if available, else cpu. Raises ValueError if the device is unknown or not available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise ValueError(f"unknown device {device!r:.40}: write auto, cpu, cuda, cuda:1 or mps")
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(number or 0) >= there:
        built = "" if kind != "cuda" or torch.version.cuda else ", and this torch is built without CUDA"
        raise DeviceNotThere(
            f"device: {device} is not there: torch sees {there} {kind} devices{built}. Set device: cpu, or install a "
            "torch for your GPU (https://pytorch.org/get-started)"
        )
    return device


def network_device(device: str, *, else_cpu: bool = False) -> torch.device:
    """Returns the device of small networks. Raises ValueError if it is unknown or not available; with `else_cpu` the
    CPU takes the place of one that is not available."""
    if device.partition(":")[0] == "mps":
        raise ValueError(f"device: {device} is for language models: small networks train on cpu or cuda")
    try:
        return torch.device(resolve_device(device))
    except DeviceNotThere:
        if else_cpu:
            return torch.device("cpu")
        raise
