"""The command line, as a person uses it."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import keras_mixprec
from keras_mixprec.cli import main
from keras_mixprec.cli.demo import run_demo
from keras_mixprec.cli.speed import median_seconds, speed_sentence
from keras_mixprec.reporting.report import load_report

BACKEND = keras.backend.backend()
README = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text()
RESULT = re.compile(
    r"^(float[\w ]+?) +([\d.]+)% +(\d+) +(\d+) +\d+%$", re.MULTILINE
)


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


def test_the_demo_names_a_layer_and_repairs_it(tmp_path):
    done = run(
        "-m", "keras_mixprec", "demo", "--backend", BACKEND, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1:] for row in RESULT.findall(done.stdout)}
    accuracy = {name: float(row[0]) for name, row in rows.items()}
    assert accuracy["float16 alone"] < 20
    assert accuracy["float16 with the tuner"] > accuracy["float32"] - 5
    # The repaired layer, and the last one, which is float32 by design.
    assert rows["float16 with the tuner"][2] == "2"
    assert "forward_overflow in 'response_norm'" in done.stdout
    assert len(done.stdout.splitlines()) <= 25
    assert (tmp_path / "logs" / "report.html").exists()
    assert load_report(tmp_path / "logs").to_dict()
    if BACKEND == "tensorflow":  # The one that the README shows.
        shown = README.partition("\n```\nHandwritten")[2].partition("\n```")[0]
        printed = done.stdout.replace(f"{tmp_path}/", "")
        assert shape_of(f"Handwritten{shown}") == shape_of(printed)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"instructions": ("AVX2",)}, r"is emulated .*nothing is measured"),
        ({"instructions": None}, r"does not report .*nothing is measured"),
        ({"kind": "cuda"}, "keras-mixprec doctor"),
    ],
    ids=["emulated", "unknown", "gpu"],
)
def test_speed_is_measured_on_cpus_with_units_alone(found, expected):
    assert re.search(expected, speed_sentence({"kind": "cpu", **found}))


def test_speed_is_that_of_steps():
    seconds = median_seconds(scale=1, steps=1)
    assert [*seconds] == ["float32", "mixed_bfloat16"]
    assert min(seconds.values()) > 0


def shape_of(output):
    """A text without its numbers, line breaks and progress."""
    output = re.sub(r"^PrecisionTuner: check.*\n", "", output, flags=re.M)
    numbers = re.sub(r"\d[\d.]*(e[+-]\d+)?", "0", output)
    return " ".join(numbers.replace("steps", "step").split())


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
