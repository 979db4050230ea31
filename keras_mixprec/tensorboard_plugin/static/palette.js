import { clamp } from "./scales.js";
import { COLORS } from "./colors.js";

// Okabe and Ito's colors, which people with any common form of color vision can distinguish.
const CATEGORY = COLORS.category;

// Samples of a ramp from navy over teal to yellow. Lightness and hue change evenly, so that a
// difference of two bits of headroom is visible everywhere on the ramp.
const RAMP = COLORS.ramp;

function rampColor(position) {
  const place = clamp(position, 0, 1) * (RAMP.length - 1);
  const below = Math.min(Math.floor(place), RAMP.length - 2);
  const part = place - below;
  return RAMP[below].map((channel, index) => {
    return Math.round(channel + (RAMP[below + 1][index] - channel) * part);
  });
}

export function cssColor(rgb, alpha = 1) {
  return `rgba(${rgb.join(",")},${alpha})`;
}

// Headroom does not use yellow, which would look like an alarm next to the warning orange.
const HEADROOM = COLORS.headroom;
const SHARE_FLOOR = -5;
const ERROR_FLOOR = -4;
const MAGNITUDE_TOP = 5;

// Returns the level of headroom. `wider` is true if the value was computed in a dtype with a larger
// range than the format.
function headroomLevel(value, wider) {
  if (value === Infinity) return "zero";
  if (value === -Infinity) return "bad";
  if (wider) return value <= 0 ? "beyond" : "roomy";
  if (value <= 0) return "bad";
  return value < HEADROOM.warning ? "warning" : "quiet";
}

export function alarmLevel(kind, value, wider = false) {
  if (Number.isNaN(value)) return "none";
  if (kind === "headroom") return headroomLevel(value, wider);
  // The share of a tensor that is all zeros is infinite, and has a level of its own.
  if (kind === "share" && value === Infinity) return "zero";
  if (kind === "count") return value > 0 ? "bad" : "quiet";
  if (kind === "error") {
    if (value >= 1) return "bad";
    return value >= 0.1 ? "warning" : "quiet";
  }
  if (kind === "magnitude") return value === Infinity ? "bad" : "quiet";
  return "quiet";
}

// The colors of levels outside the color scale, such as layers in wider dtypes.
const LEVEL_COLORS = { beyond: COLORS.beyond, passed: COLORS.passed, roomy: COLORS.roomy };
for (const [level, name] of Object.entries(COLORS.levels)) LEVEL_COLORS[level] = CATEGORY[name];

export function levelColor(level) {
  return LEVEL_COLORS[level] ?? null;
}

export function valueColor(kind, value, wider = false) {
  const level = alarmLevel(kind, value, wider);
  if (level === "none") return null;
  if (level !== "quiet") return levelColor(level);
  if (kind === "headroom") {
    const { full, warning, ramp } = HEADROOM;
    return rampColor(((full - value) / (full - warning)) * ramp);
  }
  if (kind === "share") return rampColor(1 - Math.log10(value) / SHARE_FLOOR);
  if (kind === "error") {
    const position = (Math.log10(value) - ERROR_FLOOR) / (-1 - ERROR_FLOOR);
    return rampColor(position * HEADROOM.ramp);
  }
  if (kind === "magnitude") {
    return rampColor((Math.log10(value) / MAGNITUDE_TOP) * HEADROOM.ramp);
  }
  return COLORS.quiet;
}

// Samples of each color scale, from the top of the legend to the bottom.
export const LEGENDS = {
  headroom: {
    unit: "bits left",
    stops: [24, 20, 16, 12, 8, 4, 1, 0],
    labels: ["≥ 24", "20", "16", "12", "8", "4", "< 2", "overflow"],
  },
  count: { unit: "elements", stops: [0, 1], labels: ["0", "≥ 1"] },
  share: {
    unit: "of elements",
    stops: [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1],
    labels: ["0", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
  },
  error: {
    unit: "relative error",
    stops: [1e-4, 1e-3, 1e-2, 1e-1, 1],
    labels: ["≤ 0.01 %", "0.1 %", "1 %", "10 %", "≥ 100 %"],
  },
  magnitude: {
    unit: "largest",
    stops: [1, 10, 100, 1e3, 1e4, 1e5],
    labels: ["≤ 1", "10", "100", "1,000", "10,000", "100,000"],
  },
};
