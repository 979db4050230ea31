import { eventKey, layersOf, momentOf } from "./event_text.js";

export const NOTHING_CHOSEN = { layer: null, step: null, event: null };

export function chooseEvent(store, event) {
  const layer = layersOf(event)[0] ?? store.state.layer;
  store.set({ layer, step: momentOf(event), event: eventKey(event) });
  showInZoom(store, momentOf(event));
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
