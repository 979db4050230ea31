import { chooseLayer } from "./actions.js";
import { breakable, card, element, fillSelect } from "./dom.js";
import { formatInteger, plural, readable } from "./format.js";
import { seenFirst } from "./frames.js";
import { layerChoice } from "./layer_blocks.js";
import { LEVELS } from "./levels.js";

const ROWS_SHOWN = 200;
// The name must differ from `plan.json`, the file that the code of fixes saves.
const PLAN_FILE = "what_if_plan.json";
const HEADS = ["Layer", "Activations", "Gradients fit loss scales (2 bits to spare)", "Weights"];
const CANNOT = "Ranges describe only the outputs of layers. A layer may still overflow inside, or lose " +
  "digits. Loss scales are for the gradients of outputs and weights. The log does not say which small " +
  "weight gradients count. Before training, check the plan with keras_mixprec.diagnose on a batch.";
const NO_RANGES = "This run has no measurements of layers. MixPrecMonitor measures " +
  "layers every probe_every steps, within max_overhead of the time.";

export function createWhatIf(store) {
  const type = element("select", {
    id: "what-if-format", "aria-label": "Format", onchange: () => fill(),
  });
  const answer = element("p", { class: "words", role: "status" });
  const rows = element("tbody");
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...HEADS.map((head) => element("th", { scope: "col", class: "plain" }, head)))), rows);
  const scroller = element("div", { class: "table-scroll short" }, table);
  const download = element("a", { class: "button", download: PLAN_FILE }, `Download it for apply_policy (${PLAN_FILE})`);
  const plan = element("p", {});
  const nothing = element("p", { class: "absent", hidden: true });
  const body = element("div", {}, answer, scroller,
    element("h3", {}, "Smallest plan that these ranges allow"), plan, element("p", {}, CANNOT), download);
  const root = card("what-if", "What if", [type], nothing, body);
  root.classList.add("wide");
  // Reading all ranges takes long with many layers, so wait until the card is in view.
  new IntersectionObserver((seen) => {
    if (seen.some((one) => one.isIntersecting)) store.set({ wantsWhatIf: true });
  }, { rootMargin: "200px" }).observe(root);

  function fill() {
    const { runData, whatIf } = store.state;
    const ready = whatIf && runData && whatIf.run === runData.run;
    body.hidden = type.hidden = !(ready && whatIf.measured);
    nothing.hidden = !body.hidden;
    nothing.textContent = !ready ? "Reading the ranges of all layers …" :
      readable([NO_RANGES, runData.withheld].filter(Boolean).join(" "));
    if (body.hidden) return;
    const names = Object.keys(whatIf.formats);
    if (!type.value) fillSelect(type, names.map((name) => [name, name]), runData.format.name);
    const { layers, plan: { text, file } } = whatIf.formats[type.value];
    // Show the same layers as the table of layers.
    const { keeps } = layerChoice(store.state);
    const kept = new Set(runData.layers.filter(keeps).map(({ path }) => path));
    const shown = layers.filter(({ path }) => kept.has(path));
    const counts = new Map();
    for (const { said } of shown) counts.set(said, (counts.get(said) ?? 0) + 1);
    const each = [...counts].map(([said, count]) => `${formatInteger(count)} ${said}`);
    answer.textContent = `In ${type.value}, of ${plural(shown.length, "layer")}: ${each.join(", ") || "nothing"}.`;
    rows.replaceChildren(...shown.slice(0, ROWS_SHOWN).map(row));
    plan.textContent = readable(text);
    download.hidden = !file;
    download.href = `data:application/json,${encodeURIComponent(JSON.stringify(file, null, 2))}`;
  }

  function row({ path, level, activations, gradients, weights }) {
    return element("tr", { "data-layer": path, class: level },
      element("th", { scope: "row", class: "plain" }, element("button", {
        type: "button", title: path, onclick: () => chooseLayer(store, path),
      }, ...breakable(path))),
      ...[activations, gradients, weights].map((part) => element("td", {}, part.level ?
        element("span", { class: `badge ${part.level}` }, `${LEVELS[part.level].glyph} ${readable(part.text)}`) :
        readable(part.text))));
  }

  store.on(["runData", "whatIf", "filter", "onlyProblems"], seenFirst(root, fill));
  return root;
}
