"""Shipped configs: each builds, the demo's team learns, and training data and evaluation are disjoint."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palestra.api.experiments.grid import grid_cells, load_grid
from palestra.api.experiments.schedule import check_cells
from palestra.cli.main import app
from palestra.core.config import dump, load, override, parse, validate
from palestra.core.config.shipped import DATA_DIR
from palestra.envs import make_env
from palestra.envs.support.splits import split_of_layout
from palestra.populations import scheduler
from palestra.populations.build.build import build_population, run_population
from palestra.populations.build.validation import validate_population
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, run_training
from palestra.text.build.build import build
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

ROOT = Path(__file__).parents[2]
SHIPPED = DATA_DIR / "configs"
GAMES = sorted((SHIPPED / "games").glob("*.yaml"))
KUHN = ROOT / "results/real/configs/text_kuhn_self_play.yaml"
POPULATIONS = [*sorted((SHIPPED / "populations").glob("*.yaml")), KUHN]
GRIDS = [*sorted((SHIPPED / "grids").glob("*.yaml")), *sorted(ROOT.glob("results/grid/configs/*.yaml"))]
CONFIGS = sorted({*SHIPPED.rglob("*.yaml"), *ROOT.glob("results/*/configs/*.yaml")} - {*GAMES, *POPULATIONS, *GRIDS})
ABSENT = {"jaxmarl"}  # envs of packages with their own venv: `make test-envs`
SLOW = {"pong", "overcooked"}  # rules that are compiled in half a minute, and long games; each has tests of its own
ABSENT_GRIDS = {"smax"}  # grids with such an env
NUM_ENVS = 8  # as many as a config has minibatches
SHORT = {  # the smallest settings that exercise every part of a plan
    "psro": {"iterations": 2, "env_steps": 1, "slices": 1, "games_per_cell": 8, "adaptive_games": 0},
    "xdo": {"iterations": 2, "env_steps": 1, "cfr_iterations": 10, "stop_nash_conv": 0.0},
    "self_play": {"slices": 2, "env_steps": 1, "games_per_cell": 8},
    "league": {"slices": 1, "env_steps": 1, "games_per_cell": 8},
    "pbt": {"slices": 1, "env_steps": 1},
}


def success(folder, settings=()):
    """Success on the config's test layouts (before, after)."""
    config = validate(TextConfig, override(load("configs/demo.yaml"), settings))
    with Run.create(folder, dump(config), "demo") as run:
        assert run_training(build(config), run)
    scores = [line["success"] for line in read_lines(folder / "demo/evals.jsonl") if line["name"] == "test"]
    return scores[0], scores[-1]


@pytest.fixture(scope="module")
def engines():
    return Engines("auto", 8)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_builds(path, engines):
    """On bases that are loaded, and checked, once for all configs."""
    config = validate(TextConfig, load(path))
    assert config.engine is None and config.sampler is None
    assert build(config, engines).learners and validate(TextConfig, load(path)) == config


def buildable(path):
    return pytest.param(path, marks=pytest.mark.peers if path.stem in ABSENT_GRIDS else ())


@pytest.mark.parametrize("path", [buildable(path) for path in GRIDS], ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.few(1)
def test_every_cell_of_a_grid_builds(path, tmp_path):
    if path.stem == "defaults_box2d":
        pytest.importorskip("Box2D", reason="needs palestra[box2d]")
    grid = load_grid(path)
    cells = grid_cells(grid, path.parent)
    assert len(cells) > 1
    check_cells([cell for cell in cells if cell.seed == cells[0].seed], tmp_path, grid.tasks)


def playable(path):
    kind = load(path)["env"]["type"]
    marks = pytest.mark.peers if kind in ABSENT else pytest.mark.slow if kind in SLOW else ()
    return pytest.param(path, marks=marks)


def demonstration_settings(path, folder, monkeypatch):
    """Settings for a config that learns from episodes, which are recorded by the commands in the config's first
    lines."""
    keys = {"demonstrations", "data"} & load(path)["algorithm"].keys()
    if not keys:
        return []
    monkeypatch.chdir(ROOT)
    files = []
    for command in [line for line in path.read_text().splitlines() if line.startswith("#   palestra collect")]:
        arguments = shlex.split(command)[2:]
        files.append(str(folder / Path(arguments[-1]).name))
        result = CliRunner().invoke(app, [*arguments[:-1], files[-1], "--steps", "64"])
        assert result.exit_code == 0, result.output
    return [f"algorithm.{keys.pop()}=[{', '.join(files)}]"]


@pytest.mark.parametrize("path", list(map(playable, GAMES)), ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.few(5)
def test_every_vector_config_trains(path, tmp_path, monkeypatch):
    """Two rollouts of few games with their updates, and the evaluations before and after."""
    config = validate(VectorConfig, load(path))
    settings = demonstration_settings(path, tmp_path, monkeypatch)
    sweep = config.algorithm.rollout_length * NUM_ENVS
    settings += [
        f"env.num_envs={NUM_ENVS}",
        f"env_steps={2 * sweep}",
        *(f"evals.{name}.episodes=4" for name in config.evals),
    ]
    settings += ["algorithm.learning_starts=1"] if hasattr(config.algorithm, "learning_starts") else []
    changed = validate(VectorConfig, override(load(path), settings))
    setup = build_vector_run(changed)
    with Run.create(tmp_path, dump(changed), "game") as run:
        assert run_training(setup, run, Callback())
    evals = read_lines(tmp_path / "game/evals.jsonl")
    assert [line["step"] for line in evals if line["name"] == next(iter(config.evals))] == [-1, setup.steps - 1]
    figures = [line for line in read_lines(tmp_path / "game/metrics.jsonl") if line["policy"] != "team"]
    assert all(any(key.endswith(("loss", "nll")) for key in line) for line in figures)


@pytest.mark.parametrize("path", POPULATIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_population_config_trains(path, tmp_path):
    """A short run of its plan; configs of language agents are only built, since their training takes long."""
    tree = load(path)
    config = validate_population(tree)
    assert validate_population(parse(dump(config))) == config
    setup = build_population(config)
    if config.oracle.type != "language":
        short = [f"population.{key}={value}" for key, value in SHORT[config.population.type].items()]
        config = validate_population(override(tree, [*short, "backend={type: inline}"]))
        setup = build_population(config)
        with Run.create(tmp_path, dump(config), "population") as run:
            assert run_population(setup, run, scheduler.PlanCallback())
        assert setup.plan.summary()["members"] >= 3


@pytest.mark.slow
def test_demo_team_learns_in_a_few_steps(tmp_path):
    """A fifth of the demo: 16 steps, with fewer episodes."""
    settings = ["steps=16", "episodes=24", "evals.dev.episodes=1", "evals.dev.every=0", "evals.test.episodes=150"]
    before, after = success(tmp_path, settings)
    assert before <= 0.30 and after >= before + 0.25, (before, after)


@pytest.mark.slow
def test_demo_team_reaches_90_percent_success(tmp_path):
    before, after = success(tmp_path)
    assert before <= 0.30 and after >= 0.90, (before, after)


def test_demo_splits_are_disjoint():
    """Instances of each split lie in that split, and no canonical layout in two."""
    options = load("configs/demo.yaml")["env"]
    seen = {}
    for split in ("base", "train", "dev", "test"):
        env = make_env(**(options | {"split": split}))
        for seed in range(100):
            env.reset(seed)
            assert split_of_layout(env.size, env.instance.cell_groups) == split
            seen.setdefault(split, set()).add(env.instance.cell_groups)
    train = seen["train"]
    assert not train & seen["test"] and not train & seen["dev"] and not seen["base"] & seen["test"]
