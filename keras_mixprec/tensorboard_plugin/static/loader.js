import { api } from "./api.js";
import { isReadable, metricOf, firstShown, wantedPaths } from "./wanted.js";

const TRIGGERS = [
  "runs", "run", "compare", "metric", "layer", "part", "runData", "compareData", "wantsWhatIf",
];

// The pause between two background requests in milliseconds. Requests of the user come first.
const PAUSE = 300;

export function createLoader(store) {
  const asked = {};
  const answered = {};
  const tokens = {};
  let pending = 0;

  const settle = () => {
    pending -= 1;
    if (pending) return;
    // The page is ready after the next frame, in which the panels draw the data.
    requestAnimationFrame(() => {
      if (!pending) document.body.dataset.ready = "1";
    });
  };

  // A slot keeps its data until the new data is loaded.
  const awaiting = (slot, path) => {
    const { [slot]: before, ...others } = store.state.awaited;
    return { awaited: path ? { ...others, [slot]: path } : others };
  };

  async function load(slot, path, request = null) {
    tokens[slot] = (tokens[slot] ?? 0) + 1;
    const token = tokens[slot];
    pending += 1;
    delete document.body.dataset.ready;
    try {
      const answer = await api(path);
      if (tokens[slot] !== token) return;
      fail(slot, null);
      if (slot === "summaries") askAgain(answer, path);
      answered[slot] = request;
      const isNew = Boolean(store.state.awaited[slot]);
      // Unchanged data must not redraw a part of the page that the user works with.
      const text = isNew || answer?.values ? null : JSON.stringify(answer);
      if (text && text === JSON.stringify(store.state[slot])) return;
      store.set({ [slot]: answer, ...isNew ? awaiting(slot, null) : {} });
    } catch (error) {
      if (tokens[slot] !== token) return;
      // Forget the request, so that the next refresh repeats it.
      asked[slot] = null;
      fail(slot, error.message);
      store.set(awaiting(slot, null));
    } finally {
      settle();
    }
  }

  // The server sends some rows before it has read all runs, so ask for the rest later.
  function askAgain(rows, path) {
    const token = tokens.summaries;
    if (!rows?.some((row) => row.unread)) return;
    setTimeout(() => {
      if (tokens.summaries === token) load("summaries", path);
    }, PAUSE);
  }

  function fail(slot, message) {
    const { [slot]: before, ...others } = store.state.failures;
    if (message) store.set({ failures: { ...others, [slot]: message } });
    else if (before) store.set({ failures: others });
  }

  // The version changes when a run grows, so that its data is requested again.
  const versionOf = (slot, state) => {
    if (slot === "runData" || slot === "compareData") return "";
    if (slot === "summaries") return state.runs?.map((run) => run.written).join();
    const { runData, compareData } = state;
    const data = slot.startsWith("compare") ? compareData : runData;
    return data ? `${data.last_step}/${data.events.length}` : "";
  };

  // Returns whether the data of the chosen run is still to come.
  const isOld = (slot, { run, compare, runData, compareData }) => {
    const [name, data] = slot.startsWith("compare") ? [compare, compareData] : [run, runData];
    return name !== null && data !== null && data.run !== name;
  };

  function sync() {
    const { state } = store;
    const known = { ...answered };
    for (const [slot, path] of Object.entries(wantedPaths(state))) {
      const request = path && `${path} ${versionOf(slot, state)}`;
      if (asked[slot] === request || (!path && isOld(slot, state))) continue;
      const samePath = asked[slot]?.split(" ")[0] === path;
      asked[slot] = request;
      // If another slot has the same data, copy the data instead of requesting it.
      const holder = path && Object.keys(known).find((other) => known[other] === request);
      if (path && !holder) {
        if (!samePath) store.set(awaiting(slot, path));
        load(slot, path, request);
        continue;
      }
      tokens[slot] = (tokens[slot] ?? 0) + 1;
      answered[slot] = request;
      store.set({ [slot]: holder ? state[holder] : null, ...awaiting(slot, null) });
    }
  }

  // Requests start before the panels draw, so that the server works in the meantime.
  store.on(TRIGGERS, sync);

  return {
    async refresh() {
      await load("runs", "./data/runs");
      for (const slot of ["runData", "compareData"]) {
        const path = wantedPaths(store.state)[slot];
        if (path && store.state[slot]) load(slot, path);
      }
      sync();
      store.set({ refreshed: new Date() });
    },
  };
}

// Sets the default run and metric.
export function chooseDefaults(store) {
  store.on(["runs"], ({ runs, run, compare, missing }) => {
    const isHere = (name) => runs.some((entry) => entry.run === name);
    // A link may name a run that is still to come.
    const own = missing.run ?? run;
    const other = missing.compare ?? compare;
    store.set({
      missing: {
        run: own === null || isHere(own) ? null : own,
        compare: other === null || isHere(other) ? null : other,
      },
      run: isHere(own) ? own : isHere(run) ? run : firstShown(runs),
      compare: isReadable(runs, other) ? other : null,
    });
  });
  store.on(["run"], ({ run, compare }) => {
    if (run === compare) store.set({ compare: null });
  });
  store.on(["runData"], ({ runData, metric }) => {
    if (!runData || metricOf(runData, metric)) return;
    const metrics = runData.heat?.metrics ?? [];
    const usual = metricOf(runData, "activation_headroom_bits") ?? metrics[0];
    store.set({ metric: usual?.name ?? null });
  });
}
