"""The dashboard in a real browser, over runs that palestra made: every page, its main actions, and attacks.

Screenshots are kept in .cache/screenshots. Any error in the console fails the test that caused it, and so does a
request to anywhere but the dashboard.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.long_runs import write_long_run
from helpers.warm_processes import PALESTRA
from PIL import Image
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.chat import Chat
from palestra.core.types import Answer, Episode, Node
from palestra.envs import make_env
from palestra.populations.payoffs import PayoffCell
from palestra.populations.task_json import TaskRecord
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.runs import Run
from palestra.vector.build.envs import make_vector_env
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy
from palestra.vector.rollouts.replay_recorder import ReplayRecorder
from palestra.vector.trainer import play_eval

pytest.importorskip("playwright.sync_api")
from helpers.browsers import Looking, expect, launched, settled, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]  # the first test waits for the runs

HERE = Path(__file__).parent.parent.parent
EVIL = "<img src=x onerror=\"window.hacked='{}'\"><script>window.hacked='{}'<" + "\\/script>"
DRAWN_GAMES = ("combat", "simple_tag", "pong", "foraging", "overcooked")
GAMES_AS_TEXT = ("kuhn_poker", "leduc_poker", "liars_dice")
EVIL_NAME = "<img src=x onerror=window.hacked=1> \"'&amp;#?%2f"


def evil(where: str) -> str:
    return EVIL.replace("{}", where).replace("\\/", "/")


# ---- runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    demo = ["--set", "steps=4", "--set", "episodes=12", "--set", "evals={dev: {episodes: 20, every: 2}}"]
    demo += ["--set", "tags=[baseline]"]
    duel = ["--set", "steps=2", "--set", "episodes=8", "--set", "save_episodes_every=1"]
    wide = ["--set", "env_steps=40000", "--set", "evals={held_out: {episodes: 40, every: 20000}}"]
    for config, settings in (
        ("configs/demo.yaml", demo),
        ("configs/demo.yaml", [*demo, "--set", "seed=1"]),
        (HERE / "results/algorithms/configs/duel.yaml", duel),
        ("configs/games/spread_mappo.yaml", wide),
        ("configs/populations/kuhn_psro_exact.yaml", ["--set", "population.iterations=5", "--backend", "inline"]),
        (
            "configs/populations/rps_league.yaml",
            ["--set", "population.slices=5", "--backend", "local", "--workers", "2"],
        ),
    ):
        done = CliRunner().invoke(app, ["train", str(config), "--root", str(root), *settings])
        assert done.exit_code == 0, done.output
    write_pictures(root)
    write_hostile(root)
    write_long_run(root, "steady", steps=300, episodes=4, total=400)
    write_alarming(root)
    write_games(root)
    write_beginning(root)
    return root


def answered(text: str, policy: str, prompt: int = 4) -> Answer:
    ids = np.array([396, 306, 307, 304, 4], np.int32)
    return Answer(text, policy, np.arange(prompt, dtype=np.int32), ids, np.array([-0.1, -1, -4, -0.5, 0], np.float32))


def write_pictures(root: Path) -> None:
    """The renderings of real envs at the start, one step each; programs and a conversation."""
    seen: dict[str, Any] = {}
    forms: dict[str, str] = {}
    for name in ("text_tic_tac_toe", "text_connect_four", "sudoku", "sokoban", "code"):
        env = make_env(name)
        seen[name], forms[name] = next(iter(env.reset(3).observations.values())), env.picture
    seen["drawn"] = next(iter(make_env("plan_path", rendering="ascii").reset(3).observations.values()))
    forms["drawn"] = "grid"
    seen["chat"] = Chat(({"role": "user", "content": "What is 6 x 7?"}, {"role": "tool", "content": "42"}))
    seen["signal"] = "size 4 you r0 c0 goal r3 c3 and the secret word is heron"
    program = "It works:\n```python\nn = int(input())\nprint(n)\n```"
    episodes = [
        Episode(
            name,
            0,
            {"coder": "coder@1"},
            [
                Node(
                    0,
                    None,
                    0,
                    {"coder": shown},
                    {"coder": answered(program, "coder@1")},
                    {"coder": 0.5},
                    done=True,
                    info={"success": True, "passed": 0.75, "agreed": True, "calls": {"coder": [{"tool": "run"}]}}
                    | {"invalid": {"coder": True}, "why_invalid": {"coder": "it prints nothing"}},
                )
            ],
            picture=forms.get(name, ""),
        )
        for name, shown in seen.items()
    ]
    with Run.create(root, "name: pictures\nenv: {type: code}\n", "pictures") as run:
        run.log_metrics(0, "team", {"success": 1.0})
        run.write_episodes(0, episodes)


def write_games(root: Path) -> None:
    """Replays of several envs in one run, an evaluation each: random players, in combat the env's scripted opponent."""
    config = "name: games\nenv: {type: combat}\nenv_steps: 1\npolicies: {one: {type: net}}\n"
    with Run.create(root, config, "games") as run:
        for name in (*DRAWN_GAMES, *GAMES_AS_TEXT):
            env = make_vector_env({"type": name}, 2)
            players: list[Any] = [UniformVectorPolicy(env, range(len(env.seats)))]
            if name == "combat":
                players = [ScriptedVectorPolicy(env, [n], "focus", f"focus/{n}") for n in range(len(env.seats))]
            recorder = ReplayRecorder(env, 2)
            play_eval(recorder, players, 2, seed=0)
            run.write_replays(-1, name, recorder.header(dict.fromkeys(env.seats, "one")), recorder.replays())


def write_hostile(root: Path) -> None:
    """A run in which every text from a model, an env or a config is an attack."""
    seat, other = evil("seat"), evil("other")
    nodes = [
        Node(
            0,
            None,
            0,
            {seat: evil("seen"), other: Chat(({"role": evil("role"), "content": evil("content")},))},
            {
                seat: answered(evil("said") + "\n```" + evil("fence") + "\n" + evil("code") + "```", evil("policy")),
                other: answered("javascript:window.hacked=1", "b@1"),
            },
            {seat: 1.0},
            advantages={seat: 0.5},
            done=True,
            info={"success": True, evil("key"): evil("value"), "deep": {evil("k"): [evil("v")]}},
        )
    ]
    config = json.dumps({"name": evil("config"), "env": {"type": evil("env")}, "algorithm": {"type": evil("algorithm")},
                         "policies": {evil("policy"): {"type": evil("type"), "base": evil("base")}},
                         "evals": {evil("evaluation"): {"seats": {evil("s"): evil("w")}}}, "steps": 12})  # fmt: skip
    with Run.create(root, config, EVIL_NAME, {"seed": evil("seed"), "command": [evil("command")]}) as run:
        for step in range(12):
            run.log_metrics(step, evil("policy"), {"entropy": 1.5 if step < 5 else 0.001, evil("figure"): 1.0})
            run.log_metrics(step, "team", {"success": 0.5})
            run.log_timings(step, "team", {"elapsed_s": step + 1.0, "rollout_s": 1.0, evil("phase") + "_s": 1.0})
        run.log_eval(3, evil("evaluation"), {"success": 0.5, "returns": {evil("seat"): 1.0}})
        seats = {seat: evil("policy"), other: "b@1"}
        run.write_episodes(0, [Episode(evil("env"), 1, seats, nodes), Episode("x", 2, seats, error=evil("error"))])
        for number, name in enumerate((evil("rock"), evil("paper"))):
            opponents = Opponents({"agent": {evil("rock"): 1.0}})
            task = TrainTask(f"train/{number}", player="agent", learner=evil("learner"), opponents=opponents,
                             self_play=0.5, output_member=name)  # fmt: skip
            record = TaskRecord(number, task, {}, TrainResult(env_steps=1, mean_return=0.1))
            run.append_line("tasks.jsonl", record.to_json())
        cell = PayoffCell(10, (0.5, -0.5), (1.0, 1.0), (7, 2), draws=1)
        play = PlayTask("play", cells=((evil("rock"), evil("paper")),), games_per_cell=10)
        run.append_line("tasks.jsonl", TaskRecord(2, play, {}, PlayResult((cell,))).to_json())
        worker = {"worker": evil("worker"), "kind": evil("kind"), "where": evil("where"), "why": evil("why")}
        run.append_line("workers.jsonl", {"step": 0, **worker, "lost": 1, "seen": 1.0})
        run.append_line("exploits.jsonl", {"player": evil("player"), "response_return": 1.0, "mixtures": {}})


def write_beginning(root: Path) -> None:
    """A population after its first task: the games of the only member with itself."""
    path = root / "beginning"
    shutil.copytree(root / "kuhn_psro_exact", path)
    for name in ("tasks.jsonl", "metrics.jsonl", "timings.jsonl"):
        lines = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(lines[0])
    members = json.loads((path / "population.json").read_text())
    (path / "population.json").write_text(json.dumps([one for one in members if one["name"] == "uniform"]))


def write_alarming(root: Path) -> None:
    with Run.create(
        root, "name: alarming\nsteps: 40\nenv: {type: relay}\nalgorithm: {type: grpo}\n", "alarming"
    ) as run:
        for step in range(40):
            run.log_metrics(
                step, "lazy", {"zero_std_fraction": 0.97, "entropy": max(0.001, 1.5 - 0.1 * step), "local_reward": 0.01}
            )
            run.log_metrics(step, "busy", {"zero_std_fraction": 0.2, "entropy": 1.2, "local_reward": 0.6})
            run.log_metrics(step, "team", {"success": 0.4, "episodes": 20.0, "failed": 2.0})


# ---- the browser


@pytest.fixture(scope="session")
def site(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with DashboardProcess(runs, tmp_path_factory.mktemp("cache")) as address:
        yield address


class DashboardProcess:
    """A dashboard in its own process while the block runs."""

    def __init__(self, root: Path, cache: Path, *options: str) -> None:
        self.command = [*PALESTRA, "dashboard", "--root", str(root), "--port", "0", *options]
        self.environment = os.environ | {"XDG_CACHE_HOME": str(cache)}

    def __enter__(self) -> str:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, env=self.environment)
        assert self.process.stdout is not None
        found = re.search(r"dashboard: (\S+)", self.process.stdout.readline())
        assert found
        return found[1]

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def chromium(runs: Path) -> Iterator[Any]:
    """Started after the runs are made: its event loop keeps training from starting one of its own."""
    with launched() as browser:
        yield browser


class Look(Looking):
    """Opens pages of the dashboard: `look(path, width=390, dark=True)`."""

    def __init__(self, browser: Any, site: str) -> None:
        super().__init__(browser)
        self.site = site

    def __call__(self, path: str = "#/", width: int = 1280, dark: bool = False, address: str = "") -> Any:
        return self.open(address or self.site, path, width, dark)


@pytest.fixture
def look(chromium: Any, site: str) -> Iterator[Look]:
    looking = Look(chromium, site)
    yield looking
    looking.close()


# ---- runs


def test_runs_are_listed_filtered_sorted_and_opened_by_keys(look):
    page = look()
    expect(page.locator("tbody tr")).to_have_count(12)
    row = page.locator("tbody tr", has_text="spread_mappo")
    expect(row.locator("[data-name=done]")).to_have_text("100%")  # 41,600 of 40,000 env steps
    assert row.locator("a.row").evaluate("e => e.getClientRects().length") == 1  # on one line, beside long names
    shot(page, "runs")
    page.keyboard.press("/")
    page.keyboard.type("grpo seed=1")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.get_by_label("filter runs").fill("")
    page.get_by_role("button", name="run", exact=True).click()
    page.get_by_role("button", name="run ↓", exact=True).click()
    names = page.locator("a.row").all_inner_texts()
    assert names == sorted(names)
    page.locator("h1").click()
    page.get_by_label("filter runs").fill("kuhn_psro")
    page.get_by_label("filter runs").blur()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("kuhn_psro_exact")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("all runs")
    shot(page, "keys")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.locator("tbody tr")).to_have_count(12)


def test_runs_are_compared(look):
    page = look()
    for name in ("demo", "demo-2"):
        page.get_by_label(f"choose {name}", exact=True).check()
    page.get_by_role("button", name="compare 2 runs").click()
    expect(page.locator("table.diff tbody tr")).to_have_count(1)
    expect(page.locator("table.diff tbody tr")).to_contain_text("seed")
    first = page.locator("figure.chart").first
    expect(first).to_be_visible()
    assert first.bounding_box()["y"] < page.locator("table.diff").bounding_box()["y"]  # curves come first
    expect(first.locator(".legend > span")).to_have_count(4)  # training and the evaluation, of two runs
    shot(page, "compare")
    page.get_by_label("seeds as bands").check()
    expect(first.locator(".legend > span")).to_have_count(2)
    expect(first.locator(".legend")).to_contain_text("1 more seed")
    shot(page, "compare-seeds")


def test_settings_that_a_run_lacks_are_folded(look):
    page = look("#/compare?run=demo&run=spread_mappo")
    shared = page.locator("table.diff").first
    expect(shared.locator("tr", has_text="algorithm")).to_have_count(1)  # of another type: one row
    folded = page.locator("#difference > details")
    expect(folded.first.locator("> summary")).to_have_text(re.compile("settings of demo only"))
    expect(folded.first.locator("> .wide")).not_to_be_visible()
    folded.first.locator("> summary").click()
    expect(folded.first.locator("tr", has_text="policies.planner")).to_be_visible()


def test_runs_have_columns_of_settings_tags_and_groups_of_seeds(look):
    page = look()
    page.get_by_label("filter runs").fill("baseline")
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("tbody .tag").first).to_have_text("baseline")
    column = page.get_by_label("add a column of a setting")
    column.fill("rank")
    column.blur()
    expect(page.locator("tbody td[data-name=rank]").first).to_have_text("8")
    page.get_by_label("group by seed").check()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody td[data-name=seed]")).to_have_text("2 seeds")
    expect(page.locator("tbody td[data-name=result]")).to_have_text(re.compile(r"dev [\d.]+% \[[\d.]+%, [\d.]+%\]"))
    shot(page, "runs-grouped")
    page.get_by_label("remove the column rank").click()
    expect(page.locator("tbody td[data-name=rank]")).to_have_count(0)
    page.locator("tbody a.row").click()
    expect(page.locator("h1")).to_contain_text("2 runs")
    expect(page.get_by_label("seeds as bands")).to_be_checked()


# ---- curves


def test_curves_show_values_zoom_and_smoothing(look):
    asked: list[str] = []
    page = look("#/run/steady")
    page.on("request", lambda request: asked.append(request.url) if "api/curves" in request.url else None)
    chart = page.locator("[data-metric='metrics/success']")
    expect(chart.locator("canvas")).to_be_visible()
    settled(page)
    shot(page, "run")
    plot = chart.locator(".u-over")
    last = chart.locator(".legend b").first.inner_text()
    plot.hover(position={"x": 20, "y": 20})
    expect(chart.locator(".legend b").first).not_to_have_text(last)
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 40, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="show all again")).to_be_visible()
    settled(page)
    assert any("low=" in url and "high=" in url for url in asked)
    shot(page, "run-zoomed")
    page.get_by_role("button", name="show all again").click()
    page.get_by_label("smoothed over").select_option("51")
    expect(page).to_have_url(re.compile("smooth=51"))
    chart.locator(".plot").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(chart.locator(".legend b").first).not_to_have_text(last)
    page.get_by_label("over", exact=True).select_option("seconds")
    page.get_by_label("show metrics that contain").fill("entropy")
    expect(page.locator(".slot")).to_have_count(1)
    settled(page)
    shot(page, "run-entropy")


def test_visible_panels_are_loaded_first_and_all_before_a_print(look):
    asked: list[str] = []
    page = look("#/")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page.url.replace("#/", "#/run/steady"))
    expect(page.locator("canvas").first).to_be_visible()
    settled(page)
    curves = [url for url in asked if "api/curves" in url]
    assert 0 < len(curves) < page.locator(".slot").count()
    assert not [url for url in asked if "/episodes" in url or "/population" in url]
    expect(page.locator(".slot canvas")).to_have_count(page.locator(".slot").count())  # without scrolling


def test_a_chart_is_saved_as_picture_and_as_table(look):
    page = look("#/run/demo")
    with page.expect_download() as picture:
        page.get_by_label("save the chart entropy as a picture").click()
    assert picture.value.suggested_filename == "entropy.png"
    with Image.open(picture.value.path()) as image:
        assert image.width > 500 and len(image.getcolors(2**20)) > 20  # title, axes, two curves, a legend
    with page.expect_download() as table:
        page.get_by_label("save the values of entropy as a table").click()
    head, *rows = table.value.path().read_text().splitlines()
    assert head.startswith("training steps done,planner,planner (not smoothed)") and len(rows) == 4


def test_run_is_overlaid_on_another(look):
    page = look("#/run/demo")
    lines = page.locator("[data-metric='metrics/local_reward'] .legend > span")
    expect(lines).to_have_count(2)
    page.get_by_role("button", name="+ another run").click()
    page.get_by_label("a run to lay over this one").select_option("demo-2")
    expect(lines).to_have_count(4)
    page.get_by_label("take demo-2 away").click()
    expect(lines).to_have_count(2)


def test_growing_run_is_followed(look, runs):
    page = look("#/run/steady")
    expect(page.locator("dl.facts")).to_contain_text("300 of 400")
    expect(page.locator(".live")).to_have_count(0)  # no process writes it
    with Run.open(runs / "steady") as run:
        run.log_metrics(300, "team", {"success": 1.0})
        expect(page.locator("dl.facts")).to_contain_text("301 of 400")
        expect(page.locator("h1 .status")).to_contain_text("running")
        expect(page.locator(".live")).to_be_visible()
        expect(page.locator("dl.facts")).to_contain_text("left, about")
        shot(page, "run-live")


def test_vector_runs_have_curves_over_env_steps(look):
    page = look("#/run/spread_mappo")
    expect(page.get_by_label("over", exact=True)).to_have_value("env_steps")
    expect(page.locator("[data-metric='metrics/return'] canvas")).to_be_visible()
    settled(page)
    shot(page, "run-networks")


# ---- replays


def test_a_game_is_played_step_by_step(look):
    page = look("#/run/spread_mappo/replays")
    picture = page.locator(".replay img")
    expect(page.get_by_label("played")).to_contain_text("before training")
    expect(picture).to_have_attribute("alt", "step 0 of game 1")
    first = picture.get_attribute("src")
    page.get_by_label("step of the game").fill("24")
    expect(picture).to_have_attribute("alt", "step 24 of game 1")
    assert picture.get_attribute("src") != first
    expect(page.locator("article.replay")).to_contain_text("step 24 of 24 · truncated")
    page.get_by_label("frames per second").select_option("32")
    page.get_by_role("button", name="play", exact=True).click()  # back to the start; the game stood at its end
    expect(picture).to_have_attribute("alt", re.compile("step ([1-9]|1[0-9]) of"))
    expect(picture).to_have_attribute("alt", "step 24 of game 1")
    page.get_by_role("button", name="game 2").click()
    expect(picture).to_have_attribute("alt", "step 0 of game 2")
    expect(page.locator(".replay tbody tr")).to_have_count(3)
    page.get_by_label("played").select_option("before training")
    expect(picture).not_to_have_attribute("src", first)


@pytest.mark.parametrize("env", DRAWN_GAMES)
def test_envs_draw_their_games(look, env):
    page = look(f"#/run/games/replays?eval={env}")
    picture = page.locator(".replay img")
    expect(picture).to_be_visible()
    assert picture.evaluate("(image) => image.complete && image.naturalWidth") in (84, 240)
    page.get_by_label("step of the game").fill("12")
    shot(page, f"replay-{env}")


@pytest.mark.parametrize("env", GAMES_AS_TEXT)
def test_games_of_cards_and_dice_are_texts_with_their_moves(look, env):
    page = look(f"#/run/games/replays?eval={env}")
    expect(page.locator(".replay pre")).to_contain_text("player_0  ")
    moves = page.get_by_label("moves").get_by_role("button")
    moves.last.click()
    expect(moves.last).to_have_attribute("aria-current", "step")
    expect(page.locator("article.replay")).to_contain_text("terminated")
    shot(page, f"replay-{env}")


# ---- episodes


def test_episodes_are_filtered_and_searched(look):
    page = look("#/run/demo/episodes")
    counts = page.locator("[data-counts]")
    expect(counts).to_have_text("48 of 48 episodes")
    shot(page, "episodes")
    with page.expect_response(re.compile("outcome=failure")):
        page.get_by_label("outcome").select_option("failure")
    expect(counts).to_have_text(re.compile("episodes$"))
    failed = int(counts.inner_text().split()[0])
    assert page.locator("tbody .outcome.lost").count() == min(50, failed)
    page.get_by_label("outcome").select_option("success")
    expect(counts).to_have_text(f"{48 - failed} of 48 episodes")
    page.get_by_label("seat").select_option("planner")
    page.get_by_label("its reward from").fill("1.5")
    expect(page).to_have_url(re.compile("least=1.5"))
    page.get_by_role("button", name="clear filters").click()
    page.get_by_label("sorted by").select_option("total")
    expect(page).to_have_url(re.compile("sort=total"))
    settled(page)
    totals = [float(text.replace("−", "-")) for text in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert totals == sorted(totals, reverse=True)
    page.get_by_label("words seen or said").fill("walls")
    expect(counts).to_contain_text("found in")
    assert page.locator("tbody tr").count() > 0
    page.get_by_label("words seen or said").fill("nobody ever says this")
    expect(counts).to_contain_text("0 found in 48 of 48 episodes")
    shot(page, "episodes-searched")


def test_episode_page_shows_tree_texts_and_tokens(look):
    page = look("#/run/demo/episodes")
    page.locator("a.row").nth(1).click()
    nodes = page.locator(".tree .node")
    expect(nodes.first).to_be_visible()
    assert nodes.count() % 8 == 0  # eight siblings at every joint step
    assert page.locator(".tree .node.kept").count() == page.locator("ol.words > li").count()
    expect(page.locator("svg.cells.world").first).to_be_visible()
    expect(page.locator("ol.words .gains").first).to_contain_text("advantage")
    shot(page, "episode")
    page.locator(".tree").focus()
    chosen = page.locator(".tree .node.selected").get_attribute("data-node")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tree .node.selected")).not_to_have_attribute("data-node", chosen)
    page.locator(".tree .node.tried").first.click()
    expect(page.locator("ol.words > li")).to_have_count(1)
    page.get_by_label("tokens coloured by").select_option("logprob")
    token = page.locator(".token").first
    expect(token).to_have_attribute("title", re.compile("log-probability"))
    says = page.locator(".tokens").first.inner_text()
    assert says.endswith("<|end|>")
    shot(page, "episode-tokens")
    page.get_by_label("tokens coloured by").select_option("advantage")
    expect(token).to_have_attribute("title", re.compile("advantage"))
    page.get_by_label("text instead of pictures").check()
    expect(page.locator("svg.cells")).to_have_count(0)
    before = page.locator("article b").first.inner_text()
    page.locator("h1").click()
    page.keyboard.press("]")
    expect(page.locator("article b").first).not_to_have_text(before)
    page.get_by_text("← list").click()
    expect(page.locator("a.row").first).to_be_visible()


def test_debates_are_shown_in_columns(look):
    page = look("#/run/duel/episodes/2/0")
    expect(page.locator(".columns.of2").first).to_be_visible()
    pro, con = page.locator(".columns").first.locator(".turn").all()[:2]
    assert (
        abs(pro.bounding_box()["y"] - con.bounding_box()["y"]) < 2 and pro.bounding_box()["x"] < con.bounding_box()["x"]
    )
    shot(page, "episode-debate")


@pytest.mark.parametrize(
    ("number", "picture"),
    [
        (0, "svg.cells.board"),
        (1, "svg.cells.board"),
        (2, "svg.cells.sudoku"),
        (3, "svg.cells.world"),
        (4, "pre.code"),
        (5, "svg.cells.world"),
        (6, ".chat"),
    ],
)
def test_envs_have_their_own_renderings(look, number, picture):
    page = look(f"#/run/pictures/episodes/1/{number}")
    expect(page.locator(f".turn details {picture}").first).to_be_visible()
    expect(page.locator(".answer pre.code")).to_contain_text("print(n)")
    expect(page.locator("table.info")).to_contain_text("75% of the tests")
    expect(page.locator("table.info")).not_to_contain_text("{")  # nested values are laid out, not printed as JSON
    expect(page.locator(".answer .invalid")).to_contain_text("invalid: it prints nothing")
    shot(page, f"picture-{number}")


def test_an_env_that_declares_no_picture_keeps_its_text(look):
    page = look("#/run/pictures/episodes/1/7")
    expect(page.locator(".turn details")).to_contain_text("size 4 you r0 c0 goal r3 c3 and the secret word is heron")
    expect(page.locator("svg.cells")).to_have_count(0)


# ---- populations, agents, system, alarms


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("kuhn_psro_exact", ["Population", "Agents", "Curves", "Alarms", "System", "Config"]),
        ("spread_mappo", ["Curves", "Replays", "Agents", "Alarms", "System", "Config"]),
        ("demo", ["Curves", "Episodes", "Agents", "Alarms", "System", "Config"]),
    ],
)
def test_a_run_opens_on_the_first_of_its_pages(look, name, pages):
    page = look(f"#/run/{name}")
    tabs = page.get_by_role("navigation", name="pages of the run").locator("a")
    expect(tabs.first).to_have_attribute("aria-current", "page")
    assert tabs.all_inner_texts() == pages


def test_axes_have_names_and_units(look):
    page = look("#/run/demo")
    plot = page.locator("[data-metric='metrics/success'] .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("share of episodes, over training steps done"))
    legend = page.locator("[data-metric='metrics/success'] .legend")
    expect(legend).to_contain_text("search success (best of 8)")  # not one for the policies' actions alone
    expect(legend).to_contain_text("held-out dev")
    page = look("#/run/kuhn_psro_exact/curves")
    plot = page.locator("[data-metric='metrics/nash_conv'] .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("reward, all players together, over iterations"))
    titles = page.locator("figcaption").all_inner_texts()
    assert not [title for title in titles if "/" in title or "_" in title]


def test_population_page(look):
    page = look("#/run/kuhn_psro_exact")
    expect(page.locator("canvas")).to_be_visible()
    for title in (
        "Exploitability",
        "Payoffs",
        "Mixture of player_0 over time",
        "Response graph",
        "Elo among these members",
        "Timeline",
    ):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    shot(page, "population-psro")
    cell = page.locator("svg.heat").first.locator("g rect").first
    cell.hover(force=True)
    expect(page.locator(".hint", has_text="earns").first).to_be_visible()
    page = look("#/run/rps_league/population")
    expect(page.locator("svg.timeline rect").first).to_be_visible()
    expect(page.locator("svg.whisker").first).to_be_visible()
    shot(page, "population-league")
    page.get_by_label("showing").select_option("10")
    expect(page.locator(".hint", has_text="The newest 10 of").first).to_be_visible()


def test_agents_can_be_downloaded(look):
    page = look("#/run/demo/agents")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="after 4 steps").first.click()
    assert waiting.value.suggested_filename == "planner-step-4.zip"
    assert waiting.value.path().stat().st_size > 100_000
    steps = page.get_by_label("dev: to").locator("option").all_inner_texts()
    assert steps == ["before training", "after 2 steps", "after 4 steps"]  # numbered as in --checkpoint
    shot(page, "agents")
    page = look("#/run/rps_league/agents")
    expect(page.get_by_text("main_exploiter_0-").first).to_be_visible()
    shot(page, "agents-league")


def test_a_changed_held_out_instance_leads_to_both_transcripts(look):
    page = look("#/run/demo/agents")
    for first, second in ((0, 1), (0, 2), (1, 2)):  # of a run so short some evaluations may be equal
        page.get_by_label("dev: from").select_option(str(first))
        page.get_by_label("dev: to").select_option(str(second))
        if page.locator(".changes dd a").count():
            break
    group = page.locator(".changes > div", has=page.locator("dd a")).first
    marks = "✓○" if group.locator("dt").inner_text().startswith("newly") else "○✓"  # after, then before
    instance = group.locator("dd a").first.inner_text()
    group.locator("dd a").first.click()
    for mark in marks:
        expect(page.locator("article b").first).to_contain_text(f"instance {instance}")
        expect(page.locator(".tree .node").last).to_contain_text(mark)
        expect(page.locator("ol.words .answer").first).to_be_visible()
        page.get_by_role("link", name="the same instance").click()
    page.get_by_label("tokens coloured by").select_option("logprob")
    expect(page.locator(".token").first).to_be_visible()
    shot(page, "episode-held-out")
    page.get_by_text("← evaluations").click()
    expect(page.get_by_role("heading", name="What changed between two evaluations")).to_be_visible()


def test_a_population_at_its_beginning(look):
    page = look("#/run/beginning")
    expect(page.get_by_text("1 member", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Payoffs")).to_be_visible()
    expect(page.get_by_text("Every known payoff is 0.")).to_be_visible()
    expect(page.locator("canvas")).to_have_count(0)  # NashConv was not measured yet
    assert "e-9" not in page.locator("main").inner_text()
    shot(page, "population-beginning")


def test_system_and_alarm_pages(look, runs):
    with Run.open(runs / "demo"):
        page = look("#/run/demo/system")
        expect(page.get_by_text("writes the run", exact=True)).to_be_visible()
        expect(page.locator(".phase").first).to_be_visible()
        shot(page, "system")
    page = look("#/run/rps_league/system")
    workers = page.locator("[data-workers] tbody tr")
    expect(workers.first).to_contain_text("local worker")
    expect(workers.first).to_contain_text("ago")
    shot(page, "system-workers")
    page = look("#/run/alarming/alarms")
    expect(page.locator(".alarms li")).to_have_count(4)
    for name in ("lazy seat", "entropy collapse", "one seat carries the team", "episodes fail"):
        expect(page.get_by_role("heading", name=re.compile(name))).to_be_visible()
    expect(page.locator(".alarms li").first).to_contain_text("policy lazy")
    expect(page.locator(".alarms li").first).to_contain_text("97% of its groups")
    assert page.get_by_text("The rule:").count() == page.get_by_text("To try:").count() == 4
    expect(page.locator("table.rules tbody tr")).to_have_count(6)  # the rules that do not fire
    shot(page, "alarms")
    page = look("#/run/kuhn_psro_exact/alarms")
    expect(page.locator("table.rules")).to_contain_text("cyclic population")


# ---- accessibility and layout

PAGES = {
    "runs": "#/",
    "runs-grouped": "#/?seeds=1&columns=lr,rank",
    "compare": "#/compare?run=demo&run=demo-2",
    "compare-kinds": "#/compare?run=demo&run=spread_mappo",
    "curves": "#/run/demo",
    "curves-games": "#/run/spread_mappo",
    "replays": "#/run/spread_mappo/replays",
    "replays-text": "#/run/games/replays?eval=kuhn_poker",
    "episodes": "#/run/demo/episodes",
    "episode": "#/run/demo/episodes/4/1",
    "debate": "#/run/duel/episodes/2/0",
    "held-out": "#/run/demo/episodes/4/1?eval=dev&from=0",
    "population": "#/run/kuhn_psro_exact",
    "beginning": "#/run/beginning",
    "league": "#/run/rps_league",
    "agents": "#/run/demo/agents",
    "members": "#/run/rps_league/agents",
    "system": "#/run/demo/system",
    "alarms": "#/run/alarming/alarms",
    "config": "#/run/demo/config",
}
# Elements wider than a phone, each in a frame that scrolls, with nothing cut off: trees, heat maps, programs.
CUT_OFF = """() => [...document.querySelectorAll("main *")].filter((e) => e.clientWidth
    && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible'
    && !e.matches('.tree, pre, .plot, input, select, textarea')
    && !e.querySelector('svg.heat') && !e.closest('svg')).map((e) => e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("name", PAGES)
def test_layout_fits_a_phone_and_dark_mode(look, name):
    for device, width in (("desktop", 1280), ("phone", 390)):
        for dark in (False, True):
            page = look(PAGES[name], width=width, dark=dark)
            expect(page.locator("main h1")).to_be_visible()
            settled(page)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT_OFF) == []
            shot(page, f"pages/{name}-{device}-{'dark' if dark else 'light'}")


def test_timeline_is_legible_on_a_phone(look):
    page = look("#/run/rps_league", width=390)
    text = page.locator("svg.timeline text").first
    expect(text).to_have_text("main_0")
    settled(page)
    assert text.bounding_box()["height"] >= 11  # the text is not scaled down with the picture


def test_info_of_the_env_and_of_seats_are_apart(look):
    page = look("#/run/demo/episodes/4/1")
    rows = page.locator("table.info").first.locator("tr")
    expect(rows.first).to_contain_text("success")  # of all seats: above the names of seats
    names = page.locator("table.info").first.locator("tr", has_text="of seat")
    expect(names).to_contain_text("planner")


@pytest.mark.parametrize("name", PAGES)
def test_every_control_is_labelled_and_reachable_by_keyboard(look, name):
    page = look(PAGES[name])
    settled(page)
    nameless = """() => [...document.querySelectorAll('input, select, button, a')].filter(
        (e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement !== document.body")


def test_theme_is_remembered(look):
    page = look()
    button = page.locator("[data-theme-button]")
    button.click()
    button.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


# ---- attacks


def test_model_text_is_never_executed(look):
    from urllib.parse import quote

    run = f"#/run/{quote(EVIL_NAME, safe='')}"
    pages = ["#/", run, f"{run}/episodes", f"{run}/episodes/1/0?tokens=logprob", f"{run}/episodes/1/0?columns=1",
             f"{run}/episodes/1/1", f"{run}/population", f"{run}/agents", f"{run}/system", f"{run}/alarms",
             f"{run}/config", f"#/compare?run=demo&run={quote(EVIL_NAME, safe='')}"]  # fmt: skip
    for number, path in enumerate(pages):
        page = look(path)
        settled(page)
        page.mouse.wheel(0, 3000)
        settled(page)
        expect(page.locator("main")).to_contain_text("<img src=x")  # shown as plain text
        assert page.evaluate("() => window.hacked") is None
        assert page.locator("main img, main script, main iframe, [onerror]").count() == 0
        assert page.locator("a[href^='javascript:']").count() == 0
        if number in (1, 3):
            shot(page, f"hostile-{number}")


def test_url_injection_is_not_executed(look):
    for path in ("#/run/<img src=x onerror=window.hacked=1>", "#/<script>window.hacked=1</script>", "#/run/demo/none"):
        page = look(path)
        settled(page)
        assert page.evaluate("() => window.hacked") is None
    assert [text for text in look.wrong if "404" not in text] == []
    look.wrong.clear()  # the browser logs the missing run


def test_token_in_the_url_opens_the_page_and_is_removed(look, runs, tmp_path):
    with DashboardProcess(runs, tmp_path, "--token", "sesame") as address:
        home = address.removesuffix("?token=sesame")
        page = look("", address=home)
        expect(page.get_by_text("This page needs its token")).to_be_visible()
        assert all("401" in text for text in look.wrong)
        look.wrong.clear()
        page.get_by_label("Token").fill("sesame")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("tbody tr").first).to_be_visible()
        assert "sesame" not in page.url
        page.reload()
        expect(page.locator("tbody tr").first).to_be_visible()
