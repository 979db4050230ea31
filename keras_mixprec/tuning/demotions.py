"""Which layers a tuner has demoted, demoting more, and its limits."""

import weakref
from typing import NamedTuple

import keras

from keras_mixprec import _clock
from keras_mixprec.formats import format_share
from keras_mixprec.keras_internals import Functional
from keras_mixprec.monitoring.attach import keep_watching
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.casts import isolated_layers
from keras_mixprec.policies.layers import MODEL_PATH, walk_with_model
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.set_policies import (
    add_reasons,
    reasons_of,
    rebuild_functions,
)
from keras_mixprec.policies.summary import shares_in_16_bits
from keras_mixprec.tuning.plan_store import PlanStart
from keras_mixprec.tuning.proposal import Proposal
from keras_mixprec.tuning.state import TunerSettings

# Between the reason of a demotion and why it stays.
_KEPT = "; kept "

_ALONE = "alone between float32 layers: casts cost more than 16 bits save"


class Demotion(NamedTuple):
    """A layer that computes in a wider dtype than it was built with.

    Attributes:
        before: String. Its policy as it was built.
        policy: String. Its policy now.
        step: Int. When that changed.
        kind: String. The kind of the verdict, `"casts"`, `"give_up"` or
            `"validation"`.
        reason: String. The verdict, or why else.
        because: String. The same without numbers, to stand beside the layer.
            Empty if `reason` is short.
    """

    before: str
    policy: str
    step: int
    kind: str
    reason: str
    because: str = ""


_OF_MODELS = weakref.WeakKeyDictionary()


class Repairs:
    """The demotions of one model, over all calls of `fit`.

    Args:
        model: A built `keras.Model`, which this does not keep alive.

    Attributes:
        demotions: Dict from layer path to `Demotion`, of the demoted layers.
        tries: Dict from layer path to how often the layer turned out to need
            its demotion.
        rebuilds: Int. How often the compiled functions were recompiled.
        share_at_first: Float. Share of the FLOPs in 16 bits at the start.
        asked: Dict from layer path to the policy that the user's code has set.
        harmful: Set of the paths whose demotion was undone.
        quiet_since: Int. The step of the last trouble.
        sign_off: Dict, what a metric on held-back data was at the end of
            training; `None` before.
    """

    def __init__(self, model):
        self.demotions = {}
        self.tries = {}
        self.rebuilds = 0
        self._reference = weakref.ref(model)
        self.share_at_first = self.share_in_16_bits()
        self.asked = self._left = self.policies()
        self.harmful = set()
        self.quiet_since = self._step = 0
        self._rebuilt_at = None
        self._shrunk = True
        self._waiting_since = {}
        self.sign_off: dict | None = None

    @classmethod
    def of(cls, model) -> "Repairs":
        """Returns the repairs of a model, as its last `fit` has left them.

        A policy that was set since then is the user's: the layer is no longer
        a demoted one.

        Args:
            model: A built `keras.Model`.
        """
        known = _OF_MODELS.get(model)
        if known is None:
            known = _OF_MODELS[model] = cls(model)
        now = known.policies()
        if now != known._left:
            kept = {p for p in now if now[p] == known._left.get(p)}
            known.asked = now | {p: known.asked[p] for p in kept}
            demotions = known.demotions.items()
            known.demotions = {p: d for p, d in demotions if p in kept}
            known._left, known.rebuilds = now, 0
            known.harmful &= kept
            with temporary_policies(known.as_built(known.demotions)):
                known.share_at_first = known.share_in_16_bits()
        return known

    @property
    def _model(self):
        return self._reference()

    def is_of(self, model) -> bool:
        """Whether these are the repairs of a model."""
        return self._model is model

    def policies(self) -> dict:
        """Returns a dict from path to policy, of the model as it is."""
        return {p: policy_name(layer) for p, layer in self.layers().items()}

    def plan(self) -> PrecisionPlan:
        """Returns the plan that the model follows, with the reasons."""
        plan = PrecisionPlan.from_model(self._model)
        own = {p: d.reason for p, d in self.demotions.items()}
        reasons = reasons_of(self._model) | own
        reasons = {p: reason for p, reason in reasons.items() if p in plan}
        return PrecisionPlan(plan, plan.default, reasons)

    def containers(self) -> set:
        """Returns the paths of what is made of layers alone."""
        kinds = keras.Sequential, Functional
        return {p for p, x in self.layers().items() if isinstance(x, kinds)}

    def share_in_16_bits(self) -> float:
        """Returns the share of the FLOPs in 16 bits now."""
        return shares_in_16_bits(self._model).flops

    def demoted_fraction(self) -> float:
        """Returns the fraction of the initial 16-bit FLOPs that is demoted."""
        if not self.share_at_first:
            return 0.0
        return 1 - self.share_in_16_bits() / self.share_at_first

    def wanted(self, proposal, step: int) -> dict:
        """Returns, by path, the demotions of a `Proposal` that are new."""
        wanted = {}
        for path, layer in self.layers().items():
            if id(layer) not in proposal or is_fixed(layer):
                continue
            _, policy, verdict = proposal[id(layer)]
            now = policy_name(layer)
            if now != policy:
                why = verdict.kind, verdict.finding, verdict.cause_at(path)
                wanted[path] = self._demotion(path, now, policy, step, *why)
        return wanted

    def left_alone(self, proposal, step: int) -> dict:
        """Returns, by path, the demotions of layers that others leave alone.

        Args:
            proposal: `Proposal` of the others.
            step: Int.
        """
        before = {id(layer) for layer in isolated_layers(self._model)}
        with temporary_policies(proposal.assignment()):
            layers = [
                x for x in isolated_layers(self._model) if id(x) not in before
            ]
        return {
            path: self._demotion(
                path, policy_name(layer), "float32", step, "casts", _ALONE
            )
            for path, layer in self.layers().items()
            if any(layer is other for other in layers)
        }

    def all_in_float32(self, step: int, reason: str, kind: str) -> dict:
        """Returns, by path, the demotion of every layer in 16 bits.

        Args:
            step: Int.
            reason: String.
            kind: String. The `kind` of these demotions.
        """
        return {
            path: self._demotion(
                path, policy_name(layer), "float32", step, kind, reason
            )
            for path, layer in self.layers().items()
            if is_16_bit(policy_name(layer)) and not is_fixed(layer)
        }

    def _demotion(self, path, now, *others):
        known = self.demotions.get(path)
        return Demotion(known.before if known else now, *others)

    def demote(self, wanted: dict) -> dict:
        """Demotes layers.

        Args:
            wanted: Dict from path to `Demotion`.

        Returns:
            Dict from path to the names of the policies before and after.
        """
        before = {path: d.before for path, d in wanted.items()}
        before |= {
            path: self.demotions[path].policy
            for path in wanted.keys() & self.demotions.keys()
        }
        self._count(wanted)
        self.demotions |= wanted
        self._waiting_since |= {path: d.step for path, d in wanted.items()}
        self._shrunk = False
        self._apply_policies({path: d.policy for path, d in wanted.items()})
        return {path: (before[path], d.policy) for path, d in wanted.items()}

    def restore(self, paths) -> dict:
        """Restores the policies that layers were built with.

        Returns what `demote` does.
        """
        demotions = {p: d for p, d in self.demotions.items() if p in paths}
        for path in demotions:
            del self.demotions[path]
        self._apply_policies({path: d.before for path, d in demotions.items()})
        return {path: (d.policy, d.before) for path, d in demotions.items()}

    def next_trial(self, step: int, quiet: int, promote_after: int) -> tuple:
        """Returns an event kind, and the layers to try in 16 bits again.

        After a demotion, once, all layers if they were demoted at different
        steps: a later one may have made earlier ones needless (`"shrink"`).
        After that each by itself, after ever longer waits (`"promote"`).

        Args:
            step: Int.
            quiet: Int. For how many steps nothing has happened.
            promote_after: Int. The number of steps to wait for, 0 for ever.
        """
        self._step = step
        if not self._shrunk:
            self._shrunk = True
            if len({d.step for d in self.demotions.values()}) > 1:
                return "shrink", list(self.demotions)
        if not promote_after or quiet < promote_after:
            return "promote", []
        layers = self.layers()
        return "promote", [
            path
            for path in self.demotions
            if path in layers
            and step - self._waiting_since[path]
            >= promote_after * 2 ** (self.tries[path] - 1)
        ]

    def begin(self, step: int):
        """Goes on counting steps at `step`, where a `fit` begins."""
        ahead = step - self._step
        self._waiting_since = {
            # Those of an earlier process were counted from another start.
            path: self._waiting_since.get(path, self._step) + ahead
            for path in self.demotions
        }
        self.quiet_since += ahead
        self._step = step

    def end(self, step: int):
        """A `fit` ends with this step."""
        self._step = step

    def tried(self, paths, step: int):
        """Takes note that layers still need their demotion."""
        self._count(paths)
        self._waiting_since |= dict.fromkeys(paths, step)

    def keep(self, paths, why: str):
        """Adds to the reasons of demotions why they stay, as of the last try.

        Args:
            paths: Iterable of paths of demoted layers.
            why: String.
        """
        for path in paths:
            demotion = self.demotions[path]
            first = demotion.reason.partition(_KEPT)[0]
            reason = f"{first}{_KEPT}{why}"
            self.demotions[path] = demotion._replace(reason=reason)

    def as_built(self, paths) -> dict:
        """Returns a dict from policy name to the layers that had it."""
        layers, found = self.layers(), {}
        for path in paths:
            before = self.demotions[path].before
            found.setdefault(before, []).append(layers[path])
        return found

    def paths_of(self, layers) -> set:
        """Returns the paths of some layers."""
        ids = {id(layer) for layer in layers}
        return {p for p, layer in self.layers().items() if id(layer) in ids}

    def rebuild_seconds(self) -> float | None:
        """Returns what the last rebuild cost, once, when its step is done."""
        if self._rebuilt_at is None:
            return None
        seconds = _clock.now() - self._rebuilt_at
        self._rebuilt_at = None
        return seconds

    def state(self) -> dict:
        """Returns what another process needs to go on from here."""
        return {
            "rebuilds": self.rebuilds,
            "tries": self.tries,
            "demotions": {p: d._asdict() for p, d in self.demotions.items()},
            "asked": self.asked,
            "sign_off": self.sign_off,
        }

    def follow(self, start: PlanStart) -> dict:
        """Continues from a plan.

        Args:
            start: `PlanStart`, what is used of it.

        Returns:
            Dict from path to the policies before and after.
        """
        now, used, state = self.policies(), start.used, start.state
        changes = {
            path: (now[path], policy)
            for path, policy in used.items()
            if policy != now[path]
            # What this process has found to be needed stays.
            and not (path in self.demotions and policy == self.asked[path])
        }
        self.demotions |= {
            path: Demotion(**fields)
            for path, fields in state["demotions"].items()
            if path in used
        }
        self.tries |= {p: n for p, n in state["tries"].items() if p in used}
        self.asked = self.asked | start.asked
        if not start.aside:
            self.rebuilds = max(self.rebuilds, state["rebuilds"])
        with temporary_policies(self.as_built(self.demotions)):
            self.share_at_first = self.share_in_16_bits()
        add_reasons(self._model, start.reasons)
        if changes:
            policies = {p: policy for p, (_, policy) in changes.items()}
            self._set(policies, start.reasons)
        return changes

    def _count(self, paths):
        for path in paths:
            self.tries[path] = self.tries.get(path, 0) + 1

    def layers(self) -> dict:
        """Returns a dict from path to layer, of the model as it is."""
        return {e.path: e.layer for e in walk_with_model(self._model)}

    def recompile(self):
        """Compiles the train function again, for another update rule."""
        self._rebuild(lambda: rebuild_functions(self._model))

    def _apply_policies(self, policies):
        self._rebuild(lambda: self._set(policies))

    def _rebuild(self, work):
        started = _clock.now()
        work()
        keep_watching(self._model)
        self.rebuilds += 1
        self._rebuilt_at = started

    def _set(self, policies, reasons=None):
        policies = self.policies() | policies
        default = policies.pop(MODEL_PATH)
        apply_policy(self._model, PrecisionPlan(policies, default, reasons))
        self._left = self.policies()


def find_obstacle(
    settings: TunerSettings, repairs: Repairs, proposal: Proposal, wanted: dict
) -> str | None:
    """Returns why a repair is not possible, `None` if it is.

    Args:
        settings: `TunerSettings`.
        repairs: `Repairs` of the model.
        proposal: `Proposal`.
        wanted: Dict from path to `Demotion`, what that would change.
    """
    if not wanted:
        return "the layers at fault cannot be demoted any further"
    if repairs.rebuilds >= settings.max_rebuilds:
        return f"max_rebuilds={settings.max_rebuilds} is reached"
    with temporary_policies(proposal.assignment()):
        fraction = repairs.demoted_fraction()
    if fraction > settings.max_demoted_fraction:
        return (
            f"the repair would demote {format_share(fraction)} of the FLOPs "
            f"in 16 bits, more than max_demoted_fraction="
            f"{settings.max_demoted_fraction}"
        )
    return None
