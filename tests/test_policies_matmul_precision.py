"""What is set is in force in the backend itself, and restored by the scope."""

import queue
import threading

import keras
import numpy as np
import pytest
from keras import layers

from keras_mixprec import (
    diagnose,
    lint,
    matmul_precision,
    set_matmul_precision,
)
from keras_mixprec.analysis.doctor import self_test
from keras_mixprec.backend import active
from keras_mixprec.policies.matmul_precision import in_force, resolve

BACKEND = keras.backend.backend()


def settings():
    """All that the backend itself says of it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.config.experimental.tensor_float_32_execution_enabled()
    if BACKEND == "jax":
        import jax

        return jax.config.jax_default_matmul_precision
    import torch

    switches = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
    ]
    products = torch.get_float32_matmul_precision()
    allows = torch.backends.cudnn.allow_tf32
    return products, allows, [switch.fp32_precision for switch in switches]


FULL = {
    "tensorflow": False,
    "jax": "float32",
    "torch": ("highest", False, ["ieee", "none", "none", "ieee", "ieee"]),
}
TF32 = {
    "tensorflow": True,
    "jax": "tensorfloat32",
    "torch": ("high", True, ["tf32", "tf32", "tf32", "tf32", "ieee"]),
}


@pytest.fixture(autouse=True)
def _default():
    yield
    set_matmul_precision("default")


def test_the_setter_is_in_force_until_the_default_is_set():
    before = settings()
    assert set_matmul_precision("float32") == "float32"
    assert settings() == FULL[BACKEND]
    set_matmul_precision("default")
    set_matmul_precision("default")
    after = settings()
    assert after[:2] == before[:2] if BACKEND == "torch" else after == before


def test_the_scope_restores_what_was_there():
    before = settings()
    with matmul_precision("float32") as name:
        assert (name, settings()) == ("float32", FULL[BACKEND])
        with matmul_precision("default"):
            assert settings() != FULL[BACKEND]
        assert settings() == FULL[BACKEND]
    assert settings() == before


def test_an_exception_restores_it_too():
    before = settings()
    with pytest.raises(ZeroDivisionError), matmul_precision("float32"):
        raise ZeroDivisionError
    assert settings() == before


def test_tf32_is_what_the_backend_calls_so():
    """As on a GPU that has it: the switches are there without one."""
    before = settings()
    with active.precision().scope("tf32", "cuda"):
        assert settings() == TF32[BACKEND]
        products, _ = active.precision().read("cuda")
    assert products == ("default" if BACKEND == "tensorflow" else "tf32")
    assert settings() == before


def seen_in_a_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(settings()))
    thread.start()
    thread.join()
    return seen[0]


def test_threads_follow_as_the_backend_has_it():
    before = settings()
    with matmul_precision("float32"):
        of_scope = seen_in_a_thread()
    set_matmul_precision("float32")
    assert seen_in_a_thread() == FULL[BACKEND]
    assert of_scope == (before if BACKEND == "jax" else FULL[BACKEND])


class Watched(layers.Dense):
    def call(self, x):
        self.traced.append(settings())
        return super().call(x)


# torch.compile is another compiler than XLA.
@pytest.mark.parametrize(
    "jit_compile", [False, True][: 1 + (BACKEND != "torch")]
)
def test_a_model_compiled_before_follows(jit_compile):
    """JAX and XLA trace again; the others ask when they compute."""
    layer = Watched(1)
    layer.traced = []
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, verbose=0)
    before, layer.traced[:] = settings(), []
    with matmul_precision("float32"):
        model.fit(x, y, verbose=0)
        traces_again = BACKEND != "tensorflow" or jit_compile
        assert set(map(str, layer.traced)) <= {str(FULL[BACKEND])}
        assert bool(layer.traced) is traces_again
        layer.traced.clear()
    model.fit(x, y, verbose=0)
    assert set(map(str, layer.traced)) <= {str(before)}


def significant_bits():
    """How many bits of a float32 product count, as a product shows it."""
    size = 512
    diagonal = np.ones(size, "float32")
    diagonal[:23] += 2.0 ** -np.arange(1, 24)
    product = keras.ops.matmul(
        keras.ops.diag(diagonal), keras.ops.eye(size, dtype="float32")
    )
    kept = np.diagonal(keras.ops.convert_to_numpy(product))[:23]
    return 1 + int(np.flatnonzero(kept == diagonal[:23]).max() + 1)


BITS = {"float32": 24, "bfloat16_3x": 16, "tf32": 11, "bfloat16": 8}


def test_the_device_computes_in_what_is_set():
    names = in_force().available
    assert "float32" in names
    for name in names:
        with matmul_precision(name):
            assert matmul_precision() == name
            assert significant_bits() == BITS[name]
    assert significant_bits() == BITS[matmul_precision()]


def device(backend, kind, capability=None):
    return {
        "backend": backend,
        "kind": kind,
        "devices": [f"some {kind}"],
        "compute_capability": capability,
    }


@pytest.mark.parametrize(
    ("backend", "kind", "capability", "products", "convolutions"),
    [
        ("tensorflow", "cuda", (8, 0), "tf32", "tf32"),
        ("tensorflow", "cuda", (7, 5), "float32", "float32"),
        ("tensorflow", "tpu", None, "bfloat16", "bfloat16"),
        ("tensorflow", "cpu", None, "float32", "float32"),
        ("jax", "cuda", (9, 0), "tf32", "tf32"),
        ("jax", "tpu", None, "bfloat16", "bfloat16"),
        ("jax", "rocm", None, "float32", "float32"),
        ("torch", "cuda", (8, 6), "float32", "tf32"),
        ("torch", "cuda", (7, 0), "float32", "float32"),
        ("torch", "mps", None, "float32", "float32"),
    ],
)
def test_defaults(backend, kind, capability, products, convolutions):
    found = device(backend, kind, capability)
    holds = resolve(("default", "default"), found)
    assert holds[:3] == (products, convolutions, True)
    assert ("tf32" in holds.available) is ((capability or (0,)) >= (8, 0))


def test_the_variable_of_nvidia_goes_before(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    holds = resolve(("tf32", "tf32"), device("torch", "cuda", (9, 0)))
    assert holds[:2] == ("float32", "float32")
    assert str(holds) == "float32, all that torch on some cuda has"


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (("default", "default"), "TF32, the default of JAX on some cuda"),
        (("float32", "float32"), "float32, set on JAX on some cuda"),
        (
            ("bfloat16_3x", "default"),
            "three products of bfloat16, convolutions in TF32, "
            "set on JAX on some cuda",
        ),
        (
            ("F16_F16_F32", "default"),
            "F16_F16_F32, convolutions in TF32, set on JAX on some cuda",
        ),
    ],
)
def test_sentences(read, text):
    assert str(resolve(read, device("jax", "cuda", (8, 0)))) == text


WRONG = {
    "a name of torch": ("highest", ValueError, "one of 'default', 'float32'"),
    "another case": ("TF32", ValueError, "one of .*Received: name='TF32'"),
    "no string": (32, TypeError, "name of a matmul precision.*of type int"),
    "a list": (["tf32"], TypeError, "of type list"),
    "empty": ("", ValueError, "one of"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("call", [set_matmul_precision, matmul_precision])
def test_wrong_calls(case, call):
    name, error, message = WRONG[case]
    before = settings()
    with pytest.raises(error, match=message):
        call(name)
    assert settings() == before


def test_what_the_device_lacks_is_refused_with_what_it_has():
    lacking = set(BITS) - set(in_force().available)
    for name in lacking:
        with pytest.raises(ValueError, match=f"no '{name}'.*It has 'float32'"):
            matmul_precision(name)


def test_nothing_cannot_be_set():
    with pytest.raises(TypeError, match="name=None"):
        set_matmul_precision(None)


def watched_model():
    seen = queue.SimpleQueue()  # A diagnosis would put a list back.

    class WatchedDtypes(layers.Dense):
        def call(self, x):
            seen.put((self.compute_dtype, settings()))
            return super().call(x)

    layer = WatchedDtypes(4, name="watched", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse", jit_compile=False)
    drained(seen)
    return model, seen


def drained(found):
    return [found.get() for _ in range(found.qsize())]


@pytest.mark.parametrize("check", [diagnose, lint])
def test_float32_references_have_all_digits_where_tf32_is_set(check):
    """As on a GPU: the model's own step is in what is set, TF32."""
    active.precision().put("tf32", "cuda")
    model, seen = watched_model()
    check(model, np.ones((4, 4), "float32"), np.ones((4, 4), "float32"))
    seen = drained(seen)
    assert {dtype for dtype, _ in seen} == {"float16", "float32"}
    for dtype, found in seen:
        full = dtype == "float32"
        assert found == (FULL if full else TF32)[BACKEND]
    assert settings() == TF32[BACKEND]


def test_the_doctor_checks_float32_in_float32(monkeypatch):
    seen = {}

    def run(dtype):
        seen[dtype] = settings()
        return np.ones(1), np.ones(1)

    monkeypatch.setattr(self_test, "_OPERATIONS", {"matmul": run})
    active.precision().put("tf32", "cuda")
    self_test.check_formats(["float32", "float16"])
    assert seen == dict.fromkeys(seen, FULL[BACKEND])
