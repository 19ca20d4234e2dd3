"""A plugin of pytest for `@pytest.mark.few(n)`: only `n` cases of a test with parameters are fast, the others slow.

They are evenly spaced from the first to the last, so that a few cases of several parameters have most of their values.
"""

import pytest

ELSEWHERE = ("slow", "gpu", "clients", "peers", "browser", "wheel")


@pytest.hookimpl(tryfirst=True)  # before `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but a few cases of each test with the mark as slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not any(map(item.get_closest_marker, ELSEWHERE)):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("few")
        assert mark is not None
        fast = spaced(len(found), mark.args[0])
        for place, item in enumerate(found):
            if place not in fast:
                item.add_marker(pytest.mark.slow)


def spaced(total: int, number: int) -> set[int]:
    """Returns `number` places among `total`, evenly spaced from the first to the last."""
    if number == 1:
        return {0}
    return {round(i * (total - 1) / (number - 1)) for i in range(number)}
