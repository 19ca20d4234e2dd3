// Small things that every page draws.

import type { ComponentChildren } from "preact";
import { num, percent, signed } from "./format";
import type { Evaluation } from "./types";

export function Failed({ error }: { error: string }) {
  return (
    <p class="error" role="alert">
      {error}
    </p>
  );
}

const MARKS: Record<string, string> = { running: "▶", done: "✓", failed: "✕", stopped: "■" };

export function Status({ status, error }: { status: string; error?: string }) {
  return (
    <span class={`status ${status}`} title={error}>
      <span aria-hidden="true">{MARKS[status] ?? "?"}</span> {status}
    </span>
  );
}

export function Outcome({ success, error }: { success: number | null; error: string | null }) {
  if (error !== null) return <span class="outcome failed">✕ error</span>;
  if (success === null) return <span class="quiet">–</span>;
  if (success > 0 && success < 1) return <span class="outcome">{percent(success)}</span>;
  return success ? <span class="outcome won">✓ success</span> : <span class="outcome lost">○ no success</span>;
}

// The main result of an evaluation. All intervals of these pages are 95 % intervals.
export function Score({ found }: { found: Evaluation }) {
  const shown = (value: number) => (found.success != null ? percent(value) : num(value));
  const main = found.success ?? found.return;
  if (found.successes) return <>{Object.entries(found.successes).map(([name, own]) => `${name} ${percent(own)}`).join(", ")}</>;
  if (main == null) return <>{Object.entries(found.returns ?? {}).map(([seat, own]) => `${seat} ${num(own)}`).join(", ")}</>;
  return (
    <>
      {shown(main)}{" "}
      {found.interval && (
        <small title={`95 % interval, of ${num(found.episodes)} episodes`}>
          [{shown(found.interval[0])}, {shown(found.interval[1])}]
        </small>
      )}
    </>
  );
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

// What the env told of a joint step: a row for each key; then those with values by seat, in a column for each seat.
export function Info({ info, seats }: { info: Record<string, unknown>; seats: string[] }) {
  const entries = Object.entries(info);
  const [ofAll, bySeat] = [entries.filter(([, value]) => !isBySeat(value, seats)), entries.filter(([, value]) => isBySeat(value, seats))];
  const apart = seats.filter((seat) => bySeat.some(([, value]) => seat in (value as object)));
  if (!entries.length) return null;
  return (
    <div class="wide">
      <table class="info" aria-label="what the env told of this step">
        <tbody>
          {ofAll.map(([key, value]) => (
            <tr>
              <th scope="row">{key.replaceAll("_", " ")}</th>
              <td colSpan={Math.max(1, apart.length)}>
                <Value name={key} value={value} />
              </td>
            </tr>
          ))}
        </tbody>
        {apart.length > 0 && (
          <tbody>
            <tr>
              <th scope="row">of seat</th>
              {apart.map((seat) => (
                <th scope="col">{seat}</th>
              ))}
            </tr>
            {bySeat.map(([key, value]) => (
              <tr>
                <th scope="row">{key.replaceAll("_", " ")}</th>
                {apart.map((seat) => (
                  <td>
                    <Value name={key} value={(value as Record<string, unknown>)[seat]} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        )}
      </table>
    </div>
  );
}

function isBySeat(value: unknown, seats: string[]): boolean {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return false;
  const keys = Object.keys(value);
  return keys.length > 0 && keys.every((key) => seats.includes(key));
}

const DEEPEST = 4; // levels of nested values that are laid out

function Value({ name, value, depth = 0 }: { name: string; value: unknown; depth?: number }) {
  if (value === undefined || value === null) return <span class="quiet">–</span>;
  if (typeof value === "boolean") return <>{value ? "yes" : "no"}</>;
  if (name === "passed" && typeof value === "number")
    return (
      <>
        <meter value={value} min={0} max={1} aria-label="share of tests passed" /> {percent(value)} of the tests
      </>
    );
  if (typeof value === "number") return <>{num(value)}</>;
  if (typeof value === "string") return <span class="text">{value}</span>;
  if (depth >= DEEPEST) return <span class="text">{JSON.stringify(value)}</span>;
  const inner = Object.entries(value as object);
  if (!inner.length) return <span class="quiet">none</span>;
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return <span class="text">{value.map(String).join(", ")}</span>;
  return (
    <dl class="inner">
      {inner.map(([key, one]) => (
        <div>
          <dt>{Array.isArray(value) ? Number(key) + 1 : key.replaceAll("_", " ")}</dt>
          <dd>
            <Value name={key} value={one} depth={depth + 1} />
          </dd>
        </div>
      ))}
    </dl>
  );
}
