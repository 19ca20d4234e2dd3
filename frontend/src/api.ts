// Questions to the server. The browser's own cache sends the ETags: what has not changed costs no body.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export type Params = Record<string, string | number | boolean | string[] | null | undefined>;

export function url(path: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(key, String(one));
  }
  const text = query.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

export function runPath(run: string, rest = ""): string {
  return `runs/${encodeURIComponent(run)}${rest}`;
}

export async function ask<T>(address: string, signal?: AbortSignal): Promise<T> {
  return read<T>(await reached(fetch(address, { signal, headers: { Accept: "application/json" } })));
}

export async function send<T>(address: string, body: unknown = {}): Promise<T> {
  return read<T>(await reached(fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })));
}

export const SILENT = "the server does not answer: was it ended?";

// Browsers word this each in their own way.
function reached(answer: Promise<Response>): Promise<Response> {
  return answer.catch(() => Promise.reject(new Error(SILENT)));
}

async function read<T>(answer: Response): Promise<T> {
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error ?? `the server says ${answer.status}`);
  }
  return (await answer.json()) as T;
}

const FRESH = 10_000; // milliseconds that an answer asked for ahead is good for
const ahead = new Map<string, { since: number; answer: Promise<unknown> }>();

// Asks for what is likely to be opened next; `useAnswer` then takes the answer, once.
export function askAhead(address: string): void {
  if (performance.now() - (ahead.get(address)?.since ?? -Infinity) < FRESH) return;
  if (ahead.size >= 16) ahead.clear();
  const answer = ask(address);
  answer.catch(() => ahead.delete(address)); // whoever opens it asks again, and hears why not
  ahead.set(address, { since: performance.now(), answer });
}

function askOnce<T>(address: string, signal: AbortSignal): Promise<T> {
  const known = ahead.get(address);
  ahead.delete(address);
  return known && performance.now() - known.since < FRESH ? (known.answer as Promise<T>) : ask<T>(address, signal);
}

export interface Answered<T> {
  data: T | null;
  error: string;
  loading: boolean;
}

// The answer at an address, asked again when `tick` changes. While a new one is on its way the old one stays.
export function useAnswer<T>(address: string | null, tick = 0): Answered<T> {
  const [state, setState] = useState<Answered<T>>({ data: null, error: "", loading: true });
  const before = useRef<string | null>(null);
  // Not useEffect: that would wait for a frame before it asks.
  useLayoutEffect(() => {
    if (address === null) return;
    const control = new AbortController();
    const same = path(before.current) === path(address);
    before.current = address;
    setState((old) => ({ data: same ? old.data : null, error: "", loading: true }));
    askOnce<T>(address, control.signal).then(
      (data) => {
        if (!control.signal.aborted) setState({ data, error: "", loading: false });
      },
      (error: Error) => {
        if (!control.signal.aborted) setState((old) => ({ data: old.data, error: error.message, loading: false }));
      },
    );
    return () => control.abort();
  }, [address, tick]);
  return state;
}

function path(address: string | null): string {
  return address?.split("?")[0] ?? "";
}

// Counts up whenever the server says that the run (or, without one, any run) has changed: at most every second.
export function useLive(run?: string): { tick: number; live: boolean } {
  const [tick, setTick] = useState(0);
  const [live, setLive] = useState(false);
  useEffect(() => {
    const source = new EventSource(url("events", { run }));
    source.onopen = () => setLive(true);
    source.onerror = () => setLive(false);
    source.addEventListener("change", (event) => {
      if (JSON.parse((event as MessageEvent<string>).data).length) setTick((old) => old + 1);
    });
    return () => source.close();
  }, [run]);
  return { tick, live };
}

export function useDebounced<T>(value: T, wait: number): T {
  const [late, setLate] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setLate(value), wait);
    return () => clearTimeout(timer);
  }, [value, wait]);
  return late;
}
