// The episodes of a run: to filter, to sort, to search for words, and to open.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { askAhead, runPath, url, useAnswer } from "./api";
import { opening } from "./episode";
import { count, num, signed } from "./format";
import { Failed, Outcome } from "./parts";
import { amend, parse, type Route, to } from "./route";
import type { EpisodePage, EpisodeRow, RunDetail } from "./types";

const PAGE = 50;
const FIELDS = ["outcome", "seat", "policy", "least", "most", "turns_from", "turns_to", "step_from", "step_to", "env", "invalid", "text", "sort", "ascending", "first", "before"];

export function Episodes({ run, route, tick }: { run: RunDetail; route: Route; tick: number }) {
  const query = Object.fromEntries(FIELDS.map((key) => [key, route.query.get(key)]));
  const [poll, setPoll] = useState(0);
  const { data, error, loading } = useAnswer<EpisodePage>(url(runPath(run.name, "/episodes"), { ...query, count: PAGE }), tick + poll);
  useEffect(() => {
    if (!data?.unread) return; // the server still looks through the files: ask again soon
    const timer = setTimeout(() => setPoll((old) => old + 1), 700);
    return () => clearTimeout(timer);
  }, [data]);
  const first = Number(query.first ?? 0);
  const rows = data?.rows ?? [];
  useEffect(() => {
    if (data) sessionStorage.setItem("episodes", JSON.stringify(data.rows.map((row) => [row.step, row.episode])));
  }, [data]);
  const seats = useMemo(() => [...new Set(rows.flatMap((row) => Object.keys(row.seats)))], [data]);
  // Drawn anew only where there is an answer: fifty rows cost more than all else on the page.
  const list = useMemo(() => <List run={run.name} rows={rows} route={route} seats={seats} />, [data]);
  return (
    <>
      <Filters route={route} seats={seats} />
      {error && <Failed error={error} />}
      <div class="bar">
        <span role="status" class="hint" data-counts>
          {data ? told(data) : "looking…"}
          {loading && data ? " …" : ""}
        </span>
        {data?.spread && <Spread spread={data.spread} route={route} />}
      </div>
      {data?.unread ? <progress max={data.unread + data.of / Math.max(1, data.of)} aria-label="files looked through" /> : null}
      {list}
      <div class="bar">
        <button disabled={!first} onClick={() => amend(route, { first: String(Math.max(0, first - PAGE)) })}>
          ← before
        </button>
        {data?.searched !== undefined ? (
          <button disabled={data.searched >= data.fit} onClick={() => amend(route, { before: String(data.searched) })}>
            search on
          </button>
        ) : (
          <button disabled={!data || first + PAGE >= data.fit} onClick={() => amend(route, { first: String(first + PAGE) })}>
            next →
          </button>
        )}
      </div>
    </>
  );
}

function told(page: EpisodePage): string {
  const unread = page.unread ? `, ${count(page.unread)} files not looked through yet` : "";
  if (page.searched !== undefined) return `${page.rows.length} found in ${count(page.searched)} of ${count(page.fit)} episodes${unread}`;
  return `${count(page.fit)} of ${count(page.of)} episodes${unread}`;
}

function Filters({ route, seats }: { route: Route; seats: string[] }) {
  const set = (key: string) => (event: { currentTarget: { value: string } }) => amend(route, { [key]: event.currentTarget.value, first: null, before: null });
  const box = (key: string, title: string) => <Typed key={key} name={key} title={title} route={route} kind="number" />;
  return (
    <form class="filters" onSubmit={(event) => event.preventDefault()} aria-label="which episodes">
      <label>
        outcome
        <select name="outcome" value={route.query.get("outcome") ?? ""} onChange={set("outcome")}>
          <option value="">any</option>
          <option value="success">success</option>
          <option value="failure">no success</option>
          <option value="error">error</option>
        </select>
      </label>
      <label>
        seat
        <select value={route.query.get("seat") ?? ""} onChange={set("seat")}>
          <option value="">any</option>
          {[...new Set([...seats, ...(route.query.get("seat") ? [route.query.get("seat")!] : [])])].map((seat) => (
            <option value={seat}>{seat}</option>
          ))}
        </select>
      </label>
      <Typed name="policy" title="policy" route={route} kind="text" />
      {box("least", route.query.get("seat") ? "its reward from" : "reward from")}
      {box("most", "to")}
      {box("turns_from", "turns from")}
      {box("turns_to", "to")}
      {box("step_from", "step from")}
      {box("step_to", "to")}
      <Typed name="text" title="words seen or said" route={route} kind="search" />
      <label>
        sorted by
        <select name="sort" value={route.query.get("sort") ?? "step"} onChange={set("sort")}>
          {["step", "total", "turns", "nodes", "success", "invalid"].map((key) => (
            <option value={key}>{key === "total" ? "reward" : key}</option>
          ))}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={route.query.get("ascending") === "true"} onChange={(event) => amend(route, { ascending: event.currentTarget.checked ? "true" : null, first: null })} /> lowest first
      </label>
      <label class="check">
        <input type="checkbox" checked={route.query.get("invalid") === "true"} onChange={(event) => amend(route, { invalid: event.currentTarget.checked ? "true" : null, first: null })} /> invalid only
      </label>
      <button type="button" onClick={() => amend(route, Object.fromEntries(FIELDS.map((key) => [key, null])))}>
        clear filters
      </button>
    </form>
  );
}

// A field that changes the address as one types; a search for words reads files, and waits until one has stopped.
function Typed({ name, title, route, kind }: { name: string; title: string; route: Route; kind: string }) {
  const there = route.query.get(name) ?? "";
  const [text, setText] = useState(there);
  const timer = useRef(0);
  useLayoutEffect(() => setText(there), [there]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const set = (value: string) => amend(parse(location.hash), { [name]: value, first: null, before: null });
  const typed = (value: string) => {
    setText(value);
    clearTimeout(timer.current);
    if (kind === "search") timer.current = setTimeout(() => set(value), 150);
    else set(value);
  };
  return (
    <label class={kind === "number" ? "short" : ""}>
      {title}
      <input type={kind} step="any" name={name} data-search={kind === "search" ? "" : undefined} value={text} onInput={(event) => typed(event.currentTarget.value)} />
    </label>
  );
}

function Spread({ spread, route }: { spread: { edges: number[]; counts: number[] }; route: Route }) {
  const most = Math.max(...spread.counts, 1);
  if (spread.counts.length === 0) return null;
  const width = 6;
  return (
    <svg class="spread" width={spread.counts.length * width} height="28" role="img" aria-label={`rewards from ${num(spread.edges[0])} to ${num(spread.edges.at(-1))}`}>
      {spread.counts.map((many, at) => (
        <g onClick={() => amend(route, { least: spread.edges[at].toPrecision(6), most: spread.edges[at + 1].toPrecision(6), seat: null, first: null })}>
          <title>
            {count(many)} episodes with a reward from {num(spread.edges[at])} to {num(spread.edges[at + 1])}
          </title>
          <rect class="ground" x={at * width} y="0" width={width} height="28" />
          <rect x={at * width} y={28 - (26 * many) / most} width={width - 1} height={(26 * many) / most + (many ? 1 : 0)} />
        </g>
      ))}
    </svg>
  );
}

function List({ run, rows, route, seats }: { run: string; rows: EpisodeRow[]; route: Route; seats: string[] }) {
  const timer = useRef(0);
  // Whoever stays on a row for a moment is likely to open it.
  const near = (event: Event) => {
    clearTimeout(timer.current);
    const [step, episode] = ((event.target as Element).closest("a.row") as HTMLElement | null)?.dataset.episode?.split("/").map(Number) ?? [];
    if (step !== undefined) timer.current = setTimeout(() => askAhead(opening(run, step, episode)), 60);
  };
  const own = seats.filter((seat) => rows.some((row) => row.returns[seat] !== undefined)).slice(0, 6);
  return (
    <div class="wide">
      <table class="list cards">
        <thead>
          <tr>
            <th>episode</th>
            <th>outcome</th>
            <th class="right">reward</th>
            <th class="right">team</th>
            {own.map((seat) => (
              <th class="right">{seat}</th>
            ))}
            <th class="right">turns</th>
            <th class="right">nodes</th>
            <th class="right">invalid</th>
            <th>policies</th>
            <th class="right">instance</th>
          </tr>
        </thead>
        <tbody onMouseOver={near} onFocusIn={near}>
          {rows.map((row) => (
            <tr key={`${row.step}/${row.episode}`}>
              <td>
                <a class="row" data-episode={`${row.step}/${row.episode}`} href={to(["run", run, "episodes", row.step, row.episode], listOf(route))}>
                  step {row.step} · {row.episode}
                </a>
              </td>
              <td>
                <Outcome success={row.success} error={row.error} />
              </td>
              <td class="right" data-name="reward">
                <b>{signed(row.total)}</b>
              </td>
              <td class="right" data-name="team">
                {signed(row.team)}
              </td>
              {own.map((seat) => (
                <td class="right" data-name={seat}>
                  {signed(row.returns[seat])}
                </td>
              ))}
              <td class="right" data-name="turns">
                {row.turns}
              </td>
              <td class="right" data-name="nodes">
                {row.nodes}
              </td>
              <td class={`right ${row.invalid ? "" : "none"}`} data-name="invalid">
                {row.invalid || ""}
              </td>
              <td class="seating">{Object.entries(row.seats).map(([seat, who]) => `${seat}: ${who}`).join(", ")}</td>
              <td class="right" data-name="instance">
                {row.env} {row.seed}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function listOf(route: Route): Record<string, string> {
  const kept = route.query.toString();
  return kept ? { list: kept } : {};
}
