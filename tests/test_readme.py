"""What the README says is so; its code runs as a doctest (tox.ini)."""

import pathlib
import re

import pytest

import keras_mixprec
from keras_mixprec.loss_scaling.presets import PRESETS

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
LINKS = sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT)))


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_pictures_are_small():
    pictures = [ROOT / link for link in LINKS if link.endswith(".png")]
    assert pictures
    assert max(path.stat().st_size for path in pictures) < 150_000


@pytest.mark.parametrize("name", keras_mixprec.__all__[1:])
def test_every_public_name_is_listed(name):
    assert re.search(rf"^\| `{name}`", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_listed(name):
    assert re.search(rf"^\| `{name}` ", TEXT, re.MULTILINE)


def test_ci_runs_the_second_command():
    commands = re.findall(r"^    (python3 -m venv .*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    assert (ROOT / ".ci" / "run").read_text().endswith(f"\n{commands[1]}\n")
    assert commands[1].endswith("tox")
