import { api } from "./api.js";
import { isReadable, metricOf, newestRun, wantedPaths } from "./wanted.js";

const TRIGGERS = [
  "runs", "run", "compare", "metric", "layer", "part", "runData", "compareData", "wantsRanges",
];

// Milliseconds, in which what a reader does comes first.
const PAUSE = 300;

export function createLoader(store) {
  const asked = {};
  const tokens = {};
  let pending = 0;

  const settle = () => {
    pending -= 1;
    if (pending) return;
    // The second frame comes after the panels have drawn theirs.
    requestAnimationFrame(() => requestAnimationFrame(() => {
      if (!pending) document.body.dataset.ready = "1";
    }));
  };

  async function load(slot, path) {
    tokens[slot] = (tokens[slot] ?? 0) + 1;
    const token = tokens[slot];
    pending += 1;
    delete document.body.dataset.ready;
    try {
      const answer = await api(path);
      if (tokens[slot] !== token) return;
      fail(slot, null);
      if (slot === "summaries") askAgain(answer, path);
      // What did not change must not be redrawn under the reader's hands.
      const text = answer?.values ? null : JSON.stringify(answer);
      if (text && text === JSON.stringify(store.state[slot])) return;
      store.set({ [slot]: answer });
    } catch (error) {
      if (tokens[slot] !== token) return;
      // Forgotten, so that the next refresh asks again.
      asked[slot] = null;
      fail(slot, error.message);
    } finally {
      settle();
    }
  }

  // Rows come as they are read, what is looked at first.
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

  // What depends on the run's data is requested again once that data has grown.
  const versionOf = (slot, state) => {
    if (slot === "runData" || slot === "compareData") return "";
    if (slot === "summaries") return state.runs?.map((run) => run.written).join();
    const data = slot.startsWith("compare") ? state.compareData : state.runData;
    return data ? `${data.last_step}/${data.events.length}` : "";
  };

  function sync() {
    const wanted = wantedPaths(store.state);
    for (const [slot, path] of Object.entries(wanted)) {
      const request = path && `${path} ${versionOf(slot, store.state)}`;
      if (asked[slot] === request) continue;
      const samePath = asked[slot]?.split(" ")[0] === path;
      asked[slot] = request;
      if (path && samePath) load(slot, path);
      else {
        tokens[slot] = (tokens[slot] ?? 0) + 1;
        if (slot === "histogram" || !path) store.set({ [slot]: null });
        if (path) load(slot, path);
      }
    }
  }

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
      run: isHere(own) ? own : isHere(run) ? run : newestRun(runs),
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
