"""A plan on disk is read back whole or refused with the reason."""

import json
import os

import pytest

from keras_mixprec import PrecisionPlan

PLAN = PrecisionPlan(
    {"b": "mixed_float16", "a/c": "float32"},
    "mixed_float16",
    reasons={"a/c": "why"},
    notes={"b": "left alone"},
)


def written(**changes):
    entry = {"path": "a", "policy": "float32"}
    content = {"format": "keras_mixprec.plan", "version": 1, "layers": [entry]}
    return json.dumps({**content, **changes})


def test_round_trip(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    loaded = PrecisionPlan.load(str(tmp_path / "plan.json"))
    assert loaded.diff(PLAN) == []
    assert list(loaded) == ["b", "a/c"]
    assert (loaded.reasons, loaded.notes) == (PLAN.reasons, PLAN.notes)


def test_saving_leaves_only_the_plan(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    PLAN.save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_save_that_fails_keeps_the_old_plan(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    broken = PrecisionPlan(PLAN)
    broken.reasons["b"] = object()
    with pytest.raises(TypeError, match="JSON serializable"):
        broken.save(path)
    assert PrecisionPlan.load(path).diff(PLAN) == []
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (written()[:-20], "damaged or was cut short"),
        ("[]", "`format` must be"),
        (written(format="other"), "`format` must be"),
        (written(version=2), "newer keras_mixprec.*version=2"),
        (written(version="1"), "`version` must be"),
        (written(layers={}), "`layers` must be a list"),
        (written(layers=["a"]), "needs `path` and `policy`"),
        (written(layers=[{"path": "a"}]), "needs `path` and `policy`"),
        (written(layers=[{"path": 1, "policy": "x"}]), "as strings"),
        (written(layers=[{"path": "a", "policy": "x"}]), "does not know"),
        (written(layers=2 * [{"path": "a", "policy": "float32"}]), "twice"),
    ],
)
def test_a_damaged_file_is_refused(text, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PrecisionPlan.load(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        PrecisionPlan.load(tmp_path / "none.json")


def test_reading_ignores_what_a_later_minor_change_adds(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(written(created_by="someone"))
    assert PrecisionPlan.load(path) == {"a": "float32"}
