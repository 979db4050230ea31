import { formatInteger, formatNumber, formatShare, plural } from "./format.js";
import { eventTitle, LEVELS, mainFinding } from "./event_text.js";
import { fitsOf } from "./fits.js";
import { leastHeadroom } from "./least_headroom.js";
import { alarmLevel } from "./palette.js";
import { isRepaired, isWider, ownHeadroom } from "./precision.js";

export function countBy(items, keyOf) {
  const counts = new Map();
  for (const item of items) {
    const key = keyOf(item);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return counts;
}

export function shortType(dtype) {
  const short = { float16: "fp16", bfloat16: "bf16", float32: "fp32" };
  return short[dtype] ?? dtype ?? "–";
}

/**
 * The figures above everything else, some of which lead to a finding.
 * @returns {{name: string, text: string, title?: string, level?: string,
 *   event?: any, layer?: any}[]}
 */
export function keyFigures(run) {
  const { skipped } = run;
  // Several optimizers may skip the same step.
  const counted = skipped && skipped <= run.last_step;
  const share = counted ? ` (${formatShare(skipped / run.last_step)})` : "";
  const steps = formatInteger(run.last_step);
  const { count: fits } = fitsOf(run);
  const types = [...countBy(run.layers, (layer) => layer.compute_dtype)];
  const demoted = run.layers.filter((layer) => layer.demoted_at !== null);
  const finding = findingState(run);
  return [
    {
      name: "steps", text: steps + (fits > 1 ? ` in ${fits} fits` : ""),
      title: "steps count on over all calls of fit that logged here",
    },
    {
      name: "skipped steps",
      // The sentence is of the last fit alone.
      text: formatInteger(skipped) + (fits > 1 && skipped ? ` of ${steps}` : "") + share,
      event: run.events.find((event) => event.kind === "skipped_step"),
    },
    {
      name: "layers",
      text: types.map(([type, n]) => `${n} ${type ?? "no type"}`).join(" · ") || "0",
    },
    {
      name: `demoted to ${[...new Set(demoted.map((x) => x.compute_dtype))].join(", ") || "float32"}`,
      text: plural(demoted.length, "layer"),
      layer: demoted[0],
    },
    ...shareIn16Bits(run),
    ...leastHeadroom(run),
    ...matmulPrecision(run),
    {
      name: "main finding", text: finding.text, level: finding.level,
      event: finding.event,
    },
  ];
}

// Of numbers in float32, if there are any: no word on what the run computes in. Logs of older
// versions have none.
function matmulPrecision({ matmul_precision: text }) {
  if (!text) return [];
  const [products] = text.split(", ");
  return [{
    name: "float32 products",
    text: products === "float32" ? "in full precision" : `in ${products}`,
    title: "no dtype of the run: numbers that are in float32, as in the layers kept in it, are " +
      `multiplied in ${text}`,
  }];
}

// Before and after what was demoted; logs of models without layers have none.
function shareIn16Bits({ share_of_flops: share }) {
  if (!share || share.now === null) return [];
  const [before, now] = [share.before, share.now].map(formatShare);
  return [{
    name: "FLOPs in 16 bits", text: before === now ? now : `${before} → ${now}`,
    title: "share of the FLOPs in float16 or bfloat16, at first and now",
  }];
}

/** What is said in place of a finding where little is known, by the state of the run. */
export const UNKNOWN = { not_measured: "not measured", not_compared: "none seen" };

/** @returns {{text: string, level?: string, event?: any}} */
function findingState(run) {
  const event = mainFinding(run);
  if (event) {
    const { repaired, level } = run.finding;
    return { ...describeFinding({ ...event, level }, repaired), event };
  }
  if (UNKNOWN[run.headline?.state]) return { text: UNKNOWN[run.headline.state] };
  return { text: "✓ none", level: "fine" };
}

/**
 * A finding in a word or two, and where it is, if that is not said beside it.
 * @param {any} event
 * @param {boolean} repaired
 */
export function describeFinding(event, repaired, where = "") {
  const name = eventTitle(event) + where;
  if (repaired) return { text: `✓ ${name}, repaired`, level: "fine" };
  return { text: `${LEVELS[event.level].glyph} ${name}`, level: event.level };
}

export function describeVerdict(event, layers) {
  return describeFinding({ kind: "verdict", ...event }, isRepaired(event, layers));
}

// The run in a sentence comes with a state; a word and a shape say what colour says.
export const STATES = {
  healthy: { glyph: "✓", word: "Healthy", level: "fine" },
  repaired: { glyph: "✓", word: "Repaired", level: "fine" },
  warning: { glyph: "◆", word: "Warning", level: "warning" },
  severe: { glyph: "▲", word: "Severe finding", level: "bad" },
  not_measured: { glyph: "○", word: "Not measured", level: "unknown" },
  not_compared: { glyph: "○", word: "Not compared", level: "unknown" },
  failing: { glyph: "▲", word: "Failing", level: "bad" },
};

const URGENCY = { fine: 0, unknown: 0, warning: 1, bad: 2 };

function urgencyOf(row) {
  return URGENCY[STATES[row?.headline?.state]?.level] ?? 0;
}

/**
 * The gravest run of a folder that is more urgent than the one that is shown, and how many
 * others are; `null` if there is none.
 * @param {any[] | null} summaries The rows of the table of runs, some of them still unread.
 * @param {string | null} shown
 * @returns {{run: string, state: string, others: number} | null}
 */
export function graverRun(summaries, shown) {
  const rows = summaries ?? [];
  const own = urgencyOf(rows.find(({ run }) => run === shown));
  const graver = rows.filter((row) => urgencyOf(row) > own);
  if (!graver.length) return null;
  const worst = graver.reduce((one, two) => (two.gravity < one.gravity ? two : one));
  return { run: worst.run, state: worst.headline.state, others: graver.length - 1 };
}

// A layer in float32 may hold what is too large for 16 bits: that is what it is for.
export function describeHeadroom(bits, type, formatName) {
  const level = alarmLevel("headroom", bits, isWider(type, formatName));
  const own = ownHeadroom(bits, type, formatName);
  const number = `${formatNumber(Number(own.toFixed(1)))} bits`;
  const texts = {
    zero: "all zero", beyond: `beyond ${formatName}`,
    bad: bits === -Infinity ? "▲ not finite" : "▲ overflow",
  };
  return { level, text: texts[level] ?? number };
}
