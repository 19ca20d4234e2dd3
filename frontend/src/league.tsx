// Who beats whom as a graph, and who was trained when.

import { useEffect, useRef, useState } from "preact/hooks";
import { duration, num, percent } from "./format";
import type { Stretch } from "./types";

export function Responses({ names, edges }: { names: string[]; edges: [number, number][] }) {
  const size = 480;
  const radius = size / 2 - 96;
  const at = (number: number) => {
    const angle = (2 * Math.PI * number) / names.length;
    return [size / 2 + radius * Math.sin(angle), size / 2 - radius * Math.cos(angle)];
  };
  const answered = new Map<number, number>();
  edges.forEach(([, best]) => answered.set(best, (answered.get(best) ?? 0) + 1));
  return (
    <svg class="graph" viewBox={`0 0 ${size} ${size}`} role="img" aria-label={edges.map(([one, best]) => `${names[best]} does best against ${names[one]}`).join("; ")}>
      <defs>
        <marker id="tip" viewBox="0 0 8 8" refX="13" refY="4" markerWidth="7" markerHeight="7" orient="auto">
          <path d="M0 0L8 4L0 8z" />
        </marker>
      </defs>
      {edges.map(([one, best]) => {
        const [x1, y1] = at(one);
        const [x2, y2] = at(best);
        return (
          <line x1={x1} y1={y1} x2={x2} y2={y2} marker-end="url(#tip)">
            <title>
              {names[best]} does best against {names[one]}
            </title>
          </line>
        );
      })}
      {names.map((name, number) => {
        const [x, y] = at(number);
        const angle = (360 * number) / names.length;
        const left = angle > 180;
        return (
          <g transform={`translate(${x} ${y})`}>
            <circle r={3 + Math.min(5, answered.get(number) ?? 0)} class={answered.has(number) ? "strong" : ""}>
              <title>
                {name}: the best answer to {answered.get(number) ?? 0}
              </title>
            </circle>
            {names.length <= 48 && (
              <text transform={`rotate(${angle + (left ? 90 : -90)}) translate(${left ? -10 : 10} 0)`} text-anchor={left ? "end" : "start"} dominant-baseline="central">
                {name.length > 12 ? `${name.slice(0, 4)}…${name.slice(-7)}` : name}
              </text>
            )}
          </g>
        );
      })}
    </svg>
  );
}

// A row for each learner, a bar for each stretch of its training, from left to right as it was done.
export function Timeline({ stretches }: { stretches: Stretch[] }) {
  const learners = [...new Set(stretches.map((one) => one.learner))];
  const timed = stretches.every((one) => one.from !== null && one.seconds !== null);
  const end = timed ? Math.max(...stretches.map((one) => one.from! + one.seconds!)) : stretches.length;
  const margin = 12 + 6.2 * Math.max(...learners.map((name) => Math.min(20, name.length)));
  const place = useRef<HTMLDivElement>(null);
  const width = useWidth(place, 900);
  const x = (value: number) => margin + ((width - margin - 8) * value) / Math.max(1e-9, end);
  return (
    <div class="wide" ref={place}>
      <svg class="timeline" viewBox={`0 0 ${width} ${learners.length * 22 + 22}`} width={width} height={learners.length * 22 + 22} role="img" aria-label={`${stretches.length} stretches of training of ${learners.length} learners`}>
        {learners.map((name, row) => (
          <>
            <text x={margin - 6} y={row * 22 + 11} text-anchor="end" dominant-baseline="central">
              {name.slice(0, 20)}
            </text>
            <line x1={margin} x2={width - 8} y1={row * 22 + 11} y2={row * 22 + 11} />
          </>
        ))}
        {stretches.map((one, number) => {
          const row = learners.indexOf(one.learner);
          const from = timed ? one.from! : number;
          const long = timed ? one.seconds! : 1;
          return (
            <rect class={`hue${row % 7}`} x={x(from)} y={row * 22 + 4} width={Math.max(2, x(from + long) - x(from) - 1)} height="14" rx="2">
              <title>
                {`${one.member}${one.start ? `, from ${one.start}` : ""}; ${duration(one.seconds)}; return ${num(one.return)}; met ${Object.entries(one.opponents).map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`}
              </title>
            </rect>
          );
        })}
        <text x={margin} y={learners.length * 22 + 14}>
          0
        </text>
        <text x={width - 8} y={learners.length * 22 + 14} text-anchor="end">
          {timed ? duration(end) : `${stretches.length} tasks`}
        </text>
      </svg>
    </div>
  );
}

// The width of an element in pixels, at most `most`: what is drawn in it keeps the size of its letters.
function useWidth(place: { current: HTMLElement | null }, most: number): number {
  const [width, setWidth] = useState(most);
  useEffect(() => {
    const watch = new ResizeObserver(([seen]) => seen.contentRect.width && setWidth(Math.min(most, Math.floor(seen.contentRect.width))));
    watch.observe(place.current!);
    return () => watch.disconnect();
  }, []);
  return width;
}
