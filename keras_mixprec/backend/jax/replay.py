"""Runs parts of a model again on JAX, from their traces.

See `interface.py`.
"""

import contextlib
import contextvars

import jax
import keras

from keras_mixprec.backend.common import all_variables
from keras_mixprec.backend.jax.pieces import (
    Piece,
    compiled_program,
    end_piece_at,
    known_outside,
    run_in_pieces,
)
from keras_mixprec.backend.jax.state import (
    pairs_of,
    values_of,
    variables_of,
)
from keras_mixprec.backend.user_code import line_of
from keras_mixprec.keras_internals import (
    get_stateless_scope,
    holding,
    jax_state,
    set_jax_state,
    set_value,
    stored_value,
)

REFUSALS = (
    jax.errors.JaxRuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
)

# The JAX equation that is being evaluated.
_VISITED = contextvars.ContextVar("visited")


def is_concrete(tensor):
    return not isinstance(tensor, jax.core.Tracer)


def observe(tensor, on_value, on_cotangent):
    # Observe the tensor before `identity` is called. Inside `identity`, the
    # tensor would belong to a different trace.
    value = jax.lax.stop_gradient(tensor)
    end_piece_at(value)
    on_value(value)

    @jax.custom_vjp
    def identity(values):
        return values

    def forward(values):
        return values, None

    def backward(_, cotangent):
        end_piece_at(cotangent)
        instead = on_cotangent(cotangent)
        return (cotangent if instead is None else instead,)

    identity.defvjp(forward, backward)
    return identity(tensor)


def vjp(function, primals, pull):
    outputs, pullback = jax.vjp(function, primals)
    return outputs, pullback(pull(outputs))[0]


@contextlib.contextmanager
def evaluating(model):
    variables = all_variables(model)
    before = [stored_value(variable) for variable in variables]
    # Remember the state that `fit` stores on the model, because `evaluate`
    # overwrites that state.
    state = jax_state(model)
    try:
        yield
    except BaseException:
        _put_back(model, variables, before)
        raise
    finally:
        set_jax_state(model, *state)


def _put_back(model, variables, values):
    """Restores values that `evaluate` took out of variables."""
    lost = [
        (variable, value)
        for variable, value in zip(variables, values, strict=True)
        if stored_value(variable) is None
    ]
    if any(value.is_deleted() for _, value in lost):
        # After its first batch, `fit` itself holds the variables' values.
        model.jax_state_sync()
    else:
        for variable, value in lost:
            set_value(variable, value)


def compiled(function):
    def run(tensors):
        traced = jax.make_jaxpr(
            lambda tensors: known_outside(function(tensors)), return_shape=True
        )
        closed, outputs = traced(tensors)
        # Pass closed-over values as inputs of the program, because they are
        # inputs of a train step too.
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        whole = Piece(closed.jaxpr.replace(constvars=[], invars=inputs), [])
        leaves = jax.tree.leaves(tensors)
        results = compiled_program(whole)(*closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    return run


def each_operation(function, tensors, visit):
    # Wrap the function in a new lambda. JAX would reuse the trace of a known
    # function, in which layers may have had different dtypes.
    jaxpr = jax.make_jaxpr(lambda tensors: function(tensors))(tensors)
    _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(tensors), visit)


def visited():
    equation = _VISITED.get()
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else ()
    line = line_of((frame.file_name, frame.line_num) for frame in frames)
    return equation.primitive.name, line


def train_step(model, data):
    logs, state = model.train_step(values_of(*variables_of(model)), data)
    # Write the new values of non-trainable variables to the caller's
    # `StatelessScope`.
    scope = get_stateless_scope()
    for update in zip(model.non_trainable_variables, state[1], strict=True):
        scope.add_update(update)
    return logs


def take_step(model, data, traced):
    state = values_of(*variables_of(model))
    variables = [variable for variable, _ in traced]
    values = [value for _, value in traced]
    with keras.StatelessScope(), holding(variables, values):
        logs, state = model.train_step(state, data)
    return logs, pairs_of(model, state)


def predict_step(model, data):
    state = values_of(model.trainable_variables, model.non_trainable_variables)
    return model.predict_step(state, data)[0]


def step_by_step():
    return jax.disable_jit()


def loses_assignment(variable):
    return False


def assigned(variable, value):
    return None


def run_once(model, function, data):
    if not model.jit_compile or model.run_eagerly:
        return [x if is_concrete(x) else None for x in function(data)]
    # Pass variables as inputs. With their values as constants, JAX would
    # compile the programs again in every step.
    variables = all_variables(model)

    def run(given):
        values, data = given
        with holding(variables, values):
            return function(data)

    values = [stored_value(variable) for variable in variables]
    return run_in_pieces(run, (values, data))


def _evaluate(jaxpr, constants, arguments, visit):
    """Evaluates each operation, inside calls but not inside loops."""
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = _called(equation)
        if inner is not None:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs, visit)
        else:
            outputs = equation.primitive.bind(*inputs, **_params(equation))
            if not equation.primitive.multiple_results:
                outputs = [outputs]
            _VISITED.set(equation)
            visit(inputs, outputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _params(equation):
    """Returns the parameters of an operation that the device supports.

    Attention requests float16 products with float32 sums through an algorithm
    name that CPUs do not know. On a CPU, the dtype of the result has the same
    effect.
    """
    named = isinstance(
        equation.params.get("precision"), jax.lax.DotAlgorithmPreset
    )
    if not named or jax.default_backend() != "cpu":
        return equation.params
    return {**equation.params, "precision": None}


def _called(equation):
    """Returns the function that a call operation runs, otherwise `None`."""
    if equation.primitive.name in ("jit", "pjit"):
        return equation.params["jaxpr"]
    called = ("closed_call", "custom_jvp_call", "custom_vjp_call")
    if equation.primitive.name in called:
        return equation.params["call_jaxpr"]
    return None
