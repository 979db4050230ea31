"""Every preset gives the scales of the system it is named after."""

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
from keras_mixprec.loss_scaling.presets import PRESETS

OURS = ("initial_scale", "growth_factor", "backoff_factor", "growth_interval")
CONSECUTIVE = {"hysteresis_refill": "good_step"}
DEEPSPEED = {
    "initial_scale": "init_scale",
    "growth_interval": "scale_window",
    "hysteresis": "delayed_shift",
    "min_scale": "min_scale",
}
KERAS = {
    "initial_scale": "initial_scale",
    "growth_interval": "dynamic_growth_steps",
}
TORCH = dict(
    zip(
        OURS,
        ("init_scale", "growth_factor", "backoff_factor", "growth_interval"),
        strict=True,
    )
)
# preset, its fixed overrides, the peer, our argument's name -> the peer's.
CASES = {
    "torch": ("torch", {}, peer_scalers.torch, TORCH),
    "apex-hysteresis-kernel": (
        "torch",
        CONSECUTIVE,
        peer_scalers.apex_hysteresis_kernel,
        TORCH | {"hysteresis": "hysteresis"},
    ),
    "keras": ("keras", {}, peer_scalers.keras, KERAS),
    "tf-keras": ("tf-keras", {}, peer_scalers.tf_keras, KERAS),
    "apex": (
        "apex",
        {},
        peer_scalers.apex,
        {
            "initial_scale": "init_scale",
            "growth_interval": "scale_window",
            "min_scale": "min_loss_scale",
            "max_scale": "max_loss_scale",
        },
    ),
    "deepspeed": ("deepspeed", {}, peer_scalers.deepspeed, DEEPSPEED),
    "deepspeed-consecutive": (
        "deepspeed",
        CONSECUTIVE,
        functools.partial(peer_scalers.deepspeed, consecutive_hysteresis=True),
        DEEPSPEED,
    ),
    "megatron": (
        "megatron",
        {},
        peer_scalers.megatron,
        {name: name for name in (*OURS, "hysteresis", "min_scale")},
    ),
    "paddle": (
        "paddle",
        {},
        peer_scalers.paddle,
        {
            "initial_scale": "init_loss_scaling",
            "growth_factor": "incr_ratio",
            "backoff_factor": "decr_ratio",
            "growth_interval": "incr_every_n_steps",
            "hysteresis": "decr_every_n_nan_or_inf",
        },
    ),
    "jmp": (
        "jmp",
        {},
        peer_scalers.jmp,
        {
            "initial_scale": "loss_scale",
            "growth_interval": "period",
            "min_scale": "min_loss_scale",
        },
    ),
    "mxnet": (
        "mxnet",
        {},
        peer_scalers.mxnet,
        {
            "initial_scale": "init_scale",
            "growth_interval": "scale_seq_len",
            "max_scale": "max_loss_scale",
        },
    ),
}
# Factors that float32 holds: the others are in test_loss_scale_torch_peer.py.
CHOICES = {
    "initial_scale": (1.0, 1000.0, 2.0**15, 2.0**24),
    "growth_factor": (2.0, 1.5, 4.0),
    "backoff_factor": (0.5, 0.75, 0.25),
    "growth_interval": tuple(range(1, 21)),
    "hysteresis": (1, 2, 3, 4),
    "min_scale": (2.0**-10, 1.0),
    "max_scale": (2.0**24, 2.0**30),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def pick_arguments(rng, names):
    return {name: rng.choice(CHOICES[name]).item() for name in names}


def assert_same_scales(case, arguments, overflows):
    preset, fixed, peer, names = case
    rule = DynamicLossScale.preset(preset, **fixed, **arguments)
    renamed = {names[name]: value for name, value in arguments.items()}
    make = functools.partial(peer, **renamed)
    theirs, ours = trace_peer(make, overflows), trace_rule(rule, overflows)
    marks = comparable(theirs, make)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours[marks], theirs[marks], f"{arguments}")
    assert marks.mean() > 0.2, "too few steps compared"


def test_every_preset_has_a_case():
    assert {preset for preset, *_ in CASES.values()} == set(PRESETS)


@each_case
def test_random_overflows(case):
    rng = np.random.default_rng(7)
    for _ in range(20):  # 20 x 64 = 1280 sequences.
        overflows = random_overflows(rng, rng.integers(20, 401), 64)
        arguments = pick_arguments(rng, case[-1])
        assert_same_scales(case, arguments, overflows)


@each_case
def test_rare_overflows_with_the_peers_own_arguments(case):
    overflows = np.random.default_rng(3).random((4500, 3)) < 1 / 1500
    overflows[:, 0] = False
    assert_same_scales(case, {}, overflows)


@each_case
def test_defaults_are_the_peers(case):
    preset, fixed, peer, names = case
    rule = DynamicLossScale.preset(preset, **fixed)
    parameters = inspect.signature(peer).parameters
    for ours, theirs in names.items():
        assert getattr(rule, ours) == parameters[theirs].default, ours
    assert (rule.growth_factor, rule.backoff_factor) == (2.0, 0.5)


def trace_keras_optimizer(overflows, growth_interval):
    """Returns the scales of Keras' own optimizer; a step of inf overflows."""
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), dense])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), dynamic_growth_steps=growth_interval
    )
    optimizer.build(model.trainable_variables)
    # On JAX Keras' optimizer only works inside a compiled step.
    jit_compile = keras.backend.backend() == "jax"
    model.compile(optimizer, loss="mae", jit_compile=jit_compile)
    scales = []
    for overflow in overflows:
        scales.append(float(optimizer.dynamic_scale))
        x = np.full((1, 1), np.inf if overflow else 1.0, "float32")
        model.train_on_batch(x, np.zeros((1, 1), "float32"))
    return scales


@pytest.mark.parametrize("growth_interval", [1, 3])
def test_keras_preset_equals_the_real_optimizer(growth_interval):
    overflows = np.random.default_rng(1).random((80, 1)) < 0.3
    rule = DynamicLossScale.preset("keras", growth_interval=growth_interval)
    theirs = trace_keras_optimizer(overflows[:, 0], growth_interval)
    np.testing.assert_array_equal(trace_rule(rule, overflows)[:, 0], theirs)
    assert theirs[-1] != 2.0**15
