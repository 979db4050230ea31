"""A dozen logs in the monitor's format, of invented runs of one small model.

The fixture `canonical` in `conftest.py` writes all of them, once per session.
`test_golden.py` compares their reports with files.
"""

import contextlib
import math
import os
from collections import Counter
from typing import NamedTuple

from keras_mixprec import _clock
from keras_mixprec._patched import patched
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.metrics import AUDITED, PROBED
from keras_mixprec.monitoring.failing_batches import BadData
from keras_mixprec.monitoring.recorded_steps import ScalePoint
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.low_scale import LowScales
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.schema import Row
from keras_mixprec.reporting.training_summary import (
    OptimizerSummary,
    TrainingSummary,
    closing,
)

SECONDS = 0.01
BATCH = 8
FIRST_SCALE, LEAST_SCALE = 2.0**15, 2.0**-14


def layer(path, kind="Dense", dtype="float16", share=0.0, **more):
    """A row of the table of layers."""
    return {
        "path": path,
        "class": kind,
        "compute_dtype": dtype,
        "variable_dtype": "float32",
        "parameters": 64,
        "share_of_flops": share,
        "rescaled": False,
        "notes": "",
        "fed_by": [],
    } | more


def small_model():
    """Rows of a model of four layers, the last of them in float32."""
    return [
        layer("embed", share=0.5),
        layer("block/norm", "LayerNormalization", fed_by=["embed"]),
        layer("block/square", "Square", share=0.25, fed_by=["block/norm"]),
        layer("logits", dtype="float32", share=0.25, fed_by=["block/square"]),
    ]


# Powers of two below the maximum of float16, in a sound reading.
HEADROOM = {
    "embed": 12.5,
    "block/norm": 13.0,
    "block/square": 6.25,
    "logits": 9.0,
}
SOUND = {
    name: HEADROOM if name.endswith("_bits") else dict.fromkeys(HEADROOM, 0.0)
    for name in PROBED
    if name != "activation_headroom_bits"
}


class Fit:
    """One call of `fit`, logged step by step.

    Args:
        log_dir: Path.
        layers: List of rows, as `layer` makes them.
        tuner: Boolean. True if there is a tuner.
        scales: Dict from the names of optimizers to their first loss scale.
    """

    def __init__(self, log_dir, layers=None, tuner=False, scales=None):
        self.log = RunLog(log_dir)
        self.layers = small_model() if layers is None else layers
        self.first = self.at = max(self.log.next_step - 1, 0)
        self.scales = {"": FIRST_SCALE} if scales is None else dict(scales)
        self.skipped = Counter()
        self._before = {
            name: int(self.log.counts.get(self._tag(name), 0))
            for name in self.scales
        }
        self._in_a_row, self._first_scales = Counter(), dict(self.scales)
        self._losses = Counter()
        self._probed, self._examined = False, False
        self.bad_data = BadData()
        self.speed, self._points = [], []
        settings = {"policy": "mixed_float16", "optimizer": "Adam"}
        self.event(
            "train_begin",
            fit=self.log.fits + 1,
            tuner=tuner,
            matmul_precision="float32",
            settings=settings,
        )
        self.log.layers(self.at, self.layers)
        for name in self.scales:
            self._write_scale(name)

    def _tag(self, name):
        return schema.curve_tag(schema.SKIPPED_TAG, name)

    def event(self, kind, **content):
        """Logs an event at this step."""
        self.log.event(self.at, {"kind": kind} | content)

    def verdict(self, kind, path=None, direction=None, since=None, **numbers):
        """Logs a finding with the advice that the package has for it."""
        found = Verdict(
            kind,
            path,
            direction,
            self.at,
            numbers=numbers,
            advice=advice(kind, path, **numbers),
            failing_since=since,
        )
        self.log.event(self.at, found.event())
        return found

    def advise(self, layers, because, **more):
        """Logs that a tuner would demote layers."""
        self._write_change("demote", layers, because, dry_run=True, **more)

    def change(self, kind, layers, because=None, **more):
        """Logs that a tuner sets layers to another policy."""
        self._write_change(kind, layers, because, **more)
        after = {p: a.removeprefix("mixed_") for p, (_, a) in layers.items()}
        self.layers = [
            row | {"compute_dtype": after.get(row["path"], own)}
            for row, own in ((row, row["compute_dtype"]) for row in self.layers)
        ]
        self.log.layers(self.at, self.layers)

    def _write_change(self, kind, layers, because, **more):
        found = {p: {"before": b, "after": a} for p, (b, a) in layers.items()}
        reasons = dict.fromkeys(found, because.finding) if because else {}
        brief = {p: because.cause_at(p) for p in found if because}
        self.event(kind, layers=found, reasons=reasons, because=brief, **more)

    def step(self, loss, skips=None, kind="inf", rows=None):
        """Takes a step.

        Args:
            loss: Float.
            skips: Dict from the optimizers that skip it to variables.
            kind: String. The non-finite numbers in the gradients.
            rows: Dict, the first bad row of each part of the batch.
        """
        _wait(SECONDS)
        self.at += 1
        for name in self.scales:
            if variables := (skips or {}).get(name):
                self._skip(name, variables, kind, rows)
            else:
                self._in_a_row[name] = 0
            if variables or self.at % 20 == 0:
                self._write_scale(name)
        if not math.isfinite(loss):
            self._losses["nan" if math.isnan(loss) else "inf"] += 1
        row = [self.at, loss if math.isfinite(loss) else math.nan]
        self.log.rows(self.at, schema.LOSS, [row])

    def _skip(self, name, variables, kind, rows):
        event = {"optimizer": name, "at_step": self.at}
        event |= {"scale": self.scales[name], "variables": variables}
        event["kinds"] = {variable: [kind] for variable in variables}
        if rows:
            event["bad_input"] = rows
            place = {"epoch": 0, "batch": self.at - 1 - self.first}
            place |= {"step": self.at, "rows": rows}
            self.bad_data.batches.append(place)
            self.bad_data.count += 1
        self.event("skipped_step", **event)
        self.skipped[name] += 1
        self._in_a_row[name] += 1
        self.scales[name] = max(self.scales[name] / 2, LEAST_SCALE)

    def _write_scale(self, name):
        scale, skipped = self.scales[name], self._before[name]
        skipped += self.skipped[name]
        point = ScalePoint(self.at, scale, skipped, self.at - skipped)
        self._points.append(point)
        self.log.rows(self.at, schema.SCALE, [point], optimizer=name)
        if self.at >= self.log.next_step:
            tag = schema.curve_tag("mixprec/loss_scale", name)
            self.log.scalars(self.at, {tag: scale, self._tag(name): skipped})

    def steps(self, count, losses=(2.0, 1.0), **skipping):
        """Takes steps whose losses go evenly from one number to another."""
        first, last = losses
        for n in range(count):
            share = n / max(count - 1, 1)
            self.step(first + (last - first) * share, **skipping)

    def probe(self, headroom=None, **metrics):
        """Logs what was measured of all layers at this step.

        Args:
            headroom: Dict from paths to powers of two; sound ones else.
            **metrics: Dicts from paths to numbers, by name of a metric.
        """
        self._probed = True
        paths = [row["path"] for row in self.layers]
        bits = HEADROOM | (headroom or {})
        found = {
            "activation_headroom_bits": bits,
            "activation_nonfinite": {p: bits[p] == -math.inf for p in paths},
            "gradient_headroom_bits": dict.fromkeys(paths, 8.0),
            "gradient_zero": dict.fromkeys(paths, 0.0),
        }
        found |= {n: found.get(n, {}) | own for n, own in metrics.items()}
        table = [
            [found.get(name, {}).get(path, math.nan) for name in PROBED]
            for path in paths
        ]
        self.log.heat(self.at, table, paths, PROBED)

    def histograms(self, path, lowest):
        """Logs the exponents of a layer's numbers and gradients."""
        bins = [[lowest + n, lowest + n + 1, 2.0**n] for n in range(4)]
        found = [(part, path, bins) for part in schema.EXPONENTS]
        self.log.histograms(self.at, found)

    def compare(self, errors):
        """Logs how far layers are from float32, forward and backward."""
        self._examined = True
        table, paths = [*errors.values()], [*errors]
        self.log.heat(self.at, table, paths, AUDITED, schema.ERRORS)

    def timed(self, steps, seconds=SECONDS):
        """Logs how long the last steps took."""
        row = Row(
            step=self.at,
            steps=steps,
            seconds=seconds * steps,
            samples=BATCH * steps,
            step_time_median=seconds,
            step_time_p95=1.25 * seconds,
            peak_memory=3 * 2**28,
            output_bytes_saved=0.375,
            overhead_share=0.015,
            once_seconds=0.5,
        )
        self.speed.append(row)
        self.log.rows(self.at, schema.PERFORMANCE, [row])

    def report_low_scale(self):
        """Logs that the loss scale fell far, as far as it did."""
        bad = {place["step"] for place in self.bad_data.batches}
        points = [*self._points, self._points[-1]._replace(step=self.at)]
        LowScales(self.log).read("", points, bad, 2.0, 2000)

    def end(self) -> TrainingSummary:
        """Logs the end; returns what the console shows of it."""
        if self._losses:
            self.event("nonfinite_losses", counts=dict(self._losses))
        for event in self.bad_data.events():
            self.log.event(self.at, event)
        found = self._summary()
        stuck = max(self._in_a_row.values(), default=0)
        self.event("train_end", summary=str(found), in_a_row=stuck)
        self.log.close()
        return found

    def _summary(self):
        facts = Facts(
            events=self.log.story,
            layers=self.layers,
            steps=self.at - self.first,
            skipped={name: self.skipped[name] for name in self.scales},
            in_a_row=max(self._in_a_row.values(), default=0),
            measured=self._probed,
            fits=self.log.fits + 1,
            first=self.first + 1,
            examined=self._examined,
        )
        dtypes = Counter(row["compute_dtype"] for row in self.layers)
        return TrainingSummary(
            dtypes=dict(dtypes),
            optimizers={name: self._optimizer(name) for name in self.scales},
            folder="",
            bad_data=str(self.bad_data),
            nonfinite_losses=dict(self._losses),
            **closing(facts),
        )

    def _optimizer(self, name):
        return OptimizerSummary(
            steps=self.at - self.first,
            skipped=self.skipped[name],
            in_a_row=self._in_a_row[name],
            first_scale=self._first_scales[name],
            last_scale=self.scales[name],
            overflow_counts={"embed/kernel": self.skipped[name]},
        )


OVERFLOWING = {"block/square": -math.inf}
BEHIND = {"": ["embed/kernel", "block/norm/gamma"]}


def healthy(log_dir):
    """A run without events, whose layers were compared with float32."""
    fit = Fit(log_dir)
    fit.steps(1)
    fit.compare({"embed": [4e-4, 1e-3], "block/square": [1e-3, 2e-3]})
    fit.histograms("embed", -8)
    for reading in range(5):
        bits = {"block/square": 6.25 - reading / 4}
        fit.probe(bits, **SOUND if reading else {})
        fit.steps(8, (2.0 - reading / 4, 1.8 - reading / 4))
        fit.timed(8)
    fit.histograms("embed", -6)
    return fit.end()


def searched_scale(log_dir):
    """Three steps are skipped until the loss scale suits."""
    fit = Fit(log_dir)
    fit.steps(3, (2.0, 2.0), skips=BEHIND)
    fit.steps(17)
    fit.probe()
    fit.compare({"embed": [4e-4, 1e-3]})
    return fit.end()


def overflow(log_dir):
    """A layer overflows in every step, and a tuner only advises."""
    fit = Fit(log_dir, tuner=True)
    fit.event(
        "before_training",
        finding="Sigmoid in float16",
        level="bad",
        layer="block/square",
        message="Found before.",
        advice="Widen.",
    )
    for step in range(1, 41):
        fit.step(math.nan, skips=BEHIND, kind="nan")
        if step == 5:
            found = _overflows(fit, since=1)
            wide = {"block/square": ("mixed_float16", "float32")}
            fit.advise(wide, found, message="would demote")
        if step in (1, 20, 40):
            gone = dict.fromkeys(["logits"], -math.inf)
            fit.probe(OVERFLOWING | gone)
    return fit.end()


def _overflows(fit, since=None, path="block/square"):
    return fit.verdict(
        "forward_overflow",
        path,
        "forward",
        since,
        error=math.inf,
        largest_input=2.5,
        nonfinite_outputs=39,
        largest_inside_in_float32=5e5,
    )


def repaired(log_dir):
    """A tuner demotes the layer, which costs two steps."""
    fit = Fit(log_dir, tuner=True)
    fit.steps(20, (2.0, 1.5))
    fit.probe()
    fit.event("trend", layer="block/square", headroom_bits=2.25,
              overflows_in_steps=14)  # fmt: skip
    fit.steps(2, (math.nan, math.nan), skips=BEHIND, kind="nan")
    found = _overflows(fit, since=21)
    wide = "mixed_float16", "float32"
    changes = dict.fromkeys(["block/square", "block/norm"], wide)
    fit.change("demote", changes, found, message="demotes two")
    fit.event("rebuild", seconds=0.25)
    fit.steps(58, (1.5, 0.5))
    fit.probe({"block/square": -3.0})
    return fit.end()


def underflow(log_dir):
    """Numbers become 0 on the way back, and gradients with them."""
    fit = Fit(log_dir)
    fit.steps(30, (0.7, 0.7))
    zeros = {"block/norm": 0.5}
    fit.probe(gradient_below=zeros, gradient_zero=zeros)
    fit.verdict("underflow", "block/norm", "backward", error=1.0, epsilon=1e-9)
    fit.verdict("underflow", "embed", "backward", error=0.25)
    fit.verdict("scale_too_low", needed_bits=20)
    fit.steps(30, (0.7, 0.7))
    return fit.end()


def diverged(log_dir):
    """The loss grows, in float32 as well."""
    fit = Fit(log_dir)
    fit.steps(10, (2.0, 2e3))
    fit.steps(10, (math.inf, math.inf), skips=BEHIND)
    fit.verdict(
        "divergence",
        since=11,
        loss_in_float32=1e9,
        loss_at_first=2.0,
        largest_weight=1e6,
        largest_weight_at_first=1.0,
        learning_rate=10.0,
    )
    fit.verdict("scale_collapsed", loss_scale=2.0**-14)
    fit.event("stopped", reason="no step was applied")
    return fit.end()


def weights_lost(log_dir):
    """Weights are not finite from a step on."""
    fit = Fit(log_dir)
    fit.steps(10)
    fit.probe()
    fit.steps(10, (math.nan, math.nan), skips=BEHIND, kind="nan")
    gone = dict.fromkeys(HEADROOM, -math.inf)
    fit.probe(gone, weight_headroom_bits=gone)
    fit.verdict("weights_lost", since=11, layers=3)
    return fit.end()


def bad_batch(log_dir):
    """Rows that are not finite take the loss scale far down."""
    fit = Fit(log_dir)
    fit.steps(20)
    fit.probe()
    fit.steps(9, (math.nan, math.nan), skips=BEHIND, kind="nan",
              rows={"x": 3})  # fmt: skip
    numbers = {"epoch": 0, "batch": 20, "samples_of_x": [163, 171]}
    fit.verdict("bad_data", **numbers, bad_samples_of_x=9)
    fit.steps(20, (1.0, 0.5))
    harm = {"embed": 0.25, "block/norm": 0.125}
    fit.probe(gradient_zero=harm)
    fit.report_low_scale()
    return fit.end()


def two_optimizers(log_dir):
    """A generator whose loss scale falls, and a healthy discriminator."""
    scales = {"generator": FIRST_SCALE, "discriminator": 2.0**10}
    fit = Fit(log_dir, scales=scales)
    fit.steps(10)
    fit.steps(2, (1.0, 1.0), skips={"generator": ["embed/kernel"]})
    fit.steps(8)
    fit.probe()
    fit.event(
        "nonfinite_gradients",
        optimizer="generator",
        counts={"inf": 2, "nan": 0},
    )
    return fit.end()


def two_fits(log_dir):
    """A tuner in the second `fit` repairs the overflow of the first `fit`."""
    fit = Fit(log_dir)
    fit.steps(9, (math.nan, math.nan), skips=BEHIND, kind="nan")
    _overflows(fit, since=1)
    fit.end()
    fit = Fit(log_dir, tuner=True, scales={"": fit.scales[""]})
    found = _overflows(fit)
    wide = {"block/square": ("mixed_float16", "float32")}
    fit.change("demote", wide, found, message="demotes one")
    fit.steps(25)
    fit.timed(25)
    fit.probe({"block/square": -3.0})
    return fit.end()


def wide(log_dir):
    """No layer computes in 16 bits, though that was asked for."""
    rows = [row | {"compute_dtype": "float32"} for row in small_model()]
    fit = Fit(log_dir, rows, scales={})
    fit.event("no_16_bits", message="no layer computes in 16 bits", lost=True)
    fit.steps(3)
    return fit.end()


_CHANGED = {"embed": {"before": "float32", "after": "mixed_float16"}}
_MADE = {"layers": _CHANGED, "reasons": {"embed": "sound"}}
_SCALES = {"before": 2.0**15, "after": 2.0**20, "message": "changes it"}
_FAILED = {"reason": "OSError: gone", "details": "gone"}
_WRONG = {"metrics": {"mae": "inf"}, "message": "mae was inf", "advice": "Cast"}
_RAISED = {"at_step": 3, "reason": "why"}
OTHER_EVENTS = {
    "advise_scale": _SCALES,
    "diagnosis_failed": _FAILED,
    "fit_raised": _RAISED,
    "give_up": {"message": "gives up: limit", "on_limit": "continue"},
    "graph_rewrite": {"message": "converted 3"},
    "left_in_float16": {"message": "embed is"},
    "log_gap": {"from_step": 1, "reason": "disk full", "lost": 2},
    "loss_scale_kept": {"scale": 8.0},
    "loss_scale_not_known": {"first_step": 1, "last_step": 2},
    "loss_scale_recovered": {"scale": 8.0},
    "lower_scale": _SCALES | {"after": 2.0**10},
    "metric_finite": {},
    "metric_not_finite": _WRONG,
    "no_loss_scaling": {"by": "train_step"},
    "plan_not_written": _FAILED,
    "probe_failed": _FAILED | {"layer": "embed"},
    "promote": _MADE,
    "raise_scale": _SCALES,
    "ranges_measured": {"steps": [1, 2], "seconds": 0.25},
    "ranges_withheld": {"message": "withheld"},
    "shrink": _MADE,
    "sign_off": {"within": False, "message": "not signed off"},
    "skipped_steps_not_kept": {"first_step": 1, "last_step": 3, "count": 3},
    "step_raised": _RAISED,
    "trade_off": {
        "title": "error",
        "points": [{"share_in_16_bits": 1.0, "error": 0.5, "float32": []}],
    },
    "return": {"message": "goes back", "to": 0, "done": "a rate of 0.1"},
    "spikes": {"message": "skips 1 step", "count": 1, "times": 80.0},
    "undo": _MADE,
    "validate": {"message": "held back"},
    "validation_failed": _FAILED,
    "validation_finite": {},
    "validation_not_finite": _WRONG,
}


def every_other_event(log_dir):
    """All events that the other logs lack, in one impossible run."""
    fit = Fit(log_dir, tuner=True)
    for kind, content in OTHER_EVENTS.items():
        fit.step(1.0)
        fit.event(kind, **content)
    return fit.end()


def killed(log_dir):
    """The process is gone in the middle of a write."""
    fit = Fit(log_dir)
    fit.steps(12)
    fit.probe()
    fit.steps(3, skips=BEHIND)
    fit.log.text(fit.at, "note", "cut")
    fit.log.close()
    (path,) = event_file_paths(fit.log.folder)
    os.truncate(path, os.path.getsize(path) - 5)


def many_layers(log_dir):
    """Two thousand layers, a few with findings."""
    rows = [
        layer(f"block_{n // 10}/dense_{n % 10}", share=1 / 2000)
        for n in range(2000)
    ]
    fit = Fit(log_dir, rows)
    for reading in range(4):
        fit.steps(10, (2.0 - reading / 4, 1.8 - reading / 4))
        bits = {row["path"]: 4 + n % 97 / 8 for n, row in enumerate(rows)}
        bits["block_150/dense_0"] = -math.inf
        bits |= {f"block_{n}/dense_9": math.inf for n in range(7)}
        fit.probe(bits)
    for n in range(12):
        fit.verdict("underflow", f"block_{n}/dense_3", "forward", error=1.0)
    _overflows(fit, path="block_150/dense_0")
    return fit.end()


STORIES = (
    healthy,
    searched_scale,
    overflow,
    repaired,
    underflow,
    diverged,
    weights_lost,
    bad_batch,
    two_optimizers,
    two_fits,
    wide,
    every_other_event,
    killed,
    many_layers,
)
NAMES = [story.__name__ for story in STORIES]


class Canonical(NamedTuple):
    """A log, and what the console showed at the end of its last `fit`.

    Attributes:
        log_dir: Path.
        summary: `TrainingSummary`, `None` if the run did not end.
    """

    log_dir: os.PathLike
    summary: TrainingSummary | None


_now = [0.0]


def _wait(seconds):
    _now[0] += seconds


@contextlib.contextmanager
def _set_clock():
    _now[0] = 0.0
    clock = {"now": lambda: _now[0], "wall": lambda: 1e9 + _now[0]}
    with patched(_clock, clock):
        yield


def write_all(folder) -> dict[str, Canonical]:
    """Writes each log to a folder of its name, and returns all by name."""
    found = {}
    for story in STORIES:
        with _set_clock():
            name = story.__name__
            found[name] = Canonical(folder / name, story(folder / name))
    return found


def conversion() -> ConversionReport:
    """Returns the report of a conversion for inference."""
    rows = [
        ("embed", "float16", 128, 8.0, 12.5, ""),
        ("block/norm", "float16", 128, 4.0, 13.0, ""),
        ("block/square", "float32", 256, 5e5, 6.25, "overflows"),
        ("logits", "float16", 128, None, None, ""),
    ]
    names = "path", "policy", "bytes", "largest", "headroom_bits", "reason"
    same = {"class": "Dense", "parameters": 64}
    layers = [dict(zip(names, row, strict=True)) | same for row in rows]
    drift = {"relative": 4e-4, "largest": 2e-3, "mean": 5e-4, "scale": 6.5}
    drift |= {"output": "logits", "nonfinite": 0, "top1_agreement": 0.998}
    policies = {row[0]: row[1] for row in rows}
    return ConversionReport(
        policy="float16",
        plan=PrecisionPlan(policies, default="float16"),
        layers=layers,
        drift=[drift, drift | {"output": "aux", "nonfinite": 2}],
        tolerance=0.01,
        size={"before": 1024, "after": 640},
        latency={"before": 0.004, "after": 0.002, "speedup": 2.0, "pairs": 9},
        notes=["Half."],
    )
