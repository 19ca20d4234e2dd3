// Which figures of a run stand together in a chart, and under which heading.

import type { Logs } from "./types";

export interface Panel {
  title: string;
  figures: string[]; // LOG/KEY
  team?: boolean; // all together only
}

export interface Section {
  title: string;
  panels: Panel[];
}

const NAMES: [string, string, string[]][] = [
  ["Outcome", "success (held-out evaluations and training)", ["metrics/success", "evals/success"]],
  ["Outcome", "return (held-out evaluations and training)", ["metrics/return", "evals/return"]],
  ["Outcome", "return of the team", ["metrics/team_return", "evals/team_return"]],
  ["Outcome", "NashConv", ["metrics/nash_conv"]],
  ["Outcome", "exploitability", ["metrics/exploitability"]],
  ["Outcome", "win rate", ["metrics/win_rate"]],
  ["Outcome", "win rate against the worst", ["metrics/worst_win_rate"]],
  ["Outcome", "rating", ["metrics/rating"]],
  ["Rewards by part", "own reward of an answer", ["metrics/local_reward"]],
  ["Rewards by part", "team reward of an answer", ["metrics/team_reward"]],
  ["Play", "turns (joint steps an episode)", ["metrics/steps_per_episode", "evals/steps_per_episode"]],
  ["Play", "tokens an answer", ["metrics/tokens"]],
  ["Play", "invalid answers (share)", ["metrics/invalid"]],
  ["Play", "answers cut off (share)", ["metrics/truncated_fraction"]],
  ["Play", "episodes that failed", ["metrics/failed"]],
  ["Learning", "entropy (nats)", ["metrics/entropy"]],
  ["Learning", "KL from the sampling policy", ["metrics/kl"]],
  ["Learning", "clip share", ["metrics/clip_fraction"]],
  ["Learning", "groups without differences (share)", ["metrics/zero_std_fraction"]],
  ["Learning", "staleness (steps, mean)", ["metrics/staleness"]],
  ["Learning", "staleness (steps, most)", ["metrics/staleness_max"]],
  ["Learning", "loss", ["metrics/loss"]],
  ["Learning", "norm of the gradient", ["metrics/grad_norm"]],
  ["Learning", "learning rate", ["metrics/lr"]],
  ["Speed", "tokens a second", ["timings/tokens_per_s"]],
  ["Speed", "answers a second", ["timings/answers_per_s"]],
  ["Speed", "env steps a second", ["timings/env_steps_per_s"]],
];
const ORDER = ["Outcome", "Rewards by part", "Play", "Learning", "Speed", "Other figures"];
const SILENT = new Set(["answers", "samples", "updates", "groups", "episodes", "env_steps", "env_steps_here", "iteration", "iterations", "elapsed_s", "seconds"]);

export function sections(logs: Logs[], phases: string[]): Section[] {
  const known = new Set(logs.flatMap(figures));
  const found: [string, Panel][] = [];
  const used = new Set<string>();
  for (const [section, title, wanted] of NAMES) {
    const there = wanted.filter((figure) => known.has(figure));
    if (there.length) found.push([section, { title, figures: there }]);
    there.forEach((figure) => used.add(figure));
  }
  if (phases.length) found.push(["Speed", { title: "seconds of a step, by phase", figures: phases.map((key) => `timings/${key}`), team: true }]);
  phases.forEach((key) => used.add(`timings/${key}`));
  for (const figure of [...known].sort()) {
    const key = figure.slice(figure.indexOf("/") + 1);
    if (used.has(figure) || SILENT.has(key) || key.startsWith("mix/") || key.startsWith("returns_ci95/")) continue;
    const returns = figure.startsWith("evals/returns/");
    found.push([returns ? "Rewards by part" : "Other figures", { title: returns ? `return of ${key.slice(8)} in exams` : figure, figures: [figure] }]);
  }
  return ORDER.map((title) => ({ title, panels: found.filter(([section]) => section === title).map(([, panel]) => panel) })).filter(
    (section) => section.panels.length,
  );
}

function figures(logs: Logs): string[] {
  return (Object.keys(logs) as (keyof Logs)[]).flatMap((log) =>
    Object.values(logs[log]).flatMap((keys) => keys.map((key) => `${log}/${key}`)),
  );
}
