"""Measures the scores of learning tests with other seeds and writes their distribution into the table.

    python tests/learning_scores.py tests/text/algorithms/test_kto.py -k simpo    arguments are pytest's
    python tests/learning_scores.py --seeds 20 tests/vector/algorithms

pytest names the tests that fail with another seed before they have a score; at the end each score is
listed, with what is wrong with its bar.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.learning import MIN_SEEDS, RECORDS, TABLE, read_table

ROOT = TABLE.parents[1]


def scores_of(seed: int, arguments: list[str]) -> dict[str, float]:
    """Returns the scores of the learning tests that pytest selects, with all generators seeded by `seed`."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "scores.jsonl")
        records.touch()
        os.environ[RECORDS] = str(records)
        pytest.main(["-q", "--tb=line", "--only-learning", f"--reseed={seed}", f"--rootdir={ROOT}", *arguments])
        return dict(json.loads(line) for line in records.read_text().splitlines())


def write_table(found: dict[str, list[float]]) -> None:
    """Replaces the distributions of the scores in `found`; a new score gets no bar, which the author writes."""
    table = json.loads(TABLE.read_text())
    for key, values in found.items():
        entry = table.setdefault(key, {"bar": None, "reached": "above"})
        entry["mean"] = float(f"{np.mean(values):.4g}")
        entry["deviation"] = float(f"{np.std(values, ddof=1):.4g}")
        entry["seeds"] = len(values)
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(table.items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, metavar="N")
    options, arguments = parser.parse_known_args()
    found: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for key, value in scores_of(seed, arguments).items():
            found.setdefault(key, []).append(value)
    write_table(found)
    table = read_table()
    for key, values in found.items():
        entry = table[key]
        print(f"{key}\n    {entry.mean} ± {entry.deviation}, bar {entry.bar} {entry.problem()}", np.round(values, 3))


if __name__ == "__main__":
    main()
