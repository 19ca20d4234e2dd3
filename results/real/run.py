"""Reproduces docs/results-real.md: SmolLM2-135M-Instruct and Gemma 3 270M alone and in teams, untrained and trained, on
tasks in English.

    python results/real/run.py                              all 229, about 46 hours of one core; interrupted ones go on
    python results/real/run.py --list                       the rows: published, measured here, open
    python results/real/run.py --only "sums/single agent/"  one row, a minute; a trained one up to 15
    python results/real/run.py --only story/                names that begin with "story/"; also kuhn/, service/, gemma
    python results/real/run.py --report                     only rewrite the page and its plots from the published rows
    python results/real/run.py --publish                    publish what was measured here, and rewrite the page
    python results/real/run.py --tune                       choose learning rates again and stop; --publish as for rows
    python results/real/run.py --prompts                    the untrained models by number of examples, on split dev
    python results/real/run.py --device cuda --processes 4 --only story/  on a GPU, in float32, four at once
    python results/real/run.py --quick                      a smoke test of two rows with the base `tiny`

A row is a method on a task with a seed. It is added to runs/measured/real/rows.jsonl, also where it is published
(results/real/measured/rows.jsonl), and printed beside the published one; its run is a folder of runs/reproduce-real/.
The methods that train with the task's config sample equally many answers; SFT, DPO, PPO and the stages have configs of
their own and sample fewer (column "answers"). All methods of a task have one learning rate, chosen on split dev by a
rule (rates.py), and are scored once on 300 held-out instances with greedy answers. A row whose settings have changed is
measured again. All methods, trained or not, see the same worked examples, except in
the rows without examples and those with 8.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))
import palestra
from palestra.core.config import Tree, load, override, validate
from palestra.core.config.tree import to_yaml
from palestra.core.failures import RunFailed
from palestra.envs import make_env
from palestra.evaluation.target import find_target
from palestra.evaluation.text import open_text_eval
from palestra.populations.build.validation import validate_population
from palestra.runs import read_lines
from palestra.text.config import TextConfig
from results.ledger import Ledger, Line, Rows, add_options, choose
from results.real.contributions import BASE, GREEDY, Row, measure
from results.real.games import KUHN, kuhn_self_play, service_debate, service_two_agents
from results.real.rates import DEV_EPISODES, FILE, RATES, TUNING_SEEDS, check_inside, chosen_rate
from results.real.report import write_report

CONFIGS = Path(__file__).parent / "configs"
RUNS = Path("runs/reproduce-real")
EPISODES = 300
EXAMPLES = (1, 2, 4, 8)  # numbers of worked examples that --prompts compares
SEEDS = (0, 1, 2)
FIVE_SEEDS = (0, 1, 2, 3, 4)
TWO_AGENTS = ["--lr", "5e-4", "--epochs", "4", "--questions", "8"]  # options of examples/mint_two_agents.py
QUICK_ROWS = ("sums/single agent/0", "sums/single agent + GRPO/0")
# Options of mint_debate.py: without an example the model never answers with one word alone.
DEBATE = ["--lr", "5e-4", "--epochs", "8", "--debates", "48", "--passes", "2", "--examples", "1"]


@dataclass(frozen=True)
class Place:
    """The device of the rows, and whether they are smoke tests, whose runs have a folder of their own."""

    device: str = "cpu"
    is_quick: bool = False

    @property
    def runs(self) -> Path:
        return RUNS / "quick" if self.is_quick else RUNS


CPU = Place()


@dataclass(frozen=True)
class Task:
    """A task: the config of its team, the changes for a single agent, the seeds of trained methods, and the changes for
    adapters on another base than that of the config.

    On stories and sums a single agent answers once where a team answers twice: with twice the episodes, the samples are
    equal. With tools it answers as often as a team. On chains its answer has all calculations: with as many episodes,
    the sampled tokens are equal."""

    config: Path
    alone: dict[str, Any]
    seeds: Sequence[int] = SEEDS
    base: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A method, for a single agent or a team, with an adapter for each seat or a shared one.

    `algorithm` None: untrained; {}: the config's algorithm. `env`: changes to the env's options. `sampling`: changes to
    the sampling of the scored answers. `config`: a config in place of the task's, with fewer samples, and with
    evaluations on split dev during training. `tasks`: the tasks on which the method has rows.
    """

    algorithm: dict[str, Any] | None
    is_team: bool = True
    is_shared: bool = False
    env: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    config: Path | None = None
    tasks: Sequence[str] = ("story", "sums", "tools", "chain")


def on_sums(algorithm: str) -> Method:
    """A method for a single agent on sums, with the config of that algorithm."""
    return Method({}, is_team=False, config=CONFIGS / f"sums_{algorithm}.yaml", tasks=["sums"])


def has_rows(method: Method, task: str) -> bool:
    """True if the method has rows on a task, whatever its base."""
    return task.removeprefix(GEMMA) in method.tasks


GRPO = {"type": "grpo", "branch_at": "root", "group_size": 8, "scale": "none"}
TASKS = {
    "story": Task(
        CONFIGS / "story_team.yaml",
        {"env.team": "single", "episodes": 40, "policies.agent.sampling.max_tokens": 28},
        FIVE_SEEDS,
    ),
    "sums": Task(CONFIGS / "sums_team.yaml", {"env.team": "single", "episodes": 48}, FIVE_SEEDS),
    "tools": Task(CONFIGS / "tools_team.yaml", {"env.team": "single"}),
    "chain": Task(
        CONFIGS / "chain_team.yaml", {"env.team": "single", "policies.agent.sampling.max_tokens": 52}, FIVE_SEEDS
    ),
    "guess": Task(CONFIGS / "guess_team.yaml", {}),
}
# A pretrained model of another family, without a chat template of its own: an answer is a line.
GEMMA = "gemma "
LINES = (CONFIGS / "lines.jinja").read_text()
ON_GEMMA = {"base": "gemma3-270m", "chat_template": LINES, "sampling": {"stop": ["\n"]}}
TASKS |= {GEMMA + name: replace(TASKS[name], base=ON_GEMMA) for name in ("story", "sums")}
ALL = (*Method.tasks, "guess")
# Without an example the model writes sentences: NO_EXAMPLE_LONG gives it more tokens for them.
UNCHAINED = ("story", "sums", "tools")
NO_EXAMPLE = Method(None, env={"shots": 0}, tasks=UNCHAINED)
# The best number of examples on split dev (--prompts), on tasks where it differs from the config's.
BEST_PROMPT = Method(None, env={"shots": 8}, tasks=["story", "tools"])
TRAINED_WITH_BEST = replace(BEST_PROMPT, algorithm={}, tasks=["story"])
NO_EXAMPLE_LONG = replace(NO_EXAMPLE, sampling={"max_tokens": 64}, tasks=["story", "sums"])
# The control of a chain: one agent, credited for each calculation as a team is.
IN_TURNS = Method({}, is_team=False, env={"team": "single_turns"}, tasks=["chain"])
METHODS = {
    "single agent, no example": replace(NO_EXAMPLE, is_team=False),
    "single agent, no example, 64 tokens": replace(NO_EXAMPLE_LONG, is_team=False),
    "single agent": Method(None, is_team=False),
    "single agent, 8 examples": replace(BEST_PROMPT, is_team=False),
    "single agent + GRPO": Method(GRPO, is_team=False),
    "single agent + SFT of an expert": on_sums("sft"),
    "single agent + SFT, then GRPO": on_sums("stages"),
    "single agent + DPO": on_sums("dpo"),
    "single agent + PPO": on_sums("ppo"),
    "single agent, a turn for each calculation": replace(IN_TURNS, algorithm=None),
    "single agent, a turn for each calculation + GRPO": replace(IN_TURNS, algorithm=GRPO),
    "single agent, a turn for each calculation + AT-GRPO": IN_TURNS,
    "team, no example": replace(NO_EXAMPLE, tasks=(*UNCHAINED, "guess")),
    "team, no example, 64 tokens": NO_EXAMPLE_LONG,
    "team": Method(None, tasks=ALL),
    "team, 8 examples": BEST_PROMPT,
    "team + GRPO": Method(GRPO, tasks=ALL),
    "team + AT-GRPO, shared": Method({}, is_shared=True),
    "team + AT-GRPO": Method({}),
    "team + GRPO, 8 examples": replace(TRAINED_WITH_BEST, algorithm=GRPO),
    "team + AT-GRPO, 8 examples": TRAINED_WITH_BEST,
}


@dataclass(frozen=True)
class TableRow:
    """A row of the table. Greedy answers of untrained models do not depend on the seed: such rows have only seed 0.
    `rate` is the learning rate of a tuning row, `shots` the number of worked examples of a row of --prompts; both kinds
    of rows are scored on split dev."""

    task: str
    method: str
    seed: int
    rate: float | None = None
    shots: int | None = None

    @property
    def name(self) -> str:
        last = f"{self.shots} shots" if self.shots else str(self.seed)
        if self.rate is not None:
            last = f"lr {self.rate:g}, seed {self.seed}"
        return f"{self.task}/{self.method}/{last}"

    @property
    def is_on_dev(self) -> bool:
        """True if the row is scored on split dev, since a setting is chosen by it."""
        return self.rate is not None or self.shots is not None

    @property
    def lr(self) -> float:
        """The row's learning rate."""
        return self.rate if self.rate is not None else chosen_rate(self.task, FILE.read())

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def run(self) -> str:
        """The name of the row's run: a run of other settings is never resumed."""
        return f"{self.slug}-{settings_digest(self)[:8]}"


def slug(name: str) -> str:
    """Returns a row's name in lower case, with hyphens, as the name of a file or run."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def is_current(name: str, line: Line) -> bool:
    """True if a row was measured with its current settings, or has nothing trained."""
    row = scored_rows().get(name)
    return row is None or not line.get("curve") or line.get("config") == settings_digest(row)


def settings_digest(row: TableRow) -> str:
    """Digest of the config that a row is trained with on a CPU, whatever its name and seed."""
    tree = with_rate(method_config(row), row.lr)
    settings = {key: value for key, value in tree.items() if key not in ("name", "seed")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def tuning_rows() -> dict[str, TableRow]:
    """Returns the rows that choose learning rates, by name."""
    rows = [
        TableRow(task, name, seed, rate)
        for task in TASKS
        for name, method in METHODS.items()
        for rate in RATES
        for seed in TUNING_SEEDS
        if has_rows(method, task) and method.algorithm is not None and not (method.config or "shots" in method.env)
    ]
    return {row.name: row for row in rows}


def prompt_rows() -> dict[str, TableRow]:
    """Returns the rows that compare numbers of worked examples, by name."""
    methods = {name: method for name, method in METHODS.items() if method.algorithm is None and not method.env}
    rows = [
        TableRow(task, name, 0, shots=shots)
        for task in TASKS
        for name, method in methods.items()
        for shots in EXAMPLES
        if has_rows(method, task)
    ]
    return {row.name: row for row in rows}


def table_rows() -> Iterator[TableRow]:
    """Yields all rows of the table, those of seed 0 first."""
    for seed in FIVE_SEEDS:
        for name, task in TASKS.items():
            for method_name, method in METHODS.items():
                seeds = (0,) if method.algorithm is None else task.seeds
                if has_rows(method, name) and seed in seeds:
                    yield TableRow(name, method_name, seed)


def scored_rows() -> dict[str, TableRow]:
    """Returns all rows that are scored by success, by name."""
    return {row.name: row for row in table_rows()} | tuning_rows() | prompt_rows()


def other_rows() -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns the functions that measure the other rows, by name."""
    rows: dict[str, Callable[[], dict[str, Any]]]
    rows = {f"kuhn/self-play/{seed}": partial(kuhn_self_play, seed, RUNS) for seed in SEEDS}
    served = RUNS / "served"
    return rows | {
        "service/two agents": partial(service_two_agents, TWO_AGENTS, served / "two-agents"),
        "service/debate": partial(service_debate, DEBATE, served / "debate"),
    }


def config_of(row: TableRow, place: Place = CPU) -> Tree:
    """The row's config on a device; always in float32."""
    tree = with_rate(method_config(row), row.lr) | {"name": row.run, "device": place.device}
    return shortened(tree) if place.is_quick else tree


def with_rate(tree: Tree, rate: float) -> Tree:
    """The config with all adapters at one learning rate, in float32."""
    for policy in tree["policies"].values():
        if policy["type"] == "lora":
            policy |= {"dtype": "float32", "lr": rate}
    return tree


def shortened(tree: Tree) -> Tree:
    """The config of a smoke test: the base `tiny`, one step of two episodes."""
    for policy in tree["policies"].values():
        policy |= {"base": "tiny", "sampling": {"max_tokens": 4}}
    for stage in tree.get("stages", [tree]):
        stage |= {"steps": 1, "episodes": 2}
    return tree | {"evals": {}}


def method_config(row: TableRow) -> Tree:
    """The config of the row's task with the method's changes. It has no evaluations during training, unless the method
    has a config of its own."""
    task, method = TASKS[row.task], METHODS[row.method]
    if method.config:
        return on_base(load(method.config), task) | {"seed": row.seed, "checkpoint_every": 4}
    tree = on_base(load(task.config), task) | {"seed": row.seed, "evals": {}, "checkpoint_every": 4}
    if method.is_shared or not method.is_team:
        tree["policies"] = {"agent": next(iter(tree["policies"].values()))}
    if not method.is_team:
        tree = override(tree, [f"{key}={json.dumps(value)}" for key, value in task.alone.items()])
    tree["env"] = tree["env"] | method.env | ({} if row.shots is None else {"shots": row.shots})
    tree["algorithm"] = method.algorithm or tree["algorithm"]
    return tree


def on_base(tree: Tree, task: Task) -> Tree:
    """A copy of the config with the adapters on the task's base."""
    tree = copy.deepcopy(tree)
    for policy in tree["policies"].values():
        if task.base and policy["type"] == "lora":
            policy |= task.base | {"sampling": policy["sampling"] | task.base["sampling"]}
    return tree


def train(row: TableRow, place: Place) -> Path:
    """Trains or resumes the row's run; returns its folder.

    A run in which nothing was learned is a result too: raises RunFailed only if a run did not end or was stopped."""
    path = place.runs / row.run
    failure = None
    try:
        palestra.train(resume=path) if path.exists() else palestra.train(config_of(row, place), root=place.runs)
    except RunFailed as error:
        failure = error
    if len(training_figures(path)["curve"]) < num_steps(config_of(row, place)):
        raise failure or RunFailed(f"{row.name} was stopped: run the same command to resume it")
    if failure:
        print(f"{row.name}: {failure}", flush=True)
    return path


def num_steps(tree: Tree) -> int:
    """The training steps of a config, over all its stages."""
    return sum(stage["steps"] for stage in tree["stages"]) if "stages" in tree else tree["steps"]


def run(row: TableRow, place: Place) -> dict[str, Any]:
    """Trains the row, unless its method is untrained, and scores it; returns its result."""
    method = METHODS[row.method]
    is_trained = method.algorithm is not None
    target = train(row, place) if is_trained else write_config(row, place)
    setup = open_text_eval(find_target(target), {}, {}, sampling=GREEDY | method.sampling, in_process=True)
    seats = {} if is_trained else dict.fromkeys(setup.policy_names, BASE)
    changes, episodes = ({"split": "dev"}, DEV_EPISODES) if row.is_on_dev else ({}, EPISODES)
    if place.is_quick:
        episodes = 2
    measured = measure(setup, config_of(row)["env"], Row(row.name, changes, seats), episodes)
    del measured["row"]  # the ledger has the name
    schedule = next(iter(config_of(row)["policies"].values())).get("lr_schedule", "constant")
    settings = {"lr": row.lr, "lr_schedule": schedule, "config": settings_digest(row)}
    trained = training_figures(target) | settings if is_trained else {}
    where = {"device": "cpu" if place.device == "cpu" else torch.cuda.get_device_name()}
    prompt = {} if row.shots is None else {"shots": row.shots}
    return {"task": row.task, "method": row.method, "seed": row.seed} | prompt | where | measured | trained


def write_config(row: TableRow, place: Place) -> Path:
    """Writes the row's config to a file, for a method without a run; returns its path."""
    path = place.runs / f"{row.slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(config_of(row, place)))
    return path


def training_figures(path: Path) -> dict[str, Any]:
    """Figures of a run: answers sampled, minutes of training (CPU and wall), success in rollouts by step, and success
    on split dev as [steps, success]."""
    evals = read_lines(path / "evals.jsonl") if (path / "evals.jsonl").exists() else []
    metrics, timings = read_lines(path / "metrics.jsonl"), read_lines(path / "timings.jsonl")
    steps = [line for line in timings if line["policy"] == "team"]
    return {
        "answers": sum(line.get("answers", 0) for line in metrics),
        "train_cpu_minutes": round(sum(line["rollout_cpu_s"] + line["train_cpu_s"] for line in steps) / 60, 1),
        "train_minutes": round(sum(line["rollout_s"] + line["train_s"] for line in steps) / 60, 2),
        "curve": [line["success"] for line in metrics if line["policy"] == "team"],
        "dev": [[line["step"] + 1, line["success"]] for line in evals if line["name"] == "dev"],
    }


def figure(result: Line) -> str:
    """Returns the main figure of a result."""
    if "success" in result:
        return f"{100 * result['success']:.1f} %"
    return f"NashConv {result['nash_conv'][-1]:.3f}" if "nash_conv" in result else f"{result['minutes']} minutes"


def measure_row(place: Place, name: str) -> Line:
    """Measures a row; returns its result."""
    row = scored_rows().get(name)
    return run(row, place) if row else other_rows()[name]()


def check(place: Place, name: str) -> None:
    """Raises ValueError if the row's config is wrong."""
    row = scored_rows().get(name)
    if row:
        make_env(**validate(TextConfig, config_of(row, place)).env)
    elif name.startswith("kuhn/"):
        validate_population(load(KUHN))


def discard(place: Place, name: str) -> None:
    """Removes the row's run, so that it begins anew."""
    row = scored_rows().get(name)
    shutil.rmtree(place.runs / (row.run if row else slug(name)), ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--tune", action="store_true", help="choose learning rates on split dev")
    parser.add_argument("--prompts", action="store_true", help="compare numbers of worked examples on split dev")
    parser.add_argument("--device", default="cpu", help="device of the table's rows: cpu (the default) or cuda")
    options = parser.parse_args()
    place = Place(options.device, options.quick)
    table = [*(row.name for row in table_rows()), *other_rows()]
    names = list(prompt_rows()) if options.prompts else list(tuning_rows()) if options.tune else table
    chosen = choose(names, options.only or (QUICK_ROWS if options.quick else []))
    ledger = Ledger("real", figure, options.quick, is_current)
    rows = Rows(ledger, partial(measure_row, place), partial(check, place), discard=partial(discard, place))
    if options.publish and not options.tune:
        check_inside(dict.fromkeys(name.partition("/")[0] for name in chosen), FILE.read())
    rows.run(chosen, options)
    if options.tune and not (options.quick or options.list or options.report):
        lines = [line for name, line in ledger.here.items() if name in tuning_rows()]
        scores = [(line["task"], line["method"], line["lr"], line["seed"], line["success"]) for line in lines]
        FILE.write(scores, FILE.path if options.publish else ledger.here_file.with_name("rates.yaml"))
    if options.report or options.publish:
        write_report(list(ledger.published.values()), list(METHODS), Path("docs/results-real.md"))


if __name__ == "__main__":
    main()
