// Small things that every page draws.

import type { ComponentChildren } from "preact";
import { num, percent, signed } from "./format";

export function Failed({ error }: { error: string }) {
  return (
    <p class="error" role="alert">
      {error}
    </p>
  );
}

const MARKS: Record<string, string> = { running: "▶", done: "✓", stopped: "■" };

export function Status({ status }: { status: string }) {
  return (
    <span class={`status ${status}`}>
      <span aria-hidden="true">{MARKS[status] ?? "?"}</span> {status}
    </span>
  );
}

export function Outcome({ success, error }: { success: number | null; error: string | null }) {
  if (error !== null) return <span class="outcome failed">✕ error</span>;
  if (success === null) return <span class="quiet">–</span>;
  if (success > 0 && success < 1) return <span class="outcome">{percent(success)}</span>;
  return success ? <span class="outcome won">✓ success</span> : <span class="outcome lost">○ no</span>;
}

export function Figure({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="figure">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

export function Gains({ reward, advantage, team }: { reward?: number; advantage?: number; team?: number }) {
  return (
    <span class="gains">
      {reward !== undefined && <span title="the seat's own reward of this step">reward {signed(reward)}</span>}
      {team ? <span title="the team's reward of this step">team {signed(team)}</span> : null}
      {advantage !== undefined && <span title="how much better than its siblings">advantage {signed(advantage)}</span>}
    </span>
  );
}

export function Info({ info }: { info: Record<string, unknown> }) {
  const entries = Object.entries(info);
  return entries.length ? (
    <dl class="info">
      {entries.map(([key, value]) => (
        <div>
          <dt>{key}</dt>
          {key === "passed" && typeof value === "number" && <meter value={value} min={0} max={1} aria-label="share of tests passed" />}
          <dd>{key === "passed" && typeof value === "number" ? `${percent(value)} of the tests` : typeof value === "number" ? num(value) : typeof value === "string" ? value : JSON.stringify(value)}</dd>
        </div>
      ))}
    </dl>
  ) : null;
}
