"""Compares the diagnosis before the first step with the first step itself.

In each round, a new process builds a mixed_float16 model with random weights.
It times the first train step and a diagnosis of the same batch, in alternating
order. Both times include compilation. The plain step is the median of some
later steps. Caches of compiled programs on disk are off. The columns are
medians over the rounds: first the seconds, then the ratios of the diagnosis to
the first step and to the plain step.

    python benchmarks/first_diagnosis.py
    python benchmarks/first_diagnosis.py --setups torch --models transformer
    python benchmarks/first_diagnosis.py --setups jax --rounds 1 --profile
"""

import cProfile
import pathlib
import pstats
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    argument_parser,
    in_subprocess,
    print_table,
)

MODELS = ("resnet50", "transformer", "efficientnetv2")

# The batch size, and the side of an image in pixels. They are small
# enough for a CPU to train within a minute.
_BATCH, _PIXELS = 16, 64
_CLASSES, _TOKENS, _WIDTH, _BLOCKS = 10, 64, 128, 12


def measure(jit_compile, name, rounds, steps, profile):
    """Returns the table cells of one model on the active backend."""
    import keras

    backend = keras.backend.backend()
    runs = [
        in_subprocess(
            backend, _run, jit_compile, name, turn % 2, steps, profile
        )
        for turn in range(rounds)
    ]
    diagnosis, first, plain = zip(*runs, strict=True)
    columns = [diagnosis, first, plain]
    columns += [_ratios(diagnosis, first), _ratios(diagnosis, plain)]
    return [f"{statistics.median(column):.2f}" for column in columns]


def _ratios(seconds, base):
    return [s / b for s, b in zip(seconds, base, strict=True)]


def _run(jit_compile, name, diagnosis_first, steps, profile):
    """Returns the seconds of a diagnosis, a first step and a later step."""
    import keras

    import keras_mixprec as kmp

    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
    model, x, y = _compiled(name, jit_compile)

    def diagnose():
        found = kmp.diagnose(model, x, y)
        if found:
            print(*found, sep="\n", file=sys.stderr)

    def step():
        model.fit(x, y, _BATCH, verbose=0)

    seconds = {}
    for work in (diagnose, step) if diagnosis_first else (step, diagnose):
        if profile and work is diagnose:
            seconds[work] = _profiled(work)
        else:
            seconds[work] = _timed(work)
    plain = [_timed(step) for _ in range(steps)]
    return seconds[diagnose], seconds[step], statistics.median(plain)


def _timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _profiled(work):
    profiler = cProfile.Profile()
    start = time.perf_counter()
    profiler.runcall(work)
    seconds = time.perf_counter() - start
    stats = pstats.Stats(profiler, stream=sys.stderr)
    stats.sort_stats("cumulative").print_stats(70)
    return seconds


def _compiled(name, jit_compile):
    import keras
    import numpy as np

    import keras_mixprec as kmp

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = {
        "resnet50": _resnet50,
        "transformer": _transformer,
        "efficientnetv2": _efficientnetv2,
    }[name]()
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        jit_compile=jit_compile,
    )
    random = np.random.default_rng(0)
    shape = (_BATCH, *model.input_shape[1:])
    if name == "transformer":
        x = random.integers(0, 1000, size=shape)
    else:
        x = random.uniform(0, 255, size=shape).astype("float32")
    return model, x, random.integers(0, _CLASSES, size=_BATCH)


def _resnet50():
    from benchmarks.models import resnet50

    return resnet50(_PIXELS, _CLASSES)


def _efficientnetv2():
    import keras

    return keras.applications.EfficientNetV2B0(
        weights=None, input_shape=(_PIXELS, _PIXELS, 3), classes=_CLASSES
    )


def _transformer():
    from benchmarks.models import token_transformer

    return token_transformer(_BLOCKS, _TOKENS, _WIDTH, 1000, _CLASSES)


def main():
    """Prints the table."""
    parser = argument_parser(__doc__, rounds=6, steps=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    print_table(
        [
            "diagnosis, s",
            "first step, s",
            "plain step, s",
            "diagnosis : first step",
            "in plain steps",
        ],
        arguments.setups,
        {name: name for name in arguments.models},
        measure,
        arguments.rounds,
        arguments.steps,
        arguments.profile,
    )


if __name__ == "__main__":
    main()
