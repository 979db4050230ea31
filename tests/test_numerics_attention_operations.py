"""Attention in float16 is looked into operation by operation."""

import keras
import numpy as np

from keras_mixprec.numerics.layer_replay import cause_of_nonfinite

QUERY = np.random.default_rng(0).normal(size=(1, 4, 2, 8))


def attention(tensors):
    return [keras.ops.dot_product_attention(*tensors)]


def test_the_products_of_it_run_one_by_one():
    # On JAX one of them asks for a kind that CPUs do not have.
    tensors = [keras.ops.convert_to_tensor(QUERY, "float16")] * 3
    assert cause_of_nonfinite(attention, tensors) is None
