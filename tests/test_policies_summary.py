"""The table tells the dtypes as they are and the work as it can be told."""

import keras
import numpy as np
import pytest
from keras import layers
from policies_models import BUILDERS, Block, functional

from keras_mixprec import (
    PrecisionRule,
    apply_policy,
    matmul_precision,
    precision_summary,
)
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.multiply_adds import multiply_adds


@pytest.mark.parametrize("build", BUILDERS)
def test_every_layer_has_a_row_and_every_parameter_is_counted(build):
    model = build()
    rows = precision_summary(model).to_list()
    assert [row["path"] for row in rows] == [e.path for e in walk(model)]
    assert sum(row["parameters"] for row in rows) == model.count_params()
    assert all(row["compute_dtype"] == "float32" for row in rows)
    assert sum(row["share_of_flops"] or 0 for row in rows) == pytest.approx(1)


def test_the_text_fits_100_columns_and_has_a_line_per_layer():
    model = functional()
    lines = str(precision_summary(model)).splitlines()
    assert len(lines) == 2 + len(walk(model))
    assert max(map(len, lines)) <= 100


def test_the_last_line_says_what_float32_products_are_computed_in():
    model = functional()
    with matmul_precision("float32"):
        summary = precision_summary(model)
    last = str(summary).splitlines()[-1]
    assert last.startswith(
        "Products of float32 numbers are computed in float32, "
    )
    assert f"<p>{last}</p>" in summary.to_html()


def test_html_is_escaped():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, name="<b>&")])
    text = precision_summary(model)._repr_html_()
    assert "&lt;b&gt;&amp;" in text
    assert text.count("<tr>") == 2


def test_notes_say_casts_reasons_and_exceptions():
    inputs = keras.Input((4,))
    x = layers.LayerNormalization(name="norm")(inputs)
    x = layers.Dense(4, name="a")(x)
    x = layers.Dense(4, name="b")(x)
    model = keras.Model(inputs, layers.Dense(1, name="c")(x))
    rules = [PrecisionRule("b", reason="because")]
    plan = apply_policy(model, "mixed_bfloat16", rules=rules)
    rows = precision_summary(model, plan).to_list()
    assert [row["notes"] for row in rows] == [
        "autocast=False: takes its input as it comes",
        "",
        "casts its input to float32; because",
        "casts its input to bfloat16",
    ]


def test_variable_dtypes_are_those_of_the_variables():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    model.layers[0].dtype_policy = "float16"
    row = precision_summary(model).to_list()[0]
    assert (row["compute_dtype"], row["variable_dtype"]) == (
        "float16",
        "float32",
    )


def test_an_unbuilt_layer_says_so():
    row = precision_summary(keras.Sequential([layers.Dense(2)])).to_list()[0]
    assert (row["parameters"], row["share_of_flops"]) == (None, None)
    assert row["notes"] == "not built"


def work_of(layer, *shapes):
    inputs = [keras.Input(shape) for shape in shapes]
    model = keras.Model(inputs, layer(*inputs))
    return sum(multiply_adds(entry) or 0 for entry in walk(model))


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (layers.Dense(3), (7, 4), 7 * 4 * 3),
        (layers.EinsumDense("...x,xy->...y", 3), (5, 7, 4), 5 * 7 * 4 * 3),
        (layers.EinsumDense("abc,cd->abd", (7, 3)), (7, 4), 7 * 4 * 3),
        (layers.Conv2D(5, 3), (8, 8, 2), 6 * 6 * 9 * 2 * 5),
        (layers.Conv2D(4, 3, groups=2), (8, 8, 2), 6 * 6 * 9 * 1 * 4),
        (layers.DepthwiseConv2D(3), (8, 8, 2), 6 * 6 * 9 * 2),
        (layers.SeparableConv2D(5, 3), (8, 8, 2), 6 * 6 * (9 * 2 + 2 * 5)),
        (layers.Conv1DTranspose(5, 3), (8, 2), 8 * 3 * 2 * 5),
        (layers.LSTM(3), (7, 4), 7 * (4 + 3) * 4 * 3),
        (layers.TimeDistributed(layers.Dense(3)), (7, 4), 7 * 4 * 3),
        (
            layers.Bidirectional(layers.SimpleRNN(3)),
            (7, 4),
            2 * 7 * (4 + 3) * 3,
        ),
        (layers.ReLU(), (7, 4), 0),
        (layers.Dense(3), (None, 4), 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_work(layer, shape, expected):
    assert work_of(layer, shape) == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            layers.MultiHeadAttention(2, 3),
            # Query and output of length 5, key and value of length 7.
            2 * 5 * 4 * 6 + 2 * 7 * 4 * 6 + 5 * 7 * 2 * (3 + 3),
        ),
        (
            layers.GroupQueryAttention(3, 2, 1),
            2 * 5 * 4 * 6 + 2 * 7 * 4 * 3 + 5 * 7 * 2 * (3 + 3),
        ),
    ],
    ids=["multi", "grouped"],
)
def test_work_of_attention(layer, expected):
    assert work_of(layer, (5, 4), (7, 4)) == expected


def test_work_of_merging():
    a, b = keras.Input((5, 4)), keras.Input((7, 4))
    dot = keras.Model([a, b], layers.Dot(axes=2)([a, b]))
    assert multiply_adds(walk(dot)[0]) == 5 * 7 * 4
    attention = keras.Model([a, b], layers.Attention()([a, b]))
    assert multiply_adds(walk(attention)[0]) == 5 * 7 * (4 + 4)


def test_a_user_written_layer_with_weights_is_unknown():
    class Own(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(2,))

        def call(self, x):
            return x * self.w

    model = keras.Sequential([keras.Input((2,)), Own(), Block()])
    work = [row["share_of_flops"] for row in precision_summary(model).to_list()]
    assert work == [None, 0.0, 1.0, 0.0]
    assert np.isfinite(work[2])
