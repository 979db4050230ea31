import { bringEvent, bringLayer, chooseRun, compareWith, NOTHING_CHOSEN } from "./actions.js";
import { copyButton } from "./copy.js";
import { element, fillSelect } from "./dom.js";
import { momentInWords, readable } from "./format.js";
import { rowOfEvent, STATES } from "./levels.js";
import { callName, shortRun } from "./names.js";

export function createHeader(store, { offline, copyLink }) {
  const run = element("select", {
    id: "run",
    onchange: () => chooseRun(store, run.value),
  });
  const compare = element("select", {
    id: "compare", onchange: () => compareWith(store, compare.value || null),
  });
  const refreshed = element("span", { class: "refreshed", role: "status" });
  const sentences = element("div", { id: "headline", role: "status" });
  const chips = element("div", { class: "figures" });
  const copy = copyLink ? copyButton("Copy link", copyLink) : null;
  const problem = element("div", { id: "problem", role: "alert", hidden: true });

  function fill() {
    const runs = store.state.runs ?? [];
    fillSelect(run, runs.map((entry) => {
      return [entry.run, entry.run + (entry.newer_schema ? " (newer version)" : "")];
    }), store.state.run);
    const others = runs.filter((entry) => {
      return entry.run !== store.state.run && !entry.newer_schema;
    });
    const options = [["", "nothing"], ...others.map((entry) => [entry.run, entry.run])];
    fillSelect(compare, options, store.state.compare);
    // The field may cut off a long run name, so put the whole name into its title.
    run.title = store.state.run ?? "";
    compare.title = store.state.compare ?? "";
    compare.disabled = !others.length;
    run.disabled = !runs.length;
  }

  // Returns the action of a figure, which brings an event or a layer into view.
  function actionOf(data, { event = null, layer = null }) {
    const row = event === null ? null : rowOfEvent(data, event);
    if (row) return () => bringEvent(store, row);
    return layer === null ? null : () => bringLayer(store, layer);
  }

  // Draws the headline of each run.
  function drawSentences() {
    const { runData, compareData } = store.state;
    const known = [runData, compareData].filter(Boolean);
    sentences.replaceChildren(...known.flatMap((data) => {
      const { glyph, word, level } = STATES[data.headline.state] ?? STATES.warning;
      const action = actionOf(data, data.finding ?? {});
      const sentence = element(action ? "button" : "div", {
        class: `sentence ${level}`, type: action ? "button" : null,
        title: action ? "Show its main finding below" : null, onclick: action,
      },
      element("strong", {}, `${glyph} ${word}`),
      compareData && element("em", { title: data.run }, nameOf(data)),
      element("span", {}, readable(data.headline.text)));
      return [sentence, ...notesOf(data)];
    }));
  }

  /** Returns the cards between the headline and the charts. */
  const notesOf = (data) => data.cards.filter((card) => card.is_on_top).map(({ name, title, sentence, code }) => {
    return element("p", { class: `note ${name}` }, element("strong", {}, `${title}: `), readable(sentence), " ",
      code ? copyButton("Copy code", () => code) : null);
  });

  function nameOf(data) {
    const { runData, compareData } = store.state;
    return shortRun(data.run, (data === runData ? compareData : runData)?.run);
  }

  function drawChips() {
    const { runData, compareData } = store.state;
    const others = compareData?.cards[0].figures ?? [];
    const entries = runData?.cards[0].figures ?? [];
    chips.replaceChildren(...entries.map((entry) => {
      const action = actionOf(runData, entry);
      const same = others.find((other) => other.name === entry.name);
      const other = same ? `${nameOf(compareData)}: ${same.text}` : null;
      return element(action ? "button" : "div", {
        class: `health ${entry.level ?? ""}`, type: action ? "button" : null,
        title: entry.title ?? (action ? "Show it below" : null), onclick: action,
      },
      element("span", { class: "name" }, entry.name),
      element("span", { class: "value" }, entry.text),
      other && element("span", { class: "versus" }, other));
    }));
  }

  function announce() {
    const { runs, run: name, failures, missing } = store.state;
    const unknown = [missing.run, missing.compare].filter((other) => other !== null);
    const [failure] = Object.values(failures);
    const newer = runs?.find((entry) => entry.run === name)?.newer_schema;
    const text = newer ? `${name} was written by a newer version of keras_mixprec. ` +
      "Update keras_mixprec to read it: pip install -U keras_mixprec" :
      failure ? `Could not load data: ${failure}` :
        runs?.length && unknown.length ?
          `There is no run ${unknown.join(" and no run ")} here.` +
          (missing.run ? ` The page shows ${name} instead.` : "") : "";
    problem.textContent = text;
    problem.hidden = !text;
  }

  function tellTime() {
    const time = store.state.refreshed?.toLocaleTimeString();
    refreshed.textContent = offline ? "offline report" :
      time ? `updated ${time}` : "loading…";
  }

  store.on(["runs", "run", "compare"], fill);
  store.on(["runData", "compareData"], drawSentences);
  store.on(["runData", "compareData"], drawChips);
  store.on(["runs", "run", "failures", "missing"], announce);
  store.on(["refreshed"], tellTime);
  tellTime();
  const title = element("h1", {}, "Mixed Precision",
    element("span", { class: "by" }, "keras_mixprec"));
  const field = (label, control) => {
    return element("label", { class: "field" }, label, control);
  };
  return element("header", {}, sentences, element("div", { class: "bar-top" },
    title, field("run", run), field("compare with", compare),
    element("span", { class: "gap" }), refreshed, copy), problem, chips);
}

export function createSelection(store) {
  const text = element("span", { "aria-live": "polite" });
  const clear = element("button", {
    type: "button", class: "quiet", onclick: () => store.set(NOTHING_CHOSEN),
  }, "Clear");
  const bar = element("div", { id: "selection", hidden: true }, text, clear);
  store.on(["layer", "step"], ({ layer, step, runData }) => {
    const paths = new Set((runData?.layers ?? []).map(({ path }) => path));
    const name = layer === null ? null : callName(layer, paths);
    const parts = [name, step === null ? null : momentInWords(step, "")];
    const chosen = parts.filter((part) => part !== null);
    text.textContent = chosen.length ? `Selected: ${chosen.join(" · ")}` : "";
    bar.hidden = !chosen.length;
  });
  return bar;
}

const SNIPPET = 'model.fit(..., callbacks=[keras_mixprec.MixPrecMonitor("logs")])';

export function createEmpty(offline) {
  const waits = offline ? "This report was made without data." :
    "This page refreshes by itself as soon as a run writes data.";
  return element("section", { id: "empty", class: "card", hidden: true },
    element("h2", {}, "No mixed precision data yet"),
    element("p", {}, "Record a run with the monitor callback:"),
    element("pre", {}, element("code", {}, SNIPPET)),
    element("p", {}, waits));
}
