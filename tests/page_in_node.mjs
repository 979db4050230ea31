// The page in a document without a browser: jsdom, and canvases that record.
//
// Reads a request a line, `[name, ...arguments]`, and answers each with a line.
// Nothing waits for the clock: what the page puts off for a moment runs at once,
// what it puts off for longer, or repeats, when it is told to.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const { JSDOM, VirtualConsole } = createRequire(process.argv[2])("jsdom");
const WIDTH = 1000;
const SOON = 500;

let window = null;
let page = null;

// jsdom has timers of its own.
const turn = () => new Promise((resolve) => setTimeout(() => setImmediate(resolve)));

function hex(colour) {
  const channels = /^rgba?\((\d+), ?(\d+), ?(\d+)(?:, ?1)?\)$/.exec(colour);
  return channels ? `#${channels.slice(1).map((one) => Number(one).toString(16).padStart(2, "0")).join("")}` : colour;
}

// A 2D context that keeps what was drawn, with what moves it applied.
class Pen {
  constructor(canvas) {
    this.canvas = canvas;
    this.state = [];
    this.reset();
  }

  reset() {
    this.canvas.marks = [];
    Object.assign(this, { path: [], dash: [], at: [1, 1, 0, 0], fillStyle: "#000000", strokeStyle: "#000000" });
  }

  place(x, y) {
    return [x * this.at[0] + this.at[2], y * this.at[1] + this.at[3]];
  }

  keep(kind, style, more) {
    const hatched = typeof style === "object";
    this.canvas.marks.push({ kind, colour: hex(hatched ? style.colour : style), hatched, ...more });
  }

  box(x, y, width, height) {
    return { x: this.place(x, y)[0], y: this.place(x, y)[1], width, height };
  }

  save() { this.state.push({ ...this }); }
  restore() { Object.assign(this, this.state.pop()); }
  translate(x, y) { this.at = [...this.at.slice(0, 2), ...this.place(x, y)]; }
  scale(x, y) { this.at = [this.at[0] * x, this.at[1] * y, ...this.at.slice(2)]; }
  setTransform(x, _, __, y, right, down) { this.at = [x, y, right, down]; }
  rotate() {}
  clip() {}
  rect() {}
  closePath() {}
  beginPath() { this.path = []; }
  moveTo(x, y) { this.path.push(this.place(x, y)); }
  lineTo(x, y) { this.path.push(this.place(x, y)); }
  arc(x, y) { this.path.push(this.place(x, y)); }
  setLineDash(dash) { this.dash = dash; }
  clearRect() { this.canvas.marks = []; }
  fillRect(...box) { this.keep("box", this.fillStyle, this.box(...box)); }
  strokeRect(...box) { this.keep("frame", this.strokeStyle, this.box(...box)); }
  fill() { this.keep("shape", this.fillStyle, { points: this.path }); }
  stroke() { this.keep("line", this.strokeStyle, { points: this.path, dashed: this.dash.length > 0 }); }

  fillText(text, x, y) {
    const [left, top] = this.place(x, y);
    this.keep("text", this.fillStyle, { text, x: left, y: top });
  }

  drawImage(image, x, y, width = image.width, height = image.height) {
    this.canvas.picture = image.pixels ?? null;
    this.keep("image", "", { ...this.box(x, y, width, height), of: image.parentElement?.className ?? "" });
    if (!image.pixels) this.canvas.marks.push(...image.marks);
  }

  measureText(text) { return { width: 6 * text.length }; }
  createPattern(tile) { return { colour: tile.marks[0].colour }; }
  createImageData(width, height) { return { width, height, data: new Uint8ClampedArray(4 * width * height) }; }
  putImageData(image) { this.canvas.pixels = image; }
}

// The size of an element is what its style says; all are at the upper left.
function layOut({ HTMLElement, Element, HTMLCanvasElement, HTMLAnchorElement }) {
  const define = (type, name, get) => Object.defineProperty(type.prototype, name, { configurable: true, get });
  const isHidden = (node) => node.closest("[hidden]") !== null;
  const height = (node) => parseFloat(node.style?.height) || 0;
  const width = (node) => (isHidden(node) ? 0 : parseFloat(node.style?.width) || WIDTH);
  define(HTMLElement, "offsetParent", function () { return isHidden(this) ? null : this.ownerDocument.body; });
  for (const name of ["offsetWidth", "clientWidth"]) define(Element, name, function () { return width(this); });
  for (const name of ["offsetHeight", "clientHeight"]) define(Element, name, function () { return height(this); });
  Element.prototype.getBoundingClientRect = function () {
    return { left: 0, top: 0, right: width(this), bottom: height(this), width: width(this), height: height(this) };
  };
  Element.prototype.scrollIntoView = function () { page.broughtIntoView.push(this); };
  Element.prototype.setPointerCapture = () => {};
  for (const name of ["width", "height"]) {
    Object.defineProperty(HTMLCanvasElement.prototype, name, {
      get() { return Number(this.getAttribute(name) ?? 300); },
      set(value) {
        this.setAttribute(name, value);
        this.pen?.reset();
      },
    });
  }
  HTMLCanvasElement.prototype.getContext = function () { return this.pen ??= new Pen(this); };
  HTMLCanvasElement.prototype.toBlob = function (use) { use(new Blob([JSON.stringify(this.marks)])); };
  HTMLAnchorElement.prototype.click = function () { page.saved.push([this.download, page.blobs.get(this.href)]); };
}

class Observer {
  constructor(use) { this.use = use; }

  observe(target) {
    const contentRect = { width: WIDTH, height: 0 };
    later(() => this.use([{ target, contentRect, isIntersecting: true }]));
  }
}

// What is to be done before the page is at rest.
function later(act) {
  const id = page.lastId += 1;
  const { waiting } = page;
  waiting.set(id, setImmediate(() => {
    waiting.delete(id);
    act();
  }));
  return id;
}

function stopWaiting(id) {
  clearImmediate(page.waiting.get(id));
  page.waiting.delete(id);
}

async function fetchOf(path, options) {
  const own = page;
  own.fetching += 1;
  try {
    return await fetch(new URL(path, own.base), options);
  } finally {
    own.fetching -= 1;
  }
}

function equip() {
  layOut(window);
  Object.assign(window, {
    page,
    ResizeObserver: Observer, IntersectionObserver: Observer, fetch: fetchOf, TextDecoder, Response, DecompressionStream, Blob,
    requestAnimationFrame: later, clearTimeout: stopWaiting,
    setTimeout: (act, time = 0) => (time < SOON ? later(act) : 0),
    setInterval: (act) => page.repeated.push(act),
    matchMedia: () => ({ matches: false, addEventListener: () => {} }),
  });
  window.URL.createObjectURL = (blob) => {
    page.blobs.set(`blob:${page.blobs.size}`, blob);
    return `blob:${page.blobs.size - 1}`;
  };
  window.navigator.clipboard = { writeText: async (text) => page.copied.push(text) };
}

async function atRest() {
  let quiet = 0;
  for (let turns = 0; quiet < 3; turns += 1) {
    await turn();
    const { ready, later: more } = window.document.body.dataset;
    quiet = page.waiting.size || page.fetching || !ready || more ? 0 : quiet + 1;
    if (turns > 20_000) throw new Error(`not at rest: ${JSON.stringify({ ready, more, waiting: page.waiting.size, fetching: page.fetching })}`);
  }
}

async function textOf(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  return answer.text();
}

const requests = {
  // A page as it is sent: all of it in one file, or with a server behind it.
  async open(html, url, hash) {
    window?.close();
    page = {
      base: url, fetching: 0, repeated: [], waiting: new Map(), lastId: 0,
      saved: [], blobs: new Map(), copied: [], errors: [], broughtIntoView: [],
    };
    let script = "";
    let whole = html ?? await textOf(url);
    if (html) whole = html.replace(/<script>([^]*?)<\/script>/, (_, found) => (script = found, ""));
    else {
      script = `${(await textOf(`${url}static/page.js`)).replace(/^export .*/m, "")}; render();`;
      whole = whole.replace(/<script[^]*?<\/script>/, "");
    }
    const virtualConsole = new VirtualConsole();
    for (const kind of ["jsdomError", "error", "warn"]) {
      virtualConsole.on(kind, (error) => page.errors.push(error.stack ?? String(error)));
    }
    ({ window } = new JSDOM(whole, {
      runScripts: "outside-only", pretendToBeVisual: true, resources: "usable", virtualConsole, url: `${url}#${hash}`,
    }));
    equip();
    window.eval(`(() => {${script}})()`);
    await atRest();
  },

  run: (code, ...given) => new window.Function(code)(...given),

  rest: atRest,
};

process.on("unhandledRejection", (error) => page?.errors.push(error.stack ?? String(error)));
process.on("uncaughtException", (error) => page?.errors.push(error.stack ?? String(error)));

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  let answer;
  try {
    answer = { found: await requests[name](...given) ?? null };
  } catch (error) {
    answer = { error: error.stack ?? String(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit();
