"""TensorFlow's graph-level mixed precision, as a setter and a scope."""

import contextlib
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable

import keras

from keras_mixprec._checks import check_choice, check_list, check_type
from keras_mixprec._patched import patched
from keras_mixprec.backend import active

_DTYPES = ("float16", "bfloat16", "float32")

_NEEDS = {
    "float16": "an NVIDIA GPU of compute capability 7.0 or higher, or a CPU "
    "with AMX-FP16 or AVX-NE-CONVERT",
    "bfloat16": "a CPU with AVX-512, with oneDNN (TF_ENABLE_ONEDNN_OPTS is not "
    "0) and without a visible GPU",
}

_WITHOUT_EFFECT = {
    "jit_compile": "XLA compiles this model, and the graph rewrite cannot "
    "change XLA programs. Compile the model with `jit_compile=False`",
    "run_eagerly": "This model runs eagerly, so there is no graph to "
    "rewrite. Compile the model with `run_eagerly=False, jit_compile=False`",
}

# The operations that `products` counts. They take most of the time.
_PRODUCTS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")

# Each rewrite has its own number, because TensorFlow reuses functions that it
# optimized under the same number. The backend uses 1 to test for support.
_serials = itertools.count(2)
_stack: list["GraphRewrite"] = []
# At the end of a rewrite, this stack restores TensorFlow's options, environment
# variables and `keras.Model`.
_undo = contextlib.ExitStack()


class GraphRewrite(contextlib.AbstractContextManager):
    """TensorFlow's graph rewrite. It is in force until you call `off()`.

    As a context manager it calls `off()` at the end of the block. `str()`
    sums up the conversions in one line.

    Attributes:
        dtype: String. `"float16"`, `"bfloat16"`, or `"float32"` for none.
        lists: Dict from `"allow"`, `"deny"` and `"infer"` to lists of the
            operations that you passed.
    """

    def __init__(self, dtype: str, lists: dict):
        self.dtype = dtype
        self.lists = lists
        self._functions: list[tuple[Counter, Counter]] = []
        self._serial = next(_serials)
        self.on()

    @property
    def converted(self) -> dict:
        """Counts of the conversions in functions that ran under the rewrite.

        The numbers come from the graphs that TensorFlow runs. A function counts
        once for each shape that it was traced for. The body of a loop counts
        once.

        Returns:
            Dict: `"dtype"`; `"products"`, the number of matrix products and
            convolutions that now compute in this dtype; `"float32_products"`,
            the number that still compute in float32; `"operations"`, a dict
            from the type of each converted operation to its number; `"casts"`,
            the number of casts to and from the dtype that were added;
            `"functions"`, the number of functions that have matrix products or
            convolutions.
        """
        _collect()
        before, after = Counter(), Counter()
        for earlier, later in self._functions:
            before += earlier
            after += later
        operations = {
            name: count
            for (name, dtype), count in sorted((after - before).items())
            if dtype == self.dtype != "float32"
            and name not in ("Const", "Cast")
        }
        casts = (f"float32->{self.dtype}", f"{self.dtype}->float32")
        kept = {name: n for (name, x), n in after.items() if x == "float32"}
        return {
            "dtype": self.dtype,
            "products": _products(operations),
            "float32_products": _products(kept),
            "operations": operations,
            "casts": sum(after["Cast", both] for both in casts),
            "functions": len(self._functions),
        }

    def on(self) -> None:
        """Starts the rewrite again after `off()`.

        TensorFlow reuses the functions that it optimized under this rewrite.
        """
        if self not in _stack:
            _collect()
            _stack.append(self)
            _apply()

    def off(self) -> None:
        """Ends the rewrite, if it is on, and restores the earlier settings."""
        if self in _stack:
            _collect()
            _stack.remove(self)
            _apply()

    def __exit__(self, *exc_info) -> None:
        self.off()

    def __str__(self):
        found = self.converted
        products = found["products"]
        others = sum(found["operations"].values()) - products
        return (
            f"{self.dtype}, {products} of "
            f"{products + found['float32_products']} products and {others} "
            f"other operations converted, with {found['casts']} casts"
        )


def graph_rewrite(
    dtype: str,
    *,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    infer: Iterable[str] = (),
) -> GraphRewrite:
    """Lets TensorFlow rewrite float32 graphs to 16 bits.

    The model stays a float32 model and needs no policies. When TensorFlow
    optimizes a function of the model, its `auto_mixed_precision` pass converts
    matrix products, convolutions and operations between them, and adds casts.
    The rewrite starts at once and ends when you call `off()` or the `with`
    block ends. Then the model computes in float32 again. Both changes also
    reach functions that TensorFlow has already traced.

    The rewrite applies to graphs that this thread runs. Like a float16 policy,
    `float16` needs loss scaling: compile with `LossScaleOptimizer`. A graph
    does not know its layers, so the rewrite also converts layers that
    `apply_policy` or a tuner keeps in float32. Use `deny` to keep operations in
    float32.

    Args:
        dtype: String. `"float16"`, on GPUs and a few CPUs; `"bfloat16"`, on
            CPUs with AVX-512; or `"float32"`, no rewrite.
        allow: Iterable of strings. TensorFlow's names of operations that it
            always converts, such as `"Conv2D"`, in addition to its own list.
            Defaults to `()`.
        deny: Names of operations that stay in float32, along with the
            operations that depend on them.
        infer: Names of operations that are converted if their inputs are.

    Returns:
        A `GraphRewrite`. It is a context manager with `converted` and `off()`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the backend is not TensorFlow, TensorFlow does not
            rewrite graphs on this device, or an operation is unknown or in two
            lists. During a rewrite, `fit`, `evaluate` and `predict` raise this
            error for a model that XLA compiles or that runs eagerly.

    Warns:
        UserWarning: Once, if a model trains in float16 without loss scaling.

    Example:
    >>> try:
    ...     with graph_rewrite("bfloat16", deny=["Softmax"]) as rewrite:
    ...         pass  # model.fit(x, y)
    ...     rewrite.converted["products"]
    ... except ValueError:  # The backend is not TensorFlow, or no AVX-512.
    ...     0
    0
    """
    lists = _check_arguments(
        dtype, {"allow": allow, "deny": deny, "infer": infer}
    )
    # Collect the records first, because the test for support discards them.
    _collect()
    if dtype != "float32" and not active.graph_rewrite().does(dtype):
        _apply()  # Resumes recording operations for the innermost rewrite.
        device = ", ".join(dict.fromkeys(active.devices()["devices"]))
        raise ValueError(
            f"TensorFlow does not rewrite graphs to {dtype} on this device "
            f"({device}). It needs {_NEEDS[dtype]}. A policy works on any "
            f"device: keras_mixprec.set_global_policy('mixed_{dtype}'). "
            f"Received: dtype={dtype!r}"
        )
    return GraphRewrite(dtype, lists)


def in_force() -> GraphRewrite | None:
    """Returns the rewrite that is in force, if any."""
    return _stack[-1] if _stack and _stack[-1].dtype != "float32" else None


def _collect():
    """Adds newly optimized functions to the innermost rewrite's records."""
    if _stack:
        _stack[-1]._functions += [
            (before, after)
            for before, after in active.graph_rewrite().collect()
            if any(name.startswith(_PRODUCTS) for name, _ in after)
        ]


def _apply():
    """Applies the innermost rewrite, or restores the user's own settings."""
    _undo.close()
    if _stack:
        now, backend = _stack[-1], active.graph_rewrite()
        _undo.enter_context(backend.scope(now.dtype, now._serial, now.lists))
        if in_force():
            _undo.enter_context(patched(keras.Model, _CHECKED))


def _checking(part):
    """Returns a model method that raises if the rewrite has no effect."""
    make = getattr(keras.Model, f"make_{part}_function")

    @functools.wraps(make)
    def checked(model, force=False):
        _check_model(model, _stack[-1].dtype, trains=part == "train")
        return make(model, force)

    return checked


_CHECKED = {
    f"make_{part}_function": _checking(part)
    for part in ("train", "test", "predict")
}


def _products(counts):
    return sum(n for name, n in counts.items() if name.startswith(_PRODUCTS))


def _check_arguments(dtype, lists):
    """Checks the arguments, and returns the operations as lists."""
    check_choice("dtype", check_type("dtype", dtype, str, "a string"), _DTYPES)
    what = "a list of operation names"
    lists = {n: check_list(n, given, str, what) for n, given in lists.items()}
    if (backend := keras.backend.backend()) != "tensorflow":
        sixteen = "bfloat16" if dtype == "float32" else dtype
        raise ValueError(
            "Only TensorFlow rewrites graphs. On other backends, set a policy: "
            f"keras_mixprec.set_global_policy('mixed_{sixteen}'). "
            f"Received: dtype={dtype!r} with the backend {backend!r}"
        )
    counts = Counter(x for names in lists.values() for x in set(names))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "An operation can be in only one of `allow`, `deny` and `infer`. "
            f"Received: {twice[0]!r} in several lists"
        )
    if unknown := active.graph_rewrite().unknown(counts):
        raise ValueError(
            "`allow`, `deny` and `infer` must be TensorFlow's names of "
            "operations, such as 'MatMul', 'Conv2D' or 'Softmax'. "
            f"Received: {unknown[0]!r}"
        )
    return lists


def _check_model(model, dtype, trains):
    """Raises if the rewrite has no effect, and warns without loss scaling."""
    for name, reason in _WITHOUT_EFFECT.items():
        if getattr(model, name):
            raise ValueError(
                f"{reason}, or set a policy instead of `graph_rewrite`: "
                f"keras_mixprec.apply_policy(model, 'mixed_{dtype}'). "
                f"Received: a model with {name}=True"
            )
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if trains and dtype == "float16" and not scales:
        _warn_unscaled()


@functools.cache
def _warn_unscaled():
    warnings.warn(
        "`graph_rewrite('float16')` is in force and nothing scales the loss, "
        "so small gradients underflow to zero. Compile the model with "
        "`keras_mixprec.LossScaleOptimizer`, and call `scale_loss` in your own "
        "`train_step`.",
        UserWarning,
        stacklevel=5,
    )
