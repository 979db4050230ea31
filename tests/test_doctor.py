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
from keras_mixprec.analysis.doctor.report import DoctorReport
from keras_mixprec.cli import main

ROOT = pathlib.Path(kmp.__file__).parents[1]
BACKEND = keras.backend.backend()
OTHER = "jax" if BACKEND == "torch" else "torch"
NUMBER = int, float

# The form of `--json` in docs/doctor.md: types by name, with a question mark if
# null is allowed.
FORM = (
    "schema:int backend:dict kind:str? devices:list versions:dict quick:bool "
    "settings:dict speed:list self_test:list findings:list cache:str date:str "
    "recommendation:dict? seconds:number"
)
FORMS = {
    "backend": "name:str version:str? status:str error:str",
    "devices": "name:str memory:int? capability:str? architecture:str "
    "instructions:list? formats:dict",
    "formats": "status:str note:str source:str matrix:bool",
    "speed": "operation:str size:str mode:str seconds:number? ratios:dict "
    "left_out:dict",
    "self_test": "format:str operation:str error:number? bound:number "
    "status:str note:str",
    "findings": "name:str level:str text:str fix:str evidence:str",
    "recommendation": "policy:str reason:str",
}
TYPES = {"int": int, "str": str, "number": NUMBER, "bool": bool}
TYPES |= {"dict": dict, "list": list}


def assert_form(found, form=FORM):
    kinds = dict(field.split(":") for field in form.split())
    assert found.keys() == kinds.keys()
    for name, kind in kinds.items():
        value = found[name]
        assert isinstance(value, TYPES[kind.strip("?")]) or (
            value is None and kind.endswith("?")
        )
        if name in ("versions", "settings", "ratios", "left_out"):
            kind = NUMBER if name == "ratios" else str
            assert all(isinstance(v, kind) for v in value.values())
        elif name in FORMS and value is not None:
            parts = [*value.values()] if name == "formats" else value
            for part in parts if isinstance(parts, list) else [parts]:
                assert_form(part, FORMS[name])


def state():
    layer = keras.layers.Dense(1).name
    policy = keras.config.dtype_policy().name
    return random.random(), np.random.rand(), policy, layer


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """A report, and states: as it would be without one, and after it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("measured")
        patch.setenv("KERAS_MIXPREC_CACHE_DIR", str(folder))
        states = []
        for examine in (lambda: None, lambda: kmp.doctor(quick=True)):
            keras.backend.clear_session()  # Names are counted anew.
            kmp.set_global_policy("float64")
            keras.utils.set_random_seed(3)
            report = examine()
            states.append(state())
        kmp.set_global_policy("float32")
        yield report, states


@pytest.fixture
def report(examined):
    return examined[0]


@pytest.mark.long
def test_it_leaves_names_random_numbers_and_the_policy_alone(examined):
    without, after = examined[1]
    assert after == without


def test_it_has_the_documented_form(report):
    found = json.loads(report.to_json())
    assert found["schema"] == 1
    assert_form(found)
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"`{key}`" in text for key in found)


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
    assert len(report.self_test) >= 12
    assert {"python", "keras", "numpy", BACKEND} <= report.versions.keys()


def test_the_recommendation_goes_by_it(report):
    formats = report.devices[0]["formats"]
    if formats["bfloat16"]["status"] == "emulated":
        # A quick run measures no format that the device has no units for.
        assert report.cache == ""
        assert report.recommendation["policy"] == "float32"
        return
    kept = json.loads(pathlib.Path(report.cache).read_text())
    assert kept["quick"] is True
    assert kept["speed"] == report.speed[-1]["ratios"]
    assert report.recommendation["policy"] in ("mixed_bfloat16", "float32")


def test_it_is_text_also_in_a_notebook(report):
    lines = str(report).splitlines()
    assert lines[0].lower().startswith(BACKEND)
    assert any(line.startswith('"auto" is: ') for line in lines)
    assert report.recommendation["policy"] in report._repr_html_()


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Function that puts a package in place of another backend's."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)])
    )
    monkeypatch.syspath_prepend(tmp_path)
    return (tmp_path / f"{OTHER}.py").write_text


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        (f"raise ModuleNotFoundError('x', name={OTHER!r})", "missing", "x"),
        ("raise ImportError('DLL failed')", "broken", "DLL failed"),
        ("import os; os.kill(os.getpid(), 4)", "broken", "SIGILL"),
        ("import os; os._exit(3)", "broken", "status 3"),
    ],
    ids=["missing", "library", "crash", "exit"],
)
def test_a_backend_that_cannot_be_used_is_a_finding(
    broken, code, status, text, capsys
):
    """A real import of a package that does what broken ones do."""
    broken(code)
    assert main(["doctor", "--backend", OTHER, "--json"]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    found = json.loads(out)
    assert_form(found)
    assert found["backend"]["status"] == status
    assert text in found["backend"]["error"]
    assert found["findings"][0]["name"] == f"backend-{status}"
    report = DoctorReport(**{k: v for k, v in found.items() if k != "schema"})
    assert not report.ok
    assert text in str(report)
    assert text in report._repr_html_()


@pytest.mark.one_backend
def test_a_broken_backend_from_python(broken):
    broken("raise ImportError('on purpose')")
    # As Keras is set to it, it cannot be imported at all.
    code = (
        "import keras_mixprec as kmp; report = kmp.doctor(quick=True);"
        "print(report.backend['name'], report.backend['status'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": OTHER},
    )
    assert done.stdout == f"{OTHER} broken\n", done.stderr
