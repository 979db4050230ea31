"""Damaged plans, batches and logs: the promised errors, when they are read.

Every file is damaged byte by byte where it is short, at places of a seeded
generator where it is long, and every value of its JSON is exchanged for others.
"""

import copy
import io
import json
import math
import os
import random
import zipfile

import keras
import numpy as np
import pytest
from tuner_models import chain, demoted, fit, tuner

import keras_mixprec as kmp
from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.report import MixPrecReport
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.source import Point
from keras_mixprec.tuning.demotions import Repairs
from keras_mixprec.tuning.plan_store import starting_from

STRANGE = [
    None,
    True,
    -1,
    0,
    10**400,
    1.5,
    math.inf,
    math.nan,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    {},
    {"x": 1},
]


def places(value, path=()):
    """The path of every value within a JSON value."""
    yield path
    inner = []
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, item in inner:
        yield from places(item, (*path, key))


def changed(value, path, new):
    """A copy of a JSON value with another one at a path; `del` for none."""
    if not path:
        return new
    whole = copy.deepcopy(value)
    *way, last = path
    holder = whole
    for key in way:
        holder = holder[key]
    if new is del_:
        del holder[last]
    else:
        holder[last] = new
    return whole


def del_():
    """Stands for leaving a value out."""


def damaged_json(value):
    for path in places(value):
        for new in [*STRANGE, *([del_] if path else [])]:
            yield path, new, changed(value, path, new)


def damaged_bytes(data, count=400):
    """Cut, with bits turned, bytes set, put in and left out."""
    source = random.Random(0)
    for size in range(0, len(data), max(len(data) // 40, 1)):
        yield data[:size]
    for _ in range(count):
        at, span = source.randrange(len(data)), source.choice([1, 1, 4, 64])
        new = source.choice(
            [
                bytes([data[at] ^ 1 << source.randrange(8)]),
                source.randbytes(span),
                bytes(span),
                b"",
            ]
        )
        yield data[:at] + new + data[at + span :]


def survives(read, data, path, errors=ValueError):
    """Whether a damaged file is read; or it raises what is promised."""
    path.write_bytes(data)
    try:
        read(path)
    except errors:
        return False
    assert path.read_bytes() == data
    return True


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """What a tuner wrote that demoted layers."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    fit(chain(), [1000.0] * 4, tuner(path))
    content = json.loads(path.read_text())
    assert content["tuner"]["demotions"]
    return content


@pytest.fixture(scope="module")
def load():
    """What a tuner does with a plan before training, and what follows it."""
    keras.utils.set_random_seed(0)
    model = chain()
    return lambda path: start_from(path, model)


def start_from(path, model):
    as_built = kmp.PrecisionPlan.from_model(model)
    repairs = Repairs(model)
    try:
        start = starting_from(
            *tuner(path)._disk.load(), repairs.asked, repairs.containers()
        )
    finally:
        assert kmp.PrecisionPlan.from_model(model) == as_built
    repairs.follow(start)
    repairs.begin(0)
    _, paths = repairs.next_trial(10**6, 10**6, 1)
    assert set(repairs.as_built(paths)) is not None
    assert json.dumps(repairs.state(), allow_nan=False)
    repairs.plan(), repairs.demoted_fraction()
    kmp.apply_policy(model, as_built)


def test_every_value_of_a_plan(plan, load, tmp_path):
    read = 0
    for path, new, content in damaged_json(plan):
        data = json.dumps(content).encode()
        try:
            read += survives(load, data, tmp_path / "plan.json")
        except Exception as error:
            raise AssertionError(f"{path} as {new!r}") from error
    assert read > 10  # A reason may be any text.


def test_every_byte_of_a_plan(plan, load, tmp_path):
    for data in damaged_bytes(json.dumps(plan).encode()):
        survives(load, data, tmp_path / "plan.json")


DAMAGES = {
    "KeyError": (("tries",), {}),
    "OverflowError": (("rebuilds",), math.inf),
    "TypeError": (("tries", "big"), None),
    "a step": (("demotions", "big", "step"), "soon"),
    "a policy": (("demotions", "big", "before"), "float17"),
    "for ever": (("tries", "big"), 10**9),
}


@pytest.mark.parametrize(("path", "new"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_stops_before_training(path, new, plan, tmp_path):
    content = changed(plan, ("tuner", *path), new)
    text = json.dumps(content)
    (tmp_path / "plan.json").write_text(text)
    model = chain()
    with pytest.raises(ValueError, match="delete `tuner` from the file.*Recei"):
        fit(model, [1.0] * 4, tuner(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_text() == text
    assert (demoted(model), int(model.optimizer.iterations)) == ({}, 0)


def test_nested_without_end(tmp_path):
    (tmp_path / "plan.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="not JSON"):
        fit(chain(), [1.0], tuner(tmp_path / "plan.json"))


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "batch.npz"
    x = {"a": np.ones((2, 1), "float32"), "b": [np.zeros(3), None]}
    FailingBatch(
        4,
        (x, np.ones(1), None),
        [np.ones((2, 2), "float32")],
        [np.zeros(2, "uint32")],
        {"optimizer": 2.0},
        {"dense": "mixed_float16"},
    ).save(path)
    return path.read_bytes()


def usable(path):
    """Loads a batch, with all that `replay` takes for granted."""
    found = FailingBatch.load(path)
    assert isinstance(found.step, int)
    assert isinstance(found.batch, tuple)
    for array in found.weights + found.seeds:
        assert array.dtype.kind in "biufc"
    for name, scale in found.scales.items():
        assert name.isidentifier or scale * 2
    kmp.PrecisionPlan(found.plan)


def packed(about, arrays):
    file = io.BytesIO()
    np.savez_compressed(file, about=json.dumps(about), **arrays)
    return file.getvalue()


def test_every_value_of_a_batch(batch, tmp_path):
    with np.load(io.BytesIO(batch)) as content:
        about = json.loads(str(content["about"]))
        arrays = {n: content[n] for n in content.files if n != "about"}
    for path, new, damaged in damaged_json(about):
        try:
            data = packed(damaged, arrays)
            survives(usable, data, tmp_path / "batch.npz")
        except Exception as error:
            raise AssertionError(f"{path} as {new!r}") from error
    for name in arrays:
        for new in (np.array("text"), np.ones((0, 3)), np.array(b"\0")):
            data = packed(about, arrays | {name: new})
            survives(usable, data, tmp_path / "batch.npz")


def test_every_byte_of_a_batch(batch, tmp_path):
    for data in damaged_bytes(batch, 1500):
        survives(usable, data, tmp_path / "batch.npz")


def test_every_byte_within_a_batch(batch, tmp_path):
    """The arrays damaged, in a file whose checksums are right."""
    with zipfile.ZipFile(io.BytesIO(batch)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name, part in parts.items():
        for damaged in damaged_bytes(part, 150):
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                for other, data in (parts | {name: damaged}).items():
                    archive.writestr(other, data)
            survives(usable, file.getvalue(), tmp_path / "batch.npz")


def test_what_is_no_batch(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "array.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save(tmp_path / "whole.npy", np.ones(3))
    for name in ("array.npy", "whole.npy"):
        with pytest.raises(ValueError, match="must be a file that `Failing"):
            FailingBatch.load(tmp_path / name)
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"No such|folder|Not a regular"):
            FailingBatch.load(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The folder of a log with something of everything."""
    log_dir = tmp_path_factory.mktemp("log")
    metrics = {"activation_headroom_bits": "min", "lost_updates": "max"}
    layer = {"path": "dense", "class": "Dense", "compute_dtype": "float16"}
    with RunLog(log_dir) as log:
        log.layers(
            0, [layer | {"parameters": 4, "share_of_flops": 1.0, "notes": ""}]
        )
        for step in range(4):
            log.heat(step, np.full((1, 2), 3.0), ["dense"], metrics)
            log.scale_rows(step, [[step, 8.0, 0, step]])
        log.event(1, VERDICT)
        log.event(2, DEMOTE)
        log.histogram(
            3, "mixprec/activation_exponent/dense", np.array([[0.0, 1, 5]])
        )
    return log_dir


VERDICT = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "dense",
    "direction": "forward",
    "numbers": {"overflow": 0.5},
    "advice": "Let it compute in float32",
}
DEMOTE = {
    "kind": "demote",
    "layers": {"dense": {"before": "mixed_float16", "after": "float32"}},
    "reasons": {"dense": "forward_overflow"},
}


def report(log_dir):
    found = kmp.load_report(log_dir)
    assert str(found)
    assert found.to_html()
    RunLog(log_dir).close()


def test_every_byte_of_a_log(log, tmp_path):
    (original,) = event_file_paths(log / "mixprec")
    with open(original, "rb") as file:
        data = file.read()
    (tmp_path / "mixprec").mkdir()
    path = tmp_path / "mixprec" / os.path.basename(original)

    def read(_):
        report(tmp_path)
        for other in event_file_paths(tmp_path / "mixprec"):
            if other != str(path):
                os.unlink(other)

    for damaged in damaged_bytes(data, 150):
        assert survives(read, damaged, path, ())


OTHERS = {
    "bad_data": VERDICT
    | {"verdict": "bad_data", "numbers": {"rows_of_x": [1, 2]}},
    "divergence": VERDICT | {"verdict": "divergence", "layer": None},
    "promote": DEMOTE | {"kind": "promote"},
    "advised": DEMOTE | {"dry_run": True},
    "skipped_step": {
        "kind": "skipped_step",
        "at_step": 1,
        "scale": 2.0,
        "variables": ["kernel"],
        "kinds": {"kernel": ["inf"]},
    },
    "nonfinite_losses": {"kind": "nonfinite_losses", "counts": {"inf": 2}},
    "nonfinite_gradients": {
        "kind": "nonfinite_gradients",
        "optimizer": "",
        "counts": {"nan": 2},
    },
    "give_up": {"kind": "give_up", "message": "It ends. So"},
    "stopped": {"kind": "stopped", "reason": "why"},
    "train_end": {"kind": "train_end", "summary": "a\nb"},
    "train_begin": {"kind": "train_begin", "fit": 1, "settings": {"a": 1}},
    "skipped_steps_not_kept": {
        "kind": "skipped_steps_not_kept",
        "first_step": 1,
        "last_step": 3,
        "count": 3,
    },
    "bad_batches": {
        "kind": "bad_batches",
        "count": 1,
        "message": "bad",
        "batches": [{"step": 1, "rows": {"x": 1}}],
    },
    "loss_scale_low": {
        "kind": "loss_scale_low",
        "at_step": 1,
        "held": 8.0,
        "scale": 2.0,
        "message": "low",
        "advice": "Set it",
    },
    "before_training": {
        "kind": "before_training",
        "finding": "a",
        "level": "bad",
        "layer": "dense",
        "message": "b",
    },
    "sign_off": {"kind": "sign_off", "within": False, "message": "a"},
    "fit_raised": {"kind": "fit_raised", "at_step": 1, "reason": "a"},
    "step_raised": {"kind": "step_raised", "at_step": 1, "reason": "a"},
    "zero_gradients": {"kind": "zero_gradients", "message": "a", "paths": []},
    "ranges_withheld": {"kind": "ranges_withheld", "message": "a"},
    "metric_not_finite": {
        "kind": "metric_not_finite",
        "message": "a",
        "metrics": {"mae": "inf"},
    },
    "trade_off": {
        "kind": "trade_off",
        "title": "error",
        "points": [{"share_in_16_bits": 1.0, "error": 0.5, "float32": []}],
    },
}
EVENTS = {"verdict": VERDICT, "demote": DEMOTE, **OTHERS}
LAYER = {
    "path": "dense",
    "class": "Dense",
    "compute_dtype": "float16",
    "share_of_flops": 1.0,
    "parameters": 4,
}


class Source:
    """A log that says what somebody else made it say."""

    def __init__(self, layers, events):
        lines = [json.dumps(event) for event in events]
        self._values = {
            "mixprec/layers": np.array(json.dumps(layers)),
            "mixprec/events/00000": np.array(lines, object),
        }
        self.contents = {tag: {"schema": 1} for tag in self._values}
        self.histograms = []
        self.written = 0.0

    def read(self, tag):
        return [self.last(tag)]

    def last(self, tag):
        return Point(0, self._values[tag])


def told_of(*source):
    report = MixPrecReport([RunData("run", Source(*source))])
    return str(report), report.to_html()


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_every_value_of_an_event(event):
    event = event | {"step": 1}
    for path, new, damaged in damaged_json(event):
        try:
            assert told_of([LAYER], [VERDICT | {"step": 0}, damaged])
        except Exception as error:
            raise AssertionError(f"{path} as {new!r}") from error


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_every_key_of_an_event(event):
    whole = MixPrecReport([RunData("run", Source([LAYER], [event | AT]))])
    for key in event.keys() - {"kind"}:
        left = {k: v for k, v in event.items() if k != key} | AT
        run = RunData("run", Source([LAYER], [left]))
        report = MixPrecReport([run])
        assert report.to_html()
        assert report.to_png()
        kinds = {e["kind"] for e in report.to_dict()["run"]["events"]}
        # What it cannot do without is missed, and the report says so.
        assert kinds <= {event["kind"], "unreadable"}
        assert ("unreadable" in kinds) == ("cannot be read" in str(report))
    assert "cannot be read" not in str(whole)


AT = {"step": 1}


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ({"kind": "train_begin", "fit": "one"}, "fit"),
        ({"kind": "skipped_steps_not_kept", "first_step": 1}, "count"),
        ({"kind": "stopped", "reason": 5}, "reason"),
    ],
)
def test_an_event_that_is_read_in_part_is_noted(event, key):
    text, page = told_of([LAYER], [event | AT])
    assert f"an event {event['kind']!r}" in text
    assert repr(key) in text


@pytest.mark.parametrize("name", ["bob's", 'bob\'s "x"', "a' in 'b"])
def test_a_reason_names_the_layer_whatever_quotes_are_in_its_name(name):
    found = kmp.Verdict("cast_overflow", name, "forward", 3, numbers={"a": 1})
    older = f"cast_overflow in {name!r}, forward at step 3 (a=1)"
    for reason in found.finding, older:
        event = DEMOTE | {"reasons": {"dense": reason}} | AT
        report = MixPrecReport([RunData("run", Source([LAYER], [event]))])
        (read,) = report.to_dict()["run"]["events"]
        place = f"in the forward pass of {name}"
        assert read["because"]["dense"] == f"cast overflow {place} at step 3"


def test_every_value_of_the_layers():
    events = [VERDICT | {"step": 0}, DEMOTE | {"step": 1}]
    for path, new, damaged in damaged_json([LAYER]):
        try:
            assert told_of(damaged, events)
        except Exception as error:
            raise AssertionError(f"{path} as {new!r}") from error
