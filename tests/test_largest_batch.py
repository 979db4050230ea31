"""`largest_batch` against known limits."""

import dataclasses
import functools
import json
import re

import keras
import largest_batch_models as models
import numpy as np
import pytest
from test_docs import keys, keys_in

import keras_mixprec as kmp
from keras_mixprec.analysis import largest_batch as module
from keras_mixprec.analysis.largest_batch import Trainer, search, step_at

pytestmark = pytest.mark.one_backend

X, Y = models.batch()


@pytest.mark.parametrize("step", [None, 1, 8])
@pytest.mark.parametrize("known", [1, 63, 100, 1000, 5001])
def test_the_search_ends_within_one_step(known, step):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= known

    found, fails_at = search(fits, 1, 65536, step)
    assert found <= known < fails_at
    assert fails_at - found <= (step or step_at(found))
    assert len(tried) == len(set(tried)) <= 27


def test_the_ends_of_the_search():
    assert search(lambda size: False, 4, 100) == (0, 4)
    assert search(lambda size: True, 4, 100) == (100, None)
    assert search(lambda size: True, 4, 4) == (4, None)


class Known:
    """In place of processes: what fits in each policy is known."""

    tried = []
    stop_after = None

    def __init__(self, job, timeout):
        self.job = dataclasses.replace(job, available=None)
        self.known = {"float32": 100, "mixed_float16": 190}[job.policy]

    def run(self, size):
        if len(self.tried) == self.stop_after:
            raise KeyboardInterrupt
        self.tried.append(size)
        if size > self.known:
            return {"fits": False, "because": "out of memory"}
        return {"fits": True, "peak_bytes": size, "measured_by": "device"}

    def asked(self):
        return Trainer(self.job).asked()

    def close(self):
        keras.config.set_dtype_policy("float32")


@pytest.fixture
def largest(monkeypatch):
    monkeypatch.setattr(module, "Trials", Known)
    monkeypatch.setattr(Known, "tried", [])
    return functools.partial(
        kmp.largest_batch, build=models.hungry, data=models.batch, verbose=0
    )


def find(build, **arguments):
    given = {"baseline": None, "min_size": 700, "max_size": 800, "step": 100}
    return kmp.largest_batch(build, (X, Y), "float32", **given | arguments)


@pytest.mark.slow
def test_the_known_limit_is_found(capsys):
    found = find(models.hungry)
    assert (found.batch_size, found.found.fails_at) == (models.KNOWN, 800)
    assert found.ratio is None
    assert re.findall(r"\d+", str(found)) == ["32", "700", "800"]
    first, second = found.found.trials
    assert first["fits"]
    assert first["peak_bytes"] > 2**20
    assert second["because"]
    assert capsys.readouterr().out.count("largest_batch: float32, ") == 2


def test_it_is_a_ratio_to_float32(largest):
    found = largest()
    assert (found.batch_size, found.baseline.batch_size) == (188, 100)
    assert found.ratio == 1.88
    numbers = [
        re.findall(r"[\d.]+x?", line) for line in str(found).splitlines()
    ]
    assert numbers == [["16", "188", "192", "1.88x"], ["32", "100", "102"]]
    assert largest(max_size=128).ratio is None
    # The keys that are documented.
    found = json.loads(json.dumps(found.to_dict()))
    assert found["ratio"] == 1.88
    heading = "## largest_batch(...).to_dict()"
    assert found.keys() == keys(heading)
    assert found["found"].keys() == keys_in(heading, "found")
    entries = [{*trial} for trial in found["found"]["trials"]]
    assert set.union(*entries) == keys("### Trials")


@pytest.mark.parametrize("stop_after", [0, 5, 18])
def test_an_interrupted_search_goes_on(
    largest, monkeypatch, tmp_path, stop_after
):
    whole = largest().to_dict()
    trials = len(Known.tried)
    path = tmp_path / "search.json"
    Known.tried.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Known, "stop_after", stop_after)
        with pytest.raises(KeyboardInterrupt):
            largest(resume=path)
    assert largest(resume=path).to_dict() == whole
    assert len(Known.tried) == trials


OTHERS = {
    "build": {"build": models.linear},
    "data": {"data": models.zeros},
    "policies": {"baseline": None},
    "steps": {"steps": 3},
    "device": {},
}


@pytest.mark.parametrize("differs", OTHERS)
def test_the_file_of_another_search_is_refused(
    differs, largest, tmp_path, another_device
):
    path = tmp_path / "search.json"
    largest(resume=path)
    if not OTHERS[differs]:
        another_device()
    said = f"differs in .*{differs}.*Received: resume="
    with pytest.raises(ValueError, match=said):
        largest(resume=path, **OTHERS[differs])


WRONG = {
    "imports `build`: pass": {"build": lambda: None},
    "`build`.*imported: ModuleNotFound": {"build": "nowhere:build"},
    r"same number.*\[7, 8\]": {"data": (X, Y[:7])},
    "imports `data`: pass": {"data": lambda: (X, Y)},
    "`policy` must be one": {"policy": "float17"},
    "`baseline` must": {"baseline": "auto"},
    "`min_size` must": {"min_size": 0},
    "`max_size` must": {"min_size": 8, "max_size": 7},
    "`memory_limit` must": {"memory_limit": "1 GB"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message):
    given = {"build": models.hungry, "data": (X, Y), **WRONG[message]}
    with pytest.raises((TypeError, ValueError), match=message):
        kmp.largest_batch(**given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (models.broken, KeyError, "what is wrong"),
        (models.endless, TimeoutError, "than 1 seconds"),
        # The script did start it below `if __name__ == "__main__":`.
        (models.crashed, RuntimeError, r"by SIGSEGV\."),
    ],
)
def test_what_is_no_lack_of_memory_is_raised(build, error, message):
    timeout = 1 if build is models.endless else 600
    with pytest.raises(error, match=message):
        find(build, timeout=timeout)


def test_the_first_rows_are_those_that_are_repeated():
    first = module.first_batch({"x": np.arange(500)})
    assert len(first[0]["x"]) == 256
