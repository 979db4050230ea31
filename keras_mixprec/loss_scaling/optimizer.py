"""The loss scale optimizer."""

import copy
from collections.abc import Iterable
from typing import Any, Self

import keras

from keras_mixprec.backend import active
from keras_mixprec.keras_internals import (
    no_automatic_dependency_tracking,
    updated_variables,
)
from keras_mixprec.loss_scaling.checked_gradients import (
    AccumulationWindow,
    CheckedGradients,
    checked_variables,
    commit_together,
)
from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.history import HYSTERESIS, STEPS, StepHistory
from keras_mixprec.loss_scaling.rules import LossScaleState, safe_scale
from keras_mixprec.loss_scaling.saving import SavesOnce
from keras_mixprec.loss_scaling.scaling import ScalesByHand, StepStages
from keras_mixprec.loss_scaling.step_report import ReportsSteps
from keras_mixprec.loss_scaling.wrapper import (
    DelegatesToInner,
    build_inner,
    check_constants,
    check_inner,
    check_window,
    resolve_rule,
)


@keras.saving.register_keras_serializable("keras_mixprec")
class LossScaleOptimizer(
    DelegatesToInner,
    ReportsSteps,
    SavesOnce,
    ScalesByHand,
    keras.optimizers.LossScaleOptimizer,
):
    """Scales the loss, so that float16 gradients survive, and skips steps.

    A drop-in for `keras.optimizers.LossScaleOptimizer`, and a subclass of it.
    Each step multiplies the loss by the loss scale, divides the gradients by
    it in float32, and hands them to `inner_optimizer` only if all of them are
    finite on every replica, after unscaling. The scale follows an update rule
    that can neither reach zero nor infinity. The step itself counts what it
    skipped and why.

    A `.keras` file of a model that is compiled with it names this class: a
    process that loads it has to `import keras_mixprec` first, or to load it by
    `keras.saving.load_model(path, compile=False)`.

    Args:
        inner_optimizer: `keras.optimizers.Optimizer`, or its name. Its own
            arguments (`clipnorm`, `use_ema`, `weight_decay`, ...) stay with
            it and see unscaled gradients.
        loss_scale: `"dynamic"`, a number for a fixed scale, a
            `keras.optimizers.schedules.LearningRateSchedule` or a table
            `{step: scale}` over attempted steps, or a `DynamicLossScale`,
            `FixedLossScale` or `ScheduledLossScale`. Defaults to `"dynamic"`,
            which is `DynamicLossScale()`.
        initial_scale: Float. As in Keras: the first scale of a dynamic loss
            scale. Defaults to `2.0**15`.
        dynamic_growth_steps: Int. As in Keras: finite steps in a row before
            the scale doubles. Defaults to `2000`.
        discard_window: Boolean. With `gradient_accumulation_steps` of the inner
            optimizer, whether an overflow discards all micro-batches of its
            window, as other systems do, and the update with them. If not, it
            discards its own micro-batch and the window ends one later, as in
            Keras. The loss scale moves with each micro-batch all the same.
            Defaults to `False`.
        name: String. Name of the optimizer.
        **kwargs: `dynamic=False` fixes the scale at `initial_scale`, as in
            Keras 2. Other arguments of Keras' optimizers are refused with the
            advice to set them on `inner_optimizer`.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer, or `loss_scale`
            none of the above.
        ValueError: If `inner_optimizer` is a loss scale optimizer already, or
            an argument is outside its range or contradicts another.

    Example:
    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    >>> weight = keras.Variable([1.0, 2.0])
    >>> optimizer.build([weight])
    >>> gradient = np.array([np.inf, 1.0], "float32") * 2.0**15
    >>> optimizer.apply([keras.ops.convert_to_tensor(gradient)])
    >>> optimizer.skipped_steps, float(optimizer.loss_scale)
    (1, 16384.0)
    >>> keras.ops.convert_to_numpy(weight.value).tolist()
    [1.0, 2.0]

    References:
        - [Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict,
        loss_scale: Any = "dynamic",
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        discard_window: bool = False,
        **kwargs: Any,
    ):
        inner_optimizer = check_inner(inner_optimizer)
        check_window(discard_window, inner_optimizer)
        rule = resolve_rule(
            loss_scale,
            initial_scale,
            dynamic_growth_steps,
            kwargs.pop("dynamic", True),
        )
        super().__init__(inner_optimizer, name=name, **kwargs)
        self.rule = rule
        self.initial_scale = self._initial_scale()
        self.history = StepHistory()
        self._stages = StepStages()
        self._scale_variable: Any = None
        self._growth_variable: Any = None
        self.window = (
            AccumulationWindow(inner_optimizer, self.history)
            if discard_window
            else None
        )

    # Without it Keras would count the model's variables as the optimizer's.
    @no_automatic_dependency_tracking
    def build(self, var_list: list, shared: Any = None) -> None:
        """Creates the variables for a list of trainable variables.

        Args:
            var_list: List of variables.
            shared: `keras.optimizers.LossScaleOptimizer` whose scale and step
                counter to use instead of new ones. Defaults to `None`.

        Raises:
            ValueError: If an epsilon of the inner optimizer is 0 in the dtype
                of a variable, or `beta_2` is 1, which would make weights NaN
                or move none.
        """
        if self.built:
            return
        self._check_update(var_list)
        self._trainable_variables = list(var_list)
        self._trainable_variables_indices = {
            self._var_key(v): i for i, v in enumerate(var_list)
        }
        state = self.rule.initial_state()
        if shared is not None:
            self.step_counter = shared.step_counter
            self._scale_variable = shared.dynamic_scale
            self._track_variable(self.step_counter)
            self._track_variable(self._scale_variable)
        else:
            self.step_counter = self._add_state(
                "step_counter", (), "int", int(state.good_steps)
            )
            self._scale_variable = self._add_state(
                "dynamic_scale", (), "float32", self._initial_scale()
            )
        if isinstance(self.rule, DynamicLossScale):
            # A compiled step reads it, so that it can be set later.
            self._growth_variable = self._add_state(
                "growth_interval", (), "int", self.rule.growth_interval
            )
        paths = [getattr(v, "path", v.name) for v in var_list]
        with active.step().outside_graph():
            windows = self.window is not None
            self.history.build(self._add_state, paths, state, windows)
        build_inner(self.inner_optimizer, var_list)
        self.built = True
        if self._unread_state is not None:
            with active.step().outside_graph():
                self.load_own_variables(self._unread_state)

    def _check_update(self, variables):
        check_constants(self.inner_optimizer, variables)

    def _add_state(self, name, shape, dtype, value=0):
        return self.add_variable(
            shape=shape,
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            aggregation="only_first_replica",
            name=name,
        )

    def _initial_scale(self):
        scale = self.rule.initial_state().scale
        return float(safe_scale(scale, scale))

    @property
    def variables(self) -> list:
        """The wrapper's variables, then those of the inner optimizer."""
        return self._variables + self.inner_optimizer.variables

    @property
    def counters(self) -> list:
        """The wrapper's own variables: loss scale, counters, history."""
        return list(self._variables)

    def apply(
        self, grads: list, trainable_variables: list | None = None
    ) -> None:
        """Updates the variables with scaled gradients, or skips the step.

        Args:
            grads: List of gradients of the scaled loss, one per variable;
                `None` where a variable has none.
            trainable_variables: List of variables. Defaults to those that the
                optimizer was built with.

        Raises:
            ValueError: If there is no gradient at all, or there are not as
                many gradients as variables.
        """
        if len(grads):
            commit_together([self._check_gradients(grads, trainable_variables)])

    def apply_gradients(self, grads_and_vars: Iterable) -> Any:
        """Updates variables from `(gradient, variable)` pairs.

        Returns:
            The inner optimizer's `iterations`, which skipped steps leave
            where they are.
        """
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def stateless_apply(
        self,
        optimizer_variables: list,
        grads: list,
        trainable_variables: list,
    ) -> tuple[list, list]:
        """The stateless form of `apply`, for custom loops on JAX.

        Args:
            optimizer_variables: List of tensors, values of `self.variables`.
            grads: List of gradients of the scaled loss.
            trainable_variables: List of tensors, values of the variables that
                the optimizer was built with.

        Returns:
            Tuple of the new `trainable_variables` and `optimizer_variables`.
        """
        return keras.optimizers.Optimizer.stateless_apply(
            self, optimizer_variables, grads, trainable_variables
        )

    @staticmethod
    def apply_together(*steps: tuple) -> None:
        """Applies several optimizers if all gradients of all are finite.

        For models with several optimizers, such as a GAN: one overflow skips
        the step of every one of them. Optimizers with equal rules that are
        only applied together keep equal scales, so they share one.

        Args:
            *steps: Tuples `(optimizer, grads, trainable_variables)`, as for
                `apply`.
        """
        commit_together([o._check_gradients(g, v) for o, g, v in steps])

    @staticmethod
    def stateless_apply_together(*steps: tuple) -> list:
        """The stateless form of `apply_together`, for loops on JAX.

        Args:
            *steps: Tuples `(optimizer, optimizer_variables, grads,
                trainable_variables)`, as for `stateless_apply`.

        Returns:
            List of tuples of the new `trainable_variables` and
            `optimizer_variables`, in the order of `steps`.
        """
        mapping = []
        for optimizer, own, _, weights in steps:
            mapping += zip(optimizer.variables, own, strict=True)
            mapping += zip(updated_variables(optimizer), weights, strict=True)
        with keras.StatelessScope(state_mapping=mapping) as scope:
            LossScaleOptimizer.apply_together(
                *((o, g, updated_variables(o)) for o, _, g, _ in steps)
            )
        return [
            tuple(
                [scope.get_current_value(v) for v in variables]
                for variables in (updated_variables(o), o.variables)
            )
            for o, *_ in steps
        ]

    def _check_gradients(self, grads, variables):
        grads = list(grads)
        variables = self._check_variables(grads, variables)
        if self.inner_optimizer.loss_scale_factor is not None:
            raise ValueError(
                "The inner optimizer scales the loss as well, so gradients "
                "would be divided twice. Set its `loss_scale_factor` to None. "
                "Received: loss_scale_factor="
                f"{self.inner_optimizer.loss_scale_factor!r}"
            )
        self._check_loss_was_scaled()
        scale = active.step().value(self._scale_variable)
        unscaled = self._stages.take(grads, scale)
        return CheckedGradients(self, grads, variables, scale, unscaled)

    def _check_variables(self, grads, variables):
        if variables is None and self.built:
            variables = self._trainable_variables
        variables = checked_variables(grads, variables)
        self.build(variables)
        self._check_variables_are_known(variables)
        return variables

    def _advance(self, finite, norms):
        """Moves the scale on and records the step."""
        step, rule = active.step(), self.rule
        on_host = isinstance(finite, bool)
        get = step.read if on_host else step.value
        counts = get(self.history.counts)
        before = LossScaleState(
            scale=get(self._scale_variable),
            good_steps=get(self.step_counter),
            hysteresis_left=counts[HYSTERESIS],
            pending_scale=get(self.history.pending_scale),
            steps=counts[STEPS],
        )
        if self._growth_variable is not None and not on_host:
            rule = copy.copy(rule)
            rule.growth_interval = get(self._growth_variable)
        after = rule.next_state(before, finite)
        self.history.record(finite, norms, counts, before, after)
        self.step_counter.assign(after.good_steps)
        self._scale_variable.assign(after.scale)

    @property
    def dynamic_scale(self) -> keras.Variable:
        """The variable that holds the loss scale, as in Keras."""
        self._may_scale()
        return self._scale_variable

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The growth interval of a dynamic loss scale, `None` of others."""
        return getattr(self.rule, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int | None) -> None:
        if "rule" not in vars(self):
            return
        if not isinstance(self.rule, DynamicLossScale):
            raise ValueError(
                "`dynamic_growth_steps` belongs to a dynamic loss scale. "
                f"Received: dynamic_growth_steps={value!r} for {self.rule!r}"
            )
        self.rule = self.rule.with_arguments(growth_interval=value)
        if self._growth_variable is not None:
            self._growth_variable.assign(self.rule.growth_interval)

    def get_config(self) -> dict:
        """Returns the configuration.

        It is that of Keras' optimizer where that can express it, so that
        Keras' own class can be created from it.
        """
        rule = self.rule
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **({"discard_window": True} if self.window else {}),
        }
        # Keras' class knows no "auto".
        known = getattr(rule, "initial_scale", "auto") != "auto"
        if type(rule) is DynamicLossScale and known:
            plain = DynamicLossScale(
                initial_scale=rule.initial_scale,
                growth_interval=rule.growth_interval,
            )
            if rule == plain:
                return config | {
                    "initial_scale": rule.initial_scale,
                    "dynamic_growth_steps": rule.growth_interval,
                }
        return config | {
            "loss_scale": keras.saving.serialize_keras_object(rule)
        }

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: dict | None = None
    ) -> Self:
        """Creates the optimizer from what `get_config` returned."""
        config = dict(config)
        for key in ("inner_optimizer", "loss_scale"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        return cls(**config)
