"""Which rule a layer of a model matches."""

import fnmatch
import inspect

from keras_mixprec.policies.graph import (
    feeds_sensitive_operation,
    output_layers,
)
from keras_mixprec.policies.layers import LayerEntry

# Matched by the model's graph instead of by the layer's path.
OUTPUT = "<output>"
FEEDS_OPERATION = "<feeds exp, log, pow or sum>"


class Matcher:
    """Matches rules against the layers of one model.

    Args:
        rules: Iterable of `PrecisionRule`.
        model: The `keras.Model`, whose graph some rules ask about.
    """

    def __init__(self, rules, model):
        self._rules = rules
        self._special = {
            OUTPUT: output_layers(model),
            FEEDS_OPERATION: feeds_sensitive_operation(model),
        }

    def first(self, entry: LayerEntry):
        """Returns the first rule that matches the layer, or `None`."""
        return next((r for r in self._rules if self.matches(r, entry)), None)

    def matches(self, rule, entry: LayerEntry) -> bool:
        """Whether the rule matches the layer, or one that holds it."""
        candidates = entry.lineage() if rule.sublayers else [entry]
        return any(self._matches_itself(rule.match, e) for e in candidates)

    def _matches_itself(self, match, entry):
        if isinstance(match, str):
            if match in self._special:
                return id(entry.layer) in self._special[match]
            return fnmatch.fnmatchcase(entry.path, match)
        if inspect.isclass(match):
            return isinstance(entry.layer, match)
        return bool(match(entry.layer, entry.path))
