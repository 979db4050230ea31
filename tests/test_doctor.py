"""`doctor` and `keras-mixprec doctor`, as a person calls them."""

import json
import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis.doctor.report import from_dict
from keras_mixprec.cli import main

ROOT = pathlib.Path(kmp.__file__).parents[1]
BACKEND = keras.backend.backend()
NUMBER = int, float
TEXT_OR_NONE = str, type(None)

# What docs/doctor.md says of the form of `--json`.
SCHEMA = {
    "schema": int,
    "backend": {
        "name": str,
        "version": TEXT_OR_NONE,
        "status": str,
        "error": str,
    },
    "kind": TEXT_OR_NONE,
    "devices": [
        {
            "name": str,
            "memory": (int, type(None)),
            "capability": TEXT_OR_NONE,
            "architecture": str,
            "instructions": (list, type(None)),
            "formats": {"*": {"status": str, "note": str, "source": str}},
        }
    ],
    "versions": {"*": str},
    "settings": [{"name": str, "value": str, "note": str}],
    "speed": [
        {
            "operation": str,
            "size": str,
            "mode": str,
            "seconds": (*NUMBER, type(None)),
            "ratios": {"*": NUMBER},
            "left_out": {"*": str},
        }
    ],
    "self_test": [
        {
            "format": str,
            "operation": str,
            "error": (*NUMBER, type(None)),
            "bound": NUMBER,
            "status": str,
            "note": str,
        }
    ],
    "findings": [
        {"name": str, "level": str, "text": str, "fix": str, "evidence": str}
    ],
    "recommendation": ({"policy": str, "reason": str}, None),
    "cache": str,
    "quick": bool,
    "date": str,
    "seconds": NUMBER,
}


def fits(value, form):
    if form is None:
        return value is None
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        keys = value.keys() if form.keys() == {"*"} else form.keys()
        forms = form if keys == form.keys() else dict.fromkeys(keys, form["*"])
        return value.keys() == keys and all(
            fits(value[key], forms[key]) for key in keys
        )
    if isinstance(form, list):
        return all(fits(one, form[0]) for one in value)
    if isinstance(form, tuple) and not isinstance(form[0], type):
        return any(fits(value, one) for one in form)
    return isinstance(value, form)


def run(*arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "keras_mixprec", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("measured")
        patch.setenv("KERAS_MIXPREC_CACHE_DIR", str(folder))
        yield kmp.doctor(quick=True)


def test_it_has_the_documented_form(report):
    found = json.loads(report.to_json())
    assert found["schema"] == 1
    assert fits(found, SCHEMA)
    assert from_dict(found).to_dict() == found
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"`{key}`" in text for key in SCHEMA)


def test_it_measures_what_the_device_has(report):
    assert report.backend["name"] == BACKEND
    formats = report.devices[0]["formats"]
    assert formats.keys() == {"bfloat16", "float16", "tf32", "float8"}
    operations = [row["operation"] for row in report.speed]
    assert operations == ["matmul", "convolution", "feed-forward"]
    emulated = formats["bfloat16"]["status"] == "emulated"
    for row in report.speed:
        assert row["seconds"] > 0
        assert emulated or row["ratios"]["bfloat16"] > 0
    assert {r["status"] for r in report.self_test} == {"right"}
    assert {"python", "keras", "numpy", BACKEND} <= report.versions.keys()


def test_the_recommendation_goes_by_it(report):
    formats = report.devices[0]["formats"]
    if formats["bfloat16"]["status"] == "emulated":
        # A quick run measures no format that the device has no units for.
        assert report.cache == ""
        assert report.recommendation["policy"] == "float32"
        return
    with open(report.cache) as file:
        kept = json.load(file)
    assert kept["quick"] is True
    assert kept["speed"] == report.speed[-1]["ratios"]
    assert report.recommendation["policy"] in ("mixed_bfloat16", "float32")


def test_it_is_one_screen_of_text(report):
    lines = str(report).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 130
    assert lines[0].lower().startswith(BACKEND)
    assert any(line.startswith('"auto" is: ') for line in lines)


def test_a_notebook_shows_tables(report):
    page = report._repr_html_()
    assert page.count("<table>") == page.count("</table>") >= 2
    assert report.recommendation["policy"] in page


def test_it_leaves_random_numbers_and_the_policy_alone():
    kmp.set_global_policy("float64")
    keras.utils.set_random_seed(3)
    expected = random.random(), np.random.rand()
    layer = keras.layers.Dense(1).name
    keras.utils.set_random_seed(3)
    kmp.doctor(quick=True)
    assert (random.random(), np.random.rand()) == expected
    assert keras.config.dtype_policy().name == "float64"
    number = int(layer.rpartition("_")[2]) if "_" in layer else 0
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"


def test_the_command_on_this_backend():
    done = run("--backend", BACKEND, "--quick", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert fits(found, SCHEMA)
    assert found["backend"]["name"] == BACKEND
    assert "doctor: matmul" in done.stderr
    assert "Traceback" not in done.stderr


OTHER = "jax" if BACKEND == "torch" else "torch"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        (
            f"raise ModuleNotFoundError('none', name={OTHER!r})",
            "missing",
            "none",
        ),
        ("import no_such_library", "broken", "no_such_library"),
        ("raise AttributeError('no float8_e4m3b11')", "broken", "e4m3b11"),
        ("raise ImportError('DLL load failed')", "broken", "DLL"),
        ("import os; os.kill(os.getpid(), 4)", "broken", "SIGILL"),
        ("import os; os._exit(3)", "broken", "status 3"),
        ("", "broken", "Error"),
    ],
    ids=[
        "missing",
        "dependency",
        "version",
        "library",
        "instruction",
        "exit",
        "empty",
    ],
)
def test_a_backend_that_cannot_be_used_is_a_row(tmp_path, code, status, text):
    """A real import of a package that does what broken ones do."""
    (tmp_path / f"{OTHER}.py").write_text(code)
    done = run("--backend", OTHER, "--json", PYTHONPATH=_path(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert fits(found, SCHEMA)
    assert found["backend"]["status"] == status
    assert text in found["backend"]["error"]
    assert found["findings"][0]["name"] == f"backend-{status}"


def _path(folder):
    return os.pathsep.join([str(folder), str(ROOT)])


def test_another_backend_from_python(tmp_path, monkeypatch, capsys):
    (tmp_path / f"{OTHER}.py").write_text(
        "raise ImportError('broken on purpose')"
    )
    monkeypatch.setenv("PYTHONPATH", _path(tmp_path))
    report = kmp.doctor(OTHER, quick=True)
    assert report.backend["name"] == OTHER
    assert not report.ok
    assert "broken on purpose" in str(report)
    assert "broken on purpose" in report._repr_html_()


def test_the_configured_backend_may_be_broken(tmp_path):
    (tmp_path / f"{OTHER}.py").write_text(
        "raise ImportError('broken on purpose')"
    )
    code = (
        "import keras_mixprec as kmp; report = kmp.doctor(quick=True);"
        "print(report.backend['name'], report.backend['status'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "KERAS_BACKEND": OTHER,
            "PYTHONPATH": _path(tmp_path),
        },
    )
    assert done.stdout == f"{OTHER} broken\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "theano"], "invalid choice: 'theano'"),
        (["--backend", ""], "invalid choice: ''"),
        (["--backend"], "expected one argument"),
        (["--backend", "TORCH"], "invalid choice: 'TORCH'"),
        (["--quick=3"], "ignored explicit argument '3'"),
        (["--html", "page.html"], "unrecognized arguments"),
        (["logs"], "unrecognized arguments: logs"),
        (["--json", "yes"], "unrecognized arguments: yes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_commands_are_refused(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *arguments])
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"backend": "theano"}, ValueError),
        ({"backend": 3}, ValueError),
        ({"quick": "yes"}, TypeError),
        ({"quick": None}, TypeError),
    ],
    ids=str,
)
def test_wrong_calls_are_refused(arguments, error):
    with pytest.raises(error, match=f"`{next(iter(arguments))}` must be"):
        kmp.doctor(**arguments)


def test_the_help_has_an_example_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "keras-mixprec doctor --backend torch --quick" in text
    assert all(f"\n  {status}  " in text for status in (0, 1, 2))
