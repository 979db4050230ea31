"""The command line, as a person uses it."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_mixprec
from keras_mixprec.cli import main
from keras_mixprec.cli.demo import run_demo
from keras_mixprec.reporting.report import load_report

BACKEND = keras.backend.backend()
RESULT = re.compile(r"^(\w+) +([\d.]+)% +(\d+) +[\d.]+ s$", re.MULTILINE)


def run(*command, cwd=None):
    # One thread: PyTorch's wait for each other on a machine that is busy.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("KERAS_BACKEND", None)
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], f"keras-mixprec {keras_mixprec.__version__}"),
        (["--help"], "demo"),
        (["demo", "--help"], "--log-dir"),
    ],
    ids=["version", "help", "demo help"],
)
def test_it_says_what_it_is(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert expected in capsys.readouterr().out


def test_demo_trains_logs_and_compares(tmp_path):
    command = ("-m", "keras_mixprec", "demo", "--epochs", "2")
    done = run(*command, "--backend", BACKEND, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1:] for row in RESULT.findall(done.stdout)}
    assert set(rows) == {"mixed_float16", "float32"}
    assert all(float(accuracy) > 80 for accuracy, _ in rows.values())
    assert int(rows["mixed_float16"][1]) > 0
    assert f"on {BACKEND}" in done.stdout
    assert "steps skipped" in done.stdout
    assert done.stdout.endswith("tensorboard --logdir logs\n")
    (run_shown,) = load_report(tmp_path / "logs").to_dict().values()
    heat = {m["name"]: m for m in run_shown["heat"]["metrics"]}
    # On a busy machine the last reading may be given up, and it is said.
    said = " ".join(done.stdout.split())
    withheld = "those of activations and gradients take" in said
    for part in "activation", "gradient", "weight":
        shown = heat[f"{part}_headroom_bits"]
        assert shown["steps"][0] == 1
        assert shown["steps"][-1] == 90
        of = {x["path"] for x in run_shown["layers"] if x["parameters"]}
        ends = [
            bits[:1] if withheld else [bits[0], bits[-1]]
            for path, bits in shown["values"].items()
            if part != "weight" or path in of
        ]
        assert not np.isnan(ends).any()


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("sklearn", "pip install scikit-learn"),
        ("tensorflow", "pip install tensorflow"),
        ("jax", "pip install jax"),
        ("torch", "pip install torch"),
    ],
    ids=["sklearn", "tensorflow", "jax", "torch"],
)
def test_a_missing_package_is_named(module, advice):
    backend = BACKEND if module == "sklearn" else module
    # What Python itself does with a module that it must not import.
    code = (
        f"import sys; sys.modules[{module!r}] = None;"
        "from keras_mixprec.cli import main;"
        f"sys.exit(main(['demo', '--backend', {backend!r}]))"
    )
    done = run("-c", code)
    assert done.returncode == 2
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["demo", "--log-dir", str(file / "logs")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("keras-mixprec: ")
    assert str(file / "logs") in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--epochs", "0"], "argument --epochs"),
        (["demo", "--seed", "-1"], "argument --seed"),
        (["demo", "--backend", "theano"], "invalid choice: 'theano'"),
    ],
    ids=["none", "unknown", "epochs", "seed", "backend"],
)
def test_wrong_commands_are_refused(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [{"epochs": 0}, {"seed": -1}], ids=str)
def test_wrong_numbers_are_refused(arguments, tmp_path):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be at least"):
        run_demo(log_dir=str(tmp_path), **arguments)


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("keras_mixprec.cli.demo.run_demo", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["report", "lint"])
def test_a_wrong_call_has_one_exit_status(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
