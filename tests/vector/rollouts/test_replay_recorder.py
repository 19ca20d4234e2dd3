"""Replays: they contain the game as it was played, recording changes nothing, and a run stores them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.environments.combat.env import Combat
from palestra.environments.foraging.env import Foraging
from palestra.environments.overcooked.env import Overcooked
from palestra.environments.pong.env import Pong
from palestra.envs.batch.canvas import RED, Canvas, to_png
from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.leduc import LeducPoker
from palestra.envs.vector.liars_dice import LiarsDice
from palestra.envs.vector.matrix import MatrixGame
from palestra.envs.vector.mpe import SimpleSpeakerListener, SimpleSpread, SimpleTag
from palestra.envs.vector_base import VectorEnv
from palestra.runs import Run
from palestra.runs.eval_files import eval_file, list_eval_files
from palestra.runs.replays import GameReplay, read_replays
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts import replay_recorder
from palestra.vector.rollouts.replay_recorder import ReplayRecorder
from palestra.vector.trainer import play_eval

ENVS = [SimpleSpread, SimpleTag, SimpleSpeakerListener, Combat, Foraging, Overcooked, Pong]
ENVS += [KuhnPoker, LeducPoker, LiarsDice]
SHORTER = {Overcooked: {"max_steps": 100}}  # every step is drawn


def record(env: VectorEnv, num_episodes: int = 2, seed: int = 3) -> tuple[ReplayRecorder, dict[str, Any]]:
    """Plays a recorded evaluation with random players."""
    recorder = ReplayRecorder(env, num_episodes)
    metrics = play_eval(recorder, [UniformVectorPolicy(env, range(len(env.seats)))], env.num_envs, seed)
    return recorder, metrics


def read_png(data: bytes) -> np.ndarray:
    """The pixels of a PNG."""
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("shape", [(5, 7), (6, 4, 3)])
def test_png_holds_the_pixels(shape):
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    assert (read_png(to_png(picture)) == picture).all()


def test_other_arrays_are_refused_as_pictures():
    with pytest.raises(ValueError, match=r"render returned an array float64 \[4, 4\]: return uint8"):
        to_png(np.zeros((4, 4)))


def test_shapes_are_drawn_at_their_positions():
    canvas = Canvas(-1.2, 1.2)  # 100 pixels for a unit
    canvas.disc(0.5, 0.5, 0.1, RED)  # right and up: column 170, row 70
    canvas.rectangle(-0.5, -0.5, 0.2, 0.1, (0, 0, 0))
    canvas.line((-1, 0), (1, 0), (0, 0, 255))
    canvas.disc(9, 9, 0.2, RED)  # outside: nothing is drawn
    picture = canvas.picture()
    assert tuple(picture[70, 170]) == RED and tuple(picture[70, 181]) != RED
    assert tuple(picture[170, 70]) == (0, 0, 0) and tuple(picture[170, 81]) != (0, 0, 0) == tuple(picture[166, 70])
    assert tuple(picture[120, 23]) == (0, 0, 255) == tuple(picture[119, 217])
    red = (picture == RED).all(2).sum()
    assert abs(red - np.pi * 10**2) < 40, "the disc of radius 10, less its smoothed edge"


@pytest.mark.parametrize("make", ENVS)
@pytest.mark.few(5)
def test_a_replay_is_the_game_of_its_seed_and_actions(make):
    options = SHORTER.get(make, {})
    env = make(2, **options)
    recorder, _ = record(env)
    for game, replay in enumerate(recorder.replays()):
        assert replay.seed == game and replay.end in ("terminated", "truncated")
        twin = make(2, **options)
        step = twin.reset(np.arange(2))
        for frame in replay.frames:
            shown = twin.render(game)
            assert frame.text == (shown if isinstance(shown, str) else None)
            assert frame.text is not None or (read_png(frame.picture) == shown).all()
            assert frame.acts == step.agent_mask[game].tolist()
            actions = np.zeros((2, len(env.seats)), np.int32)
            actions[game] = np.array(frame.actions)[:, 0]
            step = twin.step(actions)
            assert frame.rewards == step.rewards[game].tolist()
        assert step.done[game]


def test_recording_changes_no_result():
    with_replays, without = record(LeducPoker(8), 2)[1], record(LeducPoker(8), 0)[1]
    assert with_replays == without


def test_pictures_change_between_steps():
    frames = record(SimpleSpread(2))[0].replays()[0].frames
    assert len(frames) == 25 and len({frame.picture for frame in frames}) > 20, "they stand still only by chance"


def test_observations_that_are_pictures_need_no_renderer(monkeypatch):
    env = Pong(2, max_steps=5)
    monkeypatch.setattr(Pong, "render", VectorEnv.render)
    frame = record(env)[0].replays()[0].frames[0]
    assert (read_png(frame.picture) == env.reset(np.arange(2)).obs[0, 0, :, :, -1]).all()


def test_env_without_renderer_has_no_replays():
    assert record(MatrixGame(4))[0].replays() == []


def test_long_replays_are_truncated(monkeypatch):
    monkeypatch.setattr(replay_recorder, "MAX_FRAMES", 10)
    for replay in record(SimpleSpread(2))[0].replays():
        assert len(replay.frames) == 10 and replay.end == "cut" and replay.success is None


def test_files_restore_replays(tmp_path: Path):
    env = Combat(2)
    recorder = record(env)[0]
    header = recorder.header(dict.fromkeys(env.seats, "unit"))
    with Run.create(tmp_path, "name: a", "a") as run:
        path = run.write_replays(7, "held out/1", header, recorder.replays())
    restored, replays = read_replays(path)
    assert replays == recorder.replays() and list(restored.players) == ["unit"] * 3
    assert restored.action_names[6] == "attack enemy 0" and path.parent.parent == tmp_path / "a" / "replays"
    assert list_eval_files(tmp_path / "a" / "replays") == {"held out/1": [7]}


def test_evaluations_of_a_run_are_recorded_and_a_resume_removes_later_ones(tmp_path: Path):
    settings = ["env_steps=256", "env.num_envs=8", "algorithm.rollout_length=8", "log_every=64", "checkpoint_every=128"]
    settings += [
        "keep_every=0",
        "evals={held_out: {episodes: 8, every: 128, replays: 3}, other: {episodes: 8, replays: 0}}",
    ]
    args = [part for one in settings for part in ("--set", one)]
    done = CliRunner().invoke(
        app, ["train", "configs/games/kuhn_ppo.yaml", "--root", str(tmp_path), "--name", "a", *args]
    )
    assert done.exit_code == 0, done.output
    steps = list_eval_files(tmp_path / "a" / "replays")["held_out"]
    assert list_eval_files(tmp_path / "a" / "replays").keys() == {"held_out"} and steps[0] == -1 and len(steps) >= 3
    _, replays = read_replays(tmp_path / "a" / eval_file("replays", "held_out", steps[-1]))
    assert len(replays) == 3 and all(isinstance(one, GameReplay) and one.end == "terminated" for one in replays)
    with Run.open(tmp_path / "a") as run:
        newest = run.resume()
        late = run.write_replays(
            newest.step + 1, "held_out", read_replays(tmp_path / "a" / eval_file("replays", "held_out", -1))[0], replays
        )
        run.resume()
    assert not late.exists() and list_eval_files(tmp_path / "a" / "replays")["held_out"] == steps
