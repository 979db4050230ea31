import { bringEvent, bringLayer, chooseRun, compareWith, NOTHING_CHOSEN } from "./actions.js";
import { speedAgainstFloat32 } from "./comparison.js";
import { copyButton } from "./copy.js";
import { breakable, element, fillSelect } from "./dom.js";
import { mainFinding } from "./event_text.js";
import { momentInWords, plural, readable } from "./format.js";
import { callName, shortRun } from "./names.js";
import { setupDifference } from "./run_setup.js";
import { graverRun, keyFigures, STATES } from "./summary.js";
import { worthInWords } from "./worth.js";

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
  const graver = element("button", {
    type: "button", class: "graver", hidden: true,
    title: "Show that run",
    onclick: () => chooseRun(store, graverRun(store.state.summaries, store.state.run).run),
  });
  const chips = element("div", { class: "figures" });
  const copy = copyLink ? element("button", {
    type: "button", class: "quiet",
    async onclick() {
      copy.textContent = await copyLink() ? "Copied" : "Copy failed";
      setTimeout(() => copy.textContent = "Copy link", 1500);
    },
  }, "Copy link") : null;
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
    // Long names are cut by the width of the field.
    run.title = store.state.run ?? "";
    compare.title = store.state.compare ?? "";
    compare.disabled = !others.length;
    run.disabled = !runs.length;
  }

  /** @param {{ event?: object, layer?: { path: string } }} entry */
  function actionOf({ event, layer }) {
    if (event) return () => bringEvent(store, event);
    return layer ? () => bringLayer(store, layer.path) : null;
  }

  // The whole run in a sentence; logs of older versions have none.
  function drawSentences() {
    const { runData, compareData } = store.state;
    const known = [runData, compareData].filter((data) => data?.headline);
    sentences.replaceChildren(...known.flatMap((data) => {
      const { glyph, word, level } = STATES[data.headline.state] ?? STATES.warning;
      const action = actionOf({ event: mainFinding(data) });
      const speed = data === runData ? speedAgainstFloat32(runData, compareData) : null;
      const sentence = element(action ? "button" : "div", {
        class: `sentence ${level}`, type: action ? "button" : null,
        title: action ? "Show its main finding below" : null, onclick: action,
      },
      element("strong", {}, `${glyph} ${word}`),
      compareData && element("em", { title: data.run }, nameOf(data)),
      element("span", {}, readable(data.headline.text) + (speed ? ` ${speed}` : "")));
      const notes = data === runData && compareData ? comparedNotes() : [];
      return [sentence, ...notes, ...notesOf(data)];
    }));
  }

  // Which of two runs is which, and what else than the precision makes them differ.
  function comparedNotes() {
    const { runData, compareData, swapped } = store.state;
    const isSwapped = swapped?.run === runData.run && swapped.shown === compareData.run;
    const [own, its] = [nameOf(runData), nameOf(compareData)];
    return [
      isSwapped ? `Shown now: ${own}, which computes in 16 bits; ${its}, shown before, is compared with it.` : "",
      setupDifference(runData, compareData),
    ].filter(Boolean).map((text) => element("p", { class: "note setup" }, ...breakable(readable(text))));
  }

  // What a tuner did, an observation of a run that may be sound, and what is left to do.
  function notesOf(data) {
    const { tuner, flat_loss: flat, next } = data;
    // Of two runs that are shown, the first line says it.
    const { compareData, summaries } = store.state;
    const worth = compareData ? null : worthInWords(summaries, data);
    const texts = [worth, tuner, flat].filter(Boolean).map(readable);
    const code = next?.code;
    return [
      ...texts.map((text) => element("p", { class: "note" }, text)),
      ...next ? [element("p", { class: "note next" }, readable(next.text), " ",
        code ? copyButton("Copy code", () => code) : null)] : [],
    ];
  }

  // A sound run that is shown first would hide that another one of the folder is not.
  function drawGraver() {
    const found = graverRun(store.state.summaries, store.state.run);
    // What it is compared with has its own sentence above.
    graver.hidden = !found || found.run === store.state.compare;
    if (graver.hidden) return;
    const { glyph, word, level } = STATES[found.state];
    graver.className = `graver ${level}`;
    const more = found.others ? `, and ${plural(found.others, "more run")} with an open finding` : "";
    graver.textContent = `${glyph} Another run needs attention: ${found.run} (${word.toLowerCase()})${more}`;
  }

  function nameOf(data) {
    const { runData, compareData } = store.state;
    return shortRun(data.run, (data === runData ? compareData : runData)?.run);
  }

  function drawChips() {
    const { runData, compareData } = store.state;
    const others = compareData ? keyFigures(compareData) : [];
    const entries = runData ? keyFigures(runData) : [];
    chips.replaceChildren(...entries.map((entry) => {
      const action = actionOf(entry);
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
          (missing.run ? ` Shown instead: ${name}` : "") : "";
    problem.textContent = text;
    problem.hidden = !text;
  }

  function tellTime() {
    const time = store.state.refreshed?.toLocaleTimeString();
    refreshed.textContent = offline ? "offline report" :
      time ? `updated ${time}` : "loading…";
  }

  store.on(["runs", "run", "compare"], fill);
  store.on(["runData", "compareData", "summaries"], drawSentences);
  store.on(["runData", "compareData"], drawChips);
  store.on(["summaries", "run", "compare"], drawGraver);
  store.on(["runs", "run", "failures", "missing"], announce);
  store.on(["refreshed"], tellTime);
  tellTime();
  const title = element("h1", {}, "Mixed Precision",
    element("span", { class: "by" }, "keras_mixprec"));
  const field = (label, control) => {
    return element("label", { class: "field" }, label, control);
  };
  return element("header", {}, sentences, graver, element("div", { class: "bar-top" },
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
