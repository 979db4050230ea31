import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import { formatNumber, formatShare, plural, toNumber } from "./format.js";
import { seenFirst } from "./frames.js";

const errorInWords = (error) => (Number.isNaN(error) ? "not evaluated" :
  error === Infinity ? "not finite" : formatNumber(error));

// Returns a card with the trials of a search for the layers that need float32.
export function createPareto(store) {
  const caption = element("p", { class: "hint" });
  const table = dataTable("Trials");
  const root = card("pareto", "Error by share of FLOPs in 16 bits", [], caption, table.root);
  root.classList.add("wide");
  table.root.setAttribute("open", "");

  function update() {
    const found = store.state.runData?.trade_off;
    const points = Array.isArray(found?.points) ? found.points : [];
    const trials = points.map((point) => [
      toNumber(point.share_in_16_bits), toNumber(point.error ?? null),
      point.pareto_optimal === true ? "yes" : "no", (point.float32 ?? []).join(", ") || "nothing",
    ]).sort(([one], [other]) => other - one);
    root.hidden = !trials.length;
    table.fill(trials.length ? () => [
      [["FLOPs in 16 bits", formatShare], ["Error", errorInWords], "Pareto-optimal", "In float32"], trials,
    ] : null);
    if (root.hidden) return;
    const best = trials.filter(([, , optimal]) => optimal === "yes");
    caption.textContent = `${plural(trials.length, "trial")}, ${best.length} of them Pareto-optimal: ` +
      `none has more FLOPs in 16 bits and less error. Error: ${found.title}.`;
  }

  store.on(["runData"], seenFirst(root, update));
  return root;
}
