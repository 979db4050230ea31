import { decodeHeat } from "./heat_data.js";

const COLUMNS = 1200;

export function dataUrl(name, query) {
  return query ? `./data/${name}?${new URLSearchParams(query)}` : `./data/${name}`;
}

function bytesOfBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

async function unpackInline(inline) {
  const packed = new Blob([bytesOfBase64(inline)]).stream();
  const unpacked = packed.pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).json();
}

let unpacking = null;

export function isInline() {
  return Boolean(globalThis.MIXPREC_INLINE);
}

async function inlineAnswer(path) {
  unpacking ??= unpackInline(globalThis.MIXPREC_INLINE);
  const answers = await unpacking;
  return Object.hasOwn(answers, path) ? answers[path] : null;
}

// Adds the run and the metric to the heat, because the user may choose a different run or metric
// before the answer arrives.
function readHeat(path, buffer) {
  const query = new URLSearchParams(path.split("?")[1]);
  return { ...decodeHeat(buffer), run: query.get("run"), metric: query.get("metric") };
}

async function fetchAnswer(path) {
  const response = await fetch(path, { cache: "no-store" });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`${path}: HTTP ${response.status}`);
  return response;
}

export async function api(path) {
  const isHeat = path.startsWith("./data/heat?");
  if (isInline()) {
    const answer = await inlineAnswer(path);
    return isHeat && answer ? readHeat(path, bytesOfBase64(answer).buffer) : answer;
  }
  const response = await fetchAnswer(isHeat ? `${path}&columns=${COLUMNS}` : path);
  if (!response) return null;
  return isHeat ? readHeat(path, await response.arrayBuffer()) : response.json();
}
