"""README.md and docs/ are complete, and docs/files.md names all keys.

Their code runs in tests/documents.py.
"""

import json
import pathlib
import re
from functools import partial

import comparison_models as models
import pytest
from tuner_models import chain, fit

import keras_mixprec as kmp
from keras_mixprec.analysis.lint.lint import RULES
from keras_mixprec.devices.memory import memory_record
from keras_mixprec.loss_scaling.rules import PRESETS
from keras_mixprec.verdict_kinds import KINDS

pytestmark = pytest.mark.one_backend

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
FILES = (DOCS / "files.md").read_text()
SOURCES = [path.read_text() for path in (ROOT / "keras_mixprec").rglob("*.py")]
KIND = r'(?:"kind": |failure\(\s*|records\.\w+\(\s*|at_first\(\s*)"(\w+)"'


def test_every_page_is_linked_and_links_lead_somewhere():
    links = {*re.findall(r"\]\(([^)#:]+)\)", README)}
    assert all((ROOT / link).exists() for link in links)
    pages = {f"docs/{page.name}" for page in DOCS.glob("*.md")}
    assert pages - links == {"docs/index.md"}


def test_tables_have_every_name_kind_preset_and_rule():
    names = re.findall(
        r"^\| `(\w+)` \| [^|]+ \|$", (DOCS / "api.md").read_text(), re.M
    )
    assert sorted(names) == sorted(kmp.__all__[1:])
    for page, known in ("diagnosis", KINDS), ("loss_scaling", PRESETS):
        text = (DOCS / f"{page}.md").read_text()
        assert {*known} <= {*re.findall(r"^\| `([\w-]+)`", text, re.M)}
    rows = (DOCS / "lint.md").read_text().splitlines()
    for rule in RULES:
        of_rule = rule.code, f"`{rule.name}`", rule.severity, rule.reason
        assert f"| {' | '.join(of_rule)} |" in rows


# The keys of files.


def table(heading):
    """Returns the cells of the rows in the table below a heading."""
    _, _, below = FILES.partition(f"\n{heading}\n")
    rows = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)[0].splitlines()
    return [line.split("|")[1:4] for line in rows[2:]]


def names(text):
    return {*re.findall(r"`(\w+)`", text)}


def keys(heading):
    """Returns the names in the first column of a table."""
    return {name for first, *_ in table(heading) for name in names(first)}


def keys_in(heading, key):
    """Returns the keys of the objects that a row of a table describes."""
    (content,) = (c for first, _, c in table(heading) if first == f" `{key}` ")
    return names(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a run with demoted layers, its log and its plan."""
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
    assert set.union(*entries) == keys_in("## plan.json", "layers") - {"note"}
    part = "### The tuner's part"
    assert plan["tuner"].keys() == keys(part)
    for demotion in plan["tuner"]["demotions"].values():
        assert demotion.keys() == keys_in(part, "demotions")
    assert plan["tuner"]["sign_off"].keys() == keys_in(part, "sign_off")


def test_the_keys_of_a_report(folder):
    (run,) = kmp.load_report(folder / "logs").to_dict().values()
    inside = partial(keys_in, "## report.to_dict()")
    assert run.keys() == keys("## report.to_dict()")
    assert {*run["layers"][0]} == keys("### Layers")
    assert {*run["scale"][0]} == inside("scale")
    assert run["heat"].keys() == inside("heat")
    assert {*run["heat"]["metrics"][0]} == inside("heat.metrics")
    assert {*run["cards"][0]} == inside("cards")
    figures = [f for card in run["cards"] for f in card["figures"]]
    known = {k for f in figures for k in f}
    assert {*figures[0]} <= known <= inside("cards[].figures")


def test_every_kind_of_event_is_listed(folder):
    lines = (folder / "logs/mixprec/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    common = {"kind", "step", "wall_time"}
    assert all(common <= event.keys() for event in events)
    in_code = {kind for text in SOURCES for kind in re.findall(KIND, text)}
    assert {e["kind"] for e in events} | in_code <= keys("## events.jsonl")


def test_the_keys_of_a_comparison():
    result = kmp.compare_precisions(
        models.dense, models.arrays(), "float32",
        steps=4, blocks=2, seeds=1, verbose=0,
    )  # fmt: skip
    assert result.to_dict().keys() == {"record", "rows"}
    assert result.record.keys() == keys("### The record")
    (arm,) = result.record["arms"]
    assert arm.keys() == keys("### Arms")
    assert arm["seeds"][0].keys() == keys_in("### Arms", "seeds")
    of_memory = memory_record(models.dense())
    assert of_memory.keys() == keys_in("### Arms", "memory")
    assert result.rows[0].keys() == keys("### Rows")
