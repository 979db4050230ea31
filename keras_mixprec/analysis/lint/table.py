"""Every rule of lint."""

from keras_mixprec.analysis.lint.rule import Rule
from keras_mixprec.analysis.lint.traced_rules import TRACED_RULES

RULES: tuple[Rule, ...] = (*TRACED_RULES,)
