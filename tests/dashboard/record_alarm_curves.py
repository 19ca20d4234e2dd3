"""Records the curves of twenty good and twenty failed runs for test_alarm_curves.py, as alarm_curves.json.

PYTHONPATH=tests python tests/dashboard/record_alarm_curves.py   (some ten CPU minutes)
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import palestra as pl
from palestra.core.config import load, override
from palestra.core.failures import RunFailed
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_status import metric_columns

CURVES = Path(__file__).with_name("alarm_curves.json")
LENGTHS = (8, 12, 16, 24)
READ = {  # by the rules
    *("entropy", "zero_std_fraction", "tokens", "reward/form", "invalid", "local_reward", "team_reward"),
    *("truncated_fraction", "success", "failed", "episodes", "instances", "samples"),
}
FAILED = {
    "a learning rate of 0.3": ["policies.planner.lr=0.3", "policies.executor.lr=0.3"],
    "a temperature of 0.01": [f"policies.{name}.sampling.temperature=0.01" for name in ("planner", "executor")],
    "max_tokens: 1": [f"policies.{name}.sampling.max_tokens=1" for name in ("planner", "executor")],
    "an env that fails on some instances": ["env.type=helpers.broken_paths:CrashingPath", "max_failed=1.0"],
    "an env that pays for nonsense": ["env.type=helpers.broken_paths:NonsensePath"],
}


def record(root: str, length: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """Returns what rules read of a new run of the demo, with smaller boards and fewer of them."""
    small = [
        f"steps={length}",
        f"seed={seed}",
        f"name=run-{seed}",
        "episodes=12",
        "env.size=5",
        "evals.dev.episodes=40",
    ]
    tree = override(load("configs/demo.yaml"), [*small, f"evals.dev.every={length // 4}", *settings])
    del tree["evals"]["test"]
    with contextlib.suppress(RunFailed):  # one without an update
        pl.train(tree, root=root)
    opened = CatalogRun(Path(root), f"run-{seed}")
    opened.refresh()
    logs = {"metrics": opened.metrics, "evals": opened.evals}
    return {kind: {name: kept(metric_columns(log, name)) for name in log.names()} for kind, log in logs.items()}


def kept(columns: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the columns that rules read, rounded."""
    named = {key: values for key, values in columns.items() if key in READ or key.startswith("success.")}
    return {key: [round(value, 4) for value in values.tolist()] for key, values in named.items()}


def main() -> None:
    lines = []
    with tempfile.TemporaryDirectory() as root:
        for number, length in enumerate(LENGTHS):
            kinds: list[tuple[str, list[str]]] = [("good", [])] * 5 + list(FAILED.items())
            for seed, (kind, settings) in enumerate(kinds):
                found = record(root, length, 10 * number + seed, settings)
                lines.append(json.dumps({"kind": kind, "length": length, **found}))
                print(kind, length, flush=True)
    CURVES.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
