// What ought to worry, with the rule that says so and what to try; then the rules that do not fire.

import { runPath, url, useAnswer } from "./api";
import { Failed } from "./parts";
import type { AlarmRow, RuleRow } from "./types";

export function Alarms({ run, tick }: { run: string; tick: number }) {
  const { data, error } = useAnswer<{ alarms: AlarmRow[]; rules: RuleRow[] }>(url(runPath(run, "/alarms")), tick);
  if (error) return <Failed error={error} />;
  if (!data) return <p class="hint">reading…</p>;
  const firing = new Set(data.alarms.map((alarm) => alarm.name));
  const silent = data.rules.filter((rule) => !firing.has(rule.name));
  const judged = data.rules.every((rule) => rule.is_judged);
  return (
    <>
      {data.alarms.length > 0 ? (
        <ul class="alarms">
          {data.alarms.map((alarm) => (
            <li class="fires">
              <h2>
                <span aria-hidden="true">▲</span> {alarm.name} {alarm.policy && <small>{alarm.policy.includes(", ") ? "members" : "policy"} {alarm.policy}</small>}
              </h2>
              <p>{alarm.message}</p>
              <p class="quiet">The rule: {alarm.rule}.</p>
              <p>To try: {alarm.remedy}.</p>
            </li>
          ))}
        </ul>
      ) : (
        <p>{judged ? "✓ No rule fires." : "The run has fewer than eight log lines: most rules are not applied yet."} Alarms are hints where to look, not proofs.</p>
      )}
      {silent.length > 0 && (
        <section>
          <h2>{judged ? "Rules that do not fire" : "Rules that will be applied"}</h2>
          <div class="wide">
            <table class="list rules cards">
              <thead>
                <tr>
                  <th>alarm</th>
                  <th>fires if</th>
                  <th>then try</th>
                </tr>
              </thead>
              <tbody>
                {silent.map((rule) => (
                  <tr>
                    <td>
                      <b>{rule.name}</b>
                    </td>
                    <td data-name="fires if">{rule.rule}</td>
                    <td data-name="then try">{rule.remedy}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </section>
      )}
    </>
  );
}
