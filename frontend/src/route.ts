// Where in the dashboard one is: the part of the address after #, so that every view can be kept and sent.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  parts: string[];
  query: URLSearchParams;
}

export function parse(hash: string): Route {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query ?? "") };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function to(parts: (string | number)[], query?: URLSearchParams | Record<string, string>): string {
  const text = new URLSearchParams(query ?? {}).toString();
  return `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}${text ? `?${text}` : ""}`;
}

export function go(address: string, replace = false): void {
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const listen = () => setRoute(parse(location.hash));
    window.addEventListener("hashchange", listen);
    return () => window.removeEventListener("hashchange", listen);
  }, []);
  return route;
}

// Changes some of the query of the address, in place.
export function amend(route: Route, changes: Record<string, string | null>): void {
  const query = new URLSearchParams(route.query);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(key);
    else query.set(key, value);
  }
  go(to(route.parts, query), true);
}
