// The arithmetic of the cards that answer "what if", against numbers of NumPy and ml_dtypes.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);
const whatIf = await load("what_if");

// Of `test_plugin_answers.py`: what casts of real numbers came to.
const { formats, casts, windows } = JSON.parse(process.env.MIXPREC_KNOWN);
const formatOf = (name) => formats.find((one) => one.name === name);
const moments = (range) => ({ first: range, last: range, worst: range });

test("a range overflows or vanishes in a format as ml_dtypes casts it", () => {
  assert.ok(casts.length > 20);
  for (const { dtype, range, state } of casts) {
    const found = whatIf.judgePart(moments(range), formatOf(dtype), "worst");
    assert.equal(found.state, state, JSON.stringify({ dtype, range, found }));
  }
});

test("gradients survive at the loss scales at which NumPy's do", () => {
  for (const { dtype, range, lowest, highest } of windows) {
    const found = whatIf.scaleWindow(range, formatOf(dtype));
    assert.deepEqual(found, { lowest, highest });
  }
});

test("a loss scale spares the gradients of weights, which may be the largest", () => {
  const format = formatOf("float16");
  const gradient = moments({ largest: -3, low: -8 });
  const of = (more) => whatIf.judgeLayer({ gradient, ...more }, format, formats, "worst").gradient.highest;
  const alone = of({});
  assert.equal(of({ weight_gradient: moments({ largest: 1.5 }) }), Math.floor(format.maximum_bits - 2 - 1.5));
  assert.ok(of({ weight_gradient: moments({ largest: 1.5 }) }) < alone);
  assert.equal(of({ weight_gradient: moments({ largest: -9 }) }), alone);
  assert.equal(of({ weight_gradient: moments({ largest: null }) }), alone);
});

const range = (largest, low = null) => moments({ largest, largest_step: 3, low, low_step: 3 });
const layer = (path, more = {}) => {
  return { path, share_of_flops: 0.25, dtypes: [[0, "float16"]], fed_by: [], ...more };
};

test("a plan holds the fewest layers in float32, each with its reason", () => {
  const layers = [
    layer("a"), layer("b", { fed_by: ["a"] }), layer("c"), layer("d"), layer("e"),
    layer("f", { dtypes: [[0, "float32"]] }),
  ];
  const ranges = {
    formats,
    layers: {
      a: { activation: range(17) }, b: { activation: range(1) },
      c: { activation: range(1), gradient: range(-3, -20) },
      d: { activation: range(1), refused: { float16: ["forward_overflow"] } },
      f: { activation: range(1) },
    },
  };
  const plan = whatIf.smallestPlan(layers, ranges, "float16");
  assert.deepEqual([...plan.reasons.keys()], ["a", "b", "d", "f"]);
  assert.match(plan.reasons.get("b"), /^it receives what a computes/);
  assert.match(plan.reasons.get("d"), /forward overflow/);
  assert.deepEqual(plan.unmeasured, ["e"]);
  const wide = whatIf.smallestPlan(layers, ranges, "bfloat16");
  assert.deepEqual([...wide.reasons.keys()], ["f"]);
});

test("zeros behind a layer at fault keep their layers in 16 bits", () => {
  const zero = (path) => layer(path, { least_headroom: "inf" });
  const plan = (refused) => whatIf.smallestPlan([zero("a"), zero("b")], {
    formats, layers: { a: { refused: { float16: refused } }, b: {} },
  }, "float16");
  assert.deepEqual([...plan(["forward_overflow"]).reasons.keys()], ["a"]);
  assert.deepEqual(plan(["forward_overflow"]).unmeasured, ["b"]);
  assert.deepEqual([...plan([]).reasons.keys()], ["a", "b"]);
});

test("layers behind one at fault are not known to need float32", () => {
  const behind = (path, fed_by) => layer(path, { fed_by, passed_from: "a", least_headroom: "-inf" });
  const layers = [layer("a"), behind("b", ["a"]), behind("c", ["b"])];
  const plan = (more) => whatIf.smallestPlan(layers, {
    formats, layers: { a: {
      nonfinite: { step: 1, dtype: "float16" }, refused: { float16: ["forward_overflow"] }, ...more,
    } },
  }, "float16");
  assert.deepEqual([...plan({}).reasons.keys()], ["a"]);
  assert.deepEqual([...plan({}).behind], [["a", ["b", "c"]]]);
  assert.deepEqual([...plan({ in_float32: 3.6 }).reasons.keys()], ["a"]);
  // What it returns in float32 is beyond float16 where it is cast.
  assert.deepEqual([...plan({ in_float32: 17 }).reasons.keys()], ["a", "b"]);
});

test("a layer in float32 is not to blame for steps skipped since", () => {
  const gradient = range(-12, -20);
  const own = (more) => ({ activation: range(1), gradient, ...more });
  const refused = { float16: ["forward_overflow"] };
  const ranges = { formats, overflowing_scale: 15, layers: { a: own({ refused }), b: own() } };
  const plan = (repaired) => whatIf.smallestPlan([layer("a", { repaired }), layer("b")], ranges, "float16");
  assert.deepEqual([plan(true).scale, plan(true).blamed], [14, false]);
  assert.deepEqual([plan(false).scale, plan(false).blamed], [15, true]);
});

test("a run that diverges in float32 as well gets no plan", () => {
  const run = (verdict, repaired = false) => {
    return { events: [{ kind: "verdict", verdict }], finding: { event: 0, repaired } };
  };
  assert.match(whatIf.whyNoPlan(run("divergence")), /precision is not the cause/);
  assert.match(whatIf.whyNoPlan(run("weights_lost")), /Restore a checkpoint first/);
  assert.equal(whatIf.whyNoPlan(run("forward_overflow")), null);
  assert.equal(whatIf.whyNoPlan({ events: [], finding: null }), null);
});

test("a layer that was not finite is told so whatever was measured before", () => {
  const measured = { activation: range(6) };
  const lost = layer("a", { least_headroom: "-inf", worst_step: 8 });
  assert.deepEqual(whatIf.withLost(measured, lost).nonfinite, { step: 8, dtype: "float16" });
  assert.equal(whatIf.withLost(measured, { ...lost, passed_from: "b" }), measured);
  // What the run lost as a whole says nothing of the layer.
  const nonfinite = { step: 3, dtype: "float32" };
  const all = { ...lost, lost_because: "training diverged" };
  assert.equal(whatIf.withLost({ ...measured, nonfinite }, all).nonfinite, undefined);
  assert.equal(whatIf.withLost(measured, layer("a", { least_headroom: 3 })), measured);
});

test("a plan is not offered without what other runs found in its 16-bit layers", () => {
  const run = { run: "wide", layers: [{ path: "block/norm" }, { path: "a" }] };
  const finding = (layer, level = "bad") => {
    return { kind: "verdict", verdict: "forward_overflow", layer, level, repaired: true };
  };
  const rows = [
    { run: "wide", finding: finding("a") }, { run: "low", finding: finding("block/norm#2") },
    { run: "other model", finding: finding("b") }, { run: "mild", finding: finding("a", "info") },
    { run: "bad data", finding: finding(null) }, { run: "sound", finding: null }, { run: "to be read", unread: true },
  ];
  const plan = (...wide) => ({ reasons: new Map(wide.map((path) => [path, "it overflows"])) });
  assert.deepEqual(whatIf.foundElsewhere(rows, run, plan()), [
    { layer: "block/norm", verdict: "forward_overflow", run: "low" },
  ]);
  assert.deepEqual(whatIf.foundElsewhere(rows, run, plan("block/norm")), []);
  assert.deepEqual(whatIf.foundElsewhere(null, run, plan()), []);
});

test("what became infinite is not known in a wider format", () => {
  const lost = { nonfinite: { step: 4, dtype: "float16" }, activation: range(3) };
  const stateIn = (name) => whatIf.judgeLayer(lost, formatOf(name), formats, "worst").state;
  assert.equal(stateIn("float16"), "overflows");
  assert.equal(stateIn("bfloat16"), "unknown");
  const measured = { ...lost, activation: range(20) };
  assert.equal(whatIf.judgeLayer(measured, formatOf("bfloat16"), formats, "worst").state, "fits");
});

test("the loss scale suits the layers with the most FLOPs", () => {
  const of = (lowest, highest, cost) => ({ window: { lowest, highest }, cost });
  const layers = [of(0, 4, 1), of(8, 12, 3), of(10, 20, 3)];
  assert.equal(whatIf.bestScale(layers, [-14, 126]), 12);
  assert.equal(whatIf.bestScale([], [-14, 126]), 15);
  assert.equal(whatIf.bestScale([], [-14, 126], 13), 13);
});

const course = await load("course");
const bars = await load("dtype_bars");
const difference = await load("difference");

test("the course of a layer holds its largest, median and smallest numbers", () => {
  const heat = {
    layers: ["a", "b"], from: [0, 5], until: [4, 9], values: [1, 2, 10, -Infinity],
  };
  const histogram = { steps: [3], exponents: [[-4, -3, 1, 128]], counts: [[1, 4, 3, 9]], low: [-3] };
  assert.deepEqual(course.courseOf(heat, histogram, "b", 16), {
    largest: [[4, 6]], median: [[3, -3]], smallest: [[3, -4]], nonfinite: [3, 9], readings: 2, isZero: false,
  });
  assert.deepEqual(course.courseOf(null, null, "b", 16), {
    largest: [], median: [], smallest: [], nonfinite: [], readings: 0, isZero: false,
  });
});

test("of several forecasts of a layer the last counts", () => {
  const events = [
    { kind: "trend", layer: "a", step: 10, headroom_bits: 3, overflows_in_steps: 50 },
    { kind: "verdict", layer: "a", step: 20, numbers: { headroom_bits: 2, overflows_in_steps: 9 } },
    { kind: "verdict", layer: "b", step: 20, numbers: {} },
  ];
  assert.deepEqual(course.forecastsOf(events), [{ layer: "a", step: 20, bits: 2, until: 29 }]);
});

test("a bar for each dtype that a layer ever had, with the reason", () => {
  const layers = [
    { path: "a", dtypes: [[0, "float16"], [7, "float32"]] }, { path: "b", dtypes: [[0, "float16"]] },
  ];
  const because = { kind: "demote", step: 7, layers: { a: {} }, because: { a: "overflow" } };
  const would = { ...because, dry_run: true, layers: { b: {} } };
  assert.deepEqual(bars.dtypeBars(layers, [because, would], 20), [{
    path: "a", bars: [
      { from: 0, until: 7, dtype: "float16", reason: null },
      { from: 7, until: 20, dtype: "float32", reason: "overflow" },
    ],
  }]);
});

test("what a layer was compiled with is shown, also if it never took a step in it", () => {
  const layers = [{ path: "a", dtypes: [[0, "float32"]] }];
  const change = { a: { before: "mixed_float16", after: "float32" } };
  const demote = { kind: "demote", step: 0, layers: change, because: { a: "overflow" } };
  assert.deepEqual(bars.dtypeBars(layers, [demote], 20)[0].bars, [
    { from: 0, until: 0, dtype: "float16", reason: null },
    { from: 0, until: 20, dtype: "float32", reason: "overflow" },
  ]);
});

test("runs differ most where their errors, dtypes and headroom do", () => {
  const of = (path, dtype, headroom) => {
    return { path, compute_dtype: dtype, least_headroom: headroom, verdicts: [], severity: null };
  };
  const run = { layers: [of("a", "float16", 1), of("b", "float16", 9), of("c", "float16", 1)] };
  const other = { layers: [of("a", "float16", 5), of("b", "float32", 9), of("d", "float16", 1)] };
  const errors = [0.25, 4].map((error) => ({ layers: { a: { error } } }));
  const by = (column) => difference.differencesOf(run, other, ...errors, column);
  const sizes = (column) => Object.fromEntries(by(column).map(({ path, size }) => [path, size]));
  assert.deepEqual(sizes("headroom"), { a: 4, b: 0, c: 0, d: 0 });
  assert.equal(sizes("error").a, 4);  // log2(4 / 0.25)
  assert.equal(sizes("dtype").b, 13);  // 24 digits and 11.
  assert.equal(by("all")[0].path, "a");
  assert.deepEqual(by("all").filter(({ differs }) => !differs), []);
});

test("a layer with a verdict in either run comes before larger differences", () => {
  const of = (path, headroom, verdicts) => {
    return { path, compute_dtype: "float16", least_headroom: headroom, verdicts, severity: null };
  };
  const run = { layers: [of("a", 1, []), of("b", 9, []), of("c", 3, ["underflow"])] };
  const other = { layers: [of("a", 9, []), of("b", 9, ["forward_overflow"]), of("c", 3, [])] };
  const paths = (by, ...runs) => {
    return difference.differencesOf(...runs, null, null, by).map(({ path }) => path);
  };
  assert.deepEqual(paths("all", run, other), ["b", "c", "a"]);
  assert.deepEqual(paths("all", other, run).slice(-1), ["a"]);
  assert.equal(paths("headroom", run, other)[0], "a");
});

const map = await load("model_map");

test("blocks are folded, and edges between them kept", () => {
  const layers = [
    { path: "in", fed_by: [] }, { path: "block", fed_by: ["in"] },
    { path: "block/a", fed_by: [] }, { path: "block/a/deep", fed_by: [] },
    { path: "block/b", fed_by: ["block/a"] }, { path: "out", fed_by: ["block", "in"] },
  ];
  const folded = map.foldedGraph(layers, new Set());
  assert.deepEqual(folded.nodes.map(({ path, depth }) => [path, depth]),
    [["in", 0], ["block", 1], ["out", 2]]);
  assert.deepEqual(folded.nodes[1].inside, ["block", "block/a", "block/a/deep", "block/b"]);
  assert.deepEqual(folded.edges.map(({ from, to }) => [from, to]),
    [["in", "block"], ["block", "out"], ["in", "out"]]);
  const open = map.foldedGraph(layers, new Set(["block"]));
  assert.deepEqual(open.nodes.map(({ path }) => path), ["in", "block", "block/a", "block/b", "out"]);
  assert.ok(open.edges.some(({ from, to, nested }) => from === "block" && to === "block/a" && nested));
  assert.equal(open.nestedOnly, false);
});

test("what is behind a layer that is used twice in a row is deeper", () => {
  const layers = [
    { path: "in", fed_by: [] }, { path: "mix", fed_by: ["in", "relu"] },
    { path: "relu", fed_by: ["mix"] }, { path: "out", fed_by: ["relu"] },
    { path: "last", fed_by: ["out"] },
  ];
  assert.deepEqual(map.foldedGraph(layers, new Set()).nodes.map(({ depth }) => depth),
    [0, 1, 2, 3, 4]);
});

test("without a graph there is the nesting", () => {
  const { edges, nestedOnly } = map.foldedGraph([{ path: "a" }, { path: "a/b" }], new Set(["a"]));
  assert.deepEqual([edges, nestedOnly], [[{ from: "a", to: "a/b", nested: true }], true]);
});

test("the worst of all calls of a layer counts", () => {
  const heat = {
    layers: ["a", "a#1", "b"], from: [0, 1], until: [0, 1], pool: "min", values: [3, NaN, 2, 5, NaN, NaN],
  };
  const layers = new Map([["a", layer("a")], ["b", layer("b")]]);
  const found = map.worstByLayer(heat, layers, (call) => call.split("#")[0], "headroom");
  assert.equal(found.get("a").value, 2);
  assert.ok(Number.isNaN(found.get("b").value));
});

const pareto = await load("pareto");

test("trials are points, and errors span decades", () => {
  const trial = (error) => ({
    share_in_16_bits: 0.5, error, pareto_optimal: true, float32: ["a"],
  });
  const trials = pareto.trialsOf({ points: [trial("inf"), trial(0.02), trial(0), trial(null)] });
  assert.deepEqual(trials.map(({ error }) => error), [Infinity, 0.02, 0, NaN]);
  assert.deepEqual(pareto.decadesOf(trials), [-2, -1]);
  assert.deepEqual(pareto.trialsOf(null), []);
});
