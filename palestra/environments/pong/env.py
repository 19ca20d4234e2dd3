"""Two-player Pong on pixels, in the format of multi-agent Atari: four stacked 84 x 84 pictures, four frames per step.

Rules, seats, actions and rewards are those of PettingZoo's `pong`; physics and pictures are not an emulation of the
console. A step redraws only what moved, so that pixels cost little more than numbers.

Lengths are in pixels, speeds in pixels per frame; x grows to the right, y down. `first_0` has the right paddle.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS, random_below, uniform
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Discrete, empty_step

SCREEN_SIZE = 84
WALL_HEIGHT = 2
FRAMES_PER_STEP = 4  # frames per step, and pictures per observation
# edge lengths of ball and paddle; width of the paddle
BALL_SIZE = 2
PADDLE_LENGTH = 10
PADDLE_WIDTH = 2
PADDLE_COLUMNS = (78, 4)  # left column of each seat's paddle
PADDLE_FRONT_X = (77.0, 7.0)  # x at which the centre of the ball meets each paddle
MAX_HIT_OFFSET = (PADDLE_LENGTH + BALL_SIZE) / 2
# horizontal speed of the ball: at the serve, gain per hit, maximum
SERVE_SPEED = 1.0
SPEED_GAIN_PER_HIT = 0.05
MAX_BALL_SPEED = 2.0
MAX_HIT_SLOPE = 0.75  # vertical over horizontal speed after a hit with the end of a paddle
PADDLE_SPEED = 1.0
# y at which its centre bounces
BALL_MIN_Y = WALL_HEIGHT + BALL_SIZE / 2
BALL_MAX_Y = SCREEN_SIZE - WALL_HEIGHT - BALL_SIZE / 2
PADDLE_MIN_Y = WALL_HEIGHT + PADDLE_LENGTH / 2
PADDLE_MAX_Y = SCREEN_SIZE - WALL_HEIGHT - PADDLE_LENGTH / 2
X, Y, SPEED_X, SPEED_Y = range(4)
TRACKER_TOLERANCE = 2.0  # deviation that the tracker tolerates
ACTION_MOVES = (
    (0, -1, 1),
    (0, 0, -1, 1, -1, 1),
)  # change of y per action: minimal; no-op, fire, right, left, both firing
ATARI_ACTIONS = ("no-op", "fire", "right (up)", "left (down)", "right and fire", "left and fire")
GREY_PIXELS = np.uint32(0x80808080)  # grey in all four pictures
NUM_DRAWN_FRAMES = FRAMES_PER_STEP + 1  # drawn frames: the four in the observation, and the one that just left it


class PongArrays(NamedTuple):
    """The arrays that the kernels change. `packed_pixels` are the observations as uint32, the four stacked pictures of
    a pixel in one number, the oldest in the lowest byte: all platforms of numba are little-endian."""

    rng: np.ndarray
    ball: np.ndarray  # [B, 4] centre and speed
    paddles: np.ndarray  # [B, 2] y of the centres
    scores: np.ndarray  # [B, 2]
    hits: np.ndarray  # [B] hits since the serve
    steps: np.ndarray  # [B]
    drawn: np.ndarray  # [B, NUM_DRAWN_FRAMES, 4] left column, top row of the ball, top rows of the paddles; newest last
    packed_pixels: np.ndarray  # [B, 2, 84, 84]
    final_packed_pixels: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray


@jit
def _serve(rng: np.ndarray, ball: np.ndarray, hits: np.ndarray, b: int) -> None:
    """Puts the ball in the middle, moving to a random side."""
    stream = rng[b]
    ball[b, X], ball[b, Y] = SCREEN_SIZE / 2, uniform(stream, SCREEN_SIZE / 4, SCREEN_SIZE * 3 / 4)
    ball[b, SPEED_X] = SERVE_SPEED if random_below(stream, 2) == 0 else -SERVE_SPEED
    ball[b, SPEED_Y] = uniform(stream, -SERVE_SPEED / 2, SERVE_SPEED / 2)
    hits[b] = 0


@jit
def _fly(ball: np.ndarray, paddles: np.ndarray, hits: np.ndarray, b: int) -> int:
    """Moves the ball by one frame; returns the seat that scores, or -1."""
    before = ball[b, X]
    x = ball[b, X] + ball[b, SPEED_X]
    y = ball[b, Y] + ball[b, SPEED_Y]
    if y < BALL_MIN_Y or y > BALL_MAX_Y:
        y = 2 * (BALL_MIN_Y if y < BALL_MIN_Y else BALL_MAX_Y) - y
        ball[b, SPEED_Y] = -ball[b, SPEED_Y]
    seat = 0 if ball[b, SPEED_X] > 0 else 1
    front = PADDLE_FRONT_X[seat]
    offset = (y - paddles[b, seat]) / MAX_HIT_OFFSET
    crossed = before < front <= x if seat == 0 else before > front >= x
    if crossed and abs(offset) <= 1:
        hits[b] += 1
        speed = min(SERVE_SPEED + SPEED_GAIN_PER_HIT * hits[b], MAX_BALL_SPEED)
        x = 2 * front - x
        ball[b, SPEED_X] = -speed if seat == 0 else speed
        ball[b, SPEED_Y] = speed * MAX_HIT_SLOPE * offset
    ball[b, X], ball[b, Y] = x, y
    if BALL_SIZE / 2 < x < SCREEN_SIZE - BALL_SIZE / 2:
        return -1
    return 1 - seat


@jit
def _play(g: PongArrays, b: int, moves_2: np.ndarray, points: int) -> None:
    """Plays the frames of a step; stops when a point decides the game."""
    g.rewards[b, 0], g.rewards[b, 1] = 0, 0
    for _ in range(FRAMES_PER_STEP):
        for seat in range(2):
            y = g.paddles[b, seat] + PADDLE_SPEED * moves_2[seat]
            g.paddles[b, seat] = min(max(y, PADDLE_MIN_Y), PADDLE_MAX_Y)
        scorer = _fly(g.ball, g.paddles, g.hits, b)
        if scorer >= 0:
            g.scores[b, scorer] += 1
            g.rewards[b, scorer] += 1
            g.rewards[b, 1 - scorer] -= 1
            if g.scores[b, scorer] == points:
                break
            _serve(g.rng, g.ball, g.hits, b)


@jit
def _remember(drawn: np.ndarray, ball: np.ndarray, paddles: np.ndarray, b: int) -> None:
    """Appends the current positions, in whole pixels, to those drawn."""
    for moment in range(NUM_DRAWN_FRAMES - 1):
        for part in range(4):
            drawn[b, moment, part] = drawn[b, moment + 1, part]
    drawn[b, -1, 0] = min(max(int(ball[b, X] - BALL_SIZE / 2 + 0.5), 0), SCREEN_SIZE - BALL_SIZE)
    drawn[b, -1, 1] = int(ball[b, Y] - BALL_SIZE / 2 + 0.5)
    for seat in range(2):
        drawn[b, -1, 2 + seat] = int(paddles[b, seat] - PADDLE_LENGTH / 2 + 0.5)


@jit
def _in_picture(picture: int) -> np.uint32:
    """Returns a white pixel in one of the four pictures."""
    return np.uint32(0xFF << (8 * picture))


@jit
def _draw_paddle(words: np.ndarray, drawn: np.ndarray, b: int, view: int, seat: int, column: int) -> None:
    """Rewrites all rows in which the paddle was in a remembered frame: white where it was."""
    first = drawn[b, 0, 2 + seat]
    last = drawn[b, 0, 2 + seat]
    for moment in range(1, NUM_DRAWN_FRAMES):
        first = min(first, drawn[b, moment, 2 + seat])
        last = max(last, drawn[b, moment, 2 + seat])
    for row in range(first, last + PADDLE_LENGTH):
        word = np.uint32(0)
        for picture in range(FRAMES_PER_STEP):
            if 0 <= row - drawn[b, picture + 1, 2 + seat] < PADDLE_LENGTH:
                word |= _in_picture(picture)
        for x in range(column, column + PADDLE_WIDTH):
            words[b, view, row, x] = word


@jit
def _draw_ball(words: np.ndarray, drawn: np.ndarray, b: int, view: int, mirrored: bool, erase: bool) -> None:
    """Erases the ball of all remembered positions, or draws it into the four pictures."""
    for moment in range(0 if erase else 1, NUM_DRAWN_FRAMES):
        column = drawn[b, moment, 0]
        top = drawn[b, moment, 1]
        if mirrored:
            column = SCREEN_SIZE - BALL_SIZE - column
        for row in range(top, top + BALL_SIZE):
            for x in range(column, column + BALL_SIZE):
                words[b, view, row, x] = np.uint32(0) if erase else words[b, view, row, x] | _in_picture(moment - 1)


@jit
def _draw(words: np.ndarray, drawn: np.ndarray, b: int, mirror: bool) -> None:
    """Updates both observations of a game. The ball is erased first and drawn last, since it can overlap a paddle."""
    for view in range(2):
        mirrored = mirror and view == 1
        _draw_ball(words, drawn, b, view, mirrored, True)
        for seat in range(2):
            _draw_paddle(words, drawn, b, view, seat, PADDLE_COLUMNS[1 - seat if mirrored else seat])
        _draw_ball(words, drawn, b, view, mirrored, False)


@jit
def _write_state(g: PongArrays, b: int, points: int, max_steps: int) -> None:
    half = SCREEN_SIZE / 2
    g.state[b, 0], g.state[b, 1] = g.ball[b, X] / half - 1, g.ball[b, Y] / half - 1
    g.state[b, 2], g.state[b, 3] = g.ball[b, SPEED_X] / MAX_BALL_SPEED, g.ball[b, SPEED_Y] / MAX_BALL_SPEED
    for seat in range(2):
        g.state[b, 4 + seat] = g.paddles[b, seat] / half - 1
        g.state[b, 6 + seat] = g.scores[b, seat] / points
    g.state[b, 8] = g.steps[b] / max_steps


@jit
def _begin_game(g: PongArrays, b: int, mirror: bool) -> None:
    """Starts a game on an empty picture, in all four pictures of the observation."""
    for view in range(2):
        for row in range(WALL_HEIGHT, SCREEN_SIZE - WALL_HEIGHT):
            for x in range(SCREEN_SIZE):
                g.packed_pixels[b, view, row, x] = 0
    for seat in range(2):
        g.paddles[b, seat], g.scores[b, seat] = SCREEN_SIZE / 2, 0
    g.steps[b] = 0
    _serve(g.rng, g.ball, g.hits, b)
    for _ in range(NUM_DRAWN_FRAMES):
        _remember(g.drawn, g.ball, g.paddles, b)
    _draw(g.packed_pixels, g.drawn, b, mirror)


@jit
def _store_final(g: PongArrays, b: int) -> None:
    """Does what `native.store_final` does. Loops compile ten times as fast as slice assignments."""
    for view in range(2):
        for row in range(SCREEN_SIZE):
            for x in range(SCREEN_SIZE):
                g.final_packed_pixels[b, view, row, x] = g.packed_pixels[b, view, row, x]
    for at in range(g.state.shape[1]):
        g.final_state[b, at] = g.state[b, at]


@jit
def _begin_all(g: PongArrays, points: int, max_steps: int, mirror: bool) -> None:
    for b in range(len(g.steps)):
        _begin_game(g, b, mirror)
        _write_state(g, b, points, max_steps)


@jit
def _step_all(
    g: PongArrays, points: int, max_steps: int, mirror: bool, actions: np.ndarray, moves_A: np.ndarray
) -> None:
    moves_2 = np.zeros(2, np.int64)
    for b in range(len(g.steps)):
        for seat in range(2):
            action = actions[b, seat]
            moves_2[seat] = moves_A[action] if 0 <= action < len(moves_A) else 0
        g.steps[b] += 1
        _play(g, b, moves_2, points)
        _remember(g.drawn, g.ball, g.paddles, b)
        _draw(g.packed_pixels, g.drawn, b, mirror)
        _write_state(g, b, points, max_steps)
        g.terminated[b] = False
        for seat in range(2):
            won = g.scores[b, seat] == points
            g.success[b, seat] = won
            g.terminated[b] |= won
        g.truncated[b] = not g.terminated[b] and g.steps[b] >= max_steps
        if g.terminated[b] or g.truncated[b]:
            _store_final(g, b)
            _begin_game(g, b, mirror)
            _write_state(g, b, points, max_steps)


class Pong(NativeEnv):
    """Return the ball; a point gives 1 to the scorer and -1 to the other seat. `points` win the game, which is
    the `success` of the seat; `max_steps` is the step limit.

    A step is four frames of one action: with `minimal` stay, up, down; else Atari's six actions no-op, fire, right
    (up), left (down), right and fire, left and fire, of which firing has no effect (the ball serves itself). An action
    out of range stays. The ball gets faster with every hit, and its angle steeper the closer to its end a paddle hits
    it.

    An observation is the last four pictures, one per step, oldest first, uint8 [84, 84, 4]: walls 128, ball and paddles
    255, no score. With `mirror` every seat sees its own paddle on the right, as `first_0` always does. The state is x,
    y (-1 to 1) and velocity of the ball, y of both paddles, both scores and the time, each relative to its maximum.

    The scripted player "tracker" follows the approaching ball as it was one step ago, else waits in the middle: fast
    and steep balls get past it.

    Raises ValueError if `num_envs`, `points` or `max_steps` is below 1.
    """

    name: ClassVar[str] = "pong"
    seats = ("first_0", "second_0")
    scripted_policies = ("tracker",)
    state_size = 9

    def __init__(
        self, num_envs: int = 64, *, points: int = 5, max_steps: int = 1000, minimal: bool = True, mirror: bool = True
    ) -> None:
        for name, value in (("num_envs", num_envs), ("points", points), ("max_steps", max_steps)):
            check_at_least(name, value, 1, "nothing is played then")
        self.num_envs = num_envs
        self.options = (points, max_steps, mirror)
        self.moves = np.array(ACTION_MOVES[0 if minimal else 1])
        self.action_names = ("stay", "up", "down") if minimal else ATARI_ACTIONS
        view = (SCREEN_SIZE, SCREEN_SIZE, FRAMES_PER_STEP)
        self.observation_shapes, self.action_spaces = (view,) * 2, (Discrete(len(self.moves)),) * 2
        self.vector_step = frame = empty_step(
            num_envs, 2, view, state_size=self.state_size, reports_success="by_seat", dtype=np.uint8
        )
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "ball": np.zeros((num_envs, 4)),
            "paddles": np.zeros((num_envs, 2)),
            "scores": np.zeros((num_envs, 2), np.int64),
            "hits": np.zeros(num_envs, np.int64),
            "steps": np.zeros(num_envs, np.int64),
            "drawn": np.zeros((num_envs, NUM_DRAWN_FRAMES, 4), np.int64),
        }
        assert frame.state is not None and frame.final_state is not None and frame.success is not None
        self._board = PongArrays(
            **self.internal_state,
            packed_pixels=frame.obs.view(np.uint32)[..., 0],
            final_packed_pixels=frame.final_obs.view(np.uint32)[..., 0],
            state=frame.state,
            final_state=frame.final_state,
            rewards=frame.rewards,
            terminated=frame.terminated,
            truncated=frame.truncated,
            success=frame.success,
        )

    def _begin(self) -> None:
        self._board.packed_pixels[:, :, :WALL_HEIGHT] = GREY_PIXELS
        self._board.packed_pixels[:, :, -WALL_HEIGHT:] = GREY_PIXELS
        _begin_all(self._board, *self.options)

    def _advance(self, actions: np.ndarray) -> None:
        _step_all(self._board, *self.options, actions.astype(np.int32, copy=False), self.moves)

    def render(self, game: int) -> np.ndarray:
        """Returns the newest picture that `first_0` sees, [84, 84] in grey."""
        return self.vector_step.obs[game, 0, :, :, -1].copy()

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        if name not in self.scripted_policies:
            return super().scripted_actions(name, seat)
        coming_B = (self.internal_state["ball"][:, SPEED_X] > 0) == (seat == 0)
        ball_B = self.internal_state["drawn"][:, -2, 1] + BALL_SIZE / 2
        gap_B = np.where(coming_B, ball_B, SCREEN_SIZE / 2) - self.internal_state["paddles"][:, seat]
        up, down = (int(np.flatnonzero(self.moves == move)[0]) for move in (-1, 1))
        return np.select([gap_B < -TRACKER_TOLERANCE, gap_B > TRACKER_TOLERANCE], [up, down], 0).astype(np.int32)
