// All runs: a table to sort, to filter and to choose from, and two or more beside each other.

import { useMemo, useState } from "preact/hooks";
import { url, useAnswer, useLive } from "./api";
import { Curves } from "./curves";
import { num, percent, when } from "./format";
import { amend, go, type Route, to } from "./route";
import { Failed, Status } from "./parts";
import type { RunDetail, RunLine } from "./types";

const SHOWN = 200;
type Column = [string, string, (run: RunLine) => string | number, boolean?];
const COLUMNS: Column[] = [
  ["name", "run", (run) => run.name],
  ["status", "", (run) => run.status],
  ["env", "env", (run) => run.env],
  ["algorithm", "algorithm", (run) => run.algorithm],
  ["seed", "seed", (run) => run.seed ?? -1, true],
  ["done", "done", (run) => (run.total ? run.done / run.total : 0), true],
  ["held-out", "held-out result", (run) => run.headline],
  ["alarms", "alarms", (run) => run.alarms?.length ?? -1],
  ["success", "success in training", (run) => run.success ?? -1, true],
  ["return", "return in training", (run) => run.return ?? -Infinity, true],
  ["created", "created (UTC)", (run) => run.created],
];

export function Runs({ route }: { route: Route }) {
  const { tick } = useLive();
  const { data, error, loading } = useAnswer<{ root: string; runs: RunLine[]; of: number }>(url("runs"), tick);
  const [chosen, setChosen] = useState<string[]>([]);
  const text = route.query.get("q") ?? "";
  const sort = route.query.get("sort") ?? "-created";
  const rows = useMemo(() => sorted(fitting(data?.runs ?? [], text), sort), [data, text, sort]);
  if (error && !data) return <Failed error={error} />;
  const toggle = (name: string) => setChosen((old) => (old.includes(name) ? old.filter((one) => one !== name) : [...old, name]));
  return (
    <main>
      <h1>Runs {data && <small>in {data.root}/</small>}</h1>
      <div class="bar">
        <input type="search" data-search placeholder="filter: demo grpo running…" aria-label="filter runs" value={text} onInput={(event) => amend(route, { q: event.currentTarget.value })} />
        <button class="main" disabled={chosen.length < 2} onClick={() => go(compareAddress(chosen))}>
          compare {chosen.length >= 2 ? `${chosen.length} runs` : "runs"}
        </button>
        {chosen.length > 0 && <button onClick={() => setChosen([])}>choose none</button>}
        <span class="hint" role="status">
          {loading && !data ? "looking…" : `${rows.length} of ${data?.of ?? 0} runs`}
        </span>
      </div>
      {data && data.runs.length === 0 && <p>No run is here yet: <code>palestra train configs/demo.yaml</code> makes one.</p>}
      <div class="wide">
        <table class="list cards">
          <thead>
            <tr>
              <th>
                <span class="hidden">choose</span>
              </th>
              {COLUMNS.map(([key, title, , right]) => (
                <th class={right ? "right" : ""} aria-sort={sort === key ? "ascending" : sort === `-${key}` ? "descending" : "none"}>
                  {title && (
                    <button class="plain" onClick={() => amend(route, { sort: sort === `-${key}` ? key : `-${key}` })}>
                      {title}
                      {sort === key ? " ↑" : sort === `-${key}` ? " ↓" : ""}
                    </button>
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, SHOWN).map((run) => (
              <Row key={run.name} run={run} chosen={chosen.includes(run.name)} toggle={toggle} />
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > SHOWN && <p class="hint">The first {SHOWN} are shown: filter for the others.</p>}
    </main>
  );
}

function Row({ run, chosen, toggle }: { run: RunLine; chosen: boolean; toggle: (name: string) => void }) {
  const [, ...search] = run.success_label.match(/^search success \((.*)\)$/) ?? [];
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td>
        <input type="checkbox" aria-label={`choose ${run.name}`} checked={chosen} onChange={() => toggle(run.name)} />
      </td>
      <td class="long name">
        <a class="row" href={to(["run", run.name])}>
          {run.name}
        </a>
      </td>
      <td>
        <Status status={run.status} error={run.error} />
      </td>
      <td class="long" data-name="env">
        {run.env}
      </td>
      <td class="long" data-name="algorithm">
        {run.algorithm}
      </td>
      <td class={`right ${run.seed == null ? "none" : ""}`} data-name="seed">
        {run.seed ?? "–"}
      </td>
      <td class="right" data-name="done">
        {run.total ? percent(Math.min(1, run.done / run.total)) : run.steps}
      </td>
      <td class={`long ${run.headline ? "" : "none"}`} data-name="result">
        <b>{run.headline || "–"}</b>
      </td>
      <td data-name="alarms" class={run.alarms?.length ? "" : "none"}>
        {run.alarms?.length ? (
          <a class="warn" href={to(["run", run.name, "alarms"])} title={run.alarms.join(", ")}>
            <span aria-hidden="true">▲</span> {run.alarms.length}
          </a>
        ) : null}
      </td>
      <td class={`right ${run.success == null ? "none" : ""}`} title={run.success_label} data-name="success in training">
        {percent(run.success)} {search.length > 0 && run.success != null && <small>{search[0]}</small>}
      </td>
      <td class={`right ${run.return == null ? "none" : ""}`} data-name="return in training">
        {num(run.return)}
      </td>
      <td data-name="created">{when(run.created)}</td>
    </tr>
  );
}

function fitting(runs: RunLine[], text: string): RunLine[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hay = (run: RunLine) => [run.name, run.env, run.algorithm, run.status, run.kind, `seed=${run.seed}`, ...run.policies].join(" ").toLowerCase();
  return runs.filter((run) => words.every((word) => hay(run).includes(word)));
}

function sorted(runs: RunLine[], sort: string): RunLine[] {
  const way = sort.startsWith("-") ? -1 : 1;
  const key = COLUMNS.find(([name]) => name === sort.replace("-", ""))?.[2] ?? COLUMNS[0][2];
  return [...runs].sort((a, b) => (key(a) < key(b) ? -way : key(a) > key(b) ? way : 0));
}

function compareAddress(names: string[]): string {
  return to(["compare"], new URLSearchParams(names.map((name) => ["run", name])));
}

// ---- several beside each other

export function Compare({ route }: { route: Route }) {
  const names = route.query.getAll("run");
  const { tick } = useLive();
  const { data: difference, error } = useAnswer<{ runs: string[]; rows: [string, unknown[]][] }>(url("difference", { run: names }), 0);
  return (
    <main>
      <h1>
        {names.length} runs <small>beside each other</small>
      </h1>
      {error && <Failed error={error} />}
      <details open={names.length <= 4}>
        <summary>What their configs differ in ({difference?.rows.length ?? "…"})</summary>
        {difference && <Difference {...difference} />}
      </details>
      <Details names={names} found={[]}>
        {(details) => <Curves details={details} route={route} tick={tick} />}
      </Details>
    </main>
  );
}

function Difference({ runs, rows }: { runs: string[]; rows: [string, unknown[]][] }) {
  return (
    <div class="wide">
      <table class="list diff">
        <thead>
          <tr>
            <th>setting</th>
            {runs.map((run) => (
              <th>
                <a href={to(["run", run])}>{run}</a>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(([key, values]) => (
            <tr>
              <td>{key}</td>
              {values.map((value) => (
                <td>{value === null ? <i class="quiet">–</i> : typeof value === "string" ? value : JSON.stringify(value)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// The details of several runs, asked one after another; hooks cannot stand in a loop, components can.
export function Details({ names, found, children }: { names: string[]; found: RunDetail[]; children: (details: RunDetail[]) => preact.JSX.Element }): preact.JSX.Element {
  const next = names[found.length];
  const { data, error } = useAnswer<RunDetail>(next === undefined ? null : url(`runs/${encodeURIComponent(next)}`));
  if (next === undefined) return children(found);
  if (error) return <Failed error={error} />;
  if (!data) return <p class="hint">reading {next}…</p>;
  return (
    <Details key={next} names={names} found={[...found, data]}>
      {children}
    </Details>
  );
}
