// The training server, for whoever runs it: who is connected, what waits, what is in memory, who gets how much, what failed.

import { useEffect, useState } from "preact/hooks";
import { url, useAnswer } from "./api";
import { bytes, count, duration } from "./format";
import { Failed, Figure } from "./parts";
import { Table } from "./system";
import type { Console, ServerData } from "./types";

const EVERY = 3000; // milliseconds between two looks
const OLD = 15; // seconds after which the worker's last report is called old

export function Server() {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTick((old) => old + 1), EVERY);
    return () => clearInterval(timer);
  }, []);
  const { data, error } = useAnswer<ServerData>(url("server"), tick);
  const [known, setKnown] = useState<Console | null>(null);
  useEffect(() => {
    if (data?.console) setKnown(data.console);
  }, [data]);
  const failed = error || data?.error;
  return (
    <main data-server>
      <h1>Training server {data?.url}</h1>
      {failed && <Failed error={known ? `${failed} What follows is from ${ago(Date.now() / 1000 - known.at)}.` : failed} />}
      {known && <Shown console={known} />}
    </main>
  );
}

function ago(seconds: number) {
  return `${duration(Math.max(0, seconds))} ago`;
}

function Shown({ console }: { console: Console }) {
  const { at, worker } = console;
  const since = (time: number) => <td title={new Date(1000 * time).toLocaleString()}>{ago(at - time)}</td>;
  const owners = [...new Set([...Object.keys(worker?.work ?? {}), ...console.answers.map((one) => one.owner)])].sort();
  const waits = console.queues.reduce((sum, one) => sum + one.queued + one.taken, 0);
  return (
    <>
      {!worker ? (
        <Failed error="The engine's worker has not reported yet: does it still load its bases?" />
      ) : (
        at - worker.at > OLD && <Failed error={`The engine's worker reported last ${ago(at - worker.at)}: a long pass, or it died; see what the server prints.`} />
      )}
      <section>
        <h2>Who is connected</h2>
        {console.sessions.length === 0 ? (
          <p class="quiet">No session has sent anything in the last two minutes.</p>
        ) : (
          <Table heads={["API key of", "session", "name", "models", "samplers", "since", "last heard"]}>
            {console.sessions.map((one) => (
              <tr>
                <td>{one.owner}</td>
                <td>{one.id}</td>
                <td>{one.name}</td>
                <td class="right">{one.num_models}</td>
                <td class="right">{one.num_samplers}</td>
                {since(one.created)}
                {since(one.seen)}
              </tr>
            ))}
          </Table>
        )}
      </section>
      <section>
        <h2>Queues</h2>
        {waits === 0 ? (
          <p class="quiet">No request waits for an answer.</p>
        ) : (
          <Table heads={["API key of", "request", "queued", "taken", "bytes", "oldest"]}>
            {console.queues.map((one) => (
              <tr>
                <td>{one.owner}</td>
                <td>{one.kind}</td>
                <td class="right">{count(one.queued)}</td>
                <td class="right">{count(one.taken)}</td>
                <td class="right">{bytes(one.bytes)}</td>
                {since(one.oldest)}
              </tr>
            ))}
          </Table>
        )}
      </section>
      <section>
        <h2>Adapters in training</h2>
        {console.adapters.length === 0 ? (
          <p class="quiet">No model is in training.</p>
        ) : (
          <Table heads={["API key of", "model", "base", "rank", "state", "last used"]}>
            {console.adapters.map((one) => (
              <tr>
                <td>{one.owner}</td>
                <td>{one.id}</td>
                <td>{one.base}</td>
                <td class="right">{one.rank}</td>
                <td>
                  {one.state === "live" ? (one.is_loaded ? "in memory" : "on disk") : one.state}
                  {one.has_unsaved && ", with unsaved changes"}
                </td>
                {since(one.used)}
              </tr>
            ))}
          </Table>
        )}
      </section>
      {worker && (
        <section>
          <h2>Memory</h2>
          <dl class="facts">
            <Figure name="worker">{worker.memory === null ? "–" : bytes(worker.memory)}</Figure>
            <Figure name="models in memory">{count(worker.loaded_models.length)}</Figure>
            <Figure name="adapters for samplers">{count(worker.num_snapshots)}</Figure>
          </dl>
          <Table heads={["base", "device", "answers", "waiting", "KV cache", "its limit", "free on the device"]}>
            {worker.bases.map((base) => (
              <tr>
                <td>{base.name}</td>
                <td>{base.device}</td>
                <td class="right">{count(base.answers)}</td>
                <td class="right">{count(base.waiting)}</td>
                <td class="right">{base.cache_bytes === null ? "–" : bytes(base.cache_bytes)}</td>
                <td class="right">{base.cache_limit === null ? "–" : bytes(base.cache_limit)}</td>
                <td class="right">{bytes(base.free_memory)}</td>
              </tr>
            ))}
          </Table>
        </section>
      )}
      <section>
        <h2>Shares of API keys</h2>
        <p class="quiet">Counters in tokens: of those who wait, the smallest is served first. Answers in progress now; answered in the last minute.</p>
        {owners.length > 0 && (
          <Table heads={["API key of", "sampling", "training", "scored prompts", "answers", "answered", "mean time", "longest"]}>
            {owners.map((owner) => {
              const work = worker?.work[owner];
              const recent = console.answers.find((one) => one.owner === owner);
              return (
                <tr>
                  <td>{owner}</td>
                  <td class="right">{count(work?.sampling ?? 0)}</td>
                  <td class="right">{count(work?.training ?? 0)}</td>
                  <td class="right">{count(work?.scoring ?? 0)}</td>
                  <td class="right">{count(work?.answers ?? 0)}</td>
                  <td class="right">{count(recent?.num_answers ?? 0)}</td>
                  <td class="right">{duration(recent?.mean_s)}</td>
                  <td class="right">{duration(recent?.max_s)}</td>
                </tr>
              );
            })}
          </Table>
        )}
      </section>
      <section>
        <h2>Last errors</h2>
        {console.errors.length === 0 ? (
          <p class="quiet">No request was answered with an error in the last day.</p>
        ) : (
          <Table heads={["when", "API key of", "request", "model", "whose", "error"]}>
            {console.errors.map((one) => (
              <tr>
                {since(one.at)}
                <td>{one.owner}</td>
                <td>{one.kind}</td>
                <td>{one.model}</td>
                <td>{one.category === "user" ? "the client's" : "the server's"}</td>
                <td>
                  <pre class="text">{one.message}</pre>
                </td>
              </tr>
            ))}
          </Table>
        )}
      </section>
    </>
  );
}
