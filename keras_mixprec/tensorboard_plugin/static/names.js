// Shortened names must keep the parts in which they differ.

export function cutMiddle(text, length) {
  if (text.length <= length) return text;
  const end = Math.ceil((length - 1) * 0.6);
  return text.slice(0, length - 1 - end) + "…" + text.slice(text.length - end);
}

// The folders that all of several paths are in.
function sharedFolders(paths) {
  const [first = [], ...others] = paths.map((path) => path.split("/").slice(0, -1));
  const differs = first.findIndex((part, depth) => others.some((parts) => parts[depth] !== part));
  return differs < 0 ? first.length : differs;
}

// A path and the folders that it is in, the outermost first.
export function foldersOf(path) {
  const parts = path.split("/");
  return parts.map((_, depth) => parts.slice(0, depth + 1).join("/"));
}

/**
 * A map from each path to a label of at most `length` characters, no two alike: without the
 * folders that all long ones share, and with its middle cut.
 * @param {string[]} paths
 * @param {number} length
 */
export function shortNames(paths, length) {
  const long = paths.filter((path) => path.length > length);
  const gone = sharedFolders(long);
  const labels = new Map(paths.map((path) => [path, path]));
  const taken = new Set(paths);
  long.forEach((path, index) => {
    const rest = gone ? ["…", ...path.split("/").slice(gone)].join("/") : path;
    let label = cutMiddle(rest, length);
    if (taken.has(label)) label = `${cutMiddle(rest, length - 7)} #${index + 1}`;
    taken.add(label);
    labels.set(path, label);
  });
  return labels;
}

// The names of two runs without the folders that both end with.
export function shortRun(run, other) {
  const [parts, others] = [run.split("/"), (other ?? "").split("/")];
  while (parts.length > 1 && others.length > 1 && parts.at(-1) === others.at(-1)) {
    parts.pop();
    others.pop();
  }
  return parts.join("/");
}

const LABEL = 28;

/** The short name of a run next to another one. */
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
