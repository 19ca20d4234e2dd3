"""Measures peak memory of one GRPO step on the shape of Qwen3-0.6B (random weights) and compares it with TRL's.

    python bench/peak.py            16 prompts x 8 answers x 128 tokens, 28 layers: hours, most of them TRL's
    python bench/peak.py --quick    2 prompts x 8 answers x 16 tokens, 2 layers: a smoke test
    python bench/peak.py --alone    without TRL: about 30 CPU minutes
    python bench/peak.py --alone --tokens 24    shorter answers: five CPU minutes

palestra samples and trains as `palestra info` suggests where memory is short: the KV cache has a budget of 0.25 GiB (a
sixteenth of what all answers need), layers are recomputed, micro-batches have at most 1,024 tokens. TRL runs with its
default micro-batches of 8 answers and recomputes its layers too. Both use float32 weights, train a LoRA adapter and
make one step, each in a process of its own. Targets are upper bounds. Figures:

    peak_vs_trl         peak resident memory over TRL's
    peak_gib_over_base  palestra's peak resident memory less the weights, in GiB
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from limit import qwen3_06b_config, random_prompts, save_random

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish

HERE = Path(__file__).parent
PROMPT, NEW, K, RANK, MICRO_BATCH_TOKENS = 96, 128, 8, 8, 1024
KV_CACHE_BYTES = 2**28
TARGETS = {"peak_vs_trl": 0.33, "peak_gib_over_base": 2.0}


def run_ours(spec: dict[str, Any]) -> None:
    """Prints as JSON the peak memory of sampling and of the whole step, and the weights' size, in MiB; the number of
    preempted answers and CPU seconds."""
    import numpy as np
    from lm import Ours

    from palestra.engine.training.adapter_weights import AdapterWeights

    ours = Ours(spec["model"], cache_bytes=KV_CACHE_BYTES)
    (adapter,) = ours.adapters(1)
    trainer = AdapterWeights(ours.engine, adapter, pack_tokens=MICRO_BATCH_TOKENS, checkpointing=True)
    prompts = [np.array(prompt, np.int32) for prompt in json.loads(Path(spec["prompts"]).read_text())]
    groups = ours.sample(prompts, K, spec["new_tokens"], [adapter.snapshot()])
    sampled = peak_mib()
    ours.train(trainer, prompts, groups)
    weights = sum(p.nbytes for p in ours.engine.model.parameters())
    preempted = ours.sampler.batch.counts["preempted_answers"]
    found = {"peak_rss_mb": peak_mib(), "sampling_peak_rss_mb": sampled, "weights_mb": weights / 2**20}
    print(json.dumps(found | {"preempted_answers": preempted, "cpu_s": time.process_time()}))


def peak_mib() -> float:
    """Returns the peak resident memory of this process so far in MiB. (ru_maxrss would include the peak of the process
    that started it.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def peak_of(python: Path | str, script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script of bench/ in a process of its own; returns the JSON of its last printed line."""
    path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [str(python), str(HERE / script), *arguments], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_figures(trl_python: Path | None, *, quick: bool, tokens: int = NEW) -> dict[str, float]:
    """The figures: peak memory of palestra's step over TRL's (`trl_python` None: without it), and less the weights."""
    groups = 2 if quick else 16
    with tempfile.TemporaryDirectory() as name:
        save_random(qwen3_06b_config(2 if quick else 28), name)
        prompts = Path(name) / "prompts.json"
        prompts.write_text(json.dumps(random_prompts(groups, PROMPT)))
        spec = {"model": name, "prompts": str(prompts), "K": K, "new_tokens": tokens, "prompts_per_step": groups}
        ours = peak_of(sys.executable, "peak.py", "--ours", json.dumps(spec))
        print(f"palestra: {json.dumps(ours)}", file=sys.stderr, flush=True)
        figures = {"peak_gib_over_base": (ours["peak_rss_mb"] - ours["weights_mb"]) / 1024}
        if trl_python:
            spec |= {"rank": RANK, "steps": 0, "warmup": 1, "micro_batches": [8], "gradient_checkpointing": True}
            theirs = peak_of(trl_python, "trl_grpo.py", json.dumps(spec))
            print(f"TRL: {theirs['peak_rss_mb']:.0f} MiB", file=sys.stderr)
            figures["peak_vs_trl"] = ours["peak_rss_mb"] / theirs["peak_rss_mb"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="2 layers and 16 answers, without TRL where it is not installed"
    )
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--tokens", type=int, help=f"tokens of each answer (default: {NEW}; with --quick 16)")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        return run_ours(json.loads(given.ours))
    from lm import TRL, install_trl

    alone = given.alone or (given.quick and not (TRL / "installed").exists())
    if not alone:
        install_trl()
    tokens = given.tokens or (16 if given.quick else NEW)
    figures = peak_figures(None if alone else TRL / "bin/python", quick=given.quick, tokens=tokens)
    finish("peak", figures, TARGETS, is_stored=not given.quick)


if __name__ == "__main__":
    main()
