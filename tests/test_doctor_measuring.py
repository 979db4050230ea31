"""How the doctor measures speed, checks results, and keeps measurements."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from keras_mixprec import recommend_policy
from keras_mixprec.analysis.doctor import self_test
from keras_mixprec.analysis.doctor.self_test import Result
from keras_mixprec.devices import measured
from keras_mixprec.devices.found import find_devices
from keras_mixprec.devices.timing import compare

pytestmark = pytest.mark.one_backend

RNG = np.random.default_rng(0)


def no_kernel():
    raise NotImplementedError("no\nkernel")


@pytest.mark.parametrize(
    ("seconds", "slowdown", "ratio"),
    [
        # The first call of each compiles.
        ((9.0, 0.2, 30.0, 0.1), 0.0, 2.0),
        # Eight times as slow at the end; one after the other gives 0.4.
        ((0.1, 0.1, 0.1, 0.1), 0.2, 1.0),
    ],
    ids=["compilation", "slowing down"],
)
def test_functions_are_timed_in_turns(seconds, slowdown, ratio, clock):
    made = {"float32": 0, "float16": 0}
    start = clock.now

    def takes(name, first, later):
        def run():
            made[name] += 1
            factor = 1 + slowdown * (clock.now - start)
            clock.wait(factor * (first if made[name] == 1 else later))

        return run

    functions = {
        "float32": takes("float32", *seconds[:2]),
        "float16": takes("float16", *seconds[2:]),
        "tf32": no_kernel,
    }
    found = compare(functions, 10.0 if slowdown else 1.0)
    assert found.ratios == {"float16": pytest.approx(ratio, abs=0.05 * ratio)}
    assert found.errors == {"tf32": "NotImplementedError: no kernel"}
    assert slowdown or found.seconds == pytest.approx(seconds[1])


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_a_right_product_is_within_the_bound(format):
    dtype = getattr(ml_dtypes, format, format)
    left = RNG.uniform(0.5, 1.5, (64, 512)).astype(dtype)
    right = RNG.uniform(0.5, 1.5, (512, 64)).astype(dtype)
    # Added up in float32, rounded once: what every library does.
    found = (left.astype("float32") @ right.astype("float32")).astype(dtype)
    exact = left.astype("float64") @ right.astype("float64")
    assert self_test.judge(format, "matmul", found, exact).status == "right"


@pytest.mark.parametrize(
    ("found", "status"),
    [(np.nan, "wrong"), (1.03, "inaccurate"), (1.0001, "right")],
)
def test_wrong_numbers_are_named(found, status):
    exact, found = np.ones((4, 4)), np.full((4, 4), found)
    result = self_test.judge("float16", "convolution", found, exact)
    assert result.status == status
    named = self_test.judge_results([result], "Some GPU")
    names = [f"{status}-float16"] if status != "right" else []
    assert [f.name for f in named] == names
    assert all("Some GPU" in f.text and "convolution" in f.text for f in named)


def test_an_operation_that_fails_is_named():
    bound = self_test.bound("float16", "matmul")
    result = Result("float16", "matmul", None, bound, "fails", "TypeError: no")
    results = [result, result._replace(format="float32")]
    found = self_test.judge_results(results, "Some GPU")
    assert [(f.name, f.level) for f in found] == [
        ("fails-float16", "warning"),
        ("fails-float32", "error"),
    ]
    named = "Some GPU", "float16", "matmul", "TypeError: no"
    assert all(part in found[0].text for part in named)


# What is kept.


def keep(speed, wrong=(), quick=False):
    found = measured.Measured({"bfloat16": speed}, wrong, "2026-11-23", quick)
    return measured.save(find_devices(), found)


def kept():
    found = measured.load(find_devices())
    of_it = recommend_policy().capabilities["measured"]
    assert found is of_it is None or found.speed == of_it["speed"]
    return found and found.speed["bfloat16"]


def test_the_last_thorough_measurement_is_kept():
    assert kept() is None
    assert keep(1.9)
    keep(1.2, quick=True)
    assert kept() == 1.9
    keep(1.3)
    assert kept() == 1.3


@pytest.mark.parametrize("changed", [{"schema": 99}, {"speed": None}, None])
def test_a_damaged_measurement_is_ignored(changed):
    path = pathlib.Path(keep(1.9))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changed) if changed else "{")
    assert kept() is None
    assert keep(1.5)
    assert kept() == 1.5


@pytest.mark.parametrize("key", ["version", "keras", "devices", "backend"])
def test_a_measurement_of_something_else_is_ignored(key):
    keep(1.9)
    other = find_devices() | {key: ["other"] if key == "devices" else "other"}
    assert kept() == 1.9
    assert measured.load(other) is None


def test_a_folder_that_cannot_be_written_to_keeps_nothing(
    monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_MIXPREC_CACHE_DIR", str(tmp_path / "file"))
    assert keep(1.9) == ""
    assert kept() is None
