"""Forged results of programs: they cost the trainer little time and memory, and earn nothing."""

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_code import ADD, play, scripted_pair, write
from helpers.toy_programs import try_program

from palestra.core.types import Step
from palestra.environments.code import test_runner
from palestra.environments.code.answers import read_test
from palestra.environments.code.env import CoderTester, _lab
from palestra.environments.code.results import NO_VALUE, matches_literal, outputs_equal, parse_encoding, to_python_text
from palestra.environments.code.test_runner import ProgramSpec, ProgramTest, ProgramTestRunner

MIB = 2**20
STEP = 2**61 - 1  # all multiples have the same hash


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


async def longest_pause(work: Coroutine[Any, Any, Step]) -> tuple[Step, float]:
    """The result of `work`, and the longest time in seconds for which the event loop was blocked."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        began = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - began)
    return task.result(), longest


@pytest.mark.usefixtures("sandboxed")
def test_forged_sets_of_colliding_integers_do_not_stall_the_loop(tmp_path: Path) -> None:
    expected = list(range(100_000, 130_000))  # so that a long result is read back
    source = write(tmp_path / "a.jsonl", ADD | {"tests": [[[n, n], expected] for n in range(4)]})
    forge = f"""
import os
def add(a, b):
    numbers = [i * {STEP} for i in range(1, 39_000)]
    open("0", "w").write("ok\\n{{" + ",".join(map(str, numbers)) + "}}")
    open("1", "w").write('ok\\n["set",' + ",".join(map(str, numbers)) + "]")
    open("2", "w").write('ok\\n["dict",' + ",".join(f"[{{n}},1]" for n in numbers) + "]")
    os._exit(0)
"""
    env = CoderTester(source=source, split="all", time_limit_s=20)
    env.reset(0)
    began = time.process_time()
    step, pause = asyncio.run(longest_pause(env.step(scripted_pair(fenced(forge), ""))))
    assert step.info["passed"] == 0.0
    assert pause < 10 and time.process_time() - began < 10  # 85 s and 30 s if Python builds the sets


FORGED: dict[str, Callable[[], str]] = {
    "colliding set": lambda: '["set",' + ",".join(str(i * STEP) for i in range(1, 45_000)) + "]",
    "colliding keys": lambda: '["dict",' + ",".join(f"[{i * STEP},0]" for i in range(1, 40_000)) + "]",
    "colliding floats": lambda: '["set",' + ",".join(str(float(i * STEP)) for i in range(1, 45_000)) + "]",
    "many empty lists": lambda: '["list",' + ",".join(["[]"] * 330_000) + "]",
    "deep": lambda: "[" * 10**6,
    "deep and closed": lambda: '["list",' * 400 + "1" + "]" * 400,
    "deep set": lambda: '["set",' * 400 + "1" + "]" * 400,
    "long integer": lambda: "9" * 10**6,
    "long integers": lambda: '["list",' + ",".join(["9" * 4300] * 230) + "]",
    "long float": lambda: "1" * 10**6 + ".5",
    "long exponent": lambda: "1e" + "9" * 10**6,
    "long string": lambda: '"' + "\\ud800" * 160_000 + '"',
    "names": lambda: "{" + ",".join(f'"{i}":{i}' for i in range(80_000)) + "}",
    "constants": lambda: '["list",' + ",".join(["NaN"] * 240_000) + "]",
    "undecodable": lambda: (b"\xff" * 330_000).decode("utf-8", "replace"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.few(5)
def test_forged_values_are_compared_in_little_time(name: str) -> None:
    text, began = FORGED[name](), time.process_time()
    tree = parse_encoding(text)
    for expected in ("{1, 2}", "{1: 2}", "[1]", "0.5", "{(1, 2)}", repr(set(range(45_000 - 1)))):
        assert not matches_literal(expected, tree, exact=False)
    assert tree is NO_VALUE or isinstance(to_python_text(tree), str)
    assert not outputs_equal("0.5 1\n" * 1000, text)
    assert time.process_time() - began < 10


@pytest.mark.usefixtures("sandboxed")
def test_files_left_behind_cost_no_memory(add: Any) -> None:
    leave = "open('0', 'wb').write(b'ok\\n' + b'\\xff' * (20 * 2**20)); open('x', 'wb').write(b'\\xff' * (20 * 2**20))"
    program = f"import os\ndef add(a, b):\n    {leave}\n    os._exit(0)\n"

    async def four() -> list[Step]:
        envs = [add() for _ in range(4)]
        for env in envs:
            env.reset(0)
        return await asyncio.gather(
            *(env.step(scripted_pair(fenced(f"# {n}\n{program}"), "")) for n, env in enumerate(envs))
        )

    steps, peak = with_peak_memory(lambda: asyncio.run(four()))
    assert all(step.info["passed"] == 0.0 for step in steps)
    assert peak < 16 * MIB  # 1.1 GiB if all files are returned


@pytest.mark.usefixtures("sandboxed")
def test_long_output_is_not_kept(tmp_path: Path) -> None:
    row = ADD | {"entry": None, "tests": [["1\n", "1\n"]], "examples": []}
    env = CoderTester(source=write(tmp_path / "a.jsonl", row), split="all")
    _lab.cache_clear()

    def six() -> list[Step]:
        return [play(env, scripted_pair(fenced(f"print('{n}' * {8 * MIB})"), ""))[-1] for n in range(6)]

    steps, peak = with_peak_memory(six)
    assert not any(step.info["success"] for step in steps)
    assert peak < 4 * MIB  # 48 MiB if whole outputs are kept


def with_peak_memory(work: Callable[[], list[Step]]) -> tuple[list[Step], int]:
    """The result of `work`, and the peak of its memory in bytes."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_stored_results_are_limited_in_size(lab: ProgramTestRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_runner, "CACHE_BYTES", 12_000)
    for n in range(5):
        made = try_program(lab, ProgramSpec(f"print('{n}' * 10_000)"), "")
        assert made.results[0].output == str(n) * test_runner.MAX_OUTPUT_CHARS
    assert len(lab._known) == 2 and lab._size == sum(result.size_bytes for result in lab._known.values()) <= 12_000


def test_long_output_is_compared_in_full(lab: ProgramTestRunner) -> None:
    long = ProgramTest("", "".join(f"{n}\n" for n in range(50_000)))
    assert try_program(lab, ProgramSpec("for n in range(50_000): print(n)"), long).results[0].passed
    assert not try_program(lab, ProgramSpec("for n in range(49_999): print(n)"), long).results[0].passed
    value = ProgramTest("(200_000,)", repr(list(range(200_000))))
    made = try_program(lab, ProgramSpec("def f(n): return list(range(n))", "function", "f"), value)
    assert made.results[0].passed and len(made.results[0].output) == test_runner.MAX_OUTPUT_CHARS


def test_output_far_longer_than_expected_is_wrong(lab: ProgramTestRunner) -> None:
    """Even if only blanks follow the expected output."""
    code = partial(ProgramSpec, entry="f")
    assert try_program(lab, code("print('1' + ' ' * 1000)"), ProgramTest("", "1\n")).results[0].passed
    assert not try_program(lab, code("print('1' + ' ' * 100_000 + '2')"), ProgramTest("", "1\n")).results[0].passed
    made = try_program(lab, code("def f(): return 'a' * 100_000", "function"), ProgramTest("()", "'a'"))
    assert (made.results[0].completed, made.results[0].output) == (False, "the result is too long, or nested too deep")


def test_values_of_a_testers_test_are_read_in_little_time(add: Any) -> None:
    env, began = add(), time.process_time()
    env.reset(0)
    for value in ("[" * 3900, f"{{{','.join(str(i * STEP) for i in range(1, 180))}}}", "9" * 3900, "-" * 3900):
        read_test(f"#### add(1, 2) -> {value}", env.problem)
    for line in ("add(')->)" * 400, "add(1)" + "->" * 1900, "add([" + "->[" * 1200, "->add(" * 10_000):
        assert read_test(f"#### {line}", env.problem) is None
    assert time.process_time() - began < 5
