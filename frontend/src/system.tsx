// How the run works: its processes, what waits, what failed, what it holds on the disk.

import { useEffect, useState } from "preact/hooks";
import { runPath, url, useAnswer } from "./api";
import { bytes, count, duration, num, when } from "./format";
import { Failed, Figure } from "./parts";
import { to } from "./route";
import type { SystemData } from "./types";

export function System({ run, tick }: { run: string; tick: number }) {
  const [poll, setPoll] = useState(0);
  const { data, error } = useAnswer<SystemData>(url(runPath(run, "/system")), tick + poll);
  useEffect(() => {
    if (!data?.unread) return; // the server still looks through the files: ask again soon
    const timer = setTimeout(() => setPoll((old) => old + 1), 700);
    return () => clearTimeout(timer);
  }, [data]);
  if (error) return <Failed error={error} />;
  if (!data) return <p class="hint">reading…</p>;
  const newest = data.timings.team ?? {};
  const total = data.phases.reduce((sum, phase) => sum + (newest[phase] ?? 0), 0);
  return (
    <>
      <section>
        <h2>Processes on this machine</h2>
        {data.processes.length === 0 ? (
          <p class="quiet">No process on this machine writes the run.</p>
        ) : (
          <Table heads={["process", "name", "cores in use", "memory", "threads"]}>
            {data.processes.map((worker, at) => (
              <tr>
                <td>
                  {worker.pid} {at === 0 && <span class="quiet">writes the run</span>}
                </td>
                <td>{worker.name}</td>
                <td class="right">{worker.cpu === undefined ? "–" : worker.cpu.toFixed(1)}</td>
                <td class="right">{worker.memory ? bytes(worker.memory) : "–"}</td>
                <td class="right">{worker.threads ?? "–"}</td>
              </tr>
            ))}
          </Table>
        )}
      </section>
      <section>
        <h2>This machine now</h2>
        <dl class="facts">
          {data.machine.cores !== null && <Figure name="CPU cores">{data.machine.cores}</Figure>}
          {data.machine.load !== null && <Figure name="load, one minute">{data.machine.load.toFixed(1)}</Figure>}
          {data.machine.memory !== null && data.machine.available !== null && (
            <Figure name="memory in use">
              {bytes(data.machine.memory - data.machine.available)} of {bytes(data.machine.memory)}
            </Figure>
          )}
          {data.processes.length > 0 && (
            <>
              <Figure name="the run: cores in use">{data.processes.reduce((sum, one) => sum + (one.cpu ?? 0), 0).toFixed(1)}</Figure>
              <Figure name="the run: memory">{bytes(data.processes.reduce((sum, one) => sum + (one.memory ?? 0), 0))}</Figure>
            </>
          )}
        </dl>
      </section>
      {data.workers.length > 0 && (
        <section data-workers>
          <h2>Workers</h2>
          <Table heads={["worker", "where", "done", "busy time", "lost", "replays", "last heartbeat"]}>
            {data.workers.map((one) => (
              <tr>
                <td>{one.kind}</td>
                <td>{one.where}</td>
                <td class="right">{count(one.done)}</td>
                <td class="right">{one.seconds ? duration(one.seconds) : "–"}</td>
                <td class="right" title={one.why}>
                  {one.lost ? count(one.lost) : ""}
                </td>
                <td class="right">{one.replays ? count(one.replays) : ""}</td>
                <td>{one.seen === null ? "none" : <span title={new Date(1000 * one.seen).toLocaleString()}>{duration(Math.max(0, Date.now() / 1000 - one.seen))} ago</span>}</td>
              </tr>
            ))}
          </Table>
          {data.workers
            .filter((one) => one.why)
            .map((one) => (
              <p class="quiet">
                {one.where} lost something, last: {one.why}
              </p>
            ))}
        </section>
      )}
      {total > 0 && (
        <section>
          <h2>Time of the newest step, by phase</h2>
          <div class="phases" role="img" aria-label={data.phases.map((phase) => `${phase} ${duration(newest[phase])}`).join(", ")}>
            {data.phases.map((phase, at) => (
              <div class={`hue${at} phase`} style={{ flexGrow: (newest[phase] ?? 0) / total }}>
                {phase.replace(/_s$/, "")} {duration(newest[phase])}
              </div>
            ))}
          </div>
          <dl class="facts">
            {Object.entries(newest)
              .filter(([key]) => key.endsWith("_per_s"))
              .map(([key, value]) => (
                <Figure name={key.replace("_per_s", " per second").replace("_", " ")}>{num(value)}</Figure>
              ))}
          </dl>
        </section>
      )}
      {Object.keys(data.queues).length > 0 && (
        <section>
          <h2>Queues</h2>
          <dl class="facts">
            {Object.entries(data.queues).map(([name, value]) => (
              <Figure name={name === "wait_s" ? "training waited" : name.replace("_", ", ")}>{name === "wait_s" ? duration(value) : num(value)}</Figure>
            ))}
          </dl>
        </section>
      )}
      <section>
        <h2>Failures</h2>
        {data.failures.length === 0 && Object.keys(data.broken).length === 0 ? (
          <p class="quiet">No recorded episode failed{data.unread ? ` in the files looked through so far (${count(data.unread)} are not)` : ""}.</p>
        ) : (
          <Table heads={["times", "error", "last in"]}>
            {data.failures.map((failure) => (
              <tr>
                <td class="right">{failure.count}</td>
                <td>
                  <pre class="text">{failure.error}</pre>
                </td>
                <td>
                  <a href={to(["run", run, "episodes", failure.step, failure.episode])}>
                    step {failure.step} · {failure.episode}
                  </a>
                </td>
              </tr>
            ))}
            {Object.entries(data.broken).map(([step, why]) => (
              <tr>
                <td />
                <td>{why}</td>
                <td>step {step}</td>
              </tr>
            ))}
          </Table>
        )}
        {Object.entries(data.torn).map(([log, lines]) => (
          <p class="error">
            {log}: {lines} lines cannot be read
          </p>
        ))}
      </section>
      <section>
        <h2>Disk usage</h2>
        <Table heads={["", "size"]}>
          {Object.entries(data.disk)
            .sort(([, a], [, b]) => b - a)
            .map(([name, size]) => (
              <tr>
                <td>{name}</td>
                <td class="right">{bytes(size)}</td>
              </tr>
            ))}
        </Table>
      </section>
      <section>
        <h2>Command</h2>
        <pre class="text">{data.command.join(" ")}</pre>
        <dl class="facts">
          {Object.entries(data.meta).map(([key, value]) => (
            <Figure name={key === "created" ? "created (UTC)" : key}>{key === "created" ? when(String(value)) : String(value)}</Figure>
          ))}
        </dl>
      </section>
    </>
  );
}

// Columns of numbers.
const RIGHT = ["cores in use", "memory", "threads", "times", "size", "done", "busy time", "lost", "replays"].concat(
  ["models", "samplers", "queued", "taken", "bytes", "rank", "answers", "waiting", "KV cache", "its limit", "free on the device"],
  ["sampling", "training", "scored prompts", "answered", "mean time", "longest"],
);

export function Table({ heads, children }: { heads: string[]; children: preact.ComponentChildren }) {
  return (
    <div class="wide">
      <table class="list short">
        <thead>
          <tr>
            {heads.map((head) => (
              <th class={RIGHT.includes(head) ? "right" : ""}>{head}</th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
