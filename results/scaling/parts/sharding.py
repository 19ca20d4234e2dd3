"""Measures training a language model in several processes: memory of a rank, tokens per second, seconds of a
checkpoint.

    python results/scaling/parts/sharding.py [--quick]

All processes run on this machine's CPU and communicate over gloo. With fewer idle cores than processes they share
cores, which lowers the speeds but does not change the memory. Peak memory of a process (RSS) includes Python, torch and
transformers (some 400 MB) and the whole model, which each rank reads before it keeps its part.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from palestra.core.losses import policy_gradient_loss
from palestra.core.types import Sample
from palestra.engine.bases.fsdp import local_shard, shard_engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import save_training_state
from palestra.parallel.process_group import ProcessGroup
from palestra.parallel.torch_group import join_process_group
from palestra.testing import tiny_lm

SHAPE = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 4096, "head_dim": 64}
ROOT = Path(__file__).parents[3]


def samples(groups: int) -> list[Sample]:
    """Random samples: for each group, 8 answers of 32 tokens to a prompt of 64 tokens."""
    rng, found = np.random.default_rng(0), []
    for _ in range(groups):
        prompt = rng.integers(5, 4000, 64).astype(np.int32)
        for _ in range(8):
            ids = rng.integers(5, 4000, 32).astype(np.int32)
            found.append(Sample(prompt, ids, np.zeros(32, np.float32), rng.normal(size=32).astype(np.float32)))
    return found


def trainer(kind: str, mode: str, ranks: ProcessGroup) -> AdapterWeights:
    engine = tiny_lm(0, **SHAPE)
    if mode == "fsdp" and ranks.world_size > 1:
        shard_engine(engine, ranks, "cpu", train=kind == "full")
    adapter = None if kind == "full" else Adapter(engine.linear_layers, LoraConfig(rank=8), seed=0)
    return AdapterWeights(engine, adapter, pack_tokens=2048, group=ranks)


def kept(learner: AdapterWeights) -> int:
    """Bytes of weights and optimizer state that this rank stores."""
    weights = {id(p): p for p in [*learner.engine.model.parameters(), *learner.parameters]}.values()
    slots = [t for one in learner.optimizer.state.values() for t in one.values()]
    return sum(t.numel() * t.element_size() for t in [*(local_shard(w) for w in weights), *slots])


def work(kind: str, mode: str, steps: int, groups: int) -> None:
    """Trains and saves on one rank; rank 0 prints the figures, the largest memory over ranks."""
    ranks = join_process_group()
    learner, batch, seconds = trainer(kind, mode, ranks), samples(groups), []
    for _ in range(steps + 1):
        start = time.perf_counter()
        learner.forward_backward(batch, policy_gradient_loss)
        learner.optim_step(OptimConfig())
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save_training_state(Path(folder), learner)
    saved = time.perf_counter() - start
    tokens = sum(len(s.prompt_ids) + len(s.token_ids) for s in batch)
    mine = {"kept": kept(learner), "rss": peak_memory()}
    everyone = ranks.all_gather(mine)
    if ranks.is_rank_zero:
        most = {name: max(one[name] for one in everyone) for name in mine}
        print(json.dumps(most | {"tokens_per_s": tokens / min(seconds[1:]), "save_s": saved}))
    join_process_group().leave()


def together(count: int, kind: str, mode: str, steps: int, groups: int) -> dict[str, float]:
    """Starts `count` processes of `work`; returns the figures that rank 0 prints. Raises RuntimeError if one fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    everyone = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    everyone |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--rank", kind, mode, str(steps), str(groups)]
    processes = [
        subprocess.Popen(
            command, env=os.environ | everyone | {"RANK": str(rank), "PYTHONPATH": path}, stdout=subprocess.PIPE
        )
        for rank in range(count)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {count} ({kind}, {mode}) failed: see above")
    found: dict[str, float] = json.loads(printed[0])
    return found


def peak_memory() -> int:
    """Peak resident memory of this process in bytes (Linux). The peak that `getrusage` reports would include that of
    the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(quick: bool) -> dict[str, float]:
    """Figures by name, with all weights trained. `fsdp_memory_ratio` is the largest memory for weights and optimizer
    state of a rank of 4, over that of a single process; `ddp_speedup` and `fsdp_speedup` are tokens per second of 2
    processes over those of 1."""
    steps, groups = (2, 4) if quick else (5, 12)
    one = together(1, "full", "ddp", steps, groups)
    found = {"1.kept_mb": one["kept"] / 1e6, "1.rss_mb": one["rss"] / 1e6, "1.tokens_per_s": one["tokens_per_s"]}
    for mode, count in (("ddp", 2), ("fsdp", 2), ("fsdp", 4)):
        each = together(count, "full", mode, steps, groups)
        found[f"{mode}.{count}.kept_mb"] = each["kept"] / 1e6
        found[f"{mode}.{count}.rss_mb"] = each["rss"] / 1e6
        found[f"{mode}.{count}.tokens_per_s"] = each["tokens_per_s"]
        found[f"{mode}.{count}.save_s"] = each["save_s"]
    found["fsdp_memory_ratio"] = found["fsdp.4.kept_mb"] / found["1.kept_mb"]
    found["ddp_speedup"] = found["ddp.2.tokens_per_s"] / found["1.tokens_per_s"]
    found["fsdp_speedup"] = found["fsdp.2.tokens_per_s"] / found["1.tokens_per_s"]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--rank" in sys.argv:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        for name, figure in measure("--quick" in sys.argv).items():
            print(f"{name:24} {figure:.3f}")
