"""Trains SmolLM2-135M-Instruct to add, compared with TRL and CoMLRL: samples per second, peak memory, held-out success.

    python results/real/compare.py                with learning curves: about an hour on one core
    python results/real/compare.py --quick        only speed and memory: two steps of each, ten CPU minutes
    python results/real/compare.py --only comlrl  compares with one of the peers: trl or comlrl
    python results/real/compare.py --device cuda  everything on a GPU
    python results/real/compare.py --peers DIR    virtual environment with compare.txt; made if it does not exist
    python results/real/compare.py --peers here   the peers are installed in this Python

One LoRA adapter of rank 16 learns sums of two numbers below 100, with three examples as earlier turns, by GRPO in
groups of 8, in float32 with one thread. TRL's GRPOTrainer (compare_trl.py) has the same prompts, reward, learning rate
and number of samples, and samples by transformers' `generate`. Two adapters, a reasoner and a checker, are compared
with CoMLRL's MAGRPO with two agents (compare_comlrl.py). CoMLRL's agents answer simultaneously, so that only speed is
comparable. Each run has a process of its own, one after another. Figures are of CPU seconds and resident memory on a
CPU, of wall seconds and allocated GPU memory on a GPU:

    samples_vs_trl, samples_vs_comlrl   samples per second of whole steps after the first, over the peer's
    peak_vs_trl                         peak memory of the process, over TRL's
    success_minutes_vs_trl              minutes of training until TRL's final success on 200 held-out sums (greedy
                                        answers, all adapters evaluated by palestra), over TRL's; null if not reached
                                        in three times as many steps, which take palestra less time than TRL needs for
                                        its own
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from palestra.core.config.tree import to_yaml
from palestra.engine.bases.names import resolve_base, tokenizer_of
from palestra.envs import make_env
from palestra.evaluation.target import Target, find_target
from palestra.evaluation.text import open_text_eval
from palestra.runs import read_lines

sys.path.append(str(Path(__file__).parents[2]))
from results.ledger import absent, finish

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "compare.txt"
TARGETS = {"samples_vs_trl": 3.0, "samples_vs_comlrl": 3.0, "peak_vs_trl": 0.33, "success_minutes_vs_trl": 0.4}
BASE, GROUP_SIZE, MAX_TOKENS, RANK, LR, HELD_OUT = "smollm2", 8, 16, 16, 5e-4, 200
ENV = {"type": "math_review", "kinds": ["sum"], "difficulty": 1, "shots": 3}
ALONE, TEAM = ENV | {"team": "single"}, ENV


class Size(NamedTuple):
    """Steps, prompts a step, and steps between held-out evaluations (0: none)."""

    steps: int
    prompts: int
    eval_every: int


class Measured(NamedTuple):
    """CPU seconds after each step, peak resident memory in MB, and samples a step; on a GPU, wall seconds and allocated
    GPU memory."""

    seconds: list[float]
    peak_mb: float
    samples: int

    @property
    def rate(self) -> float:
        """Samples per second of the steps after the first."""
        return self.samples * (len(self.seconds) - 1) / (self.seconds[-1] - self.seconds[0])


class Point(NamedTuple):
    """Held-out success after a number of steps, and the minutes of training so far."""

    step: int
    minutes: float
    success: float


def run_child(command: Sequence[str | Path], folder: Path) -> tuple[str, float]:
    """Runs a command; returns its standard output and its peak resident memory in MB. Raises SystemExit if it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    out, errors = folder / "out", folder / "errors"
    with out.open("w") as stdout, errors.open("w") as stderr:
        child = subprocess.Popen(list(map(str, command)), stdout=stdout, stderr=stderr, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command[1]} ended with {child.returncode}:\n{errors.read_text()[-2000:]}")
    return out.read_text(), usage.ru_maxrss / 1024


def run_ours(env: dict[str, Any], size: Size, folder: Path, name: str, device: str, seed: int) -> Measured:
    """Trains a run of palestra called `name` in `folder`; returns its measurements."""
    lora = {"type": "lora", "base": BASE, "dtype": "float32", "rank": RANK, "lr": LR}
    lora |= {"sampling": {"max_tokens": MAX_TOKENS}}
    seats = make_env(**env).seats
    tree = {
        "seed": seed,
        "steps": size.steps,
        "episodes": size.prompts,
        "env": env,
        "policies": dict.fromkeys(seats, lora),
        "algorithm": {"type": "grpo", "branch_at": "turn", "continue_from": "random"}
        | {"group_size": GROUP_SIZE, "scale": "none"},
        "checkpoint_every": size.eval_every or size.steps,
        "keep_every": size.eval_every,
        "max_num_seqs": 64,
        "device": device,
    }
    config = folder / f"{name}.yaml"
    config.write_text(to_yaml(tree))
    _, peak = run_child([sys.executable, "-m", "palestra", "train", config, "--name", name, "--root", folder], folder)
    steps = [line for line in read_lines(folder / name / "timings.jsonl") if line["policy"] == "team"]
    clock = "cpu_s" if device == "cpu" else "s"
    seconds = list(accumulate(line[f"rollout_{clock}"] + line[f"train_{clock}"] for line in steps))
    peak = peak if device == "cpu" else steps[-1]["gpu_memory_gib"] * 1024
    return Measured(seconds, peak, size.prompts * GROUP_SIZE * len(seats))


def run_peer(python: Path, script: str, size: Size, folder: Path, agents: int, device: str, seed: int) -> Measured:
    """Trains a peer's run with its adapters saved in `folder`/peer; returns its measurements."""
    problems = folder / "problems.json"
    problems.write_text(json.dumps(make_problems(size.steps * size.prompts)))
    task = {"model": resolve_base(BASE), "problems": str(problems), "folder": str(folder / "peer"), "seed": seed}
    task |= {"group_size": GROUP_SIZE, "prompts_per_step": size.prompts, "max_tokens": MAX_TOKENS}
    task |= {"steps": size.steps, "rank": RANK, "lr": LR, "save_every": size.eval_every, "device": device}
    said, peak = run_child([python, HERE / script, json.dumps(task)], folder)
    found = json.loads(said.strip().splitlines()[-1])
    return Measured(found["seconds"], found["gpu_mb"] or peak, size.prompts * GROUP_SIZE * agents)


def make_problems(count: int) -> list[dict[str, str]]:
    """Returns training instances: the prompts that palestra's agent sees, as text, and the right answers."""
    tokenizer, env = tokenizer_of(BASE), make_env(**ALONE)
    rows = []
    for seed in range(count):
        ((_, chat),) = env.reset(seed).observations.items()
        prompt = tokenizer.apply_chat_template(list(chat.messages), tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "gold": env.problem.answer})
    return rows


def held_out_success(target: Target) -> float:
    """Share of held-out sums that greedy answers solve."""
    setup = open_text_eval(target, {}, {}, sampling={"temperature": 0}, in_process=True)
    return setup.play([setup.policy_names], HELD_OUT, 0, lambda played, of: None)[0].metrics["success"]


def peer_target(adapter: Path, folder: Path, device: str) -> Target:
    """Returns the evaluation target of an adapter in PEFT's format."""
    frozen = {"type": "frozen", "base": BASE, "dtype": "float32", "path": str(adapter)}
    frozen |= {"sampling": {"max_tokens": MAX_TOKENS}}
    config = folder / "peer.yaml"
    config.write_text(to_yaml({"env": ALONE, "policies": {"reasoner": frozen}, "max_num_seqs": 64, "device": device}))
    return find_target(config)


def learning_curve(name: str, measured: Measured, every: int, target: Callable[[int], Target]) -> list[Point]:
    """Evaluates the held-out sums with the adapters saved after every `every` steps; prints and returns the curve."""
    points = []
    for step in range(every, len(measured.seconds) + 1, every):
        points.append(Point(step, measured.seconds[step - 1] / 60, held_out_success(target(step))))
        print(f"{name}, step {step}: {points[-1].success:.1%} after {points[-1].minutes:.2f} min", flush=True)
    return points


def compare_learning(ours: Sequence[Point], trl: Sequence[Point]) -> float | None:
    """Returns palestra's minutes until TRL's final success, over TRL's; None if palestra does not reach it."""
    reached = [point.minutes for point in ours if point.success >= trl[-1].success]
    return reached[0] / trl[-1].minutes if reached else None


def peers_python(peers: str) -> Path:
    """Returns the Python with the peers installed: this one for "here", else that of a virtual environment, which is
    made if it does not exist."""
    if peers == "here":
        return Path(sys.executable)
    python = Path(peers) / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", peers], check=True)
        packages = REQUIREMENTS.read_text().split()
        for some in (packages[:1], packages[1:]):  # torch first and alone, so that pip keeps the build chosen here
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *some], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only speed and memory")
    parser.add_argument("--only", choices=["trl", "comlrl"], help="compare with one of the peers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", default=str(HERE / ".venv-real"), help='a virtual environment, or "here"')
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.quick and given.peers != "here" and not (Path(given.peers) / "bin/python").exists():
        absent("TRL and CoMLRL in an environment of their own: this script without --quick makes it")
    python, device, seed = peers_python(given.peers), given.device, given.seed
    size, short = (Size(2, 2, 0),) * 2 if given.quick else (Size(20, 8, 4), Size(4, 8, 0))
    every = size.eval_every
    figures: dict[str, float | None] = {}
    curves: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.only != "comlrl":
            ours = run_ours(ALONE, size._replace(steps=size.steps * (3 if every else 1)), folder, "alone", device, seed)
            print_line("palestra, one agent", ours)
            trl = run_peer(python, "compare_trl.py", size, folder, 1, device, seed)
            print_line("TRL GRPOTrainer", trl)
            figures |= {"samples_vs_trl": ours.rate / trl.rate, "peak_vs_trl": ours.peak_mb / trl.peak_mb}
            if every:
                own = learning_curve("palestra", ours, every, lambda step: find_target(folder / "alone", step=step))
                adapters = folder / "peer"
                peer = learning_curve("TRL", trl, every, lambda step: peer_target(adapters / str(step), folder, device))
                curves = {"palestra": own, "trl": peer}
                figures["success_minutes_vs_trl"] = compare_learning(own, peer)
        if given.only != "trl":
            team = run_ours(TEAM, short, folder, "team", device, seed)
            print_line("palestra, two agents", team)
            comlrl = run_peer(python, "compare_comlrl.py", short, folder, 2, device, seed)
            print_line("CoMLRL MAGRPO", comlrl)
            figures["samples_vs_comlrl"] = team.rate / comlrl.rate
    found = {key: value for key, value in figures.items() if value is not None}
    used = {"device": "cpu" if device == "cpu" else torch.cuda.get_device_name(), "seed": seed}
    targets = {key: TARGETS[key] for key in figures}
    finish("real", found, targets, page="real", is_stored=not given.quick, **used, curves=curves)


def print_line(name: str, measured: Measured) -> None:
    print(f"{name}: {measured.rate:.2f} samples per second, {measured.peak_mb:,.0f} MB at most", flush=True)


if __name__ == "__main__":
    main()
