import { exponentTicks, linearScale, valueAtStep } from "./scales.js";
import { chooseLayer } from "./actions.js";
import { courseOf, headroomOfPart } from "./course.js";
import {
  createSurface, drawAxisName, drawLine, hatchPattern, pointerIn,
} from "./canvas.js";
import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import {
  formatInteger, formatPower, formatShare, momentInWords, readable, toNumber,
} from "./format.js";
import {
  exponentDomain, histogramAt, partInWordsOf, shareByZone, unscaled, zoneOf,
} from "./histogram_data.js";
import { pathOfCall } from "./heat_data.js";
import { BAD_INPUT, NO_RANGE } from "./metrics.js";
import { cutMiddle, shortNames } from "./names.js";
import { widerAt } from "./precision.js";
import { themeColor } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { histogramLayer, whyShown } from "./wanted.js";
import { scaleWindow, SPARE_BITS } from "./what_if.js";

const MARGIN = { left: 54, right: 12, top: 28, axis: 42 };
const BARS_HEIGHT = 300;
const RULER_HEIGHT = 46;
const PARTS_SHOWN = [["activation", "Activations"], ["gradient", "Gradients"]];
const ZONE_NAMES = {
  overflow: "overflow", normal: "normal", subnormal: "subnormal", vanishes: "→ 0",
  beyond: "beyond",
};

export function createHistogram(store) {
  const buttons = PARTS_SHOWN.map(([part, label]) => element("button", {
    type: "button", class: "segment", "data-part": part,
    onclick: () => store.set({ part }),
  }, label));
  const parts = element("div", {
    class: "segments", role: "group", "aria-label": "Part of the layer",
  }, ...buttons);
  const caption = element("p", { class: "hint" });
  const words = element("p", { class: "words" });
  const nothing = element("div", { class: "nothing" });
  const body = element("div", { class: "canvas-box" });
  const surface = createSurface(body, { role: "img" }, draw);
  const table = dataTable("Histogram");
  const root = card("histogram", "Histogram", [parts], caption, nothing, body, words, table.root);
  let shown = null;
  let labels = new Map();

  function current() {
    const { runData, histogram, step, part } = store.state;
    const name = histogramLayer(store.state);
    const taken = name === null ? null : histogramAt(histogram, step);
    if (!taken || !runData?.format) return null;
    if (!taken.bars.length && !taken.nonfinite) return null;
    // Whose gradients are whose the log of several optimizers does not say.
    const isPlaced = part === "gradient" && runData.scale.length < 2;
    const shift = isPlaced ? scaleBefore(runData.scale[0], taken.step) : null;
    const bars = unscaled(taken.bars, shift ?? 0);
    const paths = new Map(runData.layers.map((layer) => [layer.path, layer]));
    const layer = paths.get(pathOfCall(name, paths));
    return {
      ...taken, bars, shift, format: runData.format, part, layer,
      wider: widerAt(layer, taken.step, runData.format.name),
      range: isPlaced ? windowOf(taken, name, shift ?? 0) : null,
    };
  }

  // As "What if" has it, without the gradients of weights: a bar is as wide as a whole power of two.
  function windowOf({ step, bars, low }, name, shift) {
    if (!bars.length) return null;
    const { format } = store.state.runData;
    const heat = headroomOfPart(store.state);
    const { largest } = courseOf(heat, null, name, format.maximum_bits);
    const measured = largest.find(([at]) => at === step)?.[1];
    const top = measured ?? bars.at(-1).exponent + 1;
    return scaleWindow({ largest: top - shift, low: low - shift }, format);
  }

  // The power of the loss scale that a step was taken with, which its skip changes.
  function scaleBefore(line, step) {
    if (!line) return null;
    const scale = toNumber(valueAtStep(line.steps, line.scale, step - 1));
    return scale > 0 && scale < Infinity ? Math.round(Math.log2(scale)) : null;
  }

  function draw(context, width) {
    if (!shown) return;
    const { bars, format, shift, range, wider } = shown;
    const bottom = MARGIN.top + BARS_HEIGHT;
    const domain = exponentDomain(bars, format, shift ?? 0);
    const x = linearScale(domain, [MARGIN.left, width - MARGIN.right]);
    const most = Math.max(1, ...bars.map((bar) => bar.count));
    const decades = Math.max(1, Math.ceil(Math.log10(most + 1)));
    const y = linearScale([0, decades], [bottom, MARGIN.top + 14]);
    const heightOf = (count) => y(Math.log10(count + 1));
    shown.scale = x;
    drawZones(context, x, domain, format);
    if (!bars.length) drawNothingFinite(context, width);
    context.textAlign = "right";
    for (const tick of bars.length ? exponentTicks(0, decades, 5) : []) {
      drawLine(context, [[MARGIN.left, y(tick)], [width - MARGIN.right, y(tick)]],
        themeColor("--grid"));
      context.fillStyle = themeColor("--muted");
      context.fillText(tick ? tickCount(tick) : "0", MARGIN.left - 6, y(tick));
    }
    const hatch = hatchPattern(context, wider ? "beyond" : "bad");
    for (const { exponent, count } of bars) {
      const zone = zoneOf(exponent, format);
      const color = themeColor(zone === "vanishes" ? "--warning" : "--bar");
      // With a loss scale the outline shows what happens; the bars are context.
      const faint = shift !== null;
      context.fillStyle = zone === "overflow" && !faint ? hatch :
        faint ? themeColor("--bar-faint") : color;
      const left = x(exponent);
      const top = heightOf(count);
      const size = x(exponent + 1) - left;
      context.fillRect(left, top, size - Math.min(1, size / 5), bottom - top);
    }
    if (shift !== null && bars.length) drawScaled(context, x, bottom, heightOf, hatch);
    const base = bottom + 0.5;
    drawLine(context, [[MARGIN.left, base], [width - MARGIN.right, base]],
      themeColor("--axis"));
    context.textAlign = "center";
    context.fillStyle = themeColor("--muted");
    for (const tick of exponentTicks(domain[0], domain[1], width / 48)) {
      drawLine(context, [[x(tick), bottom], [x(tick), bottom + 4]],
        themeColor("--axis"));
      context.fillText(formatPower(tick), x(tick), bottom + 13);
    }
    drawAxisName(context, "magnitude", (MARGIN.left + width) / 2, bottom + 30);
    drawAxisName(context, "elements", 8, (MARGIN.top + bottom) / 2, true);
    if (range) drawRuler(context, bottom + MARGIN.axis, width, range, shift);
  }

  function drawNothingFinite(context, width) {
    context.textAlign = "center";
    context.fillStyle = themeColor("--ink");
    context.fillText(`${formatShare(1)} infinite or NaN`, (MARGIN.left + width) / 2, MARGIN.top + BARS_HEIGHT / 2);
  }

  function drawZones(context, x, domain, format) {
    const limits = [
      ["vanishes", domain[0], format.subnormal_exponent],
      ["subnormal", format.subnormal_exponent, format.normal_exponent],
      ["normal", format.normal_exponent, format.maximum_exponent],
      ["overflow", format.maximum_exponent, domain[1]],
    ];
    context.textAlign = "center";
    for (const [zone, from, until] of limits) {
      const size = x(until) - x(from);
      const fill = zone === "overflow" && shown.wider ? "beyond" : zone;
      context.fillStyle = themeColor(`--zone-${fill}`);
      context.fillRect(x(from), MARGIN.top, size, BARS_HEIGHT);
      context.fillStyle = themeColor("--muted");
      const name = zone === "normal" ? `normal ${format.name}` : ZONE_NAMES[fill];
      const wide = context.measureText(name).width > size;
      if (wide && zone === "subnormal") continue;
      const center = Math.max((x(from) + x(until)) / 2, MARGIN.left + 8);
      const nudged = zone === "overflow" && wide ? x(until) - 20 : center;
      context.fillText(name, nudged, MARGIN.top - (wide ? 20 : 8));
    }
  }

  function drawScaled(context, x, bottom, heightOf, hatch) {
    const { bars, format, shift } = shown;
    context.strokeStyle = themeColor("--bar");
    context.lineWidth = 1.5;
    for (const { exponent, count } of bars) {
      const left = x(exponent + shift);
      const top = heightOf(count);
      const width = x(exponent + shift + 1) - left;
      const zone = zoneOf(exponent + shift, format);
      if (zone === "overflow") context.fillStyle = hatch;
      else context.fillStyle = themeColor("--bar-tint");
      context.fillRect(left, top, width, bottom - top);
    }
    const points = bars.flatMap(({ exponent, count }) => {
      return [exponent, exponent + 1].map((edge) => [x(edge + shift), heightOf(count)]);
    });
    const ends = [[points[0][0], bottom], ...points, [points.at(-1)[0], bottom]];
    drawLine(context, ends, themeColor("--bar"), 1.5);
  }

  function drawRuler(context, top, width, range, shift) {
    const high = Math.max(range.highest, range.lowest, shift ?? 0, 16) + 2;
    const low = Math.min(0, range.lowest, range.highest, shift ?? 0) - 1;
    const x = linearScale([low, high], [MARGIN.left + 62, width - MARGIN.right]);
    const y = top + 14;
    context.textAlign = "left";
    context.fillStyle = themeColor("--muted");
    context.fillText("loss scale", MARGIN.left - 6, y);
    drawLine(context, [[x(low), y], [x(high), y]], themeColor("--axis"));
    context.fillStyle = themeColor("--promote");
    if (range.highest >= range.lowest) {
      const from = x(Math.max(low, range.lowest));
      context.fillRect(from, y - 4, Math.max(2, x(range.highest) - from), 8);
    }
    context.textAlign = "center";
    context.fillStyle = themeColor("--muted");
    for (const tick of exponentTicks(low, high, (x(high) - x(low)) / 44)) {
      context.fillText(formatPower(tick), x(tick), y + 16);
    }
    if (shift === null) return;
    const at = x(shift);
    drawLine(context, [[at, y - 9], [at, y + 9]], themeColor("--cursor"), 3);
  }

  function sentence() {
    const { nonfinite, step } = shown;
    const rest = nonfinite < 1 ? sentenceOfFinite() : "";
    if (!nonfinite) return rest;
    const isBad = store.state.runData.bad_input.includes(step);
    words.classList.toggle("alarm", !isBad);
    const lost = `${isBad ? "" : "▲ "}${formatShare(nonfinite)} infinite or NaN${
      isBad ? `, ${BAD_INPUT}` : ""}`;
    return rest ? `${lost}; of the others: ${rest}` : lost;
  }

  function sentenceOfFinite() {
    const { bars, format, shift, range, wider } = shown;
    const computed = wider ? `, computed in ${wider}` : "";
    if (range) {
      const use = shift === null ? "" :
        `; in use: ${formatPower(shift)} (outlined with it, grey without)`;
      const { lowest, highest } = range;
      // A dynamic scale grows into what is to be spared.
      const off = highest < lowest ||
        (shift !== null && (shift > highest + SPARE_BITS || shift < lowest));
      const fits = highest >= lowest ?
        `those of outputs fit loss scales ${formatPower(lowest)} to ${formatPower(highest)}` :
        "no loss scale fits: the gradients span more than the format holds";
      const alarm = off && !wider;
      const left = shown.layer?.gradients_left ?? "";
      words.classList.toggle("alarm", alarm);
      return `${alarm ? "▲ " : ""}${left && `${left}; `}${fits}${use}${off && wider ? computed : ""}`;
    }
    const shares = shareByZone(bars, format);
    words.classList.toggle("alarm", shares.overflow > 0 && !wider);
    const names = { ...ZONE_NAMES };
    if (wider) names.overflow = `beyond ${format.name}${computed}`;
    return Object.entries(shares)
      .filter(([, share]) => share > 0)
      .map(([zone, share]) => `${partInWordsOf(share)} ${names[zone]}`)
      .join(" · ") + `, of those not 0${insideOfOutputs()}`;
  }

  // Its outputs look sound where it overflows on the way to them.
  function insideOfOutputs() {
    const inside = shown.layer?.inside;
    return inside ? `. These are outputs: ${inside.long}` : "";
  }

  function update() {
    const { runData, layer, part, awaited } = store.state;
    for (const button of buttons) {
      button.setAttribute("aria-pressed", button.dataset.part === part);
    }
    // Until the one that was asked for is here the last one stays.
    if (awaited.histogram) return;
    shown = current();
    const name = histogramLayer(store.state);
    const called = name ?? layer ?? "";
    // Another call of a layer is not in the table of layers.
    const what = labels.get(called) ?? cutMiddle(called, 44);
    caption.textContent = shown ?
      `${what}${whyShown(store.state)} · taken ${momentInWords(shown.step, "after")}` : what;
    caption.title = name ?? layer ?? "";
    body.hidden = !shown;
    nothing.hidden = Boolean(shown);
    words.textContent = shown ? sentence() : "";
    words.title = shown?.range ?
      `Loss scales with ${SPARE_BITS} bits to spare for the reading ${momentInWords(shown.step, "after")}, of the gradients of outputs; "What if" has those of weights, too` : "";
    if (!shown) offerOthers(runData?.histograms?.[part] ?? [], name);
    table.fill(shown && (() => [["magnitude", ["elements", formatInteger], "range of the format"],
      shown.bars.map(({ exponent, count }) => [
        `${formatPower(exponent)} to ${formatPower(exponent + 1)}`, count,
        zoneInWords(exponent + (shown.shift ?? 0)),
      ])]));
    surface.canvas.setAttribute(
      "aria-label", `${caption.title}: ${caption.textContent}. ${words.textContent}`,
    );
    surface.setHeight(
      MARGIN.top + BARS_HEIGHT + MARGIN.axis + (shown?.range ? RULER_HEIGHT : 0),
    );
  }

  function offerOthers(names, name) {
    const { runData, layer, part } = store.state;
    const { withheld, layers = [] } = runData ?? {};
    const row = layers.find((one) => one.path === layer);
    const text = name ? "No histogram of this part was taken." :
      row && toNumber(row.least_headroom) === Infinity ? NO_RANGE :
      names.length ? "No histogram was kept for this layer. Kept for:" :
        "This run keeps no histograms of this part.";
    const offered = name ? [] : names.slice(0, 12);
    const labels = shortNames(offered, 36);
    const zero = part === "gradient" && row && names.length && !name ?
      " Gradients that are all zero have none." : "";
    const choices = offered.map((other) => element("button", {
      type: "button", class: "quiet", title: other,
      onclick: () => chooseLayer(store, other),
    }, labels.get(other)));
    const why = withheld && !names.length ? element("p", {}, readable(withheld)) : null;
    nothing.replaceChildren(element("p", {}, text + zero), ...[why].filter(Boolean), ...choices);
  }

  function zoneInWords(exponent) {
    const zone = zoneOf(exponent, shown.format);
    if (zone !== "overflow" || !shown.wider) return zone;
    return `beyond ${shown.format.name}, computed in ${shown.wider}`;
  }

  surface.canvas.addEventListener("pointermove", (event) => {
    if (!shown?.scale) return;
    const exponent = Math.floor(shown.scale.invert(pointerIn(surface.canvas, event).x));
    const bar = shown.bars.find((one) => one.exponent === exponent);
    if (!bar) return hideTooltip();
    const total = shown.bars.reduce((sum, one) => sum + one.count, 0);
    const lines = [
      `${formatPower(exponent)} to ${formatPower(exponent + 1)}`,
      `${formatInteger(bar.count)} elements (${formatShare(bar.count / total)})`,
      zoneInWords(exponent),
    ];
    if (shown.shift !== null) {
      lines[2] = `with the loss scale: ${zoneInWords(exponent + shown.shift)}`;
    }
    showTooltip(event, lines);
  });
  surface.canvas.addEventListener("pointerleave", hideTooltip);

  store.on(["runData"], ({ runData }) => {
    labels = shortNames((runData?.layers ?? []).map((one) => one.path), 44);
  });
  store.on(["runData", "histogram", "step", "part", "layer", "heat", "partHeat"], update);
  store.on(["theme"], surface.redraw);
  store.on(["awaited"], ({ awaited }) => {
    root.setAttribute("aria-busy", String(Boolean(awaited.histogram)));
  });
  return root;
}

function tickCount(decade) {
  const units = ["", "k", "M", "G", "T"];
  return 10 ** (decade % 3) + (units[Math.floor(decade / 3)] ?? "P");
}
