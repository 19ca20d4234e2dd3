// A game that a person plays or looks on: what the seat is told, what it said, the question, and in the end all that was said.

import { useEffect, useRef, useState } from "preact/hooks";
import { send, SILENT, url, useAnswer } from "./api";
import { signed } from "./format";
import { Failed, Figure } from "./parts";
import { Text } from "./pictures";
import type { EpisodeTree, GameState, Outcome } from "./types";
import { said, Sees, Words } from "./words";

const KEPT = "game"; // where the page keeps which game it plays, so that it may be loaded anew

export function Table() {
  const [game, setGame] = useState(() => sessionStorage.getItem(KEPT));
  const [error, setError] = useState("");
  const begin = () =>
    send<{ id: string }>(url("games")).then(
      ({ id }) => (sessionStorage.setItem(KEPT, id), setError(""), setGame(id)),
      (wrong: Error) => setError(wrong.message),
    );
  useEffect(() => {
    if (!game) begin();
  }, []);
  return (
    <>
      {error && <Failed error={error} />}
      {game && <Game key={game} path={`games/${encodeURIComponent(game)}`} another={begin} />}
      {!game && error && <button onClick={begin}>try again</button>}
    </>
  );
}

function Game({ path, another }: { path: string; another: () => void }) {
  const { tick, live } = useNews(path);
  const { data: game, error } = useAnswer<GameState>(url(path), tick);
  if (error || !game)
    return error ? (
      <>
        <Failed error={error} />
        <button class="main" onClick={another}>
          another game
        </button>
      </>
    ) : (
      <p class="hint">reading…</p>
    );
  const past = game.now === "asked" ? game.line.slice(0, -1) : game.line;
  const ongoing = { asked: `your turn ${game.turn}`, waiting: "waiting for the others", watching: "the game goes on", paused: "the game is paused", over: "the game is over" };
  return (
    <article>
      <Head game={game} />
      {past.length > 0 && <Words line={past} tokens={() => ""} tree={bare(game)} colouring="" columns={false} plain={false} />}
      {!live && <Failed error={SILENT} />}
      <p class="hidden" role="status">
        {ongoing[game.now]}
      </p>
      {game.now === "asked" && <Question key={game.turn} game={game} path={path} />}
      {game.now === "waiting" && <p class="waits">waiting for {others(game) || "the game"}…</p>}
      {game.end ? <End end={game.end} game={game} another={another} /> : game.seat ? <Leave path={path} /> : <Pause path={path} paused={game.now === "paused"} />}
    </article>
  );
}

// Counts up whenever the server says that the game has changed, and when it can be heard again.
function useNews(path: string): { tick: number; live: boolean } {
  const [state, setState] = useState({ tick: 0, live: true });
  useEffect(() => {
    const source = new EventSource(url(`${path}/events`));
    source.onerror = () => setState((old) => ({ tick: old.tick + (source.readyState === EventSource.CLOSED ? 1 : 0), live: source.readyState === EventSource.CLOSED }));
    source.addEventListener("change", () => setState((old) => ({ tick: old.tick + 1, live: true })));
    return () => source.close();
  }, [path]);
  return state;
}

function Head({ game }: { game: GameState }) {
  return (
    <>
      <h1>{game.env}</h1>
      <div class="bar">
        {Object.entries(game.seats).map(([seat, who]) => (
          <span class={seat === game.seat ? "chip mine" : "chip"} key={seat}>
            {seat}: {seat === game.seat ? "you" : who}
          </span>
        ))}
      </div>
      {(game.role || game.rules) && (
        <details open class="told">
          <summary>{game.seat ? `the game, as your seat is told of it${game.rules ? ", and its rules" : ""}` : "the rules"}</summary>
          {game.role && <Text text={game.role} />}
          {game.rules && <p>{game.rules}</p>}
        </details>
      )}
    </>
  );
}

function Question({ game, path }: { game: GameState; path: string }) {
  const [text, setText] = useState("");
  const [sending, setSending] = useState(false);
  const [error, setError] = useState("");
  const place = useRef<HTMLFormElement>(null);
  const field = useRef<HTMLTextAreaElement>(null);
  const now = game.line.at(-1);
  const before = said(game.line, game.line.length - 1, game.seat);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) field.current?.focus({ preventScroll: true }); // else a keyboard covers the screen
    if (game.turn) place.current?.scrollIntoView({ block: "nearest" });
  }, []);
  const answer = (words: string) => {
    if (sending || !words.trim()) return;
    setSending(true);
    send(url(`${path}/answer`), { turn: game.turn, text: words }).catch((wrong: Error) => (setError(wrong.message), setSending(false)));
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    answer(text);
  };
  return (
    <form ref={place} class="question" aria-label={`your turn ${game.turn}`} onSubmit={(event) => (event.preventDefault(), answer(text))}>
      <h2>Your turn</h2>
      <Sees seen={now?.turns[0]?.observation} form={game.picture} before={before} />
      {hasTools(game) && (
        <p class="hint">
          A tool is called so: <code>{'<tool_call>{"name": "…", "arguments": {…}}</tool_call>'}</code>
        </p>
      )}
      {game.legal_actions.length > 0 && (
        <div class="moves" role="group" aria-label="what you may say">
          {game.legal_actions.map((word) => (
            <button type="button" key={word} disabled={sending} onClick={() => answer(word)}>
              {word}
            </button>
          ))}
        </div>
      )}
      <label class="say">
        <span class="label">{game.legal_actions.length ? "or in your words" : "your answer"}: Enter sends, Shift+Enter begins a line</span>
        <textarea ref={field} rows={game.legal_actions.length ? 1 : 2} value={text} onInput={(event) => setText(event.currentTarget.value)} onKeyDown={keys} spellcheck={false} autocapitalize="off" />
      </label>
      <button class="main" disabled={sending || !text.trim()}>
        send
      </button>
      {error && <Failed error={error} />}
    </form>
  );
}

function Leave({ path }: { path: string }) {
  const [left, setLeft] = useState(false);
  const leave = () => (setLeft(true), send(url(`${path}/give-up`)).catch(() => setLeft(false)));
  return (
    <p>
      <button class="plain quiet" disabled={left} onClick={leave}>
        {left ? "given up: waiting for the others" : "give up"}
      </button>
    </p>
  );
}

function Pause({ path, paused }: { path: string; paused: boolean }) {
  const place = useRef<HTMLParagraphElement>(null);
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }));
  return (
    <p ref={place}>
      <button class="main" onClick={() => send(url(`${path}/pause`), { paused: !paused }).catch(() => undefined)}>
        {paused ? "go on" : "pause"}
      </button>
    </p>
  );
}

function End({ end, game, another }: { end: Outcome; game: GameState; another: () => void }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    button.current?.focus({ preventScroll: true });
    button.current?.scrollIntoView({ block: "nearest" });
  }, []);
  return (
    <section class="question end" aria-label="the end">
      <h2>{outcome(end)}</h2>
      {!end.failed && (
        <dl class="facts">
          {end.team !== 0 && <Figure name="return of the team">{signed(end.team)}</Figure>}
          {Object.entries(end.returns).map(([seat, value]) => (
            <Figure key={seat} name={`return of ${seat}${seat === game.seat ? " (you)" : ""}`}>
              {signed(value)}
            </Figure>
          ))}
        </dl>
      )}
      <p class="hint">Above is what all seats saw and said in instance {end.instance}.</p>
      <button class="main" ref={button} onClick={another}>
        another game
      </button>
    </section>
  );
}

function outcome(end: Outcome): string {
  if (end.gave_up) return "You gave up";
  if (end.failed) return "✕ The game ended early: the terminal of palestra play says why";
  return end.success === null ? "The game is over" : end.success ? "✓ Success" : "○ No success";
}

// Of a conversation that goes on, only the first observation names them.
function hasTools(game: GameState): boolean {
  return game.line.some((joint) => joint.turns.some((turn) => (turn.observation as { tools?: unknown[] } | undefined)?.tools?.length));
}

function others(game: GameState): string {
  return Object.keys(game.seats)
    .filter((seat) => seat !== game.seat)
    .join(", ");
}

// As much of an episode's tree as its words ask for.
function bare(game: GameState): EpisodeTree {
  return { env: game.env, seed: 0, error: null, traceback: null, picture: game.picture, seats: game.seats, nodes: [], left_out: 0 };
}
