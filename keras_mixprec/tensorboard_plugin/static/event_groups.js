import { eventKey, hasBadInput, momentOf } from "./event_text.js";

function follows(event, group) {
  const last = group?.members.at(-1);
  return last && event.kind === "skipped_step" && last.kind === event.kind &&
    (event.optimizer ?? "") === (last.optimizer ?? "") &&
    // What is said of it is another cause.
    hasBadInput(event) === hasBadInput(last) &&
    momentOf(event) === momentOf(last) + 1;
}

/**
 * What is said once of several events: steps skipped in a row, and verdicts that say the same
 * of several layers. The event has the others as `members`, of skips itself as well.
 * @param {any[]} events of one run, by rising step
 * @returns {any[]}
 */
export function groupEvents(events) {
  const same = events.filter((event) => event.same_as);
  const isSame = (one, other) => one.same_as === other.layer && one.step === other.step &&
    one.verdict === other.verdict && one.direction === other.direction;
  return groupSkips(events.filter((event) => !event.same_as)).map((event) => {
    const members = same.filter((one) => isSame(one, event));
    return members.length ? { ...event, members } : event;
  });
}

function groupSkips(events) {
  const shown = [];
  // The last of each optimizer: others may skip the same steps.
  const open = new Map();
  for (const event of events) {
    if (event.kind !== "skipped_step") {
      shown.push(event);
      continue;
    }
    const optimizer = event.optimizer ?? "";
    const group = open.get(optimizer);
    if (follows(event, group)) group.members.push(event);
    else {
      open.set(optimizer, { members: [event] });
      shown.push(open.get(optimizer));
    }
  }
  return shown.map((entry) => {
    if (!entry.members) return entry;
    const [first, ...others] = entry.members;
    if (!others.length) return first;
    const kinds = Object.assign({}, ...entry.members.map((event) => event.kinds ?? {}));
    const variables = [...new Set(entry.members.flatMap((event) => event.variables ?? []))];
    return { ...first, members: entry.members, kinds, variables };
  });
}

// In how many steps updates were skipped; several optimizers may skip the same.
function stepsSkipped(events) {
  return new Set(events.filter(({ kind }) => kind === "skipped_step").map(momentOf)).size;
}

// As many as the figure above has: steps where there are some, and events otherwise.
function countOf(kind, { events, skipped }) {
  if (kind === "skipped_step") return stepsSkipped(events);
  const own = events.filter((event) => event.kind === kind);
  if (kind !== "skipped_steps_not_kept" || !own.length) return own.length;
  return Math.max(0, skipped - stepsSkipped(events));
}

/**
 * What there is of each kind, and in how many rows of the list it is said.
 * @param {{events: any[], skipped: number}[]} runs
 * @returns {{kind: string, count: number, rows: number}[]}
 */
export function countsByKind(runs) {
  const kinds = new Set(runs.flatMap(({ events }) => events.map(({ kind }) => kind)));
  const grouped = runs.map(({ events }) => groupEvents(events));
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  return [...kinds].map((kind) => ({
    kind, count: sum(runs.map((run) => countOf(kind, run))),
    rows: grouped.flat().filter((event) => event.kind === kind).length,
  }));
}

// Whether the chosen event is this one, or one of those that it stands for.
export function isChosenEvent(event, key) {
  return [event, ...event.members ?? []].some((one) => eventKey(one) === key);
}

export function lastMomentOf(event) {
  return momentOf(event.members?.at(-1) ?? event);
}
