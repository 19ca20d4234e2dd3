"""A headless Chromium, and helpers for its pages. Screenshots are kept in .cache/screenshots."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

expect.set_options(timeout=20_000)  # a busy machine may be slow
SHOTS = Path(__file__).parents[2] / ".cache" / "screenshots"
MAX_HEIGHT = 8000  # pixels of a window
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""


@contextmanager
def launched(*arguments: str) -> Iterator[Any]:
    """A browser started with these arguments; one at a time."""
    if not CHROMIUM:
        pytest.skip("no Chromium here: name one as CHROMIUM=/path/to/it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *arguments])
        yield browser
        browser.close()


class Looking:
    """Opens pages of servers here, each in its own window. `wrong` lists what went wrong on them: console errors,
    dialogs, requests to other servers."""

    def __init__(self, browser: Any) -> None:
        self.browser, self.wrong = browser, []

    def open(self, server: str, path: str, width: int = 1280, dark: bool = False, touch: bool = False) -> Any:
        colours, viewport = "dark" if dark else "light", {"width": width, "height": 850}
        context = self.browser.new_context(viewport=viewport, color_scheme=colours, has_touch=touch, is_mobile=touch)
        page = context.new_page()
        watch(page, server, self.wrong)
        page.goto(f"{server}{path}")
        return page

    def close(self) -> None:
        """Closes all windows. Raises AssertionError if anything went wrong."""
        for context in self.browser.contexts:
            context.close()
        assert self.wrong == []


def watch(page: Any, address: str, wrong: list[str]) -> None:
    """Records what goes wrong on a page of the server at `address`."""
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url))


def shot(page: Any, name: str) -> None:
    """Saves a picture of the whole page, in a window of the page's height: charts below the window's edge are not
    loaded."""
    path, size = SHOTS / f"{name}.png", page.viewport_size
    path.parent.mkdir(parents=True, exist_ok=True)
    height = page.evaluate("() => document.documentElement.scrollHeight")
    if height > size["height"]:
        page.set_viewport_size(size | {"height": min(height, MAX_HEIGHT)})
        page.wait_for_timeout(700)
    page.screenshot(path=path, full_page=True)
    page.set_viewport_size(size)


def settled(page: Any) -> None:
    page.wait_for_load_state("domcontentloaded")
    page.wait_for_timeout(700)  # events keep a connection open, so the network is never idle
