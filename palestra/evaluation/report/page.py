"""The report's page: one HTML file without scripts or external resources."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from palestra.core.config import hide_credentials, load
from palestra.core.files import atomic_write
from palestra.evaluation.report.episodes import episode_html, pick_samples
from palestra.evaluation.report.html import STYLE, block, details, escape_text, html_table, section, text_block
from palestra.evaluation.report.population import population_sections
from palestra.evaluation.report.run_charts import metric_charts
from palestra.evaluation.report.tables import eval_table, policy_table, time_table
from palestra.runs import list_checkpoints, load_episodes
from palestra.runs.headline import algorithm_label, held_out_label, return_keys, success_keys, total_steps
from palestra.runs.series import RunLogs, success_bounds, valid_instances
from palestra.runs.settings import find_run, read_meta

# Second line of defence after escaping: blocks all requests and scripts.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

NOTHING_RECORDED = "Nothing is recorded yet: the run has finished neither a training step nor an evaluation."


def write_report(run: Path, out: Path | None = None, *, episodes: int = 6, step: int | None = None) -> Path:
    """Writes the report on the run at `run` (default: report.html in it) and returns its path.

    It has `episodes` sample episodes of `step` (1 is the first of the run; default: the last recorded one). Raises
    ValueError if `run` is not a run, or no episodes were recorded at `step`.
    """
    out = out or run / "report.html"
    page = report_html(run, episodes=episodes, step=step)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, page.encode())
    return out


def report_html(run: Path, *, episodes: int = 6, step: int | None = None) -> str:
    """Returns the report as HTML. For arguments and errors see `write_report`."""
    tree = load(find_run(run) / "config.yaml")
    logs = RunLogs(run)
    meta = read_meta(run, needs_config=False)
    population = population_sections(run)
    curves = ""
    nothing = ""
    if not population:
        curves = metric_charts(logs)
    if not (population or logs.team or logs.evals):
        nothing = f"<p>{NOTHING_RECORDED}</p>"
    sections = [
        f"<header><h1>{escape_text(run.resolve().name)}</h1><p "
        f"class=soft>{escape_text(_what(tree, meta))}</p></header>",
        nothing,
        _damage_warning(run),
        metric_tiles(logs, tree),
        section("What was learned", eval_table(logs)),
        section("Curves", curves),
        *population,
        sample_section(run, episodes, step, int(tree.get("seed") or 0)),
        section("Where the time went", time_table(logs)),
        section("Metrics of each policy", _foldable("at the start and at the end", policy_table(logs))),
        section("How to reproduce it", facts_table(run, meta, tree), _foldable("the whole config", _config(run))),
    ]
    body = "\n".join(text for text in sections if text)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
        f"<title>{escape_text(run.resolve().name)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body class="palestra">\n{body}\n</body></html>\n'


def _damage_warning(run: Path) -> str:
    """Returns a paragraph on the first log that has lost or changed lines since the newest checkpoint, or ""."""
    for newest in list_checkpoints(run)[-1:]:
        if changed := newest.find_changed_log(run):
            return f"<p><strong>Damaged:</strong> {escape_text(changed)}.</p>"
    return ""


def _foldable(summary: str, inside: str) -> str:
    """Returns a section that is collapsed on screen and expanded in print."""
    if not inside:
        return ""
    return details(escape_text(summary), inside).replace("<details>", '<details class="printed">', 1)


def _what(tree: dict[str, Any], meta: dict[str, Any]) -> str:
    envs = [env["type"] for env in [tree.get("env") or {}, *(tree.get("envs") or {}).values()] if env.get("type")]
    learns = (tree.get("population") or {}).get("type") or algorithm_label(tree)
    facts = [f"{', '.join(dict.fromkeys(envs)) or 'data'} by {learns}", f"seed {tree.get('seed', 0)}"]
    if meta.get("created"):
        facts.append(f"begun {meta['created'][:16].replace('T', ' ')} UTC")
    return ", ".join(facts)


def metric_tiles(logs: RunLogs, tree: dict[str, Any]) -> str:
    """Returns the headline metrics as HTML: up to three evaluations, progress, NashConv."""
    tiles = []
    for name, lines in list(logs.evals.items())[:3]:
        last = lines[-1]
        label = held_out_label(tree, name)
        rates = success_keys(last)
        for key, what in rates.items():
            low, high = success_bounds(last, key)
            n = f"{valid_instances(last):.0f}{what.removeprefix('success')}"
            tiles.append((f"{last[key]:.1%}", f"{label}: success of {n} [{low:.0%}, {high:.0%}]"))
        if rates:
            continue
        for key, what in return_keys(last).items():
            tiles.append((f"{last[key]:.2f}", f"{label}: {what}, mean of {valid_instances(last):.0f}"))
    if logs.team:
        last = logs.team[-1]
        done = last["step"] + 1
        total = total_steps(tree)
        if total:
            tiles.append((f"{done} of {total}", "training steps"))
        elif "env_steps" in last:
            tiles.append((f"{last['env_steps']:,.0f}", "env steps"))
        else:
            tiles.append((f"{done:,.0f}", "tasks"))
        if last.get("nash_conv") is not None:
            tiles.append((f"{last['nash_conv']:.3f}", "NashConv"))
    shown = "".join(
        f'<div class="tile"><b>{escape_text(figure)}</b><span>{escape_text(what)}</span></div>'
        for figure, what in tiles
    )
    return block("tiles", shown)


def sample_section(run: Path, count: int, step: int | None, seed: int) -> str:
    """Returns sample episodes of a step (None: the last) as HTML. Raises ValueError for an unknown one."""
    files = sorted((run / "episodes").glob("step-*.parquet"))
    paths = {int(path.stem.removeprefix("step-")) + 1: path for path in files}
    if step is not None and step not in paths:
        have = ", ".join(map(str, paths)) or "none"
        raise ValueError(f"{run} has no episodes of step {step}; it has those of: {have}")
    if not paths or not count:
        return ""
    number = step
    if number is None:
        number = max(paths)
    episodes = load_episodes(paths[number])
    chosen = pick_samples(episodes, count, seed)
    caption = f"<p class=soft>{len(chosen)} of the {len(episodes)} of step {number}, as they were sampled.</p>"
    shown = section("Sample episodes", caption, *(episode_html(episode, label) for label, episode in chosen))
    return shown.replace("<section>", '<section class="page">', 1)


def facts_table(run: Path, meta: dict[str, Any], tree: dict[str, Any]) -> str:
    """Returns a table of seed, versions, command line and checkpoints, as HTML."""
    rows = [("seed", meta.get("seed", tree.get("seed", 0)))]
    rows += [(name, meta[name]) for name in ("palestra", "torch", "transformers", "python") if meta.get(name)]
    if meta.get("command"):
        rows.append(("command", hide_credentials(shlex.join(meta["command"]))))
    if meta.get("created"):
        rows.append(("begun", datetime.fromisoformat(meta["created"]).isoformat(" ", "seconds")))
    saved = list_checkpoints(run)
    if saved:
        rows.append(("checkpoints", f"after {', '.join(str(one.step + 1) for one in saved)} steps"))
    return html_table(["", ""], rows, css_class="facts")


def _config(run: Path) -> str:
    """Returns the HTML of the resolved config without empty values."""
    tree = load(run / "config.yaml")
    short = {key: value for key, value in tree.items() if value not in (None, [], {}, "")}
    return text_block(yaml.safe_dump(short, sort_keys=False, allow_unicode=True), "config")
