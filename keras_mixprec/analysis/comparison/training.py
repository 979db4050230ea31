"""Trains a model under one policy with one seed, in turns.

The training runs in its own thread or process. It pauses at the end of each
block until its next turn. Its process-wide settings and random state apply
only during its turns.
"""

import contextlib
import dataclasses
import math
import random
import statistics
import tempfile
import traceback
from typing import Any

import keras
import numpy as np

from keras_mixprec import _clock
from keras_mixprec._console import one_line
from keras_mixprec.analysis.comparison.sources import (
    MATMUL,
    REWRITE,
    ArmRequest,
    Batches,
    build_model,
    resolve,
)
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.callbacks.session import CopiedCallback
from keras_mixprec.devices import memory
from keras_mixprec.devices.energy import read_joules
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.formats import SIXTEEN_BITS
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
from keras_mixprec.policies.summary import model_share_in_16_bits

# The maximum length of an error message, which must fit into a row of a table.
_LONGEST = 400


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments that all trainings share.

    Attributes:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one.
        steps: Int. Training steps.
        blocks: Int. Number of blocks into which the steps are divided.
        metric: String, a key of the result of `evaluate`, or a function of the
            trained model, or `"module:name"` of one.
        callbacks: Function that returns a list of callbacks, or `"module:name"`
            of one, or `None`.
        data: Pair of `Batches`: one to train on, one to evaluate.
        isolated: Boolean. `True` if each training has its own process.
        asks_for_memory: Boolean. `True` if the memory has to be measured.
    """

    build: Any
    steps: int
    blocks: int
    metric: Any
    callbacks: Any
    data: tuple[Batches, Batches]
    isolated: bool = False
    asks_for_memory: bool = True


class StoppedError(Exception):
    """Raised during training if the comparison ends early."""


def run(
    connection: Any, arm: ArmRequest, seed: int, job: Job, distribution: Any
) -> None:
    """Trains in turns, as the target of a thread or process.

    Args:
        connection: The training's end of the connection. It receives `"go"` or
            `"stop"`. It sends `("block", seconds)` at the end of each block but
            the last, then `("done", dict)` or `("failed", (sentence,
            traceback))`.
        arm: The `ArmRequest`.
        seed: Int.
        job: The `Job`.
        distribution: Keras' distribution, which each thread has to set, or
            `None`.
    """
    if distribution is not None:
        keras.distribution.set_distribution(distribution)
    turns = _Turns(connection, arm.settings)
    answer: tuple | None = None
    try:
        turns.await_turn()
        answer = "done", _train(arm, seed, job, turns)
    except StoppedError:
        pass
    except BaseException as error:
        why = one_line(error, _LONGEST), traceback.format_exc()
        answer = "failed", why
    # If the comparison has ended, sending fails, and nobody needs the answer.
    with connection, contextlib.suppress(OSError):
        if answer is not None:
            turns.end(*answer)


def _matmul(name):
    # `matmul_precision` raises an error if the device lacks the precision.
    scope = matmul_precision(name)
    if name in ("float32", "tf32"):
        # Entering `matmul_precision` on TensorFlow discards the compiled
        # functions of all policies. Doing so at every turn would be slow.
        return computed_in(name)
    return scope


class _Turns:
    """Waits for the turns of an arm, and applies its settings during them."""

    def __init__(self, connection, settings):
        self._connection = connection
        self._inside = contextlib.ExitStack()
        self._matmul = next((n for n in settings if n in MATMUL), None)
        dtypes = [n.removeprefix(REWRITE) for n in settings if REWRITE in n]
        self._rewrite_dtype = next(iter(dtypes), None)
        self.rewrite: Any = None

    def await_turn(self):
        """Waits for the next turn, then applies the settings."""
        try:
            answer = self._connection.recv()
        except EOFError as error:
            # The comparison has ended, so end this training too.
            raise StoppedError from error
        if answer == "stop":
            raise StoppedError
        if self._matmul:
            self._inside.enter_context(_matmul(self._matmul))
        if self.rewrite is not None:
            self.rewrite.on()
        elif self._rewrite_dtype:
            self.rewrite = graph_rewrite(self._rewrite_dtype)
        if self.rewrite is not None:
            self._inside.callback(self.rewrite.off)

    def give_back(self, seconds):
        """Ends a turn, sends the block's time, and waits for the next turn."""
        with random_state_kept():
            self.end("block", seconds)
            self.await_turn()

    def end(self, kind, content):
        """Undoes the settings and sends a message."""
        self._inside.close()
        self._connection.send((kind, content))


@contextlib.contextmanager
def random_state_kept():
    """Context that restores the random state at its end."""
    runtime = active.runtime()
    state = random.getstate(), np.random.get_state(), runtime.random_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        runtime.set_random_state(state[2])


class _BlockTimer(keras.callbacks.Callback):
    """Times each epoch, which is a block of steps, and pauses between epochs.

    `fit` calls this callback last, so the times include the other callbacks.

    Attributes:
        seconds: List of floats, one for each block so far.
        joules: List of floats, the energy of each block. It is empty if the
            devices do not count energy.
        memory: Dict. The peak memory of the first block.
    """

    def __init__(self, turns, callbacks):
        super().__init__()
        self._turns = turns
        # Tell only one of our callbacks about pauses, because our callbacks
        # share one session. The session must not count pauses as training time,
        # because its time budget is a share of the training time.
        ours = [c for c in callbacks if isinstance(c, CopiedCallback)]
        self._monitors = ours[:1]
        self.seconds: list[float] = []
        self.joules: list[float] = []
        self.memory: dict | None = None
        self._began = 0.0
        self._joules: float | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Begins the first block."""
        self._joules = read_joules()
        self._began = _clock.now()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Ends a block. Keras has read the logs, so all steps have finished."""
        ended = _clock.now()
        self.seconds.append(ended - self._began)
        self.memory = self.memory or memory.memory_record(self.model)
        if self._joules is not None:
            joules = read_joules() or math.nan
            self.joules.append(joules - self._joules)
        if epoch + 1 < self.params["epochs"]:
            self._turns.give_back(self.seconds[-1])
            for monitor in self._monitors:
                monitor.leave_out(_clock.now() - ended)
            self.on_train_begin()


def _train(arm, seed, job, turns):
    """Trains in turns, and returns the record's entry for the seed.

    The key `"arm"` holds facts that the record stores once for the arm.
    """
    batches, held_back = job.data
    # The peak includes the memory that other models hold on the device, so
    # measure their memory first, and subtract it from the peak later.
    before = None
    if (
        memory.peak_bytes()[1] == "device"
        and not job.isolated
        and memory.reset_peak()
    ):
        before = memory.peak_bytes()[0]
    model, notes = _model(arm, seed, job)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = _callbacks(job.callbacks)
        callbacks += _monitors(arm.settings, folder)
        timer = _BlockTimer(turns, callbacks)
        history = model.fit(
            **batches.fit_arguments(job.steps // job.blocks),
            epochs=job.blocks,
            shuffle=False,
            callbacks=[*callbacks, timer],
            verbose=0,
        ).history
    metric = _metric(model, job.metric, held_back)
    found = _timings(timer, job, batches.samples_per_step(job.steps))
    skipped = sum(
        int(optimizer.skipped_steps)
        for optimizer in optimizers_of(model).values()
        if isinstance(optimizer, LossScaleOptimizer)
    )
    of_arm = _facts(model, turns.rewrite, notes)
    # Measure memory only once, because measuring may compile the step again.
    if job.asks_for_memory:
        batch = batches.batches[0]
        if job.isolated:
            of_arm["memory"] = _known(memory.memory_record(model, batch))
        else:
            of_arm["memory"] = _own(
                timer.memory, before
            ) or memory.program_record(model, batch)
    return {
        **found,
        "seed": seed,
        "losses": [float(loss) for loss in history.get("loss", [])],
        "metric": metric,
        "skipped_steps": skipped,
        "seconds_lost": skipped * statistics.median(found["step_seconds"]),
        "arm": of_arm,
    }


def _model(arm, seed, job):
    """Returns the model before training, and notes about changes to it."""
    keras.utils.set_random_seed(seed)
    model, left = build_model(job.build, arm.policy)
    notes = []
    if not isinstance(arm.policy, PrecisionPlan) and left != arm.policy:
        notes.append(
            f"`build` sets the global policy {left!r}, so `apply_policy` set "
            f"{arm.policy!r} with its rules"
        )
    if keras.dtype_policies.get(left).variable_dtype in SIXTEEN_BITS:
        # Initializers draw different numbers for variables in 16 bits, so copy
        # the weights of a float32 model.
        with random_state_kept():
            keras.utils.set_random_seed(seed)
            exact, _ = build_model(job.build, "float32")
            data = (*job.data[0].batches[0], None, None)[:3]
            for one in (exact, model):
                build_for(one, to_tensors(data, as_in_fit=True))
            model.set_weights(exact.get_weights())
        notes.append("it started from float32's initial weights")
    return model, notes + _scale_loss(model)


def _scale_loss(model):
    """Adds loss scaling if the model needs it, and returns notes."""
    if lacks_loss_scaling(model):
        if has_own_step(model):
            return [
                "its own `train_step` computes in float16 without loss scaling"
            ]
        ensure_loss_scaling(model)
        return [
            "`ensure_loss_scaling` wrapped its optimizer, which did not scale "
            "the loss"
        ]
    # Keras' own loss scaling does not count skipped steps, so use ours.
    for name, optimizer in optimizers_of(model).items():
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            setattr(model, name, adopt(optimizer))
    return []


def _monitors(settings, folder):
    """Returns our own callbacks, silent and with a temporary log."""
    from keras_mixprec.callbacks.monitor import MixPrecMonitor
    from keras_mixprec.callbacks.tuner import PrecisionTuner

    made = {
        "monitor": lambda: MixPrecMonitor(folder, verbose=0),
        "tuner": lambda: PrecisionTuner(verbose=0),
    }
    return [made[name]() for name in settings if name in made]


def _callbacks(make):
    if make is None:
        return []
    found = resolve("callbacks", make)()
    if not isinstance(found, list | tuple):
        raise TypeError(
            "`callbacks` must return a list of callbacks. "
            f"Received: {found!r} of type {type(found).__name__}"
        )
    return list(found)


def _metric(model, metric, held_back):
    if isinstance(metric, str) and ":" in metric:
        metric = resolve("metric", metric)
    if callable(metric):
        found = metric(model)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise TypeError(
                "`metric` must return a number. "
                f"Received: {found!r} of type {type(found).__name__}"
            ) from error
    batches = held_back.batches
    found = model.evaluate(
        (batch for batch in batches),
        steps=len(batches),
        verbose=0,
        return_dict=True,
    )
    if metric not in found:
        raise ValueError(
            f"`metric` must be one of {', '.join(map(repr, found))}, or a "
            f"function of the model. Received: metric={metric!r}"
        )
    return float(found[metric])


def _timings(timer, job, samples):
    steps = job.steps // job.blocks
    first, *timed = [seconds / steps for seconds in timer.seconds]
    # If a callback stops training in the first block, no other block is timed.
    timed = timed or [first]
    joules = timer.joules[1:]
    return {
        "step_seconds": timed,
        "compile_seconds": steps * max(first - statistics.median(timed), 0.0),
        "energy_joules_per_sample": (
            sum(joules) / (len(joules) * steps * samples) if joules else None
        ),
    }


def _facts(model, rewrite, notes):
    """Returns facts about an arm after training, for the record."""
    share = model_share_in_16_bits(model)
    if rewrite is not None:
        # The share of FLOPs in 16 bits is unknown, because layers do not know
        # which operations the graph rewrite put in 16 bits.
        notes = [*notes, f"graph rewrite: {rewrite}"]
        share = None
    precision = in_force()
    if precision.products != "float32":
        notes = [*notes, f"float32 products are computed in {precision}"]
    return {"notes": notes, "share_of_flops_16bit": share}


def _own(found, before):
    """Returns the peak memory of one turn, without other models' memory."""
    if found is None or before is None:
        return None
    return {
        **found,
        "peak_bytes": found["peak_bytes"] - before,
        "activations_bytes": found["activations_bytes"] - before,
    }


def _known(found):
    return found if found["peak_bytes"] is not None else None
