"""The dashboard's JSON API: each public method of `Api` answers one address.

Responses carry an ETag, so that a client that polls gets 304 while nothing changed. Errors are `{"error": TEXT}`: 400
for an invalid query, 404 for what does not exist.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra.config import validate
from palestra.dashboard import agents as agents_of
from palestra.dashboard import facts, figures, population, queries, system, trees
from palestra.dashboard.alarms import Alarm, alarms, cyclic
from palestra.dashboard.library import MAX_TREE, Absent, Library, OpenRun
from palestra.dashboard.logs import FOREIGN, Log
from palestra.population_reports import Record
from palestra.populations.ratings import cyclicity
from palestra.types import TEAM

LISTED = 5_000  # the newest runs of a folder; older ones are not listed


class Api:
    """Answers the API's requests about the runs of a library; caches list entries and population records by file
    stamp."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._lines: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._records: dict[str, tuple[tuple[int, ...], Record]] = {}

    # ---- all runs

    def runs(self, request: Request) -> Response:
        """Returns the list of runs, newest first, at most `LISTED`."""
        held = facts.held_locks()
        lines = [line for name in self.library.names() if (line := self._shown(name, held))]
        lines.sort(key=lambda line: (line["created"], line["name"]), reverse=True)
        return answer(request, {"root": self.library.root.name, "runs": lines[:LISTED], "of": len(lines)})

    def _shown(self, name: str, held: dict[int, int]) -> dict[str, Any] | None:
        """Returns a run's list entry; None if the run was just removed or its files lead out of its folder. If files
        cannot be read, the entry holds the error, so that one run never hides the others."""
        try:
            return self._line(name, held)
        except (Absent, FileNotFoundError):
            return None
        except (OSError, ValueError, *FOREIGN) as error:
            return facts.unreadable(name, error)

    def _line(self, name: str, held: dict[int, int]) -> dict[str, Any]:
        """Returns a run's list entry; cached while its logs are unchanged."""
        run = self.library.run(name)
        stamp = facts.stamp(run.path)
        known, line = self._lines.get(name, ((), {}))
        if known != stamp:
            line = facts.line(run, held)
            self._lines[name] = (stamp, line)
        return line | {"status": facts.status(run, line["done"], line["total"], held)}

    def curves(self, request: Request) -> Response:
        """Returns curves of metrics of one or several runs; see `figures.Asked` for the query."""
        query = request.query_params
        tree = dict(query) | {"run": query.getlist("run"), "figure": query.getlist("figure")}
        asked = validate(figures.Asked, tree)
        runs = [self._looked(name) for name in asked.run]
        return answer(request, {"curves": figures.curves(runs, asked)})

    def difference(self, request: Request) -> Response:
        """Returns the settings in which the configs of runs differ."""
        names = request.query_params.getlist("run")
        rows = facts.difference({name: self.library.run(name).config for name in names})
        return answer(request, {"runs": names, "rows": rows})

    # ---- one run

    def run(self, request: Request) -> Response:
        """Returns a run's progress, its metric names and newest values, alarms, and which views have data."""
        run = self._looked(request.path_params["run"])
        line = self._line(run.name, facts.held_locks())
        logs = {"metrics": run.metrics, "timings": run.timings, "evals": run.evals}
        return answer(
            request,
            line
            | {
                "left": facts.time_left(run, line["done"], line["total"]),
                "figures": {name: log.keys() for name, log in logs.items()},
                "last": {name: dict(log.last()) for name, log in logs.items()},
                "phases": facts.phases(run.timings),
                "has_episodes": run.file("episodes").is_dir(),
                "has_population": run.file("tasks.jsonl").exists(),
                "alarms": [alarm.to_json() for alarm in self._alarms(run)],
            },
        )

    def config(self, request: Request) -> Response:
        """Returns config.yaml as text, at most `MAX_TREE` characters."""
        run = self.library.run(request.path_params["run"])
        with open(run.file("config.yaml"), encoding="utf-8", errors="replace") as file:
            return answer(request, {"yaml": file.read(MAX_TREE)})

    def alarms(self, request: Request) -> Response:
        """Returns the alarms of a run."""
        run = self._looked(request.path_params["run"])
        return answer(request, {"alarms": [alarm.to_json() for alarm in self._alarms(run)]})

    def system(self, request: Request) -> Response:
        """Returns processes, workers, queues, timings, failures and disk use of a run."""
        return answer(request, system.system(self._looked(request.path_params["run"])))

    # ---- episodes

    def episodes(self, request: Request) -> Response:
        """Returns a page of the episodes that match the query, the number of matches, and the number of files not yet
        indexed."""
        run = self.library.run(request.path_params["run"])
        query = validate(queries.Query, dict(request.query_params))
        columns, unread = run.episodes.columns()
        fitting = queries.matching(columns, query)
        head = {"of": len(columns), "fit": len(fitting), "unread": unread}
        if query.text and len(fitting):
            found, end = queries.search(run.file("episodes"), columns, fitting, query)
            return answer(request, head | {"rows": queries.page(columns, found), "searched": end})
        shown = queries.page(columns, fitting[query.first : query.first + query.count])
        return answer(request, head | {"rows": shown, "spread": queries.spread(columns, fitting)})

    def tree(self, request: Request) -> Response:
        """Returns the tree of an episode. With `line=NODE`, or `line=played` for the node where play ended, also the
        texts on the path to that node, so that a page needs one request to open."""
        run, step, episode = self._episode(request)
        found = trees.tree(run.file(step), episode)
        if (asked := request.query_params.get("line")) and found["nodes"]:
            node = trees.last_played(found["nodes"]) if asked == "played" else int(asked)
            found |= {"at": node, "line": trees.words(run.file(step), episode, node)}
        return answer(request, found)

    def words(self, request: Request) -> Response:
        """Returns observations and answers on the path from the root to a node."""
        run, step, episode = self._episode(request)
        return answer(request, {"line": trees.words(run.file(step), episode, request.path_params["node"])})

    def tokens(self, request: Request) -> Response:
        """Returns the tokens of a node's answers with their log-probabilities."""
        run, step, episode = self._episode(request)
        said = trees.tokens(run.file(step), episode, request.path_params["node"], bases(run))
        return answer(request, {"said": said})

    def _episode(self, request: Request) -> tuple[OpenRun, str, int]:
        run = self.library.run(request.path_params["run"])
        step: int = request.path_params["step"]
        return run, f"episodes/step-{step:06d}.parquet", request.path_params["episode"]

    # ---- populations and agents

    def population(self, request: Request) -> Response:
        """Returns a population's payoffs, mixtures, ratings and timeline. Raises ValueError if `last` is not between 1
        and 200."""
        run = self._looked(request.path_params["run"])
        last = int(request.query_params.get("last", population.SHOWN))
        if not 1 <= last <= 200:
            raise ValueError(f"last is between 1 and 200, not {last}")
        return answer(request, population.population(run, self._record(run), last))

    def agents(self, request: Request) -> Response:
        """Returns policies, members and evaluations of a run."""
        return answer(request, agents_of.agents(self.library.run(request.path_params["run"])))

    def weights(self, request: Request) -> Response:
        """Streams a policy's weights of a checkpoint as a zip file."""
        path = request.path_params
        folder = agents_of.weights(self.library.run(path["run"]), path["step"], path["policy"])
        return _download(f"{path['policy']}-{path['step'] + 1}", folder)

    def member(self, request: Request) -> Response:
        """Streams a member's weights as a zip file."""
        path = request.path_params
        return _download(path["member"], agents_of.member_weights(self.library.run(path["run"]), path["member"]))

    # ---- inside

    def _looked(self, name: str) -> OpenRun:
        run = self.library.run(name)
        run.look()
        return run

    def _record(self, run: OpenRun) -> Record:
        stamp = facts.stamp(run.path)
        known = self._records.get(run.name)
        if known is None or known[0] != stamp:
            known = (stamp, population.record_of(run))
            self._records = {run.name: known}  # only one is cached: a large league's record takes much memory
        return known[1]

    def _alarms(self, run: OpenRun) -> list[Alarm]:
        policies = {name: columns(run.metrics, name) for name in run.metrics.names() if name != TEAM}
        exams = {name: columns(run.evals, name) for name in run.evals.names()}
        if not run.file("tasks.jsonl").exists():
            return alarms(policies, columns(run.metrics, TEAM), exams)
        try:
            return cyclic(cyclicity(*self._record(run).payoffs.points()))
        except ValueError:  # no games yet, or more than two players
            return []


def columns(log: Log, name: str) -> dict[str, Any]:
    """Returns every metric of `name` in a log: key -> values [T] float64."""
    return {key: log.column(name, key)[1] for key in log.keys().get(name, [])}


def bases(run: OpenRun) -> dict[str, str]:
    """Returns the base model of each policy; "" holds that of a population, whose members share one base."""
    tree = run.config
    found = {name: str(own.get("base") or "") for name, own in (tree.get("policies") or {}).items() if own}
    oracle = (tree.get("oracle") or {}).get("policy") or {}
    return found | ({"": str(oracle["base"])} if "base" in oracle else {})


def answer(request: Request, tree: Any) -> Response:
    """Returns `tree` as a JSON response with an ETag; 304 without a body if the client has that version."""
    text = json.dumps(plain(tree), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")  # JSON may hold a lone surrogate, which UTF-8 cannot encode
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})


def plain(value: Any) -> Any:
    """Returns `value` as JSON types: numpy numbers and arrays as Python's, non-finite floats as null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _download(name: str, folder: Any) -> Response:
    if not folder.is_dir():
        raise Absent(f"the weights of {name} are no longer there")
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name)
    headers = {"Content-Disposition": f'attachment; filename="{safe}.zip"'}
    return StreamingResponse(agents_of.zipped(folder), media_type="application/zip", headers=headers)
