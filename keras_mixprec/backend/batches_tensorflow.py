"""The next batch on TensorFlow; see `batches.py`."""

import functools

import tensorflow as tf


def tapped(model, train_function, look):
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise NotImplementedError("batches that are spread over replicas")

    def train(iterator):
        # As many as the compiled function is going to take.
        batches = []
        for _ in range(model.steps_per_execution):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            batches.append(batch.get_value())
        if not batches:
            return train_function(iterator)  # It ends the epoch.
        look(_without_optionals(batches[0]))
        return train_function(_iterator(batches, iterator.element_spec))

    return train


def _iterator(batches, spec):
    """An iterator that the compiled function takes for the one it knows."""
    datasets = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    variants = [
        # The sizes that the step was traced for, unknown ones included.
        tf.data.experimental.from_variant(
            tf.data.experimental.to_variant(dataset), spec
        )
        for dataset in datasets
    ]
    return iter(functools.reduce(tf.data.Dataset.concatenate, variants))


def _without_optionals(batch):
    return tf.nest.map_structure(
        lambda t: None if isinstance(t, tf.experimental.Optional) else t, batch
    )
