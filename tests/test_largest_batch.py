"""`largest_batch` against limits that are known."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import keras
import largest_batch_models as models
import numpy as np
import pytest
from test_docs_files import keys

import keras_mixprec as kmp
from keras_mixprec.analysis.largest_batch import run
from keras_mixprec.analysis.largest_batch.search import search, step_at

BACKEND = keras.backend.backend()
only_torch = pytest.mark.skipif(
    BACKEND != "torch", reason="knows no backend; its processes start soonest"
)
X, Y = models.batch()


@pytest.mark.parametrize("predicted", [None, 0.5, 0.97, 1.0, 1.04, 2.0])
@pytest.mark.parametrize("step", [None, 1, 8])
@pytest.mark.parametrize("known", [1, 63, 100, 1000, 5001])
def test_the_search_ends_within_one_step(known, step, predicted):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= known

    guess = predicted and max(int(known * predicted), 1)
    found, fails_at = search(fits, 1, 65536, step, lambda: guess)
    assert found <= known < fails_at
    assert fails_at - found <= (step or step_at(found))
    assert len(tried) == len(set(tried)) <= 27
    if predicted == 1.0 and step is None:
        assert len(tried) <= 4


def test_the_ends_of_the_search():
    assert search(lambda size: False, 4, 100) == (0, 4)
    assert search(lambda size: True, 4, 100) == (100, None)
    assert search(lambda size: True, 4, 4) == (4, None)


def find(build, **arguments):
    given = {"baseline": None, "min_size": 700, "max_size": 800, "step": 100}
    return kmp.largest_batch(build, (X, Y), "float32", **given | arguments)


@pytest.mark.parametrize(
    "build",
    [
        models.hungry,
        pytest.param(models.killed, marks=only_torch),
        pytest.param("largest_batch_models:aborted", marks=only_torch),
    ],
)
def test_the_known_limit_is_found(build, capsys):
    found = find(build)
    assert (found.batch_size, found.found.fails_at) == (models.KNOWN, 800)
    assert found.ratio is None
    assert str(found) == "float32: 700 samples fit, 800 do not"
    first, second = found.found.trials
    assert first["fits"]
    assert first["peak_bytes"] > 2**20
    assert second["because"]
    assert capsys.readouterr().out.count("largest_batch: float32, ") == 2


class Known:
    """In place of processes: what fits in each policy is known."""

    tried = []
    stop_after = 1000
    device = "one"

    def __init__(self, job, timeout):
        self.known = {"float32": 100, "mixed_float16": 190}[job.policy]

    def run(self, size):
        if len(self.tried) == self.stop_after:
            raise KeyboardInterrupt
        self.tried.append(size)
        if size > self.known:
            return {"fits": False, "because": "out of memory"}
        return {"fits": True, "peak_bytes": size, "measured_by": "device"}

    def predict(self, size):
        return None

    def asked(self):
        return {"device": self.device}

    def close(self):
        pass


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(run, "Trials", Known)
    monkeypatch.setattr(Known, "tried", [])
    monkeypatch.setattr(Known, "stop_after", 1000)
    return functools.partial(
        kmp.largest_batch, models.hungry, models.batch, verbose=0
    )


def test_it_is_a_ratio_to_float32(known):
    found = known()
    assert (found.batch_size, found.baseline.batch_size) == (188, 100)
    assert found.ratio == 1.88
    assert str(found).splitlines() == [
        "mixed_float16: 188 samples fit, 192 do not (1.88x)",
        "float32: 100 samples fit, 102 do not",
    ]
    assert json.loads(json.dumps(found.to_dict()))["ratio"] == 1.88
    assert known(max_size=128).ratio is None


def test_the_keys_that_are_documented(known):
    found = known().to_dict()
    assert found.keys() == keys("## largest_batch(...).to_dict()")
    assert found["found"].keys() == keys("### Searches")
    entries = [{*trial} for trial in found["found"]["trials"]]
    assert set.union(*entries) == keys("### Trials")


@pytest.mark.parametrize("stop_after", [0, 1, 5, 14, 18])
def test_an_interrupted_search_goes_on(
    known, monkeypatch, tmp_path, stop_after
):
    whole = known().to_dict()
    trials = len(Known.tried)
    path = tmp_path / "search.json"
    Known.tried.clear()
    monkeypatch.setattr(Known, "stop_after", stop_after)
    with pytest.raises(KeyboardInterrupt):
        known(resume=path)
    monkeypatch.setattr(Known, "stop_after", 1000)
    assert known(resume=path).to_dict() == whole
    assert len(Known.tried) == trials
    with pytest.raises(ValueError, match="another search: it differs in steps"):
        known(resume=path, steps=3)
    monkeypatch.setattr(Known, "device", "another")
    with pytest.raises(ValueError, match="it differs in device"):
        known(resume=path)


def other_file(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    return path


WRONG = {
    "`build` must be a function": {"build": 3},
    "which imports `build`: pass": {"build": lambda: None},
    "'module:name'. Received: build='models'": {"build": "models"},
    "`build` cannot be imported: No module": {"build": "nowhere:build"},
    "has no attribute 'none'": {"build": "largest_batch_models:none"},
    "`data` must be arrays": {"data": 3},
    r"same number of samples. .*\[7, 8\]": {"data": (X, Y[:7])},
    "at least one": {"data": (X[:0], Y[:0])},
    "which imports `data`: pass": {"data": lambda: (X, Y)},
    "`policy` must be one of": {"policy": "float17"},
    "`policy` must be the name": {"policy": 16},
    "`baseline` must be one of": {"baseline": "auto"},
    "`min_size` must be at least 1": {"min_size": 0},
    "`max_size` must be at least `min_size`": {"min_size": 8, "max_size": 7},
    "`step` must be an integer": {"step": 0.5},
    "`steps` must be at least 1": {"steps": 0},
    "`timeout` must be a finite number": {"timeout": -1},
    "`memory_limit` must be an integer": {"memory_limit": "1 GB"},
    "`resume` must be a file that": {"resume": other_file},
    "`verbose` must be one of": {"verbose": 2},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message, tmp_path):
    given = {"build": models.hungry, "data": (X, Y), **WRONG[message]}
    if given.get("resume"):
        given["resume"] = given["resume"](tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        kmp.largest_batch(given.pop("build"), given.pop("data"), **given)


@only_torch
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (models.no_model, TypeError, "must return a compiled `keras.Model`"),
        (models.not_compiled, ValueError, "call `model.compile"),
        (models.broken, KeyError, "what is wrong"),
        (models.endless, TimeoutError, "takes longer than 1 seconds"),
        # The script did start it below `if __name__ == "__main__":`.
        (models.crashed, RuntimeError, r"was killed by SIGSEGV\."),
    ],
)
def test_what_is_no_lack_of_memory_is_raised(build, error, message):
    timeout = 1 if build is models.endless else 600
    with pytest.raises(error, match=message):
        find(build, timeout=timeout)


@only_torch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_a_limit_below_what_libraries_need_is_refused():
    wrong = (
        r"`memory_limit` is less than .* \(about ([\d.,]+) (.)iB\)\. Received: "
    )
    with pytest.raises(ValueError, match=wrong) as caught:
        find(models.hungry, memory_limit=10_000_000)
    number, unit = re.search(wrong, str(caught.value)).groups()
    needs = float(number.replace(",", "")) * {"M": 2**20, "G": 2**30}[unit]
    # This one has imported the same, and more.
    status = pathlib.Path("/proc/self/status").read_text()
    own = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024
    assert 2**27 < needs < own


# Nothing of ours: what fits is what a script of a user's does.
SCRIPT = """
import resource, sys
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import largest_batch_models as models, numpy as np
x = np.repeat(models.wide_batch()[0], int(sys.argv[1]), 0)
model = getattr(models, sys.argv[3])()
for _ in range(2):
    float(model.train_on_batch(x, x))
"""


def trains(size, limit, build):
    code = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    folder = os.path.dirname(models.__file__)
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*code, str(size), str(limit), build.__name__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
@pytest.mark.parametrize("build", [models.wide, models.wide_compiled])
def test_the_limit_of_a_process_is_found(build):
    if BACKEND == "torch" and build is models.wide_compiled:
        pytest.skip("torch.compile needs a compiler of C++")
    limit, step = 1300 * 2**20, 4
    found = kmp.largest_batch(
        build,
        models.wide_batch,
        "float32",
        baseline=None,
        min_size=8,
        step=step,
        memory_limit=limit,
    )
    assert 8 < found.batch_size < 200
    assert found.found.fails_at - found.batch_size <= step
    assert trains(found.batch_size - step, limit, build)
    assert not trains(found.found.fails_at + step, limit, build)
    known = BACKEND == "jax" or build is models.wide_compiled
    assert bool(found.found.predicted) == known
    if known:
        # Of a process, which has its libraries' own in the same memory.
        near = pytest.approx(found.batch_size, rel=0.4)
        assert found.found.predicted == near


def test_rows_are_repeated():
    first = run.first_batch({"x": np.arange(500)})
    assert len(first[0]["x"]) == 256
