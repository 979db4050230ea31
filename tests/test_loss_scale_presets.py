"""Every preset gives the same loss scales as the system of its name."""

import functools
import inspect

import keras
import numpy as np
import peer_scalers
import pytest
from loss_scale_traces import (
    comparable,
    random_overflows,
    trace_peer,
    trace_rule,
)

from keras_mixprec import DynamicLossScale
from keras_mixprec.loss_scaling.rules import PRESETS

preset = DynamicLossScale.preset


def case(peer, **names):
    """A preset, what is fixed in it, and how its peer names our arguments."""
    return peer.__name__.replace("_", "-"), {}, peer, names


SCALE = {"initial_scale": "init_scale"}
WINDOW = SCALE | {"growth_interval": "scale_window"}
SHIFT = {"hysteresis": "delayed_shift", "min_scale": "min_scale"}


CASES = {
    "tf-keras": case(
        peer_scalers.tf_keras,
        initial_scale="initial_scale",
        growth_interval="dynamic_growth_steps",
    ),
    "apex": case(
        peer_scalers.apex,
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
        **WINDOW,
    ),
    "deepspeed": case(peer_scalers.deepspeed, **WINDOW, **SHIFT),
    "megatron": case(
        peer_scalers.megatron,
        initial_scale="initial_scale",
        hysteresis="hysteresis",
        min_scale="min_scale",
        growth_factor="growth_factor",
        backoff_factor="backoff_factor",
        growth_interval="growth_interval",
    ),
    "paddle": case(
        peer_scalers.paddle,
        initial_scale="init_loss_scaling",
        growth_factor="incr_ratio",
        backoff_factor="decr_ratio",
        growth_interval="incr_every_n_steps",
        hysteresis="decr_every_n_nan_or_inf",
    ),
    "jmp": case(
        peer_scalers.jmp,
        initial_scale="loss_scale",
        growth_interval="period",
        min_scale="min_loss_scale",
    ),
    "mxnet": case(
        peer_scalers.mxnet,
        growth_interval="scale_seq_len",
        max_scale="max_loss_scale",
        **SCALE,
    ),
    "deepspeed-consecutive": (
        "deepspeed",
        {"hysteresis_refill": "good_step"},
        functools.partial(peer_scalers.deepspeed, consecutive_hysteresis=True),
        WINDOW | SHIFT,
    ),
}
# Factors that float32 holds.
CHOICES = {
    "initial_scale": (1.0, 1000.0, 2.0**15, 2.0**24),
    "growth_factor": (2.0, 1.5, 4.0),
    "backoff_factor": (0.5, 0.75, 0.25),
    "growth_interval": tuple(range(1, 21)),
    "hysteresis": (1, 2, 3, 4),
    "min_scale": (2.0**-10, 1.0),
    "max_scale": (2.0**24, 2.0**30),
}


def assert_same_scales(case, arguments, overflows):
    name, fixed, peer, names = case
    rule = preset(name, **fixed, **arguments)
    renamed = {names[name]: value for name, value in arguments.items()}
    make = functools.partial(peer, **renamed)
    theirs, ours = trace_peer(make, overflows), trace_rule(rule, overflows)
    marks = comparable(theirs, make)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours[marks], theirs[marks], f"{arguments}")
    assert marks.mean() > 0.2


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scales_and_defaults_are_the_peers(case):
    name, fixed, peer, names = case
    # The presets of torch and Keras are compared with the real ones below.
    others = {"torch", "keras"}
    assert {name for name, *_ in CASES.values()} | others == set(PRESETS)
    rng = np.random.default_rng(7)
    for _ in range(20):  # 20 x 64 = 1280 sequences.
        overflows = random_overflows(rng, rng.integers(20, 401), 64)
        arguments = {n: rng.choice(CHOICES[n]).item() for n in names}
        assert_same_scales(case, arguments, overflows)
    # Seldom ones, with the peer's own arguments.
    overflows = np.random.default_rng(3).random((4500, 3)) < 1 / 1500
    overflows[:, 0] = False
    assert_same_scales(case, {}, overflows)
    rule = preset(name, **fixed)
    parameters = inspect.signature(peer).parameters
    for ours, theirs in names.items():
        assert getattr(rule, ours) == parameters[theirs].default
    assert (rule.growth_factor, rule.backoff_factor) == (2.0, 0.5)


@pytest.mark.parametrize("growth_interval", [1, 3])
def test_the_real_optimizer_of_keras(growth_interval):
    overflows = np.random.default_rng(1).random((80, 1)) < 0.3
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), dense])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), dynamic_growth_steps=growth_interval
    )
    optimizer.build(model.trainable_variables)
    # On JAX Keras' optimizer only works inside a compiled step.
    jit_compile = keras.backend.backend() == "jax"
    model.compile(optimizer, loss="mae", jit_compile=jit_compile)
    theirs = []
    for overflow in overflows[:, 0]:
        theirs.append(float(optimizer.dynamic_scale))
        x = np.full((1, 1), np.inf if overflow else 1.0, "float32")
        model.train_on_batch(x, np.zeros((1, 1), "float32"))
    rule = preset("keras", growth_interval=growth_interval)
    np.testing.assert_array_equal(trace_rule(rule, overflows)[:, 0], theirs)
    assert theirs[-1] != 2.0**15


def trace_grad_scaler(overflows, initial_scale=2.0**16, **arguments):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, **arguments)
    scaler.scale(torch.zeros(()))  # Creates the scale.
    scales = []
    for bad in overflows.tolist():
        scales.append(scaler.get_scale())
        weight.grad = torch.tensor([np.inf if bad else 1.0])
        scaler.step(optimizer)
        scaler.update()
    return scales


def trace_grad_scalers(overflows, arguments):
    return np.float32(
        [trace_grad_scaler(column, **arguments) for column in overflows.T]
    ).T


# All factors are float32 numbers: exactly equal.
@pytest.mark.one_backend
@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_interval": 1},
        {"growth_interval": 5, "growth_factor": 1.5, "backoff_factor": 0.75},
        {"growth_interval": 20, "initial_scale": 2.0**120},
        {},
    ],
    ids=str,
)
def test_the_real_grad_scaler(arguments):
    if arguments:
        overflows = random_overflows(np.random.default_rng(11), 40, 64)
    else:
        overflows = np.arange(4100)[:, None] == 50
    ours = trace_rule(preset("torch", **arguments), overflows)
    theirs = trace_grad_scalers(overflows, arguments)
    np.testing.assert_array_equal(ours, theirs)
    assert arguments or ours[-1] == 2.0**17
