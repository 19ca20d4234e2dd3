// Who a run trained: policies and members, whom they come from, where they can be had, how they did in other seats.

import { url, useAnswer } from "./api";
import { bytes, num, percent } from "./format";
import { Failed } from "./parts";
import type { AgentsData, Exam, Member, Policy } from "./types";

const SHOWN = 300;

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
          <Policies policies={data.policies} base={base} />
        </section>
      )}
      {data.evals.length > 0 && (
        <section>
          <h2>Exams, by who sits where</h2>
          <Exams exams={data.evals} />
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

function Policies({ policies, base }: { policies: Policy[]; base: string }) {
  return (
    <div class="wide">
      <table class="list">
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
              <td>{policy.name}</td>
              <td>{policy.type}</td>
              <td>{policy.base}</td>
              <td>{policy.seats.join(", ")}</td>
              <td>
                {policy.checkpoints.length === 0 && <span class="quiet">none</span>}
                {policy.checkpoints.map((one) => (
                  <a class="chip" download href={`api/${base}/checkpoints/${one.step}/${encodeURIComponent(policy.name)}.zip`}>
                    ↓ after step {one.step + 1}
                    {one.version !== null ? `, @${one.version}` : ""} ({bytes(one.bytes)}){one.keep ? " kept" : ""}
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

function score(exam: Exam): string {
  if (exam.success != null) return percent(exam.success);
  if (exam.return != null) return num(exam.return);
  return Object.entries(exam.returns ?? {}).map(([seat, own]) => `${seat} ${num(own)}`).join(", ");
}

function Exams({ exams }: { exams: AgentsData["evals"] }) {
  return (
    <div class="wide">
      <table class="list">
        <thead>
          <tr>
            <th>exam</th>
            <th>in which seats</th>
            <th class="right">first</th>
            <th class="right">last</th>
            <th class="right">after step</th>
            <th class="right">episodes</th>
          </tr>
        </thead>
        <tbody>
          {exams.map((exam) => (
            <tr>
              <td>{exam.name}</td>
              <td>{Object.entries(exam.seats).map(([seat, who]) => `${seat}: ${who}`).join(", ") || <span class="quiet">as in training</span>}</td>
              <td class="right">{score(exam.first)}</td>
              <td class="right">
                <b>{score(exam.last)}</b>
              </td>
              <td class="right">{(exam.last.step ?? -1) + 1}</td>
              <td class="right">{num(exam.last.episodes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// Members under whom they started from.
function Members({ members, base }: { members: Member[]; base: string }) {
  const rows = descent(members).slice(-SHOWN);
  return (
    <div class="wide">
      <table class="list">
        <thead>
          <tr>
            <th>member</th>
            <th>player</th>
            <th>started from</th>
            <th>known of it</th>
            <th>weights</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([member, depth]) => (
            <tr>
              <td style={{ paddingLeft: `${8 + 14 * Math.min(depth, 12)}px` }}>
                {depth > 0 && <span class="quiet">└ </span>}
                {member.name}
              </td>
              <td>{member.player || "all"}</td>
              <td>{member.parent ?? <span class="quiet">nobody</span>}</td>
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
