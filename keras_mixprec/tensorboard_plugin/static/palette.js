import { clamp } from "./scales.js";

// Okabe and Ito's colours, told apart with every common colour vision.
export const CATEGORY = {
  orange: [230, 159, 0],
  sky: [86, 180, 233],
  green: [0, 158, 115],
  blue: [0, 114, 178],
  vermillion: [213, 94, 0],
  purple: [204, 121, 167],
};

// Samples of a ramp from navy over grey to yellow whose lightness rises evenly.
const RAMP = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85],
  [254, 232, 56],
];

export function rampColor(position) {
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

// Yellow stays unused here: beside the warning orange it would read as an alarm.
const HEADROOM_RAMP = 0.72;
const QUIET = [148, 163, 180];
const SHARE_FLOOR = -5;
const ERROR_FLOOR = -4;

export function alarmLevel(kind, value) {
  if (Number.isNaN(value)) return "none";
  if (kind === "headroom") {
    if (value <= 0) return "bad";
    return value < 2 ? "warning" : "quiet";
  }
  if (kind === "count") return value > 0 ? "bad" : "quiet";
  if (kind === "error") {
    if (value >= 1) return "bad";
    return value >= 0.1 ? "warning" : "quiet";
  }
  return "quiet";
}

export function valueColor(kind, value) {
  const level = alarmLevel(kind, value);
  if (level === "none") return null;
  if (level === "bad") return CATEGORY.vermillion;
  if (level === "warning") return CATEGORY.orange;
  if (kind === "headroom") {
    return rampColor(((24 - value) / 22) * HEADROOM_RAMP);
  }
  if (kind === "share") return rampColor(1 - Math.log10(value) / SHARE_FLOOR);
  if (kind === "error") {
    const position = (Math.log10(value) - ERROR_FLOOR) / (-1 - ERROR_FLOOR);
    return rampColor(position * HEADROOM_RAMP);
  }
  return QUIET;
}

// Bands from the top of the legend to its bottom; each spans one tick to the next.
export const LEGENDS = {
  headroom: {
    unit: "bits left",
    stops: [24, 20, 16, 12, 8, 4, 2, 0, -4],
    labels: ["≥ 24", "20", "16", "12", "8", "4", "2", "0", "overflow"],
  },
  count: { unit: "elements", stops: [0, 0, 1], labels: ["0", "", "≥ 1"] },
  share: {
    unit: "of elements",
    stops: [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1],
    labels: ["0", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"],
  },
  error: {
    unit: "relative error",
    stops: [1e-4, 1e-3, 1e-2, 1e-1, 1, 10],
    labels: ["≤ 0.01 %", "0.1 %", "1 %", "10 %", "100 %", "beyond"],
  },
};
