import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const { decodeHeat } = await load("heat_data");
const { GRAVEST, poolRows, worstOfRows } = await load("heat_rows");
const { layerColumns, worstLayer } = await load("layer_columns");
const { originsIn, passedInWords } = await load("passed_on");
const { isAsIf } = await load("precision");
const { differencesOf, DIFFERENCES } = await load("difference");

const LAYER = { path: "a", compute_dtype: "float16", verdicts: [], severity: null };
const HEADROOM = "activation_headroom_bits";

function heatBuffer(head, halves) {
  const text = JSON.stringify(head).padEnd(4 * Math.ceil(JSON.stringify(head).length / 4));
  const buffer = new ArrayBuffer(4 + text.length + halves.length * 2);
  const view = new DataView(buffer);
  view.setUint32(0, text.length, true);
  new Uint8Array(buffer, 4).set(new TextEncoder().encode(text));
  halves.forEach((bits, index) => view.setUint16(4 + text.length + index * 2, bits, true));
  return buffer;
}

test("headroom comes as float16, of which each number is read", () => {
  const head = {
    layers: ["a", "b"], from: [0, 10, 20], until: [9, 19, 29], pool: "min", dtype: "float16",
    bad_input: { rows: [], columns: [] },
  };
  const halves = [0x3c00, 0xc680, 0x4a6d, 0x7e00, 0xfc00, 1];
  const { values } = decodeHeat(heatBuffer(head, halves));
  assert.deepEqual([...values], [1, -6.5, 12.8515625, NaN, -Infinity, 2 ** -24]);
});

const heatOf = (values, metric = HEADROOM) => ({
  metric, layers: ["a", "b"], from: [1], until: [1], pool: "min", values,
});

test("the data say of which cells another layer, or the whole run, is the cause", () => {
  const heat = {
    ...heatOf([]), from: [1, 2, 3], passed: [
      { from: { layer: "a" }, rows: [1], columns: [[0, 0]] },
      { from: { because: "training diverged" }, rows: [0, 1], columns: [[1, 2]] },
    ],
  };
  const originAt = originsIn(heat);
  assert.deepEqual(originAt(1, 0), { layer: "a" });
  assert.equal(originAt(0, 0), null);
  assert.deepEqual([originAt(0, 2), originAt(1, 1)], Array(2).fill({ because: "training diverged" }));
  assert.equal(originAt(0, -1), null);
  assert.equal(passedInWords(originAt(0, 2), -Infinity).short, "not finite: training diverged");
  assert.equal(passedInWords({ layer: "a" }, Infinity).short, "all zero: comes from a");
});

const narrow = { ...LAYER, path: "narrow", least_headroom: 12 };
const wide = { ...LAYER, path: "wide", compute_dtype: "float32", least_headroom: 3 };

test("a layer in float32 is not the closest to overflow", () => {
  assert.equal(worstLayer([wide, narrow], "float16"), narrow);
  const run = { format: { name: "float16" }, layers: [wide, narrow] };
  const { of, ofBlock } = layerColumns(run, null).find(({ id }) => id === "headroom");
  assert.deepEqual([of(narrow), of(wide), ofBlock([wide, narrow])], [12, 115, 12]);
  const layers = new Map([["wide", { ...wide, dtypes: [[0, "float32"]] }], ["narrow", narrow]]);
  const heat = { ...heatOf([3, 12]), layers: ["wide", "narrow"] };
  const choice = { keeps: () => true, folded: new Set() };
  const found = worstOfRows(heat, layers, choice, "float16");
  assert.deepEqual(found.map((row) => [row.value, row.wider]), [[3, "float32"], [12, null]]);
  const pixels = { first: Int32Array.of(0), last: Int32Array.of(0) };
  const pooled = poolRows(heat, [0, 1], pixels, "headroom", (call) => call === 0);
  assert.deepEqual([pooled.source[0], GRAVEST[pooled.ranks[0]]], [1, "quiet"]);
});

test("a run without a layer in 16 bits is shown as if it were in them", () => {
  assert.ok(isAsIf([wide], "float16"));
  assert.ok(!isAsIf([wide, narrow], "float16"));
  assert.ok(!isAsIf([{ ...wide, dtypes: [[0, "float16"], [3, "float32"]] }], "float16"));
});

test("of two runs a cell has one quantity, of outputs or of what is inside", () => {
  const run = (dtype, headroom, inside) => ({
    format: { name: "float16" },
    layers: [{ ...LAYER, compute_dtype: dtype, least_headroom: headroom, inside }],
  });
  const one = run("float16", -4.9, { step: 3, largest: 2e6, outputs: 17.1 });
  const [{ cells }] = differencesOf(one, run("float32", 16.8, null), null, null, "all");
  const cell = (id) => cells[DIFFERENCES.findIndex((column) => column.id === id)];
  // In the dtype that a layer computes in; both have enough of it.
  assert.deepEqual(cell("headroom").values, [17.1, 128.8]);
  assert.deepEqual(cell("headroom").notes, ["", ""]);
  assert.equal(cell("headroom").size, 0);
  assert.deepEqual(cell("inside").values, [2e6, null]);
  const headroom = (...runs) => differencesOf(...runs, null, null, "all")[0].cells.find(({ id }) => id === "headroom");
  // A run in bfloat16 has headroom of that, one in float32 of float16.
  const brain = { ...run("bfloat16", 132, null), format: { name: "bfloat16" } };
  assert.equal(headroom(brain, run("float32", 19.8, null)).size, 0);
  const scarce = headroom(run("float16", 1.5, null), run("float32", -4.9, null));
  assert.deepEqual([scarce.size, scarce.notes], [24, ["", ", beyond float16"]]);
});
