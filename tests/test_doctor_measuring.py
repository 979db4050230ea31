"""How the doctor times, checks results, and keeps what it measured."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest

from keras_mixprec import recommend_policy
from keras_mixprec.analysis.doctor import self_test
from keras_mixprec.analysis.doctor.self_test import Result
from keras_mixprec.analysis.doctor.settings import find_settings
from keras_mixprec.analysis.doctor.speed import (
    Row,
    judge_modes,
    training_speed,
)
from keras_mixprec.analysis.doctor.timing import compare
from keras_mixprec.devices import measured
from keras_mixprec.devices.found import find_devices
from keras_mixprec.policies.hardware import recommend, slow_because

RNG = np.random.default_rng(0)


class Machine:
    """A clock, and functions that take a known time on it."""

    def __init__(self, slowdown=0.0):
        self.now = 0.0
        self.calls = []
        self._slowdown = slowdown

    def clock(self):
        return self.now

    def takes(self, name, *seconds):
        times = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def run():
            self.calls.append(name)
            self.now += next(times) * (1 + self._slowdown * self.now)

        return run


def test_compilation_is_left_out():
    machine = Machine()
    functions = {
        "float32": machine.takes("float32", 9.0, 0.2),
        "bfloat16": machine.takes("bfloat16", 30.0, 0.1),
    }
    found = compare(functions, 1.0, machine.clock)
    assert found.seconds == pytest.approx(0.2)
    assert found.ratios == {"bfloat16": pytest.approx(2.0)}


def test_a_machine_that_slows_down_slows_all_of_them():
    machine = Machine(slowdown=0.2)
    names = "float32", "bfloat16"
    functions = {n: machine.takes(n, 0.1) for n in names}
    found = compare(functions, 10.0, machine.clock)
    # Eight times as slow at the end; one after the other gives 0.4.
    assert found.ratios["bfloat16"] == pytest.approx(1.0, abs=0.05)


def test_a_slow_format_is_called_twice():
    machine = Machine()
    functions = {
        "float32": machine.takes("float32", 0.1),
        "float16": machine.takes("float16", 10.0),
    }
    found = compare(functions, 1.0, machine.clock)
    assert machine.calls.count("float16") == 2
    assert found.ratios["float16"] == pytest.approx(0.01)


def test_a_format_that_fails_is_a_reason():
    def fail():
        raise NotImplementedError("no kernel\nfor it")

    machine = Machine()
    functions = {"float32": machine.takes("float32", 0.1), "float16": fail}
    found = compare(functions, 0.5, machine.clock)
    assert found.ratios == {}
    assert found.errors == {"float16": "NotImplementedError: no kernel"}


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_a_right_product_is_within_the_bound(format):
    dtype = getattr(ml_dtypes, format, format)
    left = RNG.uniform(0.5, 1.5, (64, 512)).astype(dtype)
    right = RNG.uniform(0.5, 1.5, (512, 64)).astype(dtype)
    # Added up in float32, rounded once: what every library does.
    found = (left.astype("float32") @ right.astype("float32")).astype(dtype)
    exact = left.astype("float64") @ right.astype("float64")
    assert self_test.judge(format, "matmul", found, exact).status == "right"


def test_sums_kept_in_bfloat16_are_wrong():
    """As torch without oneDNN: 256 where it is 512 (pytorch#83863)."""
    ones = np.ones(512, ml_dtypes.bfloat16)
    total = np.zeros((), ml_dtypes.bfloat16)
    for one in ones:
        total = (total + one).astype(ml_dtypes.bfloat16)
    assert total == 256
    found = self_test.judge("bfloat16", "matmul", total, np.float64(512))
    assert found.status == "wrong"
    assert found.error == 0.5


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (np.full((4, 4), np.nan), "wrong"),
        (np.full((4, 4), np.inf), "wrong"),
        (np.zeros((4, 4)), "wrong"),
        (np.full((4, 4), 1.03), "inaccurate"),
        (np.full((4, 4), 1.0001), "right"),
    ],
    ids=["NaN", "infinite", "zeros", "3% off", "rounded"],
)
def test_wrong_numbers_are_named(found, status):
    result = self_test.judge("float16", "convolution", found, np.ones((4, 4)))
    assert result.status == status
    named = self_test.judge_results([result], "Some GPU")
    assert [f.name for f in named] == [
        f"{status}-float16" for _ in [0] if status != "right"
    ]
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
    assert "Some GPU fails in float16: matmul (TypeError: no)" in found[0].text


def test_settings_in_force_are_rows(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    found = {s.name: s for s in find_settings()}
    assert found["TF_ENABLE_ONEDNN_OPTS"].value == "0"
    ignored = found["TF_ENABLE_AUTO_MIXED_PRECISION"]
    assert ignored.value == "1"
    assert "graph_rewrite" in ignored.note
    assert "float32" in found["matmul precision"].value


def test_a_faster_mode_is_named():
    """As measured on TensorFlow, see docs/doctor.md."""
    size = "block", "8 x 32 x 512"
    xla = Row(*size, "XLA", 0.115, {"bfloat16": 0.95, "float16": 0.91}, {})
    graph = Row(*size, "graph", 0.156, {"bfloat16": 1.79}, {})
    (found,) = judge_modes([xla, graph])
    assert found.name == "slow-mode"
    # 0.115 s against 0.156 / 1.79.
    assert "1.3 times as fast in bfloat16 without XLA" in found.text
    assert judge_modes([xla]) == []
    failed = xla._replace(seconds=None, ratios={})
    assert judge_modes([failed]) == []
    assert training_speed([failed]) == {}
    assert judge_modes([graph, xla._replace(seconds=0.09)]) == []


def test_this_machine_computes_right():
    results = self_test.check_formats(["float32", "bfloat16", "float16"])
    assert {r.status for r in results} == {"right"}
    assert len(results) == 12


def keep(speed, wrong=(), quick=False):
    found = measured.Measured({"bfloat16": speed}, wrong, "2026-11-23", quick)
    return measured.save(find_devices(), found)


def test_what_was_measured_is_recommended_and_said():
    before = recommend_policy()
    assert before.capabilities["measured"] is None
    assert keep(1.9)
    after = recommend_policy()
    assert after.capabilities["measured"]["speed"] == {"bfloat16": 1.9}
    native = {**after.capabilities, "instructions": ("AVX512-BF16",)}
    native |= {"kind": "cpu", "compute_capability": None}
    assert recommend(native).policy == "mixed_bfloat16"
    assert "1.90 times" in recommend(native).reason
    assert slow_because("mixed_bfloat16", native) == ""


def test_a_slow_measurement_warns():
    capabilities = find_devices() | {"instructions": ("AVX512-BF16",)}
    capabilities |= {"kind": "cpu", "compute_capability": None}
    assert slow_because("mixed_bfloat16", capabilities) == ""
    speed = {"speed": {"bfloat16": 0.84}, "wrong": (), "date": "2026-11-23"}
    capabilities["measured"] = speed
    assert "0.84" in slow_because("mixed_bfloat16", capabilities)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 1}',
        '{"schema": 99}',
        '"' + "x" * 10_000,
    ],
    ids=["empty", "cut", "list", "null", "keys", "schema", "text"],
)
def test_a_damaged_measurement_is_ignored(content):
    path = keep(1.9)
    with open(path, "w") as file:
        file.write(content)
    assert recommend_policy().capabilities["measured"] is None
    assert keep(1.5)
    assert recommend_policy().capabilities["measured"]["speed"] == {
        "bfloat16": 1.5
    }


@pytest.mark.parametrize("speed", [float("nan"), -1.0, 0.0, float("inf"), "x"])
def test_a_speed_that_is_none_is_ignored(speed):
    path = keep(1.9)
    with open(path) as file:
        content = json.load(file)
    content["speed"]["bfloat16"] = speed
    with open(path, "w") as file:
        json.dump(content, file)
    assert recommend_policy().capabilities["measured"] is None


@pytest.mark.parametrize("key", ["version", "keras", "devices", "backend"])
def test_a_measurement_of_something_else_is_ignored(key):
    keep(1.9)
    other = find_devices() | {key: ["other"] if key == "devices" else "other"}
    assert measured.load(find_devices()) is not None
    assert measured.load(other) is None


def test_a_quick_measurement_does_not_replace_a_thorough_one():
    keep(1.9)
    keep(1.2, quick=True)
    assert measured.load(find_devices()).speed == {"bfloat16": 1.9}
    keep(1.3)
    assert measured.load(find_devices()).speed == {"bfloat16": 1.3}


def test_a_folder_that_cannot_be_written_to_keeps_nothing(
    monkeypatch, tmp_path
):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KERAS_MIXPREC_CACHE_DIR", str(file))
    assert keep(1.9) == ""
    assert recommend_policy().capabilities["measured"] is None


def test_the_cache_is_where_the_system_keeps_such(monkeypatch, tmp_path):
    monkeypatch.delenv("KERAS_MIXPREC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert measured.cache_folder() == tmp_path / "keras_mixprec"
