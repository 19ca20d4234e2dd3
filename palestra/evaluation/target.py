"""Resolves evaluation targets (run, RUN:NAME, config or env) and seat assignments.

Both kinds of envs share these names of policies: a policy of the target, or RUN:NAME for a policy of another run.
text.py and vector.py add the names of their kind: `base`, `expert`, `random`, `script:NAME`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from palestra.core.config import Tree, load
from palestra.core.config.key_hints import nearest
from palestra.core.config.shipped import find_config, suggest_config
from palestra.core.types import Episode, Seat
from palestra.envs import is_vector_config, known_envs
from palestra.evaluation.report.episodes import episode_html, pick_samples
from palestra.evaluation.report.html import escape_text, notebook_html
from palestra.runs import Checkpoint, find_run
from palestra.runs.checkpoints import list_all_checkpoints
from palestra.runs.headline import (
    format_episodes,
    format_return,
    format_returns,
    returns_by_name,
    shows_return,
    success_by_name,
    success_keys,
)
from palestra.runs.series import success_interval

OnProgress = Callable[[int, int], None]  # called with (episodes played, episodes in all)

MAX_TRANSCRIPTS = 3  # episodes that a notebook shows of an evaluation
MAX_NAMED_SEATS = 4  # seats of one policy that are listed


class EvalResult(NamedTuple):
    """Result of an evaluation: the policy at each seat (with its version, if it has one), the metrics, and the episodes
    (empty for vectorised envs, which do not record them)."""

    policy_names: dict[Seat, str]
    metrics: dict[str, Any]
    episodes: list[Episode]

    def __repr__(self) -> str:
        return f"EvalResult({self._facts()})"

    def _repr_html_(self) -> str:
        shown = [episode_html(episode, label) for label, episode in pick_samples(self.episodes, MAX_TRANSCRIPTS, 0)]
        return notebook_html(f"<p>{escape_text(self._facts())}</p>{''.join(shown)}")

    def _facts(self) -> str:
        """Returns the seats of each policy, the main metrics with their intervals and the number of episodes."""
        line = self.metrics
        seats = groupby(sorted(self.policy_names, key=self.policy_names.__getitem__), self.policy_names.__getitem__)
        facts = [f"{_name_seats(list(some))}: {name}" for name, some in seats]
        facts += [f"{what} {success_interval(line, key)}" for key, what in success_keys(line).items()]
        returns = returns_by_name(line)
        if returns and (shows_return(line) or not success_by_name(line)):
            text = format_return(line) if "return" in returns else format_returns(returns)
            facts.append(f"return {text}")
        return "; ".join([*facts, format_episodes({"episodes": len(self.episodes), **line})])


def _name_seats(seats: Sequence[Seat]) -> str:
    return f"{len(seats)} seats" if len(seats) > MAX_NAMED_SEATS else ", ".join(seats)


@dataclass(frozen=True)
class Target:
    """Target of an evaluation: its config tree, run, checkpoint step and policy.

    `run` is None for a config or an env; `step` is the number of training steps before the checkpoint (None: the
    newest); `policy` plays every seat ("": as the config says).
    """

    tree: Tree
    run: Path | None = None
    step: int | None = None
    policy: str = ""

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The run's checkpoint. Raises ValueError if there is none or its files are damaged."""
        return None if self.run is None else find_checkpoint(self.run, self.step)

    @property
    def is_vector(self) -> bool:
        """True for networks in a vectorised env, False for language agents."""
        return is_vector_config(self.tree)

    def weights(self, policy: str) -> Path | None:
        """Returns the folder of the policy's weights; None if the target has no trained policy of this name."""
        checkpoint = self.checkpoint
        if checkpoint is None or policy not in checkpoint.names:
            return None
        return checkpoint.path / checkpoint.names[policy]

    def find_policy(self, name: str) -> tuple[Target, str]:
        """Returns the target that has the policy, RUN at its newest checkpoint for RUN:NAME, and its name there."""
        run, _, policy = name.rpartition(":")
        if not run:
            return self, name
        return find_target(run), policy

    def refuse_policy(self, name: str, others: str) -> NoReturn:
        """Raises ValueError for an unknown policy; `others` lists the names of other policies that can play."""
        have = dict.fromkeys(self.tree.get("policies", {}))
        if not self.checkpoint and name in have:
            raise ValueError(f'no policy "{name}" has been trained here: give its seats another, --seats SEAT={others}')
        if self.checkpoint:
            have |= dict.fromkeys(self.checkpoint.names)
        raise ValueError(f'no policy "{name}"; the run has {", ".join(have)}, or say {others}')


def find_target(what: str | Path, env: Mapping[str, Any] | None = None, step: int | None = None) -> Target:
    """Returns the evaluation target named by `what`: a run (with its checkpoint after `step` steps; None: the newest),
    RUN:NAME, a config file, which may be a shipped one, or an env, whose options are then `env`. Raises ValueError if
    there is none, or if it trains a population."""
    what = str(what)
    if not Path(what).exists() and what in known_envs():
        return _env_target(what, env or {})
    run, _, policy = what.rpartition(":")
    path = find_config(Path(run or what))
    if not path.exists():
        hint = nearest(what, known_envs()).replace(":", ";", 1)
        if path.suffix:
            hint = suggest_config(path)
        raise ValueError(
            f"there is no run, config or env {path}: `palestra runs` lists the runs, and `palestra info` the envs{hint}"
        )
    tree = load_target(path)
    if "population" in tree:
        raise ValueError(
            f"{path} trains a population: `palestra league crossplay {path}` lets its members play each other"
        )
    return Target(tree, path if path.is_dir() else None, step, policy if run else "")


def load_target(path: Path) -> Tree:
    """Returns the config of a run, or of a file."""
    if path.is_dir():
        path = find_run(path) / "config.yaml"
    return load(path)


def _env_target(name: str, options: Mapping[str, Any]) -> Target:
    """Returns the target of an env without a run: the shipped base plays it, or networks that `seats` names."""
    tree: Tree = {"env": {"type": name, **options}}
    kind = "net" if is_vector_config(tree) else "frozen"
    return Target(tree | {"policies": {"default": {"type": kind}}})


def find_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Returns a run's newest checkpoint, or that after `step` steps. Raises ValueError: none, or damaged."""
    checkpoints = [checkpoint for checkpoint in list_all_checkpoints(path) if checkpoint.path.is_dir()]
    matching = [checkpoint for checkpoint in checkpoints if step is None or checkpoint.step + 1 == step]
    if not matching:
        have = ", ".join(str(checkpoint.step + 1) for checkpoint in checkpoints) or "none"
        raise ValueError(f"{path} has no checkpoint{'' if step is None else f' after {step} steps'}; it has: {have}")
    return matching[-1].verify()


def assign_seats(names: Mapping[Seat, str], target: Target, changes: Mapping[str, str], env: str) -> dict[Seat, str]:
    """Returns the policy of each seat: the target's own policy, if it names one, else as in `names`; `changes` take
    precedence, and their keys may contain the wildcards `*` and `?`. Raises ValueError for a key that matches no
    seat."""
    assigned = dict.fromkeys(names, target.policy) if target.policy else dict(names)
    for pattern, name in changes.items():
        matched = [seat for seat in assigned if fnmatchcase(seat, pattern)]
        if not matched:
            raise ValueError(f'no seat "{pattern}": env "{env}" plays {", ".join(assigned)}')
        assigned |= dict.fromkeys(matched, str(name))
    return assigned


def swap_seats(names: Mapping[Seat, str]) -> dict[Seat, str]:
    """Returns the assignment with the policies of two seats exchanged. Raises ValueError unless there are two seats."""
    if len(names) != 2:
        raise ValueError(f"--swap is for two seats; this env has {len(names)}: name them with --seats")
    seats: Sequence[Seat] = list(names)
    return {seats[0]: names[seats[1]], seats[1]: names[seats[0]]}
