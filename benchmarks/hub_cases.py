"""Small KerasHub transformers with a planted overflow, for `repair.py --hub`.

The models consist of KerasHub's layers with new weights, and learn in float32
in less than a minute on one core. They overflow in the same way as the large
models. In T5 the output of a feed-forward block overflows and stays in the
residual stream. In Llama the gated product overflows, and does not stay in the
stream. The block with the overflow was drawn at random, once.

    pip install keras-hub
"""

import dataclasses
import functools

import keras
import keras_hub
import numpy as np
from zoo.case import Case

import keras_mixprec as kmp

_LAYERS, _WIDTH, _LENGTH, _VOCABULARY, _CLASSES = 3, 64, 12, 40, 4
_PADDING = 0

_T5 = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": _LAYERS,
    "num_heads": 2,
    "hidden_dim": _WIDTH,
    "intermediate_dim": 2 * _WIDTH,
    "dropout": 0.0,
}
_LLAMA = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": _LAYERS,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": _WIDTH,
    "intermediate_dim": 2 * _WIDTH,
}


@dataclasses.dataclass(frozen=True)
class HubCase(Case):
    """A case whose culprits are single layers, without all of their sublayers.

    Attributes:
        as_shipped: Set of paths of layers that overflow in KerasHub's own code.
        equal_dtypes: Set of paths of additional layers that need float32 if the
            backend cannot add float32 and float16 tensors.
    """

    as_shipped: frozenset = frozenset()
    equal_dtypes: frozenset = frozenset()

    def expected(self, setup):
        """Returns the paths of the layers to find in a setup."""
        found = self.culprits
        if setup != "torch":
            # T5 multiplies a mask by -1e9, which is -inf in float16, and
            # 0 * -inf is NaN. On torch, the factor is not in float16.
            found |= self.as_shipped
        if setup.startswith("tensorflow"):
            found |= self.equal_dtypes
        return found

    def model(self, policy, jit_compile, float32=(), seed=0):
        """Returns the compiled model with some layers in float32."""
        model = super().model(policy, jit_compile, seed=seed)
        plan = kmp.PrecisionPlan.from_model(model)
        unknown = set(float32) - set(plan)
        if unknown:
            raise ValueError(f"no layers of {self.name}: {sorted(unknown)}")
        moved = dict(plan) | dict.fromkeys(float32, "float32")
        if float32:
            kmp.apply_policy(model, kmp.PrecisionPlan(moved, plan.default))
        return model


def _sentences(prefix, samples=512):
    """Returns sentences of several lengths, and their classes.

    Each sentence contains one of the words 1 to 4, which is its class.
    """
    random = np.random.default_rng(0)
    ids = random.integers(_CLASSES + 1, _VOCABULARY, (samples, _LENGTH))
    lengths = random.integers(_LENGTH // 2, _LENGTH + 1, samples)
    classes = random.integers(0, _CLASSES, samples)
    ids[np.arange(samples), random.integers(0, lengths)] = classes + 1
    mask = np.arange(_LENGTH) < lengths[:, None]
    x = {
        f"{prefix}token_ids": np.where(mask, ids, _PADDING).astype("int32"),
        f"{prefix}padding_mask": mask.astype("int32"),
    }
    return x, classes.astype("int32")


def _classifier(inputs, features):
    pooled = keras.ops.mean(features, axis=1)
    head = keras.layers.Dense(_CLASSES, dtype="float32", name="head")
    return keras.Model(inputs, head(pooled))


def _t5():
    """Returns a classifier with T5's encoder."""
    backbone = keras_hub.models.T5Backbone(**_T5)
    names = ("encoder_token_ids", "encoder_padding_mask")
    inputs = {name: backbone.input[name] for name in names}
    return _classifier(inputs, backbone.output["encoder_sequence_output"])


def _llama():
    backbone = keras_hub.models.LlamaBackbone(**_LLAMA)
    return _classifier(backbone.input, backbone.output)


def _scale(variable, factor):
    variable.assign(variable * factor)


def _scale_t5(block, factor):
    model = _t5()
    layer = model.get_layer(_t5_block(block))
    _scale(layer.output_projector.kernel, factor)
    return model


def _scale_llama(block, norm=1.0, inner=1.0, outer=1.0, trainable=True):
    model = _llama()
    layer = model.get_layer(_llama_block(block))
    _scale(layer._feedforward_layernorm.scale, norm)
    _scale(layer._feedforward_gate_dense.kernel, inner)
    _scale(layer._feedforward_intermediate_dense.kernel, inner)
    _scale(layer._feedforward_output_dense.kernel, outer)
    layer._feedforward_output_dense.trainable = trainable
    return model


def _t5_block(index):
    return f"transformer_encoder_layer_{index}"


def _llama_block(index):
    return f"transformer_layer_{index}"


def _inside(block, names):
    return {f"{block}/{name}" for name in names}


def _after(block):
    return range(block + 1, _LAYERS)


def _t5_after(block):
    norms = ("t5_layer_norm", "t5_layer_norm_1")
    return _norms_after(block, _t5_block, norms, "encoder_output_layer_norm")


def _llama_after(block):
    norms = ("self_attention_layernorm", "feedforward_layernorm")
    return _norms_after(block, _llama_block, norms, "sequence_output_layernorm")


def _norms_after(block, path_of, names, last):
    later = [_inside(path_of(index), names) for index in _after(block)]
    return {last}.union(*later)


def _t5_ffn_output(block):
    # The residual stream keeps the overflow, so every later block receives it.
    own = _inside(_t5_block(block), ("output_projector", "dropout_1"))
    later = {_t5_block(index) for index in _after(block)}
    return own | later | _t5_after(block)


def _t5_ffn_output_sums(block):
    found = {_t5_block(block)} | _inside(_t5_block(block), ["dropout"])
    for index in _after(block):
        found |= _inside(_t5_block(index), ("dropout", "dropout_1"))
    return found


def _llama_gated_product(block):
    block = _llama_block(block)
    return {block} | _inside(block, ["feedforward_output_dense"])


def _llama_gated_product_sums(block):
    return _inside(_llama_block(block), ["self_attention_dropout"])


def _llama_ffn_output(block):
    later = {_llama_block(index) for index in _after(block)}
    return _llama_gated_product(block) | later | _llama_after(block)


def _llama_ffn_output_sums(block):
    found = _llama_gated_product_sums(block)
    for index in _after(block):
        names = ("self_attention_dropout", "feedforward_output_dense")
        found |= _inside(_llama_block(index), names)
    return found


_IN_T5 = {
    "as_shipped": frozenset({"transformer_encoder_layer_0/self_attention"}),
    "data": functools.partial(_sentences, "encoder_"),
}
_IN_LLAMA = {"data": functools.partial(_sentences, "")}


def _case(name, build, culprits=(), learning_rate=2e-3, **arguments):
    return HubCase(
        name,
        build,
        culprits=frozenset(culprits),
        kind="forward_overflow",
        direction="forward",
        decoy="token_embedding",
        optimizer=lambda: keras.optimizers.Adam(learning_rate),
        epochs=12,
        **arguments,
    )


def cases(names=()) -> list:
    """Returns the named cases, or all that run on the device."""
    found = [
        # Models as KerasHub's users get them, without a planted overflow.
        _case("t5", _t5, **_IN_T5),
        _case("llama", _llama, **_IN_LLAMA),
        *_planted(*np.random.default_rng(0).integers(0, _LAYERS, 5).tolist()),
    ]
    if keras.backend.backend() == "jax" and _jax_is_on_cpu():
        # Llama's attention has an `einsum` from float16 to float32, which JAX
        # does not run on a CPU.
        found = [case for case in found if not case.name.startswith("llama")]
    return [case for case in found if not names or case.name in names]


def _jax_is_on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def _planted(first, second, third, fourth, fifth):
    # In float16, the third block of the large T5 reaches 66246 at the first
    # step. This case plants a similar overflow.
    yield _case(
        "t5_ffn_output",
        lambda: _scale_t5(first, 3e4),
        _t5_ffn_output(first),
        equal_dtypes=frozenset(_t5_ffn_output_sums(first)),
        **_IN_T5,
    )
    # T5's norms compute squares in the dtype of their inputs, so they overflow
    # for inputs above 255. The residual stream reaches 255 in the second epoch.
    yield _case(
        "t5_residual_grows",
        lambda: _scale_t5(second, 50.0),
        _t5_after(second),
        **_IN_T5,
    )
    yield _case(
        "llama_gated_product",
        lambda: _scale_llama(third, inner=800.0, outer=0.01, trainable=False),
        _llama_gated_product(third),
        equal_dtypes=frozenset(_llama_gated_product_sums(third)),
        **_IN_LLAMA,
    )
    yield _case(
        "llama_ffn_output",
        lambda: _scale_llama(fourth, inner=800.0, outer=8.0),
        _llama_ffn_output(fourth),
        equal_dtypes=frozenset(_llama_ffn_output_sums(fourth)),
        learning_rate=5e-4,
        **_IN_LLAMA,
    )
    # Norms of trained models may have large weights. Such a norm makes the
    # gated product large.
    yield _case(
        "llama_product_grows",
        lambda: _scale_llama(fifth, norm=350.0),
        _llama_gated_product(fifth),
        equal_dtypes=frozenset(_llama_gated_product_sums(fifth)),
        learning_rate=1e-3,
        **_IN_LLAMA,
    )
