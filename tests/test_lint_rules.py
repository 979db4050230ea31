"""Each rule of lint finds what it is for, and nothing in a healthy model."""

import pathlib
import re

import lint_data_cases  # noqa: F401
import lint_traced_cases  # noqa: F401
import pytest
from lint_cases import FINDS, PASSES

import keras_mixprec as kmp
from keras_mixprec.analysis.lint import table
from keras_mixprec.analysis.lint.table import RULES

BY_NAME = {rule.name: rule for rule in RULES}
FOUND = [(name, *case) for name, cases in FINDS.items() for case in cases]
PASSED = [(name, build) for name, cases in PASSES.items() for build in cases]


def linted(build, rule):
    example = build()
    arguments = example if isinstance(example, tuple) else (example,)
    others = arguments[-1] if isinstance(arguments[-1], dict) else {}
    given = arguments[: len(arguments) - bool(others)]
    return [f for f in kmp.lint(*given, **others) if f.rule == rule]


def test_a_file_with_rules_is_named_so_and_in_the_table():
    for path in pathlib.Path(table.__file__).parent.glob("*.py"):
        rules = re.findall(r"^@rule\(.*\)\ndef (\w+)", path.read_text(), re.M)
        missing = set(rules) - set(BY_NAME)
        assert not missing, f"add {path.stem} to `_FILES` of table.py"
        assert not rules or path.stem.endswith("_rules")


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_has_examples_and_a_reason(name):
    assert FINDS[name]
    assert PASSES[name]
    assert BY_NAME[name].reason.endswith(".")


@pytest.mark.parametrize(
    ("name", "build", "layer", "severity"),
    FOUND,
    ids=[f"{name}-{build.__name__}" for name, build, *_ in FOUND],
)
def test_it_finds_its_fault(name, build, layer, severity):
    found = [f for f in linted(build, name) if f.layer == layer]
    assert len(found) == 1
    assert found[0].severity == (severity or BY_NAME[name].severity)


@pytest.mark.parametrize(
    ("name", "build"),
    PASSED,
    ids=[f"{name}-{build.__name__}" for name, build in PASSED],
)
def test_it_finds_nothing_in_a_healthy_model(name, build):
    assert linted(build, name) == []
