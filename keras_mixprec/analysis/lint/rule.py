"""A rule of lint: what it looks for, how severe that is, and why."""

import dataclasses
import glob
import inspect
from collections.abc import Callable, Iterable

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.model_view import ModelView
from keras_mixprec.policies.rules import PrecisionRule


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table of rules.

    Attributes:
        code: String, such as `"KMP101"`; no other rule ever gets it.
        severity: The default severity of its findings.
        check: Function of a `ModelView` that yields `Finding`s. Its first line
            of documentation is the reason, all of it the page.
    """

    code: str
    severity: str
    check: Callable[[ModelView], Iterable[Finding]]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.check.__name__

    @property
    def reason(self) -> str:
        """One sentence for the documentation."""
        return self._text().partition("\n")[0]

    @property
    def page(self) -> str:
        """What `--explain` shows."""
        title = f"{self.code} {self.name}, {self.severity} at most"
        return f"{title}\n\n{self._text()}"

    def findings(self, view: ModelView) -> list[Finding]:
        """Returns what the rule finds in a model."""
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
    """Decorator that makes a check a `Rule` of the function's name.

    Args:
        code: String, a new one.
        severity: `"high"`, `"medium"` or `"low"`, the highest of its findings.
    """
    return lambda check: Rule(code, severity, check)


def to_float32(path: str, reason: str) -> tuple[PrecisionRule, ...]:
    """Returns what a finding has as `rules`: the layer in float32."""
    return (PrecisionRule(glob.escape(path), reason=reason),)
