"""Damaged plans, batches and logs: the promised errors, when they are read.

Every value of their JSON is exchanged for others. Files are damaged byte by
byte at places of a seeded generator: a few by default, many with `slow`.
"""

import copy
import io
import json
import math
import os
import random
import shutil
import zipfile

import keras
import numpy as np
import pytest
from canonical_logs import small_model
from tuner_models import chain, demoted, fit, tuner

import keras_mixprec as kmp
from keras_mixprec.diagnosis.failing_batch import FailingBatch
from keras_mixprec.reporting.event_kinds import NEEDED
from keras_mixprec.reporting.report import MixPrecReport
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.runs import row_of
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.reporting.what_if import what_if_of
from keras_mixprec.tuning.demotions import Repairs

pytestmark = pytest.mark.one_backend

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
DELETED = object()
many = pytest.mark.parametrize(
    "count", [60, pytest.param(1500, marks=pytest.mark.slow)]
)


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
    """A copy of a JSON value with another one, or none, at a path."""
    if not path:
        return new
    whole = copy.deepcopy(value)
    *way, last = path
    holder = whole
    for key in way:
        holder = holder[key]
    if new is DELETED:
        del holder[last]
    else:
        holder[last] = new
    return whole


def read_all_damaged(value, read):
    """Reads a JSON value with each of its values exchanged.

    Returns:
        How often `read` returned something true.
    """
    count = 0
    for path in places(value):
        for new in [*STRANGE, DELETED] if path else STRANGE:
            try:
                count += bool(read(changed(value, path, new)))
            except Exception as error:
                raise AssertionError(f"{path} as {new!r}") from error
    return count


def damaged_bytes(data, count):
    """Files cut short, with changed bits, and bytes set, added or removed."""
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
    """Returns True if a damaged file is read; else it raises `errors`."""
    path.write_bytes(data)
    try:
        read(path)
    except errors:
        return False
    assert path.read_bytes() == data
    return True


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Returns the plan of a tuner that demoted layers."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    fit(chain(), [1000.0] * 4, tuner(path))
    content = json.loads(path.read_text())
    assert content["tuner"]["demotions"]
    return content


@pytest.fixture(scope="module")
def load():
    """Returns a function that uses a plan like a tuner before training."""
    keras.utils.set_random_seed(0)
    model = chain()
    return lambda path: start_from(path, model)


def start_from(path, model):
    as_built = kmp.PrecisionPlan.from_model(model)
    repairs = Repairs(model)
    try:
        repairs.follow(*tuner(path)._disk.load(model))
    except BaseException:
        assert kmp.PrecisionPlan.from_model(model) == as_built
        raise
    repairs.begin(0)
    _, paths = repairs.next_trial(10**6, 0, 1)
    assert set(repairs.as_built(paths)) is not None
    assert json.dumps(repairs.state(), allow_nan=False)
    repairs.plan(), repairs.demoted_fraction()
    kmp.apply_policy(model, as_built)


def test_every_value_of_a_plan(plan, load, tmp_path):
    def read(content):
        data = json.dumps(content).encode()
        return survives(load, data, tmp_path / "plan.json")

    assert read_all_damaged(plan, read) > 10  # A reason may be any text.


DAMAGES = {
    "KeyError": (("tries",), {}),
    "OverflowError": (("rebuilds",), math.inf),
    "a policy": (("demotions", "big", "before"), "float17"),
    "for ever": (("tries", "big"), 10**9),
}


@pytest.mark.parametrize(("path", "new"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_stops_before_training(path, new, plan, tmp_path):
    content = changed(plan, ("tuner", *path), new)
    text = json.dumps(content)
    (tmp_path / "plan.json").write_text(text)
    model = chain()
    with pytest.raises(ValueError, match="`tuner`.*Received"):
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
    path = tmp_path / "batch.npz"
    read_all_damaged(
        about, lambda damaged: survives(usable, packed(damaged, arrays), path)
    )
    for name in arrays:
        for new in (np.array("text"), np.ones((0, 3)), np.array(b"\0")):
            survives(usable, packed(about, arrays | {name: new}), path)


@many
def test_bytes_of_a_batch(count, batch, tmp_path):
    """Bytes change in the file, or in its arrays with valid checksums."""
    for data in damaged_bytes(batch, count):
        survives(usable, data, tmp_path / "batch.npz")
    with zipfile.ZipFile(io.BytesIO(batch)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name, part in parts.items():
        for damaged in damaged_bytes(part, count // 10):
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
        with pytest.raises(ValueError, match="`FailingBatch"):
            FailingBatch.load(tmp_path / name)
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"No such|folder|regular"):
            FailingBatch.load(path)


@many
def test_bytes_of_a_log(count, canonical, tmp_path):
    original = canonical["two_optimizers"].log_dir / "mixprec"
    names = sorted(os.listdir(original))

    def read(path):
        assert told(kmp.load_report(tmp_path))
        before = path.read_bytes()
        RunLog(tmp_path).close()
        # A torn line is cut, and who goes on writes behind the others.
        whole, end, _ = before.rpartition(b"\n")
        kept = whole + end if path.suffix == ".jsonl" else before
        assert path.read_bytes().startswith(kept)
        path.write_bytes(before)

    for name in names:
        shutil.rmtree(tmp_path / "mixprec", ignore_errors=True)
        shutil.copytree(original, tmp_path / "mixprec")
        data = (original / name).read_bytes()
        damages = [*damaged_bytes(data, count // 2)]
        for damaged in damages[:: len(names)]:
            assert survives(read, damaged, tmp_path / "mixprec" / name, ())


class Log:
    """A log that somebody else has written to."""

    def __init__(self, layers, events):
        own = [{"step": 0, "layers": layers}]
        self._rows = {"layers": own, "events": events}

    def rows(self, table, mark=b"", until=None):
        # As they come back from a file.
        rows = json.loads(json.dumps(self._rows.get(table, [])))
        return [row for row in rows if isinstance(row, dict)]

    def tables(self, family):
        return []

    def listed(self, run):
        return {"run": run}


def told(report):
    """All that text and page say, but for the page itself, which is slow."""
    (run,) = report._runs.values()
    (overview,) = report.to_dict().values()
    sent = to_json([overview, row_of(run), what_if_of(run)])
    return str(report), sent


def report_of(layers, events):
    return MixPrecReport([Run("run", Log(layers, events))])


LAYERS = small_model()


@pytest.fixture(scope="session")
def examples(canonical):
    """An event of every kind, as the monitor or a tuner writes it."""
    found = {}
    for log in canonical.values():
        with open(log.log_dir / "mixprec" / "events.jsonl") as lines:
            for event in map(json.loads, lines):
                found.setdefault(event["kind"], event)
    for event in found.values():
        event |= {k: v[:2] for k, v in event.items() if isinstance(v, list)}
    return found


def test_the_canonical_logs_have_every_kind_of_event(examples):
    assert NEEDED.keys() <= examples.keys()
    for event in examples.values():
        assert "cannot be read" not in str(report_of(LAYERS, [event]))


@pytest.mark.parametrize("kind", sorted(NEEDED))
def test_every_value_of_an_event(kind, examples):
    first = examples["verdict"] | {"step": 0}
    read_all_damaged(
        examples[kind] | {"step": 1},
        lambda damaged: told(report_of(LAYERS, [first, damaged])),
    )


@pytest.mark.parametrize("kind", sorted(NEEDED))
def test_every_key_of_an_event(kind, examples):
    """The report names a key that is missing and needed."""
    event = examples[kind]
    keys = event.keys() - {"kind", "step"}
    without = [{k: v for k, v in event.items() if k != key} for key in keys]
    for left in without:
        report = report_of(LAYERS, [left])
        (run,) = report.to_dict().values()
        kinds = {e["kind"] for e in run["events"]}
        assert kinds <= {kind, "unreadable"}
        needed = (NEEDED[kind] or {}) - left.keys()
        assert ("unreadable" in kinds) >= bool(needed)
        assert ("unreadable" in kinds) == ("cannot be read" in str(report))
    report = report_of(LAYERS, without)
    assert report.to_html()
    pytest.importorskip("matplotlib")
    assert report.plot()


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ({"kind": "train_begin", "fit": "one"}, "fit"),
        ({"kind": "skipped_steps_not_kept", "first_step": 1}, "count"),
        ({"kind": "stopped", "reason": 5}, "reason"),
    ],
)
def test_an_event_that_is_read_in_part_is_noted(event, key):
    text, _ = told(report_of(LAYERS, [event | {"step": 1}]))
    assert repr(event["kind"]) in text
    assert repr(key) in text


def test_events_of_other_people_are_left_as_they_are():
    theirs = [
        {"kind": "mine", "layers": 3, "step": 1},
        {"kind": "mine", "note": "hello", "step": 2},
    ]
    nothing = [{"kind": 3, "step": 1}, {"kind": "mine"}, {}]
    report = report_of(
        LAYERS, [{"kind": "verdict", "step": 0}, *theirs, *nothing]
    )
    (run,) = report.to_dict().values()
    kinds = [event["kind"] for event in run["events"]]
    assert kinds == ["unreadable", "mine", "mine"]
    assert [e["layers"] for e in run["events"] if "layers" in e] == [3]


def test_every_value_of_the_layers(examples):
    events = [examples["verdict"], examples["demote"]]
    read_all_damaged(
        LAYERS[:1], lambda damaged: told(report_of(damaged, events))
    )
