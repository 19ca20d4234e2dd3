"""Shared by all tests: one torch thread, so that timings and sums do not depend on the machine's cores."""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import learning
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never downloads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

pytest_plugins = ["helpers.first_tests", "helpers.few_cases"]

LONG_S = 12.0  # about the time from which a test is slow

# Their packages conflict with others of palestra's: `make test-envs` runs them in a venv that has them.
collect_ignore = [] if find_spec("envpool") else ["envs/adapters/peers/vector"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reseed", type=int, default=0, metavar="N", help="give all generators other seeds")
    parser.addoption("--only-learning", action="store_true", help="run the tests that check_score compares")


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPU from tests that are not made for it: their numbers are those of a CPU."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "not slow" in config.option.markexpr:
        settings.load_profile("fast")
    if config.option.reseed:
        learning.reseed(config.option.reseed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leaves what the tests import, over a million objects, out of garbage collection, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only_learning:
        items[:] = [item for item in items if "check_score" in getattr(item, "fixturenames", ())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names tests that take long and are not marked slow; on a busy machine any test may."""
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.duration > LONG_S]
    for report in sorted(passed, key=lambda report: -report.duration):
        if "slow" not in report.keywords:
            terminalreporter.write_line(f"took {report.duration:.0f} s and is not marked slow: {report.nodeid}")


@pytest.fixture
def check_score(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares what a test learned with its bar in learning_scores.json: check_score(value, name="")."""
    return lambda value, name="": learning.check_score(request.node.nodeid, name, value)


settings.register_profile("palestra", deadline=None)  # a busy machine may be slow
settings.register_profile("fast", settings.get_profile("palestra"), max_examples=30)
settings.load_profile("palestra")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random base model, as `save_pretrained` writes it."""
    return write_base(tmp_path_factory.mktemp("bases") / "small", seed=0)


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second base of another width and depth."""
    shape = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 96}
    return write_base(tmp_path_factory.mktemp("bases") / "other", seed=1, **shape)


def write_base(folder: Path, seed: int, **shape: object) -> Path:
    from palestra.testing import tiny_lm  # imports torch: only for the tests that need it

    # large weights: the last layer is not trained, and its logits must differ
    engine = tiny_lm(seed, initializer_range=0.2, **shape)
    engine.model.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    return folder
