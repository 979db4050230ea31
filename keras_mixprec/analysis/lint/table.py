"""Every rule of lint."""

from keras_mixprec.analysis.lint.rule import Rule

RULES: tuple[Rule, ...] = ()
