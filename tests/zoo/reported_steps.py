"""Train steps that fail in float16, in part as publicly reported.

Each model computes its loss by itself, with operations in the dtype of what
its layers return.
"""

import keras
from keras import layers, ops

from zoo.case import case, vectors
from zoo.own_step import OwnStep


def mlp(width, *units, name, **arguments):
    """Returns `hidden` and a last layer called `out`, to be built at once."""
    hidden = [
        layers.Dense(u, "relu", name=f"h{i}") for i, u in enumerate(units)
    ]
    last = layers.Dense(arguments.pop("outputs"), name="out", **arguments)
    return keras.Sequential([keras.Input((width,)), *hidden, last], name=name)


def share_equal(a, b):
    return ops.mean(ops.cast(ops.equal(a, b), "float32"))


class Distillation(OwnStep):
    """Cross entropy to a frozen teacher by log(softmax(x) + 1e-10)."""

    def __init__(self):
        super().__init__()
        self.teacher = mlp(32, 64, outputs=4, name="teacher")
        self.student = mlp(32, 32, outputs=4, name="student")
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def loss_of(self, x, y):
        wanted = ops.softmax(self.teacher(x))
        logits = self.student(x)
        told = self.log_probabilities(logits)
        told = ops.sum(ops.multiply(wanted, told), axis=-1)
        loss = -ops.mean(ops.cast(told, "float32"))
        same = share_equal(ops.argmax(wanted, -1), ops.argmax(logits, -1))
        return loss, {"accuracy": same}

    def log_probabilities(self, logits):
        return ops.log(ops.softmax(logits) + 1e-10)


# Reported of distillation: probabilities vanish, and so does the 1e-10.
@case(
    data=vectors(samples=1024, scale=12.0),
    culprits=frozenset({"student/out"}),
    kind="underflow",
    direction="forward",
    decoy="teacher/out",
    loss=None,
    batch_size=128,
    samples=128,
)
def distillation():
    return Distillation()


class Unscaled(OwnStep):
    """Hands the optimizer gradients of a loss that it did not scale."""

    def __init__(self):
        super().__init__()
        self.h1 = layers.Dense(32, "relu", name="h1")
        self.head = layers.Dense(4, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.h1(x))

    def scaled(self, loss):
        return loss

    def loss_of(self, x, y):
        logits = self(x, training=True)
        loss = ops.mean(
            keras.losses.sparse_categorical_crossentropy(y, logits, True)
        )
        right = ops.equal(ops.argmax(logits, axis=-1), ops.cast(y, "int32"))
        return loss, {"accuracy": ops.mean(ops.cast(right, "float32"))}


# Devised, of custom steps that forget `scale_loss`: 2**-15 of each step.
@case(
    data=vectors(samples=1024),
    loss=None,
    batch_size=128,
    samples=128,
    optimizer=lambda: keras.optimizers.SGD(0.1),
    kind="loss_scale_ignored",
    direction="backward",
    incurable=True,
)
def unscaled_loss():
    return Unscaled()
