"""Models that fail in 16 bits and train in float32, and models that do not.

`cases.toml` says of each what is wrong with it and how it is trained; the
modules, one a subject, have a function that builds it.
"""

import importlib
import pkgutil

from zoo.case import CASES

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"zoo.{module.name}")


def cases(names=()) -> list:
    """Returns the named cases, or all."""
    return [CASES[name] for name in names or CASES]
