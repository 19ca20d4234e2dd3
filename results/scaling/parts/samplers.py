"""Measures samplers in processes of their own: tokens per second, milliseconds per request, seconds of a run.

    python results/scaling/parts/samplers.py [--quick]

All ways answer the same requests: two adapters on the base `tiny`, 8 siblings to a prompt, one torch thread in each
process. The ways alternate, so that other load on the machine slows all of them, and the best round of each counts.
Figures:

    tokens_per_s_here           sampled tokens per second in this process
    tokens_per_s_apart_N        sampled tokens per second of N sampler processes
    tokens_ratio_N              tokens_per_s_apart_N over tokens_per_s_here
    added_ms_per_request        milliseconds that HTTP and the other process add to a request of one token, by medians
    ahead_wall_ratio            wall seconds of training with staleness 1 and one sampler process, over those without it
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.config import dump, validate
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.runs import Run
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.policies.lm import SamplerProtocol
from palestra.text.samplers.config import SamplerProcessesConfig
from palestra.text.samplers.remote_samplers import RemoteSamplers

COUNTS = (1, 2)
SIBLINGS, PROMPT, ANSWER = 8, 32, 32


def measure(quick: bool = False) -> dict[str, float]:
    engine = Engine.load("tiny", device="cpu")
    ways: dict[str, SamplerProtocol] = {"here": Sampler(engine)}
    openings = {n: RemoteSamplers(SamplerProcessesConfig(count=n)).open("tiny", **PLACE) for n in COUNTS}
    ways |= {f"apart_{n}": opening.wait_ready() for n, opening in openings.items()}
    figures = _throughput(engine, ways, requests=16 if quick else 64, rounds=2 if quick else 5)
    figures["added_ms_per_request"] = _added(engine, ways, times=30 if quick else 200)
    for sampler in ways.values():
        getattr(sampler, "close", lambda: None)()
    return figures | {"ahead_wall_ratio": _ahead(steps=3 if quick else 12)}


PLACE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 512}


def _throughput(engine: Engine, ways: dict[str, SamplerProtocol], *, requests: int, rounds: int) -> dict[str, float]:
    adapters = [_adapter(engine, f"agent_{i}", i) for i in range(2)]
    asked = [_request(engine, seed, SIBLINGS, ANSWER, adapters[seed % 2]) for seed in range(requests)]
    best = dict.fromkeys(ways, 0.0)
    for _ in range(rounds + 1):  # the first round loads the adapters and is never the best
        for name, sampler in ways.items():
            best[name] = max(best[name], asyncio.run(_speed(sampler, asked)))
    figures = {f"tokens_per_s_{name}": speed for name, speed in best.items()}
    return figures | {f"tokens_ratio_{n}": best[f"apart_{n}"] / best["here"] for n in COUNTS}


async def _speed(sampler: SamplerProtocol, requests: list[Request]) -> float:
    """Sampled tokens per second of all `requests`, sent concurrently."""
    start = time.perf_counter()
    found = await asyncio.gather(*(sampler.sample(request) for request in requests))
    return sum(len(answer.token_ids) for each in found for answer in each) / (time.perf_counter() - start)


def _added(engine: Engine, ways: dict[str, SamplerProtocol], *, times: int) -> float:
    """Milliseconds that a request of one token takes longer in one sampler process than in this process, by medians."""

    async def taken(sampler: SamplerProtocol) -> list[float]:
        seconds = []
        for seed in range(times):
            start = time.perf_counter()
            await sampler.sample(_request(engine, seed, 1, 1, None))
            seconds.append(time.perf_counter() - start)
        return seconds

    here, apart = (statistics.median(asyncio.run(taken(ways[name]))) for name in ("here", "apart_1"))
    return 1000 * (apart - here)


def _ahead(*, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        here, apart = (_seconds(Path(folder), name, sampler, steps) for name, sampler in RUNS.items())
    return apart / here


RUNS: dict[str, dict[str, Any] | None] = {"here": None, "apart": {"type": "processes", "count": 1}}


def _seconds(folder: Path, name: str, sampler: dict[str, Any] | None, steps: int) -> float:
    """Wall seconds of a run with staleness 1, without loading."""
    policy = {"type": "lora", "base": "tiny", "lr": 1e-3, "sampling": {"max_tokens": 16}}
    tree = {
        "steps": steps,
        "episodes": 16,
        "staleness": 1,
        "sampler": sampler,
        "device": "cpu",
        "env": {"type": "plan_path", "size": 7, "team": "planner_executor", "max_turns": 4},
        "policies": {"planner": policy, "executor": policy},
        "algorithm": {"type": "grpo", "group_size": 8},
        "checkpoint_every": 1000,
    }
    config = validate(TextConfig, tree)
    setup = build(config)
    with Run.create(folder, dump(config), name) as run:
        start = time.perf_counter()
        run_training(setup, run)
        return time.perf_counter() - start


def _request(engine: Engine, seed: int, n: int, tokens: int, adapter: Snapshot | None) -> Request:
    prompt = np.random.default_rng(seed).integers(5, engine.model.config.vocab_size, PROMPT).astype(np.int32)
    return Request(prompt, n, SamplingConfig(max_tokens=tokens, stop_at_eos=False), adapter, seed)


def _adapter(engine: Engine, name: str, seed: int) -> Snapshot:
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=8), seed=seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
    return adapter.snapshot(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    figures = {name: float(f"{value:.4g}") for name, value in measure(parser.parse_args().quick).items()}
    for name, value in figures.items():
        print(f"{name:24} {value:g}")
    print(json.dumps({"bench": "samplers", "figures": figures}))


if __name__ == "__main__":
    main()
