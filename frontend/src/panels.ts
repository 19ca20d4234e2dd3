// Which metrics of a run stand together in a chart, under which heading, and in which unit.

import type { Logs, MetricCatalog } from "./types";

export interface Panel {
  title: string;
  unit: string; // of the y axis
  metrics: string[]; // LOG/KEY
  team?: boolean; // all together only
}

export interface Section {
  title: string;
  panels: Panel[];
}

const ORDER = ["Outcome", "Rewards by seat and term", "Play", "Learning", "Speed", "Machine", "Other metrics"];
const LOGS: Record<string, string> = { metrics: "", evals: " (held-out)", timings: "" };

export function sections(catalog: MetricCatalog, logs: Logs[], phases: string[]): Section[] {
  const known = new Set(logs.flatMap(metrics));
  const found: [string, Panel][] = [];
  const used = new Set<string>();
  for (const { name, title, unit, panel, log, has_evals } of catalog.metrics) {
    const wanted = [`${log}/${name}`, ...(has_evals ? [`evals/${name}`] : [])];
    const there = wanted.filter((metric) => known.has(metric));
    if (there.length) found.push([panel, { title, unit, metrics: there }]);
    there.forEach((metric) => used.add(metric));
  }
  if (phases.length) found.push(["Speed", { title: "time per step, by phase", unit: "seconds", metrics: phases.map((key) => `timings/${key}`), team: true }]);
  phases.forEach((key) => used.add(`timings/${key}`));
  for (const metric of [...known].sort()) {
    const key = metric.slice(metric.indexOf("/") + 1);
    if (used.has(metric) || catalog.uncharted.includes(key) || key.startsWith("mix/") || key.startsWith("returns_ci95/")) continue;
    found.push(other(metric, key));
  }
  return ORDER.map((title) => ({ title, panels: found.filter(([section]) => section === title).map(([, panel]) => panel) })).filter(
    (section) => section.panels.length,
  );
}

function other(metric: string, key: string): [string, Panel] {
  if (metric.startsWith("evals/returns/")) return ["Rewards by seat and term", { title: `held-out return of ${key.slice(8)}`, unit: "reward per episode", metrics: [metric] }];
  if (metric.startsWith("metrics/reward/")) return ["Rewards by seat and term", { title: `reward term: ${key.slice(7).replaceAll("_", " ")}`, unit: "reward", metrics: [metric] }];
  const unit = key.endsWith("_per_s") ? "per second" : key.endsWith("_s") ? "seconds" : key.endsWith("_fraction") ? "share" : "";
  const title = key.replace(/_(per_s|s|fraction)$/, "").replaceAll("_", " ");
  return ["Other metrics", { title: `${title}${LOGS[metric.split("/")[0]] ?? ""}`, unit, metrics: [metric] }];
}

function metrics(logs: Logs): string[] {
  return (Object.keys(logs) as (keyof Logs)[]).flatMap((log) =>
    Object.values(logs[log]).flatMap((keys) => keys.map((key) => `${log}/${key}`)),
  );
}
