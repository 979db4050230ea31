import { element } from "./dom.js";
import { drawSoon } from "./frames.js";
import { layerChoice } from "./layer_blocks.js";
import { valueOf } from "./summary.js";
import { themeColor } from "./theme.js";

/**
 * Rows of a table as text that spreadsheets read.
 * @param {object[]} rows
 */
export function csvOf(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = rows.map((row) => names.map((name) => quoted(row[name])).join(","));
  return [names.join(","), ...lines].join("\r\n") + "\r\n";
}

// What each table holds: all that it would show if it were scrolled through.
const TABLES = {
  runs: ({ summaries }) => (summaries ?? []).filter((row) => row.headline).map(({
    headline, share_of_flops, unread, ...row
  }) => {
    return {
      ...row, state: headline.state, share_before: share_of_flops.before,
      share_now: share_of_flops.now,
    };
  }),
  performance: ({ runData }) => (runData.performance?.figures ?? []).map(({ name }) => {
    return { figure: name, value: valueOf(runData, name) };
  }),
  layers: (state) => state.runData.layers.filter(layerChoice(state).keeps),
  events: ({ runData, hiddenKinds }) => {
    return runData.events.filter(({ kind }) => !hiddenKinds.has(kind));
  },
};

function save(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// All pictures of a card, one below the other, on its background.
function pictureOf(canvases) {
  const whole = element("canvas");
  whole.width = Math.max(...canvases.map((canvas) => canvas.width));
  whole.height = canvases.reduce((sum, canvas) => sum + canvas.height, 0);
  const pen = whole.getContext("2d");
  pen.fillStyle = themeColor("--card");
  pen.fillRect(0, 0, whole.width, whole.height);
  let top = 0;
  for (const canvas of canvases) {
    pen.drawImage(canvas, 0, top);
    top += canvas.height;
  }
  return whole;
}

/**
 * Adds to each card of a table CSV and JSON, to each of a chart PNG.
 */
export function addExports(main, store) {
  const nameOf = (id, end) => {
    const run = (store.state.runData?.run ?? "runs").replace(/[^\w.-]+/g, "_");
    return `${run}-${id}.${end}`;
  };
  for (const root of main.children) {
    const { id } = root;
    const head = root.querySelector(".card-head");
    const button = (end, title, onclick) => element("button", {
      type: "button", class: "export", "data-export": end, title, onclick,
    }, end.toUpperCase());
    const saveText = (end, type, write) => button(end, `Download this table as ${end.toUpperCase()}`,
      () => save(nameOf(id, end), new Blob([write(TABLES[id](store.state))], { type })));
    if (TABLES[id]) {
      head.append(saveText("csv", "text/csv", csvOf),
        saveText("json", "application/json", (rows) => JSON.stringify(rows, null, 1)));
    }
    if (!root.querySelector("canvas")) continue;
    head.append(button("png", "Download this picture as PNG", () => drawSoon(() => {
      /** @type {HTMLCanvasElement[]} */
      const canvases = [...root.querySelectorAll("canvas")]
        .filter((canvas) => canvas.offsetParent && canvas.width);
      if (!canvases.length) return;
      pictureOf(canvases).toBlob((blob) => save(nameOf(id, "png"), blob));
    })));
  }
}
