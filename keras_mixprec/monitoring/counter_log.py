"""Reads the counters when due; logs skipped steps and the loss scale."""

import contextlib
from collections import defaultdict

from keras_mixprec import _clock
from keras_mixprec.formats import format_power
from keras_mixprec.loss_scaling.ensure import lacks_loss_scaling
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import DynamicLossScale
from keras_mixprec.loss_scaling.stages import scaling_call
from keras_mixprec.monitoring.counters import Glance, reason_to_stop
from keras_mixprec.monitoring.loss_curve import LossCurve
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS
from keras_mixprec.monitoring.speed import READINGS
from keras_mixprec.policies.layers import has_own_step, walk_with_model
from keras_mixprec.reporting.layer_tables import Thinning, rows_for
from keras_mixprec.reporting.low_scale import LowScales
from keras_mixprec.reporting.schema import SCALE, curve_tag
from keras_mixprec.reporting.text_formats import markdown_table

# The maximum number of skipped steps that are logged in full, at half a kB
# each. A run that fails overnight may skip a million steps.
_IN_FULL = 1000


class Skips:
    """Logs skipped steps and the curve of the loss scale.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._left = _IN_FULL
        self._thinning = Thinning()
        # Events that are not logged yet, by kind and optimizer.
        self._events: dict[tuple, dict] = {}
        self._points: dict[str, list] = {}
        # True for an optimizer if its last two points are equal. The next
        # unchanged point may then replace the last one.
        self._moves: dict[str, bool] = {}

    def report(self, name: str, reading):
        """Logs the skipped steps and loss scales in a reading.

        Args:
            name: String. The attribute name of the optimizer, `""` for a
                single optimizer.
            reading: `Reading` of that optimizer.
        """
        self._log_steps(name, reading)
        self._add_points(name, reading.points)
        waits = self._events or any(self._points.values())
        if waits and self._thinning.due():
            self.report_rest(reading.step)

    def report_rest(self, step: int):
        """Logs all data that have not been logged yet.

        Args:
            step: Int.
        """
        for name, points in self._points.items():
            if points:
                self._log.rows(step, SCALE, points, optimizer=name)
        for event in self._events.values():
            self._log.event(step, event)
        self._points.clear()
        self._events.clear()

    def _wait(self, kind, name, first, last, count=0):
        start = {"kind": kind, "optimizer": name, "first_step": first}
        event = self._events.setdefault((kind, name), start)
        event["last_step"] = last
        if count:
            event["count"] = event.get("count", 0) + count

    def _log_steps(self, name, reading):
        step = reading.step
        steps = reading.new_steps[: self._left]
        self._left -= len(steps)
        for skipped in steps:
            event = {
                "kind": "skipped_step",
                "optimizer": name,
                "at_step": skipped.step,
                "scale": skipped.scale,
                "variables": skipped.variables,
                "kinds": skipped.kinds,
            }
            if skipped.loss:
                event["loss"] = skipped.loss
            if skipped.inputs:
                event["bad_input"] = skipped.inputs
            self._log.event(step, event)
        if steps:
            tag = curve_tag("mixprec/skipped_step", name)
            self._log.text(step, tag, markdown_table(_rows(steps)))
        blocks = [*reading.others]
        if others := reading.new_steps[len(steps) :]:
            blocks.append((others[0].step, others[-1].step, len(others)))
        for block in blocks:
            self._wait("skipped_steps_not_kept", name, *block)
        for gap in reading.gaps:
            self._wait("loss_scale_not_known", name, *gap)

    def _add_points(self, name, points):
        rows = self._points.setdefault(name, [])
        start, *points = points
        if name not in self._moves:
            rows.append(start)
            self._moves[name] = False
        for point in points:
            changed = point.scale != start.scale
            if changed or point.skipped != start.skipped:
                # A stretch of the loss scale curve without a change needs only
                # its two end points.
                if rows and self._moves[name] and not changed:
                    rows.pop()
                rows.append(point)
                self._moves[name] = not changed
            start = point


def _rows(steps):
    return [
        {
            "step": step.step,
            "loss scale": format_power(step.scale),
            "loss": ", ".join(step.loss) or "",
            "non-finite gradients": ", ".join(
                _with_kinds(path, step.kinds.get(path))
                for path in step.variables[:5]
            )
            + (f" and {n} more" if (n := len(step.variables) - 5) > 0 else ""),
        }
        for step in steps
    ]


def _with_kinds(path, kinds):
    return f"{path} ({', '.join(kinds)})" if kinds else path


def lack_of_scaling(model, used: dict, trained: bool) -> str | None:
    """Returns the part of a float16 model that fails to scale the loss.

    Args:
        model: A compiled `keras.Model`.
        used: Dict of `StepReader`s of the loss scale optimizers in use.
        trained: Boolean, whether a step has been taken, which shows the
            optimizers in use.

    Returns:
        `"optimizer"`, `"train_step"`, or `None` if the loss is scaled.
        `CounterLog` adds `"apply"` if no gradients reach the optimizer.
    """
    if lacks_loss_scaling(model):
        return "optimizer"
    if not trained or not _computes_in_float16(model):
        return None
    if any(reader.optimizer.loss_not_scaled for reader in used.values()):
        return "train_step"
    # `compile` may have created an optimizer that a custom `train_step`
    # ignores. Such an optimizer does not scale the loss.
    own = getattr(model, "optimizer", None)
    scaled = isinstance(own, LossScaleOptimizer)
    return "optimizer" if scaled and not used else None


def _remedy(model, lack):
    """Returns advice for a loss that is not scaled."""
    if lack == "apply":
        return (
            "Pass the scaled gradients to `optimizer.apply` in `train_step`. "
            "Without that call the optimizer cannot count skipped steps."
        )
    call = f"all `loss = optimizer.{scaling_call()}` in `train_step`."
    if lack == "train_step":
        return f"C{call}"
    wrapper = "keras_mixprec.LossScaleOptimizer"
    if has_own_step(model):
        return f"Wrap each optimizer in {wrapper}, and c{call}"
    return (
        f"Compile with {wrapper}, or call "
        "keras_mixprec.ensure_loss_scaling(model)."
    )


def _computes_in_float16(model):
    entries = walk_with_model(model)
    return any(e.layer.compute_dtype == "float16" for e in entries)


# The maximum number of points on the curve of one variable. These curves make
# up most of a log: a million steps with 400 variables take 40 MB. Models with
# more variables get fewer points per variable.
ROWS_BY_VARIABLE = 128
_VARIABLES = 400


def rows_by_variable(count: int) -> int:
    """Returns the number of points per interval for each variable.

    Args:
        count: Int. The number of variables.
    """
    return rows_for(count, _VARIABLES, ROWS_BY_VARIABLE)


class CounterLog:
    """Reads the counters from time to time and logs changes.

    Args:
        watch: The `Watch`.

    Attributes:
        step: Int. The step of the last reading, `None` before the first.
        due_at: Int. The step at which to look at the counters again.
        seen: `Glance` from the last look.
        trouble: Boolean, whether the last reading shows more than a search for
            the loss scale. Signs are five skipped steps in a row, five skipped
            steps and a scale below 1, or five new non-finite losses. If losses
            are not counted, a non-finite mean loss is a sign.
        reason_to_stop: String. Why training must stop, or `None`.
        loss: `LossCurve`.
    """

    def __init__(self, watch):
        self._watch = watch
        self._counters, self._log = watch.counters, watch.log
        count = len(watch.model.trainable_variables)
        self._by_variable = Thinning(rows_by_variable(count))
        self._skips = Skips(watch.log)
        self._low_scales = LowScales(watch.log)
        self.loss = LossCurve(watch.model, watch.log)
        self._lack, self._lacks_read = None, set()
        self._losses, self.step = 0, None
        self.due_at = 0
        self.seen = self._known = Glance()
        self.trouble = False
        self.reason_to_stop: str | None = None

    def read_if_due(self, step: int, gap: int | None = None):
        """Looks at a few numbers, and reads all counters if they have changed.

        Also reads all counters if the step count has doubled since the last
        reading, or if the budget allows a reading. A slow machine therefore
        finds the same faults, and `stop_after` acts at the exact step.

        Args:
            step: Int. Step of the log.
            gap: Int. Steps between two readings, or `None` to use the settings.
        """
        watch = self._watch
        if step < self.due_at and gap is None or step == self.step:
            return
        gap = watch.settings.update_freq if gap is None else gap
        taken, before = (s - watch.first_step for s in (step, self.step))
        if step - self.step >= gap:
            doubled = taken >= 2 * before and watch.settings.max_overhead
            if doubled or watch.budget.left(READINGS) > 0:
                self.read(step)
                return
        before = self._known
        if self.look()._replace(in_a_row=0) != before._replace(in_a_row=0):
            self.read(step)
        else:
            self._plan(step)

    def look(self) -> Glance:
        """Returns the few numbers that show whether anything has happened."""
        with self.synchronized():
            self.seen = self._counters.now(self.loss.read())
        return self.seen

    def _plan(self, step):
        """Sets the next look, no later than the step of `stop_after`."""
        settings = self._watch.settings
        gap, most = settings.update_freq, settings.stop_after
        if most is not None:
            gap = min(gap, max(most - self.seen.in_a_row, 1))
        self.due_at = step + gap

    def read(self, step: int):
        """Reads the counters, at most once per step.

        Args:
            step: Int. Step of the log.
        """
        if step == self.step:
            return
        self.step = step
        self.due_at = step + 1  # Retry at the next step if the reading fails.
        watch = self._watch
        with self.synchronized():
            used = self._counters.used()
            readings = {name: w.read(step) for name, w in used.items()}
            counted = self._counters.nonfinite_curves()
            counted |= self._counters.scales_of_subclasses()
            loss = self.loss.read()
            now = self.seen = self._known = self._counters.now(loss)
        # Before logging, restore the loss scales that bad data lowered, so that
        # the log shows the restored scales at this step.
        readings = watch.bad_data.put_scales_back(watch, readings)
        # Check the scaling of the loss twice: before the first step and after
        # it.
        if (trained := watch.taken > 0) not in self._lacks_read:
            self._lacks_read.add(trained)
            self._note_lack(lack_of_scaling(watch.model, used, trained))
        started = _clock.now()
        rules = {name: w.optimizer.rule for name, w in used.items()}
        self._write(readings, rules, counted)
        many = self._new_losses(now.losses) >= TRIGGER_STEPS
        self.trouble |= many or now.mean_is_lost
        self.loss.write(step, loss, now.losses)
        self._plan(step)
        watch.budget.add(READINGS, _clock.now() - started)
        watch.bad_data.report(watch)

    def _note_lack(self, lack):
        """Logs that a part fails to scale the loss, once for each part."""
        if lack not in (None, self._lack):
            event = {"kind": "no_loss_scaling", "by": lack}
            advice = _remedy(self._watch.model, lack)
            self._log.event(self.step, event | {"advice": advice})
        self._lack = lack

    def _is_idle(self):
        """Returns whether training never applied its optimizers."""
        used = self._counters.used().values()
        applied = any(reader.since_start().attempted for reader in used)
        trains = self._watch.taken and self._watch.model.trainable_variables
        return used and trains and not applied

    def _new_losses(self, count):
        """Counts new non-finite losses that bad data do not explain."""
        before = self._losses
        self._losses = count - self._watch.bad_data.count
        return self._losses - before

    def read_loss(self) -> tuple | None:
        """Returns the sums of losses and of their weights in this epoch."""
        with self.synchronized():
            return self.loss.read()

    def hold_loss(self):
        """Keeps the sums during a validation, which reuses their variables."""
        with self.synchronized():
            self.loss.hold()

    def end_epoch(self, step: int, logs: dict | None):
        """Logs the loss of an epoch that ends with this step."""
        with self.synchronized():
            self.loss.end_epoch(step, logs)

    @contextlib.contextmanager
    def synchronized(self):
        """Context in which the counters include the last step."""
        started, watch = _clock.now(), self._watch
        with self._counters.synchronized(self.loss.variables) as waited:
            watch.performance.clock.waited(watch.step, waited)
            yield
        watch.budget.add(READINGS, _clock.now() - started - waited)

    def close(self):
        """Logs all remaining data and the final counts."""
        self._watch.examiner.report_rest()
        self._skips.report_rest(self.step)
        if self._is_idle():
            self._note_lack("apply")
        events = self._counters.nonfinite_events()
        for event in events + self._watch.bad_data.events():
            self._log.event(self.step, event)

    def _write(self, readings, rules, counted):
        curves, by_variable = defaultdict(dict), self._by_variable.due()
        self._classify(readings)
        for name, reading in readings.items():
            for step, values in reading.curves(name, by_variable).items():
                curves[step] |= values
            self._skips.report(name, reading)
            if isinstance(rule := rules[name], DynamicLossScale):
                bad = {x.step for x in reading.new_steps if x.inputs}
                growth = rule.growth_factor, rule.growth_interval
                self._low_scales.read(name, reading.points, bad, *growth)
        curves[self.step] |= counted
        for step in sorted(curves):
            # An earlier `fit` may have logged this step already, so do not log
            # the step again.
            if step >= self._log.next_step:
                self._log.scalars(step, curves[step])

    def _classify(self, readings):
        """Decides from the readings whether there is trouble."""
        watch, found = self._watch, readings.values()
        if any(reading.new_steps or reading.grown for reading in found):
            watch.ranges.hurry()
        collapsed = [reading for reading in found if reading.collapsed]
        watch.examiner.note_collapse(collapsed[-1] if collapsed else None)
        self.trouble = any(reading.is_trouble for reading in found)
        verdicts = watch.verdicts
        most = watch.settings.stop_after
        reasons = (reason_to_stop(r, verdicts, most) for r in found)
        self.reason_to_stop = next(filter(None, reasons), None)
