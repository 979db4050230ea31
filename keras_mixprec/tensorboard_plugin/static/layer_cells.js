import { breakable, element } from "./dom.js";
import { formatInteger, formatShare, plural, toNumber } from "./format.js";
import { worstLayer } from "./layer_columns.js";
import { clamp } from "./scales.js";

const FULL_HEADROOM = 24;

function countBy(items, keyOf) {
  const counts = new Map();
  for (const item of items) {
    const key = keyOf(item);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return counts;
}

function shortType(dtype) {
  const short = { float16: "fp16", bfloat16: "bf16", float32: "fp32" };
  return short[dtype] ?? dtype ?? "–";
}

function typeBadge(dtype, count = 1) {
  if (!dtype) return "–";
  const times = count > 1 ? ` ×${formatInteger(count)}` : "";
  return element("span", { class: `type ${dtype}`, title: dtype + times },
    shortType(dtype) + times);
}

function typeBadges(layers) {
  const counts = countBy(layers, (layer) => layer.compute_dtype);
  return element("span", { class: "badges" }, ...[...counts].map(([dtype, count]) => {
    return typeBadge(dtype, count);
  }));
}

// Returns the badges of layers. Findings with the same text share a badge with their number.
function verdictBadges(layers) {
  const found = layers.flatMap(({ marks }) => marks);
  const counts = countBy(found, ({ text }) => text);
  const order = ["bad", "warning", "info", "fine"];
  const kinds = [...counts.keys()].map((text) => found.find((one) => one.text === text));
  kinds.sort((one, other) => order.indexOf(one.level) - order.indexOf(other.level));
  return element("span", { class: "badges" }, ...kinds.map(({ text, level }) => {
    const times = layers.length > 1 && counts.get(text) > 1 ? ` ×${counts.get(text)}` : "";
    return element("span", { class: `badge ${level}` }, text + times);
  }));
}

function headroomBar({ headroom }) {
  if (!headroom) return "–";
  const { level, text, title } = headroom;
  const fill = element("span", { class: `fill ${level}` });
  // Outputs that are all zero are a fault, and a full bar would look healthy.
  const share = level === "zero" ? 0 : clamp(toNumber(headroom.bits) / FULL_HEADROOM, 0.04, 1);
  fill.style.width = `${100 * (level === "passed" ? 1 : share)}%`;
  return element("span", { class: `headroom ${level}`, title },
    element("span", { class: "bar" }, fill), element("span", {}, ...breakable(text)));
}

function demotion(layers) {
  const demoted = layers.filter((layer) => layer.demoted_at !== null);
  if (!demoted.length) return "";
  if (layers.length > 1) return `▼\u00a0${plural(demoted.length, "layer")}`;
  const [layer] = demoted;
  const text = `▼\u00a0step\u00a0${formatInteger(layer.demoted_at)}`;
  return element("span", { title: layer.demoted_because }, text);
}

export function pathCell(layer, label) {
  const reason = layer.demoted_because ?? "";
  return element("div", {},
    element("span", { class: "path whole" }, ...breakable(layer.path)),
    element("span", { class: "path short", "aria-hidden": "true" }, label),
    element("span", { class: "reason" },
      reason && `${layer.compute_dtype} because: ${reason}`));
}

/**
 * Returns the content of a cell, for a layer or for all layers in a block.
 * @param {{id: string, otherOf?: (layer: any) => any, of: (layer: any) => any,
 *   ofBlock: (layers: any[]) => any}} column
 */
export function cell(column, { layer, block, layers }) {
  const isBlock = block !== undefined;
  const own = isBlock ? layers : [layer];
  const shown = column.otherOf ? own.map(column.otherOf).filter(Boolean) : own;
  const value = isBlock ? column.ofBlock(layers) : column.of(layer);
  switch (column.id.replace("other-", "")) {
    case "class": return isBlock ? plural(layers.length, "layer") : element("span", { title: value }, ...breakable(String(value)));
    case "dtype": return shown.length > 1 ? typeBadges(shown) : typeBadge(shown[0]?.compute_dtype);
    case "headroom": return shown.length ? headroomBar(worstLayer(shown)) : "–";
    case "verdicts": return verdictBadges(shown);
    case "demoted": return demotion(own);
    case "parameters": return formatInteger(value ?? 0);
    default: return formatShare(value ?? NaN);
  }
}
