"""Custom training loops: the update is the true one, whoever calls what when.

A step is scaled, unscaled or applied, and several optimizers may take theirs
together.
"""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import each_jit, only_jax, only_tensorflow, only_torch
from optimizer_models import (
    BACKEND,
    as_tensor,
    each_mode,
    numbers,
    over_modes,
    rarely,
    stateless,
    stepper,
)
from zoo.own_step import OwnStep

import keras_mixprec as kmp
from keras_mixprec import LossScaleOptimizer

# The true gradient of 3 * w, and the loss scale.
TRUE, SCALE = 3.0, 8.0


def make(*shapes, growth_interval=1, **named):
    """An optimizer that is built, and its variables."""
    scaling = {"initial_scale": SCALE, "dynamic_growth_steps": growth_interval}
    inner = keras.optimizers.SGD(1.0)
    return stepper("eager", *shapes, inner=inner, **named or scaling)[:2]


def loss_of(weight):
    return ops.sum(weight) * TRUE


def stepping(optimizer, variables, change, mode):
    """Returns a function that takes a step of gradients that are changed."""

    def gradients():
        scaled = optimizer.scale_loss(ops.convert_to_tensor(TRUE, "float32"))
        return change(optimizer, variables[0], [ops.reshape(scaled, (1,))])

    def step():
        optimizer.apply(gradients(), variables)

    def stateless_step(own, weights):
        with keras.StatelessScope(zip(optimizer.variables, own, strict=True)):
            given = gradients()
        return optimizer.stateless_apply(own, given, weights)

    if mode == "jit":
        import jax

        return stateless(jax.jit(stateless_step), optimizer, variables)
    if mode != "eager":
        import tensorflow as tf

        return tf.function(step, jit_compile=mode == "xla")
    return step


def clipped(optimizer, weight, gradients):
    return [ops.clip(g, -2.0, 2.0) for g in optimizer.unscale(gradients)]


def spoiled(optimizer, weight, gradients):
    return [g * np.float32(np.nan) for g in optimizer.unscale(gradients)]


def hidden(optimizer, weight, gradients):
    given = [g * np.float32(np.inf) for g in gradients]
    return [ops.sign(g) for g in optimizer.unscale(given)]


def added_up(optimizer, weight, gradients):
    first = optimizer.unscale(gradients)
    optimizer.scale_loss(loss_of(weight))
    second = optimizer.unscale([g * 1.0 for g in gradients])
    return [a + b for a, b in zip(first, second, strict=True)]


CHANGES = {
    lambda optimizer, weight, gradients: gradients: [-2, -5, -8],
    clipped: [-1, -3, -5],
    added_up: [-5, -11, -17],
    spoiled: [1, 1, 1],
    hidden: [1, 1, 1],
}


@over_modes("change,expected", {k.__name__: (k, v) for k, v in CHANGES.items()})
def test_the_update_is_the_true_one_whatever_the_scale(change, expected, mode):
    optimizer, variables = make((1,))
    step, seen = stepping(optimizer, variables, change, mode), []
    for _ in range(3):
        step()
        seen.append(float(numbers(variables)[0][0]))
    assert seen == expected
    (norm,) = optimizer.gradient_norms().values()
    moved = expected[0] - expected[1]
    assert norm == moved or change in (spoiled, hidden)
    assert float(optimizer.loss_scale) == SCALE * (8 if moved else 1 / 8)


def test_gradients_are_divided_once():
    optimizer, variables = make((1,), growth_interval=100)
    gradients = [ops.convert_to_tensor([SCALE])]
    unscaled = optimizer.unscale(gradients)
    with pytest.raises(ValueError, match="unscaled already"):
        optimizer.unscale(unscaled)
    optimizer.apply(unscaled, variables)
    assert numbers(variables)[0] == 0
    # A second backward pass of a step.
    optimizer.unscale(gradients)
    scaled = [gradients[0] * 8]
    optimizer.apply([ops.clip(optimizer.unscale(scaled)[0], -1, 1)], variables)
    assert numbers(variables)[0] == -1


@only_torch
def test_gradients_unscaled_in_place_are_divided_once_a_step():
    optimizer, (variable,) = make((1,), growth_interval=100)
    for step in range(1, 4):
        if variable.value.grad is not None:
            variable.value.grad.zero_()
        # Without `scale_loss` nothing begins a step.
        (loss_of(variable) * SCALE).backward()
        optimizer.unscale([variable.value.grad])
        optimizer.apply([variable.value.grad])
        assert numbers([variable])[0] == 1 - TRUE * step


def two():
    """An optimizer of two variables, of four numbers each."""
    return make((4,), (2, 2), initial_scale=SCALE)


def scaled_ones():
    return [ops.ones((4,)) * SCALE, ops.ones((2, 2)) * SCALE]


def assert_weights(variables, expected):
    for values in numbers(variables):
        np.testing.assert_array_equal(values, np.full_like(values, expected))


def after(optimizer, looked_at, gradients):
    """Returns gradients after a look at something."""
    optimizer.unscale(looked_at)
    return gradients


def clip(gradients):
    return [ops.clip(g, -2, 2) for g in gradients]


def arrays(tensors):
    return [ops.convert_to_numpy(t) for t in tensors]


# Ways to apply gradients that are scaled by 8.
APPLIED = {
    "unscaled": lambda o, g: o.unscale(g),
    "after all": lambda o, g: after(o, g, g),
    "after one": lambda o, g: after(o, g[:1], g),
    "arrays": lambda o, g: arrays(o.unscale(arrays(g))),
}


@pytest.mark.parametrize("name", APPLIED)
def test_gradients_are_divided_whoever_looked_at_what(name):
    optimizer, variables = two()
    optimizer.apply(APPLIED[name](optimizer, scaled_ones()))
    assert_weights(variables, 0)
    # That step is over.
    optimizer.apply(scaled_ones())
    assert_weights(variables, -1)


refused = pytest.raises(ValueError, match="`unscale`|others are still")


def test_a_part_that_is_unscaled_is_refused():
    optimizer, variables = two()
    gradients = scaled_ones()
    (unscaled,) = optimizer.unscale(gradients[:1])
    for other in (gradients[1], gradients[1] * 1.0):
        with refused:
            optimizer.apply([unscaled, other])
    assert_weights(variables, 1)
    assert optimizer.attempted_steps == 0
    optimizer.apply(gradients)
    assert_weights(variables, 0)


@only_tensorflow
def test_stages_of_compiled_functions():
    import tensorflow as tf

    for compiled in (False, True):
        optimizer, variables = two()
        unscale = optimizer.unscale
        (tf.function(unscale) if compiled else unscale)(scaled_ones())
        with refused:
            tf.function(optimizer.apply)(scaled_ones())

    # Functions within a compiled one are one step.
    @tf.function
    def clipped(gradients):
        return clip(optimizer.unscale(gradients))

    @tf.function
    def step(gradients):
        with tf.GradientTape() as tape:
            tape.watch(gradients)
            optimizer.scale_loss(ops.sum(gradients[0]))
        optimizer.apply(clipped(gradients), variables)

    step(scaled_ones())
    assert_weights(variables, 0)


@only_jax
def test_traces_leak_no_stage():
    import jax

    optimizer, variables = two()
    weights = [v.value for v in variables]

    def own():
        return [v.value for v in optimizer.variables]

    def unscale(own, gradients):
        mapping = list(zip(optimizer.variables, own, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.unscale(gradients)

    def step(own, gradients, weights):
        clipped = clip(jax.jit(lambda *given: unscale(*given))(own, gradients))
        return optimizer.stateless_apply(own, clipped, weights)

    apply = jax.jit(optimizer.stateless_apply)
    # Nested functions are one step.
    new, _ = jax.jit(step)(own(), scaled_ones(), weights)
    np.testing.assert_array_equal(new[0], np.zeros(4))
    for look in (unscale, jax.jit(unscale)):
        look(own(), scaled_ones())
        with refused:
            apply(own(), scaled_ones(), weights)
        optimizer.scale_loss(1.0)
    new, _ = apply(own(), scaled_ones(), weights)
    np.testing.assert_array_equal(new[0], np.zeros(4))
    # A trace that was left before its end.
    jax.eval_shape(lambda *given: unscale(*given), own(), scaled_ones())
    with refused:
        optimizer.apply(scaled_ones())


X = np.ones((4, 2), "float32")


class ByHand(OwnStep):
    """Its `train_step` scales the loss as `scale` does, or not."""

    def __init__(self, scale=lambda optimizer, loss: loss):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.scale = scale

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x, y):
        loss = ops.mean(self(x))
        return loss, {"loss": loss}

    def scaled(self, loss):
        return self.scale(self.optimizer, loss)


def train_by_hand(model, jit):
    model(X)
    model.compile(LossScaleOptimizer("sgd"), jit_compile=jit)
    # Before that it has no variable `dynamic_scale`, nor has Keras' own.
    model.optimizer.build(model.trainable_variables)
    model.fit(X, X, batch_size=2, epochs=2, verbose=0)
    np.testing.assert_allclose(model.get_weights()[1], [-0.04], rtol=1e-5)


@each_jit
def test_a_forgotten_scale_is_warned_of_once_and_not_divided_by(jit):
    with pytest.warns(UserWarning, match="undivided") as caught:
        train_by_hand(ByHand(), jit)
    advice = "stateless_scale_loss" if BACKEND == "jax" else "r.scale_loss"
    (told,) = [str(w.message) for w in caught if "scale_loss" in str(w.message)]
    assert advice in told


SCALES = {
    "scale_loss": lambda o, loss: o.scale_loss(loss),
    "get_scaled_loss": lambda o, loss: o.get_scaled_loss(loss),
    "loss_scale": lambda o, loss: loss * o.loss_scale,
    "dynamic_scale": lambda o, loss: loss * o.dynamic_scale.value,
}


@each_jit
@pytest.mark.parametrize("name", ["scale_loss", *map(rarely, list(SCALES)[1:])])
def test_a_scaled_loss_is_not_warned_of(name, jit):
    train_by_hand(ByHand(SCALES[name]), jit)


def test_a_forgotten_scale_is_a_finding_of_the_run(tmp_path):
    model = ByHand()
    model(X)
    model.dense.dtype_policy = "mixed_float16"
    sgd = keras.optimizers.SGD(0.01)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd))
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    with pytest.warns(UserWarning, match="undivided"):
        model.fit(X, X, batch_size=2, verbose=0, callbacks=[monitor])
    np.testing.assert_allclose(model.get_weights()[1], [-0.02], rtol=1e-3)
    (run,) = monitor.report.to_dict().values()
    events = [e for e in run["events"] if e["kind"] == "no_loss_scaling"]
    assert [event["by"] for event in events] == ["train_step"]
    headline = monitor.summary.headline
    assert headline["state"] == "severe"
    assert headline["text"] in " ".join(str(monitor.report).split())
    assert "`train_step`" in str(monitor.summary)
    assert "ensure_loss_scaling" not in str(monitor.summary)


GOOD = np.full(2, SCALE, "float32")
BAD = np.array([1, np.inf], "float32")


def apply_together(pairs, gradients, mode):
    """Applies a gradient to each of two optimizers, in one step."""
    gradients = [[as_tensor(g)] for g in gradients]
    optimizers, variables = zip(*pairs, strict=True)

    def together():
        steps = zip(optimizers, gradients, variables, strict=True)
        LossScaleOptimizer.apply_together(*steps)

    if BACKEND == "jax":
        import jax

        def step(owns, gradients, weights):
            return LossScaleOptimizer.stateless_apply_together(
                *zip(optimizers, owns, gradients, weights, strict=True)
            )

        owns = [[v.value for v in o.variables] for o in optimizers]
        weights = [[v.value for v in group] for group in variables]
        step = step if mode == "eager" else jax.jit(step)
        new = step(owns, gradients, weights)
        for (optimizer, group), (values, own) in zip(pairs, new, strict=True):
            for variable, value in zip(
                [*group, *optimizer.variables], [*values, *own], strict=True
            ):
                variable.assign(value)
        return
    if mode != "eager":
        import tensorflow as tf

        together = tf.function(together, jit_compile=mode == "xla")
    together()


@each_mode
def test_optimizers_that_skip_together(mode):
    pairs = [make((2,), initial_scale=SCALE) for _ in range(2)]
    apply_together(pairs, [GOOD, GOOD * 2], mode)
    for bad in ({0}, {1}, {0, 1}):
        gradients = [BAD if i in bad else GOOD for i in range(2)]
        apply_together(pairs, gradients, mode)
        for index, (optimizer, _) in enumerate(pairs):
            recorded = optimizer.nonfinite_steps()[-1].variables
            assert bool(recorded) is (index in bad)
    for (optimizer, variables), weight in zip(pairs, (0, -1), strict=True):
        assert_weights(variables, weight)
        assert int(optimizer.iterations) == 1
        assert optimizer.skipped_steps == 3
        # Equal rules keep equal scales.
        assert float(optimizer.loss_scale) == SCALE / 8
    (optimizer, _), (other, _) = pairs
    optimizer.apply([as_tensor(BAD)])
    assert float(optimizer.loss_scale) == SCALE / 16
    assert float(other.loss_scale) == SCALE / 8
