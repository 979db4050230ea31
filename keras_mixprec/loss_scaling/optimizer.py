"""The loss scale optimizer."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import check_choice, check_type
from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import (
    updated_variables,
)
from keras_mixprec.loss_scaling.checked_gradients import (
    AccumulationWindow,
    CheckedGradients,
    checked_variables,
    commit_together,
    overflowing,
)
from keras_mixprec.loss_scaling.constants import check_constants
from keras_mixprec.loss_scaling.history import (
    HYSTERESIS,
    STEPS,
    StepHistory,
    copy_store,
)
from keras_mixprec.loss_scaling.rules import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleState,
    check_scale,
    resolve_rule,
    safe_scale,
)
from keras_mixprec.loss_scaling.spikes import SpikeGate
from keras_mixprec.loss_scaling.stages import (
    StepStages,
    as_tensors,
)

# Attributes for which the wrapper and the inner optimizer have separate values.
_OF_BOTH = {"name", "built", "loss_scale_factor"}


@keras.saving.register_keras_serializable("keras_mixprec")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss to avoid underflow, and skips steps that overflow.

    A subclass of `keras.optimizers.LossScaleOptimizer` and a drop-in
    replacement for it. Each step multiplies the loss by the loss scale and
    divides the gradients by the scale in float32. `inner_optimizer` gets the
    gradients only if all of them are finite on every replica. The update rule
    keeps the scale away from zero and infinity. The optimizer counts skipped
    steps and overflows, even in compiled steps.

    A `.keras` file of a model compiled with this optimizer names this class. To
    load the file, `import keras_mixprec` first, or call
    `keras.saving.load_model(path, compile=False)`.

    Args:
        inner_optimizer: `keras.optimizers.Optimizer`, or its name. Its own
            arguments (`clipnorm`, `use_ema`, `weight_decay`, ...) act on
            unscaled gradients.
        loss_scale: `"dynamic"`, a number for a fixed scale, or an update rule:
            `DynamicLossScale`, `FixedLossScale` or `ScheduledLossScale`. A
            table `{step: scale}`, or a
            `keras.optimizers.schedules.LearningRateSchedule`, sets the scale by
            attempted steps. Defaults to `"dynamic"`, which is
            `DynamicLossScale()`.
        initial_scale: Float. The first scale of a dynamic loss scale, as in
            Keras. Defaults to `2.0**15`.
        dynamic_growth_steps: Int. Number of finite steps in a row before a
            dynamic scale doubles, as in Keras. Defaults to `2000`.
        discard_window: Boolean. Applies if `inner_optimizer` has
            `gradient_accumulation_steps`. If `True`, an overflow discards the
            whole accumulation window and its update, as in torch and DeepSpeed.
            If `False`, an overflow discards only its own micro-batch, and the
            window ends one micro-batch later, as in Keras. In both cases each
            micro-batch updates the loss scale. Defaults to `False`.
        name: String. Name of the optimizer.
        **kwargs: Keras rejects other arguments and advises you to set them on
            `inner_optimizer`.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer, or `loss_scale` has
            none of the types above.
        ValueError: If `inner_optimizer` is already a loss scale optimizer, or
            an argument is out of range or contradicts another argument.

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

    built: bool
    # True if this optimizer replaced Keras' own `LossScaleOptimizer`, which
    # must be able to read the saved file.
    _continues_keras_own = False
    # The content of an optimizer file that was loaded before `build`.
    _unread_state: dict | None = None

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
        inner_optimizer = _check_inner(inner_optimizer)
        _check_window(discard_window, inner_optimizer)
        rule = resolve_rule(loss_scale, initial_scale, dynamic_growth_steps)
        super().__init__(inner_optimizer, name=name, **kwargs)
        # Keras copies the inner optimizer's arguments to the wrapper. Delete
        # the copies, which would hide later changes to the inner optimizer.
        for argument in vars(self).keys() & vars(inner_optimizer).keys():
            if not argument.startswith("_") and argument not in _OF_BOTH:
                del self.__dict__[argument]
        self.rule = rule
        self.initial_scale = self._initial_scale()
        self.history = StepHistory()
        self.window = (
            AccumulationWindow(inner_optimizer, self.history)
            if discard_window
            else None
        )
        self.spikes: SpikeGate | None = None
        self._stages = StepStages()
        self._scale_variable: Any = None
        self._growth_variable: Any = None

    @classmethod
    def continuing(
        cls,
        other: keras.optimizers.LossScaleOptimizer,
        rule: LossScale | None = None,
    ) -> Self:
        """Returns an optimizer that takes over from Keras' own.

        The new optimizer shares the inner optimizer, the loss scale and the
        step counter with Keras' optimizer, and is saved in the same format.
        Unlike Keras' optimizer, the new one never reaches a scale of 0 or
        infinity. It also detects non-finite rows of a sparse gradient, and
        non-finite gradients on another replica.

        Args:
            other: `keras.optimizers.LossScaleOptimizer`, built or not.
            rule: `LossScale`. Defaults to the update rule of `other`.
        """
        rule = rule or DynamicLossScale.preset(
            "keras",
            initial_scale=other.initial_scale,
            growth_interval=other.dynamic_growth_steps,
        )
        own = cls(other.inner_optimizer, loss_scale=rule, name=other.name)
        own._continues_keras_own = True
        if other.built:
            own.build(updated_variables(other), shared=other)
            own._repair_scale()
        return own

    def build(self, var_list: list, shared: Any = None) -> None:
        """Creates the variables for a list of trainable variables.

        Args:
            var_list: List of variables.
            shared: `keras.optimizers.LossScaleOptimizer`, whose variables for
                the scale and the step counter this optimizer then uses.
                Defaults to `None`, which creates new variables.

        Raises:
            ValueError: If the dtype of a variable rounds an epsilon of the
                inner optimizer to 0, or `beta_2` to 1. Weights would then
                become NaN or never change.
        """
        if self.built:
            return
        # Do not check the constants of an optimizer that replaces Keras' own,
        # because monitoring must not stop a run that Keras accepts.
        if not self._continues_keras_own:
            check_constants(self.inner_optimizer, var_list)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        # The inner optimizer holds these variables.
        own = {"use_ema": False, "gradient_accumulation_steps": None}
        with patched(self, own):
            keras.optimizers.Optimizer.build(self, var_list)
        state = self.rule.initial_state()
        if shared is not None:
            self.step_counter = shared.step_counter
            self._scale_variable = shared.dynamic_scale
        else:
            self.step_counter = self._add_state(
                "step_counter", (), "int", int(state.good_steps)
            )
            self._scale_variable = self._add_state(
                "dynamic_scale", (), "float32", self._initial_scale()
            )
        if isinstance(self.rule, DynamicLossScale):
            # Store the growth interval in a variable, because later changes to
            # a Python number would not reach a compiled step.
            self._growth_variable = self._add_state(
                "growth_interval", (), "int", self.rule.growth_interval
            )
        paths = [getattr(v, "path", v.name) for v in var_list]
        with active.step().outside_graph():
            self.history.build(self._add_state, paths, state)
            if self._unread_state is not None:
                self.load_own_variables(self._unread_state)

    def _add_state(self, name, shape, dtype, value=0):
        return self.add_variable(
            shape=shape,
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            aggregation="only_first_replica",
            name=name,
        )

    def skip_spikes(self) -> bool:
        """Starts to skip gradient spikes, until `spikes.stop()`.

        Returns:
            `True` if the train step must be recompiled.
        """
        self._check_built("skip_spikes")
        is_new = self.spikes is None
        if self.spikes is None:
            self.spikes = SpikeGate(self._add_state)
        self.spikes.start()
        return is_new

    def _initial_scale(self):
        scale = self.rule.initial_state().scale
        return float(safe_scale(scale, scale))

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"`{method}` needs an optimizer that has been built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )

    @property
    def variables(self) -> list:
        """The wrapper's variables, then the inner optimizer's."""
        return self._variables + self.inner_optimizer.variables

    @property
    def counters(self) -> list:
        """The wrapper's own variables: loss scale, counters, history."""
        return list(self._variables)

    # Methods that scale the loss and unscale gradients before `apply`.

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss in float32, multiplied by the loss scale.

        The loss is cast first, because a float16 loss of 3.0 would overflow at
        a scale of 2**15.
        """
        self._stages.scaling = True
        self._stages.begin()
        return ops.cast(loss, "float32") * self._scale_in_use()

    def stateless_scale_loss(self, optimizer_variables: list, loss: Any) -> Any:
        """Stateless version of `scale_loss`, for custom training loops on JAX.

        Inside a jitted function, `scale_loss` would always use the scale from
        the time of compilation.

        Args:
            optimizer_variables: List of tensors, the values of
                `self.variables`.
            loss: Scalar tensor.

        Returns:
            float32 scalar tensor.
        """
        self._check_built("stateless_scale_loss")
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.scale_loss(loss)

    def unscale(self, gradients: Iterable) -> list:
        """Returns gradients divided by the loss scale, in float32.

        Use `unscale` for code that needs true gradients before `apply`, such as
        clipping by hand. `apply` treats the returned gradients, and gradients
        that you compute from them, as unscaled. If you only look at norms, you
        can also pass the original gradients to `apply`, which then unscales
        them. `apply` checks all gradients and updates the scale in both cases.
        `apply` also skips the step if a gradient overflowed in `unscale`, even
        if all gradients passed to `apply` are finite.

        Call `scale_loss` first, because `unscale` divides gradients even if
        their loss was never scaled.

        A step may unscale the gradients of several backward passes.
        Sharpness-aware minimization, for example, unscales the gradients of
        both of its passes and applies the second.

        Args:
            gradients: List of gradients of the scaled loss. Entries may be
                `None`.

        Returns:
            List of float32 gradients.

        Raises:
            ValueError: If `unscale` has already returned one of the gradients.
        """
        gradients = list(gradients)
        self._stages.check_unscale(gradients)
        scale = self._scale_in_use()
        keep = [False] * len(gradients)
        inverse = 1.0 / scale
        unscaled = active.step().unscale(as_tensors(gradients), inverse, keep)
        overflows = overflowing([g for g in unscaled if g is not None])
        self._stages.unscaled(gradients, unscaled, scale, overflows)
        return unscaled

    def get_scaled_loss(self, loss: Any) -> Any:
        """Keras 2 name for `scale_loss`.

        If `loss` is a function, returns a function that scales its result.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable) -> list:
        """Keras 2 name for `unscale`."""
        return self.unscale(grads)

    # Methods that check all gradients of a step, then apply or skip the step.

    def apply(
        self, grads: list, trainable_variables: list | None = None
    ) -> None:
        """Updates the variables with scaled gradients, or skips the step.

        Args:
            grads: List of gradients of the scaled loss, one per variable. The
                entry of a variable without a gradient is `None`.
            trainable_variables: List of variables. Defaults to the variables
                that the optimizer was built with.

        Raises:
            ValueError: If all gradients are `None`, or their number differs
                from the number of variables.
        """
        if len(grads):
            commit_together([self._check_gradients(grads, trainable_variables)])

    def apply_gradients(self, grads_and_vars: Iterable) -> Any:
        """Updates variables from `(gradient, variable)` pairs.

        Returns:
            The inner optimizer's `iterations`, which does not count skipped
            steps.
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
        """Stateless version of `apply`, for custom training loops on JAX.

        Args:
            optimizer_variables: List of tensors, the values of
                `self.variables`.
            grads: List of gradients of the scaled loss.
            trainable_variables: List of tensors, the values of the variables
                that the optimizer was built with.

        Returns:
            Tuple of the new `trainable_variables` and `optimizer_variables`.
        """
        step = self, optimizer_variables, grads, trainable_variables
        (done,) = self.stateless_apply_together(step)
        return done

    @staticmethod
    def apply_together(*steps: tuple) -> None:
        """Applies several optimizers if all of their gradients are finite.

        Use `apply_together` for models with several optimizers, such as a GAN.
        One overflow skips the step of every optimizer. Optimizers with equal
        rules keep equal scales if you always apply them together.

        Args:
            *steps: Tuples `(optimizer, grads, trainable_variables)`, as for
                `apply`.
        """
        commit_together([o._check_gradients(g, v) for o, g, v in steps])

    @staticmethod
    def stateless_apply_together(*steps: tuple) -> list:
        """Stateless version of `apply_together`, for training loops on JAX.

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
        if variables is None and self.built:
            variables = self._trainable_variables
        variables = checked_variables(grads, variables)
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        if self.inner_optimizer.loss_scale_factor is not None:
            raise ValueError(
                "The inner optimizer also scales the loss, so gradients would "
                "be unscaled twice. Set its `loss_scale_factor` to None. "
                "Received: loss_scale_factor="
                f"{self.inner_optimizer.loss_scale_factor!r}"
            )
        if message := self._stages.forgotten(self.name):
            warnings.warn(message, stacklevel=3)
        scale = active.step().value(self._scale_variable)
        unscaled = self._stages.are_unscaled(grads, scale)
        seen = self._stages.overflows if unscaled else []
        self._stages.begin()
        return CheckedGradients(self, grads, variables, scale, unscaled, seen)

    def _advance(self, finite, norms, read):
        """Updates the loss scale and records the step."""
        counts = read(self.history.counts)
        before = LossScaleState(
            scale=read(self._scale_variable),
            good_steps=read(self.step_counter),
            hysteresis_left=counts[HYSTERESIS],
            pending_scale=read(self.history.pending_scale),
            steps=counts[STEPS],
        )
        rule = self.rule
        if self._growth_variable is not None and not isinstance(finite, bool):
            rule = copy.copy(rule)
            rule.growth_interval = read(self._growth_variable)
        after = rule.next_state(before, finite)
        self.history.record(finite, norms, counts, before, after)
        self.step_counter.assign(after.good_steps)
        self._scale_variable.assign(after.scale)

    # Properties and methods for the loss scale and for the record of steps.

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 scalar that `float()` accepts.

        Inside a compiled step, `loss_scale` is the scale of that step.
        """
        self._stages.read_scale()
        return self._scale_in_use()

    @property
    def dynamic_scale(self) -> keras.Variable:
        """The variable that holds the loss scale, as in Keras."""
        self._stages.read_scale()
        return self._scale_variable

    @property
    def loss_not_scaled(self) -> bool:
        """Returns whether a `train_step` did not scale its loss."""
        return self._stages.scaling is False

    def _scale_in_use(self):
        # In the first step, the loss is scaled before `apply` builds the
        # optimizer, so use the initial scale.
        if not self.built:
            return self._initial_scale()
        return active.step().value(self._scale_variable)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The growth interval of a dynamic loss scale, otherwise `None`."""
        return getattr(self.rule, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int | None) -> None:
        if "rule" not in vars(self):
            return
        if not isinstance(self.rule, DynamicLossScale):
            raise ValueError(
                "Only a dynamic loss scale has `dynamic_growth_steps`. "
                f"Received: dynamic_growth_steps={value!r} for {self.rule!r}"
            )
        self.rule = self.rule.with_arguments(growth_interval=value)
        if self._growth_variable is not None:
            self._growth_variable.assign(self.rule.growth_interval)

    @property
    def attempted_steps(self) -> int:
        """Number of attempted steps. `iterations` leaves out skipped steps."""
        return self.step_counts()[0]

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped since the optimizer was built."""
        return self.step_counts()[1]

    @property
    def consecutive_skipped_steps(self) -> int:
        """Number of skipped steps in a row, up to the last step."""
        return self.step_counts()[2]

    @property
    def last_step_skipped(self) -> bool:
        """Returns whether the last step was skipped."""
        return self.consecutive_skipped_steps > 0

    def overflow_counts(self) -> dict:
        """Returns the number of overflows of each gradient, by path."""
        return self.history.read_by_path("overflows")

    def nonfinite_counts(self) -> dict:
        """Returns the number of steps with infinite or NaN gradients.

        The keys of the dict are `"inf"`, `"-inf"` and `"nan"`. A step may count
        for several keys.
        """
        return self.history.read_by_kind("nonfinite_counts")

    def nonfinite_losses(self) -> dict:
        """Returns the number of batches in `fit` with a non-finite loss.

        The keys of the dict are `"inf"`, `"-inf"` and `"nan"`. Batches count
        only while a callback of this package is active. Each replica counts its
        own part of a batch.
        """
        return self.history.read_by_kind("nonfinite_losses")

    def gradient_norms(self) -> dict:
        """Returns the unscaled gradient norms of the last step, by path.

        Under `tf.distribute`, each value is the sum of the replicas' norms. The
        sum is an upper bound for the norm of the summed gradient.
        """
        return self.history.read_by_path("gradient_norms")

    def nonfinite_steps(self) -> list:
        """Returns the last 32 skipped steps, oldest first.

        Each entry has `.step` (its number among the attempted steps), `.scale`,
        `.variables` (the paths of variables whose gradients overflowed) and
        `.kinds`. `.kinds` maps each path to the non-finite kinds that its
        gradient held: `"inf"`, `"-inf"` or `"nan"`.
        """
        return self.history.read_recent()

    def set_loss_scale(self, scale: float) -> None:
        """Sets the loss scale of the next step.

        Args:
            scale: Float.

        Raises:
            TypeError: If `scale` is not a number.
            ValueError: If `scale` or its reciprocal is not a normal float32
                number, or the optimizer has not been built.
        """
        self._check_built("set_loss_scale")
        scale = check_scale("scale", scale)
        self.history.note_scale(float(self._scale_in_use()), scale)
        self._scale_variable.assign(scale)

    def step_counts(self) -> tuple:
        """Returns attempted, skipped and consecutive skipped steps."""
        return self.history.read_counts()[:3]

    # The inner optimizer provides all attributes that the wrapper lacks.

    def exclude_from_weight_decay(
        self, var_list: list | None = None, var_names: list | None = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name):
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name, value):
        inner = vars(self).get("inner_optimizer")
        if (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        ):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    # Methods that save and load. Keras' wrapper stores the inner optimizer's
    # variables twice: after its own four variables, and under
    # `inner_optimizer`. keras_mixprec's `LossScaleOptimizer` stores them only
    # after the four variables, where Keras' wrapper can read them, and adds its
    # history.

    def save_own_variables(self, store: Any) -> None:
        """Writes Keras' four variables and the inner optimizer's variables."""
        if not self.built:
            # If a file was loaded before `build`, write the content of the file
            # back unchanged.
            for name, values in (self._unread_state or {}).items():
                store[name] = values
            return
        step = active.step()
        for index, variable in enumerate(self._saved_variables()):
            store[str(index)] = step.read(variable)

    def load_own_variables(self, store: Any) -> None:
        """Loads a file from this class, Keras' class or the inner optimizer.

        An optimizer that is not built yet keeps the content of the file until
        `build`. Keras' optimizer can save a loss scale of 0 or infinity. Such a
        scale is replaced by the initial scale, with a warning.
        """
        if not self.built:
            self._unread_state = copy_store(store) or None
            return
        self._unread_state = None
        inner = self.inner_optimizer.variables
        for variables in (self._saved_variables(), inner):
            if _match(variables, store):
                for index, variable in enumerate(variables):
                    variable.assign(store[str(index)])
                self._repair_scale()
                return
        warnings.warn(
            f"The state of optimizer {self.name!r} was not loaded. The "
            f"{len(store.keys())} variables in the file do not match its "
            f"{len(self._saved_variables())} variables, or the {len(inner)} of "
            "its inner optimizer, in number and shape. Compile with the "
            "optimizer and the layers that the file was saved with.",
            stacklevel=2,
        )

    def _saved_variables(self):
        own = [self._iterations, self._learning_rate]
        own += [self.step_counter, self._scale_variable]
        return own + self.inner_optimizer.variables

    def _repair_scale(self):
        scale = float(active.step().read(self._scale_variable))
        if isinstance(self.rule, FixedLossScale):
            # A fixed rule never updates the scale. A wrong scale from a file
            # would stay, so overwrite it.
            self._scale_variable.assign(self.rule.scale)
        # Do not clip an invalid scale. At 2**-126, the valid scale nearest to
        # 0, all float16 gradients underflow to 0.
        elif not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            usable = self._initial_scale()
            warnings.warn(
                f"Optimizer {self.name!r} has a loss scale of {scale:g}, which "
                "destroys weights or skips every step. Training continues with "
                f"the initial scale {usable:g}.",
                stacklevel=3,
            )
            self._scale_variable.assign(usable)

    def __dir__(self):
        # Keras saves every attribute that `dir` lists. Hide the inner optimizer
        # to store its state only once, except in files for Keras' own
        # optimizer, which reads both copies.
        left_out = "" if self._continues_keras_own else "inner_optimizer"
        return [name for name in super().__dir__() if name != left_out]

    def get_config(self) -> dict:
        """Returns the configuration.

        If only arguments of Keras' optimizer are set, Keras' own class accepts
        this configuration too.
        """
        rule = self.rule
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **({"discard_window": True} if self.window else {}),
        }
        if type(rule) is DynamicLossScale:
            arguments = {
                "initial_scale": rule.initial_scale,
                "dynamic_growth_steps": rule.growth_interval,
            }
            plain = resolve_rule(
                "dynamic", rule.initial_scale, rule.growth_interval
            )
            if rule == plain:
                return config | arguments
        return config | {
            "loss_scale": keras.saving.serialize_keras_object(rule)
        }

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: dict | None = None
    ) -> Self:
        """Creates the optimizer from its configuration."""
        config = dict(config)
        for key in ("inner_optimizer", "loss_scale"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        return cls(**config)


def _match(variables, store):
    return len(variables) == len(store.keys()) and all(
        tuple(variable.shape) == tuple(np.shape(store[str(index)]))
        for index, variable in enumerate(variables)
    )


def _check_inner(inner):
    """Returns the inner optimizer, or raises if it cannot be wrapped."""
    if isinstance(inner, (str, dict)):
        inner = keras.optimizers.get(inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` already scales the loss. Wrap the optimizer "
            f"inside it instead. Received: inner_optimizer={inner}"
        )
    what = "a `keras.optimizers.Optimizer` or the name of one"
    check_type("inner_optimizer", inner, keras.optimizers.Optimizer, what)
    if inner.loss_scale_factor is not None:
        # Warn, because Keras' own `LossScaleOptimizer` drops
        # `loss_scale_factor` silently.
        warnings.warn(
            "The wrapper scales the loss, so it sets the `loss_scale_factor` "
            "of `inner_optimizer` to None. For a fixed scale, pass "
            "`loss_scale` to the wrapper. Received: "
            f"loss_scale_factor={inner.loss_scale_factor!r}",
            stacklevel=3,
        )
    return inner


def _check_window(discard_window, inner):
    check_choice("discard_window", discard_window, (True, False))
    steps = inner.gradient_accumulation_steps
    if discard_window and not steps:
        raise ValueError(
            "`discard_window=True` needs an `inner_optimizer` that accumulates "
            "gradients. Set its `gradient_accumulation_steps`. Received: "
            f"gradient_accumulation_steps={steps!r}"
        )
