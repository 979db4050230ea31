import { NOTHING_CHOSEN } from "./actions.js";
import { isInline } from "./api.js";
import { element } from "./dom.js";
import { createCourse } from "./course_card.js";
import { createEvents } from "./events.js";
import { drawLater, drawSoon } from "./frames.js";
import { connectHost } from "./guest.js";
import { createEmpty, createHeader, createSelection } from "./header.js";
import { createHeatCard } from "./heat_card.js";
import { createHistogram } from "./histogram.js";
import { createLayers } from "./layers.js";
import { HOST_PREFIX, readHash, readLink, writeHash } from "./link.js";
import { chooseDefaults, createLoader } from "./loader.js";
import { createPareto } from "./pareto_card.js";
import { createPerformance } from "./performance.js";
import { createMap } from "./map_card.js";
import { createRuns } from "./runs.js";
import { nameShownRun } from "./shown_run.js";
import { createStore } from "./store.js";
import { createTimeline } from "./timeline.js";
import { watchTheme } from "./theme.js";
import { showTitlesOnFocus } from "./tooltip.js";
import { createWhatIf } from "./what_if_card.js";

const POLL_EMPTY = 5000;
const POLL = 30000;

const INITIAL = {
  runs: null, run: null, compare: null, metric: null, part: "activation",
  ...NOTHING_CHOSEN,
  zoom: null, fit: false, filter: "", onlyProblems: false, folded: new Set(),
  onlyLayer: false, hiddenKinds: new Set(),
  sort: { column: null, descending: false },
  runData: null, compareData: null, heat: null, compareHeat: null, histogram: null,
  partHeat: null, whatIf: null, wantsWhatIf: false, summaries: null,
  awaited: {}, missing: { run: null, compare: null }, brought: null, failures: {}, refreshed: null,
  shown: null, theme: 0,
};

const hashOfPage = () => readHash(window.location.hash);

// Reads the hash from TensorBoard's address. TensorBoard reports its hash only after a change, and
// so not the hash of a link that was just opened.
function hashOfHost() {
  try {
    return readHash(window.parent.location.hash, HOST_PREFIX);
  } catch {
    return {};
  }
}

async function linkedState(host) {
  try {
    const data = await host.ask("experimental.GetURLPluginData");
    const link = { ...readLink(data ?? {}), ...hashOfHost() };
    return { link, inTensorBoard: true };
  } catch {
    return { link: hashOfPage(), inTensorBoard: false };
  }
}

function linkInHost(store) {
  const { origin, pathname } = window.parent.location;
  return `${origin}${pathname}#mixed_precision&${writeHash(store.state, HOST_PREFIX)}`;
}

function keepHash(store) {
  // Do not set the address on every change, because a browser takes up to 10 ms for that.
  const keep = () => {
    try {
      window.history.replaceState(null, "", `#${writeHash(store.state)}`);
    } catch {
      // A sandboxed frame has no address to set.
    }
  };
  store.on(["run", "compare", "metric", "layer", "step", "part"], () => drawLater(keep));
}

function addStyle() {
  const link = element("link", { rel: "stylesheet", href: "./static/style.css" });
  const loaded = new Promise((resolve) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", resolve);
  });
  document.head.append(link);
  return loaded;
}

function keepFresh(store, loader, host) {
  host?.on("experimental.DataReloaded", loader.refresh);
  host?.on("experimental.RunsChanged", loader.refresh);
  let waited = 0;
  setInterval(() => {
    waited += POLL_EMPTY;
    // In TensorBoard, ask the server less often, because TensorBoard announces new data.
    const early = host && store.state.runs?.length && waited < POLL;
    if (document.hidden || early) return;
    waited = 0;
    loader.refresh();
  }, POLL_EMPTY);
}

export async function render() {
  const offline = isInline();
  const host = offline ? null : connectHost();
  const [{ link, inTensorBoard }] = await Promise.all([
    host ? linkedState(host) : { link: hashOfPage(), inTensorBoard: false },
    offline ? null : addStyle(),
  ]);
  const store = createStore(INITIAL);
  const loader = createLoader(store);
  const copyLink = inTensorBoard ? () => linkInHost(store) : null;
  const header = createHeader(store, { offline, copyLink });
  const selection = createSelection(store);
  const empty = createEmpty(offline);
  const main = element("main", { hidden: true },
    createRuns(store), createTimeline(store), createPerformance(store),
    element("div", { class: "column" }, createHeatCard(store), createLayers(store)),
    element("div", { class: "column side" }, createHistogram(store), createEvents(store)),
    element("div", { class: "pair" }, createMap(store), createCourse(store)),
    createWhatIf(store), createPareto(store));
  nameShownRun(main, store);
  document.documentElement.lang = "en";
  document.title ||= "Mixed Precision";
  document.body.append(header, selection, empty, main);
  showTitlesOnFocus(document.body);

  watchTheme(inTensorBoard, () => store.set({ theme: store.state.theme + 1 }));
  store.on(["runs", "runData"], ({ runs, runData }) => {
    empty.hidden = runs === null || runs.length > 0;
    main.hidden = !runData;
    // Wait for the layout of the rows before scrolling to a row.
    if (runData) drawSoon(() => store.set({ shown: runData.run }));
  });
  store.on(["compareData"], ({ compareData }) => {
    main.classList.toggle("compared", Boolean(compareData));
  });
  store.on(["awaited"], ({ awaited }) => {
    main.setAttribute("aria-busy", String(Boolean(awaited.runData)));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (event.target instanceof HTMLSelectElement) return;
    if (store.state.zoom) store.set({ zoom: null });
    else store.set(NOTHING_CHOSEN);
  });
  chooseDefaults(store);
  store.set(link);
  if (!inTensorBoard) keepHash(store);
  await loader.refresh();
  if (!offline) keepFresh(store, loader, host);
}
