"""The numbers that the tab saves, against the log."""

import csv
import io

import numpy as np
import pytest

REPAIRED = "repaired/mixprec"


@pytest.fixture
def rows(page):
    """The rows of a table that a card has, as it saves them."""

    def rows(card, place):
        text = page.see("overflow").pick("#compare", REPAIRED).download(
            card, place
        )  # fmt: skip
        return [*csv.DictReader(io.StringIO(text, newline=""))]

    return rows


def test_loss_scale_and_loss(rows, told):
    scales, losses = rows("timeline", 1), rows("timeline", 2)
    for name in "overflow", "repaired":
        (line,) = told[name]["scale"]
        for known, saved, column in (
            (line["steps"], scales, "step"),
            (line["scale"], scales, "loss scale"),
            (line["skipped"], scales, "skipped so far"),
            (told[name]["loss"]["steps"], losses, "step"),
            (told[name]["loss"]["values"], losses, "loss"),
        ):
            own = [row for row in saved if row["run"] == f"{name}/mixprec"]
            found = [float(row[column]) for row in own]
            np.testing.assert_equal(found, known)
