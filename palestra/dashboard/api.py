"""What the page asks of a run, as JSON: each function here answers one address of the API.

Answers carry an ETag, so that a page that asks again hears only what has changed. Errors are `{"error": TEXT}`: 400 for
a question that cannot be understood, 404 for what is not here.
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

LISTED = 5_000  # runs of a folder that are listed: the newest


class Api:
    """The answers about the runs of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._lines: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._records: dict[str, tuple[tuple[int, ...], Record]] = {}

    # ---- all runs

    def runs(self, request: Request) -> Response:
        """The list of runs, newest first."""
        held = facts.held_locks()
        lines = [line for name in self.library.names() if (line := self._shown(name, held))]
        lines.sort(key=lambda line: (line["created"], line["name"]), reverse=True)
        return answer(request, {"root": self.library.root.name, "runs": lines[:LISTED], "of": len(lines)})

    def _shown(self, name: str, held: dict[int, int]) -> dict[str, Any] | None:
        """None for a run that was removed just now, and for one whose files lead out of it; one line says why where
        files cannot be read, so that one run never hides the others."""
        try:
            return self._line(name, held)
        except (Absent, FileNotFoundError):
            return None
        except (OSError, ValueError, *FOREIGN) as error:
            return facts.unreadable(name, error)

    def _line(self, name: str, held: dict[int, int]) -> dict[str, Any]:
        """From memory, where the logs are as they were."""
        run = self.library.run(name)
        stamp = facts.stamp(run.path)
        known, line = self._lines.get(name, ((), {}))
        if known != stamp:
            line = facts.line(run, held)
            self._lines[name] = (stamp, line)
        return line | {"status": facts.status(run, line["done"], line["total"], held)}

    def curves(self, request: Request) -> Response:
        query = request.query_params
        tree = dict(query) | {"run": query.getlist("run"), "figure": query.getlist("figure")}
        asked = validate(figures.Asked, tree)
        runs = [self._looked(name) for name in asked.run]
        return answer(request, {"curves": figures.curves(runs, asked)})

    def difference(self, request: Request) -> Response:
        """The settings in which runs differ."""
        names = request.query_params.getlist("run")
        rows = facts.difference({name: self.library.run(name).config for name in names})
        return answer(request, {"runs": names, "rows": rows})

    # ---- one run

    def run(self, request: Request) -> Response:
        """Where it stands, which figures it has, and what there is to see of it."""
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
        run = self.library.run(request.path_params["run"])
        with open(run.file("config.yaml"), encoding="utf-8", errors="replace") as file:
            return answer(request, {"yaml": file.read(MAX_TREE)})

    def alarms(self, request: Request) -> Response:
        run = self._looked(request.path_params["run"])
        return answer(request, {"alarms": [alarm.to_json() for alarm in self._alarms(run)]})

    def system(self, request: Request) -> Response:
        return answer(request, system.system(self._looked(request.path_params["run"])))

    # ---- episodes

    def episodes(self, request: Request) -> Response:
        """A page of those that fit the query, how many fit, and how much of the run is not looked through yet."""
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
        """The tree; with `line=NODE`, or `line=played` for where play ended, also the words on the line to that node,
        so that a page opens by one question."""
        run, step, episode = self._episode(request)
        found = trees.tree(run.file(step), episode)
        if (asked := request.query_params.get("line")) and found["nodes"]:
            node = trees.last_played(found["nodes"]) if asked == "played" else int(asked)
            found |= {"at": node, "line": trees.words(run.file(step), episode, node)}
        return answer(request, found)

    def words(self, request: Request) -> Response:
        run, step, episode = self._episode(request)
        return answer(request, {"line": trees.words(run.file(step), episode, request.path_params["node"])})

    def tokens(self, request: Request) -> Response:
        run, step, episode = self._episode(request)
        said = trees.tokens(run.file(step), episode, request.path_params["node"], bases(run))
        return answer(request, {"said": said})

    def _episode(self, request: Request) -> tuple[OpenRun, str, int]:
        run = self.library.run(request.path_params["run"])
        step: int = request.path_params["step"]
        return run, f"episodes/step-{step:06d}.parquet", request.path_params["episode"]

    # ---- populations and agents

    def population(self, request: Request) -> Response:
        run = self._looked(request.path_params["run"])
        last = int(request.query_params.get("last", population.SHOWN))
        if not 1 <= last <= 200:
            raise ValueError(f"last is between 1 and 200, not {last}")
        return answer(request, population.population(run, self._record(run), last))

    def agents(self, request: Request) -> Response:
        return answer(request, agents_of.agents(self.library.run(request.path_params["run"])))

    def weights(self, request: Request) -> Response:
        path = request.path_params
        folder = agents_of.weights(self.library.run(path["run"]), path["step"], path["policy"])
        return _download(f"{path['policy']}-{path['step'] + 1}", folder)

    def member(self, request: Request) -> Response:
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
            self._records = {run.name: known}  # one is enough: a large league's is large
        return known[1]

    def _alarms(self, run: OpenRun) -> list[Alarm]:
        policies = {name: columns(run.metrics, name) for name in run.metrics.names() if name != TEAM}
        exams = {name: columns(run.evals, name) for name in run.evals.names()}
        if not run.file("tasks.jsonl").exists():
            return alarms(policies, columns(run.metrics, TEAM), exams)
        try:
            return cyclic(cyclicity(*self._record(run).payoffs.points()))
        except ValueError:  # nothing played yet, or a game of more than two
            return []


def columns(log: Log, name: str) -> dict[str, Any]:
    return {key: log.column(name, key)[1] for key in log.keys().get(name, [])}


def bases(run: OpenRun) -> dict[str, str]:
    """By policy, the name of the base that it stands on; all members of a population stand on one."""
    tree = run.config
    found = {name: str(own.get("base") or "") for name, own in (tree.get("policies") or {}).items() if own}
    oracle = (tree.get("oracle") or {}).get("policy") or {}
    return found | ({"": str(oracle["base"])} if "base" in oracle else {})


def answer(request: Request, tree: Any) -> Response:
    """JSON with an ETag; 304 without a body for who has it already."""
    text = json.dumps(plain(tree), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")  # half a surrogate pair, which JSON may hold, is no text
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})


def plain(value: Any) -> Any:
    """What JSON can say: numbers of numpy as Python's, null for those that are not finite."""
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
