// Games that were recorded in evaluations: a frame for each joint step, and a player for them.

import { useEffect, useState } from "preact/hooks";
import { runPath, url, useAnswer } from "./api";
import { afterSteps, evalTitle, num, signed } from "./format";
import { Failed, Outcome } from "./parts";
import { amend, type Route } from "./route";
import type { ReplayFile, ReplayFrame } from "./types";

interface List {
  evals: { name: string; steps: number[] }[];
}

export function Replays({ run, route, tick }: { run: string; route: Route; tick: number }) {
  const { data: list, error } = useAnswer<List>(url(runPath(run, "/replays")), tick);
  if (error) return <Failed error={error} />;
  if (!list) return <p class="hint">reading…</p>;
  if (!list.evals.length) return <p class="hint">No game has been recorded yet. Evaluations record theirs as they are played (evals.NAME.replays in the config).</p>;
  const chosen = list.evals.find((one) => one.name === route.query.get("eval")) ?? list.evals[0];
  const asked = route.query.get("step");
  const step = asked !== null && chosen.steps.includes(Number(asked)) ? Number(asked) : chosen.steps.at(-1)!;
  return (
    <>
      <div class="bar">
        <label>
          evaluation{" "}
          <select value={chosen.name} onChange={(event) => amend(route, { eval: event.currentTarget.value, step: null, game: null })}>
            {list.evals.map((one) => (
              <option value={one.name}>{evalTitle(one.name)}</option>
            ))}
          </select>
        </label>
        <label>
          played{" "}
          <select value={step} onChange={(event) => amend(route, { step: event.currentTarget.value })}>
            {chosen.steps.map((one) => (
              <option value={one}>{afterSteps(one)}</option>
            ))}
          </select>
        </label>
      </div>
      <Games run={run} name={chosen.name} step={step} route={route} />
    </>
  );
}

function Games({ run, name, step, route }: { run: string; name: string; step: number; route: Route }) {
  const { data, error } = useAnswer<ReplayFile>(url(runPath(run, `/replays/${encodeURIComponent(name)}`), { step }));
  if (error && !data) return <Failed error={error} />;
  if (!data) return <p class="hint">reading…</p>;
  const game = Math.min(Math.max(Number(route.query.get("game") ?? 0) || 0, 0), data.episodes.length - 1);
  return (
    <>
      <div class="bar" role="group" aria-label="games">
        {data.episodes.map((one, at) => (
          <button class={at === game ? "chip best" : "chip"} aria-pressed={at === game} onClick={() => amend(route, { game: String(at) })}>
            game {at + 1}, seed {one.seed}
          </button>
        ))}
      </div>
      <Player key={`${name}/${step}/${game}`} file={data} game={game} />
    </>
  );
}

const SMALL = 128; // pixels of width up to which a picture is enlarged with its pixels sharp
const SPEEDS = [1, 2, 4, 8, 16, 32]; // frames per second

function Player({ file, game }: { file: ReplayFile; game: number }) {
  const { frames, end, success } = file.episodes[game];
  const [at, setAt] = useState(0);
  const [plays, setPlays] = useState(false);
  const [speed, setSpeed] = useState(4);
  const [small, setSmall] = useState(false);
  const last = frames.length - 1;
  useEffect(() => {
    if (!plays) return;
    const timer = setInterval(() => setAt((old) => Math.min(old + 1, last)), 1000 / speed);
    return () => clearInterval(timer);
  }, [plays, speed, last]);
  useEffect(() => {
    if (at === last) setPlays(false);
  }, [at, last]);
  const toggle = () => {
    if (!plays && at === last) setAt(0);
    setPlays(!plays);
  };
  const frame = frames[at];
  return (
    <article class="replay">
      <figure>
        {frame.picture ? <img src={frame.picture} alt={`step ${at} of game ${game + 1}`} class={small ? "small" : ""} onLoad={(event) => setSmall(event.currentTarget.naturalWidth <= SMALL)} /> : <pre class="text">{frame.text}</pre>}
        <figcaption class="player">
          <button class="main" onClick={toggle} aria-label={plays ? "pause" : "play"}>
            {plays ? "❚❚" : "▶"}
          </button>
          <input type="range" aria-label="step of the game" min={0} max={last} value={at} onInput={(event) => (setPlays(false), setAt(Number(event.currentTarget.value)))} />
          <label>
            <select aria-label="frames per second" value={speed} onChange={(event) => setSpeed(Number(event.currentTarget.value))}>
              {SPEEDS.map((one) => (
                <option value={one}>{one} / s</option>
              ))}
            </select>
          </label>
        </figcaption>
      </figure>
      <div class="wide">
        <p>
          step {at} of {last}
          {at === last && (
            <>
              {" "}
              · {end === "cut" ? "the recording ends here" : end || "not ended"} {success !== null && <Outcome success={Number(success)} error={null} />}
            </>
          )}
        </p>
        <Seats file={file} frames={frames} at={at} />
        <Moves file={file} frames={frames} at={at} choose={(step) => (setPlays(false), setAt(step))} />
      </div>
    </article>
  );
}

// What each seat does in a step, and what that brings.
function Seats({ file, frames, at }: { file: ReplayFile; frames: ReplayFrame[]; at: number }) {
  const frame = frames[at];
  const soFar = (seat: number) => frames.slice(0, at + 1).reduce((sum, one) => sum + (one.rewards[seat] ?? 0), 0);
  return (
    <table class="list short">
      <thead>
        <tr>
          <th>seat</th>
          <th>policy</th>
          <th>action</th>
          <th class="right">reward</th>
          <th class="right">return so far</th>
        </tr>
      </thead>
      <tbody>
        {file.seats.map((seat, n) => (
          <tr>
            <td>
              {file.seat_colours[n] && <Dot colour={file.seat_colours[n]} />} {seat}
            </td>
            <td>{file.players[n]}</td>
            <td>{frame.acts[n] ? action(file, frame, n) : <span class="quiet">does not act</span>}</td>
            <td class="right">{signed(frame.rewards[n])}</td>
            <td class="right">{signed(soFar(n))}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Dot({ colour }: { colour: [number, number, number] }) {
  return (
    <svg width="10" height="10" aria-hidden="true">
      <circle cx="5" cy="5" r="5" fill={`rgb(${colour.map(Number).join(",")})`} />
    </svg>
  );
}

const LONGEST = 60; // steps of a game whose moves are listed

// Games in which one seat acts at a time: all of their moves, to go to one.
function Moves({ file, frames, at, choose }: { file: ReplayFile; frames: ReplayFrame[]; at: number; choose: (step: number) => void }) {
  const inTurn = frames.every((frame) => frame.acts.filter(Boolean).length === 1);
  if (!inTurn || frames.length > LONGEST || file.seats.length < 2) return null;
  return (
    <ol class="moves" aria-label="moves">
      {frames.map((frame, step) => {
        const seat = frame.acts.indexOf(true);
        return (
          <li>
            <button class={step === at ? "plain here" : "plain"} aria-current={step === at ? "step" : undefined} onClick={() => choose(step)}>
              {step}. {file.seats[seat]}: {action(file, frame, seat)}
            </button>
          </li>
        );
      })}
    </ol>
  );
}

function action(file: ReplayFile, frame: ReplayFrame, seat: number): string {
  const taken = frame.actions[seat] ?? [];
  if (taken.length === 1 && Number.isInteger(taken[0])) return file.action_names[taken[0]!] ?? String(taken[0]);
  return taken.map((value) => num(value, 2)).join(", ");
}
