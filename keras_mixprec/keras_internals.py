"""The private parts of Keras that this package relies on.

No other file uses private parts of Keras. The comments say why the public API
is not enough. `tests/test_keras_internals.py` fails if a new version of Keras
lacks one of these names.
"""

# ruff: noqa: F401 -- other modules import these names from here.

import contextlib
import sys
import types
import weakref

import keras

# Layers call the functions in `keras.src.ops`, not those in `keras.ops`.
from keras.src import ops as layer_ops
from keras.src.backend import (
    # Sets the dtype to which layers cast variables; `None` casts nothing.
    AutocastScope,
    compute_output_spec,  # Builds a model from shapes alone.
    # Read and write a tensor's mask, which is in a private attribute.
    get_keras_mask,
    set_keras_mask,
)

# `keras.ops.map`, `scan` and others call the backend's module `core`.
from keras.src.backend import core as backend_core

# Layers and `keras.random` draw random numbers from the backend's `random`
# module, so replacements of its functions affect all random numbers.
from keras.src.backend import random as backend_random

# Read and write Keras' global state, which includes the running call.
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)

# Returns the active scope. Only the class of the scope is public.
from keras.src.backend.common.stateless_scope import get_stateless_scope

# Holds `training` and other settings that a layer passes to its sublayers.
from keras.src.layers.layer import CallContext

# The public `keras.Model` also includes subclassed models without a graph.
from keras.src.models import Functional

# The key of the seed generator that Keras uses for layers without one.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

# An optimizer saves `KerasSaveable` attributes with its variables.
from keras.src.saving.keras_saveable import KerasSaveable

# Returns the adapter from which `predict` gets its batches.
from keras.src.trainers.data_adapters import (
    get_data_adapter as get_data_adapter,
)

# The adapter that holds the arrays that were passed to `fit`.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# Makes automatic layer names from class names.
from keras.src.utils.naming import to_snake_case

# Keeps an optimizer from adopting the variables in any list that it holds.
from keras_mixprec._patched import patched

_CALL_CONTEXT = "current_call_ctx"

# The modules of activation layers and activation operations.
ACTIVATIONS = ("keras.src.layers.activations", "keras.src.ops.nn")


def flat_layers(layer, include_self: bool = True) -> list:
    """Returns a layer and all its sublayers, at any depth."""
    # The public `model.layers` exists only for models, and lists only direct
    # sublayers.
    return layer._flatten_layers(include_self=include_self)


def sublayers(layer) -> list:
    """Returns a layer's direct sublayers."""
    # The public `model.layers` exists only for models.
    return layer._layers


def own_trainable(layer) -> list:
    """Returns a layer's own trainable variables, without its sublayers'."""
    return layer._trainable_variables


def own_non_trainable(layer) -> list:
    """Returns a layer's own non-trainable variables, without its sublayers'."""
    return layer._non_trainable_variables


def seed_generators(layer) -> list:
    """Returns a layer's own seed generators."""
    # A layer saves its seed generators, but no public attribute holds them.
    return layer._seed_generators


def loss_ids(layer) -> set:
    """Returns the set of ids of a layer's losses, which callers may change."""
    return layer._loss_ids


def set_policy_object(layer, policy: keras.DTypePolicy):
    """Gives a layer a different policy object."""
    # Layers may share a policy map, and the public setter would change the map
    # for all of them.
    layer._dtype_policy = policy


def cast_constants(layer) -> dict:
    """Returns the constants that a Keras layer cast when it was built.

    They keep the compute dtype from that time, even if the policy changes.
    """
    is_normalization = isinstance(layer, keras.layers.Normalization)
    if not is_normalization or getattr(layer, "mean", None) is None:
        return {}
    return {"mean": layer.mean, "variance": layer.variance}


def cast_constants_anew(layer):
    """Casts a layer's `cast_constants` to its current compute dtype."""
    before = cast_constants(layer)
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in before.values()}
    if dtypes <= {layer.compute_dtype}:
        return
    if layer.input_mean is None:
        layer.finalize_state()
        return
    # `layer.build`, which Keras wraps, would change the variables' paths.
    type(layer).build(layer, **layer.get_build_config())


def storing(policy: keras.DTypePolicy, dtype: str) -> keras.DTypePolicy:
    """Changes the variable dtype of a policy, and returns the policy.

    A layer with this policy casts its variables when it is called, as under a
    mixed policy. The policy keeps its name, also in a file.
    """
    # No public policy computes in float32 with 16-bit variables.
    policy._variable_dtype = dtype
    return policy


def set_input_dtype(entrance: keras.layers.InputLayer, dtype: str):
    """Sets the dtype to which an input of a model casts data."""
    # Keras has no public setter for the dtype of an `InputLayer`.
    entrance._dtype = dtype
    entrance.output._dtype = dtype


def inbound_nodes(operation) -> list:
    """Returns the symbolic calls of a layer or operation."""
    # The public `layer.input` knows only the first call.
    return operation._inbound_nodes


def calls_in(functional, operation) -> list:
    """Returns the calls of an operation that belong to a graph.

    The layers of a loaded `Sequential` have more calls: it called them for
    shorter graphs while it was being built.
    """
    nodes = {id(n) for own in functional._nodes_by_depth.values() for n in own}
    return [node for node in inbound_nodes(operation) if id(node) in nodes]


def logits_of(tensor):
    """Returns the logits of a softmax or sigmoid, `None` for other tensors.

    On TensorFlow, cross-entropies of a float32 output use the logits, because
    probabilities are clipped at 1e-7. Other backends use the probabilities.
    """
    if keras.backend.backend() != "tensorflow":
        return None
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor, logits):
    """Attaches logits to a tensor that replaces a softmax or sigmoid."""
    tensor._keras_logits = logits


def producer(tensor: keras.KerasTensor):
    """Returns the operation that made a tensor, `None` without a graph."""
    history = getattr(tensor, "_keras_history", None)
    return history and history.operation


def functional_of(layer) -> Functional | None:
    """Returns the functional model that holds a layer's graph.

    A functional model returns itself, and a `Sequential` its inner model. All
    other layers have no graph and return `None`.
    """
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, Functional) else None


def only_runs_graph(layer) -> bool:
    """Returns whether a layer inherits its `call` from functional models."""
    return type(layer).call is Functional.call


def build_symbolically(model: keras.Model, data):
    """Builds a compiled model, its loss and metrics, on one batch."""
    # `fit` also builds the model with `_symbolic_build`, which computes
    # nothing.
    model._symbolic_build(data_batch=data)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric | None:
    """Returns the metric of the total loss that the last `compile` created."""
    return getattr(model, "_loss_tracker", None)


def compiled_loss(model: keras.Model):
    """Returns the object that computes the losses, `None` before `compile`."""
    return getattr(model, "_compile_loss", None)


def flat_losses(model: keras.Model) -> list[tuple]:
    """Returns the path and the loss of each output, as compiled.

    Before the model is built, a list or dict of losses gives an empty list.
    """
    known = getattr(compiled_loss(model), "_flat_losses", None)
    if known is not None:
        return [(tuple(own.path), own.loss) for own in known]
    loss = getattr(model, "loss", None)
    if loss is None or keras.tree.is_nested(loss):
        return []
    return [((), keras.losses.get(loss))]


def set_saved_optimizer(model: keras.Model, optimizer):
    """Makes `model.save` store a different optimizer than the model's."""
    # `model.save` stores the optimizer of the compile configuration.
    model._compile_config.config["optimizer"] = optimizer


def jax_state(model: keras.Model) -> tuple[dict | None, bool]:
    """Returns the state of `fit` on JAX, and whether variables are in sync."""
    state = getattr(model, "_jax_state", None)
    return state, getattr(model, "_jax_state_synced", True)


def set_jax_state(model: keras.Model, state: dict | None, synced: bool):
    """Sets the state that `jax_state` returns."""
    model._jax_state, model._jax_state_synced = state, synced


def arrays_in_fit(model: keras.Model) -> tuple | None:
    """Returns the arrays that were passed to the running `fit`, if any."""
    adapter = getattr(_epochs_in("fit", model), "data_adapter", None)
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def evaluated_batches(model: keras.Model):
    """Returns an iterator over the validation batches, as arrays.

    The iterator starts with the first batch of the running `fit` or `evaluate`.
    It is empty if neither is running.
    """
    found = getattr(model, "_eval_epoch_iterator", None)
    found = found or _epochs_in("evaluate", model)
    return iter(found.data_adapter.get_numpy_iterator()) if found else iter(())


def is_in_fit(model: keras.Model) -> bool:
    """Returns whether the caller runs inside `model.fit`."""
    return _epochs_in("fit", model) is not None


def _epochs_in(method, model):
    """Returns the `epoch_iterator` in the frame of a running method."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == method and names.get("self") is model:
            return names.get("epoch_iterator")
        frame = frame.f_back
    return None


def stored_value(variable: keras.Variable):
    """Returns the backend's array that a variable holds, not a copy."""
    # Inside a layer's call, `variable.value` may be a cast copy.
    return variable._value


def casts_value(variable: keras.Variable) -> bool:
    """Returns whether reading the variable now would cast its value."""
    value = variable._value
    return value is not None and variable._maybe_autocast(value) is not value


def set_value(variable: keras.Variable, value):
    """Sets a variable to a value that already has its dtype and devices."""
    if keras.backend.backend() == "jax":
        # `assign` would need every process of a distributed job.
        variable._value = value
    else:
        variable.assign(value)


@contextlib.contextmanager
def holding(variables, values):
    """Gives variables other values inside a `with` block, without a copy."""
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

    Inside a layer's call, `variable.dtype` is the dtype that the layer reads.
    """
    return variable._dtype


@contextlib.contextmanager
def widened(variables, dtypes):
    """Makes variables of `dtypes` float32 inside a `with` block.

    The values stay equal, and the gradients are float32 too. After the block,
    the variables hold their old values, so updates are lost.
    """
    before = [(v, v._value, v._dtype) for v in variables if v._dtype in dtypes]
    try:
        for v, value, _ in before:
            wide = keras.ops.cast(value, "float32")
            # A new variable converts the value to the backend's own type.
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
        name: String. The metric's name in the epoch logs.
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
    """Returns the variable that counts the calls to `apply`."""
    # With gradient accumulation, `iterations` counts updates, not calls.
    return optimizer._iterations


def learning_rate_object(optimizer):
    """Returns the learning rate as a variable, schedule or function, or 1."""
    # The public `learning_rate` is the current value of a schedule.
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
    """Replaces the learning rate or its schedule inside a `with` block."""
    return patched(optimizer, {"_get_current_learning_rate": lambda: rate})


def accumulated_gradients(optimizer) -> list:
    """Returns the variables that accumulate gradients between updates."""
    return optimizer._accumulated_gradients


def has_replicas(model: keras.Model) -> bool:
    """Returns whether a strategy of TensorFlow trains several replicas."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy is not None and strategy.num_replicas_in_sync > 1


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that Keras uses for layers without one, if any."""
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


def training_in_force() -> bool | None:
    """Returns the `training` argument of the outermost call now running."""
    context = get_global_attribute(_CALL_CONTEXT)
    return getattr(context, "training", None)


@contextlib.contextmanager
def called_with(training: bool | None):
    """Runs layers inside a `with` block as if called with `training`."""
    before = get_global_attribute(_CALL_CONTEXT)
    context = CallContext(entry_layer=None)
    context.training = training
    set_global_attribute(_CALL_CONTEXT, context)
    try:
        yield
    finally:
        set_global_attribute(_CALL_CONTEXT, before)
