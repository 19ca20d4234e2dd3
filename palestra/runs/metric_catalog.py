"""The metrics that runs log, with titles and units: what charts, the dashboard and the reference call them.

A run may log others, such as terms of an env's reward; they are shown by their names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricInfo:
    """A metric of `log`.jsonl under a heading; with `has_evals` its chart has evaluations too."""

    name: str
    title: str
    unit: str
    panel: str
    log: str = "metrics"
    has_evals: bool = False

    @property
    def label(self) -> str:
        """Title of a chart: the title with the unit, unless that is a word of it."""
        return self.title if self.unit in self.title else f"{self.title} ({self.unit})"


# In the order of the dashboard's charts.
METRICS = (
    MetricInfo("success", "success (held-out and in training)", "share of episodes", "Outcome", has_evals=True),
    MetricInfo("return", "return (held-out and in training)", "reward per episode", "Outcome", has_evals=True),
    MetricInfo("team_return", "return of the team", "reward per episode", "Outcome", has_evals=True),
    MetricInfo("nash_conv", "NashConv", "reward, all players together", "Outcome"),
    MetricInfo("exploitability", "exploitability", "reward, mean over players", "Outcome"),
    MetricInfo("gap", "equilibrium gap of the payoff table", "reward", "Outcome"),
    MetricInfo("value", "value of the game to each player", "reward per game", "Outcome"),
    MetricInfo("win_rate", "win rate", "share of games", "Outcome"),
    MetricInfo("worst_win_rate", "win rate against the worst", "share of games", "Outcome"),
    MetricInfo("rating", "rating", "Elo", "Outcome"),
    MetricInfo("local_reward", "local reward", "reward", "Rewards by seat and term"),
    MetricInfo("team_reward", "team reward", "reward", "Rewards by seat and term"),
    MetricInfo("steps_per_episode", "episode length", "joint steps", "Play", has_evals=True),
    MetricInfo("tokens", "answer length", "tokens", "Play"),
    MetricInfo("invalid", "invalid answers", "share of answers", "Play"),
    MetricInfo("truncated_fraction", "truncated answers", "share of answers", "Play"),
    MetricInfo("failed", "failed episodes", "episodes per step", "Play"),
    MetricInfo("failed", "failed evaluation episodes", "episodes", "Play", "evals"),
    MetricInfo("entropy", "entropy", "nats", "Learning"),
    MetricInfo("kl", "KL from the sampling policy", "nats", "Learning"),
    MetricInfo("clip_fraction", "clip fraction", "share of tokens or actions", "Learning"),
    MetricInfo("zero_std_fraction", "zero-advantage groups", "share of groups", "Learning"),
    MetricInfo("staleness", "mean staleness", "training steps", "Learning"),
    MetricInfo("staleness_max", "maximum staleness", "training steps", "Learning"),
    MetricInfo("loss", "loss", "loss", "Learning"),
    MetricInfo("policy_loss", "policy loss", "loss", "Learning"),
    MetricInfo("value_loss", "value loss", "loss", "Learning"),
    MetricInfo("td_loss", "TD loss", "loss", "Learning"),
    MetricInfo("grad_norm", "gradient norm", "L2 norm", "Learning"),
    MetricInfo("lr", "learning rate", "step size", "Learning"),
    MetricInfo("members", "members", "members", "Learning"),
    MetricInfo("games", "games played", "games", "Learning"),
    MetricInfo("tokens_per_s", "tokens per second", "tokens per second", "Speed", "timings"),
    MetricInfo("answers_per_s", "answers per second", "answers per second", "Speed", "timings"),
    MetricInfo("env_steps_per_s", "env steps per second", "env steps per second", "Speed", "timings"),
    MetricInfo("rollout_cpu_s", "CPU time of rollouts", "CPU seconds per step", "Speed", "timings"),
    MetricInfo("train_cpu_s", "CPU time of training", "CPU seconds per step", "Speed", "timings"),
    MetricInfo("cpu_percent", "CPU use of the run's process", "% of a core", "Machine", "timings"),
    MetricInfo("rss_gib", "memory of the run's process", "GiB", "Machine", "timings"),
    MetricInfo("gpu_memory_gib", "GPU memory, maximum so far", "GiB", "Machine", "timings"),
)

# Counts and labels of a line, which make no chart of their own.
UNCHARTED = (
    "answers",
    "deviation",
    "elapsed_s",
    "env_steps",
    "env_steps_here",
    "episodes",
    "groups",
    "iteration",
    "iterations",
    "return_ci95",
    "samples",
    "seconds",
    "slice",
    "updates",
)


def metric_label(name: str, log: str = "metrics") -> str:
    """Returns the title with unit of a metric of `log`, or its name if the catalogue does not have it."""
    return next((each.label for each in METRICS if (each.name, each.log) == (name, log)), name)
