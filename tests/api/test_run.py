"""Interrupts of a run: the first Ctrl-C requests a stop, the second ends the pass in progress."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.api.interrupt import StopOnInterrupt
from palestra.api.run import open_run, resumed_tree, run_request


def test_a_second_interrupt_ends_a_pass_that_does_not_yield() -> None:
    passed = []

    async def training_pass() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        passed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as stop_requested, asyncio.Runner() as event_loop:
        event_loop.run(training_pass())
        assert stop_requested() and passed == [True]
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(training_pass())
    assert passed == [True] and signal.getsignal(signal.SIGINT) is before


INTERRUPTED_TWICE = """
import asyncio, os, signal
from palestra.api.interrupt import StopOnInterrupt

async def sample():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

async def play():
    sampling = asyncio.create_task(sample())  # which nobody awaits, as that of a sampler
    await asyncio.sleep(60)

try:
    with StopOnInterrupt(), asyncio.Runner() as loop:
        loop.run(play())
except KeyboardInterrupt:
    print("ended at once")
"""


def test_a_second_interrupt_inside_a_task_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_TWICE], capture_output=True, text=True)
    assert done.returncode == 0 and "ended at once" in done.stdout
    assert "Traceback" not in done.stderr and "never retrieved" not in done.stderr, done.stderr


def test_a_refused_extension_leaves_the_config_as_it_is(tmp_path: Path) -> None:
    tree = {
        "env": {"type": "kuhn_poker", "num_envs": 4},
        "policies": {"default": {"type": "net", "hidden": [4]}},
        "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 4, "minibatches": 4},
        "env_steps": 64,
    }
    with open_run(run_request(tree, root=tmp_path)) as opened:
        assert opened.train()
    path = opened.run.path
    config, meta = (path / "config.yaml").read_bytes(), (path / "meta.json").read_bytes()
    (path / "metrics.jsonl").write_text("")
    longer = resumed_tree(path, ["env_steps=128"])
    with (
        pytest.raises(ValueError, match=r"metrics\.jsonl has 0 bytes"),
        open_run(run_request(longer, resume=path, stored=longer)),
    ):
        pass
    assert ((path / "config.yaml").read_bytes(), (path / "meta.json").read_bytes()) == (config, meta)
