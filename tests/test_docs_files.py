"""docs/files.md names the keys that files and reports really have."""

import json
import pathlib
import re

import pytest
from comparison_records import arm, record
from tuner_models import chain, fit

import keras_mixprec as kmp
from keras_mixprec.analysis.comparison.record import (
    Arm,
    Comparison,
    Memory,
    Seed,
)
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.performance import Row, performance

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "files.md").read_text()
SOURCES = [path.read_text() for path in (ROOT / "keras_mixprec").rglob("*.py")]
KIND = r'(?:"kind": |failure\(\s*|records\.\w+\(\s*|at_first\(\s*)"(\w+)"'


def keys(heading):
    """The names in the first column of the table below a heading."""
    _, _, below = PAGE.partition(f"\n{heading}\n")
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run in which layers were demoted, with its log and its plan."""
    folder = tmp_path_factory.mktemp("run")
    monitor = kmp.MixPrecMonitor(folder / "logs", verbose=0)
    tuner = kmp.PrecisionTuner(
        folder / "plan.json", verbose=0, validate=lambda model: 1.0
    )
    fit(chain(), [1000.0] * 4, monitor, tuner)
    return folder


def test_the_keys_of_a_plan(folder):
    plan = json.loads((folder / "plan.json").read_text())
    assert plan.keys() == keys("## plan.json")
    entries = [{*entry} for entry in plan["layers"]]
    assert set.union(*entries) == keys("### Entries of layers") - {"note"}
    assert plan["tuner"].keys() == keys("### The tuner's part")
    for demotion in plan["tuner"]["demotions"].values():
        assert demotion.keys() == keys("### Demotions")
    assert plan["tuner"]["sign_off"].keys() == keys("### The sign-off")


def test_the_keys_of_a_report(folder):
    (run,) = kmp.load_report(folder / "logs").to_dict().values()
    assert run.keys() == keys("## report.to_dict()")
    assert {*run["layers"][0]} == keys("### Layers")
    assert {*run["scale"][0]} == keys("### Loss scales")
    assert run["heat"].keys() == keys("### Heat")
    assert {*run["heat"]["metrics"][0]} == keys("### Metrics")


def test_the_keys_of_the_performance():
    found = performance([Row(*[1.0] * len(Row._fields))], [])
    assert found.keys() == keys("### Performance")
    assert all({*f} == keys("### Figures") for f in found["figures"])
    assert Row._fields == schema.PERFORMANCE_COLUMNS


def test_every_kind_of_event_is_listed(folder):
    lines = (folder / "logs/mixprec/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert all(
        {"kind", "step", "wall_time"} <= event.keys() for event in events
    )
    known = keys("## events.jsonl")
    assert {event["kind"] for event in events} <= known
    in_code = {kind for text in SOURCES for kind in re.findall(KIND, text)}
    assert in_code <= known


@pytest.mark.parametrize(
    ("heading", "part"),
    [
        ("### The record", Comparison),
        ("### Arms", Arm),
        ("### Memory of an arm", Memory),
        ("### Trainings", Seed),
    ],
)
def test_the_keys_of_a_comparison(heading, part):
    assert part.__annotations__.keys() == keys(heading)


def test_the_keys_of_what_follows_from_a_comparison(tmp_path):
    result = kmp.ComparisonResult(record([arm("float32", [0.9])]))
    assert result.to_dict().keys() == keys("## A comparison")
    assert result.rows[0].keys() == keys("### Rows")
    result.sign_off(tmp_path / "signed.json")
    signed = json.loads((tmp_path / "signed.json").read_text())
    assert signed.keys() == keys("### A sign-off")
