"""Rooms import lower floors only, without cycles, and modules that must start fast do not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "palestra"

# Floors of rooms, bottom to top: a room imports lower floors only, and rooms of one floor do not know each other.
FLOORS = (
    {"core"},
    {"sandbox", "parallel"},
    {"runs", "envs", "engine"},
    {"service", "environments"},
    {"text", "vector"},
    {"populations"},
    {"evaluation"},
    {"api", "dashboard"},
    {"cli"},
)
ROOMS = {room for floor in FLOORS for room in floor}
FORBIDDEN = {("vector", "engine"), ("vector", "service"), ("service", "runs")}  # although the floors allow it
BY_NAME = "environments"  # the registry of palestra.envs finds them: nobody imports them
WIRE = "palestra.service.wire"  # what `text` may import of the service
MAX_ARROWS = 67  # pairs of rooms of which one imports the other
ROOT_MODULES = {"__init__", "__main__", "testing"}
MAX_LINES = 500  # of a module
DATA = "data"  # bases and configs, with the programs that configs name
LIGHT = (  # they load no torch; a run starts without it
    "palestra.core",
    "palestra.sandbox",
    "palestra.runs",
    "palestra.envs",
    "palestra.text.rollouts",
    "palestra.text.training.trainer",
    "palestra.text.training.async_rollouts",
    "palestra.populations",
    "palestra.dashboard",
    "palestra.cli",
)
NOT_LIGHT = (
    "palestra.core.losses",
    "palestra.core.accel",
    "palestra.text.rollouts.dataset_source",
    "palestra.populations.workers",
    "palestra.populations.build",
)
WITHOUT_EXTRAS = (
    "palestra.cli.main",
    "palestra.text.build.build",
    "palestra.evaluation.evaluate",
    "palestra.evaluation.report.run_report",
    "palestra.runs.loop",
    "palestra.envs",
)
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "vllm",
    "requests",
    "httpx",
    "httpx2",
    "aiohttp",
    "http.client",
    "opentelemetry",
    "urllib.request",
)
# Not in `dependencies`: at most one module of palestra may import each, except those of the `service` extra, which all
# of `palestra.service` and nothing else may import. The dashboard shares its web server.
SERVICE = {
    "fastapi",
    "google",
    "httpx",
    "jwt",
    "python_multipart",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "zstandard",
}
WEB = {"starlette", "uvicorn"}
PROMETHEUS = ("palestra.service.server.metrics", "palestra.runs.sinks.prometheus")  # metrics of a server and of a run
WHOLE_PACKAGES = ("palestra.parallel.ray", "palestra.envs.adapters.pettingzoo")  # packages that count as one module
GRPC = {"grpc", "grpc_health", "grpc_reflection"}  # likewise of the package `palestra.envs.remote`
TALKS_HTTP = (
    "palestra.text.tinker.connection",
    "palestra.core.http.completions",
    "palestra.core.http.server",
    "palestra.core.http.chat_client",
    "palestra.text.samplers.vllm",
    "palestra.text.samplers.server",
)
SHARED = ("palestra.testing", *TALKS_HTTP, *PROMETHEUS)
SERVERS = {"palestra.api.agents.serve"}  # loaded only by its own command
OPTIONAL = (
    SERVICE
    | GRPC
    | {
        "ale_py",
        "envpool",
        "highway_env",
        "imageio_ffmpeg",
        "jax",
        "jaxmarl",
        "vmas",
        "aiohttp",
        "datasets",
        "jsonschema",
        "math_verify",
        "prometheus_client",
        "sympy",  # installed with either of the two
        "reasoning_gym",
        "sandlock",
        "textarena",
        "verifiers",
        "websockets",
        "gguf",
        "bitsandbytes",
        "triton",  # installed with torch for CUDA
        "gymnasium",
        "mcp",
        "mlflow",
        "opentelemetry",
        "numba",
        "openai",
        "openskill",
        "peft",
        "pettingzoo",
        "pyspiel",
        "ray",
        "tensorboard",
        "tinker",
        "vllm",
        "trackio",
        "wandb",
    }
)


class Import(NamedTuple):
    """One import: its module, the imported name, its line, and whether loading the module runs it."""

    importer: str
    target: str
    line: int
    in_function: bool
    typing_only: bool

    @property
    def at_load(self) -> bool:
        return not self.in_function and not self.typing_only

    @property
    def extra(self) -> bool:
        return self.target.split(".")[0] in OPTIONAL

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, Path]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name]
    return {_name(path): path for path in paths if not path.is_relative_to(PACKAGE / DATA)}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> list[Import]:
    return [found for name, path in modules().items() for found in _imports(name, path)]


def imports_of(module: str) -> list[Import]:
    """Returns the imports of one module."""
    return _by_importer().get(module, [])


@cache
def _by_importer() -> dict[str, list[Import]]:
    found: dict[str, list[Import]] = {}
    for one in imports():
        found.setdefault(one.importer, []).append(one)
    return found


def _imports(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, in_function, typing_only in _statements(tree):
        for target in _targets(node, name, path.name == "__init__.py"):
            yield Import(name, target, getattr(node, "lineno", 0), in_function, typing_only)


def _statements(
    node: ast.AST, in_function: bool = False, typing_only: bool = False
) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yields the statements below a node, and whether each is in a function, and in `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typed = typing_only or _is_type_checking(child)
            yield child, inside, typed
            yield from _statements(child, inside, typed)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _targets(node: ast.AST, name: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = name.split(".") if is_package else name.split(".")[:-1]
        base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
        base = base if node.level else str(node.module)
        for alias in node.names:  # `from palestra.envs import text` imports a module, `... import Env` does not
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base


@cache
def ours() -> list[Import]:
    return [found for found in imports() if found.target.split(".")[0] == "palestra"]


def room_of(module: str) -> str:
    """Returns the room of a module; "" for the modules of the package root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


@cache
def floor_of(room: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room in floor)


def between_rooms() -> Iterator[tuple[str, str, Import]]:
    """Yields the imports of one room by another."""
    for found in ours():
        importer, target = room_of(found.importer), room_of(found.target)
        if importer and target and importer != target:
            yield importer, target, found


@cache
def reached(start: str) -> dict[str, list[str]]:
    """Every module that loading `start` imports, with the chain of palestra's modules that leads to it."""
    chains, waiting = {start: [start]}, [start]
    while waiting:
        module = waiting.pop()
        for found in imports_of(module):
            if found.at_load:
                for target in _with_parents(found.target):
                    if target not in chains:
                        chains[target] = [*chains[module], target]
                        waiting.append(target)
    return chains


def _with_parents(target: str) -> list[str]:
    """Importing a.b.c loads a and a.b too."""
    parts = target.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def test_every_internal_import_exists() -> None:
    assert [str(found) for found in ours() if found.target not in modules()] == []


def test_modules_are_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_package_has_fifteen_rooms() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT_MODULES
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(ROOMS) == 15 and folders == ROOMS | {DATA}
    assert [path for path in PACKAGE.rglob("*") if path.is_symlink()] == []


def test_rooms_import_lower_floors_only() -> None:
    assert [str(found) for one, other, found in between_rooms() if floor_of(other) >= floor_of(one)] == []
    assert [str(found) for one, other, found in between_rooms() if (one, other) in FORBIDDEN or other == BY_NAME] == []
    of_service = [found for one, other, found in between_rooms() if (one, other) == ("text", "service")]
    assert [str(found) for found in of_service if not f"{found.target}.".startswith(f"{WIRE}.")] == []


def test_rooms_have_few_arrows() -> None:
    assert len({(one, other) for one, other, _ in between_rooms()}) <= MAX_ARROWS


def test_no_two_parts_of_a_room_import_each_other() -> None:
    """Parts are the sub-folders of a room and the modules beside them; what a room's `__init__` gives is above them."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for found in ours():
        room, importer, target = room_of(found.importer), found.importer.split("."), found.target.split(".")
        if room and room == room_of(found.target) and len(importer) > 2 and len(target) > 2:
            pairs.setdefault((f"{room}/{importer[2]}", f"{room}/{target[2]}"), []).append(str(found))
    mutual = {pair: pairs[pair] for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs}
    assert mutual == {}


def test_there_is_no_import_cycle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for found in ours():  # imports inside functions too: they hide a cycle, but do not remove it
        edges[found.importer].add(found.target)
    while free := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in free:
            del edges[name]
    assert edges == {}, f"these modules import each other in a circle: {sorted(edges)}"


@pytest.mark.parametrize("prefix", LIGHT)
def test_light_modules_do_not_import_heavy_ones(prefix: str) -> None:
    """Statically, through all of palestra's modules: a run must start without torch installed."""
    light = [name for name in modules() if _below(name, prefix) and not any(_below(name, one) for one in NOT_LIGHT)]
    chains = [chain for name in light for target, chain in reached(name).items() if _heavy(target)]
    assert [" -> ".join(chain) for chain in chains] == []


def _below(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{prefix}.")


def _heavy(target: str) -> bool:
    return any(f"{target}.".startswith(f"{name}.") for name in HEAVY)


@pytest.mark.parametrize("module", [name for name in ("palestra", *LIGHT) if name in modules()])
def test_light_modules_do_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_optional_dependencies_are_imported_by_one_module() -> None:
    users: dict[str, set[str]] = {}
    for found in imports():
        dependency = found.target.split(".")[0]
        if found.extra and dependency not in SERVICE | GRPC and found.importer not in SHARED:
            users.setdefault(dependency, set()).add(_whole(found.importer))
    assert {dependency: names for dependency, names in users.items() if len(names) > 1} == {}


def _whole(module: str) -> str:
    """Returns the package that counts as one module for optional dependencies, or the module itself."""
    return next((name for name in WHOLE_PACKAGES if module.startswith(f"{name}.")), module)


def test_service_dependencies_are_imported_in_the_service_only() -> None:
    users = [found for found in imports() if found.target.split(".")[0] in SERVICE and not _serves(found.importer)]
    users = [found for found in users if not (_shows(found.importer) and found.target.split(".")[0] in WEB)]
    assert [str(found) for found in users if found.importer not in ("palestra.testing", *TALKS_HTTP)] == []


def test_grpc_is_imported_in_remote_envs_only() -> None:
    users = [found for found in imports() if found.target.split(".")[0] in GRPC]
    assert [str(found) for found in users if not found.importer.startswith("palestra.envs.remote.")] == []


def _serves(module: str) -> bool:
    return f"{module}.".startswith(("palestra.service.", "palestra.text.tinker."))


def _shows(module: str) -> bool:
    return f"{module}.".startswith("palestra.dashboard.")


def test_importing_the_package_loads_no_extra() -> None:
    """A module may import an extra at its top only if it is loaded on request. That holds for all of the service, the
    dashboard, compiled modules, and modules that talk to other machines."""
    asked = [found for found in imports() if found.at_load and (_serves(found.importer) or _shows(found.importer))]
    needing = {found.importer for found in [*asked, *(found for found in imports() if found.at_load and found.extra)]}
    needing |= compiled() | _talking() | SERVERS
    loaded = [found for found in ours() if found.at_load and found.target in needing and found.importer not in needing]
    assert [str(found) for found in loaded] == []


def _talking() -> set[str]:
    """Returns the modules of `palestra.envs.remote` that cannot be loaded without an extra."""
    own = [name for name in modules() if name.startswith("palestra.envs.remote.")]
    return {name for name in own if {target.split(".")[0] for target in reached(name)} & OPTIONAL}


def test_compiled_extras_are_not_loaded_by_default() -> None:
    assert compiled() & set(WITHOUT_EXTRAS) == set()


@cache
def compiled() -> set[str]:
    """The modules that load a compiler, where one is installed."""
    return {name for name in modules() if "palestra.core.accel.jit" in reached(name)}


def test_function_level_imports_are_extras_or_cli_only() -> None:
    late = [found for found in imports() if found.in_function and not found.extra and not _may_delay(found)]
    assert [str(found) for found in late] == []


def _may_delay(found: Import) -> bool:
    """True for rooms from `text` up, which are loaded when used (`--help` does not wait for torch), for modules
    that need an extra, and for modules that run inside a sandbox, which load as little as possible."""
    if found.importer.startswith("palestra.sandbox."):
        return True
    over_an_extra = any(below.extra for below in imports_of(found.target))
    return over_an_extra or floor_of(room_of(found.importer) or "cli") >= floor_of("text")
