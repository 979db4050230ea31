"""When to diagnose a model in training, and telling what was found."""

import time

from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils import io_utils

from keras_mixprec.backend import batches as backend_batches
from keras_mixprec.callbacks.carry_on import carry_on_without
from keras_mixprec.callbacks.next_call import NextCall
from keras_mixprec.callbacks.watch import SUSPICIOUS_STEPS
from keras_mixprec.diagnosis import Verdict, diagnose
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.on_demand import predict_loss_scale

# Seconds that the first diagnosis of a healthy run is taken to cost.
_FIRST_COST = 1.0


class Examiner:
    """Diagnoses the next batch of a model when there is reason to.

    There is reason if the optimizer has skipped several steps in a row, or
    now and then to find what skips no step, as far as the budget allows.

    Args:
        log: The `RunLog`.
        verbose: `0` or `1`. Whether to print what is found.

    Attributes:
        verdicts: List of the `Verdict`s so far, each fault once.
        spent: Float. Seconds that diagnoses took.
    """

    def __init__(self, log, verbose):
        self.verdicts = []
        self.spent = 0.0
        self._log = log
        self._verbose = verbose
        self._cost = _FIRST_COST
        self._told = set()
        self._examined_trouble = self._found = False
        self._failed = False
        self._next_call = NextCall()

    @property
    def armed(self) -> bool:
        """Whether the next batch is going to be diagnosed."""
        return self._next_call.armed

    def wants(self, in_a_row: int, budget: float) -> bool:
        """Whether to diagnose now.

        Args:
            in_a_row: Int. Steps skipped since the last one applied.
            budget: Float. Seconds that may be spent.
        """
        if self._failed or self.armed:
            return False
        trouble = in_a_row >= SUSPICIOUS_STEPS
        if not trouble:
            self._examined_trouble = False
        elif not self._examined_trouble and not self._found:
            # The first time, what it costs does not matter.
            self._examined_trouble = True
            return True
        return budget > self._cost

    def arm(self, model, step: int):
        """Diagnoses the next batch that `model` trains on, the `step`th."""
        self._tap(model, step, lambda batch: self._examine(model, batch, step))

    def arm_first_scale(self, model, optimizer, step: int):
        """Sets the loss scale to what the next batch's gradients need."""

        def predict(batch):
            parts = data_adapter_utils.unpack_x_y_sample_weight(batch)
            scale = predict_loss_scale(model, *parts)
            rule = optimizer.rule
            scale = max(scale, rule.min_scale or 0.0)
            scale = min(scale, rule.max_scale or scale)
            optimizer.dynamic_scale.assign(scale)
            self._log.event(step, {"kind": "first_scale", "scale": scale})

        self._tap(model, step, predict)

    def _tap(self, model, step, work):
        def look(batch):
            self.disarm()
            try:
                work(batch)
            # Whatever a probe runs into, training goes on.
            except Exception as error:
                self._give_up(step, error)

        try:
            tapped = backend_batches.current().tapped(
                model, model.train_function, look
            )
        except NotImplementedError as reason:
            self._give_up(step, reason)
            return
        self._next_call.arm(model, tapped)

    def disarm(self):
        """Looks at no batch after all: there may be none before `fit` ends."""
        self._next_call.disarm()

    def tell_collapse(self, loss_scale: float, in_a_row: int, step: int):
        """Tells that the loss scale is at its floor and does not help.

        Unless the reason is told already.
        """
        if self._found:
            return
        kind = "scale_collapsed"
        numbers = {"loss_scale": loss_scale, "skipped_in_a_row": in_a_row}
        verdict = Verdict(kind, step=step, numbers=numbers, advice=advice(kind))
        self._tell(verdict, step)

    def _examine(self, model, batch, step):
        started = time.perf_counter()
        parts = data_adapter_utils.unpack_x_y_sample_weight(batch)
        try:
            for verdict in diagnose(model, *parts, step=step):
                if verdict.kind != "scale_search":  # That is normal.
                    self._tell(verdict, step)
        finally:
            self._cost = time.perf_counter() - started
            self.spent += self._cost

    def _tell(self, verdict, step):
        fault = (verdict.kind, verdict.layer, verdict.direction)
        if fault in self._told:
            return
        self._told.add(fault)
        self.verdicts.append(verdict)
        self._found |= verdict.kind != "scale_collapsed"
        event = verdict.to_dict() | {"kind": "verdict", "verdict": verdict.kind}
        self._log.event(step, event)
        if self._verbose:
            io_utils.print_msg(f"\n{verdict}")

    def _give_up(self, step, reason):
        self._failed = True
        self._log.event(
            step, {"kind": "diagnosis_failed", "reason": str(reason)[:500]}
        )
        carry_on_without("diagnose this model any more", reason)
