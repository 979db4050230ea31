"""A reader finds the way: few small files, and each room says what is in it."""

import pathlib
import re

import pytest

import keras_mixprec

ROOT = pathlib.Path(keras_mixprec.__file__).parent
DOCS = ROOT.parent / "docs"
TOPS = ROOT, ROOT / "backend", ROOT.parent
ROOMS = [
    path.parent
    for path in sorted(ROOT.rglob("__init__.py"))
    if "\nFiles" in path.read_text()
]


def test_few_files_are_too_small_to_be_an_idea():
    sizes = {p: len(p.read_text().splitlines()) for p in ROOT.rglob("*.py")}
    assert len([path for path, lines in sizes.items() if lines < 30]) <= 18


def test_large_rooms_say_what_is_in_them():
    large = {f.parent for f in ROOT.glob("*/*.py")} - {*ROOMS}
    assert all(len([*room.glob("*.py")]) < 8 for room in large)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_names_each_of_its_files(room):
    listed = (room / "__init__.py").read_text().split("\nFiles", 1)[1]
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", listed)) == files


ARCHITECTURE = (DOCS / "architecture.md").read_text()


def test_what_the_architecture_page_names_is_there():
    named = re.findall(r"`([\w<>]+/[\w/<>]+\.(?:py|js))`", ARCHITECTURE)
    files = {name.replace("<name>", "torch") for name in named}
    assert all(any((top / f).exists() for top in TOPS) for f in files)


def test_what_decides_is_where_the_architecture_page_says():
    rows = re.findall(r"\| `(\w+/[\w/]+\.py)`[^|]*\| `(\w+)` \|", ARCHITECTURE)
    assert len(rows) >= 15
    for name, function in rows:
        assert f"def {function}(" in (ROOT / name).read_text(), name
