"""Training goes on, and is logged again, when the disk fails in between."""

import shutil

import keras
import pytest
from full_disk import full, small_disk
from monitor_models import (
    BAD,
    arrays,
    each_jit,
    fit,
    good,
    monitor,
    one_weight,
    scalars,
    told,
    with_bad,
)

STEPS = 40
VALUES = with_bad(good(STEPS), 3) * 3


def watched(jit, *callbacks):
    """The history of three epochs."""
    return fit(one_weight(jit=jit), VALUES, callbacks, epochs=3)


def warnings_of(warned):
    """Keras and NumPy have others, of their own."""
    messages = [str(w.message) for w in warned if w.category is UserWarning]
    return [message for message in messages if "written" in message]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as folder:
        yield folder


class Fill(keras.callbacks.Callback):
    """The disk is full during the second epoch."""

    def __init__(self, folder):
        super().__init__()
        self.full = full(folder)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.full.__enter__()
        if epoch == 2:
            self.full.__exit__(None, None, None)


@each_jit
def test_a_full_disk_ends_nothing(disk, jit, tmp_path):
    watcher = monitor(disk, update_freq=1)
    with pytest.warns(UserWarning, match="could not be written") as warned:
        history = watched(jit, watcher, Fill(disk))
    [line] = warnings_of(warned)
    assert "\n" not in line
    assert history == watched(jit, monitor(tmp_path / "b"))
    assert list(scalars(disk, "loss_scale")) == list(range(3 * STEPS + 1))
    skipped = [e["at_step"] for e in told(disk, "skipped_step")]
    assert skipped == [4, STEPS + 4, 2 * STEPS + 4]
    [gap] = told(disk, "log_gap")
    assert gap["lost"] == 0
    assert STEPS <= gap["from_step"] < gap["step"] <= 2 * STEPS + 1
    assert "No space left" in gap["reason"]


class Remove(keras.callbacks.Callback):
    def __init__(self, folder, replace=False):
        super().__init__()
        self.folder, self.replace = folder, replace

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            shutil.rmtree(self.folder)
            if self.replace:
                self.folder.write_text("in its place")


@each_jit
def test_a_removed_folder_ends_nothing(tmp_path, jit):
    watcher, folder = monitor(tmp_path / "a", update_freq=1), tmp_path / "a"
    with pytest.warns(UserWarning, match="could not be written") as warned:
        history = watched(jit, watcher, Remove(folder))
    assert len(warnings_of(warned)) == 1
    assert history == watched(jit, monitor(tmp_path / "b"))
    steps = list(scalars(folder, "loss_scale"))
    assert steps == list(range(STEPS + 1, 3 * STEPS + 1))
    assert len(told(folder, "log_gap")) == len(told(folder, "train_end")) == 1
    assert "steps skipped" in str(watcher.summary)
    assert watcher.report.to_dict()["mixprec"]["layers"]


@each_jit
def test_a_file_in_the_place_of_the_folder_ends_nothing(tmp_path, jit):
    watcher, folder = monitor(tmp_path / "a", update_freq=1), tmp_path / "a"
    with pytest.warns(UserWarning, match="could not be written") as warned:
        history = watched(jit, watcher, Remove(folder, replace=True))
    assert len(warnings_of(warned)) == 1
    assert history == watched(jit, monitor(tmp_path / "b"))
    assert folder.read_text() == "in its place"


def test_two_monitors_in_one_fit_are_refused(tmp_path):
    both = [monitor(tmp_path / "a"), monitor(tmp_path / "b")]
    model = one_weight()
    with pytest.raises(ValueError, match="can have one `MixPrecMonitor`.*/a'"):
        fit(model, good(2), both)
    fit(model, good(2), both[:1])
    assert len(scalars(tmp_path / "a", "loss_scale")) > 0


def test_after_a_fit_that_did_not_start_others_are_watched(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise ValueError("not yet")

    model = one_weight()
    with pytest.raises(ValueError, match="not yet"):
        fit(model, good(2), [monitor(tmp_path / "a"), Fails()])
    fit(model, [BAD, 1 / 8], [monitor(tmp_path / "a")])
    assert len(told(tmp_path / "a", "skipped_step")) == 1


def test_two_models_that_train_in_turn_share_a_log_dir(tmp_path):
    models = [one_weight(), one_weight()]
    lists = []
    for model in models:
        callbacks = [monitor(tmp_path, update_freq=1)]
        each = keras.callbacks.CallbackList(callbacks, model=model, steps=3)
        lists.append(each)
    for each in lists:
        each.on_train_begin()
        each.on_epoch_begin(0)
    for step, value in enumerate([BAD, 1 / 8, BAD]):
        for model, each in zip(models, lists, strict=True):
            each.on_train_batch_begin(step)
            model.train_on_batch(*arrays([value]))
    for each in lists:
        each.on_epoch_end(0)
        each.on_train_end()
    runs = monitor(tmp_path, update_freq=1)
    fit(models[0], good(1), [runs])
    found = runs.report.to_dict()
    assert {name: run["skipped"] for name, run in found.items()} == {
        "mixprec": 2,
        "mixprec_2": 2,
    }
