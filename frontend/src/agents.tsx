// Who a run trained: policies and members, whom they come from, where they can be had, how they did in other seats.

import { useState } from "preact/hooks";
import { url, useAnswer } from "./api";
import { afterSteps, bytes, num } from "./format";
import { Failed, Score } from "./parts";
import { to } from "./route";
import type { AgentsData, EvaluationLine, Member, Policy } from "./types";

const SHOWN = 300; // members
const LISTED = 200; // instances

export function Agents({ run, tick }: { run: string; tick: number }) {
  const base = `runs/${encodeURIComponent(run)}`;
  const { data, error } = useAnswer<AgentsData>(url(`${base}/agents`), tick);
  if (error) return <Failed error={error} />;
  if (!data) return <p class="hint">reading…</p>;
  return (
    <>
      {data.policies.length > 0 && (
        <section>
          <h2>Policies</h2>
          <Policies policies={data.policies} base={base} leading={data.leading} />
        </section>
      )}
      {data.evals.length > 0 && (
        <section>
          <h2>Held-out evaluations, by seat assignment</h2>
          <Evaluations run={run} rows={data.evals} />
          <p class="hint">In brackets: 95 % intervals.</p>
        </section>
      )}
      {data.evals.some((row) => row.lines.filter((line) => line.outcomes).length > 1) && (
        <section>
          <h2>What changed between two evaluations</h2>
          {data.evals.map((row) => (
            <Changes key={row.name} run={run} name={row.name} lines={row.lines} />
          ))}
        </section>
      )}
      {data.members.length > 0 && (
        <section>
          <h2>
            Members <small>{data.members.length}</small>
          </h2>
          <Members members={data.members} base={base} />
        </section>
      )}
    </>
  );
}

function Policies({ policies, base, leading }: { policies: Policy[]; base: string; leading: string | null }) {
  return (
    <div class="wide">
      <table class="list cards">
        <thead>
          <tr>
            <th>policy</th>
            <th>type</th>
            <th>base</th>
            <th>seats</th>
            <th>checkpoints</th>
          </tr>
        </thead>
        <tbody>
          {policies.map((policy) => (
            <tr>
              <td>
                <b>{policy.name}</b>
              </td>
              <td data-name="type">{policy.type}</td>
              <td data-name="base">{policy.base}</td>
              <td data-name="seats">{policy.seats.join(", ")}</td>
              <td>
                {policy.checkpoints.length === 0 && <span class="quiet">none</span>}
                {policy.checkpoints.map((one) => (
                  <a class={one.best ? "chip best" : "chip"} download title={one.best ? `the best of these checkpoints on ${leading}` : undefined} href={`api/${base}/checkpoints/${one.step}/${encodeURIComponent(policy.name)}.zip`}>
                    ↓ {afterSteps(one.step)}
                    {one.version !== null ? `, @${one.version}` : ""} ({bytes(one.bytes)}){one.keep ? " kept" : ""}
                    {one.result && (
                      <>
                        , {leading} <Score found={one.result} />
                      </>
                    )}
                    {one.best && <b> ★ best</b>}
                  </a>
                ))}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Evaluations({ run, rows }: { run: string; rows: AgentsData["evals"] }) {
  return (
    <div class="wide">
      <table class="list cards">
        <thead>
          <tr>
            <th>evaluation</th>
            <th>seats</th>
            <th class="right">first</th>
            <th class="right">last</th>
            <th class="right">played</th>
            <th class="right">episodes</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => {
            const last = row.lines.at(-1)!;
            return (
              <tr>
                <td>
                  <b>{row.name}</b>
                </td>
                <td data-name="seats">{Object.entries(row.seats).map(([seat, who]) => `${seat}: ${who}`).join(", ") || <span class="quiet">as in training</span>}</td>
                <td class="right" data-name="first">
                  <Score found={row.lines[0]} />
                </td>
                <td class="right" data-name="last">
                  <b>
                    <Score found={last} />
                  </b>
                </td>
                <td class="right" data-name="last played">
                  {afterSteps(last.step)}
                </td>
                <td class="right" data-name="episodes">
                  {last.recorded ? (
                    <a href={to(["run", run, "episodes", last.step!, 0], { eval: row.name })} title="the transcripts of the last evaluation" onClick={() => keep(last)}>
                      {num(last.episodes)}
                    </a>
                  ) : (
                    num(last.episodes)
                  )}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

// Which held-out instances were solved at one evaluation and not at a later one, and the other way round.
function Changes({ run, name, lines }: { run: string; name: string; lines: EvaluationLine[] }) {
  const known = lines.filter((line) => line.outcomes);
  const [from, setFrom] = useState<number | null>(null);
  const [until, setUntil] = useState<number | null>(null);
  if (known.length < 2) return null;
  const first = known[from ?? known.length - 2];
  const second = known[until ?? known.length - 1];
  const which = (was: boolean, is: boolean) =>
    [...second.outcomes!].flatMap((mark, at) => (at < first.outcomes!.length && (first.outcomes![at] === "1") === was && (mark === "1") === is ? [at] : []));
  const choice = (label: string, chosen: number, set: (at: number) => void) => (
    <label>
      {label}{" "}
      <select aria-label={`${name}: ${label}`} value={String(chosen)} onChange={(event) => set(Number(event.currentTarget.value))}>
        {known.map((line, at) => (
          <option value={String(at)}>{afterSteps(line.step)}</option>
        ))}
      </select>
    </label>
  );
  const sets: [string, number[], boolean][] = [
    ["regressed", which(true, false), true],
    ["newly solved", which(false, true), true],
    ["solved in both", which(true, true), false],
    ["solved in neither", which(false, false), false],
  ];
  return (
    <div data-changes={name}>
      <div class="bar">
        <b>{name}</b>
        {choice("from", from ?? known.length - 2, setFrom)}
        {choice("to", until ?? known.length - 1, setUntil)}
      </div>
      <dl class="changes">
        {sets.map(([title, instances, listed]) => (
          <div>
            <dt>
              {title}: <b>{instances.length}</b>
            </dt>
            {listed && instances.length > 0 && <Instances instances={instances} {...{ run, name, first, second }} />}
          </div>
        ))}
      </dl>
    </div>
  );
}

// Instances, each with a link to its transcript in the later evaluation, from which one leads to the earlier one.
function Instances({ run, name, first, second, instances }: { run: string; name: string; first: EvaluationLine; second: EvaluationLine; instances: number[] }) {
  const shown = instances.slice(0, LISTED);
  const linked = shown.filter((instance) => instance < second.recorded);
  const query = { eval: name, ...(first.recorded ? { from: String(first.step) } : {}) };
  return (
    <dd>
      instances{" "}
      {shown.map((instance, at) => (
        <>
          {at > 0 && ", "}
          {instance < second.recorded ? (
            <a href={to(["run", run, "episodes", second.step!, instance], query)} onClick={() => keep(second, linked)}>
              {instance}
            </a>
          ) : (
            instance
          )}
        </>
      ))}
      {instances.length > LISTED ? ", …" : ""}
      {linked.length < shown.length && <span class="quiet"> (without a link: not recorded)</span>}
    </dd>
  );
}

// Lets the arrows of an episode's page go through these instances of an evaluation (default: all that are recorded).
function keep(line: EvaluationLine, instances = [...Array(Math.min(line.recorded, line.outcomes?.length ?? 0)).keys()]): void {
  sessionStorage.setItem("episodes", JSON.stringify(instances.map((instance) => [line.step, instance])));
}

// Members under whom they started from.
function Members({ members, base }: { members: Member[]; base: string }) {
  const rows = descent(members).slice(-SHOWN);
  return (
    <div class="wide">
      <table class="list cards">
        <thead>
          <tr>
            <th>member</th>
            <th>player</th>
            <th>started from</th>
            <th>info</th>
            <th>weights</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([member, depth]) => (
            <tr>
              <td class="indented" style={{ "--depth": Math.min(depth, 12) }}>
                {depth > 0 && <span class="quiet">└ </span>}
                {member.name}
              </td>
              <td data-name="player">{member.player || "all"}</td>
              <td data-name="started from" class={member.parent === null ? "none" : ""}>{member.parent ?? "–"}</td>
              <td>{Object.entries(member.info ?? {}).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")}</td>
              <td>
                {member.bytes > 0 && (
                  <a class="chip" download href={`api/${base}/members/${encodeURIComponent(member.name)}.zip`}>
                    ↓ {bytes(member.bytes)}
                  </a>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {members.length > SHOWN && <p class="hint">The last {SHOWN} are shown.</p>}
    </div>
  );
}

function descent(members: Member[]): [Member, number][] {
  const names = new Set(members.map((member) => member.name));
  const children = new Map<string | null, Member[]>();
  for (const member of members) {
    const parent = member.parent !== null && names.has(member.parent) && member.parent !== member.name ? member.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), member]);
  }
  const rows: [Member, number][] = [];
  const seen = new Set<string>();
  const waiting: [Member, number][] = [...(children.get(null) ?? [])].reverse().map((member) => [member, 0]);
  while (waiting.length) {
    const [member, depth] = waiting.pop()!;
    if (seen.has(member.name)) continue;
    seen.add(member.name);
    rows.push([member, depth]);
    waiting.push(...[...(children.get(member.name) ?? [])].reverse().map((child): [Member, number] => [child, depth + 1]));
  }
  return rows;
}
