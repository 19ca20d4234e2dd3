"""Evaluates trained policies: at any seats, swapped, or together with other policies. The same functions serve language
agents and networks; text.py and vector.py play the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from palestra.core.types import Seat
from palestra.evaluation.target import EvalResult, OnProgress, find_target, swap_seats

MAX_ASSIGNMENTS = 256


class EvalOptions(TypedDict, total=False):
    """Further options of an evaluation."""

    sampling: Mapping[str, Any]
    """Changes to the sampling of language models."""
    greedy: bool
    """True: networks take their most probable action instead of sampling."""
    checkpoint: int | None
    """Number of training steps before the checkpoint. None: the newest checkpoint."""
    in_process: bool
    """True: sample in this process, even if the config sets a sampler."""
    samples: int
    """Times that language agents play each instance; above 1 for pass@k and majority vote."""


class EvalSetup(Protocol):
    """An env and the names of the policies at its seats."""

    @property
    def policy_names(self) -> dict[Seat, str]:
        """The policy of each seat: a name, see `evaluate`."""

    def play(
        self, assignments: Sequence[Mapping[Seat, str]], episodes: int, seed: int, on_progress: OnProgress
    ) -> list[EvalResult]:
        """Plays the same held-out episodes with each assignment; see `evaluate` for `on_progress`."""


def evaluate(
    what: str | Path,
    env: Mapping[str, Any] | None = None,
    seats: Mapping[str, str] | None = None,
    *,
    episodes: int,
    swap: bool = False,
    seed: int = 0,
    on_progress: OnProgress = lambda played, of: None,
    **options: Unpack[EvalOptions],
) -> EvalResult:
    """Plays `episodes` held-out episodes and returns the result.

    `what` is a run, a policy of a run as RUN:NAME (it then plays every seat), a config, or an env. `env` changes
    options of the env. Text envs are played on split "test" unless `env` names another; vectorised envs have the
    options that the run's own evaluations share. `seats` maps seats (`*` and `?` are wildcards) to names of policies:
    one of the run's, RUN:NAME, "random"; for language agents also "base" (the untrained base of the seat's own
    policy), "expert", "human" or an endpoint as URL#MODEL; for networks also "script:NAME". `swap` exchanges the
    policies of two seats. `on_progress` is called with the numbers of episodes played and in all: after each episode of
    language agents, and once after all episodes of networks. For `options` see `EvalOptions`.

    Raises ValueError for an unknown name, seat or checkpoint.
    """
    with open_eval(what, env or {}, seats or {}, episodes, options) as setup:
        names = setup.policy_names
        if swap:
            names = swap_seats(names)
        return setup.play([names], episodes, seed, on_progress)[0]


def cross_play(
    what: str | Path,
    env: Mapping[str, Any] | None = None,
    members: Sequence[str] = (),
    *,
    episodes: int,
    seed: int = 0,
    on_progress: OnProgress = lambda played, of: None,
    **options: Unpack[EvalOptions],
) -> list[EvalResult]:
    """Evaluates every assignment of `members` (default: the run's own policies) to seats, all on the same instances.
    See `evaluate` for the other arguments.

    Raises ValueError if there are more than 256 assignments.
    """
    with open_eval(what, env or {}, {}, episodes, options) as setup:
        seats = list(setup.policy_names)
        members = list(dict.fromkeys(members or setup.policy_names.values()))
        if (count := len(members) ** len(seats)) > MAX_ASSIGNMENTS:
            raise ValueError(
                f"there are {count} assignments of {len(members)} members to {len(seats)} seats, more than "
                f"{MAX_ASSIGNMENTS}: name fewer with --member"
            )
        ways = [dict(zip(seats, way, strict=True)) for way in product(members, repeat=len(seats))]
        return setup.play(ways, episodes, seed, on_progress)


def open_eval(
    what: str | Path, env: Mapping[str, Any], seats: Mapping[str, str], episodes: int, options: EvalOptions
) -> AbstractContextManager[EvalSetup]:
    """Returns a context with the setup of an evaluation of `episodes` episodes, of language agents or of networks; see
    `evaluate`. Raises TypeError for an option that does not exist."""
    if unknown := options.keys() - EvalOptions.__annotations__.keys():
        raise TypeError(f"an evaluation has no option {min(unknown)}: it has {', '.join(EvalOptions.__annotations__)}")
    target = find_target(what, env, options.get("checkpoint"))
    samples = options.get("samples", 1)
    if target.is_vector:
        if samples > 1:
            raise ValueError(f"samples: {samples} is for text envs; {what} is a vectorised game: leave it out")
        from palestra.evaluation.vector import MAX_NUM_ENVS, open_vector_eval

        num_envs = min(episodes, MAX_NUM_ENVS)
        greedy = options.get("greedy", False)
        temperature = (options.get("sampling") or {}).get("temperature", 1.0)
        if not greedy and temperature != 1.0:
            raise ValueError(
                f"temperature {temperature:g} is for language agents; networks play as in training, or at 0 their most "
                "probable action: leave it out, or give 0"
            )
        return open_vector_eval(target, env, seats, num_envs=num_envs, greedy=greedy)
    from palestra.evaluation.text import open_text_eval

    in_process = options.get("in_process", False)
    sampling = options.get("sampling")
    return nullcontext(open_text_eval(target, env, seats, sampling=sampling, in_process=in_process, samples=samples))
