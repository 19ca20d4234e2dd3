// Observations drawn as the env says that they may be: grids, boards, sudokus. All others stay text, in which only
// programs between ``` are set apart.

import { Fragment } from "preact";
import type { Form } from "./types";

export function Text({ text }: { text: string }) {
  const parts = text.split(/(```[^\n]*\n[\s\S]*?```)/g);
  if (parts.length === 1) return <div class="text">{text}</div>;
  return (
    <div class="text">
      {parts.map((part, at) => {
        const block = /^```([^\n]*)\n([\s\S]*?)```$/.exec(part);
        return block ? (
          <pre class="code" key={at} data-language={block[1]}>
            {block[2]}
          </pre>
        ) : (
          <Fragment key={at}>{part}</Fragment>
        );
      })}
    </div>
  );
}

export function Picture({ text, before, form }: { text: string; before: string; form: Form }) {
  const drawn = drawing(text, form);
  if (!drawn) return <Text text={text} />;
  return (
    <div class="picture">
      <Cells {...drawn.grid} before={changed(drawn.grid, before ? drawing(before, form) : null)} />
      {drawn.rest && <Text text={drawn.rest} />}
    </div>
  );
}

function drawing(text: string, form: Form): Drawing | null {
  if (form === "grid") return compactGrid(text) ?? drawnGrid(text);
  return form === "board" ? board(text) : form === "sudoku" ? sudoku(text) : null;
}

interface Grid {
  kind: "world" | "board" | "sudoku";
  rows: string[][]; // a sign for each cell, "" for a free one
  marks?: Set<string>; // cells of a plan, "row,column"
}

interface Drawing {
  grid: Grid;
  rest: string;
}

const LARGEST = 40;
const SIGNS: Record<string, string> = { "#": "a wall", "@": "the agent", "+": "the agent on the goal", G: "the goal", o: "a goal", x: "x" };

// "size 7 you r2 c0 goal r3 c2 walls r3 c1 r3 c6 plan r3 c0": what Plan-Path and Sokoban write by default.
function compactGrid(text: string): Drawing | null {
  const found = /^size (\d+) you r(\d+) c(\d+)((?: (?:box|goal|goals|walls|plan)(?: r\d+ c\d+)*)*)(.*)$/s.exec(text.trim());
  const size = found ? Number(found[1]) : 0;
  if (!found || size < 1 || size > LARGEST) return null;
  const rows = Array.from({ length: size }, () => Array.from({ length: size }, () => ""));
  const marks = new Set<string>();
  const put = (cells: string, sign: string) => {
    for (const [, row, column] of cells.matchAll(/r(\d+) c(\d+)/g)) {
      if (sign === "plan") marks.add(`${row},${column}`);
      else if (rows[Number(row)]?.[Number(column)] !== undefined) rows[Number(row)][Number(column)] += sign;
    }
  };
  for (const [, word, cells] of found[4].matchAll(/(box|goals?|walls|plan)((?: r\d+ c\d+)*)/g)) {
    put(cells, word === "walls" ? "#" : word === "box" ? "▣" : word === "plan" ? "plan" : "G");
  }
  put(`r${found[2]} c${found[3]}`, "@");
  return { grid: { kind: "world", rows, marks }, rest: found[5].trim() };
}

// A drawing between borders of #.
function drawnGrid(text: string): Drawing | null {
  const found = /(^|\n)(#{3,42})\n((?:#[^\n]*#\n)+)\2(?=\n|$)/.exec(text);
  if (!found) return null;
  const lines = found[3].trimEnd().split("\n");
  if (lines.some((line) => line.length !== found[2].length)) return null;
  const rows = lines.map((line) => [...line.slice(1, -1)].map((sign) => (sign === "." || sign === " " ? "" : sign)));
  return { grid: { kind: "world", rows }, rest: text.replace(found[0], "\n").trim() };
}

// "Board: x . . / . o . / . . .", rows from the top.
function board(text: string): Drawing | null {
  const found = /Board: ((?:[^\s/] )+[^\s/](?: \/ (?:[^\s/] )+[^\s/])+)/.exec(text);
  if (!found) return null;
  const rows = found[1].split(" / ").map((row) => row.split(" ").map((sign) => (sign === "." ? "" : sign)));
  const last = rows.at(-1)!;
  const extra = last.length - rows[0].length; // the first word of what follows
  if (extra > 0) last.splice(rows[0].length);
  if (rows.length > LARGEST || rows.some((row) => row.length !== rows[0].length)) return null;
  const rest = text.replace(/Board: [^A-Z]*/, "").trim();
  return { grid: { kind: "board", rows }, rest };
}

// Rows of digits and dots after their names: "r1 6 5 . | . . ." in lines, or one after another.
function sudoku(text: string): Drawing | null {
  const rows: string[][] = [];
  const row = /\br(\d+)((?:\s+\|?\s*[\d.](?![\w.]))+)/g;
  let end = 0;
  for (const found of text.matchAll(row)) {
    const cells = found[2].replaceAll("|", " ").trim().split(/\s+/);
    if (Number(found[1]) !== rows.length + 1 || (rows.length && cells.length !== rows[0].length)) break;
    rows.push(cells.map((cell) => (cell === "." ? "" : cell)));
    end = found.index + found[0].length;
  }
  if (![4, 6, 9].includes(rows.length) || rows[0].length !== rows.length) return null;
  return { grid: { kind: "sudoku", rows }, rest: text.slice(end).trim() };
}

// The cells that differ from those of the picture before.
function changed(grid: Grid, old: Drawing | null): Set<string> {
  const cells = new Set<string>();
  if (!old || old.grid.rows.length !== grid.rows.length || grid.kind === "world") return cells;
  grid.rows.forEach((row, r) => row.forEach((sign, c) => sign !== old.grid.rows[r][c] && cells.add(`${r},${c}`)));
  return cells;
}

function Cells({ kind, rows, marks, before }: Grid & { before: Set<string> }) {
  const size = kind === "world" ? 22 : 26;
  const label = rows.map((row) => row.map((sign) => sign || ".").join(" ")).join(" / ");
  const box = rows.length === 9 ? [3, 3] : rows.length === 6 ? [2, 3] : [2, 2];
  return (
    <svg class={`cells ${kind}`} width={rows[0].length * size + 2} height={rows.length * size + 2} role="img" aria-label={label}>
      <g transform="translate(1 1)">
        {rows.map((row, r) =>
          row.map((sign, c) => (
            <g transform={`translate(${c * size} ${r * size})`}>
              <rect width={size} height={size} class={sign.includes("#") ? "wall" : before.has(`${r},${c}`) ? "new" : ""} />
              {marks?.has(`${r},${c}`) && <rect class="plan" x="2.5" y="2.5" width={size - 5} height={size - 5} rx="3" />}
              {sign && !sign.includes("#") && <Sign sign={sign} size={size} />}
            </g>
          )),
        )}
        {kind === "sudoku" && rows.map((_, at) => (
          <Fragment key={at}>
            {at % box[0] === 0 && <line class="thick" x1="0" x2={rows.length * size} y1={at * size} y2={at * size} />}
            {at % box[1] === 0 && <line class="thick" y1="0" y2={rows.length * size} x1={at * size} x2={at * size} />}
          </Fragment>
        ))}
        <rect class="frame" width={rows[0].length * size} height={rows.length * size} />
      </g>
    </svg>
  );
}

function Sign({ sign, size }: { sign: string; size: number }) {
  const middle = size / 2;
  const kind = sign.includes("@") || sign.includes("+") ? "agent" : sign.includes("G") || sign === "o" ? "goal" : sign.includes("▣") ? "box" : "";
  const text = kind === "agent" && (sign.includes("G") || sign.includes("+")) ? "◉" : sign.replace("@", "●").replace("G", sign.length > 1 ? "" : "★") || "●";
  return (
    <text class={kind} x={middle} y={middle} dominant-baseline="central" text-anchor="middle">
      <title>{[...sign].map((one) => SIGNS[one] ?? one).join(", ")}</title>
      {text}
    </text>
  );
}
