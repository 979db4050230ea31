"""Two workers with a monitor; each prints what it did.

The second one starts with an empty budget. Without agreement it would read and
stop at other steps than the first one, which is slow to log reports.
"""

import json
import tempfile
import time

import keras
from tuned import BIG, GOOD, chain, fit

import keras_mixprec as kmp

STEPS, BROKE_UNTIL, EVERY = 60, 30, 4


def work(worker, wrap, dataset):
    """Trains a healthy and an unrecoverable run; prints what came of it, last.

    Args:
        worker, wrap, dataset: As in `tuned.work`.
    """
    found = {}
    values = [GOOD] * STEPS, [BIG] * STEPS
    for name, batches in (
        ("healthy", values[0]),
        ("unrecoverable", values[worker]),
    ):
        model = wrap(lambda: chain(wrap=at_the_floor))
        monitor = kmp.MixPrecMonitor(
            tempfile.mkdtemp(),
            update_freq=EVERY,
            probe_every=EVERY,
            max_overhead=1.0,
            stop_after=5,
            verbose=1,
        )
        spy = Spy(broke_until=BROKE_UNTIL * worker)
        fit(model, dataset, batches, monitor, spy)
        found[name] = {
            "steps": model.optimizer.attempted_steps,
            "verdicts": sorted(f"{v.kind} {v.layer}" for v in monitor.verdicts),
            "report": str(monitor.report),
            "weights": [w.tolist() for w in model.get_weights()],
        }
    print(json.dumps(found), flush=True)


def at_the_floor(inner, initial_scale):
    rule = kmp.DynamicLossScale(initial_scale=1.0, min_scale=1.0)
    return kmp.LossScaleOptimizer(inner, rule)


class Spy(keras.callbacks.Callback):
    """Keeps the engine short of time."""

    def __init__(self, broke_until):
        super().__init__()
        self._broke_until = broke_until

    def on_epoch_begin(self, epoch, logs=None):
        watch = vars(self.model)["_keras_mixprec_session"].watch
        left, event = watch.budget.left, watch.log.event

        def late(step, what):
            time.sleep(watch.log.writes and what["kind"] == "train_end")
            event(step, what)

        watch.log.event = late
        watch.budget.left = lambda purpose: (
            left(purpose) if watch.step >= self._broke_until else -1.0
        )
