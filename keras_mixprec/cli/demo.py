"""The first real run: handwritten digits in float16, and in float32."""

import sys
import time
from typing import NamedTuple

import keras
from sklearn.datasets import load_digits

from keras_mixprec._checks import check_integer
from keras_mixprec.callbacks.monitor import MixPrecMonitor
from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.apply import apply_policy

TRAINING_IMAGES = 1437

# More than these gradients allow in float16, so that the log has something to
# show: the scale comes down by skipped steps, and feels its way up again.
SCALE_SEARCH = DynamicLossScale(initial_scale=2.0**24, growth_interval=50)


class DemoRun(NamedTuple):
    """How one training run of the demo went.

    Attributes:
        accuracy: Float. Share of the test images it gets right.
        seconds: Float. Time of `fit`, compilation included.
        skipped: Int. Steps skipped.
    """

    accuracy: float
    seconds: float
    skipped: int


def run_demo(
    epochs: int = 8, log_dir: str = "logs", seed: int = 0
) -> dict[str, DemoRun]:
    """Trains a small convolutional network in float16 and in float32.

    The images are scikit-learn's 1797 handwritten digits, which come with
    that package. Prints progress, the monitor's summary, both accuracies and
    where the log is.

    Args:
        epochs: Int >= 1. Defaults to `8`.
        log_dir: String. Where `MixPrecMonitor` writes. Defaults to `"logs"`.
        seed: Int >= 0. Both runs start from it. Defaults to `0`.

    Returns:
        Dict policy name -> `DemoRun`.

    Raises:
        TypeError: If a number is none.
        ValueError: If a number is outside its range.
        OSError: If `log_dir` cannot be written to.

    Example:
    >>> import tempfile
    >>> from keras_mixprec.cli.demo import run_demo
    >>> runs = run_demo(epochs=1, log_dir=tempfile.mkdtemp())
    ... # doctest: +ELLIPSIS
    Training on 1437 images of digits in mixed_float16 ...
    >>> runs["mixed_float16"].accuracy > 0.5, runs["float32"].accuracy > 0.5
    (True, True)
    """
    check_integer("epochs", epochs, low=1)
    check_integer("seed", seed)
    print(
        f"Training on {TRAINING_IMAGES} images of digits in mixed_float16 on "
        f"{keras.backend.backend()}.\nThe loss scale starts at 2**24, too "
        "high on purpose: steps whose gradients overflow are skipped and "
        "halve it until they fit. That is normal."
    )
    # The first reading of ranges compiles on JAX, which takes 35% of the first
    # step: by default that is withheld in a run of seconds on a slow machine.
    monitor = MixPrecMonitor(log_dir, update_freq=1, max_overhead=0.4)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), SCALE_SEARCH)
    runs = {
        "mixed_float16": _train(
            "mixed_float16", optimizer, epochs, seed, [monitor]
        )
    }
    print("\nThe same model from the same seed in float32:")
    runs["float32"] = _train(
        "float32", keras.optimizers.Adam(), epochs, seed, []
    )
    print(f"\n{_table(runs)}\n\nTo see the log: tensorboard --logdir {log_dir}")
    return runs


def build_model() -> keras.Model:
    """Returns a small convolutional network for 8 x 8 images of digits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            # 360 steps are too few for the default momentum of 0.99.
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def load_images():
    """Returns the training images and labels, then those for testing."""
    digits = load_digits()
    images = (digits.images[..., None] / 16.0).astype("float32")
    n = TRAINING_IMAGES
    return (images[:n], digits.target[:n]), (images[n:], digits.target[n:])


def _train(policy, optimizer, epochs, seed, callbacks):
    keras.utils.set_random_seed(seed)
    train, test = load_images()
    model = build_model()
    apply_policy(model, policy)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    started = time.perf_counter()
    # A progress bar in a file would be a line per update.
    verbose = 1 if sys.stdout.isatty() else 2
    model.fit(*train, epochs=epochs, verbose=verbose, callbacks=callbacks)
    seconds = time.perf_counter() - started
    accuracy = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
    return DemoRun(accuracy, seconds, getattr(optimizer, "skipped_steps", 0))


def _table(runs):
    lines = [f"{'policy':15}{'test accuracy':>15}{'skipped':>9}{'time':>9}"]
    lines += [
        f"{policy:15}{run.accuracy:15.1%}{run.skipped:9}{run.seconds:7.1f} s"
        for policy, run in runs.items()
    ]
    return "\n".join(lines)
