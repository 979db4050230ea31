"""Where the search for the smallest set starts from."""

from typing import NamedTuple

import keras

from keras_mixprec.keras_internals import only_runs_graph
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
        elif not only_runs_graph(entry.layer):
            start.candidates.append(entry)
    return start
