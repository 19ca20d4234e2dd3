"""Measures what each seat of a trained team contributes: the team untrained, trained, and with one part replaced.

    python results/real/contributions.py runs/real           every row, greedy answers to 300 held-out instances
    python results/real/contributions.py runs/real --only trained  rows whose names begin with "trained"
    python results/real/contributions.py runs/real --processes 2  two rows at once, each in a process with one thread
    python results/real/contributions.py runs/real --report  only the table of the rows measured so far

For a run with two seats whose env has the option `shots`, such as those of results/real/configs. All rows play the same
instances of the split "test". Results are stored in the run's real_results.jsonl; a row that is there is not measured
again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import palestra
from palestra.core.failures import RunFailed
from palestra.core.types import Episode, Node, Seat
from palestra.envs import env_options, load_env_class
from palestra.evaluation.target import find_target
from palestra.evaluation.text import TextEvalSetup, open_text_eval
from palestra.runs import read_lines
from palestra.runs.series import wilson_interval
from palestra.text.build.build import make_episode_runner

RESULTS_FILE = "real_results.jsonl"
SPLIT = "test"
BASE = "base"  # the policy without an adapter
GREEDY = {"temperature": 0}


class Row(NamedTuple):
    """A row of the table: changes of the env's options, and the policies of seats that the run's own do not play."""

    name: str
    env: dict[str, Any]
    seats: dict[Seat, str]


def table_rows(env: Mapping[str, Any], own: Mapping[Seat, str]) -> list[Row]:
    """Returns the rows for an env whose seats are played by the trained policies `own`."""
    untrained, (first, second) = dict.fromkeys(own, BASE), own
    rows = [
        Row("untrained, no example", {"shots": 0}, untrained),
        Row(f"untrained, {env['shots']} examples", {}, untrained),
        Row("trained", {}, {}),
        *(Row(f"trained, {seat} untrained", {}, {seat: BASE}) for seat in own),
        Row("trained, seats swapped", {}, {first: own[second], second: own[first]}),
    ]
    if "message" in env_options(load_env_class(env["type"])).model_fields:
        rows += [
            Row("trained, message blank", {"message": "blank"}, {}),
            Row("trained, message of another instance", {"message": "foreign"}, {}),
        ]
    return rows


def measure(setup: TextEvalSetup, env: Mapping[str, Any], row: Row, episodes: int) -> dict[str, Any]:
    """Plays the row's episodes and returns its line of results."""
    start = time.process_time()
    changed = setup._replace(runner=make_episode_runner({**env, "split": SPLIT, **row.env}, SPLIT))
    result = changed.play([setup.policy_names | row.seats], episodes, 0, lambda played, of: None)[0]
    return {
        "row": row.name,
        "success": result.metrics["success"],
        "returns": result.metrics["returns"],
        **completeness(result.episodes),
        "episodes": result.metrics["episodes"],
        "cpu_seconds": round(time.process_time() - start, 1),
        "examples": [example(episode) for episode in result.episodes[:5]],
    }


def open_run(run: Path) -> tuple[TextEvalSetup, Mapping[str, Any]]:
    """Returns the evaluation setup of a run, which loads the model when it first plays, and the options of its env."""
    target = find_target(run)
    return open_text_eval(target, {}, {}, sampling=GREEDY, in_process=True), target.tree["env"]


def measure_row(run: Path, row: Row, episodes: int) -> dict[str, Any]:
    """Returns the results of one row, measured in this process."""
    return measure(*open_run(run), row, episodes)


def measure_rows(run: Path, rows: Sequence[Row], episodes: int, processes: int) -> Iterator[dict[str, Any]]:
    """Measures rows, `processes` at once; yields their results as they finish."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, max(1, len(rows))), mp_context=context) as pool:
        for done in as_completed([pool.submit(measure_row, run, row, episodes) for row in rows]):
            yield done.result()


def completeness(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the share of episodes with a complete last answer, and the success among these, which does not count
    wrong forms."""
    complete = [episode for episode in episodes if is_complete(episode.nodes[-1])]
    right = sum(episode.success for episode in complete)
    return {"complete": len(complete) / len(episodes), "success_if_complete": right / max(1, len(complete))}


def is_complete(last: Node) -> bool:
    """True if all answers of an episode's last node are ones that the env can read (a number, or with tools a call or a
    number), right or wrong, and ended before their token limit."""
    return not any(last.is_invalid(seat) or answer.stop_reason == "length" for seat, answer in last.answers.items())


def example(episode: Episode) -> dict[str, Any]:
    """Returns the replies of an episode by seat, and whether it succeeded."""
    replies = {seat: answer.text for node in episode.nodes for seat, answer in node.answers.items()}
    return {**replies, "success": episode.success}


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the results as a Markdown table, with 95 % Wilson intervals."""
    seat = next(iter(lines[0]["returns"]))
    head = [f"| | team right | {seat} right | complete | episodes | CPU-s |", "|---|---:|---:|---:|---:|---:|"]
    return "\n".join(head + [table_line(line, seat) for line in lines])


def table_line(line: dict[str, Any], seat: Seat) -> str:
    low, high = wilson_interval(line["success"] * line["episodes"], line["episodes"])
    team = f"{line['success']:.1%} [{low:.1%}, {high:.1%}]"
    own, n = f"{line['returns'][seat]:.1%}", line["episodes"]
    return f"| {line['row']} | {team} | {own} | {line['complete']:.1%} | {n:.0f} | {line['cpu_seconds']:.0f} |"


def train_small_run() -> Path:
    """Trains the run of a smoke test, on the base `tiny`; returns its folder."""
    lora = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 4}}
    config = {
        "name": "real_results",
        "steps": 1,
        "episodes": 2,
        "env": {"type": "math_relay", "shots": 2},
        "policies": {"first": lora, "second": lora},
        "algorithm": {"type": "grpo", "group_size": 2},
    }
    with suppress(RunFailed):  # one step seldom finds a right answer, and then nothing is learned
        palestra.train(config, root=Path("runs/quick"))
    return max(Path("runs/quick").glob("real_results*"), key=lambda path: path.stat().st_mtime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of the run")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two instances, of a new run of one step")
    parser.add_argument("--episodes", type=int, default=300, help="held-out instances for each row (default: 300)")
    parser.add_argument("--only", nargs="+", default=[""], help="measure only rows whose names begin with one of these")
    parser.add_argument("--processes", type=int, default=1, help="rows that are measured at once (default: 1)")
    parser.add_argument("--report", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not (options.run or options.quick):
        parser.error("name the folder of a run, such as runs/real")
    run = options.run or train_small_run()
    episodes = 2 if options.quick else options.episodes
    setup, env = open_run(run)
    file, rows = run / RESULTS_FILE, table_rows(env, setup.policy_names)
    lines = read_lines(file) if file.exists() else []
    if not options.report:
        measured = {(line["row"], line["episodes"]) for line in lines}
        missing = [row for row in rows if (row.name, episodes) not in measured]
        missing = [row for row in missing if row.name.startswith(tuple(options.only))]
        for line in measure_rows(run, missing, episodes, options.processes):
            lines.append(line)
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(table_line(line, next(iter(line["returns"]))), flush=True)
    order = [row.name for row in rows]
    print(table(sorted(lines, key=lambda line: order.index(line["row"]))))


if __name__ == "__main__":
    main()
