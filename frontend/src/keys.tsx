// What keys do, and the page that says so.

import { useEffect, useRef } from "preact/hooks";
import { go, type Route, to } from "./route";

const TABS: Record<string, string | null> = { c: "curves", e: "episodes", v: "replays", p: "population", a: "agents", s: "system", w: "alarms" };

const SAID: [string, string][] = [
  ["/", "search on this page"],
  ["j, k", "next, previous row"],
  ["Enter", "open the row"],
  ["g then r", "all runs"],
  ["g then c, e, v, p, a, s, w", "curves, episodes, replays (views), population, agents, system, alarms (warnings)"],
  ["[ , ]", "previous, next episode"],
  ["arrows", "in a tree: parent, child, siblings; in a chart: along the curves"],
  ["+, -, 0", "in a chart: closer, farther, all"],
  ["?", "this list"],
];

export function useKeys(route: Route, help: () => void): void {
  const waiting = useRef(false);
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || inField(event.target)) return;
      const [page, name] = route.parts;
      if (waiting.current) {
        waiting.current = false;
        if (event.key === "r") go("#/");
        else if (event.key in TABS && page === "run") go(to(["run", name, ...(TABS[event.key] ? [TABS[event.key]!] : [])]));
        return;
      }
      if (event.key === "g") waiting.current = true;
      else if (event.key === "?") help();
      else if (event.key === "/") focus("[data-search]");
      else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
      else if (event.key === "[" || event.key === "]") document.querySelector<HTMLElement>(event.key === "]" ? "[data-next]" : "[data-before]")?.click();
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, [route]);
}

function inField(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.matches("input:not([type=checkbox]), textarea, select") || target.isContentEditable);
}

function focus(selector: string): void {
  document.querySelector<HTMLElement>(selector)?.focus();
}

function move(by: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("a.row")];
  const at = rows.indexOf(document.activeElement as HTMLElement);
  rows[Math.max(0, Math.min(rows.length - 1, at + by))]?.focus();
}

export function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={close} onClick={(event) => event.target === dialog.current && close()}>
      <h2>Keys</h2>
      <dl class="keys">
        {SAID.map(([key, what]) => (
          <>
            <dt>{key}</dt>
            <dd>{what}</dd>
          </>
        ))}
      </dl>
      <form method="dialog">
        <button class="main">close</button>
      </form>
    </dialog>
  );
}
