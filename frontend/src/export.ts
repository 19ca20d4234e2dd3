// A chart as a file: a picture with its title and legend, or a table of what is drawn.

import type { Line } from "./chart";
import { DASHES, hue, ink } from "./colours";

const FONT = "system-ui, sans-serif";
const SCALE = 2; // pixels of the picture for each of the page

// `plot` is the canvas with the axes and curves.
export function savePicture(title: string, lines: Line[], plot: HTMLCanvasElement): void {
  const width = plot.clientWidth;
  const canvas = document.createElement("canvas");
  const draw = canvas.getContext("2d")!;
  draw.font = `11px ${FONT}`;
  const places = legendPlaces(lines.map((line) => draw.measureText(line.label).width + 36), width);
  const bottom = 26 + plot.clientHeight;
  canvas.width = SCALE * width;
  canvas.height = SCALE * (bottom + 18 * ((places.at(-1)?.row ?? 0) + 1) + 6);
  draw.scale(SCALE, SCALE);
  draw.fillStyle = ink("ground");
  draw.fillRect(0, 0, canvas.width, canvas.height);
  draw.fillStyle = ink("text");
  draw.font = `600 13px ${FONT}`;
  draw.fillText(title, 8, 18, width - 16);
  draw.drawImage(plot, 0, 26, width, plot.clientHeight);
  draw.font = `11px ${FONT}`;
  lines.forEach((line, at) => {
    const { x, row } = places[at];
    const y = bottom + 18 * row + 10;
    draw.strokeStyle = hue(line.colour);
    draw.lineWidth = 2;
    draw.setLineDash(DASHES[line.dash % DASHES.length]);
    draw.beginPath();
    draw.moveTo(x, y);
    draw.lineTo(x + 18, y);
    draw.stroke();
    draw.fillText(line.label, x + 22, y + 4);
  });
  save(`${fileName(title)}.png`, canvas.toDataURL("image/png"));
}

// Where the entries of a legend stand, from left to right in as many rows as they need.
function legendPlaces(widths: number[], width: number): { x: number; row: number }[] {
  let x = 8;
  let row = 0;
  return widths.map((own) => {
    if (x > 8 && x + own > width) [x, row] = [8, row + 1];
    const place = { x, row };
    x += own;
    return place;
  });
}

// A row for each x, and columns for each curve: its values, those before smoothing, and its band.
export function saveTable(title: string, axisName: string, lines: Line[]): void {
  const columns: [string, Map<number, number | null>][] = lines.flatMap((line) => {
    const column = (name: string, x: number[], y?: (number | null)[]): [string, Map<number, number | null>][] => (y ? [[`${line.label}${name}`, new Map(x.map((at, number) => [at, y[number]]))]] : []);
    return [...column("", line.x, line.y), ...column(" (not smoothed)", line.raw?.x ?? [], line.raw?.y), ...column(" (low)", line.x, line.low), ...column(" (high)", line.x, line.high)];
  });
  const xs = [...new Set(columns.flatMap(([, values]) => [...values.keys()]))].sort((a, b) => a - b);
  const rows = [[axisName, ...columns.map(([name]) => name)], ...xs.map((x) => [x, ...columns.map(([, values]) => values.get(x) ?? "")])];
  const text = rows.map((row) => row.map(cell).join(",")).join("\r\n");
  save(`${fileName(title)}.csv`, `data:text/csv;charset=utf-8,${encodeURIComponent(`${text}\r\n`)}`);
}

// Quoted where CSV needs it; a text that a spreadsheet would run as a formula begins with an apostrophe.
function cell(value: string | number): string {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function fileName(title: string): string {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "chart";
}

function save(name: string, address: string): void {
  const link = document.createElement("a");
  link.download = name;
  link.href = address;
  link.click();
}
