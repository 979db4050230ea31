"""How long `fit` waits for batches, and how many samples are in them."""

import math
import time

import keras

from keras_mixprec.backend import active
from keras_mixprec.guards.train_function import DeferredCall
from keras_mixprec.keras_internals import watch_batches
from keras_mixprec.monitoring.overhead import PROBES

# Keras hands TensorFlow's compiled function the whole pipeline, and fetches
# for the other two batch by batch.
_SAMPLED = keras.backend.backend() == "tensorflow"

# torch's batch comes before the call that trains on it begins.
_AHEAD = keras.backend.backend() == "torch"

# The call of TensorFlow's that is sampled first; then at twice as many steps.
# Taking a batch out of a pipeline and handing it over costs 20 to 40 ms.
_FIRST_SAMPLE = 16

# Not a union of types, which each call would build: half of its time.
_NESTED = (dict, list, tuple)


class InputClock:
    """Times each batch that `fit` fetches, on TensorFlow a few of them.

    Args:
        budget: `OverheadBudget`.
        may_sample: Boolean. Whether a call may be sampled.

    Attributes:
        seconds: Float. What fetching has taken so far, where each batch is
            timed.
        samples: Int. Samples in the batches of the calls so far, where each is
            counted.
        counts_all_workers: Boolean. Whether a batch has the samples of all.
        sampled: List of pairs, the seconds that a call waited for its batches
            and the samples in the first of them.
    """

    def __init__(self, budget, may_sample: bool):
        self.seconds = 0.0
        self.samples = 0
        # JAX's batch is an array on all devices.
        self.counts_all_workers = keras.backend.backend() == "jax"
        self.sampled: list[tuple[float, int]] = []
        self._budget = budget
        self._pending = 0
        self._next_sample = _FIRST_SAMPLE if may_sample else math.inf
        self._deferred_call = DeferredCall()

    def start(self, model):
        """Times batches from the next epoch on that begins.

        Args:
            model: The `keras.Model`, in its `fit`.
        """
        if not _SAMPLED:
            watch_batches(model, self._timed)

    def due_at(self, first_step: int) -> float:
        """Returns the step at which a call is to be sampled.

        Args:
            first_step: Int. The step that the `fit` began with.
        """
        return first_step + self._next_sample if _SAMPLED else math.inf

    def sample(self, model, steps: int):
        """Times how long the next call waits for its batches.

        Args:
            model: The `keras.Model`.
            steps: Int. Steps that `fit` has taken.
        """
        self._next_sample = 2 * max(steps, self._next_sample)
        first = not self.sampled
        # The first one happens once, which is no overhead.
        if self._budget.left(PROBES) <= 0 and not first:
            return

        def train(iterator):
            self._deferred_call.disarm()
            # `train_on_batch` has a generator of the batch that it was given.
            if not hasattr(iterator, "element_spec"):
                return model.train_function(iterator)
            times = [time.perf_counter()]

            def visit(batch):
                times.append(time.perf_counter())
                fetched = times[1] - times[0]
                self.sampled.append((fetched, count_samples(batch)))

            def go_on(*args):
                cost = time.perf_counter() - times[-1]
                self._budget.add(PROBES, cost, is_overhead=not first)
                return model.train_function(*args)

            return active.batches().tapped(model, go_on, visit)(iterator)

        self._deferred_call.arm(model, train)

    def disarm(self):
        """Nothing is sampled any more."""
        self._deferred_call.disarm()

    def _timed(self, calls):
        """The batches of an epoch, as Keras enumerates them, each timed."""
        for first, last, batches in calls:
            yield first, last, _Timed(self, batches)

    def fetch(self, batches):
        """Returns the next batch."""
        started = time.perf_counter()
        batch = next(batches)
        self.seconds += time.perf_counter() - started
        samples = count_samples(batch)
        self.samples += self._pending if _AHEAD else samples
        self._pending = samples
        return batch


class _Timed:
    """Batches, each timed."""

    def __init__(self, clock, batches):
        self._clock = clock
        self._batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return self._clock.fetch(self._batches)


def count_samples(batch) -> int:
    """Returns the samples in a batch, 0 if that is not known.

    Those of the inputs where all of these have as many rows. Inputs of a graph
    have a row for each node and each edge, its targets one for each graph.

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
    elif shape := getattr(part, "shape", None):
        rows.add(shape[0])
