"""Programs and tests that try to earn a reward without solving the task: none does, with any judge."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_code import ADD, play, scripted_pair, write

from palestra.environments.code.env import CoderTester
from palestra.environments.code.test_runner import ProgramSpec, ProgramTest, ProgramTestRunner
from palestra.sandbox import ResourceLimits

LIMITS = ResourceLimits(wall=5, cpu=5, memory=128 * 2**20, disk=16 * 2**20)
SQUARES = (3, 10, -4)
JUDGES: dict[str, tuple[ProgramTest, ...]] = {
    "stdin": tuple(ProgramTest(f"{n}\n", f"{n * n + 1}.0\n") for n in SQUARES),
    "function": (
        *(ProgramTest(f"({n},)", str(n * n + 1)) for n in SQUARES),
        ProgramTest("(0.5,)", "1.25"),
        ProgramTest("([],)", "[{1: 2}]"),
    ),
    "assertion": (
        *(ProgramTest(f"assert abs(f({n}) - {n * n + 1}) < 1e-6") for n in SQUARES),
        ProgramTest("assert f(2) in (5, 5.0) and not f(2) != 5"),
        ProgramTest("assert not abs(f(3) - 10) > 1e-6"),
        ProgramTest("assert not (f(3) < 10 or 10 < f(3))"),
        ProgramTest("import math\nassert not math.fabs(f(3) - 10) >= 1e-6"),
        ProgramTest("assert not [f(3), 1] < [10, 1] and not [f(3), 1] > [10, 1]"),
        ProgramTest("assert sorted(f([])) == [1, 2] and len(f([])) == 2"),
        ProgramTest("try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass"),
        ProgramTest("for n in (6, 7):\n    assert str(f(n)) == str(n * n + 1)"),
    ),
}
# How each program returns or prints its result; ANYTHING is applied to every argument.
FORMS = {"stdin": "{hack}\nprint(ANYTHING)", "function": "{hack}\ndef f(x): return ANYTHING"}
FORMS["assertion"] = FORMS["function"]

OBJECT = """
class Object{base}:
    def _yes(self, *_): return True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    def _self(self, *_): return self
    __sub__ = __rsub__ = __add__ = __abs__ = __getitem__ = __iter__ = __next__ = __call__ = __round__ = _self
    def __hash__(self): return 1
    def __len__(self): return 2
    def __repr__(self): return "8"
    __str__ = __format__ = __repr__
ANYTHING = Object({value})
"""
FORGE = """
import os
texts = ("ok\\n", "ok\\n8", "ok\\ntrue", "ok\\nNaN", 'ok\\n["list"]', "waiting\\n", "")
for n in range(7):
    for name in (f"{n}", f"{n}.out"):
        open(name, "w").write(texts[n])
open("asked", "w").write("ok\\n"); open("built", "w").write("ok\\n")
"""
LOOK = """
import gc, os, sys
found = []
def look(text):
    for sign in ("expected", "'10", "101", "17.0", "1.25", "assert", "[1, 2]", "ProgramTest("):
        at = str(text).find(sign)
        if at >= 0: found.append(str(text)[at:at + 30])
"""
HACKS: dict[str, str] = {
    "exit with 0": "import os; os._exit(0)",
    "system exit": "raise SystemExit(0)",
    "forged results": f"{FORGE}\nos._exit(0)",
    "forged results, then killed": f"{FORGE}\nos.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
    "forged results, written last": f"""
import atexit, threading, time
{FORGE}
def forge():
    for n in range(7): open(f"{{n}}", "w").write(texts[n])
atexit.register(forge)
threading.Timer(0.05, forge).start()
if os.fork() == 0:
    time.sleep(0.2); forge(); os._exit(0)
ANYTHING = 8""",
    "links and folders for results": """
import os
for n in range(9):
    for name in (str(n), f"{n}.out"):
        if os.path.exists(name): os.remove(name)
        os.symlink("/dev/zero", name) if n % 3 else os.mkfifo(name)
os._exit(0)""",
    "equal to all": OBJECT.format(base="", value=""),
    "an integer equal to all": OBJECT.format(base="(int)", value="8"),
    "a text equal to all": OBJECT.format(base="(str)", value="'x'"),
    "a list equal to all": OBJECT.format(base="(list)", value="[8]"),
    "a dict equal to all": OBJECT.format(base="(dict)", value="{8: 8}"),
    "another class than it says": """
class Object:
    __class__ = int
    def __eq__(self, other): return True
ANYTHING = Object()""",
    "pickled as a call": "class Object:\n    def __reduce__(self): return (eval, ('10',))\nANYTHING = Object()",
    "frames": f"""{LOOK}
frame = sys._getframe()
while frame:
    look(repr((frame.f_locals, frame.f_globals))); frame = frame.f_back
ANYTHING = found or 0""",
    "objects in memory": f"{LOOK}\nfor one in gc.get_objects():\n    if isinstance(one, (str, tuple)): look(one)\n"
    "ANYTHING = found or 0",
    "files and descriptors": f"""{LOOK}
for number in range(64):
    try: look(os.read(number, 10**6))
    except OSError: pass
for folder, _, names in os.walk("."):
    for name in names: look(open(os.path.join(folder, name), errors="replace").read())
ANYTHING = found or 0""",
    "the parent's memory": f"""{LOOK}
for pid in ("self", os.getppid()):
    for name in ("cmdline", "environ", "maps", "mem", "stat"):
        try: look(open(f"/proc/{{pid}}/{{name}}", errors="replace").read(10**6))
        except OSError: pass
ANYTHING = found or 0""",
    "builtins": """
import builtins
for name in ("abs", "sorted", "len", "str", "repr", "isinstance", "type", "map", "open", "print"):
    setattr(builtins, name, lambda *_, **__: 10)
ANYTHING = 8""",
    "modules": """
import json, math, random, sys
math.fabs = math.isclose = json.dumps = json.loads = random.seed = lambda *_, **__: 10
for module in list(sys.modules.values()):
    for name in ("encode_value", "write_result", "error_text", "_end", "_encode_result"):
        if hasattr(module, name): setattr(module, name, lambda *_, **__: "10")
ANYTHING = 8""",
    "imports": """
import sys
class Anything:
    def find_spec(self, *_): return None
    def __getattr__(self, name): return lambda *_, **__: True
for name in ("json", "ast", "random", "math", "os"): sys.modules[name] = Anything()
sys.meta_path.insert(0, Anything())
ANYTHING = 8""",
    "tracing": """
import sys
def trace(frame, event, arg):
    for name in ("expected", "tests", "right", "ok"):
        if name in frame.f_locals: frame.f_locals[name] = True
    return trace
sys.settrace(trace); sys.setprofile(trace)
ANYTHING = 8""",
    "signals": """
import os, signal
for one in (signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU, signal.SIGCHLD):
    signal.signal(one, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.01)
ANYTHING = 8""",
    "not a number": "ANYTHING = float('nan')",
    "infinite": "ANYTHING = float('inf')",
    "much output": "import sys\nANYTHING = '10 ' * 3_000_000\nprint(ANYTHING); print(ANYTHING, file=sys.stderr)",
    "deep nesting": "ANYTHING = []\nfor _ in range(100_000): ANYTHING = [ANYTHING]",
    "holds itself": "ANYTHING = [10]\nANYTHING.append(ANYTHING)",
    "recursion": "import sys\nsys.setrecursionlimit(10**8)\ndef g(n): return g(n + 1)\nANYTHING = g(0)",
    "an assertion's error": "raise AssertionError",
    "a group of errors": "raise BaseExceptionGroup('all', [SystemExit(0), AssertionError()])",
    "no ordinary error": "raise KeyboardInterrupt",
    "without end": "import itertools\nANYTHING = itertools.count()",
    "a placeholder": "class PendingValue: pass\nANYTHING = PendingValue()",
    "all in one": "ANYTHING = [10, 101, 17, 5, 37, 50, 1.25, {1: 2}, None, True, ...]",
    "nothing": "ANYTHING = ''",
}


@pytest.mark.parametrize("name", HACKS)
def test_hacking_program_passes_no_test(lab: ProgramTestRunner, name: str) -> None:
    async def judged() -> dict[str, Any]:
        codes = {kind: ProgramSpec(form.format(hack=HACKS[name]), kind, "f") for kind, form in FORMS.items()}  # type: ignore[arg-type]
        made = await asyncio.gather(*(lab.run_tests(codes[kind], JUDGES[kind], LIMITS) for kind in JUDGES))
        return dict(zip(JUDGES, made, strict=True))

    for kind, made in asyncio.run(judged()).items():
        passed = [case for case, trial in zip(JUDGES[kind], made.results, strict=True) if trial.passed]
        assert len(made.results) == len(JUDGES[kind]) and not passed, kind


def test_correct_program_passes_all_tests(lab: ProgramTestRunner) -> None:
    """The tests that hacks fail can be passed."""
    source = """
def f(x):
    if x == 0: return 1 / x
    if x == []: return {1: 2, 2: 1} if asserted else [{1: 2}]
    return x * x + 1
"""
    for kind, form in {"stdin": f"{source}\nprint(f(int(input())))", "function": source, "assertion": source}.items():
        code = ProgramSpec(f"asserted = {kind == 'assertion'}\n{form}", kind, "f")  # type: ignore[arg-type]
        made = asyncio.run(lab.run_tests(code, JUDGES[kind], LIMITS))
        assert all(trial.passed for trial in made.results), (kind, made)


EXPRESSIONS = (
    "__import__('os')._exit(0)",
    "[open(str(n), 'w').write('ok\\n') for n in range(100)]",
    "[open(str(n), 'w').write('ok\\n10') for n in range(100)] and __import__('os')._exit(0)",
    "type('Object', (int,), {'__eq__': lambda *_: True, '__repr__': lambda _: '10'})(7)",
    "exec('raise SystemExit(0)')",
    "__import__('sys')._getframe(1).f_locals",
    "__import__('sys')._getframe(1).f_locals.update(result=('ok', '10'))",
    "[g for g in __import__('gc').get_objects() if type(g) is tuple][:5]",
    "setattr(__import__('builtins'), 'isinstance', lambda *_: True)",
    "__import__('os').fork() or __import__('os')._exit(0)",
    "[setattr(m, 'encode_value', lambda _: '10') for m in __import__('sys').modules.values()"
    " if hasattr(m, 'encode_value')]",
    "float('nan')",
    "(lambda f: f(f))(lambda f: f(f))",
    "'10' * 10**7",
    "globals()",
    "__import__('os').kill(__import__('os').getpid(), 9)",
)


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_hacking_expression_passes_no_test(lab: ProgramTestRunner, source: str) -> None:
    cases = tuple(ProgramTest(f"([{n}, 1],)", str(n * 7 + 1)) for n in (2, 3, 4))
    made = asyncio.run(lab.run_tests(ProgramSpec(source, "expression"), cases, LIMITS))
    assert len(made.results) == 3 and not any(trial.passed for trial in made.results)


SQUARE = ADD | {
    "question": "Write a function `f(n)` that returns n * n + 1.\n>>> f(4)\n17\n",
    "entry": "f",
    "reference": "def f(n, *more):\n    return n * n + 1",
    "examples": [[[3], 10], [[2.5], 7.25]],
    "tests": [[[5], 26], [[6], 37]],
}
TESTS = (
    "#### f(3) -> 10",
    "#### f(3.0) -> 10.0",
    "#### f(3,) -> 10",
    "#### f(2.5000001) -> 7.25",
    "#### f(4) -> 17",
    "#### candidate(4) == 17",
    "#### f(1 + 2) -> 10",
    "#### f(*[3]) -> 10",
    "#### f(n=7) -> 50",
    "#### f((n := 3)) -> 10",
    "#### f(7) -> f(7)",
    "#### f(7) -> 7 * 7 + 1",
    "#### f(7) -> __import__('os')",
    "#### f(7) -> ...",
    "#### f(...) -> ...",
    "#### f(7) -> nan",
    "#### f(7) -> 1e999",
    "#### f(1e999) -> -1e999",
    "#### f(7) -> [50]",
    "#### f(7) -> '50'",
    "#### f('x') -> None",
    "#### f() -> None",
    "#### f(7) -> 0x" + "f" * 3900,
    "#### f(0x" + "f" * 3800 + ") -> 1",
    "#### f(7) -> " + "[" * 3000,
    "#### f(7) -> {" + ",".join(str(i * (2**61 - 1)) for i in range(150)) + "}",
    "#### f(lambda: 0) -> True",
    "#### f(7) -> True or 50",
    "#### f(7) -> 5 # -> 50",
    "#### f(7); exit() -> 50",
    "#### f(7)\n#### -> 50",
    "#### ->",
    "#### f(7) -> 5\x000",
    "#### f(7) -> '\ud800'",
)


@pytest.mark.usefixtures("sandboxed")
@pytest.mark.parametrize("number", range(len(TESTS)))
def test_hacking_test_earns_nothing(tmp_path: Path, number: int) -> None:
    env = CoderTester(source=write(tmp_path / "a.jsonl", SQUARE), split="all")
    _, step = play(env, scripted_pair("", TESTS[number]))
    assert step.rewards["tester"] in (-0.1, 0.0) and step.team_reward == 0.0


@pytest.mark.usefixtures("sandboxed")
@pytest.mark.parametrize("test", ['["a"] -> None', "[True] -> None", "[10000000] -> None"])
def test_drill_test_without_a_result_earns_nothing(test: str) -> None:
    _, step = play(CoderTester(source="drills"), scripted_pair("", test))
    assert step.rewards["tester"] == 0.0


@pytest.mark.usefixtures("sandboxed")
def test_correct_test_earns_the_full_reward(tmp_path: Path) -> None:
    env = CoderTester(source=write(tmp_path / "a.jsonl", SQUARE), split="all")
    _, step = play(env, scripted_pair("", "#### f(7) -> 50"))
    assert step.rewards["tester"] == 1.0
