"""Pictures of games: discs, rectangles and lines on uint8 arrays [height, width, 3], and their PNG."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

Colour = tuple[int, int, int]
PICTURE_SIZE = 240  # pixels, width and height
BACKGROUND: Colour = (250, 250, 248)
LIGHT_GREY: Colour = (205, 207, 212)
GREY: Colour = (120, 124, 132)
RED: Colour = (214, 69, 65)
GREEN: Colour = (60, 160, 80)
SEAT_COLOURS: tuple[Colour, ...] = (  # of seats in turn, told apart by the colour-blind too (Okabe and Ito, 2008)
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (150, 140, 20),
    (90, 90, 90),
)


def seat_colour(seat: int) -> Colour:
    """Returns the colour of seat number `seat`; they repeat after eight."""
    return SEAT_COLOURS[seat % len(SEAT_COLOURS)]


class Canvas:
    """A picture of the square from `low` to `high` on both axes, y up. Edges are smoothed over one pixel."""

    def __init__(self, low: float, high: float, size: int = PICTURE_SIZE) -> None:
        self.low = low
        self.scale = size / (high - low)
        self.size = size
        self.pixels = np.full((size, size, 3), BACKGROUND, np.float32)

    def disc(self, x: float, y: float, radius: float, colour: Colour, opacity: float = 1.0) -> None:
        """Draws a filled disc."""
        area, x_W, y_H = self._window((x, y), (x, y), radius)
        self._paint(area, radius * self.scale - np.hypot(x_W, y_H[:, None]) + 0.5, colour, opacity)

    def ring(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """Draws a circle of two pixels' width."""
        area, x_W, y_H = self._window((x, y), (x, y), radius)
        self._paint(area, 1.5 - np.abs(np.hypot(x_W, y_H[:, None]) - radius * self.scale), colour)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Draws a filled rectangle around (x, y)."""
        area, x_W, y_H = self._window((x, y), (x, y), max(width, height) / 2)
        inside_W = width * self.scale / 2 - np.abs(x_W)
        inside_H = height * self.scale / 2 - np.abs(y_H)
        self._paint(area, np.minimum(inside_W, inside_H[:, None]) + 0.5, colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: Colour) -> None:
        """Draws a line of two pixels' width."""
        area, x_W, y_H = self._window(start, end, 0)
        across = (end[0] - start[0]) * self.scale
        up = -(end[1] - start[1]) * self.scale
        along = np.clip((x_W * across + y_H[:, None] * up) / (across**2 + up**2 or 1), 0, 1)
        self._paint(area, 1.5 - np.hypot(x_W - along * across, y_H[:, None] - along * up), colour)

    def picture(self) -> np.ndarray:
        """Returns what was drawn, uint8 [size, size, 3]."""
        return self.pixels.round().astype(np.uint8)

    def _window(
        self, start: tuple[float, float], end: tuple[float, float], margin: float
    ) -> tuple[tuple[slice, slice], np.ndarray, np.ndarray]:
        """Returns the rows and columns of the pixels around `start` and `end` with `margin`, and the distances of their
        centres from `start` in pixels, to the right [W] and down [H]."""
        column = (start[0] - self.low) * self.scale
        row = self.size - (start[1] - self.low) * self.scale
        columns = self._pixels(start[0], end[0], margin)
        rows = self._pixels(start[1], end[1], margin)
        rows = slice(self.size - rows.stop, self.size - rows.start)
        x_W = np.arange(columns.start, columns.stop) + 0.5 - column
        y_H = np.arange(rows.start, rows.stop) + 0.5 - row
        return (rows, columns), x_W, y_H

    def _pixels(self, one: float, other: float, margin: float) -> slice:
        first = int((min(one, other) - margin - self.low) * self.scale) - 3
        last = int((max(one, other) + margin - self.low) * self.scale) + 4
        first = min(max(first, 0), self.size)
        return slice(first, min(max(last, first), self.size))

    def _paint(self, area: tuple[slice, slice], share_HW: np.ndarray, colour: Colour, opacity: float = 1.0) -> None:
        """Paints pixels by the share of each that is covered."""
        share = np.clip(share_HW, 0, 1)[..., None] * opacity
        self.pixels[area] += share * (np.array(colour) - self.pixels[area])


def to_png(picture: np.ndarray) -> bytes:
    """Returns a PNG of a uint8 picture, [H, W] in grey or [H, W, 3] in RGB. Raises ValueError for other arrays."""
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or (picture.ndim == 3 and picture.shape[2] != 3):
        raise ValueError(
            f"render returned an array {picture.dtype} {list(picture.shape)}: return uint8 [height, width, 3] in RGB, "
            "or [height, width] in grey, or a text"
        )
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()
