// The frame around every page: where one is, the theme, the keys.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { url, useAnswer, useLive } from "./api";
import { Agents } from "./agents";
import { Alarms } from "./alarms";
import { Curves } from "./curves";
import { Episode } from "./episode";
import { Episodes } from "./episodes";
import { Help, useKeys } from "./keys";
import { Head, homePage, Overlay } from "./run";
import { Failed } from "./parts";
import { Table } from "./play";
import { Population } from "./population";
import { Replays } from "./replays";
import { go, type Route, to, useRoute } from "./route";
import { Compare, Details, Runs } from "./runs";
import { Server } from "./server";
import { System } from "./system";
import type { RunDetail } from "./types";
import "./style.css";

function App() {
  const route = useRoute();
  const [help, setHelp] = useState(false);
  useKeys(route, () => setHelp((old) => !old));
  const [page, name] = route.parts;
  useEffect(() => {
    document.title = name ? `${name} · palestra` : "palestra";
  }, [name]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.querySelector<HTMLElement>("main a, main input")?.focus())}>
        to the content
      </a>
      <header class="top">
        <nav aria-label="where one is">
          <a class="brand" href="#/">
            palestra
          </a>
          {page === "run" && (
            <>
              <span aria-hidden="true">/</span>
              <a href={to(["run", name])}>{name}</a>
            </>
          )}
          {page === "compare" && <span>/ compare</span>}
          {page === "server" && <span>/ server</span>}
        </nav>
        <span class="tools">
          <a href="#/server">server</a>
          <button class="plain" onClick={() => setHelp(true)} aria-label="keys">
            ?
          </button>
          <Theme />
        </span>
      </header>
      {help && <Help close={() => setHelp(false)} />}
      {page === undefined ? <Runs route={route} /> : page === "compare" ? <Compare route={route} /> : page === "server" ? <Server /> : page === "run" && name ? <Run key={name} name={name} route={route} /> : <Lost />}
    </>
  );
}

// The page of `palestra play --browser`, which another server shows.
function Play() {
  return (
    <>
      <header class="top">
        <nav aria-label="where one is">
          <span class="brand">palestra</span>
          <span>/ play</span>
        </nav>
        <span class="tools">
          <Theme />
        </span>
      </header>
      <main class="play">
        <Table />
      </main>
    </>
  );
}

function Lost() {
  return (
    <main>
      <h1>Nothing is here</h1>
      <p>
        <a href="#/">All runs</a>
      </p>
    </main>
  );
}

function Run({ name, route }: { name: string; route: Route }) {
  const { tick, live } = useLive(name);
  const { data, error } = useAnswer<RunDetail>(url(`runs/${encodeURIComponent(name)}`), tick);
  const [, , asked, step, episode] = route.parts;
  if (error && !data)
    return (
      <main>
        <Failed error={error} />
      </main>
    );
  if (!data) return <main aria-busy="true" />;
  const tab = asked ?? homePage(data);
  const pages: Record<string, () => preact.JSX.Element> = {
    episodes: () => (episode !== undefined ? <Episode key={`${step}/${episode}/${route.query.get("eval")}`} run={name} step={Number(step)} episode={Number(episode)} route={route} /> : <Episodes run={data} route={route} tick={tick} />),
    replays: () => <Replays run={name} route={route} tick={tick} />,
    curves: () => <CurvesPage run={data} route={route} tick={tick} />,
    population: () => <Population run={data} route={route} tick={tick} />,
    agents: () => <Agents run={name} tick={tick} />,
    system: () => <System run={name} tick={tick} />,
    alarms: () => <Alarms run={name} tick={tick} />,
    config: () => <Config run={name} />,
  };
  return (
    <main>
      <Head run={data} live={live} tab={tab} />
      {(pages[tab] ?? Lost)()}
    </main>
  );
}

function CurvesPage({ run, route, tick }: { run: RunDetail; route: Route; tick: number }) {
  const also = route.query.getAll("with");
  return (
    <>
      <Overlay run={run.name} route={route} />
      <Details key={also.join("\n")} names={also} found={[]}>
        {(others) => <Curves details={[run, ...others]} route={route} tick={tick} />}
      </Details>
    </>
  );
}

function Config({ run }: { run: string }) {
  const { data, error } = useAnswer<{ yaml: string }>(url(`runs/${encodeURIComponent(run)}/config`));
  return error ? <Failed error={error} /> : <pre class="text">{data?.yaml}</pre>;
}

const THEMES = ["auto", "light", "dark"];

function Theme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("theme") ?? "auto");
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      document.documentElement.dataset.theme = theme === "auto" ? (media.matches ? "dark" : "light") : theme;
      window.dispatchEvent(new Event("themed"));
    };
    const print = () => {
      document.documentElement.dataset.theme = "light"; // paper is white
      window.dispatchEvent(new Event("themed"));
    };
    apply();
    localStorage.setItem("theme", theme);
    media.addEventListener("change", apply);
    window.addEventListener("beforeprint", print);
    window.addEventListener("afterprint", apply);
    return () => {
      media.removeEventListener("change", apply);
      window.removeEventListener("beforeprint", print);
      window.removeEventListener("afterprint", apply);
    };
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return (
    <button class="plain" data-theme-button onClick={() => setTheme(next)} aria-label={`colours: ${theme}; change to ${next}`}>
      {theme === "auto" ? "◐ auto" : theme === "light" ? "○ light" : "● dark"}
    </button>
  );
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
const plays = location.pathname.endsWith("/play");
if (!location.hash && !plays) go("#/", true);
render(plays ? <Play /> : <App />, document.getElementById("app")!);
