// What the API says: palestra/dashboard/api.py.

export type Num = number | null;

export interface Evaluation {
  step?: number;
  success?: number;
  successes?: Record<string, number>; // by team or policy, in place of `success` and `return`
  return?: number;
  returns?: Record<string, number>;
  episodes?: number;
  interval?: [number, number] | null; // 95 %, of the leading metric
}

// `outcomes` has a letter for each held-out instance: 1 solved, 0 not, x failed.
export interface EvaluationLine extends Evaluation {
  outcomes?: string;
  recorded: number; // the episodes of so many instances are in the run
}

export interface RunLine {
  name: string;
  created: string;
  kind: "language" | "networks" | "population";
  env: string;
  algorithm: string;
  policies: string[];
  seed: number | null;
  tags: string[];
  experiment: string; // the same for runs that differ only in the seed
  settings: Record<string, string>; // the columns of the list that were asked for
  steps: number;
  done: number;
  total: number;
  status: "running" | "done" | "failed" | "stopped";
  error: string; // the first line of the error that ended it, or ""
  success: Num;
  success_label: string; // of the success rate in training
  return: Num;
  nash_conv: Num;
  headline: string; // the leading held-out evaluation, or NashConv
  alarms?: string[] | null; // in the list of runs: names; null while they are not known yet
  evals: Record<string, Evaluation>;
  changed: number;
}

export interface AlarmRow {
  name: string;
  policy: string; // "" for all; in a population, the members concerned
  message: string;
  rule: string;
  remedy: string;
}

export interface RuleRow {
  name: string;
  rule: string;
  remedy: string;
  is_judged: boolean;
}

export type Logs = Record<"metrics" | "timings" | "evals", Record<string, string[]>>;

export interface RunDetail extends Omit<RunLine, "alarms"> {
  left: Num;
  metrics: Logs;
  phases: string[];
  has_episodes: boolean;
  has_replays: boolean;
  has_population: boolean;
  alarms: AlarmRow[];
}

export interface MetricCatalog {
  metrics: { name: string; title: string; unit: string; panel: string; log: string; has_evals: boolean }[];
  uncharted: string[];
}

export interface Curve {
  metric: string;
  name: string;
  runs: string[];
  from: number;
  to: number;
  x: number[];
  y: Num[];
  low?: Num[];
  high?: Num[];
  raw?: { x: number[]; y: Num[] };
}

export interface EpisodeRow {
  step: number;
  episode: number;
  env: string;
  seed: number;
  seats: Record<string, string>;
  error: string | null;
  nodes: number;
  turns: number;
  success: Num;
  team: number;
  total: number;
  invalid: number;
  returns: Record<string, number>;
}

export interface EpisodePage {
  of: number;
  fit: number;
  unread: number;
  rows: EpisodeRow[];
  searched?: number;
  spread?: { edges: number[]; counts: number[] };
}

// How the env says that its observations may be drawn: "" as text.
export type Form = "" | "grid" | "board" | "sudoku";

export interface TreeNode {
  id: number;
  parent: number | null;
  depth: number;
  chosen: boolean;
  done: boolean;
  truncated: boolean;
  success: boolean | null;
  team: number;
  seats: Record<string, { reward?: number; advantage?: number; invalid?: boolean; draw?: number }>;
}

export interface EpisodeTree {
  env: string;
  seed: number;
  error: string | null;
  traceback: string | null;
  picture: Form;
  seats: Record<string, string>;
  nodes: TreeNode[];
  left_out: number;
  at?: number; // the node that `line` leads to
  line?: Joint[];
}

export interface Message {
  role?: string;
  content?: unknown;
  tool_calls?: unknown;
}

export type Seen = string | { messages?: Message[]; tools?: unknown[] } | unknown;

export interface Turn {
  seat: string;
  policy?: string;
  stop?: string;
  reward?: number;
  advantage?: number;
  observation?: Seen;
  answer?: string;
  invalid?: boolean;
  why_invalid?: string;
}

export interface Joint {
  node: number;
  team: number;
  info: Record<string, unknown>;
  turns: Turn[];
}

export interface Outcome {
  instance: number;
  gave_up: boolean;
  failed: boolean;
  success: boolean | null;
  team: number;
  returns: Record<string, number>;
}

export interface GameState {
  env: string;
  picture: Form;
  seat: string;
  seats: Record<string, string>;
  turn: number;
  now: "asked" | "waiting" | "watching" | "paused" | "over";
  role: string;
  rules: string;
  legal_actions: string[];
  line: Joint[];
  end: Outcome | null;
}

export interface Said {
  seat: string;
  policy: string;
  advantage: Num;
  temperature: Num;
  prompt: number;
  ids: number[];
  texts: string[] | null;
  logprobs: number[];
}

export interface Payoffs {
  seats: string[];
  of: number[];
  rows: string[];
  columns: string[];
  mean: Num[][];
  games: number[][];
}

export interface Rating {
  name: string;
  elo: number;
  stderr: number;
  rate: number;
  worst: number;
  nemesis: string;
  games: number;
}

export interface Stretch {
  learner: string;
  member: string;
  start: string | null;
  from: Num;
  seconds: Num;
  return: Num;
  opponents: Record<string, number>;
}

export interface PopulationData {
  members: number;
  payoffs: Payoffs | null;
  responses: { names: string[]; edges: [number, number][] } | null;
  mixtures: { player: string; names: string[]; shares: number[][] }[];
  ratings: { rows: Rating[]; why: string; warning: string };
  distance: Record<string, number>[];
  exploits: Record<string, unknown>[];
  timeline: Stretch[];
}

export interface Policy {
  name: string;
  type: string;
  base: string;
  seats: string[];
  checkpoints: { step: number; keep: boolean; bytes: number; version: number | null; result: Evaluation | null; best: boolean }[];
}

export interface Member {
  name: string;
  player: string;
  parent: string | null;
  info: Record<string, unknown> | null;
  bytes: number;
}

export interface AgentsData {
  policies: Policy[];
  members: Member[];
  evals: { name: string; seats: Record<string, string>; lines: EvaluationLine[]; count: number }[];
  leading: string | null; // the evaluation that picks the best checkpoint
}

export interface SystemData {
  process: number | null;
  processes: { pid: number; name?: string; memory?: number; threads?: number; cpu?: number }[];
  machine: { cores: number | null; load: number | null; memory: number | null; available: number | null };
  workers: { kind: string; where: string; done: number; seconds: number; lost: number; replays: number; seen: Num; why: string }[];
  queues: Record<string, number>;
  timings: Record<string, Record<string, number>>;
  phases: string[];
  failures: { error: string; count: number; step: number; episode: number }[];
  unread: number;
  broken: Record<string, string>;
  torn: Record<string, number>;
  disk: Record<string, number>;
  meta: Record<string, unknown>;
  command: string[];
}

// What a training server says: palestra/service/wire/schemas/console.py. Times are seconds since 1970.
export interface Console {
  at: number;
  sessions: { id: string; owner: string; name: string | null; created: number; seen: number; num_models: number; num_samplers: number }[];
  queues: { owner: string; kind: string; queued: number; taken: number; bytes: number; oldest: number }[];
  answers: { owner: string; num_answers: number; mean_s: number; max_s: number }[];
  adapters: { id: string; owner: string; base: string; rank: number; state: string; is_loaded: boolean; has_unsaved: boolean; used: number }[];
  errors: { at: number; owner: string; kind: string; model: string | null; category: string; message: string }[];
  worker: {
    at: number;
    pid: number;
    memory: Num;
    loaded_models: string[];
    num_snapshots: number;
    bases: { name: string; device: string; free_memory: number; answers: number; waiting: number; cache_bytes: Num; cache_limit: Num }[];
    work: Record<string, { sampling: number; training: number; scoring: number; answers: number }>;
  } | null;
}

export interface ServerData {
  url: string;
  error: string; // why there is no console, or ""
  console: Console | null;
}

export interface ReplayFrame {
  picture: string | null; // a data URL
  text: string | null;
  acts: boolean[];
  actions: Num[][];
  rewards: Num[];
}

export interface ReplayFile {
  env: string;
  seats: string[];
  players: string[];
  action_names: string[];
  seat_colours: [number, number, number][];
  episodes: { seed: number; end: string; success: boolean | null; frames: ReplayFrame[] }[];
}
