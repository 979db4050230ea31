"""Diagnoses `generate` of small KerasHub tasks, with and without a fault.

    pip install keras-hub
    KERAS_BACKEND=jax python -m benchmarks.hub_generate

Each task prints two lines of layers that the diagnosis in float16 names: one
without a fault, and one with an overflow in a feed-forward block. The tasks are
tiny and have new weights.
"""

import time

import keras
import keras_hub
import numpy as np

import keras_mixprec as kmp
from keras_mixprec.keras_internals import flat_layers

_SIZES = {"vocabulary_size": 40, "num_layers": 2, "hidden_dim": 16}
_MORE = _SIZES | {"intermediate_dim": 32}
_QUERIES = {"num_query_heads": 2, "num_key_value_heads": 1}
_LENGTH = 8


def _prompt(prefix=""):
    ids = np.zeros((2, _LENGTH), "int32")
    ids[:, :3] = [[5, 6, 7], [8, 9, 10]]
    return {f"{prefix}token_ids": ids, f"{prefix}padding_mask": ids > 0}


def _gpt2():
    backbone = keras_hub.models.GPT2Backbone(
        num_heads=2, max_sequence_length=_LENGTH, **_MORE
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone), _prompt()


def _llama():
    backbone = keras_hub.models.LlamaBackbone(**_QUERIES, **_MORE)
    return keras_hub.models.LlamaCausalLM(backbone=backbone), _prompt()


def _gemma():
    backbone = keras_hub.models.GemmaBackbone(head_dim=8, **_QUERIES, **_MORE)
    return keras_hub.models.GemmaCausalLM(backbone=backbone), _prompt()


def _t5():
    backbone = keras_hub.models.T5Backbone(num_heads=2, **_MORE)
    task = keras_hub.models.T5Seq2SeqLM(backbone=backbone)
    return task, _prompt("encoder_") | _prompt("decoder_")


TASKS = {"gpt2": _gpt2, "llama": _llama, "gemma": _gemma, "t5": _t5}


def _plant(task):
    """Makes the last feed-forward block's weights large, but finite."""
    # Names of blocks differ between models, but only blocks have sublayers.
    blocks = [x for x in task.backbone.layers if len(flat_layers(x)) > 1]
    for variable in blocks[-1].trainable_variables:
        value = keras.ops.convert_to_numpy(variable)
        if value.ndim == 2 and value.any():
            variable.assign(value * (3e4 / np.abs(value).max()))


def _line(name, planted):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    task, prompt = TASKS[name]()
    task.compile(sampler="greedy")
    if planted:
        _plant(task)
    start = time.perf_counter()
    verdicts = kmp.diagnose_call(
        task, task.generate, prompt, stop_token_ids=None
    )
    found = [(v.layer, v.kind, v.numbers.get("call")) for v in verdicts]
    fault = "planted" if planted else "as it is"
    took = time.perf_counter() - start
    print(f"{name:6} {fault:8} {took:5.1f} s  {found}", flush=True)


if __name__ == "__main__":
    for name in TASKS:
        for planted in (False, True):
            _line(name, planted)
