"""Demotes and restores layers, and keeps track of demoted layers."""

import weakref

import keras

from keras_mixprec import _clock
from keras_mixprec.formats import format_share
from keras_mixprec.keras_internals import Functional
from keras_mixprec.monitoring.attach import guard_of
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.casts import isolated_layers
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.set_policies import (
    add_reasons,
    reasons_of,
    rebuild_functions,
)
from keras_mixprec.policies.summary import model_share_in_16_bits
from keras_mixprec.tuning.plan_store import Demotion, check_state, left_aside
from keras_mixprec.tuning.proposal import by_policy, layers_of

# The text between the reason for a demotion and the reason for keeping the
# demotion.
_KEPT = "; kept "

_ALONE = "alone between float32 layers: casts cost more than 16 bits save"

_OF_MODELS = weakref.WeakKeyDictionary()


class Repairs:
    """The demotions of one model, over all calls to `fit`.

    Args:
        model: A built `keras.Model`, held by a weak reference.

    Attributes:
        demotions: Dict from layer path to `Demotion`.
        tries: Dict from layer path to the number of times that the layer needed
            its demotion.
        rebuilds: Int. How many times the model was recompiled.
        asked: Dict from layer path to the policy that the user's code has set.
        harmful: Set of the paths whose demotion was undone.
        sign_off: Dict, the result of the validation at the end of training;
            `None` before.
    """

    def __init__(self, model):
        self._reference = weakref.ref(model)
        self.demotions = {}
        self.tries = {}
        self.rebuilds = 0
        self.asked = self._left = self.policies()
        self.harmful = set()
        self.sign_off: dict | None = None
        self._share_at_first = self.share_in_16_bits()
        self._tried_together = True
        self._rebuilt_at = None
        # Step numbers that count over all calls to `fit`. The steps of the log
        # may restart in each call.
        self._steps = self._earlier = self._quiet_since = 0
        self._waiting_since = {}

    @classmethod
    def of(cls, model) -> "Repairs":
        """Returns the repairs of a model after its last `fit`.

        If the user has set the policy of a layer since then, the layer no
        longer counts as demoted.

        Args:
            model: A built `keras.Model`.
        """
        known = _OF_MODELS.get(model)
        if known is None:
            known = _OF_MODELS[model] = cls(model)
        known._notice_others()
        return known

    def _notice_others(self):
        """Forgets the demotions of layers whose policy the user has set."""
        now = self.policies()
        if now != self._left:
            kept = {p for p in now if now[p] == self._left.get(p)}
            self.asked = now | {p: self.asked[p] for p in kept}
            demotions = self.demotions.items()
            self.demotions = {p: d for p, d in demotions if p in kept}
            self._left, self.rebuilds = now, 0
            self.harmful &= kept
            self._measure_share_at_first()

    @property
    def _model(self):
        return self._reference()

    def layers(self) -> dict:
        """Returns a dict from path to layer."""
        return layers_of(self._model)

    def policies(self) -> dict:
        """Returns a dict from layer path to the current policy."""
        return {p: policy_name(layer) for p, layer in self.layers().items()}

    def plan(self) -> PrecisionPlan:
        """Returns the current plan of the model, with reasons."""
        plan = PrecisionPlan.from_model(self._model)
        own = {p: d.reason for p, d in self.demotions.items()}
        reasons = reasons_of(self._model) | own
        reasons = {p: reason for p, reason in reasons.items() if p in plan}
        return PrecisionPlan(plan, plan.default, reasons)

    def share_in_16_bits(self) -> float:
        """Returns the share of the FLOPs that are in 16 bits now."""
        return model_share_in_16_bits(self._model)

    def _measure_share_at_first(self):
        with temporary_policies(self.as_built(self.demotions)):
            self._share_at_first = self.share_in_16_bits()

    def demoted_fraction(self) -> float:
        """Returns the fraction of the initial 16-bit FLOPs that are demoted."""
        if not self._share_at_first:
            return 0.0
        return 1 - self.share_in_16_bits() / self._share_at_first

    # The methods below return possible demotions, as dicts from layer path to
    # `Demotion`.

    def wanted(self, proposal: dict, step: int) -> dict:
        """Returns the new demotions in a proposal."""
        wanted = {}
        for path, layer in self.layers().items():
            if path not in proposal or is_fixed(layer):
                continue
            policy, verdict = proposal[path]
            if policy_name(layer) != policy:
                why = verdict.kind, verdict.finding, verdict.cause_at(path)
                wanted[path] = self._demotion(path, layer, policy, step, *why)
        return wanted

    def left_alone(self, wanted: dict, step: int) -> dict:
        """Returns demotions for layers that `wanted` would isolate.

        A single 16-bit layer between float32 layers costs more in casts than
        it saves.

        Args:
            wanted: Dict from path to `Demotion`.
            step: Int.
        """
        before = [*map(id, isolated_layers(self._model))]
        with temporary_policies(self._as_wanted(wanted)):
            isolated = isolated_layers(self._model)
        alone = {id(layer) for layer in isolated if id(layer) not in before}
        why = "float32", step, "casts", _ALONE
        return {
            path: self._demotion(path, layer, *why)
            for path, layer in self.layers().items()
            if id(layer) in alone
        }

    def all_in_float32(self, step: int, reason: str, kind: str) -> dict:
        """Returns a demotion to float32 for every 16-bit layer.

        Args:
            step: Int.
            reason: String.
            kind: String. The `kind` of these demotions.
        """
        return {
            path: self._demotion(path, layer, "float32", step, kind, reason)
            for path, layer in self.layers().items()
            if is_16_bit(policy_name(layer)) and not is_fixed(layer)
        }

    def _demotion(self, path, layer, *others):
        known = self.demotions.get(path)
        return Demotion(known.before if known else policy_name(layer), *others)

    def _as_wanted(self, wanted):
        policies = {path: d.policy for path, d in wanted.items()}
        return by_policy(self.layers(), policies)

    def obstacle(self, tuner, wanted: dict) -> str | None:
        """Returns the reason why demotions are not possible, or `None`.

        Args:
            tuner: The `PrecisionTuner`, for its limits.
            wanted: Dict from path to `Demotion`.
        """
        if not wanted:
            return "the layers at fault cannot be demoted any further"
        if self.rebuilds >= tuner.max_rebuilds:
            return f"max_rebuilds={tuner.max_rebuilds} is reached"
        with temporary_policies(self._as_wanted(wanted)):
            fraction = self.demoted_fraction()
        if fraction > tuner.max_demoted_fraction:
            return (
                f"the repair would demote {format_share(fraction)} of the "
                "FLOPs in 16 bits, which is more than max_demoted_fraction="
                f"{tuner.max_demoted_fraction}"
            )
        return None

    # The methods below change policies. They return dicts from layer path to
    # the policies before and after.

    def demote(self, wanted: dict) -> dict:
        """Demotes layers, and returns the changes.

        Args:
            wanted: Dict from path to `Demotion`.
        """
        self._count(wanted)
        self.demotions |= wanted
        steps = self._earlier
        self._waiting_since |= {p: d.step + steps for p, d in wanted.items()}
        self._tried_together = False
        return self._change({path: d.policy for path, d in wanted.items()})

    def restore(self, paths) -> dict:
        """Restores the original policies of layers, and returns the changes."""
        paths = [path for path in self.demotions if path in paths]
        return self._change({p: self.demotions.pop(p).before for p in paths})

    def recompile(self):
        """Recompiles the train function, for a new update rule."""
        self._rebuild(lambda: rebuild_functions(self._model))

    @property
    def is_rebuilt(self) -> bool:
        """Returns whether the seconds of a rebuild have not been taken yet."""
        return self._rebuilt_at is not None

    def take_rebuild_seconds(self) -> float | None:
        """Returns the seconds of the last rebuild and its first step, once."""
        started, self._rebuilt_at = self._rebuilt_at, None
        return None if started is None else _clock.now() - started

    def sign(self, sign_off: dict):
        """Records the validation at the end of training."""
        self.sign_off = sign_off

    def _change(self, policies):
        before = self.policies()
        self._rebuild(lambda: self._set(policies))
        return {p: (before[p], policy) for p, policy in policies.items()}

    def _rebuild(self, work):
        started = _clock.now()
        work()
        # Recompiling made a new train function, so guard it too.
        guard_of(self._model).keep()
        self.rebuilds += 1
        self._rebuilt_at = started

    def _set(self, policies, reasons=None):
        policies = self.policies() | policies
        default = policies.pop(MODEL_PATH)
        apply_policy(self._model, PrecisionPlan(policies, default, reasons))
        self._left = self.policies()

    def begin(self, step: int):
        """Begins a `fit` at this step of the log."""
        self._earlier = self._steps - step
        # For layers that an earlier process demoted, the wait for a return to
        # 16 bits starts with this `fit`.
        known = dict.fromkeys(self.demotions, self._steps)
        self._waiting_since = known | self._waiting_since

    def end(self, step: int):
        """Ends a `fit` at this step of the log."""
        self._steps = self._earlier + step

    def next_trial(
        self, step: int, trouble: float, promote_after: int
    ) -> tuple:
        """Returns an event kind, and the layers to try in 16 bits again.

        If layers were demoted at different steps, a later demotion may have
        made an earlier one unnecessary. All layers are then tried once
        (`"shrink"`). After that, the wait of a layer doubles with each try
        (`"promote"`).

        Args:
            step: Int.
            trouble: The step of the last trouble in this `fit`, minus infinity
                if there was none.
            promote_after: Int. The number of steps without trouble to wait for,
                0 for never.
        """
        self.end(step)
        since = max(self._quiet_since, trouble + self._earlier)
        self._quiet_since = since
        if not self._tried_together:
            self._tried_together = True
            if len({d.step for d in self.demotions.values()}) > 1:
                return "shrink", list(self.demotions)
        if not promote_after or self._steps - since < promote_after:
            return "promote", []
        layers = self.layers()
        return "promote", [
            path
            for path in self.demotions
            if path in layers
            and self._steps - self._waiting_since[path]
            >= promote_after * 2 ** (self.tries[path] - 1)
        ]

    def tried(self, paths, step: int):
        """Records that layers still need their demotion."""
        self._count(paths)
        self._waiting_since |= dict.fromkeys(paths, step + self._earlier)

    def keep(self, paths, why: str):
        """Adds the result of the last try to the reasons for demotions.

        Args:
            paths: Iterable of paths of demoted layers.
            why: String.
        """
        for path in paths:
            demotion = self.demotions[path]
            first = demotion.reason.partition(_KEPT)[0]
            reason = f"{first}{_KEPT}{why}"
            self.demotions[path] = demotion._replace(reason=reason)

    def _count(self, paths):
        for path in paths:
            self.tries[path] = self.tries.get(path, 0) + 1

    def as_built(self, paths) -> dict:
        """Returns a dict from original policy name to layers."""
        built = {path: self.demotions[path].before for path in paths}
        return by_policy(self.layers(), built)

    def paths_of(self, layers) -> set:
        """Returns the paths of some layers."""
        ids = {id(layer) for layer in layers}
        return {p for p, layer in self.layers().items() if id(layer) in ids}

    def state(self) -> dict:
        """Returns the state that a later process needs to continue."""
        return {
            "rebuilds": self.rebuilds,
            "tries": self.tries,
            "demotions": {p: d._asdict() for p, d in self.demotions.items()},
            "asked": self.asked,
            "sign_off": self.sign_off,
        }

    def follow(self, plan: PrecisionPlan, state: dict) -> tuple[dict, dict]:
        """Continues from the entries of a plan that fit the model.

        Args:
            plan: `PrecisionPlan`.
            state: Dict, as from `state`; empty if no tuner wrote the plan.

        Returns:
            The changes, and a dict from path to the reason why the plan's entry
            is not used.

        Raises:
            ValueError: If the state is damaged.
        """
        checked = check_state(state)
        entries = {MODEL_PATH: plan.default, **plan}
        demotions, asked = checked["demotions"], self.asked
        # Older plan files have no `asked`, so take the original policies from
        # the demotions in the file.
        built = {path: d.before for path, d in demotions.items()}
        made_for = state.get("asked", {**plan, **built}) if state else asked
        made_for = {p: made_for.get(p, policy) for p, policy in asked.items()}
        containers = {
            path
            for path, layer in self.layers().items()
            if isinstance(layer, (keras.Sequential, Functional))
        }
        aside = left_aside(entries, made_for, asked, containers)
        now = self.policies()
        used = {p: policy for p, policy in entries.items() if p not in aside}
        new = {
            path: policy
            for path, policy in used.items()
            if policy != now[path]
            # Do not let the plan undo a demotion that this process made.
            and not (path in self.demotions and policy == asked[path])
        }
        self.demotions |= {p: d for p, d in demotions.items() if p in used}
        self.tries |= {p: n for p, n in checked["tries"].items() if p in used}
        self.asked = asked | {path: made_for[path] for path in used}
        if not aside:
            self.rebuilds = max(self.rebuilds, checked["rebuilds"])
        self._measure_share_at_first()
        reasons = {p: why for p, why in plan.reasons.items() if p in used}
        add_reasons(self._model, reasons)
        if new:
            self._set(new, reasons)
        return {
            path: (now[path], policy) for path, policy in new.items()
        }, aside
