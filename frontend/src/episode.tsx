// One episode: its tree, and the words along the line to the node that is looked at.

import { useEffect, useMemo, useState } from "preact/hooks";
import { runPath, url, useAnswer } from "./api";
import { afterSteps, evalTitle } from "./format";
import { Failed } from "./parts";
import { amend, type Route, to } from "./route";
import { Tree } from "./tree";
import type { EpisodeTree, Joint } from "./types";
import { Words } from "./words";

export type Colouring = "" | "logprob" | "advantage";

interface Props {
  run: string;
  step: number;
  episode: number;
  route: Route;
}

export function Episode({ run, step, episode, route }: Props) {
  const evaluation = route.query.get("eval");
  const asked = route.query.get("node");
  const address = (rest: string) => url(runPath(run, `/episodes/${step}/${episode}${rest}`), { eval: evaluation });
  const opened = useMemo(() => opening(run, step, episode, evaluation, asked), [run, step, episode]);
  const { data: tree, error } = useAnswer<EpisodeTree>(opened);
  const chosen = useMemo(() => (tree ? (asked !== null ? Number(asked) : (tree.at ?? -1)) : null), [tree, asked]);
  const words = useAnswer<{ line: Joint[] }>(chosen === null || chosen < 0 || chosen === tree?.at ? null : address(`/words/${chosen}`));
  const line = chosen === tree?.at ? tree?.line : words.data?.line;
  const colouring = (route.query.get("tokens") ?? "") as Colouring;
  if (error) return <Failed error={error} />;
  if (!tree) return <p class="hint">reading…</p>;
  return (
    <article>
      <div class="bar">
        <Beside {...{ run, step, episode, route }} />
        <b>{evaluation ? `${evalTitle(evaluation)} ${afterSteps(step)}, instance ${episode}` : `step ${step}, episode ${episode}`}</b>
        <span>
          {tree.env}, {evaluation ? "seed" : "instance"} {tree.seed}
        </span>
        <Earlier {...{ run, step, episode, route }} />
        {Object.entries(tree.seats).map(([seat, who]) => (
          <span class="chip">
            {seat}: {who}
          </span>
        ))}
      </div>
      {tree.error !== null && <pre class="text error">{tree.error}</pre>}
      {tree.traceback !== null && (
        <details>
          <summary>Traceback</summary>
          <pre class="text">{tree.traceback}</pre>
        </details>
      )}
      {tree.nodes.length > 0 && chosen !== null && <Tree tree={tree} chosen={chosen} choose={(node) => amend(route, { node: String(node) })} />}
      <div class="bar" role="group" aria-label="how words are shown">
        <label>
          tokens coloured by{" "}
          <select value={colouring} onChange={(event) => amend(route, { tokens: event.currentTarget.value })}>
            <option value="">nothing (plain text)</option>
            <option value="logprob">log-probability</option>
            <option value="advantage">advantage</option>
          </select>
        </label>
        {Object.keys(tree.seats).length > 1 && (
          <label>
            <input type="checkbox" checked={inColumns(route, tree)} onChange={(event) => amend(route, { columns: event.currentTarget.checked ? "1" : "0" })} /> a column for each seat
          </label>
        )}
        <label>
          <input type="checkbox" checked={route.query.get("text") === "1"} onChange={(event) => amend(route, { text: event.currentTarget.checked ? "1" : null })} /> text instead of pictures
        </label>
      </div>
      {words.error && <Failed error={words.error} />}
      {line && <Words line={line} tokens={(node) => address(`/tokens/${node}`)} tree={tree} colouring={colouring} columns={inColumns(route, tree)} plain={route.query.get("text") === "1"} />}
    </article>
  );
}

// Asks for the tree and, in the same answer, for the words that are shown first.
export function opening(run: string, step: number, episode: number, evaluation: string | null = null, node: string | null = null): string {
  return url(runPath(run, `/episodes/${step}/${episode}`), { line: node ?? "played", eval: evaluation });
}

// The same held-out instance in the evaluation that this one was compared with.
function Earlier({ run, step, episode, route }: Props) {
  const from = route.query.get("from");
  const evaluation = route.query.get("eval");
  if (from === null || !evaluation) return null;
  return <a href={to(["run", run, "episodes", from, episode], { eval: evaluation, from: String(step) })}>the same instance {afterSteps(Number(from))}</a>;
}

// Debates read best as columns.
function inColumns(route: Route, tree: EpisodeTree): boolean {
  const asked = route.query.get("columns");
  const seats = Object.keys(tree.seats);
  return asked !== null ? asked === "1" : seats.includes("pro") && seats.includes("con");
}

// Back to the list, and to the episodes before and after this one in it.
function Beside({ run, step, episode, route }: Props) {
  const [list, setList] = useState<[number, number][]>([]);
  useEffect(() => setList(JSON.parse(sessionStorage.getItem("episodes") ?? "[]")), []);
  const at = list.findIndex(([s, e]) => s === step && e === episode);
  const query = new URLSearchParams(route.query);
  query.delete("node");
  const address = (where: [number, number]) => to(["run", run, "episodes", ...where], query);
  return (
    <span class="beside">
      {query.has("eval") ? <a href={to(["run", run, "agents"])}>← evaluations</a> : <a href={to(["run", run, "episodes"], new URLSearchParams(route.query.get("list") ?? ""))}>← list</a>}
      {at > 0 && (
        <a data-before href={address(list[at - 1])} aria-label="the episode before">
          ‹
        </a>
      )}
      {at >= 0 && at < list.length - 1 && (
        <a data-next href={address(list[at + 1])} aria-label="the next episode">
          ›
        </a>
      )}
    </span>
  );
}
