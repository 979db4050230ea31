"""Measures how `PrecisionTuner` repairs the models of `tests/zoo`.

The table has a row for each case and backend:

- the final metric in float32, in mixed_float16, and with the tuner. The metric
  with the tuner must be within 2% of float32's, or as good as with one of five
  seeds in float32. In the second case, the row has the range over these seeds;
- the number of steps from the first bad step to the repair, and the number of
  rebuilds;
- the share of parameters and FLOPs left in 16 bits, and the share with the
  smallest set of layers known to be enough.

The tuner must not demote layers of a healthy control model.

    python -m benchmarks.repair
    python -m benchmarks.repair --setups torch --cases t5_ffn big_sum

`--rungs rescale bfloat16 float32` sets the tuner's argument. With `--hub` the
models are KerasHub transformers with a planted overflow, which need `pip
install keras-hub`. Their FLOPs are unknown because they are built for any
length, so only the shares of their parameters are compared.
"""

import json
import math
import pathlib
import statistics
import sys
import tempfile
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from benchmarks.timing import SETUPS, argument_parser, in_subprocess, markdown

_SEEDS = range(5)
_TOLERANCE = 0.02
HEADER = [
    "case",
    "float32",
    "float16",
    "tuned",
    "steps to repair",
    "rebuilds",
    "parameters, FLOPs in 16 bits",
    "oracle",
    "right",
]


def main():
    """Prints the table of each setup and the totals."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--hub", action="store_true", help="KerasHub's models")
    parser.add_argument("--rungs", nargs="+", help="of the tuner")
    arguments = parser.parse_args()
    totals = []
    for setup in arguments.setups:
        backend, jit_compile = SETUPS[setup]
        rows = in_subprocess(
            backend,
            repair_all,
            setup,
            jit_compile,
            arguments.cases,
            arguments.hub,
            arguments.rungs,
        )
        table = [result.cells for result in rows]
        print(f"\n### {setup}\n\n{markdown(HEADER, table)}", flush=True)
        totals.append([setup, *_totals(rows)])
    header = ["backend", "faults repaired", "controls untouched"]
    header += ["most rebuilds", "median share of the oracle's"]
    print("\n" + markdown(header, totals))


def repair_all(setup, jit_compile, names, hub=False, rungs=None):
    """Returns a `Repaired` for every case."""
    if hub:
        from benchmarks.hub_cases import cases
    else:
        from zoo import cases

    rows, measure = [], "parameters" if hub else "flops"
    for case in cases(names):
        if case.incurable:
            continue  # The fault is in the optimizer or data, not a dtype.
        rows.append(repair_one(case, setup, jit_compile, measure, rungs))
        print(*rows[-1].cells, sep="  ", file=sys.stderr, flush=True)
    return rows


class Repaired(NamedTuple):
    """The result of a case.

    Attributes:
        cells: List of strings, the case's row of the table.
        fault: Boolean. True if a layer is known to be unstable.
        fails: Boolean. True if the model fails to learn in mixed_float16.
        right: Boolean. True if the tuner did the right thing.
        rebuilds: Int. The number of rebuilds.
        share: Float. The share left in 16 bits, relative to the best share.
    """

    cells: list
    fault: bool
    fails: bool
    right: bool
    rebuilds: int
    share: float


def _shares(model):
    """Returns the shares of a model's parameters and FLOPs in 16 bits."""
    import keras_mixprec as kmp
    from keras_mixprec.flop_shares import parameters, share_in_16_bits

    rows = kmp.precision_summary(model).to_list()
    low = [row for row in rows if row["compute_dtype"].endswith("float16")]
    held = sum(map(parameters, rows)) or 1
    return {
        "parameters": sum(map(parameters, low)) / held,
        "flops": share_in_16_bits(rows) or 0.0,
    }


def repair_one(case, setup, jit_compile, measure="flops", rungs=None):
    """Trains a case in float32, in mixed_float16, and with the tuner."""
    import keras_mixprec as kmp

    first, *others = _SEEDS
    exact = [_float32(case, jit_compile, first)]
    low = _in_float16(case, jit_compile)
    model = case.model("mixed_float16", jit_compile)
    given = {"rungs": rungs} if rungs else {}
    tuner = kmp.PrecisionTuner(verbose=0, **given)
    with tempfile.TemporaryDirectory() as folder:
        # The tuner is first, so that the monitor logs each skipped step.
        monitor = kmp.MixPrecMonitor(folder, probe_every=0, verbose=0)
        tuned = case.fit(model, callbacks=[tuner, monitor])
        first_bad = _first_bad_step(folder)
    shares = _shares(model)
    culprits = sorted(case.expected(setup))
    oracle = _shares(case.model("mixed_float16", jit_compile, culprits))
    changes = [e for e in tuner.history if "layers" in e]
    rebuilds = sum(
        e["kind"] in ("demote", "shrink", "promote") for e in changes
    )
    demoted = any(e["kind"] == "demote" for e in changes)
    fault = bool(culprits)
    if fault and not _as_good(case, tuned, exact):
        exact += [_float32(case, jit_compile, seed) for seed in others]
    right = _as_good(case, tuned, exact) if fault else not demoted
    cells = [
        case.name,
        _range(exact),
        _metric(low),
        _metric(tuned),
        _steps(changes, first_bad),
        str(rebuilds),
        f"{shares['parameters']:.0%}, {shares['flops']:.0%}",
        f"{oracle.parameters:.0%}, {oracle.flops:.0%}",
        "yes" if right else "NO",
    ]
    share, known = shares[measure], oracle[measure]
    share = min(share / known, 1.0) if known else 1.0
    fails = not case.learns(low, exact[0])
    return Repaired(cells, fault, fails, right, rebuilds, share)


def _in_float16(case, jit_compile):
    """Returns the metric without the tuner, NaN if a step raises."""
    from keras_mixprec.backend import active

    try:
        return case.fit(case.model("mixed_float16", jit_compile))
    except active.replay().REFUSALS:
        return math.nan


def _float32(case, jit_compile, seed):
    return case.fit(case.model("float32", jit_compile, seed=seed))


def _range(metrics):
    first, least, largest = metrics[0], min(metrics), max(metrics)
    if len(metrics) == 1:
        return _metric(first)
    return f"{_metric(first)} ({_metric(least)} to {_metric(largest)})"


def _first_bad_step(folder):
    path = pathlib.Path(folder, "mixprec", "events.jsonl")
    events = map(json.loads, path.read_text().splitlines())
    steps = [e["at_step"] for e in events if e["kind"] == "skipped_step"]
    return min(steps, default=None)


def _steps(changes, first_bad):
    demotions = [e["step"] for e in changes if e["kind"] == "demote"]
    if not demotions:
        return "-"
    # The first demotion may not have been enough, so the last one counts.
    last = max(demotions)
    if first_bad is None or first_bad >= last:
        return f"0 (at {last})"
    return f"{last - first_bad} (at {last})"


def _as_good(case, tuned, exact):
    if not math.isfinite(tuned):
        return False
    if case.metric.endswith("accuracy"):
        return tuned >= min((1 - _TOLERANCE) * exact[0], *exact)
    return tuned <= max((1 + _TOLERANCE) * exact[0], *exact)


def _totals(results):
    faults = [result.right for result in results if result.fault]
    controls = [result.right for result in results if not result.fault]
    shares = [result.share for result in results if result.fault]
    return [
        f"{sum(faults)} of {len(faults)}",
        f"{sum(controls)} of {len(controls)}",
        str(max(result.rebuilds for result in results)),
        f"{statistics.median(shares):.0%}" if shares else "-",
    ]


def _metric(value):
    return f"{value:.4g}" if math.isfinite(value) else "NaN"


if __name__ == "__main__":
    main()
