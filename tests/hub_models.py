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
_SIZES |= {"intermediate_dim": 2 * WIDTH}
_HEADS = _SIZES | {"num_heads": 2}
_QUERIES = _SIZES | {"num_query_heads": 2, "num_key_value_heads": 1}
_SOUND = {"num_mels": 4, "max_encoder_sequence_length": 2 * LENGTH}


class Decoder(NamedTuple):
    """A backbone, the task for it, and the parts of its last block."""

    backbone: str
    settings: dict
    task: str | None
    block: str
    into: str
    out: str
    gate: str | None = None

    def made(self):
        """The task, or the backbone where KerasHub has none that generates."""
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
        return getattr(models, self.task)(backbone) if self.task else backbone

    def made_large(self):
        """One whose block overflows float16 by the word of the third step.

        A task takes 1, 2 and 3 in at once, then 3, then 4; the loop 3, 4, 5.
        """
        word = 4 if self.task else 5
        model = self.made()
        backbone = getattr(model, "backbone", model)
        # A normalized unit vector is about 4: 4 * 3e4 is beyond 65504.
        factors = {self.into: 3e4, self.gate: 1e-2, self.out: 1e-3}
        for name, factor in factors.items():
            for variable in backbone.weights:
                if variable.path == f"{self.block}/{name}/kernel":
                    value = np.array(keras.ops.convert_to_numpy(variable))
                    value[word] *= factor
                    variable.assign(value)
        return model


_DENSE = "feedforward_intermediate_dense", "feedforward_output_dense"

DECODERS = {
    "gpt2": Decoder(
        "GPT2Backbone",
        _HEADS | {"max_sequence_length": LENGTH},
        "GPT2CausalLM",
        "transformer_layer_1",
        *_DENSE,
    ),
    "llama": Decoder(
        "LlamaBackbone",
        _QUERIES,
        "LlamaCausalLM",
        "transformer_layer_1",
        *_DENSE,
        "feedforward_gate_dense",
    ),
    "gemma": Decoder(
        "GemmaBackbone",
        _QUERIES | {"head_dim": 8},
        "GemmaCausalLM",
        "decoder_block_1",
        "ffw_gating_2",
        "ffw_linear",
        "ffw_gating",
    ),
    "t5": Decoder(
        "T5Backbone",
        _HEADS,
        "T5Seq2SeqLM",
        "transformer_decoder_layer_1",
        "gate_projector",
        "output_projector",
        "input_projector",
    ),
    "whisper": Decoder(
        "WhisperBackbone",
        _HEADS | _SOUND | {"max_decoder_sequence_length": LENGTH},
        None,
        "transformer_decoder_layer_1",
        *_DENSE,
    ),
}


def inputs(name):
    """The words 1, 2 and 3, and room for more, as a model takes them."""
    if name == "t5":
        return _prompt("encoder_") | _prompt("decoder_")
    if name == "whisper":
        random = np.random.default_rng(0)
        sound = random.normal(size=(2, 2 * LENGTH, 4)).astype("float32")
        return _prompt("decoder_") | {"encoder_features": sound}
    return _prompt("")


def generate(model, x):
    """The tokens that a task generates, or a backbone in a loop."""
    if isinstance(model, keras_hub.models.Task):
        model.compile(sampler="greedy")
        found = model.generate(dict(x), stop_token_ids=None)
        found = found.get("token_ids", found.get("decoder_token_ids"))
        return keras.ops.convert_to_numpy(found)
    ids = x["decoder_token_ids"].copy()
    for last in range(2, LENGTH - 1):
        mask = np.broadcast_to(np.arange(LENGTH) <= last, ids.shape)
        given = {"decoder_token_ids": ids, "decoder_padding_mask": mask}
        features = model(x | given)["decoder_sequence_output"]
        logits = model.token_embedding(features[:, last], reverse=True)
        ids[:, last + 1] = keras.ops.convert_to_numpy(logits).argmax(-1)
    return ids


def _prompt(prefix):
    ids = np.zeros((2, LENGTH), "int32")
    ids[:, :3] = 1, 2, 3
    mask = (ids > 0).astype("int32")
    return {f"{prefix}token_ids": ids, f"{prefix}padding_mask": mask}


def _is_added(path):
    """Whether a weight writes into the sum that goes through all layers."""
    written = "attention_output", "output_projector", "output_dense", "linear"
    return any(name in path for name in (*written, "position_embedding"))
