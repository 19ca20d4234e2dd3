// All runs: a table to sort, to filter, to group by seed and to choose from, and two or more beside each other.

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

interface RunList {
  root: string;
  runs: RunLine[];
  of: number;
  groups: { experiment: string; runs: string[]; result: string }[]; // runs that differ only in the seed
  keys: string[]; // settings in which runs differ, where they were asked for
}

export function Runs({ route }: { route: Route }) {
  const { tick } = useLive();
  const settings = route.query.get("columns")?.split(",").filter(Boolean) ?? [];
  const [choosing, setChoosing] = useState(false);
  const { data, error, loading } = useAnswer<RunList>(url("runs", { column: settings, keys: choosing }), tick);
  const [chosen, setChosen] = useState<string[]>([]);
  const text = route.query.get("q") ?? "";
  const sort = route.query.get("sort") ?? "-created";
  const bySeed = route.query.get("seeds") === "1";
  const columns = COLUMNS.flatMap((column) => (column[0] === "done" ? [column, ...settings.map(settingColumn)] : [column]));
  const rows = useMemo(() => sorted(grouped(fitting(data?.runs ?? [], text), bySeed), columns, sort), [data, text, sort, bySeed]);
  if (error && !data) return <Failed error={error} />;
  const toggle = (names: string[]) => setChosen((old) => (names.every((name) => old.includes(name)) ? old.filter((one) => !names.includes(one)) : [...new Set([...old, ...names])]));
  const show = (keys: string[]) => amend(route, { columns: keys.join(",") });
  return (
    <main>
      <h1>Runs {data && <small>in {data.root}/</small>}</h1>
      <div class="bar">
        <input type="search" data-search placeholder="filter: demo grpo running…" aria-label="filter runs" value={text} onInput={(event) => amend(route, { q: event.currentTarget.value })} />
        <button class="main" disabled={chosen.length < 2} onClick={() => go(compareAddress(chosen))}>
          compare {chosen.length >= 2 ? `${chosen.length} runs` : "runs"}
        </button>
        {chosen.length > 0 && <button onClick={() => setChosen([])}>choose none</button>}
        <label>
          <input type="checkbox" checked={bySeed} onChange={(event) => amend(route, { seeds: event.currentTarget.checked ? "1" : null })} /> group by seed
        </label>
        <input list="settings" class="column" placeholder="+ column: lr, rank" aria-label="add a column of a setting" onFocus={() => setChoosing(true)} onChange={(event) => add(event.currentTarget, settings, show)} />
        <datalist id="settings">
          {data?.keys.map((key) => (
            <option value={key} />
          ))}
        </datalist>
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
              {columns.map(([key, title, , right]) => (
                <th class={`${right ? "right" : ""} ${settings.includes(key) ? "setting" : ""}`} aria-sort={sort === key ? "ascending" : sort === `-${key}` ? "descending" : "none"}>
                  {title && (
                    <button class="plain" onClick={() => amend(route, { sort: sort === `-${key}` ? key : `-${key}` })}>
                      {title}
                      {sort === key ? " ↑" : sort === `-${key}` ? " ↓" : ""}
                    </button>
                  )}
                  {settings.includes(key) && (
                    <button class="plain remove" aria-label={`remove the column ${key}`} onClick={() => show(settings.filter((one) => one !== key))}>
                      ×
                    </button>
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, SHOWN).map(([run, ...others]) => {
              const names = [run, ...others].map((one) => one.name);
              const group = data?.groups.find((one) => one.experiment === run.experiment && one.runs.length === names.length);
              const seeds = new Set([run, ...others].map((one) => one.seed)).size;
              const result = seeds > 1 ? group?.result : [run, ...others].find((one) => one.headline)?.headline;
              const shown = others.length ? { ...run, success: null, return: null, seed: null, headline: result ?? "" } : run;
              return <Row key={run.name} run={shown} statuses={[...new Set([run, ...others].map((one) => one.status))]} {...{ names, seeds, settings, toggle }} chosen={names.every((name) => chosen.includes(name))} />;
            })}
          </tbody>
        </table>
      </div>
      {rows.length > SHOWN && <p class="hint">The first {SHOWN} are shown: filter for the others.</p>}
    </main>
  );
}

interface RowProps {
  run: RunLine;
  names: string[]; // of the runs that differ only in the seed, in one row
  seeds: number; // different ones among them
  statuses: string[];
  settings: string[];
  chosen: boolean;
  toggle: (names: string[]) => void;
}

function Row({ run, names, seeds, statuses, settings, chosen, toggle }: RowProps) {
  const [, ...search] = run.success_label.match(/^search success \((.*)\)$/) ?? [];
  const several = names.length > 1;
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td>
        <input type="checkbox" aria-label={`choose ${several ? `${names.length} runs of ` : ""}${run.name}`} checked={chosen} onChange={() => toggle(names)} />
      </td>
      <td class="long name">
        <a class="row" href={several ? compareAddress(names, true) : to(["run", run.name])}>
          {run.name}
        </a>
        {run.tags.length > 0 && (
          <div>
            {run.tags.map((tag) => (
              <span class="tag">{tag}</span>
            ))}
          </div>
        )}
      </td>
      <td class="wraps">
        {statuses.map((status) => (
          <>
            <Status status={status} error={run.error} />{" "}
          </>
        ))}
      </td>
      <td class="long" data-name="env">
        {run.env}
      </td>
      <td class="long" data-name="algorithm">
        {run.algorithm}
      </td>
      <td class={`right ${run.seed == null && !several ? "none" : ""}`} data-name="seed">
        {several ? `${seeds} seed${seeds > 1 ? "s" : ""}${seeds < names.length ? ` in ${names.length} runs` : ""}` : (run.seed ?? "–")}
      </td>
      <td class="right" data-name="done">
        {run.total ? percent(Math.min(1, run.done / run.total)) : run.steps}
      </td>
      {settings.map((key) => (
        <td class={`right setting ${run.settings[key] ? "" : "none"}`} data-name={key}>
          {run.settings[key] || "–"}
        </td>
      ))}
      <td class={`long result ${run.headline ? "" : "none"}`} data-name="result" title={several ? "mean over the seeds, with its 95 % interval (Student's t); a seed counts once, by its newest run" : undefined}>
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
      <td class="wraps" data-name="created">
        {when(run.created).replaceAll("-", "\u2011")}
      </td>
    </tr>
  );
}

function settingColumn(key: string): Column {
  const value = (run: RunLine) => (run.settings[key] && !Number.isNaN(Number(run.settings[key])) ? Number(run.settings[key]) : (run.settings[key] ?? ""));
  return [key, key, value, true];
}

function add(field: HTMLInputElement, settings: string[], show: (keys: string[]) => void): void {
  const key = field.value.trim().replaceAll(",", "");
  if (key && !settings.includes(key)) show([...settings, key]);
  field.value = "";
}

function fitting(runs: RunLine[], text: string): RunLine[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hay = (run: RunLine) => [run.name, run.env, run.algorithm, run.status, run.kind, `seed=${run.seed}`, ...run.policies, ...run.tags].join(" ").toLowerCase();
  return runs.filter((run) => words.every((word) => hay(run).includes(word)));
}

// A row for each run, or for those that differ only in the seed.
function grouped(runs: RunLine[], bySeed: boolean): RunLine[][] {
  const groups = new Map<string, RunLine[]>();
  for (const run of runs) {
    const key = bySeed && run.experiment ? run.experiment : run.name;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()];
}

function sorted(rows: RunLine[][], columns: Column[], sort: string): RunLine[][] {
  const way = sort.startsWith("-") ? -1 : 1;
  const value = columns.find(([name]) => name === sort.replace(/^-/, ""))?.[2] ?? COLUMNS[0][2];
  const key = ([run]: RunLine[]) => value(run);
  return [...rows].sort((a, b) => (key(a) < key(b) ? -way : key(a) > key(b) ? way : 0));
}

function compareAddress(names: string[], bySeed = false): string {
  const query = names.map((name) => ["run", name]);
  return to(["compare"], new URLSearchParams(bySeed ? [...query, ["seeds", "1"]] : query));
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
      {difference && (
        <p class="hint">
          {difference.rows.length} {difference.rows.length === 1 ? "setting differs" : "settings differ"}: <a href="#" onClick={(event) => (event.preventDefault(), document.getElementById("difference")?.scrollIntoView())}>below</a>
        </p>
      )}
      <Details names={names} found={[]}>
        {(details) => <Curves details={details} route={route} tick={tick} />}
      </Details>
      {error && <Failed error={error} />}
      {difference && difference.rows.length > 0 && (
        <section id="difference">
          <h2>Settings that differ</h2>
          <Differences {...difference} />
        </section>
      )}
    </main>
  );
}

// Settings that all runs have; below, folded, those that some lack, by who has them.
function Differences({ runs, rows }: { runs: string[]; rows: [string, unknown[]][] }) {
  const owners = ([, values]: [string, unknown[]]) => runs.filter((_, at) => values[at] !== null);
  const partial = rows.filter((row) => owners(row).length < runs.length);
  const shared = rows.filter((row) => !partial.includes(row));
  return (
    <>
      {shared.length > 0 && <Difference runs={runs} rows={shared} />}
      {[...new Set(partial.map((row) => owners(row).join(", ")))].map((who) => {
        const own = partial.filter((row) => owners(row).join(", ") === who);
        return (
          <details key={who}>
            <summary>
              {own.length} setting{own.length > 1 ? "s" : ""} of {who} only
            </summary>
            <Difference runs={runs} rows={own} />
          </details>
        );
      })}
    </>
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
                <td>
                  <Setting value={value} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function isTree(value: unknown): value is object {
  return typeof value === "object" && value !== null && !Array.isArray(value) && Object.keys(value).length > 0;
}

function Setting({ value }: { value: unknown }) {
  if (value === null) return <i class="quiet">–</i>;
  if (!isTree(value)) return <>{typeof value === "string" ? value : JSON.stringify(value)}</>;
  const lines = settings(value);
  return (
    <details>
      <summary>
        {lines.length} setting{lines.length > 1 ? "s" : ""}
      </summary>
      {lines.map(([key, own]) => (
        <div>
          {key}: <Setting value={own} />
        </div>
      ))}
    </details>
  );
}

function settings(tree: object): [string, unknown][] {
  return Object.entries(tree).flatMap(([key, value]): [string, unknown][] => (isTree(value) ? settings(value).map(([rest, own]) => [`${key}.${rest}`, own]) : [[key, value]]));
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
