"""Measures which faults `lint` finds before training, in the zoo and elsewhere.

For each fault of the zoo, the table says whether a finding of high severity
names one of its layers, or the model. `lint` runs once without data and once
with a batch. Healthy models must have no such finding.

    python -m benchmarks.lint_zoo
    python -m benchmarks.lint_zoo --backend jax --cases t5_ffn big_sum
    python -m benchmarks.lint_zoo --models
    python -m benchmarks.lint_zoo --models ResNet50 BertBackbone

`--models` lints the architectures of keras.applications and KerasHub in
mixed_float16: all of them, or the ones that you name. Each finding of high
severity needs a reason. ResNet50 is also linted at 224 pixels, to time it.
"""

import argparse
import pathlib
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from benchmarks.timing import in_subprocess, markdown

_HEADER = ["case", "fault", "layers", "model alone", "with data", "if not, why"]
_MODELS = ["model", "layers", "s", "high", "medium", "low", "found"]


def main():
    """Prints the table and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    backends = ("tensorflow", "jax", "torch")
    parser.add_argument("--backend", choices=backends, default="torch")
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--models", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.models is not None:
        rows = in_subprocess(arguments.backend, lint_models, arguments.models)
        print(markdown(_MODELS, rows))
        return
    rows = in_subprocess(arguments.backend, lint_cases, arguments.cases)
    print(markdown(_HEADER, [row[:-1] for row in rows]))
    print("\n" + markdown(["faults", "number", "alone", "data"], _totals(rows)))


def lint_cases(names):
    """Returns a row of the table for every case, and its kind of fault."""
    from zoo import cases

    rows = []
    for case in cases(names):
        rows.append(_row(case))
        print(*rows[-1][:-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def lint_models(names):
    """Returns a row for every architecture."""
    import keras

    from benchmarks.sweep_models import default_names, others

    names = names or [*default_names(), *others(), "ResNet50 224"]
    rows = []
    for name in names:
        try:
            rows.append(_model_row(name))
        except ValueError as error:  # Some backends lack some models.
            rows.append([name, *["-"] * 5, str(error)[:100]])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
        keras.utils.clear_session()
    return rows


def _row(case):
    import keras

    import keras_mixprec

    setup = keras.backend.backend()
    expected = case.expected(setup) if case.fails(setup) else frozenset()
    kind = case.direction if case.fails(setup) else "healthy"
    kind = kind or ("optimizer" if case.fails(setup) else "healthy")
    model = case.model("mixed_float16", jit_compile=False)
    cells = []
    for data in ((), case.batch()):
        try:
            found = keras_mixprec.lint(model, *data)
        except Exception as error:
            found = []
            print(case.name, repr(error)[:300], file=sys.stderr)
        cells.append(_found(found, expected))
    why = "-"
    if kind != "healthy" and not cells[1]:
        why = f"appears after {case.warm_up} epochs" if case.warm_up else kind
    layers = ", ".join(sorted(expected)) or "-"
    return [case.name, kind, layers, *(c or "-" for c in cells), why, kind]


def _found(findings, layers):
    """Returns the rules that find one of the layers, or the model itself."""
    high = [f for f in findings if f.severity == "high"]
    outside = {None, "<model>"}
    named = [f for f in high if not layers or f.layer in layers | outside]
    return ", ".join(dict.fromkeys(f.rule for f in named))


def _totals(rows):
    totals = []
    for kind in dict.fromkeys(row[-1] for row in rows):
        own = [row for row in rows if row[-1] == kind]
        found = [sum(row[i] != "-" for row in own) for i in (3, 4)]
        totals.append([kind, str(len(own)), *map(str, found)])
    return totals


def _model_row(name):
    import keras

    import keras_mixprec
    from benchmarks.sweep_models import build
    from keras_mixprec.policies.layers import walk

    keras.config.set_dtype_policy("mixed_float16")
    if name == "ResNet50 224":
        model = keras.applications.ResNet50(weights=None)
    else:
        model = build(name)
    model.compile(
        keras_mixprec.LossScaleOptimizer("adam"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    start = time.perf_counter()
    findings = keras_mixprec.lint(model)
    seconds = time.perf_counter() - start
    counts = Counter(f.severity for f in findings)
    rules = Counter(f.rule for f in findings if f.severity != "low")
    listing = ", ".join(f"{rule} {count}x" for rule, count in rules.items())
    return [
        name,
        str(len(walk(model))),
        f"{seconds:.1f}",
        *(str(counts[severity]) for severity in ("high", "medium", "low")),
        listing or "-",
    ]


if __name__ == "__main__":
    main()
