"""Measures the gains of training in 16 bits, with `compare_precisions`.

Four Dense(2048) layers and a transformer block learn the outputs of a teacher:
in float32, with policies, with the plan of a tuner, with TensorFlow's graph
rewrite, and with our callbacks. Each arm has its own process, to measure its
peak memory. The arms take turns on the same batches from the same weights. The
float16 arm runs for seven steps of one seed only, because a CPU may take 100
times as long in float16.

    python benchmarks/precision_gain.py
    python benchmarks/precision_gain.py --setups torch --models "4 Dense(2048)"
"""

import functools
import importlib
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    SETUPS,
    argument_parser,
    in_subprocess,
    markdown,
)

# The batch size, and the shape of a sample at full width.
DENSE = "4 Dense(2048)"
MODELS = {DENSE: (256, (2048,)), "transformer block": (16, (128, 1024))}
TINY = 64

POLICIES = [
    "float32",
    "mixed_bfloat16",
    "mixed_bfloat16+monitor",
    "mixed_bfloat16+monitor+tuner",
]
HEADER = ["backend", "model", "policy", "ms a step", "times as fast"]
HEADER += ["peak, MiB", "loss", "verdict", "FLOPs in 16 bits"]


def measure(jit_compile, name, steps, blocks, seeds, tiny):
    """Returns a model's rows, one per policy, and the device and versions."""
    import keras

    import keras_mixprec as kmp

    batch, shape = MODELS[name]
    shape = (*shape[:-1], shape[-1] // TINY if tiny else shape[-1])
    # The other processes import this module by its full name, so the functions
    # must come from the module of that name, not from `__main__`.
    module = importlib.import_module("benchmarks.precision_gain")
    build = functools.partial(module.build, name, shape, jit_compile)
    data = _data(4 * batch, shape)
    policies = {policy: policy for policy in POLICIES}
    policies["plan of the tuner"] = _tuned(build, data, batch)
    if keras.backend.backend() == "tensorflow" and not jit_compile:
        rewrite = "float32+graph_rewrite_bfloat16"
        policies["graph rewrite, bfloat16"] = rewrite
    compare = functools.partial(
        kmp.compare_precisions,
        build,
        data,
        batch_size=batch,
        isolate=True,
        verbose=0,
    )
    result = compare(policies, steps=steps, blocks=blocks, seeds=seeds)
    print(result, file=sys.stderr)
    # Seven blocks give six pairs, the minimum to tell which arm is faster.
    slow = compare(("float32", "mixed_float16"), steps=7, blocks=7, seeds=1)
    record = result.record
    versions = [f"{x} {record['versions'][x]}" for x in (record["backend"],)]
    versions.append(f"keras {record['versions']['keras']}")
    place = ", ".join([record["device"], *versions])
    return [_cells(row) for row in (*result.rows, slow.rows[-1])], place


def build(name, shape, jit_compile):
    """Returns the compiled model."""
    import keras

    inputs = keras.Input(shape)
    outputs = _dense(inputs) if name == DENSE else _block(inputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adam(1e-4)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    return model


def _dense(x):
    from keras import layers

    width = x.shape[-1]
    for _ in range(3):
        x = layers.Dense(width, "relu", kernel_initializer="he_normal")(x)
    return layers.Dense(width)(x)


def _block(x):
    from keras import layers

    from benchmarks.models import SelfAttention

    width = x.shape[-1]
    x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
    y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


def _data(rows, shape):
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(rows, *shape)).astype("float32")
    teacher = random.normal(size=(shape[-1], shape[-1])) / shape[-1] ** 0.5
    return x, np.tanh(x @ teacher).astype("float32")


def _tuned(build, data, batch):
    """Returns the tuner's plan after an epoch under mixed_bfloat16."""
    import keras_mixprec as kmp

    with kmp.policy_scope("mixed_bfloat16"):
        model = build()
    with tempfile.TemporaryDirectory() as folder:
        tuner = kmp.PrecisionTuner(f"{folder}/plan.json", verbose=0)
        model.fit(*data, batch, callbacks=[tuner], verbose=0)
    return tuner.plan


def _cells(row):
    if row["status"] == "failed":
        return [row["name"], *[""] * 4, f"failed: {row['why']}", ""]
    speed, memory = row["speed"], row["memory_bytes"]
    share = row["share_of_flops_16bit"]
    return [
        row["name"],
        f"{1e3 * row['step_seconds']:.1f}",
        f"{speed['estimate']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})",
        f"{memory / 2**20:.0f}" if memory else "",
        f"{row['metric']:.5f}",
        row["verdict"],
        "" if share is None else f"{share:.0%}",
    ]


def main():
    """Prints the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="to try it out")
    given = parser.parse_args()
    rest = given.steps, given.blocks, given.seeds, given.tiny
    table, places = [], {}
    for setup in given.setups:
        backend, jit_compile = SETUPS[setup]
        for name in given.models:
            rows, place = in_subprocess(
                backend, measure, jit_compile, name, *rest
            )
            places[place] = None
            table += [[setup, name, *row] for row in rows]
    print(markdown(HEADER, table))
    print(f"\n{'; '.join(places)}.")


if __name__ == "__main__":
    main()
