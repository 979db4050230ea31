"""Hooks on layer calls, and layers in another dtype for a while."""

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

# Layers inside of these run in a loop that a backend may trace, so each of
# these is recorded as a whole.
WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)


class CallHook:
    """Runs a function in place of every call of a model's layers.

    Only calls in the thread that entered `hooked` count: each replica of a
    `tf.distribute` strategy traces in a thread of its own.

    Args:
        entries: List of `LayerEntry`, the layers to be there for.
        on_call: Function `(run, layer, path, index, args, kwargs)` that
            returns the call's outputs; `run(*args, **kwargs)` makes the call,
            and `index` says how often the layer was called before.
        on_function: Function `(function, layer, name, arguments)` that is
            called before one of `FUNCTIONS` is, with its name, the innermost
            layer that is called, the name of that call, and a dict of what the
            function is given by name. Defaults to `None`.
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
        """The hook is active within the context."""
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
        """Wraps `call`: it is a call of the model if no layer makes it."""

        def original(model, *args, **kwargs):
            return call(*args, **kwargs)

        def seen(*args, **kwargs):
            # Its `__call__` has recorded this call already.
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
        """The name of the call that the innermost one is inside of."""
        return self._names[-2] if len(self._names) > 1 else None

    def _called(self, function, arguments):
        if self._on_function is not None and self._open:
            call = self._open[-1], self._names[-1]
            self._on_function(function.__name__, *call, arguments)


def _is_called_directly(entry):
    """Returns whether `train_step` runs the model's `call`, around `__call__`.

    Keras' own does so on JAX, and casts no inputs then. In a functional or
    sequential model `call` only calls its layers.
    """
    return (
        entry.path == MODEL_PATH
        and hasattr(entry.layer, "compute_loss_and_updates")
        and not only_runs_graph(entry.layer)
        and not isinstance(entry.layer, keras.Sequential)
    )


def call_name(path: str, index: int) -> str:
    """Returns the path, and which call of a layer that is called repeatedly."""
    return f"{path}#{index}" if index else path


def names_of_output(paths: dict, layer, index: int) -> list:
    """Returns the names of the calls that compute the outputs of a layer.

    The cell of a recurrent layer runs in a loop, but it computes what the layer
    returns. So does the layer inside of `TimeDistributed`.

    Args:
        paths: Dict from ids of layers to their paths.
        layer: The layer.
        index: Int. Which of its calls it is.
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
    """Sends the calls of all layers to the hooks, while there are any.

    Replicas enter and leave in any order, so the last to leave restores.
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
    """Layers that a model calls and does not hold, such as its loss' own.

    Args:
        held: List of the layers that it does.
        outer: `OtherLayers` of the context around this one. Both find the same
            layers. Defaults to `None`.

    Attributes:
        narrow: List of those that compute in 16 bits, and of such losses.
    """

    def __init__(self, held: list, outer: "OtherLayers | None" = None):
        # Kept as well: another layer might get the id of one that is gone.
        self._held = {id(layer): layer for layer in held}
        self.narrow: list = []
        if outer is not None:
            self._held |= outer._held
            self.narrow = outer.narrow

    def in_float32(self, layer):
        """Returns the context of a call, in float32 of a layer like these."""
        if id(layer) in self._held or layer.compute_dtype not in SIXTEEN_BITS:
            return contextlib.nullcontext()
        if not any(layer is known for known in self.narrow):
            self.narrow.append(layer)
        return computing_in("float32", [layer])

    @contextlib.contextmanager
    def losses_in_float32(self):
        """Context in which losses and `floatx` are float32."""
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


# One entry per thread.
_OTHERS: dict[int, OtherLayers] = {}


@contextlib.contextmanager
def others_in_float32(layer):
    """Context that computes layers outside of a layer or model in float32.

    Args:
        layer: The layer or the model.

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


# Functions that attention layers call. They may not return.
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
    # Keras' own layers call the first, KerasHub's and the user's the others.
    for module in (layer_ops, keras.ops, keras.ops.nn):
        for name in FUNCTIONS:
            function = _watched(getattr(module, name))
            CallHook._functions.add(module, name, function)


_watch_functions()


@contextlib.contextmanager
def computing_in(policy: str, layers):
    """Gives `layers` a policy within the context, their own after it.

    Compiled functions are left as they are, since nothing calls them here.
    """
    # Every layer gets its policy back, even if something raises in between.
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
    """Makes a layer or a model its float32 reference within the context.

    With everything inside it or called by it, variables as well, whose
    gradients would be of 16 bits. Products have all 24 bits, though TF32 with
    11, as many as float16, is the default of some backends.
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
    """Gives layers several policies within the context, as `computing_in`.

    Args:
        assignment: Dict of policy name to list of layers.
    """
    with contextlib.ExitStack() as stack:
        for policy, layers in assignment.items():
            stack.enter_context(computing_in(policy, layers))
        yield


def with_sublayers(layer) -> list:
    """Returns the layer and everything inside it."""
    return flat_layers(layer)
