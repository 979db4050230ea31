import { chooseEvent } from "./actions.js";
import { copyButton } from "./copy.js";
import {
  breakable, bringIntoView, card, element, revealIn, walkRows,
} from "./dom.js";
import { formatInteger, momentInWords, plural, readable } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import { LEVELS } from "./levels.js";
import { labelOfRun } from "./names.js";

const PAGE = 100;

// All rows share one time format, because a format for each row would take 50 ms per page.
const clock = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "numeric", day: "numeric",
  hour: "numeric", minute: "numeric", second: "numeric",
});

export function createEvents(store) {
  const chips = element("div", {
    class: "chips", role: "group", "aria-label": "Kinds of events shown",
  });
  const only = element("input", {
    type: "checkbox", onchange: () => store.set({ onlyLayer: only.checked }),
  });
  const onlyLabel = element("label", { class: "check" }, only, "chosen layer only");
  const list = element("ol", { class: "event-list" });
  const earlier = pageButton(() => turn(-1));
  const later = pageButton(() => turn(1));
  const scroller = element("div", { class: "event-scroll" }, earlier, list, later);
  walkRows(list, "li");
  const root = card("events", "Events", [onlyLabel], chips, scroller);
  // The document has only some pages of rows, because thousands of rows would slow each layout.
  let first = 0;
  let last = PAGE;
  let shown = [];
  const openFixes = new Set();

  function pageButton(onclick) {
    return element("button", { type: "button", class: "quiet page", onclick });
  }

  function pathsOf() {
    return new Set((store.state.runData?.layers ?? []).map((layer) => layer.path));
  }

  const runsOf = ({ runData, compareData }) => [runData, compareData].filter(Boolean);

  // Returns the name of an event's run in a comparison.
  function runLabel(event) {
    const { runData, compareData } = store.state;
    if (!compareData) return null;
    const compared = !runData.told.includes(event);
    const [of, other] = compared ? [compareData, runData] : [runData, compareData];
    return element("span", {
      class: compared ? "of-run compared" : "of-run", title: of.run,
    }, labelOfRun(of.run, other.run));
  }

  function isAbout(event, paths) {
    const { layer } = store.state;
    if (layer === null) return false;
    const path = pathOfCall(layer, paths);
    return event.layers.some((name) => pathOfCall(name, paths) === path);
  }

  function turn(direction) {
    const height = scroller.scrollHeight;
    if (direction > 0) last += PAGE;
    else first = Math.max(0, first - PAGE);
    drawRows();
    if (direction < 0) scroller.scrollTop += scroller.scrollHeight - height;
  }

  function row(event, paths) {
    const { level, steps: [moment], noticed, wall_time: date } = event;
    const chosen = event.key === store.state.event;
    const details = chosen ? event.details : [];
    const badge = element("span", { class: `badge ${level}` }, `${LEVELS[level].glyph} ${event.title}`);
    const late = moment === noticed ? "" : `, noticed at step ${formatInteger(noticed)}`;
    const time = date ? clock.format(date * 1000) : "";
    return element("li", {
      "data-kind": event.kind, "data-step": moment, tabindex: "-1",
      "data-layer": event.layers[0] ?? "", "aria-current": chosen ? "true" : null,
      class: [chosen && "chosen", isAbout(event, paths) && "about"]
        .filter(Boolean).join(" "),
      title: [time + late, moment === 0 ? momentInWords(moment) : ""].filter(Boolean).join(", "), onclick: () => chooseEvent(store, event),
    },
    element("span", { class: "when" }, formatInteger(moment)),
    element("span", {}, badge, runLabel(event)),
    // Fixes come before the numbers, because there may be more numbers than fit.
    element("span", { class: "what" }, ...breakable(readable(event.text)),
      ...chosen ? fixesOf(event) : [],
      ...details.map((line) => element("span", { class: "detail" }, ...breakable(readable(line))))));
  }

  // Returns the code that repairs the fault of an event. The code stays open when new data arrives.
  function fixesOf({ fixes }) {
    return Object.entries(fixes).map(([title, code]) => element("div", { class: "fix" },
      copyButton("Copy code", () => code),
      element("details", {
        open: openFixes.has(code) ? "" : null,
        onclick: (click) => click.stopPropagation(),
        ontoggle: ({ target }) => {
          if (target.open) openFixes.add(code);
          else openFixes.delete(code);
        },
      },
        element("summary", {}, title),
        element("pre", {}, element("code", {}, code)))));
  }

  function drawChips() {
    const focused = chips.querySelector(":focus")?.dataset.filter;
    const runs = runsOf(store.state);
    const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
    const titles = Object.assign({}, ...runs.map(({ kinds }) => kinds));
    chips.replaceChildren(...Object.entries(titles).map(([kind, { title }]) => {
      const count = sum(runs.map(({ kinds }) => kinds[kind]?.count ?? 0));
      const rows = sum(runs.map(({ told }) => told.filter((row) => row.kind === kind).length));
      return chip(kind, `${title} ${formatInteger(count)}${rows === count ? "" : ` in ${plural(rows, "row")}`}`);
    }));
    [...chips.children].find((chip) => chip.dataset.filter === focused)?.focus();
  }

  function chip(kind, text) {
    const { hiddenKinds } = store.state;
    return element("button", {
      type: "button", class: "chip", "data-filter": kind,
      "aria-pressed": String(!hiddenKinds.has(kind)),
      onclick() {
        const hidden = new Set(store.state.hiddenKinds);
        if (!hidden.delete(kind)) hidden.add(kind);
        store.set({ hiddenKinds: hidden });
      },
    }, text);
  }

  function filterEvents() {
    const { hiddenKinds, onlyLayer, layer } = store.state;
    const paths = pathsOf();
    only.checked = onlyLayer;
    shown = runsOf(store.state).flatMap(({ told }) => told).filter((event) => {
      if (hiddenKinds.has(event.kind)) return false;
      return !onlyLayer || layer === null || isAbout(event, paths);
    }).sort((one, other) => one.steps[0] - other.steps[0]);
    onlyLabel.hidden = layer === null;
  }

  function drawRows() {
    const paths = pathsOf();
    const top = scroller.scrollTop;
    const focused = list.contains(document.activeElement) ?
      [...list.children].indexOf(document.activeElement) : -1;
    first = Math.max(0, Math.min(first, shown.length - 1));
    list.replaceChildren(...shown.slice(first, last).map((event) => row(event, paths)));
    if (list.firstChild) list.firstChild.tabIndex = 0;
    // Make a short list lower, unless the details of an event are shown.
    root.style.setProperty("--rows", String(store.state.event === null ? shown.length : PAGE));
    const after = Math.max(0, shown.length - last);
    earlier.hidden = first === 0;
    earlier.textContent = `Show earlier events (${formatInteger(first)})`;
    later.hidden = after === 0;
    later.textContent = `Show later events (${formatInteger(after)})`;
    scroller.scrollTop = top;
    if (focused >= 0) list.children[focused]?.focus({ preventScroll: true });
  }

  // Marks the rows about the chosen layer without drawing the list again.
  function markAbout() {
    const paths = pathsOf();
    [...list.children].forEach((node, place) => {
      node.classList.toggle("about", isAbout(shown[first + place], paths));
    });
  }

  function update() {
    filterEvents();
    drawRows();
  }

  function restart() {
    [first, last] = [0, PAGE];
    drawChips();
    update();
  }

  // If the user chooses a step in another card, the list moves to the events around it.
  function follow(state, changed) {
    filterEvents();
    const index = shown.findIndex((event) => {
      if (state.event !== null) return event.key === state.event;
      return state.step !== null && event.steps.at(-1) >= state.step;
    });
    const turns = index >= 0 && (index < first || index >= last);
    if (turns) {
      first = Math.max(0, index - PAGE / 2);
      last = first + PAGE;
    }
    if (turns || state.onlyLayer || changed.includes("event")) drawRows();
    else markAbout();
    const row = list.children[index - first];
    const moved = ["event", "step", "shown"].some((key) => changed.includes(key));
    if (index >= 0 && row && moved) revealIn(scroller, row);
  }

  scroller.addEventListener("scroll", () => {
    const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (left < 40 && last < shown.length) turn(1);
  });
  store.on(["run"], () => [first, last] = [0, PAGE]);
  store.on(["runData", "compareData"], () => {
    drawChips();
    update();
  });
  store.on(["brought"], ({ brought }) => {
    if (brought.panel === "events") bringIntoView(list.querySelector("li.chosen"), scroller);
  });
  store.on(["hiddenKinds", "onlyLayer"], restart);
  store.on(["event", "step", "layer", "shown"], follow);
  return root;
}
