import { chooseEvent } from "./actions.js";
import { copyButton } from "./copy.js";
import {
  breakable, bringIntoView, card, element, revealIn, walkRows,
} from "./dom.js";
import { countsByKind, groupEvents, isChosenEvent, lastMomentOf } from "./event_groups.js";
import {
  describeEvent, eventDetails, eventTitle, kindTitle, layersOf, LEVELS,
  momentOf,
} from "./event_text.js";
import { formatInteger, momentInWords, plural } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import { labelOfRun } from "./names.js";

const PAGE = 100;
const FIXES = {
  training: "Fix for training", plan: "Fix for all next runs: save these dtypes as plan.json", inference: "Fix for inference",
  data: "Rows to drop", diagnosis: "Code that finds the cause",
};

// Made once: a page of rows takes 50 ms where each makes its own.
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
  // Thousands of rows would make every layout slow: a window of pages is kept.
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

  // Which run an event is of, where two are shown.
  function runLabel(event) {
    const { runData, compareData } = store.state;
    if (!compareData) return null;
    const compared = !runData.events.includes(event.members?.[0] ?? event);
    const [of, other] = compared ? [compareData, runData] : [runData, compareData];
    return element("span", {
      class: compared ? "of-run compared" : "of-run", title: of.run,
    }, labelOfRun(of.run, other.run));
  }

  function isAbout(event, paths) {
    const { layer } = store.state;
    if (layer === null) return false;
    const path = pathOfCall(layer, paths);
    return layersOf(event).some((name) => pathOfCall(name, paths) === path);
  }

  function turn(direction) {
    const height = scroller.scrollHeight;
    if (direction > 0) last += PAGE;
    else first = Math.max(0, first - PAGE);
    drawRows();
    if (direction < 0) scroller.scrollTop += scroller.scrollHeight - height;
  }

  function row(event, paths) {
    const { level } = event;
    const chosen = isChosenEvent(event, store.state.event);
    const moment = momentOf(event);
    const details = chosen ? eventDetails(event) : [];
    const badge = element("span", { class: `badge ${level}` },
      `${LEVELS[level].glyph} ${eventTitle(event)}`);
    const noticed = moment === event.step ? "" : `, noticed at step ${event.step}`;
    const time = event.wall_time ? clock.format(event.wall_time * 1000) : "";
    return element("li", {
      "data-kind": event.kind, "data-step": moment, tabindex: "-1",
      "data-layer": layersOf(event)[0] ?? "", "aria-current": chosen ? "true" : null,
      class: [chosen && "chosen", isAbout(event, paths) && "about"]
        .filter(Boolean).join(" "),
      title: [time + noticed, moment === 0 ? momentInWords(moment) : ""].filter(Boolean).join(", "), onclick: () => chooseEvent(store, event),
    },
    element("span", { class: "when" }, formatInteger(moment)),
    element("span", {}, badge, runLabel(event)),
    // What repairs it before what was measured, of which there may be more than fits.
    element("span", { class: "what" }, ...breakable(describeEvent(event)),
      ...chosen ? fixesOf(event) : [],
      ...details.map((line) => element("span", { class: "detail" }, ...breakable(line)))));
  }

  // What repairs it, to be copied; what is open stays so when the run has gone on.
  function fixesOf({ fix }) {
    return Object.entries(fix ?? {}).map(([use, code]) => element("div", { class: "fix" },
      copyButton("Copy code", () => code),
      element("details", {
        open: openFixes.has(code) ? "" : null,
        onclick: (click) => click.stopPropagation(),
        ontoggle: ({ target }) => {
          if (target.open) openFixes.add(code);
          else openFixes.delete(code);
        },
      },
        element("summary", {}, FIXES[use] ?? use),
        element("pre", {}, element("code", {}, code)))));
  }

  function drawChips() {
    const { hiddenKinds } = store.state;
    const focused = chips.querySelector(":focus")?.dataset.filter;
    chips.replaceChildren(...countsByKind(runsOf(store.state)).map(({ kind, count, rows }) => element("button", {
      type: "button", class: "chip", "data-filter": kind,
      "aria-pressed": String(!hiddenKinds.has(kind)),
      onclick() {
        const hidden = new Set(store.state.hiddenKinds);
        if (!hidden.delete(kind)) hidden.add(kind);
        store.set({ hiddenKinds: hidden });
      },
    }, `${kindTitle(kind)} ${formatInteger(count)}${rows === count ? "" : ` in ${plural(rows, "row")}`}`)));
    [...chips.children].find((chip) => chip.dataset.filter === focused)?.focus();
  }

  function filterEvents() {
    const { hiddenKinds, onlyLayer, layer } = store.state;
    const paths = pathsOf();
    only.checked = onlyLayer;
    shown = runsOf(store.state).flatMap(({ events }) => groupEvents(events)).filter((event) => {
      if (hiddenKinds.has(event.kind)) return false;
      return !onlyLayer || layer === null || isAbout(event, paths);
    }).sort((one, other) => momentOf(one) - momentOf(other));
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
    // Few rows need less room than the card has beside others, but for the details of a chosen one.
    root.style.setProperty("--rows", String(store.state.event === null ? shown.length : PAGE));
    const after = Math.max(0, shown.length - last);
    earlier.hidden = first === 0;
    earlier.textContent = `Show earlier events (${formatInteger(first)})`;
    later.hidden = after === 0;
    later.textContent = `Show later events (${formatInteger(after)})`;
    scroller.scrollTop = top;
    if (focused >= 0) list.children[focused]?.focus({ preventScroll: true });
  }

  // All that another layer changes of the rows that there are.
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

  // A step chosen elsewhere brings the list to the events around it.
  function follow(state, changed) {
    filterEvents();
    const index = shown.findIndex((event) => {
      if (state.event !== null) return isChosenEvent(event, state.event);
      return state.step !== null && lastMomentOf(event) >= state.step;
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
