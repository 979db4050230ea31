"""JAX's versions, and functions run as in `fit`; see `interface.py`."""

import jax
import jaxlib

MODES = ("XLA",)


def versions():
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def compiled(function, mode):
    return jax.jit(function)


def wait(tensors):
    jax.block_until_ready(tensors)


def random_state():
    """Returns `None`, because JAX has no global random state."""


def set_random_state(state):
    pass
