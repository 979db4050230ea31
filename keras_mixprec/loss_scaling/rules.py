"""Update rules for the loss scale, as pure functions of a state.

A rule owns no variables. `update` takes the state of a step, and a boolean that
is true if the step's gradients were finite. It returns the state of the next
step. `update` is elementwise, so it also accepts a batch of states. It works on
NumPy values, and on tensors of any backend inside a compiled train step.
"""

from typing import Any, NamedTuple, Self

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import (
    check_choice,
    check_integer,
    check_number,
    check_type,
)

# A scale and its reciprocal must both be normal float32 numbers. Otherwise a
# backend that flushes subnormals would unscale every gradient to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

_NORMAL = "the scale and its reciprocal must be normal float32 numbers"


class LossScaleState(NamedTuple):
    """The state of an update rule between two steps.

    Attributes:
        scale: float32. The loss scale of the next step.
        good_steps: int. Number of finite steps since the last scale change or
            skipped step. DeepSpeed's rule starts at -1.
        hysteresis_left: int >= 1. Number of non-finite steps until the next
            backoff.
        pending_scale: float32. The next scale of a rule that applies a new
            scale one step late (MXNet). In all other rules, equal to `scale`.
        steps: int. Number of attempted steps, including skipped ones.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any
    pending_scale: Any
    steps: Any


class LossScale:
    """Base class of the update rules."""

    # True if the rule applies a new scale one step late.
    publishes_late = False
    # The initial values of `scale`, `good_steps` and `hysteresis_left`.
    _first: tuple[Any, int, int]

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, as NumPy scalars."""
        scale, good_steps, left = self._first
        scale = np.float32(scale)
        return LossScaleState(
            scale, np.int32(good_steps), np.int32(left), scale, np.int32(0)
        )

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step.

        Args:
            state: The `LossScaleState` of the step.
            finite: Boolean, a scalar or an array in the state's shape. True if
                every gradient of the step was finite on every replica.

        Returns:
            A new `LossScaleState`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `update(state, finite)`."
        )

    def next_state(self, state: LossScaleState, finite) -> LossScaleState:
        """Returns the result of `update`, with its scale in a safe range."""
        after = self.update(state, finite)
        return after._replace(scale=safe_scale(after.scale, state.scale))

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Creates the rule from its configuration."""
        return cls(**config)

    def __eq__(self, other):
        return (
            type(self) is type(other)
            and self.get_config() == other.get_config()
        )

    def __hash__(self):
        return hash((type(self), repr(self.get_config())))

    def __repr__(self):
        arguments = [f"{k}={v!r}" for k, v in self.get_config().items()]
        return f"{type(self).__name__}({', '.join(arguments)})"


def namespace(value):
    """Returns NumPy for host values, `keras.ops` for tensors and variables."""
    host = isinstance(value, (np.generic, np.ndarray, int, float))
    return np if host else ops


def safe_scale(scale, previous):
    """Clips a scale to the range in which gradients can be unscaled."""
    xp = namespace(previous)
    scale = xp.where(xp.isnan(scale), previous, scale)
    return xp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)


def check_scale(name, value, optional=False):
    """Returns a scale as a float, or raises if it is out of range."""
    if optional and value is None:
        return None
    return check_number(
        name, value, low=SMALLEST_SCALE, high=LARGEST_SCALE, why=_NORMAL
    )


_UNBOUNDED = {"min_scale": None, "max_scale": None}

# Arguments and class attributes of `DynamicLossScale` for each preset. Defaults
# and update order come from each system's source: torch
# `torch/amp/grad_scaler.py`, Keras 3 and tf-keras `loss_scale_optimizer.py`,
# Apex `apex/amp/scaler.py`, DeepSpeed `runtime/fp16/loss_scaler.py`
# (`DynamicLossScaler`, as ZeRO uses it), Megatron-LM
# `optimizer/grad_scaler.py`, Paddle `amp/grad_scaler.py` (dygraph), jmp
# `loss_scale.py`, MXNet `amp/loss_scaler.py`.
PRESETS: dict[str, dict] = {
    "torch": {"initial_scale": 2.0**16},
    "keras": {"initial_scale": 2.0**15, "grows_to_infinity": True},
    "tf-keras": {"initial_scale": 2.0**15, "min_scale": 1.0},
    "apex": {"initial_scale": 2.0**16, "max_scale": 2.0**24},
    "deepspeed": {
        "initial_scale": 2.0**16,
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1.0,
        "extra_good_steps": 1,
        "grows_to_infinity": True,
    },
    "megatron": {
        "initial_scale": 2.0**32,
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1.0,
        "grows_to_infinity": True,
    },
    "paddle": {
        "initial_scale": 2.0**16,
        "hysteresis_refill": "good_step",
        "grows_to_infinity": True,
        "refills_on_backoff": True,
    },
    "jmp": {"initial_scale": 2.0**15, "min_scale": 1.0},
    "mxnet": {
        "initial_scale": 2.0**16,
        "max_scale": 2.0**24,
        "publishes_late": True,
    },
}


@keras.saving.register_keras_serializable("keras_mixprec")
class DynamicLossScale(LossScale):
    """Raises the scale after finite steps and lowers it on overflow.

    After `growth_interval` finite steps in a row, the scale is multiplied by
    `growth_factor`. A non-finite step is skipped, and then the scale is
    multiplied by `backoff_factor`. The scale never leaves `[min_scale,
    max_scale]`.

    Args:
        initial_scale: Float. Scale of the first step. From a scale that is too
            high, each halving costs one skipped step. From a scale that is too
            low, each doubling takes one growth interval. Defaults to `2.0**15`.
        growth_factor: Float > 1. Powers of two make scaling and unscaling
            exact. Defaults to `2.0`.
        backoff_factor: Float in (0, 1). Defaults to `0.5`.
        growth_interval: Int >= 1. Number of finite steps in a row before the
            scale grows. Defaults to `2000`.
        hysteresis: Int >= 1. Number of non-finite steps until the scale backs
            off. Earlier non-finite steps are skipped, but leave the scale
            unchanged. Defaults to `1`, which backs off immediately.
        hysteresis_refill: `"growth"` or `"good_step"`. The event that resets
            the hysteresis: the next growth (DeepSpeed, Megatron) or any finite
            step (DeepSpeed's `consecutive_hysteresis`, Apex). Defaults to
            `"growth"`.
        min_scale: Float or `None`. Lower limit. Defaults to `2.0**-14`,
            float16's smallest normal number. A gradient that overflows float16
            even at this scale exceeds 1e9, and no scale will help. With `None`,
            the rule has no lower limit.
        max_scale: Float or `None`. Upper limit. Defaults to `2.0**32`, the
            highest initial scale of all presets. With `None`, the rule has no
            upper limit, but the scale still does not grow to infinity.

    `LossScaleOptimizer` clips the scale of every rule to `2.0**-126` to
    `2.0**126`. In this range, the scale and its reciprocal are normal float32
    numbers.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range, or not `min_scale <=
            initial_scale <= max_scale`.

    Example:
    >>> rule = DynamicLossScale(initial_scale=8.0, growth_interval=2)
    >>> state = rule.initial_state()
    >>> for finite in (True, True, False):
    ...     state = rule.update(state, finite)
    ...     print(float(state.scale))
    8.0
    16.0
    8.0

    References:
        - [Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)
    """

    # `_follows` is the name of the preset. `extra_good_steps` is the number of
    # finite steps that DeepSpeed needs in addition to `growth_interval`, at the
    # start and after an overflow.
    _follows: str | None = None
    extra_good_steps = 0
    # True if the scale may grow to infinity, as in some presets.
    grows_to_infinity = False
    # True if a backoff resets the hysteresis, so that each backoff takes
    # `hysteresis` overflows (Paddle).
    refills_on_backoff = False

    def __init__(
        self,
        initial_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        hysteresis_refill: str = "growth",
        min_scale: float | None = 2.0**-14,
        max_scale: float | None = 2.0**32,
    ):
        self.initial_scale = check_scale("initial_scale", initial_scale)
        # Reject a factor that float32 rounds to 1, because the scale would
        # never change.
        self.growth_factor = check_number(
            "growth_factor", growth_factor, low=1 + 2.0**-23
        )
        self.backoff_factor = check_number(
            "backoff_factor",
            backoff_factor,
            low=SMALLEST_SCALE,
            high=1 - 2.0**-24,
        )
        self.growth_interval = check_integer(
            "growth_interval", growth_interval, low=1
        )
        self.hysteresis = check_integer("hysteresis", hysteresis, low=1)
        self.hysteresis_refill = check_choice(
            "hysteresis_refill", hysteresis_refill, ("growth", "good_step")
        )
        self.min_scale = check_scale("min_scale", min_scale, optional=True)
        self.max_scale = check_scale("max_scale", max_scale, optional=True)
        low = self.min_scale or 0.0
        high = self.max_scale or np.inf
        if not low <= self.initial_scale <= high:
            raise ValueError(
                "`initial_scale` must lie between `min_scale` and "
                f"`max_scale`. Received: min_scale={min_scale!r}, "
                f"initial_scale={initial_scale!r}, max_scale={max_scale!r}"
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "DynamicLossScale":
        """Returns a rule that follows another system step for step.

        Args:
            name: String. `"torch"`, `"keras"`, `"tf-keras"`, `"apex"`,
                `"deepspeed"`, `"megatron"`, `"paddle"`, `"jmp"` or `"mxnet"`.
            **overrides: Arguments of `DynamicLossScale` that replace the
                system's defaults.

        Returns:
            A `DynamicLossScale`. In every step, its scale equals the scale of
            the other system, if that scale is a normal float32 number.

        Raises:
            ValueError: If `name` is not a preset.
            TypeError: If an override is not an argument of this class.

        Example:
        >>> DynamicLossScale.preset("deepspeed", hysteresis=3).min_scale
        1.0
        """
        check_choice("name", name, tuple(PRESETS))
        unknown = set(overrides) - set(_dynamic_arguments())
        if unknown:
            raise TypeError(
                "`DynamicLossScale.preset` does not have the argument(s) "
                f"{sorted(unknown)}. It takes {_dynamic_arguments()}. "
                f"Received: {overrides}"
            )
        given = _UNBOUNDED | PRESETS[name] | overrides
        quirks = {n: given.pop(n) for n in given.keys() - _dynamic_arguments()}
        rule = cls(**given)
        vars(rule).update(quirks, _follows=name)
        return rule

    def with_arguments(self, **arguments: Any) -> "DynamicLossScale":
        """Returns this rule with some arguments replaced."""
        return type(self).from_config(self.get_config() | arguments)

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        xp = namespace(state.scale)
        late = self.publishes_late
        current = state.pending_scale if late else state.scale
        with np.errstate(over="ignore", under="ignore"):
            grown = current * self.growth_factor
            lower = current * self.backoff_factor
        if self.max_scale is not None:
            grown = xp.minimum(grown, self.max_scale)
        elif not self.grows_to_infinity:
            grown = xp.where(xp.isfinite(grown), grown, current)
        if self.min_scale is not None:
            lower = xp.maximum(lower, self.min_scale)
        bad = xp.logical_not(finite)
        good_steps = state.good_steps + 1
        # Compare with `>=`, because a counter from a file may exceed a growth
        # interval that has since been lowered.
        grows = xp.logical_and(finite, good_steps >= self.growth_interval)
        backs_off = xp.logical_and(bad, state.hysteresis_left <= 1)
        scale = xp.where(grows, grown, xp.where(backs_off, lower, current))
        start = -self.extra_good_steps
        good_steps = xp.where(bad, start, xp.where(grows, 0, good_steps))
        refills = grows if self.hysteresis_refill == "growth" else finite
        if self.refills_on_backoff:
            refills = xp.logical_or(refills, backs_off)
        left = xp.where(bad, state.hysteresis_left - 1, state.hysteresis_left)
        left = xp.where(refills, self.hysteresis, xp.maximum(left, 1))
        published = current if late else scale
        return LossScaleState(
            published, good_steps, left, scale, state.steps + 1
        )

    @property
    def _first(self):
        return self.initial_scale, -self.extra_good_steps, self.hysteresis

    def get_config(self) -> dict:
        """Returns the arguments, and the name of the preset if there is one."""
        config = {name: getattr(self, name) for name in _dynamic_arguments()}
        return config | ({"preset": self._follows} if self._follows else {})

    @classmethod
    def from_config(cls, config: dict) -> "DynamicLossScale":
        """Creates the rule from its configuration."""
        config = dict(config)
        name = config.pop("preset", None)
        return cls.preset(name, **config) if name else cls(**config)


def _dynamic_arguments():
    code = DynamicLossScale.__init__.__code__
    return list(code.co_varnames[1 : code.co_argcount])


@keras.saving.register_keras_serializable("keras_mixprec")
class FixedLossScale(LossScale):
    """Keeps the same scale in every step, even after an overflow.

    Args:
        scale: Float between `2.0**-126` and `2.0**126`. A power of two makes
            scaling exact.

    Raises:
        TypeError: If `scale` is not a number.
        ValueError: If `scale` is out of range.

    Example:
    >>> rule = FixedLossScale(1024.0)
    >>> float(rule.update(rule.initial_state(), finite=False).scale)
    1024.0
    """

    def __init__(self, scale: float):
        self.scale = check_scale("scale", scale)
        self._first = self.scale, 0, 1

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, state.scale, finite)

    def get_config(self) -> dict:
        """Returns the arguments."""
        return {"scale": self.scale}


@keras.saving.register_keras_serializable("keras_mixprec")
class ScheduledLossScale(LossScale):
    """Takes the scale from a schedule over attempted steps.

    The schedule also counts skipped steps. Skipped steps do not advance
    `optimizer.iterations`, so a schedule over iterations would never leave a
    scale that overflows.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            table `{step: scale}`. Each scale of a table applies from its step
            on. A table needs a scale for step 0.

    Raises:
        TypeError: If `schedule` has a different type.
        ValueError: If a table has no step 0, or a step or scale is invalid.

    Example:
    >>> rule = ScheduledLossScale({0: 128.0, 2: 1024.0})
    >>> state = rule.initial_state()
    >>> for _ in range(3):
    ...     print(float(state.scale))
    ...     state = rule.update(state, finite=True)
    128.0
    128.0
    1024.0
    """

    def __init__(self, schedule: Any):
        kinds = dict, keras.optimizers.schedules.LearningRateSchedule
        what = (
            "a `keras.optimizers.schedules.LearningRateSchedule` or a dict of "
            "step -> scale"
        )
        check_type("schedule", schedule, kinds, what)
        if isinstance(schedule, dict):
            schedule = _from_table(schedule)
        self.schedule = schedule
        # Compute the first scale in the constructor, because a schedule has no
        # host value while a step is compiled. `check_scale` rejects an invalid
        # first scale.
        first = check_scale("schedule(0)", self.scale_at(np.int32(0)))
        self._first = first, 0, 1

    def scale_at(self, step: Any) -> Any:
        """Returns the scale of an attempted step, counted from 0."""
        scale = self.schedule(step)
        if namespace(step) is np:
            return np.float32(ops.convert_to_numpy(scale))
        return ops.cast(scale, "float32")

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        return _step_with(state, self.scale_at(state.steps + 1), finite)

    def get_config(self) -> dict:
        """Returns the arguments."""
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Creates the rule from its configuration."""
        return cls(keras.saving.deserialize_keras_object(config["schedule"]))


def _step_with(state, scale, finite):
    """Returns the next state if the scale does not depend on gradients."""
    xp = namespace(state.scale)
    good_steps = xp.where(finite, state.good_steps + 1, 0)
    return LossScaleState(
        scale, good_steps, state.hysteresis_left, scale, state.steps + 1
    )


def _from_table(table):
    table = {
        check_integer("schedule step", step): check_scale(
            f"schedule[{step!r}]", scale
        )
        for step, scale in sorted(table.items())
    }
    if 0 not in table:
        raise ValueError(
            "A `schedule` table needs a scale for step 0. "
            f"Received: schedule={table}"
        )
    # A Keras schedule uses a new value only after the boundary, so each
    # boundary is one step before the step in the table.
    last = [step - 1 for step in table]
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        last, [table[0], *table.values()]
    )


def resolve_rule(loss_scale, initial_scale, growth_steps) -> LossScale:
    """Returns the update rule for the optimizer's arguments."""
    arguments = {
        "initial_scale": initial_scale,
        "growth_interval": growth_steps,
    }
    given = {n: value for n, value in arguments.items() if value is not None}
    if loss_scale == "dynamic":
        return DynamicLossScale(**given)
    if given:
        raise ValueError(
            "`initial_scale` and `dynamic_growth_steps` configure a dynamic "
            "loss scale. Set them only with `loss_scale='dynamic'`. Received: "
            f"loss_scale={loss_scale!r}, initial_scale={initial_scale!r}, "
            f"dynamic_growth_steps={growth_steps!r}"
        )
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str):
        raise ValueError(
            "`loss_scale` must be 'dynamic', a number, a schedule, or a "
            "rule such as `DynamicLossScale.preset('torch')`. "
            f"Received: loss_scale={loss_scale!r}"
        )
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(loss_scale, (dict, schedule)):
        return ScheduledLossScale(loss_scale)
    return FixedLossScale(check_scale("loss_scale", loss_scale))
