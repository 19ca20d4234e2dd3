"""Compares predictions of `palestra plan` with measured runs: 1M to 600M parameters, adapters, waiting envs, Ray, gRPC.

    python bench/capacity.py             nineteen runs, about fifteen minutes of CPU time
    python bench/capacity.py --quick     twelve runs of fewer steps, about six minutes
    python bench/capacity.py --simulate  only the simulated cluster: leagues on 1 to 1,000 workers (cluster.py)
    python bench/capacity.py --rows 1M-1 20M-8 --markdown rows.md
    python bench/capacity.py --gpu       the plan of an H200 compared with the step that bench/gpu.py measured there
    python bench/capacity.py --config palestra/configs/demo.yaml    the run of a config, with its own policies

The machine is calibrated again before each run (builders/calibration.py, some seconds on three small models, none of
them a base here), since other programs may use its cores. Models have random weights, and all answers have their full
length. Seconds are medians over steps, without the first.

Compared are CPU seconds of a step, of all processes together, and, where envs wait, wall seconds of a step. The
prediction of wall seconds uses the wall seconds that each CPU second of the calibration took. Figures, where a ratio is
predicted over measured:

    within_25     share of the runs whose ratio lies within 25 % (|ratio - 1| <= 0.25), of both kinds where envs wait
    runs          their number
    median_ratio  median of the ratios of CPU seconds
    worst_ratio   the ratio that lies farthest from 1
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cluster import simulate
from rich.console import Console
from rich.table import Table
from scale import servers
from soak_parts.memory import cpu_seconds, process_tree
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM

from palestra.builders.calibration import Calibration, NoiseEnv, noise_config
from palestra.builders.capacity import Machine, decode_work
from palestra.builders.capacity_phases import StepTime, step_time
from palestra.builders.capacity_plan import Fleet, layout_of, plan_capacity
from palestra.builders.capacity_probe import probe_episodes
from palestra.builders.capacity_workload import EpisodeShape, build_workload
from palestra.builders.machines import published_machine
from palestra.builders.text_config import TextConfig
from palestra.config import dump, load, override, validate
from palestra.engine.bases import resolve_base
from palestra.launch.distributed import build
from palestra.runs import Run
from palestra.training.loop import Callback, run_training
from palestra.types import Metrics

NOISE = f"{NoiseEnv.__module__}:{NoiseEnv.__qualname__}"
TARGETS = {"within_25": 0.9, "runs": 12}
TOLERANCE = 0.25
CORES, REPEATS = 2, 2  # cores of the machine in the plan; repeats of each calibration probe
WORKERS = (1, 3, 10, 30, 100, 300, 1000)  # of the simulated cluster
SHAPES = {  # hidden size, MLP size, layers, query heads, key heads, width of a head, vocabulary
    "1M": (128, 384, 5, 4, 2, 32, 512),
    "5M": (256, 768, 6, 8, 4, 32, 2048),
    "20M": (384, 1152, 10, 12, 4, 32, 8192),
    "60M": (512, 1536, 16, 8, 4, 64, 16384),
    "135M": (576, 1536, 30, 9, 3, 64, 49152),  # SmolLM2-135M, a Llama model; the others are Qwen3 models
    "600M": (1024, 3072, 28, 16, 8, 128, 151936),  # Qwen3-0.6B
}
console = Console(width=130)


@dataclass(frozen=True)
class Row:
    """A run to measure: the size of its base, adapters (a seat each), worker processes (0: none) and their backend,
    `served` if envs are on a gRPC server, staleness, joint steps of an episode (`turns`), seconds that an env step
    waits, episodes of a step, answers to each prompt (`group`), characters of an observation (`letters`), tokens of an
    answer, and training steps."""

    name: str
    size: str
    adapters: int = 1
    workers: int = 0
    backend: str = "local"
    served: bool = False
    staleness: int = 0
    turns: int = 1
    wait_s: float = 0.0
    episodes: int = 16
    group: int = 8
    letters: int = 48
    tokens: int = 16
    steps: int = 6


ROWS = (
    Row("1M-1", "1M"),
    Row("1M-4", "1M", adapters=4, episodes=8),
    Row("1M-16", "1M", adapters=16, episodes=4),
    Row("5M-1", "5M", letters=96),
    Row("5M-4", "5M", adapters=4, episodes=4),
    Row("20M-1", "20M", episodes=8),
    Row("20M-8", "20M", adapters=8, episodes=2, steps=4),
    Row("60M-1", "60M", episodes=8, steps=4),
    Row("135M-1", "135M", episodes=4, steps=4),
    Row("135M-2", "135M", adapters=2, episodes=2, steps=4, tokens=12),
    Row("1M-1-wait-0.5", "1M", turns=2, wait_s=0.5, episodes=8),
    Row("1M-4-wait-2", "1M", adapters=4, wait_s=2.0, episodes=4),
    Row("5M-1-wait-1-ahead", "5M", staleness=1, wait_s=1.0, episodes=8),
    Row("1M-1-workers-1", "1M", workers=1),
    Row("20M-1-workers-2", "20M", workers=2, episodes=8, steps=5),
    Row("5M-2-workers-2-wait-0.2", "5M", adapters=2, workers=2, wait_s=0.2, turns=2, episodes=4, steps=5),
    Row("600M-1", "600M", episodes=2, group=4, tokens=8, steps=3),
    Row("5M-1-grpc-wait-0.5", "5M", served=True, turns=2, wait_s=0.5, episodes=8),
    Row("5M-2-ray-1", "5M", adapters=2, workers=1, backend="ray", episodes=8),
)
LEFT_OUT_OF_QUICK = {"5M-4", "60M-1", "135M-2", "1M-4-wait-2", "600M-1", "5M-1-grpc-wait-0.5", "5M-2-ray-1"}


def random_base(size: str, folder: Path) -> Path:
    """Saves a model of this size with random weights, with the tokenizer of the shipped base; returns its folder."""
    path = folder / size
    if path.exists():
        return path
    hidden, inner, layers, heads, kv_heads, width, vocab = SHAPES[size]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": 4,
    }
    torch.manual_seed(0)
    config: PreTrainedConfig = LlamaConfig(**sizes) if size == "135M" else Qwen3Config(**sizes)
    model = LlamaForCausalLM(config) if size == "135M" else Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(resolve_base("tiny"))
    tokenizer.add_tokens([f"w{i}" for i in range(len(tokenizer), vocab)])  # so that answers differ, and have a gradient
    tokenizer.save_pretrained(path)
    return path


def config_of(row: Row, base: Path, *, wait: bool = True, at: str | None = None) -> TextConfig:
    """The config of a row's run, with envs of the server `at`; without `wait`, its envs do not wait."""
    env = {"turns": row.turns, "seconds": row.wait_s if wait else 0.0, "letters": row.letters}
    env |= {"at": [at]} if at else {}
    return noise_config(
        {"base": str(base), "sampling": {"max_tokens": row.tokens, "stop_at_eos": False}},
        row.episodes,
        row.group,
        adapters=row.adapters,
        env=env,
        steps=row.steps,
        staleness=row.staleness,
        backend={"type": row.backend, "workers": row.workers} if row.workers else {"type": "inline"},
        device="cpu",
    )


def predict(config: TextConfig, row: Row, base: Path, machine: Machine) -> StepTime:
    """The step time that the plan predicts."""
    episode = replace(probe_episodes(config_of(row, base, wait=False)), env_cpu_s=0.0, env_wait_s=row.wait_s)
    workload = build_workload(config, episode, device="cpu", cache_bytes=machine.cache_bytes)
    return step_time(workload, machine, layout_of(config, CORES))


class Stopwatch(Callback):
    """Wall and CPU time in seconds at the end of each step; CPU time is that of this process and its descendants."""

    def __init__(self) -> None:
        self.wall, self.cpu = [], []

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        started = [pid for pid in process_tree(os.getpid()) if pid != os.getpid()]
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time() + sum(map(cpu_seconds, started)))


def compare_config(path: Path) -> Iterator[Compared]:
    """Predicts and measures six steps of a config's run, without evaluations. Lengths of episodes and answers are those
    of its untrained policies."""
    config = validate(TextConfig, override(load(path), ["steps=6", "evals={}"]))
    machine = Calibration("cpu").measure(REPEATS)
    episode = probe_episodes(config, own_policies=True)
    workload = build_workload(config, episode, device="cpu", cache_bytes=machine.cache_bytes)
    planned = step_time(workload, machine, layout_of(config, CORES))
    row = Row(path.stem, "-", adapters=len(config.policies), turns=episode.turns, episodes=config.episodes)
    yield Compared(row, planned, machine.slowdown, *measure(config))


def measure(config: TextConfig) -> tuple[float, float]:
    """CPU and wall seconds of a step: medians, without the first."""
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(config)) as run:
        run_training(build(config), run, watch := Stopwatch())
    return tuple(statistics.median(b - a for a, b in itertools.pairwise(times)) for times in (watch.cpu, watch.wall))


@dataclass(frozen=True)
class Compared:
    """Predicted and measured seconds of a row."""

    row: Row
    predicted: StepTime
    slowdown: float
    cpu_s: float
    wall_s: float

    @property
    def cpu_ratio(self) -> float:
        return self.predicted.busy_s / self.cpu_s

    @property
    def wall_ratio(self) -> float:
        return self.predicted.wall_s / self.wall_s

    @property
    def compared_ratios(self) -> list[float]:
        """The ratios that count: that of CPU seconds, and where envs wait that of wall seconds."""
        return [self.cpu_ratio, *([self.wall_ratio] if self.row.wait_s else [])]

    @property
    def hit(self) -> bool:
        return all(abs(ratio - 1) <= TOLERANCE for ratio in self.compared_ratios)


def compare(rows: Sequence[Row], folder: Path) -> Iterator[Compared]:
    """Calibrates the machine, predicts and measures, for each row in turn."""
    calibration = Calibration("cpu")
    for row in rows:
        base = random_base(row.size, folder)
        machine = calibration.measure(REPEATS)
        planned = predict(config_of(row, base), row, base, machine)
        with servers(int(row.served), NOISE) as started:
            at = started[0].address if started else None  # type: ignore[attr-defined]
            found = Compared(row, planned, machine.slowdown, *measure(config_of(row, base, at=at)))
        console.print(
            f"{row.name}: CPU {found.predicted.busy_s:.3f} / {found.cpu_s:.3f} = {found.cpu_ratio:.2f}, wall "
            f"{found.predicted.wall_s:.3f} / {found.wall_s:.3f} = {found.wall_ratio:.2f}"
        )
        yield found


HEADS = (
    "run",
    "base",
    "adapters",
    "processes",
    "ahead",
    "wait s",
    "wall per CPU s",
    "CPU s: plan",
    "run",
    "ratio",
    "wall s: plan",
    "run",
    "ratio",
    "",
)


def cells(found: Compared) -> tuple[str, ...]:
    row, plan = found.row, found.predicted
    numbers = (plan.busy_s, found.cpu_s, found.cpu_ratio, plan.wall_s, found.wall_s, found.wall_ratio)
    setting = (
        row.name,
        row.size,
        row.adapters,
        1 + row.workers + row.served + (row.backend == "ray"),
        row.staleness,
        row.turns * row.wait_s,
        f"{found.slowdown:.1f}",
    )
    return (*map(str, setting), *(f"{n:.2f}" for n in numbers), "hit" if found.hit else "miss")


GPU_HEADS = ("H200", "plan s", "measured s", "ratio")
ON_H200 = {  # seconds measured by bench/gpu.py (docs/scaling/gpu.md)
    "135m": {"sampling": 0.57, "training": 0.53, "whole step": 1.20, "sampling without graphs": 7.4},
    "0.6b": {"sampling": 0.76, "training": 0.60, "whole step": 1.53, "sampling without graphs": 6.7},
}


def gpu_rows(folder: Path) -> list[tuple[str, ...]]:
    """Table rows of planned and measured seconds on an H200. The plan uses the GPU's data sheet; steps are those of
    bench/gpu.py: 16 prompts of 96 tokens, 8 answers of 128 tokens each, one adapter of rank 16, bfloat16."""
    from gpu import SHAPES as GPU_SHAPES

    gpu, rows = published_machine("h200"), []
    for shape, measured in ON_H200.items():
        GPU_SHAPES[shape].save_pretrained(folder / shape)
        sampling = {"max_tokens": 128, "stop_at_eos": False}
        policy = {"base": str(folder / shape), "rank": 16, "dtype": "bfloat16", "sampling": sampling}
        episode = EpisodeShape(1, 1.0, 96)
        found = plan_capacity(noise_config(policy, 16, 8), gpu, episode, Fleet(gpus=1), answer_tokens=128)
        seconds = {phase.name: phase.seconds for phase in found.phases}
        plain = decode_work(replace(found.workload.policies[0].load, graphs=False), 128, 128, prompt=96)
        planned = {
            "sampling": seconds["prefill"] + seconds["decode"],
            "training": seconds["forward and backward"] + seconds["optimizer"] + seconds["publishing"],
            "whole step": found.step.wall_s,
            "sampling without graphs": seconds["prefill"] + gpu.seconds(plain),
        }
        rows += [
            (f"{shape}: {name}", f"{planned[name]:.2f}", f"{s:.2f}", f"{planned[name] / s:.2f}")
            for name, s in measured.items()
        ]
    return rows


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def figures(found: Sequence[Compared]) -> dict[str, float]:
    ratios = [ratio for each in found for ratio in each.compared_ratios]
    return {
        "within_25": sum(each.hit for each in found) / len(found),
        "runs": len(found),
        "median_ratio": statistics.median(each.cpu_ratio for each in found),
        "worst_ratio": max(ratios, key=lambda ratio: abs(math.log(ratio))),
    }


def simulated(workers: Sequence[int]) -> list[tuple[str, ...]]:
    """Table rows of leagues on simulated clusters of each size. A cluster loses a node every 60,000 worker-seconds;
    each learner trains for eight slices."""
    rows = []
    for count in workers:
        line = simulate(count, max(3, count * 5 // 4), 8, False)
        shown = (line["tasks"], line["tasks_per_s"], 100 * line["worker_use"], 100 * line["lost_share"])
        driver = (line["restart_delay_s"], line["cpu_ms_first"], line["cpu_ms_last"], line["rss_mb"])
        rows.append((str(count), *(f"{number:.4g}" for number in (*shown, *driver))))
        console.print(" ".join(rows[-1]))
    return rows


SIMULATED_HEADS = (
    "workers", "tasks", "tasks/s", "use %", "lost %", "restart s", "driver ms/task, first", "last quarter", "driver MB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="twelve runs of fewer steps")
    parser.add_argument("--simulate", action="store_true", help="only the simulated cluster")
    parser.add_argument("--gpu", action="store_true", help="compare the plan of an H200 with measured seconds")
    parser.add_argument("--rows", nargs="*", default=[], help="names of runs (default: all)")
    parser.add_argument("--config", type=Path, help="a config whose run to measure in place of these")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="sizes of the simulated cluster")
    parser.add_argument("--markdown", type=Path, help="also write the table as Markdown to this file")
    args = parser.parse_args()
    if args.gpu:
        with tempfile.TemporaryDirectory() as folder:
            text, shown = markdown(GPU_HEADS, rows := gpu_rows(Path(folder))), (GPU_HEADS, rows)
        line = {"bench": "capacity_gpu", "figures": {row[0]: float(row[3]) for row in rows}}
    elif args.simulate:
        text, shown = markdown(SIMULATED_HEADS, rows := simulated(args.workers)), (SIMULATED_HEADS, rows)
        last = {"tasks_per_s": float(rows[-1][2]), "worker_use": float(rows[-1][3]) / 100}
        line = {"bench": "capacity_simulated", "figures": last}
    else:
        chosen = [row for row in ROWS if (row.name in args.rows if args.rows else True)]
        if args.quick and not args.rows:
            chosen = [replace(row, steps=4) for row in chosen if row.name not in LEFT_OUT_OF_QUICK]
        with tempfile.TemporaryDirectory() as folder:
            found = list(compare_config(args.config) if args.config else compare(chosen, Path(folder)))
        text, shown = markdown(HEADS, [cells(each) for each in found]), (HEADS, [cells(each) for each in found])
        line = {"bench": "capacity", "figures": figures(found), "targets": TARGETS}
    table = Table(*shown[0])
    for cell in shown[1]:
        table.add_row(*cell)
    console.print(table)
    if args.markdown:
        args.markdown.write_text(text)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
