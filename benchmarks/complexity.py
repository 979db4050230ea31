"""Counts the code that a train step runs, and the state that changes.

    KERAS_BACKEND=torch python benchmarks/complexity.py

The script traces a `fit` of three Dense layers with `MixPrecMonitor()`. The
first numbers are the calls to the package's functions, and the number of their
files, in the median step. They are counted for steps without a task, and for
steps that read the counters. The other numbers count attributes that change
after construction, and assignments to attributes of other objects.
"""

import ast
import pathlib
import statistics
import sys
import tempfile
from collections import Counter

import keras
import numpy as np

import keras_mixprec as kmp

PACKAGE = pathlib.Path(kmp.__file__).parent
CORE = "loss_scaling callbacks monitoring guards tuning"
STEPS = 400


class Counted(keras.callbacks.Callback):
    """Counts the calls to package functions between the ends of two batches."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self._calls = Counter()

    def on_train_begin(self, logs=None):
        sys.setprofile(self._called)

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self._calls)
        self._calls = Counter()

    def on_train_end(self, logs=None):
        sys.setprofile(None)

    def _called(self, frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            self._calls[path] += 1


def steps_of_a_fit():
    """Returns the counts of calls in each step, by file."""
    layers = [keras.layers.Dense(32, "relu") for _ in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16")
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 16)).astype("float32")
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder:
        monitor = kmp.MixPrecMonitor(folder, verbose=0)
        callbacks = [monitor, counted]
        model.fit(x, x[:, :1], 8, verbose=0, callbacks=callbacks)
    return counted.steps


def assignments(room):
    """Yields the class, its method, and the target of each assignment."""
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.ClassDef):
                for function in cls.body:
                    for node in ast.walk(function):
                        for target in _targets(node):
                            yield f"{path}:{cls.name}", function, target


def _targets(node):
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        targets = getattr(node, "targets", [])
    flat = [t.elts if isinstance(t, ast.Tuple) else [t] for t in targets]
    return [t for ts in flat for t in ts if isinstance(t, ast.Attribute)]


def main():
    """Prints the figures."""
    steps = steps_of_a_fit()[20:]
    calls = [step.total() for step in steps]
    plain = statistics.median_low(calls)
    files = len(steps[calls.index(plain)])
    print(f"one plain step: {plain} calls in {files} files")
    reader = f"{PACKAGE}/monitoring/counters.py"
    pairs = zip(steps, steps[1:], strict=False)
    pairs = sorted((a + b for a, b in pairs if reader in a), key=Counter.total)
    read = pairs[len(pairs) // 2]
    print(f"a reading and the next: {read.total()} calls in {len(read)} files")
    changing, others = set(), 0
    for room in CORE.split():
        for owner, function, target in assignments(room):
            own = isinstance(target.value, ast.Name)
            if not own or target.value.id not in ("self", "cls"):
                others += 1
            elif getattr(function, "name", "") != "__init__":
                changing.add((owner, target.attr))
    print(f"attributes that change after construction: {len(changing)}")
    print(f"assignments into attributes of other objects: {others}")


if __name__ == "__main__":
    main()
