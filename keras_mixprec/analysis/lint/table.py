"""Every rule of lint; a file with rules has to be in `_FILES`."""

from keras_mixprec.analysis.lint import (
    cast_rules,
    constant_rules,
    data_rules,
    dry_run_rules,
    matmul_rules,
    optimizer_rules,
    sensitive_rules,
    shape_rules,
)
from keras_mixprec.analysis.lint.rule import Rule

_FILES = (
    dry_run_rules,
    data_rules,
    constant_rules,
    sensitive_rules,
    optimizer_rules,
    cast_rules,
    matmul_rules,
    shape_rules,
)

# In the order in which findings of one severity are listed.
RULES = tuple(
    found
    for file in _FILES
    for found in vars(file).values()
    if isinstance(found, Rule)
)
