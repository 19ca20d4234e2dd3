"""The official clients, each set of versions in its own venv, made by `make test-clients`."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.engine.bases.names import resolve_base

CLIENTS = Path(__file__).parents[2] / ".cache" / "clients"
PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
BASES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B")  # of the recipes
REVISION = "0" * 40
# Qwen's names for the tiny tokenizer's special tokens: cookbook's renderers look for them.
DIALECT = {"<|user|>": "<|im_start|>", "<|end|>": "<|im_end|>", "<|system|>": "<think>", "<|assistant|>": "</think>"}


def seed_hub(home: Path, bases: Mapping[str, Path] | None = None) -> None:
    """Makes a Hugging Face cache in which public names are the tokenizers of local bases, so that clients need no
    network."""
    for base, folder in (bases or dict.fromkeys(BASES, Path(resolve_base("tiny")))).items():
        repo = home / "hub" / f"models--{base.replace('/', '--')}"
        snapshot = repo / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(REVISION)
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            text = (folder / name).read_text()
            for ours, qwens in DIALECT.items():
                text = text.replace(ours, qwens)
            (snapshot / name).write_text(text)


@dataclass(frozen=True)
class Official:
    """Runs programs with the official clients of a set."""

    url: str
    home: Path

    def run(
        self,
        clients: str,
        *command: str,
        key: str = "tml-any",
        seconds: float = 300,
        folder: Path | None = None,
        typed: str = "",
        fails: bool = False,
    ) -> str:
        """The output of `python *command` in the set's venv, started in `folder`. Raises AssertionError with the end of
        the output unless the command succeeds, or, if it should, `fails`."""
        python = CLIENTS / clients / "bin" / "python"
        assert python.exists(), f"{python} is not there: `make test-clients` makes it"
        done = subprocess.run(
            [str(python), *command],
            env=self._environment(key),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            cwd=folder,
            input=typed,
        )
        assert bool(done.returncode) == fails, done.stdout[-5000:]
        return done.stdout

    def report(self, clients: str, program: str, **given: Any) -> Any:
        """The JSON that one of the programs here prints last."""
        return json.loads(self.run(clients, str(PROGRAMS / f"{program}.py"), **given).splitlines()[-1])

    def recipe(self, clients: str, name: str, log: Path, *, seconds: float = 300, **flags: Any) -> list[dict[str, Any]]:
        """The metrics that a cookbook recipe logged, a row for each step."""
        flags = {"behavior_if_log_dir_exists": "delete", "log_path": log} | flags
        words = [f"{flag}={value}" for flag, value in flags.items()]
        self.run(clients, "-m", f"tinker_cookbook.recipes.{name}.train", *words, seconds=seconds)
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def _environment(self, key: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        kept["HOME"] = str(self.home)  # where recipes without a log_path write
        names = {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        for vendor in ("TINKER", "MINT"):
            names |= {f"{vendor}_BASE_URL": self.url, f"{vendor}_API_KEY": key}
        return kept | names
