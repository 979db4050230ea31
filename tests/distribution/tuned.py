"""Shared by the scripts of the tuner; each prints what its worker did."""

import json
import os
import sys
import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

from tuner_models import chain, demoted, regression

import keras_mixprec as kmp

# Given, so that TensorFlow makes a graph of the step.
JIT = keras.backend.backend() == "jax"
GOOD, BIG = 1.0, 1000.0
ROWS = 4


class Case(NamedTuple):
    """The batches of two workers, one batch per number."""

    values: tuple
    scale: Any = 1.0
    arguments: dict = {}
    diverges: bool = False


CASES = {
    # Only the second worker meets the fault.
    "at_first": Case(([GOOD] * 6, [BIG] * 6)),
    "later": Case(([GOOD] * 40, [GOOD] * 20 + [BIG] * 20)),
    # It alone remembers the fault when nothing seems to need the repair.
    "quiet": Case(
        ([GOOD] * 60, [BIG] * 5 + [GOOD] * 55), arguments={"promote_after": 20}
    ),
    # A metric that only the second worker sees counts for both.
    "validated": Case(
        ([GOOD] * 6, [GOOD] * 6),
        arguments={"validate": lambda model: seen_in_16_bits(model)},
    ),
    # The demotion lets through gradients that ruin the weights of both.
    "diverging": Case(
        ([0.5] * 60, [0.5] * 20 + ([BIG] + [0.5] * 9) * 4), diverges=True
    ),
    "healthy": Case((np.linspace(1.0, 2.0, 60), np.linspace(2.0, 1.0, 60))),
}


WORKER = []


def seen_in_16_bits(model):
    """A metric that is worse with `big` in float16, on the second worker."""
    return float(WORKER[0] and model.layers[1].compute_dtype == "float16")


def rows(values):
    """Returns a batch of each number, end to end."""
    x = np.repeat(np.array(values, "float32"), ROWS)[:, None]
    return x, np.zeros_like(x)


def batches(values):
    x, y = rows(values)
    for start in range(0, len(x), ROWS):
        yield x[start : start + ROWS], y[start : start + ROWS]


def work(worker, wrap, dataset):
    """Trains on every case; prints what came of it as JSON, last.

    Args:
        worker: Int. Which of the two this is.
        wrap: Function of a function that makes a model, which it calls.
        dataset: Function that returns a dataset of a batch of each number.
    """
    WORKER.append(worker)
    folder = tempfile.mkdtemp()
    found = {}
    for name, case in CASES.items():
        model = wrap(
            lambda case=case: (
                regression(0.1, JIT) if case.diverges else build(case.scale)
            )
        )
        plan = os.path.join(folder, f"{name}.json")
        tuner = kmp.PrecisionTuner(plan, verbose=0, **case.arguments)
        fit(model, dataset, case.values[worker], tuner)
        found[name] = told(model, tuner) | {"wrote": os.path.exists(plan)}
    # Only the first worker has the plan file of the first case.
    tuner = kmp.PrecisionTuner(os.path.join(folder, "at_first.json"))
    fit(again := wrap(lambda: build(1.0)), dataset, [GOOD], tuner)
    found["again"] = told(again, tuner)["demoted"]
    plain = wrap(lambda: build(1.0))
    fit(plain, dataset, CASES["healthy"].values[worker])
    found["untuned"] = [w.tolist() for w in plain.get_weights()]
    print(json.dumps(found), flush=True)


def build(scale):
    return chain(JIT, rate=2.0**-24, scale=scale)


def fit(model, dataset, values, *callbacks):
    model.fit(
        dataset(values),
        steps_per_epoch=len(values),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def told(model, tuner):
    optimizer = model.optimizer
    return {
        "demoted": demoted(model),
        "changes": [(e["kind"], e["step"]) for e in tuner.history],
        "reasons": [e.get("reasons") for e in tuner.history],
        "applied": optimizer.attempted_steps - optimizer.skipped_steps,
        "scale": float(optimizer.loss_scale),
        "weights": [w.tolist() for w in model.get_weights()],
    }
