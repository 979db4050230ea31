"""`keras-mixprec convert`, as a person uses it."""

import json

import keras
import numpy as np
import pytest

from keras_mixprec.cli import main
from keras_mixprec.policies.plan import PrecisionPlan


class Unknown(keras.layers.Layer):
    def call(self, x):
        return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of models and data, right and wrong ones."""
    folder = tmp_path_factory.mktemp("convert")
    head = keras.layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), head])
    model.save(folder / "model.keras")
    content = (folder / "model.keras").read_bytes()
    (folder / "short.keras").write_bytes(content[: len(content) // 2])
    damaged = bytearray(content)
    damaged[len(content) // 3 : len(content) // 2] = b"\0" * 64
    (folder / "damaged.keras").write_bytes(damaged)
    keras.Sequential([keras.Input((4,)), Unknown()]).save(folder / "own.keras")
    PrecisionPlan({"dense": "mixed_bfloat16", "head": "float32"}).save(
        folder / "plan.json"
    )
    PrecisionPlan({"other": "float32"}).save(folder / "other.json")
    np.savez(folder / "x.npz", x=np.ones((8, 4), "float32"))
    np.savez(folder / "wide.npz", x=np.ones((8, 5), "float32"))
    np.savez(folder / "y.npz", y=np.ones((8, 4), "float32"))
    (folder / "text.npz").write_text("no arrays")
    (folder / "short.npz").write_bytes((folder / "x.npz").read_bytes()[:150])
    return folder


@pytest.fixture
def convert(folder, monkeypatch, capsys):
    """Function that runs the command; returns status, stdout and stderr."""
    monkeypatch.chdir(folder)
    # The command sets it, for a process of its own.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())

    def run(*arguments):
        try:
            status = main(["convert", *arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def _asked(model="model.keras", to="bfloat16", x="x.npz", out="out.keras"):
    return [model, "--to", to, "--calibration", x, "--out", out]


@pytest.mark.parametrize("to", ["bfloat16", "plan.json"])
def test_a_model_is_converted(to, convert, folder):
    status, out, said = convert(*_asked(to=to), "--report", "pages/report.html")
    assert status == 0
    steps = ["Loading model.keras", f"Converting to {to}", "Written: out.keras"]
    assert all(step in said for step in [*steps, "Written: pages/report.html"])
    small = keras.saving.load_model(folder / "out.keras")
    assert small.layers[0].kernel.dtype == "bfloat16"
    head = "float32" if to == "plan.json" else "bfloat16"
    assert small.get_layer("head").kernel.dtype == head
    assert "Weights: 2.01 KiB before" in out
    assert "<td>head</td>" in (folder / "pages/report.html").read_text()


def test_what_only_training_needs_need_not_load(convert, folder):
    def own_loss(y, prediction):
        return keras.ops.mean((y - prediction) ** 2)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", own_loss)
    model.save(folder / "own_loss.keras")
    status, _, err = convert(*_asked("own_loss.keras"))
    assert (status, "cannot be loaded" in err) == (0, False)


def test_json_is_the_report(convert):
    _, out, _ = convert(*_asked(), "--json")
    assert json.loads(out)["plan"]["head"] == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"to": "float8"}, "--to"),
        ({"to": "none.json"}, "none.json"),
        ({"out": "small.h5"}, "--out"),
        ({"out": "x.npz/small.keras"}, "x.npz"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(asked, named, convert):
    status, _, error = convert(*_asked("none.keras", **asked))
    assert status == 2
    assert named in error
    assert "Loading" not in error


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tolerance", "0"), ("--tolerance", "nan"), ("--batch-size", "0")],
)
def test_numbers_are_checked_before_anything_is_loaded(option, value, convert):
    status, _, error = convert(*_asked("none.keras"), option, value)
    assert status == 2
    assert f"{option} must be" in error
    assert "Loading" not in error


def test_progress_is_shown_while_layers_are_searched(convert, folder):
    dense, norm = keras.layers.Dense, keras.layers.LayerNormalization
    # What it puts out is beyond float16, and scaled down it would be another.
    stack = [dense(4, "elu"), norm(), dense(64), dense(3)]
    model = keras.Sequential([keras.Input((4,)), *stack])
    model.layers[0].kernel.assign(np.diag([2e4, 4e4, 6e4, 9e4]))
    model.save(folder / "large.keras")
    status, out, said = convert(*_asked("large.keras", "float16"), "--json")
    lines = said.splitlines()
    assert status == 0
    assert "In float16 outputs are off by inf" in lines
    assert "Searching which layers need float32, in many runs" in lines
    assert any("of 4 layers in float32 outputs" in line for line in lines)
    assert "float32" in json.loads(out)["plan"].values()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (_asked("none.keras"), "no file none.keras"),
        (_asked("short.keras"), "short.keras is damaged"),
        (_asked("damaged.keras"), "damaged.keras"),
        (_asked("own.keras"), "--import"),
        (_asked(to="float8"), "'float8'"),
        (_asked(to="none.json"), "none.json"),
        (_asked(to="other.json"), "'other'"),
        (_asked(x="none.npz"), "none.npz"),
        (_asked(x="text.npz"), "text.npz"),
        (_asked(x="short.npz"), "short.npz"),
        (_asked(x="y.npz"), "no array x"),
        (_asked(x="wide.npz"), "`calibration`"),
        (_asked(out="out.h5"), "--out"),
        (_asked(out="model.keras"), "another file"),
        ([*_asked(), "--report", "x.npz"], "--report must be"),
        ([*_asked(), "--tolerance", "-1"], "tolerance"),
        ([*_asked(), "--tolerance", "0.000001"], "is the worst"),
        ([*_asked(), "--batch-size", "0"], "--batch-size"),
        (_asked()[:-2], "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_wrong_calls_say_what_is_wrong(arguments, named, convert, folder):
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.keras")}
    status, _, error = convert(*arguments)
    assert status == 2
    assert named in error
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("*.keras")}
