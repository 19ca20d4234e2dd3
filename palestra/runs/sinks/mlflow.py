"""MLflow sink. Uses MlflowClient and no global state; stores the MLflow run id in the run's sink folder."""

from __future__ import annotations

import time
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from palestra.core.config import load
from palestra.runs.sinks.base import Metrics, MLflowConfig, Sink, config_as_text, stored_id

METRICS_PER_CALL = 1000  # metrics per call, MLflow's limit
PARAMS_PER_CALL = 100  # parameters per call, MLflow's limit
MAX_PARAM_CHARS = 500  # characters of a parameter's value


class MLflowSink(Sink):
    """Writes metrics by step and the config as parameters; marks the MLflow run as finished on `close`."""

    def __init__(self, config: MLflowConfig, run: Path, folder: Path) -> None:
        self.client = MlflowClient(config.uri)
        self.pending: list[Metric] = []
        self.run_id = stored_id(folder, lambda: self._begin(config.experiment, run))

    def _begin(self, name: str, run: Path) -> str:
        """Creates an MLflow run with the config as parameters and returns its id."""
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        made = self.client.create_run(experiment, run_name=run.name)
        texts = config_as_text(load(run / "config.yaml"))
        params = [Param(key, text[:MAX_PARAM_CHARS]) for key, text in texts.items()]
        for first in range(0, len(params), PARAMS_PER_CALL):
            self.client.log_batch(made.info.run_id, params=params[first : first + PARAMS_PER_CALL])
        self.client.log_batch(made.info.run_id, tags=[RunTag("palestra.run", str(run))])
        return str(made.info.run_id)

    def write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self.pending += [Metric(name, value, now, step) for name, value in metrics.items()]
        if len(self.pending) >= METRICS_PER_CALL:
            self.flush()

    def flush(self) -> None:
        while self.pending:
            self.client.log_batch(self.run_id, metrics=self.pending[:METRICS_PER_CALL])
            del self.pending[:METRICS_PER_CALL]

    def close(self) -> None:
        self.flush()
        self.client.set_terminated(self.run_id)
