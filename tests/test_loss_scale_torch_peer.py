"""`DynamicLossScale.preset("torch")` against the real `GradScaler`."""

import numpy as np
import pytest
from loss_scale_traces import batch_of_states, random_overflows, trace_rule

from keras_mixprec import DynamicLossScale

torch = pytest.importorskip("torch")


def trace_grad_scaler(overflows, initial_scale=2.0**16, **arguments):
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


# 7 x 160 = 1120 sequences. All factors are float32 numbers: exactly equal.
@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_interval": 1},
        {"growth_interval": 2, "growth_factor": 4.0},
        {"growth_interval": 3, "backoff_factor": 0.25},
        {"growth_interval": 5, "growth_factor": 1.5, "backoff_factor": 0.75},
        {"growth_interval": 1, "growth_factor": 2.0**20},
        {"growth_interval": 7, "initial_scale": 1000.0},
        {"growth_interval": 20, "initial_scale": 2.0**120},
    ],
    ids=str,
)
def test_equals_grad_scaler(arguments):
    rng = np.random.default_rng(11)
    overflows = random_overflows(rng, 40, 160)
    ours = trace_rule(DynamicLossScale.preset("torch", **arguments), overflows)
    theirs = trace_grad_scalers(overflows, arguments)
    np.testing.assert_array_equal(ours, theirs)


def test_default_interval():
    overflows = np.zeros((4100, 1), bool)
    overflows[50] = True
    ours = trace_rule(DynamicLossScale.preset("torch"), overflows)
    np.testing.assert_array_equal(ours, trace_grad_scalers(overflows, {}))
    assert ours[-1] == 2.0**17


# torch multiplies by a C++ double and rounds once; a tensor rule multiplies
# by the factor rounded to float32. So one update may differ by one ulp.
@pytest.mark.parametrize("factors", [(1.1, 0.9), (3.3, 0.3)], ids=str)
def test_other_factors_differ_by_an_ulp_at_most(factors):
    growth_factor, backoff_factor = factors
    arguments = {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": 2,
    }
    overflows = random_overflows(np.random.default_rng(5), 60, 40)
    theirs = trace_grad_scalers(overflows, arguments)
    rule = DynamicLossScale.preset("torch", **arguments)
    state = batch_of_states(rule, overflows.shape[1])
    for scale, overflow, after in zip(
        theirs, overflows, theirs[1:], strict=False
    ):
        state = rule.update(state._replace(scale=scale), ~overflow)
        np.testing.assert_array_max_ulp(state.scale, after, maxulp=1)
