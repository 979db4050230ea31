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
        code: String, such as `"KMP101"`; no other rule ever gets it.
        name: String.
        severity: The highest severity of its findings.
        reason: String. One sentence for the documentation.
        page: String. What `--explain` shows.
        check: Function of a `ModelView` that yields `Finding`s.
    """

    code: str
    name: str
    severity: str
    reason: str
    page: str
    check: Callable[[ModelView], Iterable[Finding]]

    def findings(self, view: ModelView) -> list[Finding]:
        """Returns what the rule finds in a model."""
        return [
            dataclasses.replace(finding, code=self.code, rule=self.name)
            for finding in self.check(view)
        ]


def rule(code: str, severity: str) -> Callable:
    """Decorator that makes a check a `Rule` of the function's name.

    The first line of the docstring is the reason, all of it the page.

    Args:
        code: String, a new one.
        severity: The highest severity of its findings.
    """
    check_choice("severity", severity, SEVERITIES)

    def decorate(check):
        text, name = inspect.getdoc(check), check.__name__
        page = f"{code} {name}, {severity} at most\n\n{text}"
        return Rule(code, name, severity, text.partition("\n")[0], page, check)

    return decorate


def to_float32(path: str, reason: str) -> tuple[PrecisionRule, ...]:
    """Returns what a finding has as `rules`: the layer in float32."""
    return (PrecisionRule(glob.escape(path), reason=reason),)
