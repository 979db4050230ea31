import { formatInteger, formatNumber, formatShare } from "./format.js";
import { ownHeadroom } from "./precision.js";

function headroomInWords(value, wider, formatName) {
  if (value === -Infinity) return "overflow: infinite or NaN values";
  const bits = formatNumber(Number(Math.abs(value).toFixed(1)));
  if (value === Infinity) return ALL_ZERO;
  if (wider) {
    const own = formatNumber(Number(ownHeadroom(value, wider, formatName).toFixed(1)));
    const other = value > 0 ? `${bits} bits if it were ${formatName}` : `${bits} bits beyond ${formatName}`;
    return `${own} bits left in ${wider}, ${other}`;
  }
  if (value > 0) return `${bits} bits left`;
  return `overflow: ${bits} bits too large`;
}

const ALL_ZERO = "all values are zero";

// The words for a reading of a non-finite batch.
export const BAD_INPUT = "input not finite: not an overflow, no format helps";

export const ANY_PASSED = "infinite, NaN or all zero through no fault of the layer";

// Functions that format a number, by the unit of its metric.
export const WORDS = {
  headroom: headroomInWords,
  count: (value) => (value > 0 ? `${formatInteger(value)} not finite` : "all finite"),
  share: (value) => value === Infinity ? ALL_ZERO : `${formatShare(value)} of elements`,
  error: (value) => `relative error ${formatNumber(value)}`,
  magnitude: (value) => value === Infinity ? "not finite" : `at most ${formatNumber(value)}`,
};

// Returns a value in words. `wider` is the dtype that computed the value, if its range is larger
// than that of the format.
export function valueInWords(kind, value, wider = null, formatName = "16 bits") {
  return Number.isNaN(value) ? "not measured" : WORDS[kind](value, wider, formatName);
}
