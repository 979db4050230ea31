"""The callback that repairs a model while it trains."""

import os
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.callbacks.session import (
    CopiedCallback,
    Session,
    Settings,
)
from keras_mixprec.keras_internals import is_in_fit
from keras_mixprec.loss_scaling.ensure import (
    ensure_loss_scaling,
    lacks_loss_scaling,
    skip_nonfinite_steps,
)
from keras_mixprec.monitoring.failures import failure_event
from keras_mixprec.numerics.evaluation import held_back
from keras_mixprec.policies.layers import has_own_step
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.tuning.controller import Tuning
from keras_mixprec.tuning.demotions import Repairs
from keras_mixprec.tuning.history import start_message
from keras_mixprec.tuning.plan_store import PlanOnDisk, computes_in_16_bits
from keras_mixprec.tuning.proposal import RUNGS

_ON_LIMIT = ("continue", "stop", "raise", "float32")
_BFLOAT16 = ("auto", True, False)


class PrecisionTuner(CopiedCallback):
    """Demotes numerically unstable layers to a wider dtype during training.

    The tuner diagnoses one batch, as `keras_mixprec.diagnose` does, before the
    first step, at steps 16 and 48, and then each time the step count has grown
    by a factor of 4. It also diagnoses a batch if more steps are skipped, or
    have a non-finite loss, than a search for the loss scale explains. Steps
    count over all `fit` calls until you compile the model again or set its
    dtypes or weights. A message announces a long diagnosis.

    The tuner demotes the smallest set of layers that repairs the faults. Layers
    that overflow or underflow compute in bfloat16 if the device is fast in
    bfloat16. All other demoted layers compute in float32. Weights, optimizer
    state, metrics and counters are kept. Each set of demotions recompiles the
    model once.

    If gradients vanish because the loss scale is too low, the tuner raises the
    scale. It sets a fixed scale to a value that suits all layers. If it cannot
    set the scale, it recommends a value once, in the history. The tuner demotes
    no layer because of bad data, divergence, or a loss scale that is still
    falling. If only bad data lowered the loss scale, the tuner restores it,
    unless several workers train together.

    The tuner undoes a demotion if training diverges within the next 500 steps.
    Training has diverged if the float32 loss of one batch is 1000x larger, or
    if it is 2x larger and the largest weight has grown 100x. Weights, optimizer
    state and loss scale then return to their values before the demotion. The
    loss is compared after `cooldown` steps, and then each time after twice as
    many steps. With several workers, no demotion is undone.

    After `cooldown` steps without trouble, layers that do not need their
    demotion return to 16 bits. After `promote_after` steps, the tuner diagnoses
    all demoted layers in their former dtypes. Layers that no longer show a
    fault return to 16 bits. A layer that fails again waits twice as long.

    With `validate`, a metric on held-back data must also allow a return. The
    same weights are evaluated for inference, in float32 and under the plan.
    A layer returns to 16 bits only if the metric stays within `tolerance` of
    its float32 value. If not, `plan.reasons` has the reason. When training
    ends, the tuner signs off the plan in the same way: if the metric is not
    within the tolerance, the tuner demotes the fewest layers that bring it
    there. The metric is evaluated once before the first step, so an error in it
    ends `fit` at once. If the metric fails later, or is not finite in float32,
    no layer returns, and you get a warning. Returns and the search at the end
    may take 50 evaluations, plus one for each 100 steps. Evaluations change no
    weights, metrics, layer state or random numbers.

    Under `tf.distribute` or `torch.distributed` every worker needs the tuner.
    Each worker diagnoses its own batches. The workers share their findings and
    change the same layers at the same step. All workers start from the plan of
    the first worker, and only the first worker writes the plan.

    Use the tuner alone or with `MixPrecMonitor`. The monitor then logs the
    tuner's changes, and both share readings and diagnoses.

    A custom training loop calls the methods of the callback as `fit` does and
    trains with `train_on_batch`. A model must be built to start from a plan.
    A copy (`copy.deepcopy`, `pickle`) has the results, but not the model.

    A compiled model that computes in float16 without loss scaling gets a
    `LossScaleOptimizer` if it uses Keras' own `train_step`.

    Args:
        plan: String or path-like. A JSON file. If the file exists, training
            starts from its plan. The tuner writes the file after every change
            and at the end. If writing fails during training, you get a warning
            and training continues. If your code has changed since the plan was
            written, your code wins: the tuner leaves layers as they are if they
            have a new policy, or if only the model or only the plan has them. A
            warning names these layers. The old file is kept next to the new
            one. Defaults to `None`.
        dry_run: Boolean, whether to report changes without making them. The
            plan is neither read nor written. Defaults to `False`.
        promote_after: Int. After this many steps without trouble, a demoted
            layer is tried in its original dtype. `0` means never. Defaults to
            `2000`.
        cooldown: Int. Steps between two changes. A change before the first
            step needs no cooldown. Defaults to `10`.
        max_demoted_fraction: Float. The share of the FLOPs in 16 bits that may
            be demoted. Defaults to `1.0`.
        max_rebuilds: Int. How many times the model may be recompiled. Defaults
            to `10`.
        on_limit: String. The action if a limit prevents a repair, or if no
            repair is known. `"continue"` keeps training. `"stop"` ends training
            as `model.stop_training` does. `"raise"` raises a
            `FloatingPointError`, so that `keras.callbacks.BackupAndRestore`
            keeps its backup. `"float32"` demotes all layers to float32.
            Defaults to `"continue"`.
        bfloat16: Boolean, whether the device is fast in bfloat16. `"auto"` is
            true if `recommend_policy` recommends `"mixed_bfloat16"`, which on
            a CPU depends on the measurements of `doctor`. Defaults to `"auto"`.
        update_freq: Int. Batches between two readings of the counters. Early
            on, readings are more frequent. Defaults to `50`.
        verbose: `0` or `1`, whether to print changes. Defaults to `1`.
        validate: Tuple `(x_val, y_val)` or `(x_val, y_val, sample_weight)`, a
            dataset that can be iterated repeatedly, or a function of the model
            that returns a number. The function must not call its own compiled
            functions, because these keep the dtypes of their first trace.
            Defaults to `None`.
        monitor: String. The metric on held-back data, named as for
            `EarlyStopping`. Defaults to `"val_loss"`.
        mode: String. `"min"` if smaller values of the metric are better,
            `"max"` if larger values are better. With `"auto"`, Keras decides.
            For a function, or a metric that Keras does not know, any difference
            counts. Defaults to `"auto"`.
        tolerance: Float. How much worse than in float32 the metric may be, in
            the metric's own unit. For an accuracy, 0.002 is 0.2 percentage
            points. Defaults to `0.002`.
        rungs: Sequence of strings. The repairs to try, in this order, for a
            layer that overflows or underflows. `"rescale"` keeps the layer in
            float16 and multiplies its inputs by a power of two, if the layer
            allows it (see `RescaledPolicy`). `"bfloat16"` is left out if the
            argument `bfloat16` is false. `"float32"` comes last. Defaults to
            `("bfloat16", "float32")`.
        recover: Boolean, whether to return to the last good state if training
            has diverged or weights are not finite. The tuner repeats the steps
            from there to find the cause. Training then continues with a lower
            learning rate, with clipped gradients, or, if it does not fail
            again, with the same settings. If the cause is a different one,
            training stops in the good state. Steps with non-finite gradients
            are skipped, even without loss scaling. So are steps with gradient
            spikes: gradients ten times larger than any since `fit` began. After
            three spikes in a row, the tuner returns to the last good state if
            the weights are the cause. With several workers, the tuner skips
            steps, but never returns. Defaults to `False`.
        max_returns: Int. How many times to return to a good state. After that,
            training stops in the last good state. Defaults to `3`.

    Attributes:
        plan: The `PrecisionPlan` that the model follows, with the verdict for
            each demoted layer; `None` before the first `fit`.
        history: List of dicts, one for each change of this model. In a dry run
            these are the changes that the tuner would make. Each dict has a
            `step` and a `kind`: `"start"`, `"demote"`, `"shrink"`, `"promote"`,
            `"keep"`, `"loss_scaling"`, `"raise_scale"`, `"lower_scale"`,
            `"advise_scale"` (the loss scale that you should set), `"undo"`,
            `"return"` (to the state of step `to`), `"spikes"` (`count` steps
            were skipped), `"give_up"` or `"sign_off"`. Changes have `layers`, a
            dict from path to the policies `before` and `after`, and the
            `seconds` of the recompilation and the next step. Changes that
            depend on a metric have its name as `metric`, its value in `float32`
            and under the `plan`, and the `tolerance`. `"sign_off"` has
            `within` (whether the metric is within the tolerance) and `to_blame`
            (if it is not, the layers that are the cause).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is outside its range, or `monitor` or `mode` is
            given without `validate`. When training starts, if the same `fit`
            has a second tuner, the plan is damaged, `monitor` is not a metric
            of the model, or the metric is not finite in float32.
        OSError: When training starts, if the plan cannot be written.
        FloatingPointError: During training, with `on_limit="raise"`.

    Example:
    >>> inputs = keras.Input((4,))
    >>> x = keras.layers.Rescaling(1e4, name="up")(inputs)
    >>> x = keras.layers.Rescaling(1e-4, name="down")(x)
    >>> model = keras.Model(inputs, keras.layers.Dense(1)(x))
    >>> plan = apply_policy(model, "mixed_float16", rules=[])
    >>> model.compile(LossScaleOptimizer("adam"), loss="mse")
    >>> tuner = PrecisionTuner(verbose=0)
    >>> x, y = np.full((8, 4), 10.0), np.ones((8, 1))
    >>> history = model.fit(x, y, verbose=0, callbacks=[tuner])
    >>> dict(tuner.plan)
    {'up': 'float32', 'down': 'float32', 'dense': 'mixed_float16'}
    """

    def __init__(
        self,
        plan: str | os.PathLike | None = None,
        dry_run: bool = False,
        promote_after: int = 2000,
        cooldown: int = 10,
        max_demoted_fraction: float = 1.0,
        max_rebuilds: int = 10,
        on_limit: str = "continue",
        bfloat16: bool | str = "auto",
        update_freq: int = 50,
        verbose: int = 1,
        validate: Any = None,
        monitor: str = "val_loss",
        mode: str = "auto",
        tolerance: float = 0.002,
        rungs: Sequence[str] = ("bfloat16", "float32"),
        recover: bool = False,
        max_returns: int = 3,
    ):
        super().__init__()
        self._disk: Any = None if plan is None else PlanOnDisk(plan)
        self.dry_run = check_choice("dry_run", dry_run, (True, False))
        self.promote_after = check_integer("promote_after", promote_after)
        self.cooldown = check_integer("cooldown", cooldown)
        self.max_demoted_fraction = check_number(
            "max_demoted_fraction", max_demoted_fraction, low=0, high=1
        )
        self.max_rebuilds = check_integer("max_rebuilds", max_rebuilds)
        self.on_limit = check_choice("on_limit", on_limit, _ON_LIMIT)
        self.bfloat16 = check_choice("bfloat16", bfloat16, _BFLOAT16)
        self.update_freq = check_integer("update_freq", update_freq, low=1)
        self.verbose = check_integer("verbose", verbose, high=1)
        self.validate = validate
        self.monitor, self.mode = monitor, mode
        self.tolerance = check_number("tolerance", tolerance, low=0.0)
        self.rungs = _check_rungs(rungs)
        self.recover = check_choice("recover", recover, (True, False))
        self.max_returns = check_integer("max_returns", max_returns)
        self._held_back = held_back(validate, monitor, mode)
        self.has_validated = False
        self._check_together()
        self.plan: PrecisionPlan | None = None
        self.history: list[dict] = []
        self._session: Any = None
        self._repairs: Any = None
        self._before: list = []
        self._warned = self._keeps_file = self._wraps = False
        self._fixed: Any = None

    def _check_together(self):
        if 0 < self.promote_after < self.cooldown:
            raise ValueError(
                "`promote_after` must be 0 or at least `cooldown`, because "
                "no layer changes earlier. Received: "
                f"promote_after={self.promote_after}, cooldown={self.cooldown}"
            )
        if self.on_limit == "float32" and not self.max_rebuilds:
            raise ValueError(
                '`on_limit="float32"` needs one rebuild, but `max_rebuilds=0` '
                "allows none. Received: max_rebuilds=0, on_limit='float32'"
            )

    def set_model(self, model: Any) -> None:
        """Wraps the optimizer.

        The optimizer must be wrapped before `BackupAndRestore` restores its
        state in `on_train_begin`. `evaluate` leaves the optimizer as it is.
        """
        super().set_model(model)
        self._wraps, self._fixed = False, None
        if is_in_fit(model):
            self._wrap_optimizer(model)

    def _wrap_optimizer(self, model):
        # A custom `train_step` may not call `optimizer.scale_loss`, so wrapping
        # its optimizer would not scale the loss.
        has_none = getattr(model, "optimizer", None) is None
        if self.dry_run or has_none or has_own_step(model):
            return
        if self._fixed is not None and self._fixed is model.optimizer:
            # Decide again, because the plan may have set layers to float16.
            model.optimizer = self._fixed.inner_optimizer
        if lacks_loss_scaling(model):
            ensure_loss_scaling(model)
            self._wraps = True
        before = model.optimizer
        if self.recover:
            skip_nonfinite_steps(model)
        if model.optimizer is not before:
            self._fixed = model.optimizer

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Starts from the plan, if there is one."""
        model = self.model
        repairs = Repairs.of(model)
        known = None if self._is_dry else self._disk.load(model)
        self._session = Session.join(self, Settings(verbose=self.verbose))
        if self._repairs is not repairs:
            self.history = []
        self._repairs, self._before = repairs, []
        self._session.add_tuner(
            partial(Tuning, self, repairs, self._before, self._held_back)
        )
        self._keeps_file = self._warned = False
        aside = self._start_from(*known) if known else {}
        self.plan = repairs.plan()
        # Write the plan file before training starts, so that a bad path raises
        # an error at once.
        if self._writes_plan:
            self._disk.save(repairs, keep_earlier=bool(aside))
        # The plan may have set layers to float16, which need loss scaling.
        self._wrap_optimizer(model)
        if self._wraps:
            text = "the loss is scaled from now on"
            self._before.append(("loss_scaling", text, {}))

    def on_train_end(self, logs: dict | None = None) -> None:
        """Writes the plan, and prints the result of the run."""
        session = self._session
        session.finish()
        self.has_validated = True
        self.save_plan()
        # Do not print the headline of the run a second time if the monitor's
        # summary contains the headline.
        story = session.log.story
        wide = any(event["kind"] == "no_16_bits" for event in story)
        news = wide or session.watch.tuning.records.has_news
        is_told = session.has_monitor and session.settings.verbose
        if self.verbose and news and not is_told:
            # Import the summary code lazily, because only the end of `fit`
            # needs it.
            from keras_mixprec.monitoring.summary import summarize

            said = summarize(session.watch).headline["text"]
            print_message(f"PrecisionTuner: {said}")
        session.leave(self)
        self._session = None
        session.raise_if_failed()

    def _start_from(self, plan, state):
        """Applies the plan, and returns the layers that do not fit the plan."""
        repairs = self._repairs
        changes, aside = repairs.follow(plan, state)
        is_wide = not computes_in_16_bits(repairs.asked)
        self._keeps_file = bool(aside) and is_wide
        known = any(event["kind"] == "start" for event in self.history)
        if known and not (changes or aside):
            return aside
        fits = not repairs.asked.keys() <= aside.keys()
        text = start_message(self._disk, fits, changes, aside, self._keeps_file)
        fields = {"left_aside": aside} if aside else {}
        self._before.append(("start", text, fields))
        if aside and not self.verbose:
            warnings.warn(f"PrecisionTuner {text}.", UserWarning, stacklevel=3)
        return aside

    @property
    def _is_dry(self):
        return self.dry_run or self._disk is None

    @property
    def _writes_plan(self):
        # On JAX, reading `self.model` during a step would reset the variables
        # to their values after the previous step.
        chief = active.processes().rank(self._session.model) == 0
        return chief and not (self._is_dry or self._keeps_file)

    @property
    def plan_file(self) -> str:
        """The path of the plan file, empty without one."""
        return "" if self._is_dry else str(self._disk.path)

    def save_plan(self) -> None:
        """Updates `plan`, and on the first worker its file."""
        self.plan = self._repairs.plan()
        if not self._writes_plan:
            return
        try:
            # The folder of the plan may have been removed during training, so
            # create the folder again.
            self._disk.path.parent.mkdir(parents=True, exist_ok=True)
            self._disk.update(self._repairs)
        except OSError as error:
            watch = self._session.watch
            watch.log.event(
                watch.step, failure_event("plan_not_written", error)
            )
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"PrecisionTuner cannot write the plan to "
                    f"{str(self._disk.path)!r} ({error.strerror}). Training "
                    "continues, and `tuner.plan` has the plan.",
                    UserWarning,
                    stacklevel=2,
                )


def _check_rungs(rungs):
    if isinstance(rungs, str) or not isinstance(rungs, Sequence):
        raise TypeError(
            f"`rungs` must be a sequence of strings. Received: rungs={rungs!r} "
            f"of type {type(rungs).__name__}"
        )
    some = tuple(rung for rung in RUNGS if rung in rungs)
    if tuple(rungs) != some or "float32" not in some:
        raise ValueError(
            f"`rungs` must be some of {RUNGS}, in this order, and include "
            "'float32', which always repairs a layer. Received: "
            f"rungs={rungs!r}"
        )
    return some
