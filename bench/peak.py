"""Peak memory of one GRPO step on the shape of Qwen3-0.6B (random weights), beside TRL's, each in a process of its own.

    python bench/peak.py            16 prompts x 8 answers x 128 tokens, 28 layers
    python bench/peak.py --quick    2 prompts x 8 answers x 128 tokens, 4 layers

palestra samples and trains as `palestra info` suggests where memory is short: layers are recomputed, micro-batches have
at most 2,048 tokens. TRL runs with micro-batches of 8 answers, which is its default, and recomputes its layers too.
Both keep float32 weights and train a LoRA adapter. Figures, both at most:

    peak_vs_trl         peak resident memory over TRL's
    peak_gib_over_base  the same less the weights, in GiB
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from limit import qwen3_06b_config, random_prompts, save_random

HERE = Path(__file__).parent
PROMPT, NEW, K, RANK, MICRO_BATCH_TOKENS = 96, 128, 8, 8, 2048
TARGETS = {"peak_vs_trl": 0.33, "peak_gib_over_base": 2.0}


def run_ours(spec: dict) -> None:
    """Prints the peak memory of a step, in MiB, and that of the weights."""
    import numpy as np
    from lm import Ours

    from palestra.engine.trainer import Trainer

    ours = Ours(spec["model"])
    (adapter,) = ours.adapters(1)
    trainer = Trainer(ours.engine, adapter, pack_tokens=MICRO_BATCH_TOKENS, checkpointing=True)
    prompts = [np.array(prompt, np.int32) for prompt in json.loads(Path(spec["prompts"]).read_text())]
    for _ in range(2):
        ours.step(trainer, prompts, new=NEW)
    weights = sum(p.nbytes for p in ours.engine.model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_rss_mb": peak, "weights_mb": weights / 2**20}))


def peak_of(python: Path | str, script: str, *arguments: str) -> dict:
    """What a process printed in its last line."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [str(python), str(HERE / script), *arguments], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_figures(trl_python: Path, *, quick: bool) -> dict[str, float]:
    """Peak memory of palestra's step over that of TRL's, and over the weights."""
    groups = 2 if quick else 16
    with tempfile.TemporaryDirectory() as name:
        save_random(qwen3_06b_config(4 if quick else 28), name)
        prompts = Path(name) / "prompts.json"
        prompts.write_text(json.dumps(random_prompts(groups, PROMPT)))
        spec = {"model": name, "prompts": str(prompts), "K": K, "new_tokens": NEW, "prompts_per_step": groups}
        ours = peak_of(sys.executable, "peak.py", "--ours", json.dumps(spec))
        spec |= {"rank": RANK, "steps": 1, "warmup": 1, "micro_batches": [8], "gradient_checkpointing": True}
        theirs = peak_of(trl_python, "trl_grpo.py", json.dumps(spec))
    return {
        "peak_vs_trl": ours["peak_rss_mb"] / theirs["peak_rss_mb"],
        "peak_gib_over_base": (ours["peak_rss_mb"] - ours["weights_mb"]) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 layers and 16 answers")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        return run_ours(json.loads(given.ours))
    from lm import TRL, install_trl

    install_trl()
    figures = peak_figures(TRL / "bin/python", quick=given.quick)
    print(json.dumps({"bench": "peak", "figures": {k: round(v, 3) for k, v in figures.items()}, "at_most": TARGETS}))


if __name__ == "__main__":
    main()
