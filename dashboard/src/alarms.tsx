// What ought to worry, with the rule that says so.

import type { AlarmRow } from "./types";

export function Alarms({ alarms }: { alarms: AlarmRow[] }) {
  if (!alarms.length) return <p>No rule fires. They look at the newest lines, and at fewer than ten lines not at all.</p>;
  return (
    <ul class="alarms">
      {alarms.map((alarm) => (
        <li>
          <h2>
            <span aria-hidden="true">▲</span> {alarm.name} {alarm.who && <small>{alarm.who}</small>}
          </h2>
          <p>{alarm.says}</p>
          <p class="quiet">The rule: {alarm.rule}.</p>
        </li>
      ))}
    </ul>
  );
}
