import { exponentTicks, linearScale } from "./scales.js";
import {
  createSurface, drawAxisName, drawLine, drawRows, hatchPattern, pointerIn,
} from "./canvas.js";
import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import {
  formatInteger, formatPower, formatShare, momentInWords, readable,
} from "./format.js";
import {
  exponentDomain, histogramAt, shareByZone, zoneOf,
} from "./histogram_data.js";
import { pathOfCall } from "./heat_data.js";
import { BAD_INPUT } from "./metrics.js";
import { cutMiddle, shortNames } from "./names.js";
import { widerAt } from "./precision.js";
import { themeColor } from "./theme.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { histogramLayer, whyShown } from "./wanted.js";

const MARGIN = { left: 54, right: 12, top: 28, axis: 42 };
const BARS_HEIGHT = 300;
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
  surface.setHeight(MARGIN.top + BARS_HEIGHT + MARGIN.axis);
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
    const paths = new Map(runData.layers.map((layer) => [layer.path, layer]));
    const layer = paths.get(pathOfCall(name, paths));
    return {
      ...taken, format: runData.format, part, layer,
      wider: widerAt(layer, taken.step, runData.format.name),
    };
  }

  function draw(context, width) {
    if (!shown) return;
    const { bars, format, wider } = shown;
    const bottom = MARGIN.top + BARS_HEIGHT;
    const domain = exponentDomain(bars, format);
    const x = linearScale(domain, [MARGIN.left, width - MARGIN.right]);
    const most = Math.max(1, ...bars.map((bar) => bar.count));
    const decades = Math.max(1, Math.ceil(Math.log10(most + 1)));
    const y = linearScale([0, decades], [bottom, MARGIN.top + 14]);
    const heightOf = (count) => y(Math.log10(count + 1));
    shown.scale = x;
    drawZones(context, x, domain, format);
    if (!bars.length) drawNothingFinite(context, width);
    drawRows(context, bars.length ? exponentTicks(0, decades, 5) : [], {
      y, left: MARGIN.left, right: width - MARGIN.right, label: (tick) => (tick ? tickCount(tick) : "0"),
    });
    const hatch = hatchPattern(context, wider ? "beyond" : "bad");
    for (const { exponent, count } of bars) {
      const zone = zoneOf(exponent, format);
      const color = themeColor(zone === "vanishes" ? "--warning" : "--bar");
      context.fillStyle = zone === "overflow" ? hatch : color;
      const left = x(exponent);
      const top = heightOf(count);
      const size = x(exponent + 1) - left;
      context.fillRect(left, top, size - Math.min(1, size / 5), bottom - top);
    }
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

  function sentence() {
    const { nonfinite, step } = shown;
    const rest = nonfinite < 1 ? sentenceOfFinite() : "";
    if (!nonfinite) return rest;
    const isBad = store.state.runData.bad_input.includes(step);
    words.classList.toggle("alarm", !isBad);
    const lost = `${isBad ? "" : "▲ "}${formatShare(nonfinite)} infinite or NaN${
      isBad ? `, ${BAD_INPUT}` : ""}`;
    return rest ? `${lost}; of the rest: ${rest}` : lost;
  }

  function sentenceOfFinite() {
    const { bars, format, wider } = shown;
    const computed = wider ? `, computed in ${wider}` : "";
    const shares = shareByZone(bars, format);
    words.classList.toggle("alarm", shares.overflow > 0 && !wider);
    const names = { ...ZONE_NAMES };
    if (wider) names.overflow = `beyond ${format.name}${computed}`;
    return Object.entries(shares)
      .filter(([, share]) => share > 0)
      .map(([zone, share]) => `${formatShare(share)} ${names[zone]}`)
      .join(" · ") + `, zeros not counted${insideOfOutputs()}`;
  }

  // Returns words for an overflow inside the layer, although its outputs may look healthy.
  function insideOfOutputs() {
    const inside = shown.part === "activation" && shown.layer?.inside;
    return inside ? `. The histogram shows only the outputs: ${inside.long}` : "";
  }

  function update() {
    const { layer, part, awaited } = store.state;
    for (const button of buttons) {
      button.setAttribute("aria-pressed", button.dataset.part === part);
    }
    // Keep the previous histogram until the new histogram is loaded.
    if (awaited.histogram) return;
    shown = current();
    const name = histogramLayer(store.state);
    const called = name ?? layer ?? "";
    // The second call of a layer has no label, because the table has one row per layer.
    const what = labels.get(called) ?? cutMiddle(called, 44);
    caption.textContent = shown ?
      `${what}${whyShown(store.state)} · taken ${momentInWords(shown.step, "after")}${
        part === "gradient" ? ", loss scale included" : ""}` : what;
    caption.title = name ?? layer ?? "";
    body.hidden = !shown;
    nothing.hidden = Boolean(shown);
    words.textContent = shown ? sentence() : "";
    nothing.textContent = shown ? "" : whyNone();
    table.fill(shown && (() => [["magnitude", ["elements", formatInteger], "range of the format"],
      shown.bars.map(({ exponent, count }) => [
        `${formatPower(exponent)} to ${formatPower(exponent + 1)}`, count,
        zoneInWords(exponent),
      ])]));
    surface.canvas.setAttribute(
      "aria-label", `${caption.title}: ${caption.textContent}. ${words.textContent}`,
    );
    surface.redraw();
  }

  function whyNone() {
    const { withheld = "", histograms } = store.state.runData ?? {};
    return histograms?.[store.state.part].length ?
      "No histogram of this part of the layer. Parts whose numbers are all zero have none." :
      readable(`This run keeps no histograms of this part. ${withheld}`);
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
