import { formatNumber, toNumber } from "./format.js";
import { hasNo16Bits } from "./precision.js";
import { differs, fasterOrSlower, memoryBeside, memoryRatio, speedBeside, speedRatio } from "./speed.js";

// What is told apart may still be too little to choose by.
const LITTLE = 0.1;

/**
 * The row of a run of the folder with as many layers that was compiled with float32, or that
 * was not and still computes in 16 bits.
 * @param {any[] | null} rows The table of runs, some of them still unread.
 * @param {any} run
 * @param {boolean} isWide
 */
export function partnerOf(rows, run, isWide) {
  return rows?.find((row) => row.run !== run.run && row.policy && (row.policy === "float32") === isWide &&
    row.layers === run.layers.length && (isWide || !hasNo16Bits(row)));
}

// What to make of both.
function choice(own, other) {
  const speed = speedRatio(own, other);
  const memory = memoryRatio(own, other);
  const how = !differs(speed) ? "no faster" :
    (Math.abs(speed.ratio - 1) > LITTLE ? "" : "hardly ") + fasterOrSlower(speed);
  if (how === "faster") return "16 bits are worth it on this device";
  const saves = memory !== null && memory < 1 - LITTLE;
  if (saves || how !== "slower") return `16 bits are ${how} on this device${saves ? ", and save memory" : ""}`;
  return `float32 is the ${memory === null ? "faster one" : "better choice"} on this device`;
}

/**
 * What 16 bits bring or cost, in a sentence, where a run has one of the other precision beside it
 * in the folder; `null` if there is none, no step of either was timed, or it computes nothing in
 * 16 bits.
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
  if (hasNo16Bits(own)) return null;
  const speed = speedRatio(own, other);
  if (!speed) return null;
  const losses = [own, other].map((row) => toNumber(row.last_loss ?? null));
  const parts = [
    speedBeside(own, other),
    losses.every(Number.isFinite) ?
      `last loss ${formatNumber(losses[0])} instead of ${formatNumber(losses[1])}` : null,
    memoryBeside(own, other),
  ];
  // What is faster and wrong is no choice.
  const isOpen = own.finding && !own.finding.repaired;
  return parts.filter(Boolean).join("; ") +
    `${isOpen || !speed.enough ? "" : `: ${choice(own, other)}`}.`;
}
