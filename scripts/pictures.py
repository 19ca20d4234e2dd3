"""Takes the pictures of the docs: curves of the demo, pages of the dashboard and `palestra play` in Chromium.

    python scripts/pictures.py [FOLDER]    first trains the runs that FOLDER (default: runs/pictures) does not have

Needs the extras `dashboard` and `dev` and a Chromium: CHROMIUM=/path/to/it, or one on the PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

sys.path.append(str(Path(__file__).parents[1]))
from palestra.evaluation.report.run_charts import plot_run
from results.ledger import absent

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PALESTRA = [sys.executable, "-m", "palestra"]
RUNS = {
    "demo": ["demo.yaml", "steps=12", "evals.dev.every=6", "save_episodes_every=1"],
    "psro": ["populations/kuhn_psro.yaml", "population.iterations=5"],
}
HOME_RUN = {"demo": ["demo.yaml"]}  # whose curves the docs' first page shows; takes minutes
ADDRESS = re.compile(r"http://\S+")
COLOURS = 128
SETTLE_MS = 1500  # a fixed wait: the event stream keeps a connection open, so the network is never idle


def train(folder: Path, runs: dict[str, list[str]]) -> None:
    """Trains the runs that `folder` does not have."""
    for name, (config, *changes) in runs.items():
        if not (folder / name).exists():
            settings = [part for change in changes for part in ("--set", change)]
            subprocess.run(
                [*PALESTRA, "train", f"configs/{config}", "--root", str(folder), "--name", name, *settings], check=True
            )


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Runs `palestra ARGUMENTS` as a server on a free port; yields its address, and ends it on exit."""
    command = [*PALESTRA, *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found.group() for line in process.stdout if (found := ADDRESS.search(line))).rstrip("/")
        finally:
            process.terminate()


def draw_curves(run: Path) -> None:
    """Draws the curves of a run as the docs' first page shows them."""
    path = DOCS / "assets" / "curves.png"
    shutil.copy(plot_run(run), path)
    _shrink(path)


def take_dashboard(page: Page, address: str) -> None:
    """Takes the pictures of a run, a population and an episode."""
    page.set_viewport_size({"width": 1120, "height": 760})
    _take(page, f"{address}/#/run/demo", "dashboard-run")
    page.set_viewport_size({"width": 1120, "height": 720})
    _take(page, f"{address}/#/run/psro", "dashboard-population")
    _take(page, f"{address}/#/run/demo/episodes/12/0", "dashboard-episode")


def take_game(page: Page, address: str) -> None:
    """Takes the picture of a game after two turns of the player."""
    page.set_viewport_size({"width": 900, "height": 720})
    page.goto(address)
    for turn in range(2):
        page.get_by_role("form", name=f"your turn {turn}").get_by_role("button", name="4", exact=True).click()
    page.get_by_role("form", name="your turn 2").wait_for()
    _save(page, "play")


def _take(page: Page, address: str, name: str) -> None:
    page.goto(address)
    _save(page, name)


def _save(page: Page, name: str) -> None:
    page.wait_for_timeout(SETTLE_MS)
    path = DOCS / f"{name}.png"
    page.screenshot(path=path)
    _shrink(path)
    page.goto("about:blank")  # closes the connection; otherwise the server would wait for it when it ends


def _shrink(path: Path) -> None:
    Image.open(path).quantize(COLOURS).save(path, optimize=True)  # a third of the bytes


def launch(driver: Any) -> Any:
    """Starts Chromium. Raises SystemExit if there is none."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        absent("a Chromium: set CHROMIUM=/path/to/it")
    return driver.chromium.launch(executable_path=path, args=["--no-sandbox"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "runs" / "pictures", help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="a smoke test: only says whether Chromium starts")
    options = parser.parse_args()
    folder = options.folder
    if options.quick:
        with sync_playwright() as driver:
            launch(driver).close()
        return
    train(folder, RUNS)
    train(folder / "home", HOME_RUN)
    draw_curves(folder / "home" / "demo")
    with sync_playwright() as driver:
        browser = launch(driver)
        page = browser.new_page()
        with serving("dashboard", "--root", str(folder)) as address:
            take_dashboard(page, address)
        with serving("play", "text_connect_four", "--seats", "player_1=expert", "--browser") as address:
            take_game(page, address)
        browser.close()


if __name__ == "__main__":
    main()
