"""The page of a training server in a real browser, until the server is gone."""

import re
from pathlib import Path

import pytest
from helpers.processes import Server
from helpers.warm_processes import start_palestra

pytest.importorskip("playwright.sync_api")
from helpers.browsers import Looking, expect, launched, shot

from palestra.text.tinker.client import connect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
HEADINGS = ["Who is connected", "Queues", "Adapters in training", "Memory", "Shares of API keys", "Last errors"]


def test_page_follows_the_server_and_says_when_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    server = Server(tmp_path / "data")
    words = ["--root", str(tmp_path / "runs"), "--port", "0", "--engine", server.url]
    dashboard = start_palestra("dashboard", *words, with_stderr=False)
    try:
        found = re.match(r"dashboard: (\S+)/", dashboard.stdout.readline())
        assert found
        with launched() as browser:
            looking = Looking(browser)
            page = looking.open(found[1], "/#/")
            page.get_by_role("link", name="server").click()
            expect(page.get_by_role("heading", level=2)).to_have_text(HEADINGS)
            expect(page.get_by_text("No session has sent anything")).to_be_visible()
            engines = connect(server.url)
            expect(page.get_by_role("cell", name="anyone").first).to_be_visible()  # without a reload
            expect(page.get_by_role("cell", name="tiny")).to_be_visible()
            shot(page, "server")
            engines.connection.close()
            server.stop()
            expect(page.get_by_role("alert")).to_contain_text(f"the server at {server.url} does not answer")
            expect(page.get_by_role("alert")).to_contain_text("What follows is from")
            shot(page, "server-gone")
            looking.close()
    finally:
        dashboard.kill()
        dashboard.communicate()
        server.kill()
