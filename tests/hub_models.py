"""A small decoder of KerasHub that counts: the word behind 3 is 4.

Its words are unit vectors, attention adds nothing, and the feed-forward block
of the last layer adds the vector of the next word. So tokens do not hang by a
rounding, and a weight of one word's is used at the step that takes the word in.
"""

import keras
import keras_hub
import numpy as np

WORDS, LENGTH, WIDTH = 12, 8, 16
SETTINGS = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": WIDTH}
SETTINGS |= {"intermediate_dim": 2 * WIDTH, "num_heads": 2}
SETTINGS |= {"max_sequence_length": LENGTH}
BLOCK = "transformer_layer_1"
_INTO = f"{BLOCK}/feedforward_intermediate_dense/kernel"
_OUT = f"{BLOCK}/feedforward_output_dense/kernel"


def made():
    backbone = keras_hub.models.GPT2Backbone(**SETTINGS)
    for variable in backbone.weights:
        path, shape = variable.path, variable.shape
        if "token_embedding/" in path or path == _INTO:
            variable.assign(np.eye(*shape))
        elif path == _OUT:
            variable.assign(np.eye(*shape, k=1))
        elif _is_added(path):
            variable.assign(np.zeros(shape))
    return keras_hub.models.GPT2CausalLM(backbone)


def made_large():
    """One whose last block overflows float16 by the word of the third step.

    It takes 1, 2 and 3 in at once, then 3, then 4.
    """
    model = made()
    # A normalized unit vector is about 4: 4 * 3e4 is beyond 65504.
    factors = {_INTO: 3e4, _OUT: 1e-3}
    for variable in model.backbone.weights:
        if variable.path in factors:
            value = np.array(keras.ops.convert_to_numpy(variable))
            value[4] *= factors[variable.path]
            variable.assign(value)
    return model


def inputs():
    """The words 1, 2 and 3, and room for more, as a model takes them."""
    ids = np.zeros((2, LENGTH), "int32")
    ids[:, :3] = 1, 2, 3
    return {"token_ids": ids, "padding_mask": (ids > 0).astype("int32")}


def generate(model, x):
    model.compile(sampler="greedy")
    found = model.generate(dict(x), stop_token_ids=None)
    return keras.ops.convert_to_numpy(found["token_ids"])


def _is_added(path):
    """Returns True if a weight writes into the residual stream."""
    written = "attention_output", "output_dense", "position_embedding"
    return any(name in path for name in written)
