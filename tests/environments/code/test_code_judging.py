"""Judging programs: attacks on the reward, equal programs run once, and hung programs that do not block others."""

import asyncio
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_code import ADD, GOOD, play, scripted_pair, write

from palestra.core.types import Episode, Step
from palestra.environments.code import env as code
from palestra.environments.code.env import CoderTester
from palestra.sandbox import Sandbox, client
from palestra.text.policies.base import Query
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

pytestmark = pytest.mark.usefixtures("sandboxed")


def test_programs_cannot_find_the_expected_results(tmp_path: Path) -> None:
    riddle = ADD | {"examples": [], "tests": [[[n, 0], f"xyzzy{n}"] for n in range(4)], "entry": "find"}
    program = """
import gc, os, sys
def find(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr((frame.f_locals, frame.f_globals)))
        frame = frame.f_back
    seen += [repr(one) for one in gc.get_objects()] + [open(n, errors="replace").read() for n in os.listdir(".")]
    for text in seen:
        if "xy" + "zzy" in text: return text[text.index("xy" + "zzy"):][:6]
    return len(seen)
"""
    source = write(tmp_path / "a.jsonl", riddle)
    _, step = play(
        CoderTester(source=source, split="all", time_limit_s=20), scripted_pair(f"```python\n{program}\n```", "")
    )
    assert step.info["passed"] == 0.0 and step.rewards["coder"] == 0.0  # the program did run


@pytest.mark.parametrize(
    "program",
    [
        "class All(int):\n    def __eq__(self, o): return True\n    def __repr__(self): return '3'\n"
        "def add(a, b): return All(7)",
        "import os\ndef add(a, b):\n    for n in range(4): open(str(n), 'w').write('ok\\n7')\n    os._exit(0)",
        "import sys\nprint('ok')\nsys.exit(0)",
        "raise SystemExit",
    ],
)
def test_programs_cannot_forge_results(add: Any, program: str) -> None:
    _, step = play(add(), scripted_pair(f"```python\n{program}\n```", ""))
    assert step.info["passed"] == 0.0


def test_equal_programs_run_once(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run_python = Sandbox.run_python

    async def counted(self: Sandbox, source: str, **options: Any) -> Any:
        runs.append(options["stdin"])
        return await run_python(self, source, **options)

    monkeypatch.setattr(Sandbox, "run_python", counted)
    answers = scripted_pair("```python\ndef add(a, b):\n    return a + b  # once\n```", "#### add(8, 1) -> 9")

    async def group() -> list[Step]:
        envs = [add() for _ in range(6)]
        for env in envs:
            env.reset(0)
        return await asyncio.gather(*(env.step(answers) for env in envs))

    steps = asyncio.run(group())
    assert all(step == steps[0] for step in steps) and steps[0].info["success"]
    assert len(runs) == len(set(runs)) <= 3  # the hidden tests, the tester's test, and the reference on that test


def test_env_without_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    for cached in (client.backend_problem, code._lab):
        cached.cache_clear()
    try:
        with pytest.raises(ValueError, match="unsafe: true"):
            CoderTester()
        play(CoderTester(unsafe=True, source="drills"), scripted_pair("xs", "[1] -> [1]"))
    finally:
        for cached in (client.backend_problem, code._lab):
            cached.cache_clear()


@pytest.mark.parametrize(
    ("episodes", "seconds"), [(10, 4.0), pytest.param(200, 40.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_hung_programs_do_not_block_others(tmp_path: Path, episodes: int, seconds: float) -> None:
    """Every tenth program hangs until its time limit; all others end before the first of these does."""
    ends = ends_of(tmp_path, episodes, seconds, "__import__('time').sleep(99)")
    assert (len(ends[True]), len(ends[False])) == (episodes // 10, episodes * 9 // 10)
    assert max(ends[False]) < seconds <= min(ends[True])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_endless_computation_does_not_block_others(tmp_path: Path) -> None:
    ends = ends_of(tmp_path, 200, 3.0, "exec('while True: pass')")
    assert (len(ends[True]), len(ends[False])) == (20, 180)


def ends_of(folder: Path, episodes: int, seconds: float, hang: str) -> dict[bool, list[float]]:
    """The ends of the episodes, in seconds after the first started: of those that hung in their first turn, and of the
    others. All must end in success."""
    source, ends, began = (
        write(folder / "add.jsonl", ADD),
        {True: list[float](), False: list[float]()},
        time.monotonic(),
    )
    hanging: dict[int, bool] = {}

    def coder(query: Query, rng: random.Random) -> str:
        if "Turn 2" in query.observation:
            return GOOD
        hangs = hanging.setdefault(query.seed, len(hanging) % 10 == 0)
        unlike = f"# {query.seed}"  # programs of other episodes, whose results are known
        return f"```python\n{unlike}\ndef add(a, b):\n    return {hang if hangs else 'a + b'}\n```"

    def done(episode: Episode) -> None:
        assert episode.error is None and episode.success
        ends[len(episode.nodes) == 2].append(time.monotonic() - began)

    seats = {"coder": ScriptedPolicy(coder), "tester": ScriptedPolicy(["#### add(4, 4) -> 8"])}
    arena = EpisodeRunner(partial(CoderTester, source=source, split="all", time_limit_s=seconds), "code")
    asyncio.run(arena.play_all([EpisodeSpec(0, seats, seed) for seed in range(episodes)], Branching(), on_episode=done))
    return ends
