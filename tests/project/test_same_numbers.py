"""The numbers of four runs equal, bit for bit, those before the package was renamed and regrouped.

A digest covers the numbers of each line of the metrics and the evaluations, sorted, without their keys, so that keys
may be renamed. Results depend on the processor's vector instructions in the last bit: digests are kept per kind of
processor, and the test is skipped on others. To add one, run an old commit on it:
`python tests/project/test_same_numbers.py`.
"""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import PUBLIC, serving
from helpers.warm_processes import PALESTRA

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("same_numbers.json")
RUNS = {
    "text": (
        "demo.yaml",
        "steps=3 evals.dev.episodes=16 evals.dev.every=2 evals.test.episodes=16",
    ),
    "vector": ("games/kuhn_ppo.yaml", "env_steps=40000 evals.held_out.episodes=64"),
    "psro": (
        "populations/kuhn_psro.yaml",
        "population.iterations=2 population.env_steps=4000 population.games_per_cell=200",
    ),
}


def processor() -> str:
    """The vendor and the vector instructions that PyTorch uses."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    vendor = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")
    return f"{vendor} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__.split('+')[0]}"


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def digest(lines: list[Any]) -> str:
    text = "\n".join(" ".join(map(repr, sorted(numbers(line)))) for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def train(folder: Path, name: str) -> str:
    """Runs `palestra train` on a shipped config with fewer steps; returns the digest of its logs."""
    config, changes = RUNS[name]
    command = [*PALESTRA, "train", f"configs/{config}", "--root", str(folder), "--name", name]
    for change in changes.split():
        command += ["--set", change]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    files = [folder / name / f"{kind}.jsonl" for kind in ("metrics", "evals")]
    return digest([json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()])


def serve(folder: Path) -> str:
    """Trains and samples with the official client; returns the digest of losses, log-probabilities and tokens."""
    with serving(folder / "service") as url:
        program = [*PALESTRA[:1], str(Path(__file__).with_name("same_numbers_client.py")), url, PUBLIC]
        done = subprocess.run(program, check=True, capture_output=True, text=True)
    return digest([json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))])


def measure(name: str, folder: Path) -> str:
    return serve(folder) if name == "service" else train(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, "service"])
def test_metrics_equal_the_recorded_digests(name: str, tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text()).get(processor(), {})
    if name not in kept:
        pytest.skip(f"no digest was kept on {processor()}")
    assert measure(name, tmp_path) == kept[name]


if __name__ == "__main__":
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        kept[processor()] = {name: measure(name, Path(folder)) for name in [*RUNS, "service"]}
    KEPT.write_text(json.dumps(kept, indent=2) + "\n")
    print(json.dumps(kept[processor()]))
