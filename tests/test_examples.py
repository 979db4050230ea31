"""Each example, run as a person runs it, prints what its title claims."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import keras
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
BACKEND = keras.backend.backend()


def check_loop(out, folder):
    rows = [line.split() for line in out.splitlines()[-5:]]
    losses, scales, skipped = zip(*(row[1:] for row in rows), strict=True)
    assert float(losses[-1]) < 0.5 < float(losses[0])
    assert float(scales[-1]) < 2**24
    assert 0 < int(skipped[0]) <= int(skipped[-1]) < 20


def check_gan(out, folder):
    mean, painter, recommend = out.splitlines()[-3:]
    x, y = map(float, re.findall(r"-?\d+\.\d+", mean))
    assert 2 < x < 4
    assert -3 < y < -1
    assert painter.partition(":")[2] == recommend.partition(":")[2]
    assert int(re.search(r"(\d+) skipped", painter)[1]) > 0


def check_plan(out, folder):
    for path in ("attention/softmax", "norm", "logits"):
        assert re.search(rf"^{path} +float32 +\w+", out, re.MULTILINE)
    assert re.search(r"^hidden +Dense +float16", out, re.MULTILINE)
    assert out.endswith("the plan: 0\n")
    assert (folder / "plan.json").exists()


def check_repair(out, folder):
    rows = re.findall(r"^(float32|mixed_float16.*?) +([\d.]+)%$", out, re.M)
    exact, broken, repaired = (float(accuracy) for _, accuracy in rows)
    assert broken < 50 < 90 < exact
    assert repaired > exact - 2
    assert "demotes 'out_2', 'add_2'" in out
    assert (folder / "plan.json").exists()


OF_ANY = {
    "keep_layers_in_float32": check_plan,
    "repair_in_training": check_repair,
}
OF_ONE = {
    f"custom_loop_{BACKEND}": check_loop,
    f"gan_two_optimizers_{BACKEND}": check_gan,
}
MARKS = {f"gan_two_optimizers_{BACKEND}": pytest.mark.slow}
MARKS |= dict.fromkeys(OF_ANY, pytest.mark.one_backend)


@pytest.mark.chosen_by_backend
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in OF_ONE | OF_ANY],
)
def test_prints_what_it_claims(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    runpy.run_path(str(PATHS[name]), run_name="__main__")
    {**OF_ONE, **OF_ANY}[name](capsys.readouterr().out, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "torch", reason="is an example of torch")
def test_each_of_two_processes_repairs_what_one_has_found(tmp_path):
    # Processes that it starts import it by its path.
    done = subprocess.run(
        [sys.executable, PATHS["data_parallel_torch"]],
        capture_output=True,
        text=True,
        # One thread: PyTorch's wait for each other on a busy machine.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    assert re.search(r"'up' [^.]*\(.*worker 1 ", said)
    assert "was demoted" in said


@pytest.mark.one_backend
def test_every_example_is_run_on_some_backend():
    backends = "tensorflow", "jax", "torch"
    known = {f"custom_loop_{b}" for b in backends} | {*OF_ANY}
    known |= {f"gan_two_optimizers_{b}" for b in backends}
    assert PATHS.keys() == known | {"data_parallel_torch"}
