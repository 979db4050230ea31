"""Which of a part's modules belongs to the active backend."""

import importlib

import keras


def active_module(part: str):
    """Returns the module `<part>_<backend>` of this package.

    Args:
        part: String, such as `"step"`.
    """
    name = keras.backend.backend()
    return importlib.import_module(f"{__package__}.{part}_{name}")
