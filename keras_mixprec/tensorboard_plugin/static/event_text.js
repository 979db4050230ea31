import {
  formatInteger, formatNumber, formatScale, listSome, plural, readable, toNumber, words,
} from "./format.js";

const PRECISION_KINDS = [
  "demote", "shrink", "promote", "undo", "start", "loss_scaling", "raise_scale",
  "lower_scale", "advise_scale",
  "give_up",
];

const FINDINGS = ["verdict", "trend", "before_training", "loss_scale_low"];

// Shapes repeat what colours say, for readers who cannot distinguish the colours.
export const LEVELS = {
  bad: { shape: "triangle", glyph: "▲", color: "--bad", label: "severe verdict" },
  warning: { shape: "diamond", glyph: "◆", color: "--warning", label: "warning" },
  info: { shape: "circle", glyph: "●", color: "--info", label: "information" },
  demote: {
    shape: "down", glyph: "▼", color: "--demote", label: "demoted to a wider dtype",
  },
  promote: {
    shape: "up", glyph: "△", color: "--promote", label: "returned to 16 bits",
  },
  skip: { shape: "tick", glyph: "❙", color: "--skip", label: "skipped step" },
};

export function laneOf(event) {
  if (["skipped_step", "skipped_steps_not_kept"].includes(event.kind)) return "skipped";
  if (FINDINGS.includes(event.kind)) return "verdicts";
  return PRECISION_KINDS.includes(event.kind) ? "precision" : null;
}

// A skip is noticed some steps after it happened. How far a loss scale fell is of the reading
// that says so, not of the step at which it began to fall.
export function momentOf(event) {
  if (event.kind === "loss_scale_low") return event.step;
  return event.at_step ?? event.first_step ?? event.step;
}

export function layersOf(event) {
  if (event.layer) return [event, ...event.members ?? []].map(({ layer }) => layer);
  return event.layers ? Object.keys(event.layers) : [];
}

export function eventKey(event) {
  const about = event.verdict ?? event.finding ?? event.at_step ?? "";
  const layer = layersOf(event)[0] ?? "";
  return [event.kind, event.step, event.wall_time, about, layer].join("|");
}

// What the sentence on the run begins with, which Python decides.
export function mainFinding({ events, finding }) {
  return finding ? events[finding.event] : null;
}

// Where the name in the log would say nothing to a reader.
const TITLES = {
  probe_compiled: "probed step compiled", skipped_steps_not_kept: "more skipped steps",
};

export function kindTitle(kind) {
  return TITLES[kind] ?? words(kind);
}

export function eventTitle(event) {
  const { kind } = event;
  if (kind === "verdict") return words(event.verdict);
  if (kind === "loss_scale_low" && event.cause === "bad_data") return "loss scale lowered by bad data";
  return kind === "before_training" ? words(event.finding ?? kind) : kindTitle(kind);
}

function changeSentence(verb, event) {
  const changes = Object.entries(event.layers ?? {});
  const names = listSome(changes.map(([path]) => path), 2);
  const after = changes[0]?.[1]?.after;
  const where = after ? ` to ${after.replace(/^mixed_/, "")}` : "";
  const reason = Object.values(event.because ?? {})[0];
  const why = reason ? `: ${reason}` : "";
  const what = changes.length ? `${names}${where}${why}` : event.message ?? "";
  return `${verb} ${what}`.trim() + ".";
}

function span(event) {
  if (event.first_step === undefined) return "";
  const [first, last] = [event.first_step, event.last_step].map(formatInteger);
  return ` between steps ${first} and ${last}`;
}

// Infinities by their sign, and NaN.
function kindsOf(event) {
  const kinds = [...new Set(Object.values(event.kinds ?? {}).flat())];
  return kinds.length ? ` (${kinds.join(", ")})` : "";
}

function countsOf(event, one, several) {
  const seen = Object.entries(event.counts ?? {}).filter(([, count]) => count > 0);
  return seen.map(([kind, count], index) => {
    const unit = index ? "" : ` ${count === 1 ? one : several}`;
    return `${kind} in ${formatInteger(count)}${unit}`;
  }).join(", ");
}

function withAdvice({ message = "", harm = "", advice = "" }) {
  const said = [message, harm].filter(Boolean).map((text) => `${text[0].toUpperCase()}${text.slice(1)}.`);
  return [...said, advice].filter(Boolean).join(" ");
}

/** Whether the batch of a skipped step, not its precision, is the reason. */
export function hasBadInput({ bad_input }) {
  return Object.keys(bad_input ?? {}).length > 0;
}

function rowsInWords(parts) {
  return Object.entries(parts).map(([part, row]) => `row ${row} of the batch's ${part}`).join(", ");
}

// Batches are told by their steps alone: those of an epoch are counted from 0, and steps from 1.
function badBatches({ batches = [], count = batches.length, message = "" }) {
  const [first] = batches;
  if (!first) return message;
  const more = count > 1 ? `${plural(count, "batch").replace(/s$/, "es")}, the first at step ` : "the batch of step ";
  return `Inputs not finite in ${more}${formatInteger(first.step)}.`;
}

function whySkipped(event) {
  if (hasBadInput(event)) {
    const which = event.members ? "these batches were" : "the batch was";
    return `${which} not finite, first in ${rowsInWords(event.bad_input)}, ` +
      "which no loss scale or dtype changes.";
  }
  const variables = event.variables ?? [];
  const where = variables.length ? ` in ${listSome(variables, 2)}` : "";
  const loss = event.loss?.length ? `loss ${event.loss.join(", ")}, ` : "";
  return `${loss}gradients not finite${where}${kindsOf(event)}.${loss ? "" : ofTheSearch(event)}`;
}

// Gradients that overflow, of a finite loss, with none that are NaN.
function ofTheSearch({ kinds = {} }) {
  const found = Object.values(kinds).flat();
  if (!found.length || !found.every((kind) => kind.endsWith("inf"))) return "";
  return " The loss scale was too high for them: a dynamic one is lowered by that, which is how it finds " +
    "its height, and harmless while few steps are.";
}

const SENTENCES = {
  skipped_step(event) {
    const optimizer = event.optimizer ? ` of ${event.optimizer}` : "";
    const why = whySkipped(event);
    if (event.members) {
      const [first, last] = [event.members[0], event.members.at(-1)];
      const steps = [first, last].map((one) => formatInteger(momentOf(one)));
      const [from, until] = [first, last].map((one) => formatScale(one.scale));
      const scale = from === until ? from : `${from} → ${until}`;
      return `${plural(event.members.length, "update")}${optimizer} skipped in a row, ` +
        `steps ${steps.join(" to ")}, at loss scale ${scale}: ${why}`;
    }
    return `Update${optimizer} skipped at loss scale ${formatScale(event.scale)}: ${why}`;
  },
  skipped_steps_not_kept(event) {
    const more = plural(event.count ?? 0, "more skipped step");
    return `${more}${span(event)}, of which the log has the number alone.`;
  },
  loss_scale_not_known(event) {
    return `Loss scale set by hand or not known at each step${span(event)}.`;
  },
  nonfinite_losses: (event) => `Non-finite loss: ${countsOf(event, "batch", "batches")}.`,
  nonfinite_gradients(event) {
    const optimizer = event.optimizer ? ` of ${event.optimizer}` : "";
    return `Non-finite gradients${optimizer}: ${countsOf(event, "step", "steps")}.`;
  },
  train_begin: (event) => `Call ${event.fit ?? ""} of fit starts.`,
  verdict(event) {
    const since = event.failing_since ?? null;
    const failing = since === null ? "" : `, failing since step ${formatInteger(since)}`;
    const [layer, ...others] = layersOf(event);
    const by = event.numbers?.found_by;
    const who = by ? `Found by ${by}. ` : "";
    const at = (layer ? `${layer}${failing}: ` : "") + who;
    const same = others.length ?
      ` The same in ${plural(others.length, "more layer")}: ${others.join(", ")}.` : "";
    return at + (event.advice || words(event.verdict)) + same;
  },
  before_training(event) {
    const at = event.layer ? `${event.layer}: ` : "";
    return `Before training: ${at}${event.message} ${event.advice ?? ""}`.trim();
  },
  demote: (event) => changeSentence(event.dry_run ? "Would demote" : "Demoted", event),
  shrink: (event) => changeSentence("Returned", event),
  promote: (event) => changeSentence("Returned", event),
  undo: (event) => event.message || changeSentence("Undone: returned", event),
  start: (event) => `The tuner ${event.message ?? "starts from a plan"}.`,
  loss_scaling: (event) => changeSentence("Loss scaling:", event),
  raise_scale: (event) => `The tuner ${event.message ?? "raises the loss scale"}.`,
  lower_scale: (event) => `The tuner ${event.message ?? "lowers the loss scale"}.`,
  advise_scale: (event) => `The tuner ${event.message ?? "advises another loss scale"}.`,
  give_up: (event) => event.message || "The tuner gave up.",
  rebuild: (event) => {
    return `Train step rebuilt in ${formatNumber(event.seconds)} s.`;
  },
  probe_compiled: (event) => {
    return "The probed step, which trains and measures every layer, one in probe_every steps, was " +
      `compiled in ${formatNumber(event.seconds)} s.`;
  },
  probe_failed(event) {
    const at = event.layer ? ` at ${event.layer}` : "";
    return `Probe failed${at}: ${event.reason}`;
  },
  ranges_measured(event) {
    const steps = plural(event.steps?.length ?? 0, "step");
    return `Ranges of all layers measured at ${steps} beside training, in ` +
      `${formatNumber(event.seconds)} s.`;
  },
  zero_gradients: (event) => `Reading of ranges: ${event.message}.`,
  unreadable: (event) => event.message ?? "",
  ranges_withheld: (event) => event.message ?? "",
  bad_batches: badBatches,
  graph_rewrite: (event) => `Graph rewrite: ${event.message}.`,
  ignored_variable: (event) => event.message ?? "",
  no_16_bits: (event) => `Precision: ${event.message}.`,
  trend(event) {
    const when = event.overflows_in_steps;
    const soon = when === undefined || when === null ? "" :
      `, overflow expected in ${formatNumber(when)} steps`;
    return `${event.layer}: ${formatNumber(event.headroom_bits)} bits left${soon}.`;
  },
  loss_scale_kept: (event) => {
    return `Loss scale ${formatScale(event.scale)} again: it fell because of bad data alone.`;
  },
  loss_scale_low: withAdvice,
  metric_not_finite: withAdvice,
  validation_not_finite: withAdvice,
  loss_scale_recovered: (event) => `Loss scale ${formatScale(event.scale)}: no longer too low.`,
  no_loss_scaling: (event) => `Layers compute in float16 and ${
    event.by === "train_step" ? "train_step does not scale" : "nothing scales"
  } the loss.`,
  first_scale: (event) => `Loss scaling starts at ${formatScale(event.scale)}.`,
  stopped: (event) => `Training stopped: ${event.reason}`,
  // Its first sentence, of which lines after the first are indented.
  train_end: (event) => {
    return String(event.summary ?? "Training ended.").replace(/\n {4}/g, " ").split("\n")[0];
  },
  log_gap(event) {
    return `Nothing could be logged from step ${event.from_step} on ` +
      `(${event.reason}); ${plural(event.lost ?? 0, "record")} lost.`;
  },
  validate: (event) => {
    return `Before the first step ${event.metric} is ${formatNumber(event.float32)} in float32.`;
  },
  keep: (event) => `The tuner ${event.message}.`,
  sign_off: (event) => `At the end of training: ${event.message}.`,
  validation_failed: (event) => `The metric is not evaluated any more: ${event.reason}`,
  plan_not_written: (event) => `Plan not written: ${event.reason}`,
  step_raised: (event) => `Step ${event.at_step} raised ${event.reason}` +
    (event.repaired ? "; it was taken again with the repair" : ""),
  fit_raised: (event) => `Training ended in step ${event.at_step}: ${event.reason}`,
  diagnosis_failed: (event) => `Diagnosis failed: ${event.reason}`,
};

export function describeEvent(event) {
  if (Object.hasOwn(SENTENCES, event.kind)) {
    return readable(SENTENCES[event.kind](event));
  }
  const { kind, step, wall_time, ...rest } = event;
  return `${kind} ${JSON.stringify(rest)}`;
}

// Which rows belong to which batch, of one step or of several in a row.
function badRows({ kind, batches, members, ...event }) {
  const bad = kind === "bad_batches" ? batches ?? [] : members ?? [event];
  return bad.flatMap(({ rows, bad_input, ...step }) => {
    const listed = rowsInWords(rows ?? bad_input ?? {});
    if (!listed) return [];
    return [`batch of step ${formatInteger(momentOf(step))}: not finite, first in ${listed} (rows count from 0)`];
  });
}

const asScale = (bits) => formatScale(2 ** toNumber(bits));
// What numbers of a verdict are called, and how they are written.
const NUMBERS = {
  error: ["error against float32"],
  error_of_change: ["error of its change against float32"],
  largest_input: ["largest number that it received"],
  largest_output_in_float32: ["largest number that it returns, computed in float32"],
  largest_inside_in_float32: ["largest number inside the layer, computed in float32"],
  smallest_inside_in_float32: ["smallest number but 0 inside the layer, computed in float32"],
  largest_gradient_in_float32: ["largest gradient, computed in float32"],
  batch_rows: ["rows of the batch in which it fails"],
  batch_rows_in_all: ["rows of the batch in which it fails, in all"],
  nonfinite_outputs: ["numbers that it returned infinite or NaN"],
  nonfinite_gradients: ["gradients that were infinite or NaN"],
  loss_scale_bits: ["loss scale", asScale],
  compared_at_bits: ["loss scale of the comparison with float32", asScale],
  lowest_bits: ["lowest loss scale that its gradients fit", asScale],
  highest_bits: ["highest loss scale that its gradients fit", asScale],
  advised_bits: ["loss scale that suits", asScale],
  needed_bits: ["loss scale that gradients need", asScale],
  fell_from_bits: ["loss scale before it fell", asScale],
  headroom_bits: ["headroom", (bits) => `${formatNumber(bits)} bits`],
  overflows_in_steps: ["steps until an overflow is expected"],
};
// Where bad batches were, in their epochs: their steps are told.
const PLACES = ["epoch", "batch", "batches"];
const LIMITS = {
  largest_inside_in_float32: `; float16 holds up to ${formatInteger(65504)}`,
  smallest_inside_in_float32: `; float16 holds down to ${formatNumber(6e-8)}`,
};

function inWords([name, value]) {
  const isNumber = typeof value === "number" || /^-?inf$/.test(value);
  const [title, format] = NUMBERS[name] ?? [words(name)];
  const write = format ?? (name.endsWith("scale") ? formatScale : formatNumber);
  const text = isNumber ? write(value) : [value].flat().join(", ");
  // Rows of a batch are beside its skipped step.
  const all = name.startsWith("samples_of_") ? ", counted from 0 in the whole array" : "";
  return `${title}${all}: ${text}${LIMITS[name] ?? ""}`;
}

export function eventDetails(event) {
  const lines = badRows(event);
  // The sentence has what comes first.
  if (event.message && event.layers) lines.push(...event.message.split("; ").slice(1));
  if (event.direction) {
    lines.push(event.direction === "update" ? "in the update of weights" : `in the ${event.direction} pass`);
  }
  const others = event.kind === "verdict" ? event.members ?? [] : [];
  const all = [event, ...others].map(({ numbers, verdict }) => Object.entries(numbers ?? {})
    .filter(([name]) => verdict !== "bad_data" || !PLACES.includes(name)).map(inWords));
  lines.push(...all[0]);
  others.forEach(({ layer }, place) => {
    if (all[place + 1].length) lines.push(`${layer}: ${all[place + 1].join("; ")}`);
  });
  for (const [path, change] of Object.entries(event.layers ?? {})) {
    const reason = event.because?.[path] ? ` (${event.because[path]})` : "";
    lines.push(`${path}: ${change?.before} → ${change?.after}${reason}`);
  }
  if (event.variables?.length) lines.push(`variables: ${event.variables.join(", ")}`);
  if (event.summary) lines.push(event.summary);
  if (event.details) lines.push(event.details);
  return lines.map(readable);
}
