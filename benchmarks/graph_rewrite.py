"""Compares TensorFlow's graph rewrite with float32 and with a policy.

Four Dense(2048) layers train with SGD on one batch: in float32, in
`graph_rewrite("bfloat16")` and in mixed_bfloat16. XLA also compiles the float32
model and the mixed_bfloat16 model. Short rounds alternate in one process. A
ratio is float32's time divided by the other time in the same round, so a ratio
above 1 means faster than float32. The table has the median over the rounds, and
the ratio of the fastest rounds in brackets. The times do not include
TensorFlow's optimization of graphs.

    python benchmarks/graph_rewrite.py
    python benchmarks/graph_rewrite.py --rounds 31 --width 1024
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_mixprec as kmp
from benchmarks.timing import markdown, ratio
from benchmarks.train_steps import stepper

# Each arm's policy, and whether XLA compiles it and graphs are rewritten.
ARMS = {
    "float32": ("float32", False, False),
    "graph_rewrite": ("float32", False, True),
    "mixed_bfloat16": ("mixed_bfloat16", False, False),
    "float32, XLA": ("float32", True, False),
    "mixed_bfloat16, XLA": ("mixed_bfloat16", True, False),
}


def prepare(policy, jit_compile, x):
    """Returns a function that trains a new model for a number of steps."""
    keras.utils.set_random_seed(0)
    with kmp.policy_scope(policy):
        model = keras.Sequential([keras.Input(x.shape[1:])])
        for _ in range(4):
            model.add(keras.layers.Dense(x.shape[1], "relu"))
    model.compile("sgd", loss="mse", jit_compile=jit_compile)
    return stepper(model, x, x)


def measure(steppers, rounds, steps):
    """Returns each arm's seconds per round, and the rewrite's summary."""
    seconds = {arm: [] for arm in steppers}
    said = ""
    names = list(steppers)
    for turn in range(rounds):
        shift = turn % len(names)
        for arm in names[shift:] + names[:shift]:
            rewrites = ARMS[arm][2]
            scope = kmp.graph_rewrite("bfloat16") if rewrites else None
            with scope or contextlib.nullcontext():
                # TensorFlow optimizes a new graph in an untimed first step.
                steppers[arm](1)
                start = time.perf_counter()
                steppers[arm](steps)
                seconds[arm].append(time.perf_counter() - start)
            said = str(scope) if rewrites else said
    return seconds, said


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    x = random.normal(size=(given.batch, given.width)).astype("float32")
    steppers = {
        arm: prepare(policy, jit_compile, x)
        for arm, (policy, jit_compile, _) in ARMS.items()
    }
    seconds, said = measure(steppers, given.rounds, given.steps)
    rows = [
        [
            arm,
            f"{1e3 * statistics.median(times) / given.steps:.1f}",
            ratio(seconds["float32"], times),
        ]
        for arm, times in seconds.items()
    ]
    print(markdown(["arm", "ms a step", "float32's time : its time"], rows))
    print(f"\nGraph rewrite: {said}.")


if __name__ == "__main__":
    main()
