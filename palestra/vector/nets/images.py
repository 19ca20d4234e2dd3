"""Networks for images: convolutions, of a whole observation or of the images with which it begins.

Shapes: `P` members, `R` rows, `D` numbers of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from palestra.envs.vector_base import ImageShape, VectorEnv
from palestra.vector.nets.dense import GAIN, Linear, dense_layers, orthogonal


@dataclass(frozen=True)
class ImageLayout:
    """Observations that are rows and begin with images of these `shapes` (`VectorEnv.observation_images`)."""

    shapes: tuple[ImageShape, ...]


def image_layout(env: VectorEnv, seat: int) -> ImageLayout | None:
    """Returns the layout of a seat's observations, None if they do not begin with images."""
    shapes = env.images_of(seat)
    return ImageLayout(shapes) if shapes else None


ConvolutionKind = Literal["nature", "small"]
# channels, size and stride of each convolution; units of the layer after them; the fewest pixels of a side
CONVOLUTIONS = {
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512, 36),  # Mnih et al., 2015
    "small": (((16, 8, 4), (32, 4, 2)), 256, 20),  # Mnih et al., 2013
}


class Convolutions(nn.Module):
    """Convolutions over pixels [P, R, height, width, channels], uint8 or floats in 0 to 1, then a linear layer -> [P,
    R, units] float32. Computed in `dtype`. Raises ValueError if the pixels are too few."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        generators: Sequence[torch.Generator],
        kind: ConvolutionKind = "nature",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        height, width, channels = observation_shape
        self.layers, self.units, least_pixels = CONVOLUTIONS[kind]
        self.kernels = nn.ParameterList()
        self.biases = nn.ParameterList()
        for outputs, size, stride in self.layers:
            self.kernels.append(nn.Parameter(orthogonal((outputs, channels, size, size), GAIN["relu"], generators)))
            self.biases.append(nn.Parameter(torch.zeros(len(generators), outputs)))
            height = (height - size) // stride + 1
            width = (width - size) // stride + 1
            channels = outputs
        if height < 1 or width < 1:
            raise ValueError(
                f"pixels of {observation_shape[0]} x {observation_shape[1]} are too few for the convolutions: "
                f"{least_pixels} x {least_pixels} at least"
            )
        self.last = Linear(height * width * channels, self.units, GAIN["relu"], generators)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.stack([self._member(p, pixels) for p, pixels in enumerate(x)])
        weight = self.last.weight.to(self.dtype)
        bias = self.last.bias.to(self.dtype)
        return dense_layers(features, ("relu",), weight, bias).float()

    def _member(self, p: int, x: Tensor) -> Tensor:
        scale = 1.0
        if x.dtype == torch.uint8:
            scale = 1 / 255  # applied to the first kernel, which is smaller than x
        x = x.permute(0, 3, 1, 2).to(self.dtype)
        for kernel, bias, (_, _, stride) in zip(self.kernels, self.biases, self.layers, strict=True):
            weight = (kernel[p] * scale).to(self.dtype)
            x = torch.relu(nn.functional.conv2d(x, weight, bias[p].to(self.dtype), stride))
            scale = 1.0
        return x.flatten(1)


class ImageEncoder(nn.Module):
    """Replaces the images with which observations begin by their features: [P, R, D] -> [P, R, units] float32. Each
    image has convolutions of its own; the numbers after the images stay as they are."""

    def __init__(
        self,
        layout: ImageLayout,
        inputs: int,
        generators: Sequence[torch.Generator],
        kind: ConvolutionKind,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.images = nn.ModuleList()
        self.units = inputs
        for shape in layout.shapes:
            convolutions = Convolutions(shape, generators, kind, dtype)
            self.images.append(convolutions)
            self.units += convolutions.units - math.prod(shape)

    def forward(self, rows: Tensor) -> Tensor:
        parts = []
        for shape, convolutions in zip(self.layout.shapes, self.images, strict=True):
            size = math.prod(shape)
            parts.append(convolutions(rows[..., :size].unflatten(-1, shape)))
            rows = rows[..., size:]
        return torch.cat([*parts, rows], -1)
