"""What the tab saves: numbers and pictures, each against the log."""

import csv
import io
import json

import numpy as np
import pytest

REPAIRED = "repaired/mixprec"


@pytest.fixture
def page(page):
    return page.see("overflow")


@pytest.fixture
def run(told):
    return told["overflow"]


@pytest.fixture
def rows(page):
    """The rows that a card saves, the same as CSV and as JSON."""

    def rows(card):
        lines = io.StringIO(page.download(card, "csv"), newline="")
        table, saved = [*csv.DictReader(lines)], json.loads(
            page.download(card, "json")
        )  # fmt: skip
        assert len(saved) == len(table) > 0
        for line, row in zip(table, saved, strict=True):
            for name, value in row.items():
                if isinstance(value, bool | dict | list):
                    assert json.loads(line[name]) == value
                elif isinstance(value, int | float):
                    assert float(line[name]) == value
                else:
                    assert line[name] == (value or "")
        return saved

    return rows


def test_loss_scale_and_loss(page, rows, told):
    page.pick("#compare", REPAIRED)
    saved = rows("timeline")
    for name in "overflow", "repaired":
        own = [row for row in saved if row["run"] == f"{name}/mixprec"]
        (line,) = told[name]["scale"]
        scales = [row for row in own if "loss_scale" in row]
        losses = [row for row in own if "loss" in row]
        for known, column in (
            (line["steps"], [row["step"] for row in scales]),
            (line["scale"], [row["loss_scale"] for row in scales]),
            (line["skipped"], [row["skipped_so_far"] for row in scales]),
            (told[name]["loss"]["steps"], [row["step"] for row in losses]),
        ):
            assert column == known
        values = [float(row["loss"]) for row in losses]
        np.testing.assert_equal(values, told[name]["loss"]["values"])
