"""Options of the commands that play episodes: the target, the env, and the policies of its seats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

POLICY_HELP = (
    "a policy of the run, RUN:NAME of another, base, expert, random, human, an endpoint as URL#MODEL, or any base "
    "(smollm2, OWNER/NAME, ./model.gguf); in vector envs random, script:NAME and RUN:NAME"
)
TargetArgument = Annotated[
    Path, typer.Argument(help="a run, a member as RUN:NAME (it plays every seat), a config, or an env")
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", help="change the env: `--env split=test`, `--env size=5`")
]
SeatsOption = Annotated[
    list[str] | None,
    typer.Option(help=f"policy of a seat, as SEAT=POLICY; `*` in SEAT matches any letters: {POLICY_HELP}"),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0, help="sampling temperature (default: as in training; networks accept only that and 0)"),
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="sample in this process, even if the config names a sampler")
]
CheckpointOption = Annotated[
    int | None, typer.Option(help="a checkpoint of the run, by the number of steps before it (default: the newest)")
]


def sampling_options(temperature: float | None) -> dict[str, Any]:
    """Returns the changes to the sampling of language models; none for None."""
    return {} if temperature is None else {"temperature": temperature}


def require_text_env(what: Path, name: str) -> None:
    """Raises ValueError, which names the option `name`, if the target is a vector env."""
    from palestra.evaluation.target import find_target

    if find_target(what).is_vector:
        raise ValueError(f"{name} is for text envs; {what} is a vector env, whose seats take arrays")


def parse_seats(settings: list[str] | None) -> dict[str, str]:
    """Parses `["adversary_*=random"]` to {"adversary_*": "random"}. Raises ValueError for an entry without "="."""
    pairs = [setting.partition("=") for setting in settings or []]
    if wrong := [seat for seat, equals, _ in pairs if not equals]:
        raise ValueError(f"cannot read --seats {wrong[0]}: write SEAT=POLICY, for example agent_0=random")
    return {seat: name for seat, _, name in pairs}


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parses `["size=5"]` to {"size": 5}. Raises ValueError for an entry that is not a setting."""
    from palestra.core.config import override

    return override({}, settings or [])
