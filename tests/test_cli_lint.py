"""`keras-mixprec lint`, as a person uses it."""

import json

import keras
import numpy as np
import pytest
from lint_cases import scale_of_a_billionth

from keras_mixprec.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of models and data, right and wrong ones."""
    folder = tmp_path_factory.mktemp("lint")
    scale_of_a_billionth().save(folder / "billionth.keras")
    inputs = keras.Input((4,))
    healthy = keras.layers.Dense(8, name="head", dtype="float32")(inputs)
    keras.Model(inputs, healthy).save(folder / "float32.keras")
    keras.Sequential([keras.Input((4,)), Unknown()]).save(folder / "own.keras")
    inner = keras.Sequential([keras.Input((4,)), Unknown()])
    keras.Model(inputs, inner(inputs)).save(folder / "nested.keras")
    own = keras.layers.Lambda(lambda x: 2 * x)
    keras.Sequential([keras.Input((4,)), own]).save(folder / "lambda.keras")
    _with_own_loss(folder / "own_loss.keras")
    (folder / "text.keras").write_text("no model")
    (folder / "text.npz").write_text("no arrays")
    x, y = np.full((8, 4), 1.0, "float32"), np.full((8, 8), 1.5e5)
    np.savez(folder / "data.npz", x=x, y=y)
    np.savez(folder / "y.npz", y=y)
    np.savez(folder / "wide.npz", x=np.ones((8, 5)))
    np.savez(folder / "objects.npz", x=np.array([{}], object))
    np.save(folder / "x.npy", x)
    return folder


class Unknown(keras.layers.Layer):
    def call(self, x):
        return x


def _with_own_loss(path):
    def own_loss(y, prediction):
        return keras.ops.mean((y - prediction) ** 2)

    model = scale_of_a_billionth()
    model.compile("sgd", own_loss)
    model.save(path)


@pytest.fixture
def lint(folder, monkeypatch, capsys):
    """Function that runs the command; returns status, stdout and stderr."""
    monkeypatch.chdir(folder)
    # The command sets it, for a process of its own.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())

    def run(*arguments):
        try:
            status = main(["lint", *arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("billionth.keras",), 1),
        (("billionth.keras", "--fail-on", "never"), 0),
        (("float32.keras",), 0),
        (("float32.keras", "--fail-on", "low"), 1),
        (("float32.keras", "--policy", "mixed_float16"), 0),
        (("billionth.keras", "--data", "x.npy"), 1),
    ],
    ids=str,
)
def test_the_status_says_what_was_found(lint, arguments, status):
    found, out, err = lint(*arguments)
    assert (found, err) == (status, "")
    assert out.startswith("Lint of ")


def test_json_has_the_documented_keys(lint):
    _, out, _ = lint("billionth.keras", "--json", "--data", "data.npz")
    result = json.loads(out)
    keys = ["version", "model", "backend", "policy", "counts", "findings"]
    assert list(result) == keys
    assert (result["version"], result["policy"]) == (1, None)
    finding = result["findings"][0]
    keys = ["rule", "severity", "layer", "reason", "fix", "repairs", "numbers"]
    assert list(finding) == keys
    severities = [f["severity"] for f in result["findings"]]
    counts = {s: severities.count(s) for s in ("high", "medium", "low")}
    assert result["counts"] == counts
    assert counts["high"] >= 2


def test_help_has_an_example_and_the_statuses(lint):
    status, out, _ = lint("--help")
    assert status == 0
    assert "keras-mixprec lint model.keras --policy" in out
    assert "exit status: 0" in out


def test_a_model_whose_loss_cannot_be_loaded_is_checked_without(lint):
    status, out, err = lint("own_loss.keras", "--json")
    expected = json.loads(lint("billionth.keras", "--json")[1])["findings"]
    assert status == 1
    assert json.loads(out)["findings"] == expected
    assert "own_loss" in err


WRONG = {
    "no model": ((), "required: model"),
    "no such file": (("none.keras",), "no file none.keras"),
    "a folder": (("..",), "no file .."),
    "not a model": (("text.keras",), "is damaged, or no .keras file"),
    "own layer": (("own.keras",), "the class 'Unknown': add --import"),
    "own class in a model": (
        ("nested.keras",),
        "the class 'Unknown': add --import",
    ),
    "lambda": (
        ("lambda.keras",),
        "of yours and give that with --import",
    ),
    "module": (
        ("own.keras", "--import", "nowhere"),
        "the folder of the module",
    ),
    "policy": (("float32.keras", "--policy", "half"), "policy='half'"),
    "severity": (("float32.keras", "--fail-on", "bad"), "invalid choice"),
    "backend": (("float32.keras", "--backend", "theano"), "invalid choice"),
    "no data": (("float32.keras", "--data", "none.npz"), "No such file"),
    "not data": (("float32.keras", "--data", "text.npz"), "cannot be read"),
    "objects": (("float32.keras", "--data", "objects.npz"), "plain arrays"),
    "only y": (("float32.keras", "--data", "y.npz"), "has no array x"),
    "wrong shape in float32": (
        ("float32.keras", "--data", "wide.npz"),
        "found shape",
    ),
    "wrong shape": (("billionth.keras", "--data", "wide.npz"), "found shape"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_call_is_named(lint, name):
    arguments, expected = WRONG[name]
    status, _, err = lint(*arguments)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err
