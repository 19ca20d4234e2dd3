// An episode's tree: a column for each joint step, siblings under each other, what was played on in strong lines.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { diverging } from "./colours";
import { signed } from "./format";
import type { EpisodeTree, TreeNode } from "./types";

const WIDE = 156;
const LINE = 14; // height of a seat's line
const GAP = 34;
const LINES = 6; // seats that a box names
const MOST = 500; // nodes that are drawn; of larger trees the lines played on, and the siblings of what is looked at

interface Placed {
  node: TreeNode;
  x: number;
  y: number;
}

export function Tree({ tree, chosen, choose }: { tree: EpisodeTree; chosen: number; choose: (node: number) => void }) {
  const place = useRef<HTMLDivElement>(null);
  const nodes = useMemo(() => shown(tree.nodes, chosen), [tree, tree.nodes.length > MOST ? chosen : 0]);
  const placed = useMemo(() => laid(nodes, boxHeight(nodes)), [nodes]);
  const largest = useMemo(() => Math.max(1e-9, ...tree.nodes.flatMap((node) => Object.values(node.seats).map((seat) => Math.abs(seat.advantage ?? 0)))), [tree]);
  const line = useMemo(() => lineTo(tree.nodes, chosen), [tree, chosen]);
  const all = [...placed.values()];
  const high = boxHeight(nodes);
  const several = nodes.some((node) => acting(node).length > 1);
  const width = Math.max(...all.map((one) => one.x)) + WIDE + 8;
  const height = Math.max(...all.map((one) => one.y)) + high + 8;
  useEffect(() => {
    const at = placed.get(chosen);
    const box = place.current;
    if (!at || !box) return;
    if (at.x < box.scrollLeft || at.x + WIDE > box.scrollLeft + box.clientWidth) box.scrollLeft = at.x - box.clientWidth / 2;
    if (at.y < box.scrollTop || at.y + high > box.scrollTop + box.clientHeight) box.scrollTop = at.y - box.clientHeight / 2;
  }, [chosen, placed]);
  const keys = (event: KeyboardEvent) => {
    const next = neighbour(tree.nodes, chosen, event.key);
    if (next !== undefined) {
      choose(next);
      event.preventDefault();
    }
  };
  return (
    <>
      <div ref={place} class="tree" tabIndex={0} role="application" aria-label={`tree of ${tree.nodes.length} joint steps; arrows move`} onKeyDown={keys}>
        <svg width={width} height={height}>
          {all.map(({ node, x, y }) => {
            const from = node.parent === null ? undefined : placed.get(node.parent);
            return from && <path class={line.has(node.id) ? "edge on" : node.chosen ? "edge kept" : "edge"} d={bend(from.x + WIDE, from.y + high / 2, x, y + high / 2)} />;
          })}
          {all.map((one) => (
            <Box key={one.node.id} {...one} high={high} largest={largest} selected={one.node.id === chosen} onLine={line.has(one.node.id)} choose={choose} />
          ))}
        </svg>
      </div>
      <p class="hint">
        {tree.nodes.length} joint steps{nodes.length < tree.nodes.length ? `, ${nodes.length} of them drawn` : ""}
        {tree.left_out ? `, ${tree.left_out} more in the file` : ""}. Thick: played on; ✓ success, ○ no success, ■ the end, ✕ invalid.
        <br />
        <b>r</b> the seat's reward of the step, its own and the team's; <b>A</b> its advantage. Colour: <span class="swatch plus" /> above and <span class="swatch minus" /> below its siblings
        {several ? "; where seats act at once, a line for each, and the colour is of the largest advantage" : ""}.
      </p>
    </>
  );
}

interface BoxProps extends Placed {
  high: number;
  largest: number;
  selected: boolean;
  onLine: boolean;
  choose: (node: number) => void;
}

// The seats that answered in this step; where none did, all that received something.
function acting(node: TreeNode): [string, TreeNode["seats"][string]][] {
  const seats = Object.entries(node.seats);
  const own = seats.filter(([, seat]) => seat.draw !== undefined);
  return own.length ? own : seats;
}

function boxHeight(nodes: TreeNode[]): number {
  return 6 + LINE * (1 + Math.min(LINES, Math.max(1, ...nodes.map((node) => acting(node).length))));
}

function Box({ node, x, y, high, largest, selected, onLine, choose }: BoxProps) {
  const seats = Object.entries(node.seats);
  const advantage = strongest(seats.map(([, seat]) => seat.advantage));
  const own = acting(node);
  const end = node.done ? (node.success === null ? "■" : node.success ? "✓" : "○") : "";
  const kind = ["node", node.chosen ? "kept" : "tried", selected ? "selected" : "", onLine ? "on" : ""].join(" ");
  return (
    <g class={kind} data-node={node.id} transform={`translate(${x} ${y})`} onClick={() => choose(node.id)}>
      <title>
        {`node ${node.id}: ${seats.map(([name, seat]) => `${name} reward ${signed(seat.reward)} advantage ${signed(seat.advantage)}${seat.invalid ? " invalid" : ""}`).join("; ")}${node.team ? `; team ${signed(node.team)}` : ""}`}
      </title>
      <rect class="ground" width={WIDE} height={high} rx="4" />
      <rect width={WIDE} height={high} rx="4" style={{ fill: advantage === null ? "transparent" : diverging(advantage / largest) }} />
      <text x="6" y="13" class="who">
        {own.length > 1 ? `${own.length} seats at once` : (own[0]?.[0] ?? "the env").slice(0, 18)} {end}
      </text>
      {own.slice(0, LINES).map(([name, seat], at) => (
        <text x="6" y={13 + LINE * (at + 1)} key={name}>
          {own.length > 1 ? `${name.slice(0, 7)} ` : ""}
          {`r ${signed((seat.reward ?? 0) + node.team)}`}
          {seat.advantage === undefined ? "" : ` · A ${signed(seat.advantage)}`}
          {seat.invalid ? " ✕" : ""}
        </text>
      ))}
    </g>
  );
}

function strongest(values: (number | undefined)[]): number | null {
  const known = values.filter((value): value is number => value !== undefined);
  return known.length ? known.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a)) : null;
}

function bend(x1: number, y1: number, x2: number, y2: number): string {
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

// Columns by depth; in each, the children of a parent together, in the order of the parents.
function laid(nodes: TreeNode[], high: number): Map<number, Placed> {
  const placed = new Map<number, Placed>();
  const columns = new Map<number, TreeNode[]>();
  nodes.forEach((node) => columns.set(node.depth, [...(columns.get(node.depth) ?? []), node]));
  for (const [depth, column] of [...columns].sort(([a], [b]) => a - b)) {
    const above = (node: TreeNode) => placed.get(node.parent ?? -1)?.y ?? 0;
    column.sort((a, b) => above(a) - above(b) || a.id - b.id);
    let y = 4;
    column.forEach((node, at) => {
      if (at && node.parent !== column[at - 1].parent) y += 8;
      placed.set(node.id, { node, x: 4 + depth * (WIDE + GAP), y });
      y += high + 4;
    });
  }
  return placed;
}

export function lineTo(nodes: TreeNode[], id: number): Set<number> {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const found = new Set<number>();
  for (let at = byId.get(id); at; at = at.parent === null ? undefined : byId.get(at.parent)) found.add(at.id);
  return found;
}

function shown(nodes: TreeNode[], chosen: number): TreeNode[] {
  if (nodes.length <= MOST) return nodes;
  const line = lineTo(nodes, chosen);
  const parents = new Set(nodes.filter((node) => line.has(node.id)).map((node) => node.parent));
  const wanted = nodes.filter((node) => parents.has(node.parent) || line.has(node.id));
  const rest = nodes.filter((node) => node.chosen && !parents.has(node.parent)).slice(0, MOST - wanted.length);
  const kept = new Set([...wanted, ...rest].map((node) => node.id));
  return nodes.filter((node) => kept.has(node.id));
}

function neighbour(nodes: TreeNode[], id: number, key: string): number | undefined {
  const node = nodes.find((one) => one.id === id);
  if (!node) return undefined;
  if (key === "ArrowLeft") return node.parent ?? undefined;
  if (key === "ArrowRight") {
    const children = nodes.filter((one) => one.parent === id);
    return (children.find((one) => one.chosen) ?? children[0])?.id;
  }
  const by = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
  const siblings = nodes.filter((one) => one.parent === node.parent);
  return by ? siblings[siblings.indexOf(node) + by]?.id : undefined;
}
