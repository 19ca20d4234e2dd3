// Tables of numbers as colours: payoffs between members, and mixtures over time.

import { useMemo, useState } from "preact/hooks";
import { diverging, strength } from "./colours";
import { num, percent, signed } from "./format";
import type { Payoffs, PopulationData } from "./types";

const NAMED = 24;
const WRITTEN = 14;

export function Heat({ payoffs }: { payoffs: Payoffs }) {
  const [over, setOver] = useState("");
  const { rows, columns, mean, games } = payoffs;
  const largest = useMemo(() => Math.max(0, ...mean.flat().map((value) => Math.abs(value ?? 0))), [payoffs]);
  const known = mean.flat().some((value) => value !== null);
  const size = Math.max(8, Math.min(34, Math.floor(460 / Math.max(rows.length, columns.length))));
  const named = Math.max(rows.length, columns.length) <= NAMED;
  const margin = named ? 8 + 6.2 * Math.max(...rows.map((name) => Math.min(name.length, 18))) : 4;
  const top = named ? 8 + 6.2 * Math.max(...columns.map((name) => Math.min(name.length, 18))) : 4;
  const say = (r: number, c: number) => `${rows[r]} earns ${mean[r][c] === null ? "nothing known" : signed(mean[r][c], 3)} from ${columns[c]}${games[r][c] ? `, ${games[r][c]} games` : ""}`;
  return (
    <>
      <div class="wide">
        <svg class="heat" width={margin + columns.length * size + 2} height={top + rows.length * size + 2} role="img" aria-label={`payoffs of ${rows.length} members against ${columns.length}`} onMouseLeave={() => setOver("")}>
          {named && rows.map((name, r) => (
            <text x={margin - 5} y={top + (r + 0.5) * size} text-anchor="end" dominant-baseline="central">
              {short(name)}
            </text>
          ))}
          {named && columns.map((name, c) => (
            <text transform={`translate(${margin + (c + 0.5) * size} ${top - 5}) rotate(-90)`} dominant-baseline="central">
              {short(name)}
            </text>
          ))}
          {mean.map((line, r) =>
            line.map((value, c) => (
              <g key={`${r},${c}`} onMouseEnter={() => setOver(say(r, c))}>
                <title>{say(r, c)}</title>
                <rect x={margin + c * size} y={top + r * size} width={size - 1} height={size - 1} class={value === null ? "unknown" : ""} style={value === null ? {} : { fill: diverging(largest ? value / largest : 0) }} />
                {value !== null && Math.max(rows.length, columns.length) <= WRITTEN && size >= 30 && (
                  <text class="value" x={margin + (c + 0.5) * size} y={top + (r + 0.5) * size} text-anchor="middle" dominant-baseline="central">
                    {(Math.abs(value) < 0.005 ? 0 : value).toFixed(2).replace("0.", ".").replace("-", "−")}
                  </text>
                )}
              </g>
            )),
          )}
        </svg>
      </div>
      <p class="hint">
        {over || (
          <>
            {largest > 0 && (
              <>
                What the row's member ({payoffs.seats[0]}) earns from the column's: <span class="swatch minus" /> −{num(largest)} to <span class="swatch plus" /> +{num(largest)}; grey: never met.
              </>
            )}
            {largest === 0 && (known ? "Every known payoff is 0." : "No member has met another yet.")}
            {payoffs.of[0] > rows.length ? ` The newest ${rows.length} of ${payoffs.of[0]}.` : ""}
          </>
        )}
      </p>
    </>
  );
}

function short(name: string): string {
  return name.length > 18 ? `${name.slice(0, 8)}…${name.slice(-9)}` : name;
}

export function Mixtures({ mixture }: { mixture: PopulationData["mixtures"][number] }) {
  const { names, shares } = mixture;
  const wide = Math.max(4, Math.min(28, Math.floor(420 / Math.max(1, shares.length))));
  const high = Math.max(6, Math.min(18, Math.floor(360 / Math.max(1, names.length))));
  const named = high >= 11;
  const margin = named ? 8 + 6.2 * Math.max(1, ...names.map((name) => Math.min(name.length, 18))) : 4;
  return (
    <>
      <div class="wide">
        <svg class="heat" width={margin + shares.length * wide + 2} height={names.length * high + 20} role="img" aria-label={`how probable ${names.length} members were in ${shares.length} mixtures`}>
          {named && names.map((name, r) => (
            <text x={margin - 5} y={(r + 0.5) * high} text-anchor="end" dominant-baseline="central">
              {short(name)}
            </text>
          ))}
          {shares.map((row, c) =>
            row.map((share, r) => (
              <rect x={margin + c * wide} y={r * high} width={wide - (wide > 6 ? 1 : 0)} height={high - 1} class="ground" style={share ? { fill: strength(0.08 + 0.92 * share) } : {}}>
                <title>
                  {names[r]}: {percent(share)} in mixture {c + 1}
                </title>
              </rect>
            )),
          )}
          <text x={margin} y={names.length * high + 13}>
            1
          </text>
          {shares.length > 1 && (
            <text x={margin + shares.length * wide} y={names.length * high + 13} text-anchor="end">
              {shares.length}
            </text>
          )}
        </svg>
      </div>
    </>
  );
}
