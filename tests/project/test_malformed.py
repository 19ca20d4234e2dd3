"""Malformed configs (malformed.py): each is refused with exit code 2 and one line per error, or is valid; none gives a
traceback, and none takes long. `pytest -s` prints a table of them."""

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from helpers.malformed import KINDS, Case, changed_cases, raw_cases

from palestra.cli.train import train
from palestra.populations.build import build as population
from palestra.text.build import build as text
from palestra.text.build import distributed as launch_distributed
from palestra.vector.build import build as vector

LOADED = (launch_distributed, text, vector, population)  # imports that the first case would wait for
LONGEST = 10.0  # seconds per case; most take some hundredths, but the first one of a game compiles it
PLACE: dict[str, Any] = {"settings": None, "resume": None, "name": None, "engine": None, "address": None}
SHORT = {  # the smallest settings with which a built run trains
    "text": ["steps=1"],
    "stages": [],
    "games": ["env_steps=32"],
    "replay": ["env_steps=32"],
    "population": ["population.iterations=1", "population.env_steps=32"],
    "speakers": ["population.iterations=1"],
}


class Outcome(NamedTuple):
    """The result of a case, `what` (valid, refused, failed, broken, long), its time in `seconds`, and its output or
    traceback, `said`."""

    what: str
    seconds: float
    said: str


class TooLong(BaseException):
    """Raised in a case that exceeds its time limit; nothing in palestra catches it."""


def try_case(case: Case, folder: Path, settings: list[str] | None = None, dry: bool = True) -> Outcome:
    """The outcome of `palestra train [--dry-run]` with a config, in this process."""
    path = folder / "malformed.yaml"
    path.write_text(case.text, encoding="utf-8")
    options = PLACE | {"root": folder, "backend": None, "workers": None, "dry_run": dry, "settings": settings}
    output, start, what = io.StringIO(), time.monotonic(), "valid"
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, 3 * LONGEST)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        try:
            train(path, **options)
        except typer.Exit as end:
            what = {1: "failed", 2: "refused"}[end.exit_code]
        except TooLong:
            what = "long"
        except BaseException:  # any exception is what the test looks for
            what = "broken"
            output.write(traceback.format_exc())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return Outcome(what, time.monotonic() - start, output.getvalue())


def _too_long(*_: object) -> None:
    raise TooLong


def table(outcomes: dict[Case, Outcome]) -> str:
    """For each kind, the numbers of cases that were tried, refused, valid and broken."""
    raw = set(raw_cases())
    lines = [f"{'kind':12}{'tried':>7}{'refused':>9}{'valid':>7}{'broken':>8}{'slowest':>9}"]
    for kind in [*KINDS, "raw"]:
        own = [o for case, o in outcomes.items() if ("raw" if case in raw else case.name.split()[0]) == kind]
        count = Counter(o.what for o in own)
        broken = len(own) - count["refused"] - count["valid"]
        slowest = max((o.seconds for o in own), default=0.0)
        row = f"{kind:12}{len(own):7}{count['refused']:9}{count['valid']:7}{broken:8}{slowest:8.2f}s"
        lines.append(row)
    return "\n".join(lines)


def assert_cases(cases: list[Case], folder: Path) -> dict[Case, Outcome]:
    """Tries all cases, and asserts that each is refused or valid, in time and with a readable message."""
    outcomes = {case: try_case(case, folder) for case in cases}
    print(f"\n{table(outcomes)}")
    wrong = {c.name: o for c, o in outcomes.items() if o.what not in ("refused", "valid") or o.seconds > LONGEST}
    assert not wrong, "\n".join(f"{name}: {o.what}, {o.seconds:.1f} s\n{o.said[-1500:]}" for name, o in wrong.items())
    for case, outcome in outcomes.items():
        if outcome.what == "refused":
            assert outcome.said.startswith("error: ") and "Traceback" not in outcome.said, case.name
            faults = outcome.said.count("\n")
            assert faults <= 22 and len(outcome.said) < 8000, (case.name, outcome.said)
    return outcomes


def test_raw_yaml_that_is_not_a_config_is_refused(tmp_path):
    outcomes = assert_cases(raw_cases(), tmp_path)
    assert all(outcome.what == "refused" for outcome in outcomes.values())


def test_sampled_malformed_configs_are_refused_or_valid(tmp_path):
    outcomes = assert_cases(changed_cases(180), tmp_path)
    assert Counter(o.what for o in outcomes.values())["refused"] > 120


def test_unmutated_configs_are_valid(tmp_path):
    """Otherwise every change to them would be refused for another reason."""
    for kind, tree in KINDS.items():
        outcome = try_case(Case(kind, yaml.safe_dump(tree)), tmp_path)
        assert outcome.what == "valid", (kind, outcome.said)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("games", "env.num_envs=1000000000", "needs at least"),
        ("games", "algorithm.rollout_length=1000000000", "lower algorithm.rollout_length or env.num_envs"),
        ("replay", "algorithm.buffer_size=1000000000000", "lower algorithm.buffer_size"),
        ("games", "policies.all.hidden=[65536, 65536]", "make policies' hidden layers smaller"),
        ("population", "env.num_envs=1000000000", "needs at least"),
        ("games", "torch_threads=100000000", "threads: should be less than or equal to 1024"),
        ("text", "episodes=1000000000000", "episodes: should be less than or equal to 1000000"),
        ("text", "policies.planner.rank=1000000000", "rank: should be less than or equal to 4096"),
        ("text", "policies.planner.lr=1e300", "lr: should be less than or equal to 1000000"),
        ("text", "policies.planner.lr=.nan", "lr: should be a finite number"),
        ("text", "policies.planner.base=tinny", "did you mean tiny?"),
        ("text", "device=cuda:99", "device: cuda:99 is not there: torch sees"),
        ("text", "device=gpu", "unknown device 'gpu': write auto, cpu, cuda"),
        ("text", "engine=nonsense", "engine: "),
        ("text", "env.at=127.0.0.1:1", "no env server described the env"),
        (
            "text",
            "env={type: kuhn_poker, num_envs: 4}",
            'env "kuhn_poker" is a vector env, which small networks play',
        ),
        ("games", "env={type: plan_path}", 'env "plan_path" is a text env, which language agents play'),
        ("text", f"name={'n' * 300}", "use a plain folder name"),
        ("games", "policies={'../x': {type: net}}", 'a policy cannot be called "../x"'),
    ],
)
def test_absurd_values_are_refused_with_the_fix(tmp_path, kind, setting, message):
    outcome = try_case(Case(kind, yaml.safe_dump(KINDS[kind])), tmp_path, [setting])
    assert outcome.what == "refused" and message in outcome.said, outcome
    assert outcome.seconds < 3 * LONGEST and not list(tmp_path.glob("*/config.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_all_malformed_configs_are_refused_or_valid(tmp_path, kind):
    assert_cases([case for case in changed_cases() if case.name.split()[0] == kind], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_configs_accepted_by_dry_run_train_or_fail_with_a_message(tmp_path):
    """One step each in a process with 6 GiB of address space; a huge requested length may take its time."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def train_accepted(folder: Path) -> int:
    """Trains the configs of a sample that a dry run accepts; returns how many of these broke."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    counts: Counter[str] = Counter()
    for case in changed_cases(600, seed=1):
        if try_case(case, folder).what == "valid":
            outcome = try_case(case, folder, SHORT[case.name.split()[0]], dry=False)
            counts[outcome.what] += 1
            if outcome.what == "broken":
                print(case.name, outcome.said[-1500:])
    print(dict(counts))
    return counts["broken"]


if __name__ == "__main__":
    sys.exit(min(1, train_accepted(Path(sys.argv[1]))))
