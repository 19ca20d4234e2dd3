"""A plugin of pytest for `make check`: `--first` runs the first test of every file, and so touches every part once."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true", help="run only the first test of every file that -m and -k leave")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all but the first test of every file if `--first` is given."""
    if not config.getoption("first"):
        return
    first = {item.path: item for item in reversed(items)}
    config.hook.pytest_deselected(items=[item for item in items if first[item.path] is not item])
    items[:] = first.values()
    items.reverse()
