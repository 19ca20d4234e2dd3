"""MLflow sink. Uses MlflowClient and no global state; stores the MLflow run id in the run's sink folder."""

from __future__ import annotations

import time
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from palestra.config import load
from palestra.sinks.base import Figures, MLflow, flat_config

ID = "id"
MOST = 1000  # metrics per call, MLflow's limit
PARAMS = 100  # parameters per call, MLflow's limit
LONGEST = 500  # characters of a parameter's value


class MLflowSink:
    """Writes metrics by step and the config as parameters; marks the MLflow run as finished on `close`."""

    def __init__(self, config: MLflow, run: Path, folder: Path) -> None:
        self.client = MlflowClient(config.uri)
        self.waiting: list[Metric] = []
        known = folder / ID
        if not known.exists():
            known.write_text(self._begin(config.experiment, run))
        self.id = known.read_text()

    def _begin(self, name: str, run: Path) -> str:
        """Creates an MLflow run with the config as parameters and returns its id."""
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        made = self.client.create_run(experiment, run_name=run.name)
        params = [Param(key, value[:LONGEST]) for key, value in flat_config(load(run / "config.yaml")).items()]
        for first in range(0, len(params), PARAMS):
            self.client.log_batch(made.info.run_id, params=params[first : first + PARAMS])
        self.client.log_batch(made.info.run_id, tags=[RunTag("palestra.run", str(run))])
        return str(made.info.run_id)

    def write(self, step: int, figures: Figures) -> None:
        now = int(time.time() * 1000)
        self.waiting += [Metric(name, value, now, step) for name, value in figures.items()]
        if len(self.waiting) >= MOST:
            self.flush()

    def flush(self) -> None:
        while self.waiting:
            self.client.log_batch(self.id, metrics=self.waiting[:MOST])
            del self.waiting[:MOST]

    def close(self) -> None:
        self.flush()
        self.client.set_terminated(self.id)
