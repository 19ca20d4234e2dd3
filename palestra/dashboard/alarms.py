"""Alarms: rules that detect common training failures in logged metrics, each with the numbers that triggered it.

Rules read the metrics of policies as they are logged: policy -> key -> array [T] float64, one value per log line. They
compare the mean of the newest `NEWEST_LINES` lines (at most half of all; of entropy and flat groups at most a sixth,
since a short run may collapse at its end) with that of the first `FIRST_LINES` (at most a quarter), and report nothing
if there are fewer than `MIN_LINES` lines. An alarm is a hint where to look, not a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from palestra.runs.headline import TEAM_SUCCESS, eval_interval

if TYPE_CHECKING:
    from palestra.populations.ratings import Cyclicity  # imports SciPy's solvers, half a second at the end of a run

MetricsByName = Mapping[str, Mapping[str, np.ndarray]]
NO_LINES = np.zeros(0)  # of a metric that is not logged

MIN_LINES = 8
MIN_END_LINES = 3
FIRST_LINES = 5
NEWEST_LINES = 20
SOLVED_SUCCESS = 0.95  # a task with this success rate raises no alarm
# nats; share of the first entropy
LOW_ENTROPY = 0.1
LOW_ENTROPY_SHARE = 0.1
# shares of groups in which all answers earn the same
HIGH_ZERO_VARIANCE = 0.9
LOW_ZERO_VARIANCE = 0.5
DOMINANT_REWARD_SHARE = 0.9  # share of the policies' own rewards
# factor of tokens; rise in reward; rise in success rate
LENGTH_FACTOR = 1.5
MIN_REWARD_RISE = 0.1
MAX_SUCCESS_RISE = 0.02
# the reward's term for form; share of the rise in reward
FORM_METRIC = "reward/form"
FORM_SHARE = 0.5
# what a judge's verdicts pay, and what they would if all were right; share of the rise of the first by which the second
# must rise, too; standard errors of the difference
VERDICT_METRIC = "reward/verdict"
GRADE_METRIC = "exact_grade"
GRADE_SHARE = 0.5
MIN_STANDARD_ERRORS = 3
ROUNDING = 1e-6  # nats by which the entropy of a policy with a single action may be below 0
# shares of invalid answers
INVALID_BEFORE = 0.2
INVALID_NOW = 0.02
# shares of episodes; of answers
MAX_FAILED_SHARE = 0.05
MAX_CUT_OFF_SHARE = 0.3
# times the largest return of an episode: values of endless episodes at a discount of 0.99 are far below
DIVERGED_VALUES = 1000


class AlarmRule(NamedTuple):
    """The condition of an alarm in words, and what to try when it fires."""

    rule: str
    remedy: str


RULES = {
    "lazy seat": AlarmRule(
        f"at least {HIGH_ZERO_VARIANCE:.0%} of a policy's groups have answers that all earn the same in the newest "
        f"lines, while another policy has at most {LOW_ZERO_VARIANCE:.0%}; the task is not solved",
        "pay the seat for what it does (a reward of its own, or a smaller team_weight), raise its temperature, or use "
        "a larger group_size; see in Episodes whether its answers change what follows",
    ),
    "entropy collapse": AlarmRule(
        f"a policy's entropy is at most {LOW_ENTROPY} nats (not below 0, as that of continuous actions may be) and "
        f"{LOW_ENTROPY_SHARE:.0%} of what it was at first in the newest lines, and success is not above "
        f"{SOLVED_SUCCESS:.0%}",
        "continue from an earlier checkpoint with a smaller lr, or with entropy_coef or kl_coef above 0, or a higher "
        "temperature",
    ),
    "reward hacking by length?": AlarmRule(
        f"answers are {LENGTH_FACTOR} times as long as at first and earn at least {MIN_REWARD_RISE} more each, but "
        f"success (in evaluations if there are any) has not risen by {MAX_SUCCESS_RISE:.0%}",
        "read the longest answers in Episodes; do not pay for length, lower max_tokens, or pay for the result alone",
    ),
    "reward hacking by format?": AlarmRule(
        f"reward rose by at least {MIN_REWARD_RISE} and success did not by {MAX_SUCCESS_RISE:.0%}, while at least "
        f"{FORM_SHARE:.0%} of the rise is of the reward's term for form, or invalid answers fell from at least "
        f"{INVALID_BEFORE:.0%} to at most {INVALID_NOW:.0%}",
        "often the first phase of learning: wait; if it stays so, pay less for the form and more for the task, or "
        "start from easier instances",
    ),
    "reward hacking by verdict?": AlarmRule(
        f"what a judge's verdicts pay a policy rose by at least {MIN_REWARD_RISE} an answer, and the exact grade (or, "
        f"where none is reported, success in training) by at most {GRADE_SHARE:.0%} of that; the difference is "
        f"{MIN_STANDARD_ERRORS} standard errors or more, by how much it varies from line to line",
        "read in Episodes what the judge passes that is wrong; let it commit to an answer of its own first "
        "(commits_first), or train it on these answers",
    ),
    "one seat carries the team": AlarmRule(
        f"at least {DOMINANT_REWARD_SHARE:.0%} of the policies' own rewards over the newest {NEWEST_LINES} lines are "
        "of one policy, and another has earned some too",
        "compare the seats' rewards in Episodes; pay all seats for the result of the team (a larger team_weight), or "
        "assign credit by marginal contribution (Shapley)",
    ),
    "nothing to learn from": AlarmRule(
        f"at least {HIGH_ZERO_VARIANCE:.0%} of every policy's groups have answers that all earn the same, so they give "
        "no gradient, and the task is not solved",
        "take easier instances or a denser reward, a higher temperature or a larger group_size; check that the base "
        "model can solve any instance at all",
    ),
    "held-out success fell": AlarmRule(
        "the newest success of an evaluation is below an earlier one of it, and their 95 % intervals do not meet",
        "continue from the checkpoint of the better evaluation with a smaller lr or with kl_coef above 0; see in "
        "Agents which held-out instances regressed",
    ),
    "answers are cut off": AlarmRule(
        f"at least {MAX_CUT_OFF_SHARE:.0%} of a policy's answers over the newest {NEWEST_LINES} lines ended at "
        "max_tokens",
        "raise sampling.max_tokens of the policy, or ask for shorter answers in the prompt",
    ),
    "values diverge": AlarmRule(
        f"the values of a policy's actions are {DIVERGED_VALUES} times the largest return that it got in training (at "
        "least 1), or more: they no longer follow the rewards",
        "begin anew with a target network that changes more slowly (a smaller tau, or a larger target_interval), a "
        "smaller lr or n_step: 1",
    ),
    "episodes fail": AlarmRule(
        f"at least {MAX_FAILED_SHARE:.0%} of the episodes of the newest {NEWEST_LINES} lines failed",
        "open System for the errors by frequency, and Episodes (outcome: error) for the traceback of each; fix the env",
    ),
    "cyclic population": AlarmRule(
        "in some group of members each is beaten by another of it, by more than two standard errors",
        "do not pick a best member by rating: play the mixture of the meta-strategy, and look at NashConv",
    ),
    "mirror is behind": AlarmRule(
        "the object store to which the run is mirrored fails, or another process writes the run's copy there",
        "see that the store is up, that its credentials are in the environment and that one process trains the run: "
        "what the copy lacks is sent once the store answers, or by `palestra sync RUN --to URL`",
    ),
}
POPULATION_RULES = ("cyclic population",)  # judged by payoffs
UNCOUNTED_RULES = ("mirror is behind", "held-out success fell")  # need no number of log lines
MIRROR_RULES = ("mirror is behind",)  # judged by the status of the mirror, in runs of every kind; others by metrics


@dataclass(frozen=True)
class Alarm:
    """One alarm: `name` is a key of `RULES`, `policy` the policy concerned ("" for all; in a population, the members
    concerned), `message` what was observed."""

    name: str
    policy: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, with rule and remedy."""
        return asdict(self) | RULES[self.name]._asdict()


def rules_for(is_population: bool, num_lines: int) -> list[dict[str, Any]]:
    """Returns the rules that are applied to a run with `num_lines` log lines: name, rule, remedy, and `is_judged`,
    False for as long as there are fewer than the `MIN_LINES` lines that most need."""
    judged = is_population or num_lines >= MIN_LINES
    return [
        {"name": name, **rule._asdict(), "is_judged": judged or name in UNCOUNTED_RULES}
        for name, rule in RULES.items()
        if name in MIRROR_RULES or (name in POPULATION_RULES) == is_population
    ]


@dataclass(frozen=True)
class LoggedMetrics:
    """The metrics of each policy, of all together, and of each evaluation. A mean over fewer than
    `MIN_LINES` lines is NaN, of which no comparison is true."""

    policies: MetricsByName
    team: Mapping[str, np.ndarray]
    evals: MetricsByName

    @property
    def success(self) -> float:
        """The success rate at the end."""
        return end_mean(self.team.get("success", NO_LINES))

    @property
    def success_rise(self) -> float:
        """The rise in success of the evaluation that rose most, or of training if there is none."""
        curves = [log["success"] for log in self.evals.values() if len(log.get("success", ())) > 1]
        if curves:
            return max(float(curve[-1] - curve[0]) for curve in curves)
        return rise(self.team.get("success", NO_LINES))


def find_alarms(policies: MetricsByName, team: Mapping[str, np.ndarray], evals: MetricsByName) -> list[Alarm]:
    """Returns the alarms of a run of language agents or networks. `team` holds the metrics of all policies together
    (key -> [T]), `evals` those of each evaluation. Where success is by team, its mean counts."""
    by_team = [values for key, values in team.items() if key.startswith(TEAM_SUCCESS)]
    if by_team and "success" not in team and len({len(values) for values in by_team}) == 1:
        team = {**team, "success": np.mean(by_team, axis=0)}
    rules = (
        lazy_seat,
        entropy_collapse,
        longer_for_reward,
        format_for_reward,
        one_seat_carries,
        no_signal,
        cut_off,
        charmed_judge,
        diverging_values,
        failing_episodes,
        held_out_fall,
    )
    logged = LoggedMetrics(policies, team, evals)
    return list(chain.from_iterable(rule(logged) for rule in rules))


def lazy_seat(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if nearly all groups of one policy have equal returns while another policy's differ."""
    shares = end_means(logged, "zero_std_fraction")
    if logged.success > SOLVED_SUCCESS:
        return
    for name, share in shares.items():
        others = min((other for other_name, other in shares.items() if other_name != name), default=np.nan)
        if share >= HIGH_ZERO_VARIANCE and others <= LOW_ZERO_VARIANCE:
            yield Alarm(
                "lazy seat",
                name,
                f"{share:.0%} of its groups have answers that all earn the same, and {others:.0%} of another policy's",
            )


def entropy_collapse(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if a policy's entropy is near zero and far below its initial value, and the task is not solved.
    The entropy of continuous actions may be negative, which raises no alarm."""
    success = logged.success
    if success > SOLVED_SUCCESS:
        return
    for name, now in end_means(logged, "entropy").items():
        before = first_mean(logged.policies[name]["entropy"])
        if -ROUNDING <= now <= LOW_ENTROPY and now <= LOW_ENTROPY_SHARE * before:
            message = f"entropy {now:.3g} nats, from {before:.3g}"
            if not np.isnan(success):
                message += f", at a success of {success:.0%}"
            yield Alarm("entropy collapse", name, message)


def longer_for_reward(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if answers became much longer and reward rose, but success did not."""
    for name, change in rewarded_changes(logged, "tokens").items():
        if change.after >= LENGTH_FACTOR * change.before > 0:
            message = f"answers of {change.after:.3g} tokens, from {change.before:.3g}; {change.summary}"
            yield Alarm("reward hacking by length?", name, message)


def format_for_reward(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if reward rose, success did not, and the form improved or made the rise."""
    forms = rewarded_changes(logged, FORM_METRIC)
    for name, invalid in rewarded_changes(logged, "invalid").items():
        form = forms[name]
        message = ""
        if form.after - form.before >= FORM_SHARE * form.reward_rise:
            message = f"reward for form {form.after:+.2g}, from {form.before:+.2g}; {form.summary}"
        elif invalid.before >= INVALID_BEFORE and invalid.after <= INVALID_NOW:
            message = f"invalid answers {invalid.after:.1%}, from {invalid.before:.1%}; {invalid.summary}"
        if message:
            yield Alarm("reward hacking by format?", name, message)


def charmed_judge(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if a judge's verdicts pay a policy more than at first, and its answers are not better by the
    exact grade, which is hidden from the seats; where an env reports none, by success."""
    for name, series in logged.policies.items():
        verdicts = series.get(VERDICT_METRIC, NO_LINES)
        grades = series.get(GRADE_METRIC, logged.team.get("success", NO_LINES))
        if len(verdicts) != len(grades):
            continue
        paid = rise(verdicts)
        grade = rise(grades)
        if paid >= MIN_REWARD_RISE and grade <= GRADE_SHARE * paid and is_beyond_noise(verdicts - grades):
            message = f"verdicts pay {paid:+.2g} more than at first, and the exact grade rose by {grade:+.2g}"
            yield Alarm("reward hacking by verdict?", name, message)


def one_seat_carries(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if one policy earns nearly all of the policies' own rewards."""
    values = {}
    for name, series in logged.policies.items():
        own = series.get("local_reward", NO_LINES)
        # In envs with a team reward only, a seat without own reward means nothing: skip it.
        if len(own) >= MIN_LINES and np.any(own != 0):
            values[name] = newest_mean(own)
    total = sum(max(0.0, value) for value in values.values())
    if len(values) < 2 or total < 0.05:
        return
    for name, value in values.items():
        if value / total >= DOMINANT_REWARD_SHARE:
            message = f"{value / total:.0%} of what all policies earn for themselves is its own"
            yield Alarm("one seat carries the team", name, message)


def no_signal(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if nearly all groups of every policy are flat, and the task is not solved."""
    share = min(end_means(logged, "zero_std_fraction").values(), default=np.nan)
    success = logged.success
    if share >= HIGH_ZERO_VARIANCE and not success >= SOLVED_SUCCESS:
        at = "" if np.isnan(success) else f", at a success of {success:.0%}"
        yield Alarm("nothing to learn from", "", f"{share:.0%} of the groups of every policy have zero advantage{at}")


def cut_off(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if many answers of a policy end at the token limit."""
    for name, series in logged.policies.items():
        share = newest_mean(series.get("truncated_fraction", NO_LINES))
        if share >= MAX_CUT_OFF_SHARE:
            yield Alarm("answers are cut off", name, f"{share:.0%} of its answers ran into the token limit")


def diverging_values(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if the values of a policy's actions are far from any return that it got."""
    for name, value in end_means(logged, "q").items():
        returns = np.abs(logged.policies[name].get("return", NO_LINES))
        largest = max(1.0, float(returns.max(initial=0.0)))
        if len(returns) and abs(value) >= DIVERGED_VALUES * largest:
            yield Alarm("values diverge", name, f"values of {value:.3g}, at returns of at most {largest:.3g}")


def failing_episodes(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if many of the newest episodes failed."""
    failed = newest_mean(logged.team.get("failed", NO_LINES))
    played = newest_mean(logged.team.get("episodes", NO_LINES))
    if played > 0 and failed / played >= MAX_FAILED_SHARE:
        yield Alarm("episodes fail", "", f"{failed / played:.0%} of the newest episodes ended with an error")


def held_out_fall(logged: LoggedMetrics) -> Iterator[Alarm]:
    """Yields an alarm if the newest success of an evaluation is below an earlier one, with their intervals apart."""
    for name, log in logged.evals.items():
        keys = [key for key in ("success", "episodes", "instances", "failed", "samples") if key in log]
        if keys[:2] != ["success", "episodes"] or len({len(log[key]) for key in keys}) > 1:
            continue  # some evaluations have no success
        lines = [dict(zip(keys, values, strict=True)) for values in np.stack([log[key] for key in keys], 1).tolist()]
        bounds = [eval_interval(line) or (0.0, 1.0) for line in lines]
        best = max(range(len(lines)), key=lambda number: bounds[number][0])
        if bounds[best][0] > bounds[-1][1]:
            yield Alarm(
                "held-out success fell",
                "",
                f"{name} {lines[-1]['success']:.1%} (at most {bounds[-1][1]:.1%}), from {lines[best]['success']:.1%} "
                f"(at least {bounds[best][0]:.1%}), {len(lines) - 1 - best} evaluations before",
            )


def cyclic_alarms(cyclicity: Cyclicity) -> list[Alarm]:
    """Returns an alarm if the payoffs of a population contain a cycle; [] otherwise."""
    if not cyclicity.groups:
        return []
    return [Alarm("cyclic population", "; ".join(", ".join(group) for group in cyclicity.groups), cyclicity.warning)]


def mirror_alarms(status: Mapping[str, Any]) -> list[Alarm]:
    """Returns an alarm if the mirror fails; `status` is its mirror.json, {} if the run has none."""
    if not status.get("failing_since"):
        return []
    message = f"since {status['failing_since']}; its newest state is that after {status.get('state')}"
    return [Alarm("mirror is behind", "", f"{message}: {status.get('error')}")]


# ---- metrics


@dataclass(frozen=True)
class MetricChange:
    """A metric's mean at the start (`before`) and in the newest lines (`after`), with the rise in reward per answer
    (`reward_rise`) and in success (`success_rise`)."""

    before: float
    after: float
    reward_rise: float
    success_rise: float

    @property
    def summary(self) -> str:
        """The rise in reward and success, as text."""
        return f"reward {self.reward_rise:+.2g}, success {self.success_rise:+.1%}"


def rewarded_changes(logged: LoggedMetrics, key: str) -> dict[str, MetricChange]:
    """Returns how a metric changed, for each policy whose reward rose by `MIN_REWARD_RISE` or more
    while success rose by at most `MAX_SUCCESS_RISE`."""
    better = logged.success_rise
    changes = {}
    for name, series in logged.policies.items():
        paid = reward_rise(series)
        if paid >= MIN_REWARD_RISE and better <= MAX_SUCCESS_RISE:
            values = series.get(key, NO_LINES)
            changes[name] = MetricChange(first_mean(values), newest_mean(values), paid, better)
    return changes


def first_mean(values_T: np.ndarray) -> float:
    """Returns the mean of a metric's first `FIRST_LINES` lines, at most a quarter of all."""
    return _mean(values_T, slice(min(FIRST_LINES, len(values_T) // 4)))


def newest_mean(values_T: np.ndarray) -> float:
    """Returns the mean of a metric's newest `NEWEST_LINES` lines, at most half of all."""
    return _mean(values_T, slice(-min(NEWEST_LINES, len(values_T) // 2), None))


def end_mean(values_T: np.ndarray) -> float:
    """Returns the mean of a metric's newest sixth, from `MIN_END_LINES` to `NEWEST_LINES` lines."""
    return _mean(values_T, slice(-min(NEWEST_LINES, max(MIN_END_LINES, len(values_T) // 6)), None))


def end_means(logged: LoggedMetrics, key: str) -> dict[str, float]:
    """Returns the `end_mean` of each policy that has enough lines of the metric."""
    means = {name: end_mean(series.get(key, NO_LINES)) for name, series in logged.policies.items()}
    return {name: mean for name, mean in means.items() if not np.isnan(mean)}


def _mean(values: np.ndarray, lines: slice) -> float:
    """Returns the mean of these lines, rounded: the float mean of values that are all 0.9 may be
    just below 0.9. NaN if all lines are fewer than `MIN_LINES`."""
    return round(float(np.mean(values[lines])), 9) if len(values) >= MIN_LINES else np.nan


def reward_rise(series: Mapping[str, np.ndarray]) -> float:
    """Returns the rise in reward per answer, own and team reward together as far as known."""
    rises = [rise(series.get(key, NO_LINES)) for key in ("local_reward", "team_reward")]
    return float(np.nansum(rises)) if not np.isnan(rises).all() else np.nan


def rise(values_T: np.ndarray) -> float:
    """Returns the rise of a metric's values since the start."""
    return newest_mean(values_T) - first_mean(values_T)


def is_beyond_noise(values_T: np.ndarray) -> bool:
    """Returns whether the newest mean is above the first by `MIN_STANDARD_ERRORS` or more. The
    noise of a line is measured by its difference to the next line, which a trend hardly changes
    (von Neumann, 1941). Needs `MIN_LINES` values."""
    count = len(values_T)
    variance = float(np.mean(np.diff(values_T) ** 2)) / 2
    weight = 1 / min(FIRST_LINES, count // 4) + 1 / min(NEWEST_LINES, count // 2)
    return rise(values_T) >= MIN_STANDARD_ERRORS * float(np.sqrt(variance * weight))
