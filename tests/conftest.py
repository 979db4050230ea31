"""Every test starts from the same seed and the default policy."""

import collections
import contextlib
import gc
import itertools
import os
import pathlib
import types
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Eight host devices would slow every test down; two are enough to tell
# whether replicas agree. JAX reads this once, before its first use.
# Machine code that is not optimized computes the same, and compiles in less
# time than it saves: on JAX tests take a quarter less.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 "
    "--xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)

# A defect that training would go on after fails a test.
os.environ.setdefault("KERAS_MIXPREC_STRICT", "1")

import keras
import numpy as np
import pytest

import keras_mixprec
from keras_mixprec import _clock
from keras_mixprec._patched import patched

# Reading a log needs no backend, so these tests run on torch alone. Its
# processes start fastest, and without TensorFlow a needless import shows. Only
# torch diagnoses steps that raise.
if keras.backend.backend() != "torch":
    collect_ignore_glob = [
        "test_monitor_step_raised.py",
        "test_plugin_*.py",
    ]


def pytest_collection_modifyitems(items):
    """Marks tests as slow that a backend does not run by default.

    Tests without a backend in them run on torch, and so do those that take
    `long`. The cases of the others are dealt out over the three backends, at
    least one to each, unless they are `chosen_by_backend`.
    """
    backend = keras.backend.backend()
    cases = collections.defaultdict(list)
    for item in items:
        markers = _markers(item)
        chosen = "chosen_by_backend" in markers
        if "slow" in markers:
            continue
        if _has_no_backend(item) or ("long" in markers and not chosen):
            if backend != "torch":
                item.add_marker(pytest.mark.slow)
        elif not chosen:
            test = f"{item.path.name}::{item.name.split('[')[0]}"
            cases[test].append(item)
    place = ["tensorflow", "jax", "torch"].index(backend)
    for test, dealt in cases.items():
        # Each test starts at another backend, so none gets all first cases.
        mine = place + zlib.crc32(test.encode())
        hands = min(3, len(dealt))
        for number, item in enumerate(dealt):
            if (number - mine) % hands:
                item.add_marker(pytest.mark.slow)


def _markers(item):
    return {marker.name for marker in item.iter_markers()}


def _has_no_backend(item):
    """Returns True if a test or a case is marked `one_backend`.

    In a file with this mark, `every_backend` marks the exceptions.
    """
    own = {marker.name for marker in item.own_markers}
    in_file = item.get_closest_marker("one_backend")
    return "one_backend" in own or (in_file and "every_backend" not in own)


_NUMBERS = itertools.count()


def _empty_folder(tmp_path_factory):
    return str(tmp_path_factory.getbasetemp() / f"measured{next(_NUMBERS)}")


@pytest.fixture(autouse=True, scope="module")
def _past_modules_are_not_searched():
    """TensorFlow keeps 6,500 objects of every `fit`.

    After two hundred tests a search for cycles among them takes 2 s, and
    after all of them ten.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_measured_before(tmp_path_factory):
    """Fixtures of a module use no earlier measurement either."""
    with pytest.MonkeyPatch.context() as patch:
        folder = _empty_folder(tmp_path_factory)
        patch.setenv("KERAS_MIXPREC_CACHE_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch, tmp_path_factory):
    """No test uses measurements of another test or of the developer."""
    folder = _empty_folder(tmp_path_factory)
    monkeypatch.setenv("KERAS_MIXPREC_CACHE_DIR", folder)


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    # A command that runs in this process may change it.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    keras.utils.set_random_seed(0)
    keras_mixprec.set_global_policy("float32")
    yield
    keras_mixprec.set_global_policy("float32")


@pytest.fixture(scope="session")
def canonical(tmp_path_factory):
    """Logs by name that were written without training: `canonical_logs`."""
    from canonical_logs import write_all

    return write_all(tmp_path_factory.mktemp("canonical"))


@pytest.fixture
def golden(file_regression):
    """Function that holds texts against `golden/<name>.txt`, by their title."""

    def check(name, **texts):
        written = "\n".join(
            f"---- {title.replace('_', ' ')} ----\n{text.rstrip()}\n"
            for title, text in texts.items()
        )
        path = pathlib.Path(__file__).parent / "golden" / f"{name}.txt"
        file_regression.check(written, fullpath=path)

    return check


class SetClock:
    """A clock that stands still unless a test moves it."""

    now = 100.0

    def wait(self, seconds):
        self.now += seconds

    def read(self):
        return self.now

    def each_look_takes(self, seconds):
        """Context in which each reading takes time, as on a slow machine."""

        def read():
            self.wait(seconds)
            return self.now

        return patched(_clock, {"now": read})


@pytest.fixture
def clock():
    """The clock of the package, set by the test."""
    set_clock = SetClock()
    wall = {"wall": lambda: 1e9 + set_clock.now}
    with patched(_clock, {"now": set_clock.read} | wall):
        yield set_clock


@pytest.fixture(scope="session")
def driver():
    """A browser."""
    # Only torch's environment has what drives one.
    from missing_programs import browser_or_skip

    with browser_or_skip() as driver:
        yield driver


@pytest.fixture(scope="session")
def shared_page(canonical):
    """The page without a browser, and a server of all canonical logs."""
    from node_page import Page, served

    log_dir, _ = canonical["healthy"]
    with served(log_dir.parent) as url, contextlib.closing(Page(url)) as page:
        yield page


@pytest.fixture
def page(shared_page):
    """The page that a test opens. The test must leave no error on it."""
    yield shared_page
    assert shared_page.errors() == []


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Real logs: of a run that fails, and of one that the tuner repairs."""
    from plugin_runs import train

    log_dir = tmp_path_factory.mktemp("trained")
    train(log_dir / "float16", epochs=1)
    tuner = keras_mixprec.PrecisionTuner(verbose=0)
    train(log_dir / "tuned", tuner, epochs=1)
    return log_dir


@pytest.fixture(scope="session")
def told(canonical):
    """Returns the content of the canonical logs by run, without the page."""
    log_dir, _ = canonical["healthy"]
    runs = keras_mixprec.load_report(log_dir.parent).to_dict()
    return {name.removesuffix("/mixprec"): run for name, run in runs.items()}


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    names = {n: getattr(keras_mixprec, n) for n in keras_mixprec.__all__}
    doctest_namespace.update(names, keras=keras, np=np, kmp=keras_mixprec)


@pytest.fixture
def training_goes_on(monkeypatch):
    """For a test that makes a part of the monitor fail."""
    monkeypatch.delenv("KERAS_MIXPREC_STRICT", raising=False)


@pytest.fixture
def another_device(monkeypatch):
    """Function that makes this another machine."""

    def change():
        found = types.SimpleNamespace(name="another", memory=None)
        devices = "cpu", [found]
        resume = "keras_mixprec.analysis.resume"
        monkeypatch.setattr(f"{resume}.list_devices", lambda: devices)

    return change
