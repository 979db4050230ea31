// What distinguishes names must stay visible, however short they are made.

export function cutMiddle(text, length) {
  if (text.length <= length) return text;
  const end = Math.ceil((length - 1) * 0.6);
  return text.slice(0, length - 1 - end) + "…" + text.slice(text.length - end);
}

function joined(parts) {
  return parts.join("/").replace(/(…\/)+/g, "…/").replaceAll("…/…", "…");
}

// Whole folders that all of them are in.
function sharedFolders(paths) {
  const [first = [], ...others] = paths.map((path) => path.split("/").slice(0, -1));
  const differs = first.findIndex((part, depth) => {
    return others.some((parts) => parts[depth] !== part);
  });
  return differs < 0 ? first.length : differs;
}

const stemOf = (part) => part.replace(/_?\d+$/, "");

function countStems(paths) {
  const stems = new Map();
  for (const path of new Set(paths.flatMap(foldersOf))) {
    const stem = stemOf(path);
    stems.set(stem, (stems.get(stem) ?? 0) + 1);
  }
  return stems;
}

// A path and the folders that it is in, the outermost first.
export function foldersOf(path) {
  const parts = path.split("/");
  return parts.map((_, depth) => parts.slice(0, depth + 1).join("/"));
}

// Of "transformer_encoder_layer_11" among eleven others, "…layer_11".
function shortParts(path, stems) {
  return foldersOf(path).map((folder) => {
    const part = folder.slice(folder.lastIndexOf("/") + 1);
    const [end] = part.match(/[^_]*_?\d+$/) ?? [part];
    const alike = stems.get(stemOf(folder)) > 1 && end.length + 1 < part.length;
    return alike ? `…${end}` : part;
  });
}

// Which of the folders to keep, all of them first.
function subsets(count) {
  const sizeOf = (bits) => [...bits.toString(2)].filter((bit) => bit === "1").length;
  return Array.from({ length: 2 ** Math.min(count, 6) }, (_, bits) => bits)
    .sort((one, other) => sizeOf(other) - sizeOf(one) || one - other);
}

// Ways to shorten, from whole to hardly readable; each makes a label of a path.
function waysToShorten(paths, length) {
  const long = paths.filter((path) => path.length > length);
  const shared = sharedFolders(long);
  const stems = countStems(paths);
  const restOf = (path, parts) => {
    const gone = path.length > length ? shared : 0;
    return gone ? ["…", ...parts.slice(gone)] : parts;
  };
  const shorts = new Map(paths.map((path) => {
    return [path, restOf(path, shortParts(path, stems))];
  }));
  const short = (path) => shorts.get(path);
  const keep = (bits) => (path) => joined(short(path).map((part, depth, parts) => {
    const inner = depth < parts.length - 1;
    return inner && !((bits >> depth) & 1) ? "…" : part;
  }));
  const cut = (size) => (path) => {
    const folders = short(path).slice(0, -1).map((part) => cutMiddle(part, size));
    const start = joined([...folders, ""]);
    const room = Math.max(4, length - start.length);
    return start + cutMiddle(path.split("/").at(-1), room);
  };
  const depth = Math.max(0, ...long.map((path) => short(path).length - 1));
  return [
    (path) => path,
    (path) => joined(restOf(path, path.split("/"))),
    ...subsets(depth).map(keep), cut(20), cut(12), cut(8), cut(5),
  ];
}

// Labels of many paths: the runs of a model have the same, and several panels.
const MANY = 200;
const KEPT_LABELS = 8;
const kept = new Map();

// A map from each path to a label of at most `length` characters, no two alike.
export function shortNames(paths, length) {
  if (paths.length < MANY) return makeLabels(paths, length);
  const key = `${length}\n${paths.join("\n")}`;
  if (!kept.has(key)) {
    if (kept.size === KEPT_LABELS) kept.delete(kept.keys().next().value);
    kept.set(key, makeLabels(paths, length));
  }
  return kept.get(key);
}

function makeLabels(paths, length) {
  const labels = new Map();
  const taken = new Set();
  for (const way of waysToShorten(paths, length)) {
    if (labels.size === paths.length) break;
    const made = paths.map(way);
    const counts = new Map();
    for (const label of made) counts.set(label, (counts.get(label) ?? 0) + 1);
    made.forEach((label, index) => {
      const free = counts.get(label) === 1 && !taken.has(label);
      if (labels.has(paths[index]) || !free || label.length > length) return;
      labels.set(paths[index], label);
      taken.add(label);
    });
  }
  paths.forEach((path, index) => {
    const number = ` #${index + 1}`;
    if (!labels.has(path)) {
      labels.set(path, cutMiddle(path, length - number.length) + number);
    }
  });
  return labels;
}

// Runs are told apart without the folders that both end with.
export function shortRun(run, other) {
  const [parts, others] = [run.split("/"), (other ?? "").split("/")];
  while (parts.length > 1 && others.length > 1 && parts.at(-1) === others.at(-1)) {
    parts.pop();
    others.pop();
  }
  return parts.join("/");
}

const LABEL = 28;

/** What a run is called beside another where there is little room; its title is whole. */
export function labelOfRun(run, other) {
  const name = shortRun(run, other);
  if (name.length <= LABEL) return name;
  return shortNames([name, shortRun(other ?? "", run)], LABEL).get(name);
}

// A layer used twice has rows "path" and "path#1", which is its second call.
export function callName(call, paths) {
  const [whole, path, number] = call.match(/^(.*)#(\d+)$/s) ?? [];
  return whole && !paths.has(call) ? `${path}, call ${Number(number) + 1}` : call;
}
