// The curves of one run or of several over each other. A chart asks for its metrics when it comes into view; those out
// of view follow in turn, so that a print of the page is whole.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { url, useAnswer, useDebounced } from "./api";
import { Chart, type Line, type Range } from "./chart";
import { evalTitle } from "./format";
import { type Panel, sections } from "./panels";
import { amend, type Route } from "./route";
import type { Curve, MetricCatalog, RunDetail } from "./types";

const WINDOWS = [1, 5, 9, 25, 51, 101, 301, 1001];
const AXES: [string, string][] = [
  ["step", "training steps done"],
  ["env_steps", "env steps"],
  ["iteration", "iterations"],
  ["seconds", "time"],
];

// A population logs a line for each of its tasks.
function axisTitle(axis: string, kind: string): string {
  return axis === "step" && kind === "population" ? "tasks" : (AXES.find(([key]) => key === axis)?.[1] ?? axis);
}

function usualAxis(details: RunDetail[], keys: Set<string>): string {
  if (keys.has("iteration") && details.every((one) => one.kind === "population")) return "iteration";
  return keys.has("env_steps") && details.every((one) => one.kind === "networks") ? "env_steps" : "step";
}

interface Props {
  details: RunDetail[];
  route: Route;
  tick: number;
}

export function Curves({ details, route, tick }: Props) {
  const runs = details.map((detail) => detail.name);
  const keys = new Set(details.flatMap((detail) => Object.values(detail.metrics.metrics).flat()));
  const axis = route.query.get("x") ?? usualAxis(details, keys);
  const window = Number(route.query.get("smooth") ?? "9");
  const seeds = route.query.get("seeds") === "1";
  const [only, setOnly] = useState("");
  const [range, setRange] = useState<Range>(null);
  const phases = useMemo(() => [...new Set(details.flatMap((detail) => detail.phases))], [details]);
  const { data: catalog, error } = useAnswer<MetricCatalog>(url("metrics"));
  const logs = details.map((detail) => detail.metrics);
  const all = catalog ? sections(catalog, logs, phases) : [];
  useEffect(() => setRange(null), [axis]);
  const wanted = only.trim().toLowerCase();
  return (
    <>
      <div class="bar" role="group" aria-label="how curves are drawn">
        <label>
          over{" "}
          <select aria-label="over" value={axis} onChange={(event) => amend(route, { x: event.currentTarget.value })}>
            {AXES.filter(([key]) => key === "step" || key === "seconds" || keys.has(key)).map(([key]) => (
              <option value={key}>{axisTitle(key, details[0].kind)}</option>
            ))}
          </select>
        </label>
        <label>
          smoothed over{" "}
          <select aria-label="smoothed over" value={String(window)} onChange={(event) => amend(route, { smooth: event.currentTarget.value })}>
            {WINDOWS.map((size) => (
              <option value={String(size)}>{size === 1 ? "nothing" : `${size} lines`}</option>
            ))}
          </select>
        </label>
        {runs.length > 1 && (
          <label title="runs that differ only in the seed, as mean, minimum and maximum; of runs with equal seeds the newest counts">
            <input type="checkbox" checked={seeds} onChange={(event) => amend(route, { seeds: event.currentTarget.checked ? "1" : null })} /> seeds
            as bands
          </label>
        )}
        <input type="search" data-search placeholder="metrics: entropy, reward…" aria-label="show metrics that contain" value={only} onInput={(event) => setOnly(event.currentTarget.value)} />
        {range && <button onClick={() => setRange(null)}>show all again</button>}
        <span class="hint">drag to zoom, double click for all</span>
      </div>
      {error && <p class="error">{error}</p>}
      {all.map((section) => {
        const panels = section.panels.filter((panel) => `${panel.title} ${panel.metrics.join(" ")}`.toLowerCase().includes(wanted));
        return (
          panels.length > 0 && (
            <section key={section.title}>
              <h2>{section.title}</h2>
              <div class="charts">
                {panels.map((panel) => (
                  <Drawn key={panel.title} {...{ panel, runs, axis, window, seeds, range, tick }} axisName={axisTitle(axis, details[0].kind)} training={details[0].success_label} onRange={setRange} />
                ))}
              </div>
            </section>
          )
        );
      })}
    </>
  );
}

interface DrawnProps {
  panel: Panel;
  runs: string[];
  axis: string;
  axisName: string;
  training: string; // what the success rate in training is called
  window: number;
  seeds: boolean;
  range: Range;
  tick: number;
  onRange: (range: Range) => void;
}

function Drawn({ panel, runs, axis, axisName, training, window, seeds, range, tick, onRange }: DrawnProps) {
  const place = useRef<HTMLDivElement>(null);
  const seen = useSeen(place);
  const due = useTurn();
  const late = useDebounced(range, 60);
  const address = url("curves", {
    run: runs,
    metric: panel.metrics,
    x: axis,
    points: 500,
    window: panel.metrics.some((metric) => !metric.startsWith("evals/")) ? window : 1,
    low: late?.[0],
    high: late?.[1],
    seeds,
  });
  const { data, error } = useAnswer<{ curves: Curve[] }>(seen || due ? address : null, seen ? tick : 0);
  const lines = useMemo(() => (data ? drawnLines(data.curves, panel, training, runs.length > 1) : []), [data]);
  return (
    <div ref={place} class="slot" data-metric={panel.metrics[0]}>
      {error ? <p class="error">{error}</p> : !data ? <p class="hint">{panel.title}</p> : <Chart title={panel.title} unit={panel.unit} {...{ lines, axis, axisName, range, onRange }} />}
    </div>
  );
}

// One run: a colour for each policy. Several: a colour for each run, a dash for each policy.
function drawnLines(curves: Curve[], panel: Panel, training: string, several: boolean): Line[] {
  const wanted = panel.team ? curves.filter((curve) => curve.name === "team") : curves;
  const label = (curve: Curve) => (panel.team ? curve.metric.split("/")[1].replace(/_s$/, "") : curve.metric.startsWith("evals/") ? evalTitle(curve.name) : curve.metric === "metrics/success" && curve.name === "team" ? training : curve.name);
  const labels = [...new Set(wanted.map(label))];
  const groups = [...new Set(wanted.map((curve) => curve.runs.join("\n")))];
  const lines = wanted.map((curve): Line => {
    const own = labels.indexOf(label(curve));
    const group = groups.indexOf(curve.runs.join("\n"));
    const whose = curve.runs.length > 1 ? `${curve.runs[0]} and ${curve.runs.length - 1} more seed${curve.runs.length > 2 ? "s" : ""}` : curve.runs[0];
    return {
      label: several ? `${whose} · ${label(curve)}` : label(curve),
      colour: several ? group : own,
      dash: several ? own : Math.floor(own / 7),
      dots: curve.metric.startsWith("evals/"),
      x: curve.x,
      y: curve.y,
      low: curve.low,
      high: curve.high,
      raw: curve.raw,
    };
  });
  // Equal curves would cover each other: the first is drawn, with the labels of all.
  const keys = lines.map(({ x, y }) => JSON.stringify([x, y]));
  const labelled = (line: Line, at: number) => ({ ...line, label: lines.filter((_, other) => keys[other] === keys[at]).map((one) => one.label).join(", ") });
  return lines.map(labelled).filter((_, at) => keys.indexOf(keys[at]) === at);
}

const turns: (() => void)[] = [];
const FIRST_TURN = 1000; // milliseconds that charts in view have for themselves
const NEXT_TURN = 80;
let timer = 0;

function takeTurn(): void {
  turns.shift()?.();
  timer = turns.length ? setTimeout(takeTurn, NEXT_TURN) : 0;
}

// Whether it is this chart's turn, or was; before a print it is everyone's.
function useTurn(): boolean {
  const [due, setDue] = useState(false);
  useEffect(() => {
    const turn = () => setDue(true);
    turns.push(turn);
    timer ||= setTimeout(takeTurn, FIRST_TURN);
    window.addEventListener("beforeprint", turn);
    return () => {
      window.removeEventListener("beforeprint", turn);
      if (turns.includes(turn)) turns.splice(turns.indexOf(turn), 1);
    };
  }, []);
  return due;
}

// Whether an element is on the screen, or was.
export function useSeen(place: { current: Element | null }): boolean {
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    if (!place.current || seen) return;
    const watch = new IntersectionObserver((found) => found.some((one) => one.isIntersecting) && setSeen(true), { rootMargin: "200px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [seen]);
  return seen;
}
