"""Runs `convert_for_inference` on architectures of other authors.

It converts `keras.applications` and KerasHub's backbones, small and with random
weights of seed 0. Each model is converted on a batch of eight samples. The
table shows the number of layers that stay in float32, and the most frequent
reason. If the conversion is refused, the row says why.

    python -m benchmarks.convert_models
    python -m benchmarks.convert_models --to bfloat16 --only NASNetMobile
    python -m benchmarks.convert_models --all
"""

import argparse
import collections
import sys
import time
import traceback

from benchmarks.timing import SETUPS, in_subprocess, markdown

_BATCH = 8
_HEADER = ["model", "layers", "wide", "mostly because", "drift", "bytes", "s"]

# KerasHub's backbones that consist of different kinds of layers.
_BACKBONES = (
    "BertBackbone",
    "DebertaV3Backbone",
    "GPT2Backbone",
    "BartBackbone",
    "T5Backbone",
    "LlamaBackbone",
    "GemmaBackbone",
    "MixtralBackbone",
    "ViTBackbone",
)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setup", choices=SETUPS, default="torch")
    parser.add_argument("--to", default="float16")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument(
        "--all", action="store_true", help="the larger applications too"
    )
    arguments = parser.parse_args()
    backend, _ = SETUPS[arguments.setup]
    names = arguments.only or in_subprocess(backend, _names, arguments.all)
    rows = []
    for name in names:
        rows.append([name, *_row(backend, name, arguments.to)])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(markdown(_HEADER, rows))


def convert(name, dtype):
    """Converts one model, and returns the cells of its row."""
    import keras

    from benchmarks.sweep_models import BACKBONES, batches, build
    from keras_mixprec import convert_for_inference

    keras.utils.set_random_seed(0)
    if name in BACKBONES:  # Convert a backbone without a head.
        import keras_hub

        model = getattr(keras_hub.models, name)(**BACKBONES[name])
    else:
        model = build(name)
    x, _ = batches(name, model, _BATCH)
    start = time.perf_counter()
    try:
        _, report = convert_for_inference(model, dtype, calibration=x)
    except ValueError as error:
        return ["-", "-", f"refused: {str(error)[:200]}", "-", "-", "-"]
    wide = report.wide_layers
    reasons = collections.Counter(
        # A finding begins with its kind and then names its layer. Only the
        # kind counts here.
        (report.plan.reasons.get(p) or "")
        .partition(" in '")[0]
        .partition(":")[0]
        for p in wide
    )
    (reason, _), *_ = reasons.most_common(1) or [("", 0)]
    return [
        str(len(report.layers)),
        str(len(wide)),
        reason,
        f"{max(row['relative'] for row in report.drift):.1e}",
        f"{report.size['after'] / report.size['before']:.1%}",
        f"{time.perf_counter() - start:.0f}",
    ]


def _row(backend, name, dtype):
    try:
        return in_subprocess(backend, convert, name, dtype)
    except Exception as error:  # The row shows any error.
        traceback.print_exc()
        return [f"{type(error).__name__}: {str(error)[:60]}"] + ["-"] * 5


def _names(larger):
    from benchmarks.sweep_models import BACKBONES, default_names, others

    chosen = [
        name
        for name in default_names()
        if name not in BACKBONES or name in _BACKBONES
    ]
    return chosen + (others() if larger else [])


if __name__ == "__main__":
    main()
