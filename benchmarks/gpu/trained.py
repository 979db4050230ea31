"""The compiled models that are compared, and their random data.

Functions without arguments, which other processes can import. The data are two
batches. Larger batches repeat their samples.
"""

import keras
import numpy as np

from benchmarks import models

_PIXELS, _CLASSES = 224, 1000
_SEGMENTED, _KINDS = 256, 21
_TOKENS, _VOCABULARY = 512, 30_000

# Samples of a batch; each fits into memory in float32 too.
BATCHES = {"resnet50": 128, "transformer": 32, "unet": 16, "tiny": 4}

# The throughput of this model is also given in tokens.
TOKENS = {"transformer": _TOKENS}


def resnet50():
    """Returns Keras' ResNet50."""
    return _compiled(models.resnet50(_PIXELS, _CLASSES))


def resnet50_data():
    x = _images(2 * BATCHES["resnet50"], _PIXELS)
    return x, _numbers(_CLASSES, len(x))


def transformer():
    """Returns a transformer of 12 layers, 768 wide, with 12 heads."""
    return _compiled(
        models.token_transformer(12, _TOKENS, 768, _VOCABULARY, 2, heads=12)
    )


def transformer_data():
    x = _numbers(_VOCABULARY, 2 * BATCHES["transformer"], _TOKENS)
    return x, _numbers(2, len(x))


def unet():
    """Returns a U-Net of five levels, 64 to 1024 wide."""
    widths = 64, 128, 256, 512, 1024
    return _compiled(models.unet(_SEGMENTED, widths, _KINDS))


def unet_data():
    x = _images(2 * BATCHES["unet"], _SEGMENTED)
    return x, _numbers(_KINDS, *x.shape[:3])


def tiny():
    """Returns a transformer of one layer."""
    return _compiled(models.token_transformer(1, 4, 8, 10, 2))


def tiny_data():
    x = _numbers(10, 2 * BATCHES["tiny"], 4)
    return x, _numbers(2, len(x))


def _compiled(model):
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(),
    )
    return model


def _images(count, pixels):
    random = np.random.default_rng(0)
    return random.random((count, pixels, pixels, 3), dtype="float32")


def _numbers(below, *shape):
    return np.random.default_rng(0).integers(0, below, shape, dtype="int32")
