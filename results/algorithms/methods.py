"""Tasks and methods of the comparison, and the full config of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from palestra.core.config import Tree, load

CONFIGS = Path(__file__).parent / "configs"
RATES = Path(__file__).parent / "rates.yaml"  # learning rates chosen by tuning
GROUP = 8  # siblings in a group, for most methods


@dataclass(frozen=True)
class Task:
    """A config and its score: the mean over `sides` of an evaluation metric. A side maps the name of an evaluation to
    the policies that replace learners at seats, and to the seat whose return is the score (None: success is).

    `scored` names the score in tables, `bar` is the score on dev that a run should reach. `rates` are the
    learning rates to try. `greedy`: answers are scored at temperature 0. `on_device`: runs on the device that the user
    names; other tasks run on the CPU. `runs_programs`: agents write programs, which need a sandbox."""

    name: str
    scored: str
    sides: dict[str, tuple[dict[str, str], str | None]]
    bar: float
    learners: Sequence[str]
    rates: Sequence[float]
    base: str = "tasks"
    greedy: bool = False
    on_device: bool = False
    runs_programs: bool = False

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.name}.yaml"

    def score(self, side: str, metrics: dict[str, Any]) -> float:
        seat = self.sides[side][1]
        return float(metrics["success"] if seat is None else metrics["returns"][seat])


@dataclass(frozen=True)
class Method:
    """A method by its published name, and its settings. `lines` is the number of trajectories from one instance: a step
    plays that many times fewer instances than with a method of one. `policies` are further settings of the learners.
    `teacher` is the method whose run on the same task, with the first tuning seed, is the teacher; `judge` is the one
    whose run is the reward model, and `data` the one whose run recorded the episodes to learn from. `one_policy`: the
    first learner of the task plays all learners' seats."""

    name: str
    algorithm: dict[str, Any]
    lines: int = GROUP
    policies: dict[str, Any] = field(default_factory=dict)
    teacher: str | None = None
    judge: str | None = None
    data: str | None = None
    one_policy: bool = False
    tasks: Sequence[str] = ("sums", "duel")

    @property
    def needs(self) -> str | None:
        """The method that must run first: that of the teacher, the reward model or the data. None if there is none."""
        return self.teacher or self.judge or self.data


TASKS = [
    Task("sums", "success", {"dev": ({}, None)}, 0.3, ("reasoner", "tool"), (5e-3, 1e-2), runs_programs=True),
    Task(
        "duel",
        "payoff against the untrained base, mean of both sides",
        {"as_pro": ({"con": "untrained"}, "pro"), "as_con": ({"pro": "untrained"}, "con")},
        0.15,
        ("speaker",),
        (2e-3, 5e-3),
    ),
    Task("real", "success", {"dev": ({}, None)}, 0.5, ("reasoner",), (5e-4,), "smollm2", True, True),
]


def group(**options: Any) -> dict[str, Any]:
    return {"type": "grpo", "branch_at": "root", "group_size": GROUP, "entropy_coef": 0.01} | options


def turns(**options: Any) -> dict[str, Any]:
    return group(branch_at="turn", continue_from="best", scale="none") | options


def pairs(**options: Any) -> dict[str, Any]:
    return {"type": "dpo", "branch_at": "root", "group_size": GROUP} | options


ALL = ("sums", "duel", "real")
CRITIC = {"entropy_coef": 0.01, "critic": "separate"}
DAPO = group(clip_high=0.28, flat_groups="refill", refill_attempts=3, overlong="penalty")
# with 4 siblings, `all` gives the pairs that CoMLRL's default uses: at most 16 of a group
MADPO = {"type": "madpo", "group_size": 4, "continue_from": "all", "pairs": "all", "beta": 0.1}
# A reward model for all seats. It is not a row of the tables: it learns to score answers, not to give them. On pairs of
# its own play it would learn to recognise what its drifting adapter says.
PAIRS = {"type": "reward_model", "branch_at": "root", "group_size": GROUP, "pairs": "all"}
JUDGE = Method("reward model", PAIRS, one_policy=True, data="GRPO", tasks=ALL)
METHODS = [
    Method("GRPO", group(), tasks=ALL),
    Method("Dr. GRPO", group(scale="none", loss_aggregation="constant"), tasks=ALL),
    Method("DAPO", DAPO, tasks=("sums",)),
    Method(
        "DAPO", DAPO, lines=18, tasks=("duel",)
    ),  # refilling doubles its answers there (18,080 for 8,192 in one run)
    Method("GSPO", group(surrogate="gspo", clip=3e-4, clip_high=4e-4), tasks=ALL),
    Method("CISPO", group(surrogate="cispo", clip_high=3.0), tasks=ALL),
    Method("RLOO", group(baseline="others", scale="none"), tasks=ALL),
    Method("REINFORCE++", group(group_size=1, baseline="batch", scale="batch"), lines=1, tasks=ALL),
    Method("RAE", group(group_size=1, baseline="role", scale="none"), lines=1, tasks=("duel",)),
    Method("AT-GRPO", turns(), tasks=("sums",)),
    Method("Shapley", turns(credit="shapley")),
    Method("PPO", {"type": "ppo", "entropy_coef": 0.01, "gae_lambda": 1.0}, lines=1, tasks=ALL),
    Method("IAC", {"type": "iac"} | CRITIC, lines=1, tasks=("sums",)),
    Method("MAAC", {"type": "maac", "entropy_coef": 0.01}, lines=1, tasks=("sums",)),
    Method("MAGRPO", {"type": "magrpo", "group_size": GROUP, "entropy_coef": 0.01}, tasks=("duel",)),
    # 4 joint answers in the first turn, 16 in the second: 40 answers, where 8 trajectories have 32
    Method("MAGRPO", {"type": "magrpo", "group_size": 4, "entropy_coef": 0.01}, lines=10, tasks=("sums",)),
    Method("MARLOO", {"type": "marloo", "group_size": GROUP, "entropy_coef": 0.01}, tasks=("duel",)),
    Method("MARLOO", {"type": "marloo", "group_size": 4, "entropy_coef": 0.01}, lines=10, tasks=("sums",)),
    Method("MADPO", MADPO, lines=10, tasks=("sums",)),
    # twice the batch size, since one policy learns from both seats: as many optimizer steps as with a policy for each
    Method("MATPO", group(), policies={"batch_size": 512}, one_policy=True, tasks=("sums",)),
    Method("online DPO", pairs(beta=0.1), tasks=ALL),
    Method("online IPO", pairs(beta=0.1, loss_type="ipo"), tasks=("duel",)),
    Method("online SimPO", pairs(beta=2.0, loss_type="simpo"), tasks=("duel",)),
    Method("online ORPO", pairs(beta=0.1, loss_type="orpo"), tasks=("duel",)),
    Method("online KTO", {"type": "kto", "branch_at": "root", "group_size": GROUP}, tasks=ALL),
    Method("SFT, best of 8", {"type": "sft", "group_size": GROUP, "imitate": "best"}),
    Method("SFT, own successes", {"type": "sft", "group_size": GROUP}, tasks=("sums", "real")),
    Method("SFT, own wins", {"type": "sft", "group_size": GROUP, "imitate": "all", "min_return": 0.5}, tasks=("duel",)),
    Method("SFT, expert", {"type": "sft", "imitate": "all"}, 1, {"teacher": "expert"}, tasks=ALL),
    Method("GRPO, learned reward", group(), judge=JUDGE.name, tasks=ALL),
    Method("distillation", {"type": "distill", "group_size": GROUP}, teacher="GRPO", tasks=("duel",)),
]
UNTRAINED = Method("untrained", {}, tasks=ALL)


def find_method(task: Task, name: str) -> Method:
    """Returns the method of this name on a task. Raises ValueError if there is none."""
    for own in [*METHODS, JUDGE, UNTRAINED]:
        if own.name == name and task.name in own.tasks:
            return own
    raise ValueError(f'no method "{name}" on {task.name}: METHODS in results/algorithms/methods.py has them')


def slug(method: Method) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in method.name.lower())


@cache
def tuned_rates() -> dict[str, dict[str, float]]:
    """Returns the learning rates of rates.yaml, by task and method."""
    return yaml.safe_load(RATES.read_text()) or {}


def settings_of(task: Task, method: Method, rate: float, seed: int) -> Tree:
    """Returns the full config of a run, without the path of a teacher or a reward model."""
    tree = copy.deepcopy(load(task.config))
    tree |= {"seed": seed, "name": f"{task.name}-{slug(method)}-{rate:g}-{seed}", "algorithm": method.algorithm}
    tree["episodes"] = max(1, tree["episodes"] * GROUP // method.lines)
    for name in task.learners:
        tree["policies"][name] |= {"lr": rate} | method.policies
    if method.one_policy and len(task.learners) > 1:
        first, *others = task.learners
        tree["seats"] = dict.fromkeys(task.learners, first)
        tree["policies"] = {name: policy for name, policy in tree["policies"].items() if name not in others}
    if method.teacher:
        for name in task.learners:
            tree["policies"][f"teacher_of_{name}"] = {"type": "frozen", "base": task.base}
            tree["policies"][name]["teacher"] = f"teacher_of_{name}"
    return tree


def shorten(tree: Tree) -> Tree:
    """Returns the config of a smoke test: two small steps and small evaluations."""
    short = {key: value | {"episodes": 10} for key, value in tree["evals"].items()}
    return tree | {"steps": 2, "episodes": max(2, tree["episodes"] // 16), "evals": short}
