"""Hooks on layer calls, and contexts that change the dtypes of layers."""

import contextlib
import functools
import inspect
import threading

import keras

from keras_mixprec._patched import Replacements, patched
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import (
    cast_constants,
    flat_layers,
    layer_ops,
    only_runs_graph,
    set_input_dtype,
    set_policy_object,
    widened,
)
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.matmul_precision import computed_in
from keras_mixprec.policies.names import (
    is_fixed,
    narrow_inputs,
    set_policy,
)

# Layers that run an inner layer in a loop, which the backend may trace. So a
# record treats each of these layers as a whole.
WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)


class CallHook:
    """Runs a function in place of every call to a model's layers.

    Only calls in the thread that entered `hooked` count, because each replica
    of a `tf.distribute` strategy traces in its own thread.

    Args:
        entries: List of `LayerEntry`, the layers to hook.
        on_call: Function `(run, layer, path, index, args, kwargs)` that
            returns the call's outputs. `run(*args, **kwargs)` makes the call,
            and `index` is the number of earlier calls to the layer.
        on_function: Function `(function, layer, name, arguments)` to call
            before each call to one of `FUNCTIONS`. The arguments are the name
            of the function, the innermost layer call with its name, and a dict
            of the function's arguments. Defaults to `None`.
    """

    _patching = threading.Lock()
    _patched = 0
    _original = None
    _functions = Replacements()
    _active = {}

    def __init__(self, entries, on_call, on_function=None):
        self._paths = {id(e.layer): e.path for e in entries}
        self._direct = [e.layer for e in entries if _is_called_directly(e)]
        self._on_call = on_call
        self._on_function = on_function
        self._counts = {}
        self._open = []
        self._names = []

    @contextlib.contextmanager
    def hooked(self):
        """Context manager in which the hook is active."""
        thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_patch())
            for model in self._direct:
                call = {"call": self._seen(model, model.call)}
                stack.enter_context(patched(model, call))
            outer = CallHook._active.get(thread)
            CallHook._active[thread] = self
            try:
                yield
            finally:
                if outer is None:
                    del CallHook._active[thread]
                else:
                    CallHook._active[thread] = outer

    def _seen(self, model, call):
        """Wraps a model's `call`, to record calls that bypass `__call__`."""

        def original(model, *args, **kwargs):
            return call(*args, **kwargs)

        def seen(*args, **kwargs):
            # If the model is the innermost running layer, its `__call__` has
            # already recorded the call.
            if self._open and self._open[-1] is model:
                return call(*args, **kwargs)
            return self._call(original, model, args, kwargs)

        return seen

    def _call(self, original, layer, args, kwargs):
        path = self._paths.get(id(layer))
        if path is None or (self._open and isinstance(self._open[-1], WHOLE)):
            return original(layer, *args, **kwargs)
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        self._open.append(layer)
        self._names.append(call_name(path, index))

        def run(*args, **kwargs):
            return original(layer, *args, **kwargs)

        try:
            return self._on_call(run, layer, path, index, args, kwargs)
        finally:
            self._open.pop()
            self._names.pop()

    @property
    def enclosing(self) -> str | None:
        """The name of the call that contains the innermost call, or `None`."""
        return self._names[-2] if len(self._names) > 1 else None

    def _called(self, function, arguments):
        if self._on_function is not None and self._open:
            call = self._open[-1], self._names[-1]
            self._on_function(function.__name__, *call, arguments)


def _is_called_directly(entry):
    """Returns whether `train_step` may run a model's `call` directly.

    On JAX, Keras' `train_step` bypasses the model's `__call__`, and so the cast
    of inputs. Functional and sequential models do not count, because their
    `call` only calls layers.
    """
    return (
        entry.path == MODEL_PATH
        and hasattr(entry.layer, "compute_loss_and_updates")
        and not only_runs_graph(entry.layer)
        and not isinstance(entry.layer, keras.Sequential)
    )


def call_name(path: str, index: int) -> str:
    """Returns the path, with the number of the call after repeated calls."""
    return f"{path}#{index}" if index else path


def names_of_output(paths: dict, layer, index: int) -> list:
    """Returns the names of the calls that compute the outputs of a layer.

    A call to a recurrent layer has two names: its own name and the name of the
    call to its cell, which computes the outputs in a loop. The same holds for
    `TimeDistributed` and the layer inside it.

    Args:
        paths: Dict from ids of layers to their paths.
        layer: The layer.
        index: Int. The number of earlier calls to the layer.
    """
    inner = None
    if isinstance(layer, keras.layers.RNN):
        inner = layer.cell
    elif isinstance(layer, keras.layers.TimeDistributed):
        inner = layer.layer
    found = [paths[id(x)] for x in (layer, inner) if id(x) in paths]
    return [call_name(path, index) for path in found]


@contextlib.contextmanager
def _patch():
    """Sends every layer call to the hooks while hooks are active.

    Replicas leave this context in any order, so the last one restores Keras.
    """
    cls = keras.layers.Layer
    with CallHook._patching:
        if not CallHook._patched:
            CallHook._original = cls.__call__
            cls.__call__ = _dispatch
            CallHook._functions.__enter__()
        CallHook._patched += 1
    try:
        yield
    finally:
        with CallHook._patching:
            CallHook._patched -= 1
            if not CallHook._patched:
                cls.__call__ = CallHook._original
                CallHook._functions.__exit__()


def _dispatch(layer, *args, **kwargs):
    original, thread = CallHook._original, threading.get_ident()
    hook, others = CallHook._active.get(thread), _OTHERS.get(thread)
    with others.in_float32(layer) if others else contextlib.nullcontext():
        if hook is None:
            return original(layer, *args, **kwargs)
        return hook._call(original, layer, args, kwargs)


class OtherLayers:
    """Layers that a model calls but does not contain, such as those of a loss.

    Args:
        held: List of the model's layers.
        outer: `OtherLayers` of the enclosing context, which shares its list of
            layers. Defaults to `None`.

    Attributes:
        narrow: List of the layers and losses that compute in 16 bits.
    """

    def __init__(self, held: list, outer: "OtherLayers | None" = None):
        # Keep the layers alive, so that Python does not reuse their ids.
        self._held = {id(layer): layer for layer in held}
        self.narrow: list = []
        if outer is not None:
            self._held |= outer._held
            self.narrow = outer.narrow

    def in_float32(self, layer):
        """Returns a context in which a layer outside the model uses float32."""
        if id(layer) in self._held or layer.compute_dtype not in SIXTEEN_BITS:
            return contextlib.nullcontext()
        if not any(layer is known for known in self.narrow):
            self.narrow.append(layer)
        return computing_in("float32", [layer])

    @contextlib.contextmanager
    def losses_in_float32(self):
        """Context manager that sets losses and `floatx` to float32."""
        own = keras.losses.Loss.dtype.fget

        def wide(loss):
            if own(loss) not in SIXTEEN_BITS:
                return own(loss)
            if not any(loss is known for known in self.narrow):
                self.narrow.append(loss)
            return "float32"

        floatx = keras.config.floatx()
        with patched(keras.losses.Loss, {"dtype": property(wide)}):
            if floatx in SIXTEEN_BITS:
                keras.config.set_floatx("float32")
            try:
                yield
            finally:
                keras.config.set_floatx(floatx)


# The active `OtherLayers` of each thread, by the id of the thread.
_OTHERS: dict[int, OtherLayers] = {}


@contextlib.contextmanager
def others_in_float32(layer):
    """Context manager that runs layers outside a model in float32.

    Args:
        layer: The model, or a layer.

    Yields:
        `OtherLayers`.
    """
    thread = threading.get_ident()
    outer = _OTHERS.get(thread)
    others = OtherLayers(with_sublayers(layer), outer)
    with _patch(), others.losses_in_float32():
        _OTHERS[thread] = others
        try:
            yield others
        finally:
            if outer is None:
                del _OTHERS[thread]
            else:
                _OTHERS[thread] = outer


# Functions to which attention layers pass their logits, or query and key.
FUNCTIONS = ("dot_product_attention", "softmax")


def _watched(function):
    """Returns a function that shows its arguments to the hook."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def watched(*args, **kwargs):
        hook = CallHook._active.get(threading.get_ident())
        if hook is not None:
            given = signature.bind(*args, **kwargs)
            hook._called(function, given.arguments)
        return function(*args, **kwargs)

    return watched


def _watch_functions():
    # Keras' own layers take the functions from `layer_ops`. KerasHub's and the
    # user's layers take them from `keras.ops` or `keras.ops.nn`.
    for module in (layer_ops, keras.ops, keras.ops.nn):
        for name in FUNCTIONS:
            function = _watched(getattr(module, name))
            CallHook._functions.add(module, name, function)


_watch_functions()


@contextlib.contextmanager
def computing_in(policy: str, layers):
    """Context manager that gives layers a policy, and restores their own.

    Compiled functions stay as they are, since nothing calls them here.
    """
    # Register every restore first, so that no error leaves a layer changed.
    with contextlib.ExitStack() as stack:
        for entrance in [x for layer in layers for x in narrow_inputs(layer)]:
            stack.callback(set_input_dtype, entrance, entrance.dtype)
        for layer in layers:
            stack.callback(set_policy_object, layer, layer.dtype_policy)
            for name, value in cast_constants(layer).items():
                stack.callback(setattr, layer, name, value)
        for layer in layers:
            if not is_fixed(layer):
                set_policy(layer, policy)
        yield


@contextlib.contextmanager
def in_float32(layer):
    """Context manager that runs a layer or a model as its float32 reference.

    This includes all inner layers, layers called from outside the model, and
    16-bit variables, whose gradients would have 16 bits. Matrix products do not
    use TF32, the default of some backends, because it has only float16's
    precision.
    """
    with (
        widened(layer.variables, SIXTEEN_BITS),
        computing_in("float32", with_sublayers(layer)),
        computed_in("float32"),
        others_in_float32(layer),
    ):
        yield


@contextlib.contextmanager
def temporary_policies(assignment: dict):
    """Context manager that gives layers different policies for a while.

    Args:
        assignment: Dict from policy name to list of layers.
    """
    with contextlib.ExitStack() as stack:
        for policy, layers in assignment.items():
            stack.enter_context(computing_in(policy, layers))
        yield


def with_sublayers(layer) -> list:
    """Returns the layer and everything inside it."""
    return flat_layers(layer)
