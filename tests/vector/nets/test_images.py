"""Images beside other numbers in rows: read by convolutions, as images alone are."""

from __future__ import annotations

import numpy as np
import torch

from palestra.vector.nets.images import ImageEncoder, ImageLayout
from palestra.vector.nets.layers import Net, NetConfig, make_generators

TALL = (44, 36, 1)
WIDE = (36, 40, 3)
SIZES = (44 * 36, 36 * 40 * 3)


def test_each_image_has_convolutions_of_its_own_and_numbers_stay() -> None:
    inputs = sum(SIZES) + 2
    encoder = ImageEncoder(ImageLayout((TALL, WIDE)), inputs, make_generators([1, 2]), "nature", torch.float32)
    rows = torch.rand(2, 5, inputs, generator=torch.Generator().manual_seed(0))
    tall, wide, numbers = rows.split([*SIZES, 2], -1)
    expected = [encoder.images[0](tall.view(2, 5, *TALL)), encoder.images[1](wide.view(2, 5, *WIDE)), numbers]
    assert torch.equal(encoder(rows), torch.cat(expected, -1)) and encoder.units == 512 + 512 + 2


def test_an_image_in_a_row_is_read_as_one_of_bytes_alone() -> None:
    """The same weights give the same outputs, up to the rounding of the scale."""
    config = NetConfig(hidden=[8], convolutions="small", gru_units=4)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 2, *WIDE), np.uint8)
    alone = Net(WIDE, 3, config, make_generators([5]))
    beside = Net((SIZES[1],), 3, config, make_generators([5]), layout=ImageLayout((WIDE,)))
    row = torch.from_numpy(pixels).float().flatten(3) / 255
    assert torch.allclose(beside.unroll(row)[0], alone.unroll(torch.from_numpy(pixels))[0], atol=1e-5, rtol=1e-4)


def test_outputs_depend_on_every_image_and_number() -> None:
    net = Net((sum(SIZES) + 2,), 3, NetConfig(hidden=[8]), make_generators([1]), layout=ImageLayout((TALL, WIDE)))
    rows = torch.rand(1, 1, sum(SIZES) + 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (slope,) = torch.autograd.grad(net(rows).sum(), rows)
    tall, wide, numbers = slope.abs().sum((0, 1)).split([*SIZES, 2])
    assert (tall > 0).all() and (numbers > 0).all()
    assert wide.count_nonzero() == 36 * 36 * 3  # the strides leave out the last columns
