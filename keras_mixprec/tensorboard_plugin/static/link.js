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

export function readHash(hash) {
  return readLink(Object.fromEntries(new URLSearchParams(hash.replace(/^#/, ""))));
}

export function writeHash(state) {
  const query = new URLSearchParams();
  for (const key of LINKED) {
    if (state[key] !== null && state[key] !== undefined) query.set(key, state[key]);
  }
  return "#" + query;
}

const HOST_PREFIX = "p.mixed_precision.";

export function readHostHash(hash) {
  const entries = [...new URLSearchParams(hash.replace(/^#/, ""))]
    .filter(([key]) => key.startsWith(HOST_PREFIX))
    .map(([key, value]) => [key.slice(HOST_PREFIX.length), value]);
  return readLink(Object.fromEntries(entries));
}

export function hostLink(address, state) {
  const parts = LINKED
    .filter((key) => state[key] !== null && state[key] !== undefined)
    .map((key) => {
      return `&${HOST_PREFIX}${key}=${encodeURIComponent(state[key])}`;
    });
  return `${address}#mixed_precision${parts.join("")}`;
}
