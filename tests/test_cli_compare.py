"""`keras-mixprec compare`, as a person uses it."""

import json

import keras
import pytest
from comparison_records import arm, record

from keras_mixprec.analysis.comparison.result import ComparisonResult
from keras_mixprec.cli import main

MODULE = """
import keras, numpy as np

NUMBER = 3
SAMPLES = np.random.default_rng(0).normal(size=(32, 4))

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model

def data():
    return SAMPLES, SAMPLES[:, :2]

def nothing():
    return ()
"""
SHORT = ["--steps", "4", "--blocks", "2", "--seeds", "2", "--batch-size", "8"]
GIVEN = "compared_here:build", "compared_here:data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A module to compare, plans, and files that are neither."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "compared_here.py").write_text(MODULE)
    (folder / "damaged_here.py").write_text("def build(:")
    (folder / "dividing_here.py").write_text("\nRATE = 1 / 0")
    (folder / "text.json").write_text("{")
    (folder / "other.json").write_text('{"format": "something"}')
    plan = {
        "format": "keras_mixprec.plan",
        "version": 1,
        "default": "mixed_bfloat16",
        "layers": [{"path": "dense", "policy": "float32"}],
    }
    (folder / "tuned.json").write_text(json.dumps(plan))
    arms = [arm("float32", [0.9, 0.9]), arm("bad", [0.1, 0.2], losses=[9.0])]
    unnamed = {"build": "__main__:build", "data": "builtins.tuple"}
    signed = ComparisonResult(record(arms, sources=unnamed))
    signed.sign_off(folder / "unnamed.json")
    return folder


@pytest.fixture
def compare(folder, monkeypatch, capsys):
    """Function that runs the command; returns status, stdout and stderr."""
    monkeypatch.chdir(folder)
    # The command sets it, for a process of its own.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    monkeypatch.syspath_prepend(folder)

    def run(*arguments):
        try:
            status = main(["compare", *arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def test_it_compares_writes_signs_checks_and_runs_again(compare, folder):
    status, out, _ = compare(
        *GIVEN, "--policies", "float32", "tuned.json", *SHORT, "--html",
        "out.html", "--sign-off", "signed.json",
    )  # fmt: skip
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("tuned ")]
    assert rows[0].endswith(("within tolerance", "not told apart"))
    assert "Best: float32" in out or "Best: tuned" in out
    assert "<table>" in (folder / "out.html").read_text()
    status, out, err = compare("--check", "signed.json")
    assert (status, err) == (0, "")
    assert out == "The verdicts follow from the measurements.\n"
    status, out, err = compare("--rerun", "signed.json")
    assert (status, err) == (0, "")
    assert out.endswith("The verdicts are those that were signed.\n")


def test_json_is_the_result_and_nothing_else(compare):
    policies = "--policies", "float32", "float32+float32"
    status, out, err = compare(*GIVEN, *policies, *SHORT, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    result = ComparisonResult.from_dict(found)
    assert [row["verdict"] for row in result.rows] == [
        "reference",
        "within tolerance",
    ]


def test_a_policy_that_fails_is_a_row_and_a_status(compare):
    policies = "--policies", "float32", "float32+bfloat16_3x"
    status, out, _ = compare(*GIVEN, *policies, *SHORT)
    assert status == 1
    assert "float32+bfloat16_3x: failed: " in out


def test_a_sign_off_that_was_changed_has_another_status(compare, folder):
    text = (folder / "unnamed.json").read_text()
    (folder / "changed.json").write_text(text.replace('"worse"', '"fine"'))
    assert compare("--check", "unnamed.json")[0] == 0
    status, _, err = compare("--check", "changed.json")
    assert status == 1
    assert "bad: signed as 'fine', now 'worse'" in err


def test_help_has_an_example_and_the_statuses(compare):
    status, out, _ = compare("--help")
    assert status == 0
    assert "keras-mixprec compare digits:build digits:data --metric" in out
    assert "  2  the command was called in a wrong way" in out


WRONG = {
    "nothing": ((), "BUILD and DATA are needed"),
    "no data": (GIVEN[:1], "BUILD and DATA are needed"),
    "no colon": (("compared_here", GIVEN[1]), "must be 'module:name'"),
    "no module": (
        ("nowhere_at_all:build", GIVEN[1]),
        "run the command in the folder of the module",
    ),
    "no Python": (("damaged_here:build", GIVEN[1]), "SyntaxError"),
    "no such name": (("compared_here:none", GIVEN[1]), "cannot be imported"),
    "no function": (("compared_here:NUMBER", GIVEN[1]), "must be a function"),
    "number as data": ((GIVEN[0], "compared_here:NUMBER"), "must be arrays"),
    "no batch": ((GIVEN[0], "compared_here:nothing"), "`data`"),
    "policy": ((*GIVEN, "--policies", "half"), "Received: policies='half'"),
    "setting": ((*GIVEN, "--policies", "float32+fast"), "Received: 'fast'"),
    "twice": ((*GIVEN, "--policies", "float32", "float32"), "given twice"),
    "no plan": ((*GIVEN, "--policies", "none.json"), "none.json"),
    "not a plan": (
        (*GIVEN, "--policies", "other.json"),
        "not a precision plan",
    ),
    "seeds": ((*GIVEN, "--seeds", "0"), "`seeds` must be"),
    "seeds in words": ((*GIVEN, "--seeds", "few"), "invalid int value"),
    "steps": ((*GIVEN, "--steps", "7"), "multiple of `blocks`"),
    "blocks": ((*GIVEN, "--blocks", "1"), "`blocks` must be at least 2"),
    "tolerance": ((*GIVEN, "--tolerance", "-1"), "`tolerance` must be"),
    "metric": ((*GIVEN, "--metric", "depth"), "give `mode`"),
    "mode": ((*GIVEN, "--mode", "up"), "invalid choice: 'up'"),
    "scale": (
        (*GIVEN, "--policies", "mixed_float16", "--loss-scales", "x"),
        "presets",
    ),
    "backend": ((*GIVEN, "--backend", "theano"), "invalid choice: 'theano'"),
    "check none": (("--check", "none.json"), "No such file"),
    "check text": (("--check", "text.json"), "not JSON"),
    "check other": (("--check", "other.json"), "sign_off"),
    "rerun unnamed": (("--rerun", "unnamed.json"), "cannot be run again"),
    "check and more": (
        ("--check", "unnamed.json", *GIVEN, "--steps", "4", "--json"),
        "--check takes what is compared from the file alone: leave out build, "
        "data, json, steps",
    ),
    "rerun and more": (("--rerun", "unnamed.json", *GIVEN), "out build, data"),
    "metric in all": (
        (*GIVEN, *SHORT, "--metric", "val_loss"),
        "`metric` must be what `model.evaluate` returns, one of 'loss'",
    ),
    "a folder": ((*GIVEN, "--sign-off", "."), "Not a regular file"),
    "beneath a file": ((*GIVEN, "--html", "other.json/a.html"), "other.json"),
    "a file": ((*GIVEN, "--logdir", "other.json"), "File exists"),
    "a line": (("dividing_here:build", GIVEN[1]), "dividing_here.py, line 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_named(compare, name):
    arguments, expected = WRONG[name]
    status, _, err = compare(*arguments)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err
