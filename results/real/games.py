"""Rows of docs/results-real.md that are not scored by held-out success: self-play in Kuhn poker, programs on the
service.

`run.py` runs them with `--only kuhn/` and `--only service/`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import palestra
from palestra.core.config import load
from palestra.populations.build.validation import validate_population
from palestra.populations.population import Mix, Sides
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import GameTree, expected_returns, mixture_policy, uniform_policy
from palestra.populations.workers.lm_oracle import LanguageOracle, LanguageWorker
from palestra.populations.workers.member_loader import UNIFORM_MEMBER
from palestra.runs import read_lines
from palestra.text.policies.base import Policy
from palestra.text.policy_configs import FrozenConfig

KUHN = Path(__file__).parent / "configs/text_kuhn_self_play.yaml"
SEATS = ("player_0", "player_1")
PUBLIC = "Qwen/Qwen3-0.6B"  # the model name that the programs request
Result = dict[str, Any]

# ---- Kuhn poker


def kuhn_self_play(seed: int, runs: Path, config: Path = KUHN) -> Result:
    """Trains two adapters by self-play, or resumes that run; returns figures of the average policy over their history.

    All figures are exact, from the probabilities of the words: NashConv by slice, payoffs (means over both seats)
    against opponents that were not trained against, and the probability of a bet at each information state.
    """
    name = f"kuhn-self-play-{seed}"
    path = runs / name
    tree = load(config) | {"name": name, "seed": seed}
    palestra.train(resume=path) if path.exists() else palestra.train(tree, root=runs)
    oracle = validate_population(tree).oracle
    assert isinstance(oracle, LanguageOracle)
    worker = LanguageWorker(oracle, Sides.of(SEATS))
    assert worker.action_reader is not None and worker.exact is not None
    game = worker.action_reader.tree
    members = {folder.name: folder for folder in (path / "members").iterdir()}
    policies = {name: worker.action_probabilities(name, members) for name in [UNIFORM_MEMBER, *members]}
    untrained = worker.action_reader.policy("untrained", untrained_policy(worker))
    trained = worker.exact.mixture_policy(history(policies), policies.__getitem__)
    metrics, timings = read_lines(path / "metrics.jsonl"), read_lines(path / "timings.jsonl")
    spent = sum(line["seconds"] * line["cpu_percent"] / 100 for line in timings)
    return {
        "task": "kuhn",
        "method": "self-play",
        "seed": seed,
        "nash_conv_untrained": nash_conv(game, untrained),
        "nash_conv": [line["nash_conv"] for line in metrics if "nash_conv" in line],
        "payoffs_untrained": payoffs(game, untrained, {}),
        "payoffs": payoffs(game, trained, {"untrained": untrained}),
        "bets": {text: float(row[1]) for text, row in zip(game.info_state_texts, trained, strict=True)},
        "train_cpu_minutes": round(spent / 60, 1),
    }


def untrained_policy(worker: LanguageWorker) -> Policy:
    """Returns the base without an adapter, with the members' sampling."""
    own = worker.config.policy
    config = FrozenConfig(base=own.base, system=own.system, sampling=own.sampling)
    return worker.engines.build_frozen_policy("untrained", config)


def history(names: Iterable[str]) -> dict[str, Mix]:
    """Returns equal probabilities for each seat's members and the uniform member, the first of each history."""
    own = {seat: [name for name in names if name == UNIFORM_MEMBER or name.startswith(f"{seat}-")] for seat in SEATS}
    return {seat: dict.fromkeys(mine, 1 / len(mine)) for seat, mine in own.items()}


def payoffs(tree: GameTree, policy: np.ndarray, more: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the payoff per game of a policy [I, A] against each opponent by name, a mean over both seats."""
    bets, solver = np.zeros_like(policy), CFRSolver(tree, plus=True)
    bets[:, 1] = 1.0
    solver.run(2000)
    opponents = {
        "at random": uniform_policy(tree),
        "always bets": bets,
        "always passes": bets[:, ::-1],
        "equilibrium": solver.average_policy(),
        **more,
    }
    return {name: float(np.mean([seated(tree, policy, other, s) for s in (0, 1)])) for name, other in opponents.items()}


def seated(tree: GameTree, policy: np.ndarray, other: np.ndarray, seat: int) -> float:
    """Returns the payoff of `policy` at `seat` against `other`."""
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    both = mixture_policy(tree, [policy, other], weights if seat == 0 else weights[::-1])
    return float(expected_returns(tree, both)[seat])


# ---- the service


@contextmanager
def serving(base: str, data: Path) -> Iterator[str]:
    """Runs `palestra serve` with `base` under the name that the programs request; yields its address."""
    command = [sys.executable, "-m", "palestra", "serve", "--port", "0", "--data", str(data)]
    command += ["--base", base, "--alias", f"{PUBLIC}={base}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"TINKER_BASE_URL=(\S+)", line)
        if found is None:
            raise SystemExit(f"palestra serve did not start: {line}{process.stdout.read()}")
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=120)


def printed(url: str, program: str, options: list[str]) -> str:
    """Runs a program of examples/ against a server; returns what it prints. Raises CalledProcessError if it fails."""
    env = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"}
    command = [sys.executable, f"examples/{program}.py", *options]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def service_two_agents(options: list[str], data: Path, base: str = "smollm2") -> Result:
    """Runs examples/mint_two_agents.py on a server; returns each agent's losses by epoch, and its share of right
    answers to held-out questions before and after training."""
    start = time.monotonic()
    with serving(base, data) as url:
        out = printed(url, "mint_two_agents", options)
    losses = re.findall(r"^epoch +\d+ +loss (\S+) (\S+)$", out, re.MULTILINE)
    rows = re.findall(r"^(first|second) +(\d+)% +(\d+)% ", out, re.MULTILINE)
    return {
        "task": "service",
        "method": "two agents",
        "options": options,
        "losses": [[float(one) for one in line] for line in losses],
        "right": {name: [int(before) / 100, int(after) / 100] for name, before, after in rows},
        "questions": 40,
        "minutes": round((time.monotonic() - start) / 60, 1),
    }


def service_debate(options: list[str], data: Path, base: str = "smollm2") -> Result:
    """Runs examples/mint_debate.py on a server; returns losses and the informed debater's share of wins by epoch."""
    start = time.monotonic()
    with serving(base, data) as url:
        out = printed(url, "mint_debate", options)
    lines = re.findall(r"^ +\d+ +(\d+)% +(\S+) +(\S+)$", out, re.MULTILINE)
    return {
        "task": "service",
        "method": "debate",
        "options": options,
        "wins": [int(wins) / 100 for wins, _, _ in lines],
        "losses": [[float(informed), float(guessing)] for _, informed, guessing in lines],
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
