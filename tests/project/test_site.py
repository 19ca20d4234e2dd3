"""The site as `make docs` builds it: without warnings, without other hosts, and with resolving links."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import palestra
from palestra.cli.main import app
from palestra.core.config import type_choices
from palestra.envs import TEXT_ENVS, VECTOR_ENVS
from palestra.populations.build.language import LanguagePopulationConfig
from palestra.text.config import TextConfig
from palestra.vector.config import VectorConfig

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Page(HTMLParser):
    """The resources that a page loads, its links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.ids |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found:
            self.loads.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_pages_load_nothing_from_other_hosts(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [address for address in page.loads if re.match(r"(https?:)?//", address)] == [], path
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8"), f"{path}: mermaid is fetched from elsewhere"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_every_internal_link_resolves(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        if path.name != "404.html":  # shown at any address
            assert list(_broken_links(site, path, page, pages)) == [], path


def _broken_links(site: Path, path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for link in [*page.links, *page.loads]:
        address, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", address):
            continue
        target = (path.parent / unquote(address)).resolve() if address else path
        there = target.is_file() and target.is_relative_to(site)
        if not there or (anchor and target in pages and unquote(anchor) not in pages[target].ids):
            yield link


def test_search_works_without_a_server(site: Path, pages: dict[Path, Page]) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    found = {entry["location"].partition("#")[0] for entry in json.loads(index.removeprefix("var __index = "))["docs"]}
    assert {"tutorial.html", "concepts.html", "reference/config.html", "coming-from/trl.html"} <= found
    readmes = {f"{path.relative_to(ROOT)}.html" for path in ROOT.glob("palestra/environments/*/README.md")}
    notes = {f"{path.relative_to(ROOT).with_suffix('.html')}" for path in ROOT.glob("results/*/notes.md")}
    assert {location for location in found if location.startswith("source/")} == {
        f"source/{path}" for path in readmes | notes
    }
    assert any("iframe-worker" in address for address in pages[site / "tutorial.html"].loads)


def test_reference_lists_every_key_and_type(site: Path) -> None:
    commands, config, envs, python = (
        (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        for name in ("cli", "config", "envs", "python")
    )
    for name in [
        *(group.name for group in app.registered_groups),
        *(c.name for c in app.registered_commands if c.name),
    ]:
        assert f"palestra {name}" in commands
    for model, field in ((TextConfig, "policies"), (TextConfig, "algorithm"), (VectorConfig, "policies")):
        assert all(f"{field}, type: {kind}" in config for kind in type_choices(model, field))
    assert all(f"algorithm, type: {kind}" in config for kind in type_choices(VectorConfig, "algorithm"))
    assert all(f"population, type: {kind}" in config for kind in type_choices(LanguagePopulationConfig, "population"))
    assert all(f'id="{name}"' in envs for name in [*TEXT_ENVS, *VECTOR_ENVS])
    assert all(
        f'id="palestra.{name}"' in python for name in ("core.types.Episode", "envs.base.Env", "runs.loop.run_training")
    )
    assert all(f"<td><code>{name}</code></td>" in python for name in palestra.__all__)


def test_linked_repository_files_are_pages(site: Path) -> None:
    shown = (site / "source" / "palestra" / "core" / "losses.py.html").read_text(encoding="utf-8")
    assert 'class="k">def' in shown
    listed = (site / "source/palestra/data/configs/games/index.html").read_text(encoding="utf-8")
    assert 'href="spread_mappo.yaml.html"' in listed
