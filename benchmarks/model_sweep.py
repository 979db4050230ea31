"""Runs the monitor and `diagnose` on architectures of other authors.

It runs `keras.applications` and KerasHub's backbones, small and with random
weights. Each model trains for three steps in mixed_float16, with our optimizer
and a monitor that measures before every step. Then `diagnose` examines the
model. All models are healthy, so each verdict, warning or error is a bug of
this library or needs a reason. The column "layers" counts layers with a path,
and "rows" the layers in the last measurement. `--diagnose-only` skips the
training, most of which is compilation.

    python -m benchmarks.model_sweep
    python -m benchmarks.model_sweep --setup tensorflow-xla --only NASNetMobile
    python -m benchmarks.model_sweep --all
"""

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from typing import NamedTuple

from benchmarks.timing import SETUPS, in_subprocess, markdown

_BATCH, _STEPS = 4, 3
_HEADER = [
    "model",
    "layers",
    "fit, s",
    "diagnose, s",
    "skipped",
    "rows",
    "found",
]


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setup", choices=SETUPS, default="torch")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument(
        "--all", action="store_true", help="the larger applications too"
    )
    parser.add_argument("--diagnose-only", action="store_true")
    arguments = parser.parse_args()
    backend, jit_compile = SETUPS[arguments.setup]
    names = arguments.only or in_subprocess(backend, _names, arguments.all)
    rows = []
    for name in names:
        train = not arguments.diagnose_only
        rows.append([name, *_row(backend, name, jit_compile, train)])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(markdown(_HEADER, rows))


def examine(name, jit_compile, train=True):
    """Trains and diagnoses one model, and returns the cells of its row."""
    import keras

    import keras_mixprec
    from benchmarks.sweep_models import batches, build
    from keras_mixprec.policies.layers import walk

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = build(name)
    model.compile(
        keras_mixprec.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    x, y = batches(name, model, _BATCH * _STEPS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = _fitted(model, x, y) if train else _Fitted()
    x, y = keras.tree.map_structure(lambda array: array[:_BATCH], (x, y))
    diagnose_seconds, verdicts = _timed(
        lambda: keras_mixprec.diagnose(model, x, y)
    )
    return [
        str(len(walk(model))),
        fitted.seconds,
        f"{diagnose_seconds:.1f}",
        fitted.skipped,
        fitted.rows,
        _found([*fitted.verdicts, *verdicts], caught),
    ]


class _Fitted(NamedTuple):
    """The cells that describe a training in a row of the table."""

    seconds: str = "-"
    skipped: str = "-"
    rows: str = "-"
    verdicts: tuple = ()


def _fitted(model, x, y):
    import keras_mixprec

    with tempfile.TemporaryDirectory() as log_dir:
        # `update_freq` leaves no reading within these few steps, because a
        # reading would start a diagnosis too.
        monitor = keras_mixprec.MixPrecMonitor(
            log_dir,
            update_freq=_STEPS,
            probe_every=1,
            max_overhead=1.0,
            verbose=0,
        )
        seconds, _ = _timed(
            lambda: model.fit(x, y, _BATCH, callbacks=[monitor], verbose=0)
        )
    return _Fitted(
        f"{seconds:.1f}",
        str(model.optimizer.skipped_steps),
        str(len(monitor.report.to_dict()["layers"])),
        tuple(monitor.verdicts),
    )


def _row(backend, name, jit_compile, train):
    # Each model runs in its own process, which releases its memory at the end.
    try:
        return in_subprocess(backend, examine, name, jit_compile, train)
    except Exception as error:
        traceback.print_exception(error)
        lines = f"{type(error).__name__}: {error}".split()
        return ["-"] * (len(_HEADER) - 2) + [" ".join(lines)[:300]]


def _names(larger):
    from benchmarks.sweep_models import default_names, others

    return default_names() + (others() if larger else [])


def _timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _found(verdicts, caught):
    found = [
        " ".join(filter(None, (v.kind, v.layer, v.direction))) for v in verdicts
    ]
    ours = [str(w.message) for w in caught if "MixPrec" in str(w.message)]
    return "; ".join(dict.fromkeys(found + ours)) or "-"


if __name__ == "__main__":
    main()
