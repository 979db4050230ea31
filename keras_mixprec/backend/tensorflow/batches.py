"""The batches of `fit` on TensorFlow; see `interface.py`."""

import contextlib
import functools
import itertools

import tensorflow as tf

from keras_mixprec.backend.tensorflow.processes import workers

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def tapped(model, train_function, visit, raised=None):
    strategy = model.distribute_strategy

    def train(iterator):
        if not isinstance(iterator, _ITERATORS):
            # `train_on_batch` passes a generator that yields one batch.
            first = next(iterator)
            visit(first)
            return train_function(itertools.chain([first], iterator))
        # Read those parts of a strategy's iterator that feed this process. The
        # iterator itself would ask all workers for a batch.
        pipelines = getattr(iterator, "_iterators", [iterator])
        taken, first = [[] for _ in pipelines], []
        # The compiled function takes `steps_per_execution` batches in one call.
        for _ in range(model.steps_per_execution):
            step = [_next(pipeline) for pipeline in pipelines]
            first = first or [value for values in step for value in values]
            taken = [a + b for a, b in zip(taken, step, strict=True)]
        if first:
            visit(_joined([_without_optionals(value) for value in first]))
            datasets = [
                _dataset(values, pipeline.element_spec, first[0])
                for values, pipeline in zip(taken, pipelines, strict=True)
            ]

            def step():
                return train_function(_iterator(datasets, iterator, strategy))

            try:
                return step()
            except tf.errors.OutOfRangeError:
                # The data has ended, but no step has failed.
                raise
            except Exception as error:
                if raised is None or not raised(error):
                    raise
            return step()
        if workers(model) == 1:
            raise StopIteration  # A `StopIteration` ends the epoch.
        visit(None)
        return train_function(iterator)

    return train


def synchronized(model, variables):
    return contextlib.nullcontext()


def _next(pipeline):
    """Returns the next value of each replica that has data left."""
    if hasattr(pipeline, "get_next_as_optional_list"):
        optionals = pipeline.get_next_as_optional_list()
    else:
        optionals = [pipeline.get_next_as_optional()]
    return [o.get_value() for o in optionals if o.has_value()]


def _iterator(datasets, iterator, strategy):
    """Returns an iterator of the type that the step was traced for."""
    if not isinstance(iterator, tf.distribute.DistributedIterator):
        return iter(datasets[0])
    remaining = iter(datasets)
    return iter(
        strategy.distribute_datasets_from_function(
            lambda _: next(remaining), iterator._options
        )
    )


def _dataset(values, spec, example):
    # Build the dataset with the element spec that the step was traced for,
    # including unknown sizes. With a different spec, TensorFlow would trace the
    # step again.
    variants = [
        tf.data.experimental.from_variant(
            tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(v)),
            spec,
        )
        for v in [example, *values]
    ]
    return functools.reduce(tf.data.Dataset.concatenate, variants).skip(1)


def _without_optionals(batch):
    return tf.nest.map_structure(
        lambda t: None if isinstance(t, tf.experimental.Optional) else t, batch
    )


def _joined(values):
    """Joins the batches of several replicas."""
    return tf.nest.map_structure(_concatenated, *values)


def _concatenated(first, *others):
    if first is None or not others:
        return first
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, [first, *others])
    return tf.concat([first, *others], axis=0)
