"""Games played by a person in a real browser, by keyboard and by touch. Screenshots are kept in .cache/screenshots."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.processes import playing

pytest.importorskip("playwright.sync_api")
from helpers.browsers import Looking, expect, launched, settled, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Look(Looking):
    """Opens the page of a play server: `look(address, width=390, dark=True)`."""

    def __call__(self, address: str, width: int = 1280, dark: bool = False, touch: bool = False) -> Any:
        return self.open(address.removesuffix("/play"), "/play", width, dark, touch)


@pytest.fixture
def look(chromium: Any) -> Iterator[Look]:
    looking = Look(chromium)
    yield looking
    looking.close()


@pytest.fixture(scope="module")
def four() -> Iterator[str]:
    with playing("text_connect_four", "--seats", "player_1=expert") as (_, address):
        yield address


def test_game_is_played_by_keyboard(look, four):
    page = look(four)
    expect(page.locator("h1")).to_have_text("text_connect_four")
    expect(page.locator(".chip.mine")).to_have_text("player_0: you")
    field = page.get_by_role("textbox")
    for turn in range(21):
        question = page.get_by_role("form", name=f"your turn {turn}")
        expect(question.or_(page.get_by_role("heading", name="The game is over"))).to_be_visible()
        if not question.is_visible():
            break
        expect(field).to_be_focused()
        if turn == 2:
            shot(page, "play-asked")
        page.keyboard.type(page.locator(".moves button").first.inner_text())
        page.keyboard.press("Enter")
        expect(question).not_to_be_visible()
    expect(page.get_by_role("region", name="the end")).to_contain_text("return of player_0 (you)")
    expect(page.locator(".turn b").filter(has_text="player_1").first).to_be_visible()
    shot(page, "play-over")
    expect(page.get_by_role("button", name="another game")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("form", name="your turn 0")).to_be_visible()


def test_game_is_played_by_touch_in_dark_mode(look, four):
    page = look(four, width=390, dark=True, touch=True)
    moves = page.locator(".moves button")
    expect(moves).to_have_count(7)
    moves.nth(3).tap()
    expect(page.get_by_role("form", name="your turn 1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [moves.nth(i).bounding_box() for i in range(7)]
    assert all(box["width"] >= 40 and box["height"] >= 40 for box in boxes)
    settled(page)
    shot(page, "play-phone")
    page.reload()  # the game continues
    expect(page.get_by_role("form", name="your turn 1")).to_be_visible()
    page.get_by_role("button", name="give up").tap()
    expect(page.get_by_role("heading", name="You gave up")).to_be_visible()
    shot(page, "play-phone-over")


def test_two_pages_play_two_games(look, four):
    one, two = look(four), look(four)
    one.locator(".moves button").first.click()
    expect(one.get_by_role("form", name="your turn 1")).to_be_visible()
    expect(two.get_by_role("form", name="your turn 0")).to_be_visible()


def test_multiline_answers_and_escaped_text(look, tmp_path):
    evil = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    config = tmp_path / "kuhn.yaml"
    config.write_text(
        f"""
env: {{type: text_kuhn, rendering: full}}
policies:
  player_0: {{type: random}}
  player_1: {{type: scripted, answers: ["{evil} I have seen my card #### bet"]}}
"""
    )
    with playing(config, "--seed", 1) as (_, address):
        page = look(address, dark=True)
        field = page.get_by_role("textbox")
        expect(field).to_be_focused()
        assert "I have seen" not in page.content()
        page.keyboard.type(evil)
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("#### pass")
        expect(field).to_have_value(f"{evil}\n#### pass")
        page.keyboard.press("Enter")
        expect(page.get_by_role("form", name="your turn 1")).to_be_visible()
        assert "I have seen" not in page.content()
        shot(page, "play-words")
        page.get_by_role("button", name="pass", exact=True).click()
        expect(page.get_by_text("I have seen")).to_be_visible()
        assert page.locator("article img, article script").count() == 0
        assert page.evaluate("window.hacked") is None
        expect(page.locator(".answer .text").first).to_contain_text("<img src=x")
        page.close()  # before its server ends, which would be an error on the page


def test_lost_server_is_reported(look):
    with playing("sudoku", "--env", "size=4") as (process, address):
        page = look(address)
        expect(page.get_by_role("form", name="your turn 0")).to_be_visible()
        shot(page, "play-sudoku")
        process.terminate()
        process.wait(timeout=20)
        expect(page.get_by_text("the server does not answer")).to_be_visible()
        look.wrong.clear()  # the browser's own message about the connection


def test_a_game_of_two_policies_is_watched_and_paused(look):
    """The turns of both seats appear by themselves; a paused game stands still until it goes on."""
    with playing("text_connect_four", "--watch", "--seats", "player_0=random", "--seats", "player_1=expert") as (_, at):
        page = look(at)
        expect(page.locator(".chip")).to_have_text(["player_0: random", "player_1: expert"])
        turns = page.locator(".turn")
        expect(turns.nth(1)).to_be_visible()
        page.get_by_role("button", name="pause").click()
        expect(page.get_by_role("button", name="go on")).to_be_visible()
        page.wait_for_timeout(1500)  # for the turn that had begun
        standing = turns.count()
        page.wait_for_timeout(2500)
        assert turns.count() == standing >= 2
        shot(page, "play-watched")
        page.get_by_role("button", name="go on").click()
        expect(turns.nth(standing)).to_be_visible()
        expect(page.get_by_role("region", name="the end")).to_contain_text("return of player_1", timeout=90_000)
        assert page.get_by_text("(you)").count() == 0
        shot(page, "play-watched-over")
        page.close()  # before its server
