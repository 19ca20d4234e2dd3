// Curves on a canvas, by uPlot: hover says the values, a drag zooms, arrows move, a double click or 0 shows all again.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { DASHES, faint, hue, ink } from "./colours";
import { savePicture, saveTable } from "./export";
import { num } from "./format";
import type { Num } from "./types";

export interface Line {
  label: string;
  colour: number;
  dash: number;
  x: number[];
  y: Num[];
  low?: Num[];
  high?: Num[];
  raw?: { x: number[]; y: Num[] };
  dots?: boolean;
}

export type Range = [number, number] | null;

interface Props {
  title: string;
  lines: Line[];
  axis: string;
  axisName: string; // what x counts
  unit: string; // of y
  range: Range;
  onRange: (range: Range) => void;
  log?: boolean;
  height?: number;
}

interface Drawn {
  data: uPlot.AlignedData;
  series: uPlot.Series[];
  bands: uPlot.Band[];
  shown: number[]; // by line, its series
}

function drawn(lines: Line[]): Drawn {
  const tables: uPlot.AlignedData[] = [];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const shown: number[] = [];
  const add = (x: number[], y: Num[], own: uPlot.Series) => {
    tables.push([x, y] as uPlot.AlignedData);
    series.push({ spanGaps: true, points: { show: false }, ...own });
    return series.length - 1;
  };
  for (const line of lines) {
    const stroke = () => hue(line.colour);
    const dash = DASHES[line.dash % DASHES.length];
    if (line.raw) add(line.raw.x, line.raw.y, { stroke: () => faint(hue(line.colour), 0.28), width: 1 });
    if (line.low && line.high) {
      const high = add(line.x, line.high, { width: 0 });
      const low = add(line.x, line.low, { width: 0 });
      bands.push({ series: [high, low], fill: () => faint(hue(line.colour), 0.18) } as unknown as uPlot.Band);
    }
    const few = line.dots || line.x.length < 2;
    shown.push(add(line.x, line.y, { stroke, dash, width: 1.6, points: { show: few, size: 6, stroke, fill: stroke } }));
  }
  const data = tables.length ? uPlot.join(tables) : ([[]] as unknown as uPlot.AlignedData);
  return { data, series, bands, shown };
}

const FONT = "11px system-ui, sans-serif";
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9];

function axes(axis: string, axisName: string, unit: string): uPlot.Axis[] {
  const common: uPlot.Axis = {
    stroke: () => ink("quiet"),
    grid: { stroke: () => ink("line"), width: 1 },
    ticks: { stroke: () => ink("line"), width: 1, size: 4 },
    font: FONT,
    labelFont: FONT,
    labelSize: 16,
  };
  const clock = axis === "seconds";
  const x = (_: uPlot, splits: number[]) =>
    splits.map((value) => (clock ? hours(value) : value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : num(value)));
  return [
    // Ticks of counters are whole numbers; their text is never wider than the space of a tick.
    { ...common, size: 24, values: x, space: 62, label: clock ? `${axisName} (s, min or h)` : axisName, ...(clock ? {} : { incrs: WHOLE }) },
    { ...common, size: widest, values: (_, splits) => tickTexts(splits), ...(unit ? { label: unit } : {}) },
  ];
}

// From 0 to 1 where every value is 0, which uPlot would draw from 0 to 100: beyond the values that a share can have.
function verticalRange(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

// As wide as the widest of the ticks' texts, so that none is clipped.
function widest(_: uPlot, values: string[] | null): number {
  return 14 + 6.6 * Math.max(3, ...(values ?? []).map((text) => text?.length ?? 0));
}

// As few digits as tell the ticks apart: 1.595, 1.600 and not twice 1.6.
function tickTexts(splits: (number | null)[]): string[] {
  const values = new Set(splits.filter((value) => value !== null)).size;
  for (let digits = 3; ; digits++) {
    const texts = splits.map((value) => (value === null ? "" : num(value, digits)));
    if (digits === 6 || new Set(texts.filter(Boolean)).size >= values) return texts;
  }
}

function hours(seconds: number): string {
  if (seconds < 180) return `${num(seconds)} s`;
  return seconds < 10800 ? `${num(seconds / 60)} min` : `${Number((seconds / 3600).toFixed(1))} h`;
}

export function Chart({ title, lines, axis, axisName, unit, range, onRange, log, height = 206 }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const legend = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef({ onRange, lines, range });
  latest.current = { onRange, lines, range };
  const shape = JSON.stringify([lines.map((l) => [l.label, l.colour, l.dash, !!l.raw, !!l.low, l.dots, l.x.length < 2]), axis, axisName, unit, log]);

  useEffect(() => {
    const element = place.current!;
    const { data, series, bands, shown } = drawn(latest.current.lines);
    const told = (at: number | null | undefined) => tell(legend.current, latest.current.lines, plot.current, shown, at);
    const options: uPlot.Options = {
      width: element.clientWidth || 300,
      height,
      series,
      bands,
      scales: {
        x: { time: false, range: (_, low, high) => latest.current.range ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: log ? { distr: 3 } : { range: verticalRange },
      },
      axes: axes(axis, axisName, unit),
      legend: { show: false },
      padding: [10, 26, 0, 2],
      cursor: { sync: { key: "curves", scales: ["x", null] }, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => (latest.current.onRange(null), null) } },
      hooks: {
        setCursor: [(u) => told(u.cursor.idx)],
        setSelect: [
          (u) => {
            if (u.select.width > 4) {
              latest.current.onRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            }
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
    plot.current = new uPlot(options, data, element);
    told(null);
    const sized = new ResizeObserver(() => {
      const width = element.clientWidth;
      if (width && width !== plot.current?.width) plot.current?.setSize({ width, height });
    });
    sized.observe(element);
    const themed = () => plot.current?.redraw(false);
    window.addEventListener("themed", themed);
    return () => {
      window.removeEventListener("themed", themed);
      sized.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, height]);

  useEffect(() => {
    const { data, shown } = drawn(lines);
    plot.current?.setData(data, true);
    tell(legend.current, lines, plot.current, shown, null);
  }, [lines, range]);

  const keys = (event: KeyboardEvent) => {
    const u = plot.current;
    if (!u || !u.data[0].length) return;
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step) {
      const at = Math.max(0, Math.min(u.data[0].length - 1, (u.cursor.idx ?? (step > 0 ? -1 : u.data[0].length)) + step));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.height / 3 });
      event.preventDefault();
    } else if (event.key === "+" || event.key === "-" || event.key === "0") {
      const low = u.scales.x.min ?? 0;
      const high = u.scales.x.max ?? 1;
      const quarter = (high - low) / 4;
      onRange(event.key === "0" ? null : event.key === "+" ? [low + quarter, high - quarter] : [low - quarter, high + quarter]);
    }
  };

  return (
    <figure class="chart">
      <figcaption>
        {title}
        <span class="exports">
          <button class="plain" aria-label={`save the chart ${title} as a picture`} onClick={() => plot.current && savePicture(title, lines, plot.current.ctx.canvas)}>
            PNG
          </button>
          <button class="plain" aria-label={`save the values of ${title} as a table`} onClick={() => saveTable(title, axisName, lines)}>
            CSV
          </button>
        </span>
      </figcaption>
      <div ref={place} class="plot" tabIndex={0} role="img" aria-label={summary(`${title}${unit ? `, ${unit}` : ""}, over ${axisName}`, lines)} onKeyDown={keys} />
      <div ref={legend} class="legend">
        {lines.map((line) => (
          <span key={line.label}>
            <Key colour={line.colour} dash={line.dash} />
            {line.label} <b />
          </span>
        ))}
      </div>
    </figure>
  );
}

export function Key({ colour, dash }: { colour: number; dash: number }) {
  return (
    <svg class={`key hue${colour % 7}`} width="18" height="8" aria-hidden="true">
      <line x1="0" x2="18" y1="4" y2="4" stroke="currentColor" stroke-width="2" stroke-dasharray={DASHES[dash % DASHES.length].join(" ")} />
    </svg>
  );
}

// The values under the cursor, or the last ones, written into the legend without drawing the page anew.
function tell(legend: HTMLElement | null, lines: Line[], u: uPlot | null, shown: number[], at: number | null | undefined): void {
  if (!legend) return;
  const marks = legend.querySelectorAll("b");
  lines.forEach((line, number) => {
    const values = at == null ? line.y : ((u?.data[shown[number]] ?? []) as Num[]);
    const value = at == null ? lastOf(values) : near(values, at);
    if (marks[number]) marks[number].textContent = num(value);
  });
}

function lastOf(values: ArrayLike<Num>): Num {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] != null) return values[at];
  return null;
}

function near(values: ArrayLike<Num>, at: number): Num {
  for (let away = 0; away < 40; away++) {
    if (values[at - away] != null) return values[at - away];
    if (values[at + away] != null) return values[at + away];
  }
  return null;
}

function summary(title: string, lines: Line[]): string {
  const parts = lines.map((line) => `${line.label}: from ${num(line.y[0] ?? null)} to ${num(lastOf(line.y))}`);
  return `${title}. ${parts.join("; ")}`;
}
