"""The models of `model_sweep.py`: well-known architectures, made small.

The models are Keras' applications at the smallest images that they accept, and
KerasHub's backbones with two layers of 32 features. All end in a `Dense(4)`.
"""

import importlib.util
import inspect

import keras
import numpy as np
from keras import layers

# One application of each family. `others()` returns the larger applications.
APPLICATIONS = (
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "DenseNet121",
    "ResNet50",
    "ResNet50V2",
    "InceptionV3",
    "InceptionResNetV2",
    "Xception",
    "NASNetMobile",
    "VGG16",
    "ConvNeXtTiny",
)

# The smallest image sides that Keras accepts for these applications. All other
# applications accept 32 pixels.
_LEAST_PIXELS = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}

_VOCABULARY, _LENGTH, _PIXELS = 100, 16, 32

_TOKENS = {
    "vocabulary_size": _VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
_HEADS = _TOKENS | {"num_heads": 2}
_LEARNED_POSITIONS = _HEADS | {"max_sequence_length": _LENGTH}
_QUERY_HEADS = _TOKENS | {"num_query_heads": 2, "num_key_value_heads": 1}
_IMAGES = {"image_shape": (_PIXELS, _PIXELS, 3)}
_RESNET = _IMAGES | {
    "input_conv_filters": [16],
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "bottleneck_block",
}

# The constructor arguments of each class `keras_hub.models.<name>`.
BACKBONES = {
    "BertBackbone": _LEARNED_POSITIONS,
    "RobertaBackbone": _LEARNED_POSITIONS,
    "DistilBertBackbone": _LEARNED_POSITIONS,
    "AlbertBackbone": _LEARNED_POSITIONS | {"embedding_dim": 16},
    "DebertaV3Backbone": _LEARNED_POSITIONS | {"bucket_size": 8},
    "FNetBackbone": _TOKENS | {"max_sequence_length": _LENGTH},
    "GPT2Backbone": _LEARNED_POSITIONS,
    "OPTBackbone": _LEARNED_POSITIONS,
    "BloomBackbone": _HEADS,
    "GPTNeoXBackbone": _LEARNED_POSITIONS,
    "FalconBackbone": _TOKENS | {"num_attention_heads": 2},
    "BartBackbone": _LEARNED_POSITIONS,
    "T5Backbone": _HEADS,
    "LlamaBackbone": _QUERY_HEADS,
    "GemmaBackbone": _QUERY_HEADS | {"head_dim": 16},
    "MistralBackbone": _QUERY_HEADS,
    "MixtralBackbone": _QUERY_HEADS | {"num_experts": 4},
    "QwenBackbone": _QUERY_HEADS,
    "Phi3Backbone": _QUERY_HEADS,
    "ViTBackbone": _IMAGES
    | {
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "ResNetBackbone": _RESNET,
}


def default_names() -> list:
    """Returns the names of one application of each family and all backbones.

    The result has no backbones if KerasHub is not installed.
    """
    found = importlib.util.find_spec("keras_hub") is not None
    return [*APPLICATIONS, *(BACKBONES if found else ())]


def others() -> list:
    """Returns the names of all other applications."""
    found = vars(keras.applications)
    return [n for n in found if n[0].isupper() and n not in APPLICATIONS]


def build(name: str) -> keras.Model:
    """Returns the model with a name, with new weights and a head."""
    if name in BACKBONES:
        import keras_hub

        backbone = getattr(keras_hub.models, name)(**BACKBONES[name])
    else:
        size = _LEAST_PIXELS.get(name, _PIXELS)
        backbone = getattr(keras.applications, name)(
            weights=None, include_top=False, input_shape=(size, size, 3)
        )
    features = _features(backbone.output)
    positions = tuple(range(1, features.ndim - 1))
    pooled = keras.ops.mean(features, axis=positions)
    outputs = layers.Dense(4, dtype="float32", name="head")(pooled)
    return keras.Model(backbone.input, outputs)


def batches(name: str, model: keras.Model, count: int) -> tuple:
    """Returns `count` samples as the model takes them, and their classes."""
    random = np.random.default_rng(0)
    x = {
        tensor.name: _samples(tensor, name, random, count)
        for tensor in keras.tree.flatten(model.input)
    }
    if len(x) == 1:
        (x,) = x.values()
    return x, random.integers(0, 4, count)


def _features(outputs):
    if not isinstance(outputs, dict):
        return outputs
    known = ("sequence_output", "decoder_sequence_output")
    return next(outputs[key] for key in known if key in outputs)


def _samples(tensor, name, random, count):
    if tensor.ndim == 4:
        shape = (count, *tensor.shape[1:])
        low, high = (0, 255) if _rescales(name) else (-1, 1)
        return random.uniform(low, high, shape).astype("float32")
    if "padding_mask" in tensor.name:
        # The sentences have different lengths.
        lengths = random.integers(_LENGTH // 2, _LENGTH + 1, (count, 1))
        return (np.arange(_LENGTH) < lengths).astype("int32")
    if "segment" in tensor.name:
        return np.zeros((count, _LENGTH), "int32")
    return random.integers(1, _VOCABULARY, (count, _LENGTH), "int32")


def _rescales(name):
    """Returns whether an application itself rescales bytes."""
    application = getattr(keras.applications, name, None)
    return application is not None and (
        "include_preprocessing" in inspect.signature(application).parameters
    )
