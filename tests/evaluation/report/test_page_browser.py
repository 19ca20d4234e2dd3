"""The page of a run in a real browser: legible charts, in light and dark mode. Screenshots are kept in
.cache/screenshots."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import palestra

from palestra.evaluation.report.page import write_report
from palestra.runs import Run

pytest.importorskip("playwright.sync_api")
from helpers.browsers import launched, shot, watch

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

# For every chart, its displayed image as elements of the page: the boxes of its texts and of itself, and the colours.
LOOK = """() => [...document.querySelectorAll("figure img")].map(img => {
  const text = new TextDecoder().decode(Uint8Array.from(atob(img.currentSrc.split(",")[1]), c => c.charCodeAt(0)));
  const svg = document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  const title = img.alt;
  img.parentElement.replaceWith(svg);
  const box = part => { const r = part.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
  const texts = [...svg.querySelectorAll("text")];
  return {
    title, box: box(svg),
    texts: texts.map(part => [part.textContent, ...box(part)]),
    turned: texts.some(part => /rotate\\((?!-?0[ )])/.test(part.getAttribute("transform"))),
    ink: texts.map(part => getComputedStyle(part).fill),
    lines: [...svg.querySelectorAll("g[id^=curve] > path")].map(part => getComputedStyle(part).stroke),
  }
})"""


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


def write_run(root: Path) -> None:
    """A run of language agents with difficult values: large and tiny ones, gaps, many policies, long names."""
    rng = np.random.default_rng(0)
    names = ["planner", "executor", "critic of what both of them say", *(f"helper-{i}" for i in range(5))]
    config = "name: awkward\nseed: 1\nsteps: 300\nenv: {type: maze}\nalgorithm: {type: grpo}\n"
    with Run.create(root, config, "awkward") as run:
        for step in range(300):
            rise = step / 300
            team = {"success": min(1.0, rise + rng.random() / 5), "team_return": 1e5 * rise + 1e6}
            run.log_metrics(step, "team", team)
            for k, name in enumerate(names):
                own = {"local_reward": k * rise, "team_reward": rise, "entropy": 2 - rise, "kl": 1e-5 * rng.random()}
                own |= {"zero_std_fraction": 0.5, "policy_loss": 123456.0 + rng.random(), "tokens": 1000.0 + k}
                run.log_metrics(step, name, own | {"invalid": None if 50 < step < 200 else 0.1})
            run.log_timings(step, "team", {"rollout_s": 1.0, "tokens_per_s": 12_345 + 100 * rng.random()})
        for step in range(-1, 300, 43):
            result = {"success": max(0.0, step / 300), "episodes": 50, "steps_per_episode": 3.0}
            returns = {"returns": {"red": step / 30, "blue": -step / 30}, "returns_ci95": {"red": 1.0, "blue": 1.0}}
            run.log_eval(step, "held_out", result | returns)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root)
    options = ("--root", root, "--backend", "inline")
    palestra("train", "configs/populations/kuhn_psro_exact.yaml", "--name", "psro", *options, *small("iterations=6"))
    palestra("train", "configs/populations/rps_league.yaml", "--name", "league", *options, *small("slices=4"))
    return root


def small(setting: str) -> tuple[str, str]:
    return "--set", f"population.{setting}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["awkward", "psro", "league"])
def test_charts_are_legible(browser: Any, runs: Path, tmp_path: Path, name: str, scheme: str) -> None:
    page, wrong = opened(browser, write_report(runs / name, tmp_path / "page.html"), scheme)
    shot(page, f"report-{name}-{scheme}")
    charts = page.evaluate(LOOK)
    assert charts and wrong == []
    paper = colour(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    for chart in charts:
        assert [text for text, *box in chart["texts"] if not inside(box, chart["box"])] == [], chart["title"]
        assert chart["turned"] or overlapping(chart["texts"]) == [], chart["title"]
        assert all(contrast(colour(ink), paper) > 4.5 for ink in chart["ink"]), chart["title"]
        assert all(contrast(colour(line), paper) > 1.2 for line in chart["lines"]), chart["title"]


def opened(browser: Any, page_file: Path, scheme: str) -> tuple[Any, list[str]]:
    page = browser.new_context(viewport={"width": 1280, "height": 850}, color_scheme=scheme).new_page()
    wrong: list[str] = []
    watch(page, "file://", wrong)
    page.goto(page_file.as_uri())
    return page, wrong


def inside(box: list[float], frame: list[float]) -> bool:
    return box[0] >= frame[0] - 1 and box[1] >= frame[1] - 1 and box[2] <= frame[2] + 1 and box[3] <= frame[3] + 1


def overlapping(texts: list[list[Any]]) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes overlap by more than a pixel; the height of a line exceeds that of its letters."""
    found = []
    for i, (one, left, top, right, bottom) in enumerate(texts):
        for other, *box in texts[:i]:
            across, down = min(right, box[2]) - max(left, box[0]), min(bottom, box[3]) - max(top, box[1])
            if across > 1 and down > 3:
                found.append((one, other))
    return found


def colour(css: str) -> tuple[float, float, float]:
    red, green, blue = (float(part) / 255 for part in css[css.index("(") + 1 : -1].split(",")[:3])
    return red, green, blue


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """The contrast ratio of WCAG 2.2: 1 for equal colours, 21 for black on white."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
