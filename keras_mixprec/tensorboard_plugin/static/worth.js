import { toNumber, formatNumber } from "./format.js";
import { shortRun } from "./names.js";

// Medians of few readings differ by less between two runs of the same.
const ALIKE = 0.1;

const inTwoDigits = (ratio) => formatNumber(Number(ratio.toPrecision(2)));

// How many times as much one row of the table of runs has of a figure as another.
function timesAs(own, other, name) {
  return own[name] > 0 && other[name] > 0 ? own[name] / other[name] : null;
}

/**
 * The row of a run of the folder with as many layers that was compiled with float32, or that
 * was not.
 * @param {any[] | null} rows The table of runs, some of them still unread.
 * @param {any} run
 * @param {boolean} isWide
 */
export function partnerOf(rows, run, isWide) {
  return rows?.find(({ run: name, layers, policy }) => name !== run.run && policy &&
    (policy === "float32") === isWide && layers === run.layers.length);
}

// What to make of both.
function choice(speed, memory) {
  const isLess = memory !== null && memory < 1 - ALIKE;
  if (speed > 1 + ALIKE) return "16 bits are worth it on this device";
  const isSlower = speed < 1 - ALIKE;
  if (isLess) return `16 bits are ${isSlower ? "slower" : "no faster"} on this device, and save memory`;
  return isSlower ? "float32 is the better choice on this device" :
    "16 bits are no faster on this device";
}

/**
 * What 16 bits bring or cost, in a sentence, where a run has one of the other precision beside it
 * in the folder; `null` if there is none, or the speed of either is not known.
 * @param {any[] | null} rows
 * @param {any} run
 * @returns {string | null}
 */
export function worthInWords(rows, run) {
  const isWide = run.policy === "float32";
  const shown = rows?.find((row) => row.run === run.run);
  const partner = partnerOf(rows, run, !isWide);
  if (!shown || !partner) return null;
  const [own, other] = isWide ? [partner, shown] : [shown, partner];
  const [speed, memory] = ["samples_per_second", "peak_memory"].map((name) => timesAs(own, other, name));
  if (speed === null) return null;
  const losses = [own, other].map((row) => toNumber(row.last_loss ?? null));
  const parts = [
    `${inTwoDigits(speed)}x the speed`,
    memory === null ? "memory not known" : `${inTwoDigits(memory)}x the memory`,
    losses.every(Number.isFinite) ?
      `last loss ${formatNumber(losses[0])} instead of ${formatNumber(losses[1])}` : null,
  ];
  // What is faster and wrong is no choice.
  const isOpen = own.finding && !own.finding.repaired;
  const names = [shortRun(own.run, other.run), shortRun(other.run, own.run)];
  return `${names.join(" against ")}: ${parts.filter(Boolean).join(", ")}` +
    `${isOpen ? "" : `: ${choice(speed, memory)}`}.`;
}
