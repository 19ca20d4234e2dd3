"""Two-player Pong on pixels, in the format of multi-agent Atari: four stacked 84 x 84 pictures, four frames per step.

Rules, seats, actions and rewards are those of PettingZoo's `pong`; physics and pictures are not an emulation of the
console. A step redraws only what moved, so that pixels cost little more than numbers.

Lengths are in pixels, speeds in pixels per frame; x grows to the right, y down. `first_0` has the right paddle.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.compiled import kernel
from palestra.envs.vector.base import Discrete, empty_frame
from palestra.envs.vector.native import NativeEnv
from palestra.envs.vector.rng import WORDS, below, uniform

SIZE, WALL = 84, 2
FRAMES = 4  # frames per step, and pictures per observation
BALL, PADDLE, THICK = 2, 10, 2  # edge lengths of ball and paddle; width of the paddle
COLUMNS = (78, 4)  # left column of each seat's paddle
FRONTS = (77.0, 7.0)  # x at which the centre of the ball meets each paddle
REACH = (PADDLE + BALL) / 2
SERVE, RISE, TOP_SPEED = 1.0, 0.05, 2.0  # horizontal speed of the ball: at the serve, gain per hit, maximum
STEEP = 0.75  # vertical over horizontal speed after a hit with the end of a paddle
PADDLE_SPEED = 1.0
UPPER, LOWER = WALL + BALL / 2, SIZE - WALL - BALL / 2  # y at which its centre bounces
PADDLE_UPPER, PADDLE_LOWER = WALL + PADDLE / 2, SIZE - WALL - PADDLE / 2
X, Y, SPEED_X, SPEED_Y = range(4)
SLACK = 2.0  # deviation that the tracker tolerates
MOVES = ((0, -1, 1), (0, 0, -1, 1, -1, 1))  # change of y per action: minimal; no-op, fire, right, left, both firing
GRAY = np.uint32(0x80808080)  # grey in all four pictures
REMEMBERED = FRAMES + 1  # drawn frames: the four in the observation, and the one that just left it


class Board(NamedTuple):
    """The arrays that the kernels change. `words` are the observations as uint32, the four stacked pictures of a pixel
    in one number, the oldest in the lowest byte: all platforms of numba are little-endian."""

    rng: np.ndarray
    ball: np.ndarray  # [B, 4] centre and speed
    paddles: np.ndarray  # [B, 2] y of the centres
    scores: np.ndarray  # [B, 2]
    hits: np.ndarray  # [B] hits since the serve
    steps: np.ndarray  # [B]
    drawn: np.ndarray  # [B, REMEMBERED, 4] left column and top row of the ball, top rows of the paddles; newest last
    words: np.ndarray  # [B, 2, 84, 84]
    final_words: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray


@kernel
def _serve(rng: np.ndarray, ball: np.ndarray, hits: np.ndarray, b: int) -> None:
    """Puts the ball in the middle, moving to a random side."""
    stream = rng[b]
    ball[b, X], ball[b, Y] = SIZE / 2, uniform(stream, SIZE / 4, SIZE * 3 / 4)
    ball[b, SPEED_X] = SERVE if below(stream, 2) == 0 else -SERVE
    ball[b, SPEED_Y] = uniform(stream, -SERVE / 2, SERVE / 2)
    hits[b] = 0


@kernel
def _fly(ball: np.ndarray, paddles: np.ndarray, hits: np.ndarray, b: int) -> int:
    """Moves the ball by one frame; returns the seat that scores, or -1."""
    before, x, y = ball[b, X], ball[b, X] + ball[b, SPEED_X], ball[b, Y] + ball[b, SPEED_Y]
    if y < UPPER or y > LOWER:
        y = 2 * (UPPER if y < UPPER else LOWER) - y
        ball[b, SPEED_Y] = -ball[b, SPEED_Y]
    seat = 0 if ball[b, SPEED_X] > 0 else 1
    front, offset = FRONTS[seat], (y - paddles[b, seat]) / REACH
    crossed = before < front <= x if seat == 0 else before > front >= x
    if crossed and abs(offset) <= 1:
        hits[b] += 1
        speed = min(SERVE + RISE * hits[b], TOP_SPEED)
        x = 2 * front - x
        ball[b, SPEED_X] = -speed if seat == 0 else speed
        ball[b, SPEED_Y] = speed * STEEP * offset
    ball[b, X], ball[b, Y] = x, y
    if BALL / 2 < x < SIZE - BALL / 2:
        return -1
    return 1 - seat


@kernel
def _play(g: Board, b: int, moves_2: np.ndarray, points: int) -> None:
    """Plays the frames of a step; stops when a point decides the game."""
    g.rewards[b, 0], g.rewards[b, 1] = 0, 0
    for _ in range(FRAMES):
        for seat in range(2):
            y = g.paddles[b, seat] + PADDLE_SPEED * moves_2[seat]
            g.paddles[b, seat] = min(max(y, PADDLE_UPPER), PADDLE_LOWER)
        scorer = _fly(g.ball, g.paddles, g.hits, b)
        if scorer >= 0:
            g.scores[b, scorer] += 1
            g.rewards[b, scorer] += 1
            g.rewards[b, 1 - scorer] -= 1
            if g.scores[b, scorer] == points:
                break
            _serve(g.rng, g.ball, g.hits, b)


@kernel
def _remember(drawn: np.ndarray, ball: np.ndarray, paddles: np.ndarray, b: int) -> None:
    """Appends the current positions, in whole pixels, to those drawn."""
    for moment in range(REMEMBERED - 1):
        for part in range(4):
            drawn[b, moment, part] = drawn[b, moment + 1, part]
    drawn[b, -1, 0] = min(max(int(ball[b, X] - BALL / 2 + 0.5), 0), SIZE - BALL)
    drawn[b, -1, 1] = int(ball[b, Y] - BALL / 2 + 0.5)
    for seat in range(2):
        drawn[b, -1, 2 + seat] = int(paddles[b, seat] - PADDLE / 2 + 0.5)


@kernel
def _in_picture(picture: int) -> np.uint32:
    """Returns a white pixel in one of the four pictures."""
    return np.uint32(0xFF << (8 * picture))


@kernel
def _draw_paddle(words: np.ndarray, drawn: np.ndarray, b: int, view: int, seat: int, column: int) -> None:
    """Rewrites all rows in which the paddle was in any remembered frame: white in the pictures that show it there."""
    first, last = drawn[b, 0, 2 + seat], drawn[b, 0, 2 + seat]
    for moment in range(1, REMEMBERED):
        first, last = min(first, drawn[b, moment, 2 + seat]), max(last, drawn[b, moment, 2 + seat])
    for row in range(first, last + PADDLE):
        word = np.uint32(0)
        for picture in range(FRAMES):
            if 0 <= row - drawn[b, picture + 1, 2 + seat] < PADDLE:
                word |= _in_picture(picture)
        for x in range(column, column + THICK):
            words[b, view, row, x] = word


@kernel
def _draw_ball(words: np.ndarray, drawn: np.ndarray, b: int, view: int, mirrored: bool, erase: bool) -> None:
    """Erases the ball of all remembered positions, or draws it into the four pictures."""
    for moment in range(0 if erase else 1, REMEMBERED):
        column, top = drawn[b, moment, 0], drawn[b, moment, 1]
        if mirrored:
            column = SIZE - BALL - column
        for row in range(top, top + BALL):
            for x in range(column, column + BALL):
                words[b, view, row, x] = np.uint32(0) if erase else words[b, view, row, x] | _in_picture(moment - 1)


@kernel
def _draw(words: np.ndarray, drawn: np.ndarray, b: int, mirror: bool) -> None:
    """Updates both observations of a game. The ball is erased first and drawn last, since it can overlap a paddle."""
    for view in range(2):
        mirrored = mirror and view == 1
        _draw_ball(words, drawn, b, view, mirrored, True)
        for seat in range(2):
            _draw_paddle(words, drawn, b, view, seat, COLUMNS[1 - seat if mirrored else seat])
        _draw_ball(words, drawn, b, view, mirrored, False)


@kernel
def _write_state(g: Board, b: int, points: int, cycles: int) -> None:
    half = SIZE / 2
    g.state[b, 0], g.state[b, 1] = g.ball[b, X] / half - 1, g.ball[b, Y] / half - 1
    g.state[b, 2], g.state[b, 3] = g.ball[b, SPEED_X] / TOP_SPEED, g.ball[b, SPEED_Y] / TOP_SPEED
    for seat in range(2):
        g.state[b, 4 + seat] = g.paddles[b, seat] / half - 1
        g.state[b, 6 + seat] = g.scores[b, seat] / points
    g.state[b, 8] = g.steps[b] / cycles


@kernel
def _begin_game(g: Board, b: int, mirror: bool) -> None:
    """Starts a game on an empty picture, in all four pictures of the observation."""
    for view in range(2):
        for row in range(WALL, SIZE - WALL):
            for x in range(SIZE):
                g.words[b, view, row, x] = 0
    for seat in range(2):
        g.paddles[b, seat], g.scores[b, seat] = SIZE / 2, 0
    g.steps[b] = 0
    _serve(g.rng, g.ball, g.hits, b)
    for _ in range(REMEMBERED):
        _remember(g.drawn, g.ball, g.paddles, b)
    _draw(g.words, g.drawn, b, mirror)


@kernel
def _keep_last(g: Board, b: int) -> None:
    """Copies the last observations and the state of an ended game to `final_obs` and `final_state`. Loops compile ten
    times as fast as slice assignments."""
    for view in range(2):
        for row in range(SIZE):
            for x in range(SIZE):
                g.final_words[b, view, row, x] = g.words[b, view, row, x]
    for at in range(g.state.shape[1]):
        g.final_state[b, at] = g.state[b, at]


@kernel
def _begin_all(g: Board, points: int, cycles: int, mirror: bool) -> None:
    for b in range(len(g.steps)):
        for view in range(2):
            for row in range(WALL):
                for x in range(SIZE):
                    g.words[b, view, row, x], g.words[b, view, SIZE - 1 - row, x] = GRAY, GRAY
        _begin_game(g, b, mirror)
        _write_state(g, b, points, cycles)


@kernel
def _step_all(g: Board, points: int, cycles: int, mirror: bool, actions: np.ndarray, moves_A: np.ndarray) -> None:
    moves_2 = np.zeros(2, np.int64)
    for b in range(len(g.steps)):
        for seat in range(2):
            action = actions[b, seat]
            moves_2[seat] = moves_A[action] if 0 <= action < len(moves_A) else 0
        g.steps[b] += 1
        _play(g, b, moves_2, points)
        _remember(g.drawn, g.ball, g.paddles, b)
        _draw(g.words, g.drawn, b, mirror)
        _write_state(g, b, points, cycles)
        g.success[b] = g.scores[b, 0] == points
        g.terminated[b] = g.success[b] or g.scores[b, 1] == points
        g.truncated[b] = not g.terminated[b] and g.steps[b] >= cycles
        if g.terminated[b] or g.truncated[b]:
            _keep_last(g, b)
            _begin_game(g, b, mirror)
            _write_state(g, b, points, cycles)


class Pong(NativeEnv):
    """Return the ball; a point gives 1 to the scorer and -1 to the other seat. `points` win the game; `success` means
    that `first_0` won; `cycles` is the step limit.

    A step is four frames of one action: with `minimal` stay, up, down; else Atari's six actions no-op, fire, right
    (up), left (down), right and fire, left and fire, of which firing has no effect (the ball serves itself). An action
    out of range stays. The ball gets faster with every hit, and its angle steeper the closer to its end a paddle hits
    it.

    An observation is the last four pictures, one per step, oldest first, uint8 [84, 84, 4]: walls 128, ball and paddles
    255, no score. With `mirror` every seat sees its own paddle on the right, as `first_0` always does. The state is x,
    y (-1 to 1) and velocity of the ball, y of both paddles, both scores and the time, each relative to its maximum.

    The scripted player "tracker" follows the approaching ball as it was one step ago, else waits in the middle: fast
    and steep balls get past it.

    Raises ValueError if `games`, `points` or `cycles` is below 1.
    """

    name: ClassVar[str] = "pong"
    seats = ("first_0", "second_0")
    scripts = ("tracker",)
    state_size = 9

    def __init__(
        self, games: int = 64, *, points: int = 5, cycles: int = 1000, minimal: bool = True, mirror: bool = True
    ) -> None:
        for name, value in (("games", games), ("points", points), ("cycles", cycles)):
            if value < 1:
                raise ValueError(f"{name}: {value} is too small, nothing is played then; use 1 or more")
        self.games, self.options = games, (points, cycles, mirror)
        self.moves = np.array(MOVES[0 if minimal else 1])
        view = (SIZE, SIZE, FRAMES)
        self.views, self.actions = (view,) * 2, (Discrete(len(self.moves)),) * 2
        self.frame = frame = empty_frame(games, 2, view, state=self.state_size, success=True, dtype=np.uint8)
        self.memory = {
            "rng": np.zeros((games, WORDS), np.uint64),
            "ball": np.zeros((games, 4)),
            "paddles": np.zeros((games, 2)),
            "scores": np.zeros((games, 2), np.int64),
            "hits": np.zeros(games, np.int64),
            "steps": np.zeros(games, np.int64),
            "drawn": np.zeros((games, REMEMBERED, 4), np.int64),
        }
        assert frame.state is not None and frame.final_state is not None and frame.success is not None
        self._board = Board(
            **self.memory,
            words=frame.obs.view(np.uint32)[..., 0],
            final_words=frame.final_obs.view(np.uint32)[..., 0],
            state=frame.state,
            final_state=frame.final_state,
            rewards=frame.rewards,
            terminated=frame.terminated,
            truncated=frame.truncated,
            success=frame.success,
        )

    def _begin(self) -> None:
        _begin_all(self._board, *self.options)

    def _advance(self, actions: np.ndarray) -> None:
        _step_all(self._board, *self.options, actions.astype(np.int32, copy=False), self.moves)

    def script(self, name: str, seat: int) -> np.ndarray:
        if name not in self.scripts:
            return super().script(name, seat)
        coming_B = (self.memory["ball"][:, SPEED_X] > 0) == (seat == 0)
        ball_B = self.memory["drawn"][:, -2, 1] + BALL / 2
        gap_B = np.where(coming_B, ball_B, SIZE / 2) - self.memory["paddles"][:, seat]
        up, down = (int(np.flatnonzero(self.moves == move)[0]) for move in (-1, 1))
        return np.select([gap_B < -SLACK, gap_B > SLACK], [up, down], 0).astype(np.int32)
