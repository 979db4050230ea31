"""Lint rules, their findings, and the repairs."""

import dataclasses
import glob
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import keras

from keras_mixprec._checks import check_choice
from keras_mixprec._html import element, joined, table
from keras_mixprec.analysis.lint.model_view import ModelView
from keras_mixprec.formats import printable
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.names import POLICY_NAMES
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule
from keras_mixprec.policies.set_policies import reasons_of
from keras_mixprec.reporting.text_formats import plain, to_json

SEVERITIES = ("high", "medium", "low")

# The version of `to_dict` and of `keras-mixprec lint --json`.
SCHEMA_VERSION = 1

_INDENT = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}

_COLUMNS = ("severity", "code", "rule", "layer", "reason", "fix")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault that lint found, with its reason and its repair.

    Attributes:
        reason: String. A sentence that explains the fault, with numbers.
        fix: String. A sentence that says what to change.
        layer: String, the layer's path, or `None` for the whole model.
        rules: Tuple of `PrecisionRule`s that repair the fault, often empty.
        call: Function that takes the model and repairs the fault, such as
            `ensure_loss_scaling`, or `None`.
        numbers: Dict. The evidence, which JSON can hold.
        severity: `"high"` (training fails or learns a wrong result),
            `"medium"` (training fails on some data, or gains nothing) or
            `"low"` (training is slower or less exact than it could be).
        code, rule: Strings. The code and name of the rule that found the fault.
    """

    reason: str
    fix: str
    layer: str | None = None
    rules: tuple[PrecisionRule, ...] = ()
    call: Callable | None = None
    numbers: dict = dataclasses.field(default_factory=dict)
    severity: str = ""
    code: str = ""
    rule: str = ""

    @property
    def repairs(self) -> str | None:
        """The code that `apply` runs, `None` if you must repair the model."""
        if self.rules:
            return ", ".join(map(repr, self.rules))
        name = getattr(self.call, "__name__", None)
        return f"{name}(model)" if name else None

    def to_dict(self) -> dict:
        """Returns the finding as a dict that JSON can hold.

        Non-finite numbers become the strings "inf", "-inf" and "nan".
        """
        return {
            "code": self.code,
            "rule": self.rule,
            "severity": self.severity,
            "layer": self.layer,
            "reason": self.reason,
            "fix": self.fix,
            "repairs": self.repairs,
            "numbers": plain(self.numbers),
        }

    def __str__(self):
        title = f"{self.severity:8}{self.code} {self.rule}"
        lines = [self.reason, self.fix]
        if self.repairs:
            lines.append(f"findings.apply(): {self.repairs}")
        return printable(
            "\n".join(
                [
                    f"{title}  {self.layer}" if self.layer else title,
                    *(textwrap.fill(line, 88, **_INDENT) for line in lines),
                ]
            )
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """A lint rule.

    Attributes:
        code: String, such as `"KMP101"`. A code is never used again for a
            different rule.
        severity: The default severity of the rule's findings.
        check: Function of a `ModelView` that yields `Finding`s. The first line
            of the docstring is the rule's `reason`. The whole docstring is the
            rule's `page`.
    """

    code: str
    severity: str
    check: Callable[[ModelView], Iterable[Finding]]

    @property
    def name(self) -> str:
        """The name of the check function."""
        return self.check.__name__

    @property
    def reason(self) -> str:
        """The first line of the docstring, which docs/lint.md lists."""
        return self._text().partition("\n")[0]

    @property
    def page(self) -> str:
        """The text that `--explain` prints."""
        title = f"{self.code} {self.name}, {self.severity} at most"
        return f"{title}\n\n{self._text()}"

    def findings(self, view: ModelView) -> list[Finding]:
        """Returns the rule's findings in a model."""
        return [
            dataclasses.replace(
                finding,
                severity=finding.severity or self.severity,
                code=self.code,
                rule=self.name,
            )
            for finding in self.check(view)
        ]

    def _text(self):
        return inspect.getdoc(self.check) or ""


def rule(code: str, severity: str) -> Callable:
    """Decorator that turns a function into a `Rule` with the function's name.

    Args:
        code: String. A code that no rule has had before.
        severity: `"high"`, `"medium"` or `"low"`, the highest severity of the
            rule's findings.
    """
    return lambda check: Rule(code, severity, check)


def to_float32(path: str, reason: str) -> tuple[PrecisionRule, ...]:
    """Returns the `rules` of a finding that move a layer to float32."""
    return (PrecisionRule(glob.escape(path), reason=reason),)


class Findings(Sequence):
    """The findings of lint, most severe first.

    Print it for text. A notebook shows a table. `to_dict()` and `to_json()`
    return the findings as data. `apply()` makes all automatic repairs.
    """

    def __init__(
        self,
        findings: Iterable[Finding],
        model: keras.Model,
        policy: str | None = None,
        ran: bool = True,
    ):
        self._findings = sorted(
            findings, key=lambda f: SEVERITIES.index(f.severity)
        )
        self._model = model
        self._policy = policy
        self._ran = ran

    def at_least(self, severity: str) -> list[Finding]:
        """Returns the findings with this severity or a higher one.

        Args:
            severity: `"high"`, `"medium"` or `"low"`.

        Raises:
            ValueError: If `severity` is not one of these.
        """
        check_choice("severity", severity, SEVERITIES)
        last = SEVERITIES.index(severity)
        return [f for f in self if SEVERITIES.index(f.severity) <= last]

    def apply(self, severity: str = "low") -> PrecisionPlan:
        """Repairs the model with the rules and calls of the findings.

        If `lint` got a `policy`, `apply` sets this policy first. Layers without
        a finding keep their policies.

        Args:
            severity: The lowest severity to repair. Defaults to `"low"`: all
                findings.

        Returns:
            The `PrecisionPlan` that the model now follows.

        Raises:
            ValueError: If `severity` is not `"high"`, `"medium"` or `"low"`.
        """
        found, model = self.at_least(severity), self._model
        if self._policy is not None:
            apply_policy(model, self._policy)
        rules = [rule for finding in found for rule in finding.rules]
        if rules:
            plan = PrecisionPlan.from_model(model)
            apply_policy(model, plan.default, rules=[*rules, *_kept(plan)])
        for call in dict.fromkeys(f.call for f in found if f.call):
            call(model)
        return PrecisionPlan.from_model(model, reasons_of(model))

    def to_dict(self) -> dict:
        """Returns all findings as a dict that JSON can hold."""
        counts = Counter(finding.severity for finding in self)
        return {
            "version": SCHEMA_VERSION,
            "model": self._model.name,
            "backend": keras.backend.backend(),
            "policy": self._policy,
            "counts": {severity: counts[severity] for severity in SEVERITIES},
            "findings": [finding.to_dict() for finding in self],
        }

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON."""
        return to_json(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Returns the findings as an HTML table."""
        rows = [
            [f.severity, f.code, f.rule, f.layer or "", f.reason, f.fix]
            for f in self
        ]
        return joined(element("p", self._title()), table(_COLUMNS, rows))

    def _repr_html_(self):
        return self.to_html()

    def _title(self):
        counts = self.to_dict()["counts"]
        listing = ", ".join(f"{n} {severity}" for severity, n in counts.items())
        policy = f" under {self._policy}" if self._policy else ""
        ran = "" if self._ran else " (without samples, so no step was run)"
        return f"Lint of {self._model.name!r}{policy}{ran}: {listing}."

    def __str__(self):
        return printable("\n".join([self._title(), *map(str, self)]))

    __repr__ = __str__

    def __getitem__(self, index):
        return self._findings[index]

    def __len__(self):
        return len(self._findings)


def _kept(plan):
    """Returns rules that keep the policy of every layer."""
    reasons = plan.reasons
    return [
        PrecisionRule(
            glob.escape(path), policy, reasons.get(path, ""), sublayers=False
        )
        for path, policy in plan.items()
        if policy in POLICY_NAMES
    ]
