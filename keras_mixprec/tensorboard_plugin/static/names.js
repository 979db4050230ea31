// Shortens names so that they keep the parts in which they differ.

export function cutMiddle(text, length) {
  if (text.length <= length) return text;
  const end = Math.ceil((length - 1) * 0.6);
  return text.slice(0, length - 1 - end) + "…" + text.slice(text.length - end);
}

// Returns the folders that contain all of the paths.
function sharedFolders(paths) {
  const [first = [], ...others] = paths.map((path) => path.split("/").slice(0, -1));
  const differs = first.findIndex((part, depth) => others.some((parts) => parts[depth] !== part));
  return differs < 0 ? first.length : differs;
}

// Returns the folders that contain a path, the outermost first, and the path.
export function foldersOf(path) {
  const parts = path.split("/");
  return parts.map((_, depth) => parts.slice(0, depth + 1).join("/"));
}

/**
 * Returns a map from each path to a unique label of at most `length` characters. Labels leave
 * out the folders that all long paths share, and may leave out the middle of a path.
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

// Returns the name of a run without the folders at its end that the other run's name also has.
export function shortRun(run, other) {
  const [parts, others] = [run.split("/"), (other ?? "").split("/")];
  while (parts.length > 1 && others.length > 1 && parts.at(-1) === others.at(-1)) {
    parts.pop();
    others.pop();
  }
  return parts.join("/");
}

const LABEL = 28;

/** Returns the short name of a run for a place next to another run. */
export function labelOfRun(run, other) {
  const name = shortRun(run, other);
  if (name.length <= LABEL) return name;
  return shortNames([name, shortRun(other ?? "", run)], LABEL).get(name);
}

// Returns the name of a call. The second call to the layer "path" is "path#1".
export function callName(call, paths) {
  const [whole, path, number] = call.match(/^(.*)#(\d+)$/s) ?? [];
  return whole && !paths.has(call) ? `${path}, call ${Number(number) + 1}` : call;
}
