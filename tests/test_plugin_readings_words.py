"""What the page says of a run is true, and in words a newcomer knows."""

import pytest

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

VERDICT = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "b",
    "direction": "forward",
    "advice": "Let it compute in float32: PrecisionRule('b')",
    "numbers": {},
}


def layers(*paths, dtype="float16"):
    return [
        {"path": p, "class": "Dense", "compute_dtype": dtype} for p in paths
    ]


def write(log_dir, *events, table=None, scale=None):
    """A log of two layers, or of others, and these events by their step."""
    with RunLog(log_dir) as log:
        log.layers(0, table or layers("a", "b"))
        log.event(0, {"kind": "train_begin", "fit": 1})
        for step, value in (scale or {}).items():
            log.scalars(step, {"loss_scale": value, "skipped_steps": 0.0})
        for event in events:
            log.event(event.pop("step"), event)
    return log_dir


@pytest.fixture
def show(any_page, tmp_path):
    """Opens the page of what was written."""

    def opened():
        path = tmp_path / "report.html"
        kmp.load_report(tmp_path).save_html(path)
        return any_page.open_file(path).settle()

    return opened


def skip(step, **event):
    about = {"kind": "skipped_step", "at_step": step, "scale": 2.0**15}
    return about | {"variables": ["a/kernel"], "step": step} | event


BAD = {"loss": ["nan"], "kinds": {"a/kernel": ["nan"]}, "bad_input": {"x": 3}}
BAD_DATA = VERDICT | {
    "verdict": "bad_data",
    "layer": None,
    "direction": None,
    "numbers": {"rows_of_x": [6]},
}


@pytest.mark.parametrize("is_over", [False, True])
def test_bad_data_are_dated_by_the_first_step_skipped_for_them(
    show, tmp_path, is_over
):
    # A tuner's diagnosis meets a later batch than the first.
    events = [skip(2, **BAD), skip(12, **BAD), BAD_DATA | {"step": 12}]
    batches = [{"epoch": 0, "batch": 1, "step": 2, "rows": {"x": 3}}]
    end = {"kind": "bad_batches", "count": 2, "message": "", "batches": batches}
    write(tmp_path, *events, *[end | {"step": 20}] * is_over)
    said = show().text("#headline")
    assert "Bad data in 2 batches, first at step 2 (row 3 of that" in said


def test_a_step_skipped_for_bad_data_says_so_and_no_overflow(show, tmp_path):
    write(
        tmp_path,
        *(skip(n, **BAD) for n in (2, 3)),
        skip(4, loss=[], kinds={"a/kernel": ["inf"]}),
    )
    page = show()
    bad, other = page.texts("#events li[data-kind=skipped_step] .what")
    assert bad == (
        "2 updates skipped in a row, steps 2 to 3, at loss scale 2¹⁵: these "
        "batches were not finite, first in row 3 of x, which no loss scale or "
        "dtype changes."
    )
    assert "gradients not finite in a/kernel (inf)" in other
