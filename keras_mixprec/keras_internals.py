"""Everything private in Keras that this package relies on.

No other module names anything private. Comments say why the public API is not
enough. `tests/test_keras_internals.py` fails if a new version of Keras lacks a
name.
"""

# ruff: noqa: F401 -- other modules import these names from here.

import contextlib
import sys
import types
import weakref

import keras
from keras.src import ops as layer_ops  # Keras' layers call this module.
from keras.src.backend import (
    # It sets the dtype in which variables are read; `None` is the stored one.
    AutocastScope,
    compute_output_spec,  # Calls a model on shapes alone, which builds it.
    # The masks that tensors carry from layer to layer.
    get_keras_mask,
    set_keras_mask,
)

# `keras.ops` calls these functions, such as `map` and `scan`.
from keras.src.backend import core as backend_core

# Every layer draws by the functions of this module, so replacements reach all
# layers. `keras.random` only calls these functions.
from keras.src.backend import random as backend_random

# Keras keeps the state of a call here.
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)

# It returns the active scope; only the scope's class is public.
from keras.src.backend.common.stateless_scope import get_stateless_scope

# A layer passes this to its sublayers, with `training` and other settings.
from keras.src.layers.layer import CallContext

# The public name is `keras.Model`, also for subclassed models.
from keras.src.models import Functional

# The key of the generator that Keras uses if a layer has none.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

# Attributes of this type are saved with the variables of an optimizer.
from keras.src.saving.keras_saveable import KerasSaveable

# `predict` takes its batches from it.
from keras.src.trainers.data_adapters import (
    get_data_adapter as get_data_adapter,
)

# Its instances hold the arrays that were given to `fit`.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# Keras makes the prefix of an automatic name by it.
from keras.src.utils.naming import to_snake_case

# An optimizer would take the variables in a list that it holds for its own.
from keras.src.utils.tracking import no_automatic_dependency_tracking

from keras_mixprec._patched import patched

_CALL_CONTEXT = "current_call_ctx"

# The modules of layers and operations that only apply a function.
ACTIVATIONS = ("keras.src.layers.activations", "keras.src.ops.nn")


def flat_layers(layer, include_self: bool = True) -> list:
    """Returns a layer and all that is inside it, at any depth."""
    # Only models have a public method for this.
    return layer._flatten_layers(include_self=include_self)


def sublayers(layer) -> list:
    """Returns the layers that a layer holds itself."""
    # Only models list their layers.
    return layer._layers


def own_trainable(layer) -> list:
    """Returns a layer's own trainable variables, without its sublayers'."""
    return layer._trainable_variables


def own_non_trainable(layer) -> list:
    """Returns a layer's own other variables, without its sublayers'."""
    return layer._non_trainable_variables


def seed_generators(layer) -> list:
    """Returns a layer's own seed generators."""
    # A layer saves this random state, but has no public attribute for it.
    return layer._seed_generators


def loss_ids(layer) -> set:
    """Returns the ids of the losses that a layer has added; may be changed."""
    return layer._loss_ids


def set_policy_object(layer, policy: keras.DTypePolicy):
    """Gives a layer another policy object."""
    # The public setter changes a map that layers share.
    layer._dtype_policy = policy


def cast_constants(layer) -> dict:
    """Returns the attributes that a layer of Keras cast when it was built.

    They keep the compute dtype from that time, whatever policy the layer gets.
    """
    is_normalization = isinstance(layer, keras.layers.Normalization)
    if not is_normalization or getattr(layer, "mean", None) is None:
        return {}
    return {"mean": layer.mean, "variance": layer.variance}


def cast_constants_anew(layer):
    """Casts `cast_constants` to the compute dtype that a layer has now."""
    before = cast_constants(layer)
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in before.values()}
    if dtypes <= {layer.compute_dtype}:
        return
    if layer.input_mean is None:
        layer.finalize_state()
        return
    # Calling `build` on the layer would give its variables another path.
    type(layer).build(layer, **layer.get_build_config())


def storing(policy: keras.DTypePolicy, dtype: str) -> keras.DTypePolicy:
    """Returns the policy, changed for variables of another dtype.

    The layer casts its variables when it is called, as under a mixed policy.
    The policy keeps its name, also in a file.
    """
    # No public policy is float32 with 16-bit variables.
    policy._variable_dtype = dtype
    return policy


def set_input_dtype(entrance: keras.layers.InputLayer, dtype: str):
    """Lets an input of a model cast to another dtype."""
    # There is no setter for the dtype that models cast their inputs to.
    entrance._dtype = dtype
    entrance.output._dtype = dtype


def inbound_nodes(operation) -> list:
    """Returns the symbolic calls of a layer or operation."""
    # The public `input` belongs to the first call only.
    return operation._inbound_nodes


def calls_in(functional, operation) -> list:
    """Returns the calls of an operation that belong to a graph.

    A `Sequential` from a config has other calls too, because it has called its
    layers for shorter graphs before.
    """
    nodes = {id(n) for own in functional._nodes_by_depth.values() for n in own}
    return [node for node in inbound_nodes(operation) if id(node) in nodes]


def logits_of(tensor):
    """Returns the logits of a softmax or sigmoid, `None` for other tensors.

    TensorFlow's cross-entropies compute the loss of a float32 output from them,
    because the probabilities are cut off at 1e-7. Other backends do not.
    """
    if keras.backend.backend() != "tensorflow":
        return None
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor, logits):
    """Gives logits to a tensor that replaces another one."""
    tensor._keras_logits = logits


def producer(tensor: keras.KerasTensor):
    """Returns the operation that made a tensor, `None` without a graph."""
    history = getattr(tensor, "_keras_history", None)
    return history and history.operation


def functional_of(layer) -> Functional | None:
    """Returns the functional model of a layer.

    A functional model is its own, a `Sequential` holds one, and all other
    layers have no graph: `None`.
    """
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, Functional) else None


def only_runs_graph(layer) -> bool:
    """Returns whether a layer's `call` is a functional model's."""
    return type(layer).call is Functional.call


def build_symbolically(model: keras.Model, data):
    """Builds a compiled model, its loss and metrics, on one batch."""
    # `fit` builds the model in the same way, without running it.
    model._symbolic_build(data_batch=data)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric | None:
    """Returns the metric of the total loss; each `compile` makes a new one."""
    return getattr(model, "_loss_tracker", None)


def compiled_loss(model: keras.Model):
    """Returns the object that computes the losses, `None` before `compile`."""
    return getattr(model, "_compile_loss", None)


def flat_losses(model: keras.Model) -> list[tuple]:
    """Returns the path and the loss of each output, as compiled.

    Before a model is built, only a single loss is known.
    """
    known = getattr(compiled_loss(model), "_flat_losses", None)
    if known is not None:
        return [(tuple(own.path), own.loss) for own in known]
    loss = getattr(model, "loss", None)
    if loss is None or keras.tree.is_nested(loss):
        return []
    return [((), keras.losses.get(loss))]


def set_saved_optimizer(model: keras.Model, optimizer):
    """Lets `model.save` store another optimizer than the model has."""
    # `model.save` stores the optimizer of this configuration.
    model._compile_config.config["optimizer"] = optimizer


def jax_state(model: keras.Model) -> tuple[dict | None, bool]:
    """Returns the state of `fit` on JAX, and whether variables are in sync."""
    state = getattr(model, "_jax_state", None)
    return state, getattr(model, "_jax_state_synced", True)


def set_jax_state(model: keras.Model, state: dict | None, synced: bool):
    """Sets what `jax_state` returns."""
    model._jax_state, model._jax_state_synced = state, synced


def arrays_in_fit(model: keras.Model) -> tuple | None:
    """Returns the arrays that the running `fit` got, if any."""
    adapter = getattr(_epochs_in("fit", model), "data_adapter", None)
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def evaluated_batches(model: keras.Model):
    """Returns an iterator over the validation batches, as arrays.

    These are the batches of the running `fit` or `evaluate`, from the first.
    The iterator is empty if neither is running.
    """
    found = getattr(model, "_eval_epoch_iterator", None)
    found = found or _epochs_in("evaluate", model)
    return iter(found.data_adapter.get_numpy_iterator()) if found else iter(())


def _epochs_in(method, model):
    """The batches in a local variable of the running `fit` or `evaluate`."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == method and names.get("self") is model:
            return names.get("epoch_iterator")
        frame = frame.f_back
    return None


def stored_value(variable: keras.Variable):
    """Returns the backend's array that a variable holds, not a copy."""
    # `variable.value` casts the array while a layer is called.
    return variable._value


def casts_value(variable: keras.Variable) -> bool:
    """Returns whether a layer would read the variable's value as a copy."""
    value = variable._value
    return value is not None and variable._maybe_autocast(value) is not value


def set_value(variable: keras.Variable, value):
    """Gives a variable a value with its dtype and devices."""
    if keras.backend.backend() == "jax":
        variable._value = value  # `assign` would need the other processes.
    else:
        variable.assign(value)


@contextlib.contextmanager
def holding(variables, values):
    """Context that gives variables other values without a copy."""
    before = [v._value for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def stored_dtype(variable: keras.Variable) -> str:
    """Returns the dtype of the value that a variable holds.

    In the call of a layer, `variable.dtype` is the dtype in which it is read.
    """
    return variable._dtype


@contextlib.contextmanager
def widened(variables, dtypes):
    """Context that makes variables of `dtypes` float32, with equal values.

    Gradients of these variables are float32 too. The context drops values that
    are written to them.
    """
    before = [(v, v._value, v._dtype) for v in variables if v._dtype in dtypes]
    try:
        for v, value, _ in before:
            wide = keras.ops.cast(value, "float32")
            # A new variable holds the value as this backend needs it.
            own = keras.Variable(wide, dtype="float32", trainable=v.trainable)
            v._value, v._dtype = own._value, own._dtype
        yield
    finally:
        for v, value, dtype in before:
            v._value, v._dtype = value, dtype


def better_end(model: keras.Model, name: str) -> str:
    """Returns the `EarlyStopping` mode of a metric: "min", "max" or "auto".

    Args:
        model: A compiled `keras.Model`.
        name: String, as in the logs of an epoch.
    """
    if name.endswith("loss"):
        return "min"
    callback = keras.callbacks.EarlyStopping(name)
    callback.set_model(model)
    callback.on_train_begin()
    with contextlib.suppress(ValueError):
        callback.on_epoch_end(0, {name: 0.0})
    known = {keras.ops.less: "min", keras.ops.greater: "max"}
    return known.get(callback.monitor_op, "auto")


def updated_variables(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns the variables that an optimizer was built to update."""
    return optimizer._trainable_variables


def variable_indices(optimizer, variables) -> list:
    """Returns the indices of variables in `updated_variables`."""
    return [optimizer._get_variable_index(v) for v in variables]


def micro_batches(optimizer) -> keras.Variable:
    """Returns the variable that counts the calls of `apply`."""
    # `iterations` counts windows of accumulated gradients.
    return optimizer._iterations


def learning_rate_object(optimizer):
    """Returns the optimizer's variable, schedule or function, or 1."""
    # The public `learning_rate` calls a schedule.
    return getattr(optimizer, "_learning_rate", 1.0)


def part_for(optimizer, variable: keras.Variable):
    """Returns the part of a `MultiOptimizer` that updates a variable."""
    parts = [o for o in getattr(optimizer, "optimizers", []) if o.built]
    own = (o for o in parts if any(v is variable for v in updated_variables(o)))
    return next(own, optimizer)


def innermost(optimizer):
    """Returns the inner optimizer, or the optimizer itself if it has none."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def parts_of(optimizer) -> list:
    """Returns the optimizers of a `MultiOptimizer`, or the optimizer alone."""
    return getattr(optimizer, "optimizers", None) or [optimizer]


def at_learning_rate(optimizer, rate):
    """Returns a context that sets a learning rate in place of a schedule."""
    return patched(optimizer, {"_get_current_learning_rate": lambda: rate})


def accumulated_gradients(optimizer) -> list:
    """Returns the variables that add up the gradients of a window."""
    return optimizer._accumulated_gradients


def track_variable(optimizer, variable: keras.Variable):
    """Adds a variable to an optimizer's variables."""
    # An optimizer does not track the variables in its attributes by itself.
    optimizer._track_variable(variable)


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that Keras uses for layers without one, if any."""
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


def training_in_force() -> bool | None:
    """Returns the `training` argument of the outermost call now running."""
    context = get_global_attribute(_CALL_CONTEXT)
    return getattr(context, "training", None)


@contextlib.contextmanager
def called_with(training: bool | None):
    """Context in which layers run as if called with `training`."""
    before = get_global_attribute(_CALL_CONTEXT)
    context = CallContext(entry_layer=None)
    context.training = training
    set_global_attribute(_CALL_CONTEXT, context)
    try:
        yield
    finally:
        set_global_attribute(_CALL_CONTEXT, before)
