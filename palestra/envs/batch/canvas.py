"""Pictures of games: discs, rectangles and lines on uint8 arrays [height, width, 3], and their PNG."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
PICTURE_SIZE = 240  # pixels, width and height
FINENESS = 3  # pixels drawn for one of the picture, on each axis
LINE_WIDTH = 2 * FINENESS
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
    """A picture of the square from `low` to `high` on both axes, y up. It is drawn `FINENESS` times
    as large, which smooths edges."""

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.size = FINENESS * PICTURE_SIZE
        self.scale = self.size / (high - low)
        self.image = Image.new("RGB", (self.size, self.size), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image, "RGBA")

    def disc(self, x: float, y: float, radius: float, colour: Colour, opacity: float = 1.0) -> None:
        """Draws a filled disc."""
        self.draw.ellipse(self._box(x, y, radius, radius), (*colour, round(255 * opacity)))

    def ring(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """Draws a circle of two pixels' width."""
        outer = radius + LINE_WIDTH / 2 / self.scale
        self.draw.ellipse(self._box(x, y, outer, outer), outline=colour, width=LINE_WIDTH)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Draws a filled rectangle around (x, y)."""
        self.draw.rectangle(self._box(x, y, width / 2, height / 2), colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: Colour) -> None:
        """Draws a line of two pixels' width."""
        self.draw.line([self._pixel(*start), self._pixel(*end)], colour, LINE_WIDTH)

    def picture(self) -> np.ndarray:
        """Returns what was drawn, uint8 [PICTURE_SIZE, PICTURE_SIZE, 3]."""
        return np.array(self.image.reduce(FINENESS))

    def _box(self, x: float, y: float, right: float, up: float) -> list[tuple[float, float]]:
        """Returns two corners of the box around (x, y) in pixels."""
        return [self._pixel(x - right, y + up), self._pixel(x + right, y - up)]

    def _pixel(self, x: float, y: float) -> tuple[float, float]:
        """Returns a position as Pillow's: whole numbers are the centres of pixels."""
        return (x - self.low) * self.scale - 0.5, self.size - (y - self.low) * self.scale - 0.5


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
