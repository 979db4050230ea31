"""Memory and energy of training, as measured and as computed by hand."""

import mmap
import tracemalloc

import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.devices import energy
from keras_mixprec.devices.memory import (
    memory_record,
    peak_bytes,
    reset_peak,
    sizes_in_proc,
)

BACKEND = keras.backend.backend()
ROWS, WIDTH, DEPTH = 4096, 128, 16
# In bytes, of float32.
WEIGHTS = DEPTH * WIDTH * WIDTH * 4
ACTIVATION = ROWS * WIDTH * 4


def deep(*more, **compile_arguments):
    """Returns a model of layers without bias that keep their outputs."""
    layer = {"units": WIDTH, "activation": "tanh", "use_bias": False}
    layers = [keras.layers.Dense(**layer) for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, *more])
    model.compile("adam", "mse", **compile_arguments)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.skipif(BACKEND == "torch", reason="compiles no program")
def test_a_compiled_program_takes_what_it_takes_on_paper():
    model = deep(jit_compile=True)
    batch = np.zeros((2, ROWS, WIDTH))
    found = memory_record(model, tuple(batch))
    # In memory are the outputs of all layers, the gradient of one output, and
    # the gradients of all weights. Adam has two slots.
    kept = (DEPTH + 1) * ACTIVATION
    on_paper = 2 * ACTIVATION + (1 + 2 + 1) * WEIGHTS + kept
    assert found["measured_by"] == "compiled_program"
    assert found["peak_bytes"] == pytest.approx(on_paper, rel=0.1)
    rest = found["weights_bytes"] + found["slots_bytes"]
    assert found["activations_bytes"] == found["peak_bytes"] - rest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_slots_are_counted(dtype):
    keras.config.set_dtype_policy(dtype)
    model = deep()
    each = WEIGHTS * (1 if dtype == "float32" else 0.5)
    # Keras' metrics are a sum and a count; its optimizer counts steps.
    record = memory_record(model)
    assert record["weights_bytes"] == pytest.approx(each, abs=32)
    assert record["slots_bytes"] == pytest.approx(2 * each, abs=32)


def take(size):
    """Touches new pages. `malloc` may reuse some that a large process has."""
    pages = mmap.mmap(-1, size)
    np.frombuffer(pages, "uint8")[:] = 1
    pages.close()


@pytest.mark.one_backend
def test_a_process_has_a_peak_that_starts_over():
    take(2**26)
    before, measured_by = peak_bytes()
    assert measured_by == "process"
    if reset_peak():
        assert peak_bytes()[0] < before - 2**25
    now = sizes_in_proc()["VmRSS"]
    take(2**27)
    assert peak_bytes()[0] == pytest.approx(now + 2**27, rel=0.1)


@pytest.mark.one_backend
def test_a_diagnosis_makes_fewer_arrays_than_a_step_has_tensors():
    scale = keras.layers.Rescaling(1e6, name="scale")
    model = deep(scale, jit_compile=False)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    kmp.diagnose(model, x[:8], x[:8])  # Imports.
    tracemalloc.start()
    try:
        found = kmp.diagnose(model, x, 0 * x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "scale" in [verdict.layer for verdict in found]
    # Each layer needs its output and the gradient of that.
    assert peak < 2 * len(model.layers) * x.nbytes


def gives(value):
    """A function of a library in C, which writes what it returns."""

    def function(*arguments):
        known = value(arguments[0]) if callable(value) else value
        arguments[-1]._obj.value = known
        return 0

    return function


class Library:
    """Simulates two GPUs that have counted 3 J and 5 J."""

    nvmlInit_v2 = staticmethod(lambda: 0)
    nvmlDeviceGetCount_v2 = staticmethod(gives(2))
    nvmlDeviceGetHandleByIndex_v2 = staticmethod(
        gives(lambda index: index.value + 1)
    )
    nvmlDeviceGetTotalEnergyConsumption = staticmethod(
        gives(lambda handle: {1: 3000, 2: 5000}[handle.value])
    )


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Library)
    devices = "cuda", []
    monkeypatch.setattr(energy.active, "query_devices", lambda: devices)
    energy._counters.cache_clear()
    yield
    energy._counters.cache_clear()


@pytest.mark.one_backend
def test_energy_is_that_of_all_visible_gpus(gpus, monkeypatch):
    assert energy.read_joules() == 8.0
    not_supported = staticmethod(lambda *arguments: 3)
    name = "nvmlDeviceGetTotalEnergyConsumption"
    monkeypatch.setattr(Library, name, not_supported)
    assert energy.read_joules() is None
