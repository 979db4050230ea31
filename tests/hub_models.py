"""Small decoders of KerasHub that count: the word behind 3 is 4, of each.

Their words are unit vectors, attention adds nothing, and the feed-forward block
of the last layer adds the vector of the next word. So tokens do not hang by a
rounding, and a weight of one word's is used at the step that takes the word in.
"""

from typing import NamedTuple

import keras
import keras_hub
import numpy as np

WORDS, LENGTH, WIDTH = 12, 8, 16
_SIZES = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": WIDTH}
_SIZES |= {"intermediate_dim": 2 * WIDTH, "num_heads": 2}


class Decoder(NamedTuple):
    """A backbone, the task for it, and the parts of its last block."""

    backbone: str
    settings: dict
    task: str
    block: str
    into: str
    out: str
    gate: str | None = None

    def made(self):
        models = keras_hub.models
        backbone = getattr(models, self.backbone)(**self.settings)
        kernel = f"{self.block}/{{}}/kernel".format
        units = kernel(self.into), kernel(self.gate)
        for variable in backbone.weights:
            path, shape = variable.path, variable.shape
            if "token_embedding/" in path or path in units:
                variable.assign(np.eye(*shape))
            elif path == kernel(self.out):
                variable.assign(np.eye(*shape, k=1))
            elif _is_added(path):
                variable.assign(np.zeros(shape))
        return getattr(models, self.task)(backbone)

    def made_large(self):
        """One whose block overflows float16 by the word of the third step.

        A task takes 1, 2 and 3 in at once, then 3, then 4.
        """
        model = self.made()
        # A normalized unit vector is about 4: 4 * 3e4 is beyond 65504.
        factors = {self.into: 3e4, self.gate: 1e-2, self.out: 1e-3}
        for name, factor in factors.items():
            for variable in model.backbone.weights:
                if variable.path == f"{self.block}/{name}/kernel":
                    value = np.array(keras.ops.convert_to_numpy(variable))
                    value[4] *= factor
                    variable.assign(value)
        return model


DECODERS = {
    "gpt2": Decoder(
        "GPT2Backbone",
        _SIZES | {"max_sequence_length": LENGTH},
        "GPT2CausalLM",
        "transformer_layer_1",
        "feedforward_intermediate_dense",
        "feedforward_output_dense",
    ),
    "t5": Decoder(
        "T5Backbone",
        _SIZES,
        "T5Seq2SeqLM",
        "transformer_decoder_layer_1",
        "gate_projector",
        "output_projector",
        "input_projector",
    ),
}


def inputs(name):
    """The words 1, 2 and 3, and room for more, as a model takes them."""
    if name == "t5":
        return _prompt("encoder_") | _prompt("decoder_")
    return _prompt("")


def generate(model, x):
    model.compile(sampler="greedy")
    found = model.generate(dict(x), stop_token_ids=None)
    found = found.get("token_ids", found.get("decoder_token_ids"))
    return keras.ops.convert_to_numpy(found)


def _prompt(prefix):
    ids = np.zeros((2, LENGTH), "int32")
    ids[:, :3] = 1, 2, 3
    mask = (ids > 0).astype("int32")
    return {f"{prefix}token_ids": ids, f"{prefix}padding_mask": mask}


def _is_added(path):
    """Whether a weight writes into the sum that goes through all layers."""
    written = "attention_output", "output_projector", "output_dense"
    return any(name in path for name in (*written, "position_embedding"))
