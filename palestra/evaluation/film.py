"""Films of games: one game as an animated GIF or an MP4, with the players, what they do and what it pays.

A game of networks shows what the env draws (`VectorEnv.render`), one of language agents what each seat sees and says.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from palestra.core.chat import escape_control_chars
from palestra.core.event_loop import call_outside_loop
from palestra.core.failures import RunFailed, check_not_all_failed
from palestra.core.files import replacing_file
from palestra.core.seeding import derive_seed
from palestra.envs.local import KEYS_OF_PATHS
from palestra.evaluation.evaluate import EvalOptions, evaluate, open_eval
from palestra.evaluation.target import find_target
from palestra.runs.replays import GameReplay, ReplayFrame, ReplayHeader
from palestra.text.rollouts.transcript import turns

FILE_TYPES = (".gif", ".mp4")
PICTURES_PER_SECOND = 10.0
TURNS_PER_SECOND = 0.5  # of language agents, whose turns are read
LAST_SECONDS = 2.0  # the film shows its end longer
LEAST_SIDE = 320  # pixels: smaller pictures are enlarged
LARGEST_SIDE = 480  # pixels: larger ones are reduced
MARGIN = 12  # pixels
TEXT_COLUMNS = 88
FONT_SIZE = 14
INK = (32, 33, 36)


class Frame(NamedTuple):
    """One picture of a film: the position, as a picture or a text, and a line below it with a colour for each seat."""

    position: Image.Image | str
    captions: Sequence[tuple[str, tuple[int, int, int]]] = ()


def write_film(
    what: str | Path,
    out: str | Path,
    env: Mapping[str, Any] | None = None,
    seats: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
    per_second: float | None = None,
    **options: Unpack[EvalOptions],
) -> int:
    """Plays one game and writes it as a film; returns the number of its pictures.

    The suffix of `out` is .gif or .mp4. `what`, `env`, `seats` and `options` are those of `evaluate`; `seed` chooses
    the game. `per_second` is the number of joint steps in a second (default: 10 of networks, a turn of language agents
    in two seconds). Raises ValueError for another suffix, for an env that draws nothing, and if a package is missing.
    """
    out = Path(out)
    if out.suffix not in FILE_TYPES:
        raise ValueError(f"--out {out} is neither a .gif nor an .mp4: name the file so")
    if out.suffix == ".mp4" and not find_spec("imageio_ffmpeg"):
        raise ValueError("an .mp4 needs imageio-ffmpeg: pip install 'palestra[video]', or write a .gif")
    if find_target(what, env, options.get("checkpoint")).is_vector:
        frames = _network_frames(what, env or {}, seats or {}, seed, options)
        speed = PICTURES_PER_SECOND
    else:
        play = partial(evaluate, what, env or {}, seats or {}, episodes=1, seed=seed, **options)
        episodes = call_outside_loop(play).episodes  # a notebook has a loop of its own
        check_not_all_failed(episodes, "render")
        frames = [Frame(_wrap(escape_control_chars(text.strip()))) for text in turns(episodes[0])]
        speed = TURNS_PER_SECOND
    pictures = draw_frames(frames)
    save_film(pictures, out, per_second or speed)
    return len(pictures)


def _wrap(text: str) -> str:
    """Returns a text whose lines have at most `TEXT_COLUMNS` characters."""
    wrapped = (
        textwrap.fill(line, TEXT_COLUMNS, replace_whitespace=False, drop_whitespace=False) for line in text.split("\n")
    )
    return "\n".join(wrapped)


def _network_frames(
    what: str | Path, env: Mapping[str, Any], seats: Mapping[str, str], seed: int, options: EvalOptions
) -> list[Frame]:
    """Plays a game of networks; returns a frame for each joint step. Raises ValueError if the env draws nothing."""
    config, header, game = _record_game(what, env, seats, seed, options)
    why = "it has no `render(game)` that returns a picture, uint8 [height, width, 3], or a text"
    own = dict(config.get("options") or {})
    if game is None and config["type"] in KEYS_OF_PATHS and "render_mode" not in own:
        from palestra.envs.adapters.gymnasium import RENDER_MODES

        for mode in RENDER_MODES:
            drawn = dict(env) | {"options": own | {"render_mode": mode}}
            try:
                _, header, game = _record_game(what, drawn, seats, seed, options)
            except (ValueError, RunFailed) as error:  # another mode may do
                why = str(error)
            if game is not None:
                break
    if game is None:
        raise ValueError(f'env "{header.env}" draws nothing: {why}')
    return [Frame(_position(frame), list(_captions(header, frame))) for frame in game.frames]


def _record_game(
    what: str | Path, env: Mapping[str, Any], seats: Mapping[str, str], seed: int, options: EvalOptions
) -> tuple[Mapping[str, Any], ReplayHeader, GameReplay | None]:
    """Plays a game that begins with env seed `seed`. Returns the env's config, the header with the policy of each seat,
    and the recorded game; None for the game if the env draws nothing."""
    from palestra.evaluation.vector import VectorEvalSetup, player_names
    from palestra.vector.rollouts.replay_recorder import ReplayRecorder
    from palestra.vector.trainer import play_eval

    with open_eval(what, env, seats, 1, options) as setup:
        assert isinstance(setup, VectorEvalSetup)
        recorder = ReplayRecorder(setup.env, 1)
        players = setup.players(setup.policy_names)
        play_eval(recorder, players, 1, derive_seed(seed, "film"), first_env_seed=seed)
        header = recorder.header(player_names(setup.env, players))
        return setup.env_config, header, next(iter(recorder.replays()), None)


def _position(frame: ReplayFrame) -> Image.Image | str:
    if frame.picture is None:
        return frame.text or ""
    picture = Image.open(io.BytesIO(frame.picture)).convert("RGB")
    picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return ImageOps.scale(picture, -(-LEAST_SIDE // max(picture.size)), Image.Resampling.NEAREST)


def _captions(header: ReplayHeader, frame: ReplayFrame) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yields what each seat does in a joint step and what it is paid, with the seat's colour."""
    rewards = frame.rewards or [0.0] * len(header.seats)
    rows = zip(header.seats, header.players, frame.acts, frame.actions, rewards, strict=True)
    colours = chain(header.seat_colours, repeat(INK))
    for (seat, player, acts, action, reward), (red, green, blue) in zip(rows, colours, strict=False):
        caption = f"{seat} ({player}): "
        if acts:
            caption += _action_name(header, action)
        if reward:
            caption += f" {reward:+.3g}"
        yield caption, (red, green, blue)


def _action_name(header: ReplayHeader, action: Sequence[float]) -> str:
    if len(action) == 1 and float(action[0]).is_integer() and 0 <= action[0] < len(header.action_names):
        return header.action_names[int(action[0])]
    return " ".join(f"{number:.3g}" for number in action)


def draw_frames(frames: Sequence[Frame]) -> list[Image.Image]:
    """Returns the pictures of a film, all of one size, which is even."""
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", FONT_SIZE)
    drawn = [_draw(frame, font) for frame in frames]
    width, height = (2 * -(-max(sizes) // 2) for sizes in zip(*(picture.size for picture in drawn), strict=True))
    return [_on_white(picture, (width, height)) for picture in drawn]


def _draw(frame: Frame, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Draws the position, and the captions below it."""
    position = frame.position
    width, height = _text_size(position, font) if isinstance(position, str) else position.size
    line = int(1.4 * FONT_SIZE)
    below = MARGIN + height + MARGIN // 2
    widest = max([width, *(_text_size(text, font)[0] for text, _ in frame.captions)])
    canvas = Image.new("RGB", (widest + 2 * MARGIN, below + line * len(frame.captions) + MARGIN // 2), "white")
    draw = ImageDraw.Draw(canvas)
    if isinstance(position, str):
        draw.multiline_text((MARGIN, MARGIN), position, INK, font)
    else:
        canvas.paste(position, (MARGIN, MARGIN))
    for number, (text, colour) in enumerate(frame.captions):
        draw.text((MARGIN, below + number * line), text, colour, font)
    return canvas


def _text_size(text: str, font: ImageFont.FreeTypeFont) -> tuple[int, int]:
    """Returns the width and height of a text in pixels."""
    box = ImageDraw.Draw(Image.new("RGB", (1, 1))).multiline_textbbox((0, 0), text, font)
    return int(box[2]), int(box[3])


def _on_white(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    canvas = Image.new("RGB", size, "white")
    canvas.paste(picture)
    return canvas


def save_film(pictures: Sequence[Image.Image], out: Path, per_second: float) -> None:
    """Writes pictures of one size as an animated .gif, which repeats, or an .mp4."""
    with replacing_file(out) as path:
        if out.suffix == ".gif":
            times = [1000 / per_second] * (len(pictures) - 1) + [1000 * LAST_SECONDS]
            with path.open("wb") as file:
                pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0)
            return
        import imageio_ffmpeg

        film = imageio_ffmpeg.write_frames(
            str(path), pictures[0].size, fps=per_second, macro_block_size=2, output_params=["-f", "mp4"]
        )
        film.send(None)
        for picture in [*pictures, *[pictures[-1]] * int(LAST_SECONDS * per_second)]:
            film.send(np.asarray(picture).tobytes())
        film.close()
