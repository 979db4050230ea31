"""Measures whether `diagnose` finds the faults in the models of `tests/zoo`.

The table has a row for each case and backend: the expected layers, the layers
that were found, the kind and direction of the first finding, and the time. The
last column is the time of the first step of a new model without this package,
including compilation. A case is right if exactly the expected layers are found.
Additional layers are allowed if their own gradients are known to be wrong.

    python -m benchmarks.diagnosis
    python -m benchmarks.diagnosis --setups torch --cases t5_ffn big_sum
    python -m benchmarks.diagnosis --train
    python -m benchmarks.diagnosis --policy mixed_bfloat16

`--train` checks the labels instead. It trains every model in float32, in
mixed_float16, and with the culprits or a decoy in float32.

`--policy` tries a different policy, under which different cases fail. It trains
every model in float32 and in that policy. A case is right if training fails and
something is found, or if the model learns and no layer is found.
"""

import math
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from benchmarks.timing import SETUPS, argument_parser, in_subprocess, markdown


def main():
    """Prints the table and the totals."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--policy", choices=_POLICIES)
    arguments = parser.parse_args()
    task, header = _TASKS[arguments.train]
    others = []
    if arguments.policy:
        task, header, others = diagnose_in, _OTHER, [arguments.policy]
    totals = []
    for setup in arguments.setups:
        backend, jit_compile = SETUPS[setup]
        rows = in_subprocess(
            backend, task, setup, jit_compile, arguments.cases, *others
        )
        print(f"\n### {setup}\n\n{markdown(header, [r[:-1] for r in rows])}")
        if header is HEADER:
            print("\n" + _medians(rows))
        right = sum(row[-1] for row in rows)
        totals.append([setup, str(len(rows)), str(right)])
    print("\n" + markdown(["backend", "cases", "right"], totals))


def _medians(rows):
    """Returns a line with the times of a diagnosis and of a first step."""
    times = [
        [float(row[i].split()[0]) for row in rows] for i in (_TIME, _FIRST)
    ]
    ratios = [t / max(first, 0.01) for t, first in zip(*times, strict=True)]
    found = [*map(statistics.median, [*times, ratios])]
    return "median: {:.2f} s, {:.2f} s for a first step, ratio {:.1f}".format(
        *found
    )


def diagnose_all(setup, jit_compile, names):
    """Returns a row of the table for every case, and whether it is right."""
    from zoo import cases

    rows = []
    for case in cases(names):
        rows.append(diagnose_one(case, setup, jit_compile))
        print(*rows[-1][:-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def diagnose_one(case, setup, jit_compile):
    """Returns the row of one case."""
    first = _first_step(case, jit_compile)
    verdicts = []
    seconds = _seconds(lambda: verdicts.extend(case.verdicts(jit_compile)))
    result = case.judge(verdicts, setup)
    return [
        case.name,
        ", ".join(sorted(case.expected(setup))) or case.kind or "-",
        ", ".join(sorted(result.found)) or result.kind or "-",
        f"{result.kind or '-'}, {result.direction or '-'}",
        f"{seconds:.2f} s",
        f"{first:.2f} s",
        "yes" if result.exact and result.kind_right else "NO",
        result.exact and result.kind_right,
    ]


def _first_step(case, jit_compile):
    """Returns the seconds of a first step, in float32 if 16 bits raise."""
    x, y = case.batch()

    def fit(policy):
        model = case.model(policy, jit_compile)
        run = model.fit
        return _seconds(lambda: run(x, y, batch_size=case.samples, verbose=0))

    try:
        return fit("mixed_float16")
    except Exception:  # Each backend raises its own kind of error.
        return fit("float32")


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def train_all(setup, jit_compile, names):
    """Returns every case's final metrics, and whether they prove its labels."""
    from zoo import cases

    rows = []
    for case in cases(names):
        metrics = [
            case.fit(case.model(policy, jit_compile, float32))
            for policy, float32 in case.trainings()
        ]
        exact, low, *repaired_and_decoy = metrics
        faulty = case.fails(setup)
        proven = case.learns(low, exact) != faulty
        if repaired_and_decoy:
            repaired, decoy = repaired_and_decoy
            proven &= case.learns(repaired, exact)
            proven &= case.learns(decoy, exact) != faulty
        cells = [_metric(m) for m in metrics] + ["-"] * (4 - len(metrics))
        rows.append([case.name, *cells, "yes" if proven else "NO", proven])
        print(*rows[-1][:-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def diagnose_in(setup, jit_compile, names, policy):
    """Returns a row for each case: the findings, and how training ends."""
    from zoo import cases

    rows = []
    for case in cases(names):
        exact = case.fit(case.model("float32", jit_compile))
        try:
            low = case.fit(case.model(policy, jit_compile))
            verdicts = case.verdicts(jit_compile, policy)
        # In some dtypes, the optimizer's epsilon is 0, or torch cannot draw
        # random weights. Such cases cannot be trained.
        except (NotImplementedError, ValueError) as error:
            rows.append([case.name, _metric(exact), "-", str(error), "-", True])
            continue
        fails = not case.learns(low, exact)
        layers = {v.layer for v in verdicts if v.layer}
        found = sorted(layers) or sorted({v.kind for v in verdicts})
        outcome = {
            (True, True): "found",
            (True, False): "missed",
            (False, True): "blamed",
            (False, False): "-",
        }[fails, bool(found if fails else layers)]
        cells = [case.name, _metric(exact), _metric(low), ", ".join(found)]
        right = outcome not in ("missed", "blamed")
        rows.append([*cells, outcome, right])
        print(*rows[-1][:-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def _metric(value):
    return f"{value:.4g}" if math.isfinite(value) else "NaN"


HEADER = ["case", "expected", "found", "kind, direction"]
HEADER += ["time", "first step", "right"]
_TIME, _FIRST = HEADER.index("time"), HEADER.index("first step")
_POLICIES = ["mixed_bfloat16", "bfloat16", "float16", "mixed_float16"]
_OTHER = ["case", "float32", "16 bits", "found", "outcome"]
_TASKS = {
    False: (
        diagnose_all,
        HEADER,
    ),
    True: (
        train_all,
        ["case", "float32", "float16", "repaired", "decoy", "proven"],
    ),
}


if __name__ == "__main__":
    main()
