// Which metrics of a run stand together in a chart, under which heading, and in which unit.

import type { Logs } from "./types";

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

const NAMES: [string, string, string, string[]][] = [
  ["Outcome", "success (held-out evaluations and training)", "share of episodes", ["metrics/success", "evals/success"]],
  ["Outcome", "return (held-out evaluations and training)", "reward per episode", ["metrics/return", "evals/return"]],
  ["Outcome", "return of the team", "reward per episode", ["metrics/team_return", "evals/team_return"]],
  ["Outcome", "NashConv", "reward, all players together", ["metrics/nash_conv"]],
  ["Outcome", "exploitability", "reward, mean over players", ["metrics/exploitability"]],
  ["Outcome", "equilibrium gap of the payoff table", "reward", ["metrics/gap"]],
  ["Outcome", "value of the game to each player", "reward a game", ["metrics/value"]],
  ["Outcome", "win rate", "share of games", ["metrics/win_rate"]],
  ["Outcome", "win rate against the worst", "share of games", ["metrics/worst_win_rate"]],
  ["Outcome", "rating", "Elo", ["metrics/rating"]],
  ["Rewards by part", "local reward", "reward", ["metrics/local_reward"]],
  ["Rewards by part", "team reward", "reward", ["metrics/team_reward"]],
  ["Play", "episode length", "joint steps", ["metrics/steps_per_episode", "evals/steps_per_episode"]],
  ["Play", "answer length", "tokens", ["metrics/tokens"]],
  ["Play", "invalid answers", "share of answers", ["metrics/invalid"]],
  ["Play", "truncated answers", "share of answers", ["metrics/truncated_fraction"]],
  ["Play", "failed episodes", "episodes a step", ["metrics/failed"]],
  ["Play", "failed evaluation episodes", "episodes", ["evals/failed"]],
  ["Learning", "entropy", "nats", ["metrics/entropy"]],
  ["Learning", "KL from the sampling policy", "nats", ["metrics/kl"]],
  ["Learning", "clipped", "share of tokens or actions", ["metrics/clip_fraction"]],
  ["Learning", "zero-advantage groups", "share of groups", ["metrics/zero_std_fraction"]],
  ["Learning", "mean staleness", "training steps", ["metrics/staleness"]],
  ["Learning", "maximum staleness", "training steps", ["metrics/staleness_max"]],
  ["Learning", "loss", "loss", ["metrics/loss"]],
  ["Learning", "policy loss", "loss", ["metrics/policy_loss"]],
  ["Learning", "critic loss", "loss", ["metrics/value_loss"]],
  ["Learning", "gradient norm", "L2 norm", ["metrics/grad_norm"]],
  ["Learning", "learning rate", "step size", ["metrics/lr"]],
  ["Learning", "members", "members", ["metrics/members"]],
  ["Learning", "games played", "games", ["metrics/games"]],
  ["Speed", "sampled tokens", "tokens/s", ["timings/tokens_per_s"]],
  ["Speed", "answers", "answers/s", ["timings/answers_per_s"]],
  ["Speed", "env steps", "env steps/s", ["timings/env_steps_per_s"]],
  ["Speed", "CPU time of rollouts", "CPU seconds a step", ["timings/rollout_cpu_s"]],
  ["Speed", "CPU time of training", "CPU seconds a step", ["timings/train_cpu_s"]],
  ["Machine", "CPU use of the run's process", "% of a core", ["timings/cpu_percent"]],
  ["Machine", "memory of the run's process", "GiB", ["timings/rss_gib"]],
  ["Machine", "GPU memory, maximum so far", "GiB", ["timings/gpu_memory_gib"]],
];
const ORDER = ["Outcome", "Rewards by part", "Play", "Learning", "Speed", "Machine", "Other metrics"];
const SILENT = new Set(["answers", "samples", "updates", "groups", "episodes", "env_steps", "env_steps_here", "iteration", "iterations", "elapsed_s", "seconds", "slice", "deviation"]);
const LOGS: Record<string, string> = { metrics: "", evals: " (held-out)", timings: "" };

export function sections(logs: Logs[], phases: string[]): Section[] {
  const known = new Set(logs.flatMap(metrics));
  const found: [string, Panel][] = [];
  const used = new Set<string>();
  for (const [section, title, unit, wanted] of NAMES) {
    const there = wanted.filter((metric) => known.has(metric));
    if (there.length) found.push([section, { title, unit, metrics: there }]);
    there.forEach((metric) => used.add(metric));
  }
  if (phases.length) found.push(["Speed", { title: "time of a step, by phase", unit: "seconds", metrics: phases.map((key) => `timings/${key}`), team: true }]);
  phases.forEach((key) => used.add(`timings/${key}`));
  for (const metric of [...known].sort()) {
    const key = metric.slice(metric.indexOf("/") + 1);
    if (used.has(metric) || SILENT.has(key) || key.startsWith("mix/") || key.startsWith("returns_ci95/")) continue;
    found.push(other(metric, key));
  }
  return ORDER.map((title) => ({ title, panels: found.filter(([section]) => section === title).map(([, panel]) => panel) })).filter(
    (section) => section.panels.length,
  );
}

function other(metric: string, key: string): [string, Panel] {
  if (metric.startsWith("evals/returns/")) return ["Rewards by part", { title: `held-out return of ${key.slice(8)}`, unit: "reward per episode", metrics: [metric] }];
  if (metric.startsWith("metrics/reward/")) return ["Rewards by part", { title: `own reward of an answer: ${key.slice(7)}`, unit: "reward", metrics: [metric] }];
  const unit = key.endsWith("_per_s") ? "per second" : key.endsWith("_s") ? "seconds" : key.endsWith("_fraction") ? "share" : "";
  const title = key.replace(/_(per_s|s|fraction)$/, "").replaceAll("_", " ");
  return ["Other metrics", { title: `${title}${LOGS[metric.split("/")[0]] ?? ""}`, unit, metrics: [metric] }];
}

function metrics(logs: Logs): string[] {
  return (Object.keys(logs) as (keyof Logs)[]).flatMap((log) =>
    Object.values(logs[log]).flatMap((keys) => keys.map((key) => `${log}/${key}`)),
  );
}
