"""A plan on disk is read back whole or refused with the reason."""

import json
import os
import time

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
        (written(version=True), "`version` must be"),
        (written(default=3), "`default` must be a string"),
        (written(default="x"), "does not know"),
        ("[" * 100_000, "not JSON"),
        (written(default="\ud800"), "not JSON"),
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
    with pytest.raises(FileNotFoundError, match="no file of a plan.*Received"):
        PrecisionPlan.load(tmp_path / "none.json")


def test_reading_ignores_what_a_later_minor_change_adds(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(written(created_by="someone"))
    assert PrecisionPlan.load(path) == {"a": "float32"}


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "plan.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):  # At first it leads nowhere.
        PLAN.save(link)
        assert link.is_symlink()
        assert PrecisionPlan.load(target).diff(PLAN) == []
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real"]
    assert os.listdir(tmp_path / "real") == ["plan.json"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_plan_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "plan.json"
    path.touch()
    path.chmod(mode)
    PLAN.save(path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_new_plan_has_the_permissions_of_any_new_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, make):
    path = tmp_path / "plan.json"
    make(path)
    kind = path.stat().st_mode
    with pytest.raises(ValueError, match="A plan is a file.*Not a regular"):
        PrecisionPlan.load(path)
    with pytest.raises(OSError, match="Not a regular file"):
        PLAN.save(path)
    assert path.stat().st_mode == kind
    assert os.listdir(tmp_path) == ["plan.json"]


def test_only_what_was_left_unfinished_is_removed(tmp_path):
    names = ["plan.json.0123abcd.mixprec.tmp", "plan.json.tmp", "x.mixprec.tmp"]
    long_ago = time.time() - 60
    for name in names:
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (long_ago, long_ago))
    new = tmp_path / "plan.json.89abcdef.mixprec.tmp"
    new.write_text("{")  # Somebody may write it at this moment.
    PLAN.save(tmp_path / "plan.json")
    left = ["plan.json", new.name, *names[1:]]
    assert sorted(os.listdir(tmp_path)) == sorted(left)


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    other = tmp_path / "plan.json.0123abcd.mixprec.tmp"
    with open(other, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(other, (0, 0))
        PLAN.save(tmp_path / "plan.json")
        assert other.exists()
    PLAN.save(tmp_path / "plan.json")
    assert not other.exists()
