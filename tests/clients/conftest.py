"""One server for all official clients. These tests are run by `make test-clients` alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.official import BASES, PROGRAMS, Official, seed_hub
from helpers.processes import Server

from palestra.engine.bases.names import resolve_base

LONG = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-35B-A3B")  # of these recipes ask for more than the tiny base's 2,048 tokens
LENGTH = 16_384


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    root = tmp_path_factory.mktemp("official")
    seed_hub(root / "hf")
    served = {base: "long" if base in LONG else "tiny" for base in BASES}
    yield from serve_bases(root, served, "--base", "tiny=tiny", "--base", f"long={lengthened(root / 'long')}")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    root = tmp_path_factory.mktemp("smollm2")
    seed_hub(root / "hf", dict.fromkeys(BASES, Path(resolve_base("smollm2"))))
    yield from serve_bases(root, dict.fromkeys(BASES, "smollm2"), "--base", "smollm2=smollm2")


@pytest.fixture(scope="session")
def recipe_data(official: Official, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which recipes are started; their datasets are in the cache of `official`."""
    folder = tmp_path_factory.mktemp("recipes")
    official.run("c", str(PROGRAMS / "seed_datasets.py"), str(folder))
    return folder


def serve_bases(root: Path, served: dict[str, str], *options: str) -> Iterator[Official]:
    aliases = [option for public, base in served.items() for option in ("--alias", f"{public}={base}")]
    server = Server(root / "data", *options, *aliases)
    yield Official(server.url, root / "hf")
    server.process.terminate()
    server.process.communicate(timeout=120)
    assert server.process.returncode == 0


def lengthened(folder: Path) -> Path:
    """The tiny base with a longer context."""
    shutil.copytree(resolve_base("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
    return folder
