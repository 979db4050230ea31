"""The backend uses the precision that is set; a scope restores the old one."""

import queue

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec import matmul_precision, set_matmul_precision
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
    from torch import backends, get_float32_matmul_precision

    switches = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    ]
    precisions = [switch.fp32_precision for switch in switches]
    return get_float32_matmul_precision(), backends.cudnn.allow_tf32, precisions


FULL = {
    "tensorflow": False,
    "jax": "float32",
    "torch": ("highest", False, ["ieee", "none", "none", "ieee", "ieee"]),
}[BACKEND]
TF32 = {
    "tensorflow": True,
    "jax": "tensorfloat32",
    "torch": ("high", True, ["tf32", "tf32", "tf32", "tf32", "ieee"]),
}[BACKEND]


@pytest.fixture(autouse=True)
def _default():
    yield
    set_matmul_precision("default")


def test_the_setter_is_in_force_until_the_default_is_set():
    before = settings()
    assert set_matmul_precision("float32") == "float32"
    assert settings() == FULL
    set_matmul_precision("default")
    set_matmul_precision("default")
    after = settings()
    assert after[:2] == before[:2] if BACKEND == "torch" else after == before


def test_the_scope_restores_what_was_there():
    before = settings()
    with matmul_precision("float32") as name:
        assert (name, settings()) == ("float32", FULL)
        with matmul_precision("default"):
            assert settings() != FULL
        assert settings() == FULL
    assert settings() == before
    with pytest.raises(ZeroDivisionError), matmul_precision("float32"):
        raise ZeroDivisionError
    assert settings() == before
    # As on a GPU that has it: the switches are there without one.
    with active.precision().scope("tf32", "cuda"):
        assert settings() == TF32
        products, _ = active.precision().read("cuda")
    assert products == ("default" if BACKEND == "tensorflow" else "tf32")
    assert settings() == before


class Watched(layers.Dense):
    """Notes its dtype and the settings; a diagnosis would put a list back."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.queue = queue.SimpleQueue()

    def call(self, x):
        self.queue.put((self.compute_dtype, settings()))
        return super().call(x)

    def seen(self):
        """Returns what it has noted since."""
        return [self.queue.get() for _ in range(self.queue.qsize())]


# torch.compile is another compiler than XLA.
@pytest.mark.parametrize(
    "jit_compile", [False, True][: 1 + (BACKEND != "torch")]
)
def test_a_model_compiled_before_follows(jit_compile):
    """JAX and XLA trace again; the others ask when they compute."""
    layer = Watched(1)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, verbose=0)
    before = settings()
    layer.seen()
    with matmul_precision("float32"):
        model.fit(x, y, verbose=0)
        traced = {str(s) for _, s in layer.seen()}
        assert traced <= {str(FULL)}
        traces_again = BACKEND != "tensorflow" or jit_compile
        assert bool(traced) is traces_again
    model.fit(x, y, verbose=0)
    assert {str(s) for _, s in layer.seen()} <= {str(before)}


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
    available = in_force().available
    assert "float32" in available
    for name, bits in BITS.items():
        if name in available:
            with matmul_precision(name):
                assert matmul_precision() == name
                assert significant_bits() == bits
        else:
            with pytest.raises(ValueError, match=f"'{name}'.*'float32'"):
                matmul_precision(name)
    assert significant_bits() == BITS[matmul_precision()]


def device(backend, kind, capability=None):
    return {
        "backend": backend,
        "kind": kind,
        "devices": [f"some {kind}"],
        "compute_capability": capability,
    }


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("backend", "kind", "capability", "products", "convolutions"),
    [
        ("tensorflow", "cuda", (8, 0), "tf32", "tf32"),
        ("tensorflow", "cuda", (7, 5), "float32", "float32"),
        ("jax", "tpu", None, "bfloat16", "bfloat16"),
        ("torch", "cuda", (8, 6), "float32", "tf32"),
    ],
)
def test_defaults(backend, kind, capability, products, convolutions):
    found = device(backend, kind, capability)
    holds = resolve(("default", "default"), found)
    assert holds[:3] == (products, convolutions, True)
    assert ("tf32" in holds.available) is ((capability or (0,)) >= (8, 0))


@pytest.mark.long
@pytest.mark.parametrize("check", [kmp.diagnose, kmp.lint])
def test_float32_references_have_all_digits_where_tf32_is_set(check):
    """As on a GPU: the model's own step is in what is set, TF32."""
    active.precision().put("tf32", "cuda")
    layer = Watched(4, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse", jit_compile=False)
    layer.seen()
    check(model, np.ones((4, 4), "float32"), np.ones((4, 4), "float32"))
    seen = layer.seen()
    assert {dtype for dtype, _ in seen} == {"float16", "float32"}
    for dtype, found in seen:
        assert found == (FULL if dtype == "float32" else TF32)
    assert settings() == TF32
