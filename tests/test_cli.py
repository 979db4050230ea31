"""The command line, as a person uses it."""

import json
import re
import traceback

import keras
import numpy as np
import pytest
from lint_cases import scale_of_a_billionth

import keras_mixprec
from keras_mixprec.cli import main
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.reporting.report import load_report

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
MODULE = """
import keras, numpy as np

SAMPLES = np.random.default_rng(0).normal(size=(32, 4))

def build(*middle):
    dense = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), *middle, dense])
    model.compile("sgd", "mse")
    return model

def breaks():
    return build(*map(keras.layers.Rescaling, (1e6, 1e-6)))

def data():
    return SAMPLES, SAMPLES[:, :2]
"""


class Unknown(keras.layers.Layer):
    def call(self, x):
        return x


def own_loss(y, prediction):
    return keras.ops.mean((y - prediction) ** 2)


def sequential(*layers):
    return keras.Sequential([keras.Input((4,)), *layers])


def save_models(folder):
    layers, inputs = keras.layers, keras.Input((4,))
    with_own_loss = scale_of_a_billionth()
    with_own_loss.compile("sgd", own_loss)
    for name, model in {
        "model": sequential(layers.Dense(64), layers.Dense(3, name="head")),
        "billionth": scale_of_a_billionth(),
        "own_loss": with_own_loss,
        "float32": keras.Model(inputs, layers.Dense(8)(inputs)),
        "own": sequential(Unknown()),
    }.items():
        model.save(folder / f"{name}.keras")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data, modules and plans, right and wrong ones."""
    folder = tmp_path_factory.mktemp("files")
    save_models(folder)
    x, y = np.ones((8, 4), "float32"), np.full((8, 8), 1.5e5)
    np.save(folder / "x.npy", x)
    np.savez(folder / "x.npz", x=x)
    np.savez(folder / "y.npz", y=y)
    np.savez(folder / "data.npz", x=x, y=y)
    np.savez(folder / "wide.npz", x=np.ones((8, 5), "float32"))
    for name, text in {
        "made.py": MODULE,
        "dividing.py": "\nRATE = 1 / 0",
        "text.keras": "no model",
        "text.npz": "no arrays",
        "other.json": '{"format": "something"}',
    }.items():
        (folder / name).write_text(text)
    bfloat16 = {"dense": "mixed_bfloat16", "head": "float32"}
    PrecisionPlan(bfloat16).save(folder / "plan.json")
    PrecisionPlan({"dense": "mixed_bfloat16"}).save(folder / "tuned.json")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Function that runs a command; returns its status, stdout and stderr."""
    monkeypatch.chdir(folder)
    # Commands set it, for a process of their own.
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.syspath_prepend(folder)

    def run(command):
        try:
            status = main(command.split())
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def test_the_version(run):
    version = f"keras-mixprec {keras_mixprec.__version__}\n"
    assert run("--version") == (0, version, "")


def test_the_demo_names_a_layer_and_repairs_it(run, folder):
    status, out, _ = run(f"demo --backend {BACKEND} --epochs 3")
    assert status == 0
    rows = re.findall(r"^(float[\w, ]+?) +([\d.]+)% +\d+ +(\d+) ", out, re.M)
    accuracy = {name: float(share) for name, share, _ in rows}
    assert accuracy["float16, Keras alone"] < 20
    assert accuracy[rows[-1][0]] > accuracy["float32"] - 5
    # The repaired layer, and the last one, which is float32 by design.
    assert rows[-1][2] == "2"
    assert "forward_overflow in 'response_norm'" in out
    assert len(out.splitlines()) <= 25
    assert (folder / "logs" / "report.html").exists()
    assert load_report(folder / "logs").to_dict()


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError(name="sklearn.x"), 2, "install scikit-learn"),
        (ModuleNotFoundError(name="torch"), 2, "install torch"),
    ],
    ids=["interrupt", "sklearn", "torch"],
)
def test_a_command_ends_without_a_traceback(
    raised, status, said, run, monkeypatch
):
    def raises(*arguments):
        raise raised

    monkeypatch.setattr("keras_mixprec.cli.demo.run_demo", raises)
    found, out, err = run("demo")
    assert (found, out, said in err) == (status, "", True)
    assert said or not err


def test_a_traceback_is_shown_on_demand(run):
    with pytest.raises(ValueError, match="no such file"):
        run("--traceback lint none.keras")


# `compare`.

COMPARE = "compare made:build made:data"
SHORT = f"{COMPARE} --steps 4 --blocks 2 --seeds 2 --batch-size 8"


def test_it_compares_and_writes_a_page(run, folder):
    status, out, _ = run(
        f"{SHORT} --policies float32 tuned.json --html out.html"
    )
    assert status == 0
    (row,) = [line for line in out.splitlines() if line.startswith("tuned ")]
    assert row.endswith(("within tolerance", "not told apart"))
    assert re.search(r"^Best: (float32|tuned)\b", out, re.MULTILINE)
    assert '<table class="numbers">' in (folder / "out.html").read_text()


def test_a_comparison_in_which_16_bits_fail_has_another_status(run):
    breaks = SHORT.replace("made:build", "made:breaks")
    assert run(f"{breaks} --policies float32 mixed_float16")[0] == 1


# `lint`.


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("billionth.keras", 1),
        ("billionth.keras --fail-on never", 0),
        ("billionth.keras --ignore KMP201,KMP4", 0),
        ("float32.keras --fail-on low", 1),
        ("float32.keras --policy mixed_float16 --data x.npy", 0),
    ],
)
def test_the_status_of_lint_says_what_was_found(arguments, status, run):
    found, out, err = run(f"lint {arguments}")
    assert (found, err) == (status, "")
    assert out.startswith("Lint of ")


def test_a_rule_of_lint_is_explained(run):
    status, out, _ = run("lint --explain KMP201")
    assert (status, out.split(",")[0]) == (0, "KMP201 argument_beyond_format")


def test_json_of_lint_has_the_documented_keys(run):
    _, out, _ = run("lint billionth.keras --json --data data.npz")
    result = json.loads(out)
    keys = ["version", "model", "backend", "policy", "counts", "findings"]
    assert list(result) == keys
    assert (result["version"], result["policy"]) == (1, None)
    keys = ["rule", "severity", "layer", "reason", "fix", "repairs", "numbers"]
    assert list(result["findings"][0]) == ["code", *keys]
    severities = [f["severity"] for f in result["findings"]]
    counts = {s: severities.count(s) for s in ("high", "medium", "low")}
    assert result["counts"] == counts
    assert counts["high"] >= 2


def test_a_model_whose_loss_cannot_be_loaded_is_checked_without(run):
    status, out, err = run("lint own_loss.keras --json")
    expected = json.loads(run("lint billionth.keras --json")[1])["findings"]
    assert status == 1
    assert json.loads(out)["findings"] == expected
    assert "own_loss" in err


# `convert`.

CONVERT = "convert --calibration x.npz --out out.keras --to"


@pytest.mark.parametrize(
    ("model", "to", "kernels"),
    [
        ("model", "plan.json", ["bfloat16", "float32"]),
        # A loss that only training needs does not have to load.
        ("own_loss", "bfloat16", ["bfloat16"]),
    ],
)
def test_a_model_is_converted(model, to, kernels, run, folder):
    asked = f"{to} {model}.keras --html pages/report.html"
    status, out, said = run(f"{CONVERT} {asked}")
    assert status == 0
    written = "Written: out.keras", "Written: pages/report.html"
    steps = f"Loading {model}.keras", f"Converting to {to}", *written
    assert all(step in said for step in steps)
    small = keras.saving.load_model(folder / "out.keras")
    assert [v.dtype for v in small.weights if v.name == "kernel"] == kernels
    assert re.search(r"^Weights: .* before", out, re.M)
    assert "<td>head</td>" in (folder / "pages/report.html").read_text()


# Wrong arguments are refused before anything is loaded.
EARLY = {
    f"{CONVERT} float8 none.keras": "--to float8",
    f"{CONVERT} float16 out.keras": "another file",
    "convert model.keras --to float16 --calibration x.npz": "--out",
    "convert x.npy --to auto --calibration x.npz --out x.npy": "end in .keras",
}
WRONG = EARLY | {
    "": "required: command",
    "train": "invalid choice: 'train'",
    "demo --epochs 0": "`epochs` must",
    "demo --log-dir x.npz/logs": "x.npz/logs",
    "doctor --slow": "unrecognized arguments: --slow",
    "report none": "'none'",
    "serve none": "folder. Received: none",
    "serve x.npz": "folder. Received: x.npz",
    "serve . --port 99999": "--port=99999",
    "lint": "required: model",
    "lint billionth.keras --fail-on fatal": "'fatal'",
    "lint billionth.keras --import nowhere": "Received: --import='nowhere'",
    "lint billionth.keras --data none.npz": "Received: none.npz",
    "lint none.keras": "file. Received: none.keras",
    "lint --explain E501": "codes of rules",
    "lint text.keras": "no .keras file",
    "lint own.keras": "'Unknown': add --import",
    "lint float32.keras --data text.npz": "plain arrays",
    "lint float32.keras --data y.npz": "no array x",
    "lint billionth.keras --data wide.npz": "found shape",
    "compare dividing:build made:data": "dividing.py, line 2",
    "compare build made:data": "'module:name'",
    "compare made:data made:data": "`build` must return",
    f"{COMPARE} --steps 7": "steps=7",
    f"{COMPARE} --batch-size x": "'x'",
    f"{COMPARE} --mode best": "'best'",
    f"{COMPARE} --policies none.json": "none.json",
    f"{COMPARE} --html x.npz/page": "x.npz",
    f"{COMPARE} --resume other.json": "other.json",
    f"{SHORT} --metric accuracy": "'loss'",
    f"{COMPARE} --policies other.json": "precision plan",
    f"{CONVERT} float16 model.keras --calibration wide.npz": "`calibration`",
    f"{CONVERT} other.json model.keras": "precision plan",
    f"{CONVERT} float16 model.keras --tolerance 1e-9": "tolerance=1e-09",
    f"{CONVERT} float16 model.keras --batch-size 0": "batch_size=0",
}


@pytest.mark.parametrize("command", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_call_is_named_and_writes_nothing(command, run, folder):
    def models():
        return {p: p.stat().st_mtime_ns for p in folder.glob("*.keras")}

    before = models()
    status, _, err = run(command)
    assert status == 2
    assert WRONG[command] in err
    assert "Traceback" not in err
    # Beside what argparse adds, and what has been done before.
    lines = [line for line in err.splitlines() if "keras-mixprec: " in line]
    assert len(lines) == 1 or "usage:" in err
    assert command not in EARLY or "Loading" not in err
    assert models() == before


# A defect of a tool: what raises in it, planted.
INSIDE = "keras_mixprec.analysis"
DEFECTS = {
    "doctor": "keras_mixprec.cli.doctor.run_in_process",
    "demo": "keras_mixprec.cli.demo.build_model",
    "report logs": "keras_mixprec.reporting.report.load_report",
    "lint billionth.keras": f"{INSIDE}.lint.lint.ModelView",
    "lint float32.keras --policy mixed_float16 --data x.npy": (
        f"{INSIDE}.lint.data_rules.diagnose"
    ),
    COMPARE: f"{INSIDE}.comparison.run.find_devices",
    SHORT: f"{INSIDE}.comparison.training.model_share_in_16_bits",
    f"{CONVERT} float16 model.keras": (
        "keras_mixprec.inference.comparison.largest_activations"
    ),
}


@pytest.mark.parametrize("command", DEFECTS)
@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_defect_shows_its_traceback(command, kind, run, monkeypatch):
    def raises(*args, **kwargs):
        raise kind("planted")

    monkeypatch.setattr(DEFECTS[command], raises)
    with pytest.raises(Exception, match="planted") as error:
        run(command)
    shown = "".join(traceback.format_exception(error.value))
    assert "in raises" in shown
