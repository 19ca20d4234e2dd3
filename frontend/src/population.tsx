// A population: who earns what from whom, whom learners met, how members rank, how far it is from an equilibrium.

import { useState } from "preact/hooks";
import { runPath, url, useAnswer } from "./api";
import { Chart, type Line, type Range } from "./chart";
import { num, percent } from "./format";
import { Heat, Mixtures } from "./heat";
import { Failed } from "./parts";
import { amend, type Route } from "./route";
import { Responses, Timeline } from "./league";
import type { PopulationData, Rating, RunDetail } from "./types";

export function Population({ run, route, tick }: { run: RunDetail; route: Route; tick: number }) {
  const last = route.query.get("last") ?? "40";
  const { data, error } = useAnswer<PopulationData>(run.has_population ? url(runPath(run.name, "/population"), { last }) : null, tick);
  if (!run.has_population) return <p>No task of this population is finished yet: payoffs, mixtures and ratings appear here with the first games.</p>;
  if (error) return <Failed error={error} />;
  if (!data) return <p class="hint">reading…</p>;
  const newest = data.distance.at(-1)?.nash_conv;
  return (
    <>
      <div class="bar">
        <span class="hint">
          {data.members} member{data.members === 1 ? "" : "s"}
        </span>
        <label>
          showing{" "}
          <select value={last} onChange={(event) => amend(route, { last: event.currentTarget.value })}>
            {["10", "20", "40", "100", "200"].map((size) => (
              <option value={size}>the newest {size}</option>
            ))}
          </select>
        </label>
      </div>
      <div class="pair">
        {data.distance.length > 0 && <Distance points={data.distance} />}
        {data.payoffs && data.payoffs.rows.length > 0 && (
          <section>
            <h2>Payoffs</h2>
            <Heat payoffs={data.payoffs} />
          </section>
        )}
        {data.mixtures.map((mixture) => (
          <section key={mixture.player}>
            <h2>Mixture of {mixture.player} over time</h2>
            <Mixtures mixture={mixture} />
          </section>
        ))}
        {data.responses && data.responses.edges.length > 0 && (
          <section>
            <h2>Response graph</h2>
            <p class="hint">An arrow leads from each member to whoever earns most against it.</p>
            <Responses {...data.responses} />
          </section>
        )}
      </div>
      <section>
        <h2>Elo among these members</h2>
        {data.ratings.rows.length === 0 && <p class="quiet">Nobody is rated: {data.ratings.why}.</p>}
        {data.ratings.rows.length > 0 && (
          <p class="hint">
            Fitted to the games between these members (Bradley and Terry, 1952): 400 points are odds of 10 to 1 in this pool. It says who wins on average here, and changes with who is in the pool. It does not say how
            exploitable a member is: one that ranks first may lose every game to an opponent that nobody here resembles, and where members beat each other in cycles no ranking is right. Intervals are 95 % intervals.
            {newest != null && (
              <>
                {" "}
                For the distance from an equilibrium see NashConv: the newest mixture of members has <b>{num(newest)}</b>, and 0 could not be exploited.
              </>
            )}
          </p>
        )}
        {data.ratings.warning && <p class="error">{data.ratings.warning}</p>}
        {data.ratings.rows.length > 0 && <Ratings rows={data.ratings.rows.slice(0, Number(last))} />}
      </section>
      {data.exploits.length > 0 && <Exploits rows={data.exploits} />}
      {data.timeline.length > 0 && (
        <section>
          <h2>Timeline</h2>
          <Timeline stretches={data.timeline} />
        </section>
      )}
    </>
  );
}

function Distance({ points }: { points: Record<string, number>[] }) {
  const [range, setRange] = useState<Range>(null);
  const axis = "env_steps" in points.at(-1)! && new Set(points.map((point) => point.env_steps)).size > 1 ? "env_steps" : "number";
  const values = points.map((point) => point.nash_conv);
  const wide = Math.min(...values) > 1e-9 && Math.max(...values) > 10 * Math.min(...values);
  const line: Line = {
    label: "NashConv",
    colour: 0,
    dash: 0,
    dots: true,
    x: points.map((point, at) => (axis === "number" ? at : (point.env_steps ?? 0))),
    y: points.map((point) => Math.max(point.nash_conv, 0)),
  };
  return (
    <section>
      <h2>Exploitability</h2>
      <Chart title={`NashConv: what all players together could gain by best responses; 0 at an equilibrium`} unit="reward" axisName={axis === "number" ? "assessments" : "env steps"} lines={[line]} axis={axis} range={range} onRange={setRange} log={wide} height={260} />
    </section>
  );
}

function Ratings({ rows }: { rows: Rating[] }) {
  const low = Math.min(...rows.map((row) => row.elo - 2 * row.stderr));
  const high = Math.max(...rows.map((row) => row.elo + 2 * row.stderr));
  const at = (elo: number) => 4 + (192 * (elo - low)) / Math.max(1e-9, high - low);
  return (
    <div class="wide">
      <table class="list cards">
        <thead>
          <tr>
            <th class="right">#</th>
            <th>member</th>
            <th class="right">Elo ± 95 %</th>
            <th class="drawn">
              {num(low)} – {num(high)}
            </th>
            <th class="right">win rate</th>
            <th class="right" title="the lowest win rate against any member that it met: others may do still better against it">
              worst win rate
            </th>
            <th>against</th>
            <th class="right">games</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row, place) => (
            <tr key={row.name}>
              <td class="right">{place + 1}</td>
              <td>{row.name}</td>
              <td class="right" data-name="Elo">
                {row.elo.toFixed(0)} ± {(1.96 * row.stderr).toFixed(0)}
              </td>
              <td class="drawn">
                <svg class="whisker" width="200" height="14" aria-hidden="true">
                  <line x1={at(row.elo - 1.96 * row.stderr)} x2={at(row.elo + 1.96 * row.stderr)} y1="7" y2="7" />
                  <circle cx={at(row.elo)} cy="7" r="3.5" />
                </svg>
              </td>
              <td class="right" data-name="win rate">
                {percent(row.rate)}
              </td>
              <td class="right" data-name="worst">
                {percent(row.worst)}
              </td>
              <td data-name="against">{row.nemesis}</td>
              <td class="right" data-name="games">
                {row.games}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Exploits({ rows }: { rows: Record<string, unknown>[] }) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => key !== "mixtures");
  return (
    <section>
      <h2>Learned best responses</h2>
      <div class="wide">
        <table class="list">
          <thead>
            <tr>
              {keys.map((key) => (
                <th>{key}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr>
                {keys.map((key) => (
                  <td>{typeof row[key] === "number" ? num(row[key] as number) : JSON.stringify(row[key])}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
