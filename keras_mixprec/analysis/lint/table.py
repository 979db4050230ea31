"""Every rule of lint; a file with rules has to be in `_FILES`."""

from collections.abc import Iterable

from keras_mixprec.analysis.lint import (
    batch_rules,
    cast_rules,
    constant_rules,
    data_rules,
    matmul_rules,
    optimizer_rules,
    sensitive_rules,
    shape_rules,
)
from keras_mixprec.analysis.lint.rule import Rule

_FILES = (
    batch_rules,
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


def chosen(
    select: Iterable[str] = ("KMP",), ignore: Iterable[str] = ()
) -> list[Rule]:
    """Returns the rules of some codes.

    Args:
        select: List of codes, or of what they start with, such as `"KMP4"`.
        ignore: The same, of rules that are left out.

    Raises:
        TypeError: If one of them is no list.
        ValueError: If no rule has such a code.
    """
    starts = []
    for name, codes in (("select", select), ("ignore", ignore)):
        if isinstance(codes, str) or not isinstance(codes, Iterable):
            raise TypeError(
                f"`{name}` must be a list of codes. Received: {name}={codes!r}"
            )
        starts.append(tuple(codes))
        for code in starts[-1]:
            if not any(rule.code.startswith(code) for rule in RULES):
                raise ValueError(
                    f"`{name}` must have codes of rules, as 'KMP101', or what "
                    f"they start with. Received: {name}={codes!r}"
                )
    return [
        rule
        for rule in RULES
        if rule.code.startswith(starts[0])
        and not rule.code.startswith(starts[1])
    ]
