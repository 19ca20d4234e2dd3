"""Imports point down the layers, without cycles, and modules that must start fast do not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "palestra"

# Bottom to top; the longest prefix of a name decides the layer. Packages of one row may not import each other.
LAYERS = [
    {
        "palestra",
        "palestra.types",
        "palestra.config",
        "palestra.files",
        "palestra.jit",
        "palestra.onednn",
        "palestra.processes",
        "palestra.seeding",
        "palestra.tinker_compat",
        "palestra.tracing",
    },
    {"palestra.chat", "palestra.sandbox"},
    {"palestra.web", "palestra.runs.worker_stats"},
    {"palestra.envs", "palestra.losses", "palestra.policies.base", "palestra.policies.scripted"},
    {"palestra.engine", "palestra.tabular", "palestra.nets"},
    {"palestra.policies"},
    {"palestra.runs"},
    {"palestra.rollouts", "palestra.learners"},
    {"palestra.algorithms", "palestra.populations"},
    {"palestra.training"},
    {"palestra.backends"},
    {"palestra.service", "palestra.remote"},
    {"palestra.sinks", "palestra.mirror"},
    {"palestra.builders"},
    {"palestra.workers"},
    {"palestra.launch"},
    {"palestra.report"},
    {"palestra.evaluation", "palestra.experiments"},
    {"palestra.dashboard", "palestra.agents"},
    {"palestra.api"},
    {"palestra.cli"},
    {"palestra.__main__"},
    {"palestra.testing"},
]
WITHIN_ROW = {("palestra.policies.scripted", "palestra.policies.base")}
MAX_ROOT_MODULES = 12
MAX_LINES = 400  # of a module
LIGHT = (
    "palestra.types",
    "palestra.rollouts.tree_rollout",
    "palestra.populations",
    "palestra.training.loop",
    "palestra.training.text",
    "palestra.training.async_rollouts",
)
WITHOUT_EXTRAS = (
    "palestra.cli.main",
    "palestra.builders.text",
    "palestra.evaluation.evaluate",
    "palestra.report.run_report",
    "palestra.training.loop",
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
PROMETHEUS = ("palestra.service.api.metrics", "palestra.sinks.prometheus")  # metrics of a server and of a run
WHOLE_PACKAGES = ("palestra.backends.ray", "palestra.envs.vector.pettingzoo")  # packages that count as one module
GRPC = {"grpc", "grpc_health", "grpc_reflection"}  # likewise of the package `palestra.remote`
TALKS_HTTP = (
    "palestra.service.client.connection",
    "palestra.web.completions",
    "palestra.web.server",
    "palestra.web.chat_client",
    "palestra.remote.samplers.vllm",
    "palestra.remote.samplers.server",
)
SHARED = ("palestra.testing", *TALKS_HTTP, *PROMETHEUS)
SERVERS = {"palestra.agents.serve"}  # loaded only by its own command
OPTIONAL = (
    SERVICE
    | GRPC
    | {
        "ale_py",
        "envpool",
        "highway_env",
        "jax",
        "jaxmarl",
        "vmas",
        "aiohttp",
        "datasets",
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
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name}


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


@cache
def level(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        for number, layer in enumerate(LAYERS):
            if ".".join(parts[:end]) in layer and (end > 1 or len(parts) == 1):
                return number
    raise AssertionError(f"{module} is in no layer: add it to LAYERS, at the height its imports allow")


def package_of(module: str) -> str:
    return max((name for name in LAYERS[level(module)] if f"{module}.".startswith(f"{name}.")), key=len)


def allowed(found: Import) -> bool:
    above, below = level(found.importer), level(found.target)
    pair = (found.importer, found.target)
    return below < above or package_of(found.importer) == package_of(found.target) or pair in WITHIN_ROW


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


def test_the_package_root_has_few_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_MODULES


def test_modules_are_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_imports_point_down_the_layers() -> None:
    assert [str(found) for found in ours() if not allowed(found)] == []


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
    light = [name for name in modules() if f"{name}.".startswith(f"{prefix}.")]
    chains = [chain for name in light for target, chain in reached(name).items() if _heavy(target)]
    assert [" -> ".join(chain) for chain in chains] == []


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


def test_grpc_is_imported_in_remote_only() -> None:
    users = [found for found in imports() if found.target.split(".")[0] in GRPC]
    assert [str(found) for found in users if not found.importer.startswith("palestra.remote.")] == []


def _serves(module: str) -> bool:
    return f"{module}.".startswith("palestra.service.")


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
    """Returns the modules of `palestra.remote` that cannot be loaded without an extra."""
    own = [name for name in modules() if name.startswith("palestra.remote.")]
    return {name for name in own if {target.split(".")[0] for target in reached(name)} & OPTIONAL}


def test_compiled_extras_are_not_loaded_by_default() -> None:
    assert compiled() & set(WITHOUT_EXTRAS) == set()


@cache
def compiled() -> set[str]:
    """The modules that load a compiler, where one is installed."""
    return {name for name in modules() if "palestra.jit" in reached(name)}


def test_function_level_imports_are_extras_or_cli_only() -> None:
    late = [found for found in imports() if found.in_function and not found.extra and not _may_delay(found)]
    assert [str(found) for found in late] == []


def _may_delay(found: Import) -> bool:
    """True for modules from `builders` up, which are loaded when used (`--help` does not wait for torch), for modules
    that need an extra, and for modules that run inside a sandbox, which load as little as possible."""
    if found.importer.startswith("palestra.sandbox."):
        return True
    over_an_extra = any(below.extra for below in imports_of(found.target))
    return over_an_extra or level(found.importer) >= level("palestra.builders")
