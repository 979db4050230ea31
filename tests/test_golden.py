"""The reports of the canonical logs, word for word.

The files in `golden` are read in review. `pytest tests/test_golden.py
--force-regen` writes them again.
"""

import pprint
import re

import pytest
from canonical_logs import NAMES, conversion

import keras_mixprec as kmp

pytestmark = pytest.mark.one_backend

# A list that somebody would read to its end.
LONGEST = 60


def settled(value, longest):
    """A value without what no two runs share, and without its long ends."""
    if isinstance(value, dict):
        rows = [(k, settled(v, longest)) for k, v in value.items()]
        rows = [row for row in rows if row[0] != "wall_time"]
        return dict(rows if len(rows) < LONGEST else [*rows[:2], ("...", ...)])
    if isinstance(value, list | tuple):
        rows = [settled(v, longest) for v in value]
        return rows if len(rows) < longest else [*rows[:2], ...]
    return round(value, 6) if isinstance(value, float) else value


def in_lines(value, longest=LONGEST):
    shown = settled(value, longest)
    return pprint.pformat(shown, width=100, compact=True, sort_dicts=False)


def markup(page):
    """A page without its style, its program and its data, a tag a line."""
    page = re.sub(r"(?s)(<(style|script)>).*?(</\2>)", r"\1\3", page)
    return re.sub(r"(?<=>)(?=<[^/])", "\n", page)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_of_a_log(name, canonical, golden):
    report = kmp.load_report(canonical[name].log_dir)
    (run,) = report.to_dict().values()
    golden(
        name,
        report=str(report),
        console=str(canonical[name].summary),
        dictionary=in_lines(run, 8 if name == "many_layers" else LONGEST),
    )


def test_what_is_made_of_all_logs_together(canonical, golden):
    report = kmp.load_report(canonical["healthy"].log_dir.parent)
    golden("runs", table=str(report).split("\n\n")[0])


def test_what_is_made_of_a_conversion(golden):
    report = conversion()
    golden(
        "inference",
        report=str(report),
        page=markup(report.to_html()),
        dictionary=in_lines(report.to_dict()),
    )
