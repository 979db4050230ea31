"""`PrecisionPlan`: the policy of each layer of a model, and the reason."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras

from keras_mixprec._checks import check_type
from keras_mixprec.formats import printable
from keras_mixprec.policies import plan_file
from keras_mixprec.policies.layers import (
    MODEL_PATH,
    LayerEntry,
    check_model,
    may_grow,
    unnumbered,
    walk,
    what_was_meant,
)
from keras_mixprec.policies.names import can_be_set, policy_name
from keras_mixprec.policies.set_policies import set_policies


class Change(NamedTuple):
    """One difference between two plans.

    Attributes:
        path: String. The layer's path; `"<model>"` for the model itself.
        before: The policy in the first plan, `None` if it has no such layer.
        after: The policy in the second plan, `None` if it has no such layer.
    """

    path: str
    before: str | None
    after: str | None

    def __str__(self):
        before, after = self.before or "absent", self.after or "absent"
        return printable(f"{self.path}: {before} -> {after}")


def _problems(plan, model):
    """Returns one line for each reason why a plan does not fit a model."""
    entries = {entry.path: entry for entry in walk(model)}
    unknown = [
        f"unknown path {path!r}: {what_was_meant(path, entries.values())}"
        for path in plan
        if path not in entries and not _may_appear(path, entries, model)
    ]
    missing = [
        f"missing layer {path!r}: the plan gives it no policy"
        for path, entry in entries.items()
        if not any(holder.path in plan for holder in entry.lineage())
    ]
    unsettable = [
        f"policy {plan[path]!r} of {path!r} cannot be set: the layer follows "
        f"{policy_name(entry.layer)!r}; quantize it first"
        for path, entry in entries.items()
        if not can_be_set(plan.get(path, "float32"))
        and plan[path] != policy_name(entry.layer)
    ]
    return unknown + missing + unsettable


def _may_appear(path, entries, model):
    """Returns whether an unbuilt layer may still create the layer of a path."""
    while "/" in path:
        path = path.rpartition("/")[0]
        if path in entries:
            return may_grow(entries[path].layer)
    return may_grow(model)


def _check_texts(name, value):
    what = "a dict of layer path to string"
    for path, text in check_type(name, value, Mapping, what).items():
        if not isinstance(path, str) or not isinstance(text, str):
            raise TypeError(
                f"`{name}` must be {what}. Received: {name}[{path!r}]={text!r}"
            )
    return dict(value)


def _check_known(path, policy):
    try:
        if not can_be_set(policy):
            keras.dtype_policies.get(policy)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The plan gives {path!r} a policy that Keras does not know. "
            f"Received: {policy!r}"
        ) from error


class PrecisionPlan(Mapping):
    """Says which dtype policy each layer of a model follows, and why.

    A plan maps layer paths to policy names, in the model's order. It fits any
    model built by the same code, in this process or another, and loaded copies
    of the model. Its paths do not depend on other models of the process.

    Keras' own files lose the policies of sublayers that a user-written layer
    creates. `plan.apply(loaded)` restores these policies.
    `plan.diff(PrecisionPlan.from_model(loaded))` shows the layers that lost
    their policy.

    Args:
        policies: Dict of layer path to policy name.
        default: Policy name of the model itself. A subclassed model casts its
            inputs to the dtype of this policy, and layers that the model
            creates later follow it. Defaults to `"float32"`.
        reasons: Dict of layer path to string: why the layer has its policy.
        notes: Dict of layer path to string: why the layer kept its policy.

    Attributes:
        trade_off: The trials of `minimize_float32`, with their FLOPs in 16 bits
            and their errors. `None` for any other plan. `save` leaves it out.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy, or a reason or note has no entry
            in `policies`.

    Example:
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    >>> plan = apply_policy(model, "mixed_bfloat16")
    >>> dict(plan)
    {'dense': 'mixed_bfloat16', 'dense_1': 'float32'}
    >>> plan.diff(PrecisionPlan.from_model(model))
    []
    """

    def __init__(
        self,
        policies: Mapping[str, str],
        default: str = "float32",
        reasons: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
    ):
        self._policies = _check_texts("policies", policies)
        self.default = check_type("default", default, str, "a policy name")
        self.reasons = _check_texts("reasons", reasons or {})
        self.notes = _check_texts("notes", notes or {})
        for path, policy in {**self._policies, MODEL_PATH: default}.items():
            _check_known(path, policy)
        strangers = (self.reasons | self.notes).keys() - self._policies.keys()
        if strangers:
            raise ValueError(
                "The paths of `reasons` and `notes` must be in `policies`. "
                f"Received: {sorted(strangers)}"
            )
        self.trade_off: Any = None

    @classmethod
    def from_model(
        cls,
        model: keras.Model,
        reasons: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> "PrecisionPlan":
        """Returns the plan that a model follows now.

        Args:
            model: A `keras.Model`. The plan of an unbuilt model lacks layers
                that are created later. They follow the layer that creates them.
            reasons: Dict of layer path to string, kept in the plan.
            notes: Dict of layer path to string, kept in the plan.

        Raises:
            TypeError: If `model` is not a `keras.Model`.
        """
        policies = {
            entry.path: policy_name(entry.layer)
            for entry in walk(check_model(model))
        }
        return cls(policies, policy_name(model), reasons, notes)

    def apply(self, model: keras.Model) -> "PrecisionPlan":
        """Makes a model follow the plan, as `apply_policy` does.

        Args:
            model: A `keras.Model`, made by the same code as the model of the
                plan.

        Returns:
            The plan that the model now follows.

        Raises:
            TypeError: If `model` is not a `keras.Model`.
            ValueError: If the plan does not fit the model; see `validate`.
        """
        plan = self.fitted_to(check_model(model))
        reasons, notes = set_policies(model, plan.default, plan.decide)
        return PrecisionPlan.from_model(model, reasons, notes)

    def validate(self, model: keras.Model) -> None:
        """Raises `ValueError` if the plan does not fit the model.

        The error lists each path that the model lacks, with the model's nearest
        path, and each layer that the plan lacks. A layer needs no entry if the
        plan names a layer that contains it.
        """
        if found := _problems(self, check_model(model)):
            listing = "\n".join(f"- {line}" for line in found)
            raise ValueError(
                f"The plan does not fit model {model.name!r}:\n{listing}\n"
                "A plan fits only models made by the same code. "
                "`PrecisionPlan.from_model(model)` makes a new plan."
            )

    def fitted_to(self, model: keras.Model) -> "PrecisionPlan":
        """Returns this plan, with paths renumbered to fit the model.

        A loaded copy may number its layers differently, because a file does not
        record whether a name such as `dense_1` is automatic.

        Args:
            model: A `keras.Model`. If the plan does not fit, `validate` raises.
        """
        plan, paths = self, [entry.path for entry in walk(model)]
        alike = [*map(unnumbered, self)] == [*map(unnumbered, paths)]
        if alike and _problems(self, model):
            now = dict(zip(self, paths, strict=True))
            policies, reasons, notes = (
                {now[path]: text for path, text in texts.items()}
                for texts in (self, self.reasons, self.notes)
            )
            plan = PrecisionPlan(policies, self.default, reasons, notes)
        plan.validate(model)
        return plan

    def diff(self, other: "PrecisionPlan") -> list[Change]:
        """Returns the changes from this plan to another.

        Args:
            other: A `PrecisionPlan`.

        Returns:
            List of `Change(path, before, after)`, empty if both plans agree.
            Reasons are not compared.

        Raises:
            TypeError: If `other` is not a `PrecisionPlan`.
        """
        check_type("other", other, PrecisionPlan, "a `PrecisionPlan`")
        before = {MODEL_PATH: self.default, **self}
        after = {MODEL_PATH: other.default, **other}
        return [
            Change(path, before.get(path), after.get(path))
            for path in before | after
            if before.get(path) != after.get(path)
        ]

    def decide(self, entry: LayerEntry) -> tuple[str, str]:
        """Returns a layer's policy and the reason for it.

        Args:
            entry: A `LayerEntry`. If the plan does not name the layer, the
                nearest named layer that contains it decides.
        """
        for holder in entry.lineage():
            if holder.path in self._policies:
                policy = self._policies[holder.path]
                return policy, self.reasons.get(holder.path, "")
        return self.default, ""

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON, and replaces an old file atomically.

        Args:
            path: String or path object.
        """
        plan_file.write(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PrecisionPlan":
        """Reads a plan that `save` wrote.

        Args:
            path: String or path object.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is not a plan, is damaged, or was written
                by a newer version.
        """
        return cls(**plan_file.read(path)[0])

    def __getitem__(self, path):
        return self._policies[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self):
        return len(self._policies)

    def __repr__(self):
        counts = Counter(self.values())
        listing = ", ".join(f"{n} {policy}" for policy, n in counts.items())
        return f"<PrecisionPlan of {len(self)} layers: {listing}>"

    def __str__(self):
        others = [path for path in self if self[path] != self.default]
        width = max(map(len, others), default=0)
        remarks = self.reasons | self.notes
        lines = [
            f"{path:{width}}  {self[path]:14}  {remarks.get(path, '')}".rstrip()
            for path in others
        ]
        which = " but these:" if others else ""
        title = f"{repr(self)[1:-1]}; all {self.default}{which}"
        return printable("\n".join([title, *lines]))
