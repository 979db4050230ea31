import { foldersOf } from "./names.js";

export const NOTHING_CHOSEN = { layer: null, step: null, event: null };

export function chooseRun(store, run) {
  const { missing } = store.state;
  store.set({ run, zoom: null, ...NOTHING_CHOSEN, missing: { ...missing, run: null } });
}

export function compareWith(store, run) {
  store.set({ compare: run, missing: { ...store.state.missing, compare: null } });
}

/**
 * @param {any} store
 * @param {any} row A row of the event list.
 * @param {number} [step] One of the steps of the row.
 */
export function chooseEvent(store, row, step = row.steps[0]) {
  store.set({ layer: row.layers[0] ?? store.state.layer, step, event: row.key });
  showInZoom(store, step);
}

// Scrolls to an event, because the alarm that the user clicked may be far above the event.
export function bringEvent(store, row) {
  const hiddenKinds = new Set(store.state.hiddenKinds);
  hiddenKinds.delete(row.kind);
  store.set({ hiddenKinds, onlyLayer: false });
  chooseEvent(store, row);
  store.set({ brought: { panel: "events" } });
}

export function bringLayer(store, layer) {
  const folded = new Set(store.state.folded);
  for (const folder of foldersOf(layer)) folded.delete(folder);
  store.set({ filter: "", onlyProblems: false, folded });
  chooseLayer(store, layer);
  store.set({ brought: { panel: "layers" } });
}

export function chooseStep(store, step, layer = store.state.layer) {
  store.set({ layer, step, event: null });
  showInZoom(store, step);
}

export function chooseLayer(store, layer) {
  store.set({ layer, event: null });
}

function showInZoom(store, step) {
  const { zoom } = store.state;
  if (zoom && (step < zoom[0] || step > zoom[1])) store.set({ zoom: null });
}
