"""Rules that give some layers a different policy from the model's."""

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import keras

from keras_mixprec._checks import check_list, check_type
from keras_mixprec.policies.graph import (
    feeds_sensitive_operation,
    output_layers,
)
from keras_mixprec.policies.layers import (
    LayerEntry,
    check_model,
    walk,
    what_was_meant,
)
from keras_mixprec.policies.names import check_policy

# Patterns that match a layer's place in the model's graph, not its path.
OUTPUT = "<output>"
FEEDS_OPERATION = "<feeds exp, log, pow or sum>"


class Matcher:
    """Matches rules against the layers of one model.

    Args:
        rules: Iterable of `PrecisionRule`.
        model: The `keras.Model`. Some rules depend on its graph.
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
        """Returns whether the rule matches the layer or a layer around it."""
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


@keras.saving.register_keras_serializable("keras_mixprec")
class PrecisionRule:
    """Gives matching layers a policy of their own.

    Args:
        match: A layer class, a string or a function. A class also matches its
            subclasses. A string is a glob for the whole layer path, as in
            `fnmatch` (`"head"`, `"*/attention"`; `*` also matches `/`).
            `"<output>"` matches the layers that make the model's outputs. A
            function `match(layer, path)` returns a bool.
        policy: String or `keras.DTypePolicy` that the layers follow. Defaults
            to `"float32"`.
        reason: String. The plan keeps this reason with each layer. Defaults to
            a description of the rule.
        sublayers: Boolean, whether the sublayers of a matching layer follow the
            policy too. Defaults to `True`, because an attention layer does
            almost all of its work in its sublayers.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy, or a pattern is empty.

    Example:
    >>> rule = PrecisionRule("head", reason="its targets reach 150,000")
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(1, name="head")])
    >>> PrecisionRules([rule]).unmatched(model)
    []
    """

    def __init__(
        self,
        match: type | str | Callable,
        policy: str | keras.DTypePolicy = "float32",
        reason: str = "",
        sublayers: bool = True,
    ):
        self.match = _check_match(match)
        self.policy = check_policy("policy", policy)
        check_type("reason", reason, str, "a string")
        self.reason = reason or f"rule {_describe(match)}"
        self.sublayers = check_type("sublayers", sublayers, bool, "a boolean")

    def get_config(self) -> dict:
        """Returns the arguments; a function must be registered with Keras."""
        match = self.match
        if not isinstance(match, str):
            name = keras.saving.get_registered_name(match)
            _find(name, expected=match)
            match = {"name": name}
        return {
            "match": match,
            "policy": self.policy,
            "reason": self.reason,
            "sublayers": self.sublayers,
        }

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Returns the rule that `get_config` describes."""
        config = dict(config)
        if isinstance(config["match"], dict):
            config["match"] = _find(config["match"]["name"])
        return cls(**config)

    def __repr__(self):
        return f"PrecisionRule({_describe(self.match)}, {self.policy!r})"


@keras.saving.register_keras_serializable("keras_mixprec")
class PrecisionRules(Sequence):
    """An ordered list of rules. A layer follows the first rule that matches it.

    Args:
        rules: Iterable of `PrecisionRule`.

    Raises:
        TypeError: If `rules` is not an iterable of rules.

    Example:
    >>> rules = PrecisionRules(
    ...     [PrecisionRule("head", policy="mixed_bfloat16"), *DEFAULT_RULES])
    >>> rules[0]
    PrecisionRule('head', 'mixed_bfloat16')
    """

    def __init__(self, rules: Iterable[PrecisionRule]):
        what = "a list of `PrecisionRule`"
        self._rules = tuple(check_list("rules", rules, PrecisionRule, what))

    def unmatched(self, model: keras.Model) -> list[PrecisionRule]:
        """Returns the rules that match no layer of the model."""
        entries, matcher = walk(check_model(model)), Matcher(self, model)
        return [
            rule
            for rule in self
            if not any(matcher.matches(rule, entry) for entry in entries)
        ]

    def warn_unmatched(self, model: keras.Model) -> None:
        """Warns about each rule that matches no layer of the model."""
        entries = walk(model)
        for rule in self.unmatched(model):
            meant = ""
            if isinstance(rule.match, str):
                meant = f": {what_was_meant(rule.match, entries)}"
            warnings.warn(
                f"{rule!r} matches no layer of model {model.name!r}, so it "
                f"has no effect{meant}.",
                UserWarning,
                stacklevel=4,
            )

    def get_config(self) -> dict:
        """Returns the rules' configs."""
        return {"rules": [rule.get_config() for rule in self]}

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Returns the rules that `get_config` describes."""
        return cls(PrecisionRule.from_config(c) for c in config["rules"])

    def __getitem__(self, index):
        return self._rules[index]

    def __len__(self):
        return len(self._rules)

    def __repr__(self):
        return f"PrecisionRules({list(self._rules)})"


def _check_match(match):
    if match == "":
        raise ValueError(
            "`match` must be a layer path or a glob such as '*/head'. "
            "Received: match=''"
        )
    layer = keras.layers.Layer
    no_layer = inspect.isclass(match) and not issubclass(match, layer)
    what = "a layer class, a path pattern or a function of (layer, path)"
    return check_type("match", match, () if no_layer else (str, Callable), what)


def _describe(match):
    if isinstance(match, str):
        return repr(match)
    return getattr(match, "__name__", None) or repr(match)


def _find(name, expected=None):
    """Returns the layer class or registered function with a name."""
    found = keras.saving.get_registered_object(name)
    found = found or getattr(keras.layers, name, None)
    if found is None or found is not (expected or found):
        raise ValueError(
            "To save a rule, register its `match` with "
            "`keras.saving.register_keras_serializable`, unless it is a Keras "
            f"layer class. Received: match={expected or name!r}"
        )
    return found
