"""Where the search for the smallest set starts from."""

from typing import NamedTuple

import keras

from keras_mixprec.diagnosis.smallest_set import instability
from keras_mixprec.keras_internals import only_runs_graph
from keras_mixprec.numerics.dry_step import DryStep
from keras_mixprec.policies.layers import LayerEntry, walk_with_model
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name
from keras_mixprec.policies.rules import Matcher


class StartingPoint(NamedTuple):
    """The policies of a model's layers before the search.

    Attributes:
        policies: Dict of path to policy name, the model itself included.
        reasons, notes: As in a `PrecisionPlan`.
        candidates: List of `LayerEntry`, what may go to float32 or not.
        layers: Dict of path to layer, the model itself included.
    """

    policies: dict
    reasons: dict
    notes: dict
    candidates: list[LayerEntry]
    layers: dict

    def assignment(self) -> dict:
        """Returns the layers that follow each policy, by its name."""
        found = {}
        for path, policy in self.policies.items():
            found.setdefault(policy, []).append(self.layers[path])
        return found


def starting_point(
    model: keras.Model, policy: str, matcher: Matcher
) -> StartingPoint:
    """Returns what the rules, the model and the layers themselves resolve.

    Args:
        model: A built `keras.Model`. If any of its layers computes in 16
            bits, those that do not are meant to.
        policy: String. What everything else follows.
        matcher: What finds the rule for a layer.
    """
    entries = walk_with_model(model)
    mixed = any(is_16_bit(policy_name(e.layer)) for e in entries)
    layers = {entry.path: entry.layer for entry in entries}
    start = StartingPoint({}, {}, {}, [], layers)
    for entry in entries:
        own, path = policy_name(entry.layer), entry.path
        rule = None if entry.layer is model else matcher.first(entry)
        start.policies[path] = policy
        if is_fixed(entry.layer):
            start.policies[path] = own
            start.notes[path] = f"left alone: it follows {own}"
        elif rule:
            start.policies[path] = rule.policy
            start.reasons[path] = rule.reason
        elif mixed and not is_16_bit(own):
            start.policies[path] = own
            start.reasons[path] = f"the model keeps it in {own}"
        elif _computes(entry.layer):
            start.candidates.append(entry)
    return start


def _computes(layer):
    """Whether a layer does more than call others on its inputs as they are."""
    return not only_runs_graph(layer)


def add_instabilities(found: dict, exact: DryStep, paths: set, scale: float):
    """Raises the instabilities that one step in float32 gives reason for.

    Each layer runs again on the inputs it had, once in what it computes in
    now and once in float32, forward and backward.

    Args:
        found: Dict of path to the largest instability so far: the layer's error
            as a multiple of the threshold that the diagnosis has for it.
        exact: The step.
        paths: The paths of the layers to be ranked.
        scale: Float. The loss scale.
    """
    for call in exact.calls:
        if call.path in paths:
            before = found.get(call.path, 0.0)
            found[call.path] = max(before, instability(call, scale))
