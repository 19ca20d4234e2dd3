// What was seen and said along a line of play. Everything here was written by models: it is text, never markup.

import { useMemo, useRef } from "preact/hooks";
import { useAnswer } from "./api";
import { diverging, surprise } from "./colours";
import { useSeen } from "./curves";
import type { Colouring } from "./episode";
import { signed } from "./format";
import { Gains, Info } from "./parts";
import { Picture, Text } from "./pictures";
import type { EpisodeTree, Form, Joint, Message, Said, Seen, Turn } from "./types";

interface Props {
  line: Joint[];
  tokens: (node: number) => string; // where the tokens of a node are
  tree: EpisodeTree;
  colouring: Colouring;
  columns: boolean;
  plain: boolean;
}

export function Words({ line, tokens, tree, colouring, columns, plain }: Props) {
  const seats = Object.keys(tree.seats);
  const largest = useMemo(() => Math.max(1e-9, ...tree.nodes.flatMap((node) => Object.values(node.seats).map((seat) => Math.abs(seat.advantage ?? 0)))), [tree]);
  return (
    <ol class="words">
      {line.map((joint, number) => (
        <li key={joint.node}>
          <header class="joint">
            <span>step {number}</span>
            {joint.team !== 0 && <Gains team={joint.team} />}
          </header>
          <div class={columns ? `columns of${Math.min(4, seats.length)}` : ""}>
            {(columns ? seats.map((seat) => joint.turns.find((turn) => turn.seat === seat)) : joint.turns).map((turn, at) =>
              turn ? (
                <Card key={turn.seat} turn={turn} form={tree.picture} colour={seats.indexOf(turn.seat)} {...{ tokens, colouring, plain, largest }} node={joint.node} before={said(line, number, turn.seat)} />
              ) : (
                <div key={at} class="turn none" />
              ),
            )}
          </div>
          <Info info={joint.info} seats={seats} />
        </li>
      ))}
    </ol>
  );
}

// What the seat saw before, to leave out what it is told again.
export function said(line: Joint[], number: number, seat: string): Seen {
  for (let at = number - 1; at >= 0; at--) {
    const turn = line[at].turns.find((one) => one.seat === seat);
    if (turn?.observation !== undefined) return turn.observation;
  }
  return undefined;
}

interface CardProps {
  turn: Turn;
  form: Form;
  colour: number;
  tokens: (node: number) => string; // where the tokens of a node are
  node: number;
  colouring: Colouring;
  plain: boolean;
  largest: number;
  before: Seen;
}

function Card({ turn, form, colour, tokens, node, colouring, plain, largest, before }: CardProps) {
  return (
    <section class={`turn hue${colour % 7}`}>
      <header>
        <b>{turn.seat}</b> <span class="quiet">{turn.policy}</span> <Gains reward={turn.reward} advantage={turn.advantage} />
      </header>
      {turn.observation !== undefined && (
        <details open>
          <summary>observation</summary>
          <Sees seen={turn.observation} form={plain ? "" : form} before={before} />
        </details>
      )}
      {turn.answer !== undefined && (
        <div class="answer">
          <span class="label">answer{turn.stop === "length" ? " (cut off)" : ""}</span>
          {colouring ? <Tokens {...{ tokens, node, colouring, largest }} seat={turn.seat} text={turn.answer} /> : <Text text={turn.answer} />}
          {turn.invalid && (
            <p class="invalid">
              <span aria-hidden="true">✕</span> invalid{turn.why_invalid ? `: ${turn.why_invalid}` : ""}
            </p>
          )}
        </div>
      )}
    </section>
  );
}

export function Sees({ seen, form, before }: { seen: Seen; form: Form; before: Seen }) {
  if (typeof seen === "string") return <Picture text={seen} before={typeof before === "string" ? before : ""} form={form} />;
  const { messages, tools } = (seen ?? {}) as { messages?: Message[]; tools?: unknown[] };
  if (Array.isArray(messages)) return <Chat messages={messages} tools={Array.isArray(tools) ? tools : []} />;
  return <pre class="text">{JSON.stringify(seen, null, 1)}</pre>;
}

function Chat({ messages, tools }: { messages: Message[]; tools: unknown[] }) {
  return (
    <div class="chat">
      {messages.map((message) => (
        <div class="message">
          <span class="label">{String(message?.role ?? "")}</span>
          {message?.content ? <Text text={typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1)} /> : null}
          {message?.tool_calls ? <pre class="text">{JSON.stringify(message.tool_calls, null, 1)}</pre> : null}
        </div>
      ))}
      {tools.length > 0 && (
        <details>
          <summary>tools that may be called ({tools.length})</summary>
          <pre class="text">{JSON.stringify(tools, null, 1)}</pre>
        </details>
      )}
    </div>
  );
}

interface TokensProps {
  tokens: (node: number) => string; // where the tokens of a node are
  node: number;
  seat: string;
  text: string;
  colouring: Colouring;
  largest: number;
}

// The tokens of one answer, asked for when they come into view.
function Tokens({ tokens, node, seat, text, colouring, largest }: TokensProps) {
  const place = useRef<HTMLDivElement>(null);
  const seen = useSeen(place);
  const { data } = useAnswer<{ said: Said[] }>(seen ? tokens(node) : null);
  const own = data?.said.find((one) => one.seat === seat);
  return (
    <div ref={place} class="text tokens">
      {own && own.ids.length ? own.ids.map((id, at) => <Token key={at} id={id} text={own.texts?.[at]} logprob={own.logprobs[at]} advantage={own.advantage} {...{ colouring, largest }} />) : text}
    </div>
  );
}

function Token({ id, text, logprob, advantage, colouring, largest }: { id: number; text?: string; logprob?: number; advantage: number | null; colouring: Colouring; largest: number }) {
  const known = logprob !== undefined;
  const background = colouring === "logprob" ? (known ? surprise(logprob) : "transparent") : advantage === null ? "transparent" : diverging(advantage / largest);
  const title = `token ${id}${known ? `, log-probability ${logprob.toFixed(3)} (${(100 * Math.exp(logprob)).toFixed(1)}%)` : ""}${advantage === null ? "" : `, advantage ${signed(advantage)}`}`;
  return (
    <span class={text === undefined ? "token number" : "token"} style={{ background }} title={title}>
      {text ?? id}
    </span>
  );
}
