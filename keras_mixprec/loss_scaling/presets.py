"""The rules of other systems, as arguments of ours and what those cannot say.

Defaults and update order were read in each system's source: torch
`torch/amp/grad_scaler.py`, Keras 3 and tf-keras `loss_scale_optimizer.py`,
Apex `apex/amp/scaler.py`, DeepSpeed `runtime/fp16/loss_scaler.py`
(`DynamicLossScaler`, as ZeRO uses it), Megatron-LM `optimizer/grad_scaler.py`,
Paddle `amp/grad_scaler.py` (dygraph), jmp `loss_scale.py`, MXNet
`amp/loss_scaler.py`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quirks:
    """What a system does that no argument of `DynamicLossScale` expresses.

    Attributes:
        extra_good_steps: Good steps needed on top of `growth_interval` at the
            start and after an overflow (DeepSpeed counts them from 0).
        grows_to_infinity: Growth is not held at the largest finite scale.
        refills_on_backoff: A backoff gives the tolerated steps back, so that
            every backoff needs `hysteresis` overflows (Paddle).
        publishes_late: A new scale is used one step after it was decided.
    """

    extra_good_steps: int = 0
    grows_to_infinity: bool = False
    refills_on_backoff: bool = False
    publishes_late: bool = False


def _system(quirks=None, **arguments):
    unbounded = {"min_scale": None, "max_scale": None}
    return {**unbounded, **arguments}, quirks or Quirks()


PRESETS = {
    "torch": _system(initial_scale=2.0**16),
    "keras": _system(Quirks(grows_to_infinity=True), initial_scale=2.0**15),
    "tf-keras": _system(initial_scale=2.0**15, min_scale=1.0),
    "apex": _system(initial_scale=2.0**16, max_scale=2.0**24),
    "deepspeed": _system(
        Quirks(extra_good_steps=1, grows_to_infinity=True),
        initial_scale=2.0**16,
        growth_interval=1000,
        hysteresis=2,
        min_scale=1.0,
    ),
    "megatron": _system(
        Quirks(grows_to_infinity=True),
        initial_scale=2.0**32,
        growth_interval=1000,
        hysteresis=2,
        min_scale=1.0,
    ),
    "paddle": _system(
        Quirks(
            grows_to_infinity=True,
            refills_on_backoff=True,
        ),
        initial_scale=2.0**16,
        hysteresis_refill="good_step",
    ),
    "jmp": _system(initial_scale=2.0**15, min_scale=1.0),
    "mxnet": _system(
        Quirks(publishes_late=True),
        initial_scale=2.0**16,
        max_scale=2.0**24,
    ),
}
