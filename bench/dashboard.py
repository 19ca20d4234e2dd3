"""Measures how fast the dashboard opens a large run and responds, in a real browser.

    python bench/dashboard.py                     about 4 minutes: 10,000 steps, 100,000 episodes
    python bench/dashboard.py --steps 1000        about half a minute
    python bench/dashboard.py --root FOLDER       writes the run to FOLDER, or uses the one that is there

The run is written through palestra's own `Run`. Each page is opened in a new page with an empty browser cache. An
interaction is timed in the page, from the event to the second frame after its answer is drawn. The best of several
repeats is reported, since other load on the machine only adds time. The last line is JSON. Needs playwright and a
Chromium (CHROMIUM=/path/to/it).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

from palestra.runs import Run, load_episodes

sys.path.append(str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.long_runs import write_long_run

from results.ledger import absent, finish

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = {"runs": ("#/", "a.row"), "curves": ("#/run/long", "canvas"), "episodes": ("#/run/long/episodes", "a.row")}

# Records the server's answers in the page, so that a list drawn before the answer came is not taken for the answer.
HEARD = """const ask = window.fetch; window.heard = [];
window.fetch = async (...asked) => {
    const said = await ask(...asked);
    window.heard.push(String(asked[0]));
    return said;
};"""
# Milliseconds from the event to the second frame after its answer is drawn: what a person waits.
ACT = """([selector, value, asks, shows]) => new Promise((resolve) => {
    window.heard.length = 0;
    const began = performance.now(), field = document.querySelector(selector);
    const watch = new MutationObserver(() => {
        const there = document.querySelector(shows);
        if (!there || there.textContent.endsWith("…") || (asks && !heard.some((one) => one.includes(asks)))) return;
        watch.disconnect();
        requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - began)));
    });
    watch.observe(document.querySelector("#app"), { subtree: true, childList: true, characterData: true });
    if (value === null) return void field.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value").set.call(field, value);
    field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input", { bubbles: true }));
})"""
HOVER = """() => new Promise((resolve) => {
    const over = document.querySelector(".u-over"), box = over.getBoundingClientRect(), began = performance.now();
    const at = { clientX: box.x + 100 * Math.random(), clientY: box.y + 30, bubbles: true };
    over.dispatchEvent(new MouseEvent("mousemove", at));
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - began)));
})"""

# Actions on the list, in this order: name, selector, value chosen or typed (None: a click), part of the request's URL.
COUNTS, LINE = "[data-counts]", "ol.words > li"
SEAT, NEXT = "form.filters label:nth-of-type(2) select", "div.bar:last-of-type > button:last-of-type"
ACTS: list[tuple[str, str, str | None, str]] = [
    ("filter by outcome", "select[name=outcome]", "success", "outcome=success"),
    ("filter by reward, a key pressed", "input[name=least]", "1", "least=1"),
    ("filter by seat", SEAT, "planner", "seat=planner"),
    ("sort by reward", "select[name=sort]", "total", "sort=total"),
    ("sort by turns", "select[name=sort]", "turns", "sort=turns"),
    ("next page", NEXT, None, "first=50"),
]
INTERACTION = 100  # milliseconds
OTHERS = ("open one", "open one that was hovered", "another node", "filter, a step was just written", "hover")
TARGETS = {name: INTERACTION for name in [*(act[0] for act in ACTS), *OTHERS]}


def main() -> None:
    arguments = parsed()
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        absent("a Chromium: set CHROMIUM=/path/to/it")
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root or Path(folder) / "runs"
        if not (root / "long").exists():
            console.print(f"writing {arguments.steps} steps of 10 episodes")
            write_long_run(root, steps=arguments.steps)
        rows = measured(root, Path(folder) / "cache", arguments.repeats)
    table = Table("", "best", "worst", title=f"{arguments.steps} steps, {10 * arguments.steps} episodes")
    for name, seconds in rows.items():
        table.add_row(name, *(f"{1000 * value:,.0f} ms" for value in (min(seconds), max(seconds))))
    console.print(table)
    figures = {name: round(1000 * min(seconds)) for name, seconds in rows.items()}
    finish("dashboard", figures, TARGETS, is_stored=not arguments.quick, unit="ms")


console = Console()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="100 steps, everything once: a smoke test")
    parser.add_argument("--root", type=Path, default=None)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.repeats = 100, 1
    return options


def measured(root: Path, cache: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each figure, one value for each repeat. Each repeat starts a new server, which opens the run for the
    first time; from the second repeat on, the index of episodes is in the cache."""
    rows: dict[str, list[float]] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(repeats):
            for name, seconds in one(browser, root, cache).items():
                rows.setdefault(name, []).append(seconds)
        browser.close()
    return rows


def one(browser: Any, root: Path, cache: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for page_name, (path, there) in PAGES.items():
        server, address = served(root, cache)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 850})
            page.add_init_script(HEARD)
            open_it = partial(opened, page, address + path, there)
            found[f"{page_name}: open, server just started"] = timed(open_it)
            found[f"{page_name}: first paint"] = first_paint(page)
            page.goto("about:blank")
            found[f"{page_name}: open again"] = timed(open_it)
            if page_name == "curves":
                found["hover"] = max(page.evaluate(HOVER) for _ in range(5)) / 1000
            if page_name == "episodes":
                found |= interactions(page, address, root / "long")
            page.close()
        finally:
            server.terminate()
            server.communicate()
    return found


def interactions(page: Any, address: str, run: Path) -> dict[str, float]:
    start = time.monotonic()
    while "not looked through" in page.inner_text(COUNTS):
        page.wait_for_timeout(100)
    found = {"episodes: until all are looked through": time.monotonic() - start}
    for name, selector, value, asks in ACTS:
        found[name] = act(page, selector, value, asks, COUNTS)
    listed(page, address)
    written_again(run)
    found["filter, a step was just written"] = act(page, ACTS[0][1], "failure", "outcome=failure", COUNTS)
    listed(page, address)
    found["open one"] = act(page, "a.row", None, "", LINE)
    found["another node"] = act(page, ".tree .node.tried", None, "/words/", LINE)
    listed(page, address)
    page.hover("tbody tr:nth-child(3) a.row")
    page.wait_for_timeout(300)
    found["open one that was hovered"] = act(page, "tbody tr:nth-child(3) a.row", None, "", LINE)
    return found


def act(page: Any, *what: str | None) -> float:
    """Seconds of one interaction, begun after the page was idle for 0.2 s."""
    page.wait_for_timeout(200)
    return float(page.evaluate(ACT, list(what))) / 1000


def listed(page: Any, address: str) -> None:
    page.goto("about:blank")
    opened(page, f"{address}#/run/long/episodes", "a.row")
    page.wait_for_timeout(1500)  # until the event stream has sent its first message


def written_again(path: Path) -> None:
    """Writes the episodes of the newest step again, as a run in progress writes a step."""
    newest = max((path / "episodes").glob("step-*.parquet"))
    with Run.open(path) as run:
        run.write_episodes(int(newest.stem.removeprefix("step-")), load_episodes(newest))


def opened(page: Any, address: str, there: str) -> None:
    page.goto(address, wait_until="commit")
    page.wait_for_selector(there)


def first_paint(page: Any) -> float:
    script = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(page.evaluate(script)) / 1000


def timed(act: Callable[[], Any]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def served(root: Path, cache: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", "from palestra.cli.main import app; app()", "dashboard"]
    command += ["--root", str(root), "--port", "0"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    found = re.search(r"dashboard: (\S+)", server.stdout.readline())
    assert found
    return server, found[1]


if __name__ == "__main__":
    main()
