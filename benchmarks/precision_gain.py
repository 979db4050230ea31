"""What 16 bits bring in training, by `compare_precisions`: the README's table.

Four Dense(2048) and a transformer block learn a teacher's outputs: in float32,
under policies, under the plan that a tuner wrote, with TensorFlow's graph
rewrite, and with our callbacks on. All arms of a backend take turns in one
process, on the same batches and from the same weights.

    python benchmarks/precision_gain.py
    python benchmarks/precision_gain.py --setups torch --models "4 Dense(2048)"
"""

import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    SETUPS,
    argument_parser,
    in_subprocess,
    markdown,
)

# Name: samples of a batch.
MODELS = {"4 Dense(2048)": 256, "transformer block": 16}
TINY, WIDTH, LENGTH = 16, 2048, 128

HEADER = ["backend", "model", "policy", "ms a step", "times as fast"]
HEADER += ["peak, MiB", "loss", "FLOPs in 16 bits"]

POLICIES = [
    "float32",
    "mixed_bfloat16",
    "mixed_bfloat16+monitor",
    "mixed_bfloat16+monitor+tuner",
    "mixed_float16",
]


def measure(jit_compile, name, steps, seeds, tiny):
    """Returns the cells of a model: one line for each arm, in each of them."""
    import keras

    import keras_mixprec as kmp

    width = TINY if tiny else WIDTH
    build, data = _training(name, jit_compile, width)
    policies = {policy: policy for policy in POLICIES}
    policies["tuned plan"] = _tuned(build, data)
    if keras.backend.backend() == "tensorflow" and not jit_compile:
        rewrite = "float32+graph_rewrite_bfloat16"
        policies["graph rewrite"] = rewrite
    result = kmp.compare_precisions(
        build,
        data,
        policies,
        steps=steps,
        seeds=seeds,
        batch_size=MODELS[name],
        verbose=0,
    )
    record = result.to_dict()["record"]
    rows = [_cells(arm, record["arms"][0]) for arm in record["arms"]]
    versions = {n: record["versions"][n] for n in (record["backend"], "keras")}
    return rows, f"{record['device']}, {_words(versions)}"


def _training(name, jit_compile, width):
    """A function that builds the model, and four batches for it."""
    import keras
    import numpy as np

    rows = MODELS[name]
    dense = name == "4 Dense(2048)"
    shape = (width,) if dense else (LENGTH, width // 2)
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * rows, *shape)).astype("float32")
    teacher = random.normal(size=(shape[-1], shape[-1])) / shape[-1] ** 0.5
    y = np.tanh(x @ teacher).astype("float32")

    def build():
        inputs = keras.Input(shape)
        outputs = _dense(inputs) if dense else _block(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(1e-4), loss="mse", jit_compile=jit_compile
        )
        return model

    return build, (x, y)


def _dense(x):
    from keras import layers

    width = x.shape[-1]
    for _ in range(3):
        x = layers.Dense(width, "relu", kernel_initializer="he_normal")(x)
    return layers.Dense(width, dtype="float32")(x)


def _block(x):
    from keras import layers

    from benchmarks.models import SelfAttention

    width = x.shape[-1]
    x = layers.Add()([x, SelfAttention()(layers.LayerNormalization()(x))])
    y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(width)(y)])
    return layers.Dense(width, dtype="float32")(x)


def _tuned(build, data):
    """The plan of a tuner after some steps under mixed_bfloat16."""
    import keras_mixprec as kmp

    with kmp.policy_scope("mixed_bfloat16"):
        model = build()
    with tempfile.TemporaryDirectory() as folder:
        tuner = kmp.PrecisionTuner(f"{folder}/plan.json", verbose=0)
        model.fit(*data, len(data[0]) // 4, callbacks=[tuner], verbose=0)
    return tuner.plan


def _words(versions):
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _cells(arm, first):
    if arm["status"] == "failed":
        return [arm["name"], arm["error"], "", "", "", ""]
    seconds = arm["step_seconds"]
    pairs = zip(first["step_seconds"], seconds, strict=True)
    ratios = sorted(base / own for base, own in pairs)
    share, memory = arm["share_of_flops_16bit"], arm["memory"]
    metric = statistics.mean(seed["metric"] for seed in arm["seeds"])
    return [
        arm["name"],
        f"{1e3 * statistics.median(seconds):.1f}",
        f"{statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
        f"{memory['peak_bytes'] / 2**20:.0f}" if memory else "",
        f"{metric:.5f}",
        "" if share is None else f"{share:.0%}",
    ]


def main():
    """Prints the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="to try it out")
    given = parser.parse_args()
    rest = given.steps, given.seeds, given.tiny
    table, places = [], {}
    for setup in given.setups:
        backend, jit_compile = SETUPS[setup]
        for name in given.models:
            rows, place = in_subprocess(
                backend, measure, jit_compile, name, *rest
            )
            places[place] = None
            table += [[setup, name, *row] for row in rows]
            print(markdown(HEADER, table), file=sys.stderr, flush=True)
    print(markdown(HEADER, table))
    print(f"\n{'; '.join(places)}.")


if __name__ == "__main__":
    main()
