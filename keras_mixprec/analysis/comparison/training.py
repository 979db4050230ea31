"""One policy and one seed: build, fit in blocks, evaluate, say what it took."""

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import keras

from keras_mixprec.analysis.comparison.arms import (
    CALLBACKS,
    MATMUL,
    REWRITE,
    ArmRequest,
)
from keras_mixprec.analysis.comparison.batches import Batches
from keras_mixprec.analysis.comparison.peak import Peak
from keras_mixprec.analysis.comparison.sources import build_model
from keras_mixprec.analysis.comparison.turns import BlockTimer, Turns
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.keras_internals import set_saved_optimizer
from keras_mixprec.loss_scaling.ensure import (
    adopt,
    ensure_loss_scaling,
    lacks_loss_scaling,
)
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.policies.graph_rewrite import graph_rewrite
from keras_mixprec.policies.layers import has_own_step
from keras_mixprec.policies.matmul_precision import (
    computed_in,
    in_force,
    matmul_precision,
)
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.summary import shares_in_16_bits


@dataclasses.dataclass(frozen=True)
class Job:
    """What is the same for all policies.

    Attributes:
        build: Function without arguments that returns a compiled model. Here
            and below `"module:name"` until it is resolved.
        steps: Int. Training steps.
        blocks: Int. In how many blocks.
        metric: String, a key of what `evaluate` returns, or a function of the
            trained model.
        callbacks: Function that returns a list of callbacks, or `None`.
        where: As `Peak` takes it: what else trains in this process.
        asks_for_memory: Boolean. Whether its peak is not known yet.
    """

    build: Any
    steps: int
    blocks: int
    metric: Any
    callbacks: Any
    where: str | None = None
    asks_for_memory: bool = True


class Settings:
    """What an arm sets beside its policy, as a context for each turn.

    Args:
        names: Tuple of names in `arms.SETTINGS`.
    """

    def __init__(self, names: tuple):
        self._matmul = next((n for n in names if n in MATMUL), None)
        self._rewrite_dtype = next(
            (n.removeprefix(REWRITE) for n in names if n.startswith(REWRITE)),
            None,
        )
        self.rewrite: Any = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Context of a turn."""
        with contextlib.ExitStack() as stack:
            if self._matmul:
                stack.enter_context(_matmul(self._matmul))
            if self._rewrite_dtype and self.rewrite is None:
                self.rewrite = graph_rewrite(self._rewrite_dtype)
            elif self._rewrite_dtype:
                self.rewrite.on()
            if self.rewrite is not None:
                stack.callback(self.rewrite.off)
            yield


def _matmul(name):
    scope = matmul_precision(name)  # Raises if the device does not have it.
    if name in ("float32", "tf32"):
        # As scopes on TensorFlow do not, it leaves the models alone that XLA
        # has compiled: those of all policies, at every turn.
        return computed_in(name)
    return scope


def train(
    arm: ArmRequest,
    seed: int,
    job: Job,
    data: tuple[Batches, Batches],
    turns: Turns,
    settings: Settings,
) -> dict:
    """Trains a policy with one seed, in turns, and returns what was measured.

    Args:
        arm: The `ArmRequest`.
        seed: Int.
        job: The `Job`.
        data: `Batches` to train on, and to evaluate.
        turns: The `Turns`, in the first of which it is called.
        settings: The `Settings` of the arm.

    Returns:
        Dict of what the record has of a `Seed`, and as `"arm"` of what it has
        of the arm.
    """
    batches, held_back = data
    peak = Peak(job.where)
    model, notes = _model(arm, seed, job)
    with tempfile.TemporaryDirectory() as folder:
        monitors = _monitors(arm.settings, folder)
        own = _callbacks(job.callbacks)
        timer = BlockTimer(turns, [*own, *monitors])
        history = model.fit(
            **batches.fit_arguments(job.steps // job.blocks),
            epochs=job.blocks,
            shuffle=False,
            callbacks=[*own, *monitors, *_checks(model, job.metric), timer],
            verbose=0,
        ).history
    metric = _metric(model, job.metric, held_back)
    found = _timings(timer, job, batches.samples_per_step(job.steps))
    skipped = _skipped_steps(model)
    found |= {
        "seed": seed,
        "losses": [float(loss) for loss in history.get("loss", [])],
        "metric": metric,
        "skipped_steps": skipped,
        "seconds_lost": skipped * statistics.median(found["step_seconds"]),
    }
    names = [type(callback).__name__ for callback in (*own, *monitors)]
    facts = _facts(arm, model, settings, notes, names)
    if job.asks_for_memory:  # Which a program is compiled for, in places.
        facts["memory"] = peak.record(model, next(iter(batches)))
    return found | {"arm": facts}


def _model(arm, seed, job):
    """The model as it would be trained, and notes on what was done to it."""
    keras.utils.set_random_seed(seed)
    model, left = build_model(job.build, arm.policy)
    notes = []
    if not isinstance(arm.policy, PrecisionPlan) and left != arm.policy:
        notes.append(
            f"`build` sets the global policy {left!r} itself, so "
            f"{arm.policy!r} was set by `apply_policy`, with its rules"
        )
    return model, notes + _scale_loss(model, arm)


def _scale_loss(model, arm):
    """Gives a model the loss scaling that it needs, or is to have."""
    optimizer = model.optimizer
    wrapper = keras.optimizers.LossScaleOptimizer
    if arm.loss_scale is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        scaled = LossScaleOptimizer(inner, loss_scale=arm.loss_scale)
        set_saved_optimizer(model, scaled)
        model.optimizer = scaled
        return []
    if lacks_loss_scaling(model):
        if has_own_step(model):
            return [
                "it computes in float16 with a `train_step` of its own, and "
                "its optimizer scales no loss"
            ]
        ensure_loss_scaling(model)
        return [
            "nothing scaled the loss of its float16 layers, so "
            "`ensure_loss_scaling` has wrapped its optimizer"
        ]
    # Keras' own does not count the steps that it skips.
    for name, optimizer in optimizers_of(model).items():
        if isinstance(optimizer, wrapper):
            setattr(model, name, adopt(optimizer))
    return []


def _monitors(settings, folder):
    """Our own callbacks, quiet, with a log that is thrown away."""
    if not any(name in CALLBACKS for name in settings):
        return []
    from keras_mixprec.callbacks.monitor import MixPrecMonitor
    from keras_mixprec.callbacks.tuner import PrecisionTuner

    made = {
        "monitor": lambda: MixPrecMonitor(folder, verbose=0),
        "tuner": lambda: PrecisionTuner(verbose=0),
    }
    return [made[name]() for name in settings if name in CALLBACKS]


def _callbacks(make):
    if make is None:
        return []
    found = make()
    if not isinstance(found, list | tuple):
        raise TypeError(
            "`callbacks` must return a list of callbacks. "
            f"Received: {found!r} of type {type(found).__name__}"
        )
    return list(found)


def _checks(model, metric):
    """Callbacks that find a mistake before all of the training is done."""
    as_usual = type(model).test_step is keras.Model.test_step
    if callable(metric) or not as_usual or has_own_step(model):
        return []

    def check(epoch, logs):
        _check_metric(metric, logs)

    return [keras.callbacks.LambdaCallback(on_epoch_end=check)]


def _check_metric(metric, found):
    if metric not in found:
        raise ValueError(
            "`metric` must be what `model.evaluate` returns, one of "
            f"{', '.join(map(repr, found))}, or a function of the model. "
            f"Received: metric={metric!r}"
        )


def _metric(model, metric, batches):
    if callable(metric):
        found = metric(model)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise TypeError(
                "`metric` must return a number. "
                f"Received: {found!r} of type {type(found).__name__}"
            ) from error
    found = model.evaluate(
        iter(batches), steps=len(batches), verbose=0, return_dict=True
    )
    _check_metric(metric, found)
    return float(found[metric])


def _timings(timer, job, samples):
    steps = job.steps // job.blocks
    timed = [seconds / steps for seconds in timer.seconds[1:]]
    first = timer.seconds[0] / steps
    timed = timed or [first]  # Training was stopped in the first block.
    joules = timer.joules[1:]
    return {
        "step_seconds": timed,
        "compile_seconds": steps * max(first - statistics.median(timed), 0.0),
        "energy_joules_per_sample": (
            sum(joules) / (len(joules) * steps * samples) if joules else None
        ),
    }


def _skipped_steps(model):
    return sum(
        int(optimizer.skipped_steps)
        for optimizer in optimizers_of(model).values()
        if isinstance(optimizer, LossScaleOptimizer)
    )


def _facts(arm, model, settings, notes, callbacks):
    """What the record has of an arm, as it is after training."""
    share = shares_in_16_bits(model).flops
    if settings.rewrite is not None:
        # Of the layers nothing is known; the graph has it.
        notes = [*notes, f"graph rewrite: {settings.rewrite}"]
        share = None
    precision = in_force()
    if precision.products != "float32":
        notes = [*notes, f"float32 products are in {precision}"]
    return {
        "notes": notes,
        "share_of_flops_16bit": share,
        "loss_scale": arm.loss_scale_name or _loss_scale(model),
        "callbacks": callbacks,
    }


def _loss_scale(model):
    rules = [
        repr(optimizer.rule)
        for optimizer in optimizers_of(model).values()
        if isinstance(optimizer, LossScaleOptimizer)
    ]
    return ", ".join(rules) or None
