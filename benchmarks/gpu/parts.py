"""The parts of the GPU measurement, in the order of their runs.

Most are other benchmarks of this folder, with sizes for a GPU, or tiny ones.
This file does not import Keras before a part is measured.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks import (
    diagnosis,
    monitor_overhead,
    optimizer_step,
    repair,
    steady_cost,
)
from benchmarks.timing import SETUPS


class Part(NamedTuple):
    """One part of the measurement.

    Attributes:
        title: String. What the table shows.
        weight: Float. Its share of the time, relative to the other parts that
            are not done yet.
        items: Function `(tiny, cases)` that returns the names of its items.
        measure: Function `(item, tiny)` that returns the rows of one, dicts
            from columns to cells.
        alone: Boolean. True if each item needs its own process, because it
            measures memory.
        parallel: Boolean. True if several processes may run at a time, because
            it measures no time.
    """

    title: str
    weight: float
    items: Callable
    measure: Callable
    alone: bool = False
    parallel: bool = False


def _jit_compile():
    import keras

    return SETUPS[keras.backend.backend()][1]


def _examine(item, tiny):
    """Returns the measurements and findings of the doctor."""
    import keras_mixprec as kmp

    report = kmp.doctor(quick=tiny)
    rows = [
        {key: row[key] for key in ("operation", "size", "mode")}
        | {"float32, ms": 1e3 * row["seconds"] if row["seconds"] else "fails"}
        | row["ratios"]
        | {"left out": ", ".join(map(": ".join, row["left_out"].items()))}
        for row in report.speed
    ]
    notes = [
        f"{test['format']} {test['operation']} is {test['status']}"
        for test in report.self_test
        if test["status"] != "right"
    ]
    notes += [f"{f['level']}: {f['text']}" for f in report.findings]
    notes.append("{policy}: {reason}".format(**report.recommendation))
    return rows + [{"note": note} for note in notes]


# Seconds, with importing and compiling.
_LONGEST_TRIAL = 120.0

_COMPARED = ["resnet50", "transformer", "unet"]

# The default of float32 differs. On a GPU JAX uses TF32 for products, and torch
# for convolutions.
_POLICIES = {
    "float32": "float32+float32",
    "TF32": "float32+tf32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def _compare(item, tiny):
    """Speed and memory of one model under each policy."""
    import keras_mixprec as kmp
    from benchmarks.gpu import trained

    result = kmp.compare_precisions(
        f"{trained.__name__}:{item}",
        f"{trained.__name__}:{item}_data",
        ["float32", "mixed_float16"] if tiny else _POLICIES,
        seeds=1,
        steps=4 if tiny else 40,
        blocks=2 if tiny else 5,
        batch_size=trained.BATCHES[item],
        verbose=0,
    ).to_dict()
    arms = result["record"]["arms"]
    errors = [f"{arm['name']}: {arm['error']}" for arm in arms if arm["error"]]
    if len(errors) == len(arms) or (tiny and errors):
        raise RuntimeError("; ".join(errors))
    notes = [f"{arm['name']}: {note}" for arm in arms for note in arm["notes"]]
    tokens = trained.TOKENS.get(item)
    rows = [_compared(row, tokens) for row in result["rows"]]
    return rows + [{"note": note} for note in errors + notes]


def _compared(row, tokens):
    speed = row["speed"] or {}
    step, peak = row["step_seconds"], row["memory_bytes"]
    samples = row["samples_per_second"]
    return {
        "policy": row["name"],
        "step, ms": step and 1e3 * step,
        "times as fast": speed.get("estimate"),
        "from": speed.get("low"),
        "to": speed.get("high"),
        "samples/s": samples,
        "tokens/s": samples and tokens and samples * tokens,
        "peak, GiB": peak and peak / 2**30,
        "of float32's peak": row["memory_ratio"],
        "J/sample": row["energy_joules_per_sample"],
        "compiled in, s": row["compile_seconds"],
        "FLOPs in 16 bits": row["share_of_flops_16bit"],
        "skipped steps": row["skipped_steps"],
    }


def _largest_batch(item, tiny):
    """Samples that train at once, in float16 and in float32."""
    import keras_mixprec as kmp
    from benchmarks.gpu import trained

    least = trained.BATCHES[item] // 2
    result = kmp.largest_batch(
        f"{trained.__name__}:{item}",
        f"{trained.__name__}:{item}_data",
        "mixed_float16",
        baseline=None if tiny else "float32",
        min_size=least,
        step=least,
        max_size=least if tiny else 512 * least,
        timeout=_LONGEST_TRIAL,
        verbose=0,
    )
    return [
        {
            "policy": found.policy,
            "largest batch": found.batch_size,
            "does not fit": found.fails_at,
            "of float32's": result.ratio if found is result.found else None,
            "trials": len(found.trials),
        }
        for found in (result.found, result.baseline)
        if found
    ]


_TINY = "1 Dense(8), batch 8"

# Number of layers and their width, and the size of a batch.
_OPTIMIZED = {
    "100 Dense(64), batch 128": ((100, 64), 128),
    "6 Dense(1024), batch 128": ((6, 1024), 128),
    "12 Dense(4096), batch 1024": ((12, 4096), 1024),
    _TINY: ((1, 8), 8),
}


def _step_with_optimizers(item, tiny):
    rounds, steps = (2, 1) if tiny else (21, 8)
    cells = optimizer_step.measure(
        _jit_compile(), _OPTIMIZED[item], rounds, steps
    )
    return [dict(zip(optimizer_step.HEADER, cells, strict=True))]


_WATCHED = ["convolutional", "transformer", "resnet50"]


def _steady_cost(item, tiny):
    rounds, steps, pairs = (1, 2, 2) if tiny else (10, 100, 301)
    cells = steady_cost.measure(_jit_compile(), item, rounds, steps, pairs)
    return [dict(zip(steady_cost.HEADER, cells, strict=True))]


def _probed_fits(item, tiny):
    rounds, steps = (1, 2) if tiny else (5, 96)
    cells = monitor_overhead.measure(_jit_compile(), item, rounds, steps)
    return [dict(zip(monitor_overhead.HEADER, cells, strict=True))]


def _cases(tiny, names):
    """Returns cases of the zoo, sorted so that the first are of all kinds."""
    from zoo import CASES

    if names or tiny:
        return names or ["rms_overflow"]
    return [name for k in range(7) for name in [*CASES][k::7]]


def _diagnose(item, tiny):
    """Returns what `diagnose` finds in float16 on this device."""
    import keras
    from zoo import CASES

    row = diagnosis.diagnose_one(
        CASES[item], keras.backend.backend(), _jit_compile()
    )
    _, *cells, right = row
    found = dict(zip(diagnosis.HEADER[1:], cells, strict=True))
    expected = found["expected"], CASES[item].kind, CASES[item].direction
    return [found | {"differs": "" if right else f"not {expected}"}]


def _repair(item, tiny):
    """Returns whether the case fails in float16 on this device."""
    import keras
    from zoo import CASES

    case, setup = CASES[item], keras.backend.backend()
    result = repair.repair_one(case, setup, _jit_compile())
    found = dict(zip(repair.HEADER[1:], result.cells[1:], strict=True))
    differs = [] if result.right else ["not repaired"]
    if result.fails != case.fails(setup):
        differs.append("fails" if result.fails else "learns in float16")
    return [found | {"differs": ", ".join(differs)}]


def _named(*names, tiny):
    """Returns what names these items, or that one if tiny."""
    return lambda is_tiny, cases: [tiny] if is_tiny else [*names]


PARTS = {
    "doctor": Part(
        "`kmp.doctor()`: how many times as fast as float32 each format is.",
        2,
        _named("all", tiny="all"),
        _examine,
    ),
    "compare": Part(
        "`kmp.compare_precisions`: ResNet50, a transformer of 12 layers and a "
        "U-Net (`benchmarks/gpu/trained.py`).",
        14,
        _named(*_COMPARED, tiny="tiny"),
        _compare,
        alone=True,
    ),
    "batch": Part(
        "`kmp.largest_batch` of the same models, in steps of half the batch "
        "that they are compared with.",
        7,
        _named(*_COMPARED, tiny="tiny"),
        _largest_batch,
        alone=True,
    ),
    "optimizer": Part(
        "A mixed_float16 step with Adam as a multiple of one without loss "
        "scaling (`benchmarks/optimizer_step.py`).",
        2,
        _named(*[*_OPTIMIZED][:-1], tiny=_TINY),
        _step_with_optimizers,
    ),
    "overhead": Part(
        "What monitor and tuner cost a healthy run "
        "(`benchmarks/steady_cost.py`).",
        4,
        _named(*_WATCHED, tiny="tiny"),
        _steady_cost,
    ),
    "probes": Part(
        "Fits as multiples of one without a monitor, at its defaults and with "
        "every step probed (`benchmarks/monitor_overhead.py`).",
        3,
        _named(*_WATCHED, tiny="tiny"),
        _probed_fits,
    ),
    "diagnosis": Part(
        "What is found in the models of `tests/zoo`, where it differs from "
        "what is known of them on a CPU (`benchmarks/diagnosis.py`).",
        4,
        _cases,
        _diagnose,
        parallel=True,
    ),
    "repair": Part(
        "What the tuner makes of them, where that differs "
        "(`benchmarks/repair.py`).",
        4,
        _cases,
        _repair,
        parallel=True,
    ),
}
