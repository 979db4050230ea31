"""The demo: training finds and repairs a layer that overflows float16."""

import math
import pathlib
import webbrowser
from typing import NamedTuple

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

from keras_mixprec._checks import check_integer
from keras_mixprec.callbacks.monitor import MixPrecMonitor
from keras_mixprec.callbacks.tuner import PrecisionTuner
from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.formats import format_share, text_table
from keras_mixprec.policies.summary import precision_summary

TRAINING_IMAGES = 1437
_BATCH = 32

# The maximum drop in accuracy from float32 to the repaired run. Runs in float32
# with different seeds differ by up to 3 points on the 360 test images.
_TOLERANCE = 0.05


class DemoRun(NamedTuple):
    """The result of one training run.

    Attributes:
        accuracy: Float. Share of the test images that are classified correctly.
        loss: Float. The loss of the last epoch.
        steps: Int. Number of steps, including skipped steps.
        skipped: Int. Number of skipped steps.
        wide: List of strings, the layers that compute in float32.
        share: Float. Share of the FLOPs in 16 bits.
    """

    accuracy: float
    loss: float
    steps: int
    skipped: int
    wide: list
    share: float


@keras.saving.register_keras_serializable("keras_mixprec")
class ResponseNorm(layers.Layer):
    """Scales each channel by its strength relative to the other channels.

    A hand-written global response normalization of ConvNeXt V2 (arXiv
    2301.00808). The layer sums squares over images of 8 x 8 pixels. For numbers
    above 32, the sum exceeds 65504, the largest number in float16.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = None

    def build(self, input_shape):
        """Creates a scale for each channel."""
        shape = (input_shape[-1],)
        self.scale = self.add_weight(shape, "ones", name="scale")

    def call(self, inputs):
        """Returns the normalized `inputs`."""
        squares = ops.sum(inputs * inputs, axis=(1, 2), keepdims=True)
        strength = ops.sqrt(squares + 1e-6)
        mean = ops.mean(strength, axis=-1, keepdims=True)
        return inputs + self.scale * inputs * strength / (mean + 1e-6)


def run_demo(
    epochs: int = 6, log_dir: str = "logs", show: bool = False
) -> dict[str, DemoRun]:
    """Trains a network in float32, in float16, and in float16 with repairs.

    The network has a hand-written normalization layer, which overflows float16.
    The second run uses Keras alone. The third run uses `MixPrecMonitor` and
    `PrecisionTuner`. The data are the 1797 images of handwritten digits that
    come with scikit-learn.

    Args:
        epochs: Int >= 1. Defaults to `6`.
        log_dir: String. Folder for the log. Defaults to `"logs"`.
        show: Boolean. If `True`, opens the report in a browser. Defaults to
            `False`.

    Returns:
        Dict from `"float32"`, `"float16"` and `"repaired"` to `DemoRun`.

    Raises:
        TypeError: If `epochs` is not an integer.
        ValueError: If `epochs` is below 1.
        OSError: If `log_dir` cannot be written to.

    Example:
    >>> import tempfile
    >>> from keras_mixprec.cli.demo import run_demo
    >>> runs = run_demo(epochs=3, log_dir=tempfile.mkdtemp())
    ... # doctest: +ELLIPSIS
    Handwritten digits, ...
    >>> runs["float16"].accuracy < 0.3 < runs["repaired"].accuracy
    True
    >>> runs["repaired"].wide
    ['response_norm', 'logits']
    """
    check_integer("epochs", epochs, low=1)
    page = pathlib.Path(log_dir, "report.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"Handwritten digits, {TRAINING_IMAGES} images, {epochs} epochs, on "
        f"{keras.backend.backend()}. A small network with a custom "
        "normalization layer."
    )
    runs = {}
    runs["float32"] = _train("float32", epochs)
    _say("float32", runs["float32"])
    runs["float16"] = _train("mixed_float16", epochs)
    _say("mixed_float16, Keras alone", runs["float16"])
    print("\nmixed_float16 with MixPrecMonitor and PrecisionTuner:")
    monitor = MixPrecMonitor(log_dir)
    callbacks = [monitor, PrecisionTuner()]
    runs["repaired"] = _train("mixed_float16", epochs, callbacks)
    print(f"\n{_table(runs)}\n")
    monitor.report.save_html(page)
    print(f"Report on this run: {page}\nOr run: tensorboard --logdir {log_dir}")
    if show:
        webbrowser.open(page.resolve().as_uri())
    return runs


def shortfall(runs: dict[str, DemoRun]) -> str | None:
    """Returns a sentence if the repair has failed, else `None`.

    Args:
        runs: The result of `run_demo`.
    """
    exact, repaired = runs["float32"].accuracy, runs["repaired"].accuracy
    if not math.isfinite(runs["float32"].loss):
        return "float32 fails as well, so there was nothing to repair"
    if exact - repaired <= _TOLERANCE:
        return None
    return (
        f"The repaired run has an accuracy of {repaired:.1%}, which is not "
        f"within {_TOLERANCE:.0%} of float32's {exact:.1%}"
    )


def build_model(policy: str = "float32") -> keras.Model:
    """Returns a small convolutional network for 8 x 8 images, compiled.

    Args:
        policy: String, the dtype policy. Defaults to `"float32"`.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                ResponseNorm(name="response_norm"),
                # The demo trains for 270 steps, which are too few for the
                # default momentum of 0.99.
                layers.BatchNormalization(momentum=0.9),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10, dtype="float32", name="logits"),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def load_images():
    """Returns the training images and labels, then the test images and labels.

    Pixels range from 0 to 255, as in image files.
    """
    digits = load_digits()
    images = (digits.images[..., None] / 16.0 * 255.0).astype("float32")
    n = TRAINING_IMAGES
    return (images[:n], digits.target[:n]), (images[n:], digits.target[n:])


def _train(policy, epochs, callbacks=()):
    keras.utils.set_random_seed(0)
    train, test = load_images()
    model = build_model(policy)
    history = model.fit(
        *train, _BATCH, epochs, verbose=0, callbacks=[*callbacks]
    ).history
    optimizer, steps = model.optimizer, epochs * -(-TRAINING_IMAGES // _BATCH)
    # Keras' own `LossScaleOptimizer` does not count skipped steps, so subtract
    # the number of applied steps from the number of all steps.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rows = precision_summary(model).to_list()
    return DemoRun(
        model.evaluate(*test, verbose=0, return_dict=True)["accuracy"],
        history["loss"][-1],
        steps,
        steps - int(keras.ops.convert_to_numpy(inner.iterations)),
        [r["path"] for r in rows if r["compute_dtype"] == "float32"],
        share_in_16_bits(rows) or 0.0,
    )


def _say(what, run):
    print(
        f"{what}: training loss {run.loss:.3g}, test accuracy "
        f"{run.accuracy:.1%}, {run.skipped} of {run.steps} steps skipped"
    )


def _table(runs):
    names = {
        "float32": "float32",
        "float16": "float16, Keras alone",
        "repaired": "float16 with the tuner",
    }
    rows = [("", "accuracy", "skipped", "float32 layers", "FLOPs in 16 bits")]
    for name, run in runs.items():
        numbers = f"{run.accuracy:.1%}", str(run.skipped), str(len(run.wide))
        rows.append((names[name], *numbers, format_share(run.share)))
    return "\n".join(text_table(rows))
