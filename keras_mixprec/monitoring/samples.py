"""How many samples are in the batches of `fit`."""

import keras

from keras_mixprec.keras_internals import watch_batches

# Keras hands TensorFlow's compiled function the whole pipeline, and fetches
# for the other two batch by batch.
_IS_HIDDEN = keras.backend.backend() == "tensorflow"

# torch's batch comes before the call that trains on it begins.
_IS_AHEAD = keras.backend.backend() == "torch"

# A tuple, because each call would build a union of types anew, which takes half
# of its time.
_NESTED = (dict, list, tuple)


class SampleCount:
    """Counts the samples in each batch that `fit` fetches.

    Args:
        model: The `keras.Model`, in its `fit`.

    Attributes:
        total: Int. Samples in the batches of the calls so far, `0` where the
            host does not see them.
        is_of_all_workers: Boolean, whether a batch has the samples of all.
    """

    def __init__(self, model):
        self.total = 0
        # JAX's batch is an array on all devices.
        self.is_of_all_workers = keras.backend.backend() == "jax"
        self._pending = 0
        if not _IS_HIDDEN:
            watch_batches(model, self._counted)

    def _counted(self, calls):
        """The batches of an epoch, as Keras enumerates them, each counted."""
        for first, last, batches in calls:
            yield first, last, map(self._count, batches)

    def _count(self, batch):
        samples = count_samples(batch)
        self.total += self._pending if _IS_AHEAD else samples
        self._pending = samples
        return batch


def count_samples(batch) -> int:
    """Returns the samples in a batch, 0 if that is not known.

    It counts the rows of the inputs if all inputs have as many. Inputs of a
    graph have a row for each node and each edge, its targets one for each
    graph.

    Args:
        batch: As `train_step` takes it.
    """
    parts = batch if isinstance(batch, (list, tuple)) else (batch,)
    for part in parts:
        rows: set[int] = set()
        _add_rows(part, rows)
        if len(rows) == 1:
            return rows.pop()
    return 0


def _add_rows(part, rows):
    if isinstance(part, _NESTED):
        for inner in part.values() if isinstance(part, dict) else part:
            _add_rows(inner, rows)
    elif len(shape := getattr(part, "shape", ())):
        rows.add(shape[0])
