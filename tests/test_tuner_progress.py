"""A diagnosis that takes long says so before, and shows how far it is."""

import re
import sys

import keras
import pytest
from tuner_models import chain, fit

import keras_mixprec as kmp
from keras_mixprec.monitoring import progress


def deep(layers=40):
    keras.config.set_dtype_policy("mixed_float16")
    dense = [keras.layers.Dense(1) for _ in range(layers)]
    model = keras.Sequential([keras.Input((1,)), *dense])
    model.compile("sgd", loss="mse", jit_compile=False)
    return model


@pytest.mark.slow
def test_a_long_diagnosis_is_announced_and_concluded(capsys):
    fit(deep(), [1.0], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    before, after = out.index("checking 40 layers"), out.index("checked 40")
    assert "PrecisionTuner: checking 40 layers before the first step ..." in out
    assert before < after


@pytest.mark.parametrize("terminal", [True, False])
def test_one_that_takes_its_time_shows_a_bar(terminal, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    fit(chain(), [1.0], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    # In a file a bar would be a line for each layer, with colours.
    assert ("12/12" in out, "\x1b" in out) == (terminal, terminal)
    assert out.startswith("PrecisionTuner: checking 3 layers before")
    # How many are at fault is said in the same line.
    assert re.search(r"checked 3 layers in [\d.]+ s: none at fault\.\n", out)


def test_it_says_how_many_layers_are_at_fault(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    # `big`, and `last` that casts its output.
    fit(chain(), [219.0], kmp.PrecisionTuner())
    assert " s: 2 at fault.\n" in capsys.readouterr().out


def test_the_same_of_several_layers_is_said_once(capsys):
    keras.config.set_dtype_policy("mixed_float16")
    start = keras.initializers.Constant(300.0)
    inputs = keras.Input((1,))
    big = [
        keras.layers.Dense(1, kernel_initializer=start, name=f"big{n}")(inputs)
        for n in range(3)
    ]
    ends = [keras.layers.Rescaling(1 / 256, dtype="float32")(b) for b in big]
    model = keras.Model(inputs, keras.layers.Add(dtype="float32")(ends))
    model.compile("sgd", loss="mse", jit_compile=False)
    fit(model, [219.0], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    assert out.count("compute in float32") == 1
    (same,) = re.findall("    The same in (.*)\\.\n", out)
    named = re.search("forward_overflow in '(.*?)' ", out).group(1)
    assert {named, *same.replace("'", "").split(", ")} == {
        "big0",
        "big1",
        "big2",
    }


@pytest.mark.parametrize(("patience", "verbose"), [(0.0, 0), (60.0, 1)])
def test_else_it_is_silent(patience, verbose, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    fit(chain(), [1.0], kmp.PrecisionTuner(verbose=verbose))
    assert "check" not in capsys.readouterr().out
