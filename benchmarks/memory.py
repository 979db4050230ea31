"""Prints the memory of a train step, as reported and as computed by hand.

Usage: KERAS_BACKEND=jax python benchmarks/memory.py [POLICY ...]

Each policy has its own process. The model has 16 layers `Dense(256, "tanh")`
without bias, Adam and a batch of 8,192, so the memory of a step is known.
`process` is the peak memory of the whole process, and `before` is the memory
before the model was created.
"""

import os
import subprocess
import sys

ROWS, WIDTH, DEPTH = 8192, 256, 16
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def on_paper(size):
    """Returns the bytes of a step, if an activation takes `size` bytes."""
    weights = 4 * DEPTH * WIDTH * WIDTH
    numbers = ROWS * WIDTH
    # The sum counts the weights, Adam's two slots and the gradients; `x` and
    # `y`; each layer's output; and the gradient of one output.
    return 4 * weights + 2 * 4 * numbers + (DEPTH + 1) * size * numbers


def measure(policy):
    import keras
    import numpy as np

    from keras_mixprec.devices.memory import memory_record, peak_bytes

    before = peak_bytes()[0]
    keras.config.set_dtype_policy(policy)
    layer = {"units": WIDTH, "activation": "tanh", "use_bias": False}
    layers = [keras.layers.Dense(**layer) for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("adam", "mse", jit_compile=keras.backend.backend() != "torch")
    batch = (np.zeros((ROWS, WIDTH), "float32"),) * 2
    for _ in range(3):
        model.train_on_batch(*batch)
    process = peak_bytes()[0]
    record = memory_record(model, batch)
    reported = "-"
    if record["measured_by"] != "process":
        reported = f"{record['peak_bytes'] / 2**20:.1f}"
    size = 4 if policy == "float32" else 2
    cells = [
        keras.backend.backend(),
        policy,
        f"{on_paper(size) / 2**20:.1f}",
        reported,
        record["measured_by"],
        f"{process / 2**20:.0f}",
        f"{before / 2**20:.0f}",
    ]
    print("|", " | ".join(cells), "|", flush=True)


def main(policies):
    names = "backend", "policy", "on paper", "reported", "by", "process"
    print("|", " | ".join([*names, "before"]), "|", flush=True)
    print("|", " | ".join(["---"] * 7), "|", flush=True)
    for policy in policies:
        os.environ["BENCHMARKED_POLICY"] = policy
        subprocess.run([sys.executable, __file__], check=True)


if __name__ == "__main__":
    if policy := os.environ.get("BENCHMARKED_POLICY"):
        measure(policy)
    else:
        main(sys.argv[1:] or POLICIES)
