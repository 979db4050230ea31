"""Every rule of lint; a file with rules has to be in `_FILES`."""

from collections.abc import Iterable

from keras_mixprec._checks import check_list
from keras_mixprec.analysis.lint import (
    data_rules,
    layer_rules,
    optimizer_rules,
    task_rules,
)
from keras_mixprec.analysis.lint.rule import Rule

_FILES = (data_rules, layer_rules, optimizer_rules, task_rules)

# In the order in which findings of one severity are listed.
RULES = sorted(
    (x for file in _FILES for x in vars(file).values() if isinstance(x, Rule)),
    key=lambda rule: rule.code,
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
        codes = check_list(name, codes, str, "a list of codes")
        for code in codes:
            if not any(rule.code.startswith(code) for rule in RULES):
                raise ValueError(
                    f"`{name}` must have codes of rules, as 'KMP101', or what "
                    f"they start with. Received: {name}={codes!r}"
                )
        starts.append(tuple(codes))
    return [
        rule
        for rule in RULES
        if rule.code.startswith(starts[0])
        and not rule.code.startswith(starts[1])
    ]
