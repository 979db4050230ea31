"""Each example, run as a person runs it, prints what its title claims."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
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
    assert out.endswith("differ from the plan: 0\n")
    assert (folder / "plan.json").exists()


def check_repair(out, folder):
    rows = re.findall(r"^(float32|mixed_float16.*?) +([\d.]+)%$", out, re.M)
    exact, broken, repaired = (float(accuracy) for _, accuracy in rows)
    assert broken < 50 < 90 < exact
    assert repaired > exact - 2
    assert "demotes 'out_2', 'add_2' to float32" in out
    assert (folder / "plan.json").exists()


def check_data_parallel(out, folder):
    said = re.sub(r"\s+", " ", out)
    assert "forward_overflow in up (found by worker 1)" in said
    assert "Repaired: it is in float32 now" in said


ON_ALL_BACKENDS = {
    "keep_layers_in_float32": check_plan,
    "repair_in_training": check_repair,
}
ON_ONE = {"custom_loop": check_loop, "gan_two_optimizers": check_gan}
CHECKS = ON_ALL_BACKENDS | {f"{n}_{BACKEND}": c for n, c in ON_ONE.items()}
if BACKEND == "torch":
    CHECKS["data_parallel_torch"] = check_data_parallel


# One example that every backend runs is enough off TensorFlow.
def example(name):
    seldom = BACKEND != "tensorflow" and name in ON_ALL_BACKENDS
    slow = seldom and name != "keep_layers_in_float32"
    return pytest.param(name, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("name", [example(name) for name in CHECKS])
def test_prints_what_it_claims(name, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # One thread: PyTorch's wait for each other on a busy machine.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    CHECKS[name](done.stdout, tmp_path)


def test_every_example_is_run_on_some_backend():
    backends = ("tensorflow", "jax", "torch")
    known = {f"{n}_{b}" for n in ON_ONE for b in backends} | {*ON_ALL_BACKENDS}
    known.add("data_parallel_torch")
    assert {path.stem for path in FOLDER.glob("*.py")} == known


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem
)
def test_is_short_and_says_what_it_prints(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    title, _, rest = text.partition('"""\n\nimport')
    assert rest
    assert "It prints " in title
    assert f"Run it with `python examples/{path.name}`." in title
