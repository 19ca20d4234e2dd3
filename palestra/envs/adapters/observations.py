"""Encoders from what packages show a seat to the arrays that networks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from palestra.envs.batch.sync_vector import to_array, to_bytes
from palestra.envs.vector_base import ImageShape, images_size

MIN_IMAGE_SIDE = 36  # pixels per side at least; smaller grids are boards, read as numbers


class ObsEncoder(NamedTuple):
    """Observation encoder of one seat: the observation shape, whether it is uint8 pixels, and `encode`, the function
    from a value of the Gymnasium space to the array. `encode` also takes batches, with leading dimensions (not for
    dictionaries and tuples). `images` are the shapes of the images with which a row begins."""

    shape: tuple[int, ...]
    is_uint8: bool
    encode: Callable[[Any], np.ndarray]
    images: tuple[ImageShape, ...] = ()


def image_shape(shape: tuple[int, ...]) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """Returns the shape (height, width, channels) in which an image or a stack of images is stored,
    and the order of its axes there; None if it is not an image."""
    axes = tuple(range(-len(shape), 0))
    for at in {2: [0], 3: [0, 1], 4: [1, 2]}.get(len(shape), []):
        height, width = shape[at : at + 2]
        if min(height, width) >= MIN_IMAGE_SIDE:
            others = axes[:at] + axes[at + 2 :]
            return (height, width, int(np.prod([shape[axis] for axis in others]))), (*axes[at : at + 2], *others)
    return None


def encode_image(value: Any, order: tuple[int, ...], shape: tuple[int, int, int]) -> np.ndarray:
    """Returns an image, or a batch of images, as float or bytes [..., height, width, channels]: its last axes in this
    `order`, in this `shape`. Raises ValueError if it has another height or width."""
    array = to_array(value)
    before = array.ndim - len(order)
    ordered = array.transpose(*range(before), *order)
    if ordered.shape[before : before + 2] != shape[:2]:
        size = " x ".join(map(str, ordered.shape[before : before + 2]))
        raise ValueError(
            f"an image has {size} pixels, and its space says {shape[0]} x {shape[1]}: correct the one or the other"
        )
    return ordered.reshape(*array.shape[:before], *shape)


def encode_scaled(value: Any, encode: Callable[[Any], np.ndarray], low: np.float32, scale: np.float32) -> np.ndarray:
    """Returns what `encode` returns as float32, less `low` and times `scale`."""
    return (encode(value).astype(np.float32) - low) * scale


def fit_in_one_array(encoders: Sequence[ObsEncoder], seats: Sequence[Any]) -> list[ObsEncoder]:
    """Returns the encoders of all seats of an env, as their observations share one array: unchanged
    if all are rows, or images of one shape and dtype. Otherwise those of images become rows."""
    kinds = {(encoder.shape, encoder.is_uint8) if len(encoder.shape) > 1 else None for encoder in encoders}
    if len(kinds) == 1:
        return list(encoders)
    return [row_encoder(encoder, str(seat)) for encoder, seat in zip(encoders, seats, strict=True)]


def images_by_seat(encoders: Sequence[ObsEncoder]) -> tuple[tuple[ImageShape, ...], ...]:
    """Returns the images with which each seat's row begins, () if no row has one."""
    images = tuple(encoder.images for encoder in encoders)
    return images if any(images) else ()


def row_encoder(encoder: ObsEncoder, label: str) -> ObsEncoder:
    """Returns the encoder of an image as a row of float32, bytes divided by 255; one of rows unchanged."""
    if len(encoder.shape) == 1:
        return encoder
    height, width, channels = encoder.shape
    encode = partial(_image_row, encode=encoder.encode, is_uint8=encoder.is_uint8, label=label)
    return ObsEncoder((height * width * channels,), False, encode, ((height, width, channels),))


def _image_row(value: Any, encode: Callable[[Any], np.ndarray], is_uint8: bool, label: str) -> np.ndarray:
    pixels = encode(value)
    if is_uint8:
        return encode_numbers(to_bytes(pixels, label), dimensions=3, scale=1 / 255)
    return encode_numbers(pixels, dimensions=3, scale=1.0)


def encode_parts(parts: Sequence[tuple[Any, ObsEncoder]], value: Any) -> np.ndarray:
    """Returns the images of the parts of a dictionary or tuple, then their other numbers, as one
    row float32. Raises ValueError if the parts, or their lengths, are not those of the space."""
    keys = {key for key, _ in parts}
    given = set(value) if isinstance(value, Mapping) else set(range(len(value)))
    if odd := sorted(map(repr, (given ^ keys) - {"action_mask"})):
        raise ValueError(
            f"an observation and its space differ in the parts {', '.join(odd)}: correct the one or the other"
        )
    images = []
    rows = []
    for key, part in parts:
        row = part.encode(value[key])
        if row.shape != part.shape:
            raise ValueError(
                f"part {key!r} of an observation has {len(row)} numbers, and its space says {part.shape[0]}"
            )
        if part.images:
            size = images_size(part.images)
            images.append(row[:size])
            row = row[size:]
        rows.append(row)
    return np.concatenate([*images, *rows], dtype=np.float32)


def encode_float32(value: Any) -> np.ndarray:
    """Returns a value as float32."""
    return np.asarray(to_array(value), np.float32)


def encode_grid(value: Any, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Returns a value of this shape as one row float32, times `scale`. Raises ValueError for another shape, such as
    that of the transposed array, whose numbers would be taken for others."""
    array = encode_float32(value)
    given = array.shape[array.ndim - len(shape) :]
    if given != shape:
        raise ValueError(
            f"an observation has the shape {list(given)}, and its space says {list(shape)}: correct the "
            "one or the other"
        )
    return encode_numbers(array, len(shape), scale)


def encode_numbers(value: Any, dimensions: int, scale: float) -> np.ndarray:
    """Returns the last `dimensions` axes of a value as one row float32, times `scale`."""
    array = encode_float32(value)
    return array.reshape(*array.shape[: array.ndim - dimensions], -1) * np.float32(scale)
