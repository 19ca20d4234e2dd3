"""Films of games: what the envs draw, who plays, what they do and what it pays."""

import asyncio
import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
import yaml
from gymnasium import spaces
from helpers.command_line import palestra, refused
from PIL import Image

from palestra.envs.adapters.pettingzoo.games import ParallelGame
from palestra.evaluation.film import write_film
from palestra.runs.replays import read_replays

STEPS = 5


class Race(pettingzoo.ParallelEnv):
    """Two runners; a picture shows how far each one is, a text says it."""

    metadata: dict[str, Any] = {"name": "race", "render_modes": ["rgb_array", "ansi", "human"]}

    def __init__(self, render_mode: str | None = None, fails: bool = False) -> None:
        self.render_mode = render_mode
        self.fails = fails
        self.possible_agents = ["one", "two"]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 100, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.time = 0
        self.places = dict.fromkeys(self.agents, 0)
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.time += 1
        for agent, action in actions.items():
            self.places[agent] += int(action)
        is_over = dict.fromkeys(self.agents, self.time == STEPS)
        seen, rewards = self._seen(), {agent: float(actions[agent]) for agent in self.agents}
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self.time == STEPS:
            self.agents = []
        return seen, rewards, is_over, dict.fromkeys(is_over, False), infos

    def render(self) -> Any:
        if self.fails:
            raise OSError("no screen")
        if self.render_mode == "ansi":
            return f"\x1b[41mone\x1b[0m at {self.places['one']}"
        picture = np.full((20, 30, 3), 255, np.uint8)
        for row, place in enumerate(self.places.values()):
            picture[5 + 10 * row, :place] = 0
        return picture

    def _seen(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self.places[agent]], np.float32) for agent in self.possible_agents}


class BlindRace(Race):
    """A race that takes no render mode."""

    def __init__(self) -> None:
        super().__init__()


def config_of(env: dict[str, Any], folder: Path, evals: dict[str, Any] | None = None) -> Path:
    tree = {
        "name": "film",
        "env_steps": 40,
        "env": env | {"num_envs": 2},
        "policies": {"agent": {"type": "net", "hidden": [4]}},
        "algorithm": {"type": "ppo", "rollout_length": 10},
        "evals": evals or {},
    }
    path = folder / "film.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def trained(env: dict[str, Any], folder: Path, **options: Any) -> Path:
    palestra("train", config_of(env, folder, **options), "--root", folder)
    return folder / "film"


def pictures(path: Path) -> list[np.ndarray]:
    with Image.open(path) as film:
        frames = []
        for number in range(getattr(film, "n_frames", 1)):
            film.seek(number)
            frames.append(np.asarray(film.convert("RGB")))
        return frames


RACE = {"type": "pettingzoo", "env": f"{__name__}:Race"}


def test_game_of_trained_networks_becomes_a_film(tmp_path):
    run = trained(RACE, tmp_path)
    assert f"{STEPS} pictures" in palestra("render", run, "--out", tmp_path / "race.gif", "--seed", "3")
    film = pictures(tmp_path / "race.gif")
    assert 1 < len(film) <= STEPS  # equal pictures in a row are one, shown longer
    first = film[0][12 : 12 + 220, 12 : 12 + 330]  # enlarged from 20 x 30, below the margin
    assert (first == 255).all()  # nobody has moved
    assert (film[-1][12 : 12 + 220, 12 : 12 + 330] == 0).any()
    assert (film[0][12 + 220 :] < 128).any()  # the captions


def test_env_that_writes_a_text_is_drawn_as_one(tmp_path):
    run = trained(RACE, tmp_path)
    palestra("render", run, "--out", tmp_path / "race.gif", "--env", "options.render_mode=ansi")
    assert (pictures(tmp_path / "race.gif")[0] < 128).any()
    assert ParallelGame(Race("ansi")).render() == "[one] at 0"  # what a terminal emphasises by a colour


def test_film_as_mp4_has_every_picture(tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    run = trained({"type": "simple_spread"}, tmp_path)
    palestra("render", run, "--out", tmp_path / "spread.mp4", "--seats", "agent_*=random", "--per-second", "5")
    count, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "spread.mp4"))
    assert count == 25 + 10  # the end is shown two seconds longer
    assert seconds == pytest.approx(7)


def test_language_agents_are_shown_with_what_they_see_and_say(tmp_path):
    seats = ("--seats", "player_0=expert", "--seats", "player_1=expert")
    assert "9 pictures" in palestra("render", "text_tic_tac_toe", "--out", tmp_path / "game.gif", *seats)
    film = pictures(tmp_path / "game.gif")
    assert len(film) == 9 and all((picture < 128).any() for picture in film)
    with Image.open(tmp_path / "game.gif") as opened:
        assert opened.info["duration"] == 2000


def test_characters_that_no_font_has_are_drawn_as_escapes(tmp_path):
    env = {"vocabulary": {"a1": "one\r\x1b[2J"}}  # an untrained model says such things
    for name, options in (("plain", {}), ("escaped", env)):
        assert write_film("text_tic_tac_toe", tmp_path / f"{name}.gif", options, {"*": "expert"}) == 9
    plain, escaped = (pictures(tmp_path / f"{name}.gif")[0] < 128 for name in ("plain", "escaped"))
    assert escaped.sum() > plain.sum()


def test_film_is_made_inside_a_running_loop(tmp_path):
    async def cell() -> int:
        return write_film("text_kuhn", f"{tmp_path}/kuhn.gif", {}, {"*": "random"})

    assert asyncio.run(cell()) == len(pictures(tmp_path / "kuhn.gif"))


def test_evaluations_record_what_package_envs_draw(tmp_path):
    run = trained(
        {"type": "gymnasium", "id": "CartPole-v1"},
        tmp_path,
        evals={"held_out": {"episodes": 2, "env": {"options": {"render_mode": "rgb_array"}}}},
    )
    _, (game, _) = read_replays(next((run / "replays" / "held_out").glob("*.parquet")))
    twin = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    twin.reset(seed=game.seed)
    first = Image.open(io.BytesIO(game.frames[0].picture))
    np.testing.assert_array_equal(np.asarray(first), twin.render())


def test_film_that_cannot_be_made_is_refused_in_one_line(tmp_path, monkeypatch):
    run = trained({"type": "pettingzoo", "env": f"{__name__}:BlindRace"}, tmp_path)
    assert "draws nothing" in refused("render", run, "--out", tmp_path / "film.gif")
    failing = ("--env", f"env={__name__}:Race", "--env", "options.fails=true")
    message = refused("render", run, "--out", tmp_path / "film.gif", *failing)
    assert 'env "' in message and "draws nothing" in message and "OSError: no screen" in message
    for command in ("render", "eval"):  # networks have no other
        assert "temperature 0.7 is for language agents" in refused(command, run, "--temperature", "0.7")
    assert "neither a .gif nor an .mp4" in refused("render", run, "--out", tmp_path / "film.avi")
    monkeypatch.setattr("palestra.evaluation.film.find_spec", lambda name: None)
    assert "palestra[video]" in refused("render", run, "--out", tmp_path / "film.mp4")
    assert not list(tmp_path.glob("film.[gma]*"))
