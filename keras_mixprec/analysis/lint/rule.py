"""A rule of lint: what it looks for, how severe that is, and why."""

import dataclasses
import glob
import inspect
from collections.abc import Callable, Iterable

from keras_mixprec._checks import check_choice
from keras_mixprec.analysis.lint.findings import SEVERITIES, Finding
from keras_mixprec.analysis.lint.model_view import ModelView
from keras_mixprec.policies.rules import PrecisionRule


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        name: String.
        severity: The highest severity of its findings.
        reason: String. One sentence for the documentation.
        check: Function of a `ModelView` that yields `Finding`s.
    """

    name: str
    severity: str
    reason: str
    check: Callable[[ModelView], Iterable[Finding]]

    def findings(self, view: ModelView) -> list[Finding]:
        """Returns what the rule finds in a model."""
        return [
            dataclasses.replace(finding, rule=self.name)
            for finding in self.check(view)
        ]


def rule(severity: str) -> Callable:
    """Decorator that makes a check a `Rule` of the function's name.

    The first line of the docstring is the reason.

    Args:
        severity: The highest severity of its findings.
    """
    check_choice("severity", severity, SEVERITIES)

    def decorate(check):
        reason = inspect.getdoc(check).partition("\n")[0]
        return Rule(check.__name__, severity, reason, check)

    return decorate


def to_float32(path: str, reason: str) -> tuple[PrecisionRule, ...]:
    """Returns what a finding has as `rules`: the layer in float32."""
    return (PrecisionRule(glob.escape(path), reason=reason),)
