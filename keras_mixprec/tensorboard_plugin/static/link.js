const LINKED = ["run", "compare", "metric", "layer", "step", "part"];

export function readLink(entries) {
  const link = {};
  for (const key of LINKED) {
    const value = entries[key];
    if (value === undefined || value === null || value === "") continue;
    if (key === "step" && !Number.isFinite(Number(value))) continue;
    if (key === "part" && !["activation", "gradient"].includes(value)) continue;
    link[key] = key === "step" ? Number(value) : String(value);
  }
  return link;
}

/** Returns the choices in a link. In TensorBoard's hash, the keys of a plugin have a prefix. */
export function readHash(hash, prefix = "") {
  const entries = [...new URLSearchParams(hash.replace(/^#/, ""))]
    .filter(([key]) => key.startsWith(prefix))
    .map(([key, value]) => [key.slice(prefix.length), value]);
  return readLink(Object.fromEntries(entries));
}

export function writeHash(state, prefix = "") {
  return LINKED.filter((key) => state[key] !== null && state[key] !== undefined)
    .map((key) => `${prefix}${key}=${encodeURIComponent(state[key])}`).join("&");
}

export const HOST_PREFIX = "p.mixed_precision.";
