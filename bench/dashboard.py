"""How fast the dashboard opens a large run, in a real browser.

    python bench/dashboard.py                     about 4 minutes: 10,000 steps, 100,000 episodes
    python bench/dashboard.py --steps 1000        about half a minute
    python bench/dashboard.py --root FOLDER       keeps the run there, and takes the one that is there

The run is written through palestra's own `Run`. Each page is opened anew, with nothing kept by the browser; an
interaction is timed in the page, from the event to the second frame after its answer is drawn. The best of several
repeats is told: others who use the machine only ever make it slower. Needs playwright and a Chromium
(CHROMIUM=/path/to/it).
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from long_runs import write_long_run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = {"runs": ("#/", "a.row"), "curves": ("#/run/long", "canvas"), "episodes": ("#/run/long/episodes", "a.row")}

# From the event to the second frame after the list has changed: what a person waits.
WATCH = """(act) => new Promise((resolve) => {
    const list = document.querySelector("main"), began = performance.now();
    const watch = new MutationObserver(() => {
        const counts = document.querySelector("[data-counts]").textContent;
        if (counts.endsWith("…")) return;
        watch.disconnect();
        requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - began)));
    });
    watch.observe(list, { subtree: true, childList: true, characterData: true });
    const [selector, value] = act, field = document.querySelector(selector);
    Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value").set.call(field, value);
    field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input", { bubbles: true }));
})"""
HOVER = """() => new Promise((resolve) => {
    const over = document.querySelector(".u-over"), box = over.getBoundingClientRect(), began = performance.now();
    const at = { clientX: box.x + 100 * Math.random(), clientY: box.y + 30, bubbles: true };
    over.dispatchEvent(new MouseEvent("mousemove", at));
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - began)));
})"""
FILTERS = {
    "by outcome": ("form.filters select[name=outcome]", ("success", "failure")),
    "sort": ("form.filters select[name=sort]", ("total", "turns")),
}


def main() -> None:
    arguments = parsed()
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


console = Console()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=None)
    return parser.parse_args()


def measured(root: Path, cache: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each figure. The server is started anew for each repeat, so that it opens the run as if for the first
    time; from the second on the index of episodes is in the cache."""
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
            open_it = partial(opened, page, address + path, there)
            found[f"{page_name}: open, server just started"] = timed(open_it)
            found[f"{page_name}: first paint"] = first_paint(page)
            page.goto("about:blank")
            found[f"{page_name}: open again"] = timed(open_it)
            if page_name == "curves":
                found["curves: hover"] = max(page.evaluate(HOVER) for _ in range(5)) / 1000
            if page_name == "episodes":
                found |= interactions(page, address)
            page.close()
        finally:
            server.terminate()
            server.communicate()
    return found


def interactions(page: Any, address: str) -> dict[str, float]:
    start = time.monotonic()
    while "not looked through" in page.inner_text("[data-counts]"):
        page.wait_for_timeout(100)
    found = {"episodes: until all are looked through": time.monotonic() - start}
    for name, (selector, values) in FILTERS.items():
        times = [page.evaluate(WATCH, [selector, value]) / 1000 for value in values]
        found[f"episodes: {name}"] = max(times)
    page.goto(f"{address}#/run/long/episodes")
    page.wait_for_selector("a.row")
    found["episodes: open one"] = timed(lambda: (page.click("a.row >> nth=0"), page.wait_for_selector(".tree .node")))
    return found


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
    command = [sys.executable, "-c", "from palestra.cli import app; app()", "dashboard", str(root), "--port", "0"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    found = re.search(r"dashboard: (\S+)", server.stdout.readline())
    assert found
    return server, found[1]


if __name__ == "__main__":
    main()
