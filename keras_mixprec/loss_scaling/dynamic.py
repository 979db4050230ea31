"""The dynamic loss scale and its presets."""

from typing import Any

import keras
import numpy as np

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec.loss_scaling.presets import PRESETS, Quirks
from keras_mixprec.loss_scaling.rules import (
    LossScale,
    LossScaleState,
    check_scale,
    namespace,
)


@keras.saving.register_keras_serializable("keras_mixprec")
class DynamicLossScale(LossScale):
    """Raises the scale while all is well and lowers it on overflow.

    After `growth_interval` finite steps in a row the scale is multiplied by
    `growth_factor`; on a non-finite step, which is skipped, by
    `backoff_factor`. It never leaves `[min_scale, max_scale]`.

    Args:
        initial_scale: Float, dimensionless. Scale of the first step. Too high
            costs one skipped step per halving, too low a growth interval per
            doubling. Defaults to `2.0**15`.
        growth_factor: Float > 1. Defaults to `2.0`; powers of two make
            scaling and unscaling exact.
        backoff_factor: Float in (0, 1). Defaults to `0.5`.
        growth_interval: Int >= 1. Consecutive finite steps before the scale
            grows. Defaults to `2000`.
        hysteresis: Int >= 1. Non-finite steps before the scale backs off; the
            earlier ones are skipped at an unchanged scale. Defaults to `1`,
            which backs off at once.
        hysteresis_refill: `"growth"` or `"good_step"`. What gives the
            tolerated steps back: the next growth (DeepSpeed, Megatron) or any
            finite step (DeepSpeed's `consecutive_hysteresis`, Apex). Defaults
            to `"growth"`.
        min_scale: Float or `None`. Floor. Defaults to `2.0**-14`, float16's
            smallest normal: a gradient that still overflows float16 there is
            above 1e9 and no scale will help. `None` sets no floor of the
            rule's own.
        max_scale: Float or `None`. Ceiling. Defaults to `2.0**32`, the
            highest start any system uses. `None` sets no ceiling of the
            rule's own; growth to infinity is refused all the same.

    Whatever a rule says, `LossScaleOptimizer` keeps the scale in use between
    `2.0**-126` and `2.0**126`, where it and its reciprocal are normal float32
    numbers.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is outside its range, or `min_scale`,
            `initial_scale` and `max_scale` are not in that order.

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
        self.growth_factor = check_number("growth_factor", growth_factor, low=1)
        if np.float32(self.growth_factor) == 1:
            raise ValueError(
                "`growth_factor` must be greater than 1 in float32; use "
                "`FixedLossScale` for a scale that does not grow. "
                f"Received: growth_factor={growth_factor!r}"
            )
        self.backoff_factor = check_number(
            "backoff_factor", backoff_factor, low=0, high=1
        )
        if np.float32(self.backoff_factor) in (0, 1):
            raise ValueError(
                "`backoff_factor` must lie strictly between 0 and 1 in "
                f"float32. Received: backoff_factor={backoff_factor!r}"
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
        self._follows: str | None = None
        self._quirks = Quirks()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "DynamicLossScale":
        """Returns the rule that another system follows, step for step.

        Args:
            name: String. `"torch"`, `"keras"`, `"tf-keras"`, `"apex"`,
                `"deepspeed"`, `"megatron"`, `"paddle"`, `"jmp"` or `"mxnet"`.
            **overrides: Arguments of `DynamicLossScale` that replace that
                system's defaults.

        Returns:
            A `DynamicLossScale`. Its trace equals the system's while the
            scale is a normal float32 number.

        Raises:
            ValueError: If there is no such preset.
            TypeError: If an override is not an argument of this class.

        Example:
        >>> DynamicLossScale.preset("deepspeed", hysteresis=3).min_scale
        1.0
        """
        check_choice("name", name, tuple(PRESETS))
        arguments, quirks = PRESETS[name]
        unknown = set(overrides) - set(_dynamic_arguments())
        if unknown:
            raise TypeError(
                "`DynamicLossScale.preset` does not know the argument(s) "
                f"{sorted(unknown)}; it takes {_dynamic_arguments()}. "
                f"Received: {overrides}"
            )
        rule = cls(**{**arguments, **overrides})
        rule._follows, rule._quirks = name, quirks
        return rule

    def with_arguments(self, **arguments: Any) -> "DynamicLossScale":
        """Returns this rule with some arguments replaced."""
        return type(self).from_config(self.get_config() | arguments)

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; see `LossScale.update`."""
        xp = namespace(state.scale)
        quirks = self._quirks
        bad = xp.logical_not(finite)
        good_steps = state.good_steps + 1
        # `>=`, not `==`: a restored counter may be past a lowered interval.
        grows = xp.logical_and(finite, good_steps >= self.growth_interval)
        backs_off = xp.logical_and(bad, state.hysteresis_left <= 1)
        current = state.pending_scale if quirks.publishes_late else state.scale
        scale = xp.where(
            grows,
            self._grown(xp, current),
            xp.where(backs_off, self._backed_off(xp, current), current),
        )
        start, full = self._initial_counts()
        good_steps = xp.where(bad, start, xp.where(grows, 0, good_steps))
        refills = grows if self.hysteresis_refill == "growth" else finite
        if quirks.refills_on_backoff:
            refills = xp.logical_or(refills, backs_off)
        left = xp.where(bad, state.hysteresis_left - 1, state.hysteresis_left)
        left = xp.where(refills, full, xp.maximum(left, 1))
        published = current if quirks.publishes_late else scale
        return LossScaleState(
            published, good_steps, left, scale, state.steps + 1
        )

    def _grown(self, xp, scale):
        with np.errstate(over="ignore"):
            grown = scale * self.growth_factor
        if self.max_scale is not None:
            return xp.minimum(grown, self.max_scale)
        if self._quirks.grows_to_infinity:
            return grown
        return xp.where(xp.isfinite(grown), grown, scale)

    def _backed_off(self, xp, scale):
        with np.errstate(under="ignore"):
            lower = scale * self.backoff_factor
        return (
            lower
            if self.min_scale is None
            else xp.maximum(lower, self.min_scale)
        )

    def _initial_scale(self):
        return self.initial_scale

    def _initial_counts(self):
        return -self._quirks.extra_good_steps, self.hysteresis

    def get_config(self) -> dict:
        """Returns the arguments, and the preset they belong to if any."""
        config = {name: getattr(self, name) for name in _dynamic_arguments()}
        return config | ({"preset": self._follows} if self._follows else {})

    @classmethod
    def from_config(cls, config: dict) -> "DynamicLossScale":
        """Creates the rule from what `get_config` returned."""
        config = dict(config)
        name = config.pop("preset", None)
        return cls.preset(name, **config) if name else cls(**config)


def _dynamic_arguments():
    code = DynamicLossScale.__init__.__code__
    return list(code.co_varnames[1 : code.co_argcount])
