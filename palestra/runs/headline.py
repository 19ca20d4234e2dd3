"""The headline result of a run, its leading held-out evaluation, and the labels of training metrics beside it.

In training, an episode with several answers per turn may continue from the best of them: its success rate then measures
a search, not the policies alone. Networks sample actions in training, and may be evaluated greedily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from palestra.runs.series import success_bounds

Tree = Mapping[str, Any]
DEV_EVAL = "dev"  # the evaluation by which settings are chosen
HEADLINE_EVAL = "test"  # the evaluation that leads if a run has several
TEAM_RETURN = "return."  # start of the keys of teams' returns, where there are several
TEAM_SUCCESS = "success."  # start of the keys of teams' successes, where an env reports success by seat
SEARCH_KEEPS = ("best", "epsilon")  # values of `continue_from` that choose among answers by their reward


def training_success_label(config: Tree) -> str:
    """Returns the name of the success rate that a run with this resolved config logs in training: "search success (best
    of 8)" if its episodes continue from the best of 8 answers, else "training success". The branching of a user's own
    algorithm is not in its config: its label notes that the rate may be of a search."""
    if size := _search_size(config):
        return f"search success (best of {size})"
    if any(":" in str(algorithm.get("type")) and "branch_at" not in algorithm for algorithm in _algorithms(config)):
        return "training success (may be of a search)"
    return "training success"


def training_return_label(config: Tree) -> str:
    """Returns the name of the return in training; for networks with "(sampled actions)"."""
    if size := _search_size(config):
        return f"search return (best of {size})"
    if _is_of_networks(config):
        return "training return (sampled actions)"
    return "training return"


def _search_size(config: Tree) -> int:
    """Returns the number of answers from the best of which an episode continues; 0 if it does not choose."""
    searches = [
        algorithm
        for algorithm in _algorithms(config)
        if algorithm.get("branch_at") == "turn" and algorithm.get("continue_from") in SEARCH_KEEPS
    ]
    return max((int(algorithm.get("group_size", 0)) for algorithm in searches), default=0)


def _algorithms(config: Tree) -> list[Tree]:
    """Returns the algorithm of each stage of a run, or of the whole run if it has no stages."""
    stages = config.get("stages") or [{}]
    return [found for stage in stages if (found := stage.get("algorithm") or config.get("algorithm"))]


def algorithm_label(config: Tree, steps: int | None = None) -> str:
    """Returns the names of a run's algorithms in order: "sft, then ppo"; "ppo and dqn" where
    policies have their own; with `steps`, of its first so many training steps."""
    names = []
    start = 0
    for stage in config.get("stages") or [{}]:
        if steps is None or start < steps or start == 0:
            names.append(_name_of(config, stage.get("algorithm") or config.get("algorithm") or {}))
        start += stage.get("steps") or config.get("steps") or 0
    return ", then ".join(name for name, _ in groupby(names))


def _name_of(config: Tree, algorithm: Tree) -> str:
    """Returns the name of a stage's algorithm, or of those by which trained networks replace it."""
    trained = [policy for policy in (config.get("policies") or {}).values() if policy.get("type") == "net"]
    names = [str((policy.get("algorithm") or algorithm).get("type", "")) for policy in trained]
    return " and ".join(dict.fromkeys(names)) or str(algorithm.get("type", ""))


def total_steps(config: Tree) -> int | None:
    """Returns a run's training steps over all stages; None if it does not count steps."""
    stages = config.get("stages") or [{}]
    return sum(stage.get("steps") or config.get("steps") or 0 for stage in stages) or None


def eval_label(config: Tree, name: str) -> str:
    """Returns the name of an evaluation, such as "test", and whether networks act greedily in it: "test (greedy)"."""
    own = (config.get("evals") or {}).get(name) or {}
    if own.get("greedy") and _is_of_networks(config):
        return f"{name} (greedy)"
    return name


def held_out_label(config: Tree, name: str) -> str:
    """Returns `eval_label` beside values of training: "held-out test"; a name such as "held_out" stands alone."""
    label = eval_label(config, name)
    return label.replace("_", " ") if name.startswith("held") else f"held-out {label}"


def held_out_title(config: Tree, name: str, metric: str) -> str:
    """Returns the title of a metric of an evaluation: "held-out success, test"; "success, held out" of one that is
    named so."""
    label = eval_label(config, name)
    if name.startswith("held"):
        return f"{metric}, {label.replace('_', ' ')}"
    return f"held-out {metric}, {label}"


def _is_of_networks(config: Tree) -> bool:
    return "env_steps" in config


def returns_by_name(line: Tree) -> dict[str, float]:
    """Returns the returns that a line of metrics shows: that of each team if there are several, else "return", else
    that of each seat. The mean over teams says little: of opponents it may be 0 whatever they learn."""
    if teams := _by_team(line, TEAM_RETURN):
        return teams
    if "return" in line:
        return {"return": line["return"]}
    return dict(line.get("returns") or {})


def success_by_name(line: Tree) -> dict[str, float]:
    """Returns the success rates of a line of metrics: "success", or those of opposing teams."""
    return {"success": line["success"]} if "success" in line else _by_team(line, TEAM_SUCCESS)


def success_keys(*lines: Tree) -> dict[str, str]:
    """Returns the keys of the success rates of lines of metrics with their titles: {"success": "success"}, or
    {"success.hunters": "success (hunters)", ...}."""
    keys = {}
    if any("success" in line for line in lines):
        keys["success"] = "success"
    names = dict.fromkeys(chain.from_iterable(_by_team(line, TEAM_SUCCESS) for line in lines))
    return keys | {f"{TEAM_SUCCESS}{name}": f"success ({name})" for name in names}


def return_keys(*lines: Tree) -> dict[str, str]:
    """Returns the keys of the returns that lines of metrics show, with their titles: {"return": "return"}, or
    {"return.hunters": "return (hunters)", ...} of teams; nothing without any."""
    names = dict.fromkeys(chain.from_iterable(_by_team(line, TEAM_RETURN) for line in lines))
    if names:
        return {f"{TEAM_RETURN}{name}": f"return ({name})" for name in names}
    return {"return": "return"} if any("return" in line for line in lines) else {}


def _by_team(line: Tree, start: str) -> dict[str, float]:
    """Returns the numbers of a line whose keys begin with `start`, by the rest of the key."""
    return {
        key.removeprefix(start): value
        for key, value in line.items()
        if key.startswith(start) and isinstance(value, int | float)
    }


def format_eval(line: Tree) -> str:
    """Formats an evaluation's main metric: "85.0%", "-12.40 ± 1.10", or that of each team."""
    if rates := success_by_name(line):
        return format_success(rates)
    if "return" in (returns := returns_by_name(line)):
        return format_return(line)
    return format_returns(returns)


def format_success(rates: Mapping[str, float], digits: int = 1) -> str:
    """Formats the success rates of `success_by_name`: "85.0%", or "hunters 75.0% prey 25.0%"; "" without any."""
    if list(rates) == ["success"]:
        return f"{rates['success']:.{digits}%}"
    return " ".join(f"{name} {rate:.{digits}%}" for name, rate in rates.items())


def format_returns(returns: Mapping[str, float]) -> str:
    """Formats the returns of `returns_by_name`: "-12.40", or "hunter 18.00 prey -54.00"."""
    if list(returns) == ["return"]:
        return f"{returns['return']:.2f}"
    return " ".join(f"{name} {own:.2f}" for name, own in returns.items())


def format_episodes(line: Tree) -> str:
    """Formats the size of an evaluation: "40 episodes of 10 instances, 2 failed"."""
    size = f"{line['episodes']:.0f} episodes"
    if "instances" in line:
        size += f" of {line['instances']:.0f} instances"
    if line.get("failed"):
        size += f", {line['failed']:.0f} failed"
    return size


def shows_return(line: Tree) -> bool:
    """Returns whether an evaluation's return is shown first: that of networks beside success, that of language agents
    if their env reports no success."""
    return "return" in line and (not success_by_name(line) or "team_return" not in line)


def paid_seats(line: Tree) -> list[str]:
    """Returns the seats whose own return is shown: if the team earned rewards, those that earned some too."""
    returns = line.get("returns") or {}
    half = line.get("returns_ci95") or {}
    return [seat for seat, own in returns.items() if own or half.get(seat) or not line.get("team_return")]


def eval_interval(line: Tree) -> tuple[float, float] | None:
    """Returns the 95 % interval of an evaluation's main metric: Wilson's interval of a success rate, the normal one of
    a mean return; None if the line lacks what is needed."""
    played = line.get("episodes")
    if not isinstance(played, int | float) or played < 1:
        return None
    failed = line.get("failed", 0)
    samples = line.get("samples", 1)
    if not isinstance(failed, int | float) or not isinstance(samples, int | float) or samples < 1:
        return None
    if isinstance(line.get("success"), int | float) and 0 <= line["success"] <= 1:
        return success_bounds(line)
    mean = returns_by_name(line).get("return")
    half = return_half_width(line)
    if success_by_name(line) or not isinstance(mean, int | float) or half is None:
        return None
    return mean - half, mean + half


def return_half_width(line: Tree) -> float | None:
    """Returns half the width of the 95 % interval (normal) of a mean return; None if unknown."""
    played = line.get("episodes")
    deviation = line.get("deviation")
    half = line.get("return_ci95")
    if isinstance(half, int | float):
        return half
    if not isinstance(deviation, int | float) or not isinstance(played, int | float) or played < 1:
        return None
    return float(1.96 * deviation / played**0.5)


def format_return(line: Tree) -> str:
    """Formats an evaluation's return, with half the width of its 95 % interval if it is known; "-" without one."""
    return _with_interval(line.get("return"), return_half_width(line))


def format_seat_return(line: Tree, seat: str) -> str:
    """Formats a seat's own return in an evaluation likewise."""
    return _with_interval((line.get("returns") or {}).get(seat), (line.get("returns_ci95") or {}).get(seat))


def _with_interval(mean: float | None, half: float | None) -> str:
    if mean is None:
        return "-"
    if half is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {half:.2f}"


def headline_eval(names: Sequence[str]) -> str | None:
    """Returns which of a run's evaluations leads: "test", else the first; None if there is none."""
    return next((name for name in (HEADLINE_EVAL, *names) if name in names), None)
