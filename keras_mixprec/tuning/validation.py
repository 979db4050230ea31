"""Checks returns to 16 bits, and the plan, by a metric on held-back data.

The same weights are evaluated in float32 and under a plan. The number of
evaluations is limited by the number of steps.
"""

import math

from keras_mixprec import _clock
from keras_mixprec._console import listed, print_message
from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.search import smallest_set
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.numerics.evaluation import Evaluation
from keras_mixprec.tuning.proposal import by_policy

# A run may evaluate the metric this many times, plus once for each `_STEPS`
# steps.
_EVALUATIONS, _STEPS = 50, 100

# The tuner announces an evaluation that is expected to take more seconds than
# this.
_PATIENCE = 2.0

_OVER_BUDGET = "; validation is over its budget"


class Validation:
    """Compares a metric on held-back data with its float32 value.

    All workers evaluate at the same steps, and the worst result counts.

    Args:
        tuner: The `PrecisionTuner`, for its arguments.
        watch: The `Watch`.
        repairs: `Repairs` of the model.
        records: `TunerHistory`.
        held_back: `HeldBack`, or `None`.
    """

    def __init__(self, tuner, watch, repairs, records, held_back):
        self._tuner = tuner
        self._watch = watch
        self._repairs = repairs
        self._records = records
        self._held_back = held_back
        self._evaluation = Evaluation(watch.model, held_back)
        self._cost, self._count = 0.0, 0
        self._warned = False

    def begin(self, step: int):
        """Evaluates once in float32, so that an error ends `fit` at once.

        Args:
            step: Int.

        Raises:
            ValueError: If the metric is not finite.
            Exception: Any exception that the evaluation raises.
        """
        if self._held_back is None or self._tuner.has_validated:
            return
        self._watch.synchronized_model()
        value = self._timed(self._evaluation.reference)
        event = {"kind": "validate", **self._numbers(value, None)}
        self._watch.log.event(step, event)

    def returning(self, paths: set, step: int) -> tuple[set, dict]:
        """Returns the layers that may return to 16 bits, and the new metric.

        If the metric is not within the tolerance, as few layers as possible
        stay demoted to bring it there.

        Args:
            paths: Set of paths of demoted layers that a diagnosis has found
                sound.
            step: Int.
        """
        if self._held_back is None or not paths:
            return paths, {}
        if self.over_budget(evaluations=2):
            self._keep(paths, step, _OVER_BUDGET.removeprefix("; "))
            return set(), {}
        trials = self._trials(step)
        if trials is None:
            self._keep(paths, step, "the evaluation failed")
            return set(), {}
        as_built = self._repairs.as_built
        found = smallest_set(
            sorted(paths),
            lambda kept: trials.within(kept, as_built(paths - kept)),
        )
        kept = frozenset(paths if found is None else found)
        if kept:
            value = trials.value(frozenset())
            what = f"with {len(paths)} layers in" if len(paths) > 1 else "in"
            limit = f"(tolerance={self._tuner.tolerance:g})"
            why = f"{what} 16 bits {self._compared(trials, value)} {limit}"
            why += _OVER_BUDGET * trials.over_budget
            numbers = self._numbers(trials.reference, value)
            self._keep(kept, step, why, **numbers)
        numbers = self._numbers(trials.reference, trials.value(kept))
        return paths - kept, numbers

    def _keep(self, paths, step, why, **numbers):
        self._repairs.keep(paths, f"at step {step}, {why}")
        self._repairs.tried(paths, step)
        self._records.report(
            "keep",
            step,
            f"keeps {listed(paths)} as demoted: {why}",
            paths=sorted(paths),
            **numbers,
        )

    def sign_off(self, step: int, may_demote: bool):
        """Compares the metric under the plan with its float32 value.

        If the metric is not within the tolerance, demotes as few layers as
        possible to bring it there, or only names these layers.

        Args:
            step: Int.
            may_demote: Boolean, whether layers may be demoted.
        """
        if self._held_back is None or not self._watch.taken:
            return
        self._watch.synchronized_model()
        started, within, blamed, why = _clock.now(), False, [], ""
        trials = self._trials(step)
        if trials is None:
            numbers = self._numbers(None, None)
            text = "not signed off: the evaluation failed"
        else:
            within = trials.within("now", {}, is_must=True)
            value = trials.value("now")
            if not within:
                blamed, why = self._repair(trials, value, step, may_demote)
            if blamed and not why:
                within = trials.within("repaired", {}, is_must=True)
                value, blamed = trials.value("repaired"), []
            numbers = self._numbers(trials.reference, value)
            no = "" if within else "not "
            text = (
                f"{no}signed off: {self._compared(trials, value)}, {no}within "
                f"tolerance={self._tuner.tolerance:g}{why}"
            )
        seconds = round(_clock.now() - started, 3)
        numbers |= {"within": within, "to_blame": blamed, "seconds": seconds}
        self._repairs.sign({"step": step, **numbers})
        self._records.report("sign_off", step, text, **numbers)

    def _repair(self, trials, value, step, may_demote):
        """Returns the layers to blame, and why they were not demoted."""
        repairs = self._repairs
        reason = f"in 16 bits {self._compared(trials, value)}"
        wanted = repairs.all_in_float32(step, reason, "validation")
        blamed = self._to_blame(trials, wanted)
        if not blamed:
            return [], "; no evaluations are left to find the layers to blame"
        wanted = {path: wanted[path] for path in blamed}
        named = f" because of {listed(blamed)}"
        if self._tuner.dry_run:
            changes = {p: (d.before, d.policy) for p, d in wanted.items()}
            self._records.change("demote", step, changes, wanted)
            return blamed, named
        obstacle = repairs.obstacle(self._tuner, wanted)
        if obstacle or not may_demote:
            return blamed, f"{named}; {obstacle or 'the tuner has given up'}"
        wanted |= repairs.left_alone(wanted, step)
        changes = repairs.demote(wanted)
        # Training has ended, so there is no first step to time after the
        # rebuild.
        repairs.take_rebuild_seconds()
        self._records.change("demote", step, changes, wanted)
        return blamed, ""

    def _to_blame(self, trials, wanted):
        """Returns the fewest layers to demote for a metric within tolerance."""
        self._announce(f"searches {len(wanted)} layers for the cause")
        errors = dict.fromkeys(wanted, 0.0)
        for name, own in self._watch.examiner.schedule.errors.items():
            path = name.partition("#")[0]
            error = own.get("forward", 0.0)
            if path in errors and not errors[path] >= error:
                errors[path] = min(error, 1e9)
        # Workers measure different errors on their batches, but must try the
        # layers in the same order, so they agree on the errors.
        agreed = any_worker(self._watch.model, [*errors.values()])
        errors = dict(zip(errors, agreed, strict=True))
        ranked = sorted(errors, key=errors.__getitem__, reverse=True)
        layers = self._repairs.layers()
        found = smallest_set(
            ranked,
            # With all layers in float32, the metric has its reference value, so
            # no evaluation is needed.
            lambda paths: (
                len(paths) == len(ranked)
                or trials.within(
                    paths, by_policy(layers, dict.fromkeys(paths, "float32"))
                )
            ),
        )
        blamed = found or ()
        unknown = trials.over_budget and len(blamed) == len(ranked)
        return [] if unknown else sorted(blamed)

    def _trials(self, step):
        """Returns new `_Trials`, or `None` if the float32 evaluation fails."""
        self._announce(f"evaluates the model at step {step}")
        reference, error = math.nan, None
        try:
            reference = self._timed(self._evaluation.in_float32)
        # Do not raise the error, because the other workers wait for this
        # worker's result.
        except Exception as raised:
            error = raised
        if error is None and not math.isfinite(reference):
            error = (
                f"{self._held_back.name} is {reference:g} in float32 too; "
                "check the weights and the held-back data"
            )
        (failed,) = any_worker(self._watch.model, [error is not None])
        if error is not None:
            event = failure_event("validation_failed", error)
            self._watch.log.event(step, event)
            if not self._warned:
                self._warned = True
                warn_disabled("validate", error, who="PrecisionTuner")
        return None if failed else _Trials(self, reference)

    def over_budget(self, evaluations: int) -> bool:
        """Returns whether the budget does not allow this many evaluations."""
        allowed = _EVALUATIONS + self._watch.taken // _STEPS
        return self._count + evaluations > allowed

    def evaluate(self, assignment: dict, reference: float) -> tuple:
        """Returns the metric, and whether it is within the tolerance.

        Args:
            assignment: As for `Evaluation.with_policies`.
            reference: Float. The metric in float32.
        """
        try:
            value = self._timed(
                lambda: self._evaluation.with_policies(assignment)
            )
        # Some backends reject mixed dtypes within a layer. A plan that a
        # backend rejects is not within the tolerance.
        except active.replay().REFUSALS:
            value = math.nan
        worse = self._evaluation.worse_by(value, reference)
        (worst,) = any_worker(self._watch.model, [worse])
        return value, worst <= self._tuner.tolerance

    def _timed(self, work):
        started = _clock.now()
        try:
            return work()
        finally:
            self._cost = _clock.now() - started
            self._count += 1
            budget = self._watch.budget
            budget.add("validation", self._cost, is_overhead=False)

    def _announce(self, what):
        if self._tuner.verbose and self._cost > _PATIENCE:
            about = f"about {self._cost:.0f} s an evaluation"
            print_message(f"PrecisionTuner {what} ({about}) ...")

    def _compared(self, trials, value):
        name = self._held_back.name
        return f"{name} is {value:.6g}, in float32 {trials.reference:.6g}"

    def _numbers(self, reference, value):
        return {
            "metric": self._held_back.name,
            "float32": _for_json(reference),
            "plan": _for_json(value),
            "tolerance": self._tuner.tolerance,
        }


class _Trials:
    """Evaluates the metric with the current weights, once for each key.

    Args:
        validation: `Validation`.
        reference: Float. The metric in float32, which is finite.
    """

    def __init__(self, validation, reference):
        self.reference = reference
        self.over_budget = False
        self._validation = validation
        self._known = {}

    def within(self, key, assignment: dict, is_must: bool = False) -> bool:
        """Returns whether the metric is within the tolerance.

        Returns `False` if the budget allows no evaluation.

        Args:
            key: Identifies the evaluation.
            assignment: As for `Evaluation.with_policies`.
            is_must: Boolean, whether to ignore the budget.
        """
        if key not in self._known:
            if not is_must:
                self.over_budget |= self._validation.over_budget(1)
                if self.over_budget:
                    return False
            self._known[key] = self._validation.evaluate(
                assignment, self.reference
            )
        return self._known[key][1]

    def value(self, key) -> float:
        """Returns the metric that `within` has computed, or NaN."""
        return self._known.get(key, (math.nan,))[0]


def _for_json(value):
    known = value is None or math.isfinite(value)
    return value if known else str(value)
