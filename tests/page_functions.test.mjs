// The arithmetic of the page: scales, columns of pixels, colours, ranges, plans, graphs.
// What a reader sees of it is tested in a document: `node_page.py`.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const FOLDER = new URL("../keras_mixprec/tensorboard_plugin/static/", import.meta.url);
const NAMES = readdirSync(FOLDER).filter((name) => name.endsWith(".js") && name !== "index.js");
// All that the modules export: no two define the same name, since the page is one script.
const all = Object.assign({}, ...await Promise.all(NAMES.map((name) => import(new URL(name, FOLDER)))));
const KNOWN = JSON.parse(process.env.MIXPREC_KNOWN);
const { formats } = KNOWN;
const formatOf = (name) => formats.find((one) => one.name === name);
const FLOAT16 = { ...formatOf("float16"), maximum_exponent: 16, normal_exponent: -14 };
const INF = Infinity;

const layer = (path, more = {}) => ({
  path, class: "Dense", compute_dtype: "float16", dtypes: [[0, "float16"]], demoted_at: null, inside: null,
  verdicts: [], severity: null, least_headroom: 9, share_of_flops: 0.25, fed_by: [], passed_from: null, ...more,
});
const heat = (values, more = {}) => ({
  layers: ["a"], from: [0, 1, 2], until: [0, 1, 2], pool: "min", values, metric: "activation_headroom_bits",
  badInput: { rows: new Set(), columns: new Set() }, ...more,
});
const bad = (row, column) => ({ badInput: { rows: new Set([row]), columns: new Set([column]) } });

test("no two modules define the same name, since the page is one script", () => {
  const defined = readdirSync(FOLDER).filter((name) => name.endsWith(".js")).flatMap((name) => {
    const source = readFileSync(new URL(name, FOLDER), "utf8");
    const starts = /^(?:export )?(?:async )?(?:function|const|let|class) (\w+)/gm;
    return [...source.matchAll(starts)].map(([, found]) => found);
  });
  assert.deepEqual(defined.filter((name, index) => defined.indexOf(name) !== index), []);
});

// Scales and ticks.

test("scales, ticks and zoom", () => {
  const scale = all.linearScale([10, 20], [100, 300]);
  assert.deepEqual([scale(15), scale.invert(200)], [200, 15]);
  assert.deepEqual(all.niceTicks(0, 2000, 4), [0, 500, 1000, 1500, 2000]);
  assert.deepEqual(all.niceTicks(0, 3, 10), [0, 1, 2, 3]);
  assert.deepEqual(all.niceTicks(0.004, 0.011, 4, 0), [0.004, 0.006, 0.008, 0.01]);
  assert.deepEqual(all.exponentTicks(1, 20, 6), [4, 8, 12, 16, 20]);
  assert.equal(all.countAtMost([1, 3, 5], 3), 2);
  assert.deepEqual([4, 9].map((step) => all.valueAtStep([5, 9], [7, 8], step)), [7, 8]);
  assert.equal(all.valueAtStep([], [], 1), null);
  assert.equal(all.zoomedDomain([0, 100], 50, 2, [0, 100]), null);
  assert.deepEqual(all.zoomedDomain([0, 100], 50, 0.5, [0, 100]), [25, 75]);
  assert.equal(all.labelStride(4, 11), 3);
});

test("the nearest mark within reach is hit, and none hides another", () => {
  const marks = [{ x: 0, y: 0 }, { x: 10, y: 0 }];
  assert.equal(all.nearestMark(marks, { x: 8, y: 1 }, 9), marks[1]);
  assert.equal(all.nearestMark(marks, { x: 30, y: 0 }, 9), null);
  const mark = (shape, x, y = 0) => ({ shape, x, y });
  const placed = (...own) => all.setApart(own, 100).map(({ shape, x }) => [shape, x]);
  assert.deepEqual(placed(mark("triangle", 50), mark("diamond", 52)), [["diamond", 59], ["triangle", 50]]);
  assert.deepEqual(placed(mark("triangle", 95), mark("diamond", 95)), [["diamond", 86], ["triangle", 95]]);
  assert.deepEqual(placed(mark("triangle", 50, 9), mark("diamond", 50))[0], ["diamond", 50]);
});

test("a reading takes one unit, and what lies between two none", () => {
  const HEAT = { from: [1, 50, 99], until: [1, 50, 100] };
  const axis = all.readingAxis(HEAT);
  assert.deepEqual([-9, 0, 1, 25, 50, 75, 99.5, 200].map(axis.of), [0, 0, 0.5, 1, 1.5, 2, 2.5, 3]);
  assert.deepEqual([0.5, 1.5, 2.25].map(axis.stepAt), [1, 50, 99]);
  assert.deepEqual(axis.ticks(0, 3, 5).map(axis.label), ["1", "50", "99"]);
  assert.deepEqual(axis.ticks(0, 3, 1), [0.5, 2.5]);
  const state = { axis: "step", toScale: null, runData: { last_step: 100 } };
  // Between two readings that are zoomed into steps are to scale.
  assert.equal(all.heatAxis(state, HEAT, [0, 100]).of(50), 1.5);
  assert.equal(all.heatAxis(state, HEAT, [20, 40]).of(30), 30);
  const isBy = (more) => all.isByReading({ ...state, ...more }, HEAT);
  const few = { runData: { last_step: 20 } };
  assert.deepEqual([{}, { toScale: true }, few, { ...few, toScale: false }].map(isBy), [true, false, false, true]);
  assert.ok(!all.canBeByReading(state, { from: [1, 2, 3], until: [1, 2, 3] }));
  const clock = { time: { steps: [0, 100], values: [0, 9] } };
  assert.ok(!all.canBeByReading({ ...state, axis: "time", runData: { last_step: 100, clock } }, HEAT));
});

test("two runs are placed by their own epochs, side by side", () => {
  const run = (steps, name) => ({
    run: name, last_step: steps.at(-1), clock: { epoch: { steps, values: [0, 1, 2] }, time: null },
  });
  const [runData, compareData] = [run([0, 8, 16], "a"), run([0, 20, 40], "b")];
  const state = { axis: "epoch", runData, compareData };
  const { toShown, toOwn } = all.alignedSteps(state, compareData);
  assert.deepEqual([toShown(10), toShown(40), toOwn(12)], [4, 16, 30]);
  assert.equal(all.alignedSteps(state, runData).toShown(5), 5);
  assert.equal(all.axisOf(state, compareData).of(30), 1.5);
  assert.deepEqual(["epoch", "step", "time"].map((axis) => all.lastStepOf({ ...state, axis })), [16, 40, 40]);
  const lacking = { ...state, compareData: { ...compareData, clock: {} } };
  assert.equal(all.axisOf(lacking).name, "step");
  assert.equal(all.alignedSteps(lacking, lacking.compareData).toShown(10), 10);
  const scale = all.alignedScale(state, compareData, Object.assign((step) => 2 * step, { invert: (x) => x / 2 }));
  assert.deepEqual([scale(40), scale.invert(32), scale.base(5)], [32, 40, 10]);
});

test("the axis of losses fits what is in view, and no noise fills it", () => {
  assert.deepEqual(all.lossAxis([0.5, 2.5]), [0.5, 2.5]);
  const [low, high] = all.lossAxis([2.29, 2.31]);
  // A tenth of 2.31, with 2.3 in the middle.
  assert.ok(Math.abs(high - low - 0.231) < 1e-12 && Math.abs(low + high - 4.6) < 1e-12);
  assert.deepEqual(all.lossAxis([0, 0]), [0, 0]);
  const curves = all.finiteStretches({ steps: [2, 4, 6, 8, 10], values: [9, 1, "nan", 3, 2] });
  const ranges = [[0, 20], [5, 20], [11, 20]].map((domain) => all.lossRange([curves], domain));
  assert.deepEqual(ranges, [[1, 9], [2, 3], null]);
  const gaps = (...values) => all.lossGaps({ steps: [50, 100, 150, 200], values });
  assert.deepEqual(gaps(9, "nan", "nan", 2), [[50, 150]]);
  assert.deepEqual(gaps("nan", "nan", "nan", "nan"), [[0, 200]]);
});

test("skipped steps are counted between the rows of the loss scale, too", () => {
  // At the floor there is a row for each reading; each step of 3 to 50 was skipped.
  const line = { steps: [0, 2, 3, 50, 100], scale: [4, 2, 1, 1, 1], skipped: [0, 1, 2, 49, 60] };
  const numbers = [0, 1, 2, 3, 29, 50, 99, 120].map((step) => all.skippedInWords(line, step).match(/\d+/g));
  assert.deepEqual(numbers, [["0"], ["0"], ["1"], ["2"], ["28"], ["49"], ["49", "50", "60", "100"], ["60"]]);
});

// Columns and rows of the heatmap.

test("columns leave no gaps between them", () => {
  const edges = all.columnEdges([0, 50, 100], [0, 50, 100]);
  assert.deepEqual(edges, [-25, 25, 75, 125]);
  assert.deepEqual([24, 25, 200].map((step) => all.columnAt(edges, step)), [0, 1, -1]);
});

test("one bad column stays visible however narrow the picture is", () => {
  const steps = Array.from({ length: 1000 }, (_, step) => step);
  for (const [pool, worst] of [["min", -1], ["max", 9]]) {
    for (const width of [1, 7, 333, 999, 2500]) {
      const values = new Float32Array(1000).fill(5);
      values[617] = worst;
      const edges = all.columnEdges(steps, steps);
      const pixels = all.columnsOfPixels(edges, all.linearScale([-0.5, 999.5], [0, width]), width);
      const row = all.poolRow(heat(values, { from: steps, until: steps, pool }), 0, pixels);
      assert.ok(row.values.includes(worst), `${pool} ${width}`);
    }
  }
});

const levelsOf = (found) => [...found.ranks].map((rank) => all.GRAVEST[rank]);

test("under a pixel the gravest counts: an overflow, not bad data or what a wider dtype holds", () => {
  const pixels = { first: Int32Array.of(0, 1), last: Int32Array.of(0, 2) };
  const pooled = (values, isWider = () => false) =>
    all.poolRows(heat(values, bad(0, 1)), [0], pixels, "headroom", isWider);
  assert.deepEqual(levelsOf(pooled([9, NaN, 5])), ["quiet", "input"]);
  assert.equal(pooled([9, NaN, 5]).columns[1], 1);
  assert.deepEqual(levelsOf(pooled([9, NaN, -1])), ["quiet", "bad"]);
  const rows = [layer("wide", { dtypes: [[0, "float32"]], compute_dtype: "float32", least_headroom: 3 }), layer("low")];
  const both = heat([3, 12], { layers: ["wide", "low"], from: [1], until: [1] });
  const one = { first: Int32Array.of(0), last: Int32Array.of(0) };
  const found = all.poolRows(both, [0, 1], one, "headroom", (call) => call === 0);
  assert.deepEqual([found.source[0], levelsOf(found)], [1, ["quiet"]]);
  assert.equal(all.worstLayer(rows, "float16"), rows[1]);
  const choice = { keeps: () => true, folded: new Set() };
  const worst = all.worstOfRows(both, new Map(rows.map((row) => [row.path, row])), choice, "float16");
  assert.deepEqual(worst.map((row) => [row.value, row.wider]), [[3, "float32"], [12, null]]);
  // A repaired layer leaves no mark of an alarm.
  const ranks = ["bad", "quiet"].map((level) => all.GRAVEST.indexOf(level));
  const since = (step) => all.isBadSince({ ranks, columns: [0, 1] }, { until: [5, 9] }, step);
  assert.deepEqual([since(4), since(5)], [true, false]);
});

test("the data say of which cells another layer, or the whole run, is the cause", () => {
  const [one, run] = [{ layer: "a" }, { because: "it diverged" }];
  const originAt = all.originsIn({
    layers: ["a", "b"], from: [1, 2, 3],
    passed: [{ from: one, rows: [1], columns: [[0, 0]] }, { from: run, rows: [0, 1], columns: [[1, 2]] }],
  });
  const cells = [[1, 0], [0, 0], [0, 2], [1, 1], [0, -1]];
  assert.deepEqual(cells.map((cell) => originAt(...cell)), [one, null, run, run, null]);
});

test("a layer has at each step the dtype that it was computed in", () => {
  const moved = layer("a", { compute_dtype: "float32", dtypes: [[0, "float16"], [28, "float32"]] });
  assert.deepEqual([0, 28, 29].map((step) => all.dtypeAt(moved, step)), ["float16", "float16", "float32"]);
  assert.deepEqual([28, 29].map((step) => all.widerAt(moved, step, "float16")), [null, "float32"]);
  assert.ok(all.isWider("bfloat16", "float16") && !all.isWider("float32", "bfloat16"));
});

test("calls belong to the layer of the table", () => {
  const paths = new Set(["dense", "odd#1"]);
  assert.deepEqual(["dense#2", "odd#1"].map((call) => all.pathOfCall(call, paths)), ["dense", "odd#1"]);
  assert.deepEqual(["dense#1", "odd#1"].map((call) => all.callName(call, paths)), ["dense, call 2", "odd#1"]);
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

// CIE L*a*b* of sRGB, in which a distance of about 2 is just seen.
function labOf(rgb) {
  const linear = rgb.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const rows = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]];
  const [x, y, z] = rows.map((row, place) => {
    const white = [0.95047, 1, 1.08883][place];
    const part = row.reduce((sum, factor, index) => sum + factor * linear[index], 0) / white;
    return part > 0.008856 ? Math.cbrt(part) : 7.787 * part + 16 / 116;
  });
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}

test("two bits of headroom more are seen wherever they are, and special colours are none of them", () => {
  const color = (value, wider = false) => all.valueColor("headroom", value, wider);
  const far = (one, other) => Math.hypot(...one.map((part, place) => part - other[place]));
  for (let bits = 2; bits <= 22; bits += 1) {
    const [one, two] = [bits, bits + 2].map((value) => labOf(color(value)));
    assert.ok(one[0] - two[0] > 5, `lightness at ${bits} bits`);
    assert.ok(far(one, two) > 9, `colour at ${bits} bits`);
  }
  assert.ok(far(labOf(color(2)), labOf(all.levelColor("warning"))) > 30);
  for (let bits = -1; bits <= 30; bits += 0.1) {
    for (const [special, least] of [[color(INF), 20], [color(-1, true), 20], [color(5, true), 40]]) {
      assert.ok(Math.max(...color(bits).map((one, place) => Math.abs(one - special[place]))) > least, `${bits}`);
    }
  }
  assert.notDeepEqual(all.levelColor("input"), all.levelColor("bad"));
  const share = (value) => all.valueColor("share", value).join();
  assert.ok(![0, 0.5, 1].map(share).includes(share(INF)));
});

// Numbers and names as text.

test("numbers are written as Python writes them", () => {
  for (const kind of ["share", "bytes"]) {
    const [values, texts] = KNOWN[kind];
    const written = values.map((value) => all.formatAmount(value, kind).replaceAll("\u202f", ""));
    assert.deepEqual(written, texts);
  }
  for (const [value, kind, text] of [
    [0.0021, "seconds", "2.1ms"], [4.5e-5, "seconds", "45µs"], [13850.4, "rate", "13850"], [null, "share", "–"],
  ]) assert.equal(all.formatAmount(value, kind).replaceAll("\u202f", ""), text);
  assert.deepEqual([all.formatPower(-24), all.formatScale(32768)], ["2⁻²⁴", "2¹⁵"]);
  assert.deepEqual(["-inf", "nan"].map(all.formatNumber), ["−∞", "NaN"]);
  assert.equal(all.formatInteger(1234567), "1\u202f234\u202f567");
  assert.equal(all.readable("`a` 2**15 -> 2**-14, 2**0.5"), "a 2¹⁵ -> 2⁻¹⁴, 2**0.5");
  assert.equal(all.listSome(["a", "b", "c"], 2), "a, b and 1 more");
});

const BLOCK = [
  "", "/self_attention", "/self_attention/query", "/self_attention/attention_output",
  "/self_attention_layer_norm", "/feedforward_intermediate_dense",
];
const DEEP = ["token_embedding", ...[...Array(12).keys()].flatMap((block) => {
  return BLOCK.map((part) => `bert_base_en_backbone/transformer_encoder_${block}${part}`);
}), "pool"];

test("what tells long names apart stays visible, and no two labels are alike", () => {
  const labels = all.shortNames(DEEP, 32);
  const label = (block, part) => labels.get(`bert_base_en_backbone/transformer_encoder_${block}${part}`);
  assert.equal(label(11, BLOCK[2]), "…encoder_11/self_attention/query");
  assert.equal(label(3, BLOCK[3]), "…encoder_3/…/attention_output");
  assert.match(label(7, BLOCK[5]), /^…encoder_7\/feed.*ate_dense$/);
  const equal = [...Array(200).keys()].map((n) => `${"x".repeat(50)}${n}${"y".repeat(50)}`);
  const towers = ["text", "image"].flatMap((tower) => DEEP.map((path) => `${tower}_encoder_with_a_name/${path}`));
  for (const paths of [DEEP, equal, towers, ["a"], []]) {
    for (const length of [20, 32, 36]) {
      const found = [...all.shortNames(paths, length).values()];
      assert.equal(new Set(found).size, paths.length);
      assert.ok(found.every((text) => text.length <= length));
    }
  }
  assert.deepEqual([["tuned/mixprec", "float16/mixprec"], ["mixprec", "a/mixprec"]].map((own) => all.shortRun(...own)),
    ["tuned", "mixprec"]);
});

test("links are read back as they were written, and nothing else", () => {
  const state = { run: "a b/c+d", layer: "x&y=1#2", step: 0 };
  assert.deepEqual(all.readHash(all.writeHash({ ...state, compare: null })), state);
  const url = all.hostLink("http://h/", state);
  assert.ok(url.startsWith("http://h/#mixed_precision&p.mixed_precision.run="));
  assert.deepEqual(all.readHostHash(new URL(url).hash), state);
  assert.deepEqual(all.readLink({ part: "constructor", step: "x" }), {});
});

test("a cell of a CSV is quoted, and no formula", () => {
  assert.equal(all.csvOf([{ a: 1, b: 'x,"y"' }, { a: null, c: ["z"] }]),
    'a,b,c\r\n1,"x,""y""",\r\n,,"[""z""]"\r\n');
  const cells = ["=1+1", "@a", "+a", "-a", " =a", "\ta", "-1e-3", "dense", "-inf"];
  const shown = ["'=cell", "'=1+1", "'@a", "'+a", "'-a", "' =a", "'\ta", "-1e-3", "dense", "-inf"];
  assert.equal(all.csvOf(cells.map((cell) => ({ "=cell": cell }))), [...shown, ""].join("\r\n"));
  assert.equal(all.csvOf([{ a: -3 }, { a: -INF }]), "a\r\n-3\r\n-inf\r\n");
});

// Events and figures.

test("steps skipped in a row are one event, of each optimizer its own", () => {
  const skip = (at_step, more = {}) => ({ kind: "skipped_step", step: at_step, at_step, scale: 2 ** (9 - at_step), ...more });
  const other = { optimizer: "d" };
  const events = [skip(1), skip(1, other), skip(2), { kind: "verdict", step: 3 }, skip(3), skip(5)];
  const shown = all.groupEvents(events);
  assert.deepEqual(shown.map((event) => event.members?.length ?? 1), [3, 1, 1, 1]);
  assert.ok(all.isChosenEvent(shown[0], all.eventKey(events[4])));
  assert.equal(all.lastMomentOf(shown[0]), 3);
  // They are counted as the figures above count them: steps, not events.
  const found = (layer, more) => ({ kind: "verdict", verdict: "forward_overflow", layer, step: 9, ...more });
  const both = [1, 2, 3, 7].flatMap((step) => [skip(step, { optimizer: "a" }), skip(step, { optimizer: "b" })]);
  const rest = { kind: "skipped_steps_not_kept", first_step: 9, last_step: 40, count: 30, step: 40 };
  const counts = (events, skipped) => all.countsByKind([{ events, skipped }]).map((one) => [one.count, one.rows]);
  assert.deepEqual(counts([...both, found("x"), found("y", { same_as: "x" }), rest], 24), [[4, 4], [2, 1], [20, 1]]);
  assert.deepEqual(counts([skip(1), skip(2)], 2), [[2, 1]]);
});

test("a sound run leads to the gravest that has an open finding", () => {
  const row = (run, state, gravity) => ({ run, gravity, headline: { state } });
  const rows = [row("a", "healthy", 19), row("b", "warning", 5), row("c", "failing", 0)];
  const of = (list, run) => all.graverRun(list, run);
  assert.deepEqual(of(rows, "a"), { run: "c", state: "failing", others: 1 });
  assert.deepEqual(of(rows, "b"), { run: "c", state: "failing", others: 0 });
  assert.equal(of([rows[0], rows[1], row("f", "warning", 6)], "b"), null);
  assert.equal(of([rows[0], row("d", "repaired", 15)], "a"), null);
  assert.equal(of([rows[0], { run: "e", unread: true }], "a"), null);
  assert.equal(of(null, "a"), null);
});

test("the least headroom says what was found beside a reading that looks safe", () => {
  const own = layer("a", { worst_step: 8, least_gradient_headroom: 6, worst_gradient_step: 4 });
  const run = { layers: [own], format: { name: "float16" }, events: [], finding: null, stuck: 0 };
  const tiles = (...events) => all.leastHeadroom({ ...run, events }).map(({ text, level }) => [text, level]);
  assert.deepEqual(tiles(), [["9 bits", undefined], ["6 bits", undefined]]);
  const verdict = { kind: "verdict", verdict: "forward_overflow", layer: "a", step: 3, numbers: {} };
  assert.deepEqual(tiles(verdict)[0], ["▲ overflow found", "bad"]);
  assert.equal(tiles({ ...verdict, numbers: { overflows_in_steps: 30 } })[0][0], "9 bits");
  const skip = { kind: "skipped_step", step: 9, at_step: 5 };
  assert.deepEqual(tiles(skip), [["9 bits", undefined], ["6 bits, then overflow", "skip"]]);
  assert.equal(tiles({ ...skip, at_step: 3 })[1][0], "6 bits");
  assert.equal(tiles({ ...skip, bad_input: { x: 0 } })[1][0], "6 bits");
  assert.equal(tiles({ ...skip, at_step: 9, loss: ["nan"] })[0][0], "9 bits, then overflow");
  // Gradients of a run that skips all of its steps have none, nor where no reading was finite.
  for (const bits of [6, null]) {
    const layers = [{ ...own, least_gradient_headroom: bits }];
    const [, stuck] = all.leastHeadroom({ ...run, layers, stuck: 182 });
    assert.deepEqual([stuck.text, stuck.level], ["▲ not finite", "bad"]);
  }
});

// What if.

const moments = (range) => ({ first: range, last: range, worst: range });
const range = (largest, low = null) => moments({ largest, largest_step: 3, low, low_step: 3 });

test("a range overflows or vanishes in a format as ml_dtypes casts it", () => {
  assert.ok(KNOWN.casts.length > 20);
  for (const { dtype, range, state } of KNOWN.casts) {
    const found = all.judgePart(moments(range), formatOf(dtype), "worst");
    assert.equal(found.state, state, JSON.stringify({ dtype, range, found }));
  }
});

test("gradients survive at the loss scales at which NumPy's do", () => {
  for (const { dtype, range, lowest, highest } of KNOWN.windows) {
    assert.deepEqual(all.scaleWindow(range, formatOf(dtype)), { lowest, highest });
  }
  // A loss scale spares the gradients of weights, too, which may be the largest.
  const gradient = moments({ largest: -3, low: -8 });
  const highest = (largest) => all.judgeLayer(
    { gradient, weight_gradient: moments({ largest }) }, FLOAT16, formats, "worst",
  ).gradient.highest;
  assert.equal(highest(1.5), Math.floor(FLOAT16.maximum_bits - 2 - 1.5));
  assert.deepEqual([highest(-9), highest(null)], Array(2).fill(Math.floor(FLOAT16.maximum_bits - 2 + 3)));
});

test("what became infinite is not known in a wider format", () => {
  const lost = { nonfinite: { step: 4, dtype: "float16" }, activation: range(3) };
  const stateIn = (own, name) => all.judgeLayer(own, formatOf(name), formats, "worst").state;
  assert.deepEqual(["float16", "bfloat16"].map((name) => stateIn(lost, name)), ["overflows", "unknown"]);
  assert.equal(stateIn({ ...lost, activation: range(20) }, "bfloat16"), "fits");
  // A layer that was not finite is told so whatever was measured before, if it is to blame.
  const measured = { activation: range(6) };
  const row = layer("a", { least_headroom: "-inf", worst_step: 8 });
  assert.deepEqual(all.withLost(measured, row).nonfinite, { step: 8, dtype: "float16" });
  assert.equal(all.withLost(measured, { ...row, passed_from: "b" }), measured);
  assert.equal(all.withLost(measured, layer("a")), measured);
  assert.equal(all.withLost({ ...lost }, { ...row, lost_because: "it diverged" }).nonfinite, undefined);
});

const planOf = (layers, own, more = {}, run = {}) =>
  all.smallestPlan(layers, { formats, layers: own, ...more }, "float16", run);
const inFloat32 = (...of) => [...planOf(...of).reasons.keys()];
const REFUSED = { float16: ["forward_overflow"] };

test("a plan holds the fewest layers in float32, each with its reason", () => {
  const layers = [
    layer("a"), layer("b", { fed_by: ["a"] }), layer("c"), layer("d"), layer("e"), layer("f", { dtypes: [[0, "float32"]] }),
  ];
  const own = {
    a: { activation: range(17) }, b: { activation: range(1) }, c: { activation: range(1), gradient: range(-3, -20) },
    d: { activation: range(1), refused: REFUSED }, f: { activation: range(1) },
  };
  const plan = planOf(layers, own);
  assert.deepEqual([...plan.reasons.keys()], ["a", "b", "d", "f"]);
  assert.match(plan.reasons.get("b"), /\ba\b/);
  assert.deepEqual(plan.unmeasured, ["e"]);
  const wide = all.smallestPlan(layers, { formats, layers: own }, "bfloat16");
  assert.deepEqual([...wide.reasons.keys()], ["f"]);
});

test("layers behind one at fault are not known to need float32", () => {
  const zeros = [layer("a", { least_headroom: "inf" }), layer("b", { least_headroom: "inf" })];
  assert.deepEqual(inFloat32(zeros, { a: { refused: REFUSED }, b: {} }), ["a"]);
  assert.deepEqual(inFloat32(zeros, { a: {}, b: {} }), ["a", "b"]);
  const behind = (path, fed_by) => layer(path, { fed_by, passed_from: "a", least_headroom: "-inf" });
  const chain = [layer("a"), behind("b", ["a"]), behind("c", ["b"])];
  const lost = (more) => ({ a: { nonfinite: { step: 1, dtype: "float16" }, refused: REFUSED, ...more } });
  assert.deepEqual([...planOf(chain, lost()).behind], [["a", ["b", "c"]]]);
  assert.deepEqual([{}, { in_float32: 3.6 }].map((more) => inFloat32(chain, lost(more))), [["a"], ["a"]]);
  // What it returns in float32 is beyond float16 where it is cast.
  assert.deepEqual(inFloat32(chain, lost({ in_float32: 17 })), ["a", "b"]);
});

test("a plan stays below the loss scales at which steps were skipped, unless a layer is to blame", () => {
  const own = { activation: range(1, -3), gradient: range(-12, -20) };
  const scale = (overflowing_scale, refused, repaired = false) => {
    const plan = planOf([layer("a", { repaired }), layer("b")], { a: { ...own, refused }, b: own }, { overflowing_scale });
    return [plan.scale, plan.blamed];
  };
  assert.deepEqual([null, 13, 12.5].map((bits) => scale(bits)[0]), [15, 12, 12]);
  assert.deepEqual([scale(13, REFUSED), scale(13, REFUSED, true)], [[15, true], [12, false]]);
});

test("a plan does not lower a loss scale that the run had room for", () => {
  // 1.5 bits are left at 2**15, and the first step that is skipped has bad data.
  const run = { last_step: 300, scale: [{ steps: [0, 7, 29], scale: [2 ** 15, 2 ** 14, 2 ** 13], skipped: [0, 1, 2] }] };
  const found = (largest, overflowing_scale, more = run, own = {}) => planOf([layer("a", own)], {
    a: { activation: range(1, -3), gradient: range(largest, -20) },
  }, { overflowing_scale }, more).scale;
  const tight = FLOAT16.maximum_bits - 15 - 1.5;
  assert.deepEqual([found(tight, null), found(tight, null, {})], [15, 14]);
  // Where gradients overflowed, or would, or were in float32 then, nothing is proven.
  const moved = { dtypes: [[0, "float16"], [2, "float32"], [20, "float16"]] };
  assert.deepEqual([found(tight, 15), found(tight, null, run, moved)], [14, 14]);
  assert.ok(found(tight + 2, null) < 15);
  // All steps at 2**15 were skipped; a run without a change of the loss scale has one row.
  const skips = { last_step: 2, scale: [{ steps: [0, 1], scale: [2 ** 15, 2 ** 14], skipped: [0, 1] }] };
  const steady = { last_step: 9, scale: [{ steps: [0], scale: [2 ** 15], skipped: [0] }] };
  assert.deepEqual(all.provenScales(skips, null), [{ bits: 14, step: 2 }]);
  assert.deepEqual(all.provenScales(steady, null), [{ bits: 15, step: 9 }]);
});

test("the loss scale suits the layers with the most FLOPs", () => {
  const of = (lowest, highest, cost) => ({ window: { lowest, highest }, cost });
  assert.equal(all.bestScale([of(0, 4, 1), of(8, 12, 3), of(10, 20, 3)], [-14, 126]), 12);
  assert.deepEqual([all.bestScale([], [-14, 126]), all.bestScale([], [-14, 126], 13)], [15, 13]);
});

test("a plan is not offered without what other runs found in its 16-bit layers", () => {
  const run = { run: "wide", layers: [{ path: "block/norm" }, { path: "a" }] };
  const finding = (layer, level = "bad") => ({ kind: "verdict", verdict: "forward_overflow", layer, level, repaired: true });
  const rows = [
    ["wide", finding("a")], ["low", finding("block/norm#2")], ["other model", finding("b")],
    ["mild", finding("a", "info")], ["bad data", finding(null)], ["sound", null],
  ].map(([name, found]) => ({ run: name, finding: found }));
  const plan = (...wide) => ({ reasons: new Map(wide.map((path) => [path, ""])) });
  assert.deepEqual(all.foundElsewhere(rows, run, plan()).map((one) => [one.layer, one.run]), [["block/norm", "low"]]);
  assert.deepEqual(all.foundElsewhere(rows, run, plan("block/norm")), []);
  assert.deepEqual(all.foundElsewhere(null, run, plan()), []);
});

// Readings of a layer.

test("the course of a layer holds its largest, median and smallest numbers", () => {
  const course = (...of) => all.courseOf(...of, 16);
  const own = heat([1, 2, 10, -INF], { layers: ["a", "b"], from: [0, 5], until: [4, 9] });
  const histogram = { steps: [3], exponents: [[-4, -3, 1, 128]], counts: [[1, 4, 3, 9]], low: [-3] };
  const empty = { largest: [], median: [], smallest: [], nonfinite: [], readings: 0, isZero: false };
  assert.deepEqual(course(own, histogram, "b"), {
    ...empty, largest: [[4, 6]], median: [[3, -3]], smallest: [[3, -4]], nonfinite: [3, 9], readings: 2,
  });
  assert.deepEqual(course(null, null, "b"), empty);
  assert.deepEqual(course(heat([INF, INF, INF]), null, "a"), { ...empty, readings: 3, isZero: true });
  // A histogram that is part of a column of the heatmap is no reading of its own.
  const lost = heat([-INF, -INF], { from: [1, 20], until: [1, 20] });
  const bins = { exponents: [[3, 128], [3, 128]], counts: [[1, 2], [1, 2]], low: [3, 3] };
  const readings = (steps) => course(lost, { ...bins, steps }, "a").nonfinite;
  assert.deepEqual([readings([10, 20]), readings([20, 40])], [[1, 20], [1, 20, 40]]);
});

test("the histogram is the latest at or before the step, else the first", () => {
  const data = { steps: [32, 64], exponents: [[0, 1, 128], [1]], counts: [[2, 4, 2], [6]], low: [0, 1] };
  assert.deepEqual([63, 1, null].map((step) => all.histogramAt(data, step).step), [32, 32, 64]);
  assert.equal(all.histogramAt(null, 3), null);
  // What is not finite has no place in it, but a share.
  const { bars, nonfinite } = all.histogramAt(data, 32);
  assert.deepEqual([bars.map((bar) => bar.exponent), nonfinite], [[0, 1], 0.25]);
  const zones = [16, 15, -15, -25].map((exponent) => all.zoneOf(exponent, FLOAT16));
  assert.deepEqual(zones, ["overflow", "normal", "subnormal", "vanishes"]);
});

test("the worst of all calls of a layer counts, since a repair, without bad batches", () => {
  const [headroom, error] = ["headroom", "error"].map((kind) => ({ name: kind, kind }));
  const stateOf = (values, own, metric, more = {}) => {
    const found = all.worstByLayer(heat(values, more), new Map([["a", own]]), (call) => call.split("#")[0], metric.kind);
    const { level } = all.describeReading(found.get("a"), own, metric, FLOAT16);
    return [found.get("a").value, level];
  };
  const calls = { layers: ["a", "a#1"], from: [0, 1], until: [0, 1] };
  assert.equal(stateOf([3, NaN, 2, 5], layer("a"), headroom, calls)[0], 2);
  assert.deepEqual(stateOf([9, NaN, 5], layer("a"), headroom, bad(0, 1))[0], 5);
  assert.deepEqual(stateOf([NaN, NaN, NaN], layer("a"), headroom, bad(0, 1)), [NaN, "input"]);
  const wide = layer("a", { compute_dtype: "float32", dtypes: [[0, "float16"], [1, "float32"]] });
  assert.equal(stateOf([-INF, -INF, 5], wide, headroom)[0], 5);
  // An error of before is told to be one.
  assert.deepEqual(stateOf([0.999, NaN, NaN], wide, error, { pool: "max" })[1], "beyond");
  assert.deepEqual(stateOf([0.999, NaN, NaN], layer("a"), error, { pool: "max" })[1], "warning");
});

// Two runs.

test("runs differ most where their errors, dtypes and headroom do", () => {
  const run = (...layers) => ({ format: { name: "float16" }, layers });
  const of = (path, dtype, bits, more) => layer(path, { compute_dtype: dtype, least_headroom: bits, ...more });
  const one = run(of("a", "float16", 1), of("b", "float16", 9), of("c", "float16", 1));
  const other = run(of("a", "float16", 5), of("b", "float32", 9), of("d", "float16", 1));
  const errors = [0.25, 4].map((error) => ({ layers: { a: { error, error_step: 50 } } }));
  const by = (column) => all.differencesOf(one, other, ...errors, column);
  const sizes = (column) => Object.fromEntries(by(column).map(({ path, size }) => [path, size]));
  assert.deepEqual(sizes("headroom"), { a: 4, b: 0, c: 0, d: 0 });
  assert.equal(sizes("error").a, 4);  // log2(4 / 0.25)
  assert.equal(sizes("dtype").b, 13);  // 24 digits and 11.
  assert.equal(by("all")[0].path, "a");
  const cell = (id, ...runs) => all.differencesOf(...runs, ...errors, "all")[0].cells.find((found) => found.id === id);
  assert.match(cell("error", one, other).notes[0], /step 50$/);
  // A layer with a verdict in either run comes before larger differences.
  const found = run(of("a", "float16", 9), of("b", "float16", 9, { verdicts: ["forward_overflow"] }));
  const order = (column) => all.differencesOf(run(of("a", "float16", 1), of("b", "float16", 9)), found, null, null, column);
  assert.deepEqual(["all", "headroom"].map((column) => order(column)[0].path), ["b", "a"]);
  // Headroom is that of each dtype: enough of it is no difference.
  const brain = { ...run(of("a", "bfloat16", 132)), format: { name: "bfloat16" } };
  assert.equal(cell("headroom", brain, run(of("a", "float32", 19.8))).size, 0);
  assert.equal(cell("headroom", run(of("a", "float16", 1.5)), run(of("a", "float32", -4.9))).size, 24);
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

test("layers are in blocks by their folders, and a folder of one is none", () => {
  const tree = all.layerTree(["a/b/x", "a/b/y", "a/c/z", "only/one", "flat"].map((path) => layer(path)));
  assert.deepEqual(all.allBlocks(tree).map(({ block }) => block), ["a", "a/b"]);
  assert.deepEqual(all.blocksToFold(tree, 5), ["a/b"]);
  const rows = all.layerRows(tree, { keeps: () => true, folded: new Set(["a/b"]) });
  assert.deepEqual(rows.map((row) => row.block ?? row.layer.path), ["a", "a/b", "a/c/z", "only/one", "flat"]);
});

test("errors of trials span decades", () => {
  const points = ["inf", 0.02, 0, null].map((error) => ({ share_in_16_bits: 0.5, error, pareto_optimal: true, float32: [] }));
  const trials = all.trialsOf({ points });
  assert.deepEqual(trials.map(({ error }) => error), [INF, 0.02, 0, NaN]);
  assert.deepEqual(all.decadesOf(trials), [-2, -1]);
  assert.deepEqual(all.trialsOf(null), []);
});

test("a store tells only those whose keys changed", () => {
  const store = all.createStore({ a: 1, b: 2 });
  const heard = [];
  store.on(["a"], (state) => heard.push(state.a));
  for (const patch of [{ b: 3 }, { a: 1 }, { a: 2 }]) store.set(patch);
  assert.deepEqual(heard, [2]);
});

test("what is asked for while a frame is drawn is drawn in it, each once", () => {
  const frames = [];
  globalThis.requestAnimationFrame = (next) => frames.push(next);
  const done = [];
  const picture = () => done.push("picture");
  const card = () => {
    done.push("card");
    for (const draw of [picture, card]) all.drawSoon(draw);
  };
  for (const draw of [card, card]) all.drawSoon(draw);
  assert.equal(frames.length, 1);
  frames.shift()();
  assert.deepEqual([done, frames.length], [["card", "picture"], 1]);
});
