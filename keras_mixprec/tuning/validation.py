"""Whether a metric on held-back data allows a return to 16 bits, and the plan.

The same weights are evaluated in float32 and under a plan. Evaluations are
counted; what is not a must has to wait until enough steps were taken.
"""

import math
from typing import Any

from keras_mixprec import _clock
from keras_mixprec._console import listed, print_message
from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.smallest_set import smallest_set
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.numerics.evaluation import Evaluation
from keras_mixprec.tuning.demotions import find_obstacle
from keras_mixprec.tuning.proposal import Proposal

# Evaluations that a run may make, and one more each so many steps.
_EVALUATIONS, _STEPS = 50, 100

# An evaluation that is expected to take longer is announced.
_PATIENCE = 2.0

_PURPOSE = "validation"


class Validation:
    """Decides by a metric on held-back data; by nothing if there are none.

    All workers evaluate at the same steps, and go by the worst of what they
    find.

    Args:
        settings: `TunerSettings`.
        session: The `Session`.
        repairs: `Repairs` of the model.
        records: `TunerHistory`.
    """

    def __init__(self, settings, session, repairs, records):
        self._settings = settings
        self._session = session
        self._repairs = repairs
        self._records = records
        self._cost, self._count = 0.0, 0
        self._warned = False
        self._evaluation: Any = None
        if settings.held_back is not None:
            self._evaluation = Evaluation(session.model, settings.held_back)

    def begin(self, step: int):
        """Evaluates once in float32, so that a mistake ends `fit` at once.

        Args:
            step: Int.

        Raises:
            ValueError: If the metric is not finite.
            Exception: Whatever the evaluation raises.
        """
        if self._evaluation is None or not self._settings.check_validate:
            return
        self._session.synchronized_model()
        value = self._timed(self._evaluation.reference)
        event = {"kind": "validate", **self._numbers(value, None)}
        self._session.log.event(step, event)

    def returning(self, paths: set, step: int) -> tuple[set, dict]:
        """Returns which layers may return to 16 bits, and the metric then.

        The fewest stay of those with which together the metric is not within
        the tolerance.

        Args:
            paths: Set of paths of demoted layers, which a diagnosis has found
                sound.
            step: Int.
        """
        if self._evaluation is None or not paths:
            return paths, {}
        if self.over_budget(evaluations=2):
            self._keep(paths, step, "validation is over its budget")
            return set(), {}
        trials = self._trials(step)
        if trials is None:
            self._keep(paths, step, "the evaluation failed")
            return set(), {}
        repairs = self._repairs

        def assignment(kept):
            return repairs.as_built(paths - kept)

        found = smallest_set(
            sorted(paths), lambda kept: trials.fit(kept, assignment(kept))
        )
        kept = frozenset(paths if found is None else found)
        if kept:
            value = trials.value(frozenset())
            what = f"with {len(paths)} layers in" if len(paths) > 1 else "in"
            limit = f"(tolerance={self._settings.tolerance:g})"
            why = f"{what} 16 bits {self._say(trials, value)} {limit}"
            why += "; validation is over its budget" * trials.over_budget
            numbers = self._numbers(trials.reference, value)
            self._keep(kept, step, why, **numbers)
        value = trials.value(kept)
        return paths - kept, self._numbers(trials.reference, value)

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
        self._settings.save_plan(self._repairs)

    # The end of training.

    def sign_off(self, step: int, may_demote: bool):
        """Holds the metric under the plan against float32's.

        If it is not within the tolerance, the fewest layers that bring it there
        are demoted, or named.

        Args:
            step: Int.
            may_demote: Boolean. Whether anything may be changed.
        """
        taken = step - self._session.first_step
        if self._evaluation is None or not taken:
            return
        self._session.synchronized_model()
        started = _clock.now()
        trials = self._trials(step)
        if trials is None:
            numbers = self._numbers(None, None)
            text = "not signed off: the evaluation failed"
            self._signed(step, numbers, False, text, started)
            return
        value = trials.first({})
        within, blamed, why = trials.within(value), [], ""
        if not within:
            blamed, why = self._repair(trials, value, step, may_demote)
            if not why:
                value = trials.first({})
                within, blamed = trials.within(value), []
        limit = f"tolerance={self._settings.tolerance:g}"
        no = "" if within else "not "
        text = f"{no}signed off: {self._say(trials, value)}, {no}within {limit}"
        numbers = self._numbers(trials.reference, value)
        self._signed(step, numbers, within, text + why, started, blamed)

    def _repair(self, trials, value, step, may_demote):
        """Demotes what is to blame; returns it, and why it is not demoted."""
        reason = f"in 16 bits {self._say(trials, value)}"
        wanted = self._repairs.all_in_float32(step, reason, "validation")
        blamed = self._to_blame(trials, wanted)
        if not blamed:
            return [], "; no evaluations were left to find the layers to blame"
        layers = [
            (p, x) for p, x in self._repairs.layers().items() if p in blamed
        ]
        proposal = Proposal((id(x), (x, "float32", None)) for _, x in layers)
        wanted = {p: d for p, d in wanted.items() if p in blamed}
        changes = {p: (d.before, d.policy) for p, d in wanted.items()}
        named = f" because of {listed(blamed)}"
        if self._settings.dry_run:
            self._records.change("demote", step, changes, wanted)
            return blamed, named
        obstacle = find_obstacle(
            self._settings, self._repairs, proposal, wanted
        )
        if obstacle or not may_demote:
            return blamed, f"{named}; {obstacle or 'the tuner has given up'}"
        wanted |= self._repairs.left_alone(proposal, step)
        changes = self._repairs.demote(wanted)
        self._repairs.rebuild_seconds()  # No step follows that compiles.
        self._records.change("demote", step, changes, wanted)
        return blamed, ""

    def _to_blame(self, trials, wanted):
        """The fewest layers without which the metric is within tolerance."""
        self._announce(f"searches {len(wanted)} layers for those to blame")
        errors = self._session.examiner.schedule.errors
        found = dict.fromkeys(wanted, 0.0)
        for name, own in errors.items():
            path = name.partition("#")[0]
            error = own.get("forward", 0.0)
            if path in found and not found[path] >= error:
                found[path] = min(error, 1e9)
        # Every worker has seen other batches.
        agreed = any_worker(self._session.model, [*found.values()])
        order = sorted(zip(agreed, range(len(found)), wanted, strict=True))
        ranked = [p for _, _, p in sorted(order, key=lambda e: (-e[0], e[1]))]
        layers = self._repairs.layers()

        def fits(paths):
            # All of them are what it is compared with.
            return len(paths) == len(ranked) or trials.fit(
                paths, {"float32": [layers[path] for path in paths]}
            )

        blamed = smallest_set(ranked, fits) or frozenset()
        unknown = trials.over_budget and len(blamed) == len(ranked)
        return [] if unknown else sorted(blamed)

    def _signed(self, step, numbers, within, text, started, blamed=()):
        numbers |= {
            "within": within,
            "to_blame": [*blamed],
            "seconds": round(_clock.now() - started, 3),
        }
        self._repairs.sign_off = {"step": step, **numbers}
        self._records.report("sign_off", step, text, **numbers)
        self._settings.save_plan(self._repairs)

    # Evaluating.

    def _trials(self, step):
        """What is compared with float32 now, `None` if nothing can be."""
        self._announce(f"evaluates the model at step {step}")
        reference, error = math.nan, None
        try:
            reference = self._timed(self._evaluation.in_float32)
        # The other workers wait for this one.
        except Exception as raised:
            error = raised
        (failed,) = any_worker(self._session.model, [error is not None])
        if error:
            self._fail(step, error)
        if failed:
            return None
        finite = math.isfinite(reference)
        (unknown,) = any_worker(self._session.model, [not finite])
        if not unknown:
            return _Trials(self, reference)
        name = self._settings.held_back.name
        self._fail(
            step,
            f"{name} is {reference:g} in float32 too, so it decides nothing: "
            "look at the weights and the held-back data",
        )
        return None

    def _fail(self, step, error):
        self._session.log.event(step, failure_event("validation_failed", error))
        if not self._warned:
            self._warned = True
            warn_disabled("validate", error, who="PrecisionTuner")

    def over_budget(self, evaluations: int) -> bool:
        """Whether so many evaluations are too many now."""
        session = self._session
        taken = session.step - session.first_step
        allowed = _EVALUATIONS + taken // _STEPS
        return self._count + evaluations > allowed

    def evaluate(self, assignment: dict, reference: float) -> tuple:
        """Returns the metric, and how much worse it is for any worker.

        Args:
            assignment: As for `Evaluation.with_policies`.
            reference: Float. The metric in float32.
        """
        try:
            value = self._timed(
                lambda: self._evaluation.with_policies(assignment)
            )
        # Some backends refuse to mix some dtypes within a layer.
        except active.replay().REFUSALS:
            value = math.nan
        worse = self._evaluation.worse_by(value, reference)
        return value, any_worker(self._session.model, [worse])[0]

    @property
    def tolerance(self) -> float:
        """As given to the tuner."""
        return self._settings.tolerance

    def _timed(self, work):
        started = _clock.now()
        try:
            return work()
        finally:
            self._cost = _clock.now() - started
            self._count += 1
            self._session.budget.add(_PURPOSE, self._cost, is_overhead=False)

    def _announce(self, what):
        if self._settings.verbose and self._cost > _PATIENCE:
            about = f"about {self._cost:.0f} s an evaluation"
            print_message(f"PrecisionTuner {what} ({about}) ...")

    def _say(self, trials, value):
        name = self._settings.held_back.name
        return f"{name} is {value:.6g}, in float32 {trials.reference:.6g}"

    def _numbers(self, reference, value):
        return {
            "metric": self._settings.held_back.name,
            "float32": _for_json(reference),
            "plan": _for_json(value),
            "tolerance": self._settings.tolerance,
        }


class _Trials:
    """What the metric is with the weights as they are, each computed once.

    Args:
        validation: `Validation`.
        reference: Float. The metric in float32, which is finite.
    """

    def __init__(self, validation, reference):
        self.reference = reference
        self.over_budget = False
        self._validation = validation
        self._known = {}
        self._worse = {}

    def first(self, assignment):
        """Returns the metric, whatever that costs."""
        value, worse = self._validation.evaluate(assignment, self.reference)
        self._worse[value] = worse
        return value

    def within(self, value):
        """Whether a metric that `first` returned is within the tolerance."""
        return self._worse[value] <= self._validation.tolerance

    def fit(self, paths, assignment):
        """Whether the metric is within tolerance, and within the budget."""
        if paths not in self._known:
            self.over_budget |= self._validation.over_budget(1)
            if self.over_budget:
                return False
            self._known[paths] = self._validation.evaluate(
                assignment, self.reference
            )
        return self._known[paths][1] <= self._validation.tolerance

    def value(self, paths):
        """Returns the metric that `fit` has found, NaN if it has not."""
        return self._known.get(paths, (math.nan,))[0]


def _for_json(value):
    known = value is None or math.isfinite(value)
    return value if known else str(value)
