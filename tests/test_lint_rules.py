"""Each lint rule finds its fault, and nothing in a healthy model."""

import contextlib
import pathlib
import re

import lint_cases
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis import lint as room
from keras_mixprec.analysis.lint.lint import RULES
from keras_mixprec.backend import active

pytestmark = pytest.mark.one_backend

BY_NAME = {rule.name: rule for rule in RULES}


def cases(name):
    for key, builds in getattr(lint_cases, name).items():
        for number, build in enumerate(builds):
            yield pytest.param(key, build, id=f"{key}-{number}")


FOUND, PASSED = [*cases("FINDS")], [*cases("PASSES")]


def lint(build):
    example = build()
    arguments = [*example] if isinstance(example, tuple) else [example]
    others = {**arguments.pop()} if isinstance(arguments[-1], dict) else {}
    products = others.pop("products", None)
    with on_h100(products) if products else contextlib.nullcontext():
        return kmp.lint(*arguments, **others)


@contextlib.contextmanager
def on_h100(products):
    """Simulates an H100 with this matmul precision."""
    gpu = {"kind": "cuda", "devices": ["NVIDIA H100 80GB HBM3"]}
    gpu |= {"compute_capability": (9, 0)}
    found = active.devices() | gpu
    with (
        pytest.MonkeyPatch.context() as patch,
        active.precision().scope(products, "cuda"),
    ):
        patch.setattr(active, "devices", lambda: found)
        yield


def test_a_file_with_rules_is_named_so_and_in_the_table():
    for path in pathlib.Path(room.__file__).parent.glob("*.py"):
        rules = re.findall(r"^@rule\(.*\)\ndef (\w+)", path.read_text(), re.M)
        assert {*rules} <= {*BY_NAME}, f"_FILES of lint.py needs {path.stem}"
        assert not rules or path.stem.endswith("_rules")


def test_every_rule_has_cases_and_a_page():
    assert {case.values[0].split()[0] for case in FOUND} == {*BY_NAME}
    healthy = {name for case in PASSED for name in case.values[0].split()}
    assert healthy == {*BY_NAME}
    parts = r"\.\n\nWhy: .*\.\nExample: .*\.\nFix: .*\.$"
    assert all(re.search(parts, rule.page, re.DOTALL) for rule in RULES)
    assert len({rule.code for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("key", "build"), FOUND)
def test_it_finds_its_fault(key, build):
    name, *of = key.split()
    layer = of[0] if of else "-"
    severity = of[1] if of[1:] else BY_NAME[name].severity
    found = [f for f in lint(build) if f.rule == name]
    assert [f.severity for f in found if (f.layer or "-") == layer] == [
        severity
    ]


@pytest.mark.parametrize(("names", "build"), PASSED)
def test_it_finds_nothing_in_a_healthy_model(names, build):
    found = {finding.rule for finding in lint(build)}
    assert not found & {*names.split()}
