"""Wrong calls of the optimizer, each with its clear error, and no harm done."""

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import make_variables, numbers

from keras_mixprec import (
    DynamicLossScale,
    LossScaleOptimizer,
    ensure_loss_scaling,
)

sgd = keras.optimizers.SGD


def new(*arguments, **named):
    return lambda optimizer, variables: LossScaleOptimizer(
        *(arguments or (sgd(),)), **named
    )


def call(method, *arguments, **named):
    return lambda optimizer, variables: getattr(optimizer, method)(
        *arguments, **named
    )


ONE = ops.ones((2,))

WRONG = {
    "no optimizer": (new(None), TypeError, "must be a `keras.optimizers"),
    "a class": (new(sgd), TypeError, "inner_optimizer=.*of type type"),
    "a number": (new(0.1), TypeError, "inner_optimizer=0.1 of type float"),
    "an unknown name": (new("sdg"), ValueError, "sdg"),
    "Keras' wrapper": (
        new(keras.optimizers.LossScaleOptimizer(sgd())),
        ValueError,
        "scales the loss already",
    ),
    "our wrapper": (
        new(LossScaleOptimizer("sgd")),
        ValueError,
        "scales the loss already",
    ),
    "a word": (new(loss_scale="static"), ValueError, "loss_scale='static'"),
    "a list": (new(loss_scale=[1.0]), TypeError, "must be a number"),
    "true": (new(loss_scale=True), TypeError, "loss_scale=True"),
    "none": (new(loss_scale=None), TypeError, "loss_scale=None"),
    "zero": (new(loss_scale=0), ValueError, "loss_scale=0"),
    "negative": (new(loss_scale=-8.0), ValueError, "loss_scale=-8.0"),
    "infinite": (new(loss_scale=np.inf), ValueError, "loss_scale=inf"),
    "nan": (new(loss_scale=np.nan), ValueError, "loss_scale=nan"),
    "too large": (new(loss_scale=1e38), ValueError, "normal float32"),
    "empty table": (new(loss_scale={}), ValueError, "scale for step 0"),
    "zero at first": (new(initial_scale=0), ValueError, "initial_scale=0"),
    "text at first": (new(initial_scale="x"), TypeError, "initial_scale='x'"),
    "no interval": (
        new(dynamic_growth_steps=0),
        ValueError,
        "growth_interval=0",
    ),
    "half an interval": (
        new(dynamic_growth_steps=1.5),
        TypeError,
        "must be an integer",
    ),
    "a loss scale by another name": (
        new(loss_scale="auto"),
        ValueError,
        "a number, a schedule, or a rule.*Received: loss_scale='auto'",
    ),
    "fixed and dynamic": (
        new(loss_scale=8.0, initial_scale=4.0),
        ValueError,
        "cannot be combined",
    ),
    "rule and interval": (
        new(loss_scale=DynamicLossScale(), dynamic_growth_steps=5),
        ValueError,
        "cannot be combined",
    ),
    "not dynamic": (new(dynamic=False), ValueError, "needs `initial_scale`"),
    "an unknown argument": (new(scale=8.0), ValueError, "`scale`"),
    "an argument of the inner one": (
        new(clipnorm=1.0),
        ValueError,
        "set `clipnorm` on the `inner_optimizer`",
    ),
    "too few gradients": (
        lambda o, v: o.apply([ONE], v),
        ValueError,
        "1 gradients for 2 variables",
    ),
    "too many gradients": (
        call("apply", [ONE] * 3),
        ValueError,
        "3 gradients for 2 variables",
    ),
    "no gradient at all": (
        call("apply", [None, None]),
        ValueError,
        "No gradients provided.*depends on the variables",
    ),
    "a variable it does not know": (
        lambda o, v: o.apply([ONE], make_variables((2,))),
        ValueError,
        "Unknown variable",
    ),
    "a new interval of text": (
        lambda o, v: setattr(
            LossScaleOptimizer("sgd"), "dynamic_growth_steps", "often"
        ),
        TypeError,
        "growth_interval='often'",
    ),
    "an interval of a fixed scale": (
        lambda o, v: setattr(o, "dynamic_growth_steps", 5),
        ValueError,
        "belongs to a dynamic loss scale.*=5 for FixedLossScale",
    ),
    **{
        f"a scale set to {scale}": (
            call("set_loss_scale", scale),
            ValueError,
            "normal float32.*Received: scale=",
        )
        for scale in (0, -4.0, np.inf, np.nan)
    },
    "ensure on nothing": (
        lambda o, v: ensure_loss_scaling(None),
        TypeError,
        "must be a `keras.Model`",
    ),
    "ensure on an optimizer": (
        lambda o, v: ensure_loss_scaling(o),
        TypeError,
        "of type LossScaleOptimizer",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_a_clear_error_and_does_no_harm(name):
    attempt, kind, message = WRONG[name]
    variables = make_variables((2,), (2,))
    optimizer = LossScaleOptimizer(sgd(1.0), 8.0)
    optimizer.build(variables)
    with pytest.raises(kind, match=message):
        attempt(optimizer, variables)
    assert optimizer.attempted_steps == 0
    optimizer.apply([ONE * 8, ONE * 16], variables)
    assert [v[0] for v in numbers(variables)] == [0, -1]


def test_what_needs_a_built_optimizer_says_so():
    optimizer = LossScaleOptimizer("sgd")
    for method, arguments in (
        ("set_loss_scale", (8.0,)),
        ("stateless_scale_loss", ([], 1.0)),
    ):
        with pytest.raises(ValueError, match=f"`{method}` needs.*built"):
            getattr(optimizer, method)(*arguments)
    with pytest.raises(ValueError, match="has not been built yet"):
        optimizer.apply([ONE])
    optimizer.apply([ONE], make_variables((2,)))
    assert optimizer.attempted_steps == 1


def test_a_factor_set_on_the_inner_optimizer_later_is_refused():
    variables = make_variables((2,))
    optimizer = LossScaleOptimizer(sgd(1.0), 8.0)
    optimizer.build(variables)
    optimizer.inner_optimizer.loss_scale_factor = 8.0
    with pytest.raises(ValueError, match="divided twice.*=8.0"):
        optimizer.apply([ONE])
    optimizer.inner_optimizer.loss_scale_factor = None
    optimizer.apply([ONE * 8])
    np.testing.assert_array_equal(numbers(variables)[0], [0, 0])


def test_a_factor_of_the_inner_optimizer_is_dropped_with_a_warning():
    inner = sgd(1.0, loss_scale_factor=64.0)
    with pytest.warns(UserWarning, match="set to None.*loss_scale_factor=64.0"):
        optimizer = LossScaleOptimizer(inner, 8.0)
    variables = make_variables((2,))
    optimizer.apply([ONE * 8], variables)
    np.testing.assert_array_equal(numbers(variables)[0], [0, 0])
