"""The dashboard's JSON API: each public method of `DashboardApi` answers one address.

A step is the number of training steps done, as in `--checkpoint`: 0 is before training. Files of a run count from 0,
so that step 80 is in step-000079.parquet. Errors are `{"error": TEXT}`: 400 for an invalid query, 404 for what does
not exist.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from palestra.core.config import Tree, hide_credentials, validate
from palestra.dashboard import agents as agents_of
from palestra.dashboard import curve_queries, episode_filter, population, replays, run_status, run_table, trees
from palestra.dashboard.alarms import Alarm, cyclic_alarms, rules_for
from palestra.dashboard.catalog import MAX_TREE_BYTES, UNREADABLE, CatalogRun, NotFound, RunCatalog
from palestra.evaluation.report.population_data import PopulationRecord
from palestra.populations.ratings import cyclicity
from palestra.runs.checkpoints import step_name
from palestra.runs.eval_files import EVAL_EPISODES_FOLDER, REPLAYS_FOLDER, eval_file
from palestra.runs.metric_catalog import METRICS, UNCHARTED
from palestra.runs.system_metrics import held_locks

ALARM_BUDGET_S = 0.05  # seconds of one request for the list that go into reading logs for alarms
MAX_LISTED_RUNS = 5_000  # the newest runs of a folder; older ones are not listed


class DashboardApi:
    """Answers requests about the runs of a library; caches list entries and population records."""

    def __init__(self, library: RunCatalog) -> None:
        self.library = library
        self._lines: dict[str, tuple[tuple[int, ...], dict[str, Any], run_table.Settings]] = {}
        self._listed_alarms: dict[str, tuple[float, list[str]]] = {}  # by run: when its logs changed, names of alarms
        self._records: dict[str, tuple[tuple[int, ...], PopulationRecord]] = {}

    # ---- all runs

    def runs(self, request: Request) -> Tree:
        """Returns the list of runs, newest first, at most `MAX_LISTED_RUNS`, and the groups of seeds among them. With
        `column=KEY`, as often as wanted, each run has the settings at these keys; with `keys=true` the answer has the
        keys in which runs differ."""
        query = request.query_params
        locks = held_locks()
        lines = [line for name in self.library.names() if (line := self._entry_or_error(name, locks))]
        lines.sort(key=lambda line: (line["created"], line["name"]), reverse=True)
        deadline = time.monotonic() + ALARM_BUDGET_S
        shown = []
        for line in lines[:MAX_LISTED_RUNS]:
            own = self._settings(line["name"])
            settings = {column: run_table.setting(own, column) for column in query.getlist("column")}
            shown.append(line | {"alarms": self._alarm_names(line, deadline), "settings": settings})
        keys = []
        if query.get("keys"):
            keys = run_table.varying_keys([self._settings(line["name"]) for line in shown])
        groups = run_table.seed_groups(shown)
        return {"root": self.library.root.name, "runs": shown, "of": len(lines), "groups": groups, "keys": keys}

    def _settings(self, name: str) -> run_table.Settings:
        """Returns the settings of a listed run; {} of one that cannot be read."""
        return self._lines.get(name, ((), {}, {}))[2]

    def _alarm_names(self, line: dict[str, Any], deadline: float) -> list[str] | None:
        """Returns the names of a listed run's alarms. After `deadline` (of `time.monotonic`) no more logs are read: it
        then returns the names found by an earlier request, or None."""
        name = line["name"]
        changed = line["changed"]
        known = self._listed_alarms.get(name)
        if line["status"] != "unreadable" and (known is None or known[0] != changed) and time.monotonic() < deadline:
            try:
                alarms = run_status.run_alarms(self._refreshed_run(name))
                known = changed, list(dict.fromkeys(alarm.name for alarm in alarms))
            except UNREADABLE:
                known = changed, []
            self._listed_alarms[name] = known
        return None if known is None else known[1]

    def _entry_or_error(self, name: str, locks: dict[int, int]) -> dict[str, Any] | None:
        """Returns a run's list entry; None if the run was just removed or its files lead out of its folder. If files
        cannot be read, the entry holds the error, so that one run never hides the others."""
        try:
            return self._entry(name, locks)
        except (NotFound, FileNotFoundError):
            return None
        except UNREADABLE as error:
            return run_status.unreadable_entry(name, error)

    def _entry(self, name: str, locks: dict[int, int]) -> dict[str, Any]:
        """Returns a run's list entry; cached while its logs are unchanged."""
        run = self.library.run(name)
        stamp = run_status.file_stamp(run.path)
        known, line, _ = self._lines.get(name, ((), {}, {}))
        if known != stamp:
            line = run_status.list_entry(run, locks)
            self._lines[name] = (stamp, line, run_status.experiment_config(run.config))
        return line | {"status": run_status.status(run, line["done"], line["total"], locks)}

    def metrics(self, request: Request) -> Tree:
        """Returns the catalogue of metrics: titles, units and headings of charts, and what has no chart."""
        return {"metrics": [asdict(each) for each in METRICS], "uncharted": UNCHARTED}

    def curves(self, request: Request) -> Tree:
        """Returns curves of metrics of one or several runs; see `curve_queries.CurveQuery` for the query."""
        query = request.query_params
        tree = dict(query) | {"run": query.getlist("run"), "metric": query.getlist("metric")}
        asked = validate(curve_queries.CurveQuery, tree)
        runs = [self._refreshed_run(name) for name in asked.run]
        return {"curves": curve_queries.curves(runs, asked)}

    def difference(self, request: Request) -> Tree:
        """Returns the settings in which the configs of runs differ; see `run_status.config_differences`."""
        names = request.query_params.getlist("run")
        rows = run_status.config_differences([self.library.run(name).config for name in names])
        return {"runs": names, "rows": rows}

    # ---- one run

    def run(self, request: Request) -> Tree:
        """Returns a run's progress, its metric names and newest values, alarms, and which views have data."""
        run = self._refreshed_run(request.path_params["run"])
        line = self._entry(run.name, held_locks())
        return line | {
            "left": run_status.time_left(run, line["done"], line["total"]),
            "metrics": {name: log.metric_keys() for name, log in run.charted_logs.items()},
            "phases": run_status.phase_keys(run.timings),
            "has_episodes": run.file("episodes").is_dir(),
            "has_replays": run.file(REPLAYS_FOLDER).is_dir(),
            "has_population": run.file("tasks.jsonl").exists(),
            "alarms": [alarm.to_json() for alarm in self._alarms(run)],
        }

    def config(self, request: Request) -> Tree:
        """Returns config.yaml as text, at most `MAX_TREE_BYTES` characters."""
        with open(self._run(request).file("config.yaml"), encoding="utf-8", errors="replace") as file:
            return {"yaml": hide_credentials(file.read(MAX_TREE_BYTES))}

    def alarms(self, request: Request) -> Tree:
        """Returns the alarms of a run, and all rules that are applied to it."""
        run = self._refreshed_run(request.path_params["run"])
        num_lines = max((len(run.metrics.column(name, "step")[0]) for name in run.metrics.names()), default=0)
        rules = rules_for(run.file("tasks.jsonl").exists(), num_lines)
        return {"alarms": [alarm.to_json() for alarm in self._alarms(run)], "rules": rules}

    def system(self, request: Request) -> Tree:
        """Returns processes, workers, queues, timings, failures and disk use of a run."""
        return run_status.system_status(self._refreshed_run(request.path_params["run"]))

    # ---- episodes

    def episodes(self, request: Request) -> Tree:
        """Returns a page of the matching episodes, and how many files are not indexed."""
        run = self._run(request)
        query = validate(episode_filter.EpisodeFilter, dict(request.query_params))
        columns, unread = run.episodes.columns()
        fitting = episode_filter.matching_rows(columns, query)
        head = {"of": len(columns), "fit": len(fitting), "unread": unread}
        if query.text and len(fitting):
            rows, end = episode_filter.search_text(run.file("episodes"), columns, fitting, query)
            return head | {"rows": episode_filter.page_rows(columns, rows), "searched": end}
        shown = episode_filter.page_rows(columns, fitting[query.first : query.first + query.count])
        return head | {"rows": shown, "spread": episode_filter.return_histogram(columns, fitting)}

    def tree(self, request: Request) -> Tree:
        """Returns the tree of an episode. With `line=NODE`, or `line=played` for the node where play ended, also the
        texts on the path to that node, so that a page needs one request to open."""
        run, step, episode = self._episode(request)
        view = trees.tree_view(run.file(step), episode)
        if (asked := request.query_params.get("line")) and view["nodes"]:
            node = trees.last_played_node(view["nodes"]) if asked == "played" else int(asked)
            view |= {"at": node, "line": trees.path_texts(run.file(step), episode, node)}
        return view

    def words(self, request: Request) -> Tree:
        """Returns observations and answers on the path from the root to a node."""
        run, step, episode = self._episode(request)
        return {"line": trees.path_texts(run.file(step), episode, request.path_params["node"])}

    def tokens(self, request: Request) -> Tree:
        """Returns the tokens of a node's answers with their log-probabilities."""
        run, step, episode = self._episode(request)
        return {"said": trees.node_tokens(run.file(step), episode, request.path_params["node"], base_models(run))}

    def replays(self, request: Request) -> Tree:
        """Returns which evaluations of a run have replays."""
        return {"evals": replays.replay_list(self._run(request))}

    def replay(self, request: Request) -> Tree:
        """Returns the recorded games of an evaluation after `step` steps."""
        step = int(request.query_params.get("step", 0))
        return replays.replay_view(self._run(request), request.path_params["name"], step)

    def _episode(self, request: Request) -> tuple[CatalogRun, str, int]:
        """Returns run, file and number of an episode of training, or with `?eval=NAME` of that evaluation."""
        step: int = request.path_params["step"] - 1
        file = f"episodes/{step_name(step)}.parquet"
        if evaluation := request.query_params.get("eval"):
            file = eval_file(EVAL_EPISODES_FOLDER, evaluation, step)
        return self._run(request), file, request.path_params["episode"]

    # ---- populations and agents

    def population(self, request: Request) -> Tree:
        """Returns payoffs, mixtures, ratings and timeline of the `last` members, 1 to 200."""
        run = self._refreshed_run(request.path_params["run"])
        last = int(request.query_params.get("last", population.DEFAULT_MEMBERS))
        if not 1 <= last <= 200:
            raise ValueError(f"last is between 1 and 200, not {last}")
        return population.population_view(run, self._record(run), last)

    def agents(self, request: Request) -> Tree:
        """Returns policies, members and evaluations of a run."""
        return agents_of.agents_view(self._run(request))

    def weights(self, request: Request) -> StreamingResponse:
        """Streams a policy's weights of a checkpoint as a zip file."""
        path = request.path_params
        folder = agents_of.policy_folder(self._run(request), path["step"], path["policy"])
        return _download(f"{path['policy']}-step-{path['step']}", folder)

    def member(self, request: Request) -> StreamingResponse:
        """Streams a member's weights as a zip file."""
        member = request.path_params["member"]
        return _download(member, agents_of.member_weights_folder(self._run(request), member))

    # ---- inside

    def _run(self, request: Request) -> CatalogRun:
        return self.library.run(request.path_params["run"])

    def _refreshed_run(self, name: str) -> CatalogRun:
        run = self.library.run(name)
        run.refresh()
        return run

    def _record(self, run: CatalogRun) -> PopulationRecord:
        stamp = run_status.file_stamp(run.path)
        known = self._records.get(run.name)
        if known is None or known[0] != stamp:
            known = (stamp, population.load_record(run))
            self._records = {run.name: known}  # only one is cached: a large league's record takes much memory
        return known[1]

    def _alarms(self, run: CatalogRun) -> list[Alarm]:
        alarms = run_status.run_alarms(run)
        if run.file("tasks.jsonl").exists():
            with suppress(ValueError):  # no games yet, or more than two players
                alarms += cyclic_alarms(cyclicity(*self._record(run).payoffs.pairwise_scores()))
        return alarms


def base_models(run: CatalogRun) -> dict[str, str]:
    """Returns the base model of each policy; under "", the base that all members of a population share."""
    tree = run.config
    bases = {name: str(policy.get("base") or "") for name, policy in (tree.get("policies") or {}).items() if policy}
    oracle = (tree.get("oracle") or {}).get("policy") or {}
    if "base" in oracle:
        bases[""] = str(oracle["base"])
    return bases


def _download(name: str, folder: Path) -> StreamingResponse:
    if not folder.is_dir():
        raise NotFound(f"the weights of {name} are no longer there")
    safe = re.sub("[^A-Za-z0-9._-]", "_", name)
    headers = {"Content-Disposition": f'attachment; filename="{safe}.zip"'}
    return StreamingResponse(agents_of.stream_zip(folder), media_type="application/zip", headers=headers)
