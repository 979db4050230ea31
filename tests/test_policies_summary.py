"""Tables of dtypes and FLOPs, layers not worth their casts, and devices."""

import keras
import pytest
from keras import layers
from keras.layers import Activation, Dense
from policies_models import BUILDERS, functional

import keras_mixprec as kmp
from keras_mixprec import PrecisionRule, apply_policy, precision_summary
from keras_mixprec.policies.casts import isolated_layers
from keras_mixprec.policies.hardware import recommend, slow_because
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.multiply_adds import multiply_adds

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize("build", BUILDERS)
def test_every_layer_has_a_row_and_every_parameter_is_counted(build):
    model = build()
    rows = precision_summary(model).to_list()
    assert [row["path"] for row in rows] == [e.path for e in walk(model)]
    assert sum(row["parameters"] for row in rows) == model.count_params()
    assert all(row["compute_dtype"] == "float32" for row in rows)
    assert sum(row["share_of_flops"] or 0 for row in rows) == pytest.approx(1)


def test_text_and_page_say_in_what_products_are():
    model = functional()
    with kmp.matmul_precision("float32"):
        summary = precision_summary(model)
    last = str(summary).splitlines()[-1]
    assert "float32 layers: float32" in last
    assert f"<p>{last}</p>" in summary.to_html()


def test_notes_say_casts_reasons_and_exceptions():
    inputs = keras.Input((4,))
    x = layers.LayerNormalization(name="norm")(inputs)
    for name in "abc":
        x = Dense(4, name=name)(x)
    model = keras.Model(inputs, x)
    rules = [PrecisionRule("b", reason="because")]
    plan = apply_policy(model, "mixed_bfloat16", rules=rules)
    norm, *notes = (
        x["notes"] for x in precision_summary(model, plan).to_list()
    )
    assert norm.startswith("autocast=False")
    casts = "casts its input"
    assert notes == ["", f"{casts} to float32; because", f"{casts} to bfloat16"]


def joined(layer):
    return lambda *inputs: layer(list(inputs))


ATTENTION = 2 * 5 * 4 * 6 + 5 * 7 * 2 * (3 + 3)


@pytest.mark.parametrize(
    ("layer", "shapes", "expected"),
    [
        (layers.EinsumDense("...x,xy->...y", 3), [(5, 7, 4)], 5 * 7 * 4 * 3),
        (layers.Conv2D(4, 3, groups=2), [(8, 8, 2)], 6 * 6 * 9 * 1 * 4),
        (layers.SeparableConv2D(5, 3), [(8, 8, 2)], 6 * 6 * (9 * 2 + 2 * 5)),
        (layers.Conv1DTranspose(5, 3), [(8, 2)], 8 * 3 * 2 * 5),
        (layers.LSTM(3), [(7, 4)], 7 * (4 + 3) * 4 * 3),
        (layers.Bidirectional(layers.SimpleRNN(3)), [(7, 4)], 14 * 7 * 3),
        (Dense(3), [(None, 4)], 0),
        # Query and output of length 5, key and value of length 7.
        (
            layers.GroupQueryAttention(3, 2, 1),
            [(5, 4), (7, 4)],
            ATTENTION + 2 * 7 * 4 * 3,
        ),
        (joined(layers.Attention()), [(5, 4), (7, 4)], 5 * 7 * (4 + 4)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_work(layer, shapes, expected):
    inputs = [keras.Input(shape) for shape in shapes]
    model = keras.Model(inputs, layer(*inputs))
    work = [multiply_adds(entry) or 0 for entry in walk(model)]
    assert sum(work) == expected


def names(model, low, policy="mixed_float16"):
    """Returns layers in 16 bits that gain nothing, if only `low` are."""
    rules = [PrecisionRule(name, policy) for name in low]
    apply_policy(model, "float32", rules=rules)
    return "".join(layer.name for layer in isolated_layers(model))


def chain(width=64, features=2048):
    inputs = keras.Input((features,))
    x = Activation("relu", name="b")(Dense(width, name="a")(inputs))
    return keras.Model(inputs, Dense(1, name="d")(Dense(width, name="c")(x)))


def residual():
    inputs = keras.Input((8,))
    x = Dense(8, name="a")(inputs)
    y = layers.LayerNormalization(name="b")(keras.ops.relu(x))
    x = layers.Add(name="c")([x, y])
    return keras.Model(inputs, Dense(1, name="d")(x))


def shared():
    inputs, relu = keras.Input((8,)), Activation("relu", name="b")
    x = relu(Dense(8, name="a")(inputs))
    return keras.Model(inputs, Dense(8, name="c")(relu(Dense(8)(x))))


@pytest.mark.parametrize(
    ("build", "low", "lone"),
    [
        (chain, "b", "b"),
        (lambda: chain(features=64), "c", ""),  # 50% of all.
        (lambda: chain(1024, 2**15), "c", ""),  # 512 an element, 3% of all.
        (chain, "bc", ""),  # Not alone.
        (chain, "a", ""),  # Its input comes from outside.
        (residual, "c", "c"),
        (shared, "b", "b"),
    ],
)
def test_layers_that_two_casts_make_dearer_than_float32(build, low, lone):
    assert names(build(), low) == lone


def found(kind, capability=None, name=None):
    return {
        "backend": "torch",
        "kind": kind,
        "devices": [f"some {kind}", name or f"some {kind}"],
        "compute_capability": capability,
    }


FLOAT16, BFLOAT16, FLOAT32 = "mixed_float16", "mixed_bfloat16", "float32"


@pytest.mark.parametrize(
    ("kind", "capability", "policy", "slow"),
    [
        ("cuda", (8, 0), BFLOAT16, []),
        ("cuda", (7, 5), FLOAT16, [BFLOAT16, "bfloat16"]),
        ("cuda", (6, 1), FLOAT32, [FLOAT16, BFLOAT16, "bfloat16"]),
        ("tpu", None, BFLOAT16, [FLOAT16]),
        ("cpu", None, FLOAT32, [FLOAT16, BFLOAT16, "bfloat16"]),
        ("abacus", None, FLOAT32, []),
    ],
)
def test_what_a_device_is_recommended(kind, capability, policy, slow):
    device = found(kind, capability)
    recommendation = recommend(device)
    assert recommendation.policy == policy
    assert recommendation.device == f"some {kind}"
    assert recommendation.reason
    assert not slow_because(FLOAT32, device)
    policies = FLOAT16, BFLOAT16, "bfloat16"
    assert [p for p in policies if slow_because(p, device)] == slow
