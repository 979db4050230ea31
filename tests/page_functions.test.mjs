// The arithmetic of the page: scales, columns of pixels, colours, graphs.
// What a reader sees of it is tested in a document: `node_page.py`.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const FOLDER = new URL("../keras_mixprec/tensorboard_plugin/static/", import.meta.url);
const NAMES = readdirSync(FOLDER).filter((name) => name.endsWith(".js") && name !== "index.js");
// All that the modules export: no two define the same name, since the page is one script.
const all = Object.assign({}, ...await Promise.all(NAMES.map((name) => import(new URL(name, FOLDER)))));
const KNOWN = JSON.parse(process.env.MIXPREC_KNOWN);
const FLOAT16 = KNOWN.float16;
const INF = Infinity;

const layer = (path, more = {}) => ({
  path, class: "Dense", compute_dtype: "float16", dtypes: [[0, "float16"]], demoted_at: null, inside: null,
  verdicts: [], severity: null, least_headroom: 9, share_of_flops: 0.25, fed_by: [], passed_from: null, ...more,
});
const heat = (values, more = {}) => ({
  layers: ["a"], from: [0, 1, 2], until: [0, 1, 2], pool: "min", values, metric: "activation_headroom_bits",
  marks: null, origins: [], ...more,
});
// Of three columns the second is left out.
const bad = { marks: Uint16Array.of(0, 65535, 0) };

test("no two modules define the same name, since the page is one script", () => {
  const defined = readdirSync(FOLDER).filter((name) => name.endsWith(".js")).flatMap((name) => {
    const source = readFileSync(new URL(name, FOLDER), "utf8");
    const starts = /^(?:export )?(?:async )?(?:function|const|let|class) (\w+)/gm;
    return [...source.matchAll(starts)].map(([, found]) => found);
  });
  assert.deepEqual(defined.filter((name, index) => defined.indexOf(name) !== index), []);
});

// Columns and rows of the heatmap.

test("one bad column stays visible however narrow the picture is", () => {
  const steps = Array.from({ length: 1000 }, (_, step) => step);
  for (const [pool, worst] of [["min", -1], ["max", 9]]) {
    for (const width of [1, 7, 333, 999, 2500]) {
      const values = new Float32Array(1000).fill(5);
      values[617] = worst;
      const { place } = all.columnScale({ from: steps, until: steps }, [-0.5, 999.5], [0, width]);
      const pixels = all.columnsOfPixels(place, 1000, width);
      const row = all.poolRow(heat(values, { from: steps, until: steps, pool }), 0, pixels);
      assert.ok(row.values.includes(worst), `${pool} ${width}`);
    }
  }
});

const levelsOf = (found) => [...found.ranks].map((rank) => all.GRAVEST[rank]);

test("under a pixel the gravest counts: an overflow, not bad data or what a wider dtype holds", () => {
  const pixels = { first: Int32Array.of(0, 1), last: Int32Array.of(0, 2) };
  const pooled = (values, isWider = () => false) =>
    all.poolRows(heat(values, bad), [0], pixels, "headroom", isWider);
  assert.deepEqual(levelsOf(pooled([9, NaN, 5])), ["quiet", "input"]);
  assert.equal(pooled([9, NaN, 5]).columns[1], 1);
  assert.deepEqual(levelsOf(pooled([9, NaN, -1])), ["quiet", "bad"]);
  const both = heat([3, 12], { layers: ["wide", "low"], from: [1], until: [1] });
  const one = { first: Int32Array.of(0), last: Int32Array.of(0) };
  const found = all.poolRows(both, [0, 1], one, "headroom", (call) => call === 0);
  assert.deepEqual([found.source[0], levelsOf(found)], [1, ["quiet"]]);
});

test("a layer has at each step the dtype that it was computed in", () => {
  const moved = layer("a", { compute_dtype: "float32", dtypes: [[0, "float16"], [28, "float32"]] });
  assert.deepEqual([0, 28, 29].map((step) => all.dtypeAt(moved, step)), ["float16", "float16", "float32"]);
  assert.deepEqual([28, 29].map((step) => all.widerAt(moved, step, "float16")), [null, "float32"]);
  assert.ok(all.isWider("bfloat16", "float16") && !all.isWider("float32", "bfloat16"));
});

// Colours.

test("each kind of metric has its alarms", () => {
  for (const [kind, value, wider, level] of [
    ["headroom", -INF, false, "bad"], ["headroom", 0, false, "bad"], ["headroom", 1.5, false, "warning"],
    ["headroom", -1, true, "beyond"], ["headroom", -INF, true, "bad"], ["headroom", 1.5, true, "roomy"],
    ["headroom", INF, false, "zero"], ["share", INF, false, "zero"], ["share", NaN, false, "none"],
    ["count", 1, false, "bad"], ["error", 0.1, false, "warning"],
  ]) assert.equal(all.alarmLevel(kind, value, wider), level, `${kind} ${value}`);
});

test("every unit of the package has words, and every value of it a colour", () => {
  for (const kind of KNOWN.units) {
    assert.ok(all.LEGENDS[kind], `add "${kind}" to LEGENDS of palette.js, and its colours`);
    assert.ok(all.WORDS[kind], `add "${kind}" to WORDS of metrics.js`);
    assert.equal(all.valueColor(kind, NaN), null);
    for (const value of [-INF, -1, 0, 1e-9, 1e-3, 0.5, 3, 1e9, INF]) {
      if (kind !== "headroom" && value < 0) continue;
      assert.ok(all.valueColor(kind, value).every((channel) => channel >= 0 && channel <= 255), kind);
    }
  }
});

// Numbers and names as text.

test("numbers are written as Python writes them", () => {
  const [values, texts] = KNOWN.share;
  assert.deepEqual(values.map(all.formatShare), texts);
  assert.deepEqual([all.formatPower(-24), all.formatScale(32768)], ["2⁻²⁴", "2¹⁵"]);
  assert.deepEqual(["-inf", "nan"].map(all.formatNumber), ["−∞", "NaN"]);
  assert.equal(all.formatInteger(1234567), "1,234,567");
  assert.equal(all.readable("`a` 2**15 -> 2**-14, 2**0.5"), "a 2¹⁵ -> 2⁻¹⁴, 2**0.5");
});

test("a cell of a CSV is quoted, and no formula", () => {
  assert.equal(all.csvOf([["a", "b"], [1, 'x,"y"'], [null, "z"]]), 'a,b\r\n1,"x,""y"""\r\n,z\r\n');
  const cells = ["=1+1", "@a", "+a", "-a", " =a", "\ta", "-1e-3", "dense", "-inf"];
  const shown = ["'=1+1", "'@a", "'+a", "'-a", "' =a", "'\ta", "-1e-3", "dense", "-inf"];
  assert.equal(all.csvOf(cells.map((cell) => [cell])), [...shown, ""].join("\r\n"));
  assert.equal(all.csvOf([[-3], [-INF], [NaN]]), "-3\r\n-inf\r\nnan\r\n");
});

// Readings of a layer.

test("the worst of all calls of a layer counts, since a repair, without bad batches", () => {
  const [headroom, error] = ["headroom", "error"].map((kind) => ({ name: kind, kind }));
  const stateOf = (values, own, metric, more = {}) => {
    const found = all.worstByLayer(heat(values, more), new Map([["a", own]]), (call) => call.split("#")[0], metric.kind);
    const { level } = all.describeReading(found.get("a"), own, metric, FLOAT16);
    return [found.get("a").value, level];
  };
  const calls = { layers: ["a", "a#1"], from: [0, 1], until: [0, 1] };
  assert.equal(stateOf([3, NaN, 2, 5], layer("a"), headroom, calls)[0], 2);
  assert.deepEqual(stateOf([9, NaN, 5], layer("a"), headroom, bad)[0], 5);
  assert.deepEqual(stateOf([NaN, NaN, NaN], layer("a"), headroom, bad), [NaN, "input"]);
  const wide = layer("a", { compute_dtype: "float32", dtypes: [[0, "float16"], [1, "float32"]] });
  assert.equal(stateOf([-INF, -INF, 5], wide, headroom)[0], 5);
  // An error of before is told to be one.
  assert.deepEqual(stateOf([0.999, NaN, NaN], wide, error, { pool: "max" })[1], "beyond");
  assert.deepEqual(stateOf([0.999, NaN, NaN], layer("a"), error, { pool: "max" })[1], "warning");
});

// Graphs, and what is drawn when.

test("blocks are folded, and edges between them kept", () => {
  const layers = [
    { path: "in", fed_by: [] }, { path: "block", fed_by: ["in"] }, { path: "block/a", fed_by: [] },
    { path: "block/a/deep", fed_by: [] }, { path: "block/b", fed_by: ["block/a"] }, { path: "out", fed_by: ["block", "in"] },
  ];
  const folded = all.foldedGraph(layers, new Set());
  assert.deepEqual(folded.nodes.map(({ path, depth }) => [path, depth]), [["in", 0], ["block", 1], ["out", 2]]);
  assert.equal(folded.nodes[1].inside.length, 4);
  assert.deepEqual(folded.edges.map(({ from, to }) => `${from} ${to}`), ["in block", "block out", "in out"]);
  const open = all.foldedGraph(layers, new Set(["block"]));
  assert.deepEqual(open.nodes.map(({ path }) => path), ["in", "block", "block/a", "block/b", "out"]);
  assert.ok(open.edges.some(({ from, to, nested }) => from === "block" && to === "block/a" && nested));
  // What is behind a layer that is used twice in a row is deeper.
  const twice = [["in"], ["mix", "in", "relu"], ["relu", "mix"], ["out", "relu"], ["last", "out"]]
    .map(([path, ...fed_by]) => ({ path, fed_by }));
  assert.deepEqual(all.foldedGraph(twice, new Set()).nodes.map(({ depth }) => depth), [0, 1, 2, 3, 4]);
});
