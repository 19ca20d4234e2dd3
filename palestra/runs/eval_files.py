"""Files of a run that belong to one evaluation after one step: its replays, or its episodes.

FOLDER/EVALUATION/before.parquet, step-000012.parquet
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

from palestra.runs.checkpoints import step_name

REPLAYS_FOLDER = "replays"  # of vectorised envs: runs/replays.py
EVAL_EPISODES_FOLDER = "eval_episodes"  # of language agents: runs/episodes.py
MAX_EVAL_EPISODES = 300  # episodes of an evaluation that are written, each of another instance
BEFORE_TRAINING = "before"  # stem of the file of the evaluation before training


def eval_file(folder: str, evaluation: str, step: int) -> str:
    """Returns the path, in a run, of the file of `evaluation` after `step` (-1: before training) in `folder`.
    Characters of the name with a meaning in paths are percent-encoded."""
    stem = BEFORE_TRAINING if step < 0 else step_name(step)
    return f"{folder}/{quote(evaluation, safe=' ')}/{stem}.parquet"


def list_eval_files(folder: Path) -> dict[str, list[int]]:
    """Returns the steps after which a folder has files, in order, by evaluation; -1 is before training."""
    found: dict[str, list[int]] = {}
    for file in folder.glob("*/*.parquet"):
        step = re.fullmatch(r"step-(\d{6,12})", file.stem)
        if step or file.stem == BEFORE_TRAINING:
            found.setdefault(unquote(file.parent.name), []).append(int(step[1]) if step else -1)
    return {name: sorted(steps) for name, steps in sorted(found.items())}
