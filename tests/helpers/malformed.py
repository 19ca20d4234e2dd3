"""Malformed configs, made systematically: each kind of config with each key changed to hostile values, and raw YAML."""

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

Tree = dict[str, Any]
SAMPLED = {"max_tokens": 2}

KINDS: dict[str, Tree] = {
    "text": {
        "name": "text",
        "seed": 0,
        "steps": 1,
        "episodes": 2,
        "env": {"type": "plan_path", "size": 4, "split": "train"},
        "policies": {
            "planner": {"type": "lora", "base": "tiny", "rank": 4, "alpha": 8, "lr": 1e-3, "sampling": SAMPLED},
            "executor": {"type": "random", "words": ["up", "down"], "length": 2},
        },
        "algorithm": {"type": "grpo", "group_size": 2, "clip": 0.2, "branch_at": "turn"},
        "evals": {"dev": {"episodes": 2, "every": 0, "env": {"split": "dev"}}},
        "checkpoint_every": 1,
        "staleness": 0,
        "max_num_seqs": 16,
        "max_failed": 0.5,
    },
    "stages": {
        "name": "stages",
        "env": {"type": "plan_path", "size": 4},
        "policies": {
            "default": {"type": "lora", "base": "tiny", "rank": 2, "teacher": "expert", "sampling": SAMPLED},
            "expert": {"type": "expert"},
        },
        "stages": [
            {"name": "shown", "steps": 1, "episodes": 2, "algorithm": {"type": "sft"}},
            {
                "name": "played",
                "steps": 1,
                "episodes": 2,
                "algorithm": {"type": "grpo", "group_size": 2},
                "env": {"size": 4},
                "policies": {"default": {"teacher": None}},
            },
        ],
    },
    "games": {
        "name": "games",
        "seed": 0,
        "env_steps": 64,
        "env": {"type": "kuhn_poker", "num_envs": 4},
        "policies": {"all": {"type": "net", "hidden": [8], "lr": 1e-3, "share_network": True}},
        "seats": {"player_*": "all"},
        "algorithm": {
            "type": "ppo",
            "rollout_length": 8,
            "epochs": 1,
            "minibatches": 1,
            "gamma": 0.99,
            "entropy_coef": 0.01,
        },
        "evals": {"held_out": {"episodes": 4, "every": 0, "greedy": True}},
        "log_every": 0,
        "checkpoint_every": 64,
        "torch_threads": 1,
        "num_processes": 1,
        "num_actors": 0,
    },
    "replay": {
        "name": "replay",
        "env_steps": 64,
        "env": {"type": "kuhn_poker", "num_envs": 4},
        "policies": {"all": {"type": "net", "hidden": [8], "gru_units": 0}},
        "algorithm": {"type": "dqn", "rollout_length": 8, "buffer_size": 64, "batch_size": 8, "learning_starts": 8},
    },
    "population": {
        "name": "population",
        "env": {"type": "kuhn_poker", "num_envs": 4},
        "symmetric": False,
        "population": {
            "type": "psro",
            "iterations": 1,
            "env_steps": 64,
            "games_per_cell": 8,
            "meta_solver": {"type": "nash"},
        },
        "oracle": {
            "type": "net",
            "policy": {"hidden": [8], "lr": 1e-2},
            "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 1, "minibatches": 1},
        },
        "backend": {"type": "inline"},
    },
    "speakers": {
        "name": "speakers",
        "env": {"type": "text_kuhn"},
        "population": {"type": "psro", "iterations": 1, "train_steps": 1, "games_per_cell": 2, "nash_conv_every": 0},
        "oracle": {
            "type": "language",
            "policy": {"base": "tiny", "rank": 2, "sampling": SAMPLED},
            "episodes": 2,
            "imitation_steps": 1,
        },
        "backend": {"type": "inline"},
    },
}

DEEP: Any = "x"
for _ in range(60):
    DEEP = [DEEP]

HOSTILE: list[Any] = [
    None,
    [],
    {},
    [[]],
    {"a": {"b": []}},
    DEEP,
    "",
    "n" * 300,
    "../../../tmp/x",
    "a\x1b[31m\u202e\x00b",
    "no/such:Thing",
    True,
    -4,
    0,
    10**12,
    10**30,
    1e300,
    float("nan"),
    float("-inf"),
    [-4],
    [10**9],
]

_LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)
RAW: dict[str, str] = {
    "empty": "",
    "a list": "- a\n- b\n",
    "text": "hello\n",
    "a number": "12\n",
    "tabs": "env:\n\ttype: plan_path\n",
    "open bracket": "env: {type: plan_path\n",
    "two documents": "env: {}\n---\nenv: {}\n",
    "a tag": "env: !!python/object/apply:os.system [true]\n",
    "an unknown tag": "env: !secret x\n",
    "a recursive list": "env: &a [*a]\n",
    "a recursive mapping": "env: &a {type: *a}\npolicies: *a\n",
    "a recursive whole": "&a\nenv: *a\npolicies: *a\nname: *a\n",
    "a recursive merge": "env: &a {<<: *a, type: plan_path}\n",
    "billion laughs": f"{_LAUGHS}\nenv: {{type: plan_path}}\npolicies: *a11\n",
    "billion laughs in a name": f"{_LAUGHS}\nname: *a11\nenv: {{type: plan_path}}\n",
    "nested merges": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)),
    "merged laughs": "a: &a {x: 1}\n" + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join(['*a'] * 50)}]}}" for i in range(50)),
    "deep lists": f"env: {'[' * 5000}{']' * 5000}\n",
    "deep mappings": f"env: {'{a: ' * 3000}1{'}' * 3000}\n",
    "deep blocks": "\n".join(f"{' ' * i}a:" for i in range(2000)),
    "an undefined alias": "env: *nothing\n",
    "a key twice": "env: {}\nenv: {}\n",
    "an unhashable key": "? [a, b]\n: 1\n",
    "a mapping as a key": "? {a: b}\n: 1\n",
    "a number as a key": "1: 2\nenv: {type: plan_path}\n",
    "no text": "\x00\x01\x02",
    "a surrogate": 'name: "\\ud800"\nenv: {type: plan_path}\n',
    "a huge integer": f"seed: {'9' * 5000}\n",
    "a huge hexadecimal": f"seed: 0x{'f' * 5000}\n",
    "a huge key": f"{'k' * 100_000}: 1\n",
    "many keys": "\n".join(f"k{i}: {i}" for i in range(20_000)),
    "infinity as an env": "env: -.inf\n",
    "a date": "env: 2026-01-31\n",
    "a set": "env: !!set {a, b}\n",
    "binary": "env: !!binary aGVsbG8=\n",
    "a timestamp": "env: !!timestamp 2026-01-31\n",
    "a merge of nothing": "<<: 3\nenv: {}\n",
}


class Case(NamedTuple):
    """A config as YAML, and its name: the kind, the changed key and the value."""

    name: str
    text: str


def raw_cases() -> list[Case]:
    return [Case(name, text) for name, text in RAW.items()]


def changed_cases(count: int | None = None, seed: int = 0) -> list[Case]:
    """Every kind of config with every key in turn changed to each hostile value; with `count`, that many of them, drawn
    evenly from the kinds."""
    changes = {kind: [(path, value) for path in _paths(tree) for value in HOSTILE] for kind, tree in KINDS.items()}
    if count is not None:
        rng = random.Random(seed)
        changes = {kind: rng.sample(own, count // len(changes)) for kind, own in changes.items()}
    return [_changed(kind, path, value) for kind, own in changes.items() for path, value in own]


def _changed(kind: str, path: tuple[Any, ...], value: Any) -> Case:
    shown = repr(value) if len(repr(value)) < 24 else f"{repr(value)[:20]}..."
    return Case(f"{kind} {'.'.join(map(str, path))}={shown}", _dumped(_with(KINDS[kind], path, value)))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all nodes of a tree, also of mappings and lists."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _with(tree: Tree, path: tuple[Any, ...], value: Any) -> Tree:
    changed: Any = copy.deepcopy(tree)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    whole: Tree = changed
    return whole


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dumped(tree: Tree) -> str:
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=False)
