"""The update rules of other systems, as generators, to check our presets.

A generator yields the loss scale of the next step, and receives whether that
step overflowed. Names, defaults, the order of the statements and the arithmetic
are those of each system: `f32` if it stores the scale in a float32 tensor,
Python floats if it stores it in Python.
"""

import itertools
import math

from numpy import float32 as f32


def tf_keras(initial_scale=2.0**15, dynamic_growth_steps=2000):
    """Is `tf_keras.mixed_precision.LossScaleOptimizer`; multiplier fixed."""
    current_loss_scale, multiplier, counter = f32(initial_scale), f32(2), 0
    while True:
        overflow = yield current_loss_scale
        if overflow:
            counter = 0
            current_loss_scale = max(current_loss_scale / multiplier, f32(1))
        elif counter + 1 >= dynamic_growth_steps:
            new_loss_scale = current_loss_scale * multiplier
            if math.isfinite(new_loss_scale):
                current_loss_scale = new_loss_scale
            counter = 0
        else:
            counter += 1


def apex(
    init_scale=2.0**16,
    scale_window=2000,
    min_loss_scale=None,
    max_loss_scale=2.0**24,
):
    """Is `apex.amp.scaler.LossScaler`."""
    loss_scale, unskipped = min(max_loss_scale, init_scale), 0
    while True:
        has_overflow = yield loss_scale
        if has_overflow:
            loss_scale = loss_scale / 2.0
            if min_loss_scale:
                loss_scale = max(min_loss_scale, loss_scale)
            unskipped = 0
        else:
            unskipped += 1
        if unskipped == scale_window:
            loss_scale = min(max_loss_scale, loss_scale * 2.0)
            unskipped = 0


def deepspeed(
    init_scale=2.0**16,
    scale_window=1000,
    min_scale=1,
    delayed_shift=2,
    consecutive_hysteresis=False,
):
    """Is ZeRO's `DynamicLossScaler` that does not raise at the floor."""
    cur_scale, cur_hysteresis = init_scale, delayed_shift
    last_overflow_iter = -1
    for cur_iter in itertools.count():
        overflow = yield cur_scale
        if overflow:
            if delayed_shift == 1 or cur_hysteresis == 1:
                cur_scale = max(cur_scale / 2.0, min_scale)
            else:
                cur_hysteresis -= 1
            last_overflow_iter = cur_iter
            continue
        if consecutive_hysteresis:
            cur_hysteresis = delayed_shift
        stable_interval = cur_iter - last_overflow_iter - 1
        if stable_interval > 0 and stable_interval % scale_window == 0:
            if not consecutive_hysteresis:
                cur_hysteresis = delayed_shift
            cur_scale *= 2.0


def megatron(
    initial_scale=2.0**32,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
):
    """Is `DynamicGradScaler`, whose factors are float32 tensors."""
    scale = f32(initial_scale)
    growth_tracker, hysteresis_tracker = 0, hysteresis
    while True:
        found_inf = yield scale
        if found_inf:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * f32(backoff_factor), f32(min_scale))
            continue
        growth_tracker += 1
        if growth_tracker == growth_interval:
            growth_tracker = 0
            hysteresis_tracker = hysteresis
            scale = scale * f32(growth_factor)


def paddle(
    init_loss_scaling=2.0**16,
    incr_ratio=2.0,
    decr_ratio=0.5,
    incr_every_n_steps=2000,
    decr_every_n_nan_or_inf=1,
):
    """Is `paddle.amp.GradScaler` in dynamic-graph mode."""
    scale, incr_count, decr_count = f32(init_loss_scaling), 0, 0
    while True:
        found_inf = yield scale
        if found_inf:
            incr_count = 0
            decr_count += 1
            if decr_count == decr_every_n_nan_or_inf:
                scale = scale * f32(decr_ratio)
                decr_count = 0
        else:
            decr_count = 0
            incr_count += 1
            if incr_count == incr_every_n_steps:
                scale = scale * f32(incr_ratio)
                incr_count = 0


def jmp(loss_scale=2.0**15, period=2000, factor=2, min_loss_scale=1.0):
    """Is `jmp.DynamicLossScale.adjust`; one factor for both ways."""
    loss_scale, counter = f32(loss_scale), 0
    while True:
        overflow = yield loss_scale
        if overflow:
            loss_scale = max(f32(min_loss_scale), loss_scale / f32(factor))
        elif counter == period - 1:
            grown = loss_scale * f32(factor)
            loss_scale = grown if math.isfinite(grown) else loss_scale
        counter = (counter + 1) % period * (not overflow)


def mxnet(init_scale=2.0**16, max_loss_scale=2.0**24, scale_seq_len=2000):
    """Is `mxnet.amp.loss_scaler.LossScaler`, all constants there."""
    loss_scale = next_loss_scale = init_scale
    unskipped = 0
    while True:
        has_overflow = yield loss_scale
        loss_scale = next_loss_scale
        if has_overflow:
            next_loss_scale = loss_scale / 2.0
            unskipped = 0
        else:
            unskipped += 1
        if unskipped == scale_seq_len:
            unskipped = 0
            next_loss_scale = min(max_loss_scale, loss_scale * 2.0)
