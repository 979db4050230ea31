"""One worker of a MultiWorkerMirroredStrategy; `RANK` says which.

It does the work of the module that the command line names.
"""

import importlib
import os
import sys

import tensorflow as tf

# It must be made before TensorFlow does anything else.
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

from keras.src.backend.tensorflow import trainer  # noqa: E402
from tuned import ROWS, rows  # noqa: E402


def mirrored(make):
    """Makes a model, and avoids two faults of Keras 3.15.

    With several workers `fit` gives `strategy.reduce` a tuple of `PerReplica`s,
    but only strategies of one process accept that. It also asks for the mean of
    a scalar loss along its first axis (keras-team/keras#20585).
    """
    with STRATEGY.scope():
        model = make()
    trainer._collective_all_reduce_multi_worker = lambda strategy: False

    def build_by_one_replica(iterator):
        for _, _, batches in iterator:
            batch = STRATEGY.experimental_local_results(next(batches))[0]
            with STRATEGY.scope():
                model._symbolic_build(data_batch=batch)
            return

    model._maybe_symbolic_build = build_by_one_replica
    return model


def dataset(values):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = tf.data.Dataset.from_tensor_slices(rows(values))
    # TensorFlow makes two batches of each, one for each worker. Without
    # sharding this worker gets both, which Keras must not count.
    data = data.batch(2 * ROWS).filter(lambda x, y: True)
    return data.with_options(options)


if __name__ == "__main__":
    index = int(os.environ["RANK"])
    importlib.import_module(sys.argv[1]).work(index, mirrored, dataset)
