// The head of a run's pages: where it stands, and what there is to see.

import { useState } from "preact/hooks";
import { url, useAnswer } from "./api";
import { count, duration, evalTitle, num, percent, when } from "./format";
import { Failed, Figure, Score, Status } from "./parts";
import { go, type Route, to } from "./route";
import type { RunDetail, RunLine } from "./types";

// The pages of each kind of run, what it is opened for first.
const ORDER: Record<RunLine["kind"], string[]> = {
  language: ["curves", "episodes", "agents", "alarms", "system", "config"],
  networks: ["curves", "replays", "episodes", "agents", "alarms", "system", "config"],
  population: ["population", "agents", "curves", "episodes", "alarms", "system", "config"],
};

// The page that a run opens on.
export function homePage(run: RunLine | RunDetail): string {
  return ORDER[run.kind][0];
}

export function Head({ run, live, tab }: { run: RunDetail; live: boolean; tab: string }) {
  const titles: Record<string, string> = { alarms: `Alarms${run.alarms.length ? ` (${run.alarms.length})` : ""}` };
  const pages = ORDER[run.kind].filter((key) => (key !== "episodes" || run.has_episodes) && (key !== "replays" || run.has_replays));
  return (
    <>
      <h1>
        {run.name} <Status status={run.status} />
      </h1>
      {run.status === "failed" && <Failed error={run.error} />}
      <dl class="facts">
        <Figure name="env">{run.env}</Figure>
        <Figure name={run.kind === "population" ? "plan" : "algorithm"}>{run.algorithm}</Figure>
        <Figure name={run.kind === "networks" ? "env steps" : run.kind === "population" ? "iterations" : "steps"}>
          {count(run.done)}
          {run.total > 0 && ` of ${count(run.total)}`}
        </Figure>
        {run.nash_conv != null && <Figure name="NashConv">{num(run.nash_conv)}</Figure>}
        {Object.entries(run.evals).map(([name, found]) => (
          <Figure name={evalTitle(name)}>
            <Score found={found} />
          </Figure>
        ))}
        {run.success != null && <Figure name={run.success_label}>{percent(run.success)}</Figure>}
        {run.return != null && <Figure name="training return">{num(run.return)}</Figure>}
        {run.status === "running" && run.left != null && <Figure name="left, about">{duration(run.left)}</Figure>}
        <Figure name="created (UTC)">{when(run.created)}</Figure>
        {run.changed > 0 && (
          <Figure name="last written">
            <span title={new Date(1000 * run.changed).toLocaleString()}>{duration(Math.max(0, Date.now() / 1000 - run.changed))} ago</span>
          </Figure>
        )}
        {run.status === "running" && (
          <Figure name="this page">
            <span class={live ? "live" : "quiet"}>{live ? "● live" : "○ not connected"}</span>
          </Figure>
        )}
      </dl>
      <nav class="tabs" aria-label="pages of the run">
        {pages.map((key) => (
          <a class={key === "alarms" && run.alarms.length ? "warn" : ""} href={to(key === homePage(run) ? ["run", run.name] : ["run", run.name, key])} aria-current={key === tab ? "page" : undefined}>
            {titles[key] ?? key[0].toUpperCase() + key.slice(1)}
          </a>
        ))}
      </nav>
    </>
  );
}

// Other runs to lay over this one.
export function Overlay({ run, route }: { run: string; route: Route }) {
  const [open, setOpen] = useState(false);
  const { data } = useAnswer<{ runs: RunLine[] }>(open ? url("runs") : null);
  const also = route.query.getAll("with");
  const change = (names: string[]) => {
    const query = new URLSearchParams(route.query);
    query.delete("with");
    names.forEach((name) => query.append("with", name));
    go(to(route.parts, query), true);
  };
  return (
    <div class="bar overlay">
      {also.map((name) => (
        <button class="chip" onClick={() => change(also.filter((one) => one !== name))} aria-label={`take ${name} away`}>
          {name} ×
        </button>
      ))}
      {open && data ? (
        <select
          aria-label="a run to lay over this one"
          value=""
          onChange={(event) => {
            change([...also, event.currentTarget.value]);
            setOpen(false);
          }}
        >
          <option value="">which?</option>
          {data.runs
            .filter((one) => one.name !== run && !also.includes(one.name))
            .map((one) => (
              <option value={one.name}>{one.name}</option>
            ))}
        </select>
      ) : (
        <button onClick={() => setOpen(true)}>+ another run</button>
      )}
    </div>
  );
}
