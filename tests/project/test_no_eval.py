"""No text from outside is evaluated: every call in the package that could run text or data as code is reviewed."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import palestra

PACKAGE = Path(palestra.__file__).parent

# Functions that evaluate text, or build objects from bytes, by the last part of their name.
NAMES = {"eval", "exec", "compile", "__import__", "execfile", "runpy"}
METHODS = {
    "import_module",
    "sympify",
    "parse_expr",
    "lambdify",
    "Unpickler",
    "run_module",
    "run_path",
    "spec_from_loader",
}
METHODS |= {
    "spec_from_file_location",
    "FunctionType",
    "InteractiveInterpreter",
    "read_pickle",
    "unsafe_load",
    "full_load",
}
LOADERS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml", "torch"}  # their load and loads
PRETRAINED = {"from_pretrained", "from_config", "get_class_from_dynamic_module"}  # may run a model's own code
NUMPY = {"np", "numpy"}  # whose load may unpickle

# File and call, how often, and why it runs no text of a model or a client in this process.
REVIEWED = {
    ("__init__.py", "import_module"): (1, "one of our own two packages"),
    ("core/lazy_names.py", "import_module"): (1, "names from our own tables"),
    ("parallel/local.py", "pickle.loads"): (1, "the worker that the parent process sent to its own child"),
    ("text/training/episode_tasks.py", "pickle.loads"): (
        1,
        "episodes that a worker of this run left in its temporary folder",
    ),
    ("core/config/user_modules.py", "import_module"): (1, "modules named by the config, or by our own tables"),
    ("core/config/tree.py", "yaml.load"): (1, "by a loader derived from SafeLoader"),
    ("sandbox/fork_server.py", "import_module"): (1, "our own grader, named by this process on a socket of its own"),
    ("environments/code/checker.py", "eval"): (1, "runs in the sandbox"),
    ("environments/code/checker.py", "exec"): (2, "runs in the sandbox"),
    ("environments/code/checker.py", "compile"): (2, "runs in the sandbox"),
    ("environments/code/harness.py", "eval"): (5, "runs in the sandbox"),
    ("environments/code/harness.py", "exec"): (2, "runs in the sandbox"),
    ("environments/code/harness.py", "compile"): (2, "runs in the sandbox"),
    ("environments/code/test_runner.py", "compile"): (1, "compiles our own file harness.py and runs nothing"),
    ("environments/tools/repl_driver.py", "eval"): (1, "runs in the sandbox"),
    ("environments/tools/repl_driver.py", "exec"): (1, "runs in the sandbox"),
    ("environments/tools/repl_driver.py", "compile"): (2, "runs in the sandbox"),
    ("envs/batch/subproc_vector.py", "pickle.loads"): (
        1,
        "the env maker that the parent process sent to its own child",
    ),
    ("sandbox/boot.py", "exec"): (1, "runs in the sandbox"),
    ("sandbox/boot.py", "compile"): (1, "runs in the sandbox"),
    ("sandbox/boot.py", "marshal.loads"): (1, "orders from the parent process, before the program starts"),
    ("sandbox/program.py", "compile"): (1, "compiles our own file boot.py and runs nothing"),
}
# Programs kept as text, which `ast` parses as strings: all of them run in the sandbox.
PROGRAMS = {"environments/math/env.py": 2, "sandbox/program.py": 1, "environments/code/test_runner.py": 1}


def evaluating_call(node: ast.AST) -> str | None:
    """The name of a call that could run text or data as code."""
    if isinstance(node, ast.ClassDef):
        return next(
            (base.attr for base in node.bases if isinstance(base, ast.Attribute) and base.attr in METHODS), None
        )
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Name):
        return called.id if called.id in NAMES | METHODS else None
    if not isinstance(called, ast.Attribute):
        return None
    owner = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr in METHODS:
        return called.attr
    if owner in {"builtins"} and called.attr in NAMES:
        return called.attr
    if called.attr in {"load", "loads", "load_all"} and owner in LOADERS:
        return None if owner == "torch" and _passes(node, "weights_only", True) else f"{owner}.{called.attr}"
    if called.attr == "load" and owner in NUMPY and not _passes(node, "allow_pickle", False):
        return "numpy.load" if any(word.arg == "allow_pickle" for word in node.keywords) else None
    if called.attr in PRETRAINED:
        return None if _passes(node, "trust_remote_code", False) else called.attr
    return "trust_remote_code" if any(word.arg == "trust_remote_code" for word in node.keywords) else None


def _passes(node: ast.Call, name: str, value: bool) -> bool:
    found = [word.value for word in node.keywords if word.arg == name]
    return bool(found) and isinstance(found[0], ast.Constant) and found[0].value is value


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def found_in(nodes: list[ast.AST], file: str) -> Counter[tuple[str, str]]:
    return Counter((file, name) for node in nodes if (name := evaluating_call(node)))


def aliases(nodes: list[ast.AST]) -> list[str]:
    """Names by which a file could call one of these functions without being found here."""
    watched = NAMES | METHODS | {"loads", "load"}
    modules = LOADERS | {"importlib", "sympy.parsing.sympy_parser", "builtins", "code", "runpy"}
    hidden = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            hidden += [f"{node.module}.{one.name}" for one in node.names if one.asname or one.name in {"loads", "load"}]
        if isinstance(node, ast.Import):
            hidden += [one.name for one in node.names if one.asname and one.name in modules]
        if isinstance(node, ast.Assign | ast.NamedExpr) and isinstance(node.value, ast.Name | ast.Attribute):
            last = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            hidden += [last] if last in watched - {"load", "compile"} else []
    return hidden


@cache
def package():
    """The nodes of each file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): nodes_of(path.read_text("utf-8")) for path in files}


def test_every_call_that_can_execute_text_is_reviewed():
    found = sum((found_in(nodes, file) for file, nodes in package().items()), Counter())
    assert dict(found) == {call: times for call, (times, _) in REVIEWED.items()}
    assert all(reason for _, reason in REVIEWED.values())


def test_models_are_loaded_without_their_own_code_and_by_one_module_of_the_package():
    root = PACKAGE.parent
    loaders = {
        "palestra/engine/bases/pretrained.py",
        "bench/peers/jaxmarl_qmix.py",  # the peer's config is of no model
        "scripts/architectures.py",  # peft's, of an adapter that the script saved
    }
    loading, unsafe = set(), []
    folders = ("palestra", "scripts", "bench", "results")
    for path in [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]:
        file = path.relative_to(root).as_posix()
        for node in nodes_of(path.read_text("utf-8")):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            loading |= {file} if name in PRETRAINED else set()
            if isinstance(node, ast.Call) and evaluating_call(node) in PRETRAINED:
                unsafe.append(f"{file}:{node.lineno}")
    assert {file for file in loading if file.startswith("palestra/")} == {"palestra/engine/bases/pretrained.py"}
    assert [place for place in unsafe if place.partition(":")[0] not in loaders] == []


def test_executing_functions_have_no_aliases():
    assert {file: names for file, nodes in package().items() if (names := aliases(nodes))} == {}


def test_program_sources_as_text_are_in_the_sandbox_only():
    def calls(nodes):
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return sum(text.count("exec(") + text.count("eval(") for text in texts)

    assert {file: number for file, nodes in package().items() if (number := calls(nodes))} == PROGRAMS


def test_search_finds_known_patterns():
    hostile = """
import pickle, marshal, torch, yaml, sympy, importlib
eval(a); exec(a); compile(a, "", "eval"); __import__(a); importlib.import_module(a); sympy.sympify(a)
sympy.parse_expr(a); pickle.loads(a); marshal.loads(a); torch.load(a); torch.load(a, weights_only=False); yaml.load(a)
numpy.load(a, allow_pickle=True); Model.from_pretrained(a, trust_remote_code=True)
AutoConfig.from_pretrained(a); AutoModel.from_config(a, trust_remote_code=b)
"""
    assert sum(found_in(nodes_of(hostile), "x.py").values()) == 16
    harmless = "torch.load(a, weights_only=True); json.loads(a); re.compile(a); model.eval()"
    harmless += "; Model.from_pretrained(a, trust_remote_code=False)"
    assert not found_in(nodes_of(harmless), "x.py")
    assert aliases(nodes_of("from pickle import loads\nimport pickle as p\nrun = eval\n")) == [
        "pickle.loads",
        "pickle",
        "eval",
    ]
