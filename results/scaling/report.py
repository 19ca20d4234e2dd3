"""The page docs/results-scaling.md, made of the tables that run.py measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.table import Table

from results.ledger import commit, processor

PAGE = Path("docs/results-scaling.md")


def page(tables: Sequence[Table]) -> str:
    """The page docs/results-scaling.md: the tables as Markdown."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    where = f"{cores} cores of {processor()}, {platform.system()}, Python {platform.python_version()}"
    parts = [
        "# What scaling costs",
        f"Made by `python results/scaling/run.py --report`, whose docstring describes the figures: commit {commit()}, "
        f"{where}, gRPC {grpc.__version__}; load {load:.1f} at the end.",
        "Script and figures are in [results/scaling/](../results/scaling/); without `--report` it measures them again "
        "and prints both.",
    ]
    for table in tables:
        columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
        head, *rows = ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
        marks = "| --- |" + " ---: |" * (len(columns) - 1)
        parts += [f"## {str(table.title).capitalize()}", "\n".join([head, marks, *rows])]
    return "\n\n".join(parts) + "\n"
