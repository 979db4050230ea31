"""An update that depends on the loss scale is misuse; no other one is."""

import keras
import numpy as np
import pytest
from keras import ops
from scale_use_models import (
    BACKEND,
    Step,
    X,
    Y,
    clipped,
    compiled,
    custom_gradient,
    gradients_of,
    input_gradient,
    network,
    norm,
)

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    PrecisionTuner,
    diagnose,
)

SGD = keras.optimizers.SGD
WRONG, RIGHT = {}, {}


def wrong(function):
    WRONG[function.__name__] = function
    return function


def right(function):
    RIGHT[function.__name__] = function
    return function


def changing(change):
    """A step that changes scaled gradients before it applies them."""

    def update(self, optimizer, gradients, variables):
        optimizer.apply(change(gradients), variables)

    return compiled(update=update)


def added(penalty):
    """A step that adds to the scaled loss what is not scaled."""

    def scaled(self, model, loss):
        return model.optimizer.scale_loss(loss) + penalty(model)

    return compiled(scaled=scaled)


@wrong
def clips_global_norm():
    return changing(clipped)


@wrong
def clips_each_norm():
    return changing(lambda gradients: [clipped([g])[0] for g in gradients])


@wrong
def clips_values():
    return changing(lambda gs: [ops.clip(g, -0.5, 0.5) for g in gs])


@wrong
def normalizes():
    return changing(lambda gradients: [ops.sign(g) for g in gradients])


@wrong
def drops_small_ones():
    def dropped(gradient):
        return ops.where(ops.abs(gradient) < 2.0, 0.0, gradient)

    return changing(lambda gradients: [*map(dropped, gradients)])


@wrong
def adds_noise():
    seed = keras.random.SeedGenerator(3)

    def noisy(gradient):
        shape = tuple(gradient.shape)
        return gradient + keras.random.normal(shape, seed=seed)

    return changing(lambda gradients: [*map(noisy, gradients)])


class Noisy(Step):
    """Adds noise to its data without Keras."""

    def loss(self, model, x, y):
        noise = np.random.normal(size=x.shape)
        if BACKEND == "torch":
            import torch

            noise = torch.randn(x.shape)
        elif BACKEND == "tensorflow":
            import tensorflow as tf

            noise = tf.random.normal(x.shape)
        return super().loss(model, x + ops.cast(noise, x.dtype), y)


@wrong
def clips_beside_noise():
    class Clipping(Noisy):
        def update(self, optimizer, gradients, variables):
            optimizer.apply(clipped(gradients), variables)

    return compiled(step=Clipping())


if BACKEND == "tensorflow":  # Its kernels never draw the same numbers again.
    del WRONG["clips_beside_noise"]


@wrong
def skips_by_scaled_norm():
    def update(self, optimizer, gradients, variables):
        factor = ops.cast(norm(gradients) < 1e3, "float32")
        optimizer.apply([g * factor for g in gradients], variables)

    return compiled(update=update)


@wrong
def divides_twice():
    def update(self, optimizer, gradients, variables):
        by_hand = [g / optimizer.loss_scale for g in gradients]
        optimizer.apply(by_hand, variables)

    return compiled(update=update)


@wrong
def clips_in_an_optimizer():
    class Clipping(LossScaleOptimizer):
        def apply(self, grads, trainable_variables=None):
            super().apply(clipped(grads), trainable_variables)

    return compiled(optimizer=Clipping(SGD(0.01)))


@wrong
def clips_in_a_wrapper():
    class Clipping(keras.optimizers.Optimizer):
        def __init__(self, inner):
            super().__init__(learning_rate=0.01, name="clipping")
            self.inner = inner

        def build(self, variables):
            super().build(variables)
            self.inner.build(variables)

        def scale_loss(self, loss):
            return self.inner.scale_loss(loss)

        def apply(self, grads, trainable_variables=None):
            self.inner.apply(clipped(grads), self._trainable_variables)

    wrapper = Clipping(LossScaleOptimizer(SGD(0.01)))
    model = network()
    model.compile(wrapper, loss="mse", auto_scale_loss=False)
    wrapper.build(model.trainable_variables)
    return model


@wrong
def adds_a_penalty():
    def penalty(model):
        return 0.1 * sum(
            ops.sum(ops.square(v)) for v in model.trainable_weights
        )

    return added(penalty)


@wrong
def adds_a_second_loss():
    return added(lambda model: ops.mean(ops.abs(model(X, training=True))))


@wrong
def adds_a_gradient_penalty():
    def penalty(model):
        x = ops.convert_to_tensor(X)
        gradient = input_gradient(lambda x: model(x, training=True), x)
        return ops.mean(ops.square(gradient))

    return added(penalty)


@wrong
def forgets_to_scale():
    return compiled(scaled=lambda self, model, loss: loss)


@wrong
def forgets_to_scale_beside_dropout():
    model = network(keras.layers.Dropout(0.5))
    return compiled(model, scaled=lambda self, model, loss: loss)


@wrong
def forgets_to_scale_with_keras_own():
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(0.01))
    return compiled(optimizer=optimizer, scaled=lambda self, model, loss: loss)


@wrong
def logs_the_scale_without_using_it():
    class Logging(Step):
        def scaled(self, model, loss):
            return loss

        def take(self, model, x, y):
            logs = super().take(model, x, y)
            return logs | {"scale": model.optimizer.loss_scale}

    return compiled(step=Logging())


@wrong
def scales_twice():
    def scaled(self, model, loss):
        return model.optimizer.scale_loss(model.optimizer.scale_loss(loss))

    return compiled(scaled=scaled)


@wrong
def scales_one_of_two_micro_batches():
    class Micro(Step):
        def take(self, model, x, y):
            def of(scaled, rows):
                return gradients_of(
                    lambda: scaled(self.loss(model, x[rows], y[rows])),
                    model.trainable_variables,
                )

            loss, one = of(model.optimizer.scale_loss, slice(0, 4))
            _, other = of(lambda loss: loss, slice(4, 8))
            gradients = [a + b for a, b in zip(one, other, strict=True)]
            model.optimizer.apply(gradients, model.trainable_variables)
            return {"own_loss": loss}

    return compiled(step=Micro())


@wrong
def a_loss_with_a_gradient_of_its_own():
    own = custom_gradient(
        lambda x: ops.mean(ops.square(x)), lambda upstream, x: 2 * x / 8
    )
    return compiled(loss=lambda y, prediction: own(prediction - y))


@wrong
def a_layer_that_adds_a_gradient():
    own = custom_gradient(lambda x: x * 1.0, lambda upstream, x: upstream + 0.1)

    class Auxiliary(keras.layers.Layer):
        def call(self, x):
            return ops.cast(own(ops.cast(x, "float32")), x.dtype)

    return compiled(network(Auxiliary(name="auxiliary")))


@right
def as_keras_has_it():
    return compiled()


@right
def a_step_of_its_own():
    return compiled(step=Step())


@right
def scales_by_hand():
    def scaled(self, model, loss):
        return loss * model.optimizer.loss_scale

    return compiled(scaled=scaled)


@right
def unscales_by_hand():
    def update(self, optimizer, gradients, variables):
        scale = optimizer.loss_scale
        optimizer.inner_optimizer.apply(
            [g / scale for g in gradients], variables
        )

    return compiled(update=update)


@right
def clips_after_unscaling():
    def update(self, optimizer, gradients, variables):
        optimizer.apply(clipped(optimizer.unscale(gradients)), variables)

    return compiled(update=update)


@right
def normalizes_after_unscaling():
    def update(self, optimizer, gradients, variables):
        unscaled = optimizer.unscale(gradients)
        optimizer.apply([ops.sign(g) for g in unscaled], variables)

    return compiled(update=update)


@right
def looks_at_the_norm():
    class Looking(Step):
        def take(self, model, x, y):
            logs = super().take(model, x, y)
            return logs | {"norm": self.norm}

        def update(self, optimizer, gradients, variables):
            self.norm = norm(optimizer.unscale(gradients))
            optimizer.apply(gradients, variables)

    return compiled(step=Looking())


@right
def the_inner_optimizer_clips():
    return compiled(optimizer=LossScaleOptimizer(SGD(0.01, clipnorm=0.1)))


@right
def the_inner_optimizer_clips_all():
    inner = SGD(0.01, global_clipnorm=0.1, use_ema=True)
    return compiled(optimizer=LossScaleOptimizer(inner), step=Step())


@right
def accumulates_as_keras_does():
    inner = SGD(0.01, gradient_accumulation_steps=2)
    return compiled(optimizer=LossScaleOptimizer(inner))


@right
def accumulates_in_a_step():
    class Micro(Step):
        def take(self, model, x, y):
            total = None
            for rows in (slice(0, 4), slice(4, 8)):
                loss, gradients = gradients_of(
                    lambda rows=rows: model.optimizer.scale_loss(
                        self.loss(model, x[rows], y[rows])
                    ),
                    model.trainable_variables,
                )
                total = total or [0.0] * len(gradients)
                total = [a + g for a, g in zip(total, gradients, strict=True)]
            model.optimizer.apply(total, model.trainable_variables)
            return {"own_loss": loss}

    return compiled(step=Micro())


@right
def accumulates_over_steps():
    class Accumulating(Step):
        def update(self, optimizer, gradients, variables):
            total = [a + g for a, g in zip(self.sums, gradients, strict=True)]
            for own, value in zip(self.sums, total, strict=True):
                own.assign(value)
            optimizer.apply(total, variables)

    model = compiled(step=(step := Accumulating()))
    step.sums = model.sums = [
        model.add_weight(
            v.shape,
            trainable=False,
            dtype="float32",
            autocast=False,
            initializer="zeros",
        )
        for v in model.trainable_variables
    ]
    for own in step.sums:  # Of a step at 2**15.
        own.assign(ops.full(own.shape, 2.0**12))
    return model


@right
def keeps_gradients_in_a_list():
    class Keeping(Step):
        def update(self, optimizer, gradients, variables):
            self.kept.append([g / 3 for g in gradients])
            if len(self.kept) == 3:
                optimizer.apply(
                    [*map(sum, zip(*self.kept, strict=True))], variables
                )
                self.kept = []

    model = compiled(step=(step := Keeping()))
    # Of two steps at 2**15.
    step.kept = [
        [ops.full(v.shape, 2.0**12) for v in model.trainable_variables]
        for _ in range(2)
    ]
    return model


@right
def sharpness_aware():
    class Aware(Step):
        def take(self, model, x, y):
            optimizer, variables = model.optimizer, model.trainable_variables

            def gradients():
                loss, found = gradients_of(
                    lambda: self.scaled(model, self.loss(model, x, y)),
                    variables,
                )
                return loss, optimizer.unscale(found)

            loss, first = gradients()
            away = [0.05 * g / (norm(first) + 1e-12) for g in first]
            for v, a in zip(variables, away, strict=True):
                v.assign(ops.stop_gradient(v.value + a))
            _, second = gradients()
            for v, a in zip(variables, away, strict=True):
                v.assign(ops.stop_gradient(v.value - a))
            optimizer.apply(second, variables)
            return {"own_loss": loss}

    return compiled(step=Aware())


@right
def a_gradient_penalty():
    def loss(self, model, x, y):
        gradient = input_gradient(lambda x: model(x, training=True), x)
        return Step.loss(self, model, x, y) + ops.mean(ops.square(gradient))

    return _with_loss(loss)


def _with_loss(loss):
    class Own(Step):
        pass

    Own.loss = loss
    return compiled(step=Own())


@right
def a_teacher():
    class Taught(Step):
        def loss(self, model, x, y):
            own = model(x, training=True)
            target = ops.stop_gradient(ops.matmul(x, self.teacher.value))
            return ops.mean(ops.square(own - target))

        def take(self, model, x, y):
            logs = super().take(model, x, y)
            first = model.trainable_variables[0].value
            mean = ops.mean(first, axis=1, keepdims=True)
            self.teacher.assign(0.9 * self.teacher + 0.1 * mean)
            return logs

    model = compiled(step=(step := Taught()))
    step.teacher = model.teacher = model.add_weight(
        (4, 1), trainable=False, dtype="float32", autocast=False
    )
    return model


@right
def keras_own_optimizer():
    return compiled(optimizer=keras.optimizers.LossScaleOptimizer(SGD(0.01)))


@right
def a_fixed_scale():
    optimizer = LossScaleOptimizer(SGD(0.01), loss_scale=1000.0)
    return compiled(optimizer=optimizer, step=Step())


@right
def a_loss_scale_factor():
    model = network()
    optimizer = SGD(0.01, loss_scale_factor=1024.0)
    model.compile(optimizer, loss="mse", auto_scale_loss=False)
    optimizer.build(model.trainable_variables)
    return model


@right
def no_loss_scaling():
    def update(self, optimizer, gradients, variables):
        optimizer.apply(clipped(gradients), variables)

    model = network(policy="mixed_bfloat16")
    return compiled(model, optimizer=SGD(0.01), update=update)


@right
def random_layers():
    return compiled(
        network(keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)),
        step=Step(),
    )


@right
def noise_of_the_backend():
    return compiled(step=Noisy())


@right
def noise_after_unscaling():
    seed = keras.random.SeedGenerator(3)

    def update(self, optimizer, gradients, variables):
        noisy = [
            g + keras.random.normal(tuple(g.shape), seed=seed)
            for g in optimizer.unscale(gradients)
        ]
        optimizer.apply(noisy, variables)

    return compiled(update=update)


@right
def straight_through():
    class Sign(keras.layers.Layer):
        def call(self, x):
            return x + ops.stop_gradient(ops.sign(x) - x)

    class Top(keras.layers.Layer):
        def call(self, x):
            least = ops.min(ops.top_k(x, 3)[0], axis=-1, keepdims=True)
            return ops.where(x >= least, x, ops.zeros_like(x))

    return compiled(network(Sign(), Top()))


@right
def the_scale_in_a_metric():
    class Logging(Step):
        def take(self, model, x, y):
            logs = super().take(model, x, y)
            return logs | {"scale": model.optimizer.loss_scale * 1.0}

    return compiled(step=Logging())


@right
def a_loss_of_zero():
    return compiled(loss=lambda y, p: ops.mean(ops.relu(ops.abs(p - y) - 1e3)))


@right
def a_weight_without_a_gradient():
    class Half(keras.layers.Layer):
        def build(self, shape):
            self.used = self.add_weight((), initializer="ones", name="used")
            self.idle = self.add_weight((3,), name="idle")

        def call(self, x):
            return x * self.used + 0 * ops.sum(self.idle)

    return compiled(network(Half()), step=Step())


@right
def one_of_two_optimizers_scales():
    class Two(Step):
        def take(self, model, x, y):
            halves = model.layers[-1].trainable_variables
            others = [
                v
                for v in model.trainable_variables
                if not any(v is half for half in halves)
            ]
            for optimizer, own, scale in (
                (model.optimizer, others, model.optimizer.scale_loss),
                (model.second, halves, lambda loss: loss),
            ):
                loss, gradients = gradients_of(
                    lambda scale=scale: scale(self.loss(model, x, y)), own
                )
                optimizer.apply(gradients, own)
            return {"own_loss": loss}

    model = compiled(step=Two())
    model.second = SGD(0.01)
    model.second.build(model.layers[-1].trainable_variables)
    return model


@right
def two_optimizers():
    class Two(Step):
        def take(self, model, x, y):
            variables = model.trainable_variables
            loss, gradients = gradients_of(
                lambda: self.scaled(model, self.loss(model, x, y)), variables
            )
            steps = (
                (model.optimizer, gradients[:2], variables[:2]),
                (model.other, gradients[2:], variables[2:]),
            )
            LossScaleOptimizer.apply_together(*steps)
            return {"own_loss": loss}

    model = compiled(step=Two())
    model.optimizer = LossScaleOptimizer(SGD(0.01), name="one")
    model.other = LossScaleOptimizer(SGD(0.1), name="two")
    model.optimizer.build(model.trainable_variables[:2])
    model.other.build(model.trainable_variables[2:])
    return model


@right
def an_optimizer_that_clips_unscaled():
    class Clipping(LossScaleOptimizer):
        def apply(self, grads, trainable_variables=None):
            super().apply(clipped(self.unscale(grads)), trainable_variables)

    return compiled(optimizer=Clipping(SGD(0.01)))


@right
def gradients_near_the_largest_number():
    return compiled(loss=lambda y, p: ops.mean(ops.abs(p - y)) * 1e35)


@right
def gradients_near_the_smallest_number():
    return compiled(loss=lambda y, p: ops.mean(ops.abs(p - y)) * 1e-36)


@right
def float16_in_the_code():
    def loss(y, prediction):
        narrow = ops.cast(prediction, "float16")
        return ops.mean(ops.abs(ops.cast(narrow, "float32") - y)) * 1e-7

    return compiled(loss=loss)


# A program for each pass takes a second to compile on JAX.
_OFTEN = {
    "clips_global_norm",
    "clips_beside_noise",
    "clips_in_an_optimizer",
    "noise_of_the_backend",
    "adds_a_penalty",
    "forgets_to_scale",
    "forgets_to_scale_beside_dropout",
    "a_loss_with_a_gradient_of_its_own",
    "as_keras_has_it",
    "scales_by_hand",
    "clips_after_unscaling",
    "sharpness_aware",
    "random_layers",
}


def cases(table):
    often = set(table) if BACKEND == "torch" else _OFTEN
    slow = pytest.mark.slow
    return [
        pytest.param(function, id=name, marks=() if name in often else slow)
        for name, function in table.items()
    ]


def found(model):
    verdicts = diagnose(model, X, Y)
    kinds = [verdict.kind for verdict in verdicts]
    assert "loss_scale_ignored" not in kinds[1:]
    return verdicts


@pytest.mark.parametrize("build", cases(WRONG))
def test_an_update_that_depends_on_the_loss_scale_is_named(build):
    assert found(build())[0].kind == "loss_scale_ignored"


@pytest.mark.parametrize("build", cases(RIGHT))
def test_an_update_that_does_not_is_not(build):
    assert "loss_scale_ignored" not in [v.kind for v in found(build())]


def test_two_optimizers_of_which_one_scales_cost_few_steps():
    model, steps = one_of_two_optimizers_scales(), []

    class Counted(type(model)):
        def train_step(self, *arguments):
            steps.append(None)
            return super().train_step(*arguments)

    model.__class__ = Counted
    assert {v.kind for v in found(model)} <= {"scale_search"}
    assert len(steps) < 10


def test_it_is_said_what_follows_the_loss_scale_and_what_does_not():
    penalty = found(adds_a_penalty())[0]
    assert "penalty" in penalty.advice
    assert "behind" not in penalty.numbers
    assert penalty.numbers["variables"] == 2  # A bias of 0 has no penalty.

    loss = found(a_loss_with_a_gradient_of_its_own())[0]
    assert "custom_gradient" in loss.advice
    assert loss.numbers["behind"] == "<model>"
    layer = found(a_layer_that_adds_a_gradient())[0]
    assert layer.numbers["behind"] == "hidden"
    assert layer.numbers["variables"] == 2
    assert "never multiplied" in found(forgets_to_scale())[0].advice
    assert "once more" in found(scales_twice())[0].advice
    assert "own division" in found(divides_twice())[0].advice
    assert "unscale(" in found(clips_global_norm())[0].advice


@pytest.mark.parametrize("tuned", [False, True])
def test_fit_says_so_and_moves_no_layer(tuned, tmp_path):
    model = clips_global_norm()
    before = [layer.dtype_policy.name for layer in model.layers]
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [monitor] + [PrecisionTuner(verbose=0)] * tuned
    model.fit(
        X.repeat(4, 0),
        Y.repeat(4, 0),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=callbacks,
    )
    assert [v.kind for v in monitor.verdicts] == ["loss_scale_ignored"]
    assert [layer.dtype_policy.name for layer in model.layers] == before
    assert "do not follow the loss scale" in str(monitor.summary)
    assert "do not follow the loss scale" in " ".join(
        str(monitor.report).split()
    )
