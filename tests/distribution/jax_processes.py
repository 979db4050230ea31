"""One process of a `keras.distribution.DataParallel`; `RANK` says which.

It does the work of the module that the command line names.
"""

import importlib
import os
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")

import keras  # noqa: E402
from tuned import batches  # noqa: E402


def parallel(make):
    """Makes a model whose variables are replicated over all processes."""
    return make()


if __name__ == "__main__":
    index = int(os.environ["RANK"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    keras.distribution.initialize(address, 2, index)
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
    importlib.import_module(sys.argv[1]).work(index, parallel, batches)
