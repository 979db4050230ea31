"""README.md and docs/ are complete; their code runs in tests/documents.py."""

import pathlib
import re

import pytest

import keras_mixprec
from keras_mixprec.analysis.lint.table import RULES
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.verdict_kinds import KINDS

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
LINKS = sorted(set(re.findall(r"\]\(([^)#:]+)\)", README)))


def is_row(name, page):
    text = (DOCS / page).read_text()
    return re.search(rf"^\| `{name}`", text, re.MULTILINE)


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_every_page_is_linked():
    pages = {f"docs/{page.name}" for page in DOCS.glob("*.md")}
    assert pages - set(LINKS) == {"docs/index.md"}


def test_the_front_page_is_short():
    assert README.count("\n") <= 150


def test_pictures_are_small():
    pictures = list(DOCS.glob("images/*.png"))
    assert pictures
    assert max(path.stat().st_size for path in pictures) < 150_000


def test_the_table_of_names_is_that_of_the_package():
    page = (DOCS / "api.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(names) == sorted(keras_mixprec.__all__[1:])
    assert ":::" not in page  # `.ci/api_page.py` adds the docstrings.


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_verdict_is_explained(kind):
    assert is_row(kind, "diagnosis.md")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_of_lint_is_listed(rule):
    row = f"| `{rule.name}` | {rule.severity} | {rule.reason} |"
    assert row in (DOCS / "lint.md").read_text().splitlines()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_listed(name):
    assert is_row(name, "loss_scaling.md")


def test_ci_runs_the_second_command():
    commands = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)
    assert len(commands) == 2
    assert (ROOT / ".ci" / "run").read_text().endswith(f"\n{commands[1]}\n")
    assert commands[1].endswith("tox")
