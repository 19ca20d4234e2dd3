"""Games in subprocesses equal those of a loop, survive killed processes, and leave no processes or memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.toy_games import Counting, Falls, Unmakable

from palestra.envs.batch.subproc_vector import PackageVectorEnv, SubprocVectorEnv
from palestra.envs.batch.sync_vector import SyncVectorEnv
from palestra.envs.vector_base import VectorStep
from palestra.envs.vector_check import check_vector_env, random_actions

SHARED = Path("/dev/shm")


@contextmanager
def open_env(make: Callable[[], Counting], games: int, processes: int, **options: float) -> Iterator[SubprocVectorEnv]:
    """The env; asserts that it leaves neither processes nor shared memory."""
    env = SubprocVectorEnv(make, games, processes, **options)
    name = env._memory[0].shared_memory.name
    try:
        yield env
    finally:
        pids = workers(env)
        env.close()
        assert not any(alive(pid) for pid in pids)
        assert not (SHARED / name).exists()


def workers(env: SubprocVectorEnv) -> list[int]:
    return [worker.child.process.pid for worker in env._workers if worker.child.process.pid]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not SHARED.exists() or b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()


def assert_equal_games(one: VectorStep, other: VectorStep, games: list[int]) -> bool:
    over = one.done[games]
    for part in fields(VectorStep):
        mine, theirs = getattr(one, part.name)[games], getattr(other, part.name)[games]
        if part.name.startswith("final_"):
            mine, theirs = mine[over], theirs[over]
        if not np.array_equal(mine, theirs):
            return False
    return True


def test_subproc_env_passes_the_vector_env_check() -> None:
    check_vector_env(lambda games: SubprocVectorEnv(Counting, games, 2), steps=40)


def test_subproc_env_equals_sync_env() -> None:
    """Also with more processes than games, and with shares of different sizes."""
    rng = np.random.default_rng(0)
    loop = SyncVectorEnv(Counting, 5)
    with open_env(Counting, 5, 3) as env:
        assert [worker.part for worker in env._workers] == [slice(0, 1), slice(1, 3), slice(3, 5)]
        for seeds in (np.arange(5), np.arange(5) + 100):
            frame = env.reset(seeds)
            assert assert_equal_games(loop.reset(seeds), frame, [0, 1, 2, 3, 4])
            for _ in range(30):
                actions = random_actions(env, frame, rng)
                frame = env.step(actions)
                assert assert_equal_games(loop.step(actions), frame, [0, 1, 2, 3, 4])
    with open_env(Counting, 1, 8) as env:
        assert len(env._workers) == 1


def test_killed_processes_are_replaced_without_affecting_others() -> None:
    """8 kills, before or during a step. Games of processes that are never killed stay equal to those of a loop; killed
    games are truncated at their last observation and start again."""
    rng, loop = np.random.default_rng(0), SyncVectorEnv(Counting, 6)
    with open_env(Counting, 6, 3) as env:
        spared = [0, 1]
        frame, begun = env.reset(np.arange(6)).copy(), set(range(6))
        loop.reset(np.arange(6))
        for number in range(8):
            for _ in range(3):
                actions = random_actions(env, frame, rng)
                frame = env.step(actions).copy()
                assert assert_equal_games(loop.step(actions), frame, spared)
            victim = env._workers[1 + number % 2]
            assert victim.child.process.pid is not None
            os.kill(victim.child.process.pid, signal.SIGKILL)
            if number % 3:
                victim.child.process.join()  # dead before the step begins, not during it
            actions = random_actions(env, frame, rng)
            before, frame = frame, env.step(actions).copy()
            assert assert_equal_games(loop.step(actions), frame, spared)
            if env.restarts == number + 1:
                assert frame.truncated[victim.part].all() and not frame.rewards[victim.part].any()
                assert np.array_equal(frame.final_obs[victim.part], before.obs[victim.part])
                assert frame.final_state is not None and before.state is not None
                assert np.array_equal(frame.final_state[victim.part], before.state[victim.part])
                dead = before.seat_terminated & ~before.done[:, None]  # the others are truncated
                assert np.array_equal(frame.seat_terminated[victim.part], dead[victim.part])
                assert not frame.terminated[victim.part].any() and not frame.obs[victim.part, :, 1].any()
            else:
                # the process had answered before the signal arrived: the next step detects its end
                assert number % 3 == 0
                frame = env.step(actions).copy()
                assert assert_equal_games(loop.step(actions), frame, spared) and frame.truncated[victim.part].all()
            is_first = set(frame.obs[victim.part, 0, 0].tolist())
            assert len(is_first) == 2 and not is_first & begun  # never the same games again
            begun |= is_first
        assert env.restarts == 8


def test_saved_state_resumes_in_other_processes() -> None:
    """Also after the loss of a process, and with another number of processes, or in a loop."""
    rng = np.random.default_rng(0)
    with open_env(Counting, 5, 2) as env, open_env(Counting, 5, 3) as other:
        frame = env.reset(np.arange(5))
        for _ in range(7):
            frame = env.step(random_actions(env, frame, rng))
        lost = env._workers[1]
        assert lost.child.process.pid is not None
        os.kill(lost.child.process.pid, signal.SIGKILL)
        lost.child.process.join()
        assert env.save() is None
        frame = env.step(random_actions(env, frame, rng))
        saved, loop = env.save(), SyncVectorEnv(Counting, 5)
        assert saved is not None and frame.truncated[lost.part].all()
        assert assert_equal_games(frame, other.load(saved), [0, 1, 2, 3, 4]) and assert_equal_games(
            frame, loop.load(saved), [0, 1, 2, 3, 4]
        )
        for _ in range(30):
            actions = random_actions(env, frame, rng)
            frame = env.step(actions)
            assert assert_equal_games(frame, other.step(actions), [0, 1, 2, 3, 4])
            assert assert_equal_games(frame, loop.step(actions), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("how", ["error", "segfault"])
def test_failed_games_restart_from_other_seeds(how: str) -> None:
    """One seed in seven fails at time 4; failures are distinguished from ends of games."""
    rng = np.random.default_rng(0)
    with open_env(partial(Falls, how, 4, 7), 4, 2) as env:
        frame = env.reset(np.array([1, 2, 7, 3]))
        for _ in range(3):
            assert not env.step(random_actions(env, frame, rng)).done.any()
        frame = env.step(random_actions(env, frame, rng))
        assert frame.truncated.tolist() == [False, False, True, True] and env.restarts == 1
        assert frame.final_obs[2:, 1].tolist() == [[7, 3, 0], [3, 3, 0]]
        assert frame.obs[:2, 0, :2].tolist() == [[1, 4], [2, 4]]


def test_repeated_failures_raise_with_the_reason() -> None:
    env = SubprocVectorEnv(partial(Falls, "error", 1), 2, 1)
    env.reset(np.arange(2))
    with pytest.raises(ValueError, match=r"failed 3 times(.|\n)*the fifth wheel came off"):
        for _ in range(3):
            env.step(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="closed"):
        env.step(np.zeros((2, 2), np.int32))
    env = SubprocVectorEnv(partial(Falls, "segfault"), 2, 1)
    with pytest.raises(ValueError, match=r"failed 3 times(.|\n)*exit code -11"):
        env.reset(np.arange(2))


def test_hung_process_is_replaced() -> None:
    with open_env(partial(Falls, "sleep", 2, 2), 2, 2, timeout_s=3.0) as env:
        env.reset(np.array([2, 3]))
        assert not env.step(np.zeros((2, 2), np.int32)).done.any()
        frame = env.step(np.zeros((2, 2), np.int32))
        assert frame.truncated.tolist() == [True, False] and frame.obs[1, 0, 1] == 2


def test_construction_errors_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"cannot be made(.|\n)*no such wheel"):
        SubprocVectorEnv(Unmakable, 4, 2)
    with pytest.raises(ValueError, match=r"cannot be sent to another process(.|\n)*functools.partial"):
        SubprocVectorEnv(lambda: Counting(), 4, 2)
    with pytest.raises(ValueError, match="num_processes: 0 is too small"):
        SubprocVectorEnv(Counting, 4, 0)


def test_package_env_runs_in_process_or_subprocesses() -> None:
    rng, here, there = np.random.default_rng(0), PackageVectorEnv(Counting, 2, 0), PackageVectorEnv(Counting, 2, 2)
    assert here.seats == there.seats == ("wide", "long") and there.restarts == 0
    frame = here.reset(np.arange(2))
    assert assert_equal_games(frame, there.reset(np.arange(2)), [0, 1])
    for _ in range(10):
        actions = random_actions(here, frame, rng)
        assert assert_equal_games(here.step(actions), there.step(actions), [0, 1])
    here.close()
    there.close()
    with pytest.raises(ValueError, match="num_processes is -1: 0 plays in this process"):
        PackageVectorEnv(Counting, 2, -1)


PARENT = """
import signal
import numpy as np
from palestra.envs.batch.subproc_vector import SubprocVectorEnv
from helpers.toy_games import Counting

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the test was started from
    env = SubprocVectorEnv(Counting, 4, 2)
    env.reset(np.arange(4))
    print(*[worker.child.process.pid for worker in env._workers], env._memory[0].shared_memory.name, flush=True)
    while True:
        env.step(np.zeros((4, 2), np.int32))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.few(1)
def test_processes_end_with_their_parent(end: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group, kill -9 only the parent."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    paths = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        assert parent.stdout is not None
        *pids, name = parent.stdout.readline().split()
        assert len(pids) == 2 and all(alive(int(pid)) for pid in pids)
        time.sleep(0.2)
        (os.killpg if end == signal.SIGINT else os.kill)(parent.pid, end)
        errors = parent.communicate(timeout=60)[1]
    finally:
        parent.kill()
    deadline = time.monotonic() + 60
    while any(alive(int(pid)) for pid in pids) or (SHARED / name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if end == signal.SIGINT:
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
