"""What two workers with a monitor do: each prints what it did.

The second is made to have nothing left to spend at first, so that left to
itself it would probe, look and stop at other steps than the first. The first
takes long to log what both report.
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
            "probes": spy.probes,
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
    """Notes when steps are probed, and keeps the engine short of time."""

    def __init__(self, broke_until):
        super().__init__()
        self.probes = []
        self._broke_until = broke_until

    def on_train_begin(self, logs=None):
        session = vars(self.model)["_keras_mixprec_session"]
        arm, left = session.prober.arm, session.budget.left
        event = session.log.event

        def late(step, what):
            time.sleep(session.log.writes and what["kind"] == "train_end")
            event(step, what)

        session.log.event = late
        wants = session.prober.wants

        def noting(model, step):
            self.probes.append(step)
            arm(model, step)

        def affords(step):
            return step >= self._broke_until

        session.prober.arm = noting
        session.prober.wants = lambda model, step, steps: (
            wants(model, step, steps) and affords(step)
        )
        session.budget.left = lambda purpose: (
            left(purpose) if affords(session.step) else -1.0
        )
