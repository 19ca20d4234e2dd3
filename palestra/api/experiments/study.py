"""Runs a hyperparameter search: Optuna chooses the settings, each trial is one run per seed.

The folder of the search holds the study as Optuna's journal, the runs, and the results. A search that was interrupted
continues with the trials that had started. The sampler of a trial is seeded by the trial's number, so with one trial at
a time it chooses the same settings as without interruption.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from palestra.api.experiments.grid import GridCell
from palestra.api.experiments.results import NotANumber, final_value, format_values, markdown_table
from palestra.api.experiments.schedule import (
    CellRefused,
    CellResult,
    check_cells,
    check_score,
    finished_cells,
    run_cells,
)
from palestra.api.experiments.tune import Choices, Params, Range, TuneConfig, apply_params, neighbours
from palestra.core.config import Tree, dump, load, parse
from palestra.core.config.tree import to_yaml
from palestra.core.files import atomic_write, to_json_line
from palestra.core.seeding import derive_seed
from palestra.runs.series import RunLogs
from palestra.runs.settings import diff_settings, flatten_tree

STUDY_FILE = "study.jsonl"
TUNE_FILE = "tune.yaml"
TRIALS_FILE = "trials.jsonl"
PAGE_FILE = "results.md"
BEST_FILE = "best.yaml"
REASON = "reason"  # key under which the study has the reason of a failed trial
MAX_ROWS = 20  # trials listed on the page


class Trial(NamedTuple):
    """A finished trial: its settings, the score of each of its runs, their mean (None: the config or a run failed), and
    the reason why it has no score ("": it has one, or it ended before reasons were stored)."""

    number: int
    params: Params
    values: list[float]
    score: float | None
    reason: str = ""


class Search:
    """A search in the folder `root`. `base` is the config that trials change, `evaluation` the evaluation that is
    scored (None: a population's last `nash_conv`).

    Raises ValueError if Optuna is missing, if the folder has another search, or if the config refuses a value of the
    space.
    """

    def __init__(self, config: TuneConfig, base: Tree, evaluation: str | None, root: Path) -> None:
        self.config = config
        self.base = base
        self.evaluation = evaluation
        self.root = root
        self.metric = config.metric or ""
        self.optuna = _import_optuna()
        self._space = {key: _distribution(self.optuna, values) for key, values in config.space.items()}
        self._start = check_space(config, base, root)
        _check_same_search(config, base, root)
        self._study = self._open_study()

    @property
    def trials(self) -> list[Trial]:
        """The finished trials, by number."""
        return [self._to_trial(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]

    @property
    def best(self) -> Trial | None:
        """The trial with the best score, the first of equals; None if none has a score."""
        best: Trial | None = None
        for trial in self.trials:
            if trial.score is None:
                continue
            if best is None or best.score is None or self.config.is_better(trial.score, best.score):
                best = trial
        return best

    def run(
        self,
        workers: int,
        on_end: Callable[[CellResult], None],
        on_trial: Callable[[Trial], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains trials until there are as many as the config asks for, `workers` runs at a time. A trial whose
        settings the config refuses fails without a run."""
        while len(self.trials) < self.config.trials and not stop_requested():
            batch = []
            for trial in self._next_trials(workers):
                if reason := self._refusal(trial):
                    on_trial(self._tell(trial, reason))
                else:
                    batch.append(trial)
            cells = list(chain.from_iterable(self._cells(trial) for trial in batch))
            ended = run_cells(cells, self.root, workers, on_end, stop_requested)
            stopped = {result.cell.name for result in ended if result.status == "stopped"}
            begun = {result.cell.name for result in ended} | finished_cells(self.root)
            reasons = {result.cell.name: result.reason for result in ended if result.status == "failed"}
            for trial in batch:
                names = [cell.name for cell in self._cells(trial)]
                if begun.issuperset(names) and not stopped.intersection(names):
                    on_trial(self._tell(trial, next((reasons[name] for name in names if name in reasons), "")))

    def _refusal(self, trial: Any) -> str:
        """Returns why the config refuses the settings of a trial; "" if it does not. Raises ValueError if a run of the
        trial was made with other settings."""
        try:
            check_cells(self._cells(trial), self.root)
        except CellRefused as error:
            return str(error)
        return ""

    # ---- trials

    def _next_trials(self, workers: int) -> list[Any]:
        """Returns the trials that an earlier call left unfinished; if there are none, new ones, as many as keep
        `workers` busy."""
        running = self.optuna.trial.TrialState.RUNNING
        left = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state == running]
        complete = [trial for trial in left if trial.params.keys() == self._space.keys()]
        for trial in left:
            if trial not in complete:  # the process died while its settings were written
                self._study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        if complete:
            return complete
        count = min(max(1, workers // len(self.config.seeds)), self.config.trials - len(self.trials))
        return [self._ask() for _ in range(count)]

    def _ask(self) -> Any:
        """Returns a new trial. The first has the config's own values, if the space contains all of them."""
        number = len(self._study.get_trials(deepcopy=False))
        if number == 0 and self._start:
            self._study.enqueue_trial(self._start)
        self._study.sampler = self._sampler(number)
        return self._study.ask(fixed_distributions=self._space)

    def _sampler(self, number: int) -> Any:
        seed = derive_seed(self.config.seed, number) % 2**32
        if self.config.sampler == "random":
            return self.optuna.samplers.RandomSampler(seed=seed)
        return self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _cells(self, trial: Any) -> list[GridCell]:
        tree = apply_params(self.base, trial.params)
        return [GridCell("trial", str(trial.number), seed, tree | {"seed": seed}) for seed in self.config.seeds]

    def _tell(self, trial: Any, reason: str = "") -> Trial:
        """Stores the score of a trial whose runs ended, or the reason why it has none; returns the finished trial."""
        values, unscored = self._values(trial)
        states = self.optuna.trial.TrialState
        if len(values) == len(self.config.seeds):
            self._study.tell(trial.number, sum(values) / len(values), state=states.COMPLETE)
        else:
            self.optuna.trial.Trial(self._study, trial._trial_id).set_user_attr(REASON, reason or unscored)
            self._study.tell(trial.number, state=states.FAIL)
        return self._to_trial(self._study.get_trials(deepcopy=False)[trial.number])

    def _values(self, trial: Any) -> tuple[list[float], str]:
        """Returns the scores of the trial's finished runs, and why one of them has none."""
        done = finished_cells(self.root)
        values = list[float]()
        reason = ""
        for name in [cell.name for cell in self._cells(trial) if cell.name in done]:
            try:
                values.append(self._score(name))
            except NotANumber as error:
                reason = str(error)
        return values, reason

    def _score(self, name: str) -> float:
        self.metric, value = final_value(RunLogs(self.root / name), self.evaluation, self.config.metric)
        return value

    def _to_trial(self, trial: Any) -> Trial:
        values = self._values(trial)[0] if trial.params else []
        params = {key: trial.params[key] for key in self._space if key in trial.params}
        return Trial(trial.number, params, values, trial.value, trial.user_attrs.get(REASON, ""))

    def _open_study(self) -> Any:
        optuna = self.optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(self.root / STUDY_FILE))
            )
        return optuna.create_study(
            storage=storage, study_name=self.config.name, direction=self.config.direction, load_if_exists=True
        )

    # ---- results

    def write_results(self) -> list[Path]:
        """Writes the trials as JSON lines, the best config, and a page in Markdown; returns the files, page last."""
        trials = self.trials
        best = self.best
        files = [self.root / TRIALS_FILE, self.root / PAGE_FILE]
        atomic_write(files[0], b"".join(to_json_line(trial._asdict()) for trial in trials))
        if best is not None:
            files.insert(1, self.root / BEST_FILE)
            tree = {key: value for key, value in apply_params(self.base, best.params).items() if key != "seed"}
            atomic_write(files[1], to_yaml(tree).encode())
        atomic_write(files[-1], self._page(trials).encode())
        return files

    def _page(self, trials: Sequence[Trial]) -> str:
        config = self.config
        scored = [trial for trial in trials if trial.score is not None]
        scored.sort(key=lambda trial: (trial.score or 0.0) * (-1 if config.direction == "maximize" else 1))
        keys = list(config.space)
        rows = [
            [str(trial.number), format_values(trial.values), *(format_value(value) for value in trial.params.values())]
            for trial in scored[:MAX_ROWS]
        ]
        seeds = f"seeds {', '.join(map(str, config.seeds))}" if len(config.seeds) > 1 else f"seed {config.seeds[0]}"
        better = "more" if config.direction == "maximize" else "less"
        scored_at = f"evaluation {self.evaluation}" if self.evaluation else "assessment"
        lines = [
            f"# {config.name}",
            "",
            f"{len(trials)} trials, {seeds}; {len(trials) - len(scored)} failed. Score: {self.metric or 'the metric'} "
            f"of the last {scored_at}, of which {better} is better.",
        ]
        lines += ["", *markdown_table(["trial", "score", *keys], rows)]
        failed = [f"- trial {trial.number}: {trial.reason}" for trial in trials if trial.reason]
        lines += ["", "Failed trials:", "", *failed[:MAX_ROWS]] if failed else []
        return "\n".join(lines) + "\n"


def format_value(value: Any) -> str:
    """Formats a setting: "0.0003", "gae", "null"."""
    return f"{value:.4g}" if isinstance(value, float) else str(json.dumps(value)).strip('"')


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ValueError(f"a search needs Optuna ({error}): pip install 'palestra[tune]'") from error
    return optuna


def _distribution(optuna: Any, values: Range | Choices) -> Any:
    distributions = optuna.distributions
    if isinstance(values, Choices):
        return distributions.CategoricalDistribution(values.choices)
    if values.is_whole:
        return distributions.IntDistribution(values.low, values.high, log=values.log, step=values.step or 1)
    return distributions.FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def check_space(config: TuneConfig, base: Tree, root: Path) -> Params:
    """Returns the config's own values of the settings, or {} if the space does not contain all of them. Raises
    ValueError for a key that the config does not have, a value that it refuses, or runs that would have no score."""
    from palestra.api.run import run_request

    request = run_request(base, root=root)
    check_score(request, config)
    resolved = flatten_tree(parse(dump(request.config)))
    start = {key: resolved[key] for key, values in config.space.items() if values.contains(resolved.get(key))}
    for name, params in neighbours(config, start):
        try:
            run_request(apply_params(base, params), root=root)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return start if start.keys() == config.space.keys() else {}


def _check_same_search(config: TuneConfig, base: Tree, root: Path) -> None:
    """Creates the folder with a copy of the search. Raises ValueError if the folder has another search."""
    path = root / TUNE_FILE  # compared by `base`, the changed config, not by the file that it came from
    search = {key: value for key, value in parse(dump(config)).items() if key not in ("config", "changes")}
    tree = search | {"base": base}
    if path.exists():
        stored = load(path) | {"trials": config.trials}
        if changed := diff_settings(stored, tree):
            raise ValueError(
                f"{root} has a search with other settings ({changed[0]}): give this one another name, or remove that "
                "folder"
            )
        return
    root.mkdir(parents=True, exist_ok=True)
    atomic_write(path, to_yaml(tree).encode())
